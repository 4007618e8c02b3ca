use serde::{Deserialize, Serialize};

use crate::tensor::{Shape, Size, Symbol};

/// Where element `c` of head `h` of token `t` lies in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum HeadView {
    /// `[heads, tokens, head]`: `(h·tokens + t)·head + c`.
    HeadMajor,
    /// Columns of a `[tokens, stride]` tensor: `t·stride + offset + h·head + c`.
    TokenMajor { offset: u32, stride: u32 },
}

impl HeadView {
    /// Shape of the whole tensor.
    pub fn shape(self, heads: u32, head: u32) -> Shape {
        let tokens = Size::from(Symbol::Tokens);
        match self {
            HeadView::HeadMajor => Shape::new([
                Size::constant(heads.into()),
                tokens,
                Size::constant(head.into()),
            ]),
            HeadView::TokenMajor { stride, .. } => {
                Shape::new([tokens, Size::constant(stride.into())])
            }
        }
    }

    /// Index of the first element of the `nth` head of a token; its other elements follow.
    pub fn index(self, tokens: usize, token: usize, nth: usize, head: u32) -> usize {
        let head = head as usize;
        match self {
            HeadView::HeadMajor => (nth * tokens + token) * head,
            HeadView::TokenMajor { offset, stride } => {
                token * stride as usize + offset as usize + nth * head
            }
        }
    }

    /// Elements from one token of a head to the next.
    pub(in crate::kernels) fn stride(self, head: u32) -> u32 {
        match self {
            HeadView::HeadMajor => head,
            HeadView::TokenMajor { stride, .. } => stride,
        }
    }

    /// First column of the first head of a token-major view; 0 for a head-major one.
    pub(in crate::kernels) fn column(self) -> u32 {
        match self {
            HeadView::HeadMajor => 0,
            HeadView::TokenMajor { offset, .. } => offset,
        }
    }

    /// Index of token 0 of the head that CUDA expression `nth` gives, as a 64-bit CUDA expression.
    pub(super) fn origin_of(self, nth: &str, head: u32) -> String {
        match self {
            HeadView::HeadMajor => format!("{nth} * {head}ull * tokens"),
            HeadView::TokenMajor { offset: 0, .. } => format!("{nth} * {head}ull"),
            HeadView::TokenMajor { offset, .. } => format!("{offset} + {nth} * {head}ull"),
        }
    }

    /// Whether every head's row starts at a multiple of this many elements.
    pub(crate) fn is_aligned(self, head: u32, elements: u32) -> bool {
        match self {
            HeadView::HeadMajor => head.is_multiple_of(elements),
            HeadView::TokenMajor { offset, stride } => [head, offset, stride]
                .iter()
                .all(|n| n.is_multiple_of(elements)),
        }
    }

    fn word(self) -> String {
        match self {
            HeadView::HeadMajor => "headmajor".to_owned(),
            HeadView::TokenMajor { offset, stride } => format!("{offset}of{stride}"),
        }
    }
}

/// The part of a symbol that distinguishes views, each with the width of its heads together: nothing if each tensor is
/// `[tokens, width]`, `_qkv2304` if three are the columns of one tensor.
pub(super) fn views_suffix(views: &[(&str, HeadView, u32)]) -> String {
    let columns = |offset, stride| HeadView::TokenMajor { offset, stride };
    if views.iter().all(|&(_, v, width)| v == columns(0, width)) {
        return String::new();
    }
    if views.iter().all(|(_, v, _)| *v == HeadView::HeadMajor) {
        return "_headmajor".to_owned();
    }
    let sum = |widths: &[(&str, HeadView, u32)]| {
        let widths = widths.iter().map(|&(_, _, width)| width);
        widths.fold(0, u32::saturating_add)
    };
    let stride = sum(views);
    let merged = (0..views.len()).map(|i| columns(sum(&views[..i]), stride));
    if views.len() == 3 && views.iter().map(|(_, v, _)| *v).eq(merged) {
        return format!("_qkv{stride}");
    }
    views
        .iter()
        .map(|(name, v, _)| format!("_{name}{}", v.word()))
        .collect()
}

/// The heads of a symbol: `h12x64`, or `h32kv8x128` where groups of query heads share a key head.
pub(super) fn heads_word(heads: u32, kv_heads: u32, head: u32) -> String {
    match kv_heads == heads {
        true => format!("h{heads}x{head}"),
        false => format!("h{heads}kv{kv_heads}x{head}"),
    }
}

/// The key head of a query head that a CUDA expression gives, as a CUDA expression.
pub(super) fn kv_head_of(nth: &str, heads: u32, kv_heads: u32) -> String {
    match heads / kv_heads.max(1) {
        0 | 1 => nth.to_owned(),
        group => format!("({nth} / {group}u)"),
    }
}

/// The part of a symbol that distinguishes scales: nothing for `usual`, else `_scale0p25`.
pub(super) fn scale_suffix(scale: f32, usual: f32) -> String {
    if scale.to_bits() == usual.to_bits() {
        return String::new();
    }
    let text = format!("{scale:?}");
    let text = text.strip_suffix(".0").unwrap_or(&text);
    format!("_scale{}", text.replace('.', "p").replace('-', "m"))
}

/// `1/√head`, the scale of scaled dot-product attention.
pub fn usual_scale(head: u32) -> f32 {
    (1.0 / f64::from(head).sqrt()) as f32
}

/// `scale·log2(e)`, so that the exponential is a power of two.
pub(super) fn scale_log2(scale: f32) -> f32 {
    (f64::from(scale) * std::f64::consts::LOG2_E) as f32
}
