//! Conversions to E4M3, and products of E4M3.

use gemmule_cpu::linear::{Finish, Linear};
use rayon::prelude::*;

use super::{OpError, Read, args::Args};
use crate::{
    kernels::{
        attention::MhaToE4m3,
        e4m3::{NormToE4m3, ToE4m3},
        gemm::GemmFp8,
    },
    ops::activate_f64,
    tensor::{Element, Extents},
};

pub(super) fn to_e4m3(spec: &ToE4m3, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (rows, width) = (args.extents.rows, u64::from(spec.width));
    let x = args.real("x", &[rows, width])?;
    let scale = args.real("out_scale", &[1])?[0];
    convert(x, scale, args.out(&[rows, width])?);
    Ok(())
}

/// Computes a norm, and converts its result.
pub(super) fn norm_to_e4m3(
    spec: &NormToE4m3,
    extents: &Extents,
    reads: &[Read<'_>],
    writes: &mut [&mut [f32]],
) -> Result<(), OpError> {
    let op = "norm_to_e4m3";
    let wrong = |expected, found| OpError::Writes {
        op,
        expected,
        found,
    };
    let (of_norm, scale) = reads.split_at(reads.len().saturating_sub(1));
    let scale = Args::new(op, extents, scale, &mut []).real("out_scale", &[1])?[0];
    match (spec.keeps, writes) {
        (true, [out, converted]) => {
            super::run(&spec.norm.spec(), extents, of_norm, &mut [&mut **out])?;
            Args::new(op, extents, &[], converted).out(&[out.len() as u64])?;
            convert(out, scale, converted);
        }
        (false, [converted]) => {
            super::run(&spec.norm.spec(), extents, of_norm, &mut [&mut **converted])?;
            let round = |v: &mut f32| *v = Element::E4m3.round(*v / scale);
            converted.par_iter_mut().for_each(round);
        }
        (_, writes) => {
            let expected = "the converted norm, or the norm and the converted one";
            return Err(wrong(expected, writes.len()));
        }
    }
    Ok(())
}

/// Computes attention, and converts its result.
pub(super) fn mha_to_e4m3(
    spec: &MhaToE4m3,
    extents: &Extents,
    reads: &[Read<'_>],
    out: &mut [f32],
) -> Result<(), OpError> {
    let (of_attention, scale) = reads.split_at(reads.len().saturating_sub(1));
    let scale = Args::new("mha_to_e4m3", extents, scale, &mut []).real("out_scale", &[1])?[0];
    let attention = spec.attention.clone().into();
    super::run(&attention, extents, of_attention, &mut [&mut *out])?;
    let round = |v: &mut f32| *v = Element::E4m3.round(*v / scale);
    out.par_iter_mut().for_each(round);
    Ok(())
}

fn convert(x: &[f32], scale: f32, out: &mut [f32]) {
    let round = |(out, &x): (&mut f32, &f32)| *out = Element::E4m3.round(x / scale);
    out.par_iter_mut().zip(x).for_each(round);
}

pub(super) fn gemm_fp8(spec: &GemmFp8, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let of = &spec.of;
    let rows = args.extents.rows;
    let (n, k) = (u64::from(of.n), u64::from(of.k));
    let weight_rows = u64::from(of.weight_rows());
    let x = args.real("x", &[rows, k])?;
    let weight = args.weight("weight", &[weight_rows, k])?;
    let scale = args.real("scale", &[weight_rows])?;
    let bias = match of.epilogue.bias {
        true => Some(args.real("bias", &[weight_rows])?),
        false => None,
    };
    let residual = match of.epilogue.residual {
        true => Some(args.real("residual", &[rows, n])?),
        false => None,
    };
    let out_scale = match spec.to_e4m3 {
        true => Some(args.real("out_scale", &[1])?[0]),
        false => None,
    };
    let op = args.op();
    let out = args.out(&[rows, n])?;
    if out.is_empty() {
        return Ok(());
    }
    let mut sums: Vec<f32> = Vec::new();
    let len = (rows * weight_rows) as usize;
    let bytes = (len * size_of::<f32>()) as u64;
    sums.try_reserve_exact(len)
        .map_err(|_| OpError::OutOfMemory { op, bytes })?;
    sums.resize(len, 0.0);
    let finish = Finish {
        bias: None,
        activation: None,
        residual: None,
    };
    let (n, weight_rows) = (n as usize, weight_rows as usize);
    let product = Linear {
        x,
        n: weight_rows,
        k: k as usize,
        finish,
    };
    product.run(weight, &mut sums);
    let rows = out.par_chunks_mut(n).zip(sums.par_chunks(weight_rows));
    rows.enumerate().for_each(|(row, (out, sums))| {
        let sum = |c: usize| {
            let bias = bias.map_or(0.0, |bias| f64::from(bias[c]));
            f64::from(sums[c]) * f64::from(scale[c]) + bias
        };
        for (c, out) in out.iter_mut().enumerate() {
            let activation = of.epilogue.activation;
            let activated = activation.map_or(sum(c), |a| activate_f64(a, sum(c)));
            let gate = if of.gated { sum(n + c) } else { 1.0 };
            let more = residual.map_or(0.0, |residual| f64::from(residual[row * n + c]));
            let result = activated * gate + more;
            *out = match out_scale {
                Some(scale) => Element::E4m3.round((result / f64::from(scale)) as f32),
                None => result as f32,
            };
        }
    });
    Ok(())
}
