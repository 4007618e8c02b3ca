//! GEMMs `act(x · weightᵀ + bias) + residual` and their fused variants.

use gemmule_cpu::linear::{Finish, Linear, Weight};

use super::args::{Args, zeros};
use super::{OpError, Read, fp8, rows};
use crate::kernels::gemm::{
    DeferredLayerNormGemm, GemmProblem, GemmResidualNorm, GemmResidualRowStats, GemmStream,
    StreamNorm, normalised, scaled_and_row_stats, stream_normals, stream_scaled,
};

/// Computes a problem, including its gate and epilogue.
pub(super) fn gemm(problem: &GemmProblem, mut args: Args<'_, '_>) -> Result<(), OpError> {
    if problem.is_fp8() {
        return fp8::gemm(problem, args);
    }
    let (op, extents) = (args.op(), args.extents);
    let (rows, n, k) = (extents.rows, u64::from(problem.n), u64::from(problem.k));
    let Some(gate) = problem.gate() else {
        return product(problem, args);
    };
    let plain = problem.before_gate();
    let x = args.real("x", &[rows, k])?;
    let mut of_product = vec![
        Read::Real(x),
        args.weight("weight", &[plain.n.into(), k])?.into(),
    ];
    if plain.epilogue.bias {
        of_product.push(Read::Real(args.real("bias", &[plain.n.into()])?));
    }
    let out = args.out(&[rows, n])?;
    let mut products = zeros(op, 2 * out.len())?;
    product(&plain, Args::new(op, extents, &of_product, &mut products))?;
    rows::gate(&gate, Args::new(op, extents, &[Read::Real(&products)], out))
}

/// Computes a problem without a gate.
fn product(spec: &GemmProblem, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (rows, n, k) = (args.extents.rows, u64::from(spec.n), u64::from(spec.k));
    let x = args.real("x", &[rows, k])?;
    let weight = args.weight("weight", &[n, k])?;
    let bias = if spec.epilogue.bias {
        Some(args.real("bias", &[n])?)
    } else {
        None
    };
    let residual = match spec.epilogue.residual {
        true => Some(args.real("residual", &[rows, n])?),
        false => None,
    };
    let out = args.out(&[rows, n])?;
    if out.is_empty() {
        return Ok(());
    }
    let finish = Finish {
        bias,
        activation: spec.epilogue.activation.map(Into::into),
        residual,
    };
    let (n, k) = (n as usize, k as usize);
    Linear { x, n, k, finish }.run(weight, out);
    Ok(())
}

