//! A model argument: the name of a shipped description, or the path of a description or an artifact.

use std::path::{Path, PathBuf};

use super::{Artifact, EngineError, artifact};
use crate::{
    files::{Beginning, Kind},
    model::Description,
};

/// A model opened by name or path. The file is read only once, so it may be a pipe. The first bytes of the file determine whether it is a
/// description or an artifact.
#[derive(Clone, Debug)]
pub enum ModelFile {
    Description(Box<Description>),
    /// A file written by [`Artifact::write`].
    Artifact {
        file: PathBuf,
        artifact: Box<Artifact>,
    },
}

impl ModelFile {
    /// Opens the shipped description or the file called `name`.
    ///
    /// # Errors
    /// Returns an error if `name` is neither a shipped description nor a file, or if the file is not a valid description or artifact, or
    /// exceeds the size limit.
    pub fn open(name: &str) -> Result<Self, EngineError> {
        let beginning = match Self::beginning(name)? {
            Named::Shipped(description) => return Ok(Self::Description(description)),
            Named::File(beginning) => beginning,
        };
        let file = Path::new(name);
        if artifact::begins(beginning.bytes()) {
            let artifact = Artifact::of_bytes(file, &beginning.rest(Kind::Artifact)?)?;
            return Ok(Self::Artifact {
                file: file.to_owned(),
                artifact: Box::new(artifact),
            });
        }
        Ok(Self::Description(Box::new(described(name, beginning)?)))
    }

    fn beginning(name: &str) -> Result<Named, EngineError> {
        if let Some(shipped) = Description::shipped(name) {
            return Ok(Named::Shipped(Box::new(shipped?)));
        }
        let file = Path::new(name);
        if !file.exists() {
            let known = Description::shipped_names()
                .iter()
                .map(|&n| n.to_owned())
                .collect();
            return Err(EngineError::NoModel {
                name: name.to_owned(),
                known,
            });
        }
        let beginning = Beginning::open(file, artifact::N_FIRST)?;
        Ok(Named::File(beginning))
    }

    /// Returns the description, or an error for a compiled model.
    pub fn description(self) -> Result<Description, EngineError> {
        match self {
            Self::Description(description) => Ok(*description),
            Self::Artifact { file, .. } => Err(EngineError::NotDescription { file }),
        }
    }
}

enum Named {
    Shipped(Box<Description>),
    File(Beginning),
}

fn described(name: &str, beginning: Beginning) -> Result<Description, EngineError> {
    let ron = beginning
        .rest_as_text(Kind::Description)?
        .ok_or_else(|| EngineError::NotText {
            file: Path::new(name).to_owned(),
        })?;
    Ok(Description::parse(name, &ron)?)
}

/// Opens a shipped description by name, or the description in a file.
///
/// # Errors
/// Returns the errors of [`ModelFile::open`], and an error for a compiled model.
pub fn description(name: &str) -> Result<Description, EngineError> {
    match ModelFile::beginning(name)? {
        Named::Shipped(description) => Ok(*description),
        Named::File(beginning) if artifact::begins(beginning.bytes()) => {
            Err(EngineError::NotDescription {
                file: Path::new(name).to_owned(),
            })
        }
        Named::File(beginning) => described(name, beginning),
    }
}
