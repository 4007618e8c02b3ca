//! Choice of the next token: logits processors, sampling, beam search, and random numbers that depend only on a seed.
//!
//! Everything runs on the CPU, on one row of logits for each sequence or beam. The order of operations and the results are those of Hugging
//! Face transformers.

mod beams;
mod candidates;
mod philox;
mod rules;
mod sample;

pub use beams::{
    BeamSearch, BeamState, Beams, BeamsError, EarlyStopping, Ending, Hypothesis, Kept, Step,
    Stepped,
};
pub use candidates::largest;
pub use philox::Philox;
pub use rules::Rules;
pub use sample::{Sampling, SamplingError};

/// Returns the token with the largest logit; ties go to the lowest token.
pub fn greedy(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, &x) in logits.iter().enumerate() {
        if x > logits[best] {
            best = id;
        }
    }
    best as u32
}

/// Returns `log softmax(logits)` of one token.
pub fn log_probability(logits: &[f32], id: u32) -> f32 {
    logits[id as usize] - log_sum(logits)
}

/// Returns `log Σ exp(logits)`.
pub fn log_sum(logits: &[f32]) -> f32 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - top).exp()).sum();
    (f64::from(top) + sum.ln()) as f32
}

#[cfg(test)]
mod tests;
