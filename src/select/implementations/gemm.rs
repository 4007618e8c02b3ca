//! A linear layer by one GEMM with a fused epilogue.

use super::{
    Candidate, Implementation, Launch, Operand,
    gate::{streamed, streaming},
    operands,
};
use crate::{
    kernels::gemm::{Gemm, GemmWgmma, Tile},
    machine::Machine,
    select::site::{Link, Site},
};

pub(super) fn implement(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let Site::Linear {
        n,
        k,
        dtype,
        epilogue,
    } = chain.first()?.site
    else {
        return None;
    };
    let on = machine.instructions;
    // `mma.sync` has about half the throughput of `wgmma`: on Hopper it serves only what `wgmma` does not.
    let any = match GemmWgmma::tiles(n, k, dtype, on).is_empty() {
        true => Tile::fitting(n, dtype),
        false => Vec::new(),
    };
    let any = any.into_iter().map(|tile| {
        Candidate::new(Gemm {
            n,
            k,
            dtype,
            epilogue,
            tile,
        })
    });
    let persistent = GemmWgmma::tiles(n, k, dtype, on).into_iter();
    let persistent = persistent.filter(|tile| tile.has_registers(n, epilogue));
    let persistent = persistent.map(|tile| {
        Candidate::new(GemmWgmma {
            n,
            k,
            dtype,
            epilogue,
            gated: false,
            tile,
        })
    });
    let launch = Launch {
        site: 0,
        operands: operands(0, 0..2 + epilogue.operands())
            .chain([Operand::Value(0)])
            .collect(),
        candidates: any
            .chain(persistent)
            .chain(streaming(&streamed(n, k, dtype, epilogue), machine))
            .collect(),
    };
    Some(Implementation {
        name: "gemm",
        sites: 1,
        launches: vec![launch],
        saved: 0.0,
    })
}
