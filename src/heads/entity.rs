//! Token classification: labels of tokens, and entities of one or more tokens.

use std::str::FromStr;

use serde::{Serialize, Serializer, ser::SerializeMap};

use super::argmax;

/// Rule for grouping tokens into entities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Aggregation {
    /// Each token is an entity.
    #[default]
    None,
    /// Adjacent tokens form an entity if their labels are equal without the prefixes `B-` and `I-`. A label with `B-` begins a new entity.
    Simple,
    /// Like `Simple`, but all tokens of a word get the label of the word's first token.
    First,
    /// Like `Simple`, but all tokens of a word get the label with the highest mean score over the tokens of the word.
    Average,
    /// Like `Simple`, but all tokens of a word get the label with the highest score at any token of the word.
    Max,
}

impl Aggregation {
    /// The rules with their names in the library transformers.
    pub const NAMES: [(&'static str, Self); 5] = [
        ("none", Self::None),
        ("simple", Self::Simple),
        ("first", Self::First),
        ("average", Self::Average),
        ("max", Self::Max),
    ];
}

impl FromStr for Aggregation {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        found.map(|(_, rule)| *rule).ok_or_else(|| {
            let name: String = name.chars().take(80).collect();
            format!(
                "there is no aggregation `{name}`; expected none, simple, first, average or max"
            )
        })
    }
}

/// Options of token classification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntityOptions {
    pub aggregation: Aggregation,
    /// Labels whose tokens and entities are left out of the result.
    pub ignored: Vec<String>,
}

impl Default for EntityOptions {
    fn default() -> Self {
        Self {
            aggregation: Aggregation::None,
            ignored: vec!["O".to_owned()],
        }
    }
}

/// A token with a label, or an entity of one or more tokens.
///
/// Serializes like the result of the pipeline of the library transformers, with the label of a token in `entity` and that of an entity in
/// `entity_group`.
#[derive(Clone, Debug, PartialEq)]
pub struct Entity {
    /// Name of the label; for an entity, without `B-` or `I-`.
    pub label: String,
    pub score: f32,
    /// Index of the token in its sequence; `None` for an entity.
    pub index: Option<usize>,
    /// The tokens as text.
    pub word: String,
    /// Range of the token or entity in the text, in characters.
    pub start: usize,
    pub end: usize,
}

impl Serialize for Entity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        let key = match self.index {
            Some(_) => "entity",
            None => "entity_group",
        };
        map.serialize_entry(key, &self.label)?;
        map.serialize_entry("score", &self.score)?;
        if let Some(index) = self.index {
            map.serialize_entry("index", &index)?;
        }
        map.serialize_entry("word", &self.word)?;
        map.serialize_entry("start", &self.start)?;
        map.serialize_entry("end", &self.end)?;
        map.end()
    }
}

/// A token of a text with its scores.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ScoredToken {
    pub index: usize,
    /// Name of the token in the vocabulary; for the unknown token, the part of the text that the unknown token replaces.
    pub word: String,
    pub start: usize,
    pub end: usize,
    /// Whether the token continues the word of the previous token.
    pub continues: bool,
    /// Probabilities of the labels.
    pub scores: Vec<f32>,
}

/// Returns the entities of a text. `join` turns tokens into text.
pub(super) fn entities<E>(
    tokens: Vec<ScoredToken>,
    labels: &[String],
    options: &EntityOptions,
    join: impl Fn(Vec<String>) -> Result<String, E>,
) -> Result<Vec<Entity>, E> {
    let name = |at: usize| labels.get(at).cloned().unwrap_or_default();
    let own = |token: ScoredToken| {
        let best = argmax(&token.scores);
        Entity {
            label: name(best),
            score: token.scores[best],
            index: Some(token.index),
            word: token.word,
            start: token.start,
            end: token.end,
        }
    };
    let mut all = match options.aggregation {
        Aggregation::None => tokens.into_iter().map(own).collect(),
        Aggregation::Simple => grouped(tokens.into_iter().map(own).collect(), &join)?,
        rule @ (Aggregation::First | Aggregation::Average | Aggregation::Max) => {
            let mut words: Vec<Vec<ScoredToken>> = Vec::new();
            for token in tokens {
                match words.last_mut() {
                    Some(word) if token.continues => word.push(token),
                    _ => words.push(vec![token]),
                }
            }
            let words = words.into_iter().map(|word| {
                let scores = scores_of_word(&word, rule);
                let best = argmax(&scores);
                Ok(Entity {
                    label: name(best),
                    score: scores[best],
                    index: None,
                    start: word[0].start,
                    end: word[word.len() - 1].end,
                    word: join(word.into_iter().map(|token| token.word).collect())?,
                })
            });
            grouped(words.collect::<Result<_, E>>()?, &join)?
        }
    };
    all.retain(|entity| !options.ignored.contains(&entity.label));
    Ok(all)
}

