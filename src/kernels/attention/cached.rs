//! Attention of new tokens to the keys of their sequences in a KV cache.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{
    AttentionError,
    common::softmax,
    operands::{check_head, check_scale},
    params, position_bias, storage,
    view::{heads_word, scale_suffix},
};
use crate::{
    kernels::{
        Case, Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Role, Tolerance,
        attention::position_bias::PositionBiasCode,
        cache::{BLOCK, Pool, index},
        class::attention_flop,
        limits,
    },
    machine::Machine,
    ops::{BatchInput, Bias, HeadView, PositionBias, default_scale},
    tensor::{DType, Extents, Format, Shape, Size, Symbol},
};

/// Keys that a query attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Keys {
    /// Keys of the query's own sequence, up to the query's position.
    Own,
    /// All keys of the sequence's source text, which another part of the model has cached (cross-attention).
    Source,
}

impl Keys {
    /// Returns three batch inputs: the list of the cache slots of all keys, the offset in this list at which each sequence begins, and the
    /// number of keys of each sequence.
    pub fn tables(self) -> [BatchInput; 3] {
        match self {
            Keys::Own => [
                BatchInput::Slots,
                BatchInput::SlotStarts,
                BatchInput::KeyLens,
            ],
            Keys::Source => [
                BatchInput::SourceSlots,
                BatchInput::SourceStarts,
                BatchInput::SourceLens,
            ],
        }
    }

    fn symbol(self) -> Symbol {
        match self {
            Keys::Own => Symbol::Slots,
            Keys::Source => Symbol::SourceSlots,
        }
    }
}

/// `q`, `keys [blocks, stride]`, `values [blocks, stride]`, (`bias`), (`sinks`), (`k_scale, v_scale [1]`), `cu_lens`, `slots`,
/// `slot_starts`, `key_lens` → `out [tokens, heads·head]`: each token attends to its sequence's keys up to its own position, or to all keys
/// of a source text. If a sequence has `n` tokens in the batch, the position of its token `i` is `key_lens - n + i`. This is the plain
/// kernel for any GPU, with one warp per token and head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhaCached {
    pub heads: u32,
    /// Number of key heads and of value heads. Each is shared by `heads / kv_heads` consecutive query heads.
    pub kv_heads: u32,
    pub head: u32,
    pub scale: f32,
    pub q: HeadView,
    pub keys: Keys,
    /// Soft cap, window, bias and sinks of the scores. With [`Keys::Source`], only sinks are supported.
    pub by: PositionBias,
    pub pool: Pool,
    pub dtype: DType,
}

/// Warps per CTA.
const WARPS: u32 = 4;

impl MhaCached {
    /// Checks the sizes of the heads and of the cache.
    pub(super) fn check_sizes(&self) -> Result<(), String> {
        limits::heads(self.heads, self.head, &[self.q])?;
        limits::heads(self.kv_heads, self.head, &[])?;
        self.pool.check(self.kv_heads, self.head, self.dtype)
    }

    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), AttentionError> {
        check_head(self.head)?;
        check_scale(self.scale)?;
        self.by.check()?;
        if self.keys == Keys::Source && !self.by.keeps_scores() {
            return Err(AttentionError::DistanceToSource);
        }
        let (heads, kv_heads) = (self.heads, self.kv_heads);
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(AttentionError::Groups { heads, kv_heads });
        }
        super::operands::check_views(self.head, &[("q", self.q, heads)])
    }

    fn group(&self) -> u32 {
        self.heads / self.kv_heads
    }

    /// Returns this kernel with a cache in E4M3.
    pub(super) fn in_e4m3(&self) -> Self {
        let pool = Pool {
            format: Format::E4m3,
            ..self.pool
        };
        Self {
            pool,
            ..self.clone()
        }
    }

    /// Returns this kernel with a cache in E4M3 that has scales.
    pub(super) fn scaled(&self) -> Self {
        let mut kernel = self.in_e4m3();
        kernel.pool.scaled = true;
        kernel
    }

    /// Returns variants of this kernel with windows, biases and caps, for tests that compile or run kernels.
    pub(super) fn by_distance(&self) -> impl Iterator<Item = Self> {
        let causal = position_bias::examples()
            .into_iter()
            .filter(|(causal, _)| *causal);
        let slopes = PositionBias {
            bias: Some(Bias::Slopes),
            ..PositionBias::default()
        };
        let all = causal.map(|(_, by)| by).chain([slopes]);
        all.map(|by| Self { by, ..self.clone() })
    }
}

