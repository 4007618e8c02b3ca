//! Files of llama.cpp (GGUF versions 2 and 3): metadata, and tensors of plain or quantized elements.
//!
//! [`Gguf`] reads a file with llama.cpp's names and settings. [`folder::Folder`] converts them to the names and settings of a folder saved
//! by Hugging Face transformers.

mod blocks;
mod error;
pub mod folder;
mod format;
mod header;
mod split;
#[cfg(test)]
mod tests;
mod value;

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    fs::File,
    io,
    path::{Path, PathBuf},
};

pub use error::{GgufError, GgufProblem};
use error::{Result, wrong_key, wrong_tensor};
pub use format::Format;
use header::Header;
use value::TypeOf;
pub use value::{Array, Value};

use crate::pickle::shown;

/// Number of bytes per read, unless a row is longer.
const CHUNK: u64 = 1 << 20;

/// A GGUF file, or all files of a split model.
#[derive(Debug)]
pub struct Gguf {
    parts: Vec<Part>,
    metadata: BTreeMap<String, Value>,
    tensors: Vec<Tensor>,
    /// Index of each tensor in `tensors`, by name.
    by_name: HashMap<String, usize>,
}

#[derive(Debug)]
struct Part {
    path: PathBuf,
    file: File,
}

/// A tensor of a file.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    /// Sizes in row-major order, which is the reverse of the order in the file. The last size is the length of a row.
    pub dims: Vec<u64>,
    pub format: Format,
    /// Size in bytes in the file.
    pub bytes: u64,
    /// Index of the file of a split model that contains the tensor.
    part: usize,
    offset: u64,
}

impl Tensor {
    /// Returns the number of elements.
    pub fn elements(&self) -> u64 {
        self.dims.iter().product()
    }

    /// Returns the number of elements of a row.
    pub(crate) fn row(&self) -> u64 {
        self.dims.last().copied().unwrap_or(1)
    }
}

