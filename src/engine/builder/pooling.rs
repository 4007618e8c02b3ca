//! Warnings about pooling that a checkpoint folder does not specify.

use crate::{
    graph::{Graph, Op},
    model::EMBEDDING,
    ops::PoolWeights,
    text::Folder,
};

/// Warns if the model computes sentence embeddings and the folder does not specify their pooling.
pub(super) fn warn_of_pooling(folder: &Folder, graph: &Graph) {
    let name = folder.root().display();
    if folder.root_files().has("modules.json") {
        return;
    }
    let mut outputs = graph.outputs().iter();
    let Some(&(_, mut id)) = outputs.find(|(name, _)| name == EMBEDDING) else {
        return;
    };
    if folder.modules().is_some() {
        tracing::warn!(
            "`{name}` has no modules.json; sentence embeddings are pooled as 1_Pooling/config.json says, and normalized"
        );
        return;
    }
    let mut normalized = "";
    while let (Op::L2Normalize { .. }, &[x]) = (graph.op(id), graph.operands(id).as_slice()) {
        (id, normalized) = (x, ", normalized");
    }
    let pooled = match graph.op(id) {
        Op::MeanPool => "the mean of its tokens",
        Op::MaxPool => "the maximum of its tokens",
        Op::WeightedPool(PoolWeights::Position) => "the mean of its tokens, weighted by position",
        Op::WeightedPool(PoolWeights::RootLength) => {
            "the sum of its tokens, divided by the square root of their number"
        }
        Op::FirstToken => "its first token",
        Op::LastToken => "its last token",
        // Other operators are part of the trained model, so the pooling is known.
        _ => return,
    };
    tracing::warn!(
        "`{name}` has neither modules.json nor 1_Pooling/config.json, which say how a text becomes an embedding; it is {pooled}{normalized}"
    );
}
