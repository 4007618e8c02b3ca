//! Kernels that end a decode step on the device. They select the next token of each sequence and write the batch data of the next step, so
//! the device continues without waiting for the host.
//!
//! Each row of a step's batch holds at most one sequence. The sequence has an entry for each position in two tables: its tokens, and their
//! slots in the KV cache ([`BatchInput::Slots`]). [`BatchInput::SlotStarts`] is the offset of the first entry in both tables.

mod choice;
mod logit_rows;
#[cfg(test)]
mod tests;

pub use choice::{Beam, Chosen, DeviceSamplingParams};
pub(super) use logit_rows::{
    Groups, LogitRows, MAX_GROUPS, best_of_group, raw_of_group, sum_of_group,
};

use serde::{Deserialize, Serialize};

use super::{
    Case, Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance,
    cache::BLOCK,
    rows::{count, one_per, read, read_meta, rows_by, write},
};
use crate::{
    machine::Machine,
    ops::BatchInput,
    search::Rules,
    tensor::{DType, Element, Extents, Shape, Symbol},
};

impl Fill {
    /// Returns distinct [`DeviceSamplingParams`]s, one for each sequence.
    pub(super) fn choices(case: &Case, vocabulary: u32) -> Vec<i64> {
        let known = Self::known(case).into_iter().enumerate();
        known
            .flat_map(|(row, known)| {
                let mut choice = DeviceSamplingParams::of_row(row, vocabulary);
                // If a row has rules for the first or the last new token, all known tokens are prompt tokens. The next token is then the
                // first, or both the first and the last, so the rules apply to it.
                choice.n_prompt = match choice.rules.suppressed_first.is_empty() {
                    true => known as usize / 2,
                    false => known as usize,
                };
                if choice.rules.max_new_tokens == 1 {
                    choice.n_prompt = known as usize;
                }
                let numbers = choice.encode().expect("its lists are short");
                numbers.into_iter().map(i64::from)
            })
            .collect()
    }

    /// Returns the number of tokens of each sequence so far. It is the number of keys minus one, so the table of tokens has room for
    /// another token.
    pub(super) fn known(case: &Case) -> Vec<i64> {
        let past = case.lens.iter().zip(&case.cached);
        past.map(|(&len, &cached)| i64::from(len + cached) - 1)
            .collect()
    }
}

/// `logits [batch, vocabulary]`, `requests [batch, 256]` ([`DeviceSamplingParams::encode`]), `known [batch]`, `tokens [slots]`,
/// `slot_starts [batch]` → `chosen [batch]` ([`Chosen::code`]), `log_probability [batch]`: selects the next token of each row's sequence,
/// which has `known` tokens so far. A row with `known` = 0 holds no sequence. For rows that belong to a beam search, see
/// [`Candidates`](super::beam_search::Candidates).
///
/// The kernel also writes these tensors. A group is the tokens whose logits one lane reads.
///
/// - `best_of_group`: the most probable token of each group after the rules.
/// - `sum_of_group`, for rows that are sampled without top-k: the sum of the exponentials of the group's logits relative to the best token.
/// - `raw_of_group`, if log-probabilities are requested: the maximum of the group's logits before rules, and the sum of their exponentials
///   relative to the maximum.
/// - `n_arrived [batch]`: a counter of the row's CTAs that are done. It is −1 before and after a launch.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ChooseToken {
    pub vocabulary: u32,
    pub dtype: DType,
}

/// Threads per CTA. With more threads, a thread would have too few registers for its sums.
const THREADS: u32 = 512;
/// Max number of CTAs of a launch per SM. The limit lets all CTAs run concurrently. However, each row has at least one CTA, even if this
/// exceeds the limit.
const CTAS_PER_SM: u64 = 1;
impl ChooseToken {
    /// Max number of groups of a row.
    pub const GROUPS: usize = MAX_GROUPS as usize;

    fn rows(&self) -> LogitRows {
        LogitRows {
            vocabulary: self.vocabulary,
            dtype: self.dtype,
        }
    }

    /// Returns the results that the kernel writes for each group of a row. `there` contains the sequence's tokens so far.
    fn groups_of_row(
        &self,
        logits: &[f32],
        choice: &DeviceSamplingParams,
        there: &[u32],
    ) -> Groups {
        let mut ruled = logits.to_vec();
        let rules = without_forced(&choice.rules);
        rules.apply(&mut ruled, there, choice.n_prompt);
        let weighs = choice.sampling.filter(|sampling| sampling.top_k == 0);
        let temperature = weighs.map(|sampling| sampling.temperature);
        self.rows()
            .groups(logits, &ruled, temperature, choice.log_probability)
    }
}

/// Returns the rules that a lane can apply to its group of tokens. These are all rules except forced tokens and renormalization, which
/// needs the logits of all groups.
pub(super) fn without_forced(rules: &Rules) -> Rules {
    Rules {
        forced_first: None,
        forced_last: Vec::new(),
        renormalize: false,
        ..rules.clone()
    }
}

