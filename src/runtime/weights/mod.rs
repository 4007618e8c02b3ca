//! Weights of a model, read from a published checkpoint or generated at random for benchmarks.
//!
//! Each tensor has a published name, which is looked up with each of the usual prefixes (`bert.`, …) in order. All names, shapes and types
//! are checked before the first byte is copied. The weights of a quantized checkpoint are dequantized when they are read, unless they keep
//! their published low-bit values ([`evaluate_quantized`]).

mod adapted;
mod cache_scales;
mod checkpoint;
mod error;
mod files;
mod found;
mod index;
mod ordered;
mod published;
mod quantized;
mod random;
mod rows;
mod scales;
mod shard;
mod static_table;
#[cfg(test)]
mod tests;

use half::{bf16, f16, slice::HalfFloatSliceExt};
use rayon::prelude::*;

pub use checkpoint::Checkpoint;
pub use error::CheckpointError;
pub use files::{ModelFiles, gguf_models, gguf_parts, gguf_stem, is_local};
pub use found::Found;
pub use published::{Codes, ScaleAndZero, evaluate_packed, evaluate_quantized};
pub use random::RandomWeights;
pub use scales::{Scales, evaluate_scaled};

use crate::{
    graph::{CacheRows, WeightExpr, WeightNames, interleaved_row, resized_heads_at, slope},
    tensor::{DType, Scaled},
};

/// Checks the quantization that the config.json of a folder describes. No weights are needed.
///
/// # Errors
/// Returns an error for an unsupported quantization.
#[cfg(feature = "hub")]
pub(crate) fn check_quantization(folder: &std::path::Path) -> Result<(), CheckpointError> {
    quantized::configured(folder).map(|_| ())
}

/// Returns the dimensions `[tokens, width]` of the table of a static embedding, without reading the values of the table.
///
/// # Errors
/// Returns an error if there are no weights, or if the weights contain no such table.
pub fn static_dims(files: &ModelFiles) -> Result<[u64; 2], CheckpointError> {
    let checkpoint = Checkpoint::of(files, files, WeightNames::default())?;
    checkpoint.static_dims().ok_or_else(|| {
        let names = static_table::NAMES.map(|name| format!("`{name}`"));
        CheckpointError::StaticTable {
            file: files.path().to_owned(),
            problem: format!("expected rows of one width in {}", names.join(" or ")),
        }
    })
}

/// Reads the vector `name` with `n` elements from the weights in `files`.
///
/// # Errors
/// Returns an error if there are no weights, or if the weights contain no such vector.
pub fn vector(files: &ModelFiles, name: &str, n: u64) -> Result<Vec<f32>, CheckpointError> {
    Checkpoint::of(files, files, WeightNames::default())?.read(name, &[n])
}

/// Number of elements that are converted at once.
const PIECE: usize = 1024;
/// Number of items that a thread copies at once.
const COPIED: usize = 1 << 20;

/// A source of stored tensors, converted to f32.
pub trait WeightSource: Send + Sync {
    /// Reads the tensor `name` with dimensions `dims` in row-major order.
    fn read(&self, name: &str, dims: &[u64]) -> Result<Vec<f32>, CheckpointError>;

    /// Reads a matrix whose transpose the model uses. Returns the elements in the stored order, like [`read`](Self::read). The caller
    /// transposes them.
    ///
    /// # Errors
    /// Returns the errors of [`read`](Self::read), and an error for a quantized matrix. A quantized matrix is always stored as
    /// `[outputs, inputs]`, so a model that transposes it is wrong.
    fn read_to_transpose(&self, name: &str, dims: &[u64]) -> Result<Vec<f32>, CheckpointError> {
        self.read(name, dims)
    }

    /// Reads a tensor like [`read`](Self::read) and encodes it as `dtype`, little-endian. A source that reads files converts small pieces,
    /// so that it needs little memory in addition to the result.
    ///
    /// # Errors
    /// Returns the errors of [`read`](Self::read).
    fn read_as(&self, name: &str, dims: &[u64], dtype: DType) -> Result<Vec<u8>, CheckpointError> {
        encode_weight(name, &self.read(name, dims)?, dtype)
    }

