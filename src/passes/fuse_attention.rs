use super::{
    Pass, Report,
    matching::{any_kept, first, operands, quoted},
    report::Group,
};
use crate::{
    graph::{Graph, GraphError, NodeId, Op},
    kernels::attention::HeadView,
};

/// The kernels load heads in vectors of eight elements, and keep a row of the result in registers.
const HEAD_STEP: u32 = 8;
const MAX_HEAD: u32 = 256;

/// `context(softmax(s · scores(q, k)), v) = attention{s}(q, k, v)`: the scores, which grow with
/// the square of the length, never reach device memory (ByteTransformer III.E). The result is
/// `[tokens, heads·head]`; a head-major context takes the `merge_heads` that follows it along.
pub(super) struct FuseAttention;

impl Pass for FuseAttention {
    fn name(&self) -> &'static str {
        "fuse_attention"
    }

    fn equation(&self) -> &'static str {
        "context(softmax(s·scores(q, k)), v) = attention{s}(q, k, v)"
    }

    fn run(&self, graph: &mut Graph, report: &mut Report) -> Result<(), GraphError> {
        for id in graph.topological() {
            if graph.contains(id) && matches!(graph.op(id), Op::Context { .. }) {
                match find(graph, id) {
                    None => {}
                    Some(Err(condition)) => {
                        report.refuse(self.name(), graph.node(id).name.clone(), condition);
                    }
                    Some(Ok(found)) => {
                        let group = Group::of(graph, found.nodes);
                        graph.rewrite(found.anchor, found.op, &found.operands)?;
                        group.fused(self.name(), graph, found.anchor, &[], report);
                    }
                }
            }
        }
        Ok(())
    }
}

struct Match {
    nodes: Vec<NodeId>,
    anchor: NodeId,
    op: Op,
    operands: [NodeId; 3],
}

/// The attention that ends in `context`, or why it cannot be one kernel. `None` where the
/// probabilities come from no softmax of scores.
fn find(graph: &Graph, context: NodeId) -> Option<Result<Match, String>> {
    let Op::Context {
        heads,
        head,
        v: v_view,
        out,
    } = *graph.op(context)
    else {
        return None;
    };
    let [softmax, v] = operands(graph, context)?;
    let Op::Softmax { scale } = *graph.op(softmax) else {
        return None;
    };
    let scores = first(graph, softmax)?;
    let Op::Scores {
        head: scores_head,
        q: q_view,
        k: k_view,
        ..
    } = *graph.op(scores)
    else {
        let between = graph.op(scores);
        return Some(Err(format!(
            "{} ({between}) stands between the scores and the softmax",
            quoted(graph, scores)
        )));
    };
    let [q, k] = operands(graph, scores)?;
    if let Some(condition) = any_kept(graph, [(softmax, context), (scores, softmax)]) {
        return Some(Err(condition));
    }
    if head != scores_head {
        return Some(Err(format!(
            "the heads of q and k have {scores_head} elements, those of v {head}; the kernel takes one size"
        )));
    }
    if !head.is_multiple_of(HEAD_STEP) || head > MAX_HEAD {
        return Some(Err(format!(
            "a head has {head} elements; the kernel takes multiples of {HEAD_STEP} up to {MAX_HEAD}"
        )));
    }
    for (id, view) in [(q, q_view), (k, k_view), (v, v_view)] {
        if let HeadView::TokenMajor { offset, stride } = view
            && !(offset.is_multiple_of(HEAD_STEP) && stride.is_multiple_of(HEAD_STEP))
        {
            return Some(Err(format!(
                "{} is read from column {offset} of {stride}; the kernel takes multiples of {HEAD_STEP}",
                quoted(graph, id)
            )));
        }
    }
    let mut nodes = vec![scores, softmax, context];
    let anchor = match out {
        HeadView::TokenMajor { .. } => context,
        HeadView::HeadMajor => match graph.sole_consumer(context) {
            Some(merge) if *graph.op(merge) == Op::MergeHeads => {
                nodes.push(merge);
                merge
            }
            _ => {
                return Some(Err(format!(
                    "{} is needed with its heads apart, and the kernel writes them side by side",
                    quoted(graph, context)
                )));
            }
        },
    };
    Some(Ok(Match {
        nodes,
        anchor,
        op: Op::Attention {
            heads,
            head,
            scale,
            q: q_view,
            k: k_view,
            v: v_view,
        },
        operands: [q, k, v],
    }))
}
