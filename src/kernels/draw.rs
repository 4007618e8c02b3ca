//! Samples of a latent variable: `mean + exp(log_variance / 2) · noise`, as in a variational autoencoder (Kingma and Welling
//! 2014, section 2.4).

use serde::{Deserialize, Serialize};

use super::{
    Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance,
    rows::{STREAM_THREADS, count, read, read_meta, rows_by, storage, stream_launch, write},
};
use crate::{
    kernels::limits,
    machine::Machine,
    ops::{BatchInput, LATENT, noise, seed_of},
    tensor::{DType, Extents, Shape, Size, Symbol},
};

/// `mean [batch, width]`, `log_variance [batch, width]`, `seeds [2·batch]` → `out [batch, width]`: `mean + exp(log_variance / 2) · noise`,
/// where [`noise`] depends on the seed of the sequence and on the column.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Draw {
    pub width: u32,
    pub dtype: DType,
}

impl Kernel for Draw {
    facts! { template: "draw", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!("draw_{}_w{}", self.dtype, self.width)
    }

    fn constants(&self) -> Constants {
        Constants::from([
            ("storage", storage(self.dtype)),
            ("width", self.width.into()),
            ("latent", LATENT.into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        let rows = || rows_by(Symbol::Batch, self.width);
        let log_variance = Fill::Normal {
            mean: -1.0,
            deviation: 0.5,
        };
        let seeds = Shape::new([&Size::from(Symbol::Batch) * &Size::constant(2)]);
        vec![
            read("mean", self.dtype, rows(), Fill::ACTIVATION),
            read("log_variance", self.dtype, rows(), log_variance),
            read_meta("seeds", BatchInput::Seeds, seeds),
            write("out", self.dtype, rows()),
            count(Symbol::Batch),
        ]
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width])
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        stream_launch(extents.batch * u64::from(self.width))
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (mean, log_variance, seeds) = (reads[0].real(), reads[1].real(), reads[2].index());
        let of_row = |row: usize| {
            let seed = seed_of([0, 1].map(|half| seeds[2 * row + half] as i32));
            (0..self.width).map(move |column| {
                let at = row * self.width as usize + column as usize;
                let deviation = (0.5 * f64::from(log_variance[at])).exp();
                (f64::from(mean[at]) + deviation * noise(seed, column)) as f32
            })
        };
        let all = (0..extents.batch as usize).flat_map(of_row).collect();
        vec![HostTensor::Real(all)]
    }

    fn check_rows(&self, extents: &Extents) -> u64 {
        extents.batch
    }

    fn tolerance(&self) -> Tolerance {
        let relative = match self.dtype {
            DType::F16 => 1e-3,
            DType::BF16 => 8e-3,
            DType::F32 => 2e-6,
        };
        Tolerance {
            absolute: 1e-5,
            relative,
            reason: "logarithm, sine and exponential within 2 ulp of f32, times a deviation of up to about 3, rounded to storage",
        }
    }
}

/// Instances with odd, even and realistic numbers of columns.
pub(super) fn representative() -> Vec<KernelSpec> {
    let of = |dtype| [1, 7, 64].map(|width| Draw { width, dtype }.into());
    let dtypes = [DType::F32, DType::F16, DType::BF16];
    dtypes.into_iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_standard_normal_and_a_function_of_seed_and_column() {
        let n = 100_000;
        let all: Vec<f64> = (0..n).map(|i| noise(u64::from(i / 100), i % 100)).collect();
        let moment = |power: i32| all.iter().map(|x| x.powi(power)).sum::<f64>() / f64::from(n);
        for (power, want) in [(1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)] {
            assert!(
                (moment(power) - want).abs() < 0.06,
                "{power}: {}",
                moment(power)
            );
        }
        assert!(all.iter().all(|x| x.is_finite()));
        assert_eq!(noise(7, 3), noise(7, 3));
        assert_ne!(noise(7, 3), noise(8, 3));
        assert_ne!(noise(7, 2), noise(7, 3));
        for seed in [0, 5, u64::MAX, 1 << 40] {
            let halves = [seed as u32 as i32, (seed >> 32) as u32 as i32];
            assert_eq!(seed_of(halves), seed);
        }
    }
}
