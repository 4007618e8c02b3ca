//! Attention in one kernel, with the scores on the chip: the short form and the one for any length.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{
    AttentionError, HeadView, params, storage,
    unfused::softmax,
    view::{scale_log2, scale_suffix, usual_scale, views_suffix},
};
use crate::{
    kernels::{Case, Constants, HostTensor, Kernel, Launch, Param, Tolerance, f32_literal},
    tensor::{DType, Extents, Shape, Size, Symbol},
};

/// Short fused attention (ByteTransformer III.E.1): all keys of a sequence at once in shared
/// memory, for sequences of at most `max_len`.
///
/// `q`, `k`, `v`, `cu_lens` → `out [tokens, heads·head]`, softmax of `scale · q·kᵀ` times `v`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhaShort {
    pub heads: u32,
    pub head: u32,
    pub scale: f32,
    pub q: HeadView,
    pub k: HeadView,
    pub v: HeadView,
    pub max_len: u32,
    pub dtype: DType,
}

/// Fused attention of any length by online softmax. Operands as [`MhaShort`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhaOnline {
    pub heads: u32,
    pub head: u32,
    pub scale: f32,
    pub q: HeadView,
    pub k: HeadView,
    pub v: HeadView,
    pub dtype: DType,
}

/// Shared memory that a block may have on every target; sm_86 and sm_89 have the least.
const SHARED_LIMIT: u32 = 99 * 1024;
/// Largest head size of the fused kernels.
const HEAD_LIMIT: u32 = 256;
/// Keys that the short kernel multiplies, or skips, together.
const KEY_STEP: u32 = 32;
/// Most keys of the short kernel. Half as many registers hold the scores of a warp's 16 queries.
const SHORT_LIMIT: u32 = 256;

impl MhaShort {
    /// The largest `max_len` for a head size: all of a sequence's keys and values, and a tile of
    /// queries, fit 99 KiB of shared memory, and the scores fit registers. 0 where the head size
    /// is none that the kernel takes. In f32, which reads keys tile by tile, only the latter holds.
    pub fn max_len_for(head: u32, dtype: DType) -> u32 {
        if check_head(head).is_err() {
            return 0;
        }
        if dtype == DType::F32 {
            return SHORT_LIMIT;
        }
        let row = row_bytes(head, dtype);
        let keys = (SHARED_LIMIT / row).saturating_sub(64) / 2;
        (keys / KEY_STEP * KEY_STEP).min(SHORT_LIMIT)
    }

    /// Whether the kernel can be generated as described.
    pub fn check(&self) -> Result<(), AttentionError> {
        self.operands().check()?;
        let limit = Self::max_len_for(self.head, self.dtype);
        if self.max_len == 0 || self.max_len > limit {
            return Err(AttentionError::MaxLen {
                max_len: self.max_len,
                head: self.head,
                dtype: self.dtype,
                limit,
            });
        }
        Ok(())
    }

    fn operands(&self) -> Operands {
        Operands {
            heads: self.heads,
            head: self.head,
            scale: self.scale,
            views: [self.q, self.k, self.v],
            dtype: self.dtype,
        }
    }

    fn plan(&self) -> Tiling {
        if self.dtype == DType::F32 {
            return Tiling::simt(self.head);
        }
        let keys = self.max_len.next_multiple_of(KEY_STEP);
        // Short sequences leave half of a larger tile empty.
        let rows = if keys <= 32 { 32 } else { 64 };
        Tiling {
            template: "mha_short",
            rows,
            keys,
            threads: rows * 2,
            m_tiles: 1,
            hold_q: self.head <= 128,
            shared_bytes: (rows + 2 * keys) * row_bytes(self.head, self.dtype),
        }
    }
}

impl MhaOnline {
    /// Whether the kernel can be generated as described.
    pub fn check(&self) -> Result<(), AttentionError> {
        self.operands().check()
    }

    fn operands(&self) -> Operands {
        Operands {
            heads: self.heads,
            head: self.head,
            scale: self.scale,
            views: [self.q, self.k, self.v],
            dtype: self.dtype,
        }
    }

    /// Two 16-row tiles a warp halve the reads of shared memory per product, as long as the
    /// accumulators leave room for them. Larger heads have fewer rows and shorter key tiles.
    fn plan(&self) -> Tiling {
        if self.dtype == DType::F32 {
            return Tiling::simt(self.head);
        }
        let (m_tiles, keys, hold_q) = match self.head {
            ..=64 => (2, 64, true),
            65..=128 => (1, 64, true),
            _ => (1, 32, false),
        };
        let rows = 64 * m_tiles;
        Tiling {
            template: "mha_online",
            rows,
            keys,
            threads: 128,
            m_tiles,
            hold_q,
            shared_bytes: (rows + 4 * keys) * row_bytes(self.head, self.dtype),
        }
    }
}

/// How a fused kernel is cut.
struct Tiling {
    template: &'static str,
    /// Queries of a block.
    rows: u32,
    /// Keys in shared memory at once, for one of the two buffers where there are two.
    keys: u32,
    threads: u32,
    /// 16-row tiles of a warp.
    m_tiles: u32,
    /// Whether a warp keeps its queries in registers.
    hold_q: bool,
    shared_bytes: u32,
}

