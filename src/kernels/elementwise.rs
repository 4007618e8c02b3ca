//! Pointwise kernels, which run between GEMMs if fusion is off. The submodules `copies` and `concat` have kernels that only move elements.

mod concat;
mod copies;
mod gate;
mod soft_cap;

use serde::{Deserialize, Serialize};

pub use concat::Concat;
pub use copies::{MergeHeads, SliceColumns, SplitHeads};
pub use gate::Gate;
pub use soft_cap::SoftCap;

use super::{
    Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance, f32_literal,
    rows::{
        STREAM_THREADS, count, read, rounded_once, rows_by, stream_constants, stream_launch,
        vector_width, word, write,
    },
};
use crate::{
    kernels::limits,
    machine::Machine,
    ops::{Activation, activate_f64},
    tensor::{DType, Extents, Shape, Symbol},
};

/// `x [rows, width]`, `bias [width]` → `out [rows, width]`: `x + bias`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AddBias {
    pub width: u32,
    pub dtype: DType,
}

/// `a, b [rows, width]` → `out [rows, width]`: combines two tensors element by element.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Combine {
    pub how: BinaryOp,
    pub width: u32,
    pub dtype: DType,
}

/// Operation that combines two elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum BinaryOp {
    Sum,
    Product,
}

impl BinaryOp {
    /// Name of the kernel.
    pub const fn name(self) -> &'static str {
        match self {
            BinaryOp::Sum => "add",
            BinaryOp::Product => "multiply",
        }
    }
}

/// `x [rows, width]` → `out [rows, width]`: the activation of each element.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Activate {
    pub activation: Activation,
    pub width: u32,
    pub dtype: DType,
}

/// `x [rows, width]` → `out [rows, width]`: `by · x`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scale {
    pub by: f32,
    pub width: u32,
    pub dtype: DType,
}

/// Returns the number of elements per access in kernels that read a tensor as one flat array. The width of the tensor does not matter. A
/// remainder shorter than an access is processed element by element.
fn stream_vector(dtype: DType) -> u32 {
    vector_width(dtype, &[])
}

/// Returns a launch over `rows · width` elements as a flat array.
fn flat_launch(extents: &Extents, width: u32, dtype: DType) -> Launch {
    let elements = extents.rows * u64::from(width);
    stream_launch(elements.div_ceil(stream_vector(dtype).into()))
}

/// Constants of a template that reads a flat array.
fn flat_constants(width: u32, dtype: DType) -> Constants {
    let mut constants = stream_constants(dtype, stream_vector(dtype));
    constants.insert("width", width.into());
    constants
}

impl Kernel for AddBias {
    facts! { template: "add_bias", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!("add_bias_{}_w{}", self.dtype, self.width)
    }

    fn constants(&self) -> Constants {
        let mut constants = stream_constants(self.dtype, vector_width(self.dtype, &[self.width]));
        constants.insert("width", self.width.into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        let rows = rows_by(Symbol::Rows, self.width);
        let width = Shape::fixed(&[self.width.into()]);
        vec![
            read("x", self.dtype, rows.clone(), Fill::ACTIVATION),
            read("bias", self.dtype, width, Fill::ACTIVATION),
            write("out", self.dtype, rows),
            count(Symbol::Rows),
        ]
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width])
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let packs = self.width / vector_width(self.dtype, &[self.width]);
        stream_launch(extents.rows * u64::from(packs))
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [x, bias] = reads else {
            unreachable!("the parameter list has two operands")
        };
        let bias = bias.real().iter().cycle();
        let sums = x.real().iter().zip(bias).map(|(&x, &b)| sum(x, b));
        vec![HostTensor::Real(sums.collect())]
    }

    fn tolerance(&self) -> Tolerance {
        rounded_once(self.dtype, 0.0, ONE_OPERATION)
    }
}

impl Kernel for Combine {
    facts! { template: "combine", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!("{}_{}_w{}", self.how.name(), self.dtype, self.width)
    }

