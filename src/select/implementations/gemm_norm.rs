//! A linear layer and the LayerNorm that follows by one GEMM with LayerNorm in its epilogue: a cluster has whole rows.

use super::{Candidate, Implementation, Launch, Operand, operands};
use crate::{
    kernels::{
        Instructions,
        gemm::{Epilogue, GemmResidualLayerNorm},
    },
    machine::Machine,
    select::site::{Link, Site},
};

pub(super) fn implement(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let [linear, norm, ..] = chain else {
        return None;
    };
    let (
        &Site::Linear {
            n,
            k,
            dtype,
            epilogue,
        },
        Site::SumLayerNorm(norm),
    ) = (&linear.site, &norm.site)
    else {
        return None;
    };
    let serves = machine.instructions == Instructions::Hopper
        && linear.is_private
        && epilogue == Epilogue::default();
    if !serves {
        return None;
    }
    let kernels = GemmResidualLayerNorm::candidates(n, k, dtype).into_iter();
    let candidates: Vec<Candidate> = kernels
        .map(|tile| {
            Candidate::new(GemmResidualLayerNorm {
                n,
                k,
                eps: norm.eps,
                dtype,
                bias: norm.bias,
                tile,
            })
        })
        .collect();
    // LayerNorm's operands besides the accumulators: (bias), residual, gamma, beta.
    let of_norm = operands(1, 1..4 + usize::from(norm.bias));
    let launch = Launch {
        site: 1,
        operands: operands(0, 0..2)
            .chain(of_norm)
            .chain([Operand::Value(1)])
            .collect(),
        candidates,
    };
    (!launch.candidates.is_empty()).then(|| Implementation {
        name: "gemm+norm",
        sites: 2,
        launches: vec![launch],
        saved: 0.0,
    })
}
