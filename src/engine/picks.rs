//! Picks in files: those that a user gives, and those that are kept beside the cubins.

use std::{
    io,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use super::{EngineError, emit};
use crate::{
    files::{self, own},
    jit::Target,
    kernels::KernelSpec,
    runtime::cuda::DeviceInfo,
    tensor::Extents,
    tune::{Card, MOST_BYTES, Made, Picked, Picks, PicksError, Problem},
};

/// Reads picks that [`write_picks`] wrote, or people changed.
///
/// # Errors
/// [`EngineError::Read`], or [`EngineError::Picks`] with what is wrong with them.
pub fn read_picks(file: &Path) -> Result<Picks, EngineError> {
    let bytes = files::up_to(file, MOST_BYTES as u64).map_err(|source| EngineError::Read {
        file: file.to_owned(),
        source,
    })?;
    Picks::parse(&bytes).map_err(|problem| refused(file, problem))
}

/// Writes picks as RON, in a folder that is made if it is not there; a failure leaves what was there
/// before.
pub fn write_picks(file: &Path, picks: &Picks) -> Result<(), EngineError> {
    let text = picks.to_ron().map_err(|problem| refused(file, problem))?;
    let folder = file.parent().filter(|p| !p.as_os_str().is_empty());
    folder
        .map_or(Ok(()), std::fs::create_dir_all)
        .and_then(|()| files::write(file, text.as_bytes()))
        .map_err(|source| EngineError::Write {
            file: file.to_owned(),
            source,
        })
}

pub(super) fn refused(file: &Path, problem: PicksError) -> EngineError {
    EngineError::Picks {
        file: file.to_owned(),
        problem: Box::new(problem),
    }
}

/// The picks in `file`, for code of `targets` that this NVRTC makes on a machine without their card:
/// that they are of a card of each target is all that can be asked.
pub fn picks_for_targets(
    file: &Path,
    problems: &[Problem],
    targets: &[Target],
    nvrtc: (i32, i32),
) -> Result<Picks, EngineError> {
    picks_for(file, problems, targets, Some(nvrtc))
}

/// The picks in `file`, for source that is only written: whichever NVRTC they were measured with. `target` is
/// what it is written for, if that was said.
pub fn picks_for_source(
    file: &Path,
    problems: &[Problem],
    target: Option<Target>,
) -> Result<Picks, EngineError> {
    picks_for(file, problems, target.as_slice(), None)
}

fn picks_for(
    file: &Path,
    problems: &[Problem],
    targets: &[Target],
    nvrtc: Option<(i32, i32)>,
) -> Result<Picks, EngineError> {
    let picks = read_picks(file)?;
    let check = || -> Result<(), PicksError> {
        let found = picks.made.card.clone();
        let Some(own) = target_of(&found) else {
            return Err(PicksError::NoTarget { found });
        };
        if let Some(other) = targets.iter().find(|&&target| target != own) {
            return Err(PicksError::Target {
                found,
                found_target: own.name(),
                expected: other.name(),
            });
        }
        nvrtc.map_or(Ok(()), |nvrtc| picks.check_nvrtc(nvrtc))
    };
    check().map_err(|problem| refused(file, problem))?;
    for (problem, digest) in problems.iter().zip(digests(problems)?) {
        picks
            .check_problem(problem, &digest)
            .map_err(|problem| refused(file, problem))?;
    }
    Ok(picks.only(problems))
}

/// The target whose code a card runs; `None` where there is none.
pub fn target_of(card: &Card) -> Option<Target> {
    let (major, minor) = card.capability;
    Target::for_capability(major, minor).ok()
}

impl From<&DeviceInfo> for Card {
    fn from(info: &DeviceInfo) -> Self {
        Self {
            name: info.name.clone(),
            capability: info.capability,
            n_sms: info.n_sms,
        }
    }
}

/// What tells whether the kernels of problems are those that were measured: for each problem the
/// SHA-256, in hexadecimal, of the source and launch geometry of all its candidates.
pub fn digests(problems: &[Problem]) -> Result<Vec<String>, EngineError> {
    // What of the geometry does not show in the source shows on a small batch and a larger one.
    let batches = [[1, 1, 1, 1], [317, 2, 300, 90_289]];
    let batches = batches.map(|[tokens, batch, longest, pairs]| Extents {
        tokens,
        batch,
        longest,
        pairs,
        rows: tokens,
    });
    let kernels_of = |problem: &Problem| -> Vec<KernelSpec> {
        let candidates = problem.candidates().into_iter();
        candidates.flat_map(|c| problem.kernels(c)).collect()
    };
    let kernels: Vec<Vec<KernelSpec>> = problems.iter().map(kernels_of).collect();
    let mut sources = emit(&kernels.concat())?.into_iter();
    let of = |kernels: &Vec<KernelSpec>| {
        let mut hash = Sha256::new();
        // Each part goes in with its length, so that no two lists of parts read alike.
        let mut part = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        for (kernel, source) in kernels.iter().zip(sources.by_ref()) {
            part(&source.symbol);
            part(&source.text);
            for extents in &batches {
                part(&format!("{:?}", kernel.as_kernel().launch(extents)));
            }
        }
        hex(&hash.finalize())
    };
    Ok(kernels.iter().map(of).collect())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Picks beside the cubins: a file for each problem, card, NVRTC and digest of kernels. Processes
/// that measure different problems never meet in a file; of those that measure the same, the last
/// wins with a whole file. As with the cubins, what others may have written is not read.
pub(super) struct Store {
    folder: PathBuf,
}

impl Store {
    /// In the folder of a cache.
    pub(super) fn at(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
        }
    }

    pub(super) fn file(&self, made: &Made, problem: &Problem, digest: &str) -> PathBuf {
        /// Of the problem's name: a file's name has at most 255 bytes.
        const MOST_NAME: usize = 120;
        let key = problem.key();
        let card = &made.card;
        let all = format!(
            "{}\n{:?}\n{}\n{:?}\n{key}\n{digest}",
            card.name, card.capability, card.n_sms, made.nvrtc
        );
        let hash = hex(&Sha256::digest(all)[..8]);
        let name: String = key.chars().take(MOST_NAME).collect();
        self.folder.join(format!("{name}-{hash}.picks.ron"))
    }

    /// What is kept for a problem; `None` where there is nothing.
    pub(super) fn get(
        &self,
        made: &Made,
        problem: &Problem,
        digest: &str,
    ) -> Result<Option<Picked>, EngineError> {
        let file = self.file(made, problem, digest);
        let bytes = match own::read(&file, MOST_BYTES as u64).map_err(io::Error::from) {
            Ok(bytes) => bytes,
            Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(EngineError::Read { file, source }),
        };
        let picks = Picks::parse(&bytes).map_err(|problem| refused(&file, problem))?;
        picks
            .check_made(made)
            .and_then(|()| picks.check_problem(problem, digest))
            .map_err(|problem| refused(&file, problem))?;
        Ok(picks.problems.get(&problem.key()).cloned())
    }

    pub(super) fn put(
        &self,
        made: &Made,
        problem: &Problem,
        picked: &Picked,
    ) -> Result<(), EngineError> {
        let mut picks = Picks::new(made.clone());
        picks.problems.insert(problem.key(), picked.clone());
        let file = self.file(made, problem, &picked.digest);
        let text = picks.to_ron().map_err(|problem| refused(&file, problem))?;
        own::write(&file, text.as_bytes()).map_err(|trouble| EngineError::Write {
            file,
            source: trouble.into(),
        })
    }
}