    fn constants(&self) -> Constants {
        let mut constants = flat_constants(self.width, self.dtype);
        let operator = match self.how {
            BinaryOp::Sum => "+",
            BinaryOp::Product => "*",
        };
        constants.insert("operator", operator.into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        let rows = rows_by(Symbol::Rows, self.width);
        vec![
            read("a", self.dtype, rows.clone(), Fill::ACTIVATION),
            read("b", self.dtype, rows.clone(), Fill::ACTIVATION),
            write("out", self.dtype, rows),
            count(Symbol::Rows),
        ]
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width])
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        flat_launch(extents, self.width, self.dtype)
    }

    /// Estimates the cycles from the number of elements, with the cost constants of LayerNorm with a residual. Like this kernel, LayerNorm
    /// with a residual reads two values per element and writes one.
    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        let cost = &machine.costs.norm;
        let elements = rows as f64 * f64::from(self.width);
        Some(cost.launch_of(rows) + elements * cost.element)
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [a, b] = reads else {
            unreachable!("the parameter list has two operands")
        };
        let of = |(&a, &b): (&f32, &f32)| match self.how {
            BinaryOp::Sum => sum(a, b),
            BinaryOp::Product => (f64::from(a) * f64::from(b)) as f32,
        };
        vec![HostTensor::Real(
            a.real().iter().zip(b.real()).map(of).collect(),
        )]
    }

    fn tolerance(&self) -> Tolerance {
        rounded_once(self.dtype, 0.0, ONE_OPERATION)
    }
}

/// Returns the parameters of an elementwise function: `x [rows, width]` → `out [rows, width]`.
fn unary_params(width: u32, dtype: DType, fill: Fill) -> Vec<Param> {
    let rows = rows_by(Symbol::Rows, width);
    vec![
        read("x", dtype, rows.clone(), fill),
        write("out", dtype, rows),
        count(Symbol::Rows),
    ]
}

/// Returns `f` of each element of the only operand.
fn unary(reads: &[&HostTensor], f: impl Fn(f64) -> f64) -> Vec<HostTensor> {
    let [x] = reads else {
        unreachable!("the parameter list has one operand")
    };
    let of = |&x: &f32| f(x.into()) as f32;
    vec![HostTensor::Real(x.real().iter().map(of).collect())]
}

impl Kernel for Activate {
    facts! { template: "activate", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!("{}_{}_w{}", self.activation.name(), self.dtype, self.width)
    }

