use std::{path::PathBuf, process::ExitCode};

use miette::{IntoDiagnostic, WrapErr, miette};
use serde::{Deserialize, Serialize};

use super::super::{Outcome, align_right, human, model::Runnable, print, table, write_file};
use crate::{Batch, EngineError, kernels::trial::uniform};

#[derive(clap::Args)]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    model: Runnable,
    /// Sets of lengths as JSON: {"encoder": [{"name": …, "lens": […]}, …]}
    #[arg(long, value_name = "FILE")]
    workloads: PathBuf,
    /// Names of the sets to time; all of them otherwise
    #[arg(long, value_delimiter = ',')]
    sets: Vec<String>,
    /// Write one row a set: set, tokens, ms
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[arg(long, default_value_t = 8)]
    warm_up: usize,
    #[arg(long, default_value_t = 60)]
    runs: usize,
}

#[derive(Deserialize)]
struct Workloads {
    encoder: Vec<Set>,
}

#[derive(Deserialize)]
struct Set {
    name: String,
    lens: Vec<u32>,
}

#[derive(Serialize)]
struct Row {
    set: String,
    tokens: u64,
    ms: f32,
}

pub(in crate::cli) fn run(args: Args) -> Outcome {
    let text = std::fs::read_to_string(&args.workloads).map_err(|source| EngineError::Read {
        file: args.workloads.clone(),
        source,
    })?;
    let workloads: Workloads = serde_json::from_str(&text)
        .into_diagnostic()
        .wrap_err_with(|| format!("`{}` holds no sets of lengths", args.workloads.display()))?;
    let known = || workloads.encoder.iter().map(|s| s.name.as_str());
    if let Some(name) = args.sets.iter().find(|n| known().all(|k| k != n.as_str())) {
        let names: Vec<&str> = known().collect();
        return Err(miette!(
            "there is no set `{name}`; the file has {}",
            names.join(", ")
        ));
    }
    let engine = Runnable::build(args.model.builder()?.outputs(["last_hidden_state"]))?;
    let mut session = engine.session()?;
    let limits = engine.limits();
    let mut shown = table(&["set", "tokens", "ms", "tokens/s", "activations"]);
    let mut rows = Vec::new();
    for set in workloads
        .encoder
        .iter()
        .filter(|s| args.sets.is_empty() || args.sets.contains(&s.name))
    {
        let mut state = 1;
        let tokens: u64 = set.lens.iter().map(|&n| u64::from(n)).sum();
        let ids = (0..tokens)
            .map(|_| (uniform(&mut state) % u64::from(limits.vocabulary)) as u32)
            .collect();
        let batch = Batch::from_packed(ids, &set.lens).map_err(EngineError::from)?;
        let ms = session.time(&batch, args.warm_up, args.runs)?.median();
        shown.add_row([
            set.name.clone(),
            tokens.to_string(),
            format!("{ms:.4}"),
            format!("{:.0}", tokens as f32 / ms * 1e3),
            human(engine.bytes_needed(&batch)?),
        ]);
        rows.push(Row {
            set: set.name.clone(),
            tokens,
            ms,
        });
    }
    align_right(&mut shown, 1..5);
    print(&format!(
        "{shown}\n{}, {}; median of {} runs after {} to warm up, ids to last hidden state\n",
        engine.device(),
        engine.program().dtype,
        args.runs,
        args.warm_up
    ))?;
    if let Some(file) = args.json {
        write_file(&file, &serde_json::to_vec_pretty(&rows).into_diagnostic()?)?;
    }
    Ok(ExitCode::SUCCESS)
}
