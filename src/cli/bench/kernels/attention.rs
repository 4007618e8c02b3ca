//! Attention on packed sequences, fused or with the scores in memory (ByteTransformer, figures 11
//! and 12).

use miette::Report;

use super::{
    super::sets::{Set, named},
    problem::{Contender, Problem, Task, by_limit},
};
use crate::{
    DType,
    kernels::{
        attention::{
            AttentionContext, AttentionScores, AttentionSoftmax, HeadView, MhaOnline, MhaShort,
            usual_scale,
        },
        chain::Chain,
    },
};

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
pub(super) fn problems(dtype: DType, sets: &[Set], chosen: bool) -> Result<Vec<Problem>, Report> {
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
                contenders: contenders(heads, head, set.longest(), dtype),
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

/// What a model launches comes first: the short kernel, where it serves the longest sequence. It is
/// made for the longest that fits the chip; the tuner may take one for shorter sequences.
fn contenders(heads: u32, head: u32, longest: u32, dtype: DType) -> Vec<Contender> {
    let width = heads * head;
    let column = |i| HeadView::TokenMajor {
        offset: i * width,
        stride: 3 * width,
    };
    let (q, k, v) = (column(0), column(1), column(2));
    let scale = usual_scale(head);
    // One tensor has the columns of all three, as the merged projection writes it.
    let qkv = [("q", "qkv"), ("k", "qkv"), ("v", "qkv")];
    let max_len = MhaShort::max_len_for(head, dtype);
    let short = MhaShort {
        heads,
        head,
        scale,
        q,
        k,
        v,
        max_len,
        dtype,
    };
    let online = MhaOnline {
        heads,
        head,
        scale,
        q,
        k,
        v,
        dtype,
    };
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
    let pieces = Chain::new()
        .then(scores, &qkv)
        .then(softmax, &[("out", "probabilities")])
        .then(context, &qkv);

    let mut all = Vec::new();
    let short_serves = longest <= max_len;
    if short_serves {
        let least = MhaShort {
            max_len: longest.next_power_of_two().clamp(32, max_len),
            ..short.clone()
        };
        let chain = |kernel| Chain::new().then(kernel, &qkv);
        let tight =
            (least != short).then(|| Contender::other("mha_short of tight length", chain(least)));
        all.push(Contender::picked("mha_short", chain(short)));
        all.extend(tight);
    }
    let online = Contender::other("mha_online", Chain::new().then(online, &qkv));
    all.push(Contender {
        picked: !short_serves,
        ..online
    });
    all.push(Contender::other("scores, softmax, context", pieces));
    all
}
