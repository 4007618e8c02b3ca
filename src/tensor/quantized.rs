//! Matrices of low-bit values: rounding, and the layout that kernels read.
//!
//! Packed layout of `[rows, columns]`, with rows padded to a multiple of 8 and columns to a multiple of 128:
//!
//! 1. The values, in blocks. A block has 64 columns of all rows. In a block, a row takes 64 bytes (8-bit values) or 32 bytes (4-bit
//!    values). Each of the four lanes that read the row reads a quarter of these bytes. The quarter of lane t contains the lane's operands
//!    of four MMAs of 16 columns: for MMA s, columns 16s + 2t + i with i = 0, 1, 8 and 9.
//!    - A word of E4M3 has the columns i = 0, 1, 8, 9 of an MMA in this order.
//!    - A word of 8-bit integers has them in the order 0, 8, 1, 9.
//!    - A word of 4-bit integers has the columns of two MMAs. Its nibbles j and j + 4 are neighboring columns.
//!
//!    In both orders of integers, one mask extracts two neighboring integers into the halves of a register, as the MMA expects them.
//! 2. The scales. If each row has one scale, an f32 for each row. Otherwise, a scale for each group of columns and each row: an f32 for
//!    E4M3, an f16 for 8-bit integers, or an f16 and the zero point (a 16-bit integer) for 4-bit integers.

use half::f16;
use rayon::prelude::*;

use super::{DType, Group, Scaled, Values, e4m3, format::largest, row_scale};

/// Number of columns in a block of packed values.
pub(crate) const BLOCK: usize = 64;
/// The columns of a packed matrix are padded to a multiple of this number, the rows to a multiple of [`ROWS`].
pub(crate) const COLUMNS: u64 = 128;
const ROWS: u64 = 8;
/// Largest integer of [`Values::Int4`].
const LARGEST: f32 = 15.0;

/// Order of the four E4M3 values in a 4-byte word. A word holds the values that one lane needs for one MMA; see the module documentation.
/// For each byte, this is the column of its value, relative to column 2t of the MMA for lane t.
pub(crate) const E4M3_WORD: [usize; 4] = [0, 1, 8, 9];
/// Order of the four 8-bit integers in a word, like [`E4M3_WORD`].
pub(crate) const INT8_WORD: [usize; 4] = [0, 8, 1, 9];

/// Returns the column, within its block, of the 8-bit value that a packed row stores at byte `position` of the block. `word` is
/// [`E4M3_WORD`] or [`INT8_WORD`].
pub(crate) const fn column_at(position: usize, word: [usize; 4]) -> usize {
    let (lane, mma) = (position / 16, position / 4 % 4);
    16 * mma + 2 * lane + word[position % 4]
}

/// A matrix as low-bit values, with the scales of its groups.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    format: Scaled,
    columns: usize,
    /// Low-bit value of each element as a byte (its code), row by row. The code of a [`Values::Int8`] integer is the integer plus 128.
    codes: Vec<u8>,
    /// Scale and zero point of each group, row by row.
    groups: Vec<(f32, u8)>,
}

impl Scaled {
    /// Rounds a matrix with rows of `columns` elements to this format. Int8 and E4M3 scale the largest magnitude of a group to the largest
    /// value. Int4 spreads its 16 integers over the range from the smallest to the largest element, which is extended to include 0.
    pub fn quantize(self, matrix: &[f32], columns: usize) -> Quantized {
        let columns = columns.max(1);
        self.quantize_rows(matrix.len() / columns, columns, |row, elements| {
            elements.extend_from_slice(&matrix[row * columns..][..columns]);
        })
    }

