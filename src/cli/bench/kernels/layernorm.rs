//! LayerNorm alone (TurboTransformers, figure 5), and with the bias and the residual before it in
//! one kernel or in three (ByteTransformer, figure 9).

use super::problem::{Contender, Problem, Task};
use crate::{
    DType,
    kernels::{
        chain::Chain,
        elementwise::{Add, AddBias},
        layernorm::{BiasResidualLayerNorm, LayerNorm},
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
        contenders: alone(768, dtype),
    });
    let of_width = |width| {
        ROWS.into_iter().map(move |rows| Problem {
            task: Task::BiasResidualLayerNorm { rows, width },
            lens: vec![rows],
            contenders: after_a_gemm(width, dtype),
        })
    };
    alone.chain(WIDTHS.into_iter().flat_map(of_width)).collect()
}

/// What a model launches comes first.
fn alone(width: u32, dtype: DType) -> Vec<Contender> {
    let eps = EPS;
    let layernorm = LayerNorm { width, eps, dtype };
    vec![Contender::picked("layernorm", Chain::of(layernorm))]
}

/// What a model launches comes first.
fn after_a_gemm(width: u32, dtype: DType) -> Vec<Contender> {
    let eps = EPS;
    let fused = BiasResidualLayerNorm {
        width,
        eps,
        dtype,
        bias: true,
    };
    let pieces = Chain::of(AddBias { width, dtype })
        .then(
            Add { width, dtype },
            &[("a", "out"), ("b", "residual"), ("out", "sum")],
        )
        .then(
            LayerNorm { width, eps, dtype },
            &[("x", "sum"), ("out", "normalized")],
        );
    vec![
        Contender::picked("bias_residual_layernorm", Chain::of(fused)),
        Contender::other("add_bias, add, layernorm", pieces),
    ]
}
