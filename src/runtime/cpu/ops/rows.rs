//! Row-wise kernels: pointwise functions, norms and embeddings.

use std::iter::zip;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::OpError;
use super::args::Args;
use super::parallel::for_row_blocks;
use super::simd::{self, Pointwise, Running, Times, with_activation};
use crate::kernels::elementwise::*;
use crate::kernels::embedding::{Embedding, EmbeddingLayerNorm, Table};
use crate::kernels::layernorm::{BiasResidualLayerNorm, LayerNorm};
use crate::kernels::log_probability::LogProbability;
use crate::kernels::rms_norm::RmsNorm;
use crate::{
    kernels::draw::Draw,
    ops::{BatchInput, noise, seed_of},
};

pub(super) fn add_bias(spec: &AddBias, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (rows, width) = (args.extents.rows, u64::from(spec.width));
    let x = args.real("x", &[rows, width])?;
    let bias = args.real("bias", &[width])?;
    let out = args.out(&[rows, width])?;
    let width = width as usize;
    for_row_blocks(out, width, |first, out| {
        simd::dispatch(AddRows {
            a: &x[first * width..][..out.len()],
            b: bias,
            out,
        });
    });
    Ok(())
}

pub(super) fn combine(spec: &Combine, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (rows, width) = (args.extents.rows, u64::from(spec.width));
    let a = args.real("a", &[rows, width])?;
    let b = args.real("b", &[rows, width])?;
    let out = args.out(&[rows, width])?;
    let width = width as usize;
    for_row_blocks(out, width, |first, out| {
        let at = first * width;
        let (a, b) = (&a[at..][..out.len()], &b[at..][..out.len()]);
        match spec.how {
            BinaryOp::Sum => simd::dispatch(AddRows { a, b, out }),
            BinaryOp::Product => {
                for (out, (a, b)) in zip(out, zip(a, b)) {
                    *out = a * b;
                }
            }
        }
    });
    Ok(())
}

pub(super) fn rms_norm(spec: &RmsNorm, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (rows, width) = (args.extents.rows, u64::from(spec.width));
    let (heads, stride) = (u64::from(spec.heads), u64::from(spec.stride));
    let x = args.real("x", &[rows, stride])?;
    let gamma = args.real("gamma", &[width])?;
    let out = args.out(&[rows, heads, width])?;
    let columns = (heads * width) as usize;
    let (from, stride) = (spec.from as usize, stride as usize);
    for_row_blocks(out, columns, |first, out| {
        for (i, out) in out.chunks_exact_mut(columns).enumerate() {
            simd::dispatch(RmsRows {
                x: &x[(first + i) * stride + from..][..columns],
                gamma,
                eps: spec.eps,
                out,
            });
        }
    });
    Ok(())
}

/// RMSNorm of rows as long as `gamma`, which is not empty.
pub(super) struct RmsRows<'a> {
    pub x: &'a [f32],
    pub gamma: &'a [f32],
    pub eps: f32,
    pub out: &'a mut [f32],
}

impl WithSimd for RmsRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.gamma.len();
        for (x, out) in zip(self.x.chunks_exact(width), self.out.chunks_exact_mut(width)) {
            let mean = simd::sum_of_squares(simd, x, 0.0) / width as f32;
            let factor = 1.0 / (mean + self.eps).sqrt();
            for (out, (x, gamma)) in zip(out, zip(x, self.gamma)) {
                *out = x * factor * gamma;
            }
        }
    }
}

/// Computes `out = a + b` in rows as long as `b`, which is not empty.
struct AddRows<'a> {
    a: &'a [f32],
    b: &'a [f32],
    out: &'a mut [f32],
}

impl WithSimd for AddRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.b.len();
        for (a, out) in zip(self.a.chunks_exact(width), self.out.chunks_exact_mut(width)) {
            simd::add(simd, a, self.b, out);
        }
    }
}

pub(super) fn activate(spec: &Activate, args: Args<'_, '_>) -> Result<(), OpError> {
    with_activation!(Some(spec.activation), f => map(f, spec.width, args))
}

