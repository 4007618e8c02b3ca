//! Limits on the sizes of kernels in programs that are read from files. Executors need them, because they multiply sizes without overflow
//! checks.

use super::rows::Teams;
use crate::{
    ops::{AttentionProblem, HeadView, MAX_WIDTH},
    tensor::DType,
};

/// Max number of elements of a tensor, which is more than the memory of any GPU can hold.
pub const MAX_ELEMENTS: u64 = 1 << 40;

pub(super) fn real(what: &str, value: f32) -> Result<(), String> {
    match value.is_finite() {
        true => Ok(()),
        false => Err(format!("{what} is {value}, expected a finite number")),
    }
}

pub(super) fn eps(value: f32) -> Result<(), String> {
    match value.is_finite() && value > 0.0 {
        true => Ok(()),
        false => Err(format!("eps is {value}, expected a finite number above 0")),
    }
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

pub(super) fn groups(heads: u32, kv_heads: u32) -> Result<(), String> {
    match heads.is_multiple_of(kv_heads) {
        true => Ok(()),
        false => Err(format!(
            "{heads} query heads for {kv_heads} key heads, expected a divisor of {heads}"
        )),
    }
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

/// Returns the view of heads that are adjacent columns, from column `offset`, in rows of `stride` elements.
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
