//! The Hopper GEMM with operands in E4M3.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{BLOCK_K, GemmWgmma, THREADS, WgmmaTile};
use crate::{
    kernels::{
        Case, Class, Constants, Fill, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param,
        Role, TensorMap, Tolerance,
        e4m3::{ROUNDED, saturated},
    },
    machine::Machine,
    ops::{Activation, Epilogue, activate_f64},
    tensor::{DType, Element, Extents, Shape, Size, Symbol},
};

/// `x [rows, k]` and `weight [n, k]` in E4M3, `scale [n]`, (`bias [n]`), (`residual [rows, n]`), (`out_scale [1]`) → `out [rows, n]`:
/// `act(scale ∘ (x · weightᵀ) + bias) + residual`, or its quotient by `out_scale` in E4M3. With a gate, `weight`, `scale` and `bias` have
/// `2n` rows, and the result is that of the first half times the second half, which has no activation.
///
/// Tensor cores add the products of E4M3 with 14 bits of mantissa, in f32 accumulators.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GemmFp8 {
    /// The 16-bit GEMM with the same sizes, epilogue, gate and tile.
    pub of: GemmWgmma,
    /// Whether the result is stored in E4M3.
    pub to_e4m3: bool,
}

/// Vectors of f32 that the epilogue reads from shared memory: the bias and the scales.
const VECTORS: u32 = 2;
/// Elements of k per stage. A stage has as many bytes as with 16-bit operands.
const BLOCK_K_FP8: u32 = 2 * BLOCK_K;
/// Max outputs of a ping-pong warpgroup that loads the scales before its mainloop. With more, it has no registers for them.
const EARLY_OUTPUTS: u32 = 128 * 128;
/// Standard deviation of the operands in checks. Values below 2⁻⁶ are multiples of 2⁻⁹, so sums of their products are
/// short integers, which tensor cores add exactly.
const DEVIATION: f32 = 1.5 / 512.0;

impl GemmFp8 {
    /// Returns the kernels of a GEMM with every tile that serves it.
    pub fn tiles(of: &GemmWgmma, to_e4m3: bool, instructions: Instructions) -> Vec<Self> {
        let tiles = match of.gated {
            true => GemmWgmma::gating(of.n, of.k, of.epilogue.bias, of.dtype, instructions),
            false => GemmWgmma::tiles(of.n, of.k, of.dtype, instructions),
        };
        let kernels = tiles.into_iter().map(|tile| Self {
            of: GemmWgmma { tile, ..of.clone() },
            to_e4m3,
        });
        kernels.filter(|kernel| kernel.check().is_ok()).collect()
    }

    /// Checks that rows of `k` elements start at multiples of 16 bytes, as a tensor map requires.
    pub(in crate::kernels::gemm) fn check_k(k: u32) -> Result<(), String> {
        match k.is_multiple_of(16) {
            true => Ok(()),
            false => Err(format!(
                "the GEMM of E4M3 does not support k = {k}; expected a multiple of 16"
            )),
        }
    }

    fn check(&self) -> Result<(), String> {
        self.of.check()?;
        let GemmWgmma { n, k, tile, .. } = self.of;
        Self::check_k(k)?;
        // The largest ping-pong tiles have registers for scales if they store directly and add no residual.
        let is_large = !tile.cooperative && tile.outputs_of_warpgroup() >= 128 * 144;
        if is_large && (self.of.epilogue.residual || !tile.stores_directly(n)) {
            return Err(format!(
                "{tile:?} has no registers for the scales of {n} columns with {:?}; expected a smaller or a cooperative tile",
                self.of.epilogue
            ));
        }
        let in_groups = tile.swaps_ab() || tile.stores_directly(n);
        match self.to_e4m3 && (self.of.epilogue.residual || !in_groups) {
            true => Err(format!(
                "a result of {n} columns in E4M3 with {:?} and {tile:?}; expected no residual, and whole groups of 32 columns",
                self.of.epilogue
            )),
            false => Ok(()),
        }
    }

