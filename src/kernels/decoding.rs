//! The end of a step on the device: the next token of each sequence, and the batch data of the next step, so that the device
//! goes on without the host.
//!
//! Sequences lie in *rows*, the batch of a step. Where a row's sequence has its tokens and slots is batch data, too: the table
//! [`Meta::Slots`], and a table of tokens beside it, which both begin at [`Meta::SlotStarts`].

use serde::{Deserialize, Serialize};

use super::{
    Case, Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Meta, Param, Tolerance,
    cache::BLOCK,
    rows::{count, one_per, read, read_meta, rows_by, storage, vector_width, write},
};
use crate::{
    machine::Machine,
    search::{Beams, EarlyStopping, Philox, Rules, Sampling, greedy, log_probability},
    tensor::{DType, Extents, Shape, Symbol},
};

/// What stands in the place of a chosen token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chosen {
    Token(u32),
    /// The row has no sequence.
    Idle,
    /// A logit is no finite number, nor −∞; its token is in the place of the log-probability.
    NotANumber,
    /// The rules leave no token.
    NoToken,
    /// The search of beams is done.
    Found,
}

impl Chosen {
    pub fn code(self) -> i32 {
        match self {
            Self::Token(id) => id as i32,
            Self::Idle => -1,
            Self::NotANumber => -2,
            Self::NoToken => -3,
            Self::Found => -4,
        }
    }

    pub fn of_code(code: i32) -> Self {
        match code {
            -1 => Self::Idle,
            -2 => Self::NotANumber,
            -4 => Self::Found,
            id => u32::try_from(id).map_or(Self::NoToken, Self::Token),
        }
    }
}

/// How a sequence goes on.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    pub rules: Rules,
    /// Draws; without, the most probable token comes.
    pub sampling: Option<Sampling>,
    pub seed: u64,
    /// Tokens of the prompt.
    pub n_prompt: usize,
    pub log_probability: bool,
    /// The search that the row is a beam of.
    pub beam: Option<Beam>,
}

/// One of the beams that are searched together, in neighbouring rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Beam {
    pub of: Beams,
    /// Its place among them.
    pub nth: usize,
}

impl Beam {
    /// Beams of a request at most.
    pub const MOST: usize = 16;
    /// Candidates of a beam, and of a group of beams, at most.
    pub const MOST_CANDIDATES: usize = 64;
}

impl Choice {
    /// 32-bit numbers that describe one.
    pub const WIDTH: u32 = 256;
    /// Numbers before the lists of tokens.
    const HEADER: usize = 24;

    /// The numbers, in the order of `templates/partials/request.cu`; `None` where its lists of tokens are too long, or
    /// there are more beams than a CTA searches, or rules that devices do not apply, or apply before a diversity.
    pub fn encode(&self) -> Option<Vec<i32>> {
        let rules = &self.rules;
        if !rules.suit_devices() {
            return None;
        }
        let whole = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let flags = [
            self.sampling.is_some(),
            self.log_probability,
            rules.renormalize,
        ];
        let flags = flags.into_iter().enumerate();
        let flags = flags.map(|(bit, flag)| i32::from(flag) << bit).sum();
        let sampling = self.sampling.unwrap_or_default();
        let mut last = rules.forced_last.clone();
        last.sort_unstable();
        last.dedup();
        let lists: [&[u32]; 5] = [
            &rules.end,
            &rules.suppressed,
            &rules.suppressed_first,
            rules.forced_first.as_slice(),
            &last,
        ];
        let least = rules
            .min_length
            .max(self.n_prompt.saturating_add(rules.min_new_tokens));
        let mut all = vec![
            whole(self.n_prompt),
            whole(self.n_prompt.saturating_add(rules.max_new_tokens)),
            whole(least),
            flags,
            sampling.temperature.to_bits() as i32,
            whole(sampling.top_k),
            sampling.top_p.to_bits() as i32,
            sampling.min_p.to_bits() as i32,
            self.seed as i32,
            (self.seed >> 32) as i32,
            rules.repetition_penalty.to_bits() as i32,
            whole(rules.no_repeat_ngram),
        ];
        all.extend(match self.beam {
            None => [0; 7],
            Some(Beam { of, nth }) => {
                let n_candidates = of.candidates(rules.end.len());
                if of.n > Beam::MOST || n_candidates > Beam::MOST_CANDIDATES {
                    return None;
                }
                // What all tokens sum to depends on what earlier groups take.
                if rules.renormalize && of.groups > 1 && of.diversity > 0.0 {
                    return None;
                }
                [
                    whole(of.n),
                    whole(of.groups),
                    whole(nth),
                    whole(n_candidates),
                    of.diversity.to_bits() as i32,
                    of.length_penalty.to_bits() as i32,
                    match of.early_stopping {
                        EarlyStopping::Heuristic => 0,
                        EarlyStopping::Yes => 1,
                        EarlyStopping::Never => 2,
                    },
                ]
            }
        });
        all.extend(lists.map(|list| whole(list.len())));
        debug_assert_eq!(all.len(), Self::HEADER);
        all.extend(lists.into_iter().flatten().map(|&id| id as i32));
        let width = Self::WIDTH as usize;
        (all.len() <= width).then(|| {
            all.resize(width, 0);
            all
        })
    }

