//! What is asked of a generator, what it tells, and why it refuses or fails.

use crate::search::{Beams, Hypothesis, Rules, Sampling};

/// How a request goes on from its prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generate {
    pub rules: Rules,
    /// Draws tokens; without, each is the most probable one.
    pub sampling: Option<Sampling>,
    /// Searches beams, whose tokens come when the search is done.
    pub beams: Option<Beams>,
    /// How tokens are drawn, and beams searched, by those who ask for that without saying more: as the folder has it.
    pub usual_sampling: Sampling,
    pub usual_beams: Beams,
    /// The draws' seed. Equal seeds give equal tokens, whatever runs beside.
    pub seed: u64,
    /// Whether each token comes with its log-probability.
    pub log_probabilities: bool,
    /// How many of the most probable tokens come with each that has a log-probability. The host chooses the tokens then.
    pub most_probable: usize,
    /// Whether each token comes with the logits of all tokens in its place. The host chooses the tokens then, and no beams are
    /// searched.
    pub logits: bool,
    /// The token before the first new one, in models that write from a source.
    pub decoder_start: Option<u32>,
    /// The first new token where one token stands before it, if [`Rules::forced_first`] has none.
    pub forced_bos: Option<u32>,
    /// Maximum number of tokens of a sequence, those of the prompt included; in models that write from a source, the one before the
    /// first new one. The number of new tokens is then the lowest of what this, [`Rules::max_new_tokens`], the model's positions and
    /// the KV cache leave.
    pub max_length: Option<usize>,
    /// Settings of the folder that change how tokens are drawn and that are not computed. Only requests that draw are refused for them.
    pub unsupported_draws: Vec<UnsupportedDraw>,
}

impl Generate {
    /// Number of new tokens after `before` others, where the model's positions and the cache leave room for `room`.
    pub(super) fn new_tokens(&self, before: usize, room: usize) -> usize {
        let new = self.rules.max_new_tokens;
        match self.max_length {
            None if new != Rules::NO_LIMIT => new,
            max_length => {
                let length = max_length.unwrap_or(usize::MAX);
                new.min(length.saturating_sub(before)).min(room)
            }
        }
    }

    /// Whether nothing but the model's positions and the cache limits the number of new tokens.
    pub(super) fn has_no_limit(&self) -> bool {
        self.max_length.is_none() && self.rules.max_new_tokens == Rules::NO_LIMIT
    }
}

/// A setting of `generation_config.json` that changes how tokens are drawn and is not computed, with its value as JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsupportedDraw {
    pub key: String,
    pub value: String,
}

/// A prompt, and how to go on from it. Of a model in parts, such as one that translates, the prompt is the source.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    pub prompt: Vec<u32>,
    pub options: Generate,
}

/// A request that was admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub(super) u64);

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A token that ends sequences came; it is the last.
    End,
    /// The most new tokens are there.
    Length,
    Cancelled,
}

/// What a step gave.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The next token of a sequence, with its log-probability before rules and sampling where that was asked for.
    Token {
        ticket: Ticket,
        id: u32,
        log_probability: Option<f32>,
        /// The most probable tokens in its place, with their log-probabilities, as many as were asked for.
        most_probable: Vec<(u32, f32)>,
        /// The logits of its place before rules and sampling, one for each token of the vocabulary; none where they were not asked for.
        logits: Vec<f32>,
    },
    /// What a search of beams found, the best first; its tokens follow.
    Found {
        ticket: Ticket,
        hypotheses: Vec<Hypothesis>,
    },
    Done {
        ticket: Ticket,
        reason: Reason,
    },
    /// The sequence ends for this; others go on.
    Failed {
        ticket: Ticket,
        problem: Failure,
    },
}

impl Event {
    /// Whose event it is.
    pub fn ticket(&self) -> Ticket {
        match self {
            Self::Token { ticket, .. }
            | Self::Found { ticket, .. }
            | Self::Done { ticket, .. }
            | Self::Failed { ticket, .. } => *ticket,
        }
    }
}

/// Why a request ends before its time.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Failure {
    /// The model gave something that nothing can be chosen by.
    #[error(
        "the logit of token {token} for new token {step}{} is NaN or infinite; the weights are damaged, or overflow the storage type: try bf16 or f32",
        beam.map(|beam| format!(" of beam {beam}")).unwrap_or_default()
    )]
    NotANumber {
        /// Which new token was to come, from 0.
        step: usize,
        /// The beam that it was to come behind, where beams are searched.
        beam: Option<usize>,
        token: usize,
    },
    #[error("the rules allow no token for new token {step}")]
    NoToken {
        /// Which new token was to come, from 0.
        step: usize,
    },
    /// It never ran; only [`Generator::write_all`](super::Generator::write_all) gives this.
    #[error(transparent)]
    Refused(#[from] AdmitError),
}