    /// Rounds a matrix like [`quantize`](Self::quantize). `read` appends the elements of a row.
    pub fn quantize_rows(
        self,
        n_rows: usize,
        columns: usize,
        read: impl Fn(usize, &mut Vec<f32>) + Sync,
    ) -> Quantized {
        let columns = columns.max(1);
        let width = self.width(columns);
        let per_row = columns.div_ceil(width);
        let mut codes = vec![0; n_rows * columns];
        let mut groups = vec![(0.0, 0); n_rows * per_row];
        codes
            .par_chunks_mut(columns)
            .zip(groups.par_chunks_mut(per_row))
            .enumerate()
            .for_each_init(Vec::new, |elements, (row, (codes, groups))| {
                elements.clear();
                read(row, elements);
                self.encode_row(elements, codes, groups);
            });
        self.with_codes(columns, codes, groups)
    }

    /// Rounds a matrix like [`quantize_rows`](Self::quantize_rows), and returns the bytes that kernels read. Unlike
    /// [`quantize_rows`](Self::quantize_rows) followed by [`Quantized::pack`], it does not hold the codes of the whole matrix.
    pub fn pack_rows(
        self,
        n_rows: usize,
        columns: usize,
        read: impl Fn(usize, &mut Vec<f32>) + Sync,
    ) -> Vec<u8> {
        self.pack(n_rows, columns, Vec::new, |elements, row, codes, groups| {
            elements.clear();
            read(row, elements);
            self.encode_row(elements, codes, groups);
        })
    }

    /// Returns the bytes that kernels read, in the layout that the module documentation describes. `write(state, row, codes, groups)`
    /// writes the codes and the groups of a row. Each thread has its own state.
    fn pack<S>(
        self,
        n_rows: usize,
        columns: usize,
        state: impl Fn() -> S + Sync + Send,
        write: impl Fn(&mut S, usize, &mut [u8], &mut [(f32, u8)]) + Sync,
    ) -> Vec<u8> {
        /// Number of rows that a thread packs at a time. In a block, these rows are contiguous.
        const AT_ONCE: usize = 64;
        let columns = columns.max(1);
        let padded = n_rows.next_multiple_of(ROWS as usize);
        let n_columns = columns.next_multiple_of(COLUMNS as usize);
        let pitch = BLOCK / 8 * self.bits() as usize;
        let width = self.width(columns);
        let n_groups = match self.group {
            Group::Row => 1,
            Group::Columns(_) => n_columns / width,
        };
        let scale_bytes = self.scale_bytes() as usize;
        let n_values = n_columns / BLOCK * padded * pitch;
        let mut packed = vec![0; n_values + n_groups * padded * scale_bytes];
        let (values, scales) = packed.split_at_mut(n_values);
        // Each entry is for `AT_ONCE` rows. It has the bytes of these rows in each block, and those of their scales in each group.
        let mut parts = Vec::new();
        parts.resize_with(padded.div_ceil(AT_ONCE), <[Vec<&mut [u8]>; 2]>::default);
        for (kind, bytes, pitch) in [(0, values, pitch), (1, scales, scale_bytes)] {
            for all_rows in bytes.chunks_mut(padded * pitch) {
                let rows = all_rows.chunks_mut(AT_ONCE * pitch);
                parts
                    .iter_mut()
                    .zip(rows)
                    .for_each(|(part, rows)| part[kind].push(rows));
            }
        }
        let parts = parts.into_par_iter().enumerate();
        parts.for_each_init(
            || {
                (
                    state(),
                    vec![self.zero(); n_columns],
                    vec![(0.0, 0); columns.div_ceil(width)],
                )
            },
            |(state, codes, groups), (nth, [mut blocks, mut scales])| {
                for row in 0..AT_ONCE.min(padded - nth * AT_ONCE) {
                    let of_matrix = nth * AT_ONCE + row;
                    if of_matrix < n_rows {
                        write(state, of_matrix, &mut codes[..columns], groups);
                    } else {
                        codes.fill(self.zero());
                        groups.fill((0.0, 0));
                    }
                    for (codes, rows) in codes.as_chunks().0.iter().zip(&mut blocks) {
                        self.put(codes, &mut rows[row * pitch..][..pitch]);
                    }
                    for (&group, rows) in groups.iter().zip(&mut scales) {
                        self.put_scale(group, &mut rows[row * scale_bytes..][..scale_bytes]);
                    }
                }
            },
        );
        packed
    }