fn requests(vocabulary: u32) -> Param {
    Param {
        name: "requests",
        role: super::Role::Read {
            element: Element::I32,
            shape: rows_by(Symbol::Batch, DeviceSamplingParams::WIDTH),
            fill: Fill::Choices { vocabulary },
        },
    }
}

pub(super) fn per_row(name: &'static str, fill: Fill) -> Param {
    read(name, Element::I32, one_per(Symbol::Batch), fill)
}

pub(super) fn tokens(name: &'static str, vocabulary: u32) -> Param {
    read(
        name,
        Element::I32,
        one_per(Symbol::Slots),
        Fill::Below(vocabulary),
    )
}

impl Kernel for ChooseToken {
    facts! { template: "choose_token", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!("choose_token_{}_w{}", self.dtype, self.vocabulary)
    }

    fn constants(&self) -> Constants {
        let mut all = self.rows().constants();
        all.insert("beams", false.into());
        all
    }

    fn params(&self) -> Vec<Param> {
        let logits = Fill::Normal {
            mean: 0.0,
            deviation: 3.0,
        };
        let row = || one_per(Symbol::Batch);
        vec![
            read(
                "logits",
                self.dtype,
                rows_by(Symbol::Batch, self.vocabulary),
                logits,
            ),
            requests(self.vocabulary),
            per_row("known", Fill::Known),
            tokens("tokens", self.vocabulary),
            read_meta("slot_starts", BatchInput::SlotStarts, row()),
            best_of_group(),
            sum_of_group(),
            raw_of_group(),
            write("n_arrived", Element::I32, row()),
            write("chosen", Element::I32, row()),
            write("log_probability", DType::F32, row()),
        ]
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        self.rows()
            .launch(extents.batch, THREADS, CTAS_PER_SM, machine)
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
        let (mut chosen, mut values) = (Vec::new(), Vec::new());
        for row in 0..n {
            let there = &tokens[starts[row] as usize..][..known[row] as usize];
            let there: Vec<u32> = there.iter().map(|&id| id as u32).collect();
            let (groups, (token, value)) = match there.is_empty() {
                true => (Groups::none(), (Chosen::Idle, f32::NAN)),
                false => {
                    let choice = DeviceSamplingParams::decode(&requests[row * width..][..width]);
                    let logits = &logits[row * vocabulary..][..vocabulary];
                    let groups = self.groups_of_row(logits, &choice, &there);
                    (groups, choice.choose(logits, &there))
                }
            };
            best.extend(groups.best);
            sum.extend(groups.sum);
            raw.extend(groups.raw);
            chosen.push(i64::from(token.code()));
            values.push(value);
        }
        vec![
            HostTensor::Index(best),
            HostTensor::Real(sum),
            HostTensor::Real(raw),
            HostTensor::Index(vec![-1; n]),
            HostTensor::Index(chosen),
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
            absolute: 2e-5,
            relative: 1e-5,
            reason: "f32 sums of up to 256 exponentials of differences of up to 30, each with a relative error of 2^-24; tokens are equal",
        }
    }
}

/// `chosen`, `log_probability`, `requests`, `known_before`, `tokens_before [slots]`, `slots`, `slot_starts`, `step_before [1]` → `known`,
/// `tokens`, `token_ids`, `positions`, `key_lens`, `token_slots`, `ring_ids` and `ring_values [RING, ROWS]`, `ring_steps [RING]`, `step
/// [1]`: writes the batch data of the next step. The results of this step go to a ring of steps, which the host reads. A tensor that is
/// read as `…_before` may share its memory with the tensor that is written without this suffix. A row that has tokens but no chosen token
/// ([`Chosen::Idle`]) holds a new sequence.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Advance;

impl Advance {
    /// Number of steps whose results the ring holds.
    pub const RING: usize = 16;
    /// Max number of rows of a step.
    pub const ROWS: usize = 1024;
    /// Vocabulary size in checks.
    const VOCABULARY: u32 = 11;

    /// Cache slot to which rows without a sequence write their keys and values: the first slot of the last of `blocks` blocks.
    fn spare_slot(blocks: u64) -> i64 {
        (blocks as i64 - 1) * i64::from(BLOCK)
    }
}

impl Kernel for Advance {
    fn symbol(&self) -> String {
        "advance".into()
    }