impl Tiling {
    /// The f32 kernel's: queries, keys, values, and the probabilities of a tile.
    fn simt(head: u32) -> Self {
        let rows = 32;
        let shared =
            |keys: u32| (rows + 2 * keys) * row_bytes(head, DType::F32) + rows * (keys + 4) * 4;
        let keys = if shared(32) <= SHARED_LIMIT { 32 } else { 16 };
        Self {
            template: "mha_simt",
            rows,
            keys,
            threads: 128,
            m_tiles: 1,
            hold_q: false,
            shared_bytes: shared(keys),
        }
    }

    /// Numbers are given to tiles so that a sequence's first is `start / rows + its index`.
    fn launch(&self, extents: &Extents, heads: u32) -> Launch {
        let tiles = extents.tokens / u64::from(self.rows) + extents.batch;
        Launch {
            // At most 2^24 tokens and as many sequences, so this fits.
            grid: [tiles as u32, heads, 1],
            threads: self.threads,
            shared_bytes: self.shared_bytes,
        }
    }
}

/// Elements of a row in shared memory: 16-bit products take 16 at a time.
fn row(head: u32, dtype: DType) -> u32 {
    if dtype == DType::F32 {
        head
    } else {
        head.next_multiple_of(16)
    }
}

/// Bytes from one row in shared memory to the next.
fn row_bytes(head: u32, dtype: DType) -> u32 {
    row(head, dtype) * dtype.bytes() as u32 + 16
}

fn check_head(head: u32) -> Result<(), AttentionError> {
    if head == 0 || head > HEAD_LIMIT || !head.is_multiple_of(8) {
        return Err(AttentionError::HeadSize { head });
    }
    Ok(())
}

/// What both fused kernels read.
struct Operands {
    heads: u32,
    head: u32,
    scale: f32,
    /// Of q, k and v.
    views: [HeadView; 3],
    dtype: DType,
}