    /// Returns the narrowest type in which [`read_as`](Self::read_as) rounds no element of a tensor.
    fn dtype(&self, _name: &str, _dims: &[u64]) -> DType {
        DType::F32
    }

    /// Returns the format in which a matrix is published. Returns `None` if the matrix is not quantized, or if kernels do not support its
    /// format.
    fn published(&self, _name: &str, _dims: &[u64]) -> Option<Scaled> {
        None
    }

    /// Reads the codes and scales of a matrix. Returns `None` unless the matrix is [published](Self::published) in `format`.
    ///
    /// # Errors
    /// Returns the errors of [`read`](Self::read), and an error for a scale that the format cannot hold.
    fn read_codes(
        &self,
        _name: &str,
        _dims: &[u64],
        _format: Scaled,
    ) -> Result<Option<Codes>, CheckpointError> {
        Ok(None)
    }

    /// Returns the format of a quantized matrix after its columns are sorted by group, and the column indices in this order. Returns `None`
    /// if the checkpoint does not list a group for each column of the matrix, if the groups differ in size, or if kernels do not support
    /// the format.
    ///
    /// # Errors
    /// Returns the errors of [`read`](Self::read).
    fn ordered(
        &self,
        _name: &str,
        _dims: &[u64],
    ) -> Result<Option<(Scaled, Vec<u32>)>, CheckpointError> {
        Ok(None)
    }

    /// Like [`read_codes`](Self::read_codes), for a matrix with its columns in the order that [`ordered`](Self::ordered) returns.
    ///
    /// # Errors
    /// Returns the errors of [`read_codes`](Self::read_codes).
    fn read_ordered_codes(
        &self,
        _name: &str,
        _dims: &[u64],
        _format: Scaled,
    ) -> Result<Option<Codes>, CheckpointError> {
        Ok(None)
    }

    /// Returns whether the source is a checkpoint with linear layers whose weights are in E4M3 or int8, but whose inputs are not quantized.
    /// Also returns `true` for every GPTQ or AWQ checkpoint.
    fn keeps_inputs(&self) -> bool {
        false
    }

    /// Returns whether the source has scales for keys or values in a KV cache.
    fn has_cache_scales(&self) -> bool {
        false
    }

    /// Returns the scale of the keys or values (`rows`) that the layer `linear` computes, for a KV cache in E4M3.
    ///
    /// # Errors
    /// Returns an error if the source has no such scale, or if the scale is not a positive number.
    fn cache_scale(&self, linear: &str, rows: CacheRows) -> Result<f32, CheckpointError> {
        Err(CheckpointError::NoCacheScale {
            linear: linear.to_owned(),
            expected: cache_scales::names(linear, rows),
        })
    }

    /// Checks all tensors of `stored` at once, so that a single error lists all missing tensors.
    fn check(&self, stored: &[(&str, &[u64])]) -> Result<(), CheckpointError>;

    /// Returns the names of the source's tensors that are not in `used`. Published checkpoints often have such tensors.
    fn surplus(&self, used: &[(&str, &[u64])]) -> Vec<String>;

    /// Returns the names of output head weights that the model ties to an embedding table, but whose stored values differ from the table's.
    ///
    /// # Errors
    /// Returns the errors of [`read`](Self::read).
    fn own(&self) -> Result<Vec<String>, CheckpointError> {
        Ok(Vec::new())
    }

    /// Returns the surplus tensors whose names differ from the name of a used tensor only in a layer number. Such tensors indicate a
    /// description with a missing index, or a config.json with too few layers. A source that generates its tensors returns none.
    fn left_out(&self, _used: &[(&str, &[u64])]) -> Vec<String> {
        Vec::new()
    }
}

/// Allocates memory for `n` elements of `tensor`. The size comes from a file or a config, so a failed allocation must be an error. A plain
/// allocation would abort the process.
pub(super) fn room<T>(tensor: &str, n: u64) -> Result<Vec<T>, CheckpointError> {
    let refused = || CheckpointError::OutOfMemory {
        tensor: tensor.to_owned(),
        bytes: n.saturating_mul(size_of::<T>() as u64),
    };
    let mut values = Vec::new();
    let n = usize::try_from(n).map_err(|_| refused())?;
    values.try_reserve_exact(n).map_err(|_| refused())?;
    Ok(values)
}

