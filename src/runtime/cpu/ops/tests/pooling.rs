use super::*;
use crate::kernels::pooling::{
    L2Normalize, MaxPool, MeanPool, MeanPoolNormalize, TokenOfSequence, TokenPosition,
};
use crate::{kernels::weighted_pool::WeightedPool, ops::PoolWeights};

const WIDTHS: [usize; 4] = [1, 7, 16, 40];

fn means(batch: &Batch, x: &[f32], width: usize) -> Vec<f64> {
    let mut out = Vec::new();
    for (start, _, len) in batch.sequences() {
        for c in 0..width {
            let sum: f64 = (start..start + len)
                .map(|t| f64::from(x[t * width + c]))
                .sum();
            out.push(sum / len as f64);
        }
    }
    out
}

fn unit_rows(x: &[f64], width: usize, eps: f64) -> Vec<f64> {
    x.chunks_exact(width)
        .flat_map(|row| {
            let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt().max(eps);
            row.iter().map(move |x| x / norm)
        })
        .collect()
}

#[test]
fn first_and_last_token_select_a_row_of_each_sequence() {
    for (batch, which) in batches().into_iter().flat_map(|batch| {
        [
            (batch.clone(), TokenPosition::First),
            (batch, TokenPosition::Last),
        ]
    }) {
        for width in WIDTHS {
            let x = noise(batch.tokens() * width, 1);
            let spec = KernelSpec::TokenOfSequence(TokenOfSequence {
                which,
                width: width as u32,
                dtype: F32,
            });
            let reads = [Read::Real(&x), Read::I32(&batch.cu_lens)];
            let got = output(&spec, &batch.extents, &reads, batch.lens.len() * width);
            let want: Vec<f32> = batch
                .sequences()
                .map(|(start, _, len)| match which {
                    TokenPosition::First => start,
                    TokenPosition::Last => start + len - 1,
                })
                .flat_map(|token| &x[token * width..][..width])
                .copied()
                .collect();
            assert_eq!(got, want);
        }
    }
}

#[test]
fn max_pool_is_the_largest_of_each_column_and_keeps_a_nan() {
    for batch in batches() {
        for width in WIDTHS {
            // All values are negative, so that a spurious 0 would be the maximum.
            let noise = noise(batch.tokens() * width, 1);
            let mut x: Vec<f32> = noise.iter().map(|x| x - 2.0).collect();
            let spec = KernelSpec::MaxPool(MaxPool {
                width: width as u32,
                dtype: F32,
            });
            let pooled = |x: &[f32]| {
                let reads = [Read::Real(x), Read::I32(&batch.cu_lens)];
                output(&spec, &batch.extents, &reads, batch.lens.len() * width)
            };
            let got = pooled(&x);
            for (row, (start, _, len)) in got.chunks(width).zip(batch.sequences()) {
                for (c, &got) in row.iter().enumerate() {
                    let column = (start..start + len).map(|t| x[t * width + c]);
                    assert_eq!(got, column.fold(f32::NEG_INFINITY, f32::max));
                }
            }
            x[0] = f32::NAN;
            let with_nan = pooled(&x);
            assert!(with_nan[0].is_nan());
            assert_eq!(with_nan[1..], got[1..]);
        }
    }
}

#[test]
fn mean_pool_is_the_mean_over_each_sequence() {
    for batch in batches() {
        for width in WIDTHS {
            let x = noise(batch.tokens() * width, 1);
            let spec = KernelSpec::MeanPool(MeanPool {
                width: width as u32,
                dtype: F32,
            });
            let reads = [Read::Real(&x), Read::I32(&batch.cu_lens)];
            let got = output(&spec, &batch.extents, &reads, batch.lens.len() * width);
            assert_close(&got, &means(&batch, &x, width), 1e-6);
        }
    }
}

#[test]
fn weighted_pools_are_sums_by_position_and_by_the_root_of_the_length() {
    for (batch, weights) in batches()
        .into_iter()
        .flat_map(|batch| PoolWeights::ALL.map(|weights| (batch.clone(), weights)))
    {
        for width in WIDTHS {
            let x = noise(batch.tokens() * width, 1);
            let spec = KernelSpec::WeightedPool(WeightedPool {
                weights,
                width: width as u32,
                dtype: F32,
            });
            let reads = [Read::Real(&x), Read::I32(&batch.cu_lens)];
            let got = output(&spec, &batch.extents, &reads, batch.lens.len() * width);
            let sum = |(start, _, len): (usize, usize, usize), c: usize| {
                let column =
                    (0..len).map(|i| weights.of(i) * f64::from(x[(start + i) * width + c]));
                column.sum::<f64>() / weights.divisor(len)
            };
            let each = batch.sequences();
            let want = each.flat_map(|sequence| (0..width).map(move |c| sum(sequence, c)));
            assert_close(&got, &want.collect::<Vec<_>>(), 3e-6);
        }
    }
}

#[test]
fn mean_pool_normalize_is_a_mean_of_length_one() {
    for batch in batches() {
        for width in WIDTHS {
            let x = noise(batch.tokens() * width, 1);
            let spec = KernelSpec::MeanPoolNormalize(MeanPoolNormalize {
                width: width as u32,
                eps: 1e-12,
                dtype: F32,
            });
            let reads = [Read::Real(&x), Read::I32(&batch.cu_lens)];
            let got = output(&spec, &batch.extents, &reads, batch.lens.len() * width);
            let want = unit_rows(&means(&batch, &x, width), width, 1e-12);
            assert_close(&got, &want, 3e-6);
        }
    }
}

#[test]
fn l2_normalize_divides_by_the_norm_or_eps() {
    for width in WIDTHS {
        let mut x = noise(5 * width, 1);
        // A row of zeros, and a row whose norm is below eps.
        x[width..2 * width].fill(0.0);
        x[2 * width..3 * width].iter_mut().for_each(|x| *x *= 1e-4);
        let spec = KernelSpec::L2Normalize(L2Normalize {
            width: width as u32,
            eps: 1e-2,
            dtype: F32,
        });
        let extents = Batch::new(&[1]).extents.with_rows(5);
        let got = output(&spec, &extents, &[Read::Real(&x)], 5 * width);
        let want = unit_rows(&wide(&x), width, f64::from(1e-2_f32));
        assert_close(&got, &want, 1e-6);
    }
}
