//! Checks of the pooling that a checkpoint folder specifies.

use crate::{
    engine::EngineError,
    graph::{Graph, NodeId, Op},
    model::{EMBEDDING, Module, computed},
    ops::PoolWeights,
    text::Folder,
};

/// Warns if the model computes sentence embeddings and the folder does not specify their pooling.
///
/// # Errors
/// Returns an error if sentence embeddings are requested, but the folder's modules compute a different output, such as sparse vectors or the
/// score of a pair.
pub(super) fn check_pooling(
    folder: &Folder,
    modules: &[Module],
    graph: &Graph,
) -> Result<(), EngineError> {
    let name = folder.root().display();
    let mut outputs = graph.outputs().iter();
    let Some(&(_, id)) = outputs.find(|(name, _)| name == EMBEDDING) else {
        return Ok(());
    };
    if let Some(computed) = computed(modules).filter(|output| *output != EMBEDDING) {
        return Err(EngineError::OtherOutput {
            folder: name.to_string(),
            computed,
            asked: EMBEDDING,
        });
    }
    if !folder.root_files().has("modules.json") {
        warn_of_pooling(folder, graph, id);
    }
    Ok(())
}

/// Warns that the folder has no modules.json. The warning says how the sentence embedding, which node `id` computes, is pooled.
fn warn_of_pooling(folder: &Folder, graph: &Graph, mut id: NodeId) {
    let name = folder.root().display();
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
        // Any other operator is part of the trained model, so there is no assumed pooling to warn of.
        _ => return,
    };
    tracing::warn!(
        "`{name}` has neither modules.json nor 1_Pooling/config.json, which define the pooling; the embedding of a text is {pooled}{normalized}"
    );
}
