//! Reads a file of weights (safetensors, PyTorch or llama.cpp) in pieces, through an open handle. The file is not memory-mapped: if another
//! process truncates a mapped file, this process receives SIGBUS. A read from a truncated file is an ordinary error.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use gemmule_weights::{
    Element,
    gguf::{self, folder::Weight},
    torch,
};
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensorError, SafeTensors, tensor::Metadata};

use super::{CheckpointError, decode, decode_into, elements, encode, encode_into, room, zeros};
use crate::{files::read_at, tensor::DType};

/// Size of the length field before the header of a safetensors file, in bytes.
const N_LENGTH: u64 = 8;
/// Maximum header size of the safetensors crate, in bytes.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes per read, small compared with a large tensor, and large enough to amortize the system call.
const PIECE: usize = 1 << 20;

/// An open file of weights.
pub(super) struct Shard {
    path: PathBuf,
}

/// A tensor in a shard: its element type, dimensions and location.
pub(super) struct Stored {
    /// Type of the elements, or the name of an unknown type.
    pub element: Result<Element, String>,
    pub dims: Vec<u64>,
    location: Location,
}

/// Location of a tensor's elements.
enum Location {
    /// Row-major elements in this range of a file.
    Range(Arc<File>, Range<u64>),
    /// Elements of a file in an order other than row-major.
    View(Arc<File>, torch::Tensor),
    /// Elements in a GGUF file. Quantized elements are read as f32.
    Gguf(Arc<gguf::folder::Folder>, Box<Weight>),
}

/// A tensor in one of several shards.
pub(super) struct Place {
    pub shard: usize,
    pub stored: Stored,
}

impl Stored {
    /// Returns the type of the elements. If weights cannot have this type, returns the name of the type as the error.
    pub fn dtype(&self) -> Result<DType, String> {
        match &self.element {
            Ok(Element::F32) => Ok(DType::F32),
            Ok(Element::F16) => Ok(DType::F16),
            Ok(Element::BF16) => Ok(DType::BF16),
            Ok(other) => Err(other.to_string()),
            Err(name) => Err(name.clone()),
        }
    }

    /// Returns the tensor and its file if it is stored in a GGUF file.
    pub fn gguf(&self) -> Option<(&gguf::folder::Folder, &Weight)> {
        match &self.location {
            Location::Gguf(folder, weight) => Some((folder, weight)),
            Location::Range(..) | Location::View(..) => None,
        }
    }
}

/// Returns the element type for a type of safetensors, or the name of the type if it is not supported.
fn element(dtype: Dtype) -> Result<Element, String> {
    Ok(match dtype {
        Dtype::F64 => Element::F64,
        Dtype::F32 => Element::F32,
        Dtype::F16 => Element::F16,
        Dtype::BF16 => Element::BF16,
        Dtype::F8_E4M3 => Element::F8E4M3,
        Dtype::F8_E5M2 => Element::F8E5M2,
        Dtype::F8_E8M0 => Element::F8E8M0,
        Dtype::C64 => Element::C64,
        Dtype::I64 => Element::I64,
        Dtype::I32 => Element::I32,
        Dtype::I16 => Element::I16,
        Dtype::I8 => Element::I8,
        Dtype::U64 => Element::U64,
        Dtype::U32 => Element::U32,
        Dtype::U16 => Element::U16,
        Dtype::U8 => Element::U8,
        Dtype::BOOL => Element::Bool,
        other => return Err(format!("{other:?}")),
    })
}

