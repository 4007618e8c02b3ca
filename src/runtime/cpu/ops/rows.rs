//! Row-wise kernels: pointwise functions, norms and embeddings.

use std::iter::zip;

use gemmule_cpu::{
    parallel::for_row_blocks,
    rows::{self, AddRows, Lookup, NormalizeSum, RmsRows, Sum},
};
use rayon::prelude::*;

use super::args::Args;
use super::{Call, CpuForm, OpError, forms};
use crate::kernels::elementwise::*;
use crate::kernels::embedding::{Embedding, EmbeddingLayerNorm, Table};
use crate::kernels::layernorm::{BiasResidualLayerNorm, LayerNorm};
use crate::kernels::log_probability::LogProbability;
use crate::kernels::rms_norm::RmsNorm;
use crate::kernels::rms_norm_sum::RmsNormSum;
use crate::{
    kernels::draw::Draw,
    ops::{BatchInput, noise, seed_of},
};

forms! {
    AddBias => add_bias;
    Combine => combine;
    RmsNorm => rms_norm;
    Activate => activate;
    Gate => gate;
    Scale => scale;
    SoftCap => soft_cap;
    SliceColumns => slice_columns;
    SplitHeads => split_heads;
    MergeHeads => merge_heads;
    LayerNorm => layer_norm;
    BiasResidualLayerNorm => bias_residual_layer_norm;
    Embedding => embedding;
    EmbeddingLayerNorm => embedding_layer_norm;
    Concat => concat;
    Draw => draw;
    LogProbability => log_probability;
}

fn add_bias(spec: &AddBias, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (rows, width) = (args.extents.rows, u64::from(spec.width));
    let x = args.real("x", &[rows, width])?;
    let bias = args.real("bias", &[width])?;
    let out = args.out(&[rows, width])?;
    let width = width as usize;
    for_row_blocks(out, width, &|first, out| {
        AddRows {
            a: &x[first * width..][..out.len()],
            b: bias,
            out,
        }
        .run();
    });
    Ok(())
}

fn combine(spec: &Combine, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (rows, width) = (args.extents.rows, u64::from(spec.width));
    let a = args.real("a", &[rows, width])?;
    let b = args.real("b", &[rows, width])?;
    let out = args.out(&[rows, width])?;
    let width = width as usize;
    for_row_blocks(out, width, &|first, out| {
        let at = first * width;
        let (a, b) = (&a[at..][..out.len()], &b[at..][..out.len()]);
        match spec.how {
            BinaryOp::Sum => AddRows { a, b, out }.run(),
            BinaryOp::Product => rows::multiply_elements(a, b, out),
        }
    });
    Ok(())
}

fn rms_norm(spec: &RmsNorm, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (rows, width) = (args.extents.rows, u64::from(spec.width));
    let (heads, stride) = (u64::from(spec.heads), u64::from(spec.stride));
    let x = args.real("x", &[rows, stride])?;
    let gamma = match spec.centered {
        true => args.real("gamma", &[heads, width])?,
        false => args.real("gamma", &[width])?,
    };
    let out = args.out(&[rows, heads, width])?;
    let (columns, width, eps) = ((heads * width) as usize, width as usize, spec.eps);
    let (from, stride) = (spec.from as usize, stride as usize);
    let zeros = vec![0.0; if spec.centered { width } else { 0 }];
    for_row_blocks(out, columns, &|first, out| {
        for (i, out) in out.chunks_exact_mut(columns).enumerate() {
            let x = &x[(first + i) * stride + from..][..columns];
            if !spec.centered {
                RmsRows { x, gamma, eps, out }.run();
                continue;
            }
            let heads = zip(x.chunks_exact(width), gamma.chunks_exact(width));
            for (out, (x, gamma)) in zip(out.chunks_exact_mut(width), heads) {
                NormalizeSum {
                    sum: Sum::Rows {
                        bias: None,
                        x,
                        residual: None,
                    },
                    gamma,
                    beta: &zeros,
                    eps,
                    first: 0,
                    out,
                }
                .run();
            }
        }
    });
    Ok(())
}

