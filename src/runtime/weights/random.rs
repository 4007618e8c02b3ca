use super::{CheckpointError, WeightSource, elements, room};
use crate::kernels::trial::normal;

/// Weights generated from a seed, for benchmarks and for tests of unpublished model sizes.
///
/// The values of a tensor depend only on the seed and the tensor's name. Matrices are normally distributed around 0, and LayerNorm weights
/// around 1. `scripts/reference.py` generates the same numbers for Hugging Face transformers.
#[derive(Clone, Copy, Debug)]
pub struct RandomWeights {
    pub seed: u64,
    pub deviation: f32,
}

impl RandomWeights {
    /// Creates weights with standard deviation 0.02, the default of Hugging Face transformers.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            deviation: 0.02,
        }
    }
}

impl WeightSource for RandomWeights {
    fn read(&self, name: &str, dims: &[u64]) -> Result<Vec<f32>, CheckpointError> {
        let n = elements(dims);
        let mut values = room(name, n)?;
        // FNV-1a hash of the name, starting from the seed.
        let mut state = name
            .bytes()
            .fold(self.seed ^ 0xcbf2_9ce4_8422_2325, |h, b| {
                (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3)
            });
        let is_gain = dims.len() == 1 && name.ends_with("weight");
        let mean = if is_gain { 1.0 } else { 0.0 };
        values.extend((0..n).map(|_| mean + self.deviation * normal(&mut state)));
        Ok(values)
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

    #[test]
    fn a_tensor_larger_than_memory_is_an_error_with_its_name_and_bytes() {
        let text = |dims: &[u64]| {
            let weights = RandomWeights::new(1);
            weights.read("table", dims).unwrap_err().to_string()
        };
        insta::assert_snapshot!(text(&[1 << 40, 1 << 8]), @"out of memory for the tensor `table`, which takes 1125899906842624 bytes; are its sizes right? Free memory, or use a smaller model");
        // The product exceeds 64 bits.
        insta::assert_snapshot!(text(&[1 << 40, 1 << 40]), @"out of memory for the tensor `table`, which takes 18446744073709551615 bytes; are its sizes right? Free memory, or use a smaller model");
        let row = |rows| crate::graph::WeightExpr::Stored {
            name: format!("part of {rows}"),
            dims: vec![rows, 1 << 20],
        };
        let parts = crate::graph::WeightExpr::ConcatRows(vec![row(1 << 31), row(1 << 30)]);
        let error = super::super::evaluate(&parts, &RandomWeights::new(1)).unwrap_err();
        insta::assert_snapshot!(error, @"out of memory for the tensor `part of 2147483648`, which takes 13510798882111488 bytes; are its sizes right? Free memory, or use a smaller model");
    }
}
