//! Soft cap of logits, and of attention scores in memory. Fused attention kernels apply the soft cap themselves.

use serde::{Deserialize, Serialize};

use super::{flat_constants, flat_launch, unary, unary_params};
use crate::{
    kernels::{
        Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance, f32_literal,
        limits,
        rows::{STREAM_THREADS, rounded_once, word},
    },
    machine::Machine,
    ops,
    tensor::{DType, Extents},
};

/// `x [rows, width]` → `out [rows, width]`: `cap · tanh(x / cap)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SoftCap {
    pub cap: ops::SoftCap,
    pub width: u32,
    pub dtype: DType,
}

impl Kernel for SoftCap {
    facts! { template: "soft_cap", dtype: self.dtype }

    fn symbol(&self) -> String {
        let cap = word(self.cap.get());
        format!("soft_cap_{}_w{}_cap{cap}", self.dtype, self.width)
    }

    fn constants(&self) -> Constants {
        let mut constants = flat_constants(self.width, self.dtype);
        let inverse = (1.0 / f64::from(self.cap.get())) as f32;
        constants.insert("cap", f32_literal(self.cap.get()).into());
        constants.insert("inverse", f32_literal(inverse).into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        // With this deviation, some magnitudes are far below the cap, and others are above it.
        let fill = Fill::Normal {
            mean: 0.0,
            deviation: self.cap.get(),
        };
        unary_params(self.width, self.dtype, fill)
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width])
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        flat_launch(extents, self.width, self.dtype)
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        unary(reads, |x| self.cap.of(x))
    }

    fn tolerance(&self) -> Tolerance {
        let rounding = rounded_once(
            self.dtype,
            0.0,
            "two products and tanhf, which is off by at most two units in the last place, in f32, rounded to storage",
        );
        Tolerance {
            relative: rounding.relative + 6e-7,
            ..rounding
        }
    }
}

/// Instances with the caps of Gemma 2 and another cap, at even and odd widths. The width of attention scores is the number of heads.
pub(super) fn representative(dtype: DType) -> impl Iterator<Item = KernelSpec> {
    let all = [(30.0, 1024), (50.0, 5), (1.5, 1003)];
    all.into_iter().map(move |(cap, width)| {
        let cap = ops::SoftCap::new(cap).expect("it is in range");
        KernelSpec::from(SoftCap { cap, width, dtype })
    })
}
