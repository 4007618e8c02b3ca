//! The header of a file: metadata and the list of tensors.
//!
//! The layout is documented in ggml's description of GGUF. Before memory for a list is allocated, the list is checked against the size of
//! the file.

use std::{
    collections::{BTreeMap, HashSet},
    fs::File,
    io::{BufReader, Read},
};

use super::{
    Array, Format, GgufProblem, Value,
    error::{Result, wrong_key, wrong_tensor},
    format::name_of,
};
use crate::pickle::shown;

/// First bytes of a Git LFS pointer file, which takes the place of a file that was not fetched.
const LFS: &[u8] = b"version https://git-lfs";
/// First bytes of llama.cpp's formats before GGUF: `ggml`, `ggmf`, `ggjt` and `ggla` as little-endian numbers.
const BEFORE_GGUF: [&[u8; 4]; 4] = [b"lmgg", b"fmgg", b"tjgg", b"algg"];
/// Maximum size of the header in bytes.
const MAX_HEADER: u64 = 128 << 20;
/// Maximum size of a key or of a tensor's name in bytes.
const MAX_NAME: u64 = 1024;
/// Maximum number of dimensions of a tensor.
const MAX_DIMS: u32 = 4;
/// Maximum nesting depth of arrays.
const MAX_DEPTH: usize = 4;
/// Default alignment of the tensors in bytes.
const ALIGNMENT: u64 = 32;
/// Maximum alignment in bytes.
const MAX_ALIGNMENT: u64 = 1 << 20;

/// A tensor as listed in the header.
#[derive(Debug)]
pub(super) struct Listed {
    pub name: String,
    /// Sizes in row-major order. The last size is the length of a row.
    pub dims: Vec<u64>,
    pub format: Format,
    /// Offset in bytes from the beginning of the file.
    pub offset: u64,
    pub bytes: u64,
}

/// The header of a file.
pub(super) struct Header {
    pub metadata: BTreeMap<String, Value>,
    pub tensors: Vec<Listed>,
}

impl Header {
    pub(super) fn read(file: &File) -> Result<Self> {
        let size = file.metadata()?.len();
        let mut reader = Reader {
            // The caller has not read from the file, so its offset is 0. The file is not cloned, because a clone would share the offset.
            file: BufReader::new(file),
            left: size.min(MAX_HEADER),
            is_cut: size > MAX_HEADER,
        };
        check_start(&mut reader)?;
        let n_tensors = reader.u64("the number of tensors")?;
        let n_keys = reader.u64("the number of keys")?;
        // An entry of the metadata has at least a key, its type and a value of one byte. An entry of the list of tensors has at least a
        // name, the number of dimensions (0), a type and an offset.
        reader.check_count("the keys", n_keys, 8 + 4 + 1)?;
        reader.check_count("the list of tensors", n_tensors, 8 + 4 + 4 + 8)?;
        let mut metadata = BTreeMap::new();
        for index in 0..n_keys {
            let key = reader.name(|| format!("key {index}"))?;
            let kind = reader.u32(&key)?;
            let value = reader.value(&key, kind)?;
            if metadata.contains_key(&key) {
                return Err(wrong_key(&key, "it is there twice; expected each key once"));
            }
            metadata.insert(key, value);
        }
        let mut tensors = Vec::with_capacity(n_tensors as usize);
        let mut names = HashSet::with_capacity(n_tensors as usize);
        for index in 0..n_tensors {
            let tensor = reader.tensor(index)?;
            if !names.insert(tensor.name.clone()) {
                let problem = "it is there twice; expected each name once";
                return Err(wrong_tensor(&tensor.name, problem));
            }
            tensors.push(tensor);
        }
        let read = size.min(MAX_HEADER) - reader.left;
        place(&mut tensors, read, alignment(&metadata)?, size)?;
        Ok(Self { metadata, tensors })
    }
}

/// Checks the magic number and the version.
fn check_start(reader: &mut Reader<'_>) -> Result<()> {
    let start = reader.array::<4>("the first four bytes");
    match start.map_err(|error| match error {
        GgufProblem::Truncated { .. } => GgufProblem::NotGguf,
        other => other,
    })? {
        start if start == *b"GGUF" => {}
        start if LFS.starts_with(&start) => return Err(GgufProblem::LfsPointer),
        start if BEFORE_GGUF.contains(&&start) => return Err(GgufProblem::BeforeGguf),
        _ => return Err(GgufProblem::NotGguf),
    }
    match reader.u32("the version")? {
        2 | 3 => Ok(()),
        // A small version number with its bytes in the opposite order.
        found if found & 0xffff == 0 && found != 0 => Err(GgufProblem::BigEndian),
        found => Err(GgufProblem::Version { found }),
    }
}

