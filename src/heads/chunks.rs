//! Vectors of chunks from the states of their tokens, for late chunking (Günther et al. 2024, arXiv:2409.04701).

use std::ops::Range;

use crate::text::ChunkPooling;

/// Returns the vector of each chunk: the mean of its tokens' states, truncated to `pooling.width` values and, if `pooling.normalizes`,
/// scaled to norm 1. `states` is `[n_tokens, width]`, with a row for each token of the whole sequence. `ranges` has the token range of each
/// chunk.
pub fn pool_chunks(
    states: &[f32],
    n_tokens: usize,
    ranges: &[Range<usize>],
    pooling: ChunkPooling,
) -> Vec<Vec<f32>> {
    let width = states.len() / n_tokens.max(1);
    let kept = pooling.width.map_or(width, |kept| width.min(kept as usize));
    let pooled = ranges.iter().map(|range| {
        let mut sums = vec![0.0_f64; kept];
        let rows = states.chunks_exact(width.max(1));
        for row in rows.skip(range.start).take(range.len()) {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += f64::from(*value);
            }
        }
        let mut scale = 1.0 / range.len().max(1) as f64;
        if pooling.normalizes {
            let square: f64 = sums.iter().map(|sum| (sum * scale).powi(2)).sum();
            // The min norm is that of `torch.nn.functional.normalize`.
            scale /= square.sqrt().max(1e-12);
        }
        sums.into_iter().map(|sum| (sum * scale) as f32).collect()
    });
    pooled.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_the_mean_of_its_tokens() {
        let states = [3.0, 4.0, 9.0, 1.0, 2.0, 9.0, 0.0, 0.0, 9.0];
        let plain = ChunkPooling {
            normalizes: false,
            width: None,
        };
        let pool = |pooling| pool_chunks(&states, 3, &[0..1, 1..3], pooling);
        assert_eq!(pool(plain), [[3.0, 4.0, 9.0], [0.5, 1.0, 9.0]]);
        let cut = ChunkPooling {
            normalizes: true,
            width: Some(2),
        };
        let [first, _] = pool(cut).try_into().unwrap();
        assert_eq!(first, [0.6, 0.8]);
    }
}
