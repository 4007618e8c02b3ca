//! Files of `torch.save` (PyTorch 1.6 and later): a zip archive of a pickle and of one entry for each storage.
//!
//! The format is documented in PyTorch's notes on serialization. The pickle of a state dict is interpreted, not executed:
//! instructions and functions that a dictionary of tensors does not need are refused by name.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io::{self, Read},
    ops::Range,
};

use rawzip::{CompressionMethod, RECOMMENDED_BUFFER_SIZE, ZipArchive};
use thiserror::Error;

pub use crate::pickle::{Element, PickleError};
use crate::pickle::{Pickle, Tensor as View, Value};

/// Maximum size of the pickle in bytes.
const MAX_PICKLE: u64 = 64 << 20;
/// Maximum number of entries of the archive.
const MAX_ENTRIES: u64 = 1 << 20;
/// First bytes of a zip archive.
const ZIP: [u8; 4] = *b"PK\x03\x04";
/// First bytes of the format before PyTorch 1.6: the pickled number 0x1950a86a20f9469cfc6c.
const LEGACY: [u8; 8] = [0x80, 0x02, 0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46];

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
        "it has the format of PyTorch before 1.6, which is not read; save it again in Python: torch.save(torch.load(FILE, weights_only=True), FILE)"
    )]
    Legacy,
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
    #[error("its values are big-endian; save it again on a little-endian machine")]
    BigEndian,
    #[error(transparent)]
    Pickle(#[from] PickleError),
    #[error(
        "its pickle is no dictionary of tensors by name; expected the state dict of a model: torch.save(model.state_dict(), FILE)"
    )]
    NoStateDict,
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

/// A tensor of a file, in row-major order without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub element: Element,
    pub dims: Vec<u64>,
    /// Position of its bytes in the file.
    pub bytes: Range<u64>,
}

/// Reads the directory of a file: its tensors by name. No values are read.
///
/// # Errors
/// A file that is damaged, that is not a state dict, or that needs more than building tensors; and a tensor that is not stored
/// contiguously in row-major order.
pub fn open(file: &File) -> Result<BTreeMap<String, Tensor>, TorchError> {
    let file = file.try_clone()?;
    check_start(&file)?;
    let mut buffer = vec![0; RECOMMENDED_BUFFER_SIZE];
    let archive = ZipArchive::from_file(file, &mut buffer)?;
    if archive.entries_hint() > MAX_ENTRIES {
        return Err(TorchError::Zip {
            problem: format!("it has {} entries", archive.entries_hint()),
        });
    }
    let mut entries = HashMap::new();
    let mut listed = archive.entries(&mut buffer);
    while let Some(entry) = listed.next_entry()? {
        let name = String::from_utf8_lossy(entry.file_path().as_bytes()).into_owned();
        if entries.len() as u64 >= MAX_ENTRIES {
            return Err(TorchError::Zip {
                problem: format!("it has more than {MAX_ENTRIES} entries"),
            });
        }
        let is_stored = entry.compression_method() == CompressionMethod::STORE;
        entries.insert(name, (is_stored, entry.wayfinder()));
    }
    // Returns the bytes of an entry in the file.
    let range = |name: &str| -> Result<Option<Range<u64>>, TorchError> {
        let Some(&(is_stored, wayfinder)) = entries.get(name) else {
            return Ok(None);
        };
        if !is_stored {
            return Err(TorchError::Compressed {
                entry: name.to_owned(),
            });
        }
        let (start, end) = archive.get_entry(wayfinder)?.compressed_data_range();
        Ok(Some(start..end))
    };
    let read = |name: &str, limit: u64| -> Result<Option<Vec<u8>>, TorchError> {
        let Some(range) = range(name)? else {
            return Ok(None);
        };
        let bytes = range.end.saturating_sub(range.start);
        if bytes > limit {
            return Err(TorchError::TooLarge {
                entry: name.to_owned(),
                bytes,
                limit,
            });
        }
        let mut data = Vec::new();
        let entry = archive.get_entry(entries[name].1)?;
        entry
            .verifying_reader(entry.reader())
            .take(limit)
            .read_to_end(&mut data)
            .map_err(|error| TorchError::Zip {
                problem: format!("the entry `{name}`: {error}"),
            })?;
        Ok(Some(data))
    };
    let mut pickles = entries.keys().filter_map(|name| {
        let prefix = name.strip_suffix("data.pkl")?;
        (prefix.is_empty() || prefix.ends_with('/')).then(|| prefix.to_owned())
    });
    let prefix = pickles.next().ok_or(TorchError::NoPickle)?;
    if pickles.next().is_some() {
        return Err(TorchError::Zip {
            problem: "it has more than one `data.pkl`".to_owned(),
        });
    }
    if let Some(order) = read(&format!("{prefix}byteorder"), 16)?
        && order != b"little"
    {
        return Err(TorchError::BigEndian);
    }
    let pickle = read(&format!("{prefix}data.pkl"), MAX_PICKLE)?;
    let pickle = pickle.ok_or(TorchError::NoPickle)?;
    let pickle = Pickle::read(&pickle)?;
    let Value::Dict(pairs) = &pickle.values[pickle.root] else {
        return Err(TorchError::NoStateDict);
    };
    let mut tensors = BTreeMap::new();
    for &(key, value) in pairs {
        let name = pickle.text(key).ok_or(TorchError::NoStateDict)?;
        let wrong = |problem: String| TorchError::Tensor {
            tensor: name.to_owned(),
            problem,
        };
        let Value::Tensor(view) = &pickle.values[value] else {
            return Err(TorchError::NoTensor {
                name: name.to_owned(),
            });
        };
        let key = pickle.text(view.key).unwrap_or_default();
        let entry = format!("{prefix}data/{key}");
        let storage = range(&entry)?;
        let storage =
            storage.ok_or_else(|| wrong(format!("its values, `{entry}`, are missing")))?;
        tensors.insert(name.to_owned(), placed(view, &storage).map_err(wrong)?);
    }
    Ok(tensors)
}

