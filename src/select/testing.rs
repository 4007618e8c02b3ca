//! Chains for tests.

use super::{Chain, Link, SelectionInput, Site};
use crate::{
    kernels::{
        e4m3::ToE4m3,
        elementwise::{BinaryOp, Combine, Gate},
        gemm::GemmProblem,
        layernorm::{BiasResidualLayerNorm, LayerNorm},
        prepare_attention::PrepareAttention,
        rms_norm::RmsNorm,
    },
    machine::Machine,
    ops::{Activation, Epilogue, Rotation},
    tensor::{DType, Format},
};

fn of_links(links: Vec<Link>) -> Chain {
    Chain {
        links,
        in_one_launch: false,
    }
}

/// Returns the chains of a post-norm encoder of twelve layers, with the number of occurrences of
/// each.
pub(super) fn encoder(width: u32, inner: u32, dtype: DType) -> Vec<(Chain, usize)> {
    let linear = |n, k, bias, activation| Link {
        site: Site::Linear(GemmProblem::new(
            n,
            k,
            dtype,
            Epilogue::new(bias, activation),
        )),
        is_private: true,
    };
    let norm = || Link {
        site: Site::SumLayerNorm(BiasResidualLayerNorm::new(width, 1e-12, dtype, true)),
        is_private: false,
    };
    let head = Link {
        is_private: false,
        ..linear(3 * width, width, true, None)
    };
    let layer = vec![
        linear(width, width, false, None),
        norm(),
        linear(inner, width, true, Some(Activation::GeluExact)),
        linear(width, inner, false, None),
        norm(),
    ];
    let within = layer.iter().cloned().chain([head.clone()]).collect();
    vec![
        (of_links(vec![head]), 1),
        (of_links(within), 11),
        (of_links(layer), 1),
    ]
}

/// Returns a chain of a pre-norm encoder, in which LayerNorm comes before linear layers. The second LayerNorm also adds a residual, but no
/// bias.
pub(super) fn pre_norm(width: u32, inner: u32, dtype: DType) -> Vec<(Chain, usize)> {
    let link = |site| Link {
        site,
        is_private: true,
    };
    let linear = |n, k, activation| {
        let bias = activation != Some(Activation::Relu);
        let epilogue = Epilogue::new(bias, activation);
        link(Site::Linear(GemmProblem::new(n, k, dtype, epilogue)))
    };
    let sum = BiasResidualLayerNorm::new(width, 1e-5, dtype, false);
    let links = vec![
        link(Site::LayerNorm(LayerNorm::new(width, 1e-5, dtype))),
        linear(inner, width, Some(Activation::Relu)),
        linear(width, inner, None),
        link(Site::SumLayerNorm(sum)),
        linear(width, width, Some(Activation::GeluTanh)),
    ];
    vec![(of_links(links), 2)]
}

/// Returns two chains of pre-norm decoder layers, in which norms read a residual stream: one with a gate, and one with an activation.
pub(super) fn writer(width: u32, inner: u32, dtype: DType) -> Vec<(Chain, usize)> {
    let link = |site, is_private| Link { site, is_private };
    let linear = |n, k, epilogue| Site::Linear(GemmProblem::new(n, k, dtype, epilogue));
    let plain = Epilogue::default();
    let bias = Epilogue::new(true, None);
    let gelu = Epilogue::new(true, Some(Activation::GeluTanh));
    let gated = vec![
        link(linear(width, width, plain.with_residual()), false),
        link(Site::RmsNorm(RmsNorm::of_rows(width, 1e-5, dtype)), true),
        link(linear(2 * inner, width, plain), true),
        link(
            Site::Gate(Gate {
                activation: Activation::Silu,
                width: inner,
                dtype,
            }),
            true,
        ),
        link(linear(width, inner, plain.with_residual()), false),
        link(Site::RmsNorm(RmsNorm::of_rows(width, 1e-5, dtype)), true),
        link(linear(2 * width, width, plain), false),
    ];
    let activated = vec![
        link(linear(width, width, bias.with_residual()), false),
        link(Site::LayerNorm(LayerNorm::new(width, 1e-5, dtype)), true),
        link(linear(inner, width, gelu), false),
    ];
    vec![(of_links(gated), 3), (of_links(activated), 2)]
}

