//! Conditions and patterns shared by several passes.

use crate::graph::{Graph, NodeId, Op};

/// Returns the reason why the value `id` cannot be merged into `reader`, if there is one.
pub(super) fn kept(graph: &Graph, id: NodeId, reader: NodeId) -> Option<String> {
    if let Some(condition) = stored(graph, id) {
        return Some(condition);
    }
    let others = names(
        graph,
        graph.consumers(id).into_iter().filter(|&c| c != reader),
    );
    (!others.is_empty()).then(|| format!("{} is also read by {others}", quoted(graph, id)))
}

/// Returns the reason why the value `id` must be stored even if a single node reads it. The only such reason is that the value is an
/// output. Returns `None` if it is not an output.
pub(super) fn stored(graph: &Graph, id: NodeId) -> Option<String> {
    let (output, _) = graph.outputs().iter().find(|&&(_, o)| o == id)?;
    let name = &graph.node(id).name;
    Some(match output == name {
        true => format!("`{name}` is an output, so it must be stored"),
        false => format!("`{name}` is the output `{output}`, so it must be stored"),
    })
}

/// Returns the first reason that [`kept`] gives for one of `pairs`. A pair is a value and its reader.
pub(super) fn any_kept<const N: usize>(
    graph: &Graph,
    pairs: [(NodeId, NodeId); N],
) -> Option<String> {
    pairs
        .into_iter()
        .find_map(|(id, reader)| kept(graph, id, reader))
}

/// Returns the value's name in backticks.
pub(super) fn quoted(graph: &Graph, id: NodeId) -> String {
    format!("`{}`", graph.node(id).name)
}

/// Returns the names in backticks, separated by commas.
pub(super) fn names(graph: &Graph, ids: impl IntoIterator<Item = NodeId>) -> String {
    ids.into_iter()
        .map(|id| quoted(graph, id))
        .collect::<Vec<_>>()
        .join(", ")
}

/// Returns the operand in the first slot.
pub(super) fn first(graph: &Graph, id: NodeId) -> Option<NodeId> {
    graph.operands(id).first().copied()
}

/// Returns the operands of a node with exactly `N` operands; otherwise `None`.
pub(super) fn operands<const N: usize>(graph: &Graph, id: NodeId) -> Option<[NodeId; N]> {
    graph.operands(id).try_into().ok()
}

/// Returns the operand of a scale; `None` for other operators.
pub(super) fn scaled(graph: &Graph, id: NodeId) -> Option<NodeId> {
    match graph.op(id) {
        Op::Scale { .. } => first(graph, id),
        _ => None,
    }
}
