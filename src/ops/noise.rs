//! Normally distributed noise that is a function of a seed and a column.

use crate::search::Philox;

/// Returns a standard normal number for a column, by the Box-Muller transform of two Philox numbers. It depends only on the seed and the
/// column, and its Philox counter differs from the counters used to sample tokens.
pub fn noise(seed: u64, column: u32) -> f64 {
    let [radius, angle, ..] = Philox::new(seed).numbers([column / 2, 0, 0, LATENT]);
    let unit = |bits: u32| f64::from(bits) / f64::from(1 << 24);
    // The argument of the logarithm is from 2⁻²⁴ to 1, so the result is finite.
    let radius = (-2.0 * unit((radius >> 8) + 1).ln()).sqrt();
    let angle = std::f64::consts::TAU * unit(angle >> 8);
    match column % 2 {
        0 => radius * angle.cos(),
        _ => radius * angle.sin(),
    }
}

/// Last word of the Philox counter for noise. In counters for sampling tokens, the last word has this value only after 2⁶³ sequences.
pub(crate) const LATENT: u32 = 1 << 31;

/// Combines the low and high halves of a sequence's seed ([`BatchInput::Seeds`](super::BatchInput::Seeds)).
pub fn seed_of(halves: [i32; 2]) -> u64 {
    let [low, high] = halves.map(|half| u64::from(half as u32));
    high << 32 | low
}
