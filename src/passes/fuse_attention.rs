use super::{
    Pass, Report,
    matching::{any_kept, first, operands, quoted},
    report::Group,
};
use crate::{
    graph::{Graph, GraphError, HEAD_STEP, MAX_HEAD, NodeId, Op},
    ops::{AttentionProblem, HeadView},
};

/// `context(softmax(s · scores(q, k)), v) = attention{s}(q, k, v)`: the scores, whose size is quadratic in the sequence length, never reach
/// device memory (ByteTransformer III.E). The result is `[tokens, heads·head]`. If the context is head-major, the following `merge_heads`
/// is also fused.
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
    operands: Vec<NodeId>,
}

/// Returns the attention that ends in `context`, or the reason why it cannot be fused. Returns `None` if the context does not read a
/// softmax of scores.
fn find(graph: &Graph, context: NodeId) -> Option<Result<Match, String>> {
    let Op::Context {
        heads,
        kv_heads,
        head,
        v: v_view,
        out,
    } = *graph.op(context)
    else {
        return None;
    };
    let [softmax, v] = operands(graph, context)?;
    let Op::Softmax { scale, causal, by } = *graph.op(softmax) else {
        return None;
    };
    let scores = first(graph, softmax)?;
    let Op::Scores {
        kv_heads: scores_kv_heads,
        head: scores_head,
        q: q_view,
        k: k_view,
        ..
    } = *graph.op(scores)
    else {
        let between = graph.op(scores);
        return Some(Err(format!(
            "{} ({between}) is between the scores and the softmax",
            quoted(graph, scores)
        )));
    };
    let [q, k] = operands(graph, scores)?;
    if let Some(condition) = any_kept(graph, [(softmax, context), (scores, softmax)]) {
        return Some(Err(condition));
    }
    if kv_heads != scores_kv_heads {
        return Some(Err(format!(
            "k has {scores_kv_heads} heads and v {kv_heads}; the kernel takes one number"
        )));
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
                    "{} is needed with separate heads, but the kernel writes all heads of a token in one row",
                    quoted(graph, context)
                )));
            }
        },
    };
    Some(Ok(Match {
        nodes,
        anchor,
        op: Op::Attention(AttentionProblem {
            heads,
            kv_heads,
            head,
            scale,
            causal,
            by,
            q: q_view,
            k: k_view,
            v: v_view,
        }),
        // The bias and the sinks of the softmax become operands of the attention.
        operands: [q, k, v]
            .into_iter()
            .chain(graph.operands(softmax).into_iter().skip(1))
            .collect(),
    }))
}

#[cfg(test)]
mod tests {
    use super::super::{
        Options, optimize,
        tests::{alone, models::Builder, refusals, story},
    };
    use crate::{
        graph::{NodeId, Op},
        ops::HeadView,
    };

    /// Adds self-attention of `x` without a scale, since another pass folds scales.
    fn attend(b: &mut Builder, x: NodeId, heads: u32, head: u32, view: HeadView) {
        let scores = Op::Scores {
            heads,
            kv_heads: heads,
            head,
            q: view,
            k: view,
        };
        let scores = b.add("scores", scores, &[x, x]);
        let probabilities = b.add(
            "probabilities",
            Op::Softmax {
                scale: 0.5,
                causal: false,
                by: Default::default(),
            },
            &[scores],
        );
        let context = Op::Context {
            heads,
            kv_heads: heads,
            head,
            v: view,
            out: HeadView::HeadMajor,
        };
        let context = b.add("context", context, &[probabilities, x]);
        b.add("merged", Op::MergeHeads, &[context]);
    }

    fn attention(heads: u32, head: u32) -> Builder {
        let mut b = Builder::default();
        let x = b.tokens(u64::from(heads * head));
        let x = b.split("heads", x, heads);
        attend(&mut b, x, heads, head, HeadView::HeadMajor);
        b
    }

    fn refused(b: Builder, outputs: &[&str]) -> String {
        refusals("fuse_attention", b.with_outputs(outputs))
    }

    #[test]
    fn scores_softmax_and_context_become_one() {
        let graph = attention(2, 8).with_outputs(&["merged"]);
        insta::assert_snapshot!("fuse_attention", story("fuse_attention", graph));
    }

