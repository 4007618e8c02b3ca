//! Converts errors of task heads to errors of requests.

use super::ServeError;
use crate::{heads::HeadError, text::TextError};

impl From<HeadError> for ServeError {
    fn from(error: HeadError) -> Self {
        let problem = error.to_string();
        match error {
            HeadError::Text(TextError::Text { .. }) | HeadError::NoMask { .. } => {
                Self::invalid("inputs", problem)
            }
            HeadError::Text(TextError::Folder { .. } | TextError::PublishedTokenizer { .. })
            | HeadError::NoMaskToken
            | HeadError::NoEntailment { .. } => Self::invalid("model", problem),
            HeadError::Target { .. } => Self::invalid("targets", problem),
            HeadError::Template { .. } => Self::invalid("hypothesis_template", problem),
            HeadError::NoLabels => Self::invalid("candidate_labels", problem),
            HeadError::Option { option, found, max } => {
                let field = match option {
                    "max_tokens" => "max_seq_len",
                    "max_answer_tokens" => "max_answer_len",
                    other => other,
                };
                let problem = format!("`{field}` is {found}; expected a number from 1 to {max}");
                Self::invalid(field, problem)
            }
            HeadError::Text(_) | HeadError::Logits { .. } | HeadError::MaskRows { .. } => {
                Self::Internal(problem)
            }
        }
    }
}
