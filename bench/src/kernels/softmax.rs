//! Softmax over the keys in unfused attention (TurboTransformers, figure 5).

use gemmule::{
    DType,
    kernels::{
        Case,
        attention::{AttentionSoftmax, SoftmaxForm},
    },
};

use super::problem::{Contender, HEADS, Problem, Task, by_limit, variants};
use crate::launched::ChosenBy;

/// Number of sequences and length of each sequence, for every problem.
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
        case: Case::new("timed", &vec![length; batch as usize]),
        contenders: contenders(length, dtype),
    };
    SHAPES.into_iter().map(problem).collect()
}

/// Returns the kernel that a model launches, followed by its variants.
///
/// - In the variants `X=1`, `X=2` and `X=4`, a team of lanes (threads) processes X rows together (`warpAllReduce_XElem`). A team has the
///   same number of lanes as in the launched kernel. If the variant does not exist for this number, the next larger number is used.
/// - `a block a row` uses a block for each row.
/// - `streamed` supports any length.
fn contenders(length: u32, dtype: DType) -> Vec<Contender> {
    let picked = by_limit(AttentionSoftmax::new(HEADS, 1.0, dtype).by_length(), length);
    let candidates = picked.candidates();
    let held = |least: u32, x: u32| {
        let fits = |c: &&AttentionSoftmax| match c.form {
            SoftmaxForm::Resident { lanes, x_rows, .. } => lanes >= least && x_rows == x,
            SoftmaxForm::Streamed => false,
        };
        candidates.iter().find(fits).cloned()
    };
    let (lanes, x) = match picked.form {
        SoftmaxForm::Resident { lanes, x_rows, .. } => (lanes, x_rows),
        SoftmaxForm::Streamed => (0, 0),
    };
    let streamed = candidates
        .iter()
        .find(|c| c.form == SoftmaxForm::Streamed)
        .cloned();
    // A team of 64 lanes or more is a whole block.
    let others = [
        ("X=1", held(lanes, 1)),
        ("X=2", held(lanes, 2)),
        ("X=4", held(lanes, 4)),
        ("a block a row", held(64.max(lanes), 1)),
        ("streamed", streamed),
    ];
    let label = match (x, lanes) {
        (1, 64..) => "a block a row",
        (1, _) => "X=1",
        (2, _) => "X=2",
        (4, _) => "X=4",
        _ => "streamed",
    };
    variants((label, ChosenBy::Rule), &picked, others)
}
