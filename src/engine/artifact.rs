//! A compiled model in one file: the program, and cubins for the targets that it was compiled for.

use std::{io::Write, path::Path};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Compiled, EngineError};
use crate::{
    files::{self, Beginning, Kind},
    graph::WeightNames,
    jit::{Cubin, Target},
    kernels::Meta,
    program::Program,
    runtime::batch::Limits,
    tune::Picks,
};

/// First bytes of the file, with the version of its layout.
const MAGIC: &[u8; 8] = b"GEMMULE4";
/// The part of it that all layouts have.
const FAMILY: &[u8; 7] = b"GEMMULE";
const DIGEST: usize = 32;
/// How many bytes of a file tell whether it is an artifact.
pub(super) const N_FIRST: u64 = FAMILY.len() as u64;

/// Whether these are the first bytes of an artifact of this or another version.
pub(super) fn begins(bytes: &[u8]) -> bool {
    bytes.starts_with(FAMILY)
}

/// A program with what a run must know of it, and its code.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Artifact {
    /// The model's name.
    pub name: String,
    pub program: Program,
    pub limits: Limits,
    /// What checkpoints may call its weights.
    pub weight_names: WeightNames,
    /// What the program's kernels were chosen by, where they were measured.
    pub picks: Option<Picks>,
    pub cubins: Vec<Cubin>,
}

impl Artifact {
    pub fn of(compiled: Compiled, cubins: Vec<Cubin>) -> Self {
        let limits = Limits::of(&compiled.model);
        let (name, weight_names) = (compiled.model.name, compiled.model.weight_names);
        Self {
            name,
            program: compiled.program,
            limits,
            weight_names,
            picks: compiled.options.picks,
            cubins,
        }
    }

    /// Whether a file starts like an artifact of this or another version. A pipe loses these bytes:
    /// [`ModelFile::open`](super::ModelFile::open) reads once.
    pub fn is_one(file: &Path) -> bool {
        Beginning::open(file, N_FIRST).is_ok_and(|beginning| begins(beginning.bytes()))
    }

    /// The targets that there is code for.
    pub fn targets(&self) -> Vec<Target> {
        let mut targets: Vec<Target> = self.cubins.iter().map(|c| c.target).collect();
        targets.sort_unstable();
        targets.dedup();
        targets
    }

    /// Writes the file; a failure leaves what was there before. Returns its size in bytes.
    pub fn write(&self, file: &Path) -> Result<u64, EngineError> {
        let failed = |source| EngineError::Write {
            file: file.to_owned(),
            source,
        };
        let body =
            postcard::to_stdvec(self).map_err(|e| failed(std::io::Error::other(e.to_string())))?;
        let folder = file
            .parent()
            .filter(|p| !p.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        let mut temporary = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
        temporary.write_all(MAGIC).map_err(failed)?;
        temporary
            .write_all(&Sha256::digest(&body))
            .map_err(failed)?;
        temporary.write_all(&body).map_err(failed)?;
        temporary.persist(file).map_err(|e| failed(e.error))?;
        Ok((MAGIC.len() + DIGEST + body.len()) as u64)
    }

    /// Reads a file. Whatever is in it, the result is an artifact that is sound, or an error.
    pub fn read(file: &Path) -> Result<Self, EngineError> {
        Self::of_bytes(file, &files::bytes(file, Kind::Artifact)?)
    }

    /// What the bytes of `file` hold.
    pub(super) fn of_bytes(file: &Path, bytes: &[u8]) -> Result<Self, EngineError> {
        Self::from_bytes(bytes).map_err(|problem| EngineError::Artifact {
            file: file.to_owned(),
            problem,
        })
    }

    /// The artifact that a file of these bytes holds; otherwise what is wrong with them.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let rest = bytes
            .strip_prefix(MAGIC)
            .ok_or("it starts with other bytes")?;
        let (digest, body) = rest.split_at_checked(DIGEST).ok_or("it ends too early")?;
        if Sha256::digest(body).as_slice() != digest {
            return Err("its checksum does not fit, so it was damaged or cut".to_owned());
        }
        let (artifact, rest): (Self, _) =
            postcard::take_from_bytes(body).map_err(|e| e.to_string())?;
        if !rest.is_empty() {
            return Err(format!("{} bytes follow its end", rest.len()));
        }
        artifact.program.validate()?;
        artifact.check_limits()?;
        if let Some(picks) = &artifact.picks {
            picks
                .check()
                .map_err(|problem| format!("its picks are impossible: {problem}"))?;
        }
        Ok(artifact)
    }

    /// Whether every id that [`Limits`] lets through picks a row of each table: a device reads
    /// tables without asking.
    fn check_limits(&self) -> Result<(), String> {
        let Limits {
            vocabulary,
            segments,
            longest,
        } = self.limits;
        for table in self.program.tables() {
            let n_ids = match table.ids {
                Meta::TokenIds => Some(vocabulary),
                // Without segment ids every token is in segment 0.
                Meta::TypeIds => Some(segments.unwrap_or(1)),
                Meta::Positions => longest,
                Meta::CuLens | Meta::PairOffsets | Meta::Mask | Meta::ValidLens => None,
            };
            let fits = |n: u32| u64::from(n) + u64::from(table.offset) <= u64::from(table.rows);
            if !n_ids.is_some_and(fits) {
                return Err(format!(
                    "ids of {:?} are not limited to the {} rows of their table",
                    table.ids, table.rows
                ));
            }
        }
        Ok(())
    }
}
