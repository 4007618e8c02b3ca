//! Requests to the hub: redirects, the token, and retries.

use std::{io, thread, time::Duration};

use ureq::{
    Agent, Body,
    http::{HeaderMap, Response, StatusCode, Uri, header},
    tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem},
};

use crate::{Event, Hub, HubError, Network, Progress};

/// Maximum number of redirects of a request.
const MAX_REDIRECTS: usize = 10;

/// Maximum number of bytes of a file of certificates.
const MAX_CERTIFICATES: u64 = 16 << 20;

/// Sends requests.
pub(crate) struct Client<'h> {
    hub: &'h Hub,
    agent: Agent,
    endpoint: Uri,
}

/// The failure of one attempt.
pub(crate) enum Failure {
    /// A transient failure. Another attempt may succeed, after the pause that the server requests.
    Passing {
        error: HubError,
        pause: Option<Duration>,
    },
    /// The server refuses the request.
    Refused(Refusal),
    Final(HubError),
}

/// A response with an error status.
pub(crate) struct Refusal {
    pub(crate) url: String,
    pub(crate) status: u16,
    /// The hub's code for the error.
    pub(crate) code: String,
    pub(crate) message: String,
}

impl<'h> Client<'h> {
    pub(crate) fn new(hub: &'h Hub) -> Result<Self, HubError> {
        let bad = || HubError::BadEndpoint {
            given: hub.endpoint.clone(),
        };
        let endpoint: Uri = hub.endpoint.parse().map_err(|_| bad())?;
        let is_http = matches!(endpoint.scheme_str(), Some("http" | "https"));
        let is_plain = endpoint.query().is_none() && !hub.endpoint.contains(['@', '#']);
        if !(is_http && is_plain && endpoint.host().is_some_and(|host| !host.is_empty())) {
            return Err(bad());
        }
        let network = &hub.network;
        let tls = TlsConfig::builder().root_certs(roots(network)?).build();
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // Disable ureq's redirects. [`Client::get`] follows them, so that the token is sent only to the endpoint.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .proxy(None)
            .tls_config(tls)
            .user_agent(concat!("gemmule-hub/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(network.timeout))
            .timeout_recv_response(Some(network.timeout))
            .timeout_per_read(Some(network.timeout))
            .build();
        Ok(Self {
            hub,
            agent: config.into(),
            endpoint,
        })
    }

    /// Sends one GET request for the bytes from `from` on, and follows redirects.
    ///
    /// Returns responses with the status 200, 206 or 416. Other statuses are failures.
    pub(crate) fn get(&self, url: &str, from: u64) -> Result<Response<Body>, Failure> {
        let mut uri: Uri = url.parse().map_err(|_| {
            Failure::Final(HubError::BadEndpoint {
                given: self.hub.endpoint.clone(),
            })
        })?;
        let mut at_hub = true;
        for _ in 0..=MAX_REDIRECTS {
            at_hub &= origin(&uri) == origin(&self.endpoint);
            let response = self.send(&uri, from, at_hub)?;
            let status = response.status();
            if !(status.is_redirection() && status != StatusCode::NOT_MODIFIED) {
                return sorted(&uri, response);
            }
            uri = next(&uri, response.headers()).map_err(Failure::Final)?;
        }
        Err(Failure::Final(HubError::BadRedirect {
            from: shown(&url.parse().unwrap_or_default()),
            to: shown(&uri),
            problem: "there are more than 10 redirects",
        }))
    }

    fn send(&self, uri: &Uri, from: u64, with_token: bool) -> Result<Response<Body>, Failure> {
        let mut request = self
            .agent
            .get(uri.clone())
            .header(header::ACCEPT_ENCODING, "identity");
        if from > 0 {
            request = request.header(header::RANGE, format!("bytes={from}-"));
        }
        if let Some(token) = self.hub.token.as_ref().filter(|_| with_token) {
            request = request.header(header::AUTHORIZATION, token.header());
        }
        let proxy = self.hub.network.proxies.for_uri(uri).cloned();
        let sent = request.config().proxy(proxy).build().call();
        sent.map_err(|error| unreachable(uri, &error))
    }

    /// Calls `attempt` until it succeeds, is refused or fails permanently, or until no attempts are left. `what` names the request in
    /// messages.
    pub(crate) fn retry<T>(
        &self,
        what: &str,
        attempts: u32,
        progress: Progress<'_>,
        mut attempt: impl FnMut() -> Result<T, Failure>,
    ) -> Result<Result<T, Refusal>, HubError> {
        let mut retries = Retries::new(&self.hub.network, attempts);
        loop {
            match attempt() {
                Ok(done) => return Ok(Ok(done)),
                Err(Failure::Refused(refusal)) => return Ok(Err(refusal)),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Passing { error, pause }) => {
                    retries.wait(what, error, pause, progress)?;
                }
            }
        }
    }
}

/// Counts the failed attempts of a request, and waits between attempts.
pub(crate) struct Retries<'n> {
    network: &'n Network,
    attempts: u32,
    failed: u32,
}