    /// Writes the codes and the groups of a row.
    fn encode_row(self, elements: &[f32], codes: &mut [u8], groups: &mut [(f32, u8)]) {
        let width = self.width(elements.len()).max(1);
        let of_groups = codes.chunks_mut(width).zip(elements.chunks(width));
        for (group, (codes, elements)) in groups.iter_mut().zip(of_groups) {
            *group = self.group(elements);
            self.encode(elements, *group, codes);
        }
    }

    /// Creates a matrix with rows of `columns` elements. `codes` holds the low-bit value of each element, and `groups` the scale and zero
    /// point of each group. Both are in row-major order.
    ///
    /// # Panics
    /// Panics if the number of groups does not match the codes.
    pub fn with_codes(self, columns: usize, codes: Vec<u8>, groups: Vec<(f32, u8)>) -> Quantized {
        let per_row = columns.div_ceil(self.width(columns));
        assert_eq!(groups.len(), codes.len() / columns * per_row);
        Quantized {
            format: self,
            columns,
            codes,
            groups,
        }
    }

    /// Bytes of a packed matrix; `None` if they do not fit in 64 bits.
    pub fn packed_bytes(self, rows: u64, columns: u64) -> Option<u64> {
        let rows = rows.checked_next_multiple_of(ROWS)?;
        let columns = columns.checked_next_multiple_of(COLUMNS)?;
        let values = rows.checked_mul(columns)? / 8 * self.bits();
        let scales = match self.group {
            Group::Row => rows,
            Group::Columns(width) => rows * (columns / u64::from(width)),
        };
        values.checked_add(scales.checked_mul(self.scale_bytes())?)
    }

    /// Returns the dimensions of the packed values as a matrix of bytes: the number of rows of all blocks together, and the bytes per row.
    pub const fn rows_of_blocks(self, rows: u64, columns: u64) -> [u64; 2] {
        let blocks = columns.next_multiple_of(COLUMNS) / BLOCK as u64;
        [
            blocks * rows.next_multiple_of(ROWS),
            BLOCK as u64 * self.bits() / 8,
        ]
    }

    /// Bytes per scale in a packed matrix. For 4-bit integers, this includes the zero point of the scale's group.
    pub const fn scale_bytes(self) -> u64 {
        match (self.values, self.group) {
            (Values::Int8, Group::Columns(_)) => 2,
            (Values::Int8, Group::Row) | (Values::E4m3 | Values::Int4, _) => 4,
        }
    }

    /// Bits of a value.
    pub const fn bits(self) -> u64 {
        match self.values {
            Values::Int8 | Values::E4m3 => 8,
            Values::Int4 => 4,
        }
    }

    /// Returns the number of elements that share a scale, in a row of `columns` elements.
    pub fn width(self, columns: usize) -> usize {
        match self.group {
            Group::Row => columns,
            Group::Columns(width) => width as usize,
        }
    }

    /// Returns whether a group can store `scale` without rounding it.
    pub fn holds_scale(self, scale: f32) -> bool {
        match (self.values, self.group) {
            (_, Group::Row) | (Values::E4m3, Group::Columns(_)) => true,
            (Values::Int8 | Values::Int4, Group::Columns(_)) => {
                f16::from_f32(scale).to_f32() == scale
            }
        }
    }

    /// Converts the zero point of a checkpoint's group to the zero point in this format, which is 0 for 8-bit values.
    pub fn zero_point(self, of_codes: u16) -> u8 {
        match self.values {
            Values::Int8 | Values::E4m3 => 0,
            Values::Int4 => of_codes as u8,
        }
    }

