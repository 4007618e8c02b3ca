//! f32 weights as panels of columns of the transposed weight. A panel is as wide as a register tile of sums.
//!
//! Products are summed in the order of k, independent of the other rows, so a row has the same bits in every batch.

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::{Block, Linear, SharedOut};
use crate::{
    lines::Lines,
    product::{add_products_ahead, vectors, vectors_mut},
    simd,
};

/// Number of columns of a block, a multiple of the panel width on every instruction set.
const COLS: usize = 48;
/// Number of rows of a block. The inputs and the sums of a block stay in cache.
const ROWS: usize = 256;
/// Maximum length of the parts into which a panel is divided along k. All rows of a block are multiplied by a part before the next part is
/// read, so a part stays in the L2 cache.
const DEPTH: usize = 1024;
/// Maximum length of a part, instead of [`DEPTH`], if a block has fewer than [`FEW`] tiles of rows. `SHORT`, `FEW` and [`MANY`] were
/// determined by measurements on a Xeon (docs/history, entry 58).
const SHORT: usize = 192;
const FEW: usize = 4;
/// If a block has at least this many tiles of rows, full tiles prefetch nothing. Waits for memory are then rare, because only the first
/// tile that uses a panel waits.
const MANY: usize = 32;

/// A weight `[n, k]` as consecutive panels `[k, columns]`. The last panel is padded with zeros.
pub(crate) struct Panels {
    values: Lines,
}

impl Panels {
    pub fn new(weight: &[f32], n: usize, k: usize) -> Self {
        Self::of_width(simd::dispatch(PanelCols), weight, n, k)
    }

    /// Packs panels of `cols` columns, which is the tile width of an instruction set.
    pub fn of_width(cols: usize, weight: &[f32], n: usize, k: usize) -> Self {
        let mut values = Lines::zeros::<f32>(n.next_multiple_of(cols) * k);
        if k > 0 {
            let (panels, rows) = (
                values.all_mut().par_chunks_mut(cols * k),
                weight.par_chunks(cols * k),
            );
            panels
                .zip(rows)
                .for_each(|(to, rows)| transpose(rows, k, to, cols));
        }
        Self { values }
    }

    pub fn bytes(&self) -> u64 {
        self.values.bytes()
    }

    /// Computes the result of the layer.
    pub fn multiply(&self, layer: &Linear<'_>, out: &mut [f32]) {
        let cut = layer.cut(out.len() / layer.n, [ROWS, COLS]);
        layer.blocks(out, cut, |out, block| {
            simd::dispatch(Tiles {
                panels: self.values.all(),
                layer: *layer,
                block,
                out,
            });
        });
    }
}

#[cfg(test)]
impl Panels {
    /// Returns the operation that multiplies all rows of `x` by the panels on one thread.
    pub fn block_of<'a>(
        &'a self,
        x: &'a [f32],
        n: usize,
        k: usize,
        out: &'a mut [f32],
    ) -> Tiles<'a> {
        let finish = super::Finish {
            bias: None,
            activation: None,
            residual: None,
        };
        Tiles {
            panels: self.values.all(),
            layer: Linear { x, n, k, finish },
            block: Block {
                row: 0,
                rows: x.len() / k,
                col: 0,
                cols: n,
            },
            out: SharedOut::new(out),
        }
    }
}

/// Number of columns of a panel: the largest number of vectors whose sums, for all rows of a tile, fit in the registers
/// together with the operands.
pub(crate) struct PanelCols;

impl WithSimd for PanelCols {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        S::F32_LANES * if S::REGISTER_COUNT >= 32 { 3 } else { 2 }
    }
}

/// The products of a block.
pub(crate) struct Tiles<'a> {
    panels: &'a [f32],
    layer: Linear<'a>,
    block: Block,
    out: SharedOut<'a>,
}