    fn template(&self) -> &'static str {
        "advance"
    }

    fn constants(&self) -> Constants {
        Constants::from([
            ("width", DeviceSamplingParams::WIDTH.into()),
            ("ring", (Self::RING as u64).into()),
            ("rows", (Self::ROWS as u64).into()),
            ("block", BLOCK.into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        let row = || one_per(Symbol::Batch);
        let ring = |columns: usize| Shape::fixed(&[(Self::RING * columns) as u64]);
        let ids = |name| write(name, Element::I32, row());
        vec![
            per_row(
                "chosen",
                Fill::Chosen {
                    vocabulary: Self::VOCABULARY,
                },
            ),
            read("log_probability", DType::F32, row(), Fill::ACTIVATION),
            requests(Self::VOCABULARY),
            per_row("known_before", Fill::Known),
            tokens("tokens_before", Self::VOCABULARY),
            read_meta("slots", BatchInput::Slots, one_per(Symbol::Slots)),
            read_meta("slot_starts", BatchInput::SlotStarts, row()),
            read(
                "step_before",
                Element::I32,
                Shape::fixed(&[1]),
                Fill::Below(1 << 20),
            ),
            ids("known"),
            write("tokens", Element::I32, one_per(Symbol::Slots)),
            ids("token_ids"),
            ids("positions"),
            ids("key_lens"),
            ids("token_slots"),
            write("ring_ids", Element::I32, ring(Self::ROWS)),
            write("ring_values", DType::F32, ring(Self::ROWS)),
            write("ring_steps", Element::I32, ring(1)),
            write("step", Element::I32, Shape::fixed(&[1])),
            count(Symbol::Batch),
            count(Symbol::Blocks),
        ]
    }

    fn launch(&self, _: &Extents, _: &Machine) -> Launch {
        Launch::of_ctas(1, THREADS, 0)
    }

    fn threads(&self) -> u32 {
        THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let chosen = reads[0].index();
        let values = reads[1].real();
        let [requests, before, tokens_before, slots, starts, step] =
            [2, 3, 4, 5, 6, 7].map(|i| reads[i].index());
        let n = extents.batch as usize;
        let width = DeviceSamplingParams::WIDTH as usize;
        let entry = step[0] as usize % Self::RING;
        // Elements of `tokens` that are not written stay −1.
        let mut tokens = vec![-1; tokens_before.len()];
        let [
            mut known,
            mut ids,
            mut positions,
            mut key_lens,
            mut token_slots,
        ] = [(); 5].map(|()| vec![0i64; n]);
        let mut ring_ids = vec![-1; Self::RING * Self::ROWS];
        let mut ring_values = vec![f32::NAN; Self::RING * Self::ROWS];
        let mut ring_steps = vec![-1; Self::RING];
        for row in 0..n {
            let choice = DeviceSamplingParams::decode(&requests[row * width..][..width]);
            let start = starts[row] as usize;
            let (mut len, mut last) = (before[row] as usize, 0);
            match Chosen::of_code(chosen[row] as i32) {
                Chosen::Token(id) if len > 0 => {
                    let most = choice.n_prompt + choice.rules.max_new_tokens;
                    let ends = choice.rules.ends(id) || len + 1 >= most;
                    // `BeamStep` determines the end of a beam search.
                    match ends && choice.beam.is_none() {
                        true => len = 0,
                        false => {
                            tokens[start + len] = id.into();
                            (len, last) = (len + 1, id.into());
                        }
                    }
                }
                Chosen::Idle if len > 0 => last = tokens_before[start + len - 1],
                _ => len = 0,
            }
            known[row] = len as i64;
            (ids[row], positions[row], key_lens[row], token_slots[row]) = match len {
                0 => (0, 0, 1, Self::spare_slot(extents.blocks)),
                len => (last, len as i64 - 1, len as i64, slots[start + len - 1]),
            };
            ring_ids[entry * Self::ROWS + row] = chosen[row];
            ring_values[entry * Self::ROWS + row] = values[row];
        }
        ring_steps[entry] = step[0] + 1;
        vec![
            HostTensor::Index(known),
            HostTensor::Index(tokens),
            HostTensor::Index(ids),
            HostTensor::Index(positions),
            HostTensor::Index(key_lens),
            HostTensor::Index(token_slots),
            HostTensor::Index(ring_ids),
            HostTensor::Real(ring_values),
            HostTensor::Index(ring_steps),
            HostTensor::Index(vec![step[0] + 1]),
        ]
    }

    fn cases(&self) -> Vec<Case> {
        Case::cached()
            .into_iter()
            .chain([Case::new("many", &(1..100).collect::<Vec<u32>>())])
            .collect()
    }

    fn tolerance(&self) -> Tolerance {
        super::rows::COPIED
    }
}

/// Instances with vocabulary sizes that are smaller than a warp, odd, and common.
pub(super) fn representative() -> Vec<KernelSpec> {
    let of = |dtype| {
        [7, 1003, 50257, 151_936].map(|vocabulary| ChooseToken { vocabulary, dtype }.into())
    };
    let dtypes = [DType::F32, DType::F16, DType::BF16];
    let choose = dtypes.into_iter().flat_map(of);
    choose
        .chain([Advance.into(), super::upload::Scatter.into()])
        .collect()
}
