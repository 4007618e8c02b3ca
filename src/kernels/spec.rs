use serde::{Deserialize, Serialize};

use crate::tensor::DType;

use super::{
    Kernel, attention, attention::*, beam_search, beam_search::*, cache, cache::*, decoding,
    decoding::*, draw, draw::*, elementwise, elementwise::*, embedding, embedding::*, gemm,
    gemm::*, layernorm, layernorm::*, log_probability, log_probability::*, pack::*, pooling,
    pooling::*, prepare_attention, prepare_attention::*, rms_norm, rms_norm::*, rotary, rotary::*,
    upload::*,
};

/// Lists all kernels once. Every function over all kernels is derived from this list.
macro_rules! kernels {
    ($($name:ident),* $(,)?) => {
        /// Any kernel that a program may launch, as plain data that an artifact can store.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        pub enum KernelSpec {
            $($name($name),)*
        }

        impl KernelSpec {
            /// Returns the kernel's description.
            pub fn as_kernel(&self) -> &dyn Kernel {
                match self {
                    $(Self::$name(kernel) => kernel,)*
                }
            }
        }

        $(impl From<$name> for KernelSpec {
            fn from(kernel: $name) -> Self {
                Self::$name(kernel)
            }
        })*
    };
}

kernels! {
    Gemm, GemmWgmma, GemmSplitK, GemmResidualNorm, GemmResidualRowStats,
    DeferredLayerNormGemm, GemmPrepareAttention, GemmStream, AddBias, Combine, Activate, Scale, SliceColumns, SplitHeads,
    MergeHeads, LayerNorm, BiasResidualLayerNorm, Embedding, EmbeddingLayerNorm, TokenOfSequence, MeanPool, L2Normalize,
    MeanPoolNormalize, MaxPool, Concat, AttentionScores, AttentionSoftmax, SoftmaxByDistance, AttentionContext, MhaShort, MhaOnline,
    MhaSplitKeys, MhaWgmma, MhaLongScores, MhaLongReduce, MhaLongContext, MhaCached, MhaDecode, MhaDecodeAppend, MhaPrefill,
    AppendCache,
    PrepareAttention, Gate, Draw, LogProbability, RmsNorm, Rotary, PackScan, PackTokens, Upload, Scatter, ChooseToken, Candidates, BeamStep, Advance,
    RelativeScores,
}

impl KernelSpec {
    /// Number of tensors that the kernel writes. In every kernel that a program may launch, they are the last parameters
    /// before the counts.
    pub fn n_writes(&self) -> usize {
        match self {
            Self::MhaLongScores(_) => 2,
            Self::PackTokens(_) => 3,
            Self::PackScan(_) => 2,
            Self::ChooseToken(_) => 6,
            Self::Candidates(_) => 7,
            Self::BeamStep(_) => 10,
            Self::Advance(_) => 10,
            Self::GemmResidualNorm(k) if k.keeps_sum => 2,
            Self::GemmResidualRowStats(_) | Self::DeferredLayerNormGemm(_) => 2,
            Self::PrepareAttention(_) | Self::MhaDecodeAppend(_) => 2,
            Self::GemmPrepareAttention(_) => 3,
            Self::GemmStream(k) => k.n_writes(),
            _ => 1,
        }
    }

    /// Launches that precede a program's: the upload of the batch's data, and the two that pack a padded batch.
    pub fn runtime() -> [KernelSpec; 3] {
        [Upload.into(), PackScan.into(), PackTokens.into()]
    }

    /// Launches that follow a decode step whose program writes logits `[batch, vocabulary]`: token selection, beam candidates,
    /// the beam search step, and the next step's batch data.
    pub fn decoding(vocabulary: u32, dtype: DType) -> [KernelSpec; 5] {
        [
            ChooseToken { vocabulary, dtype }.into(),
            Candidates { vocabulary, dtype }.into(),
            BeamStep.into(),
            Advance.into(),
            Scatter.into(),
        ]
    }
}

/// Instances of every kernel in every storage type, at odd and at common sizes.
pub fn representative() -> Vec<KernelSpec> {
    [
        gemm::representative(),
        elementwise::representative(),
        layernorm::representative(),
        embedding::representative(),
        pooling::representative(),
        log_probability::representative(),
        rms_norm::representative(),
        rotary::representative(),
        attention::representative(),
        cache::representative(),
        decoding::representative(),
        draw::representative(),
        beam_search::representative(),
        prepare_attention::representative(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
