//! `act(x · weightᵀ + bias) + residual`, with the epilogue applied while a block of the result is in cache.

use gemm_common::Parallelism;
use gemm_f32::gemm::f32::get_gemm_fn;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::args::Args;
use super::parallel::SharedOut;
use super::simd::{self, Pointwise, with_activation};
use super::{OpError, Read, Sums, rows};
use crate::kernels::gemm::{
    Activation, DeferredLayerNormGemm, Gemm, GemmResidualLayerNorm, GemmResidualRowStats,
    GemmStream, StreamNorm, normalised, scaled_and_row_stats, stream_normals, stream_scaled,
};

/// A strided matrix operand: element `(i, j)` is at `i·row + j·col`.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a> {
    pub data: &'a [f32],
    pub row: usize,
    pub col: usize,
}

impl Operand<'_> {
    fn check(&self, rows: usize, cols: usize) {
        let end = match (rows.checked_sub(1), cols.checked_sub(1)) {
            (Some(i), Some(j)) => i * self.row + j * self.col + 1,
            _ => 0,
        };
        assert!(
            end <= self.data.len(),
            "kernels read within the length that was checked"
        );
    }
}

/// What [`multiply`] does with what its block holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Into {
    Overwrite,
    Accumulate,
}

/// Writes or adds `scale · a · b`, on the calling thread, to the `m × n` block at `out[at..]` whose
/// rows are `stride` apart. `a` is `m × k` and `b` is `k × n`.
///
/// # Safety
///
/// No one else reads or writes the block meanwhile.
#[expect(clippy::too_many_arguments, reason = "a GEMM has this many sizes")]
pub(super) unsafe fn multiply(
    (m, n, k): (usize, usize, usize),
    scale: f32,
    a: Operand<'_>,
    b: Operand<'_>,
    into: Into,
    out: &SharedOut<'_>,
    at: usize,
    stride: usize,
) {
    a.check(m, k);
    b.check(k, n);
    let dst = out.block(at, m, n, stride);
    // The micro-kernel writes columns, so it computes the transpose: outᵀ = bᵀ · aᵀ, `n` rows of `m` columns.
    // SAFETY: the operands and the block are in bounds by the checks above; the block is ours by
    // the caller's promise. Strides of slices in memory fit an isize.
    unsafe {
        get_gemm_fn()(
            n,
            m,
            k,
            dst,
            stride as isize,
            1,
            into == Into::Accumulate,
            b.data.as_ptr(),
            b.row as isize,
            b.col as isize,
            a.data.as_ptr(),
            a.row as isize,
            a.col as isize,
            1.0,
            scale,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

/// Columns of a block: its part of the weight stays in the second-level cache for all its rows.
const BLOCK_COLS: usize = 96;
/// Rows that are computed before the epilogue runs over them, so that they are still in cache.
const BLOCK_ROWS: usize = 512;
/// Fewest rows of a task, where columns alone give too few tasks: each task transposes its weights.
const MIN_TASK_ROWS: usize = 128;
/// At most this many rows are computed as dot products, which need no transposed weights.
const MAX_DOT_ROWS: usize = 64;
/// Multiplications below which one thread is faster than several.
const MIN_PARALLEL: usize = 1 << 19;

pub(super) fn gemm(spec: &Gemm, sums: Sums, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (rows, n, k) = (args.extents.rows, u64::from(spec.n), u64::from(spec.k));
    let x = args.real("x", &[rows, k])?;
    let weight = args.real("weight", &[n, k])?;
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
    let (n, k) = (n as usize, k as usize);
    let finish = Finish {
        bias,
        activation: spec.epilogue.activation,
        residual,
    };
    match sums {
        Sums::Fastest => linear(x, weight, finish, out, n, k),
        // The other path splits k by what is left to do, and rows in ways of their own.
        Sums::Invariant => {
            for (i, out) in out.chunks_mut(MAX_DOT_ROWS * n).enumerate() {
                let first = i * MAX_DOT_ROWS;
                let x = &x[first * k..][..out.len() / n * k];
                let finish = Finish {
                    residual: residual.map(|r| &r[first * n..][..out.len()]),
                    ..finish
                };
                linear(x, weight, finish, out, n, k);
            }
        }
    }
    Ok(())
}

/// What an epilogue applies.
#[derive(Clone, Copy)]
struct Finish<'a> {
    bias: Option<&'a [f32]>,
    activation: Option<Activation>,
    /// As long as the result.
    residual: Option<&'a [f32]>,
}

/// `out [rows, n]` is not empty; `x [rows, k]` and `weight [n, k]` fit it.
fn linear(x: &[f32], weight: &[f32], of: Finish<'_>, out: &mut [f32], n: usize, k: usize) {
    let rows = out.len() / n;
    let out = SharedOut::new(out);
    let finish = |first_row: usize, m: usize, first_col: usize, cols: usize| {
        let bias = of.bias.map(|b| &b[first_col..first_col + cols]);
        let at = first_row * n + first_col;
        if bias.is_some() || of.activation.is_some() {
            with_activation!(of.activation, f => simd::dispatch(ApplyEpilogue {
                f, bias, out, at, rows: m, cols, stride: n,
            }));
        }
        if let Some(residual) = of.residual {
            for start in (0..m).map(|row| at + row * n) {
                // SAFETY: rows of the block that this task alone writes.
                let row = unsafe { out.slice(start..start + cols) };
                for (sum, more) in row.iter_mut().zip(&residual[start..]) {
                    *sum += more;
                }
            }
        }
    };
    let threads = if rows * n * k < MIN_PARALLEL {
        1
    } else {
        rayon::current_num_threads()
    };

    if rows <= MAX_DOT_ROWS && k > 0 {
        let block = |first_col: usize| {
            let cols = BLOCK_COLS.min(n - first_col);
            let weight = &weight[first_col * k..][..cols * k];
            simd::dispatch(DotRows {
                x,
                weight,
                rows,
                k,
                out,
                first_col,
                stride: n,
            });
            finish(0, rows, first_col, cols);
        };
        if threads == 1 {
            (0..n).step_by(BLOCK_COLS).for_each(block);
        } else {
            (0..n.div_ceil(BLOCK_COLS))
                .into_par_iter()
                .for_each(|i| block(i * BLOCK_COLS));
        }
        return;
    }

    let col_blocks = n.div_ceil(BLOCK_COLS);
    // A few tasks per thread: one that is late leaves work for the others to take.
    let most_row_tasks = rows.div_ceil(MIN_TASK_ROWS);
    let row_tasks = match threads {
        1 => 1,
        _ => (4 * threads).div_ceil(col_blocks).min(most_row_tasks),
    };
    let task_rows = rows.div_ceil(row_tasks);
    let task = |transposed: &mut Vec<f32>, i: usize| {
        let first_col = i % col_blocks * BLOCK_COLS;
        let cols = BLOCK_COLS.min(n - first_col);
        transpose(&weight[first_col * k..][..cols * k], k, transposed);
        let weight = Operand {
            data: transposed,
            row: cols,
            col: 1,
        };
        let first = i / col_blocks * task_rows;
        let end = rows.min(first + task_rows);
        for first_row in (first..end).step_by(BLOCK_ROWS) {
            let m = BLOCK_ROWS.min(end - first_row);
            let x = Operand {
                data: &x[first_row * k..],
                row: k,
                col: 1,
            };
            // SAFETY: blocks are disjoint, and each is one task's.
            unsafe {
                multiply(
                    (m, cols, k),
                    1.0,
                    x,
                    weight,
                    Into::Overwrite,
                    &out,
                    first_row * n + first_col,
                    n,
                );
            }
            finish(first_row, m, first_col, cols);
        }
    };
    let n_tasks = rows.div_ceil(task_rows) * col_blocks;
    if threads == 1 {
        let mut transposed = Vec::new();
        (0..n_tasks).for_each(|i| task(&mut transposed, i));
    } else {
        (0..n_tasks)
            .into_par_iter()
            .for_each_init(Vec::new, |transposed, i| task(transposed, i));
    }
}

/// Writes the transpose of `x [n, k]` to `out [k, n]`, in tiles of one cache line by as many rows:
/// rows a power of two apart would evict each other before their lines were used up.
fn transpose(x: &[f32], k: usize, out: &mut Vec<f32>) {
    const TILE: usize = 16;
    // Grows once; every element is overwritten below.
    out.resize(x.len(), 0.0);
    if k == 0 {
        return;
    }
    let n = x.len() / k;
    for row in (0..n).step_by(TILE) {
        let rows = TILE.min(n - row);
        for col in (0..k).step_by(TILE) {
            let cols = TILE.min(k - col);
            let mut tile = [[0.0_f32; TILE]; TILE];
            if (rows, cols) == (TILE, TILE) {
                // Sizes that the compiler knows: no check and no loop is left.
                for i in 0..TILE {
                    let line = &x[(row + i) * k + col..][..TILE];
                    for j in 0..TILE {
                        tile[j][i] = line[j];
                    }
                }
            } else {
                for i in 0..rows {
                    for j in 0..cols {
                        tile[j][i] = x[(row + i) * k + col + j];
                    }
                }
            }
            for (j, tile) in tile.iter().take(cols).enumerate() {
                out[(col + j) * n + row..][..rows].copy_from_slice(&tile[..rows]);
            }
        }
    }
}

/// `out [rows, ..]` from `first_col` on `= x [rows, k] · weight [cols, k]ᵀ`, as dot products of
/// rows that both lie in memory as they are.
#[derive(Clone, Copy)]
pub(super) struct DotRows<'a> {
    pub x: &'a [f32],
    pub weight: &'a [f32],
    pub rows: usize,
    /// Not 0.
    pub k: usize,
    pub out: SharedOut<'a>,
    pub first_col: usize,
    pub stride: usize,
}

impl WithSimd for DotRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // As many sums as fit the registers together with what is multiplied.
        if S::REGISTER_COUNT >= 32 {
            self.tiles::<S, 4, 4>(simd);
        } else {
            self.tiles::<S, 3, 3>(simd);
        }
    }
}

