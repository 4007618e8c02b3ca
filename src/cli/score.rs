use std::{path::PathBuf, process::ExitCode};

use miette::miette;
use serde_json::json;

use super::{Outcome, align_right, input::lines, model::Runnable, print, print_json, table};
use crate::{
    Batch, EngineError,
    engine::{Folder, LOG_PROBABILITY, TextEncoder},
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Runnable,
    /// A text (several times for several)
    #[arg(
        long = "text",
        value_name = "TEXT",
        required_unless_present = "texts_file"
    )]
    texts: Vec<String>,
    /// A file with one text a line
    #[arg(long, value_name = "FILE", conflicts_with = "texts")]
    texts_file: Option<PathBuf>,
    /// Tokens of a batch at most: the logits of all are in memory at once
    #[arg(long, value_name = "N", default_value_t = 1024)]
    batch_tokens: usize,
    /// Print the log-probability of every token as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> Outcome {
    let texts = match &args.texts_file {
        Some(file) => lines(file)?,
        None => args.texts.clone(),
    };
    let folder =
        args.model.weights.as_deref().ok_or_else(|| {
            miette!("texts need the tokenizer.json of a checkpoint; give --weights")
        })?;
    let encoder = TextEncoder::for_prompts(Folder::open(folder)?)?;
    let ids = encoder.prompts(&texts)?;
    if let Some(text) = ids.iter().position(Vec::is_empty) {
        return Err(miette!(
            "text {text}, counted from 0, has no token; expected at least one"
        ));
    }
    let engine = Runnable::build(
        args.model
            .builder_of_own_outputs()?
            .outputs([LOG_PROBABILITY]),
    )?;
    let mut session = engine.session()?;
    let mut scores: Vec<Vec<f32>> = Vec::with_capacity(ids.len());
    let mut rest = ids.as_slice();
    while !rest.is_empty() {
        let mut tokens = 0;
        let fits = |ids: &&Vec<u32>| {
            tokens += ids.len();
            tokens <= args.batch_tokens
        };
        let n = rest.iter().take_while(fits).count().max(1);
        let (now, later) = rest.split_at(n);
        let batch = Batch::from_sequences(now).map_err(EngineError::from)?;
        let outputs = session.run(&batch)?;
        outputs.check_finite()?;
        for i in 0..n {
            scores.push(outputs.sequence(LOG_PROBABILITY, i)?.to_vec());
        }
        rest = later;
    }
    // The first token of a text has nothing before it, so nothing is said of it.
    let sums = scores.iter().map(|own| {
        let sum: f64 = own.iter().map(|&x| f64::from(x)).sum();
        (sum, own.len() - 1)
    });
    let sums: Vec<(f64, usize)> = sums.collect();
    let perplexity = |sum: f64, n: usize| (-sum / n.max(1) as f64).exp();
    let (sum, n) = sums.iter().fold((0.0, 0), |(s, n), (t, m)| (s + t, n + m));
    if args.json {
        let all: Vec<_> = texts
            .iter()
            .zip(&ids)
            .zip(&scores)
            .map(
                |((text, ids), own)| json!({"text": text, "tokens": ids, "log_probabilities": own}),
            )
            .collect();
        print_json(&json!({
            "texts": all, "log_probability": sum, "tokens": n, "perplexity": perplexity(sum, n),
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = table(&["text", "tokens", "log-probability", "a token", "perplexity"]);
    for (text, &(sum, n)) in texts.iter().zip(&sums) {
        let shown = match text.chars().count() > 48 {
            true => format!("{}…", text.chars().take(47).collect::<String>()),
            false => text.clone(),
        };
        rows.add_row([
            shown,
            n.to_string(),
            format!("{sum:.3}"),
            format!("{:.3}", sum / n.max(1) as f64),
            format!("{:.3}", perplexity(sum, n)),
        ]);
    }
    align_right(&mut rows, 1..5);
    print(&format!("{rows}\n"))?;
    print(&format!(
        "all: {n} tokens after each text's first, log-probability {sum:.3}, perplexity {:.3}\n",
        perplexity(sum, n)
    ))?;
    Ok(ExitCode::SUCCESS)
}
