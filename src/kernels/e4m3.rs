//! Kernels that convert the inputs of E4M3 matrix products to E4M3: a kernel that only converts, and norms and gates that also convert
//! their results.

use serde::{Deserialize, Serialize};

use super::{
    Class, Constants, Fill, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, Role,
    Tolerance,
    elementwise::Gate,
    layernorm::{BiasResidualLayerNorm, LayerNorm},
    limits,
    rms_norm::RmsNorm,
    rows::{
        STREAM_THREADS, count, read, rows_by, stream_constants, stream_launch, vector_width, write,
    },
};
use crate::{
    machine::Machine,
    ops::Activation,
    tensor::{DType, Element, Extents, Shape, Symbol, e4m3},
};

/// `x [rows, width]`, `out_scale [1]` → `out [rows, width]`: `x / out_scale` in E4M3.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ToE4m3 {
    pub width: u32,
    pub dtype: DType,
}

/// The inputs of a norm, and `out_scale [1]` → (`out [rows, width]`), `converted [rows, width]`: `out` is the norm's result, which is
/// written only if `keeps` is true. `converted` is the result divided by `out_scale`, in E4M3.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NormToE4m3 {
    pub norm: Norm,
    /// Whether the result is also stored in the norm's storage type.
    pub keeps: bool,
}

/// The number of columns of a norm or gate must be a multiple of this number, because E4M3 products require this of their operands.
const STEP: u32 = 16;

/// `x [rows, 2·width]`, `out_scale [1]` → `out [rows, width]`: the gate's result, divided by `out_scale`, in E4M3.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GateToE4m3 {
    pub gate: Gate,
}

/// A kernel that normalizes whole rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Norm {
    Layer(LayerNorm),
    Sum(BiasResidualLayerNorm),
    Rms(RmsNorm),
}

impl Norm {
    fn as_kernel(&self) -> &dyn Kernel {
        match self {
            Norm::Layer(norm) => norm,
            Norm::Sum(norm) => norm,
            Norm::Rms(norm) => norm,
        }
    }

    /// Returns the norm kernel without the conversion of the result to E4M3.
    pub fn spec(&self) -> KernelSpec {
        match self.clone() {
            Norm::Layer(norm) => norm.into(),
            Norm::Sum(norm) => norm.into(),
            Norm::Rms(norm) => norm.into(),
        }
    }

    fn width(&self) -> u32 {
        match self {
            Norm::Layer(norm) => norm.width,
            Norm::Sum(norm) => norm.width,
            Norm::Rms(norm) => norm.width,
        }
    }
}

/// The scale in checks. Values of standard deviation 1, divided by this scale, use most of the range of E4M3.
const OUT_SCALE: Fill = Fill::Normal {
    mean: 1.0 / 64.0,
    deviation: 0.0,
};

/// Tolerance of a result that is divided by [`OUT_SCALE`] and rounded to E4M3.
pub(super) const ROUNDED: Tolerance = Tolerance {
    absolute: 1.0 / 512.0,
    relative: 1.0 / 8.0,
    reason: "one step of E4M3 (2^-3), as a value near the middle of two may be rounded to either",
};

fn out_scale() -> Param {
    read("out_scale", DType::F32, Shape::fixed(&[1]), OUT_SCALE)
}

impl Kernel for ToE4m3 {
    facts! { template: "to_e4m3", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!("to_e4m3_{}_w{}", self.dtype, self.width)
    }

    fn constants(&self) -> Constants {
        let mut constants = stream_constants(self.dtype, vector_width(self.dtype, &[]));
        constants.insert("width", self.width.into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        let rows = rows_by(Symbol::Rows, self.width);
        vec![
            read("x", self.dtype, rows.clone(), Fill::ACTIVATION),
            out_scale(),
            write("out", Element::E4m3, rows),
            count(Symbol::Rows),
        ]
    }

    fn instructions(&self) -> Instructions {
        Instructions::Ada
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width])
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let elements = extents.rows * u64::from(self.width);
        stream_launch(elements.div_ceil(vector_width(self.dtype, &[]).into()))
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        // The kernel moves half as many bytes as a norm with a residual, in the same access pattern.
        let cost = &machine.costs.norm;
        let elements = rows as f64 * f64::from(self.width);
        Some(cost.launch + elements * cost.element * 0.5)
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [x, scale] = reads else {
            unreachable!("the parameter list has two operands")
        };
        vec![divided(x.real(), scale.real()[0])]
    }

    fn tolerance(&self) -> Tolerance {
        ROUNDED
    }
}

