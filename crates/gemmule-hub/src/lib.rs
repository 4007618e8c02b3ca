//! Fetches models from the Hugging Face hub into the cache of Python's `huggingface_hub`.
//!
//! [`Hub::snapshot`] returns a folder with the chosen files of a model at one revision. The layout of the cache is that of
//! `huggingface_hub`, so each finds the files that the other fetched:
//!
//! ```text
//! models--org--name/blobs/<hash>                 contents: SHA-256 of files in Git LFS, Git's SHA-1 of the others
//! models--org--name/snapshots/<commit>/<name>    a relative link to the blob
//! models--org--name/refs/<revision>              the commit of a branch or tag
//! .locks/models--org--name/<hash>.lock           held while a blob is fetched
//! ```
//!
//! The server is not trusted: names of files, sizes and hashes are checked, bodies are limited, and the token is sent to the
//! endpoint alone. A file is linked only after its hash is verified.

mod cache;
mod env;
mod error;
mod fetch;
mod hash;
mod http;
mod id;
mod listing;
mod progress;
mod proxy;
mod snapshot;
mod token;

use std::{path::PathBuf, time::Duration};

pub use error::HubError;
pub use id::ModelId;
pub use progress::{Event, Progress};
pub use proxy::Proxies;
pub use token::Token;

/// The endpoint without `HF_ENDPOINT`.
pub const ENDPOINT: &str = "https://huggingface.co";

/// A hub, and the cache of its files.
#[derive(Clone, Debug)]
pub struct Hub {
    /// URL of the server, without a path after it unless the server is a mirror that needs one.
    pub endpoint: String,
    /// Folder of the cache.
    pub cache: PathBuf,
    /// Access token for private and gated models.
    pub token: Option<Token>,
    /// Whether to use the cache alone.
    pub offline: bool,
    pub network: Network,
}

/// Settings of connections.
#[derive(Clone, Debug)]
pub struct Network {
    pub proxies: Proxies,
    /// PEM file of the certificate authorities to trust instead of the built-in ones.
    pub certificates: Option<PathBuf>,
    /// Time limit for a connection, and for each wait for data.
    pub timeout: Duration,
    /// Number of attempts in a row without progress before a request fails.
    pub attempts: u32,
    /// Pause before the second attempt. It doubles with each attempt, up to 16 times.
    pub pause: Duration,
    /// Max pause that a server may request with `Retry-After`.
    pub max_pause: Duration,
    /// Number of files to fetch at the same time.
    pub connections: usize,
}

impl Default for Network {
    fn default() -> Self {
        Self {
            proxies: Proxies::default(),
            certificates: None,
            timeout: Duration::from_secs(30),
            attempts: 5,
            pause: Duration::from_secs(1),
            max_pause: Duration::from_secs(120),
            connections: 4,
        }
    }
}

impl Hub {
    /// Returns the public hub with this cache folder, without a token.
    pub fn new(cache: impl Into<PathBuf>) -> Self {
        Self {
            endpoint: ENDPOINT.to_owned(),
            cache: cache.into(),
            token: None,
            offline: false,
            network: Network::default(),
        }
    }

    /// Returns the names of the models of which the cache has files, sorted. Folders with other names are left out.
    pub fn cached_models(&self) -> Vec<String> {
        cache::models(&self.cache)
    }
}