impl DotRows<'_> {
    #[inline(always)]
    fn tiles<S: Simd, const M: usize, const N: usize>(self, simd: S) {
        let k = self.k;
        let cols = self.weight.len() / k;
        for col in (0..cols).step_by(N) {
            let n = N.min(cols - col);
            // Past the last one, a row is computed again and not stored.
            let mut w: [&[f32]; N] = [&[]; N];
            for (j, w) in w.iter_mut().enumerate() {
                *w = &self.weight[(col + j.min(n - 1)) * k..][..k];
            }
            for row in (0..self.rows).step_by(M) {
                let m = M.min(self.rows - row);
                let mut x: [&[f32]; M] = [&[]; M];
                for (i, x) in x.iter_mut().enumerate() {
                    *x = &self.x[(row + i.min(m - 1)) * k..][..k];
                }
                let sums = dot_tile(simd, x, w);
                for (i, sums) in sums.iter().take(m).enumerate() {
                    let at = (row + i) * self.stride + self.first_col + col;
                    // SAFETY: these columns are this task's.
                    let out = unsafe { self.out.slice(at..at + n) };
                    out.copy_from_slice(&sums[..n]);
                }
            }
        }
    }
}

/// The dot product of each of `a` with each of `b`, all of one length.
#[inline(always)]
fn dot_tile<S: Simd, const M: usize, const N: usize>(
    simd: S,
    a: [&[f32]; M],
    b: [&[f32]; N],
) -> [[f32; N]; M] {
    // Loops rather than closures: a closure is compiled for the base instruction set unless it
    // happens to be inlined.
    let mut a_heads: [&[S::f32s]; M] = [&[]; M];
    let mut b_heads: [&[S::f32s]; N] = [&[]; N];
    let mut a_tails: [S::f32s; M] = [simd.splat_f32s(0.0); M];
    let mut b_tails: [S::f32s; N] = [simd.splat_f32s(0.0); N];
    let steps = a[0].len() / S::F32_LANES;
    for i in 0..M {
        let (head, tail) = S::as_simd_f32s(a[i]);
        (a_heads[i], a_tails[i]) = (&head[..steps], simd.partial_load_f32s(tail));
    }
    for j in 0..N {
        let (head, tail) = S::as_simd_f32s(b[j]);
        (b_heads[j], b_tails[j]) = (&head[..steps], simd.partial_load_f32s(tail));
    }
    let mut sums = [[simd.splat_f32s(0.0); N]; M];
    for i in 0..M {
        for j in 0..N {
            sums[i][j] = simd.mul_f32s(a_tails[i], b_tails[j]);
        }
    }
    for step in 0..steps {
        for i in 0..M {
            let a = a_heads[i][step];
            for j in 0..N {
                sums[i][j] = simd.mul_add_e_f32s(a, b_heads[j][step], sums[i][j]);
            }
        }
    }
    let mut totals = [[0.0; N]; M];
    for i in 0..M {
        for j in 0..N {
            totals[i][j] = simd.reduce_sum_f32s(sums[i][j]);
        }
    }
    totals
}

