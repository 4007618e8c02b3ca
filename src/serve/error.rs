use std::{sync::Arc, time::Duration};

use crate::{EngineError, generate::AdmitError, schedule::Refusal, search::SamplingError};

/// Error of a request. The variant tells whether the client can fix the problem.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ServeError {
    /// The request is not valid. `param` is the field with the problem.
    #[error("{problem}")]
    Invalid {
        param: &'static str,
        problem: String,
    },
    /// The prompt and the new tokens together exceed the model's positions or its KV cache.
    #[error("{problem}")]
    ContextLength {
        param: &'static str,
        problem: String,
    },
    /// An input is not valid. `problem` follows the name of the input.
    #[error("input {index}{problem}")]
    Input { index: usize, problem: String },
    #[error(
        "input {index} has more than {limit} tokens, the model's maximum; shorten it, or have it truncated"
    )]
    TooLong { index: usize, limit: usize },
    #[error(
        "input {index} exceeds the largest batch that the device's memory or the scheduler's rows allow; shorten it"
    )]
    TooLarge { index: usize },
    #[error(
        "the request and its response need about {bytes} bytes of the server's memory; expected at most {limit}, so split it into several requests"
    )]
    LargeRequest { bytes: u64, limit: u64 },
    #[error(
        "the server is overloaded; send the request again after {} ms, or to another server",
        .retry_after.as_millis()
    )]
    Overloaded { retry_after: Duration },
    #[error(
        "the request cannot be answered before its deadline; send it with a later deadline, or to another server"
    )]
    Hopeless { retry_after: Duration },
    /// The request takes longer than its time limit even on an idle server.
    #[error(
        "the request alone takes about {} ms, but it must be answered within {} ms; split it, or send it with a later deadline",
        .takes.as_millis(), .within.as_millis()
    )]
    ShortDeadline { takes: Duration, within: Duration },
    #[error(
        "the request's deadline passed before its response was ready; send it with a later deadline"
    )]
    Deadline,
    #[error("the server is not ready: {why}; another server may answer")]
    NotReady { why: &'static str },
    #[error("there is no model `{name}`; the models are {}", known.join(", "))]
    NoModel { name: String, known: Vec<String> },
    #[error("the model `{model}` {does}, but the request is for {asked}; use another model")]
    UnsupportedTask {
        model: String,
        does: &'static str,
        asked: &'static str,
    },
    /// An internal error.
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

    pub(crate) fn input(index: usize, problem: impl Into<String>) -> Self {
        Self::Input {
            index,
            problem: problem.into(),
        }
    }

    /// If the error is about the field `prompt`, replaces that name with `field`, the name of the request field that has the input.
    pub(crate) fn of_source(self, field: &'static str) -> Self {
        let named = |param| match param {
            "prompt" => field,
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

    /// Prepends the index of a text to the message, for a request with several texts. `name` is the word for a text in such a request.
    pub(crate) fn of_text(self, name: &str, index: usize) -> Self {
        match self {
            Self::Invalid { param, problem } => {
                Self::invalid(param, format!("{name} {index}: {problem}"))
            }
            Self::ContextLength { param, problem } => {
                let problem = format!("{name} {index}: {problem}");
                Self::ContextLength { param, problem }
            }
            other => other,
        }
    }

    /// Converts this error of an input to the error of an equal input in another request. `index` is the index of the equal input in that
    /// request.
    pub(super) fn at(self, index: usize) -> Self {
        match self {
            Self::TooLong { limit, .. } => Self::TooLong { index, limit },
            Self::TooLarge { .. } => Self::TooLarge { index },
            Self::Input { problem, .. } => Self::Input { index, problem },
            other => other,
        }
    }

    /// Returns the error for an input that the scheduler refused.
    pub(super) fn refused(
        refusal: Refusal,
        index: usize,
        retry_after: impl FnOnce() -> Duration,
    ) -> Self {
        match refusal {
            Refusal::Expired => Self::Deadline,
            Refusal::Hopeless => Self::Hopeless {
                retry_after: retry_after(),
            },
            Refusal::TooLarge => Self::TooLarge { index },
        }
    }
}

impl From<AdmitError> for ServeError {
    fn from(error: AdmitError) -> Self {
        let param = match &error {
            AdmitError::NoNewTokens | AdmitError::LongTarget { .. } => "max_tokens",
            // The prompt fits, but the prompt and the new tokens together do not.
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