/// Returns `n` equal elements, for the computed weight `what`.
fn vector_of(value: f32, what: &str, n: u64) -> Result<Vec<f32>, CheckpointError> {
    let mut out = room(what, n)?;
    out.extend((0..n).map(|_| value));
    Ok(out)
}

/// Allocates `n` zeros, or returns an error like [`room`]. Memory pages are first touched when they are written, so several threads can
/// share the page faults.
fn zeros(tensor: &str, n: u64) -> Result<Vec<u8>, CheckpointError> {
    let checked: Vec<u8> = room(tensor, n)?;
    drop(checked);
    Ok(vec![0; n as usize])
}

/// Copies `part` to the start of `rest`, and returns the remaining items of `rest`.
fn put<'r, T: Copy + Send + Sync>(rest: &'r mut [T], part: &[T]) -> &'r mut [T] {
    let (to, rest) = rest.split_at_mut(part.len());
    let pieces = to.par_chunks_mut(COPIED).zip(part.par_chunks(COPIED));
    pieces.for_each(|(to, from)| to.copy_from_slice(from));
    rest
}

/// Number of elements of a tensor, saturating at `u64::MAX`.
fn elements(dims: &[u64]) -> u64 {
    dims.iter().fold(1, |n: u64, &d| n.saturating_mul(d))
}

/// Evaluates an expression over stored tensors. Returns the elements in row-major order.
///
/// # Errors
/// Returns the errors of [`WeightSource::read`].
pub fn evaluate(expr: &WeightExpr, source: &dyn WeightSource) -> Result<Vec<f32>, CheckpointError> {
    match expr {
        WeightExpr::Stored { name, dims } => source.read(name, dims),
        WeightExpr::Transposed { name, dims } => {
            let stored = source.read_to_transpose(name, dims)?;
            let columns = dims.last().map_or(0, |&n| n as usize);
            let mut out = room(name, stored.len() as u64)?;
            for column in 0..columns {
                out.extend(stored.iter().skip(column).step_by(columns));
            }
            Ok(out)
        }
        WeightExpr::Sinusoid { style, rows, width } => {
            let mut out = room("a table of positions", elements(&[*rows, *width]))?;
            for row in 0..*rows {
                out.extend((0..*width).map(|column| style.at(row, column, *width) as f32));
            }
            Ok(out)
        }
        WeightExpr::RelativeBias {
            name,
            dims,
            buckets,
        } => {
            let table = source.read(name, dims)?;
            let reach = i64::from(buckets.reach);
            let heads = dims[1] as usize;
            let mut out = room(name, elements(&expr.dims()))?;
            for head in 0..heads {
                let row = |distance| buckets.row(distance) as usize;
                out.extend((-reach..=reach).map(|distance| table[row(distance) * heads + head]));
            }
            Ok(out)
        }
        WeightExpr::Positions {
            name,
            dims,
            positions,
        } => {
            let table = source.read(name, dims)?;
            let width = dims[1] as usize;
            let mut out = room(name, elements(&expr.dims()))?;
            let farthest = i64::from(positions.farthest().unwrap_or(0));
            for distance in -farthest..=farthest {
                let row = positions.row(distance) as usize;
                out.extend_from_slice(&table[row * width..][..width]);
            }
            Ok(out)
        }
        WeightExpr::Slopes { heads, scale } => {
            let mut out = room("the slopes of heads", *heads)?;
            let scale = f64::from(scale.get());
            out.extend((0..*heads).map(|head| (scale * slope(head, *heads)) as f32));
            Ok(out)
        }
        WeightExpr::ResizedHeads { heads, from, to } => {
            let mut out = room("a matrix that resizes heads", elements(&expr.dims()))?;
            for row in 0..heads * to {
                let columns = 0..heads * from;
                out.extend(columns.map(|column| resized_heads_at(row, column, *from, *to)));
            }
            Ok(out)
        }
        WeightExpr::Rows { name, dims, .. } => {
            let stored = source.read(name, dims)?;
            Ok(selected_rows(expr, stored, elements(&dims[1..])))
        }
        WeightExpr::PlusOne { name, dims } => {
            let mut stored = source.read(name, dims)?;
            stored.iter_mut().for_each(|w| *w += 1.0);
            Ok(stored)
        }
        WeightExpr::Zeros { n } => vector_of(0.0, "a vector of zeros", *n),
        WeightExpr::Ones { n } => vector_of(1.0, "a vector of ones", *n),
        WeightExpr::ConcatRows(parts) => {
            let name = expr.stored().first().map_or("", |&(name, _)| name);
            let mut out = room(name, elements(&expr.dims()))?;
            for part in parts {
                out.extend(evaluate(part, source)?);
            }
            Ok(out)
        }
        WeightExpr::ProductScales { .. } | WeightExpr::Scale(_) => {
            Scales::default().evaluate(expr, source)
        }
        WeightExpr::CacheScale { linear, rows } => Ok(vec![source.cache_scale(linear, *rows)?]),
        WeightExpr::OrderedColumns { name, dims } => {
            let order = ordered::order(source, name, dims)?;
            let stored = source.read(name, dims)?;
            let mut out = room(name, elements(dims))?;
            out.extend(ordered::columns(&stored, &order));
            Ok(out)
        }
        WeightExpr::OrderedRows {
            name,
            dims,
            by,
            by_dims,
        } => {
            let order = ordered::order(source, by, by_dims)?;
            let stored = source.read(name, dims)?;
            Ok(ordered::rows(&stored, &order, elements(&dims[1..])))
        }
        WeightExpr::InterleavedColumns {
            name,
            dims,
            interleaved,
        } => {
            let mut stored = source.read(name, dims)?;
            separate_pairs(&mut stored, [dims[1], *interleaved], 1);
            Ok(stored)
        }
    }
}

