//! What MODEL stands for: a shipped description, or a file of one of two kinds.

use std::path::{Path, PathBuf};

use super::{Artifact, EngineError, artifact};
use crate::{
    files::{Beginning, Kind},
    model::Description,
};

/// A model by its name or path. The file is read once, so it may be a pipe, and its first bytes
/// say which kind it is.
#[derive(Clone, Debug)]
pub enum ModelFile {
    Description(Box<Description>),
    /// A file that [`Artifact::write`] made.
    Artifact {
        file: PathBuf,
        artifact: Box<Artifact>,
    },
}

impl ModelFile {
    /// The shipped description `name`, or what is in the file `name`.
    ///
    /// # Errors
    /// A name of neither; a file that is neither kind, is not sound, or is larger than any model.
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

    /// The description; an error where the file is a compiled model.
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

/// A shipped description by name, or the description in a file.
///
/// # Errors
/// As [`ModelFile::open`]; and a compiled model is none.
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
