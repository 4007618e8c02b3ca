//! Beam search on the device: a kernel that finds the most probable continuations of each beam, and a kernel that selects the new beams
//! from these.
//!
//! The beams of a request are in consecutive rows. Each row has a table of its tokens and a table of their slots in the KV cache. If a beam
//! continues the beam of another row, the kernel copies the tables of that row, not its keys and values.

mod data;
#[cfg(test)]
mod tests;

pub use data::BeamData;

use serde::{Deserialize, Serialize};

use super::{
    Case, Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance,
    decoding::{
        Beam, Chosen, DeviceSamplingParams, Groups, LogitRows, best_of_group, per_row,
        raw_of_group, sum_of_group, tokens, without_forced,
    },
    rows::{one_per, read, read_meta, rows_by, write},
};
use crate::{
    machine::Machine,
    ops::BatchInput,
    search::{BeamState, Beams, Ending, Kept, Rules, largest, log_sum},
    tensor::{DType, Element, Extents, Symbol},
};

/// `logits [batch, vocabulary]`, `requests [batch, 256]` ([`DeviceSamplingParams::encode`]), `known [batch]`, `tokens [slots]`,
/// `slot_starts [batch]` → `n_candidates [batch]`, `candidate_ids` and `candidate_values [batch, 64]`: the most probable continuations of
/// each beam ([`Beams::candidates`]), best first, with their log-probabilities after the request's rules.
///
/// Rows without a beam are skipped. If the logit of a token is NaN or +∞, the number of candidates is [`Chosen::NotANumber`], and the first
/// candidate is this token. Like [`ChooseToken`](super::decoding::ChooseToken), the kernel also writes the best token of each group of the
/// vocabulary. Unlike in `ChooseToken`, this best token is never a token with a repetition penalty, because the kernel evaluates such
/// tokens separately.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Candidates {
    pub vocabulary: u32,
    pub dtype: DType,
}

/// Max number of candidates per row.
const STRIDE: u32 = Beam::MOST_CANDIDATES as u32;
/// Threads per CTA of [`Candidates`].
const THREADS: u32 = 256;
/// Resident CTAs of [`Candidates`] per SM.
const CTAS_PER_SM: u32 = 3;

impl Candidates {
    fn rows(&self) -> LogitRows {
        LogitRows {
            vocabulary: self.vocabulary,
            dtype: self.dtype,
        }
    }

    fn groups_of_row(
        &self,
        logits: &[f32],
        choice: &DeviceSamplingParams,
        there: &[u32],
    ) -> Groups {
        let rules = Rules {
            repetition_penalty: 1.0,
            ..without_forced(&choice.rules)
        };
        let mut ruled = logits.to_vec();
        rules.apply(&mut ruled, there, choice.n_prompt);
        if choice.rules.repetition_penalty != 1.0 {
            there
                .iter()
                .for_each(|&id| ruled[id as usize] = f32::NEG_INFINITY);
        }
        let temperature = choice.rules.renormalize.then_some(1.0);
        self.rows().groups(logits, &ruled, temperature, true)
    }
}

impl Kernel for Candidates {
    facts! { template: "candidates", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!("candidates_{}_w{}", self.dtype, self.vocabulary)
    }

    fn constants(&self) -> Constants {
        let mut all = self.rows().constants();
        all.insert("beams", true.into());
        all.insert("stride", STRIDE.into());
        all.insert("ctas", CTAS_PER_SM.into());
        all
    }

    fn params(&self) -> Vec<Param> {
        let row = || one_per(Symbol::Batch);
        let vocabulary = self.vocabulary;
        let of_rows = rows_by(Symbol::Batch, STRIDE);
        vec![
            read(
                "logits",
                self.dtype,
                rows_by(Symbol::Batch, vocabulary),
                Fill::Logits { vocabulary },
            ),
            requests(vocabulary),
            per_row("known", Fill::Known),
            tokens("tokens", vocabulary),
            read_meta("slot_starts", BatchInput::SlotStarts, row()),
            best_of_group(),
            sum_of_group(),
            raw_of_group(),
            write("n_arrived", Element::I32, row()),
            write("n_candidates", Element::I32, row()),
            write("candidate_ids", Element::I32, of_rows.clone()),
            write("candidate_values", DType::F32, of_rows),
        ]
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        let ctas = u64::from(CTAS_PER_SM);
        self.rows().launch(extents.batch, THREADS, ctas, machine)
    }

