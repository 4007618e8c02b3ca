//! Inputs of a run: texts, pairs of texts, or token ids.

use std::path::{Path, PathBuf};

use miette::{IntoDiagnostic, Report, WrapErr, miette};
use serde::Deserialize;

use crate::{
    Batch, EngineError, Output, Outputs, TextError,
    files::{self, Kind},
    heads::{TokenVectors, max_sim},
    model::TOKEN_VECTORS,
    text::{self, Encoded, Folder, Prompt, TextEncoder, TextRole},
};

#[derive(clap::Args)]
#[group(skip)]
pub(super) struct Input {
    /// A text (repeat for several)
    #[arg(
        long = "text",
        value_name = "TEXT",
        group = "input",
        allow_hyphen_values = true
    )]
    texts: Vec<String>,
    /// A file with one text per line
    #[arg(long, value_name = "FILE", group = "input")]
    texts_file: Option<PathBuf>,
    /// A pair of texts for a cross-encoder or a late-interaction model (repeat for several)
    #[arg(long = "pair", num_args = 2, value_names = ["QUERY", "DOCUMENT"], group = "input", allow_hyphen_values = true)]
    pairs: Vec<String>,
    /// A file with one pair per line, with a tab between query and document
    #[arg(long, value_name = "FILE", group = "input")]
    pairs_file: Option<PathBuf>,
    /// Token ids as JSON: [[101, 102], …], or {"ids": …, "types": …} with segment ids, or {"ids": …, "mask": …, "types": …}
    /// for a padded batch
    #[arg(long, value_name = "FILE", group = "input")]
    ids: Option<PathBuf>,
    /// Role of the texts, for a late-interaction model or the routes of a Router: query or document
    #[arg(long, value_name = "ROLE", value_parser = role, conflicts_with_all = ["pairs", "pairs_file", "ids"])]
    role: Option<TextRole>,
    /// Put the prompt with this name, from the checkpoint's folder, before every text
    #[arg(long, value_name = "NAME", conflicts_with_all = ["prompt", "ids"])]
    prompt_name: Option<String>,
    /// Put this prompt before every text; an empty prompt disables the folder's default prompt
    #[arg(
        long,
        value_name = "TEXT",
        conflicts_with = "ids",
        allow_hyphen_values = true
    )]
    prompt: Option<String>,
}

/// Texts, for commands that read nothing else.
#[derive(clap::Args)]
#[group(skip)]
pub(super) struct OnlyTexts {
    /// A text (repeat for several)
    #[arg(
        long = "text",
        value_name = "TEXT",
        required_unless_present = "texts_file",
        allow_hyphen_values = true
    )]
    texts: Vec<String>,
    /// A file with one text per line
    #[arg(long, value_name = "FILE", conflicts_with = "texts")]
    texts_file: Option<PathBuf>,
}

impl OnlyTexts {
    /// Reads the texts.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or has no text.
    pub(super) fn read(&self) -> Result<(Vec<String>, Source), Report> {
        let file = self.texts_file.as_deref();
        let (texts, source) = Source::texts("text", &self.texts, file)?;
        match file {
            Some(file) if texts.is_empty() => Err(miette!(
                "`{}` has no text; expected one per line",
                file.display()
            )),
            _ => Ok((texts, source)),
        }
    }
}

/// The inputs of a run, tokenized as a batch.
pub(super) struct Read {
    pub(super) texts: Texts,
    /// Origin of the texts; `None` for token ids.
    source: Option<Source>,
    pub(super) batch: Batch,
    /// Sequences of a late-interaction model. The document of a pair directly follows its query.
    pub(super) late: Option<LateInputs>,
}

impl Read {
    /// Adds the name of the text or pair to an error about a sequence of the batch.
    pub(super) fn refused(&self, error: EngineError) -> Report {
        let per_input = match self.late {
            Some(_) => self.texts.sequences(),
            None => 1,
        };
        match &self.source {
            Some(source) => source.refused(error, |sequence| sequence / per_input),
            None => error.into(),
        }
    }
}

/// Queries and documents of a late-interaction model.
pub(super) struct LateInputs {
    encoder: TextEncoder,
    sequences: Vec<(TextRole, Encoded)>,
}

