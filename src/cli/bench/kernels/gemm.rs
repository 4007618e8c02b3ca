//! GEMMs alone, and with bias and GELU in the epilogue or in kernels of their own (ByteTransformer,
//! figure 10).

use super::problem::{Contender, Problem, Task, by_limit};
use crate::{
    DType,
    kernels::{
        chain::Chain,
        elementwise::{Activate, AddBias},
        gemm::{Activation, Epilogue, Gemm},
    },
};

const ROWS: [u32; 8] = [10, 40, 128, 500, 1229, 2458, 4915, 9830];
/// Outputs and inputs of the weights of BERT-base, then BERT-large.
const SIZES: [(u32, u32); 8] = [
    (2304, 768),
    (768, 768),
    (3072, 768),
    (768, 3072),
    (3072, 1024),
    (1024, 1024),
    (4096, 1024),
    (1024, 4096),
];
/// Those of the weight before the activation.
const INNER: [(u32, u32); 2] = [(3072, 768), (4096, 1024)];

pub(super) fn problems(dtype: DType) -> Vec<Problem> {
    let plain = SIZES.into_iter().flat_map(|(n, k)| {
        ROWS.into_iter().map(move |rows| Problem {
            task: Task::Gemm { rows, n, k },
            lens: vec![rows],
            contenders: vec![Contender::picked(
                "gemm",
                Chain::of(picked(rows, n, k, dtype, Epilogue::default())),
            )],
        })
    });
    let inner = INNER.into_iter().flat_map(|(n, k)| {
        ROWS.into_iter().map(move |rows| Problem {
            task: Task::GemmBiasGelu { rows, n, k },
            lens: vec![rows],
            contenders: with_gelu(rows, n, k, dtype),
        })
    });
    plain.chain(inner).collect()
}

/// What a model launches comes first.
fn with_gelu(rows: u32, n: u32, k: u32, dtype: DType) -> Vec<Contender> {
    let activation = Activation::GeluExact;
    let gemm = |bias, activation| picked(rows, n, k, dtype, Epilogue { bias, activation });
    let gelu = || Activate {
        activation,
        width: n,
        dtype,
    };
    let activated = [("x", "sum"), ("out", "activated")];
    let two = Chain::new()
        .then(gemm(true, None), &[("out", "sum")])
        .then(gelu(), &activated);
    let three = Chain::of(gemm(false, None))
        .then(AddBias { width: n, dtype }, &[("x", "out"), ("out", "sum")])
        .then(gelu(), &activated);
    vec![
        Contender::picked("gemm_bias_gelu", Chain::of(gemm(true, Some(activation)))),
        Contender::other("gemm_bias, gelu", two),
        Contender::other("gemm, add_bias, gelu", three),
    ]
}

/// The kernel that a model would launch for so many rows.
fn picked(rows: u32, n: u32, k: u32, dtype: DType, epilogue: Epilogue) -> Gemm {
    by_limit(Gemm::variants(n, k, dtype, epilogue), rows)
}
