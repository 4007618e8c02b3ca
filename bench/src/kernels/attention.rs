//! Attention on packed sequences, fused or with the scores in memory (ByteTransformer, figures 11
//! and 12).

use gemmule::{
    DType,
    cli::bench::sets::{Set, named},
    kernels::{
        Instructions,
        attention::{
            AttentionContext, AttentionScores, AttentionSoftmax, HeadView, MhaTile, usual_scale,
        },
        chain::Chain,
    },
    tune::{self, Choice},
};
use miette::Report;

use super::problem::{Contender, Launched, Problem, Task, by_limit};

/// Sets of the project's own that are timed with 12 heads of 64; and with other heads.
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
/// Heads and their size: BERT-base, MiniLM, BERT-large.
const HEADS: [(u32, u32); 3] = [(12, 64), (12, 32), (16, 64)];

/// Every head shape on every set where the sets are the user's, else the project's choice of both.
pub(super) fn problems(
    dtype: DType,
    launched: &Launched,
    instructions: Instructions,
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
            problems.push(Problem {
                contenders: contenders(launched, instructions, heads, head, set.longest(), dtype),
                task: Task::Attention {
                    set: set.name,
                    heads,
                    head,
                    lens: set.lens.clone(),
                },
                lens: set.lens,
            });
        }
    }
    Ok(problems)
}

/// What a model launches comes first, then the other kernels for these lengths: the shortest of the
/// short ones, the online and the grouped one, and attention in pieces.
fn contenders(
    launched: &Launched,
    instructions: Instructions,
    heads: u32,
    head: u32,
    longest: u32,
    dtype: DType,
) -> Vec<Contender> {
    let width = heads * head;
    let column = |i| HeadView::TokenMajor {
        offset: i * width,
        stride: 3 * width,
    };
    let (q, k, v) = (column(0), column(1), column(2));
    let scale = usual_scale(head);
    let attention = tune::Problem::Attention {
        heads,
        head,
        scale,
        q,
        k,
        v,
        dtype,
        instructions,
    };
    // One tensor has the columns of all three, as the merged projection writes it.
    let merged = |chain: Chain| chain.sharing(&["q", "k", "v"], "qkv");
    let (picked, origin) = launched.choice(&attention, longest.into());
    let picked = Some(picked);
    let size = u64::from(longest);
    let serve = attention.candidates().into_iter();
    let mut serve: Vec<Choice> = serve
        .filter(|c| c.most().is_none_or(|most| size <= most))
        .collect();
    // Of the short kernels only the tightest, beside the pick.
    let tightest = serve.iter().filter_map(|c| c.most()).min();
    serve.retain(|c| Some(*c) == picked || c.most().is_none_or(|most| Some(most) == tightest));
    let tiles = MhaTile::by_length(head);
    let usual = tiles
        .iter()
        .find(|(most, _)| most.is_none_or(|most| size <= most));
    serve.retain(|c| match c {
        Choice::MhaWgmma(tile) => {
            Some(*c) == picked || usual.is_some_and(|(_, usual)| tile == usual)
        }
        _ => true,
    });
    serve.sort_by_key(|c| Some(*c) != picked);
    let mut all: Vec<Contender> = serve
        .into_iter()
        .filter_map(|choice| {
            let chain = merged(attention.chain(choice)?);
            let label = match choice {
                Choice::MhaShort { .. } if Some(choice) == picked => "mha_short",
                Choice::MhaShort { .. } => "mha_short of tight length",
                Choice::MhaWgmma(_) => "mha_wgmma",
                Choice::MhaGrouped => "grouped scores, reduction, context",
                _ => "mha_online",
            };
            Some(match Some(choice) == picked {
                true => Contender::picked(label, chain).by(origin),
                false => Contender::other(label, chain),
            })
        })
        .collect();
    let scores = AttentionScores {
        heads,
        head,
        scale: 1.0,
        q,
        k,
        dtype,
    };
    let softmax = by_limit(AttentionSoftmax::variants(heads, scale, dtype), longest);
    let context = AttentionContext {
        heads,
        head,
        v,
        out: HeadView::TokenMajor {
            offset: 0,
            stride: width,
        },
        dtype,
    };
    let pieces = Chain::of(scores)
        .then(softmax, &[("out", "probabilities")])
        .then(context, &[]);
    all.push(Contender::other("scores, softmax, context", merged(pieces)));
    all
}
