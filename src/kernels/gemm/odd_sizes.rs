//! Problems, and formats of packed weights, with which GEMM kernels are checked.

use super::GemmProblem;
use crate::{
    ops::{Activation, Epilogue},
    tensor::{DType, Format, Group, Scaled, Values},
};

/// Returns the formats of packed weights with which GEMM kernels are checked.
pub(super) fn odd_formats() -> impl Iterator<Item = Format> {
    let narrow = Format::Scaled(Scaled {
        values: Values::Int4,
        group: Group::Columns(32),
    });
    [
        Format::INT8,
        Format::FP8,
        Format::INT4,
        narrow,
        Format::FP8_128,
        Format::INT8_32,
    ]
    .into_iter()
}

/// Returns the problems with which `GemmSplitK` and `GemmStream` are checked.
pub(super) fn odd_sizes() -> impl Iterator<Item = GemmProblem> {
    let plain = Epilogue::default();
    let gelu = Epilogue::new(true, Some(Activation::GeluExact));
    let sizes = [
        (768, 768, plain),
        (1000, 328, gelu),
        (8, 8, plain),
        (328, 1000, Epilogue::new(true, None).with_residual()),
    ];
    [DType::F16, DType::BF16]
        .into_iter()
        .flat_map(move |dtype| {
            sizes.map(|(n, k, epilogue)| GemmProblem::new(n, k, dtype, epilogue))
        })
}
