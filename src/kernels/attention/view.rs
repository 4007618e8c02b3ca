use serde::{Deserialize, Serialize};

use crate::tensor::{Shape, Size, Symbol};

/// Location of element `c` of head `h` of token `t` in a tensor.
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

    /// Index of the first element of the `nth` head of a token. The head's other elements follow it.
    pub fn index(self, tokens: usize, token: usize, nth: usize, head: u32) -> usize {
        let head = head as usize;
        match self {
            HeadView::HeadMajor => (nth * tokens + token) * head,
            HeadView::TokenMajor { offset, stride } => {
                token * stride as usize + offset as usize + nth * head
            }
        }
    }

    /// Elements between consecutive tokens of a head.
    pub(in crate::kernels) fn stride(self, head: u32) -> u32 {
        match self {
            HeadView::HeadMajor => head,
            HeadView::TokenMajor { stride, .. } => stride,
        }
    }

    /// First column of the first head in a token-major view; 0 in a head-major one.
    pub(in crate::kernels) fn column(self) -> u32 {
        match self {
            HeadView::HeadMajor => 0,
            HeadView::TokenMajor { offset, .. } => offset,
        }
    }

    /// CUDA expression (64-bit) for the index of token 0 of a head, where `nth` is the CUDA expression for the head's index.
    pub(super) fn origin_of(self, nth: &str, head: u32) -> String {
        match self {
            HeadView::HeadMajor => format!("{nth} * {head}ull * tokens"),
            HeadView::TokenMajor { offset: 0, .. } => format!("{nth} * {head}ull"),
            HeadView::TokenMajor { offset, .. } => format!("{offset} + {nth} * {head}ull"),
        }
    }

    /// Whether the row of every head starts at a multiple of `elements` elements.
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

/// Part of a symbol that distinguishes views, each given with the total width of its heads. Empty if each tensor is
/// `[tokens, width]`; `_qkv2304` if three views are columns of one tensor.
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

/// Part of a symbol that names the heads: `h12x64`, or `h32kv8x128` if groups of query heads share a key head.
pub(super) fn heads_word(heads: u32, kv_heads: u32, head: u32) -> String {
    match kv_heads == heads {
        true => format!("h{heads}x{head}"),
        false => format!("h{heads}kv{kv_heads}x{head}"),
    }
}

/// CUDA expression for the key head of the query head given by the CUDA expression `nth`.
pub(super) fn kv_head_of(nth: &str, heads: u32, kv_heads: u32) -> String {
    match heads / kv_heads.max(1) {
        0 | 1 => nth.to_owned(),
        group => format!("({nth} / {group}u)"),
    }
}

/// Part of a symbol that distinguishes scales: empty for `usual`, else e.g. `_scale0p25`.
pub(super) fn scale_suffix(scale: f32, usual: f32) -> String {
    if scale.to_bits() == usual.to_bits() {
        return String::new();
    }
    let text = format!("{scale:?}");
    let text = text.strip_suffix(".0").unwrap_or(&text);
    format!("_scale{}", text.replace('.', "p").replace('-', "m"))
}

/// Returns `1/√head`, the default scale of dot-product attention.
pub fn default_scale(head: u32) -> f32 {
    (1.0 / f64::from(head).sqrt()) as f32
}

/// Returns `scale·log2(e)`, for softmax with base-2 exponentials.
pub(super) fn scale_log2(scale: f32) -> f32 {
    (f64::from(scale) * std::f64::consts::LOG2_E) as f32
}
