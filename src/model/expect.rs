//! Checks the `expect:` fields of a description: numbers of launches, GEMMs or operators in the graph after the passes.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
};

use super::error::{At, File, ModelError, Problem};
use crate::{
    graph::{Graph, Op},
    ops::{Activation, Epilogue},
};

/// Names that `expect:` can count: all launches, all GEMMs with any epilogue, or one operator by [`Op::name`].
pub(super) fn counted() -> Vec<String> {
    let with_activation = Activation::ALL.into_iter().flat_map(|activation| {
        let epilogues = [false, true].map(|bias| Epilogue::new(bias, Some(activation)));
        let epilogues = epilogues.into_iter().flat_map(|e| [e, e.with_residual()]);
        [Op::Activate(activation), Op::Gate(activation)]
            .into_iter()
            .chain(epilogues.map(|epilogue| Op::Linear { epilogue }))
    });
    let with_activation = with_activation.map(|op| op.name().into_owned());
    let others = ["launches", "gemms"].into_iter().chain(Op::countable());
    others.map(str::to_owned).chain(with_activation).collect()
}

/// An expected number of nodes in the graph after the passes, in all of it or in one iteration of a `Repeat`.
///
/// A node is counted in an iteration if its name starts with that of the iteration, such as `layer.3`. If a pass merges nodes of
/// one iteration, the merged node has the name of one of them, so it is counted in the same iteration.
#[derive(Clone, Debug)]
pub struct Expectation {
    /// Iteration of a `Repeat`, such as `layer.3`; `None` for the whole graph.
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

    /// Compares the expectation with the counts of its scope.
    fn compare(&self, counts: &Counts) -> Result<(), ModelError> {
        let found = match self.what.as_str() {
            "launches" => counts.by_operator.values().sum(),
            "gemms" => counts.n_gemms,
            name => counts.by_operator.get(name).copied().unwrap_or(0),
        };
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
        let there = counts.by_operator.iter();
        let there: Vec<String> = there.map(|(op, n)| format!("{n} × {op}")).collect();
        let error = self
            .place
            .value
            .error(problem, &self.place.span, format!("found {found}"));
        Err(error.help(format!("there are {}", there.join(", "))))
    }
}

/// Numbers of nodes in a scope.
#[derive(Default)]
struct Counts {
    by_operator: BTreeMap<Cow<'static, str>, usize>,
    n_gemms: usize,
}

/// Checks all expectations. Nodes are counted once for all scopes, since there may be thousands of scopes.
///
/// # Errors
/// Returns [`Problem::Expectation`] for the first unmet expectation, with the actual counts.
pub(super) fn check(expectations: &[Expectation], fused: &Graph) -> Result<(), ModelError> {
    let scopes = expectations.iter().map(|e| e.scope.as_deref());
    let mut counts: HashMap<Option<&str>, Counts> =
        scopes.map(|scope| (scope, Counts::default())).collect();
    for id in fused.topological() {
        let node = fused.node(id);
        if !node.op.is_compute() {
            continue;
        }
        // A node is counted in the whole graph and in every scope that is a prefix of its name.
        let ends = node.name.match_indices('.').map(|(end, _)| end);
        let scopes = ends.map(|end| Some(&node.name[..end])).chain([None]);
        for scope in scopes {
            if let Some(counts) = counts.get_mut(&scope) {
                *counts.by_operator.entry(node.op.name()).or_default() += 1;
                counts.n_gemms += usize::from(matches!(node.op, Op::Linear { .. }));
            }
        }
    }
    expectations
        .iter()
        .try_for_each(|e| e.compare(&counts[&e.scope.as_deref()]))
}
