use std::process::ExitCode;

use serde_json::json;

use super::{
    Outcome, align_right,
    input::{self, OnlyTexts},
    model::Runnable,
    print, print_json, say, table,
};
use crate::{
    Batch, EngineError,
    engine::LOG_PROBABILITY,
    runtime::batch::Limits,
    text::{Folder, TextEncoder},
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Runnable,
    #[command(flatten)]
    input: OnlyTexts,
    /// Max tokens of a batch; the logits of all its tokens are in memory at the same time
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = super::numbers::at_least_one())]
    batch_tokens: usize,
    /// Print the log-probability of every token as JSON; null for the first token of a text, which has no context
    #[arg(long)]
    json: bool,
}

/// Checks token ids against the model's limits.
fn checked(ids: Vec<u32>, limits: &Limits) -> Result<Vec<u32>, String> {
    let n = ids.len();
    match limits.longest {
        _ if n == 0 => Err("it has no token; expected at least one".to_owned()),
        Some(most) if n > most as usize => Err(format!(
            "its {n} tokens are more than the model's {most} positions; shorten or split it"
        )),
        _ => {
            let alone = Batch::from_sequences(std::slice::from_ref(&ids));
            let checked = alone.and_then(|alone| alone.check(limits));
            checked.map(|()| ids).map_err(|e| e.to_string())
        }
    }
}

pub(super) fn run(args: Args) -> Outcome {
    let (texts, source) = args.input.read()?;
    let folder = args.model.tokenizer_folder("texts")?;
    let encoder = TextEncoder::for_prompts(Folder::open(folder)?)?;
    let builder = args.model.builder_of_own_outputs()?;
    let engine = args.model.build_for(builder, LOG_PROBABILITY)?;
    // Skip texts that cannot be scored, and report them.
    let limits = engine.limits();
    let (mut scored, mut code) = (Vec::new(), ExitCode::SUCCESS);
    for (index, ids) in input::prompts(&encoder, &texts).into_iter().enumerate() {
        let ids = ids.map_err(|e| e.to_string());
        match ids.and_then(|ids| checked(ids, &limits)) {
            Ok(ids) => scored.push((texts[index].as_str(), ids)),
            Err(problem) => {
                say(&format!("{} failed: {problem}", source.name(index)));
                code = ExitCode::FAILURE;
            }
        }
    }
    let mut session = engine.session()?;
    let mut scores: Vec<Vec<f32>> = Vec::with_capacity(scored.len());
    let mut rest = scored.as_slice();
    while !rest.is_empty() {
        let mut tokens = 0;
        let fits = |(_, ids): &&(&str, Vec<u32>)| {
            tokens += ids.len();
            tokens <= args.batch_tokens
        };
        let n = rest.iter().take_while(fits).count().max(1);
        let (now, later) = rest.split_at(n);
        let now: Vec<&[u32]> = now.iter().map(|(_, ids)| ids.as_slice()).collect();
        let batch = Batch::from_sequences(&now).map_err(EngineError::from)?;
        let outputs = session.run(&batch)?;
        outputs.check_finite()?;
        for i in 0..n {
            scores.push(outputs.sequence(LOG_PROBABILITY, i)?.to_vec());
        }
        rest = later;
    }
    // The first token of a text has no context and therefore no score.
    let sums = scores.iter().map(|own| {
        let sum: f64 = own.iter().map(|&x| f64::from(x)).sum();
        (sum, own.len() - 1)
    });
    let sums: Vec<(f64, usize)> = sums.collect();
    // A text of a single token (n = 0) has no mean.
    let each = |sum: f64, n: usize| (n > 0).then(|| sum / n as f64);
    let perplexity = |sum: f64, n: usize| each(sum, n).map(|mean| (-mean).exp());
    let shown = |value: Option<f64>| value.map_or("—".to_owned(), |value| format!("{value:.3}"));
    let (sum, n) = sums.iter().fold((0.0, 0), |(s, n), (t, m)| (s + t, n + m));
    if args.json {
        let all = scored.iter().zip(&scores);
        let all = all.map(|((text, ids), own)| {
            // The first token has no score.
            let own = (own.iter().enumerate()).map(|(at, &score)| (at > 0).then_some(score));
            let own: Vec<Option<f32>> = own.collect();
            json!({"text": text, "tokens": ids, "log_probabilities": own})
        });
        let all: Vec<_> = all.collect();
        print_json(&json!({
            "texts": all, "log_probability": sum, "tokens": n, "perplexity": perplexity(sum, n),
        }))?;
        return Ok(code);
    }
    let mut rows = table(&["text", "tokens", "log-probability", "a token", "perplexity"]);
    for ((text, _), &(sum, n)) in scored.iter().zip(&sums) {
        let begun = match text.chars().count() > 48 {
            true => format!("{}…", text.chars().take(47).collect::<String>()),
            false => (*text).to_owned(),
        };
        rows.add_row([
            begun,
            n.to_string(),
            format!("{sum:.3}"),
            shown(each(sum, n)),
            shown(perplexity(sum, n)),
        ]);
    }
    align_right(&mut rows, 1..5);
    print(&format!("{rows}\n"))?;
    print(&format!(
        "all: {n} tokens after each text's first, log-probability {sum:.3}, perplexity {}\n",
        shown(perplexity(sum, n))
    ))?;
    Ok(code)
}
