//! Padded execution, for measuring the benefit of packing.

use std::collections::HashSet;

use super::LowerError;
use crate::graph::{Graph, NodeId, Op};

/// Layout of sequences of different lengths in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Padding {
    /// Sequences are packed, and nothing is computed for padding (ByteTransformer III.D).
    #[default]
    Removed,
    /// Sequences are packed. A sequence may end with tokens that no token attends to (`Batch::with_attended`), and softmax masks these
    /// tokens.
    Expanded,
    /// Every sequence is padded to the longest, as in frameworks without packing. All launches
    /// include the padding, and softmax masks padding keys. For measurements only.
    Kept,
}

/// Checks that the outputs of a graph are correct for padded sequences: no token of a sequence may
/// depend on padding.
pub(super) fn check_kept(graph: &Graph) -> Result<(), LowerError> {
    for (output, id) in graph.outputs() {
        let mut seen = HashSet::new();
        let mut next = vec![*id];
        while let Some(id) = next.pop() {
            if seen.insert(id) {
                check_node(graph, id, output)?;
                next.extend(graph.operands(id));
            }
        }
    }
    Ok(())
}

/// Checks that tokens to which no token attends affect only their own rows.
pub(super) fn check_expanded(graph: &Graph) -> Result<(), LowerError> {
    check_kept(graph)?;
    for id in graph.topological() {
        if let Op::Softmax { causal: true, .. } = graph.op(id) {
            let node = graph.node(id).name.clone();
            return Err(LowerError::CausalExpansion { node });
        }
    }
    Ok(())
}

fn check_node(graph: &Graph, id: NodeId, output: &str) -> Result<(), LowerError> {
    let node = || graph.node(id).name.clone();
    match graph.op(id) {
        Op::Attention(_) => Err(LowerError::UnmaskedAttention { node: node() }),
        Op::MeanPool | Op::MeanPoolNormalize { .. } => Err(LowerError::MeanOfPadding {
            output: output.to_owned(),
            node: node(),
        }),
        Op::MaxPool => Err(LowerError::ReadsPadding {
            output: output.to_owned(),
            node: node(),
            reads: "takes the maximum over tokens",
        }),
        Op::WeightedPool(_) => Err(LowerError::ReadsPadding {
            output: output.to_owned(),
            node: node(),
            reads: "takes a weighted sum over tokens",
        }),
        Op::AfterPrompt => Err(LowerError::ReadsPadding {
            output: output.to_owned(),
            node: node(),
            reads: "reads the tokens after prompts",
        }),
        Op::LastToken => Err(LowerError::ReadsPadding {
            output: output.to_owned(),
            node: node(),
            reads: "reads last tokens",
        }),
        // The first token is never padding.
        Op::FirstToken | Op::Input(_) | Op::Weight(_) | Op::Quantize(_) => Ok(()),
        Op::Embedding { .. } | Op::EmbeddingLayerNorm { .. } => Ok(()),
        Op::SplitHeads { .. } | Op::MergeHeads => Ok(()),
        // Padded batches are not appended to caches, because no later batch continues their sequences.
        Op::Cache { .. } | Op::CrossCache { .. } => Ok(()),
        // The softmax is masked, so that padding keys have no weight in the context.
        Op::Scores { .. } | Op::RelativeScores { .. } | Op::Softmax { .. } | Op::Context { .. } => {
            Ok(())
        }
        // Each row depends only on the rows of the operands with the same index.
        _ if keeps_rows(graph, id) => Ok(()),
        _ => Err(LowerError::ReadsPadding {
            output: output.to_owned(),
            node: node(),
            reads: "reads other tokens",
        }),
    }
}

/// Returns whether a value and its first operand have the same leading dimension.
fn keeps_rows(graph: &Graph, id: NodeId) -> bool {
    let rows = |id: NodeId| graph.shape(id).0.first();
    let operands = graph.operands(id);
    operands.first().is_some_and(|&x| rows(x) == rows(id))
}
