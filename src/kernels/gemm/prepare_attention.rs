//! The QKV projection, with rotary embeddings of queries and keys in the epilogue.

use serde::{Deserialize, Serialize};

use super::{GemmProblem, GemmWgmma, WgmmaTile};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, Role,
        RowOrder, TensorMap, Tolerance, prepare_attention::PrepareAttention, rotary::frequencies,
    },
    machine::Machine,
    ops::{Activation, Epilogue, Rotation},
    tensor::{DType, Extents},
};

/// [`GemmWgmma`] fused with [`PrepareAttention`] of the rows that it computes, without norms and without a cache: `x [rows, k]`, `weight
/// [n, k]`, (`bias [n]`), `positions [rows]` → `out [rows, n]`, `queries` and `keys`. The kernel writes only those columns of `out` that
/// belong neither to queries nor to keys, such as the values. With `fp8`, `x` and the weight are in E4M3, and `scale [n]` follows the
/// weight, as in [`GemmProblem`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GemmPrepareAttention {
    pub k: u32,
    pub bias: bool,
    /// Whether the operands are in E4M3.
    pub fp8: bool,
    pub prepare: PrepareAttention,
    pub tile: WgmmaTile,
}

impl GemmPrepareAttention {
    /// Returns a copy of the kernel for each supported tile. A supported tile consists of whole heads, and one lane holds both columns of
    /// each rotated pair. The tile of `self` is ignored.
    pub fn tiles(&self, instructions: Instructions) -> Vec<Self> {
        if instructions != Instructions::Hopper {
            return Vec::new();
        }
        let kernels = WgmmaTile::CANDIDATES.into_iter().map(|tile| Self {
            tile,
            ..self.clone()
        });
        kernels.filter(|kernel| kernel.check().is_ok()).collect()
    }

    /// Whether the epilogue can prepare the heads. Head norms and stores to a cache were also tried in the epilogue, without a gain
    /// (`docs/history/encoders.md`, entry 51).
    fn fits(&self) -> bool {
        let Self { prepare, tile, .. } = self;
        let [queries, keys, _] = prepare.columns;
        let is_whole = [prepare.row, tile.n, queries, keys];
        let groups = [prepare.head, prepare.pairs()];
        // The epilogue rounds an angle to whole turns by adding 1.5 · 2²³, which is correct for fewer than 2²² turns. Positions reach 2²⁴,
        // so frequencies (in radians per position) must be at most 1.
        let frequencies = prepare.rotation.iter().flat_map(|r| &r.frequencies);
        let are_slow = frequencies.into_iter().all(|f| f.abs() <= 1.0);
        prepare.norm.is_none()
            && are_slow
            && prepare.pool.is_none()
            && tile.stores_directly(prepare.row)
            && tile.outputs_of_warpgroup() <= Self::MAX_OUTPUTS
            && tile.n
                <= if self.fp8 && !tile.cooperative {
                    Self::MAX_COLUMNS_FP8
                } else {
                    Self::MAX_COLUMNS
                }
            && is_whole
                .into_iter()
                .all(|columns| columns.is_multiple_of(prepare.head))
            && groups
                .into_iter()
                .all(|columns| columns.is_multiple_of(RowOrder::GROUP))
    }

