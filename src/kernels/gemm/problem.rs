//! The function that a GEMM computes, independent of the schedule: operands, epilogue, reference and tolerance.

use gemmule_cpu::product::exact_dot;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::packed_rows::DEVIATION;
use crate::{
    kernels::{
        Case, Constants, Fill, HostTensor, Kernel, Param, Tolerance,
        e4m3::{ROUNDED, saturated},
        elementwise::Gate,
        rows::{count, read, write},
    },
    ops::{Activation, Epilogue, MAX_ROWS, activate_f64},
    tensor::{DType, Element, Extents, Format, Scaled, Shape, Size, Symbol},
};

/// `x [rows, k]`, `weight [n, k]`, (`bias [n]`), (`residual [rows, n]`) → `out [rows, n]`: `act(x · weightᵀ + bias) + residual`.
///
/// With a gate, `weight` and `bias` have `2n` rows. The result is the activation of the product with the first `n` rows of `weight`, times
/// the product with the last `n` rows.
///
/// If the weight's format is [`Format::E4m3`], x is also in E4M3. The operand after the weight is then `scale [weight rows]` in f32, by
/// which the products are multiplied before the bias is added. If the result is stored in E4M3, the last operand is `out_scale [1]`, by
/// which the result is divided.
///
/// With quantized rows, x is the result of `QuantizeRows`: `[rows, columns]` in 8 bits. The operand after the weight is then `x_scale`, the
/// scales of the rows. A sum of products is multiplied by the scale of the weight's row and by the scale of the row of x. If the weight has
/// a scale for every 128 columns of a row, x is the result of `QuantizeGroups`. Each sum of 128 products is then multiplied by the scales
/// of the two groups.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GemmProblem {
    /// Columns of the result.
    pub n: u32,
    /// Columns of x and of the weight.
    pub k: u32,
    /// Storage type of the bias and the residual. It is also the type of x unless x has 8-bit elements, and of the result unless `to_e4m3`
    /// is true.
    pub dtype: DType,
    /// Storage format of the weight. If `dtype` is f16 or bf16, kernels convert a packed weight in registers. If `dtype` is f32, only the
    /// CPU executor supports a weight in another format. It rounds x to int8 or bf16 if the weight is in int8 or bf16.
    pub weight: Format,
    pub epilogue: Epilogue,
    /// Whether the problem has a gate. `epilogue.activation` is then the activation of the gate.
    pub gated: bool,
    /// Whether the result is stored in E4M3.
    pub to_e4m3: bool,
    /// Whether x is quantized. The weight is then packed and has the same kind of elements and scales as x: E4M3 with a scale for each row
    /// or for every 128 columns of a row, or int8 with a scale for each row.
    pub quantized_rows: bool,
}

impl GemmProblem {
    /// Creates a problem with a weight in the type of the activations, without a gate.
    pub fn new(n: u32, k: u32, dtype: DType, epilogue: Epilogue) -> Self {
        Self {
            n,
            k,
            dtype,
            weight: dtype.into(),
            epilogue,
            gated: false,
            to_e4m3: false,
            quantized_rows: false,
        }
    }

    /// Returns the problem with operands in E4M3.
    #[must_use]
    pub fn in_e4m3(self) -> Self {
        Self {
            weight: Format::E4m3,
            ..self
        }
    }

    /// Returns the problem with a gate: `activation` of the first half of the columns, times the second half. The result has `n / 2`
    /// columns.
    #[must_use]
    pub fn with_gate(self, activation: Activation) -> Self {
        Self {
            n: self.n / 2,
            epilogue: Epilogue {
                activation: Some(activation),
                ..self.epilogue
            },
            gated: true,
            ..self
        }
    }

    /// Whether the weight has the storage type of the activations.
    pub fn is_plain(&self) -> bool {
        self.weight == Format::Plain(self.dtype)
    }

    /// Whether x and the weight are in E4M3.
    pub fn is_fp8(&self) -> bool {
        self.weight == Format::E4m3
    }

