//! LayerNorm alone (TurboTransformers, figure 5), and with the bias and the residual before it in
//! one kernel or in three (ByteTransformer, figure 9).

use super::problem::{Contender, Problem, Task};
use crate::{
    DType,
    kernels::{
        chain::Chain,
        elementwise::{Add, AddBias},
        layernorm::{BiasResidualLayerNorm, LayerNorm, Teams, Variance},
    },
};

const EPS: f32 = 1e-12;
/// Tokens of the shapes of figure 5, by a width of 768.
const ALONE: [u32; 7] = [10, 100, 200, 500, 2000, 10_000, 16_384];
const WIDTHS: [u32; 2] = [768, 1024];
/// Tokens of single sequences, of packed batches, and of one that leaves L2.
const ROWS: [u32; 9] = [10, 40, 128, 500, 1229, 2458, 4915, 9830, 32_768];

pub(super) fn problems(dtype: DType) -> Vec<Problem> {
    let alone = ALONE.into_iter().map(|rows| Problem {
        task: Task::LayerNorm { rows, width: 768 },
        lens: vec![rows],
        contenders: alone(768, rows, dtype),
    });
    let of_width = |width| {
        ROWS.into_iter().map(move |rows| Problem {
            task: Task::BiasResidualLayerNorm { rows, width },
            lens: vec![rows],
            contenders: after_a_gemm(width, rows, dtype),
        })
    };
    alone.chain(WIDTHS.into_iter().flat_map(of_width)).collect()
}

/// What a model launches comes first, then the other ways to share out rows among warps.
fn alone(width: u32, rows: u32, dtype: DType) -> Vec<Contender> {
    let picked = for_rows(LayerNorm::variants(width, EPS, dtype), rows);
    let others = picked.candidates().into_iter().filter(|c| *c != picked);
    let other = |kernel: LayerNorm| {
        Contender::other(label(kernel.teams, kernel.variance), Chain::of(kernel))
    };
    let first = Contender::picked(
        label(picked.teams, picked.variance),
        Chain::of(picked.clone()),
    );
    std::iter::once(first).chain(others.map(other)).collect()
}

/// The variant for a number of rows.
fn for_rows<K>(variants: Vec<(Option<u64>, K)>, rows: u32) -> K {
    let serves = |most: &Option<u64>| most.is_none_or(|most| u64::from(rows) <= most);
    let variant = variants.into_iter().find(|(most, _)| serves(most));
    variant.expect("the last variant serves all rows").1
}

fn label(teams: Teams, variance: Variance) -> String {
    let passes = match variance {
        Variance::OnePassShifted => "",
        Variance::TwoPass => ", two passes",
    };
    let s = if teams.warps == 1 { "" } else { "s" };
    format!("{} warp{s}, X = {}{passes}", teams.warps, teams.x_rows)
}

/// What a model launches comes first, then the other sharings, then the three kernels that it is
/// fused from.
fn after_a_gemm(width: u32, rows: u32, dtype: DType) -> Vec<Contender> {
    let picked = for_rows(
        BiasResidualLayerNorm::variants(width, EPS, dtype, true),
        rows,
    );
    let others = picked
        .candidates()
        .into_iter()
        .filter(|c| *c != picked && c.variance == Variance::default());
    let layernorm = for_rows(LayerNorm::variants(width, EPS, dtype), rows);
    let pieces = Chain::of(AddBias { width, dtype })
        .then(
            Add { width, dtype },
            &[("a", "out"), ("b", "residual"), ("out", "sum")],
        )
        .then(layernorm, &[("x", "sum"), ("out", "normalized")]);
    let mut all = vec![Contender::picked(
        label(picked.teams, picked.variance),
        Chain::of(picked.clone()),
    )];
    all.extend(
        others.map(|kernel| {
            Contender::other(label(kernel.teams, kernel.variance), Chain::of(kernel))
        }),
    );
    all.push(Contender::other("add_bias, add, layernorm", pieces));
    all
}
