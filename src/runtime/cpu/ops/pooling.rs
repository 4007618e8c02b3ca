//! Pooling of tokens to one row per sequence, and normalization to unit length.

use pulp::{Simd, WithSimd};

use super::OpError;
use super::args::{Args, Sequence};
use super::parallel::for_row_blocks;
use super::simd::{self, Times};
use crate::kernels::pooling::{
    L2Normalize, MaxPool, MeanPool, MeanPoolNormalize, TokenOfSequence, TokenPosition, larger,
};

pub(super) fn token_of_sequence(
    spec: &TokenOfSequence,
    mut args: Args<'_, '_>,
) -> Result<(), OpError> {
    let (tokens, batch) = (args.extents.tokens, args.extents.batch);
    let width = u64::from(spec.width);
    let x = args.real("x", &[tokens, width])?;
    let sequences = args.sequences()?;
    let out = args.out(&[batch, width])?;
    let width = width as usize;
    for_row_blocks(out, width, |first, out| {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            let sequence = &sequences[first + i];
            let token = match spec.which {
                TokenPosition::First => sequence.start,
                TokenPosition::Last => sequence.start + sequence.len - 1,
            };
            out.copy_from_slice(&x[token * width..][..width]);
        }
    });
    Ok(())
}

pub(super) fn max_pool(spec: &MaxPool, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (tokens, batch) = (args.extents.tokens, args.extents.batch);
    let width = u64::from(spec.width);
    let x = args.real("x", &[tokens, width])?;
    let sequences = args.sequences()?;
    let out = args.out(&[batch, width])?;
    let width = width as usize;
    for_row_blocks(out, width, |first, out| {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            let sequence = &sequences[first + i];
            let x = &x[sequence.start * width..][..sequence.len * width];
            out.fill(f32::NEG_INFINITY);
            for row in x.chunks_exact(width) {
                // A branch per element would prevent vectorization.
                for (top, &x) in out.iter_mut().zip(row) {
                    *top = larger(*top, x);
                }
            }
        }
    });
    Ok(())
}

pub(super) fn mean_pool(spec: &MeanPool, args: Args<'_, '_>) -> Result<(), OpError> {
    pool(spec.width, None, args)
}

pub(super) fn mean_pool_normalize(
    spec: &MeanPoolNormalize,
    args: Args<'_, '_>,
) -> Result<(), OpError> {
    pool(spec.width, Some(spec.eps), args)
}

fn pool(width: u32, normalize: Option<f32>, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (tokens, batch) = (args.extents.tokens, args.extents.batch);
    let x = args.real("x", &[tokens, u64::from(width)])?;
    let sequences = args.sequences()?;
    let out = args.out(&[batch, u64::from(width)])?;
    let width = width as usize;
    for_row_blocks(out, width, |first, out| {
        let n = out.len() / width;
        simd::dispatch(Pool {
            x,
            sequences: &sequences[first..first + n],
            normalize,
            width,
            out,
        });
    });
    Ok(())
}

struct Pool<'a> {
    x: &'a [f32],
    sequences: &'a [Sequence],
    normalize: Option<f32>,
    /// Row width, not 0.
    width: usize,
    out: &'a mut [f32],
}

impl WithSimd for Pool<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.width;
        let rows = self.out.chunks_exact_mut(width);
        for (sequence, out) in self.sequences.iter().zip(rows) {
            out.fill(0.0);
            let x = &self.x[sequence.start * width..][..sequence.len * width];
            for x in x.chunks_exact(width) {
                simd::accumulate(simd, x, out);
            }
            simd::map_in_place(simd, Times(1.0 / sequence.len as f32), out);
            if let Some(eps) = self.normalize {
                unit(simd, out, eps);
            }
        }
    }
}

pub(super) fn l2_normalize(spec: &L2Normalize, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let shape = [args.extents.rows, u64::from(spec.width)];
    let x = args.real("x", &shape)?;
    let out = args.out(&shape)?;
    let width = spec.width as usize;
    for_row_blocks(out, width, |first, out| {
        out.copy_from_slice(&x[first * width..][..out.len()]);
        simd::dispatch(UnitRows {
            width,
            eps: spec.eps,
            out,
        });
    });
    Ok(())
}

struct UnitRows<'a> {
    /// Row width, not 0.
    width: usize,
    eps: f32,
    out: &'a mut [f32],
}

impl WithSimd for UnitRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for row in self.out.chunks_exact_mut(self.width) {
            unit(simd, row, self.eps);
        }
    }
}

/// Divides a row by `max(‖row‖₂, eps)`.
#[inline(always)]
fn unit<S: Simd>(simd: S, row: &mut [f32], eps: f32) {
    let norm = simd::sum_of_squares(simd, row, 0.0).sqrt();
    // `f32::max` would turn a NaN norm into `eps`.
    let norm = if norm < eps { eps } else { norm };
    simd::map_in_place(simd, Times(1.0 / norm), row);
}
