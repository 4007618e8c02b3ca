//! Embeds the texts of a large file.

use std::path::PathBuf;

use gemmule_corpus::{Column, Kind, Value, Vectors};
use miette::{Report, WrapErr as _, miette};

use super::{
    Outcome,
    corpus::{self, Files, Places, PromptArgs, Task, Units},
    input,
    model::Runnable,
};
use crate::{
    heads::TokenVectors,
    model::{EMBEDDING, TOKEN_VECTORS},
    text::{Input, Prompt, TextEncoder, TextRole},
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Runnable,
    /// File of texts: JSONL, CSV, TSV, Parquet, or lines, possibly compressed with gzip
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// Column or field with the texts
    #[arg(long, value_name = "NAME", default_value = "text")]
    column: String,
    /// File for the vectors: Parquet, Arrow, .npy or JSONL. Rows that cannot be embedded are listed in FILE.errors.jsonl
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// Type of the values: f32, f16, int8 (with a scale per vector) or binary (one bit per value)
    #[arg(long, value_name = "TYPE", default_value_t = Vectors::F32)]
    vectors: Vectors,
    /// Keep the first N values of each vector, scaled to length 1 (Matryoshka representation learning)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    dimensions: Option<u32>,
    /// Role of the texts: query or document. Selects the route of a sentence-transformers Router. Required for a late-interaction model,
    /// which computes one vector per token
    #[arg(long, value_name = "ROLE", value_parser = input::role, conflicts_with = "dimensions")]
    role: Option<TextRole>,
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    files: Files,
}

pub(super) fn run(mut args: Args) -> Outcome {
    args.role = args.model.route(args.role)?;
    let places = Places {
        input: args.input,
        columns: vec![args.column],
        output: args.output,
        vectors: args.vectors,
        result: ["vector", "vectors"],
    };
    let kind = match args.role {
        None => Kind::Vector,
        Some(_) => Kind::Vectors,
    };
    let job = args.files.job(&places, &[column(kind(1))])?;
    let encoder = corpus::encoder(&args.model)?;
    let is_late = encoder.folder().late_interaction().is_some();
    if is_late && args.role.is_none() {
        return Err(input::no_role());
    }
    match args.role {
        None => {
            let prompt = args.prompt.text(encoder.folder())?;
            let engines = args.files.engines(&args.model, EMBEDDING)?;
            let task = OneVector {
                encoder,
                prompt,
                dimensions: args.dimensions.map(|n| n as usize),
            };
            args.files
                .run(&job, &args.model, engines, task, places.result)
        }
        Some(role) => {
            let prompt = args.prompt.given(encoder.folder())?;
            let engines = args.files.engines(&args.model, TOKEN_VECTORS);
            let engines = match is_late {
                true => engines?,
                false => engines.wrap_err(
                    "--role is for models that compute vectors of tokens (late interaction)",
                )?,
            };
            let task = VectorsOfTokens {
                encoder,
                prompt,
                role,
            };
            args.files
                .run(&job, &args.model, engines, task, places.result)
        }
    }
}

/// Returns the column of vectors.
fn column(kind: Kind) -> Column {
    Column::new("embedding", kind)
}

/// Computes one vector per text.
struct OneVector {
    encoder: TextEncoder,
    prompt: String,
    dimensions: Option<usize>,
}

impl Task for OneVector {
    type Row = ();

    fn identity(&self) -> String {
        let dimensions = self.dimensions.map_or("all".to_owned(), |n| n.to_string());
        format!("{dimensions} dimensions, prompt {:?}", self.prompt)
    }

    fn output(&self) -> &'static str {
        EMBEDDING
    }

    fn columns(&self, width: usize) -> Result<Vec<Column>, Report> {
        match self.dimensions {
            Some(n) if n > width => Err(miette!(
                "--dimensions is {n}, and the model's vectors have {width} values"
            )),
            n => Ok(vec![column(Kind::Vector(n.unwrap_or(width)))]),
        }
    }

    fn encode(&self, texts: &[String]) -> Result<Units<()>, String> {
        let text = texts.first().map_or("", String::as_str);
        let prompt = Prompt::Text(&self.prompt);
        let encoded = self.encoder.encode_one(Input::Text(text), prompt);
        Ok(Units {
            row: (),
            sequences: vec![encoded.map_err(|e| e.to_string())?],
        })
    }

    fn finish(&self, (): (), outputs: &[&[f32]]) -> Result<Vec<Value>, String> {
        let vector = outputs.concat();
        Ok(vec![Value::Vector(match self.dimensions {
            None => vector,
            Some(n) => shortened(&vector, n),
        })])
    }
}

/// Computes a vector for each token of a text, except for tokens that do not take part in scores of late interaction.
struct VectorsOfTokens {
    encoder: TextEncoder,
    /// Text of the prompt; `None` for the default prompt.
    prompt: Option<String>,
    role: TextRole,
}

impl Task for VectorsOfTokens {
    /// The ids of the tokens.
    type Row = Vec<u32>;

    fn identity(&self) -> String {
        let role = self.role.name();
        format!(
            "vectors of the tokens of a {role}, prompt {:?}",
            self.prompt
        )
    }

    fn output(&self) -> &'static str {
        TOKEN_VECTORS
    }

    fn columns(&self, width: usize) -> Result<Vec<Column>, Report> {
        Ok(vec![column(Kind::Vectors(width))])
    }

    fn encode(&self, texts: &[String]) -> Result<Units<Vec<u32>>, String> {
        let text = texts.first().map_or("", String::as_str);
        let prompt = self.prompt.as_deref();
        let prompt = prompt.map_or(Prompt::Default, Prompt::Text);
        let side = self.encoder.cut_side();
        let encoded = self.encoder.encode_as(self.role, text, prompt, side);
        let encoded = encoded.map_err(|e| e.to_string())?;
        Ok(Units {
            row: encoded.ids.clone(),
            sequences: vec![encoded],
        })
    }

    fn finish(&self, ids: Vec<u32>, outputs: &[&[f32]]) -> Result<Vec<Value>, String> {
        let &[rows] = outputs else {
            return Err("the model gave no vectors".to_owned());
        };
        let vectors = TokenVectors::of(&self.encoder, self.role, &ids, rows);
        Ok(vec![Value::Vectors(vectors.values)])
    }
}

/// Returns the first `n` values, scaled to length 1.
fn shortened(vector: &[f32], n: usize) -> Vec<f32> {
    let kept = &vector[..n.min(vector.len())];
    let norm = kept.iter().map(|v| v * v).sum::<f32>().sqrt();
    let norm = norm.max(f32::MIN_POSITIVE);
    kept.iter().map(|v| v / norm).collect()
}