    /// Chooses the scale and the zero point of a group.
    fn group(self, elements: &[f32]) -> (f32, u8) {
        match (self.values, self.group) {
            (Values::Int8, Group::Row) => (largest(elements) / 127.0, 0),
            (Values::Int8, Group::Columns(_)) => {
                (f16::from_f32(largest(elements) / 127.0).to_f32(), 0)
            }
            (Values::E4m3, _) => (row_scale(elements), 0),
            (Values::Int4, _) => {
                let (low, high) = elements.iter().fold((0.0f32, 0.0f32), |(low, high), &v| {
                    (low.min(v), high.max(v))
                });
                let scale = f16::from_f32((high - low) / LARGEST).to_f32();
                let zero = if scale > 0.0 {
                    (-low / scale).round().clamp(0.0, LARGEST)
                } else {
                    0.0
                };
                (scale, zero as u8)
            }
        }
    }

    /// Writes the codes of a group.
    fn encode(self, elements: &[f32], (scale, zero): (f32, u8), codes: &mut [u8]) {
        /// 1.5 · 2²³. Adding it to a small number rounds the number to an integer and puts the integer into the low bits of the sum.
        const INTEGERS: f32 = 12_582_912.0;
        if scale == 0.0 {
            return codes.fill(self.zero());
        }
        let integer = |v: f32| ((v / scale).clamp(-128.0, 127.0) + INTEGERS).to_bits() as u8;
        let pairs = codes.iter_mut().zip(elements);
        match self.values {
            Values::Int8 => pairs.for_each(|(code, &v)| *code = integer(v) ^ 0x80),
            Values::E4m3 => pairs.for_each(|(code, &v)| *code = e4m3::encode(v / scale)),
            Values::Int4 => pairs.for_each(|(code, &v)| {
                let code_of = i32::from(integer(v) as i8) + i32::from(zero);
                *code = code_of.clamp(0, LARGEST as i32) as u8;
            }),
        }
    }

    /// Returns the value of a code before scaling.
    fn value(self, code: u8, zero: u8) -> f32 {
        match self.values {
            Values::Int8 => f32::from(code) - 128.0,
            Values::E4m3 => e4m3::decode(code),
            Values::Int4 => f32::from(code) - f32::from(zero),
        }
    }

    /// Returns the code of the value 0.
    const fn zero(self) -> u8 {
        match self.values {
            Values::Int8 => 128,
            Values::E4m3 | Values::Int4 => 0,
        }
    }

    /// Writes the scale of a group, and its zero point if the format has one.
    fn put_scale(self, (scale, zero): (f32, u8), to: &mut [u8]) {
        match (self.values, self.group) {
            (_, Group::Row) | (Values::E4m3, _) => to.copy_from_slice(&scale.to_le_bytes()),
            (Values::Int8 | Values::Int4, Group::Columns(_)) => {
                let word = u32::from(f16::from_f32(scale).to_bits()) | u32::from(zero) << 16;
                to.copy_from_slice(&word.to_le_bytes()[..to.len()]);
            }
        }
    }

    /// Writes the codes of a row of a block, in the order that the module documentation describes.
    fn put(self, codes: &[u8; BLOCK], row: &mut [u8]) {
        // Codes of the columns 2t, 2t + 1, 2t + 8 and 2t + 9 of an MMA.
        let of_lane = |lane: usize, mma: usize| {
            let at = 16 * mma + 2 * lane;
            [0, 1, 8, 9].map(|more| codes[at + more])
        };
        let words = row.as_chunks_mut::<4>().0.iter_mut().enumerate();
        match self.values {
            Values::Int8 => words.for_each(|(at, word)| {
                let [a, b, c, d] = of_lane(at / 4, at % 4);
                *word = [a, c, b, d];
            }),
            Values::E4m3 => words.for_each(|(at, word)| *word = of_lane(at / 4, at % 4)),
            Values::Int4 => words.for_each(|(at, word)| {
                let [a, b, c, d] = of_lane(at / 2, at % 2 * 2);
                let [e, f, g, h] = of_lane(at / 2, at % 2 * 2 + 1);
                *word = [a | c << 4, e | g << 4, b | d << 4, f | h << 4];
            }),
        }
    }
}

