//! Late-interaction scores (MaxSim) of documents for a query.

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
/// Panics if a slice is not whole rows of `width`, or if `out` and `documents` differ in length.
pub struct MaxSim<'a> {
    /// Rows of the query, `[rows, width]`.
    pub query: &'a [f32],
    /// Rows of each document, `[rows, width]`.
    pub documents: &'a [&'a [f32]],
    /// Number of columns, not 0.
    pub width: usize,
    /// Receives the score of each document.
    pub out: &'a mut [f32],
}

/// Scratch memory of a task.
#[derive(Default)]
struct Scratch {
    /// Rows of short documents, which are multiplied together.
    rows: Vec<f32>,
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
            out,
        } = self;
        let n_queries = query.len() / width;
        let is_whole = |rows: &[f32]| rows.len().is_multiple_of(width);
        assert!(
            is_whole(query) && documents.iter().all(|rows| is_whole(rows)),
            "rows are whole"
        );
        assert_eq!(documents.len(), out.len(), "each document has a score");
        if n_queries == 0 {
            out.fill(0.0);
            return;
        }
        // Each task has consecutive documents with about `BLOCK` rows in total.
        let mut tasks = Vec::new();
        let (mut first, mut rows, mut all) = (0, 0, 0);
        for (at, document) in documents.iter().enumerate() {
            rows += document.len() / width;
            all += document.len();
            if rows >= BLOCK || at + 1 == documents.len() {
                tasks.push(first..at + 1);
                (first, rows) = (at + 1, 0);
            }
        }
        let scores = SharedOut::new(out);
        let work = n_queries.saturating_mul(all);
        parallel::with_scratch(tasks.len(), work, &|scratch: &mut Scratch, i| {
            let members = tasks[i].clone();
            // SAFETY: no two tasks have the same document.
            let scores = unsafe { scores.slice(members.clone()) };
            let Scratch {
                rows: copies,
                products,
                largest,
            } = scratch;
            let members = &documents[members];
            let rows = match members {
                [one] => one,
                several => {
                    copies.clear();
                    several
                        .iter()
                        .for_each(|rows| copies.extend_from_slice(rows));
                    &copies[..]
                }
            };
            largest.clear();
            largest.resize(n_queries, f32::NEG_INFINITY);
            let ends = members.iter().scan(0, |end, document| {
                *end += document.len() / width;
                Some(*end)
            });
            let mut ends = ends.zip(scores).peekable();
            let (mut row, n_rows) = (0, rows.len() / width);
            for block in (0..n_rows).step_by(BLOCK) {
                let n = BLOCK.min(n_rows - block);
                products.resize(n * n_queries, 0.0);
                let to = SharedOut::new(products);
                let queries = rows_from(query, width, 0).transposed();
                // SAFETY: only this task accesses its products.
                unsafe {
                    multiply(
                        (n, n_queries, width),
                        1.0,
                        rows_from(rows, width, block),
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

    fn expected(query: &[f32], documents: &[&[f32]], width: usize) -> Vec<f32> {
        let score = |rows: &&[f32]| {
            let product = |a: &[f32], b: &[f32]| zip(a, b).map(|(a, b)| a * b).sum::<f32>();
            let largest = |q: &[f32]| {
                let products = rows.chunks_exact(width).map(|row| product(q, row));
                products.reduce(f32::max).unwrap_or(0.0)
            };
            query.chunks_exact(width).map(largest).sum()
        };
        documents.iter().map(score).collect()
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
                let query = values(n_queries * width, seed);
                let all = values(lens.iter().sum::<usize>() * width, seed + 1);
                let mut rest = &all[..];
                let document = |&n: &usize| rest.split_off(..n * width).unwrap_or_default();
                let documents: Vec<&[f32]> = lens.iter().map(document).collect();
                let mut out = vec![f32::NAN; documents.len()];
                let run = MaxSim {
                    query: &query,
                    documents: &documents,
                    width,
                    out: &mut out,
                };
                run.run();
                let want = expected(&query, &documents, width);
                assert_eq!(out, want, "{n_queries} {width} {lens:?}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "rows are whole")]
    fn a_part_of_a_row_is_refused() {
        let run = MaxSim {
            query: &[1.0, 1.0],
            documents: &[&[1.0]],
            width: 2,
            out: &mut [0.0],
        };
        run.run();
    }
}
