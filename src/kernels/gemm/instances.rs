use super::{Gemm, GemmProblem, Tile, odd_sizes::odd_formats};
use crate::{
    kernels::KernelSpec,
    ops::{Activation, Epilogue},
    tensor::{DType, Format},
};

/// Instances that cover every tile, every epilogue, and sizes that are not multiples of a tile.
pub fn representative() -> Vec<KernelSpec> {
    let plain = Epilogue::default();
    let bias = |activation| Epilogue::new(true, activation);
    let gelu = bias(Some(Activation::GeluExact));
    let mut kernels = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let mut add = |n, k, epilogue, tile| {
            let problem = GemmProblem::new(n, k, dtype, epilogue);
            kernels.push(KernelSpec::from(Gemm { problem, tile }));
        };
        let tiles = Tile::candidates(dtype);
        for &tile in tiles {
            add(768, 768, plain, tile);
            add(1000, 320, gelu, tile);
            add(328, 320, bias(None).with_residual(), tile);
        }
        let (Some(&first), Some(&last)) = (tiles.first(), tiles.last()) else {
            continue;
        };
        for tile in [first, last] {
            // Odd values of n, and values of k with which rows have every alignment.
            for (n, k) in [
                (1003, 320),
                (3, 768),
                (1, 8),
                (320, 1000),
                (130, 36),
                (70, 10),
                (33, 7),
            ] {
                add(n, k, bias(None), tile);
            }
            for (n, k) in [(1003, 320), (130, 36)] {
                add(n, k, plain.with_residual(), tile);
            }
            let activated = bias(Some(Activation::Relu)).with_residual();
            add(320, 320, activated, tile);
        }
        for activation in [Activation::GeluTanh, Activation::Relu, Activation::Tanh] {
            add(320, 320, bias(Some(activation)), first);
            add(320, 320, Epilogue::new(false, Some(activation)), last);
        }
    }
    for dtype in [DType::F16, DType::BF16] {
        for weight in odd_formats() {
            let mut add = |n, k, epilogue, tile| {
                let problem = GemmProblem {
                    weight,
                    ..GemmProblem::new(n, k, dtype, epilogue)
                };
                kernels.push(KernelSpec::from(Gemm { problem, tile }));
            };
            let tiles = Tile::reading(weight, dtype);
            for &tile in &tiles {
                add(1000, 320, gelu, tile);
            }
            for tile in [tiles[0], tiles[tiles.len() - 1]] {
                for (n, k) in [(328, 776), (3, 768), (1, 8), (1003, 130), (33, 7)] {
                    add(n, k, bias(None), tile);
                }
                add(1003, 320, plain.with_residual(), tile);
            }
        }
    }
    kernels.extend(in_e4m3().into_iter().chain(in_int8()));
    kernels.extend(super::wgmma::representative());
    kernels.extend(super::prepare_attention::representative());
    kernels.extend(super::split_k::representative());
    kernels.extend(super::residual_norm::representative());
    kernels.extend(super::residual_row_stats::representative());
    kernels.extend(super::deferred_layernorm::representative());
    kernels.extend(super::stream::representative());
    kernels.extend(super::unpack::representative());
    kernels.extend(super::quantize_rows::representative());
    kernels.extend(super::quantize_groups::representative());
    kernels
}

/// Instances with operands in E4M3: every tile, every epilogue, results in 16 bits and in E4M3, and sizes that are not multiples of a tile.
/// Few instances differ only in their storage type, because it affects only the epilogue.
fn in_e4m3() -> Vec<KernelSpec> {
    let plain = Epilogue::default();
    let bias = Epilogue::new(true, None);
    let with = |activation| Epilogue::new(true, Some(activation));
    let gelu = with(Activation::GeluExact);
    let (f16, bf16) = (DType::F16, DType::BF16);
    let of = |n, k, dtype, epilogue| GemmProblem::new(n, k, dtype, epilogue).in_e4m3();
    let to_e4m3 = |problem| GemmProblem {
        to_e4m3: true,
        ..problem
    };
    let with_all_tiles = [
        to_e4m3(of(1000, 336, f16, gelu)),
        of(328, 3088, bf16, bias.with_residual()),
    ];
    let with_outer_tiles = [
        of(768, 768, f16, plain),
        of(1003, 336, f16, gelu),
        of(3, 768, f16, bias),
        of(1, 16, f16, bias),
        of(130, 48, f16, plain.with_residual()),
        of(320, 80, f16, with(Activation::Relu).with_residual()),
        of(33, 144, bf16, with(Activation::GeluTanh)),
        to_e4m3(of(36, 144, f16, plain)),
        to_e4m3(of(320, 1008, bf16, with(Activation::Tanh))),
    ];
    let tiles = Tile::reading(with_all_tiles[0].weight, f16);
    with_tiles(&with_all_tiles, &with_outer_tiles, &tiles)
}

/// Instances with quantized rows in int8: every tile, every epilogue, and sizes that are not multiples of a tile, of a block of columns, or
/// of eight rows of the weight.
fn in_int8() -> Vec<KernelSpec> {
    let bias = Epilogue::new(true, None);
    let with = |activation| Epilogue::new(true, Some(activation));
    let (f16, bf16) = (DType::F16, DType::BF16);
    let of = |n, k, dtype, epilogue| GemmProblem {
        weight: Format::INT8,
        quantized_rows: true,
        ..GemmProblem::new(n, k, dtype, epilogue)
    };
    let with_all_tiles = [
        of(1000, 328, f16, with(Activation::GeluExact)),
        of(328, 3080, bf16, bias.with_residual()),
    ];
    let with_outer_tiles = [
        of(768, 768, f16, Epilogue::default()),
        of(1003, 328, f16, bias),
        of(3, 768, f16, bias),
        of(1, 8, f16, bias),
        of(130, 72, f16, Epilogue::default().with_residual()),
        of(320, 80, bf16, with(Activation::Relu).with_residual()),
    ];
    let tiles = Tile::of(&with_all_tiles[0]);
    with_tiles(&with_all_tiles, &with_outer_tiles, &tiles)
}

/// Returns kernels for the problems `with_all` with all tiles, and for the problems `with_outer` with the first and the last tile.
fn with_tiles(
    with_all: &[GemmProblem],
    with_outer: &[GemmProblem],
    tiles: &[Tile],
) -> Vec<KernelSpec> {
    let outer = tiles.iter().copied().enumerate();
    let outer = outer.filter(|&(at, _)| at == 0 || at + 1 == tiles.len());
    let outer: Vec<Tile> = outer.map(|(_, tile)| tile).collect();
    let kernels = |problems: &[GemmProblem], tiles: &[Tile]| -> Vec<KernelSpec> {
        let each = problems.iter().flat_map(|problem| {
            let with_tile = |&tile: &Tile| Gemm {
                problem: problem.clone(),
                tile,
            };
            tiles.iter().map(with_tile)
        });
        each.map(KernelSpec::from).collect()
    };
    let mut all = kernels(with_all, tiles);
    all.extend(kernels(with_outer, &outer));
    all
}
