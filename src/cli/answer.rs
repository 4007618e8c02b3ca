use std::{path::PathBuf, process::ExitCode};

use miette::IntoDiagnostic;

use super::{Outcome, align_right, model::Runnable, print, print_json, table};
use crate::{
    EngineError,
    files::{self, Kind},
    heads::{AnswerOptions, TOKEN_LOGITS},
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Runnable,
    /// A question about the text (repeat for several)
    #[arg(long, value_name = "TEXT", required = true, allow_hyphen_values = true)]
    question: Vec<String>,
    /// The text that contains the answer
    #[arg(
        long,
        value_name = "TEXT",
        required_unless_present = "context_file",
        allow_hyphen_values = true
    )]
    context: Option<String>,
    /// A file with the text that contains the answer
    #[arg(long, value_name = "FILE", conflicts_with = "context")]
    context_file: Option<PathBuf>,
    /// Number of answers to each question
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = super::numbers::from_one_to(1000))]
    top_k: usize,
    /// Max tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = super::numbers::from_one_to(1000))]
    max_answer_tokens: usize,
    /// Max tokens of a question together with a part of the text; longer texts are read in parts
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// Number of tokens by which two consecutive parts of the text overlap
    #[arg(long, value_name = "N")]
    stride: Option<usize>,
    /// Allow an empty answer, which means that the text does not contain the answer
    #[arg(long)]
    no_answer: bool,
    /// Do not extend answers to word boundaries
    #[arg(long)]
    parts_of_words: bool,
    /// Print one JSON document per question: a list of answers
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> Outcome {
    let context = match (args.context, &args.context_file) {
        (Some(text), _) => text,
        (None, Some(file)) => files::text(file, Kind::Batch).map_err(EngineError::from)?,
        (None, None) => String::new(),
    };
    let options = AnswerOptions {
        top_k: args.top_k,
        max_answer_tokens: args.max_answer_tokens,
        max_tokens: args.max_tokens,
        stride: args.stride,
        allows_none: args.no_answer,
        aligns_to_words: !args.parts_of_words,
    };
    let builder = args.model.builder_of_own_outputs()?;
    let engine = args.model.build_for(builder, TOKEN_LOGITS)?;
    for question in &args.question {
        let answers = engine.answer(question, &context, &options);
        let answers = answers.map_err(|error| args.model.unsuited(TOKEN_LOGITS, error))?;
        if args.json {
            print_json(&serde_json::to_value(&answers).into_diagnostic()?)?;
            continue;
        }
        let mut rows = table(&["answer", "score", "start", "end"]);
        for answer in &answers {
            rows.add_row([
                answer.answer.clone(),
                format!("{:.5}", answer.score),
                answer.start.to_string(),
                answer.end.to_string(),
            ]);
        }
        align_right(&mut rows, 1..4);
        print(&format!("{question}\n{rows}\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}
