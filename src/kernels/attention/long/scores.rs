use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{
    super::{
        AttentionError,
        common::{SHARED_LIMIT, row, row_bytes},
        operands::{check_head, check_scale, check_views},
        params, storage,
        view::{scale_suffix, views_suffix},
    },
    KEY_TILE, Layout, cases, max_tiles, partials_shape, problems, scores_shape, visitor_constants,
    visitor_launch,
};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Kernel, Launch, Param, Tolerance, attention::view::ViewCode,
        class::attention_flop, f32_literal, limits,
    },
    machine::Machine,
    ops::{HeadView, default_scale},
    tensor::{DType, Extents, Shape, Size},
};

/// `q`, `k`, `cu_lens`, `pair_offsets` → `scores [heads, pairs + 8·tokens]`: `scale · q·kᵀ` for each sequence, and `partials [heads,
/// key_tiles, 2]` in f32 (ByteTransformer III.E.2, figure 8). A partial consists of the maximum of a row's stored (rounded) scores in a
/// tile of 128 keys, and the sum of `exp(score − maximum)` over the tile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhaLongScores {
    pub heads: u32,
    pub head: u32,
    pub scale: f32,
    pub q: HeadView,
    pub k: HeadView,
    pub dtype: DType,
}

/// Keys in shared memory at once: half of a key tile, to halve the number of accumulators.
const KEYS: u32 = 64;
/// Pitch of a row of scores in shared memory, in bytes. The epilogue collects scores in shared memory before it stores them to global
/// memory.
const STAGE_PITCH: u32 = KEYS * 2 + 16;

struct Plan {
    template: &'static str,
    rows: u32,
    threads: u32,
    /// Columns of a head's queries and keys that are in shared memory at once.
    depth: u32,
    min_blocks: u32,
    shared_bytes: u32,
}

impl MhaLongScores {
    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), AttentionError> {
        check_head(self.head)?;
        check_scale(self.scale)?;
        let named = self.named();
        let views = named.map(|(name, view)| (name, view, self.heads));
        check_views(self.head, &views)
    }

    fn named(&self) -> [(&'static str, HeadView); 2] {
        [("q", self.q), ("k", self.k)]
    }

    fn plan(&self) -> Plan {
        if !self.dtype.has_mma() {
            // Splits the head into equal parts of at most 64 columns.
            let parts = self.head.div_ceil(64).max(1);
            let depth = self.head.div_ceil(parts).next_multiple_of(8);
            return Plan {
                template: "mha_long_scores_simt",
                rows: 64,
                threads: 256,
                depth,
                min_blocks: 1,
                shared_bytes: (64 + KEY_TILE) * row_bytes(depth, DType::F32),
            };
        }
        let depth = row(self.head, self.dtype);
        let bytes = row_bytes(self.head, self.dtype);
        let shared = |rows: u32| (rows + KEYS) * bytes + rows * STAGE_PITCH;
        let rows = if shared(128) <= SHARED_LIMIT { 128 } else { 64 };
        Plan {
            template: "mha_long_scores",
            rows,
            threads: rows * 2,
            depth,
            // Min CTAs per SM for `__launch_bounds__`. Two CTAs of 256 threads limit a thread to 128 registers, and three CTAs of 128
            // threads limit it to 168.
            min_blocks: if rows == 128 { 2 } else { 3 },
            shared_bytes: shared(rows),
        }
    }
}

impl Kernel for MhaLongScores {
    facts! { dtype: self.dtype, class: Attention }

    fn symbol(&self) -> String {
        let width = self.heads * self.head;
        format!(
            "mha_long_scores_{}_h{}x{}{}{}",
            self.dtype,
            self.heads,
            self.head,
            views_suffix(&self.named().map(|(name, view)| (name, view, width))),
            scale_suffix(self.scale, default_scale(self.head)),
        )
    }

