//! API keys.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
};

use hyper::{HeaderMap, header::AUTHORIZATION};
use sha2::{Digest, Sha256};

use super::error::Failure;
use crate::files::{self, Kind, ReadError};

/// A client of the server, identified by the name of its keys in the key file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tenant {
    /// Number of the tenant. Keys with the same name have the same tenant.
    pub number: u32,
    /// Max priority of the tenant's requests. A higher `x-priority` is reduced to this value.
    pub max_priority: u8,
}

/// The tenant of all requests if the server has no keys. It may use every priority.
impl Default for Tenant {
    fn default() -> Self {
        Self {
            number: 0,
            max_priority: u8::MAX,
        }
    }
}

/// SHA-256 digests of the accepted keys, and the tenant of each key. Clones share one map.
#[derive(Clone, Debug, Default)]
pub struct Keys {
    tenants: Arc<RwLock<HashMap<String, Tenant>>>,
    /// File to reload the keys from.
    file: Option<PathBuf>,
}

/// Error in a key file.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    #[error(transparent)]
    File(#[from] ReadError),
    #[error("`{}`: {problem}", file.display())]
    Keys { file: PathBuf, problem: Box<Self> },
    #[error(
        "line {line} is not a key; expected a name and the SHA-256 of the key in 64 hexadecimal digits, as `printf %s KEY | sha256sum` writes it"
    )]
    Line { line: usize },
    #[error(
        "line {line} has `{found}` after the key; expected `max-priority=N`, with N from 0 to 255, the max `x-priority` of requests with this key"
    )]
    Priority { line: usize, found: String },
    #[error("there is no key in it, so every request would be refused; add at least one")]
    Empty,
}

impl Keys {
    /// Parses keys, one per line: a name, the SHA-256 of the key and, optionally, `max-priority=N`, the max `x-priority` of requests with
    /// this key (0 by default). Keys with the same name belong to one tenant. Empty lines and lines that begin with `#` are skipped.
    ///
    /// # Errors
    /// Returns an error if a line is not valid, or if there is no key. Line numbers start at 1.
    pub fn parse(text: &str) -> Result<Self, KeysError> {
        let tenants = Arc::new(RwLock::new(tenants(text)?));
        Ok(Self {
            tenants,
            file: None,
        })
    }

    /// Reads keys from a file, in the format of [`parse`](Self::parse). When the server reloads, it reads the file again.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or if [`parse`](Self::parse) fails.
    pub fn open(file: &Path) -> Result<Self, KeysError> {
        Ok(Self {
            tenants: Arc::new(RwLock::new(read(file)?)),
            file: Some(file.to_owned()),
        })
    }

    /// Reads the key file again, if the keys come from a file. The keys do not change until the caller calls the returned function, which
    /// replaces them.
    pub(super) fn reload(&self) -> Result<impl FnOnce() + use<>, KeysError> {
        let new = self.file.as_deref().map(read).transpose()?;
        let current = Arc::clone(&self.tenants);
        Ok(move || {
            if let Some(new) = new {
                *current.write().unwrap_or_else(PoisonError::into_inner) = new;
            }
        })
    }

    /// Returns the tenant of the key that a request sends. The lookup uses the digest of the key, so its duration reveals nothing about
    /// valid keys.
    pub(super) fn tenant(&self, headers: &HeaderMap) -> Result<Tenant, Failure> {
        let given = headers
            .get(AUTHORIZATION)
            .and_then(|value| value.to_str().ok());
        let key = given
            .and_then(bearer)
            .ok_or_else(|| Failure::key("there is no API key; send `Authorization: Bearer KEY`"))?;
        let digest = Sha256::digest(key.as_bytes());
        let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        let tenants = self.tenants.read().unwrap_or_else(PoisonError::into_inner);
        let tenant = tenants.get(&digest).copied();
        tenant.ok_or_else(|| Failure::key("the API key is not known here"))
    }
}

/// Returns the token of an `Authorization` header. The scheme is case-insensitive.
fn bearer(header: &str) -> Option<&str> {
    let (scheme, token) = header.trim().split_once([' ', '\t'])?;
    scheme
        .eq_ignore_ascii_case("bearer")
        .then_some(token.trim())
}

fn read(file: &Path) -> Result<HashMap<String, Tenant>, KeysError> {
    let text = files::text(file, Kind::Config)?;
    tenants(&text).map_err(|problem| KeysError::Keys {
        file: file.to_owned(),
        problem: Box::new(problem),
    })
}

/// Parses keys into a map from digest to tenant.
fn tenants(text: &str) -> Result<HashMap<String, Tenant>, KeysError> {
    let mut tenants = HashMap::new();
    let mut names: HashMap<&str, u32> = HashMap::new();
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = KeysError::Line { line: at + 1 };
        let mut words = line.split_whitespace();
        let (Some(name), Some(digest)) = (words.next(), words.next()) else {
            return Err(wrong);
        };
        if digest.len() != 64 || !digest.chars().all(|c| c.is_ascii_hexdigit()) {
            return Err(wrong);
        }
        let rest: Vec<&str> = words.collect();
        let max_priority = match rest.as_slice() {
            [] => Some(0),
            [one] => one
                .strip_prefix("max-priority=")
                .and_then(|n| n.parse().ok()),
            _ => None,
        };
        let max_priority = max_priority.ok_or_else(|| KeysError::Priority {
            line: at + 1,
            found: rest.join(" "),
        })?;
        let next = names.len() as u32 + 1;
        let tenant = Tenant {
            number: *names.entry(name).or_insert(next),
            max_priority,
        };
        tenants.insert(digest.to_ascii_lowercase(), tenant);
    }
    match tenants.is_empty() {
        true => Err(KeysError::Empty),
        false => Ok(tenants),
    }
}
