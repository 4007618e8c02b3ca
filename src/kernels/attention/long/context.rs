use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{
    super::{
        AttentionError,
        common::{row, row_bytes},
        operands::{check_head, check_views},
        params, storage,
        view::views_suffix,
    },
    KEY_TILE, Layout, cases, problems, scores_shape, statistics_shape, visitor_constants,
    visitor_launch,
};
use crate::{
    kernels::{
        Case, Constants, Fill, HostTensor, Kernel, Launch, Param, Role, Tolerance,
        attention::view::ViewCode, class::attention_flop, limits,
    },
    machine::Machine,
    ops::HeadView,
    tensor::{DType, Extents, Shape, Size, Symbol},
};

/// `scores [heads, pairs + 8·tokens]`, `statistics [heads, tokens, 2]`, `v`, `cu_lens`, `pair_offsets` → `out [tokens, heads·head]`: `p·v`
/// for each sequence. The kernel computes `p = exp(score − maximum) / sum` when it loads the scores (ByteTransformer III.E.2, algorithm
/// III.2).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MhaLongContext {
    pub heads: u32,
    pub head: u32,
    pub v: HeadView,
    pub dtype: DType,
}

/// Tiling of a kernel that computes the attention context P · V.
pub(in super::super) struct Plan {
    pub template: &'static str,
    pub rows: u32,
    pub threads: u32,
    /// Keys per pipeline stage.
    pub keys: u32,
    pub stages: u32,
    /// Number of 16-row MMA tiles per warp.
    pub m_tiles: u32,
    pub min_blocks: u32,
    pub shared_bytes: u32,
}

impl MhaLongContext {
    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), AttentionError> {
        check_head(self.head)?;
        check_views(self.head, &[("v", self.v, self.heads)])
    }

    fn width(&self) -> u32 {
        self.heads * self.head
    }

    fn plan(&self) -> Plan {
        let bytes = row_bytes(self.head, self.dtype);
        if !self.dtype.has_mma() {
            let (rows, keys) = (32, 32);
            return Plan {
                template: "mha_long_context_simt",
                rows,
                threads: rows * 4,
                keys,
                stages: 1,
                m_tiles: 1,
                min_blocks: 1,
                shared_bytes: keys * bytes + rows * (keys + 4) * 4,
            };
        }
        tensor_core_plan("mha_long_context", self.head, self.dtype)
    }
}

/// Returns the tiling of P · V on tensor cores, for kernels that compute the softmax weights P from scores, and for kernels that load P.
/// For each query, a pipeline stage has `keys` 16-bit weights and 16 more bytes. These bytes are padding, or hold the additional 16-byte
/// chunk that an unaligned row of P needs.
///
/// A warp has two 16-row tiles if the accumulators leave enough registers for several CTAs per SM, because two tiles halve the
/// shared-memory reads of V per MMA.
pub(in super::super) fn tensor_core_plan(template: &'static str, head: u32, dtype: DType) -> Plan {
    let bytes = row_bytes(head, dtype);
    let (rows, m_tiles, keys, stages, min_blocks) = match head {
        ..=64 => (128, 2, 64, 2, 3),
        65..=128 => (64, 1, 64, 2, 3),
        _ => (128, 1, 32, 3, 1),
    };
    let threads = rows * 2 / m_tiles;
    let operands = stages * (rows * (keys * 2 + 16) + keys * bytes);
    let results = threads / 32 * 16 * bytes;
    Plan {
        template,
        rows,
        threads,
        keys,
        stages,
        m_tiles,
        min_blocks,
        shared_bytes: operands.max(results),
    }
}

impl Kernel for MhaLongContext {
    facts! { dtype: self.dtype, class: Attention }

    fn symbol(&self) -> String {
        format!(
            "mha_long_context_{}_h{}x{}{}",
            self.dtype,
            self.heads,
            self.head,
            views_suffix(&[("v", self.v, self.width())]),
        )
    }