struct ApplyEpilogue<'a, F> {
    f: F,
    bias: Option<&'a [f32]>,
    out: SharedOut<'a>,
    at: usize,
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<F: Pointwise> WithSimd for ApplyEpilogue<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for row in 0..self.rows {
            let start = self.at + row * self.stride;
            // SAFETY: rows of the block that this task alone writes.
            let row = unsafe { self.out.slice(start..start + self.cols) };
            match self.bias {
                Some(bias) => simd::add_map_in_place(simd, self.f, bias, row),
                None => simd::map_in_place(simd, self.f, row),
            }
        }
    }
}

/// The products, and LayerNorm of their sum with bias and residual, one after the other.
pub(super) fn gemm_residual_layer_norm(
    spec: &GemmResidualLayerNorm,
    sums: Sums,
    mut args: Args<'_, '_>,
) -> Result<(), OpError> {
    let (op, extents) = (args.op(), args.extents);
    let (rows, n, k) = (extents.rows, u64::from(spec.n), u64::from(spec.k));
    let x = args.real("x", &[rows, k])?;
    let weight = args.real("weight", &[n, k])?;
    let bias = match spec.bias {
        true => Some(args.real("bias", &[n])?),
        false => None,
    };
    let residual = args.real("residual", &[rows, n])?;
    let gamma = args.real("gamma", &[n])?;
    let beta = args.real("beta", &[n])?;
    let out = args.out(&[rows, n])?;
    let (product, norm) = spec.unfused();
    let mut products = Vec::new();
    products
        .try_reserve_exact(out.len())
        .map_err(|_| OpError::OutOfMemory {
            op,
            bytes: size_of_val(&*out) as u64,
        })?;
    products.resize(out.len(), 0.0);
    let reads = [x, weight].map(Read::Real);
    gemm(
        &product,
        sums,
        Args::new(op, extents, &reads, &mut products),
    )?;
    let reads: Vec<Read> = [
        Some(products.as_slice()),
        bias,
        Some(residual),
        Some(gamma),
        Some(beta),
    ]
    .into_iter()
    .flatten()
    .map(Read::Real)
    .collect();
    rows::bias_residual_layer_norm(&norm, Args::new(op, extents, &reads, out))
}