impl LateInputs {
    /// Computes the score of each pair from the outputs of its two sequences.
    pub(super) fn scores(&self, outputs: &Outputs) -> Result<Output, EngineError> {
        let vectors = self.sequences.iter().enumerate().map(|(at, (role, own))| {
            let rows = outputs.sequence(TOKEN_VECTORS, at)?;
            Ok(TokenVectors::of(&self.encoder, *role, &own.ids, rows))
        });
        let vectors: Vec<TokenVectors> = vectors.collect::<Result<_, EngineError>>()?;
        let score = self.encoder.folder().late_score();
        let (pairs, _) = vectors.as_chunks::<2>();
        let scores = pairs
            .iter()
            .flat_map(|[query, document]| max_sim(query, std::slice::from_ref(document), score));
        Ok(Output {
            name: "scores".to_owned(),
            shape: vec![pairs.len() as u64],
            values: scores.collect(),
        })
    }
}

/// Texts to show with the results.
pub(super) enum Texts {
    Single(Vec<String>),
    Pairs(Vec<(String, String)>),
    /// Token ids have no texts.
    None,
}

impl Texts {
    /// Returns the number of sequences per text or pair in a late-interaction model.
    fn sequences(&self) -> usize {
        match self {
            Self::Pairs(_) => 2,
            Self::Single(_) | Self::None => 1,
        }
    }
}

impl Input {
    /// Returns an error if the arguments contain no input. This is checked before a model is fetched.
    pub(super) fn check(&self) -> Result<(), Report> {
        let lists = [self.texts.is_empty(), self.pairs.is_empty()];
        let files = [&self.texts_file, &self.pairs_file, &self.ids];
        match lists.iter().all(|&none| none) && files.iter().all(|file| file.is_none()) {
            true => Err(miette!(
                "there is no input; give --text, --texts-file, --pair, --pairs-file or --ids"
            )),
            false => Ok(()),
        }
    }

    /// Returns the role of the texts, and removes it.
    pub(super) fn take_role(&mut self) -> Option<TextRole> {
        self.role.take()
    }

    /// Reads and tokenizes all inputs. `folder` returns the folder of the checkpoint, if there is one. `role` is the role of the texts, for
    /// a late-interaction model.
    pub(super) fn read(
        &self,
        role: Option<TextRole>,
        folder: impl FnOnce() -> Result<Option<Folder>, Report>,
    ) -> Result<Read, Report> {
        if let Some(file) = &self.ids {
            let text = files::text(file, Kind::Batch).map_err(EngineError::from)?;
            let batch = parse_ids(file, &text)?;
            return Ok(Read {
                texts: Texts::None,
                source: None,
                batch,
                late: None,
            });
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
                Some(file) => miette!("`{}` has no text; expected one per line", file.display()),
                None => miette!(
                    "there is no input; give --text, --texts-file, --pair, --pairs-file or --ids"
                ),
            });
        }
        let folder = folder()?.ok_or_else(|| {
            miette!("texts need the tokenizer.json of a checkpoint; give --weights, or --ids instead of texts")
        })?;
        let encoder = TextEncoder::of(folder)?;
        let prompt = match (&self.prompt, &self.prompt_name) {
            (Some(text), _) => Prompt::Text(text),
            (None, Some(name)) => Prompt::Named(name),
            (None, None) => Prompt::Default,
        };
        if encoder.folder().late_interaction().is_some() {
            let side = |index, role, text| {
                let encoded = encoder.encode_as(role, text, prompt, encoder.cut_side());
                let encoded = encoded.map_err(|e| source.told(index, e))?;
                source.warn_if_cut(index, &encoded);
                Ok::<_, Report>((role, encoded))
            };
            let mut sequences = Vec::new();
            match &texts {
                Texts::Pairs(pairs) => {
                    for (index, (query, document)) in pairs.iter().enumerate() {
                        sequences.push(side(index, TextRole::Query, query)?);
                        sequences.push(side(index, TextRole::Document, document)?);
                    }
                }
                Texts::Single(texts) => {
                    let role = role.ok_or_else(no_role)?;
                    for (index, text) in texts.iter().enumerate() {
                        sequences.push(side(index, role, text)?);
                    }
                }
                Texts::None => {}
            }
            let all = sequences.iter().map(|(_, encoded)| encoded);
            let per_input = texts.sequences();
            let batch = Encoded::batch(all);
            let batch = batch.map_err(|e| source.refused(e.into(), |at| at / per_input))?;
            let late = Some(LateInputs { encoder, sequences });
            return Ok(Read {
                texts,
                source: Some(source),
                batch,
                late,
            });
        }
        if role.is_some() {
            return Err(miette!(
                "--role is for late-interaction models and the routes of a Router, and this model is neither; leave it out"
            ));
        }
        let batch = match &texts {
            Texts::Pairs(pairs) => {
                let inputs = pairs.iter().map(|(a, b)| text::Input::Pair(a, b));
                source.batch(&encoder, inputs, prompt)?
            }
            Texts::Single(texts) => {
                let inputs = texts.iter().map(|text| text::Input::Text(text));
                source.batch(&encoder, inputs, prompt)?
            }
            Texts::None => return Err(miette!("there is no input")),
        };
        Ok(Read {
            texts,
            source: Some(source),
            batch,
            late: None,
        })
    }
}

