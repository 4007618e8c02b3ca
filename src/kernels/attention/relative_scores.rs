//! Dot products of queries or keys with embeddings of relative positions, as in disentangled attention (DeBERTa).

use serde::{Deserialize, Serialize};

use super::{
    common::{pairs_shape, rounding},
    params, storage,
};
use crate::{
    kernels::{
        Case, Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Role, Tolerance,
        class::attention_flop, limits,
    },
    machine::Machine,
    ops::{PositionBias, Side},
    tensor::{DType, Extents, Shape, Size, Symbol},
};

/// `x [tokens, heads·head]`, `table [2·reach + 1, heads·head]`, `cu_lens`, `pair_offsets` → `scores [heads, pairs]`: `x · table[distance]`
/// for each head, query and key of a sequence. `of` selects whether the row of `x` belongs to the query or to the key. The distance is the
/// key's position minus the query's position, clamped to `±reach`, and row 0 of `table` is for distance `-reach`. This is the plain kernel,
/// with one thread per pair.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RelativeScores {
    pub heads: u32,
    pub head: u32,
    /// Max distance that has its own row in the table.
    pub reach: u32,
    pub of: Side,
    pub dtype: DType,
}

const THREADS: u32 = 256;

impl RelativeScores {
    /// Number of rows of the table.
    pub fn rows(&self) -> u64 {
        2 * u64::from(self.reach) + 1
    }

    /// Returns the table's row for a key and a query of a sequence.
    pub fn row(&self, key: usize, query: usize) -> usize {
        let reach = i64::from(self.reach);
        let distance = (key as i64 - query as i64).clamp(-reach, reach);
        (distance + reach) as usize
    }
}

impl Kernel for RelativeScores {
    facts! { template: "relative_scores", dtype: self.dtype, class: Attention }

    fn symbol(&self) -> String {
        format!(
            "relative_scores_{}_{}_h{}x{}_reach{}",
            self.dtype,
            self.of.name(),
            self.heads,
            self.head,
            self.reach
        )
    }

    fn constants(&self) -> Constants {
        Constants::from([
            ("storage", storage(self.dtype).into()),
            ("head", self.head.into()),
            ("width", (self.heads * self.head).into()),
            ("reach", self.reach.into()),
            ("of", self.of.name().into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        let width = Size::constant(u64::from(self.heads) * u64::from(self.head));
        let x = Shape::new([Symbol::Tokens.into(), width.clone()]);
        let table = Param {
            name: "table",
            role: Role::Read {
                element: self.dtype.into(),
                shape: Shape::new([Size::constant(self.rows()), width]),
                fill: Fill::ACTIVATION,
            },
        };
        let mut all = vec![
            params::read("x", self.dtype, x),
            table,
            params::cu_lens(),
            params::pair_offsets(),
            params::write("scores", self.dtype, pairs_shape(self.heads)),
        ];
        all.extend(params::counts(&[]));
        all
    }

    fn flop(&self) -> Size {
        attention_flop(1, self.heads, self.head)
    }

    fn validate(&self) -> Result<(), String> {
        limits::heads(self.heads, self.head, &[])?;
        match self.reach <= PositionBias::FARTHEST {
            true => Ok(()),
            false => Err(format!(
                "reaches {} positions, at most {} fit",
                self.reach,
                PositionBias::FARTHEST
            )),
        }
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let blocks = extents.pairs.div_ceil(THREADS.into());
        Launch {
            grid: [blocks.clamp(1, i32::MAX as u64) as u32, self.heads, 1],
            threads: THREADS,
            shared_bytes: 0,
        }
    }

    fn threads(&self) -> u32 {
        THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (x, table) = (reads[0].real(), reads[1].real());
        let (cu_lens, offsets) = (reads[2].index(), reads[3].index());
        let (heads, head) = (self.heads as usize, self.head as usize);
        let mut scores = vec![0.0; heads * extents.pairs as usize];
        for h in 0..heads {
            for (b, ends) in cu_lens.windows(2).enumerate() {
                let (start, n) = (ends[0] as usize, (ends[1] - ends[0]) as usize);
                let to = h * extents.pairs as usize + offsets[b] as usize;
                for query in 0..n {
                    for key in 0..n {
                        let token = match self.of {
                            Side::Query => start + query,
                            Side::Key => start + key,
                        };
                        let of = |row: usize| (row * heads + h) * head;
                        let (x, row) = (&x[of(token)..], &table[of(self.row(key, query))..]);
                        let products = x.iter().zip(row).take(head);
                        let sum: f64 = products.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                        scores[to + query * n + key] = sum as f32;
                    }
                }
            }
        }
        vec![HostTensor::Real(scores)]
    }

    fn cases(&self) -> Vec<Case> {
        let mut cases = Case::standard();
        cases.push(Case::new("edges", &[31, 32, 33, 200, 1]));
        cases
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance {
            absolute: 2e-5 * f64::from(self.head).sqrt() as f32,
            relative: rounding(self.dtype),
            reason: "f32 sum over the head in another order, then one rounding to the stored type",
        }
    }
}

/// Instances for queries and for keys, with common and odd head sizes. `reach` exceeds all distances in the cases, or only some of them.
pub(super) fn representative(dtype: DType) -> Vec<KernelSpec> {
    let kernel = |heads, head, reach, of| RelativeScores {
        heads,
        head,
        reach,
        of,
        dtype,
    };
    [
        kernel(12, 64, 512, Side::Query),
        kernel(12, 64, 512, Side::Key),
        kernel(3, 20, 9, Side::Query),
        kernel(3, 17, 40, Side::Key),
    ]
    .map(KernelSpec::from)
    .into()
}