/// Returns the values divided by a scale and clamped to the range of E4M3.
fn divided(values: &[f32], scale: f32) -> HostTensor {
    let of = |&v: &f32| saturated((f64::from(v) / f64::from(scale)) as f32);
    HostTensor::Real(values.iter().map(of).collect())
}

/// Returns the parameters of a kernel that computes the result of `plain` in E4M3: the parameters of `plain`, with `out_scale` before the
/// result.
pub(super) fn params_in_e4m3(plain: &dyn Kernel) -> Vec<Param> {
    let mut params = Vec::new();
    for mut param in plain.params() {
        if let Role::Write { element, .. } = &mut param.role {
            *element = Element::E4m3;
            params.push(out_scale());
        }
        params.push(param);
    }
    params
}

/// Returns the result of `plain`, and this result divided by the scale, which is the last element of `reads`.
pub(super) fn reference_in_e4m3(
    plain: &dyn Kernel,
    extents: &Extents,
    reads: &[&HostTensor],
) -> [HostTensor; 2] {
    let Some((scale, reads)) = reads.split_last() else {
        unreachable!("the parameter list ends with the scale")
    };
    let out = plain.reference(extents, reads).remove(0);
    let converted = divided(out.real(), scale.real()[0]);
    [out, converted]
}

/// Returns the tolerance of the result of `plain` in E4M3. It is the tolerance of `plain` divided by the scale 1 / 64, plus the tolerance
/// of the rounding to E4M3.
pub(super) fn tolerance_in_e4m3(plain: &dyn Kernel) -> Tolerance {
    Tolerance {
        absolute: ROUNDED.absolute + 64.0 * plain.tolerance().absolute,
        ..ROUNDED
    }
}

/// Clamps `value` to the range of E4M3, without rounding it.
pub(super) fn saturated(value: f32) -> f32 {
    value.clamp(-e4m3::MAX, e4m3::MAX)
}

impl Kernel for NormToE4m3 {
    fn symbol(&self) -> String {
        let kept = if self.keeps { "_kept" } else { "" };
        format!("{}_to_e4m3{kept}", self.norm.as_kernel().symbol())
    }

    fn definition(&self) -> String {
        let kept = if self.keeps { "_kept" } else { "" };
        format!("{}_to_e4m3{kept}", self.norm.as_kernel().definition())
    }

    fn template(&self) -> &'static str {
        self.norm.as_kernel().template()
    }

    fn constants(&self) -> Constants {
        let mut constants = self.norm.as_kernel().constants();
        constants.insert("to_e4m3", true.into());
        constants.insert("keeps", self.keeps.into());
        if let Norm::Sum(norm) = &self.norm
            && norm.bias
            && norm.teams.warps == 1
        {
            // If the kernel writes two results, a thread needs more registers than the launch bounds of the norm alone allow on compute
            // capability 8.9. Request one CTA per SM less, to allow more registers.
            let ctas = norm.teams.min_ctas_per_sm(norm.width, norm.dtype);
            constants.insert("blocks", (ctas - 1).max(1).into());
        }
        constants
    }

    fn params(&self) -> Vec<Param> {
        let mut params = Vec::new();
        for param in self.norm.as_kernel().params() {
            let is_out = matches!(param.role, Role::Write { .. });
            if is_out {
                params.push(out_scale());
            }
            if self.keeps || !is_out {
                params.push(param);
            }
            if is_out {
                let rows = rows_by(Symbol::Rows, self.norm.width());
                params.push(write("converted", Element::E4m3, rows));
            }
        }
        params
    }

    fn instructions(&self) -> Instructions {
        Instructions::Ada
    }

    fn dtype(&self) -> Option<DType> {
        self.norm.as_kernel().dtype()
    }

    fn class(&self) -> Class {
        Class::LayerNorm
    }

    fn validate(&self) -> Result<(), String> {
        self.norm.as_kernel().validate()?;
        if !self.norm.width().is_multiple_of(STEP) {
            return Err(format!(
                "a norm of {} columns with results in E4M3; expected a multiple of {STEP}",
                self.norm.width()
            ));
        }
        match &self.norm {
            Norm::Rms(norm) if (norm.heads, norm.from, norm.stride) != (1, 0, norm.width) => {
                Err("an RMSNorm of parts of rows with results in E4M3".to_owned())
            }
            Norm::Layer(_) | Norm::Sum(_) | Norm::Rms(_) => Ok(()),
        }
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        self.norm.as_kernel().launch(extents, machine)
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        let norm = self.norm.as_kernel().cycles(rows, machine)?;
        let elements = rows as f64 * f64::from(self.norm.width());
        // A norm with a residual moves six bytes per element. The additional result adds one byte.
        Some(norm + elements * machine.costs.norm.element / 6.0)
    }

    fn max_rows(&self) -> Option<u64> {
        self.norm.as_kernel().max_rows()
    }

    fn threads(&self) -> u32 {
        self.norm.as_kernel().threads()
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [out, converted] = reference_in_e4m3(self.norm.as_kernel(), extents, reads);
        match self.keeps {
            true => vec![out, converted],
            false => vec![converted],
        }
    }

    fn tolerance(&self) -> Tolerance {
        // The result in the norm's storage type has a smaller error than the E4M3 result, but all results of a kernel share one bound.
        ROUNDED
    }
}

