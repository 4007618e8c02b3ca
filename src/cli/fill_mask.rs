use std::{path::PathBuf, process::ExitCode};

use miette::{IntoDiagnostic, miette};

use super::{Outcome, align_right, input::Source, model::Runnable, print, print_json, table};
use crate::heads::{MASK_LOGITS, MaskOptions};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Runnable,
    /// A text with the model's mask token, such as [MASK] (several times for several)
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
    /// Number of tokens for each mask
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = super::generate::up_to(1000))]
    top_k: usize,
    /// Consider only this word (several times for several)
    #[arg(long, value_name = "WORD")]
    target: Vec<String>,
    /// Print one JSON document per text: a list of tokens for each mask
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> Outcome {
    let (texts, _) = Source::texts("text", &args.texts, args.texts_file.as_deref())?;
    if let (true, Some(file)) = (texts.is_empty(), &args.texts_file) {
        let file = file.display();
        return Err(miette!("`{file}` has no text; expected one per line"));
    }
    let options = MaskOptions {
        top_k: args.top_k,
        targets: args.target,
    };
    let builder = args.model.builder_of_own_outputs()?.outputs([MASK_LOGITS]);
    let engine = Runnable::build(builder)?;
    for masks in engine.fill_masks(&texts, &options)? {
        if args.json {
            print_json(&serde_json::to_value(&masks).into_diagnostic()?)?;
            continue;
        }
        for mask in &masks {
            let mut rows = table(&["token", "score", "text"]);
            for filled in mask {
                rows.add_row([
                    filled.token_str.clone(),
                    format!("{:.5}", filled.score),
                    filled.sequence.clone(),
                ]);
            }
            align_right(&mut rows, [1]);
            print(&format!("{rows}\n"))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
