//! The parts of attention in f64, head by head.

use super::{Batch, softmax};
use crate::ops::{Bias, HeadView, PositionBias};

/// Dimensions of heads, independent of their layout.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub(super) heads: usize,
    /// Number of heads of keys and values.
    pub(super) kv_heads: usize,
    pub(super) head: usize,
    pub(super) tokens: usize,
}

impl Heads {
    pub(super) fn index(self, view: HeadView, h: usize, t: usize, c: usize) -> usize {
        match view {
            HeadView::HeadMajor => (h * self.tokens + t) * self.head + c,
            HeadView::TokenMajor { offset, stride } => {
                t * stride as usize + offset as usize + h * self.head + c
            }
        }
    }

    /// Calls `f` with the head, the first token and the length for each head of each sequence.
    pub(super) fn each(self, batch: &Batch, mut f: impl FnMut(usize, usize, usize)) {
        for h in 0..self.heads {
            for (start, n) in batch.sequences() {
                f(h, start, n);
            }
        }
    }

    pub(super) fn scores(
        self,
        batch: &Batch,
        (q, k): (&[f64], &[f64]),
        views: [HeadView; 2],
    ) -> Vec<f64> {
        let mut out = Vec::new();
        self.each(batch, |h, start, n| {
            for i in start..start + n {
                for j in start..start + n {
                    let dot = (0..self.head).map(|c| {
                        q[self.index(views[0], h, i, c)]
                            * k[self.index(views[1], self.kv_head(h), j, c)]
                    });
                    out.push(dot.sum());
                }
            }
        });
        out
    }

    /// Returns the key head of a query head.
    pub(super) fn kv_head(self, h: usize) -> usize {
        h / (self.heads / self.kv_heads)
    }

    /// Computes the softmax of the scaled, capped and biased scores over the keys that each query attends to. `operands` are the bias and
    /// the sinks.
    pub(super) fn softmax(
        self,
        batch: &Batch,
        scores: &[f64],
        scale: f32,
        causal: bool,
        (by, operands): (PositionBias, &[&[f64]]),
    ) -> Vec<f64> {
        let biases = by.bias.and(operands.first());
        let sinks = operands.last().filter(|_| by.sinks);
        let mut out = Vec::new();
        self.each(batch, |h, _, n| {
            for i in 0..n {
                let row = &scores[out.len()..][..n];
                let biased = |j: usize| {
                    let distance = j as i64 - i as i64;
                    if (causal && j > i)
                        || by
                            .window
                            .is_some_and(|w| distance.unsigned_abs() > w.into())
                    {
                        return f64::NEG_INFINITY;
                    }
                    let bias = match (by.bias, biases) {
                        (Some(Bias::Table { reach }), Some(biases)) => {
                            let reach = i64::from(reach);
                            let column = distance.clamp(-reach, reach) + reach;
                            biases[h * (2 * reach as usize + 1) + column as usize]
                        }
                        (Some(Bias::Slopes), Some(slopes)) => -slopes[h] * distance.abs() as f64,
                        _ => 0.0,
                    };
                    let scaled = f64::from(scale) * row[j];
                    let capped = by.cap.map_or(scaled, |cap| {
                        let cap = f64::from(cap.get());
                        cap * (scaled / cap).tanh()
                    });
                    capped + bias
                };
                let sink = sinks.map(|sinks| sinks[h]);
                let row: Vec<f64> = (0..n).map(biased).chain(sink).collect();
                // The probability of the sink is dropped.
                out.extend_from_slice(&softmax(&row, 1.0)[..n]);
            }
        });
        out
    }

    pub(super) fn context(
        self,
        batch: &Batch,
        p: &[f64],
        v: &[f64],
        views: [HeadView; 2],
    ) -> Vec<f64> {
        let mut out = vec![0.0; self.tokens * self.heads * self.head];
        let mut at = 0;
        self.each(batch, |h, start, n| {
            for i in start..start + n {
                for c in 0..self.head {
                    let terms = (0..n).map(|j| {
                        p[at + j] * v[self.index(views[0], self.kv_head(h), start + j, c)]
                    });
                    out[self.index(views[1], h, i, c)] = terms.sum();
                }
                at += n;
            }
        });
        out
    }
}

pub(super) fn transpose(shape: Heads, x: &[f64], from: HeadView, to: HeadView) -> Vec<f64> {
    let mut out = vec![0.0; x.len()];
    for h in 0..shape.heads {
        for t in 0..shape.tokens {
            for c in 0..shape.head {
                out[shape.index(to, h, t, c)] = x[shape.index(from, h, t, c)];
            }
        }
    }
    out
}

/// Divides each head by its root mean square, and multiplies it by a row of the weight. If `centered`, first subtracts the mean.
pub(super) fn norm(x: &[f64], weight: &[f64], head: usize, eps: f64, centered: bool) -> Vec<f64> {
    let of_head = |(x, weight): (&[f64], &[f64])| {
        let mean = match centered {
            true => x.iter().sum::<f64>() / head as f64,
            false => 0.0,
        };
        let square = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / head as f64;
        let norm = (square + eps).sqrt();
        let scaled = x.iter().zip(weight).map(|(v, w)| (v - mean) / norm * w);
        scaled.collect::<Vec<f64>>()
    };
    let weights = weight.chunks(head).cycle();
    x.chunks(head).zip(weights).flat_map(of_head).collect()
}
