//! Checks of the `Host` and `Origin` headers.

use std::net::IpAddr;

use hyper::{
    Request, Version,
    header::{HOST, ORIGIN},
    http::uri::Authority,
};

use super::error::Failure;

/// Checks that a request has exactly one valid `Host` header. HTTP/1.0 may omit it.
pub(super) fn check<B>(request: &Request<B>) -> Result<(), Failure> {
    let mut hosts = request.headers().get_all(HOST).iter();
    let host = match (hosts.next(), hosts.next()) {
        (Some(host), None) => host,
        (Some(_), Some(_)) => {
            return Err(Failure::host(
                "the request has more than one Host header; send one",
            ));
        }
        (None, _) if request.version() == Version::HTTP_11 => {
            return Err(Failure::host(
                "the request has no Host header, which HTTP/1.1 requires",
            ));
        }
        (None, _) => return Ok(()),
    };
    // RFC 9112 allows an empty `Host`.
    match host.is_empty() || Authority::try_from(host.as_bytes()).is_ok_and(|a| !has_user(&a)) {
        true => Ok(()),
        false => Err(Failure::host(
            "the Host header is not valid; expected a name or an address with an optional port, such as 127.0.0.1:8080",
        )),
    }
}

fn has_user(authority: &Authority) -> bool {
    authority.as_str().contains('@')
}

/// Checks that an administrative command does not come from a web page in a browser. Refuses an `Origin` header, which browsers send, and a
/// host name other than `localhost`, which an attack by DNS rebinding needs.
pub(super) fn check_command<B>(request: &Request<B>) -> Result<(), Failure> {
    check(request)?;
    if request.headers().contains_key(ORIGIN) {
        return Err(Failure::forbidden(
            "commands from web pages are refused; send the request without an Origin header",
        ));
    }
    let host = request.headers().get(HOST);
    let host = host.and_then(|host| Authority::try_from(host.as_bytes()).ok());
    let is_local = host.is_some_and(|authority| {
        let name = authority.host().trim_matches(['[', ']']);
        name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
    });
    match is_local {
        true => Ok(()),
        false => Err(Failure::forbidden(
            "commands are accepted only if the Host header is an IP address or localhost",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(version: Version, headers: &[(&str, &str)]) -> Request<()> {
        let mut builder = Request::post("/admin/reload").version(version);
        for (name, value) in headers {
            builder = builder.header(*name, *value);
        }
        builder.body(()).unwrap()
    }

    #[test]
    fn a_request_has_one_valid_host() {
        let check = |version, headers: &[(&str, &str)]| check(&request(version, headers)).is_ok();
        for host in ["x", "127.0.0.1:8080", "[::1]:80", "", "a.example"] {
            assert!(check(Version::HTTP_11, &[("host", host)]), "{host}");
        }
        for host in ["a b", "user@x", "x/y", "http://x", "[::1"] {
            assert!(!check(Version::HTTP_11, &[("host", host)]), "{host}");
        }
        assert!(!check(Version::HTTP_11, &[]));
        assert!(check(Version::HTTP_10, &[]));
        let two = [("host", "x"), ("host", "x")];
        assert!(!check(Version::HTTP_11, &two));
        assert!(!check(Version::HTTP_10, &two));
    }

    #[test]
    fn commands_come_from_this_machine_and_not_from_web_pages() {
        let check =
            |headers: &[(&str, &str)]| check_command(&request(Version::HTTP_11, headers)).is_ok();
        for host in [
            "127.0.0.1:9000",
            "LOCALHOST",
            "localhost:9000",
            "[::1]:9000",
        ] {
            assert!(check(&[("host", host)]), "{host}");
            for origin in ["null", "http://127.0.0.1:9000", "https://evil.example"] {
                assert!(!check(&[("host", host), ("origin", origin)]), "{origin}");
            }
        }
        for host in ["evil.example:9000", "localhost.evil.example", "", "x"] {
            assert!(!check(&[("host", host)]), "{host}");
        }
        assert!(!check(&[]));
    }
}