impl Quantized {
    /// Returns the dequantized matrix, row by row.
    pub fn values(&self) -> Vec<f32> {
        self.values_rounded(|scale| scale, |value| value)
    }

    /// Returns the matrix as an operand of MMAs of `dtype`.
    ///
    /// - With a scale for each group of columns, the scaled elements are rounded to `dtype`. The scales are rounded to `dtype`, too, except
    ///   for 8-bit integers.
    /// - With a scale for each row, kernels apply the scale to the sums, so nothing is rounded.
    pub fn values_in(&self, dtype: DType) -> Vec<f32> {
        let round = |value| dtype.round(value);
        match (self.format.values, self.format.group) {
            (_, Group::Row) => self.values(),
            (Values::Int8, Group::Columns(_)) => self.values_rounded(|scale| scale, round),
            (Values::E4m3 | Values::Int4, Group::Columns(_)) => self.values_rounded(round, round),
        }
    }

    /// Returns the matrix with scaled elements rounded to `dtype`. With a scale for each group of columns, the elements are those of
    /// [`values_in`](Self::values_in).
    pub fn unpacked(&self, dtype: DType) -> Vec<f32> {
        match self.format.group {
            Group::Row => self.values_rounded(|scale| scale, |value| dtype.round(value)),
            Group::Columns(_) => self.values_in(dtype),
        }
    }

    /// Returns the matrix. Scales are rounded by `round_scale`, and the products of scales and elements are rounded by `round`.
    fn values_rounded(
        &self,
        round_scale: impl Fn(f32) -> f32 + Copy + Sync,
        round: impl Fn(f32) -> f32 + Copy + Sync,
    ) -> Vec<f32> {
        let width = self.format.width(self.columns);
        let rows = self.codes.par_chunks(self.columns);
        let per_row = self.columns.div_ceil(width);
        rows.zip(self.groups.par_chunks(per_row))
            .flat_map_iter(|(codes, groups)| {
                let of_groups = groups.iter().zip(codes.chunks(width));
                of_groups.flat_map(move |(&(scale, zero), codes)| {
                    let scale = round_scale(scale);
                    let value = move |&code| round(self.format.value(code, zero) * scale);
                    codes.iter().map(value)
                })
            })
            .collect()
    }

    /// Returns the code of each element, row by row.
    pub fn into_codes(self) -> Vec<u8> {
        self.codes
    }

