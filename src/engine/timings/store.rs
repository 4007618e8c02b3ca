//! Files of timings, given by the user or stored next to the cubin cache.

use std::{
    io,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use super::{KERNELS, TimedOn, TimingsError, check_on, hex, parse_timings, timings_to_ron};
use crate::{
    engine::EngineError,
    files::{self, Kind, own},
    machine::Machine,
    select::Timings,
};

/// Reads a file of timings given by the user.
pub fn read_timings(file: &Path) -> Result<(Timings, TimedOn), EngineError> {
    let bytes = files::bytes(file, Kind::Timings)?;
    parse_timings(&bytes).map_err(|problem| refused(file, problem))
}

/// Writes a file that [`read_timings`] can read.
pub fn write_timings(file: &Path, timings: &Timings, on: &TimedOn) -> Result<(), EngineError> {
    let text = timings_to_ron(timings, on).map_err(|problem| refused(file, problem))?;
    files::write(file, text.as_bytes()).map_err(|source| EngineError::Write {
        file: file.to_owned(),
        source,
    })
}

/// Returns `timings` after checking that they were measured on the card `machine` and, if `nvrtc` is given, with that version of NVRTC.
/// `(timings, found)` is the result of [`read_timings`] for `file`.
///
/// # Errors
/// Returns an error if the timings were measured on another card or with another version of NVRTC.
pub fn timings_for(
    file: &Path,
    (timings, found): (Timings, TimedOn),
    machine: &Machine,
    nvrtc: Option<(i32, i32)>,
) -> Result<Timings, EngineError> {
    if !found.serves(machine)? {
        let (major, minor) = machine.capability;
        let card = format!(
            "{} (capability {major}.{minor}, {} SMs)",
            machine.name, machine.sms
        );
        return Err(refused(file, TimingsError::OtherMachine { found, card }));
    }
    match nvrtc.filter(|&nvrtc| nvrtc != found.nvrtc) {
        Some(expected) => {
            let found = found.nvrtc;
            Err(refused(file, TimingsError::Nvrtc { found, expected }))
        }
        None => Ok(timings),
    }
}

pub(in crate::engine) fn refused(file: &Path, problem: TimingsError) -> EngineError {
    EngineError::Timings {
        file: file.to_owned(),
        problem: Box::new(problem),
    }
}

/// Timings stored next to the cubin cache, in one file for each card and NVRTC version. Files that another user may have written are not
/// read.
pub(in crate::engine) struct Store {
    file: PathBuf,
}

impl Store {
    /// Returns the store in the folder of a cache.
    pub(in crate::engine) fn at(folder: &Path, on: &TimedOn) -> Self {
        let all = format!("{on:?}\n{KERNELS}");
        let hash = hex(&Sha256::digest(all)[..8]);
        Self {
            file: folder.join(format!("{hash}.timings.ron")),
        }
    }

    /// Returns the stored timings; empty if there is no file.
    pub(in crate::engine) fn get(&self, on: &TimedOn) -> Result<Timings, EngineError> {
        let most = Kind::Timings.limit();
        let bytes = match own::read(&self.file, most).map_err(io::Error::from) {
            Ok(bytes) => bytes,
            Err(source) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(Timings::default());
            }
            Err(source) => {
                let file = self.file.clone();
                return Err(EngineError::Read { file, source });
            }
        };
        let refused = |problem| refused(&self.file, problem);
        let (timings, found) = parse_timings(&bytes).map_err(refused)?;
        check_on(&found, on).map_err(refused)?;
        Ok(timings)
    }

    pub(in crate::engine) fn put(
        &self,
        timings: &Timings,
        on: &TimedOn,
    ) -> Result<(), EngineError> {
        let text = timings_to_ron(timings, on).map_err(|problem| refused(&self.file, problem))?;
        own::write(&self.file, text.as_bytes()).map_err(|trouble| EngineError::Write {
            file: self.file.clone(),
            source: trouble.into(),
        })
    }
}
