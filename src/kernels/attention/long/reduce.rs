use serde::{Deserialize, Serialize};

use super::{super::params, KEY_TILE, Layout, cases, partials_shape, problems, statistics_shape};
use crate::{
    kernels::{Case, Constants, Fill, HostTensor, Kernel, Launch, Param, Role, Tolerance, limits},
    machine::Machine,
    tensor::{DType, Extents},
};

/// `partials [heads, key_tiles, 2]`, `cu_lens`, `pair_offsets` → `statistics [heads, tokens, 2]`: for each row of scores, the maximum and
/// the sum of `exp(score − maximum)`, computed in f32 from the partials of the row's key tiles. This is the full reduction between the two
/// grouped GEMMs of ByteTransformer III.E.2.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MhaLongReduce {
    pub heads: u32,
}

const THREADS: u32 = 256;
/// Lanes per row.
const LANES: u32 = 8;

impl Kernel for MhaLongReduce {
    facts! { template: "mha_long_reduce", class: Attention }

    fn symbol(&self) -> String {
        format!("mha_long_reduce_{}_h{}", DType::F32, self.heads)
    }

    fn constants(&self) -> Constants {
        Constants::from([("key_tile", KEY_TILE.into()), ("lanes", LANES.into())])
    }

    fn params(&self) -> Vec<Param> {
        let partials = Param {
            name: "partials",
            role: Role::Read {
                element: DType::F32.into(),
                shape: partials_shape(self.heads),
                // The values are positive, like row sums of exponentials.
                fill: Fill::Normal {
                    mean: 3.0,
                    deviation: 0.5,
                },
            },
        };
        let mut all = vec![
            partials,
            params::cu_lens(),
            params::pair_offsets(),
            params::write("statistics", DType::F32, statistics_shape(self.heads)),
        ];
        all.extend(params::counts(&[]));
        all
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.heads])
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let rows = u64::from(THREADS / LANES);
        Launch {
            // There are at most 2^24 tokens, so the number of CTAs fits in 32 bits.
            grid: [extents.tokens.div_ceil(rows) as u32, self.heads, 1],
            threads: THREADS,
            shared_bytes: 0,
        }
    }

    fn threads(&self) -> u32 {
        THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let partials = reads[0].real();
        let layout = Layout::of(extents);
        let tokens = extents.tokens as usize;
        let mut statistics = vec![0.0; self.heads as usize * tokens * 2];
        for p in problems(self.heads, reads[1].index(), reads[2].index()) {
            let tiles = Layout::tiles(p.len);
            for i in 0..p.len {
                let from = (layout.partials(p.head, p.pairs, p.tokens) + i * tiles) * 2;
                let of_row = || partials[from..from + tiles * 2].chunks_exact(2);
                let top = of_row().map(|p| p[0]).fold(f32::NEG_INFINITY, f32::max);
                let sum: f64 = of_row()
                    .map(|p| f64::from(p[1]) * f64::from(p[0] - top).exp())
                    .sum();
                let to = (p.head * tokens + p.tokens + i) * 2;
                statistics[to..to + 2].copy_from_slice(&[top, sum as f32]);
            }
        }
        vec![HostTensor::Real(statistics)]
    }

    fn cases(&self) -> Vec<Case> {
        cases()
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance {
            absolute: 1e-6,
            relative: 1e-5,
            reason: "f32 sum over the tiles in another order, each rescaled by a few powers of two",
        }
    }
}
