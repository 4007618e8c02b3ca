//! Inputs of requests: texts, or token ids.

use std::{path::PathBuf, sync::Arc};

use miette::{Report, miette};

use crate::{
    EngineError,
    files::{self, Kind},
};

/// Options of the inputs.
#[derive(clap::Args)]
pub(super) struct InputOptions {
    /// Send token ids below N instead of texts, so that the server does not have to tokenize
    #[arg(long, value_name = "N", conflicts_with = "words")]
    ids: Option<u32>,
    /// Build texts from sequences of words at random positions of this file. By default, use 64 common words, which tokenizers find in
    /// their caches
    #[arg(long, value_name = "FILE")]
    words: Option<PathBuf>,
    /// Number of different texts, which are sent in turn; by default all texts differ, so that no cache contains them
    #[arg(long, value_name = "N")]
    different: Option<u64>,
}

/// Inputs of requests by request number. The same number always gives the same input.
#[derive(Clone)]
pub(super) struct Inputs {
    ids: Option<u32>,
    different: Option<u64>,
    /// Words of a file.
    words: Option<Arc<[String]>>,
}

pub(super) enum Input {
    Ids(Vec<u32>),
    Text(String),
}

impl Inputs {
    /// # Errors
    /// Returns an error if the file cannot be read or has no words.
    pub(super) fn of(options: &InputOptions) -> Result<Self, Report> {
        let words = match &options.words {
            None => None,
            Some(file) => {
                let text = files::text(file, Kind::Batch).map_err(EngineError::from)?;
                let words: Arc<[String]> = text.split_whitespace().map(str::to_owned).collect();
                if words.is_empty() {
                    return Err(miette!("`{}` has no word; expected a text", file.display()));
                }
                Some(words)
            }
        };
        Ok(Self {
            ids: options.ids,
            different: options.different,
            words,
        })
    }

    /// Returns the input of a request: `tokens` token ids, or a text of `tokens` minus `marks` words. `marks` is the number of special
    /// tokens that a tokenizer adds.
    pub(super) fn get(&self, number: u64, tokens: u32, marks: u32) -> Input {
        let number = self.different.map_or(number, |n| number % n.max(1));
        match self.ids {
            Some(below) => Input::Ids(ids(number, tokens, below)),
            None => Input::Text(self.text(number, tokens.saturating_sub(marks).max(1))),
        }
    }

    fn text(&self, number: u64, n: u32) -> String {
        let at = |at: u32| scattered(number, u64::from(at)) as usize;
        let words: Vec<&str> = match &self.words {
            Some(words) => {
                let from = at(0) % words.len();
                let run = from..from + n as usize;
                run.map(|i| words[i % words.len()].as_str()).collect()
            }
            None => (0..n).map(|i| WORDS[at(i) % WORDS.len()]).collect(),
        };
        words.join(" ")
    }
}

/// Returns a pseudorandom number that depends only on the arguments.
fn scattered(number: u64, at: u64) -> u64 {
    let mut x = number
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(at.wrapping_mul(0xbf58_476d_1ce4_e5b9));
    x = (x ^ (x >> 30)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn ids(number: u64, n: u32, below: u32) -> Vec<u32> {
    // Skip the first ids, which are mostly special tokens.
    let least = u64::from(below / 8);
    let span = u64::from(below).saturating_sub(least).max(1);
    (0..n.max(1))
        .map(|at| (least + scattered(number, u64::from(at)) % span) as u32)
        .collect()
}

/// English words that common tokenizers represent by a single token.
const WORDS: [&str; 64] = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
];
