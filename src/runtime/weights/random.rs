use super::{CheckpointError, WeightSource};

/// Weights drawn from a seed: for benchmarks and for tests of sizes that nobody published.
///
/// A tensor depends on the seed and its own name only. Matrices are normal with deviation 0.02,
/// as transformers' initialiser has it; LayerNorm weights lie near 1.
#[derive(Clone, Copy, Debug)]
pub struct RandomWeights {
    pub seed: u64,
}

impl WeightSource for RandomWeights {
    fn read(&self, name: &str, dims: &[u64]) -> Result<Vec<f32>, CheckpointError> {
        let n = dims.iter().product::<u64>() as usize;
        let mut state = name.bytes().fold(self.seed ^ 0xcbf2_9ce4_8422_2325, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let is_gain = dims.len() == 1 && name.ends_with("weight");
        let mean = if is_gain { 1.0 } else { 0.0 };
        Ok((0..n).map(|_| mean + 0.02 * normal(&mut state)).collect())
    }

    fn check(&self, _: &[(&str, &[u64])]) -> Result<(), CheckpointError> {
        Ok(())
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014).
pub fn uniform(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A value close to a standard normal one: the sum of four uniform ones (Irwin and Hall), scaled.
/// It has no far tail, which suits tests of low-precision kernels, and costs one draw.
pub fn normal(state: &mut u64) -> f32 {
    let bits = uniform(state);
    let sum: u32 = (0..4).map(|i| ((bits >> (16 * i)) & 0xffff) as u32).sum();
    // Each part is uniform on 0..65536 with variance 65536²/12; four of them sum to 65536²/3.
    (sum as f32 - 131_070.0) / 37_837.23
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_centred_with_unit_deviation() {
        let mut state = 7;
        let n = 100_000;
        let values: Vec<f64> = (0..n).map(|_| f64::from(normal(&mut state))).collect();
        let mean = values.iter().sum::<f64>() / f64::from(n);
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / f64::from(n);
        assert!(mean.abs() < 0.02, "{mean}");
        assert!((variance - 1.0).abs() < 0.02, "{variance}");
    }

    #[test]
    fn a_tensor_depends_on_seed_and_name_only() {
        let a = RandomWeights { seed: 1 };
        let read = |w: RandomWeights, name| w.read(name, &[4, 4]).expect("random weights exist");
        assert_eq!(read(a, "x"), read(a, "x"));
        assert_ne!(read(a, "x"), read(a, "y"));
        assert_ne!(read(a, "x"), read(RandomWeights { seed: 2 }, "x"));
    }
}
