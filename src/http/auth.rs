//! Keys of those who may ask.

use std::collections::HashMap;

use hyper::{HeaderMap, header::AUTHORIZATION};
use sha2::{Digest, Sha256};

use super::error::Failure;

/// Who may ask: digests of keys, with the number of the tenant that each is of.
#[derive(Clone, Debug, Default)]
pub struct Keys {
    tenants: HashMap<String, u32>,
}

/// What is wrong with a file of keys.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeysError {
    #[error(
        "line {line} is no key; expected a name and the SHA-256 of the key in 64 hexadecimal digits, as `printf %s KEY | sha256sum` writes it"
    )]
    Line { line: usize },
    #[error("there is no key in it, so that nobody could ask")]
    Empty,
}

impl Keys {
    /// Reads keys, one a line: a name, and the key's SHA-256. Keys of one name share a tenant's turns. Empty lines and those that
    /// begin with `#` are left out.
    ///
    /// # Errors
    /// A line that is no key; lines count from 1.
    pub fn parse(text: &str) -> Result<Self, KeysError> {
        let mut keys = Self::default();
        let mut names: HashMap<&str, u32> = HashMap::new();
        for (at, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = KeysError::Line { line: at + 1 };
            let mut words = line.split_whitespace();
            let (Some(name), Some(digest), None) = (words.next(), words.next(), words.next())
            else {
                return Err(wrong);
            };
            if digest.len() != 64 || !digest.chars().all(|c| c.is_ascii_hexdigit()) {
                return Err(wrong);
            }
            let next = names.len() as u32 + 1;
            let tenant = *names.entry(name).or_insert(next);
            keys.tenants.insert(digest.to_ascii_lowercase(), tenant);
        }
        match keys.tenants.is_empty() {
            true => Err(KeysError::Empty),
            false => Ok(keys),
        }
    }

    /// The tenant of a request's key. Digests are looked up, so that the time of an answer says nothing of a key.
    pub(super) fn tenant(&self, headers: &HeaderMap) -> Result<u32, Failure> {
        let given = headers
            .get(AUTHORIZATION)
            .and_then(|value| value.to_str().ok());
        let key = given
            .and_then(|text| text.strip_prefix("Bearer "))
            .ok_or_else(|| Failure::key("there is no API key; send `Authorization: Bearer KEY`"))?;
        let digest = Sha256::digest(key.trim().as_bytes());
        let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        let tenant = self.tenants.get(&digest).copied();
        tenant.ok_or_else(|| Failure::key("the API key is not known here"))
    }
}
