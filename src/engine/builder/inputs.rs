//! The description, the sizes and the weights that a builder was given.

use serde_json::Value;

use super::{
    super::{Artifact, Builder, EngineError, ModelFile, model_file::description},
    Start,
};
use crate::{
    model::Description,
    runtime::weights::{Checkpoint, WeightSource},
    text::{Folder, config, limit_context},
};

impl Builder {
    /// Opens the checkpoint's folder. A caller can inspect its settings, for example to choose outputs, before it calls
    /// [`build`](Self::build). Returns `None` if the builder has no checkpoint.
    ///
    /// # Errors
    /// Returns the errors of [`Folder::open_for`].
    pub fn folder(&self) -> Result<Option<Folder>, EngineError> {
        let open = |folder| Folder::open_for(folder, self.task.as_deref());
        let folder = self.checkpoint.as_deref().map(open).transpose()?;
        Ok(folder.map(|folder| folder.with_max_context(self.max_context)))
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
        let mut read = match (&self.config_value, &self.config, folder) {
            (Some(value), ..) => value.clone(),
            (None, Some(file), _) => config(file)?,
            (None, None, Some(folder)) => folder.config()?.clone(),
            (None, None, None) => return Err(EngineError::NoConfig),
        };
        limit_context(&mut read, self.max_context);
        Ok(read)
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