    /// Whether x has elements of 8 bits.
    pub(super) fn multiplies_8_bits(&self) -> bool {
        self.is_fp8() || self.quantized_rows
    }

    /// Bytes of an element of x.
    pub(super) fn x_bytes(&self) -> u64 {
        match self.multiplies_8_bits() {
            true => 1,
            false => self.dtype.bytes(),
        }
    }

    /// Number of elements of x per 16 bits: 2 in E4M3 or int8, otherwise 1. Constants such as the k of a stage count units of 16 bits.
    pub(super) fn elements_in_16_bits(&self) -> u32 {
        1 + u32::from(self.multiplies_8_bits())
    }

    /// Returns the format of the weight if it is packed and device kernels read it (activations in f16 or bf16).
    pub(super) fn packed(&self) -> Option<Scaled> {
        match self.weight {
            Format::Scaled(scaled) if self.dtype.has_mma() => Some(scaled),
            Format::Scaled(_) | Format::Plain(_) | Format::E4m3 => None,
        }
    }

    /// Number of rows of the weight.
    pub fn weight_rows(&self) -> u32 {
        match self.gated {
            true => 2 * self.n,
            false => self.n,
        }
    }

    /// Number of tensors that the GEMM reads.
    pub fn n_reads(&self) -> usize {
        let scales = usize::from(self.multiplies_8_bits()) + usize::from(self.to_e4m3);
        2 + scales + self.epilogue.operands()
    }

    /// Returns the problem without its gate. The result is the input of the gate, and has a column for each row of the weight. If there is
    /// no gate, returns the problem itself.
    #[must_use]
    pub fn before_gate(&self) -> Self {
        match self.gated {
            true => Self {
                n: self.weight_rows(),
                epilogue: Epilogue::new(self.epilogue.bias, None),
                gated: false,
                ..self.clone()
            },
            false => self.clone(),
        }
    }

    /// Returns the gate as a separate kernel, if there is one.
    pub fn gate(&self) -> Option<Gate> {
        let activation = self.epilogue.activation.filter(|_| self.gated)?;
        Some(Gate {
            activation,
            width: self.n,
            dtype: self.dtype,
        })
    }

    /// Element type of the result.
    fn out(&self) -> Element {
        match self.to_e4m3 {
            true => Element::E4m3,
            false => self.dtype.into(),
        }
    }

    /// Name of the computed function in kernel symbols.
    pub(super) fn definition(&self) -> String {
        let fp8 = match (self.is_fp8(), self.quantized_rows) {
            (true, _) => "fp8_",
            (false, true) => "quantized_rows_",
            (false, false) => "",
        };
        let to = if self.to_e4m3 { "_to_e4m3" } else { "" };
        format!("{fp8}{}{}{to}", self.epilogue_name(), self.sizes_name())
    }

    /// Part of a kernel's symbol that names the gate and the epilogue.
    pub(super) fn epilogue_name(&self) -> String {
        let gate = self.gate().map_or_else(String::new, |gate| {
            format!("{}_gate_", gate.activation.name())
        });
        format!("{gate}{}", self.before_gate().epilogue.name())
    }

    /// Part of a kernel's symbol that names types and sizes.
    pub(super) fn sizes_name(&self) -> String {
        let Self { n, k, dtype, .. } = self;
        let weight = match self.is_plain() || self.is_fp8() {
            true => String::new(),
            false => format!("_weight_{}", self.weight),
        };
        format!("_{dtype}{weight}_n{n}_k{k}")
    }

