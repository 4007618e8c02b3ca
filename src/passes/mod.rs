//! Fusion passes: named rewrites of the graph. Each pass has a file, with its equation above the rewrite.
//!
//! TurboTransformers 4.1 and ByteTransformer III.C describe the fusions: everything between two GEMMs becomes one kernel. A pass rewrites
//! one pattern wherever the pattern's conditions hold. It records fusions in a [`Report`], and also refusals with the condition that
//! failed.
//!
//! Every pass obeys three rules:
//!
//! - The remaining value keeps the name and the meaning of the last operator that was merged. Any
//!   remaining named value can therefore be compared with the unfused graph.
//! - A value that is an output of the model, or that has a reader outside the pattern, is kept.
//! - The graph is verified after every pass.

mod explanation;
mod fold_head_layout;
mod fold_scale;
mod fold_soft_cap;
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
mod order_inputs;
mod quantize_cache;
mod quantize_inputs;
mod quantize_linear;
mod report;

use std::collections::{BTreeMap, BTreeSet};

pub use explanation::Explanation;
pub use quantize_inputs::NAME as QUANTIZE_INPUTS;
pub use report::{Entry, Moved, Part, Report};

use crate::{
    graph::{Graph, GraphError},
    tensor::Format,
};

/// A rewrite of the graph that preserves the values of the outputs.
pub trait Pass: Sync {
    /// Returns the name used in reports and to disable the pass.
    fn name(&self) -> &'static str;

    /// Returns the rewrite as one equation.
    fn equation(&self) -> &'static str;

    /// Rewrites `graph` wherever the pattern and its conditions hold.
    fn run(&self, graph: &mut Graph, report: &mut Report) -> Result<(), GraphError>;
}

/// Returns every pass, in the order in which they run.
pub fn all() -> &'static [&'static dyn Pass] {
    &[
        // Runs before any fusion, so that values of pooled tokens are fused like values of all tokens.
        &hoist_pooled_token::HoistPooledToken,
        // Runs before the scale is folded. Published models scale the scores before the cap, so the softmax reads the scale only after the
        // cap is folded.
        &fold_soft_cap::FoldSoftCap,
        // Runs before attention is fused, because that fusion matches scores, softmax and context with no scale in between.
        &fold_scale::FoldScale,
        // Runs before the head layout is folded: query, key and value are identified by their split heads, and folding removes the slices
        // that this pass adds. Runs before any bias becomes an epilogue: only plain projections can be stacked.
        &merge_projections::MergeProjections,
        // Runs before attention is fused. After this pass, the operands are columns of the projection, and the result is
        // `[tokens, heads·head]`. The fused kernel has these layouts.
        &fold_head_layout::FoldHeadLayout,
        &fuse_attention::FuseAttention,
        // Runs before sums become residuals, because a sum of two embeddings also looks like a residual.
        &fuse_embedding_layer_norm::FuseEmbeddingLayerNorm,
        // Runs before biases are fused into epilogues. Adding the bias costs nothing in the LayerNorm kernel, which reads the residual
        // anyway, and the GEMM stays plain.
        &fuse_bias_residual_layer_norm::FuseBiasResidualLayerNorm,
        // Runs before any bias or activation becomes an epilogue: only plain projections can be stacked, and the activation belongs to the
        // gate.
        &fuse_gate::FuseGate,
        // Fuses all remaining biases.
        &fuse_bias_activation::FuseBiasActivation,
        // Runs after biases are fused, so that linear layers include them. Also runs after LayerNorm is fused with the sum before it.
        // A sum that has other readers is not fused with LayerNorm. This pass fuses it with the linear layer.
        &fuse_residual::FuseResidual,
        // Independent of the other passes.
        &fuse_pool_normalize::FusePoolNormalize,
    ]
}

/// Options of [`optimize`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Names of the passes to skip.
    pub without: BTreeSet<String>,
    /// Format that the weights of linear layers are stored in. `None` selects the format in `published`, or else the program's storage
    /// type.
    pub quantize: Option<Format>,
    /// Formats of tensors that keep their published quantized values, by tensor name.
    pub published: BTreeMap<String, Format>,
    /// Formats, by tensor name, of tensors that keep their published values only if `order_inputs` sorts their columns by quantization
    /// group.
    pub ordered: BTreeMap<String, Format>,
    /// Format of the KV cache; `None` for the program's storage type.
    pub cache: Option<Format>,
    /// Whether the checkpoint publishes scales for a KV cache that is stored in E4M3.
    pub cache_scales: bool,
    /// Whether the inputs of fp8 linear layers are also in E4M3.
    pub fp8_inputs: bool,
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
        "the pass `{pass}` left an unsound graph, which is a bug in gemmule: {source}; switch the pass off to continue"
    )]
    Broken {
        pass: &'static str,
        source: GraphError,
    },
}

/// Runs the passes in order, and returns the graph and the report.
///
/// # Errors
/// Returns an error if `options` names an unknown pass, or if the graph is unsound before the first pass or after a pass.
pub fn optimize(graph: Graph, options: &Options) -> Result<(Graph, Report), PassError> {
    optimize_observed(graph, options, |_, _| {})
}

/// Like [`optimize`]. Calls `after` with the pass's name and the graph after each pass that ran.
pub fn optimize_observed(
    mut graph: Graph,
    options: &Options,
    mut after: impl FnMut(&'static str, &Graph),
) -> Result<(Graph, Report), PassError> {
    let passes = || all().iter().map(|pass| pass.name());
    let known = || passes().chain([quantize_inputs::NAME]);
    if let Some(name) = options.without.iter().find(|n| !known().any(|k| k == *n)) {
        return Err(PassError::Unknown {
            name: name.clone(),
            known: known().collect(),
        });
    }
    graph
        .verify()
        .map_err(|source| PassError::Unsound { source })?;
    // Unneeded values would count as readers and prevent fusions, so they are removed.
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
    if !options.ordered.is_empty() {
        let pass = order_inputs::NAME;
        let broken = |source| PassError::Broken { pass, source };
        order_inputs::run(&mut graph, &options.ordered, &mut report).map_err(broken)?;
        graph.prune();
        graph.verify().map_err(broken)?;
        after(pass, &graph);
    }
    let are_published = !(options.published.is_empty() && options.ordered.is_empty());
    if options.quantize.is_some() || are_published {
        let pass = quantize_linear::NAME;
        let broken = |source| PassError::Broken { pass, source };
        quantize_linear::run(&mut graph, options, &mut report).map_err(broken)?;
        graph.prune();
        graph.verify().map_err(broken)?;
        after(pass, &graph);
    }
    if let Some(format) = options.cache {
        let pass = quantize_cache::NAME;
        let broken = |source| PassError::Broken { pass, source };
        quantize_cache::run(&mut graph, format, options.cache_scales, &mut report)
            .map_err(broken)?;
        graph.verify().map_err(broken)?;
        after(pass, &graph);
    }
    Ok((graph, report))
}

#[cfg(test)]
pub(crate) mod tests;