    fn constants(&self) -> Constants {
        let mut constants = flat_constants(self.width, self.dtype);
        constants.insert("activation", self.activation.function().into());
        constants.insert("precise", (self.dtype == DType::F32).into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        // The standard deviation is large enough for inputs to reach both tails of the activation.
        let fill = Fill::Normal {
            mean: 0.0,
            deviation: 3.0,
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
        unary(reads, |x| activate_f64(self.activation, x))
    }

    fn tolerance(&self) -> Tolerance {
        match self.dtype {
            DType::F32 => Tolerance {
                absolute: 2e-6,
                relative: 1e-6,
                reason: "erff and tanhf are off by at most two units in the last place, which the \
                         factor x of a GELU's tail, where 1 + erf cancels, multiplies",
            },
            dtype => {
                let rounding = rounded_once(
                    dtype,
                    self.activation.error_at_zero(),
                    "the short forms for 16-bit results are off by at most 2^-11 of the result, or \
                     of 2^-6 where a GELU is smaller, which is then rounded to storage",
                );
                Tolerance {
                    relative: rounding.relative + 4.9e-4,
                    ..rounding
                }
            }
        }
    }
}

impl Kernel for Scale {
    facts! { template: "scale", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!("scale_{}_w{}_by{}", self.dtype, self.width, word(self.by))
    }

    fn constants(&self) -> Constants {
        let mut constants = flat_constants(self.width, self.dtype);
        constants.insert("by", f32_literal(self.by).into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        unary_params(self.width, self.dtype, Fill::ACTIVATION)
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width])?;
        limits::real("the scale", self.by)
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        flat_launch(extents, self.width, self.dtype)
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        unary(reads, |x| x * f64::from(self.by))
    }

    fn tolerance(&self) -> Tolerance {
        rounded_once(self.dtype, 0.0, ONE_OPERATION)
    }
}

fn sum(a: f32, b: f32) -> f32 {
    (f64::from(a) + f64::from(b)) as f32
}

const ONE_OPERATION: &str = "one f32 operation, rounded to storage";

/// Instances for the device check and the compile tests, including copies.
pub fn representative() -> Vec<KernelSpec> {
    let mut kernels = copies::representative();
    kernels.extend(concat::representative());
    kernels.extend(gate::representative());
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for width in [768, 384, 320, 1024, 1003, 128, 4096] {
            kernels.push(KernelSpec::from(AddBias { width, dtype }));
            for how in [BinaryOp::Sum, BinaryOp::Product] {
                kernels.push(KernelSpec::from(Combine { how, width, dtype }));
            }
        }
        for width in [3072, 1000, 1003] {
            for activation in Activation::ALL {
                kernels.push(KernelSpec::from(Activate {
                    activation,
                    width,
                    dtype,
                }));
            }
        }
        // Widths of 12 and 5 are numbers of heads: the kernel may also scale attention scores.
        for (by, width) in [(0.125, 12), (0.176_776_7, 5), (-2.0, 768), (1.5, 1003)] {
            kernels.push(KernelSpec::from(Scale { by, width, dtype }));
        }
        kernels.extend(soft_cap::representative(dtype));
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    const F32: DType = DType::F32;

    fn real(values: &[f32]) -> HostTensor {
        HostTensor::Real(values.to_vec())
    }

    #[test]
    fn pointwise_references_match_examples_worked_by_hand() {
        let extents = Extents::of(&[2]).unwrap();
        let x = real(&[1.0, -2.0, 3.0, 0.0]);
        let add_bias = AddBias {
            width: 2,
            dtype: F32,
        };
        let out = add_bias.reference(&extents, &[&x, &real(&[10.0, 20.0])]);
        assert_eq!(out[0], real(&[11.0, 18.0, 13.0, 20.0]));
        let add = Combine {
            how: BinaryOp::Sum,
            width: 2,
            dtype: F32,
        };
        let out = add.reference(&extents, &[&x, &real(&[0.5, 2.0, 0.0, -1.0])]);
        assert_eq!(out[0], real(&[1.5, 0.0, 3.0, -1.0]));
        let scale = Scale {
            by: -0.5,
            width: 2,
            dtype: F32,
        };
        assert_eq!(
            scale.reference(&extents, &[&x])[0],
            real(&[-0.5, 1.0, -1.5, 0.0])
        );
        let relu = Activate {
            activation: Activation::Relu,
            width: 2,
            dtype: F32,
        };
        assert_eq!(
            relu.reference(&extents, &[&x])[0],
            real(&[1.0, 0.0, 3.0, 0.0])
        );
        let gelu = Activate {
            activation: Activation::GeluExact,
            width: 2,
            dtype: F32,
        };
        let out = gelu.reference(&extents, &[&x]);
        let want = [0.841_344_7, -0.045_500_26, 2.995_950_3, 0.0]; // x·Φ(x), Φ from tables
        for (got, want) in out[0].real().iter().zip(want) {
            assert!((got - want).abs() < 1e-6, "{got} {want}");
        }
    }

    #[test]
    fn a_thread_has_one_access_whether_or_not_the_width_is_aligned() {
        let extents = Extents::of(&[3]).unwrap();
        let threads = |launch: Launch| u64::from(launch.grid[0]) * u64::from(launch.threads);
        let dtype = DType::F16;
        // 3 · 1003 elements take 377 accesses of 8 elements. `AddBias` processes rows instead of a flat array, so with an odd width, each
        // access has only one element.
        assert_eq!(
            threads(
                Combine {
                    how: BinaryOp::Sum,
                    width: 1003,
                    dtype
                }
                .launch(&extents, &crate::machine::testing::hopper())
            ),
            512
        );
        assert_eq!(
            threads(
                AddBias { width: 1003, dtype }.launch(&extents, &crate::machine::testing::hopper())
            ),
            3072
        );
        assert_eq!(
            threads(
                AddBias { width: 768, dtype }.launch(&extents, &crate::machine::testing::hopper())
            ),
            512
        );
    }

    #[test]
    fn activations_of_16_bit_results_use_the_short_forms() {
        let precise = |dtype| {
            let activation = Activation::GeluExact;
            let kernel = Activate {
                activation,
                width: 8,
                dtype,
            };
            kernel.constants()["precise"].clone()
        };
        assert_eq!(precise(DType::F32), true.into());
        assert_eq!(precise(DType::BF16), false.into());
    }
}