impl<'n> Retries<'n> {
    pub(crate) fn new(network: &'n Network, attempts: u32) -> Self {
        Self {
            network,
            attempts,
            failed: 0,
        }
    }

    /// Resets the number of failed attempts after progress.
    pub(crate) fn renew(&mut self) {
        self.failed = 0;
    }

    /// Waits before the next attempt.
    ///
    /// # Errors
    /// Returns `error`, the error of the last attempt, if no attempts are left or if the server requests a pause above
    /// [`Network::max_pause`].
    pub(crate) fn wait(
        &mut self,
        what: &str,
        error: HubError,
        asked: Option<Duration>,
        progress: Progress<'_>,
    ) -> Result<(), HubError> {
        self.failed += 1;
        let is_too_long = asked.is_some_and(|pause| pause > self.network.max_pause);
        if self.failed >= self.attempts || is_too_long {
            return Err(error);
        }
        let doubled = self.network.pause * (1 << (self.failed - 1).min(4));
        let pause = asked.unwrap_or(doubled);
        progress(&Event::Retrying {
            what,
            problem: &error.to_string(),
            pause,
        });
        thread::sleep(pause);
        Ok(())
    }
}

/// Returns responses with an expected status, and converts others to failures.
fn sorted(uri: &Uri, response: Response<Body>) -> Result<Response<Body>, Failure> {
    let status = response.status().as_u16();
    let text = |name: &str| {
        let value = response.headers().get(name);
        let value = value.and_then(|v| v.to_str().ok()).unwrap_or_default();
        value.chars().take(300).collect::<String>()
    };
    match status {
        200 | 206 | 416 => Ok(response),
        429 => {
            let pause = pause(response.headers());
            Err(Failure::Passing {
                error: HubError::TooManyRequests {
                    url: shown(uri),
                    seconds: pause.map(|pause| pause.as_secs()),
                },
                pause,
            })
        }
        408 | 500.. => Err(Failure::Passing {
            error: HubError::Status {
                url: shown(uri),
                status,
                expected: "file",
            },
            pause: pause(response.headers()),
        }),
        _ => Err(Failure::Refused(Refusal {
            url: shown(uri),
            status,
            code: text("x-error-code"),
            message: text("x-error-message"),
        })),
    }
}

/// Returns the pause that a server requests: `Retry-After` in seconds, or `t` of the hub's `RateLimit` header.
fn pause(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| headers.get(name)?.to_str().ok();
    let after = text("retry-after").and_then(|value| value.trim().parse().ok());
    let reset = || {
        let mut parts = text("ratelimit")?.split(';');
        parts.find_map(|part| part.trim().strip_prefix("t=")?.parse().ok())
    };
    after.or_else(reset).map(Duration::from_secs)
}

/// Returns the URL that a response redirects to.
fn next(from: &Uri, headers: &HeaderMap) -> Result<Uri, HubError> {
    let location = headers.get(header::LOCATION);
    let location = location.and_then(|v| v.to_str().ok()).unwrap_or_default();
    let location = location.split('#').next().unwrap_or_default();
    let bad = |problem| HubError::BadRedirect {
        from: shown(from),
        to: location.chars().take(200).collect(),
        problem,
    };
    let scheme = from.scheme_str().unwrap_or("https");
    let absolute = if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        let host = from.authority().map(|host| host.as_str());
        format!("{scheme}://{}{location}", host.unwrap_or_default())
    } else {
        location.to_owned()
    };
    let uri: Uri = absolute
        .parse()
        .map_err(|_| bad("it is no URL, or one relative to a folder"))?;
    match (scheme, uri.scheme_str()) {
        ("https", Some("http")) => Err(bad("it leaves HTTPS")),
        (_, Some("http" | "https")) if uri.host().is_some_and(|host| !host.is_empty()) => Ok(uri),
        _ => Err(bad("it is no URL of HTTP, or one relative to a folder")),
    }
}

/// Returns the scheme, host and port of a URL. The token is sent only to the origin of the endpoint.
fn origin(uri: &Uri) -> (Option<&str>, Option<String>, Option<u16>) {
    let default = match uri.scheme_str() {
        Some("http") => Some(80),
        Some("https") => Some(443),
        _ => None,
    };
    let host = uri.host().map(str::to_ascii_lowercase);
    (uri.scheme_str(), host, uri.port_u16().or(default))
}

