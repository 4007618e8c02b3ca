//! Bounded reads. A path may be a pipe or a device without an end, and a file of the wrong kind may
//! have any size. Every read is therefore limited before its contents are parsed.

use std::{
    fmt,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use gemmule_weights::gguf::GgufError;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Kind of a file, which determines its maximum size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A model description in RON. Its size limit is that of `model/reader.rs`.
    Description,
    Config,
    Tokenizer,
    /// A SentencePiece model. Its size limit is low, because its pieces take about twenty times the size of the file in memory.
    SentencePiece,
    /// The index that maps tensors to weight files (shards).
    ShardIndex,
    /// An input file with token ids, texts, or sets of sequence lengths.
    Batch,
    Reference,
    Artifact,
    /// Records that gemmule writes: the kernels that were checked (`Ledger`) and timed (`Timings`).
    Ledger,
    Timings,
    /// A table of the costs of batches on a device.
    Costs,
    /// Requests recorded by a server.
    Trace,
}

impl Kind {
    /// Returns the maximum size of a file of this kind, in bytes.
    pub fn limit(self) -> u64 {
        match self {
            Self::Description => 128 * KIB,
            Self::Config | Self::SentencePiece | Self::Ledger | Self::Timings | Self::Costs => {
                16 * MIB
            }
            Self::Tokenizer | Self::ShardIndex => 256 * MIB,
            Self::Batch | Self::Trace => GIB,
            Self::Reference | Self::Artifact => 4 * GIB,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Description => "description",
            Self::Config => "config.json",
            Self::Tokenizer => "tokenizer.json",
            Self::SentencePiece => "SentencePiece model",
            Self::ShardIndex => "shard index",
            Self::Batch => "batch file",
            Self::Reference => "reference file",
            Self::Artifact => "compiled model",
            Self::Ledger => "ledger",
            Self::Timings => "timings file",
            Self::Costs => "cost table",
            Self::Trace => "trace",
        })
    }
}

/// A size displayed in whole KiB, MiB or GiB.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n % GIB == 0 => write!(f, "{} GiB", n / GIB),
            n if n % MIB == 0 => write!(f, "{} MiB", n / MIB),
            n => write!(f, "{} KiB", n / KIB),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("`{}` cannot be read", .file.display())]
    Io { file: PathBuf, source: io::Error },
    #[error(
        "`{}` is larger than {}, the size limit of a {kind}; check that it is the right file",
        .file.display(), Size(kind.limit())
    )]
    TooLarge { file: PathBuf, kind: Kind },
    /// A GGUF file (the format of llama.cpp) that cannot be read.
    #[error(transparent)]
    Gguf(Box<GgufError>),
    #[error(
        "`{}` has {} GGUF files: {}; give the path of one of them",
        .folder.display(), .files.len(), .files.join(", ")
    )]
    SeveralGguf { folder: PathBuf, files: Vec<String> },
}

impl From<GgufError> for ReadError {
    fn from(error: GgufError) -> Self {
        Self::Gguf(Box::new(error))
    }
}

impl ReadError {
    fn io(file: &Path, source: io::Error) -> Self {
        Self::Io {
            file: file.to_owned(),
            source,
        }
    }
}

/// Reads the whole file, which is opened only once.
///
/// # Errors
/// Returns an error if the file cannot be read or exceeds the limit of its kind.
pub fn bytes(file: &Path, kind: Kind) -> Result<Vec<u8>, ReadError> {
    Beginning::open(file, 0)?.rest(kind)
}

/// Reads the whole file as text, without a byte order mark.
///
/// # Errors
/// Returns the errors of [`bytes`], and an error if the file is not UTF-8.
pub fn text(file: &Path, kind: Kind) -> Result<String, ReadError> {
    let text = String::from_utf8(bytes(file, kind)?).map_err(|_| {
        let source = io::Error::new(
            io::ErrorKind::InvalidData,
            "stream did not contain valid UTF-8",
        );
        ReadError::io(file, source)
    })?;
    Ok(match text.strip_prefix('\u{feff}') {
        Some(rest) => rest.to_owned(),
        None => text,
    })
}

