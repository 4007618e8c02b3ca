//! Which kernels serve each problem, and who chose them.

use std::collections::BTreeMap;

use super::EngineError;
use crate::tune::{Card, Made, Origin, Picked, Picks, Problem, Range};

/// The picks of some problems, and where each problem's kernels come from.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    pub picks: Picks,
    /// By [`Problem::key`]; of all problems, those without picks too.
    pub origins: BTreeMap<String, Origin>,
}

impl Chosen {
    pub(in crate::engine) fn new(made: Made) -> Self {
        Self {
            picks: Picks::new(made),
            origins: BTreeMap::new(),
        }
    }

    /// The one kernel of each problem that an invariant program launches.
    pub(in crate::engine) fn for_all_sizes(
        card: &Card,
        problems: &[Problem],
    ) -> Result<Self, EngineError> {
        let mut chosen = Self::new(Made {
            card: card.clone(),
            nvrtc: (0, 0),
        });
        for problem in problems {
            // One that has no such kernel was refused when it was lowered.
            if let Ok(choice) = problem.for_all_sizes() {
                let range = Range {
                    up_to: None,
                    choice,
                };
                say(&problem.key(), &[range], Origin::Guess);
            }
            chosen.origins.insert(problem.key(), Origin::Guess);
        }
        Ok(chosen)
    }

    /// What the cost model guesses, of every problem.
    pub(in crate::engine) fn guesses(card: &Card, problems: &[Problem]) -> Self {
        let mut chosen = Self::new(Made {
            card: card.clone(),
            nvrtc: (0, 0),
        });
        problems.iter().for_each(|problem| chosen.guess(problem));
        chosen
    }

    pub(in crate::engine) fn add(&mut self, key: String, picked: Picked, from: Origin) {
        self.picks.problems.insert(key.clone(), picked);
        self.origins.insert(key, from);
    }

    pub(in crate::engine) fn guess(&mut self, problem: &Problem) {
        let key = problem.key();
        if tracing::enabled!(tracing::Level::INFO) {
            say(&key, &problem.guess(), Origin::Guess);
        }
        self.origins.insert(key, Origin::Guess);
    }
}

/// Says which kernels serve a problem, and who chose them.
pub(in crate::engine) fn say(key: &str, ranges: &[Range], from: Origin) {
    let shown: Vec<String> = ranges
        .iter()
        .map(|range| match range.up_to {
            Some(most) => format!("{} up to {most}", range.choice),
            None => range.choice.to_string(),
        })
        .collect();
    tracing::info!("{key}: {} ({})", shown.join(", "), from.words());
}