impl WithSimd for Tiles<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        if S::REGISTER_COUNT >= 32 {
            self.run::<S, 8, 3>(simd);
        } else {
            self.run::<S, 6, 2>(simd);
        }
    }
}

impl Tiles<'_> {
    /// Computes tiles of up to `M` rows and panels of `N` vectors.
    #[inline(always)]
    fn run<S: Simd, const M: usize, const N: usize>(&self, simd: S) {
        match self.block.rows.div_ceil(M) {
            ..FEW => self.few::<S, M, N>(simd),
            tiles => self.many::<S, M, N>(simd, tiles),
        }
    }

    /// Multiplies few rows, where reading the weight is the bottleneck. The tiles of each part of a panel prefetch the next part.
    /// Nothing prefetches the first part of a layer, so parts are short.
    #[inline(always)]
    fn few<S: Simd, const M: usize, const N: usize>(&self, simd: S) {
        let (k, cols) = (self.layer.k, N * S::F32_LANES);
        let depth = part_of(k, SHORT);
        for col in (0..self.block.cols).step_by(cols) {
            for from in (0..k.max(1)).step_by(depth) {
                let values = &self.panels[(self.block.col + col) * k + from * cols..];
                let (panel, next) = values.split_at(depth.min(k - from) * cols);
                let next = &next[..panel.len().min(next.len())];
                let mut ahead = Ahead::new(next, self.block.rows.div_ceil(M));
                let panel = vectors::<S, N>(panel);
                for row in (0..self.block.rows).step_by(M) {
                    let (of, ahead) = ((from, row, col), ahead.next());
                    match self.block.rows - row {
                        1 => self.tile::<S, 1, N, 2>(simd, panel, ahead, of),
                        2 => self.tile::<S, 2, N, 2>(simd, panel, ahead, of),
                        3 | 4 => self.tile::<S, 4, N, 2>(simd, panel, ahead, of),
                        _ => self.tile::<S, M, N, 2>(simd, panel, ahead, of),
                    }
                }
            }
        }
    }

    /// Multiplies many rows. The parts of a panel are long. If there are fewer than [`MANY`] tiles of rows, the tiles prefetch the next
    /// panel. This function and [`few`](Self::few) are separate, because one function for both cases would be slower for many rows.
    #[inline(always)]
    fn many<S: Simd, const M: usize, const N: usize>(&self, simd: S, tiles: usize) {
        let (k, cols) = (self.layer.k, N * S::F32_LANES);
        let depth = part_of(k, DEPTH);
        for col in (0..self.block.cols).step_by(cols) {
            let (panel, next) = self.panels[(self.block.col + col) * k..].split_at(cols * k);
            let next = &next[..next.len().min(cols * k)];
            let mut ahead = Ahead::new(next, tiles * k.max(1).div_ceil(depth));
            let panel = vectors::<S, N>(panel);
            for from in (0..k.max(1)).step_by(depth) {
                let panel = &panel[from..k.min(from + depth)];
                for row in (0..self.block.rows).step_by(M) {
                    let (of, ahead) = ((from, row, col), ahead.next());
                    match self.block.rows - row {
                        1 => self.tile::<S, 1, N, 1>(simd, panel, ahead, of),
                        2 => self.tile::<S, 2, N, 1>(simd, panel, ahead, of),
                        3 | 4 => self.tile::<S, 4, N, 1>(simd, panel, ahead, of),
                        _ if tiles < MANY => self.tile::<S, M, N, 1>(simd, panel, ahead, of),
                        _ => self.tile::<S, M, N, 0>(simd, panel, ahead, of),
                    }
                }
            }
        }
    }

    /// Multiplies up to `M` rows by a part of a panel that starts at position `from` in k, and adds the results to the sums of the earlier
    /// parts. If there are fewer rows, the last row of the block is repeated. Prefetches `AHEAD` cache lines of `ahead` per element of k.
    #[inline(always)]
    fn tile<S: Simd, const M: usize, const N: usize, const AHEAD: usize>(
        &self,
        simd: S,
        panel: &[[S::f32s; N]],
        ahead: &[f32],
        (from, row, col): (usize, usize, usize),
    ) {
        let (layer, block) = (self.layer, self.block);
        let rows = M.min(block.rows - row);
        let cols = (N * S::F32_LANES).min(block.cols - col);
        let mut x: [&[f32]; M] = [&[]; M];
        for (i, x) in x.iter_mut().enumerate() {
            let row = block.row + row + i.min(rows - 1);
            *x = &layer.x[row * layer.k + from..][..panel.len()];
        }
        let mut sums = [[simd.splat_f32s(0.0); N]; M];
        let out = |i: usize| {
            let start = layer.at(block) + (row + i) * layer.n + col;
            // SAFETY: only this task writes this row of the block.
            unsafe { self.out.slice(start..start + cols) }
        };
        if from > 0 {
            for (i, sums) in sums.iter_mut().take(rows).enumerate() {
                elements::<S>(sums)[..cols].copy_from_slice(out(i));
            }
        }
        add_products_ahead::<S, M, N, AHEAD>(simd, x, panel, &mut sums, ahead);
        for (i, sums) in sums.iter_mut().take(rows).enumerate() {
            match vectors_mut::<S, N>(out(i)).first_mut() {
                Some(out) => *out = *sums,
                None => out(i).copy_from_slice(&elements::<S>(sums)[..cols]),
            }
        }
    }
}

