use super::{
    Pass, Report,
    matching::{first, kept, quoted},
    report::absorb,
};
use crate::graph::{Graph, GraphError, Op};

/// Folds a scale into the softmax that reads it: `softmax(t · (s·x)) = softmax((t·s) · x)`. The equation also holds with a bias, which is
/// added after scaling, and with sinks, which are not scaled. The softmax kernel multiplies by a factor in any case.
pub(super) struct FoldScale;

impl Pass for FoldScale {
    fn name(&self) -> &'static str {
        "fold_scale"
    }

    fn equation(&self) -> &'static str {
        "softmax(t·(s·x)) = softmax((t·s)·x)"
    }

    fn run(&self, graph: &mut Graph, report: &mut Report) -> Result<(), GraphError> {
        for id in graph.topological() {
            // There may be several consecutive scales.
            while let Op::Softmax { scale, causal, by } = *graph.op(id)
                && let Some(x) = first(graph, id)
                && let Op::Scale { by: factor } = *graph.op(x)
            {
                if let Some(condition) = kept(graph, x, id) {
                    report.refuse(self.name(), graph.node(id).name.clone(), condition);
                    break;
                }
                // Round once instead of twice.
                let product = f64::from(scale) * f64::from(factor);
                let scale = product as f32;
                if !(scale.is_finite() && scale > 0.0) {
                    let condition = format!(
                        "{} scales by {factor}, but the softmax takes the maximum before it scales, so the factor must be above 0",
                        quoted(graph, x)
                    );
                    report.refuse(self.name(), graph.node(id).name.clone(), condition);
                    break;
                }
                let softmax = Op::Softmax { scale, causal, by };
                absorb(self.name(), graph, id, softmax, report)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{models::Builder, refusals, story};
    use crate::graph::{Graph, Op};

    /// Returns attention with two scales before a softmax that also has a scale.
    fn attention() -> Builder {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let x = b.split("heads", x, 2);
        b.attention("", [x, x, x], 0.25);
        let again = Op::Scale { by: 0.5 };
        let again = b.add("again", again, &[b.get("scaled")]);
        b.add(
            "twice",
            Op::Softmax {
                scale: 2.0,
                causal: false,
                by: Default::default(),
            },
            &[again],
        );
        b
    }

    fn refused(outputs: &[&str]) -> String {
        let graph: Graph = attention().with_outputs(outputs);
        refusals("fold_scale", graph)
    }

    #[test]
    fn scales_become_the_softmax_s_factor() {
        let graph = attention().with_outputs(&["twice"]);
        insta::assert_snapshot!("fold_scale", story("fold_scale", graph));
    }

    #[test]
    fn a_scale_that_is_an_output_stays() {
        insta::assert_snapshot!(refused(&["probabilities", "scaled"]), @r"
        refused `probabilities` by fold_scale
            because `scaled` is an output, so it must be stored
        ");
    }

    #[test]
    fn a_scale_that_turns_the_order_of_scores_stays() {
        for (by, shown) in [(-0.5, "-0.5"), (0.0, "0"), (-0.0, "-0")] {
            let mut b = Builder::default();
            let x = b.tokens(16);
            let x = b.split("heads", x, 2);
            b.attention("", [x, x, x], by);
            let report = refusals("fold_scale", b.with_outputs(&["merged"]));
            assert_eq!(
                report,
                format!(
                    "refused `probabilities` by fold_scale\n    because `scaled` scales by {shown}, but the softmax takes the maximum before it scales, so the factor must be above 0\n"
                )
            );
        }
    }

    #[test]
    fn a_scale_with_another_reader_stays() {
        let mut b = attention();
        let scaled = b.get("scaled");
        b.add("other", Op::Scale { by: 3.0 }, &[scaled]);
        let graph = b.with_outputs(&["probabilities", "other"]);
        insta::assert_snapshot!(refusals("fold_scale", graph), @r"
        refused `probabilities` by fold_scale
            because `scaled` is also read by `other`
        ");
    }
}
