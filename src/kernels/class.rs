//! Classes of kernels for time breakdowns, and the work that kernels compute.

use std::fmt;

use super::{
    KernelSpec,
    attention::{MhaDecode, MhaDecodeAppend, MhaPrefill},
};
use crate::ops::AttentionProblem;
use crate::tensor::{Size, Symbol};

/// Classes of kernels by which ByteTransformer's figure 3 breaks down a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Products of tokens and a weight, including their epilogues.
    Gemm,
    /// Matrix products of attention (scores and context), or fused attention including softmax.
    Attention,
    /// Softmax as a separate kernel.
    Softmax,
    /// LayerNorm, including everything fused into its kernel.
    LayerNorm,
    /// Copies and pointwise kernels: lookups, sums, biases, activations, transposes, pooling.
    Other,
}

impl Class {
    pub const ALL: [Class; 5] = [
        Class::Gemm,
        Class::Attention,
        Class::Softmax,
        Class::LayerNorm,
        Class::Other,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Class::Gemm => "GEMM",
            Class::Attention => "attention",
            Class::Softmax => "softmax",
            Class::LayerNorm => "LayerNorm",
            Class::Other => "other",
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl KernelSpec {
    /// Class that the kernel's time is attributed to.
    pub fn class(&self) -> Class {
        match self {
            Self::Gemm(_)
            | Self::GemmWgmma(_)
            | Self::GemmSplitK(_)
            | Self::GemmResidualNorm(_)
            | Self::GemmResidualRowStats(_)
            | Self::DeferredLayerNormGemm(_)
            | Self::GemmPrepareAttention(_)
            | Self::GemmStream(_) => Class::Gemm,
            Self::AttentionScores(_)
            | Self::RelativeScores(_)
            | Self::AttentionContext(_)
            | Self::MhaShort(_)
            | Self::MhaOnline(_)
            | Self::MhaSplitKeys(_)
            | Self::MhaWgmma(_)
            | Self::MhaCached(_)
            | Self::MhaDecode(_)
            | Self::MhaDecodeAppend(_)
            | Self::MhaPrefill(_)
            | Self::MhaLongScores(_)
            | Self::MhaLongReduce(_)
            | Self::MhaLongContext(_) => Class::Attention,
            Self::AttentionSoftmax(_) | Self::SoftmaxByDistance(_) => Class::Softmax,
            Self::RmsNorm(_)
            | Self::LayerNorm(_)
            | Self::BiasResidualLayerNorm(_)
            | Self::EmbeddingLayerNorm(_) => Class::LayerNorm,
            Self::AddBias(_)
            | Self::Combine(_)
            | Self::Rotary(_)
            | Self::AppendCache(_)
            | Self::PrepareAttention(_)
            | Self::Gate(_)
            | Self::Activate(_)
            | Self::Scale(_)
            | Self::SliceColumns(_)
            | Self::SplitHeads(_)
            | Self::MergeHeads(_)
            | Self::Embedding(_)
            | Self::LogProbability(_)
            | Self::Draw(_)
            | Self::Concat(_)
            | Self::TokenOfSequence(_)
            | Self::MeanPool(_)
            | Self::MaxPool(_)
            | Self::L2Normalize(_)
            | Self::MeanPoolNormalize(_)
            | Self::Upload(_)
            | Self::Scatter(_)
            | Self::PackScan(_)
            | Self::PackTokens(_)
            | Self::ChooseToken(_)
            | Self::Candidates(_)
            | Self::BeamStep(_)
            | Self::Advance(_) => Class::Other,
        }
    }

    /// Outputs and inputs of the linear layer that the kernel computes for each row; `None` if it does not include one.
    pub fn weight(&self) -> Option<[u32; 2]> {
        match self {
            Self::Gemm(k) => Some([k.n, k.k]),
            Self::GemmWgmma(k) => Some([k.weight_rows(), k.k]),
            Self::GemmResidualNorm(k) => Some([k.n, k.k]),
            Self::GemmResidualRowStats(k) => Some([k.n, k.k]),
            Self::DeferredLayerNormGemm(k) => Some([k.n, k.k]),
            Self::GemmPrepareAttention(k) => Some([k.prepare.row, k.k]),
            Self::GemmStream(k) => Some([k.plain().n, k.k]),
            Self::GemmSplitK(k) => Some([k.n, k.k]),
            _ => None,
        }
    }

    /// Floating-point operations of the matrix products in one launch, two per multiply-add, as in ByteTransformer's
    /// table II. 0 for memory-bound kernels.
    pub fn flop(&self) -> Size {
        let product = |a: u32, b: u32, symbol: Symbol| {
            let each = 2u64.saturating_mul(u64::from(a).saturating_mul(b.into()));
            &Size::constant(each) * &symbol.into()
        };
        let attention = |heads, head| product(heads, head, Symbol::Pairs);
        let fused = |of: &AttentionProblem| {
            let one = attention(of.heads, of.head);
            &one + &one
        };
        if let Some([n, k]) = self.weight() {
            return product(n, k, Symbol::Rows);
        }
        match self {
            Self::AttentionScores(k) => attention(k.heads, k.head),
            Self::RelativeScores(k) => attention(k.heads, k.head),
            Self::AttentionContext(k) => attention(k.heads, k.head),
            Self::MhaLongScores(k) => attention(k.heads, k.head),
            Self::MhaLongContext(k) => attention(k.heads, k.head),
            Self::MhaShort(k) => fused(&k.of),
            Self::MhaOnline(k) => fused(&k.of),
            Self::MhaCached(k)
            | Self::MhaDecode(MhaDecode { plain: k, .. })
            | Self::MhaDecodeAppend(MhaDecodeAppend {
                decode: MhaDecode { plain: k, .. },
                ..
            })
            | Self::MhaPrefill(MhaPrefill { plain: k, .. }) => {
                let one = attention(k.heads, k.head);
                &one + &one
            }
            Self::MhaSplitKeys(k) => fused(&k.plain.of),
            Self::MhaWgmma(k) => fused(&k.of),
            _ => Size::constant(0),
        }
    }
}