    /// Max accumulators of a consumer warpgroup. With more accumulators, a thread has no registers left for a head and its angles.
    const MAX_OUTPUTS: u32 = 128 * 128;
    /// Max columns of a tile. With more columns, a thread has no registers left for a head and its angles.
    const MAX_COLUMNS: u32 = 192;
    /// Max columns of a ping-pong tile in fp8, whose threads also hold scales.
    const MAX_COLUMNS_FP8: u32 = 128;

    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), String> {
        self.gemm().check()?;
        self.prepare.check()?;
        match self.fits() {
            true => Ok(()),
            false => Err(format!(
                "{:?} cannot rotate heads of {} columns in {} pairs in rows of {}; expected tiles and offsets of whole heads, heads and pairs in multiples of 32, frequencies of at most 1, and neither norms nor a cache",
                self.tile,
                self.prepare.head,
                self.prepare.pairs(),
                self.prepare.row
            )),
        }
    }

    /// Returns the GEMM without the rotation.
    pub fn gemm(&self) -> GemmWgmma {
        let epilogue = Epilogue::new(self.bias, None);
        let problem = GemmProblem::new(self.prepare.row, self.k, self.prepare.dtype, epilogue);
        GemmWgmma {
            problem: match self.fp8 {
                true => problem.in_e4m3(),
                false => problem,
            },
            tile: self.tile,
        }
    }

    /// Number of tensors that the GEMM without the rotation reads.
    pub fn of_gemm(&self) -> usize {
        self.gemm().problem.n_reads()
    }
}

impl Kernel for GemmPrepareAttention {
    facts! { template: "gemm_wgmma", dtype: self.prepare.dtype, class: Gemm }

    fn symbol(&self) -> String {
        format!("{}_{}", self.definition(), self.tile.name())
    }

    fn definition(&self) -> String {
        let bias = if self.bias { "_bias" } else { "" };
        let fp8 = if self.fp8 { "fp8_" } else { "" };
        format!("{fp8}gemm{bias}_k{}_{}", self.k, self.prepare.symbol())
    }

    fn instructions(&self) -> Instructions {
        Instructions::Hopper
    }

    fn constants(&self) -> Constants {
        let mut constants = self.gemm().constants();
        let [q, k, _] = self.prepare.columns;
        let of_prepare = self.prepare.constants();
        let same = [
            "heads",
            "kv_heads",
            "head",
            "pairs",
            "frequencies",
            "factor",
        ];
        let kept = of_prepare
            .into_iter()
            .filter(|(name, _)| same.contains(name));
        constants.extend(kept);
        constants.extend([
            ("prepares", true.into()),
            ("q_from", q.into()),
            ("k_from", k.into()),
        ]);
        constants
    }

    fn params(&self) -> Vec<Param> {
        let mut of_gemm = self.gemm().params();
        let writes = of_gemm.split_off(self.of_gemm());
        let of_prepare = self.prepare.params().into_iter().skip(1);
        let of_prepare = of_prepare.filter(|param| !matches!(param.role, Role::Count(_)));
        let (reads, prepared): (Vec<_>, Vec<_>) =
            of_prepare.partition(|param| matches!(param.role, Role::Read { .. }));
        let [out, rows] = [0, 1].map(|at| writes[at].clone());
        let params = of_gemm.into_iter().chain(reads).chain([out]);
        params.chain(prepared).chain([rows]).collect()
    }

    fn tensor_maps(&self) -> Vec<TensorMap> {
        self.gemm().tensor_maps()
    }

    fn weight(&self) -> Option<[u32; 2]> {
        Some([self.prepare.row, self.k])
    }

    fn validate(&self) -> Result<(), String> {
        self.gemm().validate()?;
        self.prepare.validate()?;
        self.check()
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        self.gemm().launch(extents, machine)
    }