pub(super) fn gate(spec: &Gate, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (rows, width) = (args.extents.rows, u64::from(spec.width));
    let x = args.real("x", &[rows, 2, width])?;
    let out = args.out(&[rows, width])?;
    let width = width as usize;
    for_row_blocks(out, width, |first, out| {
        let rows = x[2 * first * width..].chunks_exact(2 * width);
        for (out, row) in zip(out.chunks_exact_mut(width), rows) {
            let (x, up) = row.split_at(width);
            with_activation!(Some(spec.activation), f => simd::dispatch(Map { f, x, out }));
            for (out, up) in zip(out, up) {
                *out *= up;
            }
        }
    });
    Ok(())
}

pub(super) fn scale(spec: &Scale, args: Args<'_, '_>) -> Result<(), OpError> {
    map(Times(spec.by), spec.width, args)
}

fn map(f: impl Pointwise + Sync, width: u32, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let shape = [args.extents.rows, u64::from(width)];
    let x = args.real("x", &shape)?;
    let out = args.out(&shape)?;
    let width = width as usize;
    for_row_blocks(out, width, |first, out| {
        let x = &x[first * width..][..out.len()];
        simd::dispatch(Map { f, x, out });
    });
    Ok(())
}

struct Map<'a, F> {
    f: F,
    x: &'a [f32],
    out: &'a mut [f32],
}

impl<F: Pointwise> WithSimd for Map<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        simd::map(simd, self.f, self.x, self.out);
    }
}

pub(super) fn slice_columns(spec: &SliceColumns, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let rows = args.extents.rows;
    let (from, width) = (u64::from(spec.from_width), u64::from(spec.width));
    let end = u64::from(spec.start) + width;
    if end > from {
        return Err(OpError::Columns {
            op: args.op(),
            what: "the columns",
            end,
            stride: from,
        });
    }
    let x = args.real("x", &[rows, from])?;
    let out = args.out(&[rows, width])?;
    let (from, width, start) = (from as usize, width as usize, spec.start as usize);
    for_row_blocks(out, width, |first, out| {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            out.copy_from_slice(&x[(first + i) * from + start..][..width]);
        }
    });
    Ok(())
}

pub(super) fn concat(spec: &Concat, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let rows = args.extents.rows;
    let parts = spec
        .parts()
        .map(|(name, width)| {
            let part = args.real(name, &[rows, u64::from(width)])?;
            Ok((part, width as usize))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let width = u64::from(spec.width());
    let out = args.out(&[rows, width])?;
    let width = width as usize;
    for_row_blocks(out, width, |first, out| {
        for (i, mut out) in out.chunks_exact_mut(width).enumerate() {
            for &(part, width) in &parts {
                let (to, rest) = out.split_at_mut(width);
                to.copy_from_slice(&part[(first + i) * width..][..width]);
                out = rest;
            }
        }
    });
    Ok(())
}

pub(super) fn split_heads(spec: &SplitHeads, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (tokens, heads, head) = (
        args.extents.tokens,
        u64::from(spec.heads),
        u64::from(spec.head),
    );
    let x = args.real("x", &[tokens, heads, head])?;
    let out = args.out(&[heads, tokens, head])?;
    let (tokens, heads, head) = (tokens as usize, heads as usize, head as usize);
    // Row `h·tokens + t` of the result is row `t·heads + h` of `x`.
    for_row_blocks(out, head, |first, out| {
        for (i, out) in out.chunks_exact_mut(head).enumerate() {
            let (h, t) = ((first + i) / tokens, (first + i) % tokens);
            out.copy_from_slice(&x[(t * heads + h) * head..][..head]);
        }
    });
    Ok(())
}

pub(super) fn merge_heads(spec: &MergeHeads, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (tokens, heads, head) = (
        args.extents.tokens,
        u64::from(spec.heads),
        u64::from(spec.head),
    );
    let x = args.real("x", &[heads, tokens, head])?;
    let out = args.out(&[tokens, heads, head])?;
    let (tokens, heads, head) = (tokens as usize, heads as usize, head as usize);
    for_row_blocks(out, head, |first, out| {
        for (i, out) in out.chunks_exact_mut(head).enumerate() {
            let (t, h) = ((first + i) / heads, (first + i) % heads);
            out.copy_from_slice(&x[(h * tokens + t) * head..][..head]);
        }
    });
    Ok(())
}

/// Terms that are summed into a row before it is normalized.
#[derive(Clone, Copy)]
enum Sum<'a> {
    /// Row `i` of each tensor, and a bias.
    Rows {
        bias: Option<&'a [f32]>,
        x: &'a [f32],
        residual: Option<&'a [f32]>,
    },
    /// One row of each table, selected by the table's id for token `i`.
    Tables(&'a [Lookup<'a>]),
}