    #[test]
    fn columns_are_read_and_written_in_place() {
        let mut b = Builder::default();
        let x = b.tokens(32);
        let view = HeadView::TokenMajor {
            offset: 8,
            stride: 32,
        };
        attend(&mut b, x, 3, 8, view);
        let (graph, _) = optimize(b.with_outputs(&["merged"]), &Options::default()).unwrap();
        insta::assert_snapshot!(graph, @r"
        TokenIds = input(TokenIds) : [tokens]
        tokens = embedding TokenIds @tokens.weight : [tokens, 32]
        merged = attention(heads=3, head=8, scale=0.5, q=columns 8 of 32, k=columns 8 of 32, v=columns 8 of 32) tokens tokens tokens : [tokens, 24]
        output merged = merged
        ");
    }

    #[test]
    fn every_multiple_of_8_up_to_256_is_fused() {
        for head in (8..=256).step_by(8) {
            let (_, report) = alone(
                "fuse_attention",
                &attention(1, head).with_outputs(&["merged"]),
            );
            assert_eq!(report.launches_saved(), 3, "{head}");
        }
    }

    #[test]
    fn a_head_of_12_is_refused() {
        insta::assert_snapshot!(refused(attention(2, 12), &["merged"]), @r"
        refused `context` by fuse_attention
            because a head has 12 elements; the kernel takes multiples of 8 up to 256
        ");
    }

    #[test]
    fn a_head_of_264_is_refused() {
        insta::assert_snapshot!(refused(attention(1, 264), &["merged"]), @r"
        refused `context` by fuse_attention
            because a head has 264 elements; the kernel takes multiples of 8 up to 256
        ");
    }

    #[test]
    fn columns_that_vectors_cannot_load_are_refused() {
        let mut b = Builder::default();
        let x = b.tokens(20);
        let view = HeadView::TokenMajor {
            offset: 4,
            stride: 20,
        };
        attend(&mut b, x, 2, 8, view);
        insta::assert_snapshot!(refused(b, &["merged"]), @r"
        refused `context` by fuse_attention
            because `tokens` is read from column 4 of 20; the kernel takes multiples of 8
        ");
    }

    #[test]
    fn values_with_heads_of_another_size_are_refused() {
        let mut b = Builder::default();
        let x = b.tokens(32);
        let q = b.add(
            "q",
            Op::SliceColumns {
                start: 0,
                width: 16,
            },
            &[x],
        );
        let [q, v] = [("qh", q), ("vh", x)].map(|(name, y)| b.split(name, y, 2));
        b.attention("", [q, q, v], 1.0);
        let all = Options::default();
        let graph = b.with_outputs(&["merged"]);
        let (_, report) = optimize(graph, &all).unwrap();
        let last = report.entries.last().cloned();
        let report = super::Report {
            entries: last.into_iter().collect(),
        };
        insta::assert_snapshot!(report, @r"
        refused `merged` by fuse_attention
            because the heads of q and k have 8 elements, those of v 16; the kernel takes one size
        ");
    }

    #[test]
    fn probabilities_that_are_an_output_are_stored() {
        insta::assert_snapshot!(refused(attention(2, 8), &["merged", "probabilities"]), @r"
        refused `context` by fuse_attention
            because `probabilities` is an output, so it must be stored
        ");
    }

    #[test]
    fn scores_with_another_reader_are_stored() {
        let mut b = attention(2, 8);
        let scores = b.get("scores");
        b.add(
            "sharper",
            Op::Softmax {
                scale: 2.0,
                causal: false,
                by: Default::default(),
            },
            &[scores],
        );
        insta::assert_snapshot!(refused(b, &["merged", "sharper"]), @r"
        refused `context` by fuse_attention
            because `scores` is also read by `sharper`
        ");
    }

    #[test]
    fn a_context_that_is_read_by_heads_is_stored() {
        insta::assert_snapshot!(refused(attention(2, 8), &["merged", "context"]), @r"
        refused `context` by fuse_attention
            because `context` is needed with separate heads, but the kernel writes all heads of a token in one row
        ");
    }

    #[test]
    fn a_scale_between_is_refused() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let x = b.split("heads", x, 2);
        b.attention("", [x, x, x], 0.5);
        insta::assert_snapshot!(refused(b, &["merged"]), @r"
        refused `context` by fuse_attention
            because `scaled` (scale(by=0.5)) is between the scores and the softmax
        ");
    }
}
