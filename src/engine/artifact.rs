//! Artifacts: a compiled model in one file, with the program and the cubins of the targets it was compiled for.

use std::{collections::HashMap, path::Path};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Compiled, EngineError, Origin, emit};
use crate::{
    files::{self, Beginning, Kind},
    graph::WeightNames,
    jit::{CacheKey, Cubin, Source, Target, options},
    ops::BatchInput,
    program::Program,
    runtime::{batch::Limits, cuda::CudaModel},
};

/// First bytes of the file, including the version of its layout.
const MAGIC: &[u8; 8] = b"GEMMULEJ";
/// Prefix of [`MAGIC`] that all versions of the layout share.
const FAMILY: &[u8; 7] = b"GEMMULE";
const DIGEST: usize = 32;
/// Number of bytes that identify an artifact.
pub(super) const N_FIRST: u64 = FAMILY.len() as u64;

/// Returns whether `bytes` begin with the magic bytes of an artifact, in any version of the layout.
pub(super) fn begins(bytes: &[u8]) -> bool {
    bytes.starts_with(FAMILY)
}

/// A kernel's cubin, bound to the source it was compiled from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sealed {
    pub cubin: Cubin,
    /// Version of the NVRTC that compiled it, (major, minor).
    pub nvrtc: (i32, i32),
    /// SHA-256 of the inputs of the compilation (as in [`CacheKey`]: source text, options, NVRTC's version, target), followed
    /// by the cubin.
    pub digest: [u8; 32],
}

impl Sealed {
    /// Binds `cubin` to `source`, from which NVRTC version `nvrtc` compiled it.
    pub fn new(cubin: Cubin, source: &Source, nvrtc: (i32, i32)) -> Self {
        let digest = seal(&cubin, source, nvrtc);
        Self {
            cubin,
            nvrtc,
            digest,
        }
    }

    /// Binds each of `cubins` to the source at the same index of `sources`.
    pub fn all(cubins: Vec<Cubin>, sources: &[Source], nvrtc: (i32, i32)) -> Vec<Self> {
        let both = cubins.into_iter().zip(sources);
        both.map(|(cubin, source)| Self::new(cubin, source, nvrtc))
            .collect()
    }
}

fn seal(cubin: &Cubin, source: &Source, nvrtc: (i32, i32)) -> [u8; 32] {
    let options = options(cubin.target, nvrtc);
    let key = CacheKey::new(&source.text, &options, nvrtc, cubin.target);
    Sha256::new()
        .chain_update(key.as_bytes())
        .chain_update(&cubin.bytes)
        .finalize()
        .into()
}

/// A program with its run-time metadata and cubins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Artifact {
    /// Name of the model.
    pub name: String,
    /// The description, and the sizes and modules that it was compiled for.
    pub origin: Origin,
    pub program: Program,
    pub limits: Limits,
    /// Names of the weights in checkpoints.
    pub weight_names: WeightNames,
    /// The card that the program was lowered for.
    pub card: String,
    /// Number of timings used to select the program's kernels.
    pub timings: usize,
    pub cubins: Vec<Sealed>,
}

impl Artifact {
    /// Creates an artifact of a compiled program.
    pub fn of(compiled: Compiled, cubins: Vec<Sealed>) -> Self {
        let limits = Limits::of(&compiled.model);
        let (name, weight_names) = (compiled.model.name, compiled.model.weight_names);
        Self {
            name,
            origin: compiled.origin,
            program: compiled.program,
            limits,
            weight_names,
            card: compiled.options.machine.name,
            timings: compiled.options.timings.map_or(0, |timings| timings.len()),
            cubins,
        }
    }

    /// Returns whether `file` starts with the magic bytes of an artifact, in any version of the layout. Do not call this for a pipe,
    /// because it consumes the first bytes of the pipe. [`ModelFile::open`](super::ModelFile::open) accepts pipes.
    pub fn is_one(file: &Path) -> bool {
        Beginning::open(file, N_FIRST).is_ok_and(|beginning| begins(beginning.bytes()))
    }

