//! Files of `torch.save` (PyTorch 1.6 and later): a zip archive with a pickle and one entry per storage.
//!
//! The format is documented in PyTorch's notes on serialization. The pickle of a state dict is interpreted, not executed. Opcodes and
//! functions that a dictionary of tensors does not need are refused by name.

#[cfg(test)]
mod tests;
mod view;

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    fs::File,
    io::{self, Read},
    ops::Range,
};

use rawzip::{CompressionMethod, RECOMMENDED_BUFFER_SIZE, ZipArchive, ZipArchiveEntryWayfinder};
use thiserror::Error;

pub use crate::pickle::PickleError;
use crate::pickle::{Pickle, Value, shown};
pub use view::Tensor;

/// Maximum size of the pickle in bytes.
const MAX_PICKLE: u64 = 64 << 20;
/// Maximum number of entries of the archive.
const MAX_ENTRIES: usize = 1 << 20;
/// First bytes of a zip archive.
const ZIP: [u8; 4] = *b"PK\x03\x04";
/// First byte of a pickle. A file in the format before PyTorch 1.6 also starts with this byte, because the file is a sequence of pickles.
const PICKLE: u8 = 0x80;
/// First bytes of a Git LFS pointer file, which takes the place of a file that was not fetched.
const LFS: &[u8] = b"version https://git-lfs";
/// Maximum size of a tensor's name in bytes.
const MAX_NAME: usize = 1024;
/// Keys under which training programs store the state dict of the model.
const WRAPPERS: [&str; 2] = ["state_dict", "model_state_dict"];

/// Reason for refusing a file.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TorchError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(
        "it is no file of torch.save: it does not begin as a zip archive; if it was cut short, download it again"
    )]
    NotZip,
    #[error(
        "it is a pickle without a zip archive, the format of PyTorch before 1.6, which is not read; save it again with torch 1.6 or later: torch.save(torch.load(FILE, weights_only=True), FILE), or convert it to safetensors"
    )]
    Legacy,
    #[error("it is a pointer of Git LFS to the file; download the file itself: git lfs pull")]
    LfsPointer,
    #[error("its zip archive is damaged: {problem}; download it again")]
    Zip { problem: String },
    #[error("its zip archive has no `data.pkl`; expected a file of torch.save")]
    NoPickle,
    #[error("its entry `{entry}` has {bytes} bytes, above the limit of {limit}")]
    TooLarge {
        entry: String,
        bytes: u64,
        limit: u64,
    },
    #[error("its entry `{entry}` is compressed, which torch.save does not do; save the file again")]
    Compressed { entry: String },
    #[error("its entry `{entry}` is encrypted; save the file again")]
    Encrypted { entry: String },
    #[error("its values are big-endian; save it again on a little-endian machine")]
    BigEndian,
    #[error(transparent)]
    Pickle(#[from] PickleError),
    #[error(
        "its pickle is no dictionary of tensors by name; expected the state dict of a model: torch.save(model.state_dict(), FILE)"
    )]
    NoStateDict,
    #[error(
        "its pickle has a key of {bytes} bytes, above the limit of {MAX_NAME}; expected the names of tensors"
    )]
    LongName { bytes: usize },
    #[error(
        "`{name}` is no tensor; expected the state dict of a model: torch.save(model.state_dict(), FILE)"
    )]
    NoTensor { name: String },
    #[error("the tensor `{tensor}`: {problem}")]
    Tensor { tensor: String, problem: String },
}

impl From<rawzip::Error> for TorchError {
    fn from(error: rawzip::Error) -> Self {
        Self::Zip {
            problem: error.to_string(),
        }
    }
}

/// Reads the directory of a file, and returns its tensors by name. No values are read.
///
/// # Errors
/// Returns an error if the file is damaged, is not a state dict, or uses functions that a dictionary of tensors does not need.
pub fn open(file: &File) -> Result<BTreeMap<String, Tensor>, TorchError> {
    let archive = Archive::open(file)?;
    let prefix = archive.prefix()?;
    if let Some(order) = archive.read(&format!("{prefix}byteorder"), 16)?
        && order != b"little"
    {
        return Err(TorchError::BigEndian);
    }
    let pickle = archive.read(&format!("{prefix}data.pkl"), MAX_PICKLE)?;
    let pickle = pickle.ok_or(TorchError::NoPickle)?;
    let pickle = Pickle::read(&pickle)?;
    let mut storages: HashMap<&str, Option<Range<u64>>> = HashMap::new();
    let mut tensors = BTreeMap::new();
    for &(key, value) in state_dict(&pickle)? {
        let name = pickle.text(key).ok_or(TorchError::NoStateDict)?;
        if name.len() > MAX_NAME {
            return Err(TorchError::LongName { bytes: name.len() });
        }
        let Value::Tensor(view) = &pickle.values[value] else {
            return Err(TorchError::NoTensor { name: shown(name) });
        };
        let wrong = |problem: String| TorchError::Tensor {
            tensor: shown(name),
            problem,
        };
        let key = pickle.text(view.storage.key).unwrap_or_default();
        let entry = || format!("{prefix}data/{key}");
        let storage = match storages.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(archive.range(&entry())?),
        };
        let missing = || wrong(format!("its values, `{}`, are missing", shown(&entry())));
        let storage = storage.as_ref().ok_or_else(missing)?;
        let tensor = Tensor::place(view, storage).map_err(wrong)?;
        tensors.insert(name.to_owned(), tensor);
    }
    Ok(tensors)
}

