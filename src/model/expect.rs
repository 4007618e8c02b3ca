//! `expect:` lines: what must be in the graph after the passes.

use std::collections::BTreeMap;

use super::error::{At, File, ModelError, Problem};
use crate::graph::{Graph, Op};

/// What `expect:` can count: all launches, all GEMMs whatever their epilogue, or one operator by
/// the name of [`Op::name`].
pub(super) const COUNTED: [&str; 35] = [
    "launches",
    "gemms",
    "embedding",
    "linear",
    "bias_linear",
    "linear_gelu",
    "bias_gelu_linear",
    "linear_gelu_tanh",
    "bias_gelu_tanh_linear",
    "linear_relu",
    "bias_relu_linear",
    "linear_tanh",
    "bias_tanh_linear",
    "add_bias",
    "add",
    "gelu",
    "gelu_tanh",
    "relu",
    "tanh",
    "scale",
    "layer_norm",
    "split_heads",
    "merge_heads",
    "scores",
    "softmax",
    "context",
    "first_token",
    "mean_pool",
    "l2_normalize",
    "slice_columns",
    "embedding_layer_norm",
    "bias_residual_layer_norm",
    "residual_layer_norm",
    "attention",
    "mean_pool_normalize",
];

/// One count that the fused graph must have.
///
/// A node belongs to a layer by its name, `layer.3.…`: a pass that merges nodes of one layer gives
/// the result the name of one of them.
#[derive(Clone, Debug)]
pub struct Expectation {
    /// The iteration of a `Repeat`, such as `layer.3`; the whole graph, where `None`.
    pub scope: Option<String>,
    /// `launches`, `gemms` or the name of an operator.
    pub what: String,
    pub n: usize,
    place: At<File>,
}

impl Expectation {
    pub(super) fn new(scope: Option<String>, what: &At<String>, n: usize, file: &File) -> Self {
        Self {
            scope,
            what: what.value.clone(),
            n,
            place: At::new(file.clone(), what.span.clone()),
        }
    }

    /// Counts in the graph.
    ///
    /// # Errors
    /// [`Problem::Expectation`] with the counts that are there.
    pub fn check(&self, fused: &Graph) -> Result<(), ModelError> {
        let mut found = 0;
        let mut there: BTreeMap<&'static str, usize> = BTreeMap::new();
        for id in fused.topological() {
            let node = fused.node(id);
            if !node.op.is_compute() || !self.concerns(&node.name) {
                continue;
            }
            *there.entry(node.op.name()).or_default() += 1;
            found += usize::from(match self.what.as_str() {
                "launches" => true,
                "gemms" => matches!(node.op, Op::Linear { .. }),
                name => node.op.name() == name,
            });
        }
        if found == self.n {
            return Ok(());
        }
        let problem = Problem::Expectation {
            place: match &self.scope {
                Some(scope) => format!("`{scope}`"),
                None => "the graph".to_owned(),
            },
            what: self.what.clone(),
            expected: self.n,
            found,
        };
        let there: Vec<String> = there.iter().map(|(op, n)| format!("{n} × {op}")).collect();
        let error = self
            .place
            .value
            .error(problem, &self.place.span, format!("found {found}"));
        Err(error.help(format!("there are {}", there.join(", "))))
    }

    /// Whether a node of this name is counted.
    fn concerns(&self, node: &str) -> bool {
        self.scope.as_ref().is_none_or(|scope| {
            node.strip_prefix(scope.as_str())
                .is_some_and(|rest| rest.starts_with('.'))
        })
    }
}
