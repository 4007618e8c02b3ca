//! For few rows, two launches compute three sites: a linear layer that adds to the residual stream, the norm of the sum, and the linear
//! layer that is the only reader of the norm. The first launch stores the sum, the rows of the sum times gamma, and the statistics of these
//! rows. The second launch normalizes its accumulators with the statistics.

use super::{
    Bindings, Candidate, IS_READ, Implementation, Launch, Operand, ScratchRows, Unfit, gate::gated,
    require,
};
use crate::{
    kernels::gemm::{GemmProblem, GemmResidualRowStats, GemmStream, StreamNorm},
    machine::Machine,
    select::site::{Link, Site},
    tensor::{DType, Element},
};

pub(super) fn implement(chain: &[Link], machine: &Machine) -> Result<Implementation, Unfit> {
    let [before, norm, after, ..] = chain else {
        return Err(Unfit::Sites);
    };
    let (Site::Linear(first), Site::Linear(second)) = (&before.site, &after.site) else {
        return Err(Unfit::Sites);
    };
    let (eps, centered) = match &norm.site {
        Site::LayerNorm(norm) => (norm.eps, true),
        Site::RmsNorm(norm) => (norm.eps, false),
        _ => return Err(Unfit::Sites),
    };
    let GemmProblem { n, dtype, .. } = *first;
    let adds = first.epilogue.residual && second.k == n;
    require(adds, "the first linear layer does not add to a residual")?;
    require(norm.is_private, IS_READ)?;
    let gate = gated(&chain[2..]).ok();
    let sites = 3 + usize::from(gate.is_some());
    let streaming = |problem: GemmProblem, norm| {
        let kernel = GemmStream {
            norm,
            ..GemmStream::of(problem)
        };
        let kernels = kernel.tiles(machine.instructions).into_iter();
        kernels.map(Candidate::new).collect()
    };
    let second = gate.unwrap_or_else(|| second.clone());
    let scratch = |name, dtype, columns, more| Operand::Scratch {
        site: 1,
        name,
        element: Element::Value(dtype),
        columns,
        rows: ScratchRows::OfBatch { more },
    };
    let more_rows = GemmStream::more_rows(centered);
    let scaled = scratch("scaled", dtype, n.into(), more_rows);
    let stats = scratch(
        "row_stats",
        DType::F32,
        GemmResidualRowStats::stats_of(n),
        0,
    );
    let launches = vec![
        Launch {
            // The launch has the position of the norm in the program: the norm is the first reader of the sum, and gamma is available
            // there.
            site: 1,
            bindings: Bindings::to_operands_of(&[0, 1])
                .with("out", Operand::Value(0))
                .with("scaled", scaled)
                .with("row_stats", stats),
            candidates: streaming(first.clone(), StreamNorm::Before { centered }),
        },
        Launch {
            site: sites - 1,
            bindings: Bindings::to_operands_of(&[2])
                .with("x", scaled)
                .with("row_stats", stats)
                .with("out", Operand::Value(sites - 1)),
            candidates: streaming(second, StreamNorm::After { eps, centered }),
        },
    ];
    Implementation::of(sites, launches, 0.0)
}
