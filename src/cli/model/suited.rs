//! Explains the error of a command that needs an output for which the model was not made.

use miette::Report;

use super::Runnable;
use crate::{
    EngineError,
    engine::{Builder, Engine, LOG_PROBABILITY, LOGITS},
    heads::{MASK_LOGITS, TOKEN_LOGITS},
    model::{Description, EMBEDDING, TOKEN_VECTORS, computed},
    program::NEXT_LOGITS,
    runtime::weights::CheckpointError,
    text::{Folder, TextError},
};

/// Suffixes of class names in the library transformers. Models of these classes have a head for masked tokens.
const MASKED: [&str; 2] = ["ForMaskedLM", "ForPreTraining"];

impl Runnable {
    /// Builds an engine that computes `output`.
    ///
    /// # Errors
    /// Returns the errors of [`build`](Self::build). If the model is made for other outputs, the error names them, and the commands that
    /// compute them.
    pub(in crate::cli) fn build_for(
        &self,
        builder: Builder,
        output: &str,
    ) -> Result<Engine, Report> {
        let engine = Self::build(builder.outputs([output]));
        engine.map_err(|error| self.unsuited(output, error))
    }

    /// Explains an error of a command that needs `output`, if the model is made for other outputs. Returns other errors unchanged.
    pub(in crate::cli) fn unsuited(&self, output: &str, error: EngineError) -> Report {
        let may_be_unsuited = matches!(
            error,
            EngineError::Checkpoint(CheckpointError::Missing { .. })
                | EngineError::Model(_)
                | EngineError::OtherOutput { .. }
                | EngineError::NeedsSource { .. }
                | EngineError::Text(TextError::Folder { .. })
        );
        let own = match may_be_unsuited {
            true => self.own_outputs().unwrap_or_default(),
            false => Vec::new(),
        };
        let error = Report::from(error);
        if own.is_empty() || own.iter().any(|own| own == output) {
            return error;
        }
        let mut commands: Vec<String> = Vec::new();
        for command in own.iter().flat_map(|own| commands_for(own)) {
            let command = format!("`gemmule {command}`");
            if !commands.contains(&command) {
                commands.push(command);
            }
        }
        let own: Vec<String> = own.iter().map(|own| format!("`{own}`")).collect();
        error.wrap_err(format!(
            "`{}` computes {}, and this command needs `{output}`; for this model, use {}",
            self.name(),
            own.join(" and "),
            commands.join(" or ")
        ))
    }

    /// Returns the outputs that the model is made for, according to the modules of its folder and the `architectures` of its config.json.
    /// Returns `None` if they are unknown, as for a description that is not built in.
    fn own_outputs(&self) -> Option<Vec<String>> {
        let folder = self.opened().ok()??;
        if let Some(output) = folder.modules().and_then(computed) {
            return Some(vec![output.to_owned()]);
        }
        let config = folder.config().ok()?;
        let description = match self.location.model() {
            Some(name) => Description::shipped(name)?.ok()?,
            None => Description::for_config(config).ok()?,
        };
        let known = description.output_names();
        let mut own = description.outputs_for(config).ok()?;
        if description.writes(config) {
            own.retain(|name| *name == NEXT_LOGITS);
            own.extend(
                [NEXT_LOGITS, LOG_PROBABILITY]
                    .iter()
                    .filter(|name| known.contains(name)),
            );
        }
        if is_masked(&folder) {
            own.extend([MASK_LOGITS].iter().filter(|name| known.contains(name)));
        }
        own.dedup();
        Some(own.into_iter().map(str::to_owned).collect())
    }
}

/// Returns whether the checkpoint has a head for masked tokens.
fn is_masked(folder: &Folder) -> bool {
    let class = folder.config().ok();
    let class = class.and_then(|config| config["architectures"][0].as_str());
    class.is_some_and(|class| MASKED.iter().any(|ending| class.ends_with(ending)))
}

/// Returns the commands for models that are made for `output`.
fn commands_for(output: &str) -> &'static [&'static str] {
    match output {
        EMBEDDING => &["embed", "run"],
        TOKEN_VECTORS => &["rerank", "embed --role"],
        LOGITS => &["classify", "rerank"],
        TOKEN_LOGITS => &["classify --tokens", "answer"],
        MASK_LOGITS => &["fill-mask"],
        NEXT_LOGITS => &["generate", "translate"],
        LOG_PROBABILITY => &["score"],
        _ => &["run"],
    }
}
