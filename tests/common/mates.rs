//! Checks whether the results of a sequence depend on the other sequences of its batch.

use gemmule::{Batch, Engine, Session};

/// A pseudorandom generator with a fixed seed.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn below(&mut self, bound: u32) -> u32 {
        let product = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = product.wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(bound)) as u32
    }

    pub fn sequence(&mut self, len: u32, vocabulary: u32) -> Vec<u32> {
        (0..len).map(|_| self.below(vocabulary)).collect()
    }
}

/// Returns the bits of all outputs for sequence `at` of the batch. An output has one row per token or one row per sequence.
fn bits(session: &mut Session, sequences: &[Vec<u32>], at: usize) -> Vec<u32> {
    let batch = Batch::from_sequences(sequences).expect("a batch");
    let outputs = session.run(&batch).expect("it runs");
    let start: usize = sequences[..at].iter().map(Vec::len).sum();
    let n_tokens: usize = sequences.iter().map(Vec::len).sum();
    let mut bits = Vec::new();
    for output in outputs.iter() {
        let (first, rows) = match output.shape[0] as usize == n_tokens {
            true => (start, sequences[at].len()),
            false => (at, 1),
        };
        let width = output.shape[1] as usize;
        let values = &output.values[first * width..][..rows * width];
        bits.extend(values.iter().map(|value| value.to_bits()));
    }
    assert!(bits.iter().all(|b| f32::from_bits(*b).is_finite()));
    bits
}

/// Runs a sequence of each length in `lens` alone and in several batches, and returns the number of batches in which its result differs
/// bitwise from its result alone. The sequence is at the start, at the end or at a random position of its batch. The other sequences vary
/// in number and length, up to `longest` tokens. `longest` must be at least 90.
pub fn n_changed(engine: &Engine, lens: &[u32], longest: u32) -> usize {
    let vocabulary = engine.limits().vocabulary;
    let mut session = engine.session().expect("a session");
    let mut numbers = Numbers(7);
    let mut n_changed = 0;
    for &len in lens {
        let own = numbers.sequence(len, vocabulary);
        let alone = bits(&mut session, std::slice::from_ref(&own), 0);
        for n_others in [1, 2, 9] {
            let longest = [3, 90, longest][numbers.below(3) as usize];
            let mut sequences: Vec<Vec<u32>> = (0..n_others)
                .map(|_| {
                    let len = 1 + numbers.below(longest);
                    numbers.sequence(len, vocabulary)
                })
                .collect();
            let middle = numbers.below(n_others + 1) as usize;
            for at in [0, n_others as usize, middle] {
                sequences.insert(at, own.clone());
                n_changed += usize::from(bits(&mut session, &sequences, at) != alone);
                sequences.remove(at);
            }
        }
    }
    n_changed
}