impl Gguf {
    /// Opens a file and reads its metadata and list of tensors. No tensor values are read.
    ///
    /// A model that is split into files `NAME-00001-of-00003.gguf` can be opened by the name of any of its files. All files must be in one
    /// folder.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, is damaged, or has a tensor of an unsupported type.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        let path = path.as_ref();
        let (file, header) = open_part(path)?;
        let Some(position) = split::position(&header.metadata).map_err(at(path))? else {
            let mut gguf = Self::new(header.metadata);
            let part = Part {
                path: path.to_owned(),
                file,
            };
            gguf.add(part, header.tensors).map_err(at(path))?;
            return Ok(gguf);
        };
        let paths = position.paths(path).map_err(at(path))?;
        // Only the first file of a split model has all of the metadata.
        let mut first = None;
        let mut pending = Vec::new();
        for (index, other) in paths.iter().enumerate() {
            let (file, header) = open_part(other)?;
            let found = split::position(&header.metadata).map_err(at(other))?;
            position.check(index, found).map_err(at(other))?;
            let Header { metadata, tensors } = header;
            first.get_or_insert(metadata);
            let part = Part {
                path: other.clone(),
                file,
            };
            pending.push((part, tensors));
        }
        let mut gguf = Self::new(first.unwrap_or_default());
        for (part, tensors) in pending {
            let path = part.path.clone();
            gguf.add(part, tensors).map_err(at(&path))?;
        }
        position.check_total(gguf.tensors.len()).map_err(at(path))?;
        Ok(gguf)
    }

    fn new(metadata: BTreeMap<String, Value>) -> Self {
        Self {
            parts: Vec::new(),
            metadata,
            tensors: Vec::new(),
            by_name: HashMap::new(),
        }
    }

    fn add(&mut self, part: Part, listed: Vec<header::Listed>) -> Result<()> {
        for tensor in listed {
            match self.by_name.entry(tensor.name.clone()) {
                Entry::Vacant(new) => _ = new.insert(self.tensors.len()),
                Entry::Occupied(known) => {
                    let problem = "another file of the model has it, too; expected each name once";
                    return Err(wrong_tensor(known.key(), problem));
                }
            }
            self.tensors.push(Tensor {
                name: tensor.name,
                dims: tensor.dims,
                format: tensor.format,
                bytes: tensor.bytes,
                part: self.parts.len(),
                offset: tensor.offset,
            });
        }
        self.parts.push(part);
        Ok(())
    }

    /// Returns the path of the first file.
    pub fn path(&self) -> &Path {
        &self.parts[0].path
    }

    /// Returns the paths of all files.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.parts.iter().map(|part| part.path.as_path())
    }

    /// Returns all values of the metadata by key.
    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    /// Returns the tensors in the order of the file.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Returns a tensor by its name in the file.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name).map(|&index| &self.tensors[index])
    }

    /// Dequantizes the elements of a tensor, in row-major order.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or memory runs out.
    pub fn read(&self, tensor: &Tensor) -> Result<Vec<f32>, GgufError> {
        let mut out = self.allocate(tensor, tensor.elements(), 0.0)?;
        let mut filled = 0;
        self.each_row(tensor, |blocks, elements| {
            let end = filled + elements;
            blocks::dequantize(tensor.format, blocks, &mut out[filled..end]);
            filled = end;
        })?;
        Ok(out)
    }

    /// Reads the stored bytes of a tensor: elements, or blocks of elements, in row-major order.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or memory runs out.
    pub fn read_raw(&self, tensor: &Tensor) -> Result<Vec<u8>, GgufError> {
        let mut out = self.allocate(tensor, tensor.bytes, 0)?;
        let part = &self.parts[tensor.part];
        read_at(&part.file, &mut out, tensor.offset).map_err(at_io(&part.path))?;
        Ok(out)
    }

    /// Reads a tensor in chunks of a few whole rows. Calls `take` with the stored bytes of each chunk and the number of elements in it.
    pub(crate) fn each_row(
        &self,
        tensor: &Tensor,
        mut take: impl FnMut(&[u8], usize),
    ) -> Result<(), GgufError> {
        let (row, format) = (tensor.row(), tensor.format);
        let row_bytes = row / format.block_elements() * format.block_bytes();
        if tensor.bytes == 0 {
            return Ok(());
        }
        let part = &self.parts[tensor.part];
        let rows = (CHUNK / row_bytes).clamp(1, tensor.bytes / row_bytes);
        let mut chunk = self.allocate(tensor, rows * row_bytes, 0)?;
        let mut done = 0;
        while done < tensor.bytes {
            let bytes = (rows * row_bytes).min(tensor.bytes - done);
            let chunk = &mut chunk[..bytes as usize];
            read_at(&part.file, chunk, tensor.offset + done).map_err(at_io(&part.path))?;
            take(chunk, (bytes / row_bytes * row) as usize);
            done += bytes;
        }
        Ok(())
    }

    /// Allocates `n` elements. Returns an error if memory runs out.
    pub(crate) fn allocate<T: Copy>(
        &self,
        tensor: &Tensor,
        n: u64,
        value: T,
    ) -> Result<Vec<T>, GgufError> {
        let memory = || {
            self.error(GgufProblem::Memory {
                tensor: shown(&tensor.name),
                bytes: n.saturating_mul(size_of::<T>() as u64),
            })
        };
        let n = usize::try_from(n).map_err(|_| memory())?;
        let mut list = Vec::new();
        list.try_reserve_exact(n).map_err(|_| memory())?;
        list.resize(n, value);
        Ok(list)
    }

    /// Returns an error that names the first file.
    pub(crate) fn error(&self, problem: GgufProblem) -> GgufError {
        at(self.path())(problem)
    }

    /// Returns the value of a key, converted to `T`. `expected` describes the type in messages.
    pub(crate) fn value<'g, T>(
        &'g self,
        key: &str,
        expected: &str,
        get: impl Fn(&'g Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.metadata.get(key) else {
            return Ok(None);
        };
        let wrong = || {
            let found = TypeOf(value);
            wrong_key(key, format!("it is of type {found}; expected {expected}"))
        };
        get(value).ok_or_else(wrong).map(Some)
    }
}

fn open_part(path: &Path) -> Result<(File, Header), GgufError> {
    let file = File::open(path).map_err(at_io(path))?;
    let header = Header::read(&file).map_err(at(path))?;
    Ok((file, header))
}

fn at(path: &Path) -> impl Fn(GgufProblem) -> GgufError {
    move |problem| GgufError {
        path: path.to_owned(),
        problem,
    }
}

fn at_io(path: &Path) -> impl Fn(io::Error) -> GgufError {
    move |error| at(path)(error.into())
}

/// Fills a buffer from byte `offset` of a file. The current position of the file is not used, so several threads may read it.
#[cfg(unix)]
fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, offset)
}

/// Fills a buffer from byte `offset` of a file.
#[cfg(windows)]
fn read_at(file: &File, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
    use std::os::windows::fs::FileExt;
    while !buffer.is_empty() {
        match file.seek_read(buffer, offset)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => (buffer, offset) = (&mut buffer[n..], offset + n as u64),
        }
    }
    Ok(())
}