    /// Returns the targets that have cubins.
    pub fn targets(&self) -> Vec<Target> {
        let mut targets: Vec<Target> = self.cubins.iter().map(|c| c.cubin.target).collect();
        targets.sort_unstable();
        targets.dedup();
        targets
    }

    /// Writes the artifact to `file` and returns its size in bytes. If writing fails, an existing file is unchanged, unless it is a device
    /// or a pipe: these are written in place.
    pub fn write(&self, file: &Path) -> Result<u64, EngineError> {
        let failed = |source| EngineError::Write {
            file: file.to_owned(),
            source,
        };
        let body =
            postcard::to_stdvec(self).map_err(|e| failed(std::io::Error::other(e.to_string())))?;
        let whole = [MAGIC, Sha256::digest(&body).as_slice(), &body].concat();
        files::write(file, &whole).map_err(failed)?;
        Ok(whole.len() as u64)
    }

    /// Reads and validates a file.
    pub fn read(file: &Path) -> Result<Self, EngineError> {
        Self::of_bytes(file, &files::bytes(file, Kind::Artifact)?)
    }

    /// Parses the contents of `file`.
    pub(super) fn of_bytes(file: &Path, bytes: &[u8]) -> Result<Self, EngineError> {
        Self::from_bytes(bytes).map_err(|problem| EngineError::Artifact {
            file: file.to_owned(),
            problem,
        })
    }

    /// Parses and validates the contents of an artifact file. The error is the reason why they are invalid.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let rest = bytes
            .strip_prefix(MAGIC)
            .ok_or("it does not start with an artifact header")?;
        let (digest, body) = rest.split_at_checked(DIGEST).ok_or("it is truncated")?;
        if Sha256::digest(body).as_slice() != digest {
            return Err("its checksum does not match, so it is damaged or truncated".to_owned());
        }
        let (artifact, rest): (Self, _) =
            postcard::take_from_bytes(body).map_err(|e| e.to_string())?;
        if !rest.is_empty() {
            return Err(format!("{} bytes follow its end", rest.len()));
        }
        artifact.program.validate()?;
        artifact.check_limits()?;
        artifact.check_code()?;
        Ok(artifact)
    }

    /// Checks that each cubin was compiled from the source that this version of gemmule generates for its kernel.
    ///
    /// The check detects cubins that were mixed up or belong to another version. It does not detect forged cubins, because a digest can be
    /// forged, too. Like an executable, an artifact must come from a trusted source.
    fn check_code(&self) -> Result<(), String> {
        if self.cubins.is_empty() {
            return Ok(());
        }
        let sources = emit(&CudaModel::kernels(&self.program)).map_err(|e| e.to_string())?;
        let of_symbol: HashMap<&str, &Source> =
            sources.iter().map(|s| (s.symbol.as_str(), s)).collect();
        for Sealed {
            cubin,
            nvrtc,
            digest,
        } in &self.cubins
        {
            let (symbol, target) = (cubin.symbol.escape_default(), cubin.target);
            let Some(source) = of_symbol.get(cubin.symbol.as_str()) else {
                return Err(format!(
                    "it has code for `{symbol}`, which is not one of its kernels"
                ));
            };
            if seal(cubin, source, *nvrtc) != *digest {
                return Err(format!(
                    "its code of `{symbol}` for {target} was not compiled from the kernel's current \
                     source"
                ));
            }
        }
        Ok(())
    }

    /// Checks that every id within [`Limits`] selects a row of each embedding table, since kernels do not check ids.
    fn check_limits(&self) -> Result<(), String> {
        let Limits {
            vocabulary,
            segments,
            longest,
            extended: _,
            skipped: _,
            end: _,
        } = self.limits;
        for table in self.program.tables() {
            let n_ids = match table.ids {
                BatchInput::TokenIds => Some(vocabulary),
                // Without segment ids, every token is in segment 0.
                BatchInput::TypeIds => Some(segments.unwrap_or(1)),
                BatchInput::Positions => longest,
                BatchInput::PreviousIds { first } => Some(vocabulary.max(first.saturating_add(1))),
                _ => None,
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
