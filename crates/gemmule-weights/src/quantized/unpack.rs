//! Unpacking of 4- and 8-bit integers from 32-bit words.

use super::{config::Bits, error::Result, values::room};

/// Number of rows of words that are unpacked together. The cache lines to which they are unpacked then stay in cache.
const TILE: usize = 64;

/// A stored matrix of words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packing {
    pub bits: Bits,
    /// Axis along which a word holds neighboring elements.
    pub axis: Axis,
    /// Whether a word of eight integers holds elements in the order 0, 2, 4, 6, 1, 3, 5, 7.
    pub interleaved: bool,
    /// Whether the stored matrix is the transpose of the unpacked one.
    pub transposed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Axis {
    Rows,
    Columns,
}

/// Order of the elements in a word.
const PLAIN: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];
/// Order of the elements in a word of AWQ.
const INTERLEAVED: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

impl Packing {
    /// Returns the shape in words of a matrix `[rows, columns]`.
    pub fn stored(self, [rows, columns]: [u64; 2]) -> [u64; 2] {
        let [rows, columns] = match self.transposed {
            true => [columns, rows],
            false => [rows, columns],
        };
        let n = self.bits.per_word();
        match self.axis {
            Axis::Rows => [rows.div_ceil(n), columns],
            Axis::Columns => [rows, columns.div_ceil(n)],
        }
    }

    /// Unpacks the little-endian words of a matrix `[rows, columns]`. Integers beyond these sizes are ignored.
    ///
    /// # Panics
    /// Panics if `words` does not have the [`stored`](Self::stored) shape.
    pub fn unpack(self, name: &str, words: &[u8], [rows, columns]: [usize; 2]) -> Result<Vec<u8>> {
        let [height, width] = self
            .stored([rows as u64, columns as u64])
            .map(|n| n as usize);
        let words = words.as_chunks::<4>().0;
        assert_eq!(words.len(), height * width);
        let mut codes = room(name, rows * columns)?;
        codes.resize(rows * columns, 0);
        let n = self.bits.per_word() as usize;
        let order = match self.interleaved {
            true => INTERLEAVED,
            false => PLAIN,
        };
        let mask = u32::MAX >> (32 - self.bits.count());
        // Strides of the unpacked matrix along the axes of the stored one.
        let (down, along) = match self.transposed {
            true => (1, columns),
            false => (columns, 1),
        };
        let (bound, step) = match (self.axis, self.transposed) {
            (Axis::Rows, true) => (columns, down),
            (Axis::Rows, false) => (rows, down),
            (Axis::Columns, true) => (rows, along),
            (Axis::Columns, false) => (columns, along),
        };
        for tile in (0..height).step_by(TILE) {
            for x in 0..width {
                for y in tile..(tile + TILE).min(height) {
                    let mut word = u32::from_le_bytes(words[y * width + x]);
                    let (first, at) = match self.axis {
                        Axis::Rows => (y * n, x * along),
                        Axis::Columns => (x * n, y * down),
                    };
                    for &neighbor in &order[..n] {
                        if first + neighbor < bound {
                            codes[at + (first + neighbor) * step] = (word & mask) as u8;
                        }
                        word >>= self.bits.count();
                    }
                }
            }
        }
        Ok(codes)
    }
}

/// Returns the transpose of a matrix `[rows, columns]`.
pub(super) fn transposed<T: Copy>(name: &str, values: &[T], columns: usize) -> Result<Vec<T>> {
    let mut out = room(name, values.len())?;
    for column in 0..columns {
        out.extend(values.iter().skip(column).step_by(columns));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_packing_gives_back_what_was_packed() {
        for (bits, interleaved) in [
            (Bits::Four, false),
            (Bits::Four, true),
            (Bits::Eight, false),
        ] {
            for axis in [Axis::Rows, Axis::Columns] {
                for transposed in [false, true] {
                    // Sizes beyond one tile, and sizes that are not a multiple of a word.
                    for [rows, columns] in [[3, 5], [8, 16], [67, 9], [7, 601]] {
                        let packing = Packing {
                            bits,
                            axis,
                            interleaved,
                            transposed,
                        };
                        check(packing, [rows, columns]);
                    }
                }
            }
        }
    }

    /// Packs a matrix by definition, computing the word of each integer from its position, and checks that `unpack` restores the matrix.
    fn check(packing: Packing, [rows, columns]: [usize; 2]) {
        let n = packing.bits.per_word() as usize;
        let width = packing.bits.count() as usize;
        let codes: Vec<u8> = (0..rows * columns)
            .map(|at| ((at * 7 + at / 16) % (1 << width)) as u8)
            .collect();
        let stored = packing
            .stored([rows as u64, columns as u64])
            .map(|n| n as usize);
        let mut words = vec![0u32; stored[0] * stored[1]];
        for row in 0..rows {
            for column in 0..columns {
                let (y, x) = match packing.transposed {
                    true => (column, row),
                    false => (row, column),
                };
                let (word, place) = match packing.axis {
                    Axis::Rows => (y / n * stored[1] + x, y % n),
                    Axis::Columns => (y * stored[1] + x / n, x % n),
                };
                let place = match packing.interleaved {
                    true => [0, 4, 1, 5, 2, 6, 3, 7][place],
                    false => place,
                };
                words[word] |= u32::from(codes[row * columns + column]) << (place * width);
            }
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let unpacked = packing.unpack("w", &bytes, [rows, columns]).expect("room");
        assert_eq!(unpacked, codes, "{packing:?} of {rows} x {columns}");
    }
}
