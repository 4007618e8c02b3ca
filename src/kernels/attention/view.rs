//! Conversion of a [`HeadView`] to text for symbols and CUDA sources.

use crate::ops::HeadView;

pub(super) trait ViewCode {
    /// Returns a 64-bit CUDA expression for the index of a head's first element in token 0. `nth` is the CUDA expression for the index of
    /// the head.
    fn origin_of(self, nth: &str, head: u32) -> String;

    /// Returns the part of a kernel's symbol that names the view.
    fn word(self) -> String;
}

impl ViewCode for HeadView {
    fn origin_of(self, nth: &str, head: u32) -> String {
        match self {
            HeadView::HeadMajor => format!("{nth} * {head}ull * tokens"),
            HeadView::TokenMajor { offset: 0, .. } => format!("{nth} * {head}ull"),
            HeadView::TokenMajor { offset, .. } => format!("{offset} + {nth} * {head}ull"),
        }
    }

    fn word(self) -> String {
        match self {
            HeadView::HeadMajor => "headmajor".to_owned(),
            HeadView::TokenMajor { offset, stride } => format!("{offset}of{stride}"),
        }
    }
}

/// Returns the part of a kernel's symbol that distinguishes views. Each item of `views` is a name, a view, and the total width of the
/// heads. The part is empty if each tensor is `[tokens, width]`, and e.g. `_qkv2304` if three views are columns of one tensor.
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

/// Returns the part of a kernel's symbol that names the heads: `h12x64`, or `h32kv8x128` if several query heads share a key head.
pub(super) fn heads_word(heads: u32, kv_heads: u32, head: u32) -> String {
    match kv_heads == heads {
        true => format!("h{heads}x{head}"),
        false => format!("h{heads}kv{kv_heads}x{head}"),
    }
}

/// Returns a CUDA expression for the index of the key head that belongs to a query head. `nth` is the CUDA expression for the index of the
/// query head.
pub(super) fn kv_head_of(nth: &str, heads: u32, kv_heads: u32) -> String {
    match heads / kv_heads.max(1) {
        0 | 1 => nth.to_owned(),
        group => format!("({nth} / {group}u)"),
    }
}

/// Returns the part of a kernel's symbol that distinguishes scales: empty for `usual`, else e.g. `_scale0p25`.
pub(super) fn scale_suffix(scale: f32, usual: f32) -> String {
    if scale.to_bits() == usual.to_bits() {
        return String::new();
    }
    let text = format!("{scale:?}");
    let text = text.strip_suffix(".0").unwrap_or(&text);
    format!("_scale{}", text.replace('.', "p").replace('-', "m"))
}

/// Returns `scale·log2(e)`, for softmax with base-2 exponentials.
pub(super) fn scale_log2(scale: f32) -> f32 {
    (f64::from(scale) * std::f64::consts::LOG2_E) as f32
}
