use std::{io, path::PathBuf};

/// Errors of fetching models from a hub. Each message says how to fix the problem.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error(
        "`{given}` is not the name of a model on the hub: {problem}; expected `org/name` or `org/name@revision`"
    )]
    BadId { given: String, problem: String },
    #[error(
        "`{given}` is not the URL of a hub; set HF_ENDPOINT to one such as https://huggingface.co, or leave it out"
    )]
    BadEndpoint { given: String },
    #[error("`{variable}` is not the URL of a proxy; expected one such as http://proxy:3128")]
    BadProxy { variable: String },
    #[error("`{variable}` is not UTF-8; set it to a value that is, or leave it out")]
    BadVariable { variable: String },
    #[error(
        "the token from {place} has spaces, line breaks or other characters that no token has; copy it again from the settings of your account on the hub"
    )]
    BadToken { place: String },
    #[error("there is no folder for the cache; set HF_HOME, or HOME")]
    NoCache,
    #[error(
        "`{file}` has no usable certificates: {problem}; set SSL_CERT_FILE to a PEM file of certificate authorities"
    )]
    BadCertificates { file: PathBuf, problem: String },
    #[error(
        "there is no model `{model}` at {endpoint}; check the name; private repositories need HF_TOKEN"
    )]
    NoModel { model: String, endpoint: String },
    #[error(
        "`{model}` has no revision `{revision}`; use a branch, a tag or a commit of {endpoint}/{model}/commits/main"
    )]
    NoRevision {
        model: String,
        revision: String,
        endpoint: String,
    },
    #[error(
        "the hub lists `{file}` of `{model}` at commit {commit}, and does not have it; try again, and report it to the owner of the model if it stays"
    )]
    NoFile {
        model: String,
        file: String,
        commit: String,
    },
    #[error("`{model}` is gated; {}", gated(.model, .endpoint, *.has_token))]
    Gated {
        model: String,
        endpoint: String,
        has_token: bool,
    },
    #[error(
        "the hub does not accept the access token; make a new one at {endpoint}/settings/tokens and set HF_TOKEN, or remove the old one if the model is public"
    )]
    TokenRefused { endpoint: String },
    #[error(
        "the hub forbids access to `{model}`: {reason}; set HF_TOKEN to a token that may read the model"
    )]
    Forbidden { model: String, reason: String },
    #[error(
        "the hub limits how often it is asked: {url} answered 429{}; wait, or set HF_TOKEN for a higher limit", wait(*.seconds)
    )]
    TooManyRequests { url: String, seconds: Option<u64> },
    #[error("{url} answered {status}; expected a {expected}")]
    Status {
        url: String,
        status: u16,
        expected: &'static str,
    },
    #[error(
        "{url} cannot be reached: {problem}; check the connection, HF_ENDPOINT and the proxy, or set HF_HUB_OFFLINE=1 to use a model that is in the cache"
    )]
    Unreachable { url: String, problem: String },
    #[error(
        "{from} redirects to {to}, which is not followed: {problem}; check HF_ENDPOINT and the proxy"
    )]
    BadRedirect {
        from: String,
        to: String,
        problem: &'static str,
    },
    #[error(
        "`{model}` is not in the cache `{cache}`, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; fetch it once without them"
    )]
    Offline { model: String, cache: PathBuf },
    #[error(
        "`{file}` of `{model}` is not in the cache `{cache}`, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; fetch the model once without them"
    )]
    OfflineFile {
        model: String,
        file: String,
        cache: PathBuf,
    },
    #[error(
        "{url} sent more than {limit} bytes of JSON, the limit; check that HF_ENDPOINT is a hub"
    )]
    TooLarge { url: String, limit: u64 },
    #[error("{url} is not the list of a model's files: {problem}; check that HF_ENDPOINT is a hub")]
    BadListing { url: String, problem: String },
    #[error(
        "the hub lists a file called {name:?}, which {problem}; such a name is refused, and nothing was fetched"
    )]
    BadName { name: String, problem: &'static str },
    #[error(
        "the hub lists `{file}` without its size or hash, so it cannot be verified; set HF_ENDPOINT to a server that answers `?blobs=true` as huggingface.co does"
    )]
    NoHash { file: String },
    #[error(
        "`{file}` has {found} bytes at {url}, and the hub lists {expected}; try again, and check the proxy if it stays"
    )]
    WrongSize {
        file: String,
        url: String,
        expected: u64,
        found: String,
    },
    #[error(
        "`{file}` was damaged on the way: expected {expected}, found {found}; it was deleted; try again, and check the proxy if it stays"
    )]
    WrongHash {
        file: String,
        expected: String,
        found: String,
    },
    #[error(
        "the disk is full: `{path}` cannot be written{}; free some space, or set HF_HOME to a folder on another disk", left(*.bytes)
    )]
    DiskFull { path: PathBuf, bytes: Option<u64> },
    #[error("`{path}` in the cache cannot be {action}; check its permissions, or set HF_HOME")]
    Io {
        path: PathBuf,
        action: &'static str,
        source: io::Error,
    },
}

impl HubError {
    /// Returns whether the error means that the hub is unavailable: it cannot be reached, limits requests, or fails with a status of 500 or
    /// above.
    pub(crate) fn is_network(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::TooManyRequests { .. } => true,
            Self::Status { status, .. } => *status >= 500,
            _ => false,
        }
    }

    /// Returns the error of an operation on a file of the cache.
    pub(crate) fn io(
        path: &std::path::Path,
        action: &'static str,
    ) -> impl Fn(io::Error) -> HubError + use<> {
        let path = path.to_owned();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => HubError::DiskFull {
                path: path.clone(),
                bytes: None,
            },
            _ => HubError::Io {
                path: path.clone(),
                action,
                source,
            },
        }
    }
}

fn gated(model: &str, endpoint: &str, has_token: bool) -> String {
    let accept = format!("accept its conditions at {endpoint}/{model} while signed in");
    match has_token {
        true => format!("{accept}, with the account of the token"),
        false => {
            format!("{accept}, and set HF_TOKEN to a token of that account")
        }
    }
}

fn wait(seconds: Option<u64>) -> String {
    seconds.map_or_else(String::new, |s| format!(", and asks to wait {s} s"))
}

fn left(bytes: Option<u64>) -> String {
    bytes.map_or_else(String::new, |n| format!(", of which {n} bytes are left"))
}
