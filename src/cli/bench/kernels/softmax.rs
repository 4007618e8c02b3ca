//! Softmax over the keys, as attention in pieces has it (TurboTransformers, figure 5).

use super::problem::{Contender, HEADS, Problem, Task};
use crate::{
    DType,
    kernels::{attention::AttentionSoftmax, chain::Chain},
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
        contenders: contenders(dtype),
    };
    SHAPES.into_iter().map(problem).collect()
}

/// What a model launches comes first.
fn contenders(dtype: DType) -> Vec<Contender> {
    let softmax = AttentionSoftmax {
        heads: HEADS,
        scale: 1.0,
        dtype,
    };
    vec![Contender::picked("attention_softmax", Chain::of(softmax))]
}
