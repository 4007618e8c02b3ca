//! Classifies the texts of a large file.

use std::path::PathBuf;

use gemmule_corpus::{Column, Kind, Value, Vectors};
use miette::Report;

use super::super::{
    Outcome,
    corpus::{self, Files, Places, Task, Units},
    numbers::from_one_to,
};
use crate::{
    EngineError,
    engine::LOGITS,
    heads::{
        Aggregation, Entity, EntityOptions, LabelScore, TOKEN_LOGITS, TokenJob, ZeroShotJob,
        ZeroShotOptions,
    },
    text::{Input, Prompt, TextEncoder},
};

/// Options for classifying the texts of a file.
#[derive(clap::Args)]
#[group(skip)]
pub(super) struct Args {
    /// File of texts, instead of --text: JSONL, CSV, TSV, Parquet, or lines, possibly compressed with gzip
    #[arg(long, value_name = "FILE", requires = "output_file", conflicts_with_all = ["texts", "texts_file", "json"])]
    input: Option<PathBuf>,
    /// With --input, the column or field with the texts
    #[arg(long, value_name = "NAME", default_value = "text", requires = "input")]
    column: String,
    /// With --input, the file of labels: Parquet, Arrow or JSONL. Rows that cannot be classified are listed in FILE.errors.jsonl
    #[arg(
        id = "output_file",
        long = "output",
        value_name = "FILE",
        requires = "input"
    )]
    output: Option<PathBuf>,
    /// With --input, also write the N best labels with their scores, as the column `labels`
    #[arg(long, value_name = "N", value_parser = from_one_to(1 << 20), requires = "input", conflicts_with = "tokens")]
    top_k: Option<usize>,
    /// With --input, also write all labels with their scores, best first, as the column `labels`
    #[arg(long, requires = "input", conflicts_with_all = ["top_k", "tokens"])]
    all_scores: bool,
    #[command(flatten)]
    files: Files,
}

impl Args {
    pub(super) fn is_given(&self) -> bool {
        self.input.is_some()
    }
}

pub(super) fn run(args: super::Args) -> Outcome {
    let (model, own) = (&args.model, &args.file);
    let files = &own.files;
    let places = Places {
        input: own.input.clone().unwrap_or_default(),
        columns: vec![own.column.clone()],
        output: own.output.clone().unwrap_or_default(),
        vectors: Vectors::F32,
        result: match args.tokens {
            true => ["list of entities", "lists of entities"],
            false => ["label", "labels"],
        },
    };
    let best = match (own.top_k, own.all_scores) {
        (Some(n), _) => Some(n),
        (None, true) => Some(usize::MAX),
        (None, false) => None,
    };
    if args.tokens {
        let options = args.entity_options();
        let job = files.job(&places, &entity_columns(options.aggregation))?;
        let encoder = corpus::encoder(model)?;
        let engines = files.engines(model, TOKEN_LOGITS)?;
        let task = Tokens { encoder, options };
        return files.run(&job, model, engines, task, places.result);
    }
    let job = files.job(&places, &label_columns(best))?;
    let encoder = corpus::encoder(model)?;
    let engines = files.engines(model, LOGITS)?;
    if args.label.is_empty() {
        let task = Labels { encoder, best };
        return files.run(&job, model, engines, task, places.result);
    }
    let names = encoder.folder().label_names();
    // Check that the model can score the labels before the first row is computed.
    let template = &args.template;
    ZeroShotJob::new(&encoder, &names, "a", &args.label, template).map_err(EngineError::from)?;
    let task = AnyLabels {
        encoder,
        names,
        labels: args.label.clone(),
        options: args.zero_shot_options(),
        best,
    };
    files.run(&job, model, engines, task, places.result)
}

/// Returns the columns for labels: the best label and its score. If `best` is set, also a column with a list of that many labels.
fn label_columns(best: Option<usize>) -> Vec<Column> {
    let own = [
        Column::new("label", Kind::Text),
        Column::new("score", Kind::Number),
    ];
    let list = best.map(|_| Column::new("labels", Kind::Records(own.to_vec())));
    own.into_iter().chain(list).collect()
}

/// Returns the values of [`label_columns`].
fn label_values(ranked: Vec<LabelScore>, best: Option<usize>) -> Result<Vec<Value>, String> {
    let values = |one: &LabelScore| vec![Value::Text(one.label.clone()), Value::Number(one.score)];
    let first = ranked.first().ok_or("the model gave no label")?;
    let list = best.map(|n| Value::Records(ranked.iter().take(n).map(values).collect()));
    Ok(values(first).into_iter().chain(list).collect())
}

/// Describes how many labels the lists contain.
fn described(best: Option<usize>) -> String {
    match best {
        None => "the best one".to_owned(),
        Some(usize::MAX) => "lists of all".to_owned(),
        Some(n) => format!("lists of the best {n}"),
    }
}

/// Computes the labels of a classifier.
struct Labels {
    encoder: TextEncoder,
    best: Option<usize>,
}

impl Task for Labels {
    type Row = ();