/// Selects the rows of [`WeightExpr::Rows`] from the rows of the stored tensor, which have `width` elements each.
fn selected_rows<T: Copy>(expr: &WeightExpr, mut stored: Vec<T>, width: u64) -> Vec<T> {
    if let WeightExpr::Rows {
        dims,
        groups,
        from,
        rows,
        interleaved,
        ..
    } = expr
    {
        keep_rows(&mut stored, [*groups, *from, *rows], width, dims[0]);
        separate_pairs(&mut stored, [*rows, *interleaved], width);
    }
    stored
}

/// Splits `n_rows` rows of `width` elements into `groups` equal groups. Keeps `rows` rows of each group, starting with row `from` of the
/// group.
fn keep_rows<T: Copy>(
    stored: &mut Vec<T>,
    [groups, from, rows]: [u64; 3],
    width: u64,
    n_rows: u64,
) {
    let (part, kept) = (n_rows / groups * width, (rows * width) as usize);
    for group in 0..groups {
        let start = (group * part + from * width) as usize;
        stored.copy_within(start..start + kept, group as usize * kept);
    }
    stored.truncate(groups as usize * kept);
}

/// Splits rows of `width` elements into groups of `rows` rows. Among the first `interleaved` rows of each group, moves rows with an even
/// index before rows with an odd index.
fn separate_pairs<T: Copy>(stored: &mut [T], [rows, interleaved]: [u64; 2], width: u64) {
    if interleaved == 0 || width == 0 {
        return;
    }
    for part in stored.chunks_exact_mut((rows * width) as usize) {
        let pairs = part[..(interleaved * width) as usize].to_vec();
        for row in 0..interleaved {
            let from = (interleaved_row(row, interleaved) * width) as usize;
            let to = (row * width) as usize;
            part[to..to + width as usize].copy_from_slice(&pairs[from..from + width as usize]);
        }
    }
}