/// Returns the alignment of the tensors.
fn alignment(metadata: &BTreeMap<String, Value>) -> Result<u64> {
    const KEY: &str = "general.alignment";
    let Some(value) = metadata.get(KEY) else {
        return Ok(ALIGNMENT);
    };
    let found = value.as_u64();
    found
        .filter(|n| n.is_power_of_two() && *n <= MAX_ALIGNMENT)
        .ok_or_else(|| {
            let found = found.map_or("no integer of at least 0".to_owned(), |n| n.to_string());
            wrong_key(
                KEY,
                format!("it is {found}; expected a power of two, at most {MAX_ALIGNMENT}"),
            )
        })
}

/// Makes offsets relative to the beginning of the file. Checks that the tensors are within the file and do not overlap.
fn place(tensors: &mut [Listed], read: u64, alignment: u64, size: u64) -> Result<()> {
    // `next_multiple_of` does not overflow: the alignment is a power of two, and `read` is at most the size of a file.
    let start = read.next_multiple_of(alignment);
    let available = size.saturating_sub(start);
    for tensor in tensors.iter_mut() {
        let (offset, bytes) = (tensor.offset, tensor.bytes);
        if offset % alignment != 0 {
            let problem = format!("its offset is {offset}; expected a multiple of {alignment}");
            return Err(wrong_tensor(&tensor.name, problem));
        }
        if offset.checked_add(bytes).is_none_or(|end| end > available) {
            let problem = format!(
                "it has {bytes} bytes at offset {offset}, and the file has {available} bytes of tensors; download it again"
            );
            return Err(wrong_tensor(&tensor.name, problem));
        }
        tensor.offset = start + offset;
    }
    let mut sorted: Vec<&Listed> = tensors.iter().filter(|tensor| tensor.bytes > 0).collect();
    sorted.sort_by_key(|tensor| tensor.offset);
    for pair in sorted.windows(2) {
        let (before, after) = (pair[0], pair[1]);
        if before.offset + before.bytes > after.offset {
            let problem = format!(
                "it overlaps with the tensor `{}`; the file is damaged, download it again",
                shown(&before.name)
            );
            return Err(wrong_tensor(&after.name, problem));
        }
    }
    Ok(())
}

/// Reads numbers and strings within the bounds of the file and of the maximum header size.
struct Reader<'f> {
    file: BufReader<&'f File>,
    /// Number of bytes until the end of the file or until the maximum header size, whichever comes first.
    left: u64,
    /// Whether the file is longer than the maximum header size.
    is_cut: bool,
}

