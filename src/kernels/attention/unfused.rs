//! Unfused attention: the two matrix products, with the scores in global memory. These kernels run if fusion is off, and fused kernels are
//! compared with them. The softmax between the two products is in the module `softmax`.
//!
//! On tensor cores, both products are grouped GEMMs (batched GEMMs of different sizes), with a GEMM for each head of each sequence. If
//! tensor cores cannot read the operands, one thread computes each result.

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use super::{
    common::{SHARED_LIMIT, edge_cases, pairs_shape, rounding, row, row_bytes},
    long::{ContextPlan, max_tiles, tensor_core_plan, visitor_constants, visitor_launch},
    operands::check_head,
    params, storage,
    view::{heads_word, kv_head_of, scale_suffix, views_suffix},
};
use crate::{
    kernels::{
        Case, Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Role, Tolerance,
        attention::view::ViewCode, class::attention_flop, f32_literal, limits,
    },
    machine::Machine,
    ops::{HeadView, default_scale},
    tensor::{DType, Extents, Size},
};

/// `q`, `k`, `cu_lens`, `pair_offsets` → `scores [heads, pairs]`: `scale · q·kᵀ` for each sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionScores {
    pub heads: u32,
    /// Number of key heads, a divisor of `heads`.
    pub kv_heads: u32,
    pub head: u32,
    pub scale: f32,
    pub q: HeadView,
    pub k: HeadView,
    pub dtype: DType,
}

/// `probabilities [heads, pairs]`, `v`, `cu_lens`, `pair_offsets` → `out`: `probabilities · v` for each sequence.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AttentionContext {
    pub heads: u32,
    /// Number of value heads, a divisor of `heads`.
    pub kv_heads: u32,
    pub head: u32,
    pub v: HeadView,
    pub out: HeadView,
    pub dtype: DType,
}

/// Threads per CTA of both kernels without tensor cores.
const SIMT_THREADS: u32 = 256;

/// Whether MMAs can read heads of this type and size, at the locations of `views`, 16 bytes at a time.
fn suits_tensor_cores(head: u32, dtype: DType, views: [HeadView; 2]) -> bool {
    dtype.has_mma() && check_head(head).is_ok() && views.iter().all(|view| view.is_aligned(head, 8))
}

/// Tiling of scores for tensor cores.
struct ScoresPlan {
    /// Queries and keys per tile.
    tile: [u32; 2],
    threads: u32,
    /// Number of pipeline stages in shared memory, each with a tile of queries and a tile of keys.
    stages: u32,
    min_blocks: u32,
    shared_bytes: u32,
}

impl AttentionScores {
    /// Whether the kernel uses tensor cores. This requires 16-bit storage, a head size of at most 256 (the accumulators must fit the
    /// registers), and a head size and views that can be read 16 bytes at a time.
    pub fn tensor_cores(&self) -> bool {
        suits_tensor_cores(self.head, self.dtype, [self.q, self.k])
    }

    /// Returns the tiling. Tiles are small, because the last tiles of a sequence are partly empty, and sequences are short. Several CTAs
    /// per SM hide each other's latency. Head sizes above 160 leave room for only one stage.
    fn plan(&self) -> ScoresPlan {
        let [rows, keys] = [64, 64];
        let stage = (rows + keys) * row_bytes(self.head, self.dtype);
        let results = rows * (keys * 2 + 16);
        let stages = if 2 * stage + results <= SHARED_LIMIT {
            2
        } else {
            1
        };
        ScoresPlan {
            tile: [rows, keys],
            threads: rows * 2,
            stages,
            min_blocks: 4,
            shared_bytes: stages * stage + results,
        }
    }
}

impl AttentionContext {
    /// Whether the kernel uses tensor cores. This requires 16-bit storage, a head size of at most 256 (the accumulators must fit the
    /// registers), and a head size and views that can be read and written 16 bytes at a time.
    pub fn tensor_cores(&self) -> bool {
        suits_tensor_cores(self.head, self.dtype, [self.v, self.out])
    }

