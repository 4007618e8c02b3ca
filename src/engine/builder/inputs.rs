//! The description, the sizes and the weights that a builder was given.

use serde_json::Value;

use super::{
    super::{Artifact, Builder, EngineError, ModelFile, model_file::description},
    Start,
};
use crate::{
    model::Description,
    runtime::weights::{Checkpoint, WeightSource},
    text::{Folder, config},
};

impl Builder {
    /// Opens the checkpoint's folder, so that a caller can choose outputs by the folder's settings before it calls [`build`](Self::build).
    /// Returns `None` if the builder has no checkpoint.
    ///
    /// # Errors
    /// Returns the errors of [`Folder::open_for`].
    pub fn folder(&self) -> Result<Option<Folder>, EngineError> {
        let open = |folder| Folder::open_for(folder, self.task.as_deref());
        Ok(self.checkpoint.as_deref().map(open).transpose()?)
    }

    pub(super) fn description(&self, folder: Option<&Folder>) -> Result<Description, EngineError> {
        match &self.start {
            Start::Named(name) => description(name),
            Start::Source { name, ron } => Ok(Description::parse(name, ron)?),
            Start::Opened(ModelFile::Description(description)) => Ok((**description).clone()),
            Start::Checkpoint => Ok(Description::for_config(&self.config_json(folder)?)?),
            Start::Artifact(_) | Start::Opened(_) => Err(EngineError::NoConfig),
        }
    }

    pub(super) fn config_json(&self, folder: Option<&Folder>) -> Result<Value, EngineError> {
        if let Some(value) = &self.config_value {
            return Ok(value.clone());
        }
        match (&self.config, folder) {
            (Some(file), _) => Ok(config(file)?),
            (None, Some(folder)) => Ok(folder.config()?.clone()),
            (None, None) => Err(EngineError::NoConfig),
        }
    }

    pub(super) fn weights(
        &self,
        artifact: &Artifact,
        folder: Option<&Folder>,
    ) -> Result<Box<dyn WeightSource>, EngineError> {
        match (folder, self.random) {
            (_, Some(random)) => Ok(Box::new(random)),
            (Some(folder), None) => {
                let names = artifact.weight_names.clone();
                let opened = Checkpoint::of(folder.files(), folder.root_files(), names)?;
                Ok(Box::new(opened))
            }
            (None, None) => Err(EngineError::NoWeights),
        }
    }
}