/// Returns the scores of the labels for a word.
fn scores_of_word(word: &[ScoredToken], rule: Aggregation) -> Vec<f32> {
    match rule {
        Aggregation::Average => {
            let mut sums = vec![0f64; word[0].scores.len()];
            for token in word {
                let scores = sums.iter_mut().zip(&token.scores);
                scores.for_each(|(sum, score)| *sum += f64::from(*score));
            }
            let n = word.len() as f64;
            sums.into_iter().map(|sum| (sum / n) as f32).collect()
        }
        Aggregation::Max => {
            let top = |token: &ScoredToken| token.scores[argmax(&token.scores)];
            let tops: Vec<f32> = word.iter().map(top).collect();
            word[argmax(&tops)].scores.clone()
        }
        Aggregation::First | Aggregation::None | Aggregation::Simple => word[0].scores.clone(),
    }
}

/// Returns whether a label marks the beginning of an entity, and its name without `B-` or `I-`.
fn tag(label: &str) -> (bool, &str) {
    match (label.strip_prefix("B-"), label.strip_prefix("I-")) {
        (Some(name), _) => (true, name),
        (None, Some(name)) => (false, name),
        (None, None) => (false, label),
    }
}

/// Groups adjacent tokens or words whose labels are equal without `B-` and `I-`. A label with `B-` begins a new group.
fn grouped<E>(
    words: Vec<Entity>,
    join: &impl Fn(Vec<String>) -> Result<String, E>,
) -> Result<Vec<Entity>, E> {
    let mut groups: Vec<Vec<Entity>> = Vec::new();
    for word in words {
        let (begins, name) = tag(&word.label);
        let goes_on = groups
            .last()
            .and_then(|group| group.last())
            .is_some_and(|last| !begins && tag(&last.label).1 == name);
        match groups.last_mut() {
            Some(group) if goes_on => group.push(word),
            _ => groups.push(vec![word]),
        }
    }
    let groups = groups.into_iter().map(|group| {
        let sum: f64 = group.iter().map(|word| f64::from(word.score)).sum();
        let first = &group[0];
        // The label of an entity is the part after the first hyphen, as in the library transformers.
        let label = first
            .label
            .split_once('-')
            .map_or(first.label.as_str(), |(_, name)| name);
        Ok(Entity {
            label: label.to_owned(),
            score: (sum / group.len() as f64) as f32,
            index: None,
            start: first.start,
            end: group[group.len() - 1].end,
            word: join(group.into_iter().map(|word| word.word).collect())?,
        })
    });
    groups.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example in the documentation of the library transformers: micro|soft com|pany.
    fn tokens() -> Vec<ScoredToken> {
        // Scores of O, B-ENT, I-ENT and I-NAME.
        let rows = [
            ("micro", false, [0.1, 0.5, 0.2, 0.2]),
            ("##soft", true, [0.1, 0.1, 0.2, 0.6]),
            ("com", false, [0.0, 0.1, 0.7, 0.2]),
            ("##pany", true, [0.1, 0.0, 0.9, 0.0]),
            ("rose", false, [0.9, 0.0, 0.1, 0.0]),
        ];
        let mut start = 0;
        let rows = rows.into_iter().enumerate();
        let rows = rows.map(|(at, (word, continues, scores))| {
            let begins = start + usize::from(at > 0 && !continues);
            start = begins + word.trim_start_matches("##").len();
            ScoredToken {
                index: at + 1,
                word: word.to_owned(),
                start: begins,
                end: start,
                continues,
                scores: scores.to_vec(),
            }
        });
        rows.collect()
    }

    fn shown(aggregation: Aggregation) -> String {
        let labels = ["O", "B-ENT", "I-ENT", "I-NAME"].map(str::to_owned);
        let options = EntityOptions {
            aggregation,
            ..EntityOptions::default()
        };
        let join = |words: Vec<String>| Ok::<_, ()>(words.join(" ").replace(" ##", ""));
        let all = entities(tokens(), &labels, &options, join).unwrap();
        let all = all.iter().map(|e| {
            format!(
                "{} {} {:.3} {}-{}",
                e.label, e.word, e.score, e.start, e.end
            )
        });
        all.collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn words_have_one_label_by_each_rule() {
        assert_eq!(
            shown(Aggregation::None),
            "B-ENT micro 0.500 0-5; I-NAME ##soft 0.600 5-9; I-ENT com 0.700 10-13; I-ENT ##pany 0.900 13-17"
        );
        assert_eq!(
            shown(Aggregation::Simple),
            "ENT micro 0.500 0-5; NAME ##soft 0.600 5-9; ENT company 0.800 10-17"
        );
        assert_eq!(
            shown(Aggregation::First),
            "ENT microsoft company 0.600 0-17"
        );
        assert_eq!(
            shown(Aggregation::Average),
            "NAME microsoft 0.400 0-9; ENT company 0.800 10-17"
        );
        assert_eq!(
            shown(Aggregation::Max),
            "NAME microsoft 0.600 0-9; ENT company 0.900 10-17"
        );
    }
}
