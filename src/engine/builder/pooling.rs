//! The pooling that is assumed where a folder does not say it.

use crate::{
    engine::folder::Folder,
    graph::{Graph, Op},
    model::EMBEDDING,
};

/// Warns of sentence embeddings whose pooling the folder does not say.
pub(super) fn warn_of_pooling(folder: &Folder, graph: &Graph) {
    let name = folder.root().display();
    if folder.root().join("modules.json").exists() {
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
        Op::FirstToken => "its first token",
        Op::LastToken => "its last token",
        // What the model was trained to compute.
        _ => return,
    };
    tracing::warn!(
        "`{name}` has neither modules.json nor 1_Pooling/config.json, which say how a text becomes an embedding; it is {pooled}{normalized}"
    );
}