/// The GEMM, then bias, residual and the row statistics that LayerNorm needs.
pub(super) fn gemm_residual_row_stats(
    spec: &GemmResidualRowStats,
    sums: Sums,
    mut args: Args<'_, '_>,
    row_stats: &mut [f32],
) -> Result<(), OpError> {
    let (op, extents) = (args.op(), args.extents);
    let (rows, n, k) = (extents.rows, u64::from(spec.n), u64::from(spec.k));
    let x = args.real("x", &[rows, k])?;
    let weight = args.real("weight", &[n, k])?;
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
    let reads = [x, weight].map(Read::Real);
    let product = spec.unfused().0;
    gemm(&product, sums, Args::new(op, extents, &reads, scaled))?;
    let (of_rows, of_stats) = scaled_and_row_stats(scaled, bias, residual, gamma);
    scaled.copy_from_slice(&of_rows);
    row_stats.copy_from_slice(&of_stats);
    Ok(())
}

/// LayerNorm from row statistics, then the GEMM of its result.
pub(super) fn deferred_layer_norm_gemm(
    spec: &DeferredLayerNormGemm,
    sums: Sums,
    mut args: Args<'_, '_>,
    normal: &mut [f32],
) -> Result<(), OpError> {
    let (op, extents) = (args.op(), args.extents);
    let (rows, n, k) = (extents.rows, u64::from(spec.n), u64::from(spec.k));
    let scaled = args.real("scaled", &[rows, k])?;
    let row_stats = args.real("row_stats", &[rows, GemmResidualRowStats::stats_of(spec.k)])?;
    let gamma = args.real("gamma", &[k])?;
    let beta = args.real("beta", &[k])?;
    let mut of_gemm = vec![Read::Real(args.real("weight", &[n, k])?)];
    if spec.epilogue.bias {
        of_gemm.push(Read::Real(args.real("bias", &[n])?));
    }
    args.check_shape("normal", &[rows, k], normal.len())?;
    let out = args.out(&[rows, n])?;
    normal.copy_from_slice(&normalised(scaled, row_stats, gamma, beta, spec.eps));
    of_gemm.insert(0, Read::Real(normal));
    let (_, product) = spec.unfused();
    gemm(&product, sums, Args::new(op, extents, &of_gemm, out))
}

