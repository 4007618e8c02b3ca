//! Pooling of tokens to one row per sequence, and normalization to unit length.

use gemmule_cpu::{
    parallel::for_row_blocks,
    rows::{MeanRows, Pooled, UnitRows},
};

use super::OpError;
use super::args::{Args, Sequence};
use crate::kernels::{
    pooling::{
        L2Normalize, MaxPool, MeanPool, MeanPoolNormalize, TokenOfSequence, TokenPosition, larger,
    },
    weighted_pool::WeightedPool,
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
    for_row_blocks(out, width, &|first, out| {
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
    for_row_blocks(out, width, &|first, out| {
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

pub(super) fn weighted_pool(spec: &WeightedPool, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (tokens, batch) = (args.extents.tokens, args.extents.batch);
    let width = u64::from(spec.width);
    let x = args.real("x", &[tokens, width])?;
    let sequences = args.sequences()?;
    let out = args.out(&[batch, width])?;
    let width = width as usize;
    for_row_blocks(out, width, &|first, out| {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            let sequence = &sequences[first + i];
            let x = &x[sequence.start * width..][..sequence.len * width];
            out.fill(0.0);
            // Divided weights keep the sums of long sequences small.
            let share = 1.0 / spec.weights.divisor(sequence.len);
            for (token, row) in x.chunks_exact(width).enumerate() {
                let weight = (spec.weights.of(token) * share) as f32;
                for (sum, &x) in out.iter_mut().zip(row) {
                    *sum += weight * x;
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

fn pooled(sequence: &Sequence) -> Pooled {
    Pooled {
        start: sequence.start,
        len: sequence.len,
    }
}

fn pool(width: u32, normalize: Option<f32>, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (tokens, batch) = (args.extents.tokens, args.extents.batch);
    let x = args.real("x", &[tokens, u64::from(width)])?;
    let sequences: Vec<Pooled> = args.sequences()?.iter().map(pooled).collect();
    let out = args.out(&[batch, u64::from(width)])?;
    let width = width as usize;
    for_row_blocks(out, width, &|first, out| {
        let n = out.len() / width;
        MeanRows {
            x,
            sequences: &sequences[first..first + n],
            normalize,
            width,
            out,
        }
        .run();
    });
    Ok(())
}

pub(super) fn l2_normalize(spec: &L2Normalize, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let shape = [args.extents.rows, u64::from(spec.width)];
    let x = args.real("x", &shape)?;
    let out = args.out(&shape)?;
    let width = spec.width as usize;
    for_row_blocks(out, width, &|first, out| {
        out.copy_from_slice(&x[first * width..][..out.len()]);
        UnitRows {
            width,
            eps: spec.eps,
            out,
        }
        .run();
    });
    Ok(())
}
