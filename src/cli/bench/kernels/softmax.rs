//! Softmax over the keys, as attention in pieces has it (TurboTransformers, figure 5).

use super::problem::{Contender, HEADS, Problem, Task};
use crate::{
    DType,
    kernels::{
        attention::{AttentionSoftmax, SoftmaxForm},
        chain::Chain,
    },
};

/// Sequences and their length.
const SHAPES: [(u32, u32); 7] = [
    (1, 10),
    (1, 100),
    (1, 500),
    (20, 10),
    (20, 100),
    (20, 500),
    (16, 1024),
];

pub(super) fn problems(dtype: DType) -> Vec<Problem> {
    let problem = |(batch, length)| Problem {
        task: Task::Softmax {
            batch,
            length,
            heads: HEADS,
        },
        lens: vec![length; batch as usize],
        contenders: contenders(dtype, length),
    };
    SHAPES.into_iter().map(problem).collect()
}

/// What a model launches comes first, then the other ways to share out rows among lanes.
fn contenders(dtype: DType, length: u32) -> Vec<Contender> {
    let serves = |most: &Option<u64>| most.is_none_or(|most| u64::from(length) <= most);
    let (_, picked) = AttentionSoftmax::variants(HEADS, 1.0, dtype)
        .into_iter()
        .find(|(most, _)| serves(most))
        .expect("the last variant serves all lengths");
    let others = picked.candidates().into_iter().filter(|c| *c != picked);
    let other = |kernel: AttentionSoftmax| Contender::other(label(&kernel), Chain::of(kernel));
    let first = Contender::picked(label(&picked), Chain::of(picked.clone()));
    std::iter::once(first).chain(others.map(other)).collect()
}

fn label(softmax: &AttentionSoftmax) -> String {
    match softmax.form {
        SoftmaxForm::Held { lanes, x_rows, .. } => format!("{lanes} lanes, X = {x_rows}"),
        SoftmaxForm::Streamed => "streamed".to_owned(),
    }
}
