//! Proxies from the usual environment variables.

use ureq::{Proxy, http::Uri};

use crate::HubError;

/// Proxies for requests.
#[derive(Clone, Debug, Default)]
pub struct Proxies {
    http: Option<Proxy>,
    https: Option<Proxy>,
    exempt: Vec<String>,
}

impl Proxies {
    /// Reads `https_proxy`, `http_proxy`, `all_proxy` and `no_proxy`, in lower case or else in upper case. `variable` returns the value of
    /// a variable.
    ///
    /// # Errors
    /// Returns [`HubError::BadProxy`] with the name of the variable if its value is not the URL of a proxy.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, HubError> {
        let value = |name: &str| {
            let names = [name.to_owned(), name.to_ascii_uppercase()];
            names.into_iter().find_map(|name| {
                let value = variable(&name).filter(|value| !value.trim().is_empty())?;
                Some((name, value.trim().to_owned()))
            })
        };
        let proxy = |name: &str| match value(name).or_else(|| value("all_proxy")) {
            Some((variable, url)) => match Proxy::new(&url) {
                Ok(proxy) => Ok(Some(proxy)),
                Err(_) => Err(HubError::BadProxy { variable }),
            },
            None => Ok(None),
        };
        let exempt = value("no_proxy").map(|(_, list)| list).unwrap_or_default();
        let exempt = exempt.split(',').map(|host| host.trim().to_lowercase());
        Ok(Self {
            http: proxy("http_proxy")?,
            https: proxy("https_proxy")?,
            exempt: exempt.filter(|host| !host.is_empty()).collect(),
        })
    }

    /// Returns the proxy for a request to `uri`.
    pub(crate) fn for_uri(&self, uri: &Uri) -> Option<&Proxy> {
        let host = uri.host().unwrap_or_default().to_ascii_lowercase();
        if self.exempt.iter().any(|pattern| matches(pattern, &host)) {
            return None;
        }
        match uri.scheme_str() {
            Some("https") => self.https.as_ref(),
            _ => self.http.as_ref(),
        }
    }
}

/// Returns whether an entry of `no_proxy` matches the host: `*`, the host itself, or a domain that contains it.
fn matches(pattern: &str, host: &str) -> bool {
    let domain = pattern.trim_start_matches('*').trim_start_matches('.');
    let is_under = |host: &str| {
        let above = host.strip_suffix(domain);
        above.is_some_and(|above| above.is_empty() || above.ends_with('.'))
    };
    pattern == "*" || (!domain.is_empty() && is_under(host))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxies_are_chosen_by_scheme_and_host() {
        let proxies = Proxies::from_variables(|name| {
            let value = match name {
                "https_proxy" => "http://a.test:1",
                "ALL_PROXY" => "http://b.test:2",
                "NO_PROXY" => "localhost, .inner.test,127.0.0.1",
                _ => return None,
            };
            Some(value.to_owned())
        })
        .unwrap();
        let host = |uri: &str| {
            let uri = uri.parse().unwrap();
            proxies.for_uri(&uri).map(|proxy| proxy.host().to_owned())
        };
        assert_eq!(host("https://hub.test/x").as_deref(), Some("a.test"));
        assert_eq!(host("http://hub.test/x").as_deref(), Some("b.test"));
        assert_eq!(host("https://localhost/x"), None);
        assert_eq!(host("https://x.inner.test/"), None);
        assert_eq!(host("https://winner.test/").as_deref(), Some("a.test"));
        assert_eq!(host("http://127.0.0.1:8/"), None);
        let all = Proxies::from_variables(|name| match name {
            "HTTP_PROXY" => Some("http://c.test".to_owned()),
            "no_proxy" => Some("*".to_owned()),
            _ => None,
        });
        assert_eq!(
            all.unwrap().for_uri(&"http://h.test".parse().unwrap()),
            None
        );
    }

    #[test]
    fn a_bad_proxy_is_named_by_its_variable() {
        let error = Proxies::from_variables(|name| {
            (name == "HTTPS_PROXY").then(|| "gopher://x:1".to_owned())
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("`HTTPS_PROXY`"), "{error}");
    }
}