    /// Returns the scale of each group, row by row.
    pub fn scales(&self) -> impl Iterator<Item = f32> + '_ {
        self.groups.iter().map(|&(scale, _)| scale)
    }

    /// Returns the bytes that kernels read, in the layout that the module documentation describes.
    pub fn pack(&self) -> Vec<u8> {
        let columns = self.columns;
        let per_row = columns.div_ceil(self.format.width(columns));
        let n_rows = self.codes.len() / columns;
        self.format.pack(
            n_rows,
            columns,
            || (),
            |(), row, codes, groups| {
                codes.copy_from_slice(&self.codes[row * columns..][..columns]);
                groups.copy_from_slice(&self.groups[row * per_row..][..per_row]);
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Format;

    fn formats() -> Vec<Scaled> {
        let scaled = |format| match format {
            Format::Scaled(scaled) => scaled,
            Format::Plain(_) | Format::E4m3 => {
                unreachable!("the formats below have scales")
            }
        };
        let mut all: Vec<_> = [
            Format::INT8,
            Format::INT8_32,
            Format::FP8,
            Format::FP8_128,
            Format::INT4,
        ]
        .map(scaled)
        .into();
        all.extend([32, 64].map(|width| Scaled {
            values: Values::Int4,
            group: Group::Columns(width),
        }));
        all
    }

    fn matrix(rows: usize, columns: usize) -> Vec<f32> {
        let mut state = 7u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.4
        };
        (0..rows * columns).map(|_| next()).collect()
    }

    #[test]
    fn values_are_within_half_a_step() {
        let (rows, columns) = (5, 200);
        let matrix = matrix(rows, columns);
        for format in formats() {
            let got = format.quantize(&matrix, columns).values();
            for (&got, &want) in got.iter().zip(&matrix) {
                // The error is at most 1/16 of the value for E4M3, and half a quantization step for integers. Rounded zero points increase
                // the error for 4-bit integers.
                let bound = match format.values {
                    Values::Int8 => 0.6 / 254.0 * 1.01,
                    Values::E4m3 => want.abs() / 16.0 + 0.6 / 448.0 / 1024.0,
                    Values::Int4 => 1.0 / 15.0,
                };
                assert!((got - want).abs() <= bound, "{format:?}: {got} for {want}");
            }
        }
    }

    #[test]
    fn quantized_values_stay_as_they_are() {
        // 4-bit integers are excluded, because rounding may shrink the range of a group.
        for format in formats().into_iter().filter(|format| format.bits() == 8) {
            let once = format.quantize(&matrix(3, 130), 130).values();
            let twice = format.quantize(&once, 130).values();
            for (once, twice) in once.iter().zip(&twice) {
                assert!(
                    (once - twice).abs() <= 1e-6 * once.abs(),
                    "{format:?}: {once} became {twice}"
                );
            }
        }
    }

    #[test]
    fn packed_bytes_have_the_announced_size_and_every_value_once() {
        for format in formats() {
            for (rows, columns) in [(1, 1), (8, 128), (11, 130), (16, 64), (131, 70)] {
                let matrix = matrix(rows, columns);
                let quantized = format.quantize(&matrix, columns);
                let packed = quantized.pack();
                let at_once = format.pack_rows(rows, columns, |row, elements| {
                    elements.extend_from_slice(&matrix[row * columns..][..columns]);
                });
                assert!(at_once == packed, "{format:?} {rows}x{columns}");
                let size = format.packed_bytes(rows as u64, columns as u64);
                assert_eq!(
                    Some(packed.len() as u64),
                    size,
                    "{format:?} {rows}x{columns}"
                );
                let padded = rows.next_multiple_of(8);
                let pitch = 8 * format.bits() as usize;
                for row in 0..rows {
                    for column in 0..columns {
                        let at = (column / BLOCK * padded + row) * pitch;
                        let of_row = &packed[at..at + pitch];
                        let code = quantized.codes[row * columns + column];
                        let (mut codes, mut alone) = ([0; BLOCK], vec![0; pitch]);
                        codes[column % BLOCK] = 0xf;
                        format.put(&codes, &mut alone);
                        let place = alone.iter().position(|&b| b != 0).unwrap_or(0);
                        let stored = match (format.bits(), alone[place]) {
                            (4, 0xf0) => of_row[place] >> 4,
                            (4, _) => of_row[place] & 15,
                            _ => of_row[place],
                        };
                        assert_eq!(stored, code, "{format:?} {row} {column}");
                    }
                }
            }
        }
    }

    #[test]
    fn packed_rows_of_8_bit_values_store_columns_in_the_documented_order() {
        for (values, word) in [(Values::E4m3, E4M3_WORD), (Values::Int8, INT8_WORD)] {
            let group = Group::Row;
            let codes: [u8; BLOCK] = std::array::from_fn(|column| column as u8);
            let mut row = [0; BLOCK];
            Scaled { values, group }.put(&codes, &mut row);
            let columns: Vec<u8> = (0..BLOCK).map(|at| column_at(at, word) as u8).collect();
            assert_eq!(row.as_slice(), columns, "{values:?}");
        }
    }

    #[test]
    fn a_group_of_zeros_has_values_of_zero() {
        for format in formats() {
            let quantized = format.quantize(&[0.0; 256], 128);
            assert!(quantized.values().iter().all(|&v| v == 0.0));
        }
    }
}
