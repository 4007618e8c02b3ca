//! Weights of a model in host memory. Each weight is stored in every form (packed or plain rows) that its kernels read.

use std::collections::HashMap;

use super::{
    super::{
        elements::decode_values,
        weights::{WeightSource, evaluate, evaluate_quantized, evaluate_scaled},
    },
    CpuError, Threads,
    ops::{MatmulPrecision, PackedWeight, Read},
};
use crate::{
    graph::WeightExpr,
    program::{Program, Storage},
    tensor::{DType, Element},
};

/// One weight. If only linear layers read the weight, only its packed form is stored.
#[derive(Default)]
struct Held {
    rows: Vec<f32>,
    packed: Option<PackedWeight>,
}

/// All weights of a program. Weights with equal expressions and formats are stored once.
pub(super) struct Weights {
    held: Vec<Held>,
    /// Index in `held` for each tensor of the program; 0, the index of an empty entry, if the tensor is not a weight.
    at: Vec<usize>,
}

/// How the kernels of the program use a weight.
#[derive(Clone, Copy, Default)]
struct Readers {
    /// Rows and columns, if a linear layer multiplies by the weight.
    multiplied: Option<[u32; 2]>,
    otherwise: bool,
}

impl Weights {
    /// Reads and packs the weights of `program`. `progress` receives the number of finished tensors and the total.
    ///
    /// # Errors
    /// Returns the errors of [`WeightSource::read`], and an error for a weight in a format that this CPU does not compute
    /// with.
    pub fn load(
        program: &Program,
        threads: &Threads,
        source: &dyn WeightSource,
        progress: &dyn Fn(usize, usize),
    ) -> Result<Self, CpuError> {
        let mut places: HashMap<(&WeightExpr, Element), usize> = HashMap::new();
        let mut at = vec![0; program.tensors.len()];
        for (tensor, at) in program.tensors.iter().zip(&mut at) {
            if let Storage::Weight(expr) = &tensor.place {
                let next = places.len() + 1;
                *at = *places.entry((expr, tensor.element)).or_insert(next);
            }
        }
        let mut readers = vec![Readers::default(); places.len() + 1];
        for step in &program.steps {
            for kernel in step.dispatch.choices() {
                let kernel = program.kernels[*kernel].as_kernel();
                let weight = kernel.weight_operand().zip(kernel.weight());
                for (operand, &tensor) in step.operands.iter().enumerate() {
                    let readers = &mut readers[at[tensor]];
                    match weight {
                        Some((index, shape)) if index == operand => {
                            readers.multiplied = Some(shape);
                        }
                        _ => readers.otherwise = true,
                    }
                }
            }
        }
        let mut held: Vec<Held> = readers.iter().map(|_| Held::default()).collect();
        let n_tensors = program.tensors.len();
        for (done, (tensor, &at)) in program.tensors.iter().zip(&at).enumerate() {
            if let Storage::Weight(expr) = &tensor.place
                && places.remove(&(expr, tensor.element)).is_some()
            {
                let rows = match tensor.element {
                    Element::E4m3 => {
                        let rows = evaluate_scaled(expr, source)?;
                        decode_values(&rows.into_codes(), tensor.element)
                    }
                    Element::Scaled(scaled)
                        if precision(tensor.element)? == MatmulPrecision::F32 =>
                    {
                        evaluate_quantized(expr, source, scaled)?.values()
                    }
                    Element::Value(_)
                    | Element::Scaled(_)
                    | Element::I8
                    | Element::I32
                    | Element::I64 => evaluate(expr, source)?,
                };
                let readers = readers[at];
                if let Some([n, k]) = readers.multiplied {
                    let precision = precision(tensor.element)?;
                    let pack = || PackedWeight::new(&rows, n as usize, k as usize, precision);
                    held[at].packed = Some(threads.run(pack));
                }
                if readers.otherwise {
                    held[at].rows = rows;
                }
            }
            progress(done + 1, n_tensors);
        }
        Ok(Self { held, at })
    }

    /// Returns a weight: the packed form if `multiplied` and if this form is stored, and otherwise the unpacked form.
    pub fn read(&self, tensor: usize, multiplied: bool) -> Read<'_> {
        let held = &self.held[self.at[tensor]];
        match &held.packed {
            Some(packed) if multiplied => Read::Packed(packed),
            _ => Read::Real(&held.rows),
        }
    }

    /// Total bytes of all packed and unpacked weights.
    pub fn bytes(&self) -> u64 {
        let bytes = |held: &Held| {
            size_of_val(held.rows.as_slice()) as u64
                + held.packed.as_ref().map_or(0, PackedWeight::bytes)
        };
        self.held.iter().map(bytes).sum()
    }
}

/// Returns the precision in which products with a weight in this format are computed.
pub(super) fn precision(element: Element) -> Result<MatmulPrecision, CpuError> {
    let precision = match element {
        Element::Value(DType::F32) | Element::E4m3 => MatmulPrecision::F32,
        Element::Value(DType::BF16) => MatmulPrecision::Bf16,
        Element::Scaled(scaled) => match scaled.is_multiplied_as_integers() {
            true => MatmulPrecision::Int8,
            // The weight is rounded to the format, and the product is computed in f32.
            false => MatmulPrecision::F32,
        },
        Element::Value(DType::F16) | Element::I8 | Element::I32 | Element::I64 => {
            return Err(CpuError::WeightFormat(element));
        }
    };
    match precision.is_supported() {
        true => Ok(precision),
        false => Err(CpuError::MatmulPrecision(precision)),
    }
}
