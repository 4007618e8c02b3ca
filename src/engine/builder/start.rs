//! Sources that an engine can be built from.

use std::path::PathBuf;

use crate::engine::{Artifact, ModelFile};

/// The source of a [`Builder`](super::Builder)'s model.
pub(in crate::engine) enum Start {
    Named(String),
    Source {
        name: String,
        ron: String,
    },
    Artifact(PathBuf),
    Opened(ModelFile),
    /// The shipped description for the `model_type` of the checkpoint's config.json.
    Checkpoint,
}

impl Start {
    /// Returns the path of a compiled model, and its contents if they were already read.
    pub(super) fn artifact(&self) -> Option<(&PathBuf, Option<&Artifact>)> {
        match self {
            Self::Artifact(file) => Some((file, None)),
            Self::Opened(ModelFile::Artifact { file, artifact }) => Some((file, Some(artifact))),
            _ => None,
        }
    }
}
