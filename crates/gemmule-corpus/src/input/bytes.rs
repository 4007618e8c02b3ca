//! Streams of bytes, possibly compressed, and lines of limited length.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read as _, Seek as _, SeekFrom},
    path::Path,
};

use flate2::bufread::MultiGzDecoder;

/// Size of the read buffer in bytes.
const BUFFER: usize = 256 << 10;

/// First bytes of a gzip file.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Byte order mark of UTF-8, which some programs put at the start of a file.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// A stream of decompressed bytes, with its position.
pub(super) struct Stream {
    reader: Box<dyn BufRead + Send>,
    /// Number of decompressed bytes that have been read.
    at: u64,
    /// Size of the file in bytes; `None` if it is compressed.
    size: Option<u64>,
}

/// The result of reading a line of a stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line {
    End,
    Complete,
    /// A line of this many bytes, which exceeds the limit and is not stored.
    TooLong(u64),
}

impl Stream {
    /// Opens a file at byte `from` of its decompressed contents. A byte order mark at the start of the contents is skipped.
    pub fn open(path: &Path, from: u64) -> io::Result<Self> {
        let mut file = File::open(path)?;
        let size = file.metadata().map(|metadata| metadata.len()).ok();
        let mut start = Vec::new();
        (&mut file).take(2).read_to_end(&mut start)?;
        let is_compressed = start == GZIP;
        file.seek(SeekFrom::Start(if is_compressed { 0 } else { from }))?;
        let file = BufReader::with_capacity(BUFFER, file);
        let mut stream = Self {
            reader: match is_compressed {
                true => Box::new(BufReader::with_capacity(BUFFER, MultiGzDecoder::new(file))),
                false => Box::new(file),
            },
            at: from,
            size: size.filter(|_| !is_compressed),
        };
        if is_compressed {
            let skipped = io::copy(&mut (&mut stream.reader).take(from), &mut io::sink())?;
            if skipped < from {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        if from == 0 && stream.reader.fill_buf()?.starts_with(MARK) {
            stream.consume(MARK.len());
        }
        Ok(stream)
    }

    pub fn at(&self) -> u64 {
        self.at
    }

    pub fn size(&self) -> Option<u64> {
        self.size
    }

    /// Returns the buffered bytes that are not consumed, and reads more if there are none. The result is empty at the end.
    pub fn fill(&mut self) -> io::Result<&[u8]> {
        self.reader.fill_buf()
    }

    pub fn consume(&mut self, n: usize) {
        self.reader.consume(n);
        self.at += n as u64;
    }

    /// Reads a line into `line`, without its line ending (`\n` or `\r\n`). A line of more than `limit` bytes is skipped.
    pub fn line(&mut self, limit: usize, line: &mut Vec<u8>) -> io::Result<Line> {
        line.clear();
        let began = self.at;
        let mut is_too_long = false;
        loop {
            let bytes = self.reader.fill_buf()?;
            if bytes.is_empty() && self.at == began {
                return Ok(Line::End);
            }
            let end = memchr(bytes);
            let part = &bytes[..end.unwrap_or(bytes.len())];
            is_too_long |= line.len() + part.len() > limit;
            match is_too_long {
                true => line.clear(),
                false => line.extend_from_slice(part),
            }
            let is_last = bytes.is_empty() || end.is_some();
            let n = part.len() + usize::from(end.is_some());
            self.consume(n);
            if is_last {
                break;
            }
        }
        if is_too_long {
            *line = Vec::new();
            return Ok(Line::TooLong(self.at - began));
        }
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        Ok(Line::Complete)
    }
}

/// Returns the position of the first line feed.
fn memchr(bytes: &[u8]) -> Option<usize> {
    bytes.iter().position(|&b| b == b'\n')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(content: &[u8], limit: usize) -> Vec<(Line, Vec<u8>, u64)> {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), content).expect("written");
        let mut stream = Stream::open(file.path(), 0).expect("opened");
        let mut read = Vec::new();
        loop {
            let mut line = Vec::new();
            match stream.line(limit, &mut line).expect("a line") {
                Line::End => return read,
                kind => read.push((kind, line, stream.at())),
            }
        }
    }

    #[test]
    fn lines_end_with_a_feed_or_the_file() {
        let expected = vec![
            (Line::Complete, b"a".to_vec(), 6),
            (Line::Complete, b"".to_vec(), 7),
            (Line::TooLong(7), b"".to_vec(), 14),
            (Line::Complete, b"bc".to_vec(), 16),
        ];
        assert_eq!(lines(b"\xef\xbb\xbfa\r\n\n123456\nbc", 5), expected);
        assert!(lines(b"", 5).is_empty());
    }
}
