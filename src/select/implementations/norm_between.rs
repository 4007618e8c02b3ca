//! For small M, two launches compute three sites: a linear layer that adds to the residual stream, the norm of the sum, and the linear
//! layer that is the only reader of the norm. The first launch stores the rows times gamma and their statistics. The second launch
//! normalizes its accumulators with the statistics.

use super::{
    Bindings, Implementation, Launch, Operand,
    gate::{gated, is_read_by_streams, streamed, streaming},
};
use crate::{
    kernels::gemm::{GemmResidualRowStats, GemmStream, StreamNorm},
    machine::Machine,
    select::site::{Link, Site},
    tensor::DType,
};

pub(super) fn implement(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let [before, norm, after, ..] = chain else {
        return None;
    };
    let (
        &Site::Linear {
            n,
            k,
            dtype,
            weight,
            epilogue,
        },
        &Site::Linear {
            n: n_after,
            k: width,
            epilogue: epilogue_after,
            weight: weight_after,
            ..
        },
    ) = (&before.site, &after.site)
    else {
        return None;
    };
    let (eps, centred) = match &norm.site {
        Site::LayerNorm(norm) => (norm.eps, true),
        Site::RmsNorm(norm) => (norm.eps, false),
        _ => return None,
    };
    let mut weights = [weight, weight_after].into_iter();
    let is_read = weights.all(|weight| is_read_by_streams(weight, dtype));
    if !epilogue.residual || !norm.is_private || width != n || !is_read {
        return None;
    }
    let gate = gated(&chain[2..]);
    let sites = 3 + usize::from(gate.is_some());
    let first = GemmStream {
        norm: StreamNorm::Before { centred },
        ..streamed(n, k, dtype, weight, epilogue)
    };
    let second = GemmStream {
        norm: StreamNorm::After { eps, centred },
        ..gate.unwrap_or_else(|| streamed(n_after, width, dtype, weight_after, epilogue_after))
    };
    let scratch = |name, dtype, columns, more_rows| Operand::Scratch {
        site: 1,
        name,
        dtype,
        columns,
        more_rows,
    };
    let more_rows = GemmStream::more_rows(centred);
    let scaled = scratch("scaled", dtype, n.into(), more_rows);
    let stats = scratch(
        "row_stats",
        DType::F32,
        GemmResidualRowStats::stats_of(n),
        0,
    );
    let launches = vec![
        Launch {
            // The launch is at the norm's site: the norm is the first reader of the sum, and its gamma is available there.
            site: 1,
            bindings: Bindings::to_operands_of(&[0, 1])
                .with("out", Operand::Value(0))
                .with("scaled", scaled)
                .with("row_stats", stats),
            candidates: streaming(&first, machine, |_| true),
        },
        Launch {
            site: sites - 1,
            bindings: Bindings::to_operands_of(&[2])
                .with("x", scaled)
                .with("row_stats", stats)
                .with("out", Operand::Value(sites - 1)),
            candidates: streaming(&second, machine, |_| true),
        },
    ];
    let is_served = launches.iter().all(|launch| !launch.candidates.is_empty());
    is_served.then_some(Implementation {
        name: "norm between gemms",
        sites,
        launches,
        saved: 0.0,
    })
}