    fn threads(&self) -> u32 {
        THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let logits = reads[0].real();
        let [requests, known, tokens, starts] = [1, 2, 3, 4].map(|i| reads[i].index());
        let (width, vocabulary) = (
            DeviceSamplingParams::WIDTH as usize,
            self.vocabulary as usize,
        );
        let n = extents.batch as usize;
        let (mut best, mut sum, mut raw) = (Vec::new(), Vec::new(), Vec::new());
        let mut counts = vec![-1; n];
        let mut ids = vec![-1; n * Beam::MOST_CANDIDATES];
        let mut values = vec![f32::NAN; n * Beam::MOST_CANDIDATES];
        for row in 0..n {
            let there = &tokens[starts[row] as usize..][..known[row] as usize];
            let there: Vec<u32> = there.iter().map(|&id| id as u32).collect();
            let choice = DeviceSamplingParams::decode(&requests[row * width..][..width]);
            let groups = match choice.beam.filter(|_| !there.is_empty()) {
                None => Groups::none(),
                Some(beam) => {
                    let logits = &logits[row * vocabulary..][..vocabulary];
                    let sum = log_sum(logits);
                    let mut ruled: Vec<f32> = logits.iter().map(|x| x - sum).collect();
                    choice.rules.apply(&mut ruled, &there, choice.n_prompt);
                    let found = largest(&ruled, beam.of.candidates(choice.rules.end.len()));
                    counts[row] = found.len() as i64;
                    for (i, (id, x)) in found.into_iter().enumerate() {
                        ids[row * Beam::MOST_CANDIDATES + i] = i64::from(id);
                        values[row * Beam::MOST_CANDIDATES + i] = x;
                    }
                    self.groups_of_row(logits, &choice, &there)
                }
            };
            best.extend(groups.best);
            sum.extend(groups.sum);
            raw.extend(groups.raw);
        }
        vec![
            HostTensor::Index(best),
            HostTensor::Real(sum),
            HostTensor::Real(raw),
            HostTensor::Index(vec![-1; n]),
            HostTensor::Index(counts),
            HostTensor::Index(ids),
            HostTensor::Real(values),
        ]
    }

    fn cases(&self) -> Vec<Case> {
        Case::cached()
            .into_iter()
            .chain(Case::standard())
            .chain([Case::new("many", &(1..60).collect::<Vec<u32>>())])
            .collect()
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance {
            absolute: 4e-5,
            relative: 1e-5,
            reason: "f32 sums of up to 256 exponentials of differences of up to 30, each with a relative error of 2^-24, for two logarithms; tokens are equal",
        }
    }
}

/// `requests`, `known [batch]`, `slot_starts [batch]`, `n_candidates [batch]`, `candidate_ids` and `candidate_values [batch, 64]`
/// ([`Candidates`]), `scores_before [batch, 2]`, `states_before [batch, 4]`, `tokens_before [slots]`, `slots_before [slots]` → `chosen
/// [batch]`, `log_probability [batch]`, `scores`, `states`, `tokens`, `slots`, `found [slots]`, `found_scores`, `found_lens`, `found_places
/// [batch]`: one search step ([`BeamState`]) for each request with beams. A tensor that is read as `…_before` may share its memory with the
/// tensor that is written without this suffix.
///
/// Row `i` of a request holds its running beam `i`, and the `i`-th of the best sequences (hypotheses) that the search has kept so far:
///
/// - `scores`: the score of the beam and the score of the best sequence.
/// - `states`: four integers. The first is 1 if the best sequence has ended. The second is the sequence's number of new tokens, and the
///   third is the row of the request whose `found` holds them. The fourth is 1 if the group of the beam is done.
/// - `tokens` and `slots`: written from the end of the prompt on, and only while the search continues.
/// - `found`: the tokens of a best sequence, without its prompt. They are written when the sequence becomes one of the best.
/// - `found_scores`, `found_lens` and `found_places`: written when the search is done.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BeamStep;

