//! LayerNorm and the linear layer that reads it first by one GEMM with a normalisation prologue, for the smallest M.

use super::{Candidate, Implementation, Launch, Operand, operands};
use crate::{
    kernels::gemm::ResidualLayerNormGemm,
    machine::Machine,
    select::site::{Link, Site},
};

/// Most rows at which it is faster than deferred normalisation, where they are wider than [`NARROW`]: with 9 to 16 tokens an
/// encoder of width 768 took 0.163 ms with this and 0.146 ms with that, of width 1024 0.438 and 0.339, of width 384 0.058 and
/// 0.060.
const MOST_WIDE_ROWS: u64 = 8;
const NARROW: u32 = 512;
/// Most rows of a tile: larger ones are slower than deferred normalisation at any width.
const MOST_TOKENS: u32 = 16;

pub(super) fn implement(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let [norm, linear, ..] = chain else {
        return None;
    };
    let (
        Site::SumLayerNorm(norm),
        &Site::Linear {
            n,
            k,
            dtype,
            epilogue,
        },
    ) = (&norm.site, &linear.site)
    else {
        return None;
    };
    let tiles = ResidualLayerNormGemm::tiles(n, k, dtype, machine).into_iter();
    let tiles = tiles.filter(|tile| tile.tokens <= MOST_TOKENS);
    let candidates: Vec<Candidate> = tiles
        .map(|tile| {
            let most = tile.most_rows(n, k, machine);
            let kernel = ResidualLayerNormGemm {
                n,
                k,
                eps: norm.eps,
                dtype,
                x_bias: norm.bias,
                epilogue,
                tile,
            };
            Candidate {
                kernel: kernel.into(),
                most_rows: Some(if k > NARROW {
                    most.min(MOST_WIDE_ROWS)
                } else {
                    most
                }),
            }
        })
        .collect();
    let launch = Launch {
        site: 1,
        operands: operands(0, 0..4 + usize::from(norm.bias))
            .chain(operands(1, 1..2 + usize::from(epilogue.bias)))
            .chain([Operand::Value(0), Operand::Value(1)])
            .collect(),
        candidates,
    };
    (!launch.candidates.is_empty()).then(|| Implementation {
        name: "norm prologue",
        sites: 2,
        launches: vec![launch],
        saved: 0.0,
    })
}
