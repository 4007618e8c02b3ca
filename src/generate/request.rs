//! Requests, events and errors of a generator.

use crate::{
    runtime::batch::or_extend,
    search::{Beams, Hypothesis, Rules, Sampling},
};

/// Generation options of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingParams {
    pub rules: Rules,
    /// Sampling parameters; `None` selects the most probable token, unless `beams` is set.
    pub sampling: Option<Sampling>,
    /// Beam search parameters. Tokens are returned after the search ends.
    pub beams: Option<Beams>,
    /// The folder's settings for sampling and for beam search, whether or not the folder enables them. A caller that enables sampling or
    /// beam search without its own parameters uses these settings.
    pub default_sampling: Sampling,
    pub default_beams: Beams,
    /// Seed of sampling. Equal seeds give equal tokens, independent of other requests.
    pub seed: u64,
    /// Whether each token is returned with its log-probability.
    pub log_probabilities: bool,
    /// Number of most probable tokens to return at each position, with their log-probabilities. If it is not 0, the host selects the
    /// tokens.
    pub top_tokens: usize,
    /// Whether each token is returned with the logits of the whole vocabulary. The host then selects the tokens, and beam
    /// search is not available.
    pub logits: bool,
    /// The decoder's start token, for encoder-decoder models.
    pub decoder_start: Option<u32>,
    /// Token that is forced as the first new token if exactly one token precedes it and [`Rules::forced_first`] is `None`.
    pub forced_bos: Option<u32>,
    /// Maximum number of tokens of a sequence, including the prompt or, for encoder-decoder models, the start token. The number of new
    /// tokens is also limited by [`Rules::max_new_tokens`], the model's positions and the KV cache.
    pub max_length: Option<usize>,
    /// Unsupported sampling settings of the folder. If there are any, requests that use sampling are refused.
    pub unsupported_draws: Vec<UnsupportedDraw>,
}

impl SamplingParams {
    /// Returns the max number of new tokens after `before` tokens. `room` is the number of new tokens for which the model's positions and
    /// the KV cache have room. If [`Rules::max_new_tokens`] is set without a `max_length`, returns [`Rules::max_new_tokens`] even if it
    /// exceeds `room`. Admission then refuses a request that does not fit.
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

    /// Whether only the model's positions and the cache limit the number of new tokens.
    pub(super) fn has_no_limit(&self) -> bool {
        self.max_length.is_none() && self.rules.max_new_tokens == Rules::NO_LIMIT
    }
}

/// An unsupported sampling setting of `generation_config.json`, with its value as JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsupportedDraw {
    pub key: String,
    pub value: String,
}

/// A prompt and its generation options. For encoder-decoder models, the prompt is the source of the encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    pub prompt: Vec<u32>,
    pub options: SamplingParams,
}

/// Identifier of an admitted request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub(super) u64);

/// Reason why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// An end token was generated. It is the last token of the result.
    End,
    /// The maximum number of new tokens was reached.
    Length,
    Cancelled,
}

/// A result of a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The next token of a sequence. `log_probability` is set if requested, and is computed before rules and sampling.
    Token {
        ticket: Ticket,
        id: u32,
        log_probability: Option<f32>,
        /// The most probable tokens and their log-probabilities at this position, if requested.
        top_tokens: Vec<(u32, f32)>,
        /// The logits of this position before rules and sampling, of shape `[vocabulary]`; empty if not requested.
        logits: Vec<f32>,
    },
    /// The hypotheses of a beam search, best first. Token events of the best hypothesis follow.
    Found {
        ticket: Ticket,
        hypotheses: Vec<Hypothesis>,
    },
    Done {
        ticket: Ticket,
        reason: Reason,
    },
    /// The request failed. Other requests continue.
    Failed {
        ticket: Ticket,
        problem: Failure,
    },
}

impl Event {
    /// Returns the ticket of the request.
    pub fn ticket(&self) -> Ticket {
        match self {
            Self::Token { ticket, .. }
            | Self::Found { ticket, .. }
            | Self::Done { ticket, .. }
            | Self::Failed { ticket, .. } => *ticket,
        }
    }
}

/// Reason why a request failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Failure {
    /// A logit is NaN or infinite.
    #[error(
        "the logit of token {token} for new token {step}{} is NaN or infinite; the weights are damaged, or overflow the storage type: try bf16 or f32",
        beam.map(|beam| format!(" of beam {beam}")).unwrap_or_default()
    )]
    NotANumber {
        /// Index of the new token, from 0.
        step: usize,
        /// In a beam search, the beam that the token would have extended.
        beam: Option<usize>,
        token: usize,
    },
    #[error("the rules exclude every token for new token {step}")]
    NoToken {
        /// Index of the new token, from 0.
        step: usize,
    },
    /// The request never ran. Only [`Generator::write_all`](super::Generator::write_all) returns this.
    #[error(transparent)]
    Refused(#[from] AdmitError),
}