/// Returns a URL without its query, which may contain a signature.
fn shown(uri: &Uri) -> String {
    let scheme = uri.scheme_str().unwrap_or_default();
    let host = uri.host().unwrap_or_default();
    let port = uri.port_u16().map(|port| format!(":{port}"));
    format!(
        "{scheme}://{host}{}{}",
        port.unwrap_or_default(),
        uri.path()
    )
}

/// Returns the failure of a request that received no response.
fn unreachable(uri: &Uri, error: &ureq::Error) -> Failure {
    use ureq::Error as E;
    let failed = HubError::Unreachable {
        url: shown(uri),
        problem: problem(error),
    };
    match error {
        E::Io(source) if source.kind() == io::ErrorKind::InvalidData => Failure::Final(failed),
        E::Io(_)
        | E::Timeout(_)
        | E::HostNotFound
        | E::ConnectionFailed
        | E::Protocol(_)
        | E::ConnectProxyFailed(_) => Failure::Passing {
            error: failed,
            pause: None,
        },
        // Errors of certificates and settings, which another attempt would not fix.
        _ => Failure::Final(failed),
    }
}

/// Returns the description of a connection error.
pub(crate) fn problem(error: &ureq::Error) -> String {
    match error {
        ureq::Error::HostNotFound => "the name of the host is not known".to_owned(),
        ureq::Error::Timeout(_) => "it does not answer in time".to_owned(),
        ureq::Error::Io(source) => source.to_string(),
        other => other.to_string(),
    }
}

fn roots(network: &Network) -> Result<RootCerts, HubError> {
    use std::io::Read as _;
    let Some(file) = &network.certificates else {
        return Ok(RootCerts::WebPki);
    };
    let bad = |problem: String| HubError::BadCertificates {
        file: file.clone(),
        problem,
    };
    let opened = std::fs::File::open(file).map_err(|e| bad(e.to_string()))?;
    let mut bytes = Vec::new();
    let read = opened.take(MAX_CERTIFICATES).read_to_end(&mut bytes);
    read.map_err(|e| bad(e.to_string()))?;
    let mut certificates: Vec<Certificate<'static>> = Vec::new();
    for item in parse_pem(&bytes) {
        if let PemItem::Certificate(certificate) = item.map_err(|e| bad(e.to_string()))? {
            certificates.push(certificate);
        }
    }
    match certificates.is_empty() {
        true => Err(bad("it has none in PEM format".to_owned())),
        false => Ok(RootCerts::new_with_certs(&certificates)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uri(text: &str) -> Uri {
        text.parse().unwrap()
    }

    fn redirect(from: &str, to: &str) -> Result<String, HubError> {
        let mut headers = HeaderMap::new();
        headers.insert(header::LOCATION, to.parse().unwrap());
        next(&uri(from), &headers).map(|uri| uri.to_string())
    }

    #[test]
    fn redirects_are_resolved_and_stay_in_https() {
        let from = "https://hub.test/a/b?c=d";
        assert_eq!(redirect(from, "/x?y").unwrap(), "https://hub.test/x?y");
        assert_eq!(
            redirect(from, "//cdn.test/x").unwrap(),
            "https://cdn.test/x"
        );
        assert_eq!(
            redirect("http://h.test:8/a", "/x").unwrap(),
            "http://h.test:8/x"
        );
        assert_eq!(
            redirect("http://h.test:8/a", "https://c.test/#x").unwrap(),
            "https://c.test/"
        );
        for bad in ["", "x", "../x", "http://cdn.test/x", "file:///etc/passwd"] {
            let error = redirect(from, bad).expect_err(bad);
            assert!(matches!(error, HubError::BadRedirect { .. }), "{error}");
        }
    }

    #[test]
    fn a_token_belongs_to_scheme_host_and_port() {
        let hub = uri("https://hub.test");
        let hub = origin(&hub);
        assert_eq!(origin(&uri("https://HUB.test:443/x")), hub);
        for other in [
            "http://hub.test",
            "https://hub.test:8443",
            "https://cdn.hub.test",
            "https://hub.test.evil.test",
        ] {
            assert_ne!(origin(&uri(other)), hub, "{other}");
        }
    }

    #[test]
    fn signatures_are_not_shown() {
        let signed = uri("https://cdn.test:8/x?Signature=secret");
        assert_eq!(shown(&signed), "https://cdn.test:8/x");
    }

    #[test]
    fn pauses_are_read() {
        let pause_of = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            pause(&headers).map(|pause| pause.as_secs())
        };
        assert_eq!(pause_of("retry-after", "7"), Some(7));
        assert_eq!(
            pause_of("retry-after", "Fri, 31 Dec 1999 23:59:59 GMT"),
            None
        );
        assert_eq!(pause_of("ratelimit", r#""api";r=0;t=55"#), Some(55));
        assert_eq!(pause_of("x", "1"), None);
    }
}