    /// Checks sizes and formats.
    ///
    /// # Errors
    /// Returns the reason if the problem is invalid for every kernel.
    pub(super) fn check(&self) -> Result<(), String> {
        // A width has the same limit as the number of rows of an embedding table, because a GEMM may have a column for each token of the
        // vocabulary.
        for size in [
            self.n,
            self.k,
            self.n.saturating_mul(1 + u32::from(self.gated)),
        ] {
            if !(1..=MAX_ROWS).contains(&size) {
                return Err(format!("a width of {size}, expected 1 to {MAX_ROWS}"));
            }
        }
        if self.to_e4m3 && !self.is_fp8() {
            return Err(format!(
                "a result in E4M3 and a weight in {}, expected a weight in E4M3",
                self.weight
            ));
        }
        if self.quantized_rows {
            self.check_quantized_rows()?;
        }
        match self.weight {
            Format::Plain(_) | Format::E4m3 => Ok(()),
            Format::Scaled(scaled) => scaled.check(),
        }
    }

    /// Checks that the problem has neither a gate nor quantized rows nor operands in [`Format::E4m3`].
    ///
    /// # Errors
    /// Returns the reason otherwise.
    pub(super) fn check_is_portable(&self) -> Result<(), String> {
        match self.is_fp8() {
            true => Err(UNSCALED.to_owned()),
            false => self.check_has_no_gate(),
        }
    }

    /// Checks that the problem has neither a gate nor quantized rows, which only some kernels support.
    ///
    /// # Errors
    /// Returns the reason otherwise.
    pub(super) fn check_has_no_gate(&self) -> Result<(), String> {
        if self.quantized_rows {
            return Err(QUANTIZED_ROWS.to_owned());
        }
        match self.gated {
            true => Err("a gate, which only kernels for Hopper compute in a GEMM".to_owned()),
            false => Ok(()),
        }
    }

    /// Constants that all GEMM templates need.
    pub(super) fn constants(&self) -> Constants {
        let activation = self.epilogue.activation;
        Constants::from([
            ("storage", self.dtype.name().into()),
            ("n", self.n.into()),
            ("k", self.k.into()),
            ("bias", self.epilogue.bias.into()),
            ("residual", self.epilogue.residual.into()),
            (
                "activation",
                activation.map_or("identity", Activation::function).into(),
            ),
            ("precise", (self.dtype == DType::F32).into()),
        ])
    }

    pub(super) fn params(&self) -> Vec<Param> {
        let (k, weight_rows) = (u64::from(self.k), u64::from(self.weight_rows()));
        let rows = Size::from(Symbol::Rows);
        let by = |width: u64| Shape::new([rows.clone(), width.into()]);
        let matrix = Shape::fixed(&[weight_rows, k]);
        let vector = Shape::fixed(&[weight_rows]);
        let mut params = match self.is_fp8() {
            _ if self.quantized_rows => self.operands_of_rows(matrix),
            true => {
                let factor = Fill::Normal {
                    mean: 0.0,
                    deviation: DEVIATION,
                };
                // Scaled results have standard deviation 1. The scales of columns differ, so the check detects a scale that is applied to a
                // wrong column.
                let mean = 1.0 / (DEVIATION * DEVIATION * (self.k as f32).sqrt());
                let scale = Fill::Normal {
                    mean,
                    deviation: mean / 8.0,
                };
                vec![
                    read("x", Element::E4m3, by(k), factor),
                    read("weight", Element::E4m3, matrix, factor),
                    read("scale", DType::F32, vector.clone(), scale),
                ]
            }
            false => {
                // With weights of this deviation, inputs of standard deviation 1 give outputs of standard deviation 1.
                let weights = Fill::Normal {
                    mean: 0.0,
                    deviation: 1.0 / (self.k as f32).sqrt(),
                };
                vec![
                    read("x", self.dtype, by(k), Fill::ACTIVATION),
                    read("weight", self.weight, matrix, weights),
                ]
            }
        };
        if self.epilogue.bias {
            params.push(read("bias", self.dtype, vector, Fill::ACTIVATION));
        }
        if self.epilogue.residual {
            params.push(read(
                "residual",
                self.dtype,
                by(self.n.into()),
                Fill::ACTIVATION,
            ));
        }
        if self.to_e4m3 {
            // With this scale, the largest results are near the largest magnitude of E4M3.
            let scale = Fill::Normal {
                mean: 1.0 / 64.0,
                deviation: 0.0,
            };
            params.push(read("out_scale", DType::F32, Shape::fixed(&[1]), scale));
        }
        params.push(write("out", self.out(), by(self.n.into())));
        params.push(count(Symbol::Rows));
        params
    }

