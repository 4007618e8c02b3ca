//! Attention on packed sequences, fused or with the scores in memory (ByteTransformer, figures 11
//! and 12).

use gemmule::{
    DType,
    cli::bench::sets::{Set, named},
    kernels::{
        Case, Instructions, KernelSpec,
        attention::{
            AttentionContext, AttentionScores, AttentionSoftmax, MhaOnline, MhaTile, MhaWgmma,
        },
        chain::Chain,
    },
    machine::Machine,
    ops::{AttentionProblem, HeadView, PositionBias, default_scale},
    select::Attention,
    tensor::Extents,
};
use miette::{IntoDiagnostic, Report, miette};

use super::problem::{Contender, Problem, Task, by_limit};
use crate::launched::ChosenBy;

/// Default sets of sequence lengths: `SETS` for 12 heads of size 64, and `FEW` for all other heads.
const SETS: [&str; 8] = [
    "b16_m64",
    "b16_m128",
    "b16_m256",
    "b16_m384",
    "b16_m512",
    "b16_m768",
    "b16_m1024",
    "b64_m128",
];
const FEW: [&str; 3] = ["b16_m128", "b16_m512", "b16_m1024"];
/// Number of heads and head size of BERT-base, MiniLM and BERT-large.
const HEADS: [(u32, u32); 3] = [(12, 64), (12, 32), (16, 64)];

/// Heads of the problems with sequences of equal length. Each problem has [`EQUAL_TOKENS`] tokens in total, or a single sequence if the
/// length exceeds [`EQUAL_TOKENS`].
const EQUAL: [Heads; 6] = [
    (8, 8, 128, false),
    (8, 8, 128, true),
    (16, 8, 128, true),
    (32, 8, 64, true),
    (8, 4, 256, true),
    (8, 8, 256, false),
];
const EQUAL_LENGTHS: [u32; 6] = [512, 1024, 2048, 4096, 8192, 16_384];
const EQUAL_TOKENS: u32 = 8192;

/// Heads of the problems in which attention is limited to a window of keys.
const WINDOWED: [Heads; 5] = [
    (16, 4, 64, true),
    (8, 8, 96, true),
    (16, 4, 128, true),
    (8, 2, 256, true),
    (12, 12, 64, false),
];
/// Sequence lengths and windows of the problems with causal attention. A window of `None` means attention to all earlier keys, for
/// comparison.
const CAUSAL_WINDOWS: ([u32; 2], [Option<u32>; 4]) =
    ([2048, 16_384], [None, Some(512), Some(2047), Some(4096)]);
const FULL_WINDOWS: ([u32; 2], [Option<u32>; 4]) =
    ([1024, 8192], [None, Some(64), Some(128), Some(512)]);

/// Heads, key heads, head size, and whether attention is causal.
type Heads = (u32, u32, u32, bool);

/// Returns the problems. If the user selects `sets` (`chosen`), every entry of [`HEADS`] is timed on every set. Otherwise, a default
/// selection of heads and sets is timed.
pub(super) fn problems(
    dtype: DType,
    machine: &Machine,
    sets: &[Set],
    chosen: bool,
) -> Result<Vec<Problem>, Report> {
    let mut problems = Vec::new();
    for (heads, head) in HEADS {
        let names: &[&str] = match (chosen, (heads, head) == HEADS[0]) {
            (true, _) => &[],
            (false, true) => &SETS,
            (false, false) => &FEW,
        };
        let names: Vec<String> = names.iter().map(|&n| n.to_owned()).collect();
        for set in named(sets.to_vec(), &names)? {
            let heads = (heads, heads, head, false);
            problems.push(problem(machine, heads, None, set, dtype)?);
        }
    }
    for heads in EQUAL.into_iter().filter(|_| !chosen) {
        for length in EQUAL_LENGTHS {
            problems.push(problem(machine, heads, None, equal(length), dtype)?);
        }
    }
    Ok(problems)
}

/// Returns problems with windows, in sequences of equal length.
pub(super) fn windows(dtype: DType, machine: &Machine) -> Result<Vec<Problem>, Report> {
    let mut problems = Vec::new();
    for heads in WINDOWED {
        let (lengths, windows) = match heads {
            (.., true) => CAUSAL_WINDOWS,
            (.., false) => FULL_WINDOWS,
        };
        for length in lengths {
            for window in windows.into_iter().filter(|w| w.is_none_or(|w| w < length)) {
                problems.push(problem(machine, heads, window, equal(length), dtype)?);
            }
        }
    }
    Ok(problems)
}

/// Returns a set of sequences of `length` tokens: [`EQUAL_TOKENS`] tokens in total, or a single longer sequence.
fn equal(length: u32) -> Set {
    let n = (EQUAL_TOKENS / length).max(1);
    Set {
        name: format!("{n}x{length}"),
        lens: vec![length; n as usize],
    }
}