/// Returns the error for texts without a role, which a late-interaction model needs.
pub(super) fn no_role() -> Report {
    miette!(
        "a late-interaction model reads queries and documents differently; give --role query or --role document"
    )
}

/// Parses the role of a text, for late interaction or a Router.
pub(super) fn role(name: &str) -> Result<TextRole, String> {
    let all = [TextRole::Query, TextRole::Document];
    let found = all.into_iter().find(|role| role.name() == name);
    found.ok_or_else(|| "expected query or document".to_owned())
}

/// Origin of inputs, to name them in messages.
pub(super) enum Source {
    /// Arguments. The string is the kind of input, such as `text` or `pair`.
    Arguments(&'static str),
    /// Lines of a file, with their line numbers.
    Lines(PathBuf, Vec<usize>),
}

impl Source {
    /// Returns the texts of the arguments, or the nonblank lines of a file.
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

    /// Names an input. `index` counts from 0.
    pub(super) fn name(&self, index: usize) -> String {
        match self {
            Self::Arguments(kind) => format!("{kind} {index}, counted from 0,"),
            Self::Lines(file, lines) => format!("line {} of `{}`", lines[index], file.display()),
        }
    }

    /// Adds the index of the input to `error`. For an input from a file, also adds the file name and the line number.
    fn told(&self, index: usize, error: TextError) -> Report {
        let error = Report::from(EngineError::from(error.of_text(index)));
        match self {
            Self::Arguments(_) => error,
            Self::Lines(..) => error.wrap_err(self.name(index)),
        }
    }

    /// Adds the name of an input to an error that names a sequence. `input_of` returns the index of the input that a sequence belongs to.
    pub(super) fn refused(
        &self,
        error: EngineError,
        input_of: impl FnOnce(usize) -> usize,
    ) -> Report {
        let mut named = None;
        let error = error.of_sequence(|sequence| {
            named = Some(sequence);
            sequence
        });
        let error = Report::from(error);
        match named {
            Some(sequence) => {
                error.wrap_err(format!("{} is refused", self.name(input_of(sequence))))
            }
            None => error,
        }
    }

    /// Builds the batch of all inputs. Warns about truncated inputs.
    fn batch<'t>(
        &self,
        encoder: &TextEncoder,
        inputs: impl Iterator<Item = text::Input<'t>>,
        prompt: Prompt,
    ) -> Result<Batch, Report> {
        let mut all = Vec::new();
        for (index, input) in inputs.enumerate() {
            let encoded = encoder.encode_one(input, prompt);
            let encoded = encoded.map_err(|e| self.told(index, e))?;
            self.warn_if_cut(index, &encoded);
            all.push(encoded);
        }
        Encoded::batch(all.iter()).map_err(|e| self.refused(e.into(), |at| at))
    }

    fn warn_if_cut(&self, index: usize, encoded: &Encoded) {
        if encoded.is_cut {
            let (name, n) = (self.name(index), encoded.ids.len());
            tracing::warn!("{name} is truncated to {n} tokens, the checkpoint's maximum");
        }
    }
}

/// Tokenizes each prompt separately, so that an error refers to a single prompt.
pub(super) fn prompts<S: AsRef<str>>(
    encoder: &TextEncoder,
    texts: &[S],
) -> Vec<Result<Vec<u32>, TextError>> {
    let each = texts.iter().enumerate();
    each.map(|(index, text)| {
        let ids = encoder.prompts(&[text]);
        ids.map(|ids| ids.concat()).map_err(|e| e.of_text(index))
    })
    .collect()
}

/// Reads pairs from the lines of a file.
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
            "`{}` has no pair; expected one per line",
            file.display()
        )),
        false => Ok((pairs, source)),
    }
}

/// Token ids in a file. Without `mask`, each row is a sequence. With `mask`, the rows are padded to the same length.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Ids {
    ids: Vec<Vec<u32>>,
    mask: Option<Vec<Vec<u32>>>,
    types: Option<Vec<Vec<u32>>>,
}

/// Parses a batch of token ids from JSON. `file` is the file name for errors.
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
    // Leave out the type ids of padding.
    let rows = types.iter().zip(batch.lens());
    let packed: Vec<u32> = rows
        .flat_map(|(row, &n)| row.iter().take(n as usize).copied())
        .collect();
    Ok(batch.with_type_ids(packed).map_err(EngineError::from)?)
}