    fn identity(&self) -> String {
        format!("labels, {}", described(self.best))
    }

    fn output(&self) -> &'static str {
        LOGITS
    }

    fn columns(&self, width: usize) -> Result<Vec<Column>, Report> {
        let score = self.encoder.folder().class_score(width);
        score.map_err(EngineError::from)?;
        Ok(label_columns(self.best))
    }

    fn encode(&self, texts: &[String]) -> Result<Units<()>, String> {
        let text = texts.first().map_or("", String::as_str);
        let encoded = self.encoder.encode_one(Input::Text(text), Prompt::Default);
        Ok(Units {
            row: (),
            sequences: vec![encoded.map_err(|e| e.to_string())?],
        })
    }

    fn finish(&self, (): (), outputs: &[&[f32]]) -> Result<Vec<Value>, String> {
        let mut scores = outputs.concat();
        let folder = self.encoder.folder();
        let score = folder.class_score(scores.len());
        score.map_err(|e| e.to_string())?.apply(&mut scores);
        let names = folder.labels(scores.len());
        label_values(LabelScore::ranked(&names, scores), self.best)
    }
}

/// Scores labels that the model was not trained on.
struct AnyLabels {
    encoder: TextEncoder,
    /// Names of the model's own labels.
    names: Vec<String>,
    labels: Vec<String>,
    options: ZeroShotOptions,
    best: Option<usize>,
}

impl Task for AnyLabels {
    type Row = ZeroShotJob;

    fn identity(&self) -> String {
        let best = described(self.best);
        format!("the labels {:?}, {:?}, {best}", self.labels, self.options)
    }

    fn output(&self) -> &'static str {
        LOGITS
    }

    fn columns(&self, _: usize) -> Result<Vec<Column>, Report> {
        Ok(label_columns(self.best))
    }

    fn encode(&self, texts: &[String]) -> Result<Units<ZeroShotJob>, String> {
        let text = texts.first().map_or("", String::as_str);
        let template = &self.options.template;
        let job = ZeroShotJob::new(&self.encoder, &self.names, text, &self.labels, template);
        let job = job.map_err(|e| e.to_string())?;
        let sequences = job.inputs().to_vec();
        Ok(Units {
            row: job,
            sequences,
        })
    }

    fn finish(&self, job: ZeroShotJob, outputs: &[&[f32]]) -> Result<Vec<Value>, String> {
        label_values(job.finish(outputs, &self.options), self.best)
    }
}

/// Computes entities, or labels of tokens.
struct Tokens {
    encoder: TextEncoder,
    options: EntityOptions,
}

/// Returns the column for entities. The fields of an entity have the same names as in the output of `--json`.
fn entity_columns(aggregation: Aggregation) -> Vec<Column> {
    let label = match aggregation {
        Aggregation::None => "entity",
        Aggregation::Simple | Aggregation::First | Aggregation::Average | Aggregation::Max => {
            "entity_group"
        }
    };
    let index = (aggregation == Aggregation::None).then_some(("index", Kind::Integer));
    let before = [(label, Kind::Text), ("score", Kind::Number)];
    let after = [
        ("word", Kind::Text),
        ("start", Kind::Integer),
        ("end", Kind::Integer),
    ];
    let fields = before.into_iter().chain(index).chain(after);
    let fields = fields.map(|(name, kind)| Column::new(name, kind));
    vec![Column::new("entities", Kind::Records(fields.collect()))]
}

impl Task for Tokens {
    type Row = TokenJob;

    fn identity(&self) -> String {
        format!("labels of tokens, {:?}", self.options)
    }

    fn output(&self) -> &'static str {
        TOKEN_LOGITS
    }

    fn columns(&self, _: usize) -> Result<Vec<Column>, Report> {
        Ok(entity_columns(self.options.aggregation))
    }

    fn encode(&self, texts: &[String]) -> Result<Units<TokenJob>, String> {
        let text = texts.first().map_or("", String::as_str);
        let job = TokenJob::new(&self.encoder, 0, text).map_err(|e| e.to_string())?;
        let sequences = vec![job.input().clone()];
        Ok(Units {
            row: job,
            sequences,
        })
    }

    fn finish(&self, job: TokenJob, outputs: &[&[f32]]) -> Result<Vec<Value>, String> {
        let logits = outputs.concat();
        let n_labels = logits.len() / job.input().ids.len().max(1);
        let labels = self.encoder.folder().labels(n_labels);
        let entities = job.finish(&self.encoder, &logits, &labels, &self.options);
        let integer = |n: usize| Value::Integer(i64::try_from(n).unwrap_or(i64::MAX));
        let record = |entity: Entity| {
            let before = [Value::Text(entity.label), Value::Number(entity.score)];
            let index = entity.index.map(integer);
            let after = [
                Value::Text(entity.word),
                integer(entity.start),
                integer(entity.end),
            ];
            before.into_iter().chain(index).chain(after).collect()
        };
        let entities = entities.map_err(|e| e.to_string())?;
        Ok(vec![Value::Records(
            entities.into_iter().map(record).collect(),
        )])
    }
}
