//! Limits on the sizes of kernels, for programs from files. An executor multiplies sizes without checks.

use super::{
    attention::MhaCached,
    cache::BLOCK,
    elementwise::Concat,
    embedding::{EmbeddingLayerNorm, Table},
    gemm::{Gemm, Tile},
    layernorm::Teams,
    prepare_attention::PrepareAttention,
};
use crate::{
    ops::{AttentionProblem, HeadView, MAX_ROWS, MAX_WIDTH},
    tensor::DType,
};

/// Max elements of a tensor. It exceeds the memory of any machine.
pub const MAX_ELEMENTS: u64 = 1 << 40;

pub(super) fn real(what: &str, value: f32) -> Result<(), String> {
    match value.is_finite() {
        true => Ok(()),
        false => Err(format!("{what} is {value}")),
    }
}

pub(super) fn eps(value: f32) -> Result<(), String> {
    match value.is_finite() && value > 0.0 {
        true => Ok(()),
        false => Err(format!("eps is {value}")),
    }
}

/// Checks the preparation of attention's operands.
pub(super) fn prepared(k: &PrepareAttention) -> Result<(), String> {
    widths(&[k.row])?;
    heads(k.heads, k.head, &[])?;
    heads(k.kv_heads.saturating_mul(2), k.head, &[])?;
    k.norm.map_or(Ok(()), eps)?;
    k.check()?;
    match k.stride {
        Some(blocks) => stride(blocks, 2 * k.kv_heads, k.head),
        None => Ok(()),
    }
}

/// Checks the sizes of attention to a cache.
pub(super) fn cached(k: &MhaCached) -> Result<(), String> {
    heads(k.heads, k.head, &[k.q])?;
    heads(k.kv_heads, k.head, &[])?;
    stride(k.stride, k.kv_heads, k.head)
}

pub(super) fn widths(all: &[u32]) -> Result<(), String> {
    match all.iter().find(|w| !(1..=MAX_WIDTH).contains(*w)) {
        None => Ok(()),
        Some(width) => Err(format!("a width of {width}, expected 1 to {MAX_WIDTH}")),
    }
}

/// Checks the operands of fused attention.
pub(super) fn attention(of: &AttentionProblem) -> Result<(), String> {
    let mut operands = of.operands().into_iter();
    operands.try_for_each(|(_, view, n)| heads(n, of.head, &[view]))?;
    groups(of.heads, of.kv_heads)
}

/// Checks that a cache of these heads fits a block.
pub(super) fn stride(stride: u64, heads: u32, head: u32) -> Result<(), String> {
    let least = u64::from(heads) * u64::from(head) * u64::from(BLOCK);
    match (least..=MAX_ELEMENTS).contains(&stride) {
        true => Ok(()),
        false => Err(format!(
            "blocks of {stride} elements, expected at least {least}"
        )),
    }
}

pub(super) fn groups(heads: u32, kv_heads: u32) -> Result<(), String> {
    match heads.is_multiple_of(kv_heads) {
        true => Ok(()),
        false => Err(format!("{heads} heads in {kv_heads} groups")),
    }
}

pub(super) fn parts(concat: &Concat) -> Result<(), String> {
    let n = concat.widths.len();
    if !(2..=Concat::MAX_PARTS).contains(&n) {
        return Err(format!("{n} parts, expected 2 to {}", Concat::MAX_PARTS));
    }
    widths(&concat.widths)?;
    widths(&[concat.width()])
}

pub(super) fn teams(teams: Teams, width: u32, dtype: DType) -> Result<(), String> {
    match teams.fits(width, dtype) {
        true => Ok(()),
        false => Err(format!("{teams:?} cannot hold rows of {width} {dtype}")),
    }
}

pub(super) fn columns(start: u32, width: u32, of: u32) -> Result<(), String> {
    if u64::from(start) + u64::from(width) > u64::from(of) {
        return Err(format!("{width} columns from {start} on, in rows of {of}"));
    }
    Ok(())
}

/// Returns the view of adjacent heads in rows.
pub(super) fn columns_of(offset: u32, stride: u32) -> HeadView {
    HeadView::TokenMajor { offset, stride }
}

pub(super) fn heads(heads: u32, head: u32, views: &[HeadView]) -> Result<(), String> {
    widths(&[heads, head])?;
    let width = heads
        .checked_mul(head)
        .filter(|&w| w <= MAX_WIDTH)
        .ok_or_else(|| format!("{heads} heads of {head}, at most {MAX_WIDTH} columns fit"))?;
    for view in views {
        if let HeadView::TokenMajor { offset, stride } = *view {
            widths(&[stride])?;
            columns(offset, width, stride)?;
        }
    }
    Ok(())
}

pub(super) fn tables(tables: &[Table]) -> Result<(), String> {
    if !(1..=EmbeddingLayerNorm::MAX_TABLES).contains(&tables.len()) {
        return Err(format!(
            "{} tables, expected 1 to {}",
            tables.len(),
            EmbeddingLayerNorm::MAX_TABLES
        ));
    }
    for table in tables {
        if table.offset >= table.rows || table.rows > MAX_ROWS {
            return Err(format!(
                "a table of {} rows, read from row {} on",
                table.rows, table.offset
            ));
        }
    }
    Ok(())
}

pub(super) fn gemm(gemm: &Gemm) -> Result<(), String> {
    // The width of a GEMM over the vocabulary is limited like the rows of a table.
    for size in [gemm.n, gemm.k] {
        if !(1..=MAX_ROWS).contains(&size) {
            return Err(format!("a width of {size}, expected 1 to {MAX_ROWS}"));
        }
    }
    if !Tile::candidates(gemm.dtype).contains(&gemm.tile) {
        return Err(format!("{:?} is not a tile for {}", gemm.tile, gemm.dtype));
    }
    Ok(())
}
