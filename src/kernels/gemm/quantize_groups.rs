//! The conversion of rows to E4M3 with a scale for each group of 128 columns. A GEMM multiplies the result with a packed E4M3 weight whose
//! rows have the same groups.

use serde::{Deserialize, Serialize};

use super::{
    GemmProblem,
    packed_rows::{self, GROUP, PACK, group_scales_shape},
};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, Tolerance,
        limits, rows::STREAM_THREADS,
    },
    machine::Machine,
    ops::Epilogue,
    tensor::{DType, Element, Extents, Format},
};

/// `x [rows, k]` → `quantized [rows, columns]`, `row_scale [groups, rows]`: groups of 128 columns of `x`, divided by their scales, in E4M3.
/// The scale of a group is its largest magnitude divided by 448, the maximum of E4M3. A group of zeros has the scale 1.
///
/// Columns are stored and padded as in [`QuantizeRows`](super::QuantizeRows). NaN stays NaN. An infinite element becomes NaN, and the other
/// elements of its group become zero.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct QuantizeGroups {
    pub k: u32,
    pub dtype: DType,
}

impl QuantizeGroups {
    /// Format of the weight with which the rows are multiplied.
    pub const WEIGHT: Format = Format::FP8_128;

    /// Returns the kernel that converts a problem's x, and the problem with the converted x. Returns `None` if the weight's format is not
    /// [`Self::WEIGHT`], or if the conversion does not support `k` or the storage type.
    pub fn of(problem: &GemmProblem) -> Option<(Self, GemmProblem)> {
        let GemmProblem { k, dtype, .. } = *problem;
        let is_packed = problem.weight == Self::WEIGHT && problem.packed().is_some();
        let is_served = is_packed && k.is_multiple_of(PACK);
        let converted = GemmProblem {
            quantized_rows: true,
            ..problem.clone()
        };
        is_served.then_some((Self { k, dtype }, converted))
    }

    /// Columns of the result.
    pub fn columns(&self) -> u32 {
        packed_rows::columns(self.k)
    }

    /// Number of scales of a row.
    pub fn groups(&self) -> u32 {
        packed_rows::groups(self.k)
    }
}

impl Kernel for QuantizeGroups {
    facts! { template: "quantize_groups", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!("quantize_groups_{}_k{}", self.dtype, self.k)
    }

    fn constants(&self) -> Constants {
        Constants::from([
            ("storage", self.dtype.name().into()),
            ("k", self.k.into()),
            ("columns", self.columns().into()),
            ("groups", self.groups().into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        packed_rows::params(
            self.k,
            self.dtype,
            Element::E4m3,
            group_scales_shape(self.k),
        )
    }

    /// Returns Hopper, because only kernels for Hopper read the result.
    fn instructions(&self) -> Instructions {
        Instructions::Hopper
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.k])?;
        let problem = GemmProblem {
            weight: Self::WEIGHT,
            ..GemmProblem::new(1, self.k, self.dtype, Epilogue::default())
        };
        match Self::of(&problem) {
            Some(_) => Ok(()),
            None => Err(format!(
                "rows of {} columns in {} that are converted to E4M3 in groups of {GROUP}; expected a multiple of {PACK} in f16 or bf16",
                self.k, self.dtype
            )),
        }
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let packs = extents.rows.saturating_mul((self.columns() / PACK).into());
        Launch::of_ctas(packs.div_ceil(STREAM_THREADS.into()), STREAM_THREADS, 0)
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        Some(packed_rows::cycles(self.k, rows, machine))
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (quantized, scales) = packed_rows::quantized_groups(reads[0].real(), self.k);
        vec![HostTensor::Real(quantized), HostTensor::Real(scales)]
    }

    fn cases(&self) -> Vec<Case> {
        Case::standard()
    }

    fn tolerance(&self) -> Tolerance {
        packed_rows::IN_E4M3
    }
}

/// Instances with whole and partial groups, and with rows that end inside a CTA.
pub(super) fn representative() -> Vec<KernelSpec> {
    let mut kernels = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for k in [8, 328, 768, 1024, 4096, 14_336] {
            kernels.push(QuantizeGroups { k, dtype }.into());
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_widths_and_f32_are_refused() {
        let refused = |k, dtype| QuantizeGroups { k, dtype }.validate().unwrap_err();
        assert_eq!(
            refused(36, DType::F16),
            "rows of 36 columns in f16 that are converted to E4M3 in groups of 128; expected a multiple of 8 in f16 or bf16"
        );
        assert!(refused(64, DType::F32).contains("in f32"));
    }
}
