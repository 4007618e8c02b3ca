//! f32 weights: panels of columns of the transposed weight, which the `gemm` crate's micro-kernels read as they are.

use rayon::prelude::*;

use super::{
    super::product::{Into, Operand, multiply},
    Linear,
};

/// Columns of a panel: whole tiles of the micro-kernels of every instruction set.
const COLS: usize = 48;
/// Rows that are computed before the epilogue runs over them, so that they are still in cache.
const ROWS: usize = 256;

/// A weight `[n, k]` as panels `[k, 48]`, one behind the other; the last has the columns that are left.
pub(super) struct Panels {
    values: Vec<f32>,
}

impl Panels {
    pub fn new(weight: &[f32], k: usize) -> Self {
        let mut values = vec![0.0; weight.len()];
        let panel = (COLS * k).max(1);
        let (panels, rows) = (values.par_chunks_mut(panel), weight.par_chunks(panel));
        panels
            .zip(rows)
            .for_each(|(to, rows)| transpose(rows, k, to));
        Self { values }
    }

    pub fn bytes(&self) -> u64 {
        size_of_val(self.values.as_slice()) as u64
    }

    /// Writes the layer's result.
    pub fn multiply(&self, layer: &Linear<'_>, out: &mut [f32]) {
        let k = layer.k;
        let cut = layer.cut(out.len() / layer.n, [ROWS, COLS]);
        layer.blocks(out, cut, |out, block| {
            let x = Operand {
                data: &layer.x[block.row * k..],
                row: k,
                col: 1,
            };
            let panel = Operand {
                data: &self.values[block.col * k..],
                row: block.cols,
                col: 1,
            };
            let sizes = (block.rows, block.cols, k);
            // SAFETY: blocks are disjoint, and each is one task's.
            unsafe {
                multiply(
                    sizes,
                    1.0,
                    x,
                    panel,
                    Into::Overwrite,
                    &out,
                    layer.at(block),
                    layer.n,
                )
            };
        });
    }
}

/// Writes the transpose of `x [n, k]` to `out [k, n]`, in tiles of one cache line by as many rows:
/// rows a power of two apart would evict each other before their lines were used up.
fn transpose(x: &[f32], k: usize, out: &mut [f32]) {
    const TILE: usize = 16;
    if k == 0 {
        return;
    }
    let n = x.len() / k;
    for row in (0..n).step_by(TILE) {
        let rows = TILE.min(n - row);
        for col in (0..k).step_by(TILE) {
            let cols = TILE.min(k - col);
            let mut tile = [[0.0_f32; TILE]; TILE];
            if (rows, cols) == (TILE, TILE) {
                // Sizes that the compiler knows: no check and no loop is left.
                for i in 0..TILE {
                    let line = &x[(row + i) * k + col..][..TILE];
                    for j in 0..TILE {
                        tile[j][i] = line[j];
                    }
                }
            } else {
                for i in 0..rows {
                    for j in 0..cols {
                        tile[j][i] = x[(row + i) * k + col + j];
                    }
                }
            }
            for (j, tile) in tile.iter().take(cols).enumerate() {
                out[(col + j) * n + row..][..rows].copy_from_slice(&tile[..rows]);
            }
        }
    }
}
