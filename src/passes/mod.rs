//! Fusion: named rewrites of the graph, each one file with its equation above the rewrite.
//!
//! TurboTransformers 4.1 and ByteTransformer III.C say what to fuse: whatever stands between two
//! GEMMs becomes one kernel. A pass rewrites one pattern wherever its conditions hold and writes
//! down both what it fused and what it refused, with the condition that failed, in a [`Report`].
//!
//! Three rules hold for every pass:
//!
//! - The value that survives keeps the name of the last operator that was merged, and means the
//!   same. So any named value that is left can be compared with the unfused graph.
//! - A value that is an output of the model or has a reader outside the pattern does not vanish.
//! - The graph is verified after every pass.

mod explanation;
mod fold_head_layout;
mod fold_scale;
mod fuse_attention;
mod fuse_bias_activation;
mod fuse_bias_residual_layer_norm;
mod fuse_embedding_layer_norm;
mod fuse_gate;
mod fuse_pool_normalize;
mod fuse_residual;
mod hoist_pooled_token;
mod matching;
mod merge_projections;
mod report;

use std::collections::BTreeSet;

pub use explanation::Explanation;
pub use report::{Entry, Moved, Part, Report};

use crate::graph::{Graph, GraphError};

/// One rewrite. It must leave the values of the outputs as they are.
pub trait Pass: Sync {
    /// The name that switches it off and stands in reports.
    fn name(&self) -> &'static str;

    /// What is replaced by what, as one equation.
    fn equation(&self) -> &'static str;

    /// Rewrites `graph` wherever the pattern and its conditions hold.
    fn run(&self, graph: &mut Graph, report: &mut Report) -> Result<(), GraphError>;
}

/// Every pass, in the order in which they run.
pub fn all() -> &'static [&'static dyn Pass] {
    &[
        // Before any fusion, so that what is computed of pooled tokens is fused as what is computed of all.
        &hoist_pooled_token::HoistPooledToken,
        // Before the others: attention is matched as scores, softmax, context, with nothing between them.
        &fold_scale::FoldScale,
        // Before the head layout is folded: the roles of query, key and value are read off the
        // split heads, and the slices that it leaves are what the folding then removes. Before
        // any bias becomes an epilogue: only bare projections can be stacked.
        &merge_projections::MergeProjections,
        // Before attention is fused: it turns the operands into columns of the projection and the
        // result into tokens, which is the layout that the fused kernel reads and writes.
        &fold_head_layout::FoldHeadLayout,
        &fuse_attention::FuseAttention,
        // Before the residual: a sum of two embeddings looks like a residual too.
        &fuse_embedding_layer_norm::FuseEmbeddingLayerNorm,
        // Before the epilogues: the bias costs nothing in this kernel, which has to read the
        // residual anyway, and leaves the GEMM plain.
        &fuse_bias_residual_layer_norm::FuseBiasResidualLayerNorm,
        // Before any bias or activation becomes an epilogue: only bare projections can be stacked, and the activation is the
        // gate's.
        &fuse_gate::FuseGate,
        // Takes every bias that is left.
        &fuse_bias_activation::FuseBiasActivation,
        // After the biases, which its linear layers then have, and after the sums that a LayerNorm takes in, which leave it
        // those that are read by others, too.
        &fuse_residual::FuseResidual,
        // Touches nothing that another pass looks at, so its place is free.
        &fuse_pool_normalize::FusePoolNormalize,
    ]
}

/// What a caller may choose.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Names of passes that do not run.
    pub without: BTreeSet<String>,
}

#[derive(Debug, PartialEq, thiserror::Error)]
pub enum PassError {
    #[error("no pass is named `{name}`; the passes are {}", known.join(", "))]
    Unknown {
        name: String,
        known: Vec<&'static str>,
    },
    #[error("the graph was unsound before the first pass: {source}")]
    Unsound { source: GraphError },
    #[error(
        "the pass `{pass}` left an unsound graph, which is a mistake in gemmule: {source}; switch the pass off to go on"
    )]
    Broken {
        pass: &'static str,
        source: GraphError,
    },
}

/// Runs the passes in order and returns the graph with what was done.
pub fn optimize(graph: Graph, options: &Options) -> Result<(Graph, Report), PassError> {
    optimize_observed(graph, options, |_, _| {})
}

/// As [`optimize`]; `after` sees the graph after each pass that ran, under the pass's name.
pub fn optimize_observed(
    mut graph: Graph,
    options: &Options,
    mut after: impl FnMut(&'static str, &Graph),
) -> Result<(Graph, Report), PassError> {
    let known = || all().iter().map(|pass| pass.name());
    if let Some(name) = options.without.iter().find(|n| !known().any(|k| k == *n)) {
        return Err(PassError::Unknown {
            name: name.clone(),
            known: known().collect(),
        });
    }
    graph
        .verify()
        .map_err(|source| PassError::Unsound { source })?;
    // What no output needs would count as a reader and forbid a fusion.
    graph.prune();
    let mut report = Report::default();
    for pass in all() {
        let name = pass.name();
        if options.without.contains(name) {
            continue;
        }
        let broken = |source| PassError::Broken { pass: name, source };
        pass.run(&mut graph, &mut report).map_err(broken)?;
        graph.prune();
        graph.verify().map_err(broken)?;
        after(name, &graph);
    }
    Ok((graph, report))
}

#[cfg(test)]
pub(crate) mod tests;
