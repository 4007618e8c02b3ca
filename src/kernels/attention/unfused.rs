//! The two products of attention in three kernels, with the scores in memory: what runs when fusing
//! is off, and the oracle of the fused kernels. The softmax between them is in `softmax.rs`.

use serde::{Deserialize, Serialize};

use super::{
    HeadView, params,
    view::{scale_suffix, usual_scale, views_suffix},
};
use crate::{
    kernels::{Constants, Fill, HostTensor, Kernel, Launch, Param, Role, Tolerance, f32_literal},
    tensor::{DType, Extents, Shape, Size, Symbol},
};

/// `q`, `k`, `cu_lens`, `pair_offsets` → `scores [heads, pairs]`: `scale · q·kᵀ` per sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionScores {
    pub heads: u32,
    pub head: u32,
    pub scale: f32,
    pub q: HeadView,
    pub k: HeadView,
    pub dtype: DType,
}

/// `probabilities [heads, pairs]`, `v`, `cu_lens`, `pair_offsets` → `out`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AttentionContext {
    pub heads: u32,
    pub head: u32,
    pub v: HeadView,
    pub out: HeadView,
    pub dtype: DType,
}

/// Threads of a block of each kernel here.
const THREADS: u32 = 256;

pub(super) fn pairs_shape(heads: u32) -> Shape {
    Shape::new([Size::constant(heads.into()), Size::from(Symbol::Pairs)])
}

/// Enough blocks for `threads` threads, as far as a grid goes.
fn blocks(threads: u64) -> u32 {
    threads.div_ceil(THREADS.into()).min(i32::MAX as u64).max(1) as u32
}

/// Half a unit in the last place of a value that is stored in `dtype`, twice over.
pub(super) fn rounding(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
        _ => 2e-5,
    }
}

impl Kernel for AttentionScores {
    fn symbol(&self) -> String {
        format!(
            "attention_scores_{}_h{}x{}{}{}",
            self.dtype,
            self.heads,
            self.head,
            views_suffix(self.heads * self.head, &[("q", self.q), ("k", self.k)]),
            scale_suffix(self.scale, usual_scale(self.head)),
        )
    }

    fn template(&self) -> &'static str {
        "attention_scores"
    }

    fn constants(&self) -> Constants {
        Constants::from([
            (
                "storage",
                crate::kernels::attention::storage(self.dtype).into(),
            ),
            ("head", self.head.into()),
            ("scale", f32_literal(self.scale).into()),
            ("q_origin", self.q.origin(self.head).into()),
            ("q_stride", self.q.stride(self.head).into()),
            ("k_origin", self.k.origin(self.head).into()),
            ("k_stride", self.k.stride(self.head).into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        let mut all = vec![
            params::read("q", self.dtype, self.q.shape(self.heads, self.head)),
            params::read("k", self.dtype, self.k.shape(self.heads, self.head)),
            params::cu_lens(),
            params::pair_offsets(),
            params::write("scores", self.dtype, pairs_shape(self.heads)),
        ];
        all.extend(params::counts(&[self.q, self.k]));
        all
    }

    fn launch(&self, extents: &Extents) -> Launch {
        Launch {
            grid: [blocks(extents.pairs), self.heads, 1],
            threads: THREADS,
            shared_bytes: 0,
        }
    }

    fn threads(&self) -> u32 {
        THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (q, k) = (reads[0].real(), reads[1].real());
        let (cu_lens, offsets) = (reads[2].index(), reads[3].index());
        let (tokens, width) = (extents.tokens as usize, self.head as usize);
        let mut scores = vec![0.0; self.heads as usize * extents.pairs as usize];
        for h in 0..self.heads as usize {
            for (b, ends) in cu_lens.windows(2).enumerate() {
                let (start, n) = (ends[0] as usize, (ends[1] - ends[0]) as usize);
                let to = h * extents.pairs as usize + offsets[b] as usize;
                for i in 0..n {
                    let query = self.q.index(tokens, start + i, h, self.head);
                    for j in 0..n {
                        let key = self.k.index(tokens, start + j, h, self.head);
                        let sum: f64 = (0..width)
                            .map(|c| f64::from(q[query + c]) * f64::from(k[key + c]))
                            .sum();
                        scores[to + i * n + j] = (f64::from(self.scale) * sum) as f32;
                    }
                }
            }
        }
        vec![HostTensor::Real(scores)]
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance {
            absolute: 2e-5 * f64::from(self.head).sqrt() as f32 * self.scale.abs(),
            relative: rounding(self.dtype),
            reason: "f32 sum over the head in another order, then one rounding to the stored type",
        }
    }
}

impl Kernel for AttentionContext {
    fn symbol(&self) -> String {
        format!(
            "attention_context_{}_h{}x{}{}",
            self.dtype,
            self.heads,
            self.head,
            views_suffix(self.heads * self.head, &[("v", self.v), ("out", self.out)]),
        )
    }

    fn template(&self) -> &'static str {
        "attention_context"
    }

    fn constants(&self) -> Constants {
        Constants::from([
            (
                "storage",
                crate::kernels::attention::storage(self.dtype).into(),
            ),
            ("head", self.head.into()),
            ("v_origin", self.v.origin(self.head).into()),
            ("v_stride", self.v.stride(self.head).into()),
            ("out_origin", self.out.origin(self.head).into()),
            ("out_stride", self.out.stride(self.head).into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        let probabilities = Param {
            name: "probabilities",
            role: Role::Read {
                dtype: self.dtype,
                shape: pairs_shape(self.heads),
                // As large as the probabilities of some twenty keys.
                fill: Fill::WEIGHT,
            },
        };
        let mut all = vec![
            probabilities,
            params::read("v", self.dtype, self.v.shape(self.heads, self.head)),
            params::cu_lens(),
            params::pair_offsets(),
            params::write("out", self.dtype, self.out.shape(self.heads, self.head)),
        ];
        all.extend(params::counts(&[self.v, self.out]));
        all
    }

    fn launch(&self, extents: &Extents) -> Launch {
        Launch {
            grid: [blocks(extents.tokens * u64::from(self.head)), self.heads, 1],
            threads: THREADS,
            shared_bytes: 0,
        }
    }

    fn threads(&self) -> u32 {
        THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (probabilities, v) = (reads[0].real(), reads[1].real());
        let (cu_lens, offsets) = (reads[2].index(), reads[3].index());
        let (tokens, width) = (extents.tokens as usize, self.head as usize);
        let elements = self.out.shape(self.heads, self.head).elements();
        let mut out = vec![0.0; elements.eval(extents).unwrap_or(0) as usize];
        for h in 0..self.heads as usize {
            for (b, ends) in cu_lens.windows(2).enumerate() {
                let (start, n) = (ends[0] as usize, (ends[1] - ends[0]) as usize);
                let first = h * extents.pairs as usize + offsets[b] as usize;
                for i in 0..n {
                    let row = &probabilities[first + i * n..first + (i + 1) * n];
                    let to = self.out.index(tokens, start + i, h, self.head);
                    for c in 0..width {
                        let sum: f64 = row
                            .iter()
                            .enumerate()
                            .map(|(j, &p)| {
                                let value = self.v.index(tokens, start + j, h, self.head) + c;
                                f64::from(p) * f64::from(v[value])
                            })
                            .sum();
                        out[to + c] = sum as f32;
                    }
                }
            }
        }
        vec![HostTensor::Real(out)]
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance {
            absolute: 1e-5,
            relative: rounding(self.dtype),
            reason: "f32 sum over the keys in another order, then one rounding to the stored type",
        }
    }
}
