//! Pooling of tokens with weights.

use serde::{Deserialize, Serialize};

use super::{
    Case, Constants, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance, limits,
    pooling::{POOL_THREADS, pool_cases, pool_constants, pool_launch, pool_params, pool_reads},
    rows::rounded_once,
};
use crate::{
    machine::Machine,
    ops::PoolWeights,
    tensor::{DType, Extents},
};

/// `x [tokens, width]`, `cu_lens [batch + 1]` → `out [batch, width]`: sum of each sequence's rows, weighted by [`PoolWeights`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WeightedPool {
    pub weights: PoolWeights,
    pub width: u32,
    pub dtype: DType,
}

impl Kernel for WeightedPool {
    facts! { template: "weighted_pool", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!("{}_{}_w{}", self.weights.name(), self.dtype, self.width)
    }

    fn constants(&self) -> Constants {
        let mut constants = pool_constants(self.width, self.dtype);
        constants.insert(
            "by_position",
            (self.weights == PoolWeights::Position).into(),
        );
        constants
    }

    fn params(&self) -> Vec<Param> {
        pool_params(self.width, self.dtype)
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width])
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        pool_launch(extents)
    }

    fn threads(&self) -> u32 {
        POOL_THREADS
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (x, cu_lens) = pool_reads(reads);
        let width = self.width as usize;
        let mut out = Vec::new();
        for ends in cu_lens.windows(2) {
            let rows = &x[ends[0] as usize * width..ends[1] as usize * width];
            let mut sums = vec![0f64; width];
            for (i, row) in rows.chunks_exact(width).enumerate() {
                let weight = self.weights.of(i);
                for (sum, &v) in sums.iter_mut().zip(row) {
                    *sum += weight * f64::from(v);
                }
            }
            let divisor = self.weights.divisor(rows.len() / width);
            out.extend(sums.iter().map(|sum| (sum / divisor) as f32));
        }
        vec![HostTensor::Real(out)]
    }

    fn cases(&self) -> Vec<Case> {
        pool_cases()
    }

    fn tolerance(&self) -> Tolerance {
        rounded_once(
            self.dtype,
            1e-5,
            "a thread adds up to a few hundred weighted values in f32 before the division; the sum divided by the square root \
             of their number has a magnitude of a few units, and is then rounded to storage",
        )
    }
}

/// Instances for the device check and the compile tests.
pub fn representative() -> Vec<KernelSpec> {
    let mut kernels: Vec<KernelSpec> = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for weights in PoolWeights::ALL {
            for width in [768, 100, 1003, 8191] {
                let kernel = WeightedPool {
                    weights,
                    width,
                    dtype,
                };
                kernels.push(kernel.into());
            }
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_tokens_count_more_and_sums_are_divided_by_the_root_of_the_length() {
        let extents = Extents::of(&[1, 4]).unwrap();
        let x = HostTensor::Real(vec![3.0, 1.0, 2.0, 3.0, 4.0]);
        let cu_lens = HostTensor::Index(vec![0, 1, 5]);
        let pooled = |weights| {
            let kernel = WeightedPool {
                weights,
                width: 1,
                dtype: DType::F32,
            };
            kernel.reference(&extents, &[&x, &cu_lens])[0]
                .real()
                .to_vec()
        };
        assert_eq!(pooled(PoolWeights::Position), [3.0, 3.0]);
        assert_eq!(pooled(PoolWeights::RootLength), [3.0, 5.0]);
    }
}