impl BeamStep {
    /// Number of elements per row of `scores`.
    pub const SCORES: usize = 2;
    /// Number of elements per row of `states`.
    pub const STATES: usize = 4;
    /// Threads per CTA. The kernel reuses the shared memory of the candidates for one integer per thread and beam, so this memory must be
    /// large enough for these integers.
    const THREADS: u32 = 128;
    /// Vocabulary size in checks.
    const VOCABULARY: u32 = 1003;

    /// Returns the scores and states of each row at the start of a search.
    pub fn start(beams: &Beams) -> (Vec<f32>, Vec<i32>) {
        let standing = BeamState::new(beams);
        let scores = standing.running.iter().zip(&standing.best);
        let scores = scores.flat_map(|(&running, &(best, _))| [running, best]);
        let states = (0..beams.n as i32).flat_map(|place| [0, 0, place, 0]);
        (scores.collect(), states.collect())
    }
}

/// Subtracts the diversity penalty from candidates that already reflect the rules. The library transformers subtracts this penalty before
/// it applies the rules. To get the same result, this function makes two changes. It scales the penalty of a token that occurs in the
/// sequence (`there`) by the repetition penalty, and does not penalize forced tokens.
fn diversify(
    candidates: &mut [(u32, f32)],
    taken: &[u32],
    choice: &DeviceSamplingParams,
    there: &[i64],
) {
    let (rules, n_new) = (&choice.rules, there.len() + 1 - choice.n_prompt);
    let diversity = choice.beam.map_or(0.0, |beam| beam.of.diversity);
    let is_forced = n_new == 1 && rules.forced_first.is_some()
        || n_new == rules.max_new_tokens && !rules.forced_last.is_empty();
    if is_forced {
        return;
    }
    for (id, x) in candidates {
        let n_taken = taken.iter().filter(|&taken| taken == id).count();
        let times = match there.contains(&i64::from(*id)) {
            true => rules.repetition_penalty,
            false => 1.0,
        };
        *x -= n_taken as f32 * diversity * times;
    }
}

fn requests(vocabulary: u32) -> Param {
    read(
        "requests",
        Element::I32,
        rows_by(Symbol::Batch, DeviceSamplingParams::WIDTH),
        Fill::Beams(BeamData::Requests { vocabulary }),
    )
}

impl Kernel for BeamStep {
    fn symbol(&self) -> String {
        "beam_step".into()
    }

