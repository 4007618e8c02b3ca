//! Attention to a KV cache: steps of one token a sequence, and pieces of prompts.

use gemmule::{
    DType,
    kernels::{
        Case, KernelSpec,
        attention::{HeadView, Keys, MhaCached, MhaDecode, MhaPrefill, usual_scale},
        cache::BLOCK,
        chain::Chain,
    },
    machine::Machine,
    select::CachedAttention,
};
use miette::{Report, miette};

use super::problem::{Contender, Problem, Task};
use crate::launched::ChosenBy;

/// Heads, key heads and their size: GPT-2, Qwen3-0.6B, Llama-3.2-1B, Llama-3-8B.
const HEADS: [(u32, u32, u32); 4] = [(12, 12, 64), (16, 8, 128), (32, 8, 64), (32, 8, 128)];
/// Sequences, new tokens of each, and its keys with them.
const SHAPES: [(u32, u32, u32); 11] = [
    (1, 1, 96),
    (32, 1, 96),
    (1, 1, 256),
    (32, 1, 256),
    (128, 1, 256),
    (1, 1, 8192),
    (8, 1, 8192),
    (1, 128, 128),
    (1, 512, 2048),
    (8, 512, 512),
    (1, 8192, 8192),
];

pub(super) fn problems(dtype: DType, machine: &Machine) -> Result<Vec<Problem>, Report> {
    let all = HEADS
        .into_iter()
        .flat_map(|heads| SHAPES.map(|shape| (heads, shape)));
    all.map(|((heads, kv_heads, head), (sequences, new, keys))| {
        let task = Task::CachedAttention {
            heads,
            kv_heads,
            head,
            sequences,
            new,
            keys,
        };
        let plain = MhaCached {
            by: Default::default(),
            keys: Keys::Own,
            heads,
            kv_heads,
            head,
            scale: usual_scale(head),
            q: HeadView::TokenMajor {
                offset: 0,
                stride: (heads + 2 * kv_heads) * head,
            },
            stride: u64::from(2 * kv_heads * head * BLOCK),
            dtype,
        };
        let (n, each) = (sequences as usize, u64::from(new));
        Ok(Problem {
            contenders: contenders(&plain, machine, u64::from(sequences) * each, each)
                .ok_or_else(|| miette!("no kernel computes {task} on `{}`", machine.name))?,
            task,
            case: Case {
                cached: vec![keys - new; n],
                ..Case::new("timed", &vec![new; n])
            },
        })
    })
    .collect()
}

/// What a model launches comes first, then the other kernels; the plain one only where it ends in time.
fn contenders(
    plain: &MhaCached,
    machine: &Machine,
    tokens: u64,
    longest: u64,
) -> Option<Vec<Contender>> {
    let dispatch = CachedAttention(plain.clone()).by_length(machine);
    let picked = dispatch.at(tokens, longest)?.clone();
    let decode = |splits| MhaDecode {
        plain: plain.clone(),
        splits,
    };
    let mut others: Vec<KernelSpec> = Vec::new();
    if tokens <= 128 {
        let splits = [1, 2, 4, 8].map(decode);
        let hopper = |k: &MhaDecode| k.splits == 1 || machine.clusters_at_once(k.splits) > 0;
        others.extend(splits.into_iter().filter(hopper).map(KernelSpec::from));
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

/// In words, the same for every shape.
fn label(kernel: &KernelSpec) -> &'static str {
    match kernel {
        KernelSpec::MhaDecode(k) => match k.splits {
            1 => "mha_decode",
            2 => "mha_decode by clusters of 2",
            4 => "mha_decode by clusters of 4",
            _ => "mha_decode by clusters of 8",
        },
        KernelSpec::MhaPrefill(k) if k.tile.is_some() => "mha_prefill by WGMMA",
        KernelSpec::MhaPrefill(_) => "mha_prefill",
        _ => "mha_cached",
    }
}
