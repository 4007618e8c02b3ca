//! Request bodies that are compressed.

use std::io::Read;

use flate2::read::MultiGzDecoder;
use hyper::{HeaderMap, header::CONTENT_ENCODING};

use super::error::Failure;

/// How a body is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    Identity,
    Gzip,
}

impl Encoding {
    /// The encoding that the headers of a request name.
    ///
    /// # Errors
    /// An encoding that the server does not read, and several one after another.
    pub fn from_headers(headers: &HeaderMap) -> Result<Self, Failure> {
        let all = headers.get_all(CONTENT_ENCODING).iter();
        let all: Vec<_> = all
            .map(|value| String::from_utf8_lossy(value.as_bytes()))
            .collect();
        let names = all.join(", ");
        match names.trim().to_ascii_lowercase().as_str() {
            "" | "identity" => Ok(Self::Identity),
            "gzip" | "x-gzip" => Ok(Self::Gzip),
            _ => Err(Failure::encoding(&names)),
        }
    }

    /// The bytes that a body stands for, at most `max`.
    ///
    /// # Errors
    /// More bytes, and data that is damaged or broken off.
    pub fn decoded(self, body: Vec<u8>, max: usize) -> Result<Vec<u8>, Failure> {
        if self == Self::Identity {
            return Ok(body);
        }
        let mut bytes = Vec::new();
        // One byte more shows that there are too many.
        let mut decoder = MultiGzDecoder::new(body.as_slice()).take(max as u64 + 1);
        match decoder.read_to_end(&mut bytes) {
            Ok(n) if n > max => Err(Failure::large_inflated(max)),
            Ok(_) => Ok(bytes),
            Err(error) => Err(Failure::broken_gzip(&error.to_string())),
        }
    }
}
