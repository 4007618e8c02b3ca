//! What a run takes: texts, pairs of texts, or token ids.

use std::path::{Path, PathBuf};

use miette::{IntoDiagnostic, Report, WrapErr, miette};
use serde::Deserialize;

use crate::{
    Batch, EngineError,
    engine::{self, Encoded, Prompt, TextEncoder},
    files::{self, Kind},
};

#[derive(clap::Args)]
#[group(skip)]
pub(super) struct Input {
    /// A text (several times for several)
    #[arg(
        long = "text",
        value_name = "TEXT",
        group = "input",
        allow_hyphen_values = true
    )]
    texts: Vec<String>,
    /// A file with one text a line
    #[arg(long, value_name = "FILE", group = "input")]
    texts_file: Option<PathBuf>,
    /// A pair of texts for a cross-encoder (several times for several)
    #[arg(long = "pair", num_args = 2, value_names = ["QUERY", "DOCUMENT"], group = "input", allow_hyphen_values = true)]
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
    #[arg(
        long,
        value_name = "TEXT",
        conflicts_with = "ids",
        allow_hyphen_values = true
    )]
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
        let (texts, source) = match &self.pairs_file {
            Some(file) => {
                let (pairs, source) = pairs(file)?;
                (Texts::Pairs(pairs), source)
            }
            None if self.pairs.is_empty() => {
                let file = self.texts_file.as_deref();
                let (texts, source) = Source::texts("text", &self.texts, file)?;
                (Texts::Single(texts), source)
            }
            None => {
                let (pairs, _) = self.pairs.as_chunks::<2>();
                let pairs = pairs.iter().cloned().map(|[a, b]| (a, b)).collect();
                (Texts::Pairs(pairs), Source::Arguments("pair"))
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
            Texts::Pairs(pairs) => {
                let inputs = pairs.iter().map(|(a, b)| engine::Input::Pair(a, b));
                source.batch(&encoder, inputs, prompt)?
            }
            Texts::Single(texts) => {
                let inputs = texts.iter().map(|text| engine::Input::Text(text));
                source.batch(&encoder, inputs, prompt)?
            }
            Texts::None => return Err(miette!("there is nothing to run on")),
        };
        Ok(Read { texts, batch })
    }
}

/// Where inputs come from, as messages name each.
pub(super) enum Source {
    /// From arguments, of which there is one kind.
    Arguments(&'static str),
    /// From lines of a file, by their numbers.
    Lines(PathBuf, Vec<usize>),
}

impl Source {
    /// Texts of arguments, or the lines of a file that are not blank.
    pub(super) fn texts(
        kind: &'static str,
        arguments: &[String],
        file: Option<&Path>,
    ) -> Result<(Vec<String>, Self), EngineError> {
        let Some(file) = file else {
            return Ok((arguments.to_vec(), Self::Arguments(kind)));
        };
        let text = files::text(file, Kind::Batch)?;
        let lines = (1..).zip(text.lines());
        let lines = lines.filter(|(_, line)| !line.trim().is_empty());
        let (numbers, lines) = lines.map(|(n, line)| (n, line.to_owned())).unzip();
        Ok((lines, Self::Lines(file.to_owned(), numbers)))
    }

    /// An input, counted from 0.
    pub(super) fn name(&self, index: usize) -> String {
        match self {
            Self::Arguments(kind) => format!("{kind} {index}, counted from 0,"),
            Self::Lines(file, lines) => format!("line {} of `{}`", lines[index], file.display()),
        }
    }

    /// The error of an input that was tokenized by itself.
    fn told(&self, index: usize, error: EngineError) -> Report {
        let error = Report::from(error.of_text(index));
        match self {
            Self::Arguments(_) => error,
            Self::Lines(..) => error.wrap_err(self.name(index)),
        }
    }

    /// The batch of inputs. One that is cut is warned about.
    fn batch<'t>(
        &self,
        encoder: &TextEncoder,
        inputs: impl Iterator<Item = engine::Input<'t>>,
        prompt: Prompt,
    ) -> Result<Batch, Report> {
        let mut all = Vec::new();
        for (index, input) in inputs.enumerate() {
            let encoded = encoder.encode_one(input, prompt);
            let encoded = encoded.map_err(|e| self.told(index, e))?;
            if encoded.is_cut {
                let (name, n) = (self.name(index), encoded.ids.len());
                tracing::warn!("{name} is cut to {n} tokens, the most that the checkpoint takes");
            }
            all.push(encoded);
        }
        Ok(Encoded::batch(all.iter()).map_err(EngineError::from)?)
    }
}

/// Token ids of texts to go on from, each by itself; what is wrong with one is said of it alone.
pub(super) fn prompts<S: AsRef<str>>(
    encoder: &TextEncoder,
    texts: &[S],
) -> Vec<Result<Vec<u32>, EngineError>> {
    let each = texts.iter().enumerate();
    each.map(|(index, text)| {
        let ids = encoder.prompts(&[text]);
        ids.map(|ids| ids.concat()).map_err(|e| e.of_text(index))
    })
    .collect()
}

/// Pairs of the lines of a file.
fn pairs(file: &Path) -> Result<(Vec<(String, String)>, Source), Report> {
    let (lines, source) = Source::texts("pair", &[], Some(file))?;
    let mut pairs = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let mut texts = line.split('\t');
        let (Some(a), Some(b), None) = (texts.next(), texts.next(), texts.next()) else {
            return Err(miette!(
                "{}: expected two texts with one tab between them, found {} tabs",
                source.name(at),
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
        false => Ok((pairs, source)),
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
