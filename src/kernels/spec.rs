use serde::{Deserialize, Serialize};

use crate::tensor::DType;

use super::{
    Kernel, attention, attention::*, beam_search, beam_search::*, cache, cache::*, decoding,
    decoding::*, draw, draw::*, e4m3, e4m3::*, elementwise, elementwise::*, embedding,
    embedding::*, gemm, gemm::*, layernorm, layernorm::*, log_probability, log_probability::*,
    max_sim, max_sim::*, pack::*, pooling, pooling::*, prepare_attention, prepare_attention::*,
    rms_norm, rms_norm::*, rotary, rotary::*, upload::*, weighted_pool, weighted_pool::*,
};

/// Lists all kernels. Every function over all kernels is derived from this list.
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
    RelativeScores, ToE4m3, NormToE4m3, MhaToE4m3, WeightedPool, SoftCap, MaxSim,
}

impl KernelSpec {
    /// Kernels that run before a program's kernels: the upload of the batch's data, and the two kernels that pack a padded batch.
    pub fn runtime() -> [KernelSpec; 3] {
        [Upload.into(), PackScan.into(), PackTokens.into()]
    }

    /// Kernels that run after a decode step whose program writes logits `[batch, vocabulary]`. They select tokens, find beam candidates,
    /// run the beam search step, and write the next step's batch data.
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
        max_sim::representative(),
        rms_norm::representative(),
        rotary::representative(),
        attention::representative(),
        cache::representative(),
        decoding::representative(),
        draw::representative(),
        e4m3::representative(),
        beam_search::representative(),
        prepare_attention::representative(),
        weighted_pool::representative(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{kernels::Role, tensor::Shape};

    #[test]
    fn written_tensors_are_the_last_parameters() {
        for kernel in representative().into_iter().chain(KernelSpec::runtime()) {
            let kernel = kernel.as_kernel();
            let params = kernel.params();
            let tensors = params.iter().filter(|p| !matches!(p.role, Role::Count(_)));
            let writes = tensors.map(|p| matches!(p.role, Role::Write { .. }));
            assert!(writes.is_sorted(), "{}", kernel.symbol());
        }
    }

    #[test]
    fn the_weight_of_a_linear_layer_is_an_operand_of_its_shape() {
        for kernel in representative() {
            let kernel = kernel.as_kernel();
            let params = kernel.params();
            let mut reads = params.iter().filter_map(|p| match &p.role {
                Role::Read { shape, .. } => Some(shape),
                Role::Write { .. } | Role::Count(_) => None,
            });
            let weight = kernel.weight_operand();
            assert_eq!(
                weight.is_some(),
                kernel.weight().is_some(),
                "{}",
                kernel.symbol()
            );
            if let (Some(at), Some([n, k])) = (weight, kernel.weight()) {
                let shape = reads.nth(at).expect("the index is in range");
                assert_eq!(
                    *shape,
                    Shape::fixed(&[n.into(), k.into()]),
                    "{}",
                    kernel.symbol()
                );
            }
        }
    }
}