    /// What [`Choice::encode`] wrote.
    pub(super) fn decode(numbers: &[i64]) -> Self {
        let whole = |at: usize| numbers[at] as usize;
        let real = |at: usize| f32::from_bits(numbers[at] as u32);
        let mut from = Self::HEADER;
        let [end, suppressed, suppressed_first, forced_first, forced_last] = [19, 20, 21, 22, 23]
            .map(|at| {
                let list = &numbers[from..from + whole(at)];
                from += list.len();
                list.iter().map(|&id| id as u32).collect::<Vec<u32>>()
            });
        let n_prompt = whole(0);
        Self {
            rules: Rules {
                renormalize: numbers[3] & 4 != 0,
                repetition_penalty: real(10),
                no_repeat_ngram: whole(11),
                end,
                min_length: whole(2),
                min_new_tokens: 0,
                forced_first: forced_first.first().copied(),
                forced_last,
                suppressed,
                suppressed_first,
                max_new_tokens: whole(1) - n_prompt,
                ..Rules::default()
            },
            sampling: (numbers[3] & 1 != 0).then(|| Sampling {
                temperature: real(4),
                top_k: whole(5),
                top_p: real(6),
                min_p: real(7),
            }),
            seed: numbers[8] as u32 as u64 | (numbers[9] as u32 as u64) << 32,
            n_prompt,
            log_probability: numbers[3] & 2 != 0,
            beam: (numbers[12] != 0).then(|| Beam {
                of: Beams {
                    n: whole(12),
                    groups: whole(13),
                    diversity: real(16),
                    length_penalty: real(17),
                    early_stopping: match numbers[18] {
                        1 => EarlyStopping::Yes,
                        2 => EarlyStopping::Never,
                        _ => EarlyStopping::Heuristic,
                    },
                },
                nth: whole(14),
            }),
        }
    }

    /// The token behind `tokens`, and its log-probability before rules and sampling, or 0 where that was not asked for.
    pub fn choose(&self, logits: &[f32], tokens: &[u32]) -> (Chosen, f32) {
        let is_wrong = |x: &f32| x.is_nan() || *x == f32::INFINITY;
        if let Some(at) = logits.iter().position(is_wrong) {
            return (Chosen::NotANumber, at as f32);
        }
        let mut ruled = logits.to_vec();
        self.rules.apply(&mut ruled, tokens, self.n_prompt);
        if ruled.iter().all(|&x| x == f32::NEG_INFINITY) {
            return (Chosen::NoToken, 0.0);
        }
        let id = match &self.sampling {
            None => greedy(&ruled),
            Some(sampling) => {
                let uniform = Philox::new(self.seed).uniform(tokens.len() as u64, 0);
                sampling.choose(&ruled, uniform)
            }
        };
        let value = match self.log_probability {
            true => log_probability(logits, id),
            false => 0.0,
        };
        (Chosen::Token(id), value)
    }