    fn template(&self) -> &'static str {
        "beam_step"
    }

    fn constants(&self) -> Constants {
        Constants::from([
            ("width", DeviceSamplingParams::WIDTH.into()),
            ("stride", STRIDE.into()),
            ("most_beams", (Beam::MOST as u64).into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        let row = || one_per(Symbol::Batch);
        let by = |n: usize| rows_by(Symbol::Batch, n as u32);
        let slots = || one_per(Symbol::Slots);
        let fill = |data| Fill::Beams(data);
        let values = Fill::Normal {
            mean: -4.0,
            deviation: 2.0,
        };
        let vocabulary = Self::VOCABULARY;
        vec![
            requests(vocabulary),
            per_row("known", Fill::Known),
            read_meta("slot_starts", BatchInput::SlotStarts, row()),
            per_row("n_candidates", fill(BeamData::Counts)),
            read(
                "candidate_ids",
                Element::I32,
                by(Beam::MOST_CANDIDATES),
                fill(BeamData::Ids { vocabulary }),
            ),
            read(
                "candidate_values",
                DType::F32,
                by(Beam::MOST_CANDIDATES),
                values,
            ),
            read(
                "scores_before",
                DType::F32,
                by(Self::SCORES),
                fill(BeamData::Scores),
            ),
            read(
                "states_before",
                Element::I32,
                by(Self::STATES),
                fill(BeamData::States),
            ),
            tokens("tokens_before", vocabulary),
            read_meta("slots_before", BatchInput::Slots, slots()),
            write("chosen", Element::I32, row()),
            write("log_probability", DType::F32, row()),
            write("scores", DType::F32, by(Self::SCORES)),
            write("states", Element::I32, by(Self::STATES)),
            write("tokens", Element::I32, slots()),
            write("slots", Element::I32, slots()),
            write("found", Element::I32, slots()),
            write("found_scores", DType::F32, row()),
            write("found_lens", Element::I32, row()),
            write("found_places", Element::I32, row()),
        ]
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        Launch::of_ctas(extents.batch, Self::THREADS, 0)
    }

    fn threads(&self) -> u32 {
        Self::THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [requests, known, starts, counts, ids] = [0, 1, 2, 3, 4].map(|i| reads[i].index());
        let (values, scores_before) = (reads[5].real(), reads[6].real());
        let [states_before, tokens_before, slots_before] = [7, 8, 9].map(|i| reads[i].index());
        let width = DeviceSamplingParams::WIDTH as usize;
        let n_rows = extents.batch as usize;
        // Elements that are not written stay −1 (integers) or NaN (floats).
        let [mut chosen, mut lens, mut places] = [(); 3].map(|()| vec![-1i64; n_rows]);
        let [mut logs, mut found_scores] = [(); 2].map(|()| vec![f32::NAN; n_rows]);
        let mut scores = vec![f32::NAN; n_rows * Self::SCORES];
        let mut states = vec![-1; n_rows * Self::STATES];
        let [mut tokens, mut slots, mut found] = [(); 3].map(|()| vec![-1; tokens_before.len()]);
        for first in 0..n_rows {
            let n_known = known[first] as usize;
            if n_known == 0 {
                chosen[first] = Chosen::Idle.code().into();
                continue;
            }
            let choice = DeviceSamplingParams::decode(&requests[first * width..][..width]);
            let Some(Beam { of, nth: 0 }) = choice.beam else {
                continue;
            };
            let rows = first..first + of.n;
            let not_a_number = i64::from(Chosen::NotANumber.code());
            if let Some(row) = rows.clone().find(|&row| counts[row] == not_a_number) {
                chosen[rows.clone()].fill(not_a_number);
                logs[rows].fill(ids[row * Beam::MOST_CANDIDATES] as f32);
                continue;
            }
            let state = |row: usize, at: usize| states_before[row * Self::STATES + at];
            let of_group = of.n / of.groups;
            let mut standing = BeamState {
                running: rows
                    .clone()
                    .map(|row| scores_before[Self::SCORES * row])
                    .collect(),
                best: rows
                    .clone()
                    .map(|row| (scores_before[Self::SCORES * row + 1], state(row, 0) != 0))
                    .collect(),
                done: rows
                    .clone()
                    .step_by(of_group)
                    .map(|row| state(row, 3) != 0)
                    .collect(),
            };
            let of_row = |row: usize| -> Vec<(u32, f32)> {
                let from = row * Beam::MOST_CANDIDATES;
                let all = ids[from..].iter().zip(&values[from..]);
                let all = all.take(counts[row] as usize);
                all.map(|(&id, &x)| (id as u32, x)).collect()
            };
            let ending = Ending {
                ends: &choice.rules.end,
                n_new: n_known + 1 - choice.n_prompt,
                most: choice.rules.max_new_tokens,
            };
            let of_beam = |beam: usize, taken: &[u32]| {
                let row = first + beam;
                let there = &tokens_before[starts[row] as usize..][..n_known];
                let mut all = of_row(row);
                diversify(&mut all, taken, &choice, there);
                all
            };
            let stepped = standing.step(&of, of_beam, ending);
            let tokens_of = |row: usize| {
                let start = starts[row] as usize;
                &tokens_before[start + choice.n_prompt..start + n_known]
            };
            let mut used: Vec<i64> = Vec::new();
            for kept in &stepped.kept {
                if let Kept::Before(place) = kept {
                    used.push(state(first + place, 2));
                }
            }
            for (i, kept) in stepped.kept.iter().enumerate() {
                let row = first + i;
                let own = &mut states[row * Self::STATES..][..Self::STATES];
                own[0] = i64::from(standing.best[i].1);
                (own[1], own[2]) = match *kept {
                    Kept::Before(place) => (state(first + place, 1), state(first + place, 2)),
                    Kept::New(step) => {
                        // Find the first free row of the group. A row is free if its part of `found` holds none of the kept sequences.
                        let of_group = i / of_group * of_group..(i / of_group + 1) * of_group;
                        let free = of_group.map(|place| place as i64);
                        let place = free.into_iter().find(|place| !used.contains(place));
                        let place = place.expect("there are as many places as sequences");
                        used.push(place);
                        let to = starts[first + place as usize] as usize;
                        let before = tokens_of(first + step.parent);
                        found[to..to + before.len()].copy_from_slice(before);
                        found[to + before.len()] = step.token.into();
                        (ending.n_new as i64, place)
                    }
                };
                own[3] = i64::from(standing.done[i / of_group]);
                scores[row * Self::SCORES] = standing.running[i];
                scores[row * Self::SCORES + 1] = standing.best[i].0;
                logs[row] = standing.running[i];
            }
            let any = rows.clone().any(|row| states[row * Self::STATES + 1] > 0);
            for (row, step) in rows.clone().zip(&stepped.steps) {
                if standing.is_done() {
                    let end = if any { Chosen::Found } else { Chosen::NoToken };
                    chosen[row] = end.code().into();
                    found_scores[row] = scores[row * Self::SCORES + 1];
                    lens[row] = states[row * Self::STATES + 1];
                    places[row] = states[row * Self::STATES + 2];
                    continue;
                }
                chosen[row] = step.token.into();
                let to = starts[row] as usize + choice.n_prompt;
                let from = starts[first + step.parent] as usize + choice.n_prompt;
                let n = n_known - choice.n_prompt;
                tokens[to..to + n].copy_from_slice(&tokens_before[from..from + n]);
                slots[to..to + n].copy_from_slice(&slots_before[from..from + n]);
            }
        }
        vec![
            HostTensor::Index(chosen),
            HostTensor::Real(logs),
            HostTensor::Real(scores),
            HostTensor::Index(states),
            HostTensor::Index(tokens),
            HostTensor::Index(slots),
            HostTensor::Index(found),
            HostTensor::Real(found_scores),
            HostTensor::Index(lens),
            HostTensor::Index(places),
        ]
    }

    /// Returns batches in which all rows have the same number of tokens, like the beams of a request.
    fn cases(&self) -> Vec<Case> {
        let of = |name, rows: usize, known: u32| Case {
            cached: vec![known; rows],
            ..Case::new(name, &vec![1; rows])
        };
        vec![
            of("idle", 6, 0),
            of("first", 101, 1),
            of("later", 202, 37),
            of("long", 47, 300),
        ]
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance {
            absolute: 1e-6,
            relative: 1e-6,
            reason: "sums of two numbers, and a quotient by a power that is rounded twice",
        }
    }
}

/// Instances with vocabulary sizes that are smaller than a warp, odd, and common.
pub(super) fn representative() -> Vec<KernelSpec> {
    let of =
        |dtype| [7, 1003, 50257, 58_101].map(|vocabulary| Candidates { vocabulary, dtype }.into());
    let dtypes = [DType::F32, DType::F16, DType::BF16];
    let candidates = dtypes.into_iter().flat_map(of);
    candidates.chain([BeamStep.into()]).collect()
}