fn problem(
    machine: &Machine,
    (heads, kv_heads, head, causal): Heads,
    window: Option<u32>,
    set: Set,
    dtype: DType,
) -> Result<Problem, Report> {
    let stride = (heads + 2 * kv_heads) * head;
    let column = |offset| HeadView::TokenMajor { offset, stride };
    let of = AttentionProblem {
        heads,
        kv_heads,
        head,
        scale: default_scale(head),
        causal,
        by: PositionBias {
            window,
            ..PositionBias::default()
        },
        q: column(0),
        k: column(heads * head),
        v: column((heads + kv_heads) * head),
    };
    Ok(Problem {
        contenders: contenders(machine, of, &set, dtype)?,
        case: Case::new("timed", &set.lens),
        task: Task::Attention {
            set: set.name,
            heads,
            kv_heads,
            head,
            causal,
            window,
            lens: set.lens,
        },
    })
}

/// Returns the kernel that a model launches for the lengths of `set`, followed by the alternatives that support the problem: the smallest
/// kernel for short sequences, warpgroup MMA, online softmax, grouped GEMMs, and unfused attention. With a window, warpgroup MMA with one
/// tile per CTA is also included.
fn contenders(
    machine: &Machine,
    of: AttentionProblem,
    set: &Set,
    dtype: DType,
) -> Result<Vec<Contender>, Report> {
    let AttentionProblem {
        heads,
        kv_heads,
        head,
        scale,
        q,
        k,
        v,
        ..
    } = of;
    let attention = Attention(MhaOnline { of, dtype });
    // One tensor contains the columns of Q, K and V, like the output of the merged projection.
    let merged = |chain: Chain| chain.sharing(&["q", "k", "v"], "qkv");
    let longest = set.longest();
    let batch = Extents::of(&set.lens).into_diagnostic()?;
    let picked = attention.by_length(machine, None).at(&batch).cloned();
    let picked = picked.ok_or_else(|| {
        miette!(
            "no kernel computes attention of {heads} heads of {head} for `{}` on the card `{}`",
            set.name,
            machine.name
        )
    })?;
    // Select as for a card without Hopper instructions, on which a model launches kernels for short sequences.
    let others = Machine {
        instructions: Instructions::Ampere,
        ..machine.clone()
    };
    let short = attention.by_length(&others, None).at(&batch).cloned();
    let short = short.filter(|kernel| matches!(kernel, KernelSpec::MhaShort(_)));
    let wgmma = attention.wgmma(machine).ok();
    let wgmma = wgmma.and_then(|by_length| by_length.at(&batch).cloned());
    let one_tile = MhaTile::for_adjusted_scores(head).map(|tile| MhaWgmma::of(&attention.0, tile));
    let one_tile = one_tile.filter(|kernel| {
        let serves = of.by.window.is_some() && kernel.check().is_ok();
        serves && machine.instructions == Instructions::Hopper
    });
    let mut all = vec![Contender::picked(
        label(&picked),
        merged(Chain::of(picked.clone())),
        ChosenBy::Rule,
    )];
    let alone = [
        ("mha_short of tight length", short),
        ("mha_wgmma", wgmma),
        ("mha_online", Some(attention.0.clone().into())),
        ("mha_wgmma with one tile per CTA", one_tile.map(Into::into)),
    ];
    // Skip a kernel with the name of the selected one: it differs only in its tile, and the selected kernel has the best tile for this
    // batch.
    for (name, kernel) in alone
        .into_iter()
        .filter(|(name, _)| *name != label(&picked))
    {
        if let Some(kernel) = kernel.filter(|kernel| *kernel != picked) {
            all.push(Contender::other(name, merged(Chain::of(kernel))));
        }
    }
    // Grouped attention does not support every problem.
    if let Ok(grouped) = attention.grouped() {
        let label = "grouped scores, reduction, context";
        all.push(Contender::other(label, merged(grouped)));
    }
    if of.causal || of.by.window.is_some() {
        return Ok(all);
    }
    let scores = AttentionScores {
        heads,
        kv_heads,
        head,
        scale: 1.0,
        q,
        k,
        dtype,
    };
    let softmax = by_limit(AttentionSoftmax::variants(heads, scale, dtype), longest);
    let context = AttentionContext {
        heads,
        kv_heads,
        head,
        v,
        out: HeadView::TokenMajor {
            offset: 0,
            stride: of.width(),
        },
        dtype,
    };
    let pieces = Chain::of(scores)
        .then(softmax, &[("out", "probabilities")])
        .then(context, &[]);
    all.push(Contender::other("scores, softmax, context", merged(pieces)));
    Ok(all)
}

/// Returns a name of the kernel for tables and figures. It does not depend on the shape.
fn label(kernel: &KernelSpec) -> &'static str {
    match kernel {
        KernelSpec::MhaShort(_) => "mha_short",
        KernelSpec::MhaWgmma(_) => "mha_wgmma",
        KernelSpec::MhaSplitKeys(_) => "mha_split_keys",
        _ => "mha_online",
    }
}