impl CpuForm for RmsNormSum {
    fn run(&self, mut call: Call<'_, '_, '_>) -> Result<(), OpError> {
        let [sum, out] = call.outputs()?;
        rms_norm_sum(self, call.args(out), sum)
    }
}

/// Normalizes the rows of `x`, adds them to the residual, and normalizes the sums.
fn rms_norm_sum(spec: &RmsNormSum, mut args: Args<'_, '_>, sum: &mut [f32]) -> Result<(), OpError> {
    let (rows, width) = (args.extents.rows, u64::from(spec.width));
    let x = args.real("x", &[rows, width])?;
    let gamma = args.real("gamma", &[width])?;
    let residual = args.real("residual", &[rows, width])?;
    let next_gamma = args.real("next_gamma", &[width])?;
    args.check_shape("sum", &[rows, width], sum.len())?;
    let out = args.out(&[rows, width])?;
    let (width, eps) = (width as usize, spec.eps);
    let norm = |x: &[f32], gamma, out: &mut [f32]| {
        for_row_blocks(out, width, &|first, out| {
            let x = &x[first * width..][..out.len()];
            RmsRows { x, gamma, eps, out }.run();
        });
    };
    norm(x, gamma, out);
    for_row_blocks(sum, width, &|first, sum| {
        AddRows {
            a: &out[first * width..][..sum.len()],
            b: &residual[first * width..][..sum.len()],
            out: sum,
        }
        .run();
    });
    norm(sum, next_gamma, out);
    Ok(())
}

fn activate(spec: &Activate, args: Args<'_, '_>) -> Result<(), OpError> {
    let activation = spec.activation.into();
    map(
        &|x, out| rows::activate(activation, x, out),
        spec.width,
        args,
    )
}

pub(super) fn gate(spec: &Gate, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (rows, width) = (args.extents.rows, u64::from(spec.width));
    let x = args.real("x", &[rows, 2, width])?;
    let out = args.out(&[rows, width])?;
    let width = width as usize;
    for_row_blocks(out, width, &|first, out| {
        let rows = x[2 * first * width..].chunks_exact(2 * width);
        for (out, row) in zip(out.chunks_exact_mut(width), rows) {
            let (x, up) = row.split_at(width);
            rows::gate(spec.activation.into(), x, up, out);
        }
    });
    Ok(())
}

fn scale(spec: &Scale, args: Args<'_, '_>) -> Result<(), OpError> {
    map(&|x, out| rows::scale(spec.by, x, out), spec.width, args)
}

fn soft_cap(spec: &SoftCap, args: Args<'_, '_>) -> Result<(), OpError> {
    let cap = spec.cap.get();
    map(&|x, out| rows::soft_cap(cap, x, out), spec.width, args)
}

/// Computes a pointwise function.
fn map(
    f: &(dyn Fn(&[f32], &mut [f32]) + Sync),
    width: u32,
    mut args: Args<'_, '_>,
) -> Result<(), OpError> {
    let shape = [args.extents.rows, u64::from(width)];
    let x = args.real("x", &shape)?;
    let out = args.out(&shape)?;
    let width = width as usize;
    for_row_blocks(out, width, &|first, out| {
        f(&x[first * width..][..out.len()], out);
    });
    Ok(())
}

fn slice_columns(spec: &SliceColumns, mut args: Args<'_, '_>) -> Result<(), OpError> {
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
    for_row_blocks(out, width, &|first, out| {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            out.copy_from_slice(&x[(first + i) * from + start..][..width]);
        }
    });
    Ok(())
}

