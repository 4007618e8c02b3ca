//! A linear layer in one GEMM with a fused epilogue.

use super::{
    Bindings, Candidate, Implementation, Launch, Operand,
    gate::{streamed, streaming},
};
use crate::{
    kernels::gemm::{Gemm, GemmSplitK, GemmWgmma, SplitKTile, StreamTile, Tile},
    machine::Machine,
    select::site::{Link, Site},
    tensor::Format,
};

/// Min rows of `mma.sync` tiles for a packed weight, if there is also a streaming GEMM for it.
const MMA_ROWS: u32 = 64;

pub(super) fn implement(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let Site::Linear {
        n,
        k,
        dtype,
        weight,
        epilogue,
    } = chain.first()?.site
    else {
        return None;
    };
    let on = machine.instructions;
    // `mma.sync` has about half the throughput of `wgmma`, so on Hopper it is used only if `wgmma`
    // does not support the shape.
    let is_plain = weight == Format::Plain(dtype);
    let any = match is_plain && !GemmWgmma::tiles(n, k, dtype, on).is_empty() {
        true => Vec::new(),
        false => Tile::fitting(n, weight, dtype),
    };
    let any = any.into_iter().map(|tile| {
        let kernel = Gemm {
            n,
            k,
            dtype,
            weight,
            epilogue,
            tile,
        };
        (tile, Candidate::new(kernel))
    });
    if !is_plain {
        let streams = streaming(&streamed(n, k, dtype, weight, epilogue), machine, |_| true);
        // For few rows, the streaming GEMM is faster, because it has more loads of the weight in flight.
        let any = any.filter(|(tile, _)| streams.is_empty() || tile.m >= MMA_ROWS);
        let any: Vec<Candidate> = any.map(|(_, candidate)| candidate).collect();
        return Some(implementation(any.into_iter().chain(streams).collect()));
    }
    let any = any.map(|(_, candidate)| candidate);
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
    let at_once = |tile: SplitKTile| tile.max_rows_at_once(n, k, machine);
    let split_k = GemmSplitK::tiles(n, k, dtype, on);
    // In a ring, MMAs wait for each other. No ring is needed if all operands of a CTA fit in shared memory.
    let has_room = split_k
        .iter()
        .any(|&tile| tile.splits == 1 && at_once(tile) > 0);
    let streams = move |tile: &StreamTile| !has_room || tile.splits > 1 || tile.rows <= 32;
    let split_k = split_k.into_iter().filter_map(|tile| {
        let most = at_once(tile);
        let kernel = GemmSplitK {
            n,
            k,
            dtype,
            epilogue,
            tile,
        };
        (most > 0).then(|| Candidate {
            kernel: kernel.into(),
            max_rows: Some(most),
        })
    });
    let all = any
        .chain(persistent)
        .chain(split_k)
        .chain(streaming(
            &streamed(n, k, dtype, weight, epilogue),
            machine,
            streams,
        ))
        .collect();
    Some(implementation(all))
}

fn implementation(candidates: Vec<Candidate>) -> Implementation {
    let launch = Launch {
        site: 0,
        bindings: Bindings::to_operands_of(&[0]).with("out", Operand::Value(0)),
        candidates,
    };
    Implementation {
        name: "gemm",
        sites: 1,
        launches: vec![launch],
        saved: 0.0,
    }
}