/// LayerNorm of a sum of rows, for the rows from `first` on. The sum is computed in place of the result, so it is in the L1 cache
/// for the later passes.
struct NormalizeSum<'a> {
    sum: Sum<'a>,
    gamma: &'a [f32],
    beta: &'a [f32],
    eps: f32,
    first: usize,
    out: &'a mut [f32],
}

impl WithSimd for NormalizeSum<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.gamma.len();
        for (i, out) in self.out.chunks_exact_mut(width).enumerate() {
            let row = self.first + i;
            let at = row * width;
            match self.sum {
                Sum::Rows { bias, x, residual } => {
                    let x = &x[at..][..width];
                    match residual {
                        Some(residual) => simd::add(simd, x, &residual[at..][..width], out),
                        None => out.copy_from_slice(x),
                    }
                    if let Some(bias) = bias {
                        simd::accumulate(simd, bias, out);
                    }
                }
                Sum::Tables(tables) => {
                    out.fill(0.0);
                    for table in tables {
                        simd::accumulate(simd, table.row(row, width), out);
                    }
                }
            }
            simd::normalize(simd, out, self.gamma, self.beta, self.eps);
        }
    }
}

fn normalize_rows(sum: Sum<'_>, gamma: &[f32], beta: &[f32], eps: f32, out: &mut [f32]) {
    for_row_blocks(out, gamma.len(), |first, out| {
        simd::dispatch(NormalizeSum {
            sum,
            gamma,
            beta,
            eps,
            first,
            out,
        });
    });
}

pub(super) fn layer_norm(spec: &LayerNorm, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (rows, width) = (args.extents.rows, u64::from(spec.width));
    let x = args.real("x", &[rows, width])?;
    let gamma = args.real("gamma", &[width])?;
    let beta = args.real("beta", &[width])?;
    let out = args.out(&[rows, width])?;
    let sum = Sum::Rows {
        bias: None,
        x,
        residual: None,
    };
    normalize_rows(sum, gamma, beta, spec.eps, out);
    Ok(())
}

pub(super) fn bias_residual_layer_norm(
    spec: &BiasResidualLayerNorm,
    mut args: Args<'_, '_>,
) -> Result<(), OpError> {
    let (rows, width) = (args.extents.rows, u64::from(spec.width));
    let x = args.real("x", &[rows, width])?;
    let bias = if spec.bias {
        Some(args.real("bias", &[width])?)
    } else {
        None
    };
    let residual = Some(args.real("residual", &[rows, width])?);
    let gamma = args.real("gamma", &[width])?;
    let beta = args.real("beta", &[width])?;
    let out = args.out(&[rows, width])?;
    normalize_rows(Sum::Rows { bias, x, residual }, gamma, beta, spec.eps, out);
    Ok(())
}

/// A table, and ids that are all within it.
struct Lookup<'a> {
    ids: &'a [i32],
    offset: usize,
    rows: &'a [f32],
}

impl<'a> Lookup<'a> {
    fn new(
        op: &'static str,
        table: &Table,
        ids: &'a [i32],
        rows: &'a [f32],
    ) -> Result<Self, OpError> {
        check_ids(op, table, ids)?;
        Ok(Self {
            ids,
            offset: table.offset as usize,
            rows,
        })
    }

    #[inline(always)]
    fn row(&self, token: usize, width: usize) -> &'a [f32] {
        // `new` has checked that the id is not negative.
        let row = self.ids[token] as usize + self.offset;
        &self.rows[row * width..][..width]
    }
}

/// Checks that every id refers to a row of the table.
fn check_ids(op: &'static str, table: &Table, ids: &[i32]) -> Result<(), OpError> {
    for (index, &id) in ids.iter().enumerate() {
        let row = i64::from(id) + i64::from(table.offset);
        if id < 0 || row >= i64::from(table.rows) {
            return Err(OpError::Id {
                op,
                param: ids_param(table.ids),
                index,
                id,
                offset: table.offset,
                rows: table.rows,
            });
        }
    }
    Ok(())
}

