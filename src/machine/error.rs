use super::Machine;
use crate::names::nearest;

/// An error in reading or finding the description of a card.
#[derive(Clone, Debug, thiserror::Error)]
pub enum MachineError {
    #[error("the card description `{name}` is invalid: {problem}")]
    File { name: String, problem: String },
    #[error("`{name}` is not a card that gemmule describes{near}; expected one of {known}")]
    Unknown {
        name: String,
        /// Part of the message that suggests the most similar name; empty if no name is similar.
        near: String,
        known: String,
    },
    #[error(
        "{card} is not supported: its compute capability is {}.{}; expected 8.0 or newer",
        capability.0,
        capability.1
    )]
    TooOld {
        card: String,
        capability: (u32, u32),
    },
}

impl MachineError {
    pub(super) fn unknown(name: &str, all: &[Machine]) -> Self {
        let known: Vec<&str> = all.iter().map(|machine| machine.name.as_str()).collect();
        Self::Unknown {
            name: name.to_owned(),
            near: nearest(name, known.iter().copied())
                .map_or_else(String::new, |near| format!("; the nearest is `{near}`")),
            known: known.join(", "),
        }
    }
}