    /// Shape of the weight, `[rows, k]`.
    pub(super) fn weight_shape(&self) -> [u32; 2] {
        [self.weight_rows(), self.k]
    }

    /// Computes the results. If `converts`, a packed weight is rounded to the type of x before the product, like in device kernels.
    pub(super) fn reference(
        &self,
        extents: &Extents,
        reads: &[&HostTensor],
        converts: bool,
    ) -> Vec<HostTensor> {
        if self.quantized_rows {
            let [x, weight, x_scale, rest @ ..] = reads else {
                unreachable!("the parameter list has at least three operands")
            };
            let x = HostTensor::Real(self.restored_rows(x.real(), x_scale.real()));
            let reads = [&[&x, *weight], rest].concat();
            // The elements of x and of the weight are multiplied without rounding to the storage type.
            return self.with_plain_rows().reference(extents, &reads, false);
        }
        if self.is_fp8() {
            let products = Self {
                dtype: DType::F32,
                weight: DType::F32.into(),
                epilogue: Epilogue::default(),
                to_e4m3: false,
                ..self.before_gate()
            };
            let products = products.products(extents, &reads[..2], converts);
            let more: Vec<&[f32]> = reads[2..].iter().map(|tensor| tensor.real()).collect();
            let mut out = vec![0.0; extents.rows as usize * self.n as usize];
            self.finish(products.real(), &more, &mut out);
            return vec![HostTensor::Real(out)];
        }
        let out = self.before_gate().products(extents, reads, converts);
        match self.gate() {
            Some(gate) => gate.reference(extents, &[&out]),
            None => vec![out],
        }
    }

    /// Whether the CPU executor rounds x to the weight's format before the product.
    fn rounds_x(&self) -> bool {
        match self.weight {
            _ if self.is_plain() || self.packed().is_some() => false,
            Format::Plain(_) => true,
            Format::Scaled(scaled) => scaled.is_multiplied_as_integers(),
            Format::E4m3 => false,
        }
    }

    /// Returns the values of `matrix` rounded to the weight's format. If `converts`, scaled values are also rounded to the storage type.
    fn stored(&self, matrix: &[f32], converts: bool) -> Vec<f32> {
        let k = self.k as usize;
        match self.weight {
            Format::Scaled(scaled) if converts => scaled.quantize(matrix, k).values_in(self.dtype),
            Format::Scaled(scaled) => scaled.quantize(matrix, k).values(),
            Format::Plain(dtype) => matrix.iter().map(|&w| dtype.round(w)).collect(),
            Format::E4m3 => matrix.iter().map(|&w| Element::E4m3.round(w)).collect(),
        }
    }

