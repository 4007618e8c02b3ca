//! GEMMs `act(x · weightᵀ + bias) + residual` and their fused variants.

use gemmule_cpu::linear::{Finish, Linear, Weight};

use super::args::{Args, zeros};
use super::{Call, CpuForm, OpError, Read, forms, fp8, rows};
use crate::kernels::gemm::{
    DeferredLayerNormGemm, Gemm, GemmPrepareAttention, GemmProblem, GemmResidualNorm,
    GemmResidualRowStats, GemmSplitK, GemmStream, GemmWgmma, StreamNorm, UnpackWeight, normalized,
    row_columns, scaled_and_row_stats, stream_normals, stream_scaled,
};

forms! {
    Gemm => |k, args| gemm(&k.problem, args);
    GemmWgmma => |k, args| gemm(&k.problem, args);
    GemmSplitK => |k, args| gemm(&k.problem, args);
    UnpackWeight => unpack_weight;
}

/// Computes a GEMM, including its gate and epilogue.
pub(super) fn gemm(problem: &GemmProblem, mut args: Args<'_, '_>) -> Result<(), OpError> {
    if problem.is_fp8() {
        return fp8::gemm(problem, args);
    }
    if problem.quantized_rows {
        return gemm_of_rows(problem, args);
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

/// Computes a GEMM whose input rows were quantized to E4M3 or int8. It converts the rows back to f32 first.
fn gemm_of_rows(of: &GemmProblem, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (op, extents) = (args.op(), args.extents);
    let (rows, n) = (extents.rows, u64::from(of.n));
    let weight_rows = u64::from(of.weight_rows());
    let x = args.real("x", &[rows, row_columns(of.k).into()])?;
    let weight = args.weight("weight", &[weight_rows, of.k.into()])?;
    let x_scale = args.real("x_scale", &[rows, of.scales_of_row()])?;
    let x = of.restored_rows(x, x_scale);
    let mut reads = vec![Read::Real(&x), weight.into()];
    if of.epilogue.bias {
        reads.push(Read::Real(args.real("bias", &[weight_rows])?));
    }
    if of.epilogue.residual {
        reads.push(Read::Real(args.real("residual", &[rows, n])?));
    }
    let out = args.out(&[rows, n])?;
    let plain = of.with_plain_rows();
    gemm(&plain, Args::new(op, extents, &reads, out))
}

/// Computes a GEMM that has no gate.
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

/// Rounds the elements of a weight to its packed format, and then to the storage type of the kernel.
fn unpack_weight(spec: &UnpackWeight, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let shape = [u64::from(spec.n), u64::from(spec.k)];
    let weight = args.real("weight", &shape)?;
    let out = args.out(&shape)?;
    let quantized = spec.weight.quantize(weight, spec.k as usize);
    out.copy_from_slice(&quantized.unpacked(spec.dtype));
    Ok(())
}

/// Computes a GEMM, adds bias and residual, and normalizes the rows of the sum.
impl CpuForm for GemmResidualNorm {
    fn run(&self, call: Call<'_, '_, '_>) -> Result<(), OpError> {
        let (product, norm) = self.unfused();
        let mut own;
        let (sum, out): (&mut [f32], _) = match (self.keeps_sum, &mut *call.writes) {
            (true, [sum, out]) => (sum, out),
            (false, [out]) => {
                own = zeros(call.op, out.len())?;
                (&mut own, out)
            }
            (_, writes) => {
                let found = writes.len();
                return Err(call.wrong_outputs("one tensor, or two with the sum", found));
            }
        };
        let (of_sum, of_norm) = call.reads.split_at(self.of_sum().min(call.reads.len()));
        super::run(&product.into(), call.extents, of_sum, &mut [&mut *sum])?;
        let rows = [Read::Real(sum)];
        let reads: Vec<Read<'_>> = rows.iter().chain(of_norm).copied().collect();
        super::run(&norm, call.extents, &reads, &mut [&mut **out])
    }
}

/// Computes the GEMM, and then prepares attention from the rows of the GEMM's result.
impl CpuForm for GemmPrepareAttention {
    fn run(&self, mut call: Call<'_, '_, '_>) -> Result<(), OpError> {
        call.op = "gemm_prepare_attention";
        let [out, prepared @ ..] = std::mem::take(&mut call.writes) else {
            return Err(call.wrong_outputs("three tensors", 0));
        };
        let (of_gemm, of_prepare) = call.reads.split_at(self.of_gemm().min(call.reads.len()));
        super::run(
            &self.gemm().into(),
            call.extents,
            of_gemm,
            &mut [&mut **out],
        )?;
        let rows = [Read::Real(out)];
        let reads: Vec<Read<'_>> = rows.iter().chain(of_prepare).copied().collect();
        super::run(&self.prepare.clone().into(), call.extents, &reads, prepared)
    }
}

impl CpuForm for GemmResidualRowStats {
    fn run(&self, mut call: Call<'_, '_, '_>) -> Result<(), OpError> {
        let [scaled, row_stats] = call.outputs()?;
        gemm_residual_row_stats(self, call.args(scaled), row_stats)
    }
}

impl CpuForm for DeferredLayerNormGemm {
    fn run(&self, mut call: Call<'_, '_, '_>) -> Result<(), OpError> {
        let [normal, out] = call.outputs()?;
        deferred_layer_norm_gemm(self, call.args(out), normal)
    }
}

impl CpuForm for GemmStream {
    fn run(&self, mut call: Call<'_, '_, '_>) -> Result<(), OpError> {
        match std::mem::take(&mut call.writes) {
            [out] => gemm_stream(self, call.args(out), None),
            [out, scaled, row_stats] => {
                gemm_stream(self, call.args(out), Some((scaled, row_stats)))
            }
            writes => {
                let expected = "one tensor, or three before a norm";
                Err(call.wrong_outputs(expected, writes.len()))
            }
        }
    }
}

/// Computes a GEMM, adds bias and residual, and computes the row statistics that LayerNorm needs.
fn gemm_residual_row_stats(
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
fn deferred_layer_norm_gemm(
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
    normal.copy_from_slice(&normalized(scaled, row_stats, gamma, beta, spec.eps));
    of_gemm.insert(0, Read::Real(normal));
    let (_, product) = spec.unfused();
    gemm(&product.problem, Args::new(op, extents, &of_gemm, out))
}

/// Computes a plain GEMM, a GEMM after a norm, or a GEMM before a norm. Only a GEMM before a norm has `more`: the tensors to which it
/// writes the scaled values and the row statistics.
fn gemm_stream(
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
        (StreamNorm::Before { centered }, Some(more)) => (Some(more), Some(centered)),
        (_, more) => {
            return Err(OpError::Writes {
                op,
                expected: "one tensor, or three before a norm",
                found: more.map_or(1, |_| 3),
            });
        }
    };
    let input_norm = match spec.norm {
        StreamNorm::After { eps, centered } => Some((eps, centered)),
        StreamNorm::None | StreamNorm::Before { .. } => None,
    };
    let x_rows = input_norm.map_or(rows, |(_, centered)| rows + GemmStream::more_rows(centered));
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
    if let Some(centered) = vectors_of {
        vectors.push(args.real("gamma", &[n])?);
        if centered {
            vectors.push(args.real("beta", &[n])?);
        }
    }
    let normal;
    if let Some((eps, centered)) = input_norm {
        let stats = [rows, GemmResidualRowStats::stats_of(problem.k)];
        let row_stats = args.real("row_stats", &stats)?;
        normal = stream_normals(x, row_stats, rows as usize, k as usize, eps, centered);
        x = &normal;
    }
    of_gemm.insert(0, Read::Real(x));
    if let (Some((scaled, row_stats)), Some(centered)) = (&scaled, vectors_of) {
        let shape = [rows + GemmStream::more_rows(centered), n];
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
