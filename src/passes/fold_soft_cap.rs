use super::{
    Pass, Report,
    matching::{first, kept, quoted},
    report::absorb,
};
use crate::{
    graph::{Graph, GraphError, Op},
    ops::{PositionBias, SoftCap},
};

/// Folds a soft cap into the softmax that reads it: `softmax(s · c·tanh(x/c)) = softmax{cap = s·c}(s·x)`. The attention can then be fused
/// into one kernel, which stores no scores.
pub(super) struct FoldSoftCap;

impl Pass for FoldSoftCap {
    fn name(&self) -> &'static str {
        "fold_soft_cap"
    }

    fn equation(&self) -> &'static str {
        "softmax(s·soft_cap{c}(x)) = softmax{cap=s·c}(s·x)"
    }

    fn run(&self, graph: &mut Graph, report: &mut Report) -> Result<(), GraphError> {
        for id in graph.topological() {
            if let Op::Softmax { scale, causal, by } = *graph.op(id)
                && let Some(x) = first(graph, id)
                && let Op::SoftCap(cap) = *graph.op(x)
            {
                let product = f64::from(scale) * f64::from(cap.get());
                let folded = match (kept(graph, x, id), by.cap) {
                    (Some(condition), _) => Err(condition),
                    (None, Some(own)) => Err(format!(
                        "the softmax caps the scores at {} itself, and {} caps them before; it takes one cap",
                        own.get(),
                        quoted(graph, x)
                    )),
                    (None, None) => SoftCap::new(product as f32).map_err(|e| e.to_string()),
                };
                match folded {
                    Err(condition) => {
                        report.refuse(self.name(), graph.node(id).name.clone(), condition);
                    }
                    Ok(cap) => {
                        let by = PositionBias {
                            cap: Some(cap),
                            ..by
                        };
                        let softmax = Op::Softmax { scale, causal, by };
                        absorb(self.name(), graph, id, softmax, report)?;
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{models::Builder, refusals, story};
    use crate::{graph::Op, ops::SoftCap};

    /// Returns attention whose scores are scaled by 0.25 and capped at 50 before a softmax that scales them by 2.
    fn attention() -> Builder {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let x = b.split("heads", x, 2);
        b.attention("", [x, x, x], 0.25);
        let cap = SoftCap::new(50.0).unwrap();
        let capped = b.add("capped", Op::SoftCap(cap), &[b.get("scaled")]);
        let softmax = Op::Softmax {
            scale: 2.0,
            causal: false,
            by: Default::default(),
        };
        b.add("weights", softmax, &[capped]);
        b
    }

    #[test]
    fn a_cap_becomes_the_softmax_s() {
        let graph = attention().with_outputs(&["weights"]);
        insta::assert_snapshot!("fold_soft_cap", story("fold_soft_cap", graph));
    }

    #[test]
    fn a_cap_whose_result_is_an_output_stays() {
        let graph = attention().with_outputs(&["weights", "capped"]);
        insta::assert_snapshot!(refusals("fold_soft_cap", graph), @r"
        refused `weights` by fold_soft_cap
            because `capped` is an output, so it must be stored
        ");
    }

    #[test]
    fn a_second_cap_stays() {
        let mut b = attention();
        let capped = b.get("capped");
        let softmax = Op::Softmax {
            scale: 1.0,
            causal: false,
            by: crate::ops::PositionBias {
                cap: SoftCap::new(30.0).ok(),
                ..Default::default()
            },
        };
        b.add("twice", softmax, &[capped]);
        insta::assert_snapshot!(refusals("fold_soft_cap", b.with_outputs(&["twice"])), @r"
        refused `twice` by fold_soft_cap
            because the softmax caps the scores at 30 itself, and `capped` caps them before; it takes one cap
        ");
    }
}
