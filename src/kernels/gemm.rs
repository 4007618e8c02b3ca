//! `out = act(x · weightᵀ + bias) + residual`: the tensor-core GEMM with its epilogues (ByteTransformer III.C).

#[cfg(test)]
mod activate;
mod deferred_layernorm;
mod instances;
mod odd_sizes;
mod packed;
mod prepare_attention;
mod residual_norm;
mod residual_row_stats;
mod row_stats;
mod small_m;
mod split_k;
mod stream;
mod tile;
mod wgmma;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

pub use deferred_layernorm::DeferredLayerNormGemm;
pub use instances::representative;
pub use prepare_attention::GemmPrepareAttention;
pub use residual_norm::GemmResidualNorm;
pub use residual_row_stats::GemmResidualRowStats;
pub use split_k::{GemmSplitK, SplitKTile};
pub use stream::{GemmStream, GemmStreamFp8, StreamNorm, StreamTile};
pub use wgmma::{GemmFp8, GemmWgmma, WgmmaTile};
pub(crate) use {
    deferred_layernorm::normalised,
    residual_row_stats::scaled_and_row_stats,
    stream::{stream_normals, stream_scaled},
};

use super::{Constants, Fill, HostTensor, Kernel, Launch, Param, Role, Tolerance};
use crate::{
    kernels::Class,
    machine::Machine,
    ops::{Activation, Epilogue, MAX_ROWS, activate_f64},
    tensor::{DType, Element, Extents, Format, Scaled, Shape, Size, Symbol, Values},
};

/// CTA tile `m × n × k`, computed by `warps_m × warps_n` warps with a pipeline of `stages` k tiles in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Tile {
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub warps_m: u32,
    pub warps_n: u32,
    pub stages: u32,
}

/// `x [rows, k]`, `weight [n, k]`, (`bias [n]`), (`residual [rows, n]`) → `out [rows, n]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Gemm {
    pub n: u32,
    pub k: u32,
    pub dtype: DType,
    /// Storage of the weight. In f16 and bf16, kernels read a packed weight and convert it in registers. In f32, only
    /// the CPU executor reads one, and rounds x like an int8 or bf16 weight.
    pub weight: Format,
    pub epilogue: Epilogue,
    pub tile: Tile,
}

/// Reason why a GEMM with 16-bit or 32-bit inputs does not read an E4M3 weight without scales.
const UNSCALED: &str =
    "a weight in E4M3 without scales, which only products with inputs in E4M3 read";

impl Gemm {
    /// Row tiles of a rasterisation group. A wave of CTAs then covers a roughly square part of the output, which minimises
    /// the distinct bytes read into L2.
    const GROUP_M: u32 = 8;

    /// Creates a GEMM with the first candidate tile, for uses where the tile does not matter.
    pub fn of(n: u32, k: u32, dtype: DType, epilogue: Epilogue) -> Self {
        Self {
            n,
            k,
            dtype,
            weight: dtype.into(),
            epilogue,
            tile: Tile::candidates(dtype)[0],
        }
    }

    /// Returns whether the weight is stored like the activations.
    fn is_plain(&self) -> bool {
        self.weight == Format::Plain(self.dtype)
    }

    /// Returns the format of a packed weight that a device reads.
    fn packed(&self) -> Option<Scaled> {
        match self.weight {
            Format::Scaled(scaled) if self.on_tensor_cores() => Some(scaled),
            Format::Scaled(_) | Format::Plain(_) | Format::E4m3 => None,
        }
    }

    /// Whether x is rounded to the weight's format.
    fn rounds_x(&self) -> bool {
        match self.weight {
            _ if self.is_plain() || self.packed().is_some() => false,
            Format::Plain(_) => true,
            Format::Scaled(scaled) => match scaled.values {
                Values::Int8 => true,
                Values::E4m3 | Values::Int4 => false,
            },
            Format::E4m3 => false,
        }
    }

    /// Returns the matrix in the format of the weight. If `converts`, a packed weight is converted to the type of x
    /// before the product.
    fn stored(&self, matrix: &[f32], converts: bool) -> Vec<f32> {
        let k = self.k as usize;
        match self.weight {
            Format::Scaled(scaled) if converts => scaled.quantize(matrix, k).values_in(self.dtype),
            Format::Scaled(scaled) => scaled.quantize(matrix, k).values(),
            Format::Plain(dtype) => matrix.iter().map(|&w| dtype.round(w)).collect(),
            Format::E4m3 => matrix.iter().map(|&w| Element::E4m3.round(w)).collect(),
        }
    }