/// The GEMM with a gate in its epilogue, or before or behind a norm: `scaled` and row statistics are `more`.
pub(super) fn gemm_stream(
    spec: &GemmStream,
    sums: Sums,
    mut args: Args<'_, '_>,
    more: Option<(&mut [f32], &mut [f32])>,
) -> Result<(), OpError> {
    let (op, extents) = (args.op(), args.extents);
    let (rows, n, k) = (extents.rows, u64::from(spec.n), u64::from(spec.k));
    let plain = spec.plain();
    let (x_rows, behind) = match spec.norm {
        StreamNorm::Behind { eps, centred } => {
            (rows + GemmStream::more_rows(centred), Some((eps, centred)))
        }
        _ => (rows, None),
    };
    let mut x = args.real("x", &[x_rows, k])?;
    let mut of_gemm = vec![Read::Real(args.real("weight", &[plain.n.into(), k])?)];
    if plain.epilogue.bias {
        of_gemm.push(Read::Real(args.real("bias", &[plain.n.into()])?));
    }
    if plain.epilogue.residual {
        of_gemm.push(Read::Real(args.real("residual", &[rows, n])?));
    }
    let mut vectors = Vec::new();
    if let StreamNorm::Before { centred } = spec.norm {
        vectors.push(args.real("gamma", &[n])?);
        if centred {
            vectors.push(args.real("beta", &[n])?);
        }
    }
    let normal;
    if let Some((eps, centred)) = behind {
        let row_stats = args.real("row_stats", &[rows, GemmResidualRowStats::stats_of(spec.k)])?;
        let sizes = (rows as usize, spec.k as usize);
        normal = stream_normals(x, row_stats, sizes.0, sizes.1, eps, centred);
        x = &normal;
    }
    of_gemm.insert(0, Read::Real(x));
    let vectors_of = match spec.norm {
        StreamNorm::Before { centred } => Some(centred),
        _ => None,
    };
    let more = match (more, vectors_of) {
        (None, None) => None,
        (Some((scaled, row_stats)), Some(centred)) => {
            let shape = [rows + GemmStream::more_rows(centred), n];
            args.check_shape("scaled", &shape, scaled.len())?;
            let shape = [rows, GemmResidualRowStats::stats_of(spec.n)];
            args.check_shape("row_stats", &shape, row_stats.len())?;
            Some((scaled, row_stats))
        }
        (more, _) => {
            return Err(OpError::Writes {
                op,
                expected: "one tensor, or three before a norm",
                found: more.map_or(1, |_| 3),
            });
        }
    };
    let out = args.out(&[rows, n])?;
    if let Some(gate) = spec.gate() {
        let mut products = Vec::new();
        products
            .try_reserve_exact(2 * out.len())
            .map_err(|_| OpError::OutOfMemory {
                op,
                bytes: 2 * size_of_val(&*out) as u64,
            })?;
        products.resize(2 * out.len(), 0.0);
        gemm(
            &plain,
            sums,
            Args::new(op, extents, &of_gemm, &mut products),
        )?;
        return rows::gate(&gate, Args::new(op, extents, &[Read::Real(&products)], out));
    }
    gemm(&plain, sums, Args::new(op, extents, &of_gemm, out))?;
    if let Some((scaled, row_stats)) = more {
        let (of_rows, of_stats) = stream_scaled(out, &vectors);
        scaled.copy_from_slice(&of_rows);
        row_stats.copy_from_slice(&of_stats);
    }
    Ok(())
}
