//! Scores of late interaction.

use std::iter::zip;

use pulp::{Simd, WithSimd};

use crate::parallel::{self, SharedOut};
use crate::product::{Into, Operand, multiply};
use crate::runs;

/// Number of document rows that are multiplied by the query at once. The products of a block stay in the L2 cache.
const BLOCK: usize = 256;

/// Scores documents for a query. Each row of the query contributes its max product with a row of the document. The score is the sum of
/// these products in f32. A document without rows scores 0.
///
/// # Panics
/// Panics if a slice is not whole rows of `width`, if `ends` decreases or does not end with the last row, or if `out` and `ends` differ in
/// length.
pub struct MaxSim<'a> {
    /// Rows of the query, `[rows, width]`.
    pub query: &'a [f32],
    /// Rows of all documents one after another, `[rows, width]`.
    pub documents: &'a [f32],
    /// Number of columns, not 0.
    pub width: usize,
    /// For each document, the number of rows of `documents` up to its end.
    pub ends: &'a [usize],
    /// Receives the score of each document.
    pub out: &'a mut [f32],
}

/// Scratch memory of a task.
#[derive(Default)]
struct Scratch {
    products: Vec<f32>,
    largest: Vec<f32>,
}

impl MaxSim<'_> {
    /// Computes the scores, in parallel if there is enough work.
    pub fn run(self) {
        let Self {
            query,
            documents,
            width,
            ends,
            out,
        } = self;
        let (n_queries, n_rows) = (query.len() / width, documents.len() / width);
        assert!(
            n_queries * width == query.len()
                && n_rows * width == documents.len()
                && ends.is_sorted()
                && ends.last().copied().unwrap_or(0) == n_rows
                && ends.len() == out.len(),
            "rows are whole, and documents end at theirs"
        );
        if n_queries == 0 {
            out.fill(0.0);
            return;
        }
        // Each task has consecutive documents with about `BLOCK` rows in total.
        let mut tasks = Vec::new();
        let (mut first, mut from) = (0, 0);
        for (at, &end) in ends.iter().enumerate() {
            if end - from >= BLOCK || at + 1 == ends.len() {
                tasks.push((first..at + 1, from..end));
                (first, from) = (at + 1, end);
            }
        }
        let scores = SharedOut::new(out);
        let work = n_queries.saturating_mul(documents.len());
        parallel::with_scratch(tasks.len(), work, &|scratch: &mut Scratch, i| {
            let (members, rows) = tasks[i].clone();
            // SAFETY: no two tasks have the same document.
            let scores = unsafe { scores.slice(members.clone()) };
            let Scratch { products, largest } = scratch;
            largest.clear();
            largest.resize(n_queries, f32::NEG_INFINITY);
            let mut ends = members.map(|at| ends[at]).zip(scores).peekable();
            let mut row = rows.start;
            for block in rows.clone().step_by(BLOCK) {
                let n = BLOCK.min(rows.end - block);
                products.resize(n * n_queries, 0.0);
                let to = SharedOut::new(products);
                let queries = rows_from(query, width, 0).transposed();
                // SAFETY: only this task accesses its products.
                unsafe {
                    multiply(
                        (n, n_queries, width),
                        1.0,
                        rows_from(documents, width, block),
                        queries,
                        Into::Overwrite,
                        &to,
                        0,
                        n_queries,
                    );
                }
                let end_of_block = block + n;
                while row < end_of_block {
                    finish(&mut ends, row, largest);
                    let end = ends.peek().map_or(end_of_block, |(end, _)| *end);
                    let to = end.min(end_of_block);
                    let rows = &products[(row - block) * n_queries..(to - block) * n_queries];
                    Largest { rows, largest }.run();
                    row = to;
                }
            }
            finish(&mut ends, row, largest);
        });
    }
}

fn rows_from(data: &[f32], width: usize, row: usize) -> Operand<'_> {
    Operand {
        data: &data[row * width..],
        row: width,
        col: 1,
    }
}

/// Writes the scores of the documents whose rows end at `row`.
fn finish<'s>(
    ends: &mut std::iter::Peekable<impl Iterator<Item = (usize, &'s mut f32)>>,
    row: usize,
    largest: &mut [f32],
) {
    while let Some((_, score)) = ends.next_if(|(end, _)| *end <= row) {
        let is_empty = largest.first() == Some(&f32::NEG_INFINITY);
        *score = match is_empty {
            true => 0.0,
            false => largest.iter().sum(),
        };
        largest.fill(f32::NEG_INFINITY);
    }
}

/// Updates `largest` with the max of each column of the rows.
struct Largest<'a> {
    rows: &'a [f32],
    largest: &'a mut [f32],
}

runs!(Largest);

impl WithSimd for Largest<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (max, max_rest) = S::as_mut_simd_f32s(self.largest);
        for row in self
            .rows
            .chunks_exact(max.len() * S::F32_LANES + max_rest.len())
        {
            let (row, row_rest) = S::as_simd_f32s(row);
            for (max, &x) in zip(max.iter_mut(), row) {
                *max = simd.max_f32s(*max, x);
            }
            for (max, &x) in zip(max_rest.iter_mut(), row_rest) {
                *max = max.max(x);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values with few significant bits, so that products and sums are exact.
    fn values(n: usize, seed: usize) -> Vec<f32> {
        let value = |i: usize| ((i * 37 + seed * 11) % 17) as f32 - 8.0;
        (0..n).map(value).collect()
    }

    fn expected(query: &[f32], documents: &[f32], width: usize, ends: &[usize]) -> Vec<f32> {
        let mut from = 0;
        let score = |&end: &usize| {
            let rows = &documents[from * width..end * width];
            from = end;
            let product = |a: &[f32], b: &[f32]| zip(a, b).map(|(a, b)| a * b).sum::<f32>();
            let largest = |q: &[f32]| {
                let products = rows.chunks_exact(width).map(|row| product(q, row));
                products.reduce(f32::max).unwrap_or(0.0)
            };
            query.chunks_exact(width).map(largest).sum()
        };
        ends.iter().map(score).collect()
    }

    #[test]
    fn scores_are_sums_of_maxima_whatever_the_lengths() {
        let lengths: [&[usize]; 6] = [
            &[1],
            &[0],
            &[],
            &[3, 0, 0, 700, 1, 255, 1, 256, 0],
            &[256, 256, 512],
            &[20; 300],
        ];
        for (seed, lens) in lengths.into_iter().enumerate() {
            for (n_queries, width) in [(0, 4), (1, 1), (7, 5), (32, 16), (65, 8)] {
                let ends: Vec<usize> = (1..=lens.len()).map(|n| lens[..n].iter().sum()).collect();
                let end = ends.last().copied().unwrap_or(0);
                let query = values(n_queries * width, seed);
                let documents = values(end * width, seed + 1);
                let mut out = vec![f32::NAN; ends.len()];
                let run = MaxSim {
                    query: &query,
                    documents: &documents,
                    width,
                    ends: &ends,
                    out: &mut out,
                };
                run.run();
                assert_eq!(
                    out,
                    expected(&query, &documents, width, &ends),
                    "{n_queries} {width} {lens:?}"
                );
            }
        }
    }

    #[test]
    #[should_panic(expected = "documents end")]
    fn a_document_past_the_last_row_is_refused() {
        let run = MaxSim {
            query: &[1.0],
            documents: &[1.0],
            width: 1,
            ends: &[2],
            out: &mut [0.0],
        };
        run.run();
    }
}
