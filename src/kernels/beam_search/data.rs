//! Beam searches for kernel checks, in every state that a step can encounter.

use super::STRIDE;
use crate::{
    kernels::{
        Case, Fill, HostTensor,
        decoding::{Beam, Chosen, DeviceSamplingParams},
    },
    search::{Beams, EarlyStopping, Rules},
};

/// Test data for beam search. Requests with several numbers of beams are in consecutive rows, with some rows without beams between them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BeamData {
    /// A [`DeviceSamplingParams`] for each row.
    Requests { vocabulary: u32 },
    /// Candidate count of each beam: in most cases the maximum, sometimes a smaller count, 0 or [`Chosen::NotANumber`].
    Counts,
    /// Token ids of the candidates. The ids of a beam are distinct, and most of them are also candidates of neighboring beams.
    Ids { vocabulary: u32 },
    /// Scores of a search in progress.
    Scores,
    /// States of a search in progress.
    States,
}

impl BeamData {
    /// Returns the index of each row's request, and the beam that the row holds. A row between requests has an unused index and no beam.
    /// The rows after the last request have the index `usize::MAX`.
    fn teams(n: usize) -> Vec<(usize, Option<Beam>)> {
        let mut rows = Vec::new();
        for team in 0.. {
            let sizes = [
                (4, 1),
                (0, 1),
                (2, 1),
                (3, 3),
                (16, 1),
                (6, 2),
                (1, 1),
                (5, 1),
            ];
            let (size, groups) = sizes[team % sizes.len()];
            if rows.len() + size.max(1) > n {
                break;
            }
            if size == 0 {
                rows.push((team, None));
            }
            let of = Beams {
                n: size,
                groups,
                diversity: if groups > 1 { 0.7 } else { 0.0 },
                length_penalty: [1.0, 0.6, 0.0, -0.5, 2.0][team % 5],
                early_stopping: [
                    EarlyStopping::Heuristic,
                    EarlyStopping::Yes,
                    EarlyStopping::Never,
                ][team % 3],
            };
            rows.extend((0..size).map(|nth| (team, Some(Beam { of, nth }))));
        }
        rows.resize(n, (usize::MAX, None));
        rows
    }

    pub(in crate::kernels) fn make(self, case: &Case) -> HostTensor {
        let rows = Self::teams(case.lens.len());
        let known = Fill::known(case);
        let of_rows = rows.into_iter().zip(known);
        let ends = |team: usize| {
            if team % 4 == 2 {
                vec![5, 6, 7]
            } else {
                vec![5]
            }
        };
        match self {
            Self::Requests { vocabulary } => {
                let choices = of_rows.flat_map(|((team, beam), known)| {
                    let id = |n: u32| n % vocabulary;
                    let is_last = team % 5 == 4;
                    let n_prompt = match team % 4 {
                        1 => known as usize,
                        _ => known as usize / 2,
                    };
                    let mut rules = Rules {
                        end: ends(team).into_iter().map(id).collect(),
                        renormalize: team.is_multiple_of(2),
                        max_new_tokens: match is_last {
                            true => known as usize + 1 - n_prompt,
                            false => 1 << 20,
                        },
                        ..Rules::default()
                    };
                    match team % 7 {
                        0 => rules.repetition_penalty = 1.3,
                        1 => (rules.no_repeat_ngram, rules.repetition_penalty) = (2, 0.7),
                        2 => rules.min_length = 1 << 20,
                        3 => rules.suppressed = (0..40).map(|n| id(17 * n + 1)).collect(),
                        4 => rules.forced_last = vec![id(3), id(9)],
                        5 => rules.suppressed_first = vec![id(1)],
                        _ => {}
                    }
                    let choice = DeviceSamplingParams {
                        rules,
                        sampling: None,
                        seed: 0,
                        n_prompt,
                        log_probability: false,
                        beam,
                    };
                    choice.encode().expect("its lists are short")
                });
                HostTensor::Index(choices.map(i64::from).collect())
            }
            Self::Counts => {
                let counts = of_rows.enumerate().map(|(row, ((team, beam), _))| {
                    let all = beam.map_or(0, |b| b.of.candidates(ends(team).len()) as i64);
                    match (team % 9, row % 3) {
                        (3, 0) => all / 2,
                        (5, _) => 0,
                        (7, 1) => Chosen::NotANumber.code().into(),
                        _ => all,
                    }
                });
                HostTensor::Index(counts.collect())
            }
            Self::Ids { vocabulary } => {
                let ids = of_rows.enumerate().flat_map(|(row, _)| {
                    (0..STRIDE)
                        .map(move |i| i64::from((37 * (i + 3 * row as u32) + 5) % vocabulary))
                });
                HostTensor::Index(ids.collect())
            }
            Self::Scores => {
                let scores = of_rows.flat_map(|((team, beam), _)| {
                    let nth = beam.map_or(0, |beam| beam.nth);
                    let is_dead = team % 4 == 1 && nth > 0;
                    let running = if is_dead {
                        -1e9
                    } else {
                        -1.0 - 0.37 * nth as f32
                    };
                    [running, Self::best(team, nth).0]
                });
                HostTensor::Real(scores.collect())
            }
            Self::States => {
                let states = of_rows.flat_map(|((team, beam), _)| {
                    let (nth, of_group) = beam.map_or((0, 1), |b| (b.nth, b.of.n / b.of.groups));
                    let ended = Self::best(team, nth).1;
                    // Within a group, the tokens of the best sequences are stored in reverse order of rows.
                    let place = nth / of_group * of_group + of_group - 1 - nth % of_group;
                    let is_done = nth >= of_group && team.is_multiple_of(2);
                    let length = if ended { 1 + nth as i64 } else { 0 };
                    [i64::from(ended), length, place as i64, i64::from(is_done)]
                });
                HostTensor::Index(states.collect())
            }
        }
    }

    /// Returns the score of a request's `nth` best sequence (counted from 0), and whether this sequence has ended.
    fn best(team: usize, nth: usize) -> (f32, bool) {
        let n_ended = team % 5;
        match nth < n_ended {
            true => (-0.8 - 0.3 * nth as f32, true),
            false => (-1e9, false),
        }
    }
}