    /// Returns the reference's results; see [`Self::stored`] for `converts`.
    fn on_host(&self, extents: &Extents, reads: &[&HostTensor], converts: bool) -> Vec<HostTensor> {
        let (n, k) = (self.n as usize, self.k as usize);
        let (rounded_x, rounded_weight);
        let (mut x, mut weight) = (reads[0].real(), reads[1].real());
        if self.rounds_x() {
            rounded_x = self.stored(x, converts);
            x = &rounded_x;
        }
        if !self.is_plain() {
            rounded_weight = self.stored(weight, converts);
            weight = &rounded_weight;
        }
        let bias = self.epilogue.bias.then(|| reads[2].real());
        let residual = 2 + usize::from(self.epilogue.bias);
        let residual = self.epilogue.residual.then(|| reads[residual].real());
        let rows = extents.rows as usize;
        let element = |row: usize, column: usize, sum: f64| {
            let sum = sum + bias.map_or(0.0, |b| f64::from(b[column]));
            let activation = self.epilogue.activation;
            let activated = activation.map_or(sum, |a| activate_f64(a, sum));
            let more = residual.map_or(0.0, |r| f64::from(r[row * n + column]));
            (activated + more) as f32
        };
        // Blocks of columns for all rows, so that a large weight is read once.
        const COLUMNS: usize = 32;
        let blocks = weight.par_chunks(COLUMNS * k).enumerate();
        let blocks: Vec<Vec<f32>> = blocks
            .map(|(block, weight)| {
                let width = weight.len() / k;
                let mut part = vec![0.0; rows * width];
                for (column, weight) in weight.chunks_exact(k).enumerate() {
                    for (row, x) in x.chunks_exact(k).take(rows).enumerate() {
                        part[row * width + column] =
                            element(row, block * COLUMNS + column, dot(x, weight));
                    }
                }
                part
            })
            .collect();
        let mut out = vec![0.0f32; rows * n];
        out.par_chunks_mut(n).enumerate().for_each(|(row, out)| {
            for (to, part) in out.chunks_mut(COLUMNS).zip(&blocks) {
                to.copy_from_slice(&part[row * to.len()..][..to.len()]);
            }
        });
        vec![HostTensor::Real(out)]
    }

    fn on_tensor_cores(&self) -> bool {
        self.dtype.has_mma()
    }

    /// Bytes of the widest access, up to `widest`, to which every row of `width` elements is aligned.
    fn access_bytes(&self, width: u32, widest: u64) -> u64 {
        let pitch = u64::from(width) * self.dtype.bytes();
        widest.min(1 << pitch.trailing_zeros().min(4))
    }
}

impl Kernel for Gemm {
    fn symbol(&self) -> String {
        let t = self.tile;
        format!(
            "{}_t{}x{}x{}_w{}x{}_s{}",
            self.definition(),
            t.m,
            t.n,
            t.k,
            t.warps_m,
            t.warps_n,
            t.stages
        )
    }

    fn definition(&self) -> String {
        let epilogue = self.epilogue.name();
        let weight = match self.is_plain() {
            true => String::new(),
            false => format!("_weight_{}", self.weight),
        };
        format!("{epilogue}_{}{weight}_n{}_k{}", self.dtype, self.n, self.k)
    }

