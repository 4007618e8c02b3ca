//! Adapters of a transformer's weights. The task of a text selects the adapter.

use serde_json::Value;

use super::Folder;
use crate::{
    model::{ADAPTER, Description},
    names::nearest,
    runtime::weights::ModelFiles,
    text::TextError,
};

/// Class of a first module whose code is in the checkpoint folder. Such a module passes the task of a text to the transformer.
pub(super) const OWN_TRANSFORMER: &str = "custom_st.Transformer";
/// Key of config.json with the prompt of each task.
const INSTRUCTIONS: &str = "task_instructions";

/// Returns the names of the adapters that the model description for this config.json has. If it has adapters and a `task` is given, writes
/// the adapter of the task into the config.
///
/// # Errors
/// Returns an error if there are adapters, but none with the name of the task.
pub(super) fn chosen(
    root: &ModelFiles,
    config: Option<&mut Value>,
    task: Option<&str>,
) -> Result<Vec<String>, TextError> {
    let Some(config) = config else {
        return Ok(Vec::new());
    };
    // All models with adapters have their own code, which `auto_map` names.
    if task.is_none() && config.get("auto_map").is_none() {
        return Ok(Vec::new());
    }
    // A missing description is reported when the engine is built.
    let description = Description::for_config(config).ok();
    let names = description.and_then(|description| description.adapter_names(config).ok());
    let names = names.flatten().unwrap_or_default();
    if let (Some(task), false) = (task, names.is_empty()) {
        if !names.iter().any(|name| name == task) {
            let near = nearest(task, names.iter().map(String::as_str));
            return Err(TextError::NoAdapter {
                folder: root.path().to_owned(),
                task: task.to_owned(),
                near: near.map(str::to_owned),
                adapters: names.join(", "),
            });
        }
        config[ADAPTER] = task.into();
    }
    Ok(names)
}

impl Folder {
    /// Returns the tasks for which the checkpoint has adapters of its weights; empty if it has none.
    pub fn adapters(&self) -> &[String] {
        &self.adapters
    }

    /// Returns the task whose adapter is added to the weights; `None` if no adapter is added.
    pub fn adapter(&self) -> Option<&str> {
        let config = self.config.as_ref().filter(|_| !self.adapters.is_empty())?;
        config.get(ADAPTER)?.as_str()
    }

    /// Uses the prompt that config.json has for the chosen task as the default prompt, unless the folder has a default prompt.
    pub(super) fn read_instruction(&mut self) {
        let config = self.config.as_ref();
        let texts = config.and_then(|config| config.get(INSTRUCTIONS));
        let text = self.adapter().and_then(|task| texts?.get(task)?.as_str());
        if let (Some(text), None) = (text, &self.default_prompt) {
            self.default_text = Some(text.to_owned());
        }
    }
}
