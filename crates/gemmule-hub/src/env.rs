//! Settings from the environment variables of `huggingface_hub`.

use std::{
    cell::RefCell,
    env::VarError,
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
};

use crate::{ENDPOINT, Hub, HubError, Network, Proxies, Token};

/// Maximum number of bytes of a token file.
const MAX_TOKEN: u64 = 64 << 10;

impl Hub {
    /// Reads the settings from the environment variables of `huggingface_hub`.
    ///
    /// - The cache: `HF_HUB_CACHE`, else `HUGGINGFACE_HUB_CACHE`, else `hub` in `HF_HOME`. The default of `HF_HOME` is
    ///   `XDG_CACHE_HOME/huggingface`, else `~/.cache/huggingface`.
    /// - The token: `HF_TOKEN`, else `HUGGING_FACE_HUB_TOKEN`, else the file `HF_TOKEN_PATH`, else the file `token` in
    ///   `HF_HOME`. There is no token if `HF_HUB_DISABLE_IMPLICIT_TOKEN` is set.
    /// - The endpoint: `HF_ENDPOINT`. Offline use: `HF_HUB_OFFLINE`, else `TRANSFORMERS_OFFLINE`.
    /// - Proxies: `https_proxy`, `http_proxy`, `all_proxy`, `no_proxy`. Certificate authorities: `SSL_CERT_FILE`.
    ///
    /// # Errors
    /// Returns an error if a value is invalid, if no variable determines the cache, or if the token file cannot be read.
    pub fn from_env() -> Result<Self, HubError> {
        let broken = RefCell::new(None);
        let hub = Self::from_variables(|name| match std::env::var(name) {
            Ok(value) => Some(value),
            Err(VarError::NotPresent) => None,
            Err(VarError::NotUnicode(_)) => {
                let variable = name.to_owned();
                broken.replace(Some(HubError::BadVariable { variable }));
                None
            }
        });
        match broken.into_inner() {
            Some(error) => Err(error),
            None => hub,
        }
    }

    /// Like [`from_env`](Self::from_env), but reads variables with a function. An empty value counts as unset.
    ///
    /// # Errors
    /// Returns the errors of [`from_env`](Self::from_env).
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, HubError> {
        let variable = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let home = variable("HOME").map(PathBuf::from);
        let path = |name: &str| variable(name).map(|path| expanded(&path, home.as_deref()));
        let hf_home = path("HF_HOME").or_else(|| {
            let cache = path("XDG_CACHE_HOME").or_else(|| Some(home.as_ref()?.join(".cache")))?;
            Some(cache.join("huggingface"))
        });
        let cache = path("HF_HUB_CACHE")
            .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| Some(hf_home.as_ref()?.join("hub")))
            .ok_or(HubError::NoCache)?;
        let is_set = |name: &str| variable(name).is_some_and(|value| is_true(&value));
        let file = path("HF_TOKEN_PATH").or_else(|| Some(hf_home.as_ref()?.join("token")));
        let names = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"];
        let named = names.iter().find_map(|&name| Some((name, variable(name)?)));
        let token = match (named, file) {
            _ if is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN") => None,
            (Some((name, value)), _) => Some(token(&value, name)?),
            (None, Some(file)) => token_file(&file)?,
            (None, None) => None,
        };
        let offline = variable("HF_HUB_OFFLINE").or_else(|| variable("TRANSFORMERS_OFFLINE"));
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        Ok(Self {
            endpoint: endpoint.trim().trim_end_matches('/').to_owned(),
            cache,
            token,
            offline: offline.is_some_and(|value| is_true(&value)),
            network: Network {
                proxies: Proxies::from_variables(variable)?,
                certificates: path("SSL_CERT_FILE"),
                ..Network::default()
            },
        })
    }
}

fn is_true(value: &str) -> bool {
    let value = value.trim().to_ascii_uppercase();
    ["1", "ON", "YES", "TRUE"].contains(&value.as_str())
}

/// Returns the path with a leading `~` replaced by the home folder.
fn expanded(path: &str, home: Option<&Path>) -> PathBuf {
    match (path.strip_prefix('~'), home) {
        (Some(""), Some(home)) => home.to_owned(),
        (Some(rest), Some(home)) if rest.starts_with('/') => home.join(&rest[1..]),
        _ => PathBuf::from(path),
    }
}