/// Reads a file up to `most + 1` bytes. A result of `most + 1` bytes means that the file is larger than `most`.
///
/// # Errors
/// Returns an error if the file cannot be opened or read.
pub fn up_to(file: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(file)?.take(most + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// An open file with its first bytes, which identify the kind of the file. The bytes are kept, because a pipe cannot be read twice.
pub struct Beginning {
    path: PathBuf,
    file: File,
    bytes: Vec<u8>,
}

impl Beginning {
    /// Opens a file and reads its first `n` bytes, or all if it is shorter.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened or read.
    pub fn open(path: &Path, n: u64) -> Result<Self, ReadError> {
        let failed = |source| ReadError::io(path, source);
        let mut file = File::open(path).map_err(failed)?;
        let mut bytes = Vec::new();
        file.by_ref()
            .take(n)
            .read_to_end(&mut bytes)
            .map_err(failed)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            bytes,
        })
    }

    /// Returns the first bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Reads the rest of the file, and returns all bytes, including the first ones.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or exceeds the limit of its kind.
    pub fn rest(self, kind: Kind) -> Result<Vec<u8>, ReadError> {
        let (path, bytes) = self.up_to(kind.limit())?;
        match bytes.len() as u64 > kind.limit() {
            true => Err(ReadError::TooLarge { file: path, kind }),
            false => Ok(bytes),
        }
    }

    /// Reads the file up to a total of `most + 1` bytes. Returns the path and all bytes, including those that were read when it was opened.
    fn up_to(mut self, most: u64) -> Result<(PathBuf, Vec<u8>), ReadError> {
        let left = (most + 1).saturating_sub(self.bytes.len() as u64);
        match self.file.take(left).read_to_end(&mut self.bytes) {
            Ok(_) => Ok((self.path, self.bytes)),
            Err(source) => Err(ReadError::io(&self.path, source)),
        }
    }

    /// Reads the rest of the file, and returns all bytes as text, or `None` if they are not UTF-8. For a file that exceeds the limit of its
    /// kind, the result is `None` if the bytes up to the limit contain invalid UTF-8, and otherwise an error about the size.
    ///
    /// # Errors
    /// Returns the errors of [`Beginning::rest`].
    pub fn rest_as_text(self, kind: Kind) -> Result<Option<String>, ReadError> {
        let (path, bytes) = self.up_to(kind.limit())?;
        if bytes.len() as u64 <= kind.limit() {
            return Ok(String::from_utf8(bytes).ok());
        }
        match std::str::from_utf8(&bytes) {
            // The bytes contain invalid UTF-8, not just a character that was truncated at the limit.
            Err(error) if error.error_len().is_some() => Ok(None),
            _ => Err(ReadError::TooLarge { file: path, kind }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_at_the_limit_is_read_and_one_byte_more_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("model.ron");
        let limit = Kind::Description.limit() as usize;
        std::fs::write(&file, vec![b'a'; limit]).expect("it is written");
        assert_eq!(
            bytes(&file, Kind::Description).expect("it fits").len(),
            limit
        );
        // `ß` has two bytes; the second one exceeds the limit.
        std::fs::write(&file, "a".repeat(limit) + "ß").expect("it is written");
        let shown = |error: ReadError| {
            let folder = folder.path().display().to_string();
            error.to_string().replace(&folder, "[dir]")
        };
        insta::assert_snapshot!(shown(bytes(&file, Kind::Description).unwrap_err()), @"`[dir]/model.ron` is larger than 128 KiB, the size limit of a description; check that it is the right file");
        let open = || Beginning::open(&file, 7).expect("it is there");
        assert_eq!(open().bytes(), b"aaaaaaa");
        insta::assert_snapshot!(shown(open().rest_as_text(Kind::Description).unwrap_err()), @"`[dir]/model.ron` is larger than 128 KiB, the size limit of a description; check that it is the right file");
        std::fs::write(&file, [vec![b'a'; limit - 1], vec![0xff; 9]].concat()).expect("written");
        assert_eq!(open().rest_as_text(Kind::Description).unwrap(), None);
    }

    #[cfg(unix)]
    #[test]
    fn an_endless_device_is_read_up_to_the_limit() {
        for kind in [Kind::Description, Kind::Config] {
            let error = bytes(Path::new("/dev/zero"), kind).unwrap_err();
            let size = Size(kind.limit());
            assert_eq!(
                error.to_string(),
                format!(
                    "`/dev/zero` is larger than {size}, the size limit of a {kind}; check that it is the right file"
                )
            );
        }
    }
}