    fn plan(&self) -> ContextPlan {
        tensor_core_plan("attention_context", self.head, self.dtype)
    }
}

/// Returns a launch of one thread per result. The number of CTAs is clamped to the max grid size.
fn simt_launch(results: u64, heads: u32) -> Launch {
    let blocks = results.div_ceil(SIMT_THREADS.into());
    Launch {
        grid: [blocks.clamp(1, i32::MAX as u64) as u32, heads, 1],
        threads: SIMT_THREADS,
        shared_bytes: 0,
    }
}

/// Returns batches with which both kernels are checked: lengths around tile boundaries, many sequences, and rows of several tiles that
/// start at every offset from a 16-byte boundary.
fn cases() -> Vec<Case> {
    let mut cases = edge_cases();
    cases.push(Case::new("long", &[700, 3]));
    cases.push(Case::new("odd_rows", &[193, 131, 7, 259]));
    // With twelve heads, this batch has more than 32 tiles per CTA.
    let crowd: Vec<u32> = (0..1500).map(|i| 1 + i % 3).collect();
    cases.push(Case::new("crowd", &crowd));
    cases
}

/// Instances of the scores kernel and of the context kernel, with and without tensor cores.
pub(super) fn representative(dtype: DType) -> Vec<KernelSpec> {
    let grouped = |[heads, kv_heads]: [u32; 2], head, scale, [q, k, v, out]: [HeadView; 4]| {
        let scores = AttentionScores {
            heads,
            kv_heads,
            head,
            scale,
            q,
            k,
            dtype,
        };
        let context = AttentionContext {
            heads,
            kv_heads,
            head,
            v,
            out,
            dtype,
        };
        [KernelSpec::from(scores), KernelSpec::from(context)]
    };
    let pair = |heads, head, scale, views| grouped([heads, heads], head, scale, views);
    let columns = |offset, stride| HeadView::TokenMajor { offset, stride };
    let merged = |width: u32| [0, 1, 2].map(|i| columns(i * width, 3 * width));
    let mut all = Vec::new();
    // Every tiling: one or two stages, head sizes that are not a multiple of 16, and one or two 16-row tiles per warp.
    let sizes = [
        (12, 64),
        (12, 32),
        (2, 80),
        (2, 128),
        (1, 8),
        (1, 72),
        (1, 168),
        (3, 256),
    ];
    for (heads, head) in sizes {
        let [q, k, v] = merged(heads * head);
        let views = [q, k, v, columns(0, heads * head)];
        all.extend(pair(heads, head, default_scale(head), views));
    }
    for view in [HeadView::HeadMajor, columns(0, 160)] {
        all.extend(pair(4, 40, default_scale(40), [view; 4]));
    }
    // Cases without tensor cores: odd sizes, unaligned rows, large heads.
    let [q, k, v] = merged(51);
    all.extend(pair(3, 17, 0.5, [q, k, v, columns(0, 51)]));
    let from_4 = columns(4, 36);
    let views = [from_4, from_4, from_4, columns(0, 32)];
    all.extend(pair(2, 16, default_scale(16), views));
    all.extend(pair(1, 264, default_scale(264), [columns(0, 264); 4]));
    // Grouped-query heads, with and without tensor cores.
    for head in [64, 20] {
        let [q, k, v] = [0, 6, 8].map(|first| columns(first * head, 10 * head));
        let views = [q, k, v, columns(0, 6 * head)];
        all.extend(grouped([6, 2], head, default_scale(head), views));
    }
    all
}

impl Kernel for AttentionScores {
    facts! { dtype: self.dtype, class: Attention }

    fn symbol(&self) -> String {
        format!(
            "{}_{}_{}{}{}",
            self.template(),
            self.dtype,
            heads_word(self.heads, self.kv_heads, self.head),
            views_suffix(&[
                ("q", self.q, self.heads * self.head),
                ("k", self.k, self.kv_heads * self.head),
            ]),
            scale_suffix(self.scale, default_scale(self.head)),
        )
    }