/// Why a request is not admitted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AdmitError {
    #[error("the prompt has no token; begin with the model's first token, if it has one")]
    EmptyPrompt,
    #[error("max_new_tokens is 0; expected at least one token")]
    NoNewTokens,
    #[error(
        "the prompt's {prompt} tokens and {new} new ones are more than the model's {positions} positions; {}",
        match positions.saturating_sub(*prompt as u32) {
            0 => format!("shorten the prompt to at most {} tokens", positions.saturating_sub(*new as u32)),
            left => format!("shorten the prompt, or ask for at most {left} new tokens"),
        }
    )]
    TooLong {
        prompt: usize,
        new: usize,
        positions: u32,
    },
    /// A model that writes from a source has no room for so many new tokens.
    #[error(
        "{new} new tokens behind the one that begins a text are more than the model's {positions} positions; ask for at most {} new tokens",
        positions.saturating_sub(1)
    )]
    LongTarget { new: usize, positions: u32 },
    #[error(
        "the {before} tokens that are there leave none of the {max_length} that a text may have (`max_length` of the checkpoint's folder); shorten the prompt, or say how many tokens may be new (`--max-new`, `max_new_tokens`)"
    )]
    MaxLength { before: usize, max_length: usize },
    #[error(
        "the source has {tokens} tokens, more than the model's {positions} positions; shorten or split it"
    )]
    LongSource { tokens: usize, positions: u32 },
    #[error(
        "the model writes from a source, and nothing says what stands before its first new token; set `Generate::decoder_start`, or `decoder_start_token_id` in config.json"
    )]
    NoStart,
    #[error(
        "token {at} of the prompt is {id}, the model's padding token, for which it counts no position; take it out"
    )]
    Skipped { at: usize, id: u32 },
    #[error("token {at} of the prompt is {id}, but the vocabulary has {vocabulary}")]
    Id { at: usize, id: u32, vocabulary: u32 },
    #[error(
        "the token {id} is forced (`forced_bos_token_id`, `forced_eos_token_id` or `--forced-bos`), but the vocabulary has {vocabulary}"
    )]
    ForcedId { id: u32, vocabulary: u32 },
    #[error(transparent)]
    Sampling(#[from] crate::search::SamplingError),
    #[error(transparent)]
    Beams(#[from] crate::search::BeamsError),
    #[error(
        "beams are searched for the most probable tokens, and sampling draws others; ask for one of the two"
    )]
    BeamsAndSampling,
    #[error(
        "beams are searched along many sequences, and logits come with the tokens of one; ask for one of the two"
    )]
    BeamsAndLogits,
    #[error(
        "`{key}` of generation_config.json is {value}, which changes how tokens are drawn and is not computed; take the most probable token instead, or take the key out of a copy of the folder"
    )]
    UnsupportedDraw { key: String, value: String },
    #[error("the repetition penalty is {found}; expected a number above 0")]
    RepetitionPenalty { found: f32 },
    #[error("the {name} is {found}; expected a number")]
    Penalty { name: &'static str, found: f32 },
    #[error("the bias of token {id} is {found}; expected a number")]
    Bias { id: u32, found: f32 },
    #[error("there is a bias of token {id}, but the vocabulary has {vocabulary}")]
    BiasId { id: u32, vocabulary: u32 },
    /// Others have the room now; it fits when they end.
    #[error(
        "the KV cache has no room now: {missing_bytes} bytes are missing; poll until others end"
    )]
    Full { missing_bytes: u64 },
    #[error(
        "the request needs {needed_bytes} bytes of KV cache, and there are {bytes} in all; ask for a larger cache, a shorter prompt or fewer new tokens"
    )]
    NeverFits { needed_bytes: u64, bytes: u64 },
}

/// What a caller that has seen an event wants no more of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The request that the event is of: its memory is free at once, and nothing more is told of it.
    One,
    /// All.
    All,
}

/// What was written behind a prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Written {
    pub tokens: Vec<u32>,
    /// Each token's log-probability, before rules and sampling, where they were asked for.
    pub log_probabilities: Vec<f32>,
    /// The best beam's score, where beams were searched.
    pub score: Option<f32>,
    /// `None` where it was broken off, and where it failed.
    pub reason: Option<Reason>,
    /// Why it failed, if it did.
    pub problem: Option<Failure>,
}

impl Written {
    /// Adds what an event tells.
    pub(super) fn take(&mut self, event: &Event) {
        match event {
            Event::Token {
                id,
                log_probability,
                ..
            } => {
                self.tokens.push(*id);
                self.log_probabilities.extend(log_probability);
            }
            Event::Found { hypotheses, .. } => self.score = hypotheses.first().map(|h| h.score),
            Event::Done { reason, .. } => self.reason = Some(*reason),
            Event::Failed { problem, .. } => self.problem = Some(problem.clone()),
        }
    }
}
