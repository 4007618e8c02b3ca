//! What an engine can be built from.

use std::path::PathBuf;

use crate::engine::{Artifact, ModelFile};

/// Where a [`Builder`](super::Builder) starts from.
pub(in crate::engine) enum Start {
    Named(String),
    Source {
        name: String,
        ron: String,
    },
    Artifact(PathBuf),
    Opened(ModelFile),
    /// The description that comes with gemmule for the checkpoint's config.json.
    Checkpoint,
}

impl Start {
    /// The file of a compiled model, and what is in it if it was read.
    pub(super) fn artifact(&self) -> Option<(&PathBuf, Option<&Artifact>)> {
        match self {
            Self::Artifact(file) => Some((file, None)),
            Self::Opened(ModelFile::Artifact { file, artifact }) => Some((file, Some(artifact))),
            _ => None,
        }
    }
}