    fn template(&self) -> &'static str {
        self.plan().template
    }

    fn constants(&self) -> Constants {
        let plan = self.plan();
        let aligned = 16 / self.dtype.bytes() as u32;
        let mut all = visitor_constants(self.heads, [plan.rows, KEY_TILE], true, plan.min_blocks);
        all.extend(Constants::from([
            ("storage", storage(self.dtype).into()),
            ("head", self.head.into()),
            ("row", plan.depth.into()),
            ("scale", f32_literal(self.scale).into()),
            ("keys", KEYS.into()),
            ("q_origin", self.q.origin_of("tile.head", self.head).into()),
            ("q_stride", self.q.stride(self.head).into()),
            ("q_aligned", self.q.is_aligned(self.head, aligned).into()),
            ("k_origin", self.k.origin_of("tile.head", self.head).into()),
            ("k_stride", self.k.stride(self.head).into()),
            ("k_aligned", self.k.is_aligned(self.head, aligned).into()),
        ]));
        all
    }

    fn params(&self) -> Vec<Param> {
        let mut all = vec![
            params::read("q", self.dtype, self.q.shape(self.heads, self.head)),
            params::read("k", self.dtype, self.k.shape(self.heads, self.head)),
            params::cu_lens(),
            params::pair_offsets(),
            params::write("scores", self.dtype, scores_shape(self.heads)),
            params::write("partials", DType::F32, partials_shape(self.heads)),
        ];
        all.extend(params::counts(&[self.q, self.k]));
        all
    }

    fn flop(&self) -> Size {
        attention_flop(1, self.heads, self.head)
    }

    fn validate(&self) -> Result<(), String> {
        limits::heads(self.heads, self.head, &[self.q, self.k])?;
        self.check().map_err(|e| e.to_string())
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        let plan = self.plan();
        let of_head = max_tiles(extents, [plan.rows, KEY_TILE]);
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

    /// Computes the scores and the partials. Partials are computed from scores that are rounded to the storage type. Elements in gaps of
    /// the [`Layout`] are NaN.
    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (q, k) = (reads[0].real(), reads[1].real());
        let (tokens, width) = (extents.tokens as usize, self.head as usize);
        let problems = problems(self.heads, reads[2].index(), reads[3].index());
        let results: Vec<(Vec<f32>, Vec<f32>)> = problems
            .par_iter()
            .map(|problem| {
                let (h, start, n) = (problem.head, problem.tokens, problem.len);
                let pitch = Layout::pitch(n);
                let mut scores = vec![0.0; n * pitch];
                let mut partials = Vec::new();
                for (i, row) in scores.chunks_exact_mut(pitch).enumerate() {
                    let query = self.q.index(tokens, start + i, h, self.head);
                    for (j, score) in row[..n].iter_mut().enumerate() {
                        let key = self.k.index(tokens, start + j, h, self.head);
                        let products = q[query..query + width].iter().zip(&k[key..key + width]);
                        let sum: f64 = products.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                        *score = (f64::from(self.scale) * sum) as f32;
                    }
                    for tile in row[..n].chunks(KEY_TILE as usize) {
                        let stored = || tile.iter().map(|&s| self.dtype.round(s));
                        let top = stored().fold(f32::NEG_INFINITY, f32::max);
                        let sum: f64 = stored().map(|s| f64::from(s - top).exp()).sum();
                        partials.extend([top, sum as f32]);
                    }
                }
                (scores, partials)
            })
            .collect();
        let layout = Layout::of(extents);
        let room = |shape: Shape| {
            let elements = shape.elements().eval(extents);
            vec![f32::NAN; elements.unwrap_or(0) as usize]
        };
        let mut scores = room(scores_shape(self.heads));
        let mut partials = room(partials_shape(self.heads));
        for (p, (from, reduced)) in problems.iter().zip(&results) {
            let to = layout.scores(p.head, p.pairs, p.tokens);
            scores[to..to + from.len()].copy_from_slice(from);
            let to = layout.partials(p.head, p.pairs, p.tokens) * 2;
            partials[to..to + reduced.len()].copy_from_slice(reduced);
        }
        vec![HostTensor::Real(scores), HostTensor::Real(partials)]
    }

    fn cases(&self) -> Vec<Case> {
        cases()
    }

    fn tolerance(&self) -> Tolerance {
        let absolute = 2e-5 * f64::from(self.head).sqrt() as f32 * self.scale.abs();
        let reason = "f32 sum over the head in another order, then one rounding to the stored type; \
                      if the maximum of a tile, up to about 8, is rounded to its other neighbor, \
                      the relative change of the tile's sum of exponentials is the change of the maximum";
        match self.dtype {
            DType::F16 => Tolerance {
                absolute,
                relative: 5e-3,
                reason,
            },
            DType::BF16 => Tolerance {
                absolute,
                relative: 4e-2,
                reason,
            },
            DType::F32 => Tolerance {
                absolute,
                relative: 2e-5,
                reason: "f32 sum over the head in another order, and approximate powers of two",
            },
        }
    }
}