impl Shard {
    /// Opens a file and reads its list of tensors. A file with the extension `.safetensors` is read as safetensors. Any other file is read
    /// as a file of `torch.save`.
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
            Ok((tensors, file)) => (tensors, Arc::new(file)),
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
                element: Ok(tensor.element),
                dims: tensor.dims.clone(),
                location: match tensor.is_contiguous() {
                    true => Location::Range(Arc::clone(&file), tensor.bytes),
                    false => Location::View(Arc::clone(&file), tensor),
                },
            };
            (name, stored)
        });
        let stored = stored.collect();
        Ok((Self { path }, stored))
    }

    /// Returns the file and the tensors of a GGUF model.
    pub fn of_gguf(folder: &Arc<gguf::folder::Folder>) -> (Self, BTreeMap<String, Stored>) {
        let weights = folder
            .names()
            .filter_map(|name| Some((name, folder.weight(name)?)));
        let stored = weights.map(|(name, weight)| {
            let stored = Stored {
                element: Ok(weight.element().unwrap_or(Element::F32)),
                dims: weight.dims.clone(),
                location: Location::Gguf(Arc::clone(folder), Box::new(weight.clone())),
            };
            (name.to_owned(), stored)
        });
        let path = folder.gguf().path().to_owned();
        (Self { path }, stored.collect())
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
        let file = Arc::new(file);
        let metadata: Metadata = serde_json::from_slice(&header[N_LENGTH as usize..])
            // If the safetensors crate also rejects the header, its error is more precise.
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
                    element: element(info.dtype),
                    dims: info.shape.iter().map(|&d| d as u64).collect(),
                    location: Location::Range(
                        Arc::clone(&file),
                        data + start as u64..data + end as u64,
                    ),
                };
                (name, stored)
            })
            .collect();
        Ok((Self { path }, tensors))
    }

    pub fn file(&self) -> &Path {
        &self.path
    }

    /// Reads a tensor's elements. The file is read in pieces, of which only one is in memory at a time. Returns the elements, and the
    /// number of elements that are not finite.
    pub fn read(
        &self,
        name: &str,
        stored: &Stored,
        dtype: DType,
    ) -> Result<(Vec<f32>, usize), CheckpointError> {
        let mut values = room(name, elements(&stored.dims))?;
        let mut n_bad = 0;
        self.pieces(name, stored, |piece| {
            n_bad += count_bad(piece, dtype);
            decode_into(&mut values, piece, dtype);
        })?;
        Ok((values, n_bad))
    }

    /// Reads a tensor like [`read`](Self::read) and encodes its elements as `to`. Elements that already have this type are copied. Pieces
    /// are read in parallel, except for tensors in a GGUF file or in an order other than row-major.
    pub fn read_as(
        &self,
        name: &str,
        stored: &Stored,
        from: DType,
        to: DType,
    ) -> Result<(Vec<u8>, usize), CheckpointError> {
        let size = elements(&stored.dims).saturating_mul(to.bytes());
        let n_bad = AtomicUsize::new(0);
        let count = |piece: &[u8]| n_bad.fetch_add(count_bad(piece, from), Ordering::Relaxed);
        // `rows` is the number of rows in a piece of `PIECE` bytes of f32.
        let width = stored.dims.last().map_or(1, |&n| n.max(1));
        let rows = (PIECE as u64 / DType::F32.bytes() / width).max(1);
        let parts = match &stored.location {
            Location::Gguf(folder, weight) if weight.element().is_none() => {
                weight.in_parts(rows).map(|parts| (folder, parts))
            }
            Location::Range(..) | Location::View(..) | Location::Gguf(..) => None,
        };
        let mut bytes;
        match (&stored.location, parts) {
            (Location::Range(file, range), _) => {
                bytes = zeros(name, size)?;
                let of_piece = PIECE / from.bytes() as usize * to.bytes() as usize;
                let pieces = bytes.par_chunks_mut(of_piece).enumerate();
                pieces.try_for_each_init(Vec::new, |piece, (nth, out)| {
                    let at = range.start + (nth * PIECE) as u64;
                    if from == to {
                        self.read_at(file, name, out, at)?;
                        count(out);
                        return Ok::<(), CheckpointError>(());
                    }
                    piece.resize(out.len() / to.bytes() as usize * from.bytes() as usize, 0);
                    self.read_at(file, name, piece, at)?;
                    count(piece);
                    out.copy_from_slice(&encode(&decode(piece, from), to));
                    Ok(())
                })?;
            }
            (_, Some((folder, parts))) => {
                bytes = zeros(name, size)?;
                let of_part = (rows * width * to.bytes()) as usize;
                let pieces = bytes.par_chunks_mut(of_part).zip(&parts);
                pieces.try_for_each(|(out, part)| {
                    let values = folder.read(part)?;
                    let is_bad = |value: &&f32| !value.is_finite();
                    n_bad.fetch_add(values.iter().filter(is_bad).count(), Ordering::Relaxed);
                    out.copy_from_slice(&encode(&values, to));
                    Ok::<(), CheckpointError>(())
                })?;
            }
            (Location::View(..) | Location::Gguf(..), None) => {
                bytes = room(name, size)?;
                self.pieces(name, stored, |piece| {
                    count(piece);
                    match from == to {
                        true => bytes.extend_from_slice(piece),
                        false => encode_into(&mut bytes, &decode(piece, from), to),
                    }
                })?;
            }
        }
        Ok((bytes, n_bad.into_inner()))
    }

    /// Reads the bytes of a tensor's elements in row-major order.
    pub fn bytes(&self, name: &str, stored: &Stored) -> Result<Vec<u8>, CheckpointError> {
        let size = match &stored.location {
            Location::Range(file, range) => {
                let mut bytes = zeros(name, range.end - range.start)?;
                let pieces = bytes.par_chunks_mut(PIECE).enumerate();
                pieces.try_for_each(|(nth, out)| {
                    self.read_at(file, name, out, range.start + (nth * PIECE) as u64)
                })?;
                return Ok(bytes);
            }
            Location::View(_, view) => elements(&view.dims).saturating_mul(view.element.bytes()),
            Location::Gguf(_, weight) => elements(&stored.dims)
                .saturating_mul(weight.element().unwrap_or(Element::F32).bytes()),
        };
        let mut bytes = room(name, size)?;
        self.pieces(name, stored, |piece| bytes.extend_from_slice(piece))?;
        Ok(bytes)
    }

    /// Passes the bytes of a tensor's elements to `take` in row-major order, in pieces of whole elements. A tensor that is in a GGUF file,
    /// or in an order other than row-major, is read as a whole.
    fn pieces(
        &self,
        name: &str,
        stored: &Stored,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), CheckpointError> {
        let (file, Range { start, end }) = match &stored.location {
            Location::Range(file, bytes) => (file, bytes.clone()),
            Location::View(file, view) => {
                let Range { start, end } = view.bytes;
                let mut span = room(name, end - start)?;
                span.resize((end - start) as usize, 0);
                self.read_at(file, name, &mut span, start)?;
                let mut gathered = room(name, elements(&view.dims) * view.element.bytes())?;
                view.gather(&span, &mut gathered);
                take(&gathered);
                return Ok(());
            }
            Location::Gguf(folder, weight) if weight.element().is_some() => {
                take(&folder.read_raw(weight)?);
                return Ok(());
            }
            Location::Gguf(folder, weight) => {
                let mut bytes = Vec::new();
                for values in folder.read(weight)?.chunks(PIECE) {
                    bytes.clear();
                    encode_into(&mut bytes, values, DType::F32);
                    take(&bytes);
                }
                return Ok(());
            }
        };
        let mut piece = vec![0; (end - start).min(PIECE as u64) as usize];
        let mut at = start;
        while at < end {
            let n = (end - at).min(PIECE as u64);
            let piece = &mut piece[..n as usize];
            self.read_at(file, name, piece, at)?;
            take(piece);
            at += n;
        }
        Ok(())
    }

    fn read_at(
        &self,
        file: &File,
        name: &str,
        bytes: &mut [u8],
        at: u64,
    ) -> Result<(), CheckpointError> {
        read_at(file, bytes, at).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => CheckpointError::EndedEarly {
                file: self.path.clone(),
                tensor: name.to_owned(),
            },
            _ => CheckpointError::Io {
                file: self.path.clone(),
                source,
            },
        })
    }
}

/// Returns the number of NaN and infinite elements, whose exponents have all bits set.
pub(super) fn count_bad(bytes: &[u8], dtype: DType) -> usize {
    let halves = |exponent: u16| {
        let elements = bytes.as_chunks::<2>().0.iter();
        let is_bad = |&&b: &&[u8; 2]| u16::from_le_bytes(b) & exponent == exponent;
        elements.filter(is_bad).count()
    };
    match dtype {
        DType::F16 => halves(0x7c00),
        DType::BF16 => halves(0x7f80),
        DType::F32 => {
            let elements = bytes.as_chunks::<4>().0.iter();
            let is_bad = |&&b: &&[u8; 4]| !f32::from_le_bytes(b).is_finite();
            elements.filter(is_bad).count()
        }
    }
}

pub(super) fn warn_of_bad(tensor: &str, n_bad: usize) {
    if n_bad > 0 {
        tracing::warn!(
            "the tensor `{tensor}` holds {n_bad} values that are NaN or infinite; results that depend on it will be too"
        );
    }
}
