//! Building an engine from an artifact instead of a description.

use std::path::Path;

use super::{Builder, Loaded, modules_of};
use crate::{
    engine::{Artifact, ChosenBy, DeviceName, EngineError},
    machine::Served,
    program::Padding,
    tensor::Format,
    text::Folder,
};

impl Builder {
    /// Returns the program and the kernels of the artifact `read`. If `read` is `None`, reads the artifact from `file`.
    ///
    /// # Errors
    /// Returns an error if a setting of the builder differs from the setting that the artifact was compiled with, or if the folder's sizes
    /// or modules describe another model.
    pub(super) fn of_file(
        &self,
        file: &Path,
        read: Option<&Artifact>,
        device: &DeviceName,
        folder: Option<&Folder>,
    ) -> Result<Loaded, EngineError> {
        if self.is_tuned() {
            return Err(EngineError::TuneArtifact {
                file: file.to_owned(),
            });
        }
        if self.padding == Padding::Kept {
            return Err(EngineError::ArtifactPadding {
                file: file.to_owned(),
            });
        }
        if let Some(asked) = self.attention {
            let file = file.to_owned();
            return Err(EngineError::ArtifactAttention { file, asked });
        }
        let mut artifact = read.map_or_else(|| Artifact::read(file), |a| Ok(a.clone()))?;
        let (dtype, format) = self.computes_in(device)?;
        let asked = self.dtype.map(|_| dtype);
        if let Some(asked) = asked.filter(|&d| d != artifact.program.dtype) {
            return Err(EngineError::ArtifactDType {
                file: file.to_owned(),
                stored: artifact.program.dtype.to_string(),
                asked: asked.to_string(),
            });
        }
        let stored = artifact.program.weight_format();
        if (self.dtype.is_some() || self.quantize.is_some()) && format != stored {
            let shown = |format: Option<Format>| format.unwrap_or(dtype.into()).to_string();
            return Err(EngineError::ArtifactFormat {
                file: file.to_owned(),
                stored: shown(stored),
                asked: shown(format),
            });
        }
        let stored = artifact.program.cache_format();
        if let Some(asked) = self.kv_cache
            && !artifact.program.caches.is_empty()
            && asked != stored
        {
            return Err(EngineError::ArtifactCache {
                file: file.to_owned(),
                stored,
                asked,
            });
        }
        let stored = artifact.limits.longest;
        if let Some(asked) = self.max_context
            && stored != Some(asked)
        {
            let file = file.to_owned();
            return Err(EngineError::ArtifactContext {
                file,
                stored,
                asked,
            });
        }
        let settings = [
            (!self.without.is_empty(), "without"),
            (self.no_fused_launches, "no_fused_launches"),
            (self.config.is_some(), "config"),
        ];
        if let Some((_, setting)) = settings.into_iter().find(|(is_given, _)| *is_given) {
            let file = file.to_owned();
            return Err(EngineError::ArtifactSetting { file, setting });
        }
        let outputs = &artifact.program.outputs;
        let is_missing = |asked: &&String| !outputs.iter().any(|(name, _)| name == *asked);
        if let Some(asked) = self.outputs.iter().flatten().find(is_missing) {
            let stored: Vec<_> = outputs
                .iter()
                .map(|(name, _)| format!("`{name}`"))
                .collect();
            return Err(EngineError::ArtifactOutput {
                file: file.to_owned(),
                stored: stored.join(", "),
                asked: asked.clone(),
            });
        }
        if self.invariant && !artifact.program.invariant {
            return Err(EngineError::ArtifactInvariant {
                file: file.to_owned(),
            });
        }
        if self.cached && artifact.program.caches.is_empty() {
            return Err(EngineError::ArtifactWrites {
                file: file.to_owned(),
            });
        }
        if let Some(folder) = folder {
            let modules = modules_of(Some(folder));
            let checked = artifact.origin.check(folder.config()?.clone(), &modules);
            checked.map_err(|differences| EngineError::ArtifactFolder {
                file: file.to_owned(),
                folder: folder.root().to_owned(),
                differences,
            })?;
        }
        let chosen_by = ChosenBy {
            card: artifact.card.clone(),
            fit: None,
            served: Served::Own,
            timings: artifact.timings,
        };
        let cubins = std::mem::take(&mut artifact.cubins).into_iter();
        Ok(Loaded {
            cubins: Some(cubins.map(|sealed| sealed.cubin).collect()),
            chosen_by,
            artifact,
        })
    }
}
