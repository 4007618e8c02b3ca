//! Keys of those who may ask.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
};

use hyper::{HeaderMap, header::AUTHORIZATION};
use sha2::{Digest, Sha256};

use super::error::Failure;
use crate::files::{self, Kind, ReadError};

/// Who may ask: digests of keys, with the number of the tenant that each is of. Copies are the same list.
#[derive(Clone, Debug, Default)]
pub struct Keys {
    tenants: Arc<RwLock<HashMap<String, u32>>>,
    /// Where they are read again.
    file: Option<PathBuf>,
}

/// What is wrong with a file of keys.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    #[error(transparent)]
    File(#[from] ReadError),
    #[error("`{}`: {problem}", file.display())]
    Keys { file: PathBuf, problem: Box<Self> },
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
        let tenants = Arc::new(RwLock::new(tenants(text)?));
        Ok(Self {
            tenants,
            file: None,
        })
    }

    /// Reads the keys of a file, as [`parse`](Self::parse) does. It is read again where the server is told to load its models anew.
    ///
    /// # Errors
    /// A file that cannot be read, and as `parse`.
    pub fn open(file: &Path) -> Result<Self, KeysError> {
        Ok(Self {
            tenants: Arc::new(RwLock::new(read(file)?)),
            file: Some(file.to_owned()),
        })
    }

    /// Reads their file again. The new keys are in force once the returned function is called.
    pub(super) fn reload(&self) -> Result<impl FnOnce() + use<>, KeysError> {
        let new = self.file.as_deref().map(read).transpose()?;
        let current = Arc::clone(&self.tenants);
        Ok(move || {
            if let Some(new) = new {
                *current.write().unwrap_or_else(PoisonError::into_inner) = new;
            }
        })
    }

    /// The tenant of a request's key. Digests are looked up, so that the time of an answer says nothing of a key.
    pub(super) fn tenant(&self, headers: &HeaderMap) -> Result<u32, Failure> {
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

/// The token of an `Authorization` header, whose scheme is compared without regard to case.
fn bearer(header: &str) -> Option<&str> {
    let (scheme, token) = header.trim().split_once([' ', '\t'])?;
    scheme
        .eq_ignore_ascii_case("bearer")
        .then_some(token.trim())
}

fn read(file: &Path) -> Result<HashMap<String, u32>, KeysError> {
    let text = files::text(file, Kind::Config)?;
    tenants(&text).map_err(|problem| KeysError::Keys {
        file: file.to_owned(),
        problem: Box::new(problem),
    })
}

/// The tenants of keys, by digest.
fn tenants(text: &str) -> Result<HashMap<String, u32>, KeysError> {
    let mut tenants = HashMap::new();
    let mut names: HashMap<&str, u32> = HashMap::new();
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = KeysError::Line { line: at + 1 };
        let mut words = line.split_whitespace();
        let (Some(name), Some(digest), None) = (words.next(), words.next(), words.next()) else {
            return Err(wrong);
        };
        if digest.len() != 64 || !digest.chars().all(|c| c.is_ascii_hexdigit()) {
            return Err(wrong);
        }
        let next = names.len() as u32 + 1;
        let tenant = *names.entry(name).or_insert(next);
        tenants.insert(digest.to_ascii_lowercase(), tenant);
    }
    match tenants.is_empty() {
        true => Err(KeysError::Empty),
        false => Ok(tenants),
    }
}
