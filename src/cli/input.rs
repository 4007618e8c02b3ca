//! What a run takes: texts, pairs of texts, or token ids.

use std::path::{Path, PathBuf};

use miette::{IntoDiagnostic, Report, WrapErr, miette};
use serde::Deserialize;

use crate::{
    Batch, EngineError,
    engine::{Prompt, TextEncoder},
    files::{self, Kind},
};

#[derive(clap::Args)]
#[group(skip)]
pub(super) struct Input {
    /// A text (several times for several)
    #[arg(long = "text", value_name = "TEXT", group = "input")]
    texts: Vec<String>,
    /// A file with one text a line
    #[arg(long, value_name = "FILE", group = "input")]
    texts_file: Option<PathBuf>,
    /// A pair of texts for a cross-encoder (several times for several)
    #[arg(long = "pair", num_args = 2, value_names = ["QUERY", "DOCUMENT"], group = "input")]
    pairs: Vec<String>,
    /// A file with one pair a line, a tab between query and document
    #[arg(long, value_name = "FILE", group = "input")]
    pairs_file: Option<PathBuf>,
    /// Token ids as JSON: [[101, 102], …], or {"ids": …, "types": …} with segment ids, or {"ids": …, "mask": …, "types": …}
    /// for a padded batch
    #[arg(long, value_name = "FILE", group = "input")]
    ids: Option<PathBuf>,
    /// The prompt of this name in the checkpoint's folder before every text
    #[arg(long, value_name = "NAME", conflicts_with_all = ["prompt", "ids"])]
    prompt_name: Option<String>,
    /// This prompt before every text; an empty one keeps the folder's default out
    #[arg(long, value_name = "TEXT", conflicts_with = "ids")]
    prompt: Option<String>,
}

/// What was read.
pub(super) struct Read {
    pub(super) texts: Texts,
    pub(super) batch: Batch,
}

/// What to show beside results.
pub(super) enum Texts {
    Single(Vec<String>),
    Pairs(Vec<(String, String)>),
    /// Token ids have none.
    None,
}

impl Input {
    /// Reads everything; `folder` is the checkpoint's.
    pub(super) fn read(&self, folder: Option<&Path>) -> Result<Read, Report> {
        if let Some(file) = &self.ids {
            let text = files::text(file, Kind::Batch).map_err(EngineError::from)?;
            let batch = parse_ids(file, &text)?;
            let texts = Texts::None;
            return Ok(Read { texts, batch });
        }
        let texts = match (&self.texts_file, &self.pairs_file) {
            (Some(file), _) => Texts::Single(lines(file)?),
            (_, Some(file)) => Texts::Pairs(pairs(file)?),
            _ if self.pairs.is_empty() => Texts::Single(self.texts.clone()),
            _ => {
                let (pairs, _) = self.pairs.as_chunks::<2>();
                Texts::Pairs(pairs.iter().cloned().map(|[a, b]| (a, b)).collect())
            }
        };
        if matches!(&texts, Texts::Single(texts) if texts.is_empty()) {
            return Err(match &self.texts_file {
                Some(file) => miette!("`{}` holds no text; expected one a line", file.display()),
                None => miette!(
                    "there is nothing to run on; give --text, --texts-file, --pair, --pairs-file or --ids"
                ),
            });
        }
        let folder = folder.ok_or_else(|| {
            miette!("texts need the tokenizer.json of a checkpoint; give --weights, or --ids instead of texts")
        })?;
        let encoder = TextEncoder::open(folder)?;
        let prompt = match (&self.prompt, &self.prompt_name) {
            (Some(text), _) => Prompt::Text(text),
            (None, Some(name)) => Prompt::Named(name),
            (None, None) => Prompt::Default,
        };
        let batch = match &texts {
            Texts::Pairs(pairs) => encoder.encode_pairs(pairs, prompt)?,
            Texts::Single(texts) => encoder.encode_with(texts, prompt)?,
            Texts::None => return Err(miette!("there is nothing to run on")),
        };
        Ok(Read { texts, batch })
    }
}

/// The lines of a file that are not blank.
pub(super) fn lines(file: &Path) -> Result<Vec<String>, EngineError> {
    let text = files::text(file, Kind::Batch)?;
    let lines = text.lines().filter(|l| !l.trim().is_empty());
    Ok(lines.map(str::to_owned).collect())
}

fn pairs(file: &Path) -> Result<Vec<(String, String)>, Report> {
    let mut pairs = Vec::new();
    for (at, line) in lines(file)?.iter().enumerate() {
        let mut texts = line.split('\t');
        let (Some(a), Some(b), None) = (texts.next(), texts.next(), texts.next()) else {
            return Err(miette!(
                "`{}`, pair {}: expected two texts with one tab between them, found {} tabs",
                file.display(),
                at + 1,
                line.matches('\t').count()
            ));
        };
        pairs.push((a.to_owned(), b.to_owned()));
    }
    match pairs.is_empty() {
        true => Err(miette!(
            "`{}` holds no pair; expected one a line",
            file.display()
        )),
        false => Ok(pairs),
    }
}

/// Token ids as a file has them. Rows without a mask are sequences, with one they are padded.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Ids {
    ids: Vec<Vec<u32>>,
    mask: Option<Vec<Vec<u32>>>,
    types: Option<Vec<Vec<u32>>>,
}

/// Reads a batch of token ids from JSON text; `file` is its name in errors.
pub fn parse_ids(file: &Path, text: &str) -> Result<Batch, Report> {
    let expected = || {
        format!(
            "`{}`: expected [[101, 102], …], or {{\"ids\": [[…], …], \"mask\": [[…], …], \"types\": [[…], …]}} with rows of one length, of which `mask` and `types` may be left out",
            file.display()
        )
    };
    let read = match text.trim_start().starts_with('[') {
        true => serde_json::from_str(text).map(|ids| Ids {
            ids,
            mask: None,
            types: None,
        }),
        false => serde_json::from_str(text),
    };
    let Ids { ids, mask, types } = read.into_diagnostic().wrap_err_with(expected)?;
    for (name, rows) in [("mask", &mask), ("types", &types)] {
        let Some(rows) = rows else { continue };
        let differs = |(a, b): (&Vec<u32>, &Vec<u32>)| a.len() != b.len();
        if rows.len() != ids.len() || ids.iter().zip(rows).any(differs) {
            return Err(miette!(
                "{}; the rows of `ids` and `{name}` differ in number or length",
                expected()
            ));
        }
    }
    let Some(mask) = mask else {
        let batch = Batch::from_sequences(&ids).map_err(EngineError::from)?;
        return Ok(match types {
            Some(types) => batch
                .with_type_ids(types.concat())
                .map_err(EngineError::from)?,
            None => batch,
        });
    };
    let width = ids.first().map_or(0, Vec::len);
    if ids.iter().any(|row| row.len() != width) {
        return Err(miette!("{}; the rows differ in length", expected()));
    }
    let batch = Batch::from_padded(&ids.concat(), &mask.concat(), width);
    let batch = batch.map_err(EngineError::from)?;
    let Some(types) = types else { return Ok(batch) };
    // Those of padding are nobody's.
    let rows = types.iter().zip(batch.lens());
    let packed: Vec<u32> = rows
        .flat_map(|(row, &n)| row.iter().take(n as usize).copied())
        .collect();
    Ok(batch.with_type_ids(packed).map_err(EngineError::from)?)
}