    /// Computes the results from the products of each row. `more` are the operands after the weight. Results in E4M3 are not yet rounded.
    pub(crate) fn finish(&self, products: &[f32], more: &[&[f32]], out: &mut [f32]) {
        let Epilogue {
            bias,
            residual,
            activation,
        } = self.of.epilogue;
        let mut more = more.iter().copied();
        let mut next = |is_there: bool| is_there.then(|| more.next().unwrap_or_default());
        let scale = next(true).unwrap_or_default();
        let (bias, residual) = (next(bias), next(residual));
        let out_scale = next(self.to_e4m3).map(|scale| f64::from(scale[0]));
        let n = self.of.n as usize;
        let rows = products.par_chunks(self.of.weight_rows() as usize);
        let rows = rows.zip(out.par_chunks_mut(n)).enumerate();
        rows.for_each(|(row, (products, out))| {
            let sum = |c: usize| {
                let bias = bias.map_or(0.0, |b| f64::from(b[c]));
                f64::from(products[c]) * f64::from(scale[c]) + bias
            };
            for (c, out) in out.iter_mut().enumerate() {
                let mut result = sum(c);
                if let Some(activation) = activation {
                    result = activate_f64(activation, result);
                }
                if self.of.gated {
                    result *= sum(n + c);
                }
                if let Some(residual) = residual {
                    result += f64::from(residual[row * n + c]);
                }
                *out = match out_scale {
                    Some(scale) => saturated((result / scale) as f32),
                    None => result as f32,
                };
            }
        });
    }

    fn out(&self) -> Element {
        match self.to_e4m3 {
            true => Element::E4m3,
            false => self.of.dtype.into(),
        }
    }
}

impl Kernel for GemmFp8 {
    fn symbol(&self) -> String {
        format!("{}_{}", self.definition(), self.of.tile.name())
    }

    fn definition(&self) -> String {
        let to = if self.to_e4m3 { "_to_e4m3" } else { "" };
        format!("fp8_{}{to}", self.of.definition())
    }