impl Kernel for MhaCached {
    facts! { template: "mha_cached", dtype: self.dtype, class: Attention }

    fn symbol(&self) -> String {
        let (q, head) = (self.q, self.head);
        format!(
            "mha_{}_{}_{}_q{}of{}{}{}{}",
            match self.keys {
                Keys::Own => "cached",
                Keys::Source => "source",
            },
            self.dtype,
            heads_word(self.heads, self.kv_heads, head),
            q.column(),
            q.stride(head),
            self.pool.word(),
            self.by.suffix(),
            scale_suffix(self.scale, default_scale(head))
        )
    }

    fn constants(&self) -> Constants {
        let mut constants = Constants::from([
            ("storage", storage(self.dtype).into()),
            ("heads", self.heads.into()),
            ("group", self.group().into()),
            ("head", self.head.into()),
            ("warps", WARPS.into()),
            ("q_column", self.q.column().into()),
            ("q_stride", self.q.stride(self.head).into()),
            ("stride", self.pool.stride.into()),
            ("e4m3", self.pool.is_e4m3().into()),
            ("scaled", self.pool.scaled.into()),
            ("block", BLOCK.into()),
            ("causal", (self.keys == Keys::Own).into()),
        ]);
        constants.extend(self.by.constants("head", self.scale));
        constants
    }

    fn params(&self) -> Vec<Param> {
        let pool = |name| params::read(name, self.pool.element(), self.pool.shape());
        let meta = |name, meta: BatchInput, symbol: Symbol| Param {
            name,
            role: Role::Read {
                element: meta.element(),
                shape: Shape::new([symbol.into()]),
                fill: Fill::BatchInput(meta),
            },
        };
        let [slots, starts, lens] = self.keys.tables();
        let width = Size::constant((self.heads * self.head).into());
        let out = Shape::new([Size::from(Symbol::Tokens), width]);
        let mut all = vec![
            params::read("q", self.dtype, self.q.shape(self.heads, self.head)),
            pool("keys"),
            pool("values"),
        ];
        all.extend(self.by.params(self.heads, self.dtype));
        all.extend(self.pool.scales());
        all.extend([
            params::cu_lens(),
            meta("slots", slots, self.keys.symbol()),
            meta("slot_starts", starts, Symbol::Batch),
            meta("key_lens", lens, Symbol::Batch),
            params::write("out", self.dtype, out),
        ]);
        all.extend(params::counts(&[self.q]));
        all
    }

    fn flop(&self) -> Size {
        attention_flop(2, self.heads, self.head)
    }

    fn validate(&self) -> Result<(), String> {
        self.check_sizes()?;
        self.check().map_err(|e| e.to_string())
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        Launch {
            grid: [extents.tokens.max(1) as u32, self.heads.div_ceil(WARPS), 1],
            threads: self.threads(),
            shared_bytes: 0,
        }
    }

    fn threads(&self) -> u32 {
        WARPS * 32
    }