/// Checks the first bytes of a file.
fn check_start(mut file: &File) -> Result<(), TorchError> {
    use io::Seek;
    let mut start = Vec::new();
    file.rewind()?;
    file.take(LEGACY.len() as u64).read_to_end(&mut start)?;
    if start == LEGACY {
        return Err(TorchError::Legacy);
    }
    match start.starts_with(&ZIP) {
        true => Ok(()),
        false => Err(TorchError::NotZip),
    }
}

/// Returns the position of a view in the file.
fn placed(view: &View, storage: &Range<u64>) -> Result<Tensor, String> {
    let View {
        element,
        n,
        offset,
        dims,
        strides,
        ..
    } = view;
    let size = |what: &str, n: i64| {
        u64::try_from(n).map_err(|_| format!("its {what} is {n}; expected at least 0"))
    };
    let dims: Vec<u64> = dims
        .iter()
        .map(|&n| size("size", n))
        .collect::<Result<_, _>>()?;
    let too_large = || "its sizes exceed 64 bits".to_owned();
    let mut elements: u64 = 1;
    if strides.len() != dims.len() {
        return Err(format!(
            "it has {} sizes and {} strides",
            dims.len(),
            strides.len()
        ));
    }
    let mut is_row_major = true;
    for (&dim, &stride) in dims.iter().zip(strides).rev() {
        // The stride of a dimension of size 1 is arbitrary.
        is_row_major &= dim == 1 || u64::try_from(stride) == Ok(elements);
        elements = elements.checked_mul(dim).ok_or_else(too_large)?;
    }
    if !is_row_major && elements > 0 {
        return Err(format!(
            "it is a view of sizes {dims:?} and strides {strides:?}, not stored contiguously; save it with Tensor.contiguous()"
        ));
    }
    let bytes = element.bytes();
    let in_file = storage.end.saturating_sub(storage.start);
    let n = size("number of stored elements", *n)?;
    if n.checked_mul(bytes).ok_or_else(too_large)? > in_file {
        return Err(format!(
            "its storage has {in_file} bytes; expected {n} elements of {bytes} bytes"
        ));
    }
    let first = size("offset", *offset)?;
    let last = first.checked_add(elements).ok_or_else(too_large)?;
    if last > n {
        return Err(format!(
            "it ends at element {last} of a storage of {n} elements"
        ));
    }
    let start = storage.start + first * bytes;
    Ok(Tensor {
        element: *element,
        dims,
        bytes: start..start + elements * bytes,
    })
}
