//! Methods of [`GemmProblem`] that depend on the elements and scales of quantized rows.

use super::{
    GemmProblem, QuantizeGroups,
    packed_rows::{
        DEVIATION, RowElement, columns, group_scales_shape, groups, restored, restored_groups,
    },
};
use crate::{
    kernels::{Fill, HostTensor, Param, Tolerance, rows::read},
    tensor::{DType, Format, Scaled, Shape, Symbol},
};

/// Absolute error of a result (of standard deviation 1) in checks with scales of groups: tensor cores add the E4M3 products of a group with
/// only 14 bits of mantissa.
const SUMS_IN_14_BITS: f32 = 2e-3;
/// In checks, the elements of a weight's row are `i · max / 7` with integers `i` of magnitude at most 7. Scaled to the range of E4M3, they
/// are multiples of 64 up to 448, which E4M3 stores exactly.
const LARGEST: u32 = 7;

impl GemmProblem {
    /// Returns the element type of quantized rows.
    pub(crate) fn row_element(&self) -> RowElement {
        match self.multiplies_int8() {
            true => RowElement::Int8,
            false => RowElement::E4m3,
        }
    }

    /// Whether x and the weight are both in int8.
    pub(crate) fn multiplies_int8(&self) -> bool {
        self.quantized_rows && self.weight == Format::INT8
    }

    /// Whether x and the weight are in E4M3 with scales for groups of columns. The sum of a group is then multiplied by both scales before
    /// it is added to the sums of the other groups.
    pub(crate) fn multiplies_groups(&self) -> bool {
        self.quantized_rows && self.weight == QuantizeGroups::WEIGHT
    }

    /// Number of f32 values that are stored for each quantized row: its scales, and in int8 also the sum of its integers.
    pub(crate) fn scales_of_row(&self) -> u64 {
        match self.multiplies_groups() {
            true => groups(self.k).into(),
            false => self.row_element().scales(),
        }
    }

    /// Shape of the scales of quantized rows.
    pub(super) fn x_scale_shape(&self) -> Shape {
        match self.multiplies_groups() {
            true => group_scales_shape(self.k),
            false => self.row_element().scales_shape(),
        }
    }

    /// Returns the parameters of a product of quantized rows: the rows, the packed weight, and the scales of the rows. The fills of the
    /// parameters give results a standard deviation of 1. Sums of products are exact, except with scales of groups. With scales of groups,
    /// the weight is normally distributed. Its groups then have different scales, so the check detects the scale of a wrong group or row.
    pub(super) fn operands_of_rows(&self, matrix: Shape) -> Vec<Param> {
        let &Self { k, weight, .. } = self;
        let to = self.row_element();
        let normal = |mean, deviation| Fill::Normal { mean, deviation };
        let normal_elements = normal(0.0, (k as f32).sqrt().recip());
        // The scales of rows differ, so the check detects a scale that is applied to a wrong row.
        let (x, elements, scale) = match to {
            RowElement::E4m3 => {
                // Variance of the integer factors of the weight's elements.
                let variance = (LARGEST * (LARGEST + 1)) as f32 / 3.0;
                let exact = Fill::Multiples {
                    largest: LARGEST,
                    unit: (variance * k as f32).sqrt().recip(),
                };
                let elements = match self.multiplies_groups() {
                    true => normal_elements,
                    false => exact,
                };
                let scale = normal(DEVIATION.recip(), DEVIATION.recip() / 8.0);
                (normal(0.0, DEVIATION), elements, scale)
            }
            // The mean is not 0, so rows have large sums.
            RowElement::Int8 => (
                normal(8.0, 32.0),
                normal_elements,
                normal(1.0 / 32.0, 1.0 / 256.0),
            ),
        };
        let rows = Shape::new([Symbol::Rows.into(), u64::from(columns(k)).into()]);
        vec![
            read("x", to.element(), rows, x),
            read("weight", weight, matrix, elements),
            read("x_scale", DType::F32, self.x_scale_shape(), scale),
        ]
    }

    /// Returns the rows `[rows, k]` that the `quantized` rows and their `scales` represent.
    pub(crate) fn restored_rows(&self, quantized: &[f32], scales: &[f32]) -> Vec<f32> {
        match self.multiplies_groups() {
            true => restored_groups(quantized, scales, self.k),
            false => restored(quantized, scales, self.k, self.row_element()),
        }
    }

    /// Returns the format of the weight if it is packed and kernels convert it in registers.
    pub(super) fn converted(&self) -> Option<Scaled> {
        self.packed().filter(|_| !self.quantized_rows)
    }

    /// Returns the problem with rows of x that are not quantized.
    pub(crate) fn with_plain_rows(&self) -> Self {
        Self {
            quantized_rows: false,
            ..self.clone()
        }
    }

    /// Checks the weight, the result and the columns of a problem with quantized rows.
    ///
    /// # Errors
    /// Returns the reason if no kernel computes the problem.
    pub(super) fn check_quantized_rows(&self) -> Result<(), String> {
        let of_rows = RowElement::beside(self.weight).is_some_and(|to| self.k <= to.max_k());
        match self.dtype.has_mma() && (of_rows || self.multiplies_groups()) {
            true => Ok(()),
            false => Err(format!(
                "quantized rows of {} columns, a weight in {} and results in {}; expected a weight in {} or {}, or in {} with at most {} columns, and results in f16 or bf16",
                self.k,
                self.weight,
                self.dtype,
                Format::FP8,
                QuantizeGroups::WEIGHT,
                Format::INT8,
                RowElement::Int8.max_k()
            )),
        }
    }

    /// Adds the error of sums of E4M3 products to `tolerance` if the problem has scales of groups. Otherwise, sums are exact in checks.
    pub(super) fn with_error_of_sums(&self, tolerance: Tolerance) -> Tolerance {
        match self.multiplies_groups() {
            true => Tolerance {
                absolute: tolerance.absolute + SUMS_IN_14_BITS,
                reason: "sums of the E4M3 products of a group, in 14 bits; otherwise as without groups: f32 sums, and one rounding to storage",
                ..tolerance
            },
            false => tolerance,
        }
    }

    /// For int8, returns the index of `x_scale` in `reads`, and a copy of `x_scale` that contains the sums of the rows of x. Otherwise,
    /// returns an empty list.
    pub(super) fn derived_inputs(&self, reads: &[&HostTensor]) -> Vec<(usize, HostTensor)> {
        let (true, [x, _, x_scale, ..]) = (self.multiplies_int8(), reads) else {
            return Vec::new();
        };
        let rows = x.real().chunks_exact(columns(self.k) as usize);
        let scales = x_scale.real().chunks_exact(2).zip(rows);
        let scales = scales.flat_map(|(scale, row)| [scale[0], row.iter().sum()]);
        vec![(2, HostTensor::Real(scales.collect()))]
    }
}
