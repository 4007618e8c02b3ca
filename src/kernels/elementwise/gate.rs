//! Gate of a feed-forward network (GLU variants: Shazeer 2020).

use serde::{Deserialize, Serialize};

use crate::{
    kernels::{
        Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance, limits,
        rows::{
            STREAM_THREADS, count, read, rounded_once, rows_by, stream_constants, stream_launch,
            vector_width, write,
        },
    },
    machine::Machine,
    ops::{Activation, activate_f64},
    tensor::{DType, Extents, Symbol},
};

/// `x [rows, 2·width]` → `out [rows, width]`: the activation of the first half of a row's columns, times the second half.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Gate {
    pub activation: Activation,
    /// Columns of the result.
    pub width: u32,
    pub dtype: DType,
}

impl Gate {
    fn vector(&self) -> u32 {
        vector_width(self.dtype, &[self.width])
    }
}

impl Kernel for Gate {
    facts! { template: "gate", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!(
            "{}_gate_{}_w{}",
            self.activation.name(),
            self.dtype,
            self.width
        )
    }

    fn constants(&self) -> Constants {
        let mut constants = stream_constants(self.dtype, self.vector());
        constants.extend([
            ("width", self.width.into()),
            ("activation", self.activation.function().into()),
            ("precise", (self.dtype == DType::F32).into()),
            ("to_e4m3", false.into()),
        ]);
        constants
    }

    fn params(&self) -> Vec<Param> {
        let rows = |width| rows_by(Symbol::Rows, width);
        vec![
            read("x", self.dtype, rows(2 * self.width), Fill::ACTIVATION),
            write("out", self.dtype, rows(self.width)),
            count(Symbol::Rows),
        ]
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width.saturating_mul(2)])
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let packs = self.width / self.vector();
        stream_launch(extents.rows.saturating_mul(packs.into()))
    }

    /// Estimates the cycles from the number of elements, with 1.5 times the cost per element of LayerNorm with a residual.
    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        let cost = &machine.costs.norm;
        let elements = rows as f64 * f64::from(self.width);
        Some(cost.launch_of(rows) + 1.5 * elements * cost.element)
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [x] = reads else {
            unreachable!("the parameter list has one operand")
        };
        let width = self.width as usize;
        let row = |row: &[f32]| {
            let (gate, up) = row.split_at(width);
            let of = |(&g, &u): (&f32, &f32)| {
                (activate_f64(self.activation, g.into()) * f64::from(u)) as f32
            };
            gate.iter().zip(up).map(of).collect::<Vec<_>>()
        };
        let rows = x.real().chunks_exact(2 * width);
        vec![HostTensor::Real(rows.flat_map(row).collect())]
    }

    fn tolerance(&self) -> Tolerance {
        // With this fill of `x`, activations are multiplied by factors below 6.
        let of_activation = match self.dtype {
            DType::F32 => 2e-6,
            DType::F16 | DType::BF16 => self.activation.error_at_zero(),
        };
        let rounding = rounded_once(
            self.dtype,
            6.0 * of_activation,
            "the error of an activation (`Activate`) times a number below 6, rounded to storage",
        );
        let relative = match self.dtype {
            DType::F32 => 1e-6,
            DType::F16 | DType::BF16 => 4.9e-4,
        };
        Tolerance {
            relative: rounding.relative + relative,
            ..rounding
        }
    }
}

/// Instances with realistic widths, a width whose rows start only at multiples of 8 bytes, and an odd width.
pub(super) fn representative() -> Vec<KernelSpec> {
    let mut kernels = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for width in [3072, 1004, 1003] {
            for activation in Activation::ALL {
                kernels.push(KernelSpec::from(Gate {
                    activation,
                    width,
                    dtype,
                }));
            }
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_half_is_activated_and_multiplies_the_second() {
        let kernel = Gate {
            activation: Activation::Relu,
            width: 2,
            dtype: DType::F32,
        };
        let x = HostTensor::Real(vec![1.0, -2.0, 3.0, 4.0, 5.0, 6.0, -7.0, 0.5]);
        let extents = Extents::of(&[2]).expect("a batch");
        let out = kernel.reference(&extents, &[&x]);
        assert_eq!(out, [HostTensor::Real(vec![3.0, 0.0, -35.0, 3.0])]);
    }
}
