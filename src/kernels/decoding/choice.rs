//! Generation parameters of a sequence, their encoding for the kernels, and the outcomes of token selection.

use crate::search::{Beams, EarlyStopping, Philox, Rules, Sampling, greedy, log_probability};

/// Outcome of choosing a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chosen {
    Token(u32),
    /// The row holds no sequence.
    Idle,
    /// A logit is NaN or +∞. The id of its token is stored in place of the log-probability.
    NotANumber,
    /// The rules exclude every token.
    NoToken,
    /// The beam search is done and has found at least one sequence.
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

/// Parameters that determine how a sequence continues.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceSamplingParams {
    pub rules: Rules,
    /// Sampling parameters; `None` selects the most probable token.
    pub sampling: Option<Sampling>,
    pub seed: u64,
    /// Number of prompt tokens.
    pub n_prompt: usize,
    pub log_probability: bool,
    /// The beam that the row holds; `None` outside beam search.
    pub beam: Option<Beam>,
}

/// One beam of a search. The beams of a search are in consecutive rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Beam {
    pub of: Beams,
    /// Index of the beam in its search.
    pub nth: usize,
}

impl Beam {
    /// Max number of beams of a request.
    pub const MOST: usize = 16;
    /// Max number of candidates per beam, and per group of beams.
    pub const MOST_CANDIDATES: usize = 64;
}

impl DeviceSamplingParams {
    /// Number of 32-bit words of a sequence's encoded parameters.
    pub const WIDTH: u32 = 256;
    /// Number of 32-bit words in the encoded parameters before the lists of tokens, such as end tokens and suppressed tokens.
    pub(super) const HEADER: usize = 24;

    /// Returns the parameters as [`Self::WIDTH`] words, in the order of `templates/partials/request.cu`. Returns `None` in four cases:
    ///
    /// - The lists of tokens exceed the words that remain after the header.
    /// - The beams or their candidates exceed [`Beam::MOST`] or [`Beam::MOST_CANDIDATES`].
    /// - The device kernels do not implement one of the rules ([`Rules::suit_devices`]).
    /// - Renormalization is combined with a diversity penalty.
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
            // The limit avoids overflow: the kernels add the value to positions.
            whole(rules.no_repeat_ngram.min(1 << 30)),
        ];
        all.extend(match self.beam {
            None => [0; 7],
            Some(Beam { of, nth }) => {
                let n_candidates = of.candidates(rules.end.len());
                if of.n > Beam::MOST || n_candidates > Beam::MOST_CANDIDATES {
                    return None;
                }
                // Renormalization needs the sum over all tokens. With a diversity penalty, this sum depends on the tokens that earlier
                // groups of beams have taken.
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

    /// Inverts [`DeviceSamplingParams::encode`].
    pub(in crate::kernels) fn decode(numbers: &[i64]) -> Self {
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

    /// Returns the token that follows `tokens`, and its log-probability before rules and sampling (0 if not requested).
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

    /// Returns parameters for a row of a check. Neighboring rows get different parameters.
    pub(super) fn of_row(row: usize, vocabulary: u32) -> Self {
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