    /// One of several choices for a row of a check, none of them like its neighbours.
    fn of_row(row: usize, vocabulary: u32) -> Self {
        let id = |n: u32| n % vocabulary;
        let drawn = |temperature, top_k, top_p, min_p| {
            Some(Sampling {
                temperature,
                top_k,
                top_p,
                min_p,
            })
        };
        let mut rules = Rules {
            max_new_tokens: 1 << 20,
            end: vec![id(5)],
            ..Rules::default()
        };
        let sampling = match row % 14 {
            0 => None,
            1 => drawn(1.0, 50, 1.0, 0.0),
            2 => drawn(0.8, 50, 0.9, 0.0),
            3 => drawn(1.3, 0, 0.7, 0.0),
            4 => drawn(1.0, 0, 1.0, 0.0),
            5 => drawn(2.0, 0, 0.999, 0.0),
            6 => drawn(0.7, 700, 0.95, 0.01),
            7 => drawn(1.0, 0, 1.0, 0.2),
            8 => drawn(1.0, 1, 1.0, 0.0),
            9 => None,
            10 => drawn(1.0, 300, 1e-6, 0.0),
            11 => drawn(1.2, 100, 0.8, 0.05),
            12 => drawn(1.0, 0, 0.5, 0.02),
            _ => drawn(3.0, 40, 1.0, 0.05),
        };
        match row % 7 {
            1 => rules.repetition_penalty = 1.3,
            2 => (rules.no_repeat_ngram, rules.repetition_penalty) = (2, 0.7),
            3 => rules.min_length = 1 << 20,
            4 => rules.suppressed = (0..40).map(|n| id(17 * n + 1)).filter(|&n| n > 0).collect(),
            5 => (rules.forced_last, rules.max_new_tokens) = (vec![id(9), id(3), id(9)], 1),
            6 => rules.suppressed_first = vec![id(1)],
            _ => {}
        }
        Self {
            rules,
            sampling,
            seed: 0x1234_5678_9abc_def0 ^ row as u64,
            n_prompt: 0,
            log_probability: row.is_multiple_of(2),
            beam: None,
        }
    }
}