    fn template(&self) -> &'static str {
        if self.tensor_cores() {
            "attention_scores"
        } else {
            "attention_scores_simt"
        }
    }

    fn constants(&self) -> Constants {
        let tensor_cores = self.tensor_cores();
        let head = if tensor_cores {
            "tile.head"
        } else {
            "blockIdx.y"
        };
        let kv_head = kv_head_of(head, self.heads, self.kv_heads);
        let mut all = Constants::from([
            ("storage", storage(self.dtype).into()),
            ("head", self.head.into()),
            ("scale", f32_literal(self.scale).into()),
            ("q_origin", self.q.origin_of(head, self.head).into()),
            ("q_stride", self.q.stride(self.head).into()),
            ("k_origin", self.k.origin_of(&kv_head, self.head).into()),
            ("k_stride", self.k.stride(self.head).into()),
        ]);
        if tensor_cores {
            let plan = self.plan();
            all.extend(visitor_constants(
                self.heads,
                plan.tile,
                true,
                plan.min_blocks,
            ));
            all.extend(Constants::from([
                ("row", row(self.head, self.dtype).into()),
                ("stages", plan.stages.into()),
                ("q_aligned", self.q.is_aligned(self.head, 8).into()),
                ("k_aligned", self.k.is_aligned(self.head, 8).into()),
            ]));
        }
        all
    }

    fn params(&self) -> Vec<Param> {
        let mut all = vec![
            params::read("q", self.dtype, self.q.shape(self.heads, self.head)),
            params::read("k", self.dtype, self.k.shape(self.kv_heads, self.head)),
            params::cu_lens(),
            params::pair_offsets(),
            params::write("scores", self.dtype, pairs_shape(self.heads)),
        ];
        all.extend(params::counts(&[self.q, self.k]));
        all
    }

    fn flop(&self) -> Size {
        attention_flop(1, self.heads, self.head)
    }

    fn validate(&self) -> Result<(), String> {
        limits::heads(self.heads, self.head, &[self.q])?;
        limits::heads(self.kv_heads, self.head, &[self.k])?;
        limits::groups(self.heads, self.kv_heads)?;
        limits::real("the scale", self.scale)
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        if !self.tensor_cores() {
            return simt_launch(extents.pairs, self.heads);
        }
        let plan = self.plan();
        let of_head = max_tiles(extents, plan.tile);
        visitor_launch(
            of_head,
            self.heads,
            plan.threads,
            plan.shared_bytes,
            machine,
        )
    }

    fn threads(&self) -> u32 {
        if self.tensor_cores() {
            self.plan().threads
        } else {
            SIMT_THREADS
        }
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (q, k) = (reads[0].real(), reads[1].real());
        let (cu_lens, offsets) = (reads[2].index(), reads[3].index());
        let (tokens, width) = (extents.tokens as usize, self.head as usize);
        let group = (self.heads / self.kv_heads.max(1)).max(1) as usize;
        let mut scores = vec![0.0; self.heads as usize * extents.pairs as usize];
        for h in 0..self.heads as usize {
            for (b, ends) in cu_lens.windows(2).enumerate() {
                let (start, n) = (ends[0] as usize, (ends[1] - ends[0]) as usize);
                let to = h * extents.pairs as usize + offsets[b] as usize;
                for i in 0..n {
                    let query = self.q.index(tokens, start + i, h, self.head);
                    for j in 0..n {
                        let key = self.k.index(tokens, start + j, h / group, self.head);
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

    fn cases(&self) -> Vec<Case> {
        cases()
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance {
            absolute: 2e-5 * f64::from(self.head).sqrt() as f32 * self.scale.abs(),
            relative: rounding(self.dtype),
            reason: "f32 sum over the head in another order, by tensor cores truncated at every 8 products, then one rounding to the stored type",
        }
    }
}

impl Kernel for AttentionContext {
    facts! { dtype: self.dtype, class: Attention }

    fn symbol(&self) -> String {
        format!(
            "{}_{}_{}{}",
            self.template(),
            self.dtype,
            heads_word(self.heads, self.kv_heads, self.head),
            views_suffix(&[
                ("v", self.v, self.kv_heads * self.head),
                ("out", self.out, self.heads * self.head),
            ]),
        )
    }

    fn template(&self) -> &'static str {
        if self.tensor_cores() {
            "attention_context"
        } else {
            "attention_context_simt"
        }
    }

    fn constants(&self) -> Constants {
        let tensor_cores = self.tensor_cores();
        let head = if tensor_cores {
            "tile.head"
        } else {
            "blockIdx.y"
        };
        let kv_head = kv_head_of(head, self.heads, self.kv_heads);
        let mut all = Constants::from([
            ("storage", storage(self.dtype).into()),
            ("head", self.head.into()),
            ("v_origin", self.v.origin_of(&kv_head, self.head).into()),
            ("v_stride", self.v.stride(self.head).into()),
            ("out_origin", self.out.origin_of(head, self.head).into()),
            ("out_stride", self.out.stride(self.head).into()),
        ]);
        if tensor_cores {
            let plan = self.plan();
            let tile = [plan.rows, plan.keys];
            all.extend(visitor_constants(self.heads, tile, false, plan.min_blocks));
            all.extend(Constants::from([
                ("row", row(self.head, self.dtype).into()),
                ("keys", plan.keys.into()),
                ("stages", plan.stages.into()),
                ("m_tiles", plan.m_tiles.into()),
                ("v_aligned", self.v.is_aligned(self.head, 8).into()),
                ("out_aligned", self.out.is_aligned(self.head, 8).into()),
            ]));
        }
        all
    }

    fn params(&self) -> Vec<Param> {
        let probabilities = Param {
            name: "probabilities",
            role: Role::Read {
                element: self.dtype.into(),
                shape: pairs_shape(self.heads),
                // With this fill, values have the magnitude of softmax probabilities over about twenty keys.
                fill: Fill::WEIGHT,
            },
        };
        let mut all = vec![
            probabilities,
            params::read("v", self.dtype, self.v.shape(self.kv_heads, self.head)),
            params::cu_lens(),
            params::pair_offsets(),
            params::write("out", self.dtype, self.out.shape(self.heads, self.head)),
        ];
        all.extend(params::counts(&[self.v, self.out]));
        all
    }

    fn flop(&self) -> Size {
        attention_flop(1, self.heads, self.head)
    }

    fn validate(&self) -> Result<(), String> {
        limits::heads(self.heads, self.head, &[self.out])?;
        limits::heads(self.kv_heads, self.head, &[self.v])?;
        limits::groups(self.heads, self.kv_heads)
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        if !self.tensor_cores() {
            return simt_launch(extents.tokens * u64::from(self.head), self.heads);
        }
        let plan = self.plan();
        // Upper bound on the number of tiles per head, which is Σ ⌈n / rows⌉ over the lengths n of the sequences.
        let of_head = extents.tokens / u64::from(plan.rows) + extents.batch;
        visitor_launch(
            of_head,
            self.heads,
            plan.threads,
            plan.shared_bytes,
            machine,
        )
    }

    fn threads(&self) -> u32 {
        if self.tensor_cores() {
            self.plan().threads
        } else {
            SIMT_THREADS
        }
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (probabilities, v) = (reads[0].real(), reads[1].real());
        let (cu_lens, offsets) = (reads[2].index(), reads[3].index());
        let (tokens, width) = (extents.tokens as usize, self.head as usize);
        let group = (self.heads / self.kv_heads.max(1)).max(1) as usize;
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
                                let value =
                                    self.v.index(tokens, start + j, h / group, self.head) + c;
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

    fn cases(&self) -> Vec<Case> {
        cases()
    }

    fn tolerance(&self) -> Tolerance {
        if self.tensor_cores() {
            return Tolerance {
                absolute: 1e-4,
                relative: rounding(self.dtype),
                reason: "f32 sums of size 4 at most, truncated (2^-23) at every 8 of 700 products; one rounding to the stored type",
            };
        }
        Tolerance {
            absolute: 1e-5,
            relative: rounding(self.dtype),
            reason: "f32 sum over the keys in another order, then one rounding to the stored type",
        }
    }
}
