//! Reads one safetensors file in pieces through an open handle. The file is not memory-mapped: if another process truncates a
//! mapped file, this process receives SIGBUS. A truncated read is an ordinary error.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    path::{Path, PathBuf},
};

use safetensors::{Dtype, SafeTensorError, SafeTensors, tensor::Metadata};

use super::{CheckpointError, decode_into, room};
use crate::{files::read_at, tensor::DType};

/// Size of the length field before the header, in bytes.
const N_LENGTH: u64 = 8;
/// Maximum header size of the safetensors crate, in bytes.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes per read: small compared with a large tensor, and large enough to amortize the system call.
const PIECE: usize = 1 << 20;

/// An open safetensors file.
pub(super) struct Shard {
    path: PathBuf,
    file: File,
}

/// A tensor's entry in the header of a shard.
pub(super) struct Stored {
    pub dtype: Dtype,
    pub dims: Vec<u64>,
    /// Byte range in the file.
    start: u64,
    end: u64,
}

impl Shard {
    /// Opens a file, reads its header and checks it against the file size.
    pub fn open(path: PathBuf) -> Result<(Self, BTreeMap<String, Stored>), CheckpointError> {
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