impl Operands {
    fn named(&self) -> [(&'static str, HeadView); 3] {
        let [q, k, v] = self.views;
        [("q", q), ("k", k), ("v", v)]
    }

    fn width(&self) -> u32 {
        self.heads * self.head
    }

    fn check(&self) -> Result<(), AttentionError> {
        check_head(self.head)?;
        if !self.dtype.is_real() {
            return Err(AttentionError::Storage { dtype: self.dtype });
        }
        if !(self.scale.is_finite() && self.scale > 0.0) {
            return Err(AttentionError::Scale { scale: self.scale });
        }
        for (operand, view) in self.named() {
            if let HeadView::TokenMajor { offset, stride } = view {
                let width = self.width();
                if !view.is_aligned(self.head, 8) {
                    return Err(AttentionError::Alignment {
                        operand,
                        offset,
                        stride,
                    });
                }
                if u64::from(offset) + u64::from(width) > u64::from(stride) {
                    return Err(AttentionError::Columns {
                        operand,
                        offset,
                        stride,
                        width,
                    });
                }
            }
        }
        Ok(())
    }

    /// The end of a symbol, after what tells the kernel's own sizes.
    fn suffix(&self) -> String {
        views_suffix(self.width(), &self.named())
            + &scale_suffix(self.scale, usual_scale(self.head))
    }

    fn constants(&self, tiling: &Tiling) -> Constants {
        let [q, k, v] = self.views;
        let aligned = 16 / self.dtype.bytes() as u32;
        Constants::from([
            ("storage", storage(self.dtype).into()),
            ("head", self.head.into()),
            ("row", row(self.head, self.dtype).into()),
            ("rows", tiling.rows.into()),
            ("keys", tiling.keys.into()),
            ("m_tiles", tiling.m_tiles.into()),
            ("hold_q", tiling.hold_q.into()),
            ("scale_log2", f32_literal(scale_log2(self.scale)).into()),
            ("out_stride", self.width().into()),
            ("q_origin", q.origin(self.head).into()),
            ("q_stride", q.stride(self.head).into()),
            ("q_aligned", q.is_aligned(self.head, aligned).into()),
            ("k_origin", k.origin(self.head).into()),
            ("k_stride", k.stride(self.head).into()),
            ("k_aligned", k.is_aligned(self.head, aligned).into()),
            ("v_origin", v.origin(self.head).into()),
            ("v_stride", v.stride(self.head).into()),
            ("v_aligned", v.is_aligned(self.head, aligned).into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        let mut all: Vec<Param> = self
            .named()
            .into_iter()
            .map(|(name, view)| params::read(name, self.dtype, view.shape(self.heads, self.head)))
            .collect();
        let width = Size::constant(self.width().into());
        let out = Shape::new([Size::from(Symbol::Tokens), width]);
        all.push(params::cu_lens());
        all.push(params::write("out", self.dtype, out));
        all.extend(params::counts(&self.views));
        all
    }

    /// In f64 throughout; sequences and heads in parallel.
    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (q, k, v) = (reads[0].real(), reads[1].real(), reads[2].real());
        let [q_view, k_view, v_view] = self.views;
        let (tokens, width) = (extents.tokens as usize, self.head as usize);
        let sequences = reads[3].index().windows(2);
        let problems: Vec<(usize, usize, usize)> = sequences
            .flat_map(|ends| {
                let (start, end) = (ends[0] as usize, ends[1] as usize);
                (0..self.heads as usize).map(move |h| (start, end, h))
            })
            .collect();
        let results: Vec<Vec<f32>> = problems
            .par_iter()
            .map(|&(start, end, h)| {
                let mut rows = Vec::with_capacity((end - start) * width);
                for t in start..end {
                    let query = q_view.index(tokens, t, h, self.head);
                    let scores = (start..end).map(|t| {
                        let key = k_view.index(tokens, t, h, self.head);
                        let products = q[query..query + width].iter().zip(&k[key..key + width]);
                        let dot: f64 = products.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                        f64::from(self.scale) * dot
                    });
                    let mut row = vec![0.0f64; width];
                    for (t, p) in (start..end).zip(softmax(scores.collect())) {
                        let value = v_view.index(tokens, t, h, self.head);
                        for (to, &x) in row.iter_mut().zip(&v[value..value + width]) {
                            *to += p * f64::from(x);
                        }
                    }
                    rows.extend(row.into_iter().map(|x| x as f32));
                }
                rows
            })
            .collect();
        let stride = self.width() as usize;
        let mut out = vec![0.0; tokens * stride];
        for (&(start, _, h), rows) in problems.iter().zip(&results) {
            for (i, row) in rows.chunks_exact(width).enumerate() {
                let to = (start + i) * stride + h * width;
                out[to..to + width].copy_from_slice(row);
            }
        }
        vec![HostTensor::Real(out)]
    }

    fn tolerance(&self) -> Tolerance {
        match self.dtype {
            DType::F16 => Tolerance {
                absolute: 2e-3,
                relative: 1e-3,
                reason: "each probability is rounded to f16 (2^-11) before it weighs values of up to about 4",
            },
            DType::BF16 => Tolerance {
                absolute: 1.6e-2,
                relative: 8e-3,
                reason: "each probability is rounded to bf16 (2^-8) before it weighs values of up to about 4",
            },
            _ => Tolerance {
                absolute: 2e-5,
                relative: 2e-5,
                reason: "f32 sums in another order, and exponents of up to about 60 with 2^-24 each",
            },
        }
    }
}

/// Batches whose lengths lie around the edges of tiles.
fn edge_cases() -> Vec<Case> {
    let mut cases = Case::standard();
    cases.push(Case::new(
        "tile_edges",
        &[15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129],
    ));
    cases
}

impl Kernel for MhaShort {
    fn symbol(&self) -> String {
        format!(
            "mha_short_{}_h{}x{}_l{}{}",
            self.dtype,
            self.heads,
            self.head,
            self.max_len,
            self.operands().suffix(),
        )
    }

    fn template(&self) -> &'static str {
        self.plan().template
    }

    fn constants(&self) -> Constants {
        self.operands().constants(&self.plan())
    }

    fn params(&self) -> Vec<Param> {
        self.operands().params()
    }

    fn launch(&self, extents: &Extents) -> Launch {
        self.plan().launch(extents, self.heads)
    }

    fn threads(&self) -> u32 {
        self.plan().threads
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.operands().reference(extents, reads)
    }

    /// Only sequences that the kernel takes, and up to the longest of them.
    fn cases(&self) -> Vec<Case> {
        let mut cases = edge_cases();
        cases.push(Case {
            name: "longest",
            lens: vec![
                self.max_len,
                1,
                self.max_len.saturating_sub(1),
                self.max_len,
            ],
        });
        for case in &mut cases {
            case.lens.retain(|&n| n > 0 && n <= self.max_len);
        }
        cases.retain(|case| !case.lens.is_empty());
        cases
    }

    fn tolerance(&self) -> Tolerance {
        self.operands().tolerance()
    }
}

impl Kernel for MhaOnline {
    fn symbol(&self) -> String {
        format!(
            "mha_online_{}_h{}x{}{}",
            self.dtype,
            self.heads,
            self.head,
            self.operands().suffix(),
        )
    }

    fn template(&self) -> &'static str {
        self.plan().template
    }

    fn constants(&self) -> Constants {
        self.operands().constants(&self.plan())
    }

    fn params(&self) -> Vec<Param> {
        self.operands().params()
    }

    fn launch(&self, extents: &Extents) -> Launch {
        self.plan().launch(extents, self.heads)
    }

    fn threads(&self) -> u32 {
        self.plan().threads
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.operands().reference(extents, reads)
    }

    fn cases(&self) -> Vec<Case> {
        let mut cases = edge_cases();
        cases.push(Case::new("long", &[300, 1, 512]));
        cases.push(Case::new("longest", &[7, 1000]));
        // More sequences than a warp looks through at once.
        let many: Vec<u32> = (0..70).map(|i| 1 + i * 5 % 37).collect();
        cases.push(Case::new("many", &many));
        cases
    }

    fn tolerance(&self) -> Tolerance {
        self.operands().tolerance()
    }
}
