//! Scores of classifiers, as the text-classification pipeline of the library transformers computes them.

use serde_json::Value;

use super::Folder;
use crate::text::TextError;

/// Max number of labels of a classifier whose config.json does not name its labels.
const MAX_LABELS: u64 = 1 << 20;

/// Activation function that turns a cross-encoder's logits into scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Score {
    Identity,
    Sigmoid,
    Tanh,
}

impl Score {
    /// Returns the activation for a checkpoint that does not set one: a sigmoid for one label, the identity for several.
    pub fn usual(n_labels: u64) -> Self {
        match n_labels {
            1 => Score::Sigmoid,
            _ => Score::Identity,
        }
    }

    /// Returns the score of a logit.
    pub fn of(self, logit: f32) -> f32 {
        match self {
            Score::Identity => logit,
            Score::Sigmoid => 1.0 / (1.0 + (-logit).exp()),
            Score::Tanh => logit.tanh(),
        }
    }
}

/// Activation function that turns the logits of a classifier into scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClassScore {
    Identity,
    /// A sigmoid of each logit.
    Sigmoid,
    /// A softmax over all labels.
    Softmax,
}

impl ClassScore {
    /// Returns the activation for a checkpoint that does not set one: a sigmoid for one label, a softmax for several.
    pub fn usual(n_labels: usize) -> Self {
        match n_labels {
            1 => Self::Sigmoid,
            _ => Self::Softmax,
        }
    }

    /// Replaces the logits of one text with its scores.
    pub fn apply(self, logits: &mut [f32]) {
        match self {
            Self::Identity => {}
            Self::Sigmoid => logits.iter_mut().for_each(|x| *x = Score::Sigmoid.of(*x)),
            Self::Softmax => {
                let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                logits.iter_mut().for_each(|x| *x = (*x - top).exp());
                let sum: f32 = logits.iter().sum();
                logits.iter_mut().for_each(|x| *x /= sum);
            }
        }
    }
}

impl Folder {
    /// Returns the names of all labels of a classifier. Their number is the size of `id2label` in config.json, or else `num_labels`, or
    /// else 2.
    pub fn label_names(&self) -> Vec<String> {
        let get = |key: &str| self.config.as_ref().and_then(|config| config.get(key));
        let named = get("id2label")
            .and_then(|names| names.as_object())
            .map(|names| names.len());
        let counted = || {
            get("num_labels")
                .and_then(Value::as_u64)
                .map(|n| n.min(MAX_LABELS) as usize)
        };
        self.labels(named.or_else(counted).unwrap_or(2))
    }

    /// Returns whether config.json names a model that answers questions about a text.
    pub fn answers_questions(&self) -> bool {
        let named = self
            .config
            .as_ref()
            .and_then(|config| config.get("architectures")?.as_array());
        let mut named = named.into_iter().flatten().filter_map(Value::as_str);
        named.any(|name| name.ends_with("ForQuestionAnswering"))
    }

    /// Returns the activation for logits of `n_labels` labels, as the text-classification pipeline of the library transformers chooses it
    /// from `problem_type` of config.json.
    ///
    /// # Errors
    /// Returns an error if the library transformers has no such `problem_type`.
    pub fn class_score(&self, n_labels: usize) -> Result<ClassScore, TextError> {
        let config = self.config.as_ref();
        match config.and_then(|config| config.get("problem_type")) {
            None | Some(Value::Null) => Ok(ClassScore::usual(n_labels)),
            Some(Value::String(kind)) if kind == "regression" => Ok(ClassScore::Identity),
            Some(Value::String(kind)) if kind == "multi_label_classification" => {
                Ok(ClassScore::Sigmoid)
            }
            Some(Value::String(kind)) if kind == "single_label_classification" => {
                Ok(ClassScore::usual(n_labels))
            }
            Some(other) => Err(TextError::Folder {
                file: self.trunk.name("config.json"),
                problem: format!(
                    "`problem_type` is {other}; expected regression, single_label_classification or multi_label_classification"
                ),
            }),
        }
    }
}