fn token(text: &str, place: &str) -> Result<Token, HubError> {
    Token::new(text).ok_or_else(|| HubError::BadToken {
        place: place.to_owned(),
    })
}

/// Reads a token file. A missing or empty file, as after signing out, is not an error.
fn token_file(file: &Path) -> Result<Option<Token>, HubError> {
    let opened = match File::open(file) {
        Ok(opened) => opened,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(HubError::io(file, "read")(error)),
    };
    let mut bytes = Vec::new();
    let read = opened.take(MAX_TOKEN).read_to_end(&mut bytes);
    read.map_err(HubError::io(file, "read"))?;
    let text = String::from_utf8_lossy(&bytes);
    match text.trim().is_empty() {
        true => Ok(None),
        false => token(&text, &format!("the file `{}`", file.display())).map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(variables: &[(&str, &str)]) -> Result<Hub, HubError> {
        let value = |name: &str| {
            let found = variables.iter().find(|(n, _)| *n == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        Hub::from_variables(value)
    }

    #[test]
    fn the_cache_is_where_python_has_it() {
        let cases: [(&[(&str, &str)], &str); 7] = [
            (&[("HOME", "/h")], "/h/.cache/huggingface/hub"),
            (
                &[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")],
                "/x/huggingface/hub",
            ),
            (&[("HOME", "/h"), ("HF_HOME", "/f")], "/f/hub"),
            (&[("HOME", "/h"), ("HF_HOME", "~/f")], "/h/f/hub"),
            (&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")], "/c"),
            (&[("HF_HOME", "/f"), ("HUGGINGFACE_HUB_CACHE", "/c")], "/c"),
            (
                &[("HOME", "/h"), ("HF_HOME", "")],
                "/h/.cache/huggingface/hub",
            ),
        ];
        for (variables, expected) in cases {
            assert_eq!(
                hub(variables).unwrap().cache,
                Path::new(expected),
                "{variables:?}"
            );
        }
        assert!(matches!(hub(&[]), Err(HubError::NoCache)));
    }

    #[test]
    fn the_token_is_of_the_variable_else_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().to_str().unwrap();
        assert_eq!(hub(&[("HF_HOME", home)]).unwrap().token, None);
        std::fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        std::fs::write(folder.path().join("other"), "hf_other").unwrap();
        let other = folder.path().join("other");
        let other = other.to_str().unwrap();
        let is = |variables: &[(&str, &str)], expected: &str| {
            let found = hub(variables).unwrap().token.unwrap();
            assert_eq!(found, Token::new(expected).unwrap(), "{variables:?}");
        };
        is(&[("HF_HOME", home)], "hf_file");
        is(&[("HF_HOME", home), ("HF_TOKEN_PATH", other)], "hf_other");
        is(&[("HF_HOME", home), ("HF_TOKEN", "hf_env")], "hf_env");
        let none = hub(&[("HF_HOME", home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]);
        assert_eq!(none.unwrap().token, None);
        let error = hub(&[("HF_HOME", home), ("HF_TOKEN", "two words")]).unwrap_err();
        assert!(
            error.to_string().contains("the token from HF_TOKEN"),
            "{error}"
        );
    }

    #[test]
    fn offline_and_endpoint_are_read() {
        let default = hub(&[("HOME", "/h")]).unwrap();
        assert_eq!(
            (default.offline, default.endpoint.as_str()),
            (false, ENDPOINT)
        );
        for (name, value, expected) in [
            ("HF_HUB_OFFLINE", "1", true),
            ("HF_HUB_OFFLINE", "true", true),
            ("HF_HUB_OFFLINE", "0", false),
            ("TRANSFORMERS_OFFLINE", "YES", true),
        ] {
            let hub = hub(&[("HOME", "/h"), (name, value)]).unwrap();
            assert_eq!(hub.offline, expected, "{name}={value}");
        }
        let hub = hub(&[("HOME", "/h"), ("HF_ENDPOINT", "http://m.test/")]).unwrap();
        assert_eq!(hub.endpoint, "http://m.test");
    }
}