impl Reader<'_> {
    /// Checks that at least `needed` bytes are left.
    fn check(&self, part: &str, needed: u64) -> Result<()> {
        match needed <= self.left {
            true => Ok(()),
            false if self.is_cut => Err(GgufProblem::TooLarge {
                what: "the size in bytes of its metadata".to_owned(),
                found: needed.saturating_add(MAX_HEADER - self.left),
                limit: MAX_HEADER,
            }),
            false => Err(GgufProblem::Truncated {
                part: shown(part),
                needed,
                left: self.left,
            }),
        }
    }

    /// Checks that the remaining bytes can hold `count` items of at least `bytes` bytes each.
    fn check_count(&self, part: &str, count: u64, bytes: u64) -> Result<()> {
        self.check(part, count.saturating_mul(bytes))
    }

    fn array<const N: usize>(&mut self, part: &str) -> Result<[u8; N]> {
        self.check(part, N as u64)?;
        let mut bytes = [0; N];
        self.file.read_exact(&mut bytes)?;
        self.left -= N as u64;
        Ok(bytes)
    }

    fn u32(&mut self, part: &str) -> Result<u32> {
        self.array(part).map(u32::from_le_bytes)
    }

    fn u64(&mut self, part: &str) -> Result<u64> {
        self.array(part).map(u64::from_le_bytes)
    }

    fn string(&mut self, part: &str) -> Result<String> {
        let bytes = self.u64(part)?;
        self.text(part, bytes)
    }

    fn text(&mut self, part: &str, bytes: u64) -> Result<String> {
        self.check(part, bytes)?;
        let mut text = vec![0; bytes as usize];
        self.file.read_exact(&mut text)?;
        self.left -= bytes;
        String::from_utf8(text).map_err(|_| GgufProblem::NotUtf8 {
            what: format!("a text of `{}`", shown(part)),
        })
    }

    /// Reads a key or the name of a tensor.
    fn name(&mut self, part: impl Fn() -> String) -> Result<String> {
        let bytes = self.u64(&part())?;
        match bytes {
            0..=MAX_NAME => self.text(&part(), bytes),
            _ => Err(GgufProblem::TooLarge {
                what: format!("the size in bytes of the name of {}", part()),
                found: bytes,
                limit: MAX_NAME,
            }),
        }
    }

    fn bool(&mut self, key: &str) -> Result<bool> {
        match self.array(key)? {
            [0] => Ok(false),
            [1] => Ok(true),
            [found] => Err(wrong_key(
                key,
                format!("its truth value is {found}; expected 0 or 1"),
            )),
        }
    }

    /// Reads a value of the type with the code `kind`.
    fn value(&mut self, key: &str, kind: u32) -> Result<Value> {
        Ok(match kind {
            0 => Value::U8(u8::from_le_bytes(self.array(key)?)),
            1 => Value::I8(i8::from_le_bytes(self.array(key)?)),
            2 => Value::U16(u16::from_le_bytes(self.array(key)?)),
            3 => Value::I16(i16::from_le_bytes(self.array(key)?)),
            4 => Value::U32(u32::from_le_bytes(self.array(key)?)),
            5 => Value::I32(i32::from_le_bytes(self.array(key)?)),
            6 => Value::F32(f32::from_le_bytes(self.array(key)?)),
            7 => Value::Bool(self.bool(key)?),
            8 => Value::String(self.string(key)?),
            9 => Value::Array(self.list(key, 1)?),
            10 => Value::U64(u64::from_le_bytes(self.array(key)?)),
            11 => Value::I64(i64::from_le_bytes(self.array(key)?)),
            12 => Value::F64(f64::from_le_bytes(self.array(key)?)),
            _ => return Err(unknown_type(key, kind)),
        })
    }

    /// Reads an array: the element type, the number of elements, and the elements.
    fn list(&mut self, key: &str, depth: usize) -> Result<Array> {
        if depth > MAX_DEPTH {
            let problem = format!("its arrays are nested deeper than {MAX_DEPTH}");
            return Err(wrong_key(key, problem));
        }
        let kind = self.u32(key)?;
        let count = self.u64(key)?;
        Ok(match kind {
            0 => Array::U8(self.numbers(key, count, u8::from_le_bytes)?),
            1 => Array::I8(self.numbers(key, count, i8::from_le_bytes)?),
            2 => Array::U16(self.numbers(key, count, u16::from_le_bytes)?),
            3 => Array::I16(self.numbers(key, count, i16::from_le_bytes)?),
            4 => Array::U32(self.numbers(key, count, u32::from_le_bytes)?),
            5 => Array::I32(self.numbers(key, count, i32::from_le_bytes)?),
            6 => Array::F32(self.numbers(key, count, f32::from_le_bytes)?),
            7 => Array::Bool(self.many(key, count, 1, |reader| reader.bool(key))?),
            8 => Array::String(self.many(key, count, 8, |reader| reader.string(key))?),
            9 => Array::Array(self.many(key, count, 12, |reader| reader.list(key, depth + 1))?),
            10 => Array::U64(self.numbers(key, count, u64::from_le_bytes)?),
            11 => Array::I64(self.numbers(key, count, i64::from_le_bytes)?),
            12 => Array::F64(self.numbers(key, count, f64::from_le_bytes)?),
            _ => return Err(unknown_type(key, kind)),
        })
    }

    fn numbers<const N: usize, T>(
        &mut self,
        key: &str,
        count: u64,
        from: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>> {
        self.many(key, count, N as u64, |reader| {
            Ok(from(reader.array::<N>(key)?))
        })
    }

    /// Reads `count` items of at least `bytes` bytes each.
    fn many<T>(
        &mut self,
        key: &str,
        count: u64,
        bytes: u64,
        mut one: impl FnMut(&mut Self) -> Result<T>,
    ) -> Result<Vec<T>> {
        self.check_count(key, count, bytes)?;
        let mut list = Vec::with_capacity(count as usize);
        for _ in 0..count {
            list.push(one(self)?);
        }
        Ok(list)
    }

    fn tensor(&mut self, index: u64) -> Result<Listed> {
        let name = self.name(|| format!("tensor {index}"))?;
        let part = format!("the tensor `{name}`");
        let n_dims = self.u32(&part)?;
        if n_dims > MAX_DIMS {
            let problem = format!("it has {n_dims} dimensions; expected at most {MAX_DIMS}");
            return Err(wrong_tensor(&name, problem));
        }
        let dims = (0..n_dims).map(|_| self.u64(&part));
        let mut dims = dims.collect::<Result<Vec<_>>>()?;
        dims.reverse();
        let code = self.u32(&part)?;
        let format = Format::from_code(code).ok_or_else(|| GgufProblem::Format {
            tensor: shown(&name),
            found: name_of(code),
        })?;
        let offset = self.u64(&part)?;
        let too_large = || wrong_tensor(&name, format!("its sizes {dims:?} exceed 64 bits"));
        let elements = dims.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim));
        let elements = elements.ok_or_else(too_large)?;
        let (block, row) = (format.block_elements(), dims.last().copied().unwrap_or(1));
        if row % block != 0 {
            let problem = format!(
                "its rows have {row} elements; expected a multiple of {block}, the block of {format}"
            );
            return Err(wrong_tensor(&name, problem));
        }
        let bytes = (elements / block).checked_mul(format.block_bytes());
        let bytes = bytes.ok_or_else(too_large)?;
        // The dequantized tensor needs four bytes per element.
        elements.checked_mul(4).ok_or_else(too_large)?;
        Ok(Listed {
            name,
            dims,
            format,
            offset,
            bytes,
        })
    }
}

fn unknown_type(key: &str, kind: u32) -> GgufProblem {
    wrong_key(
        key,
        format!("its type has the number {kind}; expected a number from 0 to 12"),
    )
}
