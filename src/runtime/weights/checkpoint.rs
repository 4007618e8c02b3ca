//! A checkpoint folder as published: `model.safetensors`, or an index and its shards.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    path::{Path, PathBuf},
};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};

use super::{WeightSource, decode};
use crate::{graph::WeightNames, names::nearest, tensor::DType};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error(
        "`{folder}` holds neither `{SINGLE}` nor `{INDEX}`; expected a checkpoint folder as published on the Hugging Face hub"
    )]
    NoCheckpoint { folder: PathBuf },
    #[error("`{file}` cannot be read")]
    Io {
        file: PathBuf,
        source: std::io::Error,
    },
    #[error("`{file}` is no whole safetensors file: {problem}; download it again")]
    NotSafetensors { file: PathBuf, problem: String },
    #[error("`{file}` is no index of shards: {problem}; expected an object with a `weight_map`")]
    Index { file: PathBuf, problem: String },
    #[error("`{index}` names the shard `{shard}`, which is not beside it; download it too")]
    MissingShard { index: PathBuf, shard: String },
    #[error(
        "`{file}` lacks {n_missing} of the {n_needed} tensors that the model needs: {list}; is it a checkpoint of this model, with its own config.json?"
    )]
    Missing {
        file: PathBuf,
        n_missing: usize,
        n_needed: usize,
        list: String,
    },
    #[error(
        "`{file}`: the tensor `{tensor}` is {found:?}, but the model needs {expected:?}; does the config.json belong to this checkpoint?"
    )]
    Shape {
        file: PathBuf,
        tensor: String,
        expected: Vec<u64>,
        found: Vec<u64>,
    },
    #[error(
        "`{file}`: the tensor `{tensor}` is stored as {found}, expected F32, F16 or BF16; convert the checkpoint"
    )]
    DType {
        file: PathBuf,
        tensor: String,
        found: String,
    },
}

/// An open checkpoint. Files stay mapped; nothing is copied until a tensor is read.
pub struct Checkpoint {
    /// The single file or the index, for messages.
    main: PathBuf,
    shards: Vec<(PathBuf, Mmap)>,
    /// Where each tensor is.
    entries: BTreeMap<String, Entry>,
    names: WeightNames,
}

struct Entry {
    shard: usize,
    dtype: Dtype,
    dims: Vec<u64>,
    /// Byte range in the shard.
    start: usize,
    end: usize,
}

impl Checkpoint {
    /// Opens the checkpoint in `folder`, whose tensors may be called as `names` says.
    pub fn open(folder: &Path, names: WeightNames) -> Result<Self, CheckpointError> {
        let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
        let (main, files) = if single.is_file() {
            (single.clone(), vec![single])
        } else if index.is_file() {
            let shards = shard_files(&index)?;
            (index, shards)
        } else {
            return Err(CheckpointError::NoCheckpoint {
                folder: folder.to_owned(),
            });
        };
        let mut checkpoint = Self {
            main,
            shards: Vec::new(),
            entries: BTreeMap::new(),
            names,
        };
        for file in files {
            checkpoint.map(file)?;
        }
        Ok(checkpoint)
    }

    fn map(&mut self, file: PathBuf) -> Result<(), CheckpointError> {
        let io = |source| CheckpointError::Io {
            file: file.clone(),
            source,
        };
        let handle = File::open(&file).map_err(io)?;
        // SAFETY: the map is read only. Another process that truncates the file while it is
        // mapped could fault us; a checkpoint is not written while it is in use.
        let map = unsafe { Mmap::map(&handle) }.map_err(io)?;
        let broken = |e: safetensors::SafeTensorError| CheckpointError::NotSafetensors {
            file: file.clone(),
            problem: e.to_string(),
        };
        let tensors = SafeTensors::deserialize(&map).map_err(broken)?;
        let base = map.as_ptr() as usize;
        for (name, view) in tensors.iter() {
            let start = view.data().as_ptr() as usize - base;
            let entry = Entry {
                shard: self.shards.len(),
                dtype: view.dtype(),
                dims: view.shape().iter().map(|&d| d as u64).collect(),
                start,
                end: start + view.data().len(),
            };
            self.entries.insert(name.to_owned(), entry);
        }
        self.shards.push((file, map));
        Ok(())
    }

