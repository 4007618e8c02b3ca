#[cfg(feature = "corpora")]
mod file;

use std::process::ExitCode;

use miette::IntoDiagnostic;
use serde_json::{Value, json};

use super::{Outcome, align_right, input::OnlyTexts, model::Runnable, print, print_json, table};
use crate::{
    engine::LOGITS,
    heads::{Aggregation, EntityOptions, LabelScore, TOKEN_LOGITS, ZeroShotOptions},
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Runnable,
    #[command(flatten)]
    input: OnlyTexts,
    /// Label tokens instead of texts, for example named entities
    #[arg(long)]
    tokens: bool,
    /// With --tokens, combine tokens into entities: none, simple, first, average or max
    #[arg(long, value_name = "RULE", requires = "tokens")]
    aggregation: Option<Aggregation>,
    /// With --tokens, leave out this label (repeat for several); O by default
    #[arg(long, value_name = "LABEL", requires = "tokens")]
    ignore_label: Vec<String>,
    /// Score this label with a model for natural language inference (repeat for several)
    #[arg(long, value_name = "LABEL", conflicts_with = "tokens")]
    label: Vec<String>,
    /// With --label, the hypothesis, in which {} is replaced by a label
    #[arg(
        long,
        value_name = "TEXT",
        requires = "label",
        default_value = "This example is {}."
    )]
    template: String,
    /// With --label, score each label independently
    #[arg(long, requires = "label")]
    multi_label: bool,
    /// Print one JSON document per text
    #[arg(long)]
    json: bool,
    #[cfg(feature = "corpora")]
    #[command(flatten)]
    file: file::Args,
    /// A file of texts, which needs the feature `corpora`
    #[cfg(not(feature = "corpora"))]
    #[arg(id = "input_file", long = "input", value_name = "FILE", hide = true)]
    file: Option<std::path::PathBuf>,
}

impl Args {
    fn entity_options(&self) -> EntityOptions {
        let mut options = EntityOptions {
            aggregation: self.aggregation.unwrap_or_default(),
            ..EntityOptions::default()
        };
        if !self.ignore_label.is_empty() {
            options.ignored.clone_from(&self.ignore_label);
        }
        options
    }

    fn zero_shot_options(&self) -> ZeroShotOptions {
        ZeroShotOptions {
            template: self.template.clone(),
            multi_label: self.multi_label,
        }
    }
}

pub(super) fn run(args: Args) -> Outcome {
    #[cfg(feature = "corpora")]
    if args.file.is_given() {
        return file::run(args);
    }
    #[cfg(not(feature = "corpora"))]
    if args.file.is_some() {
        return super::missing::run("classify --input", "corpora");
    }
    let (texts, source) = args.input.read()?;
    let output = match args.tokens {
        true => TOKEN_LOGITS,
        false => LOGITS,
    };
    let builder = args.model.builder_of_own_outputs()?;
    let engine = args.model.build_for(builder, output)?;
    if args.tokens {
        let found = engine.classify_tokens(&texts, &args.entity_options());
        for entities in found.map_err(|e| source.refused(e, |at| at))? {
            if args.json {
                print_json(&serde_json::to_value(&entities).into_diagnostic()?)?;
                continue;
            }
            let mut rows = table(&["label", "word", "score", "start", "end"]);
            for entity in &entities {
                rows.add_row([
                    entity.label.clone(),
                    entity.word.clone(),
                    format!("{:.5}", entity.score),
                    entity.start.to_string(),
                    entity.end.to_string(),
                ]);
            }
            align_right(&mut rows, 2..5);
            print(&format!("{rows}\n"))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let scores = match args.label.is_empty() {
        true => {
            let scores = engine.classify(&texts);
            scores.map_err(|e| source.refused(e, |at| at))?
        }
        false => {
            let options = args.zero_shot_options();
            let each = texts.iter().enumerate().map(|(index, text)| {
                let scores = engine.classify_zero_shot(text, &args.label, &options);
                // The model reads one sequence for each label, which contains the text and the label. Report an error about any of these
                // sequences as an error about the text.
                scores.map_err(|e| source.refused(e, |_| index))
            });
            each.collect::<Result<Vec<Vec<LabelScore>>, _>>()?
        }
    };
    for (text, scores) in texts.iter().zip(&scores) {
        if args.json {
            print_json(&match args.label.is_empty() {
                true => json!(scores),
                false => zero_shot(text, scores),
            })?;
            continue;
        }
        let mut rows = table(&["label", "score"]);
        for LabelScore { label, score } in scores {
            rows.add_row([label.clone(), format!("{score:.5}")]);
        }
        align_right(&mut rows, [1]);
        print(&format!("{text}\n{rows}\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the result of zero-shot classification as JSON, with the keys of the pipeline in Hugging Face transformers.
fn zero_shot(text: &str, scores: &[LabelScore]) -> Value {
    let (labels, scores): (Vec<&str>, Vec<f32>) = scores
        .iter()
        .map(|one| (one.label.as_str(), one.score))
        .unzip();
    json!({"sequence": text, "labels": labels, "scores": scores})
}
