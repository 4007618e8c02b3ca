//! A LayerNorm or RMSNorm, and the linear layer that alone reads it, by one GEMM at small M: every CTA normalises what it reads.

use super::{Candidate, Implementation, Launch, Operand, operands};
use crate::{
    kernels::gemm::NormGemm,
    machine::Machine,
    select::site::{Link, Site},
};

pub(super) fn implement(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let [norm, linear, ..] = chain else {
        return None;
    };
    let &Site::Linear {
        n,
        k,
        dtype,
        epilogue,
    } = &linear.site
    else {
        return None;
    };
    let (eps, centred) = match &norm.site {
        Site::LayerNorm(norm) => (norm.eps, true),
        Site::RmsNorm(norm) => (norm.eps, false),
        _ => return None,
    };
    if !norm.is_private || epilogue.residual {
        return None;
    }
    let tiles = NormGemm::tiles(n, k, dtype, machine.instructions).into_iter();
    let kernels = tiles.map(|tile| NormGemm {
        n,
        k,
        eps,
        centred,
        dtype,
        epilogue,
        tile,
    });
    // All CTAs of a launch are resident at once: those of a second wave would normalise the rows again.
    let resident = |kernel: &NormGemm| {
        let room = u64::from(machine.sms) * u64::from(kernel.side_by_side(machine));
        kernel.tile.ctas(1, n) <= room
    };
    let candidates: Vec<Candidate> = kernels.filter(resident).map(Candidate::new).collect();
    let launch = Launch {
        site: 1,
        // x, the linear layer's operands, and the norm's.
        operands: operands(0, 0..1)
            .chain(operands(1, 1..2 + epilogue.operands()))
            .chain(operands(0, 1..2 + usize::from(centred)))
            .chain([Operand::Value(1)])
            .collect(),
        candidates,
    };
    (!launch.candidates.is_empty()).then(|| Implementation {
        name: "norm+gemm",
        sites: 2,
        launches: vec![launch],
        saved: 0.0,
    })
}
