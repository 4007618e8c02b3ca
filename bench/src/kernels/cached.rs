//! Attention to a KV cache: decode steps with one token per sequence, and parts of prompts.

use gemmule::{
    DType, Format,
    kernels::{
        Case, Instructions, KernelSpec,
        attention::{DecodeCta, DecodeCtas, Keys, MhaCached, MhaDecode, MhaPrefill},
        cache::Pool,
        chain::Chain,
    },
    machine::Machine,
    ops::{HeadView, PositionBias, default_scale},
    select::CachedAttention,
    tensor::Extents,
};
use miette::{IntoDiagnostic, Report, miette};

use super::problem::{Contender, Problem, Task};
use crate::launched::ChosenBy;

/// Number of heads, number of key heads, and head size of GPT-2, Qwen3-0.6B, Llama-3.2-1B and Llama-3-8B.
const HEADS: [(u32, u32, u32); 4] = [(12, 12, 64), (16, 8, 128), (32, 8, 64), (32, 8, 128)];
/// Number of sequences, number of new tokens per sequence, and number of keys per sequence, which includes the new tokens.
const SHAPES: [(u32, u32, u32); 15] = [
    (1, 1, 96),
    (32, 1, 96),
    (1, 1, 256),
    (32, 1, 256),
    (128, 1, 256),
    (1, 1, 1024),
    (4, 1, 512),
    (1, 1, 8192),
    (5, 1, 8192),
    (8, 1, 8192),
    (16, 1, 8192),
    (1, 128, 128),
    (1, 512, 2048),
    (8, 512, 512),
    (1, 8192, 8192),
];

/// Shapes of the problems with a window, which are prompts.
const WINDOWED: [(u32, u32, u32); 1] = [(1, 8192, 8192)];
const WINDOWS: [Option<u32>; 3] = [None, Some(512), Some(4096)];

/// Heads as in [`HEADS`], a shape as in [`SHAPES`], a window, and whether the cache is in E4M3.
type Shape = ((u32, u32, u32), (u32, u32, u32), Option<u32>, bool);

pub(super) fn problems(dtype: DType, machine: &Machine) -> Result<Vec<Problem>, Report> {
    let all = HEADS
        .into_iter()
        .flat_map(|heads| SHAPES.map(|shape| (heads, shape, None, false)));
    of_shapes(all, dtype, machine)
}

/// Returns problems for long prompts: attention with and without a window, to a cache in the type of the activations and to a cache in
/// E4M3.
pub(super) fn windows(dtype: DType, machine: &Machine) -> Result<Vec<Problem>, Report> {
    let all = [(16, 8, 128), (8, 2, 256)]
        .into_iter()
        .flat_map(|heads| WINDOWED.map(|shape| (heads, shape)))
        .flat_map(|(heads, shape)| WINDOWS.map(|window| (heads, shape, window)))
        .flat_map(|(heads, shape, window)| [false, true].map(|e4m3| (heads, shape, window, e4m3)));
    let is_shorter = |&(_, (.., keys), window, _): &Shape| window.is_none_or(|w| w < keys);
    of_shapes(all.filter(is_shorter), dtype, machine)
}

fn of_shapes(
    all: impl Iterator<Item = Shape>,
    dtype: DType,
    machine: &Machine,
) -> Result<Vec<Problem>, Report> {
    let mut problems = Vec::new();
    for ((heads, kv_heads, head), (sequences, new, keys), window, e4m3) in all {
        let task = Task::CachedAttention {
            heads,
            kv_heads,
            head,
            sequences,
            new,
            keys,
            window,
            e4m3,
        };
        let format = match e4m3 {
            true => Format::E4m3,
            false => dtype.into(),
        };
        let plain = MhaCached {
            by: PositionBias {
                window,
                ..PositionBias::default()
            },
            keys: Keys::Own,
            heads,
            kv_heads,
            head,
            scale: default_scale(head),
            q: HeadView::TokenMajor {
                offset: 0,
                stride: (heads + 2 * kv_heads) * head,
            },
            pool: Pool::of_layer(kv_heads, head, format),
            dtype,
        };
        let n = sequences as usize;
        let case = Case {
            cached: vec![keys - new; n],
            ..Case::new("timed", &vec![new; n])
        };
        let batch = case.extents().into_diagnostic()?;
        problems.push(Problem {
            contenders: contenders(&plain, machine, &batch)
                .ok_or_else(|| miette!("no kernel computes {task} on `{}`", machine.name))?,
            task,
            case,
        });
    }
    Ok(problems)
}

/// Returns the kernel that a model launches, followed by the other kernels that support the batch; `None` if no kernel supports it. For
/// more than 128 tokens, the other kernels do not include [`MhaDecode`] and [`MhaCached`].
fn contenders(plain: &MhaCached, machine: &Machine, batch: &Extents) -> Option<Vec<Contender>> {
    let dispatch = CachedAttention(plain.clone()).by_length(machine);
    let picked = dispatch.at(batch)?.clone();
    let decode = |ctas| MhaDecode {
        plain: plain.clone(),
        ctas,
    };
    let mut others: Vec<KernelSpec> = Vec::new();
    if batch.tokens <= 128 {
        let all = [
            DecodeCtas::SMALL,
            DecodeCtas::MEDIUM,
            DecodeCtas::LARGE,
            DecodeCtas::LARGE.split(2),
            DecodeCtas::MEDIUM.split(2),
            DecodeCtas::MEDIUM.split(4),
            DecodeCtas::MEDIUM.split(8),
        ];
        let on_hopper = machine.instructions == Instructions::Hopper;
        let here = |k: &MhaDecode| match (k.ctas.size, k.ctas.splits) {
            (DecodeCta::Small, _) => true,
            (DecodeCta::Medium | DecodeCta::Large, 1) => on_hopper,
            (DecodeCta::Medium | DecodeCta::Large, n) => machine.clusters_at_once(n) > 0,
        };
        others.extend(
            all.map(decode)
                .into_iter()
                .filter(here)
                .map(KernelSpec::from),
        );
        others.push(plain.clone().into());
    }
    let prefill = MhaPrefill {
        plain: plain.clone(),
        tile: None,
    };
    if prefill.check().is_ok() {
        others.push(prefill.into());
    }
    others.retain(|kernel| *kernel != picked);
    let mut all = vec![Contender::picked(
        label(&picked),
        Chain::of(picked),
        ChosenBy::Rule,
    )];
    all.extend(
        others
            .into_iter()
            .map(|k| Contender::other(label(&k), Chain::of(k))),
    );
    Some(all)
}

/// Returns a name of the kernel for tables and figures. It does not depend on the shape.
fn label(kernel: &KernelSpec) -> &'static str {
    match kernel {
        KernelSpec::MhaDecode(k) => match (k.ctas.size, k.ctas.splits) {
            (DecodeCta::Small, _) => "mha_decode",
            (DecodeCta::Medium, 1) => "mha_decode by medium CTAs",
            (DecodeCta::Large, 1) => "mha_decode by large CTAs",
            (DecodeCta::Large, _) => "mha_decode by pairs of large CTAs",
            (DecodeCta::Medium, 2) => "mha_decode by clusters of 2",
            (DecodeCta::Medium, 4) => "mha_decode by clusters of 4",
            (DecodeCta::Medium, _) => "mha_decode by clusters of 8",
        },
        KernelSpec::MhaPrefill(k) if k.tile.is_some() => "mha_prefill by WGMMA",
        KernelSpec::MhaPrefill(_) => "mha_prefill",
        _ => "mha_cached",
    }
}