impl Fill {
    /// [`Choice`]s, one for each sequence, which differ.
    pub(super) fn choices(case: &Case, vocabulary: u32) -> Vec<i64> {
        let known = Self::known(case).into_iter().enumerate();
        known
            .flat_map(|(row, known)| {
                let mut choice = Choice::of_row(row, vocabulary);
                // A last token is one behind all that are known, and a first one is behind the prompt.
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

    /// Tokens that are known of each sequence: all its keys but one, so that another has room.
    pub(super) fn known(case: &Case) -> Vec<i64> {
        let past = case.lens.iter().zip(&case.cached);
        past.map(|(&len, &cached)| i64::from(len + cached) - 1)
            .collect()
    }
}

/// `logits [batch, vocabulary]`, `requests [batch, 256]` ([`Choice::encode`]), `known [batch]`, `tokens [slots]`,
/// `slot_starts [batch]` → `chosen [batch]` ([`Chosen::code`]), `log_probability [batch]`: the token behind the `known` ones of
/// each row; a row of which none is known has no sequence, and beams are not this kernel's. Between the two it leaves, for each group of tokens, the best
/// one (`best_of_group`), the sum of exponentials where a row is drawn without top-k (`sum_of_group`), the maximum and the sum of
/// its logits before rules where log-probabilities are asked for (`raw_of_group`); `n_arrived [batch]` is −1 before and after.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ChooseToken {
    pub vocabulary: u32,
    pub dtype: DType,
}

/// Threads of a CTA. More would leave a thread fewer registers than its sums take.
const THREADS: u32 = 512;
/// Groups of tokens at most.
pub(super) const MOST_GROUPS: u32 = 1024;
/// CTAs of a row at most: one for each piece.
const MOST_CTAS: u64 = 32;
/// CTAs that a launch has for each SM, where its rows are fewer: as many as run at once.
const CTAS_PER_SM: u64 = 1;
/// Tokens among which one is drawn without further passes over the row.
pub(super) const MOST_CANDIDATES: u32 = 1024;

impl ChooseToken {
    /// Groups that a row has room for.
    pub const GROUPS: usize = MOST_GROUPS as usize;

    fn rows(&self) -> LogitRows {
        LogitRows {
            vocabulary: self.vocabulary,
            dtype: self.dtype,
        }
    }

    /// What the kernel leaves of each group of a row.
    fn groups_of_row(&self, logits: &[f32], choice: &Choice, there: &[u32]) -> Groups {
        let mut ruled = logits.to_vec();
        let rules = without_forced(&choice.rules);
        rules.apply(&mut ruled, there, choice.n_prompt);
        let weighs = choice.sampling.filter(|sampling| sampling.top_k == 0);
        let temperature = weighs.map(|sampling| sampling.temperature);
        self.rows()
            .groups(logits, &ruled, temperature, choice.log_probability)
    }
}

/// Rules but those that leave few tokens, which need not look at groups, and but what comes after all tokens are known.
pub(super) fn without_forced(rules: &Rules) -> Rules {
    Rules {
        forced_first: None,
        forced_last: Vec::new(),
        renormalize: false,
        ..rules.clone()
    }
}

/// Rows of logits that several CTAs read by groups of tokens: each lane of a warp has one, of accesses that lie a warp apart.
#[derive(Clone, Copy)]
pub(super) struct LogitRows {
    pub(super) vocabulary: u32,
    pub(super) dtype: DType,
}

impl LogitRows {
    /// Logits of an access.
    fn vector(self) -> u32 {
        vector_width(self.dtype, &[self.vocabulary])
    }

    /// Accesses of a lane to its group.
    fn packs(self) -> u32 {
        self.vocabulary.div_ceil(MOST_GROUPS * self.vector())
    }

    /// Pieces of a row, each of a group for every lane of a warp.
    fn pieces(self) -> u32 {
        self.vocabulary.div_ceil(32 * self.packs() * self.vector())
    }

    pub(super) fn constants(self) -> Constants {
        Constants::from([
            ("storage", storage(self.dtype)),
            ("vocabulary", self.vocabulary.into()),
            ("vector", self.vector().into()),
            ("packs", self.packs().into()),
            ("most_groups", MOST_GROUPS.into()),
            ("most_candidates", MOST_CANDIDATES.into()),
            ("width", Choice::WIDTH.into()),
        ])
    }

    /// A launch of about so many CTAs for each SM. A row has one at least.
    pub(super) fn launch(
        self,
        rows: u64,
        threads: u32,
        ctas_per_sm: u64,
        machine: &Machine,
    ) -> Launch {
        let rows = rows.max(1);
        let of_row = (ctas_per_sm * u64::from(machine.sms) / rows).clamp(1, MOST_CTAS) as u32;
        Launch {
            grid: [of_row.min(self.pieces()), rows as u32, 1],
            threads,
            // Two bitmaps of the vocabulary.
            shared_bytes: 2 * 4 * self.vocabulary.div_ceil(32),
        }
    }

    /// What is left of the groups of a row: of each the best token behind the rules, the sum of exponentials of what the rules
    /// leave, where it is wanted at a temperature, and the largest and the sum of all logits, if they are wanted.
    pub(super) fn groups(
        self,
        logits: &[f32],
        ruled: &[f32],
        temperature: Option<f32>,
        logs: bool,
    ) -> Groups {
        let mut all = Groups::none();
        let (n, packs) = (self.vector() as usize, self.packs() as usize);
        for group in 0..32 * self.pieces() as usize {
            let first = |pack: usize| (group / 32 * packs + pack) * 32 * n + group % 32 * n;
            let ids = (0..packs).flat_map(|pack| first(pack)..first(pack) + n);
            let ids: Vec<usize> = ids.filter(|&id| id < logits.len()).collect();
            if ids.is_empty() {
                all.best[group] = 0;
                continue;
            }
            let of = |row: &[f32]| -> Vec<f32> { ids.iter().map(|&id| row[id]).collect() };
            let (ruled, raw) = (&of(ruled), &of(logits));
            let at = greedy(ruled) as usize;
            let top = ruled[at];
            let id = ids[at] as u32;
            all.best[group] = (u64::from(key_of(top)) << 32 | u64::from(!id)) as i64;
            if let Some(temperature) = temperature {
                let scaled = |x: f32| x / temperature;
                let exps = ruled.iter().filter(|x| **x > f32::NEG_INFINITY);
                let exps = exps.map(|&x| f64::from(scaled(x) - scaled(top)).exp());
                all.sum[group] = exps.sum::<f64>() as f32;
            }
            if logs {
                let top = raw.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let exps = raw.iter().map(|&x| f64::from(x - top).exp());
                all.raw[2 * group] = top;
                all.raw[2 * group + 1] = exps.sum::<f64>() as f32;
            }
        }
        all
    }
}

/// What is left of the groups of a row; what is not written stays −1 or NaN.
pub(super) struct Groups {
    pub(super) best: Vec<i64>,
    pub(super) sum: Vec<f32>,
    pub(super) raw: Vec<f32>,
}

impl Groups {
    pub(super) fn none() -> Self {
        let n = MOST_GROUPS as usize;
        Self {
            best: vec![-1; n],
            sum: vec![f32::NAN; n],
            raw: vec![f32::NAN; 2 * n],
        }
    }
}

/// Whole numbers in the order of the numbers; −0 is 0.
fn key_of(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    bits ^ (((bits as i32) >> 31) as u32 | 0x8000_0000)
}

fn requests(vocabulary: u32) -> Param {
    Param {
        name: "requests",
        role: super::Role::Read {
            dtype: DType::I32,
            shape: rows_by(Symbol::Batch, Choice::WIDTH),
            fill: Fill::Choices { vocabulary },
        },
    }
}

pub(super) fn per_row(name: &'static str, fill: Fill) -> Param {
    read(name, DType::I32, one_per(Symbol::Batch), fill)
}

pub(super) fn tokens(name: &'static str, vocabulary: u32) -> Param {
    read(
        name,
        DType::I32,
        one_per(Symbol::Slots),
        Fill::Below(vocabulary),
    )
}

pub(super) fn best_of_group() -> Param {
    write(
        "best_of_group",
        DType::I64,
        rows_by(Symbol::Batch, MOST_GROUPS),
    )
}

pub(super) fn sum_of_group() -> Param {
    write(
        "sum_of_group",
        DType::F32,
        rows_by(Symbol::Batch, MOST_GROUPS),
    )
}

pub(super) fn raw_of_group() -> Param {
    write(
        "raw_of_group",
        DType::F32,
        rows_by(Symbol::Batch, 2 * MOST_GROUPS),
    )
}

impl Kernel for ChooseToken {
    fn symbol(&self) -> String {
        format!("choose_token_{}_w{}", self.dtype, self.vocabulary)
    }

    fn template(&self) -> &'static str {
        "choose_token"
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
            read_meta("slot_starts", Meta::SlotStarts, row()),
            best_of_group(),
            sum_of_group(),
            raw_of_group(),
            write("n_arrived", DType::I32, row()),
            write("chosen", DType::I32, row()),
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
        let (width, vocabulary) = (Choice::WIDTH as usize, self.vocabulary as usize);
        let n = extents.batch as usize;
        let (mut best, mut sum, mut raw) = (Vec::new(), Vec::new(), Vec::new());
        let (mut chosen, mut values) = (Vec::new(), Vec::new());
        for row in 0..n {
            let there = &tokens[starts[row] as usize..][..known[row] as usize];
            let there: Vec<u32> = there.iter().map(|&id| id as u32).collect();
            let (groups, (token, value)) = match there.is_empty() {
                true => (Groups::none(), (Chosen::Idle, f32::NAN)),
                false => {
                    let choice = Choice::decode(&requests[row * width..][..width]);
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
            reason: "f32 sums of up to 256 exponentials of differences of up to 30, each rounded to 2^-24 of it; tokens are equal",
        }
    }
}

/// `chosen`, `log_probability`, `requests`, `known_before`, `tokens_before [slots]`, `slots`, `slot_starts`, `step_before [1]` →
/// `known`, `tokens`, `token_ids`, `positions`, `key_lens`, `token_slots`, `ring_ids` and `ring_values [RING, ROWS]`,
/// `ring_steps [RING]`, `step [1]`: the batch data of the next step, and what the host learns of this one. What is read before
/// and written after may be the same memory. Where nothing was chosen ([`Chosen::Idle`]) of a row that has tokens, it is new.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Advance;

impl Advance {
    /// Steps whose results the ring holds.
    pub const RING: usize = 16;
    /// Rows of a step at most.
    pub const ROWS: usize = 1024;
    /// A vocabulary for checks.
    const VOCABULARY: u32 = 11;

    /// The slot of rows without a sequence, of a cache of so many blocks: the first of the last block.
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
            ("width", Choice::WIDTH.into()),
            ("ring", (Self::RING as u64).into()),
            ("rows", (Self::ROWS as u64).into()),
            ("block", BLOCK.into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        let row = || one_per(Symbol::Batch);
        let ring = |columns: usize| Shape::fixed(&[(Self::RING * columns) as u64]);
        let ids = |name| write(name, DType::I32, row());
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
            read_meta("slots", Meta::Slots, one_per(Symbol::Slots)),
            read_meta("slot_starts", Meta::SlotStarts, row()),
            read(
                "step_before",
                DType::I32,
                Shape::fixed(&[1]),
                Fill::Below(1 << 20),
            ),
            ids("known"),
            write("tokens", DType::I32, one_per(Symbol::Slots)),
            ids("token_ids"),
            ids("positions"),
            ids("key_lens"),
            ids("token_slots"),
            write("ring_ids", DType::I32, ring(Self::ROWS)),
            write("ring_values", DType::F32, ring(Self::ROWS)),
            write("ring_steps", DType::I32, ring(1)),
            write("step", DType::I32, Shape::fixed(&[1])),
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
        let width = Choice::WIDTH as usize;
        let entry = step[0] as usize % Self::RING;
        // Whole numbers that are not written stay −1.
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
            let choice = Choice::decode(&requests[row * width..][..width]);
            let start = starts[row] as usize;
            let (mut len, mut last) = (before[row] as usize, 0);
            match Chosen::of_code(chosen[row] as i32) {
                Chosen::Token(id) if len > 0 => {
                    let most = choice.n_prompt + choice.rules.max_new_tokens;
                    let ends = choice.rules.ends(id) || len + 1 >= most;
                    // A search of beams says itself when it is done.
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

/// A vocabulary smaller than a warp, odd ones, and common ones.
pub(super) fn representative() -> Vec<KernelSpec> {
    let of = |dtype| {
        [7, 1003, 50257, 151_936].map(|vocabulary| ChooseToken { vocabulary, dtype }.into())
    };
    let dtypes = [DType::F32, DType::F16, DType::BF16];
    let choose = dtypes.into_iter().flat_map(of);
    choose.chain([Advance.into()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_choice_says_is_read_back() {
        for row in 0..84 {
            let mut choice = Choice::of_row(row, 50257);
            choice.n_prompt = row;
            let numbers = choice.encode().expect("its lists are short");
            assert_eq!(numbers.len(), Choice::WIDTH as usize);
            let numbers: Vec<i64> = numbers.into_iter().map(i64::from).collect();
            // Lists come back in order and without repetitions, and both kinds of least lengths as one.
            choice.rules.forced_last.sort_unstable();
            choice.rules.forced_last.dedup();
            choice.rules.min_length = choice.rules.min_length.max(row);
            let sampling = choice.sampling;
            let back = Choice::decode(&numbers);
            assert_eq!(back.sampling, sampling, "{row}");
            assert_eq!(back, choice, "{row}");
        }
    }

    #[test]
    fn lists_that_are_too_long_are_not_encoded() {
        let mut choice = Choice::of_row(0, 1000);
        let room = Choice::WIDTH as usize - Choice::HEADER - choice.rules.end.len();
        choice.rules.suppressed = (0..room as u32).collect();
        assert!(choice.encode().is_some());
        choice.rules.suppressed.push(999);
        assert_eq!(choice.encode(), None);
    }

    #[test]
    fn what_stands_in_a_tokens_place_is_told_apart() {
        let all = [
            Chosen::Token(0),
            Chosen::Token(151_935),
            Chosen::Idle,
            Chosen::NotANumber,
            Chosen::NoToken,
            Chosen::Found,
        ];
        for chosen in all {
            assert_eq!(Chosen::of_code(chosen.code()), chosen);
        }
    }

    /// The probabilities of what may be drawn, by sorting and f64 sums: each setting narrows what the one before left.
    fn probabilities(sampling: Sampling, logits: &[f32]) -> Vec<f64> {
        let softmax = |kept: &[(usize, f64)]| {
            let most = kept.iter().fold(f64::NEG_INFINITY, |m, k| m.max(k.1));
            let sum: f64 = kept.iter().map(|k| (k.1 - most).exp()).sum();
            let shares = kept.iter().map(|k| (k.0, k.1, (k.1 - most).exp() / sum));
            shares.collect::<Vec<_>>()
        };
        let temperature = f64::from(sampling.temperature);
        let scaled = logits.iter().map(|&x| f64::from(x) / temperature);
        let mut kept: Vec<(usize, f64)> = scaled.enumerate().collect();
        kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if sampling.top_k > 0 && sampling.top_k < kept.len() {
            let least = kept[sampling.top_k - 1].1;
            kept.retain(|k| k.1 >= least);
        }
        let mut before = 0.0;
        let nucleus = softmax(&kept).into_iter().filter(|share| {
            let is_kept = before < f64::from(sampling.top_p);
            before += share.2;
            is_kept
        });
        kept = nucleus.map(|share| (share.0, share.1)).collect();
        let shares = softmax(&kept);
        let least = shares[0].2 * f64::from(sampling.min_p);
        let kept: Vec<(usize, f64)> = shares
            .iter()
            .filter(|s| s.2 >= least)
            .map(|s| (s.0, s.1))
            .collect();
        let mut all = vec![0.0; logits.len()];
        for (id, _, share) in softmax(&kept) {
            all[id] = share;
        }
        all
    }

    /// Pearson's χ² of 20,000 draws for each of several settings together, at positions of one sequence and by seeds of many.
    #[test]
    fn what_is_drawn_has_the_probabilities_of_a_plain_softmax() {
        // Sums of three uniform numbers, some of them equal.
        let uniform = |i, j| Philox::new(77).uniform(i, j);
        let logits: Vec<f32> = (0..400u64)
            .map(|i| {
                let sum: f64 = (0..3).map(|j| uniform(i, j)).sum();
                ((sum * 40.0).round() / 8.0) as f32
            })
            .collect();
        let of = |temperature, top_k, top_p, min_p| Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
        };
        let settings = [
            of(1.0, 0, 1.0, 0.0),
            of(0.7, 50, 1.0, 0.0),
            of(1.4, 0, 0.8, 0.0),
            of(1.0, 0, 1.0, 0.05),
            of(0.9, 40, 0.9, 0.02),
            of(2.0, 120, 0.95, 0.1),
            of(0.3, 200, 0.99, 0.001),
        ];
        for (n, sampling) in settings.into_iter().enumerate() {
            let want = probabilities(sampling, &logits);
            for of_one_sequence in [true, false] {
                let draws = 20_000usize;
                let mut counts = vec![0usize; logits.len()];
                let tokens = vec![0u32; draws];
                for draw in 0..draws {
                    let (seed, len) = match of_one_sequence {
                        true => (n as u64, draw),
                        false => (1000 * n as u64 + draw as u64, 5),
                    };
                    let choice = Choice {
                        sampling: Some(sampling),
                        seed,
                        n_prompt: 0,
                        rules: Rules::default(),
                        log_probability: false,
                        beam: None,
                    };
                    let (Chosen::Token(id), _) = choice.choose(&logits, &tokens[..len]) else {
                        panic!("no token is drawn");
                    };
                    counts[id as usize] += 1;
                }
                // Tokens that are expected fewer than five times are one cell.
                let (mut chi, mut cells) = (0.0, 0u32);
                let mut rest = (0.0, 0.0);
                let mut add = |got: f64, expected: f64| {
                    chi += (got - expected).powi(2) / expected;
                    cells += 1;
                };
                for (&got, share) in counts.iter().zip(&want) {
                    let expected = share * draws as f64;
                    match expected {
                        0.0 => assert_eq!(got, 0, "a token is drawn that may not come"),
                        x if x < 5.0 => rest = (rest.0 + got as f64, rest.1 + expected),
                        _ => add(got as f64, expected),
                    }
                }
                if rest.1 > 0.0 {
                    add(rest.0, rest.1);
                }
                // Wilson and Hilferty's approximation of the quantile at four standard deviations.
                let free = f64::from(cells - 1);
                let spread = 2.0 / (9.0 * free);
                let most = free * (1.0 - spread + 4.0 * spread.sqrt()).powi(3);
                assert!(
                    cells > 2 && chi < most,
                    "{sampling:?}: {chi} of {most} in {cells} cells"
                );
            }
        }
    }

    #[test]
    fn logits_that_are_no_numbers_are_told_with_their_place() {
        let choice = Choice::of_row(0, 8);
        let mut logits = [0.5, 2.0, 2.0, f32::NEG_INFINITY];
        assert_eq!(choice.choose(&logits, &[3]).0, Chosen::Token(1));
        for wrong in [f32::NAN, f32::INFINITY] {
            logits[2] = wrong;
            assert_eq!(choice.choose(&logits, &[3]), (Chosen::NotANumber, 2.0));
        }
        let none = [f32::NEG_INFINITY; 4];
        assert_eq!(choice.choose(&none, &[3]).0, Chosen::NoToken);
    }
}
