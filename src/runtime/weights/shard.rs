//! Reads one file of weights, of safetensors or of PyTorch, in pieces through an open handle. The file is not memory-mapped: if another process truncates a
//! mapped file, this process receives SIGBUS. A truncated read is an ordinary error.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    path::{Path, PathBuf},
};

use gemmule_weights::torch::{self, Element};
use safetensors::{Dtype, SafeTensorError, SafeTensors, tensor::Metadata};

use super::{CheckpointError, decode_into, room};
use crate::{files::read_at, tensor::DType};

/// Size of the length field before the header, in bytes.
const N_LENGTH: u64 = 8;
/// Maximum header size of the safetensors crate, in bytes.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes per read: small compared with a large tensor, and large enough to amortize the system call.
const PIECE: usize = 1 << 20;

/// An open file of weights.
pub(super) struct Shard {
    path: PathBuf,
    file: File,
}

/// A tensor's entry in the directory of a shard.
pub(super) struct Stored {
    pub dtype: Dtype,
    pub dims: Vec<u64>,
    /// Byte range in the file.
    start: u64,
    end: u64,
}

impl Shard {
    /// Opens a file and reads its directory. A file whose name ends in `.safetensors` is one of safetensors, and any other is one
    /// of `torch.save`.
    pub fn open(path: PathBuf) -> Result<(Self, BTreeMap<String, Stored>), CheckpointError> {
        match path
            .extension()
            .is_some_and(|ending| ending == "safetensors")
        {
            true => Self::open_safetensors(path),
            false => Self::open_torch(path),
        }
    }

    fn open_torch(path: PathBuf) -> Result<(Self, BTreeMap<String, Stored>), CheckpointError> {
        let opened = File::open(&path).map_err(torch::TorchError::Io);
        let read = opened.and_then(|file| Ok((torch::open(&file)?, file)));
        let (tensors, file) = match read {
            Ok(read) => read,
            Err(torch::TorchError::Io(source)) => {
                return Err(CheckpointError::Io { file: path, source });
            }
            Err(problem) => {
                return Err(CheckpointError::Torch {
                    file: path,
                    problem,
                });
            }
        };
        let stored = tensors.into_iter().map(|(name, tensor)| {
            let stored = Stored {
                dtype: match tensor.element {
                    Element::F64 => Dtype::F64,
                    Element::F32 => Dtype::F32,
                    Element::F16 => Dtype::F16,
                    Element::BF16 => Dtype::BF16,
                    Element::I64 => Dtype::I64,
                    Element::I32 => Dtype::I32,
                    Element::I16 => Dtype::I16,
                    Element::I8 => Dtype::I8,
                    Element::U8 => Dtype::U8,
                    Element::Bool => Dtype::BOOL,
                },
                dims: tensor.dims,
                start: tensor.bytes.start,
                end: tensor.bytes.end,
            };
            (name, stored)
        });
        let stored = stored.collect();
        Ok((Self { path, file }, stored))
    }

    /// Opens a safetensors file, reads its header and checks it against the file size.
    fn open_safetensors(
        path: PathBuf,
    ) -> Result<(Self, BTreeMap<String, Stored>), CheckpointError> {
        let io = |source| CheckpointError::Io {
            file: path.clone(),
            source,
        };
        let broken = |error: SafeTensorError| CheckpointError::NotSafetensors {
            file: path.clone(),
            problem: error.to_string(),
        };
        let file = File::open(&path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        if size < N_LENGTH {
            return Err(broken(SafeTensorError::HeaderTooSmall));
        }
        let mut length = [0; N_LENGTH as usize];
        read_at(&file, &mut length, 0).map_err(io)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER {
            return Err(broken(SafeTensorError::HeaderTooLarge));
        }
        let data = N_LENGTH + length;
        if data > size {
            return Err(broken(SafeTensorError::InvalidHeaderLength));
        }
        let mut header = Vec::new();
        header
            .try_reserve_exact(data as usize)
            .map_err(|_| io(io::ErrorKind::OutOfMemory.into()))?;
        header.resize(data as usize, 0);
        read_at(&file, &mut header, 0).map_err(io)?;
        let metadata: Metadata = serde_json::from_slice(&header[N_LENGTH as usize..])
            // Report the error of the safetensors crate, which is more precise. It also checks for the data, which is not passed
            // here, but only after it has accepted the header.
            .map_err(|error| match SafeTensors::read_metadata(&header) {
                Err(problem) => broken(problem),
                Ok(_) => broken(error.into()),
            })?;
        if data + metadata.data_len() as u64 != size {
            return Err(broken(SafeTensorError::MetadataIncompleteBuffer));
        }
        let tensors = metadata.tensors().into_iter();
        let tensors = tensors
            .map(|(name, info)| {
                let (start, end) = info.data_offsets;
                let stored = Stored {
                    dtype: info.dtype,
                    dims: info.shape.iter().map(|&d| d as u64).collect(),
                    start: data + start as u64,
                    end: data + end as u64,
                };
                (name, stored)
            })
            .collect();
        Ok((Self { path, file }, tensors))
    }

    pub fn file(&self) -> &Path {
        &self.path
    }

    /// Reads a tensor's elements. Besides them, only one piece of the file is in memory at a time. Returns the elements and the
    /// number of non-finite ones.
    pub fn read(
        &self,
        name: &str,
        stored: &Stored,
        dtype: DType,
    ) -> Result<(Vec<f32>, usize), CheckpointError> {
        let bytes = stored.end - stored.start;
        let mut values = room(name, bytes / dtype.bytes())?;
        let mut piece = vec![0; PIECE.min(bytes as usize)];
        let (mut at, mut n_bad) = (stored.start, 0);
        while at < stored.end {
            let n = (stored.end - at).min(PIECE as u64);
            let piece = &mut piece[..n as usize];
            read_at(&self.file, piece, at).map_err(|source| match source.kind() {
                io::ErrorKind::UnexpectedEof => CheckpointError::EndedEarly {
                    file: self.path.clone(),
                    tensor: name.to_owned(),
                },
                _ => CheckpointError::Io {
                    file: self.path.clone(),
                    source,
                },
            })?;
            let before = values.len();
            decode_into(&mut values, piece, dtype);
            n_bad += values[before..].iter().filter(|v| !v.is_finite()).count();
            at += n;
        }
        Ok((values, n_bad))
    }
}