/// Reason why a request is refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AdmitError {
    #[error("the prompt has no tokens; begin with the model's first token, if it has one")]
    EmptyPrompt,
    #[error("max_new_tokens is 0; expected at least one token")]
    NoNewTokens,
    #[error(
        "the prompt's {prompt} tokens and {new} new ones are more than the model's {positions} positions; {}{}",
        match positions.saturating_sub(*prompt as u32) {
            0 => format!("shorten the prompt to at most {} tokens", positions.saturating_sub(*new as u32)),
            left => format!("shorten the prompt, or request at most {left} new tokens"),
        },
        or_extend(*extended)
    )]
    TooLong {
        prompt: usize,
        new: usize,
        positions: u32,
        /// The largest number of positions that the model can be built with, if that is more than `positions`.
        extended: Option<u32>,
    },
    /// The requested number of new tokens is more than the model's positions.
    #[error(
        "{new} new tokens after the start token are more than the model's {positions} positions; request at most {} new tokens",
        positions.saturating_sub(1)
    )]
    LongTarget { new: usize, positions: u32 },
    #[error(
        "the {before} existing tokens leave no room below the maximum length of {max_length} (`max_length` of the checkpoint folder); shorten the prompt, or set the number of new tokens (`--max-new`, `max_new_tokens`)"
    )]
    MaxLength { before: usize, max_length: usize },
    #[error(
        "the source has {tokens} tokens, more than the model's {positions} positions; shorten or split it"
    )]
    LongSource { tokens: usize, positions: u32 },
    #[error(
        "the model generates from a source and needs a start token; set `SamplingParams::decoder_start`, or `decoder_start_token_id` in generation_config.json"
    )]
    NoStart,
    #[error(
        "token {at} of the prompt is {id}, the model's padding token, which has no position; remove it"
    )]
    Skipped { at: usize, id: u32 },
    #[error("token {at} of the prompt is {id}, but the vocabulary has {vocabulary} tokens")]
    Id { at: usize, id: u32, vocabulary: u32 },
    #[error(
        "the token {id} is forced (`forced_bos_token_id` or `forced_eos_token_id` of the folder, or the request), but the vocabulary has {vocabulary} tokens"
    )]
    ForcedId { id: u32, vocabulary: u32 },
    #[error(transparent)]
    Sampling(#[from] crate::search::SamplingError),
    #[error(transparent)]
    Beams(#[from] crate::search::BeamsError),
    #[error("beam search and sampling cannot be combined; request one of the two")]
    BeamsAndSampling,
    #[error(
        "beam search cannot return logits, which belong to one sequence; request one of the two"
    )]
    BeamsAndLogits,
    #[error(
        "`{key}` of generation_config.json is {value}, which changes sampling and is not supported; disable sampling, or remove the key in a copy of the folder"
    )]
    UnsupportedDraw { key: String, value: String },
    #[error("the repetition penalty is {found}; expected a number above 0")]
    RepetitionPenalty { found: f32 },
    #[error("the {name} is {found}; expected a number")]
    Penalty { name: &'static str, found: f32 },
    #[error("the bias of token {id} is {found}; expected a number")]
    Bias { id: u32, found: f32 },
    #[error("there is a bias of token {id}, but the vocabulary has {vocabulary} tokens")]
    BiasId { id: u32, vocabulary: u32 },
    /// Running requests occupy the cache. The request will fit when they end.
    #[error(
        "the KV cache is full: {missing_bytes} bytes are missing; poll until other requests end"
    )]
    Full { missing_bytes: u64 },
    #[error(
        "the request needs {needed_bytes} bytes of KV cache, and its total size is {bytes}; use a larger cache, a shorter prompt or fewer new tokens"
    )]
    NeverFits { needed_bytes: u64, bytes: u64 },
}

/// Return value of an event callback that stops the event's request or all requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Stops the request of the event. Its memory is freed and it has no more events.
    One,
    /// Stops all requests.
    All,
}

/// Result of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    pub tokens: Vec<u32>,
    /// Log-probability of each token, before rules and sampling, if requested.
    pub log_probabilities: Vec<f32>,
    /// Score of the best hypothesis of a beam search.
    pub score: Option<f32>,
    /// The hypotheses of a beam search, best first; empty otherwise.
    pub hypotheses: Vec<Hypothesis>,
    /// `None` if the request was stopped, refused or failed.
    pub reason: Option<Reason>,
    /// Reason why the request was refused or failed.
    pub problem: Option<Failure>,
}

impl Generation {
    /// Adds an event to the result.
    pub(super) fn add(&mut self, event: &Event) {
        match event {
            Event::Token {
                id,
                log_probability,
                ..
            } => {
                self.tokens.push(*id);
                self.log_probabilities.extend(log_probability);
            }
            Event::Found { hypotheses, .. } => {
                self.score = hypotheses.first().map(|h| h.score);
                self.hypotheses.clone_from(hypotheses);
            }
            Event::Done { reason, .. } => self.reason = Some(*reason),
            Event::Failed { problem, .. } => self.problem = Some(problem.clone()),
        }
    }
}