/// The part of a panel, or the panel, that is needed next. Each tile of the current part or panel prefetches an equal share of it. Without
/// this prefetch, the first tile of the next part waits for the L3 cache, because the hardware prefetcher stops at page boundaries.
struct Ahead<'a> {
    values: &'a [f32],
    tile: usize,
    tiles: usize,
}

impl<'a> Ahead<'a> {
    fn new(values: &'a [f32], tiles: usize) -> Self {
        let tile = 0;
        Self {
            values,
            tile,
            tiles,
        }
    }

    fn next(&mut self) -> &'a [f32] {
        let at = |tile: usize| tile * self.values.len() / self.tiles;
        let share = &self.values[at(self.tile)..at(self.tile + 1)];
        self.tile += 1;
        share
    }
}

/// Divides k into the minimum number of parts of at most `most` elements, and returns the length of a part. The last part may be shorter.
fn part_of(k: usize, most: usize) -> usize {
    k.div_ceil(k.div_ceil(most).max(1)).max(1)
}

#[inline(always)]
fn elements<S: Simd>(vectors: &mut [S::f32s]) -> &mut [f32] {
    bytemuck::cast_slice_mut(vectors)
}

/// Writes the transpose of `x [n, k]` to `out [k, cols]` in square tiles as wide as a cache line. Without tiles, rows whose distance is a
/// power of two would evict each other before their lines are used up.
fn transpose(x: &[f32], k: usize, out: &mut [f32], cols: usize) {
    const TILE: usize = 16;
    let n = x.len() / k;
    for row in (0..n).step_by(TILE) {
        let rows = TILE.min(n - row);
        for col in (0..k).step_by(TILE) {
            let width = TILE.min(k - col);
            let mut tile = [[0.0_f32; TILE]; TILE];
            if (rows, width) == (TILE, TILE) {
                // The compiler knows the sizes, so it removes all checks and unrolls the loops.
                for i in 0..TILE {
                    let line = &x[(row + i) * k + col..][..TILE];
                    for j in 0..TILE {
                        tile[j][i] = line[j];
                    }
                }
            } else {
                for i in 0..rows {
                    for j in 0..width {
                        tile[j][i] = x[(row + i) * k + col + j];
                    }
                }
            }
            for (j, tile) in tile.iter().take(width).enumerate() {
                out[(col + j) * cols + row..][..rows].copy_from_slice(&tile[..rows]);
            }
        }
    }
}
