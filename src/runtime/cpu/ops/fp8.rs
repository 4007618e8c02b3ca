//! Conversions to E4M3 and int8, and matrix products of values in E4M3.

use gemmule_cpu::linear::{Finish, Linear};
use rayon::prelude::*;

use super::{
    Call, CpuForm, OpError, Read,
    args::{Args, zeros},
    forms,
};
use crate::{
    kernels::{
        attention::MhaToE4m3,
        e4m3::{GateToE4m3, NormToE4m3, ToE4m3},
        gemm::{GemmProblem, QuantizeGroups, QuantizeRows, quantized, quantized_groups},
    },
    tensor::Element,
};

forms! {
    ToE4m3 => to_e4m3;
}

fn to_e4m3(spec: &ToE4m3, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (rows, width) = (args.extents.rows, u64::from(spec.width));
    let x = args.real("x", &[rows, width])?;
    let scale = args.real("out_scale", &[1])?[0];
    let out = args.out(&[rows, width])?;
    out.copy_from_slice(x);
    convert(out, scale);
    Ok(())
}

/// Computes a norm, and converts its result to E4M3.
impl CpuForm for NormToE4m3 {
    fn run(&self, mut call: Call<'_, '_, '_>) -> Result<(), OpError> {
        call.op = "norm_to_e4m3";
        let (of_norm, scale) = split_scale(&call)?;
        let norm = self.norm.spec();
        match (self.keeps, &mut *call.writes) {
            (true, [out, converted]) => {
                super::run(&norm, call.extents, of_norm, &mut [&mut **out])?;
                Args::new(call.op, call.extents, &[], converted).out(&[out.len() as u64])?;
                converted.copy_from_slice(out);
                convert(converted, scale);
            }
            (false, [converted]) => {
                super::run(&norm, call.extents, of_norm, &mut [&mut **converted])?;
                convert(converted, scale);
            }
            (_, writes) => {
                let expected = "the converted norm, or the norm and the converted one";
                let found = writes.len();
                return Err(call.wrong_outputs(expected, found));
            }
        }
        Ok(())
    }
}

/// Computes attention, and converts its result to E4M3.
impl CpuForm for MhaToE4m3 {
    fn run(&self, mut call: Call<'_, '_, '_>) -> Result<(), OpError> {
        call.op = "mha_to_e4m3";
        let [out] = call.outputs()?;
        let (of_attention, scale) = split_scale(&call)?;
        let attention = self.attention.spec();
        super::run(&attention, call.extents, of_attention, &mut [&mut **out])?;
        convert(out, scale);
        Ok(())
    }
}

/// Converts rows to E4M3 or int8, with a scale for each row.
impl CpuForm for QuantizeRows {
    fn run(&self, mut call: Call<'_, '_, '_>) -> Result<(), OpError> {
        call.op = "quantize_rows";
        let shape = [self.columns().into(), self.to.scales()];
        quantize(call, self.k, shape, self.to.element(), |x| {
            quantized(x, self.k, self.to)
        })
    }
}

/// Converts rows to E4M3, with a scale for each group of columns.
impl CpuForm for QuantizeGroups {
    fn run(&self, mut call: Call<'_, '_, '_>) -> Result<(), OpError> {
        call.op = "quantize_groups";
        let shape = [self.columns().into(), self.groups().into()];
        quantize(call, self.k, shape, Element::E4m3, |x| {
            quantized_groups(x, self.k)
        })
    }
}

/// Converts each row of `k` elements to `columns` elements of type `to` and `scales` scales. `quantized` takes all rows, and returns the
/// elements of all rows and the scales of all rows.
fn quantize(
    mut call: Call<'_, '_, '_>,
    k: u32,
    [columns, scales]: [u64; 2],
    to: Element,
    quantized: impl FnOnce(&[f32]) -> (Vec<f32>, Vec<f32>),
) -> Result<(), OpError> {
    let rows = call.extents.rows;
    let [out, row_scale] = call.outputs()?;
    let mut args = call.args(out);
    let x = args.real("x", &[rows, k.into()])?;
    args.check_shape("row_scale", &[rows, scales], row_scale.len())?;
    let out = args.out(&[rows, columns])?;
    let (values, of_rows) = quantized(x);
    let round = |(out, value): (&mut f32, f32)| *out = to.round(value);
    out.par_iter_mut().zip(values).for_each(round);
    row_scale.copy_from_slice(&of_rows);
    Ok(())
}

/// Computes a gate, and converts its result to E4M3.
impl CpuForm for GateToE4m3 {
    fn run(&self, mut call: Call<'_, '_, '_>) -> Result<(), OpError> {
        call.op = "gate_to_e4m3";
        let [out] = call.outputs()?;
        let (of_gate, scale) = split_scale(&call)?;
        let gate = self.gate.clone().into();
        super::run(&gate, call.extents, of_gate, &mut [&mut **out])?;
        convert(out, scale);
        Ok(())
    }
}

/// Splits off the scale of the result, which is the last tensor that the kernel reads. Returns the other tensors and the scale.
fn split_scale<'r>(call: &Call<'r, '_, '_>) -> Result<(&'r [Read<'r>], f32), OpError> {
    let (reads, scale) = call.reads.split_at(call.reads.len().saturating_sub(1));
    let scale = Args::new(call.op, call.extents, scale, &mut []).real("out_scale", &[1])?[0];
    Ok((reads, scale))
}

/// Divides values by `scale` and rounds them to E4M3.
fn convert(values: &mut [f32], scale: f32) {
    let round = |v: &mut f32| *v = Element::E4m3.round(*v / scale);
    values.par_iter_mut().for_each(round);
}

/// Computes a GEMM whose operands are in E4M3.
pub(super) fn gemm(of: &GemmProblem, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let rows = args.extents.rows;
    let (n, k) = (u64::from(of.n), u64::from(of.k));
    let weight_rows = u64::from(of.weight_rows());
    let x = args.real("x", &[rows, k])?;
    let weight = args.weight("weight", &[weight_rows, k])?;
    let mut more = vec![args.real("scale", &[weight_rows])?];
    if of.epilogue.bias {
        more.push(args.real("bias", &[weight_rows])?);
    }
    if of.epilogue.residual {
        more.push(args.real("residual", &[rows, n])?);
    }
    if of.to_e4m3 {
        more.push(args.real("out_scale", &[1])?);
    }
    let op = args.op();
    let out = args.out(&[rows, n])?;
    if out.is_empty() {
        return Ok(());
    }
    let mut sums = zeros(op, (rows * weight_rows) as usize)?;
    let finish = Finish {
        bias: None,
        activation: None,
        residual: None,
    };
    let product = Linear {
        x,
        n: weight_rows as usize,
        k: k as usize,
        finish,
    };
    product.run(weight, &mut sums);
    of.finish(&sums, &more, out);
    if of.to_e4m3 {
        convert(out, 1.0);
    }
    Ok(())
}
