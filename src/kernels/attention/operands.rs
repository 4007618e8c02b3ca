//! Operands of the fused attention kernels, their checks, and the reference that all fused kernels share.

use rayon::prelude::*;

use super::{
    AttentionError,
    common::{row, softmax},
    params, storage,
    tiling::Tiling,
    view::{heads_word, kv_head_of, scale_suffix, views_suffix},
};
use crate::{
    kernels::{
        Constants, HostTensor, Param, Tolerance,
        attention::{position_bias::PositionBiasCode, view::ViewCode},
    },
    ops::{AttentionProblem, HeadView, default_scale},
    tensor::{DType, Extents, Shape, Size, Symbol},
};

/// Max head size of the fused kernels.
const HEAD_LIMIT: u32 = 256;

/// An attention problem and its storage type, which determine the parameters and results of a fused kernel.
pub(super) struct Operands {
    pub of: AttentionProblem,
    pub dtype: DType,
}

impl Operands {
    pub fn check(&self) -> Result<(), AttentionError> {
        let AttentionProblem {
            heads,
            kv_heads,
            head,
            ..
        } = self.of;
        check_head(head)?;
        check_scale(self.of.scale)?;
        self.of.by.check()?;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(AttentionError::Groups { heads, kv_heads });
        }
        check_views(head, &self.of.operands())
    }

    /// Part of the kernel's symbol that names the heads.
    pub fn heads(&self) -> String {
        heads_word(self.of.heads, self.of.kv_heads, self.of.head)
    }

    /// Last part of a kernel's symbol: the views, the causal mask, the position bias, and a scale that is not the default.
    pub fn suffix(&self) -> String {
        let AttentionProblem { head, scale, .. } = self.of;
        let operands = self.of.operands();
        let views = operands.map(|(name, view, heads)| (name, view, heads * head));
        let causal = if self.of.causal { "_causal" } else { "" };
        let by = self.of.by.suffix();
        views_suffix(&views) + causal + &by + &scale_suffix(scale, default_scale(head))
    }

    pub fn constants(&self, tiling: &Tiling) -> Constants {
        let AttentionProblem {
            heads,
            kv_heads,
            head,
            q,
            k,
            v,
            ..
        } = self.of;
        let aligned = 16 / self.dtype.bytes() as u32;
        let kv_head = kv_head_of("blockIdx.y", heads, kv_heads);
        let mut constants = Constants::from([
            ("storage", storage(self.dtype).into()),
            ("causal", self.of.causal.into()),
            ("head", head.into()),
            ("row", row(head, self.dtype).into()),
            ("rows", tiling.rows.into()),
            ("keys", tiling.keys.into()),
            ("m_tiles", tiling.m_tiles.into()),
            ("q_in_regs", tiling.q_in_regs.into()),
            ("out_stride", self.of.width().into()),
            ("to_e4m3", false.into()),
            ("q_origin", q.origin_of("blockIdx.y", head).into()),
            ("q_stride", q.stride(head).into()),
            ("q_aligned", q.is_aligned(head, aligned).into()),
            ("k_origin", k.origin_of(&kv_head, head).into()),
            ("k_stride", k.stride(head).into()),
            ("k_aligned", k.is_aligned(head, aligned).into()),
            ("v_origin", v.origin_of(&kv_head, head).into()),
            ("v_stride", v.stride(head).into()),
            ("v_aligned", v.is_aligned(head, aligned).into()),
        ]);
        constants.extend(self.of.by.constants("blockIdx.y", self.of.scale));
        constants
    }

    pub fn params(&self) -> Vec<Param> {
        let operands = self.of.operands().into_iter();
        let mut all: Vec<Param> = operands
            .map(|(name, view, heads)| {
                params::read(name, self.dtype, view.shape(heads, self.of.head))
            })
            .collect();
        all.extend(self.of.by.params(self.of.heads, self.dtype));
        let width = Size::constant(self.of.width().into());
        let out = Shape::new([Size::from(Symbol::Tokens), width]);
        all.push(params::cu_lens());
        all.push(params::write("out", self.dtype, out));
        all.extend(params::counts(&[self.of.q, self.of.k, self.of.v]));
        all
    }

    /// Computes the attention in f64, with sequences and heads in parallel.
    pub fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (q, k, v) = (reads[0].real(), reads[1].real(), reads[2].real());
        let AttentionProblem {
            heads,
            kv_heads,
            head,
            scale,
            causal,
            by,
            q: q_view,
            k: k_view,
            v: v_view,
        } = self.of;
        let group = (heads / kv_heads.max(1)).max(1) as usize;
        let (tokens, width) = (extents.tokens as usize, head as usize);
        let mut metas = &reads[3..];
        let operands = by.take(&mut metas);
        let sequences = metas[0].index().windows(2);
        let problems: Vec<(usize, usize, usize)> = sequences
            .flat_map(|ends| {
                let (start, end) = (ends[0] as usize, ends[1] as usize);
                (0..heads as usize).map(move |h| (start, end, h))
            })
            .collect();
        let results: Vec<Vec<f32>> = problems
            .par_iter()
            .map(|&(start, end, h)| {
                let mut rows = Vec::with_capacity((end - start) * width);
                for t in start..end {
                    let query = q_view.index(tokens, t, h, head);
                    let seen = by.seen(causal, t - start, end - start);
                    let keys = start + seen.start..start + seen.end;
                    let scores = keys.clone().map(|key| {
                        let distance = key as i64 - t as i64;
                        let key = k_view.index(tokens, key, h / group, head);
                        let products = q[query..query + width].iter().zip(&k[key..key + width]);
                        let dot: f64 = products.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                        by.score(f64::from(scale) * dot, operands.biases, h, distance)
                    });
                    let mut row = vec![0.0f64; width];
                    for (t, p) in keys.zip(softmax(scores.collect(), operands.sink(h))) {
                        let value = v_view.index(tokens, t, h / group, head);
                        for (to, &x) in row.iter_mut().zip(&v[value..value + width]) {
                            *to += p * f64::from(x);
                        }
                    }
                    rows.extend(row.into_iter().map(|x| x as f32));
                }
                rows
            })
            .collect();
        let stride = self.of.width() as usize;
        let mut out = vec![0.0; tokens * stride];
        for (&(start, _, h), rows) in problems.iter().zip(&results) {
            for (i, row) in rows.chunks_exact(width).enumerate() {
                let to = (start + i) * stride + h * width;
                out[to..to + width].copy_from_slice(row);
            }
        }
        vec![HostTensor::Real(out)]
    }

    pub fn tolerance(&self) -> Tolerance {
        tolerance(self.dtype)
    }
}

/// Tolerance of the fused kernels, which round probabilities to the storage type.
pub(super) fn tolerance(dtype: DType) -> Tolerance {
    match dtype {
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
        DType::F32 => Tolerance {
            absolute: 2e-5,
            relative: 2e-5,
            reason: "f32 sums in another order, and exponents of up to about 60 with 2^-24 each",
        },
    }
}

pub(super) fn check_head(head: u32) -> Result<(), AttentionError> {
    if head == 0 || head > HEAD_LIMIT || !head.is_multiple_of(8) {
        return Err(AttentionError::HeadSize { head });
    }
    Ok(())
}

pub(super) fn check_scale(scale: f32) -> Result<(), AttentionError> {
    if !(scale.is_finite() && scale > 0.0) {
        return Err(AttentionError::Scale { scale });
    }
    Ok(())
}

/// Checks that all heads of the views can be read 16 bytes at a time. `head` must pass [`check_head`].
pub(super) fn check_views(
    head: u32,
    views: &[(&'static str, HeadView, u32)],
) -> Result<(), AttentionError> {
    for &(operand, view, heads) in views {
        let width = heads * head;
        if let HeadView::TokenMajor { offset, stride } = view {
            if !view.is_aligned(head, 8) {
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
