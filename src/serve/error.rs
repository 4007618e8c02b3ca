use std::{sync::Arc, time::Duration};

use crate::{EngineError, engine::AdmitError, schedule::Refusal, search::SamplingError};

/// Why a request has no answer. What the sender can mend is told apart from what it cannot.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ServeError {
    /// The request itself is wrong; `param` is the field.
    #[error("{problem}")]
    Invalid {
        param: &'static str,
        problem: String,
    },
    /// A prompt and its new tokens are longer than the model's positions, or than its KV cache.
    #[error("{problem}")]
    ContextLength {
        param: &'static str,
        problem: String,
    },
    #[error(
        "input {index} has more than {limit} tokens, the most that the model takes; shorten it, or send \"truncate\": true to have it cut"
    )]
    TooLong { index: usize, limit: usize },
    #[error(
        "input {index} is larger than any batch here, by the device's memory or by the rows of the scheduler; shorten it"
    )]
    TooLarge { index: usize },
    #[error(
        "the request takes about {bytes} bytes of the server's memory, with its answer; expected at most {limit}, so split it into several requests"
    )]
    LargeRequest { bytes: u64, limit: u64 },
    #[error(
        "the server has as much to do as it can answer in time; send the request again after {} ms, or to another server",
        .retry_after.as_millis()
    )]
    Overloaded { retry_after: Duration },
    #[error(
        "the request's deadline lies before the time that its answer would take; send it with a later one, or to another server"
    )]
    Hopeless,
    #[error("the request's deadline passed before there was an answer; send it with a later one")]
    Deadline,
    #[error("the server is not ready: {why}; another one may answer")]
    NotReady { why: &'static str },
    #[error("there is no model `{name}` here; there is {}", known.join(", "))]
    NoModel { name: String, known: Vec<String> },
    #[error("the model `{model}` {does}, and this request asks for {asked}; ask another model")]
    UnsupportedTask {
        model: String,
        does: &'static str,
        asked: &'static str,
    },
    /// A mistake on this side.
    #[error("the server failed: {0}")]
    Internal(String),
    #[error("a batch failed: {0}")]
    Engine(Arc<EngineError>),
}

impl ServeError {
    pub(crate) fn invalid(param: &'static str, problem: impl Into<String>) -> Self {
        Self::Invalid {
            param,
            problem: problem.into(),
        }
    }

    /// The same error of a prompt that a conversation was written down as.
    pub(super) fn of_messages(self) -> Self {
        let named = |param| match param {
            "prompt" => "messages",
            other => other,
        };
        match self {
            Self::Invalid { param, problem } => Self::invalid(named(param), problem),
            Self::ContextLength { param, problem } => {
                let param = named(param);
                Self::ContextLength { param, problem }
            }
            other => other,
        }
    }

    /// The same error of an equal input that has another place in its request.
    pub(super) fn at(self, index: usize) -> Self {
        match self {
            Self::TooLong { limit, .. } => Self::TooLong { index, limit },
            Self::TooLarge { .. } => Self::TooLarge { index },
            other => other,
        }
    }

    /// The error of an input that was refused by the scheduler.
    pub(super) fn refused(refusal: Refusal, index: usize) -> Self {
        match refusal {
            Refusal::Expired => Self::Deadline,
            Refusal::Hopeless => Self::Hopeless,
            Refusal::TooLarge => Self::TooLarge { index },
        }
    }
}

impl From<AdmitError> for ServeError {
    fn from(error: AdmitError) -> Self {
        let param = match &error {
            AdmitError::NoNewTokens | AdmitError::LongTarget { .. } => "max_tokens",
            // A shorter text would have a place behind this prompt.
            AdmitError::TooLong {
                prompt, positions, ..
            } if *prompt < *positions as usize => "max_tokens",
            AdmitError::Sampling(SamplingError::Temperature { .. }) => "temperature",
            AdmitError::Sampling(SamplingError::TopP { .. }) => "top_p",
            AdmitError::UnsupportedDraw { .. } => "temperature",
            AdmitError::Bias { .. } | AdmitError::BiasId { .. } => "logit_bias",
            _ => "prompt",
        };
        let problem = error.to_string();
        match error {
            AdmitError::TooLong { .. }
            | AdmitError::LongTarget { .. }
            | AdmitError::LongSource { .. }
            | AdmitError::MaxLength { .. }
            | AdmitError::NeverFits { .. } => Self::ContextLength { param, problem },
            _ => Self::invalid(param, problem),
        }
    }
}
