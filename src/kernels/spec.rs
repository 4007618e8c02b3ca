use serde::{Deserialize, Serialize};

use super::{attention::*, elementwise::*, embedding::*, gemm::*, layernorm::*, pooling::*};

/// Any kernel that a program may launch, as plain data that an artifact can store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum KernelSpec {
    Gemm(Gemm),
    AddBias(AddBias),
    Add(Add),
    Activate(Activate),
    Scale(Scale),
    SliceColumns(SliceColumns),
    SplitHeads(SplitHeads),
    MergeHeads(MergeHeads),
    LayerNorm(LayerNorm),
    BiasResidualLayerNorm(BiasResidualLayerNorm),
    Embedding(Embedding),
    EmbeddingLayerNorm(EmbeddingLayerNorm),
    FirstToken(FirstToken),
    MeanPool(MeanPool),
    L2Normalize(L2Normalize),
    MeanPoolNormalize(MeanPoolNormalize),
    AttentionScores(AttentionScores),
    AttentionSoftmax(AttentionSoftmax),
    AttentionContext(AttentionContext),
    MhaShort(MhaShort),
    MhaOnline(MhaOnline),
}