    /// The estimate counts the rotation as an activation, which takes about as long.
    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        let epilogue = Epilogue::new(self.bias, Some(Activation::Silu));
        let k = if self.fp8 { self.k.div_ceil(2) } else { self.k };
        let tile = self.tile;
        Some(tile.cycles(rows, self.prepare.row, k, epilogue, machine))
    }

    fn threads(&self) -> u32 {
        self.gemm().threads()
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (of_gemm, of_prepare) = reads.split_at(self.of_gemm());
        let out = self.gemm().reference(extents, of_gemm).remove(0);
        let reads: Vec<&HostTensor> = [&out]
            .into_iter()
            .chain(of_prepare.iter().copied())
            .collect();
        let prepared = self.prepare.reference(extents, &reads);
        let head = self.prepare.head as usize;
        let parts = self.prepare.columns.into_iter().zip(self.prepare.parts());
        let mut rest = out.real().to_vec();
        for row in rest.chunks_exact_mut(self.prepare.row as usize) {
            for (from, heads) in parts.clone().take(2) {
                row[from as usize..][..heads as usize * head].fill(f32::NAN);
            }
        }
        [HostTensor::Real(rest)]
            .into_iter()
            .chain(prepared)
            .collect()
    }

    /// Returns cases with enough rows that some SM has more than one tile.
    fn cases(&self) -> Vec<Case> {
        self.prepare.cases()
    }

    fn tolerance(&self) -> Tolerance {
        let Tolerance {
            absolute, relative, ..
        } = self.gemm().tolerance();
        Tolerance {
            absolute: absolute
                * if self.prepare.norm.is_some() {
                    8.0
                } else {
                    2.0
                },
            relative: 1.5 * relative,
            reason: "errors of the sums of two columns that are rotated together, times a gamma of a few; sines and cosines within 2^-20; one rounding to storage",
        }
    }
}

/// Instances with every tile and with heads of 64 and 128 columns. Values are before or after queries and keys in a row. Some instances
/// rotate only a part of each head.
pub fn representative() -> Vec<KernelSpec> {
    let mut kernels = Vec::new();
    for (dtype, heads, kv_heads, head, pairs, columns, row, bias, fp8) in [
        (DType::F16, 6, 3, 64, 32, [192, 576, 0], 832, true, false),
        (DType::F16, 4, 2, 128, 64, [0, 512, 768], 1024, false, false),
        (DType::F16, 2, 2, 128, 32, [0, 256, 512], 768, true, false),
        (DType::BF16, 3, 1, 64, 32, [0, 192, 256], 320, false, false),
        (DType::F16, 6, 3, 64, 32, [192, 576, 0], 832, true, true),
        (DType::BF16, 4, 2, 128, 64, [0, 512, 768], 1024, false, true),
    ] {
        let prepare = PrepareAttention {
            heads,
            kv_heads,
            head,
            columns,
            row,
            norm: None,
            rotation: Some(Rotation {
                heads,
                frequencies: frequencies(pairs, 1e4),
                factor: if pairs * 2 < head { 1.25 } else { 1.0 },
            }),
            pool: None,
            dtype,
        };
        let k = match (fp8, bias) {
            (false, true) => 72,
            (false, false) => 328,
            (true, true) => 80,
            (true, false) => 336,
        };
        let kernel = GemmPrepareAttention {
            k,
            bias,
            fp8,
            prepare,
            tile: WgmmaTile::CANDIDATES[0],
        };
        let tiles = kernel.tiles(Instructions::Hopper).into_iter();
        kernels.extend(tiles.map(KernelSpec::from));
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_have_whole_heads_and_both_columns_of_a_pair_in_a_lane() {
        let KernelSpec::GemmPrepareAttention(kernel) = representative().remove(0) else {
            unreachable!("all are of this kind")
        };
        assert_eq!(kernel.check(), Ok(()));
        let refused = |prepare: PrepareAttention| {
            let kernel = GemmPrepareAttention {
                prepare,
                ..kernel.clone()
            };
            assert_eq!(kernel.tiles(Instructions::Hopper), []);
            kernel.check().expect_err("refused")
        };
        let mut sixteen = kernel.prepare.clone();
        if let Some(rotation) = &mut sixteen.rotation {
            rotation.frequencies.truncate(16);
        }
        assert_eq!(
            refused(sixteen),
            format!(
                "{:?} cannot rotate heads of 64 columns in 16 pairs in rows of 832; expected tiles and offsets of whole heads, heads and pairs in multiples of 32, frequencies of at most 1, and neither norms nor a cache",
                kernel.tile
            )
        );
        let mut between = kernel.prepare.clone();
        between.columns[0] = 32;
        assert!(refused(between).contains("cannot rotate heads"));
        assert_eq!(kernel.tiles(Instructions::default()), []);
    }
}
