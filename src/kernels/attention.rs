//! Attention over packed sequences:
//!
//! - unfused kernels: scores, softmax, context
//! - fused kernels: for short sequences, for any length (online softmax), for few tokens (split keys), and for Hopper (WGMMA)
//! - for long sequences: two grouped GEMMs, with the softmax split between them
//! - kernels with a KV cache: for any batch, for decode steps, and for prefill
//!
//! A token attends only to the tokens of its own sequence, so scores are ragged. For sequence `b`
//! with length `n`, the score of head `h`, query `i` and key `j` is stored at `h·pairs +
//! pair_offsets[b] + i·n + j`, with `pairs = Σ n²` over all sequences.

mod cached;
mod common;
mod decode;
mod decode_append;
mod e4m3;
mod fused;
mod long;
mod operands;
mod params;
mod position_bias;
mod prefill;
mod relative_scores;
mod sinks;
mod softmax;
mod softmax_by_distance;
mod split_keys;
#[cfg(test)]
mod tests;
mod tiling;
mod unfused;
mod view;
mod wgmma;

pub use cached::{Keys, MhaCached};
pub use decode::{DecodeCta, DecodeCtas, MhaDecode};
pub use decode_append::MhaDecodeAppend;
pub use e4m3::{FusedMha, MhaToE4m3};
pub use fused::{MhaOnline, MhaShort};
pub use long::{
    Layout, MhaLongContext, MhaLongReduce, MhaLongScores, partials_shape, scores_shape,
    statistics_shape,
};
pub use prefill::MhaPrefill;
pub use relative_scores::RelativeScores;
pub use softmax::{AttentionSoftmax, SoftmaxForm, SoftmaxMask};
pub use softmax_by_distance::SoftmaxByDistance;
pub use split_keys::MhaSplitKeys;
pub use unfused::{AttentionContext, AttentionScores};
pub use wgmma::{MhaTile, MhaWgmma};

use super::KernelSpec;
use crate::{
    ops::{AttentionProblem, DistanceTooLarge, HeadView, default_scale},
    tensor::DType,
};

/// The reason why an attention kernel cannot be generated.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AttentionError {
    #[error(
        "the head size is {head}; fused attention takes multiples of 8 up to 256, use the unfused kernels"
    )]
    HeadSize { head: u32 },
    #[error(
        "{heads} query heads do not divide into groups for {kv_heads} key heads; expected a divisor of {heads}"
    )]
    Groups { heads: u32, kv_heads: u32 },
    #[error(
        "the {kernel} kernel requires full attention without causal mask, window, bias or cap, and a key head for each query head; use the online kernel"
    )]
    Full { kernel: &'static str },
    #[error("the {kernel} kernel takes attention without sinks; use the online kernel")]
    Sinks { kernel: &'static str },
    #[error(transparent)]
    Distance(#[from] DistanceTooLarge),
    #[error(
        "attention to a source supports neither window nor bias, because its positions have no distance to a query"
    )]
    DistanceToSource,
    #[error(
        "the scale is {scale}; fused attention takes finite scales above 0, use the unfused kernels"
    )]
    Scale { scale: f32 },
    #[error(
        "`{operand}` starts at column {offset} of rows of {stride}; fused attention reads 16 bytes at a time and takes multiples of 8 only"
    )]
    Alignment {
        operand: &'static str,
        offset: u32,
        stride: u32,
    },
    #[error("`{operand}` is {width} columns from column {offset}, but a row has {stride}")]
    Columns {
        operand: &'static str,
        offset: u32,
        stride: u32,
        width: u32,
    },
    #[error(
        "the longest sequence of a short kernel is {max_len}; with head size {head} in {dtype} it is from 1 to {limit}, use the online kernel"
    )]
    MaxLen {
        max_len: u32,
        head: u32,
        dtype: DType,
        limit: u32,
    },
    #[error(
        "the head size is {head}; warpgroup attention takes 32, 64, 96, 128 and 256, use the online kernel"
    )]
    WarpgroupHead { head: u32 },
    #[error(
        "warpgroup attention does not support causal attention with biases or caps; use the online kernel"
    )]
    WarpgroupMask,
    #[error("warpgroup attention over {dtype} elements; expected f16 or bf16")]
    WarpgroupStorage { dtype: DType },
    #[error(
        "`{operand}` is head-major; warpgroup attention reads columns of rows of tokens, use the online kernel"
    )]
    WarpgroupView { operand: &'static str },
    #[error(
        "the heads of `{operand}` begin at column {offset} of rows of {stride}; warpgroup attention takes multiples of {columns}, use the online kernel"
    )]
    WarpgroupColumns {
        operand: &'static str,
        offset: u32,
        stride: u32,
        columns: u32,
    },
    #[error("{} is not a tile of warpgroup attention with head size {head}", .tile.name())]
    WarpgroupTile { tile: MhaTile, head: u32 },
    #[error(
        "warpgroup attention needs compute capability 9.0, which not all targets have; use the online kernel"
    )]
    WarpgroupInstructions,
    #[error(
        "the head size is {head}; attention by split keys takes 32 and 64, use the online kernel"
    )]
    SplitHead { head: u32 },
    #[error("attention by split keys over {dtype} elements; expected f16 or bf16")]
    SplitStorage { dtype: DType },
    #[error(
        "`{operand}` is head-major; attention by split keys reads columns of rows of tokens, use the online kernel"
    )]
    SplitView { operand: &'static str },
    #[error(
        "the head size is {head}; decode attention takes multiples of 8 from 32 to 256, use the plain kernel for a cache"
    )]
    DecodeHead { head: u32 },
    #[error(
        "`q` is head-major; decode attention reads columns of rows of tokens, use the plain kernel for a cache"
    )]
    DecodeView,
    #[error(
        "decode attention with {dtype} queries and a KV cache in e4m3; expected f16 or bf16, use the plain kernel for a cache"
    )]
    DecodeE4m3 { dtype: DType },
    #[error(
        "decode attention splits keys over {splits} CTAs; expected 1 to {max_splits} for this size of CTA"
    )]
    DecodeSplits { splits: u32, max_splits: u32 },
    #[error("attention to a source does not append to its cache")]
    AppendToSource,
    #[error("decode attention cannot append to the cache: {0}")]
    Append(String),
    #[error(
        "prefill attention over {dtype} elements; expected f16 or bf16, use the plain kernel for a cache"
    )]
    PrefillStorage { dtype: DType },
    #[error(
        "a softmax over {dtype} cannot be {form:?}; expected f32, f16 or bf16, a power of two from 4 to 1024 lanes, 1, 2 or 4 rows together, and at most 64 elements per lane"
    )]
    SoftmaxForm { form: SoftmaxForm, dtype: DType },
}