    fn template(&self) -> &'static str {
        self.plan().template
    }

    fn constants(&self) -> Constants {
        let plan = self.plan();
        let aligned = 16 / self.dtype.bytes() as u32;
        let mut all = visitor_constants(self.heads, [plan.rows, KEY_TILE], false, plan.min_blocks);
        all.extend(Constants::from([
            ("storage", storage(self.dtype).into()),
            ("head", self.head.into()),
            ("row", row(self.head, self.dtype).into()),
            ("keys", plan.keys.into()),
            ("stages", plan.stages.into()),
            ("m_tiles", plan.m_tiles.into()),
            ("out_stride", self.width().into()),
            ("v_origin", self.v.origin_of("tile.head", self.head).into()),
            ("v_stride", self.v.stride(self.head).into()),
            ("v_aligned", self.v.is_aligned(self.head, aligned).into()),
        ]));
        all
    }

    fn params(&self) -> Vec<Param> {
        let statistics = Param {
            name: "statistics",
            role: Role::Read {
                element: DType::F32.into(),
                shape: statistics_shape(self.heads),
                // Row sums must be positive, and row maxima should exceed most scores. Values around 4 satisfy both.
                fill: Fill::Normal {
                    mean: 4.0,
                    deviation: 0.5,
                },
            },
        };
        let width = Size::constant(self.width().into());
        let out = Shape::new([Size::from(Symbol::Tokens), width]);
        let mut all = vec![
            params::read("scores", self.dtype, scores_shape(self.heads)),
            statistics,
            params::read("v", self.dtype, self.v.shape(self.heads, self.head)),
            params::cu_lens(),
            params::pair_offsets(),
            params::write("out", self.dtype, out),
        ];
        all.extend(params::counts(&[self.v]));
        all
    }

    fn flop(&self) -> Size {
        attention_flop(1, self.heads, self.head)
    }

    fn validate(&self) -> Result<(), String> {
        limits::heads(self.heads, self.head, &[self.v])?;
        self.check().map_err(|e| e.to_string())
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        let plan = self.plan();
        // Upper bound on Σ ⌈n / rows⌉ over the lengths n of the sequences, the number of tiles per head.
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
        self.plan().threads
    }

    /// Computes the context in f64, with sequences and heads in parallel.
    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (scores, statistics, v) = (reads[0].real(), reads[1].real(), reads[2].real());
        let layout = Layout::of(extents);
        let (tokens, head) = (extents.tokens as usize, self.head as usize);
        let problems = problems(self.heads, reads[3].index(), reads[4].index());
        let results: Vec<Vec<f32>> = problems
            .par_iter()
            .map(|p| {
                let (h, start, n) = (p.head, p.tokens, p.len);
                let first = layout.scores(h, p.pairs, start);
                let mut rows = Vec::with_capacity(n * head);
                for i in 0..n {
                    let at = (h * tokens + start + i) * 2;
                    let (top, sum) = (f64::from(statistics[at]), f64::from(statistics[at + 1]));
                    let from = first + i * Layout::pitch(n);
                    let mut row = vec![0.0f64; head];
                    for (j, &score) in scores[from..from + n].iter().enumerate() {
                        let p = (f64::from(score) - top).exp() / sum;
                        let value = self.v.index(tokens, start + j, h, self.head);
                        for (to, &x) in row.iter_mut().zip(&v[value..value + head]) {
                            *to += p * f64::from(x);
                        }
                    }
                    rows.extend(row.into_iter().map(|x| x as f32));
                }
                rows
            })
            .collect();
        let width = self.width() as usize;
        let mut out = vec![0.0; tokens * width];
        for (p, rows) in problems.iter().zip(&results) {
            for (i, row) in rows.chunks_exact(head).enumerate() {
                let to = (p.tokens + i) * width + p.head * head;
                out[to..to + head].copy_from_slice(row);
            }
        }
        vec![HostTensor::Real(out)]
    }

    fn cases(&self) -> Vec<Case> {
        cases()
    }

    fn tolerance(&self) -> Tolerance {
        match self.dtype {
            DType::F16 => Tolerance {
                absolute: 2e-3,
                relative: 1e-3,
                reason: "each weight is rounded to f16 (2^-11) before it is multiplied by values of up to about 4",
            },
            DType::BF16 => Tolerance {
                absolute: 1.6e-2,
                relative: 8e-3,
                reason: "each weight is rounded to bf16 (2^-8) before it is multiplied by values of up to about 4",
            },
            DType::F32 => Tolerance {
                absolute: 2e-5,
                relative: 2e-5,
                reason: "f32 sum over the keys in another order, and approximate powers of two",
            },
        }
    }
}
