//! Classification by labels that the model was not trained on. A model of natural language inference (NLI) scores
//! whether a text entails a sentence with the label.

use serde::Serialize;

use super::softmax;

/// Options of zero-shot classification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZeroShotOptions {
    /// Sentence in which `{}` is replaced by the label.
    pub template: String,
    /// Whether several labels may apply. Each is then scored independently.
    pub multi_label: bool,
}

impl Default for ZeroShotOptions {
    fn default() -> Self {
        Self {
            template: "This example is {}.".to_owned(),
            multi_label: false,
        }
    }
}

/// A label with its score.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LabelScore {
    pub label: String,
    pub score: f32,
}

impl LabelScore {
    /// Returns labels with their scores, highest first. Equal scores keep the order of the labels.
    pub fn ranked(labels: &[String], scores: Vec<f32>) -> Vec<Self> {
        let all = labels.iter().zip(scores);
        let mut all: Vec<Self> = all
            .map(|(label, score)| Self {
                label: label.clone(),
                score,
            })
            .collect();
        all.sort_by(|a, b| b.score.total_cmp(&a.score));
        all
    }
}

/// Indices of the labels for entailment and contradiction of a natural language inference model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entailment {
    entailment: usize,
    contradiction: usize,
}

impl Entailment {
    /// Finds the entailment label, whose name begins with `entail` in upper or lower case. As in the library transformers, the
    /// contradiction is the first label, or the last one if the first is the entailment. Returns `None` if no label is the entailment, or
    /// if the entailment is the only label.
    pub fn new(labels: &[String]) -> Option<Self> {
        let is_entailment = |label: &String| label.to_lowercase().starts_with("entail");
        let entailment = labels.iter().position(is_entailment)?;
        let contradiction = match entailment {
            0 => labels.len() - 1,
            _ => 0,
        };
        (contradiction != entailment).then_some(Self {
            entailment,
            contradiction,
        })
    }

    /// Returns the score of each label. `rows` has, for each label, the model's logits for the text paired with the sentence of that label.
    pub(super) fn scores(self, rows: &[&[f32]], multi_label: bool) -> Vec<f32> {
        let entails = |row: &&[f32]| {
            row.get(self.entailment)
                .copied()
                .unwrap_or(f32::NEG_INFINITY)
        };
        if multi_label || rows.len() == 1 {
            let score = |row: &&[f32]| {
                let no = row.get(self.contradiction).copied();
                let mut both = [no.unwrap_or(f32::NEG_INFINITY), entails(row)];
                softmax(&mut both);
                both[1]
            };
            return rows.iter().map(score).collect();
        }
        let mut scores: Vec<f32> = rows.iter().map(entails).collect();
        softmax(&mut scores);
        scores
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn the_label_of_entailment_is_found_by_its_name() {
        let found = |all: &[&str]| {
            Entailment::new(&names(all)).map(|found| (found.entailment, found.contradiction))
        };
        assert_eq!(
            found(&["contradiction", "neutral", "Entailment"]),
            Some((2, 0))
        );
        assert_eq!(
            found(&["ENTAILMENT", "NEUTRAL", "CONTRADICTION"]),
            Some((0, 2))
        );
        assert_eq!(found(&["entailment"]), None);
        assert_eq!(found(&["LABEL_0", "LABEL_1"]), None);
    }

    #[test]
    fn labels_exclude_each_other_or_are_scored_alone() {
        let nli = Entailment::new(&names(&["contradiction", "entailment"])).unwrap();
        let (a, b) = ([0.0, 3f32.ln()], [0.0, 0.0]);
        let near = |found: Vec<f32>, expected: &[f32]| {
            let off = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
            assert!(
                found.len() == expected.len() && off.fold(0.0, f32::max) < 1e-6,
                "{found:?}"
            );
        };
        near(nli.scores(&[&a, &b], false), &[0.75, 0.25]);
        near(nli.scores(&[&a, &b], true), &[0.75, 0.5]);
        near(nli.scores(&[&a], false), &[0.75]);
        let ranked = LabelScore::ranked(&names(&["x", "y", "z"]), vec![0.2, 0.6, 0.2]);
        let order: Vec<&str> = ranked.iter().map(|label| label.label.as_str()).collect();
        assert_eq!(order, ["y", "x", "z"]);
    }
}