/// Computes the products plus bias and residual, and then the norm of this sum.
pub(super) fn gemm_residual_norm(
    spec: &GemmResidualNorm,
    extents: &crate::tensor::Extents,
    reads: &[Read<'_>],
    writes: &mut [&mut [f32]],
) -> Result<(), OpError> {
    let (product, norm) = spec.unfused();
    let mut own;
    let (sum, out): (&mut [f32], _) = match (spec.keeps_sum, writes) {
        (true, [sum, out]) => (sum, out),
        (false, [out]) => {
            own = zeros("gemm_residual_norm", out.len())?;
            (&mut own, out)
        }
        (_, writes) => {
            return Err(OpError::Writes {
                op: "gemm_residual_norm",
                expected: "one tensor, or two with the sum",
                found: writes.len(),
            });
        }
    };
    let (of_sum, of_norm) = reads.split_at(spec.of_sum().min(reads.len()));
    super::run(&product.into(), extents, of_sum, &mut [&mut *sum])?;
    let rows = [Read::Real(sum)];
    let reads: Vec<Read<'_>> = rows.iter().chain(of_norm).copied().collect();
    super::run(&norm, extents, &reads, &mut [&mut **out])
}

/// Computes a GEMM, adds bias and residual, and computes the row statistics that LayerNorm needs.
pub(super) fn gemm_residual_row_stats(
    spec: &GemmResidualRowStats,
    mut args: Args<'_, '_>,
    row_stats: &mut [f32],
) -> Result<(), OpError> {
    let (op, extents) = (args.op(), args.extents);
    let (rows, n, k) = (extents.rows, u64::from(spec.n), u64::from(spec.k));
    let x = args.real("x", &[rows, k])?;
    let weight = args.weight("weight", &[n, k])?;
    let bias = match spec.bias {
        true => Some(args.real("bias", &[n])?),
        false => None,
    };
    let residual = args.real("residual", &[rows, n])?;
    let gamma = args.real("gamma", &[n])?;
    args.check_shape(
        "row_stats",
        &[rows, GemmResidualRowStats::stats_of(spec.n)],
        row_stats.len(),
    )?;
    let scaled = args.out(&[rows, n])?;
    let reads = [Read::Real(x), weight.into()];
    let product = spec.unfused().0;
    gemm(&product.problem, Args::new(op, extents, &reads, scaled))?;
    let (of_rows, of_stats) = scaled_and_row_stats(scaled, bias, residual, gamma);
    scaled.copy_from_slice(&of_rows);
    row_stats.copy_from_slice(&of_stats);
    Ok(())
}

/// Applies LayerNorm with given row statistics, and then a GEMM to the result.
pub(super) fn deferred_layer_norm_gemm(
    spec: &DeferredLayerNormGemm,
    mut args: Args<'_, '_>,
    normal: &mut [f32],
) -> Result<(), OpError> {
    let (op, extents) = (args.op(), args.extents);
    let (rows, n, k) = (extents.rows, u64::from(spec.n), u64::from(spec.k));
    let scaled = args.real("scaled", &[rows, k])?;
    let row_stats = args.real("row_stats", &[rows, GemmResidualRowStats::stats_of(spec.k)])?;
    let gamma = args.real("gamma", &[k])?;
    let beta = args.real("beta", &[k])?;
    let mut of_gemm = vec![args.weight("weight", &[n, k])?.into()];
    if spec.epilogue.bias {
        of_gemm.push(Read::Real(args.real("bias", &[n])?));
    }
    args.check_shape("normal", &[rows, k], normal.len())?;
    let out = args.out(&[rows, n])?;
    normal.copy_from_slice(&normalised(scaled, row_stats, gamma, beta, spec.eps));
    of_gemm.insert(0, Read::Real(normal));
    let (_, product) = spec.unfused();
    gemm(&product.problem, Args::new(op, extents, &of_gemm, out))
}

/// Computes a plain GEMM, a GEMM after a norm, or a GEMM before a norm. Only a GEMM before a norm has `more`: the tensors to which it
/// writes the scaled values and the row statistics.
pub(super) fn gemm_stream(
    spec: &GemmStream,
    mut args: Args<'_, '_>,
    more: Option<(&mut [f32], &mut [f32])>,
) -> Result<(), OpError> {
    let (op, extents) = (args.op(), args.extents);
    let problem = &spec.problem;
    let (rows, n, k) = (extents.rows, u64::from(problem.n), u64::from(problem.k));
    let (scaled, vectors_of) = match (spec.norm, more) {
        (StreamNorm::None, None) => return gemm(problem, args),
        (StreamNorm::After { .. }, None) => (None, None),
        (StreamNorm::Before { centred }, Some(more)) => (Some(more), Some(centred)),
        (_, more) => {
            return Err(OpError::Writes {
                op,
                expected: "one tensor, or three before a norm",
                found: more.map_or(1, |_| 3),
            });
        }
    };
    let input_norm = match spec.norm {
        StreamNorm::After { eps, centred } => Some((eps, centred)),
        StreamNorm::None | StreamNorm::Before { .. } => None,
    };
    let x_rows = input_norm.map_or(rows, |(_, centred)| rows + GemmStream::more_rows(centred));
    let weight_rows = u64::from(problem.weight_rows());
    let mut x = args.real("x", &[x_rows, k])?;
    let mut of_gemm = vec![args.weight("weight", &[weight_rows, k])?.into()];
    if problem.epilogue.bias {
        of_gemm.push(Read::Real(args.real("bias", &[weight_rows])?));
    }
    if problem.epilogue.residual {
        of_gemm.push(Read::Real(args.real("residual", &[rows, n])?));
    }
    let mut vectors = Vec::new();
    if let Some(centred) = vectors_of {
        vectors.push(args.real("gamma", &[n])?);
        if centred {
            vectors.push(args.real("beta", &[n])?);
        }
    }
    let normal;
    if let Some((eps, centred)) = input_norm {
        let stats = [rows, GemmResidualRowStats::stats_of(problem.k)];
        let row_stats = args.real("row_stats", &stats)?;
        normal = stream_normals(x, row_stats, rows as usize, k as usize, eps, centred);
        x = &normal;
    }
    of_gemm.insert(0, Read::Real(x));
    if let (Some((scaled, row_stats)), Some(centred)) = (&scaled, vectors_of) {
        let shape = [rows + GemmStream::more_rows(centred), n];
        args.check_shape("scaled", &shape, scaled.len())?;
        let shape = [rows, GemmResidualRowStats::stats_of(problem.n)];
        args.check_shape("row_stats", &shape, row_stats.len())?;
    }
    let out = args.out(&[rows, n])?;
    gemm(problem, Args::new(op, extents, &of_gemm, out))?;
    if let Some((scaled, row_stats)) = scaled {
        let (of_rows, of_stats) = stream_scaled(out, &vectors);
        scaled.copy_from_slice(&of_rows);
        row_stats.copy_from_slice(&of_stats);
    }
    Ok(())
}

impl<'a> From<Weight<'a>> for Read<'a> {
    fn from(weight: Weight<'a>) -> Self {
        match weight {
            Weight::Rows(rows) => Read::Real(rows),
            Weight::Packed(packed) => Read::Packed(packed),
        }
    }
}