fn ids_param(ids: BatchInput) -> &'static str {
    match ids {
        BatchInput::TokenIds => "token_ids",
        BatchInput::TypeIds => "type_ids",
        BatchInput::Positions => "positions",
        _ => "ids",
    }
}

pub(super) fn draw(spec: &Draw, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (batch, width) = (args.extents.batch, u64::from(spec.width));
    let mean = args.real("mean", &[batch, width])?;
    let log_variance = args.real("log_variance", &[batch, width])?;
    let seeds = args.i32s("seeds", batch.saturating_mul(2))?;
    let out = args.out(&[batch, width])?;
    for (at, out) in out.iter_mut().enumerate() {
        let (row, column) = (at / width as usize, at % width as usize);
        let noise = noise(seed_of([seeds[2 * row], seeds[2 * row + 1]]), column as u32);
        *out = (0.5 * log_variance[at])
            .exp()
            .mul_add(noise as f32, mean[at]);
    }
    Ok(())
}

pub(super) fn log_probability(
    spec: &LogProbability,
    mut args: Args<'_, '_>,
) -> Result<(), OpError> {
    let (op, tokens, width) = (args.op(), args.extents.tokens, u64::from(spec.width));
    let logits = args.real("logits", &[tokens, width])?;
    let ids = args.i32s("token_ids", tokens)?;
    let columns = Table {
        ids: BatchInput::TokenIds,
        offset: 0,
        rows: spec.width,
    };
    check_ids(op, &columns, ids)?;
    let positions = args.i32s("positions", tokens)?;
    let out = args.out(&[tokens, 1])?;
    let width = width as usize;
    // Each row of the result needs one row of logits.
    let one = |t: usize, scratch: &mut Vec<f32>| {
        if t == 0 || positions[t] == 0 {
            return 0.0;
        }
        let row = &logits[(t - 1) * width..t * width];
        scratch.clear();
        scratch.extend_from_slice(row);
        let sum = simd::dispatch(LogSum(scratch));
        row[ids[t] as usize] - sum
    };
    out.par_iter_mut()
        .enumerate()
        .for_each_init(Vec::new, |scratch, (t, out)| *out = one(t, scratch));
    Ok(())
}

/// Computes `log Σ exp` of a row, which is overwritten.
struct LogSum<'a>(&'a mut [f32]);

impl WithSimd for LogSum<'_> {
    type Output = f32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let mut running = Running::START;
        simd::softmax_numerators(simd, self.0, 1.0, &mut running);
        running.max + running.sum.ln()
    }
}

pub(super) fn embedding(spec: &Embedding, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (op, tokens, width) = (args.op(), args.extents.tokens, u64::from(spec.width));
    let ids = args.i32s(ids_param(spec.table.ids), tokens)?;
    let rows = args.real("table", &[u64::from(spec.table.rows), width])?;
    let lookup = Lookup::new(op, &spec.table, ids, rows)?;
    let out = args.out(&[tokens, width])?;
    let width = width as usize;
    for_row_blocks(out, width, |first, out| {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            out.copy_from_slice(lookup.row(first + i, width));
        }
    });
    Ok(())
}

pub(super) fn embedding_layer_norm(
    spec: &EmbeddingLayerNorm,
    mut args: Args<'_, '_>,
) -> Result<(), OpError> {
    let (op, tokens, width) = (args.op(), args.extents.tokens, u64::from(spec.width));
    let ids = spec
        .tables
        .iter()
        .map(|table| args.i32s(ids_param(table.ids), tokens))
        .collect::<Result<Vec<_>, _>>()?;
    let rows = spec
        .tables
        .iter()
        .map(|table| args.real("table", &[u64::from(table.rows), width]))
        .collect::<Result<Vec<_>, _>>()?;
    let gamma = args.real("gamma", &[width])?;
    let beta = args.real("beta", &[width])?;
    let lookups = zip(&spec.tables, zip(ids, rows))
        .map(|(table, (ids, rows))| Lookup::new(op, table, ids, rows))
        .collect::<Result<Vec<_>, _>>()?;
    let out = args.out(&[tokens, width])?;
    normalize_rows(Sum::Tables(&lookups), gamma, beta, spec.eps, out);
    Ok(())
}