/// Returns the dictionary of tensors: the pickle's result, or its entry with a key in [`WRAPPERS`].
fn state_dict<'p>(pickle: &'p Pickle<'_>) -> Result<&'p [(usize, usize)], TorchError> {
    let Value::Dict(root) = &pickle.values[pickle.root] else {
        return Err(TorchError::NoStateDict);
    };
    for &(key, value) in root {
        let is_wrapper = pickle.text(key).is_some_and(|key| WRAPPERS.contains(&key));
        if let (true, Value::Dict(wrapped)) = (is_wrapper, &pickle.values[value]) {
            return Ok(wrapped);
        }
    }
    Ok(root)
}

/// A zip archive. Only uncompressed entries can be read.
struct Archive {
    zip: ZipArchive<rawzip::FileReader>,
    entries: HashMap<String, Listed>,
    /// Size of the file in bytes.
    size: u64,
}

/// An entry of the central directory.
#[derive(Clone, Copy)]
struct Listed {
    is_stored: bool,
    is_encrypted: bool,
    wayfinder: ZipArchiveEntryWayfinder,
}

impl Archive {
    fn open(file: &File) -> Result<Self, TorchError> {
        let damaged = |problem: String| TorchError::Zip { problem };
        let file = file.try_clone()?;
        let size = file.metadata()?.len();
        check_start(&file)?;
        let mut buffer = vec![0; RECOMMENDED_BUFFER_SIZE];
        let zip = ZipArchive::from_file(file, &mut buffer)?;
        let mut entries = HashMap::new();
        let mut listed = zip.entries(&mut buffer);
        while let Some(entry) = listed.next_entry()? {
            let name = String::from_utf8_lossy(entry.file_path().as_bytes()).into_owned();
            if entries.len() >= MAX_ENTRIES {
                return Err(damaged(format!("it has more than {MAX_ENTRIES} entries")));
            }
            let listed = Listed {
                is_stored: entry.compression_method() == CompressionMethod::STORE,
                is_encrypted: entry.flags().is_encrypted(),
                wayfinder: entry.wayfinder(),
            };
            match entries.entry(name) {
                Entry::Vacant(new) => _ = new.insert(listed),
                Entry::Occupied(known) => {
                    let name = shown(known.key());
                    return Err(damaged(format!("it has two entries `{name}`")));
                }
            }
        }
        Ok(Self { zip, entries, size })
    }

    /// Returns the archive's folder that contains `data.pkl`, with a trailing slash.
    fn prefix(&self) -> Result<String, TorchError> {
        let mut pickles = self.entries.keys().filter_map(|name| {
            let prefix = name.strip_suffix("data.pkl")?;
            (prefix.is_empty() || prefix.ends_with('/')).then_some(prefix)
        });
        let prefix = pickles.next().ok_or(TorchError::NoPickle)?;
        match pickles.next() {
            None => Ok(prefix.to_owned()),
            Some(_) => Err(TorchError::Zip {
                problem: "it has more than one `data.pkl`".to_owned(),
            }),
        }
    }

    /// Returns the range of an entry in the file; `None` if there is no such entry.
    fn range(&self, name: &str) -> Result<Option<Range<u64>>, TorchError> {
        let Some(listed) = self.entries.get(name) else {
            return Ok(None);
        };
        let entry = || shown(name);
        if listed.is_encrypted {
            return Err(TorchError::Encrypted { entry: entry() });
        }
        if !listed.is_stored {
            return Err(TorchError::Compressed { entry: entry() });
        }
        let (start, end) = self
            .zip
            .get_entry(listed.wayfinder)?
            .compressed_data_range();
        match start <= end && end <= self.size {
            true => Ok(Some(start..end)),
            false => Err(TorchError::Zip {
                problem: format!("the entry `{}` is not within the file", entry()),
            }),
        }
    }

    /// Reads an entry of at most `limit` bytes; `None` if there is no such entry.
    fn read(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, TorchError> {
        let Some(range) = self.range(name)? else {
            return Ok(None);
        };
        let bytes = range.end - range.start;
        if bytes > limit {
            return Err(TorchError::TooLarge {
                entry: shown(name),
                bytes,
                limit,
            });
        }
        let mut data = Vec::new();
        let entry = self.zip.get_entry(self.entries[name].wayfinder)?;
        entry
            .verifying_reader(entry.reader())
            .take(limit + 1)
            .read_to_end(&mut data)
            .map_err(|error| TorchError::Zip {
                problem: format!("the entry `{}`: {error}", shown(name)),
            })?;
        Ok(Some(data))
    }
}

/// Checks the first bytes of a file.
fn check_start(mut file: &File) -> Result<(), TorchError> {
    use io::Seek;
    let mut start = Vec::new();
    file.rewind()?;
    file.take(LFS.len() as u64).read_to_end(&mut start)?;
    match start.as_slice() {
        [PICKLE, 2..=5, ..] => Err(TorchError::Legacy),
        start if start == LFS => Err(TorchError::LfsPointer),
        start if start.starts_with(&ZIP) => Ok(()),
        _ => Err(TorchError::NotZip),
    }
}
