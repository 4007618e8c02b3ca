//! Compressed request bodies.

use std::io::Read;

use flate2::read::MultiGzDecoder;
use hyper::{HeaderMap, header::CONTENT_ENCODING};

use super::error::Failure;

/// Encoding of a request body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    Identity,
    Gzip,
}

impl Encoding {
    /// Returns the encoding of a request from its headers.
    ///
    /// # Errors
    /// Returns an error for an unsupported encoding, or for several encodings.
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

    /// Returns the decompressed body, limited to `max` bytes. A body that is not compressed is returned unchanged.
    ///
    /// # Errors
    /// Returns an error if the body has more than `max` bytes, or if its data are damaged or
    /// truncated.
    pub fn decoded(self, body: Vec<u8>, max: usize) -> Result<Vec<u8>, Failure> {
        if self == Self::Identity {
            return Ok(body);
        }
        let mut bytes = Vec::new();
        // Read up to one byte more than allowed, to detect a body that is too large.
        let mut decoder = MultiGzDecoder::new(body.as_slice()).take(max as u64 + 1);
        match decoder.read_to_end(&mut bytes) {
            Ok(n) if n > max => Err(Failure::large_inflated(max)),
            Ok(_) => Ok(bytes),
            Err(error) => Err(Failure::broken_gzip(&error.to_string())),
        }
    }
}
