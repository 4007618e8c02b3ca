//! Dequantization of blocks to f32.
//!
//! Each product and sum is rounded to f32 in the same order as in the Python package `gguf`, so that results are bitwise equal.

use half::{bf16, f16};

use super::{Format, folder::Integers};

/// Number of elements of a block in the types with large blocks (`Q2_K` to `Q6_K` and `IQ4_XS`).
const K: usize = 256;
/// Values of the 16 codes of IQ4_NL and IQ4_XS.
const IQ4: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// Writes the dequantized elements of whole blocks to `out`.
///
/// # Panics
/// Panics if `blocks` does not consist of whole blocks, or if `out` does not have the length of their elements.
pub(super) fn dequantize(format: Format, blocks: &[u8], out: &mut [f32]) {
    match format {
        Format::F32 => each(blocks, out, |block: &[u8; 4], [x]: &mut [f32; 1]| {
            *x = f32::from_le_bytes(*block);
        }),
        Format::F16 => each(blocks, out, |block: &[u8; 2], [x]: &mut [f32; 1]| {
            *x = f16::from_le_bytes(*block).to_f32();
        }),
        Format::BF16 => each(blocks, out, |block: &[u8; 2], [x]: &mut [f32; 1]| {
            *x = bf16::from_le_bytes(*block).to_f32();
        }),
        Format::Q4_0 => each(blocks, out, q4_0),
        Format::Q4_1 => each(blocks, out, q4_1),
        Format::Q5_0 => each(blocks, out, q5_0),
        Format::Q5_1 => each(blocks, out, q5_1),
        Format::Q8_0 => each(blocks, out, q8_0),
        Format::Q2K => each(blocks, out, q2_k),
        Format::Q3K => each(blocks, out, q3_k),
        Format::Q4K => each(blocks, out, q4_k),
        Format::Q5K => each(blocks, out, q5_k),
        Format::Q6K => each(blocks, out, q6_k),
        Format::IQ4NL => each(blocks, out, iq4_nl),
        Format::IQ4XS => each(blocks, out, iq4_xs),
    }
}

/// Writes the codes and scales of whole blocks of integers.
///
/// # Panics
/// Panics if `blocks` does not consist of whole blocks, or if `codes` or `scales` does not have the length for these blocks.
pub(super) fn integers(of: Integers, blocks: &[u8], codes: &mut [u8], scales: &mut [f32]) {
    match of {
        Integers::Int4 => each(blocks, codes, |block: &[u8; 18], out: &mut [u8; 32]| {
            for (i, &byte) in block[2..].iter().enumerate() {
                (out[i], out[16 + i]) = (byte & 15, byte >> 4);
            }
        }),
        Integers::Int8 => each(blocks, codes, |block: &[u8; 34], out: &mut [u8; 32]| {
            for (out, &byte) in out.iter_mut().zip(&block[2..]) {
                *out = byte ^ 0x80;
            }
        }),
    }
    let block = blocks.len() / scales.len().max(1);
    for (scale, block) in scales.iter_mut().zip(blocks.chunks_exact(block.max(1))) {
        *scale = half(block, 0);
    }
}

fn each<const B: usize, const N: usize, T>(
    blocks: &[u8],
    out: &mut [T],
    one: impl Fn(&[u8; B], &mut [T; N]),
) {
    let ((blocks, rest), (out, unfilled)) = (blocks.as_chunks(), out.as_chunks_mut());
    assert!(rest.is_empty() && unfilled.is_empty() && blocks.len() == out.len());
    for (block, out) in blocks.iter().zip(out) {
        one(block, out);
    }
}

/// Returns the f16 at byte `at` of a block.
fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Returns the four bits of element `i` of 32. The low nibbles of the 16 bytes come first, then the high ones.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    (bytes[i % 16] >> (i / 16 * 4)) & 15
}

/// Returns bit `i` of a byte sequence.
fn bit(bytes: &[u8], i: usize) -> u8 {
    (bytes[i / 8] >> (i % 8)) & 1
}

fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half(block, 0);
    for (i, x) in out.iter_mut().enumerate() {
        *x = d * f32::from(nibble(&block[2..], i) as i8 - 8);
    }
}

fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, min) = (half(block, 0), half(block, 2));
    for (i, x) in out.iter_mut().enumerate() {
        *x = d * f32::from(nibble(&block[4..], i)) + min;
    }
}

fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = half(block, 0);
    for (i, x) in out.iter_mut().enumerate() {
        let q = nibble(&block[6..], i) | bit(&block[2..], i) << 4;
        *x = d * f32::from(q as i8 - 16);
    }
}

fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, min) = (half(block, 0), half(block, 2));
    for (i, x) in out.iter_mut().enumerate() {
        let q = nibble(&block[8..], i) | bit(&block[4..], i) << 4;
        *x = d * f32::from(q) + min;
    }
}

fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half(block, 0);
    for (x, &q) in out.iter_mut().zip(&block[2..]) {
        *x = d * f32::from(q as i8);
    }
}

/// Returns the two bits of element `i` of 256, from 64 bytes. In each half of the bytes, byte `j` has two bits of each of the elements `j`,
/// `j + 32`, `j + 64` and `j + 96` of that half.
fn pair(bytes: &[u8], i: usize) -> u8 {
    (bytes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3
}

fn q2_k(block: &[u8; 84], out: &mut [f32; K]) {
    let (d, min) = (half(block, 80), half(block, 82));
    for (i, x) in out.iter_mut().enumerate() {
        let scale = block[i / 16];
        let (d, min) = (d * f32::from(scale & 15), min * f32::from(scale >> 4));
        *x = d * f32::from(pair(&block[16..], i)) - min;
    }
}

fn q3_k(block: &[u8; 110], out: &mut [f32; K]) {
    let (high, scales, d) = (&block[..32], &block[96..108], half(block, 108));
    for (i, x) in out.iter_mut().enumerate() {
        let group = i / 16;
        let low = (scales[group % 8] >> (group / 8 * 4)) & 15;
        let upper = (scales[8 + group % 4] >> (group / 4 * 2)) & 3;
        let scale = (low | upper << 4) as i8 - 32;
        let bit = (high[i % 32] >> (i / 32)) & 1;
        let q = pair(&block[32..], i) as i8 - (4 - 4 * bit as i8);
        *x = d * f32::from(scale) * f32::from(q);
    }
}

/// Returns the scale and the minimum of group `i` of a block, which has eight groups. Both numbers have six bits.
fn scale_min(scales: &[u8], i: usize) -> (u8, u8) {
    match i {
        0..4 => (scales[i] & 63, scales[4 + i] & 63),
        _ => (
            scales[4 + i] & 15 | scales[i - 4] >> 6 << 4,
            scales[4 + i] >> 4 | scales[i] >> 6 << 4,
        ),
    }
}

/// Returns the four bits of element `i` of 256, from 128 bytes. Every 64 consecutive elements take 32 bytes. The low nibbles hold the first
/// 32 elements, and the high nibbles the others.
fn nibble_of_64(bytes: &[u8], i: usize) -> u8 {
    (bytes[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4)) & 15
}

fn q4_k(block: &[u8; 144], out: &mut [f32; K]) {
    let (d, min) = (half(block, 0), half(block, 2));
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, offset) = scale_min(&block[4..16], group);
        let (d, min) = (d * f32::from(scale), min * f32::from(offset));
        for (i, x) in out.iter_mut().enumerate() {
            *x = d * f32::from(nibble_of_64(&block[16..], group * 32 + i)) - min;
        }
    }
}

fn q5_k(block: &[u8; 176], out: &mut [f32; K]) {
    let (d, min) = (half(block, 0), half(block, 2));
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, offset) = scale_min(&block[4..16], group);
        let (d, min) = (d * f32::from(scale), min * f32::from(offset));
        for (i, x) in out.iter_mut().enumerate() {
            let high = (block[16 + i] >> group) & 1;
            let q = nibble_of_64(&block[48..], group * 32 + i) | high << 4;
            *x = d * f32::from(q) - min;
        }
    }
}

fn q6_k(block: &[u8; 210], out: &mut [f32; K]) {
    let (scales, d) = (&block[192..208], half(block, 208));
    for (i, x) in out.iter_mut().enumerate() {
        let low = (block[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4)) & 15;
        let q = (low | pair(&block[128..], i) << 4) as i8 - 32;
        *x = d * f32::from(scales[i / 16] as i8) * f32::from(q);
    }
}

fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half(block, 0);
    for (i, x) in out.iter_mut().enumerate() {
        *x = d * f32::from(IQ4[usize::from(nibble(&block[2..], i))]);
    }
}

fn iq4_xs(block: &[u8; 136], out: &mut [f32; K]) {
    let (d, high) = (half(block, 0), u16::from_le_bytes([block[2], block[3]]));
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = (block[4 + group / 2] >> (group % 2 * 4)) & 15;
        let upper = (high >> (group * 2)) as u8 & 3;
        let d = d * f32::from((low | upper << 4) as i8 - 32);
        let values = &block[8 + group * 16..];
        for (i, x) in out.iter_mut().enumerate() {
            *x = d * f32::from(IQ4[usize::from(nibble(values, i))]);
        }
    }
}
