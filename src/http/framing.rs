//! Finds where requests end in the bytes that a client sends.

/// Max bytes of a line that are kept. Longer lines are not needed to find the end of a request.
const MAX_LINE: usize = 128;

/// Tracks the position in the bytes of a connection, to find out whether the bytes so far end between two requests. hyper parses the
/// requests and refuses invalid ones, but does not report this position.
#[derive(Debug, Default)]
pub(super) struct Framing {
    place: Place,
    /// Beginning of the current line.
    line: Vec<u8>,
    /// Framing of the request body, according to the headers received so far.
    body: Announced,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Between,
    Headers,
    /// In a body of known length. Contains the number of bytes that are still to come.
    Body(u64),
    ChunkSize,
    /// In a chunk or in the line end after it. Contains the number of bytes that are still to come.
    Chunk(u64),
    Trailers,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Announced {
    #[default]
    None,
    Length(u64),
    Chunked,
}

impl Framing {
    /// Returns whether the bytes read so far end outside any request.
    pub fn is_between(&self) -> bool {
        self.place == Place::Between && self.line.is_empty()
    }

    /// Advances the position past `bytes`, the next bytes of the connection.
    pub fn read(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match self.place {
                Place::Body(left) | Place::Chunk(left) => {
                    let n = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                    bytes = &bytes[n..];
                    let left = left - n as u64;
                    self.place = match (&self.place, left) {
                        (Place::Body(_), 0) => Place::Between,
                        (Place::Body(_), _) => Place::Body(left),
                        (_, 0) => Place::ChunkSize,
                        (_, _) => Place::Chunk(left),
                    };
                }
                Place::Between | Place::Headers | Place::ChunkSize | Place::Trailers => {
                    let end = bytes.iter().position(|&byte| byte == b'\n');
                    let (line, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
                    let room = MAX_LINE.saturating_sub(self.line.len());
                    self.line.extend_from_slice(&line[..line.len().min(room)]);
                    bytes = rest;
                    if end.is_some() {
                        bytes = &bytes[1..];
                        let line = std::mem::take(&mut self.line);
                        self.end_line(line.trim_ascii());
                    }
                }
            }
        }
    }

    fn end_line(&mut self, line: &[u8]) {
        self.place = match (&self.place, line) {
            // Empty lines before a request are skipped.
            (Place::Between, []) | (Place::Trailers, []) => Place::Between,
            (Place::Trailers, _) => Place::Trailers,
            (Place::Headers, []) => match std::mem::take(&mut self.body) {
                Announced::None | Announced::Length(0) => Place::Between,
                Announced::Length(n) => Place::Body(n),
                Announced::Chunked => Place::ChunkSize,
            },
            (Place::ChunkSize, line) => match chunk_size(line) {
                0 => Place::Trailers,
                n => Place::Chunk(n.saturating_add(2)),
            },
            (Place::Headers, line) => {
                self.header(line);
                Place::Headers
            }
            (Place::Between | Place::Body(_) | Place::Chunk(_), _) => Place::Headers,
        };
    }

    fn header(&mut self, line: &[u8]) {
        let line = String::from_utf8_lossy(line).to_ascii_lowercase();
        let Some((name, value)) = line.split_once(':') else {
            return;
        };
        match name {
            "transfer-encoding" => self.body = Announced::Chunked,
            "content-length" if self.body != Announced::Chunked => {
                self.body = Announced::Length(value.trim().parse().unwrap_or(0));
            }
            _ => {}
        }
    }
}

/// Parses the line before a chunk, which contains the size of the chunk and optional extensions. Returns 0 if the size is not valid.
fn chunk_size(line: &[u8]) -> u64 {
    let line = String::from_utf8_lossy(line);
    let size = line.split([';', ' ', '\t']).next().unwrap_or_default();
    u64::from_str_radix(size, 16).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::Framing;

    /// Returns the positions in `text` that are between two requests. Checks that bytes that arrive one by one give the same result as
    /// bytes that arrive together.
    fn between(text: &str) -> Vec<usize> {
        let mut one = Framing::default();
        let mut found = Vec::new();
        for (at, byte) in text.bytes().enumerate() {
            one.read(&[byte]);
            let mut whole = Framing::default();
            whole.read(&text.as_bytes()[..=at]);
            assert_eq!(one.is_between(), whole.is_between(), "{at}");
            if one.is_between() {
                found.push(at + 1);
            }
        }
        found
    }

    #[test]
    fn requests_end_after_their_headers_or_their_bodies() {
        let get = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n";
        let post = "POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n{\n\r\n}";
        let chunked = "POST /embed HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n5;x=y\r\n{\r\n\r\n\r\n1\r\n}\r\n0\r\na: b\r\n\r\n";
        let bare = "GET / HTTP/1.1\nhost: x\n\n";
        let empty = "POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n";
        let all = [get, post, chunked, bare, empty, get];
        let mut ends = Vec::new();
        let mut text = String::new();
        for request in all {
            text += request;
            ends.push(text.len());
        }
        assert_eq!(between(&text), ends);
        // Empty lines before a request belong to no request.
        let led = format!("\r\n{get}GET / HT");
        assert_eq!(between(&led), [2, 2 + get.len()]);
    }

    #[test]
    fn long_lines_take_no_memory() {
        let mut framing = Framing::default();
        framing.read("x".repeat(1 << 20).as_bytes());
        assert!(framing.line.capacity() < 1024);
        assert!(!framing.is_between());
    }
}
