//! Pooling of tokens to one row per sequence, and normalization to unit length.

use gemmule_cpu::{
    parallel::for_row_blocks,
    rows::{MeanRows, Pooled, UnitRows},
};

use super::args::{Args, Sequence};
use super::{OpError, forms};
use crate::kernels::{
    pooling::{
        L2Normalize, MaxPool, MeanPool, MeanPoolNormalize, TokenOfSequence, TokenPosition, larger,
    },
    weighted_pool::WeightedPool,
};

forms! {
    TokenOfSequence => token_of_sequence;
    MeanPool => mean_pool;
    MaxPool => max_pool;
    WeightedPool => weighted_pool;
    L2Normalize => l2_normalize;
    MeanPoolNormalize => mean_pool_normalize;
}

fn token_of_sequence(spec: &TokenOfSequence, mut args: Args<'_, '_>) -> Result<(), OpError> {
    if spec.which == TokenPosition::Last {
        return for_sequences(spec.width, args, &|x, out| {
            if let Some(row) = x.chunks_exact(out.len()).next_back() {
                out.copy_from_slice(row);
            }
        });
    }
    // A sequence may start at any token, because pooling may leave out prompts.
    let (tokens, batch) = (args.extents.tokens, args.extents.batch);
    let x = args.real("x", &[tokens, spec.width.into()])?;
    let first = args.first_tokens()?;
    let out = args.out(&[batch, spec.width.into()])?;
    let width = spec.width as usize;
    for (&first, out) in first.iter().zip(out.chunks_exact_mut(width)) {
        out.copy_from_slice(&x[first as usize * width..][..width]);
    }
    Ok(())
}

fn max_pool(spec: &MaxPool, args: Args<'_, '_>) -> Result<(), OpError> {
    for_sequences(spec.width, args, &|x, out| {
        out.fill(f32::NEG_INFINITY);
        for row in x.chunks_exact(out.len()) {
            // The assignment is unconditional, because a branch per element would prevent vectorization.
            for (top, &x) in out.iter_mut().zip(row) {
                *top = larger(*top, x);
            }
        }
    })
}

fn weighted_pool(spec: &WeightedPool, args: Args<'_, '_>) -> Result<(), OpError> {
    for_sequences(spec.width, args, &|x, out| {
        out.fill(0.0);
        // The weights, not the sum, are divided by the divisor of the sequence, so that the sums of long sequences stay small.
        let share = 1.0 / spec.weights.divisor(x.len() / out.len());
        for (token, row) in x.chunks_exact(out.len()).enumerate() {
            let weight = (spec.weights.of(token) * share) as f32;
            for (sum, &x) in out.iter_mut().zip(row) {
                *sum += weight * x;
            }
        }
    })
}

/// Computes a row of the result for each sequence, from the rows of the sequence.
fn for_sequences(
    width: u32,
    mut args: Args<'_, '_>,
    row: &(dyn Fn(&[f32], &mut [f32]) + Sync),
) -> Result<(), OpError> {
    let (tokens, batch) = (args.extents.tokens, args.extents.batch);
    let x = args.real("x", &[tokens, width.into()])?;
    let sequences = args.pooled_sequences()?;
    let out = args.out(&[batch, width.into()])?;
    let width = width as usize;
    for_row_blocks(out, width, &|first, out| {
        for (sequence, out) in sequences[first..].iter().zip(out.chunks_exact_mut(width)) {
            row(&x[sequence.start * width..][..sequence.len * width], out);
        }
    });
    Ok(())
}

fn mean_pool(spec: &MeanPool, args: Args<'_, '_>) -> Result<(), OpError> {
    pool(spec.width, None, args)
}

fn mean_pool_normalize(spec: &MeanPoolNormalize, args: Args<'_, '_>) -> Result<(), OpError> {
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
    let sequences: Vec<Pooled> = args.pooled_sequences()?.iter().map(pooled).collect();
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

fn l2_normalize(spec: &L2Normalize, mut args: Args<'_, '_>) -> Result<(), OpError> {
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
