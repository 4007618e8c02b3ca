//! Scores the pairs of queries and documents of a large file.

use std::path::PathBuf;

use gemmule_corpus::{Column, Kind, Value, Vectors};
use miette::{Report, WrapErr as _};

use super::{
    Outcome,
    corpus::{self, Files, Places, PromptArgs, Task, Units},
    model::Runnable,
};
use crate::{
    EngineError,
    engine::LOGITS,
    heads::{TokenVectors, max_sim},
    model::TOKEN_VECTORS,
    text::{Encoded, Input, LateScore, Prompt, Score, TextEncoder, TextRole},
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Runnable,
    /// File with a query and a document per row: JSONL, CSV, TSV or Parquet, possibly compressed with gzip
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// Column or field with the query
    #[arg(long, value_name = "NAME", default_value = "query")]
    query_column: String,
    /// Column or field with the document
    #[arg(long, value_name = "NAME", default_value = "document")]
    document_column: String,
    /// File for the scores: Parquet, Arrow, .npy or JSONL. Rows that cannot be scored are listed in FILE.errors.jsonl
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// Score by late interaction (MaxSim), even with a model that also has other outputs, such as BGE-M3
    #[arg(long)]
    max_sim: bool,
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    files: Files,
}

pub(super) fn run(args: Args) -> Outcome {
    let places = Places {
        input: args.input,
        columns: vec![args.query_column, args.document_column],
        output: args.output,
        vectors: Vectors::F32,
        result: ["score", "scores"],
    };
    let job = args.files.job(&places, &columns())?;
    let encoder = corpus::encoder(&args.model)?;
    let (model, files) = (&args.model, &args.files);
    if encoder.folder().late_interaction().is_some() || args.max_sim {
        let prompt = args.prompt.given(encoder.folder())?;
        let engines = files.engines(model, TOKEN_VECTORS);
        let engines = match args.max_sim {
            false => engines?,
            true => engines.wrap_err("--max-sim is for models that compute vectors of tokens")?,
        };
        let score = encoder.folder().late_score();
        let task = Late {
            encoder,
            prompt,
            score,
        };
        return files.run(&job, model, engines, task, places.result);
    }
    let prompt = args.prompt.text(encoder.folder())?;
    let engines = files.engines(model, LOGITS)?;
    let score = encoder.folder().score(1);
    let task = Cross {
        encoder,
        prompt,
        score,
    };
    files.run(&job, model, engines, task, places.result)
}

fn columns() -> Vec<Column> {
    vec![Column::new("score", Kind::Number)]
}

/// Returns the query and the document of a row.
fn pair(texts: &[String]) -> (&str, &str) {
    let text = |at: usize| texts.get(at).map_or("", String::as_str);
    (text(0), text(1))
}

/// Computes scores with a cross-encoder.
struct Cross {
    encoder: TextEncoder,
    prompt: String,
    /// Computes the score of a pair from its logit.
    score: Score,
}

impl Task for Cross {
    type Row = ();

    fn identity(&self) -> String {
        format!("scores of pairs, prompt {:?}", self.prompt)
    }

    fn output(&self) -> &'static str {
        LOGITS
    }

    fn columns(&self, width: usize) -> Result<Vec<Column>, Report> {
        match width {
            1 => Ok(columns()),
            labels => {
                let labels = labels as u64;
                Err(EngineError::SeveralScores { labels }.into())
            }
        }
    }

    fn encode(&self, texts: &[String]) -> Result<Units<()>, String> {
        let (query, document) = pair(texts);
        let input = Input::Pair(query, document);
        let encoded = self.encoder.encode_one(input, Prompt::Text(&self.prompt));
        Ok(Units {
            row: (),
            sequences: vec![encoded.map_err(|e| e.to_string())?],
        })
    }

    fn finish(&self, (): (), outputs: &[&[f32]]) -> Result<Vec<Value>, String> {
        let logit = outputs.iter().copied().flatten().next();
        let logit = logit.ok_or("the model gave no score")?;
        Ok(vec![Value::Number(self.score.of(*logit))])
    }
}

/// Computes scores by late interaction (MaxSim).
struct Late {
    encoder: TextEncoder,
    /// Text of the prompt; `None` for the default prompt.
    prompt: Option<String>,
    score: LateScore,
}

impl Late {
    fn side(&self, role: TextRole, text: &str) -> Result<Encoded, String> {
        let prompt = self.prompt.as_deref();
        let prompt = prompt.map_or(Prompt::Default, Prompt::Text);
        let side = self.encoder.cut_side();
        let encoded = self.encoder.encode_as(role, text, prompt, side);
        encoded.map_err(|e| e.to_string())
    }
}

impl Task for Late {
    /// The token ids of the query and of the document.
    type Row = [Vec<u32>; 2];

    fn identity(&self) -> String {
        format!("scores of late interaction, prompt {:?}", self.prompt)
    }

    fn output(&self) -> &'static str {
        TOKEN_VECTORS
    }

    fn columns(&self, _: usize) -> Result<Vec<Column>, Report> {
        Ok(columns())
    }

    fn encode(&self, texts: &[String]) -> Result<Units<Self::Row>, String> {
        let (query, document) = pair(texts);
        let query = self.side(TextRole::Query, query)?;
        let document = self.side(TextRole::Document, document)?;
        Ok(Units {
            row: [query.ids.clone(), document.ids.clone()],
            sequences: vec![query, document],
        })
    }

    fn finish(&self, row: Self::Row, outputs: &[&[f32]]) -> Result<Vec<Value>, String> {
        let [query_ids, document_ids] = row;
        let &[query, document] = outputs else {
            return Err("the model gave no vectors".to_owned());
        };
        let query = TokenVectors::of(&self.encoder, TextRole::Query, &query_ids, query);
        let document = TokenVectors::of(&self.encoder, TextRole::Document, &document_ids, document);
        let scores = max_sim(&query, std::slice::from_ref(&document), self.score);
        let score = scores.first().ok_or("the model gave no score")?;
        Ok(vec![Value::Number(*score)])
    }
}
