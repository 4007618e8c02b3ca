use super::{CheckpointError, WeightSource};
use crate::kernels::trial::normal;

/// Weights drawn from a seed: for benchmarks and for tests of sizes that nobody published.
///
/// A tensor depends on the seed and its own name only. Matrices are normal around 0 and gains of
/// LayerNorm around 1. `scripts/reference.py` makes the same numbers for transformers.
#[derive(Clone, Copy, Debug)]
pub struct RandomWeights {
    pub seed: u64,
    pub deviation: f32,
}

impl RandomWeights {
    /// The deviation 0.02 that transformers' initialisers have.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            deviation: 0.02,
        }
    }
}

impl WeightSource for RandomWeights {
    fn read(&self, name: &str, dims: &[u64]) -> Result<Vec<f32>, CheckpointError> {
        let n = dims.iter().product::<u64>() as usize;
        // FNV-1a of the name, started from the seed.
        let mut state = name
            .bytes()
            .fold(self.seed ^ 0xcbf2_9ce4_8422_2325, |h, b| {
                (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3)
            });
        let is_gain = dims.len() == 1 && name.ends_with("weight");
        let mean = if is_gain { 1.0 } else { 0.0 };
        Ok((0..n)
            .map(|_| mean + self.deviation * normal(&mut state))
            .collect())
    }

    fn check(&self, _: &[(&str, &[u64])]) -> Result<(), CheckpointError> {
        Ok(())
    }

    fn surplus(&self, _: &[(&str, &[u64])]) -> Vec<String> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_depends_on_seed_and_name_only() {
        let a = RandomWeights::new(1);
        let read = |w: RandomWeights, name| w.read(name, &[4, 4]).expect("random weights exist");
        assert_eq!(read(a, "x"), read(a, "x"));
        assert_ne!(read(a, "x"), read(a, "y"));
        assert_ne!(read(a, "x"), read(RandomWeights::new(2), "x"));
    }
}
