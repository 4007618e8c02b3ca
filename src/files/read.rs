//! Reading within a limit. A path may be a pipe or a device without an end, and a file that is no
//! model may have any size: what is read first is bounded, and looked at only then.

use std::{
    fmt,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// What a file is read as, which limits its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// RON; as much as `model/reader.rs` takes.
    Description,
    Config,
    Tokenizer,
    /// A SentencePiece model. Its pieces take some twenty times their bytes once read.
    Pieces,
    /// Which shard has which tensor.
    ShardIndex,
    /// Token ids, texts, sets of lengths.
    Batch,
    Reference,
    Artifact,
    /// What gemmule itself keeps of the kernels that it checked, and of those that it timed.
    Ledger,
    Timings,
    /// What batches cost on a device.
    Costs,
    /// Requests that a server recorded.
    Trace,
}

impl Kind {
    /// The largest size in bytes that is read.
    pub fn limit(self) -> u64 {
        match self {
            Self::Description => 128 * KIB,
            Self::Config | Self::Pieces | Self::Ledger | Self::Timings | Self::Costs => 16 * MIB,
            Self::Tokenizer | Self::ShardIndex => 256 * MIB,
            Self::Batch | Self::Trace => GIB,
            Self::Reference | Self::Artifact => 4 * GIB,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Description => "description has",
            Self::Config => "config.json has",
            Self::Tokenizer => "tokenizer.json has",
            Self::Pieces => "SentencePiece model has",
            Self::ShardIndex => "index of shards has",
            Self::Batch => "batch needs",
            Self::Reference => "reference needs",
            Self::Artifact => "compiled model has",
            Self::Ledger => "ledger has",
            Self::Timings => "timings have",
            Self::Costs => "table of costs has",
            Self::Trace => "trace has",
        })
    }
}

/// A size for people: whole KiB, MiB or GiB, as limits are.
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
        "`{}` is larger than {}, more than any {kind}; is it the file that was meant?",
        .file.display(), Size(kind.limit())
    )]
    TooLarge { file: PathBuf, kind: Kind },
}

impl ReadError {
    fn io(file: &Path, source: io::Error) -> Self {
        Self::Io {
            file: file.to_owned(),
            source,
        }
    }
}

/// The whole file, which is opened and read once.
///
/// # Errors
/// One that cannot be read, or is larger than its kind may be.
pub fn bytes(file: &Path, kind: Kind) -> Result<Vec<u8>, ReadError> {
    Beginning::open(file, 0)?.rest(kind)
}

/// The whole file as text, without the mark of its byte order that some editors put before it.
///
/// # Errors
/// As [`bytes`]; and what is not UTF-8 cannot be read either.
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

/// At most so many bytes and one more, which tells that there are too many.
///
/// # Errors
/// A file that cannot be opened or read.
pub fn up_to(file: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(file)?.take(most + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The first bytes of a file that stays open: they say what kind it is, and are not lost if it is
/// a pipe.
pub struct Beginning {
    path: PathBuf,
    file: File,
    bytes: Vec<u8>,
}

impl Beginning {
    /// Opens a file and reads `n` bytes, or what there is.
    ///
    /// # Errors
    /// A file that cannot be opened or read.
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

    /// The first bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// All bytes, the first ones included.
    ///
    /// # Errors
    /// A file that cannot be read, or is larger than its kind may be.
    pub fn rest(self, kind: Kind) -> Result<Vec<u8>, ReadError> {
        let (path, bytes) = self.up_to(kind.limit())?;
        match bytes.len() as u64 > kind.limit() {
            true => Err(ReadError::TooLarge { file: path, kind }),
            false => Ok(bytes),
        }
    }

    /// The path, and at most so many bytes and one more.
    fn up_to(mut self, most: u64) -> Result<(PathBuf, Vec<u8>), ReadError> {
        let left = (most + 1).saturating_sub(self.bytes.len() as u64);
        match self.file.take(left).read_to_end(&mut self.bytes) {
            Ok(_) => Ok((self.path, self.bytes)),
            Err(source) => Err(ReadError::io(&self.path, source)),
        }
    }

    /// All bytes of a text, the first ones included; `None` where it is none, which is told of a
    /// file that is too large, too.
    ///
    /// # Errors
    /// As [`Beginning::rest`].
    pub fn rest_as_text(self, kind: Kind) -> Result<Option<String>, ReadError> {
        let (path, bytes) = self.up_to(kind.limit())?;
        if bytes.len() as u64 <= kind.limit() {
            return Ok(String::from_utf8(bytes).ok());
        }
        match std::str::from_utf8(&bytes) {
            // Not the limit cut a character short.
            Err(error) if error.error_len().is_some() => Ok(None),
            _ => Err(ReadError::TooLarge { file: path, kind }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_the_limit_is_read_and_one_byte_more_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("model.ron");
        let limit = Kind::Description.limit() as usize;
        std::fs::write(&file, vec![b'a'; limit]).expect("it is written");
        assert_eq!(
            bytes(&file, Kind::Description).expect("it fits").len(),
            limit
        );
        // `ß` has two bytes, of which the second is the byte too many.
        std::fs::write(&file, "a".repeat(limit) + "ß").expect("it is written");
        let shown = |error: ReadError| {
            let folder = folder.path().display().to_string();
            error.to_string().replace(&folder, "[dir]")
        };
        insta::assert_snapshot!(shown(bytes(&file, Kind::Description).unwrap_err()), @"`[dir]/model.ron` is larger than 128 KiB, more than any description has; is it the file that was meant?");
        let open = || Beginning::open(&file, 7).expect("it is there");
        assert_eq!(open().bytes(), b"aaaaaaa");
        insta::assert_snapshot!(shown(open().rest_as_text(Kind::Description).unwrap_err()), @"`[dir]/model.ron` is larger than 128 KiB, more than any description has; is it the file that was meant?");
        std::fs::write(&file, [vec![b'a'; limit - 1], vec![0xff; 9]].concat()).expect("written");
        assert_eq!(open().rest_as_text(Kind::Description).unwrap(), None);
    }

    #[cfg(unix)]
    #[test]
    fn a_device_without_an_end_is_read_to_the_limit_only() {
        for kind in [Kind::Description, Kind::Config] {
            let error = bytes(Path::new("/dev/zero"), kind).unwrap_err();
            let size = Size(kind.limit());
            assert_eq!(
                error.to_string(),
                format!(
                    "`/dev/zero` is larger than {size}, more than any {kind}; is it the file that was meant?"
                )
            );
        }
    }
}