    /// Computes the attention in f64, with sequences and heads in parallel.
    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [q, keys, values] = [0, 1, 2].map(|i| reads[i].real());
        let mut metas = &reads[3..];
        let operands = self.by.take(&mut metas);
        let [k_scale, v_scale] = self.pool.take_scales(&mut metas).map(f64::from);
        let [cu_lens, slots, starts, key_lens] = [0, 1, 2, 3].map(|i| metas[i].index());
        let (tokens, head) = (extents.tokens as usize, self.head as usize);
        let (heads, group) = (self.heads as usize, self.group() as usize);
        let stride = self.pool.stride as usize;
        let problems: Vec<(usize, usize)> = (0..key_lens.len())
            .flat_map(|b| (0..heads).map(move |h| (b, h)))
            .collect();
        let results: Vec<Vec<f32>> = problems
            .par_iter()
            .map(|&(b, h)| {
                let (start, end) = (cu_lens[b] as usize, cu_lens[b + 1] as usize);
                let n_keys = key_lens[b] as usize;
                let own = &slots[starts[b] as usize..][..n_keys];
                let mut rows = Vec::with_capacity((end - start) * head);
                for t in start..end {
                    let at = self.q.index(tokens, t, h, self.head);
                    let query = &q[at..at + head];
                    // The position may be negative: a source text may have fewer keys than the sequence has tokens.
                    let position = (n_keys + t) as i64 - end as i64;
                    let (seen, first) = match self.keys {
                        Keys::Own => {
                            let seen = self.by.seen(true, position as usize, n_keys);
                            (&own[seen.clone()], seen.start)
                        }
                        Keys::Source => (own, 0),
                    };
                    let row = |x: &[f32], slot: i64| -> Vec<f64> {
                        let at = index(slot as usize, h / group, head, stride);
                        x[at..at + head].iter().map(|&v| v.into()).collect()
                    };
                    let scores = seen.iter().enumerate().map(|(nth, &slot)| {
                        let distance = (first + nth) as i64 - position;
                        let products = row(keys, slot);
                        let dot = products.iter().zip(query).map(|(k, &q)| k * f64::from(q));
                        let scaled = f64::from(self.scale) * k_scale * dot.sum::<f64>();
                        self.by.score(scaled, operands.biases, h, distance)
                    });
                    let mut sum = vec![0.0f64; head];
                    for (&slot, p) in seen.iter().zip(softmax(scores.collect(), operands.sink(h))) {
                        for (to, x) in sum.iter_mut().zip(row(values, slot)) {
                            *to += p * x;
                        }
                    }
                    rows.extend(sum.into_iter().map(|x| (v_scale * x) as f32));
                }
                rows
            })
            .collect();
        let width = heads * head;
        let mut out = vec![0.0; tokens * width];
        for (&(b, h), rows) in problems.iter().zip(&results) {
            for (i, row) in rows.chunks_exact(head).enumerate() {
                let to = (cu_lens[b] as usize + i) * width + h * head;
                out[to..to + head].copy_from_slice(row);
            }
        }
        vec![HostTensor::Real(out)]
    }

    fn cases(&self) -> Vec<Case> {
        match self.keys {
            Keys::Own => Case::cached(),
            Keys::Source => Case::with_sources(),
        }
    }

    fn tolerance(&self) -> Tolerance {
        let relative = match self.dtype {
            DType::F16 => 1e-3,
            DType::BF16 => 8e-3,
            DType::F32 => 2e-5,
        };
        Tolerance {
            absolute: 2e-5,
            relative,
            reason: "f32 sums in another order, exponents of up to about 60 with 2^-24 each, rounded to storage",
        }
    }
}

/// Instances with a key head for each query head, with key heads that several query heads share, with a single key head, and with head
/// sizes that are not multiples of 32.
pub(super) fn representative() -> Vec<KernelSpec> {
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let shapes = [(12, 12, 64), (16, 8, 128), (6, 1, 40), (3, 3, 256)].map(|s| (s, Keys::Own));
        let sources = [(8, 8, 64), (3, 3, 40)].map(|s| (s, Keys::Source));
        for ((heads, kv_heads, head), keys) in shapes.into_iter().chain(sources) {
            let kernel = MhaCached {
                heads,
                kv_heads,
                head,
                scale: default_scale(head),
                q: HeadView::TokenMajor {
                    offset: 0,
                    stride: (heads + 2 * kv_heads) * head,
                },
                keys,
                by: PositionBias::default(),
                pool: Pool::of_layer(kv_heads, head, dtype),
                dtype,
            };
            all.push(kernel.in_e4m3().into());
            all.push(kernel.scaled().into());
            if keys == Keys::Own && heads == 12 {
                all.extend(kernel.by_distance().map(KernelSpec::from));
                let scaled = kernel.scaled();
                let capped = scaled
                    .by_distance()
                    .filter(|kernel| kernel.by.cap.is_some());
                all.extend(capped.map(KernelSpec::from));
            }
            all.push(kernel.into());
        }
    }
    all
}
