//! Sizes for checks of the GEMMs on Hopper.

use crate::{
    kernels::{Instructions, KernelSpec},
    ops::{Activation, Epilogue},
    tensor::{DType, Format, Group, Scaled, Values},
};

/// Formats of packed weights.
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
    ]
    .into_iter()
}

/// Sizes for checks of the GEMMs for small M and of those with one tile per CTA.
pub(super) fn odd_sizes() -> impl Iterator<Item = (u32, u32, DType, Epilogue)> {
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
        .flat_map(move |dtype| sizes.map(|(n, k, epilogue)| (n, k, dtype, epilogue)))
}

/// Every tile of one kind of Hopper kernel at [`odd_sizes`].
pub(super) fn at_odd_sizes<T>(
    tiles: impl Fn(u32, u32, DType, Instructions) -> Vec<T>,
    kernel: impl Fn((u32, u32, DType, Epilogue), T) -> KernelSpec,
) -> Vec<KernelSpec> {
    let mut kernels = Vec::new();
    for sizes @ (n, k, dtype, _) in odd_sizes() {
        let tiles = tiles(n, k, dtype, Instructions::Hopper);
        kernels.extend(tiles.into_iter().map(|tile| kernel(sizes, tile)));
    }
    kernels
}
