//! Cross-origin resource sharing (CORS), which allows web pages to use the server from a browser.

use std::str::FromStr;

use hyper::{
    HeaderMap, Method, Response, StatusCode, Uri,
    header::{
        ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
        ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
        ALLOW, HeaderValue, ORIGIN, VARY,
    },
};

use super::{Body, error::Failure};

/// Origin of web pages that may use the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Any,
    One(HeaderValue),
}

/// Error for a text that is not an origin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected `*`, or an origin without a path, such as https://example.com or http://localhost:3000"
)]
pub struct OriginError;

impl FromStr for Origin {
    type Err = OriginError;

    fn from_str(text: &str) -> Result<Self, OriginError> {
        if text == "*" {
            return Ok(Self::Any);
        }
        // Browsers send the origin `null` for pages that are local files.
        if text != "null" {
            let uri: Uri = text.parse().map_err(|_| OriginError)?;
            let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
                return Err(OriginError);
            };
            if !text.eq_ignore_ascii_case(&format!("{scheme}://{authority}"))
                || authority.as_str().contains(['@', '*'])
            {
                return Err(OriginError);
            }
        }
        // Browsers send the scheme and the host in lower case.
        let value = HeaderValue::from_str(&text.to_ascii_lowercase());
        value.map(Self::One).map_err(|_| OriginError)
    }
}

/// Response headers that pages may read, in addition to those that browsers always expose.
const EXPOSED: &str =
    "x-request-id, retry-after, retry-after-ms, x-compute-tokens, x-rows, x-width, x-tokens";
/// Seconds for which a browser caches a preflight response.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");

/// Returns the value of `Access-Control-Allow-Origin` for a request; `None` if the request has no `Origin` header, or an origin that is not
/// allowed.
pub(super) fn allowed(origins: &[Origin], headers: &HeaderMap) -> Option<HeaderValue> {
    let asked = headers.get(ORIGIN)?;
    match origins {
        _ if origins.contains(&Origin::Any) => Some(HeaderValue::from_static("*")),
        _ => origins
            .iter()
            .any(|origin| matches!(origin, Origin::One(one) if one == asked))
            .then(|| asked.clone()),
    }
}

/// Handles a preflight request (`OPTIONS`). `methods` are the methods of the path.
///
/// # Errors
/// Returns an error if the origin is not allowed.
pub(super) fn preflight(
    origins: &[Origin],
    headers: &HeaderMap,
    methods: &[Method],
) -> Result<Response<Body>, Failure> {
    if let Some(asked) = headers.get(ORIGIN)
        && allowed(origins, headers).is_none()
    {
        return Err(Failure::origin(&String::from_utf8_lossy(asked.as_bytes())));
    }
    let mut response = Response::new(Body::Whole(None));
    *response.status_mut() = StatusCode::NO_CONTENT;
    let to = response.headers_mut();
    let names: Vec<&str> = methods.iter().map(Method::as_str).collect();
    if let Ok(names) = HeaderValue::from_str(&format!("{}, OPTIONS", names.join(", "))) {
        to.insert(ACCESS_CONTROL_ALLOW_METHODS, names.clone());
        to.insert(ALLOW, names);
    }
    if let Some(asked) = headers.get(ACCESS_CONTROL_REQUEST_HEADERS) {
        to.insert(ACCESS_CONTROL_ALLOW_HEADERS, asked.clone());
    }
    to.insert(ACCESS_CONTROL_MAX_AGE, MAX_AGE);
    to.append(VARY, HeaderValue::from(ACCESS_CONTROL_REQUEST_HEADERS));
    Ok(response)
}

/// Adds the headers that allow a page to read the response. `allowed` is the page's origin, or `*`, or `None` if the page may not read the
/// response.
pub(super) fn mark(origins: &[Origin], allowed: Option<HeaderValue>, to: &mut HeaderMap) {
    if origins.is_empty() {
        return;
    }
    if !origins.contains(&Origin::Any) {
        to.append(VARY, HeaderValue::from(ORIGIN));
    }
    if let Some(origin) = allowed {
        to.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        to.insert(
            ACCESS_CONTROL_EXPOSE_HEADERS,
            HeaderValue::from_static(EXPOSED),
        );
    }
}