/// Evaluates an expression over stored tensors and encodes the elements as `dtype`, little-endian. Expressions that only select or
/// concatenate stored elements need no f32 copy of whole tensors.
///
/// # Errors
/// Returns the errors of [`WeightSource::read`].
pub fn evaluate_as(
    expr: &WeightExpr,
    source: &dyn WeightSource,
    dtype: DType,
) -> Result<Vec<u8>, CheckpointError> {
    match expr {
        WeightExpr::Stored { name, dims } => source.read_as(name, dims, dtype),
        WeightExpr::Rows { name, dims, .. } => {
            let stored = source.read_as(name, dims, dtype)?;
            let width = elements(&dims[1..]) * dtype.bytes();
            Ok(selected_rows(expr, stored, width))
        }
        WeightExpr::ConcatRows(parts) => {
            let name = expr.stored().first().map_or("", |&(name, _)| name);
            let mut out = zeros(name, elements(&expr.dims()).saturating_mul(dtype.bytes()))?;
            let mut rest = out.as_mut_slice();
            for part in parts {
                rest = put(rest, &evaluate_as(part, source, dtype)?);
            }
            Ok(out)
        }
        WeightExpr::Transposed { .. }
        | WeightExpr::Sinusoid { .. }
        | WeightExpr::RelativeBias { .. }
        | WeightExpr::Positions { .. }
        | WeightExpr::Slopes { .. }
        | WeightExpr::ResizedHeads { .. }
        | WeightExpr::PlusOne { .. }
        | WeightExpr::ProductScales { .. }
        | WeightExpr::Scale(_)
        | WeightExpr::CacheScale { .. }
        | WeightExpr::OrderedColumns { .. }
        | WeightExpr::OrderedRows { .. }
        | WeightExpr::InterleavedColumns { .. }
        | WeightExpr::Zeros { .. }
        | WeightExpr::Ones { .. } => {
            let name = expr
                .stored()
                .first()
                .map_or("a computed table", |&(name, _)| name);
            encode_weight(name, &evaluate(expr, source)?, dtype)
        }
    }
}

/// Encodes `values` as `dtype`, little-endian.
pub fn encode(values: &[f32], dtype: DType) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(values.len() * dtype.bytes() as usize);
    encode_into(&mut bytes, values, dtype);
    bytes
}

/// Encodes the elements of the weight `name` as `dtype`, little-endian.
///
/// # Errors
/// Returns an error if the allocation fails.
fn encode_weight(name: &str, values: &[f32], dtype: DType) -> Result<Vec<u8>, CheckpointError> {
    let mut bytes = room(name, values.len() as u64 * dtype.bytes())?;
    encode_into(&mut bytes, values, dtype);
    Ok(bytes)
}

fn encode_into(bytes: &mut Vec<u8>, values: &[f32], dtype: DType) {
    match dtype {
        // The slice conversions of `half` use hardware instructions.
        DType::F16 => {
            let mut halves = [f16::ZERO; PIECE];
            for piece in values.chunks(PIECE) {
                let halves = &mut halves[..piece.len()];
                halves.convert_from_f32_slice(piece);
                bytes.extend(halves.iter().flat_map(|half| half.to_le_bytes()));
            }
        }
        DType::BF16 => bytes.extend(values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes())),
        DType::F32 => bytes.extend(values.iter().flat_map(|&v| v.to_le_bytes())),
    }
}

/// Decodes little-endian elements of type `dtype` to f32. Trailing bytes of an incomplete element are ignored.
pub fn decode(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let mut values = Vec::new();
    decode_into(&mut values, bytes, dtype);
    values
}

/// Decodes like [`decode`] and appends to `values`.
pub(super) fn decode_into(values: &mut Vec<f32>, bytes: &[u8], dtype: DType) {
    let pairs = || bytes.as_chunks::<2>().0.iter();
    match dtype {
        DType::F16 => {
            let mut halves = [f16::ZERO; PIECE];
            for piece in bytes.as_chunks::<2>().0.chunks(PIECE) {
                let halves = &mut halves[..piece.len()];
                for (half, &bytes) in halves.iter_mut().zip(piece) {
                    *half = f16::from_le_bytes(bytes);
                }
                let from = values.len();
                values.resize(from + piece.len(), 0.0);
                halves.convert_to_f32_slice(&mut values[from..]);
            }
        }
        DType::BF16 => values.extend(pairs().map(|&b| bf16::from_le_bytes(b).to_f32())),
        DType::F32 => values.extend(
            bytes
                .as_chunks::<4>()
                .0
                .iter()
                .map(|&b| f32::from_le_bytes(b)),
        ),
    }
}
