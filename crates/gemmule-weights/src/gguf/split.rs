//! Models in several files: `NAME-00001-of-00003.gguf`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use super::{
    GgufProblem, Value,
    error::{Result, wrong_key},
};

/// Maximum number of files of a split model.
const MAX_FILES: u64 = 1000;

/// Position of a file in a split model, from its metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    /// From 0.
    index: u64,
    count: u64,
    /// Total number of tensors in all files.
    tensors: Option<u64>,
}

/// Returns the position of a file among the files of a split model; `None` for a model in one file.
pub(super) fn position(metadata: &BTreeMap<String, Value>) -> Result<Option<Position>> {
    let get = |key: &str| match metadata.get(key) {
        None => Ok(None),
        Some(value) => value
            .as_u64()
            .map(Some)
            .ok_or_else(|| wrong_key(key, "expected an integer of at least 0")),
    };
    let count = match get("split.count")? {
        None | Some(0 | 1) => return Ok(None),
        Some(count) if count > MAX_FILES => {
            let problem = format!("it is {count}; expected at most {MAX_FILES} files");
            return Err(wrong_key("split.count", problem));
        }
        Some(count) => count,
    };
    let index = get("split.no")?.unwrap_or(0);
    if index >= count {
        let problem = format!("it is {index}; expected less than {count}, the number of files");
        return Err(wrong_key("split.no", problem));
    }
    Ok(Some(Position {
        index,
        count,
        tensors: get("split.tensors.count")?,
    }))
}

impl Position {
    fn ending(self, index: u64) -> String {
        format!("-{:05}-of-{:05}.gguf", index + 1, self.count)
    }

    /// Returns the paths of all files, given the path of the file at this position.
    pub(super) fn paths(self, path: &Path) -> Result<Vec<PathBuf>> {
        let name = path.file_name().and_then(|name| name.to_str());
        let ending = self.ending(self.index);
        let Some(stem) = name.and_then(|name| name.strip_suffix(&ending)) else {
            return Err(GgufProblem::Split {
                problem: format!(
                    "it is file {} of the {} files of a model; expected a name that ends with `{ending}`, by which the others are found; rename it",
                    self.index + 1,
                    self.count
                ),
            });
        };
        let paths =
            (0..self.count).map(|i| path.with_file_name(format!("{stem}{}", self.ending(i))));
        Ok(paths.collect())
    }

    /// Checks the position of another file of the model.
    pub(super) fn check(self, index: usize, found: Option<Self>) -> Result<()> {
        let index = index as u64;
        match found {
            Some(found) if found.index == index && found.count == self.count => Ok(()),
            _ => {
                let found = match found {
                    None => "a model in one file".to_owned(),
                    Some(found) => format!("file {} of {}", found.index + 1, found.count),
                };
                let (number, count) = (index + 1, self.count);
                Err(GgufProblem::Split {
                    problem: format!(
                        "its metadata says that it is {found}; expected file {number} of {count}; download it again"
                    ),
                })
            }
        }
    }

    /// Checks the total number of tensors.
    pub(super) fn check_total(self, found: usize) -> Result<()> {
        match self.tensors {
            Some(expected) if expected != found as u64 => Err(GgufProblem::Split {
                problem: format!(
                    "the files of the model have {found} tensors; expected {expected}; download them again"
                ),
            }),
            _ => Ok(()),
        }
    }
}
