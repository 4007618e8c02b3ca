//! Operands of the fused kernels, their checks, and the definition of attention that they share.

use rayon::prelude::*;

use super::{
    AttentionError, HeadView,
    fused::Tiling,
    params,
    softmax::softmax,
    storage,
    view::{scale_log2, scale_suffix, usual_scale, views_suffix},
};
use crate::{
    kernels::{Constants, HostTensor, Param, Tolerance, f32_literal},
    tensor::{DType, Extents, Shape, Size, Symbol},
};

/// Largest head size of the fused kernels.
const HEAD_LIMIT: u32 = 256;

/// The parameters of fused attention.
pub(super) struct Operands {
    pub heads: u32,
    pub head: u32,
    pub scale: f32,
    /// The views of q, k and v.
    pub views: [HeadView; 3],
    pub dtype: DType,
}

impl Operands {
    pub fn named(&self) -> [(&'static str, HeadView); 3] {
        let [q, k, v] = self.views;
        [("q", q), ("k", k), ("v", v)]
    }

    pub fn width(&self) -> u32 {
        self.heads * self.head
    }

    pub fn check(&self) -> Result<(), AttentionError> {
        check_head(self.head)?;
        check_scale(self.scale)?;
        check_views(self.heads, self.head, self.dtype, &self.named())
    }

    /// The last part of a symbol, after the kernel's own sizes.
    pub fn suffix(&self) -> String {
        views_suffix(self.width(), &self.named())
            + &scale_suffix(self.scale, usual_scale(self.head))
    }

    pub fn constants(&self, tiling: &Tiling) -> Constants {
        let [q, k, v] = self.views;
        let aligned = 16 / self.dtype.bytes() as u32;
        Constants::from([
            ("storage", storage(self.dtype).into()),
            ("head", self.head.into()),
            ("row", row(self.head, self.dtype).into()),
            ("rows", tiling.rows.into()),
            ("keys", tiling.keys.into()),
            ("m_tiles", tiling.m_tiles.into()),
            ("q_in_regs", tiling.q_in_regs.into()),
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

    pub fn params(&self) -> Vec<Param> {
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

    /// Computed in f64 throughout; sequences and heads run in parallel.
    pub fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
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

    pub fn tolerance(&self) -> Tolerance {
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

/// Elements of a row in shared memory: the k extent of a 16-bit MMA is 16.
pub(super) fn row(head: u32, dtype: DType) -> u32 {
    if dtype == DType::F32 {
        head
    } else {
        head.next_multiple_of(16)
    }
}

/// Row pitch in shared memory, in bytes: 16 more than a row, against bank conflicts.
pub(super) fn row_bytes(head: u32, dtype: DType) -> u32 {
    row(head, dtype) * dtype.bytes() as u32 + 16
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

/// Whether heads of a size that [`check_head`] accepts can be read 16 bytes at a time.
pub(super) fn check_views(
    heads: u32,
    head: u32,
    dtype: DType,
    views: &[(&'static str, HeadView)],
) -> Result<(), AttentionError> {
    if !dtype.is_real() {
        return Err(AttentionError::Storage { dtype });
    }
    let width = heads * head;
    for &(operand, view) in views {
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