    /// The entry of a tensor, under the first spelling that is there.
    fn find(&self, name: &str) -> Option<(String, &Entry)> {
        let mut spellings = self.names.spellings(name).into_iter();
        spellings.find_map(|n| self.entries.get(&n).map(|e| (n, e)))
    }

    fn checked(
        &self,
        name: &str,
        dims: &[u64],
    ) -> Result<(String, &Entry, DType), CheckpointError> {
        let Some((full, entry)) = self.find(name) else {
            return Err(self.missing(&[name], 1));
        };
        let file = || self.shards[entry.shard].0.clone();
        if entry.dims != dims {
            return Err(CheckpointError::Shape {
                file: file(),
                tensor: full,
                expected: dims.to_vec(),
                found: entry.dims.clone(),
            });
        }
        let dtype = match entry.dtype {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            other => {
                return Err(CheckpointError::DType {
                    file: file(),
                    tensor: full,
                    found: format!("{other:?}"),
                });
            }
        };
        Ok((full, entry, dtype))
    }

    fn missing(&self, names: &[&str], n_needed: usize) -> CheckpointError {
        const SHOWN: usize = 5;
        let mut list: Vec<String> = names
            .iter()
            .take(SHOWN)
            .map(
                |name| match nearest(name, self.entries.keys().map(String::as_str)) {
                    Some(near) => format!("`{name}` (the nearest name there is `{near}`)"),
                    None => format!("`{name}`"),
                },
            )
            .collect();
        if names.len() > SHOWN {
            list.push(format!("and {} more", names.len() - SHOWN));
        }
        CheckpointError::Missing {
            file: self.main.clone(),
            n_missing: names.len(),
            n_needed,
            list: list.join(", "),
        }
    }
}

impl WeightSource for Checkpoint {
    fn read(&self, name: &str, dims: &[u64]) -> Result<Vec<f32>, CheckpointError> {
        let (full, entry, dtype) = self.checked(name, dims)?;
        let values = decode(&self.shards[entry.shard].1[entry.start..entry.end], dtype);
        let n_bad = values.iter().filter(|v| !v.is_finite()).count();
        if n_bad > 0 {
            tracing::warn!(
                "the tensor `{full}` holds {n_bad} values that are NaN or infinite; results that depend on it will be too"
            );
        }
        Ok(values)
    }

    fn check(&self, stored: &[(&str, &[u64])]) -> Result<(), CheckpointError> {
        let missing: Vec<&str> = stored
            .iter()
            .map(|s| s.0)
            .filter(|name| self.find(name).is_none())
            .collect();
        if !missing.is_empty() {
            return Err(self.missing(&missing, stored.len()));
        }
        stored
            .iter()
            .try_for_each(|(name, dims)| self.checked(name, dims).map(|_| ()))
    }

    fn surplus(&self, used: &[(&str, &[u64])]) -> Vec<String> {
        let used: BTreeSet<String> = used
            .iter()
            .filter_map(|(name, _)| self.find(name).map(|(n, _)| n))
            .collect();
        self.entries
            .keys()
            .filter(|&n| !used.contains(n))
            .cloned()
            .collect()
    }
}

fn shard_files(index: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let broken = |problem: String| CheckpointError::Index {
        file: index.to_owned(),
        problem,
    };
    let text = std::fs::read_to_string(index).map_err(|source| CheckpointError::Io {
        file: index.to_owned(),
        source,
    })?;
    let json: serde_json::Value = serde_json::from_str(&text).map_err(|e| broken(e.to_string()))?;
    let map = json
        .get("weight_map")
        .and_then(serde_json::Value::as_object)
        .ok_or_else(|| broken("there is no `weight_map`".to_owned()))?;
    let mut names = BTreeSet::new();
    for (tensor, shard) in map {
        let name = shard
            .as_str()
            .ok_or_else(|| broken(format!("`{tensor}` names no file")))?;
        // An index comes from elsewhere: it may name files beside itself only.
        if Path::new(name).components().count() != 1 || name.starts_with('.') {
            return Err(broken(format!("`{name}` is no plain file name")));
        }
        names.insert(name);
    }
    let folder = index.parent().unwrap_or(Path::new("."));
    names
        .into_iter()
        .map(|name| {
            let file = folder.join(name);
            if file.is_file() {
                Ok(file)
            } else {
                Err(CheckpointError::MissingShard {
                    index: index.to_owned(),
                    shard: name.to_owned(),
                })
            }
        })
        .collect()
}