impl Kernel for GateToE4m3 {
    fn symbol(&self) -> String {
        format!("{}_to_e4m3", self.gate.symbol())
    }

    fn template(&self) -> &'static str {
        self.gate.template()
    }

    fn constants(&self) -> Constants {
        let mut constants = self.gate.constants();
        constants.insert("to_e4m3", true.into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        params_in_e4m3(&self.gate)
    }

    fn instructions(&self) -> Instructions {
        Instructions::Ada
    }

    fn dtype(&self) -> Option<DType> {
        self.gate.dtype()
    }

    fn class(&self) -> Class {
        self.gate.class()
    }

    fn validate(&self) -> Result<(), String> {
        self.gate.validate()?;
        match self.gate.width.is_multiple_of(STEP) {
            true => Ok(()),
            false => Err(format!(
                "a gate of {} columns with results in E4M3; expected a multiple of {STEP}",
                self.gate.width
            )),
        }
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        self.gate.launch(extents, machine)
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        // Use the gate's estimate: a result of one byte instead of two saves only one of the six bytes that the gate moves per element.
        self.gate.cycles(rows, machine)
    }

    fn threads(&self) -> u32 {
        self.gate.threads()
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [_, converted] = reference_in_e4m3(&self.gate, extents, reads);
        vec![converted]
    }

    fn tolerance(&self) -> Tolerance {
        tolerance_in_e4m3(&self.gate)
    }
}

/// Instances of each norm and of the gate at realistic and odd widths.
pub(super) fn representative() -> Vec<KernelSpec> {
    let mut kernels = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for width in [768, 1024, 336, 4096] {
            let eps = 1e-12;
            kernels.push(ToE4m3 { width, dtype }.into());
            let norms = [
                (Norm::Layer(LayerNorm::new(width, eps, dtype)), false),
                (Norm::Layer(LayerNorm::new(width, eps, dtype)), true),
                (
                    Norm::Sum(BiasResidualLayerNorm::new(width, eps, dtype, true)),
                    true,
                ),
                (
                    Norm::Sum(BiasResidualLayerNorm::new(width, eps, dtype, false)),
                    true,
                ),
                (Norm::Rms(RmsNorm::of_rows(width, 1e-6, dtype)), false),
                (Norm::Rms(RmsNorm::of_rows(width, 1e-6, dtype)), true),
            ];
            kernels.extend(norms.map(|(norm, keeps)| NormToE4m3 { norm, keeps }.into()));
        }
        kernels.push(ToE4m3 { width: 1003, dtype }.into());
        for (activation, width) in [(Activation::Silu, 336), (Activation::GeluTanh, 1152)] {
            let gate = Gate {
                activation,
                width,
                dtype,
            };
            kernels.push(GateToE4m3 { gate }.into());
        }
    }
    kernels
}
