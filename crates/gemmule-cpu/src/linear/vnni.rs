//! 8-bit products by instructions that multiply quads: AMX or AVX-512 VNNI. Rows of activations are read in place, and any number of rows
//! is supported.

use std::{arch::x86_64::_mm512_dpbusd_epi32, iter::zip};

use super::{
    amx,
    groups::{COLS, Group, LANES, Panels, TILE_ROWS, VECTOR_ROWS, VECTORS, tiles},
};
use crate::lines::Lines;

/// Returns whether this CPU has AVX-512 VNNI.
pub(super) fn is_supported() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni")
}

/// A quantized weight, packed in quads of integers that are adjacent along k.
pub(super) struct Quads {
    panels: Panels,
}

impl Quads {
    /// Packs `integers [n, k]`.
    ///
    /// # Panics
    /// Panics on a CPU without the instruction.
    pub fn new(integers: &[i8], n: usize, k: usize) -> Self {
        assert!(
            is_supported(),
            "callers check for AVX-512 VNNI before packing"
        );
        Self {
            panels: packed(integers, n, k),
        }
    }

    pub fn bytes(&self) -> u64 {
        self.panels.bytes()
    }

    /// Multiplies rows by the panel that starts at column `col`, a multiple of 48. Calls `store` with the index of a tile's first row and
    /// the sums of its rows. The rows of `x` consist of whole quads.
    pub fn multiply(
        &self,
        x: &Lines,
        rows: usize,
        col: usize,
        mut store: impl FnMut(usize, &[[i32; COLS]]),
    ) {
        let panel = self.panels.panel_of(col);
        let depth = panel.len() / COLS;
        let mut sums = [[0; COLS]; TILE_ROWS];
        for row in (0..rows).step_by(TILE_ROWS) {
            let n = TILE_ROWS.min(rows - row);
            let x = &x.all()[row * depth..][..n * depth];
            // SAFETY: a weight is packed only on a CPU with the instruction.
            unsafe { sums_of(x, panel, depth, &mut sums) };
            store(row, &sums[..n]);
        }
    }
}

/// Packs `integers [n, k]` into panels of quads.
fn packed(integers: &[i8], n: usize, k: usize) -> Panels {
    let pack = |first: usize, panel: &mut [Group]| {
        for col in 0..COLS.min(n - first) {
            let row = &integers[(first + col) * k..][..k];
            for (to, from) in zip(panel[col..].iter_mut().step_by(COLS), row.chunks(4)) {
                let mut quad = [0; 4];
                quad[..from.len()].copy_from_slice(bytemuck::cast_slice(from));
                *to = u32::from_le_bytes(quad);
            }
        }
    };
    Panels::new(n, k.div_ceil(4), pack)
}

tiles!("avx512f,avx512vnni", i32, amx::of_quads, |sums, x, w| {
    _mm512_dpbusd_epi32(sums, x, w)
});

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs on every CPU, because packing does not use the instruction.
    #[test]
    fn a_weight_is_packed_into_panels_of_quads_padded_with_zeros() {
        for (n, k) in [(1, 1), (48, 4), (50, 7), (97, 12)] {
            let integers: Vec<i8> = (0..n * k).map(|i| (i * 37 % 251) as u8 as i8).collect();
            let panels = packed(&integers, n, k);
            for col in 0..n.next_multiple_of(COLS) {
                let panel = panels.panel_of(col / COLS * COLS);
                let quads = panel[col % COLS..].iter().step_by(COLS);
                let held: Vec<i8> = quads
                    .flat_map(|q| q.to_le_bytes().map(|b| b as i8))
                    .collect();
                let mut want = match col < n {
                    true => integers[col * k..][..k].to_vec(),
                    false => Vec::new(),
                };
                want.resize(k.next_multiple_of(4), 0);
                assert_eq!(held, want, "column {col} of [{n}, {k}]");
            }
        }
    }

    #[test]
    fn tiles_of_amx_and_of_vectors_have_the_same_sums() {
        if !(amx::is_supported() && is_supported()) {
            println!("not compared: this CPU does not have both AMX and AVX-512 VNNI");
            return;
        }
        for (rows, depth) in [(1, 1), (3, 15), (8, 16), (9, 35), (16, 96)] {
            let groups = |n: usize| -> Vec<Group> {
                let group = |i: usize| (i as u32).wrapping_mul(2_654_435_761);
                (1..=n).map(group).collect()
            };
            let (x, panel) = (groups(rows * depth), groups(COLS * depth));
            let mut sums = [[[0; COLS]; TILE_ROWS]; 2];
            // SAFETY: the CPU has the instructions.
            unsafe {
                amx::of_quads(&x, &panel, depth, &mut sums[0]);
                by_vectors(&x, &panel, depth, &mut sums[1]);
            }
            assert_eq!(sums[0][..rows], sums[1][..rows], "[{rows}, {depth}]");
        }
    }
}