fn concat(spec: &Concat, mut args: Args<'_, '_>) -> Result<(), OpError> {
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
    for_row_blocks(out, width, &|first, out| {
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

fn split_heads(spec: &SplitHeads, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (tokens, heads, head) = (
        args.extents.tokens,
        u64::from(spec.heads),
        u64::from(spec.head),
    );
    let x = args.real("x", &[tokens, heads, head])?;
    let out = args.out(&[heads, tokens, head])?;
    let (tokens, heads, head) = (tokens as usize, heads as usize, head as usize);
    // Row `h·tokens + t` of the result is row `t·heads + h` of `x`.
    for_row_blocks(out, head, &|first, out| {
        for (i, out) in out.chunks_exact_mut(head).enumerate() {
            let (h, t) = ((first + i) / tokens, (first + i) % tokens);
            out.copy_from_slice(&x[(t * heads + h) * head..][..head]);
        }
    });
    Ok(())
}

fn merge_heads(spec: &MergeHeads, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (tokens, heads, head) = (
        args.extents.tokens,
        u64::from(spec.heads),
        u64::from(spec.head),
    );
    let x = args.real("x", &[heads, tokens, head])?;
    let out = args.out(&[tokens, heads, head])?;
    let (tokens, heads, head) = (tokens as usize, heads as usize, head as usize);
    for_row_blocks(out, head, &|first, out| {
        for (i, out) in out.chunks_exact_mut(head).enumerate() {
            let (t, h) = ((first + i) / heads, (first + i) % heads);
            out.copy_from_slice(&x[(h * tokens + t) * head..][..head]);
        }
    });
    Ok(())
}

fn normalize_rows(sum: Sum<'_>, gamma: &[f32], beta: &[f32], eps: f32, out: &mut [f32]) {
    for_row_blocks(out, gamma.len(), &|first, out| {
        NormalizeSum {
            sum,
            gamma,
            beta,
            eps,
            first,
            out,
        }
        .run();
    });
}

fn layer_norm(spec: &LayerNorm, mut args: Args<'_, '_>) -> Result<(), OpError> {
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

fn bias_residual_layer_norm(
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

/// Checks that every id refers to a row of the table, and returns the lookup.
fn lookup<'a>(
    op: &'static str,
    table: &Table,
    ids: &'a [i32],
    rows: &'a [f32],
) -> Result<Lookup<'a>, OpError> {
    check_ids(op, table, ids)?;
    Ok(Lookup {
        ids,
        offset: table.offset as usize,
        rows,
    })
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
        BatchInput::PreviousIds { .. } => "previous_ids",
        _ => "ids",
    }
}

fn draw(spec: &Draw, mut args: Args<'_, '_>) -> Result<(), OpError> {
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

fn log_probability(spec: &LogProbability, mut args: Args<'_, '_>) -> Result<(), OpError> {
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
    // The log probability of token `t` is computed from the logits of token `t − 1`; it is 0 for the first token of a sequence.
    let one = |t: usize, scratch: &mut Vec<f32>| {
        if t == 0 || positions[t] == 0 {
            return 0.0;
        }
        let row = &logits[(t - 1) * width..t * width];
        scratch.clear();
        scratch.extend_from_slice(row);
        let sum = rows::log_sum_exp(scratch);
        row[ids[t] as usize] - sum
    };
    out.par_iter_mut()
        .enumerate()
        .for_each_init(Vec::new, |scratch, (t, out)| *out = one(t, scratch));
    Ok(())
}

fn embedding(spec: &Embedding, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (op, tokens, width) = (args.op(), args.extents.tokens, u64::from(spec.width));
    let ids = args.i32s(ids_param(spec.table.ids), tokens)?;
    let rows = args.real("table", &[u64::from(spec.table.rows), width])?;
    let lookup = lookup(op, &spec.table, ids, rows)?;
    let out = args.out(&[tokens, width])?;
    let width = width as usize;
    for_row_blocks(out, width, &|first, out| {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            out.copy_from_slice(lookup.row(first + i, width));
        }
    });
    Ok(())
}

fn embedding_layer_norm(spec: &EmbeddingLayerNorm, mut args: Args<'_, '_>) -> Result<(), OpError> {
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
        .map(|(table, (ids, rows))| lookup(op, table, ids, rows))
        .collect::<Result<Vec<_>, _>>()?;
    let out = args.out(&[tokens, width])?;
    normalize_rows(Sum::Tables(&lookups), gamma, beta, spec.eps, out);
    Ok(())
}