/// Returns the name of a storage type in `partials/types.cu`.
fn storage(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        other => other.name(),
    }
}

/// Instances of every attention kernel, for tests that compile or run kernels. The instances cover all tilings, views and storage types.
pub fn representative() -> Vec<KernelSpec> {
    let mut all: Vec<KernelSpec> = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        // Heads of BERT-base and MiniLM, five heads of 64, and sizes that exercise padding and larger tiles.
        for (heads, head) in [
            (12, 64),
            (12, 32),
            (5, 64),
            (2, 80),
            (2, 128),
            (1, 8),
            (1, 72),
            (3, 256),
        ] {
            let width = heads * head;
            let column = |i| HeadView::TokenMajor {
                offset: i * width,
                stride: 3 * width,
            };
            let scale = default_scale(head);
            let of = AttentionProblem::full(heads, head, scale, [0, 1, 2].map(column));
            let longest = MhaShort::max_len_for(head, dtype);
            let lens = [32, 64, 128].into_iter().filter(|&len| len < longest);
            for max_len in lens.chain([longest]) {
                all.push(KernelSpec::from(MhaShort { of, max_len, dtype }));
            }
            all.push(KernelSpec::from(MhaOnline { of, dtype }));
        }
        for (heads, head) in [(12, 64), (12, 32), (2, 80), (2, 128), (1, 72), (3, 256)] {
            let column = |i| HeadView::TokenMajor {
                offset: i * heads * head,
                stride: 3 * heads * head,
            };
            all.extend(long(heads, head, [0, 1, 2].map(column), dtype));
        }
        let (heads, head) = (4, 40);
        let plain = HeadView::TokenMajor {
            offset: 0,
            stride: heads * head,
        };
        for view in [HeadView::HeadMajor, plain] {
            let of = AttentionProblem::full(heads, head, 1.0, [view; 3]);
            let max_len = 96;
            all.push(KernelSpec::from(MhaShort { of, max_len, dtype }));
            all.push(KernelSpec::from(MhaOnline { of, dtype }));
            all.extend(long(heads, head, [view; 3], dtype));
        }
        // Causal attention with grouped-query heads, in every tiling.
        for (heads, kv_heads, head) in [(6, 2, 64), (4, 4, 32), (8, 1, 128), (2, 1, 256)] {
            let column = |first| HeadView::TokenMajor {
                offset: first * head,
                stride: (heads + 2 * kv_heads) * head,
            };
            let views = [0, heads, heads + kv_heads].map(column);
            let of = AttentionProblem {
                kv_heads,
                causal: true,
                ..AttentionProblem::full(heads, head, default_scale(head), views)
            };
            all.push(KernelSpec::from(MhaOnline { of, dtype }));
        }
        // Full and causal attention with position biases, windows and caps, in every tiling.
        for (heads, head) in [(12, 64), (3, 256), (2, 80)] {
            let column = |i| HeadView::TokenMajor {
                offset: i * heads * head,
                stride: 3 * heads * head,
            };
            let full =
                AttentionProblem::full(heads, head, default_scale(head), [0, 1, 2].map(column));
            for (causal, by) in position_bias::examples() {
                // Kernels for other head sizes differ from those for heads of 64 only in their tiles, so a few of the examples are
                // sufficient.
                if head != 64 && by.window.is_some() != by.bias.is_some() {
                    continue;
                }
                let of = AttentionProblem { causal, by, ..full };
                all.push(KernelSpec::from(MhaOnline { of, dtype }));
            }
        }
        all.extend(softmax_by_distance::representative(dtype));
        all.extend(relative_scores::representative(dtype));
        all.extend(unfused::representative(dtype));
        all.extend(softmax::representative(dtype));
    }
    for heads in [12, 3, 1] {
        all.push(KernelSpec::from(MhaLongReduce { heads }));
    }
    all.extend(cached::representative());
    all.extend(decode::representative());
    all.extend(decode_append::representative());
    all.extend(prefill::representative());
    all.extend(split_keys::representative());
    all.extend(wgmma::representative());
    all.extend(e4m3::representative(&all));
    all.extend(sinks::representative());
    all
}

/// Returns the two grouped GEMMs of attention for long sequences.
fn long(heads: u32, head: u32, [q, k, v]: [HeadView; 3], dtype: DType) -> [KernelSpec; 2] {
    let scores = MhaLongScores {
        heads,
        head,
        scale: default_scale(head),
        q,
        k,
        dtype,
    };
    let context = MhaLongContext {
        heads,
        head,
        v,
        dtype,
    };
    [scores.into(), context.into()]
}