    fn template(&self) -> &'static str {
        self.of.template()
    }

    fn instructions(&self) -> Instructions {
        self.of.instructions()
    }

    fn constants(&self) -> Constants {
        let mut constants = self.of.constants();
        let (tile, store) = (self.of.tile, self.of.store());
        let late_scales = !tile.cooperative && tile.outputs_of_warpgroup() > EARLY_OUTPUTS;
        constants.extend([
            ("block_k", BLOCK_K_FP8.into()),
            ("mma_k", 32u32.into()),
            ("scaled", true.into()),
            ("late_scales", late_scales.into()),
            ("to_e4m3", self.to_e4m3.into()),
            ("stages", tile.stages(store, VECTORS).into()),
            ("buffers", tile.buffers(store, VECTORS).into()),
        ]);
        constants
    }

    fn params(&self) -> Vec<Param> {
        let GemmWgmma {
            n,
            k,
            dtype,
            epilogue,
            ..
        } = self.of;
        let rows = Size::from(Symbol::Rows);
        let weight_rows = u64::from(self.of.weight_rows());
        let by = |width: u32| Shape::new([rows.clone(), u64::from(width).into()]);
        let read = |name, element, shape, fill| Param {
            name,
            role: Role::Read {
                element,
                shape,
                fill,
            },
        };
        let factor = Fill::Normal {
            mean: 0.0,
            deviation: DEVIATION,
        };
        // Products have standard deviation 1. Scales differ, so that the check detects a scale on a wrong column.
        let mean = 1.0 / (DEVIATION * DEVIATION * (k as f32).sqrt());
        let scale = Fill::Normal {
            mean,
            deviation: mean / 8.0,
        };
        // The largest results are near the largest magnitude of E4M3.
        let out_scale = Fill::Normal {
            mean: 1.0 / 64.0,
            deviation: 0.0,
        };
        let f32 = Element::Value(DType::F32);
        let matrix = Shape::fixed(&[weight_rows, k.into()]);
        let mut params = vec![
            read("x", Element::E4m3, by(k), factor),
            read("weight", Element::E4m3, matrix, factor),
            read("scale", f32, Shape::fixed(&[weight_rows]), scale),
        ];
        if epilogue.bias {
            let shape = Shape::fixed(&[weight_rows]);
            params.push(read("bias", dtype.into(), shape, Fill::ACTIVATION));
        }
        if epilogue.residual {
            params.push(read("residual", dtype.into(), by(n), Fill::ACTIVATION));
        }
        if self.to_e4m3 {
            params.push(read("out_scale", f32, Shape::fixed(&[1]), out_scale));
        }
        let out = Role::Write {
            element: self.out(),
            shape: by(n),
        };
        let count = Role::Count(rows);
        params.extend([("out", out), ("rows", count)].map(|(name, role)| Param { name, role }));
        params
    }

    fn tensor_maps(&self) -> Vec<TensorMap> {
        let mut maps = self.of.tensor_maps();
        let factors = maps.iter_mut().filter(|map| map.param != "out");
        factors.for_each(|map| map.box_columns = BLOCK_K_FP8);
        maps
    }

    fn dtype(&self) -> Option<DType> {
        Some(self.of.dtype)
    }

    fn class(&self) -> Class {
        Class::Gemm
    }

    fn weight(&self) -> Option<[u32; 2]> {
        Some([self.of.weight_rows(), self.of.k])
    }

    fn validate(&self) -> Result<(), String> {
        self.of.validate()?;
        self.check()
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        Launch {
            threads: THREADS,
            shared_bytes: self.of.tile.shared_bytes(self.of.store(), VECTORS),
            ..self.of.launch(extents, machine)
        }
    }

    /// A stage has as many bytes as with 16-bit operands and twice as many products, which tensor cores compute in the
    /// same time.
    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        let halved = GemmWgmma {
            k: self.of.k.div_ceil(2),
            ..self.of.clone()
        };
        halved.cycles(rows, machine)
    }

    fn threads(&self) -> u32 {
        THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let products = GemmWgmma {
            n: self.of.weight_rows(),
            dtype: DType::F32,
            epilogue: Epilogue::default(),
            ..self.of.clone()
        };
        let products = products.plain().reference(extents, &reads[..2]).remove(0);
        let more: Vec<&[f32]> = reads[2..].iter().map(|tensor| tensor.real()).collect();
        let mut out = vec![0.0; extents.rows as usize * self.of.n as usize];
        self.finish(products.real(), &more, &mut out);
        vec![HostTensor::Real(out)]
    }

    fn cases(&self) -> Vec<Case> {
        self.of.cases()
    }

    fn tolerance(&self) -> Tolerance {
        match self.to_e4m3 {
            true => ROUNDED,
            // The sums are exact, see `DEVIATION`.
            false => self.of.tolerance(),
        }
    }
}

/// Returns functions of every epilogue and result, at sizes that are not multiples of a tile. Their tiles are arbitrary.
pub(in crate::kernels::gemm) fn functions() -> impl Iterator<Item = GemmFp8> {
    let plain = Epilogue::default();
    let gelu = Epilogue::new(true, Some(Activation::GeluExact));
    let silu = |bias| Epilogue::new(bias, Some(Activation::Silu));
    let sizes = [
        (DType::F16, 992, 336, gelu, false, true),
        (DType::F16, 768, 768, plain, false, false),
        (DType::F16, 1000, 80, plain.with_residual(), false, false),
        (
            DType::F16,
            768,
            3072,
            Epilogue::new(true, None).with_residual(),
            false,
            false,
        ),
        (DType::F16, 352, 336, silu(false), true, true),
        (DType::BF16, 1000, 336, gelu, false, false),
        (DType::BF16, 768, 336, plain, false, true),
        (DType::BF16, 352, 336, silu(true), true, false),
    ];
    let functions = sizes.map(|(dtype, n, k, epilogue, gated, to_e4m3)| {
        let of = GemmWgmma {
            n,
            k,
            dtype,
            epilogue,
            gated,
            tile: WgmmaTile::CANDIDATES[0],
        };
        GemmFp8 { of, to_e4m3 }
    });
    functions.into_iter()
}

/// Instances of every tile.
pub(super) fn representative() -> Vec<KernelSpec> {
    let kernels =
        functions().flat_map(|of| GemmFp8::tiles(&of.of, of.to_e4m3, Instructions::Hopper));
    kernels.map(KernelSpec::from).collect()
}
