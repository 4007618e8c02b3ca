use std::process::ExitCode;

use miette::IntoDiagnostic;

use super::{Outcome, align_right, input::OnlyTexts, model::Runnable, print, print_json, table};
use crate::heads::{MASK_LOGITS, MaskOptions};

#[derive(clap::Args)]
#[command(mut_arg("texts", |text| {
    text.help("A text with the model's mask token, such as [MASK] (several times for several)")
}))]
pub(super) struct Args {
    #[command(flatten)]
    model: Runnable,
    #[command(flatten)]
    input: OnlyTexts,
    /// Number of proposed tokens per mask
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = super::numbers::from_one_to(1000))]
    top_k: usize,
    /// Only propose this word (repeat for several)
    #[arg(long, value_name = "WORD")]
    target: Vec<String>,
    /// Print one JSON document per text, with a list of tokens per mask
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> Outcome {
    let (texts, source) = args.input.read()?;
    let options = MaskOptions {
        top_k: args.top_k,
        targets: args.target,
    };
    let builder = args.model.builder_of_own_outputs()?;
    let engine = args.model.build_for(builder, MASK_LOGITS)?;
    let filled = engine.fill_masks(&texts, &options);
    for masks in filled.map_err(|e| source.refused(e, |at| at))? {
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