    /// Computes the results of a problem without a gate and without `scale`.
    fn products(&self, extents: &Extents, reads: &[&HostTensor], converts: bool) -> HostTensor {
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
        // Each task computes a block of columns for all rows, to read a large weight only once.
        const COLUMNS: usize = 32;
        let blocks = weight.par_chunks(COLUMNS * k).enumerate();
        let blocks: Vec<Vec<f32>> = blocks
            .map(|(block, weight)| {
                let width = weight.len() / k;
                let mut part = vec![0.0; rows * width];
                for (column, weight) in weight.chunks_exact(k).enumerate() {
                    for (row, x) in x.chunks_exact(k).take(rows).enumerate() {
                        part[row * width + column] =
                            element(row, block * COLUMNS + column, exact_dot(x, weight));
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
        HostTensor::Real(out)
    }

    /// Computes the results of a problem with operands in [`Format::E4m3`] from `products [rows, weight rows]`, and stores them in `out
    /// [rows, n]`. `more` holds the operands after the weight. Results that are stored in E4M3 are clamped to its range, but not yet
    /// rounded.
    pub(crate) fn finish(&self, products: &[f32], more: &[&[f32]], out: &mut [f32]) {
        let Epilogue {
            bias,
            residual,
            activation,
        } = self.epilogue;
        let mut more = more.iter().copied();
        let mut next = |is_there: bool| is_there.then(|| more.next().unwrap_or_default());
        let scale = next(true).unwrap_or_default();
        let (bias, residual) = (next(bias), next(residual));
        let out_scale = next(self.to_e4m3).map(|scale| f64::from(scale[0]));
        let n = self.n as usize;
        let rows = products.par_chunks(self.weight_rows() as usize);
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
                if self.gated {
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

    /// Batches for checks.
    pub(super) fn cases(&self) -> Vec<Case> {
        let mut cases = Case::standard();
        if self.gated {
            cases.extend(few_rows());
        }
        cases
    }

    /// Tolerance of the results.
    pub(super) fn tolerance(&self) -> Tolerance {
        if self.to_e4m3 {
            return ROUNDED;
        }
        match self.gated {
            true => self.tolerance_with_factors(),
            false => self.tolerance_of_sums(),
        }
    }

    /// Tolerance of the results of the product, before a gate.
    pub(super) fn tolerance_of_sums(&self) -> Tolerance {
        // With the fills of the parameters, partial sums have magnitude 1. FMAs in f32 round a sum k times, with random errors. Tensor
        // cores truncate a sum after every 8 or 16 products instead.
        let k = f64::from(self.k);
        // Sums of integer products are exact. Sums of E4M3 products are exact in checks (see `DEVIATION`), except with scales of groups.
        self.with_error_of_sums(match self.dtype {
            DType::F16 => Tolerance {
                absolute: (2e-4 + 2.0 * k / 8.0 * f64::from(f32::EPSILON)) as f32,
                relative: 1.5e-3,
                reason: "f32 sums, truncated at every 8 products or more; one rounding to f16 (2^-11), and an error of the same size in tanh.approx",
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
        })
    }

    /// Tolerance of results that are multiplied by another product, or that are computed from normalized rows.
    pub(super) fn tolerance_with_factors(&self) -> Tolerance {
        let sums = self.tolerance_of_sums();
        Tolerance {
            absolute: 8.0 * sums.absolute + self.storage_error() * 4e-3,
            relative: 2.0 * sums.relative,
            reason: "as the GEMM; the factors of a gate, of a row and of gamma · w are below 8, and rows of a norm are rounded to storage as x is",
        }
    }

    /// Ratio of the storage type's rounding error to the rounding error of f16.
    pub(super) fn storage_error(&self) -> f32 {
        match self.dtype {
            DType::F16 => 1.0,
            DType::BF16 | DType::F32 => 8.0,
        }
    }
}

/// Error message for a GEMM with 16-bit or 32-bit inputs and an E4M3 weight without scales.
const UNSCALED: &str =
    "a weight in E4M3 without scales, which only products with inputs in E4M3 read";

/// Error message for a GEMM that does not read quantized rows.
pub(super) const QUANTIZED_ROWS: &str = "quantized rows, which only the persistent GEMM for Hopper and, in int8, the GEMM for any GPU read";

/// Returns cases in which octets (groups of eight rows) and tiles of rows are full, partial or empty. For kernels that append gamma and
/// beta as two more rows, some cases have these two rows in the same octet, and others in different octets.
pub(super) fn few_rows() -> impl Iterator<Item = Case> {
    let rows = [7, 8, 15, 30, 31, 32, 33, 62, 64, 65, 127, 128].into_iter();
    rows.map(|rows| Case::new("few_rows", &[rows]))
}

/// Checks that rows of `k` elements in E4M3 start at multiples of 16 bytes, as a tensor map requires.
pub(super) fn check_k_of_fp8(k: u32) -> Result<(), String> {
    match k.is_multiple_of(16) {
        true => Ok(()),
        false => Err(format!(
            "the GEMM of E4M3 does not support k = {k}; expected a multiple of 16"
        )),
    }
}
