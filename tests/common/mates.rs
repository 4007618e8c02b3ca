//! Checks whether a sequence's results depend on the rest of the batch.

use gemmule::{Batch, Engine, Session};

/// Generates numbers below a bound, the same in every run.
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

/// Returns the bits of all outputs for sequence `at` of the batch. An output has rows of tokens or of sequences.
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

/// Returns the number of batches in which the result of a sequence differs bitwise from its result alone. The sequence has one of the given
/// lengths, and is the first, the last or another one of its batch. The other sequences vary in number and in length, up to `longest`.
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