/// Returns the chain of layers with norms before and after both attention and the feed-forward network. The norm after a linear layer is
/// added to the residual stream, and the norm of this sum is the input of the next linear layer.
pub(super) fn sandwich(width: u32, inner: u32, dtype: DType) -> Vec<(Chain, usize)> {
    let link = |site, is_private| Link { site, is_private };
    let linear = |n, k| Site::Linear(GemmProblem::new(n, k, dtype, Epilogue::default()));
    let norm = || link(Site::RmsNorm(RmsNorm::of_rows(width, 1e-5, dtype)), true);
    let (how, residual) = (BinaryOp::Sum, "b");
    let kernel = Combine { how, width, dtype };
    let sum = link(Site::NormSum { kernel, residual }, false);
    let links = vec![
        link(linear(width, inner), true),
        norm(),
        sum,
        norm(),
        link(linear(inner, width), false),
    ];
    vec![(of_links(links), 2)]
}

/// Returns a chain with a projection whose rotary heads are read by attention.
pub(super) fn attended(width: u32, dtype: DType) -> Vec<(Chain, usize)> {
    let pairs = if width.is_multiple_of(64) { 32 } else { 1 };
    let head = if pairs == 32 { 64 } else { 2 };
    let heads = width.div_ceil(head);
    let columns = heads * head;
    let kernel = PrepareAttention {
        heads,
        kv_heads: heads,
        head,
        columns: [0, columns, 2 * columns],
        row: 3 * columns,
        norm: None,
        rotation: Some(Rotation {
            heads,
            frequencies: vec![0.5; pairs],
            factor: 1.0,
        }),
        pool: None,
        dtype,
    };
    let problem = GemmProblem::new(kernel.row, width, dtype, Epilogue::default());
    let linear = Site::Linear(problem);
    let prepare = Site::Prepare {
        kernel,
        is_alone: true,
    };
    let links = [linear, prepare].map(|site| Link {
        site,
        is_private: false,
    });
    let links = links.to_vec();
    vec![(of_links(links), 2)]
}

/// Returns the chains with all operands of linear layers in E4M3.
pub(super) fn in_fp8(chains: Vec<(Chain, usize)>) -> Vec<(Chain, usize)> {
    let links_of = |link: Link| match link.site {
        Site::Linear(problem) => {
            let conversion = ToE4m3 {
                width: problem.k,
                dtype: problem.dtype,
            };
            let conversion = Link {
                site: Site::ToE4m3(conversion),
                is_private: true,
            };
            let product = Site::Linear(problem.in_e4m3());
            let is_private = link.is_private;
            vec![
                conversion,
                Link {
                    site: product,
                    is_private,
                },
            ]
        }
        site => vec![Link { site, ..link }],
    };
    let of_chain = |(chain, n): (Chain, usize)| {
        let links = chain.links.into_iter().flat_map(links_of).collect();
        (of_links(links), n)
    };
    chains.into_iter().map(of_chain).collect()
}

/// Returns the chains with all weights in a packed format.
pub(super) fn with_weights_in(
    format: Format,
    mut chains: Vec<(Chain, usize)>,
) -> Vec<(Chain, usize)> {
    let links = chains.iter_mut().flat_map(|(chain, _)| &mut chain.links);
    for link in links {
        if let Site::Linear(problem) = &mut link.site {
            problem.weight = format;
        }
    }
    chains
}

pub(super) fn question<'a>(
    chains: &'a [(Chain, usize)],
    machine: &'a Machine,
) -> SelectionInput<'a> {
    SelectionInput {
        chains,
        machine,
        timings: None,
        may_fuse: true,
        invariant: false,
        quantizes_rows: true,
    }
}
