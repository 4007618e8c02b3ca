//! Fetches models from the Hugging Face hub into the cache of Python's `huggingface_hub`.
//!
//! [`Hub::snapshot`] returns a folder with the selected files of a model at one revision. The cache has the layout of `huggingface_hub`, so
//! gemmule and `huggingface_hub` each find the files that the other has fetched:
//!
//! ```text
//! models--org--name/blobs/<hash>                 contents; the hash is SHA-256 in Git LFS, else Git's SHA-1
//! models--org--name/snapshots/<commit>/<name>    a relative link to the blob
//! models--org--name/refs/<revision>              the commit of a branch or tag
//! .locks/models--org--name/<hash>.lock           held while a blob is fetched
//! ```
//!
//! The server is not trusted. File names, sizes and hashes are checked, the size of bodies is limited, and the token is sent only to the
//! endpoint. A file is linked only after its hash is verified.

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

/// The endpoint if `HF_ENDPOINT` is not set.
pub const ENDPOINT: &str = "https://huggingface.co";

/// A hub, and the cache of its files.
#[derive(Clone, Debug)]
pub struct Hub {
    /// URL of the server. It may have a path, which some mirrors need.
    pub endpoint: String,
    /// Folder of the cache.
    pub cache: PathBuf,
    /// Access token for private and gated models.
    pub token: Option<Token>,
    /// Whether to use only the cache.
    pub offline: bool,
    pub network: Network,
}

/// Settings of connections.
#[derive(Clone, Debug)]
pub struct Network {
    pub proxies: Proxies,
    /// PEM file of the certificate authorities to trust instead of the built-in ones.
    pub certificates: Option<PathBuf>,
    /// Timeout for connecting, and for each wait for data.
    pub timeout: Duration,
    /// Maximum number of consecutive attempts without progress.
    pub attempts: u32,
    /// Pause before the second attempt. It doubles with each attempt, up to 16 times this value.
    pub pause: Duration,
    /// Maximum pause that a server may request with `Retry-After`.
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

    /// Returns the names of the models with files in the cache, sorted. Folders whose names are not those of models are skipped.
    pub fn cached_models(&self) -> Vec<String> {
        cache::models(&self.cache)
    }
}