    fn template(&self) -> &'static str {
        if self.on_tensor_cores() {
            "gemm_mma"
        } else {
            "gemm_simt"
        }
    }

    fn constants(&self) -> Constants {
        // On tensor cores a lane stores at most four neighbouring columns, in 8 bytes.
        let store = if self.on_tensor_cores() { 8 } else { 16 };
        let activation = self.epilogue.activation;
        // For a classifier's few columns, and with a weight that is converted, ptxas might otherwise spill registers to fit more CTAs.
        let min_ctas = if self.n < 8 || !self.is_plain() {
            ", 1"
        } else {
            ""
        };
        Constants::from([
            ("storage", self.dtype.name().into()),
            ("n", self.n.into()),
            ("k", self.k.into()),
            ("block_m", self.tile.m.into()),
            ("block_n", self.tile.n.into()),
            ("block_k", self.tile.k.into()),
            ("warps_m", self.tile.warps_m.into()),
            ("warps_n", self.tile.warps_n.into()),
            ("stages", self.tile.stages.into()),
            ("group_m", Self::GROUP_M.into()),
            ("min_ctas", min_ctas.into()),
            ("copy_bytes", self.access_bytes(self.k, 16).into()),
            ("store_bytes", self.access_bytes(self.n, store).into()),
            ("bias", self.epilogue.bias.into()),
            ("residual", self.epilogue.residual.into()),
            (
                "activation",
                activation.map_or("identity", Activation::function).into(),
            ),
            ("precise", (self.dtype == DType::F32).into()),
            ("packed", self.packed().map_or("", packed::kind).into()),
            ("hopper", false.into()),
            ("warp_mma", false.into()),
            ("group", self.packed().map_or(0, packed::group).into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        let (n, k) = (u64::from(self.n), u64::from(self.k));
        let rows = Size::from(Symbol::Rows);
        let read = |name, shape, fill| Param {
            name,
            role: Role::Read {
                element: self.dtype.into(),
                shape,
                fill,
            },
        };
        // Gives outputs of standard deviation 1 for activations of standard deviation 1.
        let weights = Fill::Normal {
            mean: 0.0,
            deviation: 1.0 / (self.k as f32).sqrt(),
        };
        let mut params = vec![
            read("x", Shape::new([rows.clone(), k.into()]), Fill::ACTIVATION),
            Param {
                name: "weight",
                role: Role::Read {
                    element: self.weight.into(),
                    shape: Shape::fixed(&[n, k]),
                    fill: weights,
                },
            },
        ];
        if self.epilogue.bias {
            params.push(read("bias", Shape::fixed(&[n]), Fill::ACTIVATION));
        }
        if self.epilogue.residual {
            let shape = Shape::new([rows.clone(), n.into()]);
            params.push(read("residual", shape, Fill::ACTIVATION));
        }
        params.push(Param {
            name: "out",
            role: Role::Write {
                element: self.dtype.into(),
                shape: Shape::new([rows.clone(), n.into()]),
            },
        });
        params.push(Param {
            name: "rows",
            role: Role::Count(rows),
        });
        params
    }

    fn dtype(&self) -> Option<DType> {
        Some(self.dtype)
    }

    fn class(&self) -> Class {
        Class::Gemm
    }

    fn weight(&self) -> Option<[u32; 2]> {
        Some([self.n, self.k])
    }

    fn cpu_only(&self) -> Option<String> {
        let (weight, dtype) = (self.weight, self.dtype);
        (!self.is_plain() && self.packed().is_none())
            .then(|| format!("its weight is stored in {weight}, its input in {dtype}"))
    }

    fn validate(&self) -> Result<(), String> {
        // The width of a GEMM over the vocabulary is limited like the rows of a table.
        for size in [self.n, self.k] {
            if !(1..=MAX_ROWS).contains(&size) {
                return Err(format!("a width of {size}, expected 1 to {MAX_ROWS}"));
            }
        }
        if !Tile::reading(self.weight, self.dtype).contains(&self.tile) {
            return Err(format!(
                "{:?} is not a tile for {} with a weight in {}",
                self.tile, self.dtype, self.weight
            ));
        }
        match self.weight {
            Format::Plain(_) => Ok(()),
            Format::Scaled(scaled) => scaled.check(),
            Format::E4m3 => Err(UNSCALED.to_owned()),
        }
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let ctas = self.tile.ctas(extents.rows, self.n);
        let shared_bytes = if self.on_tensor_cores() {
            self.tile.shared_bytes(self.dtype, self.packed())
        } else {
            0 // Static in the source, within the 48 KB that need no opt-in.
        };
        Launch::of_ctas(ctas, self.threads(), shared_bytes)
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        Some(
            self.tile
                .cycles(rows, self.n, self.k, self.dtype, self.packed(), machine),
        )
    }

    fn threads(&self) -> u32 {
        self.tile.threads()
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.on_host(extents, reads, true)
    }

    fn tolerance(&self) -> Tolerance {
        // With the given fills, partial sums have magnitude 1. They are rounded to f32 k times (at random), or truncated at
        // every 8 or 16 products in tensor cores.
        let k = f64::from(self.k);
        match self.dtype {
            DType::F16 => Tolerance {
                absolute: (2e-4 + 2.0 * k / 8.0 * f64::from(f32::EPSILON)) as f32,
                relative: 1.5e-3,
                reason: "f32 sums, truncated at every 8 products or more; one rounding to f16 (2^-11), and as much for tanh.approx",
            },
            DType::BF16 => Tolerance {
                absolute: (2e-4 + 2.0 * k / 8.0 * f64::from(f32::EPSILON)) as f32,
                relative: 5e-3,
                reason: "f32 sums, truncated at every 8 products or more; one rounding to bf16 (2^-9)",
            },
            DType::F32 => Tolerance {
                absolute: (4e-6 + 8.0 * k.sqrt() * f64::from(f32::EPSILON) / 2.0) as f32,
                relative: 2e-6,
                reason: "k roundings of a sum of size 1, which add up like a random walk (8 deviations)",
            },
        }
    }
}

/// Computes `Σ aᵢbᵢ` in f64, in eight interleaved sums.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let (a_chunks, b_chunks) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest = a_chunks.remainder().iter().zip(b_chunks.remainder());
    let mut sum: f64 = rest.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    let mut lanes = [0.0f64; 8];
    for (a, b) in a_chunks.zip(b_chunks) {
        for (lane, (&a, &b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += f64::from(a) * f64::from(b);
        }
    }
    sum += lanes.iter().sum::<f64>();
    sum
}

#[cfg(test)]
mod tests;
