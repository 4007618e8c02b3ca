//! Error responses in the format of each API.

use std::time::Duration;

use hyper::{
    Method, Response, StatusCode,
    header::{ACCEPT_ENCODING, ALLOW, HeaderName, HeaderValue, RETRY_AFTER},
};
use serde_json::json;

use super::{
    Body, Route, json,
    route::{Style, Subject},
};
use crate::{
    names::{excerpt, without_middle},
    serve::{ReloadError, ServeError},
};

/// Max characters of an error message from another library, such as serde_json. It may quote a value of the request.
pub(super) const MAX_QUOTED: usize = 400;
/// Max characters of any error message.
const MAX_MESSAGE: usize = 4000;

/// Error of a request, with its HTTP status.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    status: StatusCode,
    code: &'static str,
    param: Option<String>,
    message: String,
    retry_after: Option<Duration>,
    allow: Option<String>,
    /// For an error about an input, the data from which [`on`](Self::on) completes the message. Boxed to keep the type small.
    of_input: Option<Box<OfInput>>,
}

/// A problem with an input of a request. The message depends on the route, because each route names its inputs differently.
#[derive(Clone, Debug)]
struct OfInput {
    subject: Subject,
    index: usize,
    problem: Problem,
}

#[derive(Clone, Debug)]
enum Problem {
    /// The input has more than this number of tokens.
    TooLong(usize),
    /// The input exceeds the largest batch.
    TooLarge,
    /// Any other problem. The message is the name of the input followed by this text.
    Other(String),
}

impl Failure {
    fn new(status: StatusCode, code: &'static str, message: String) -> Self {
        Self {
            status,
            code,
            param: None,
            message,
            retry_after: None,
            allow: None,
            of_input: None,
        }
    }

    /// Sets the text of the request that the error is about. The default is [`Subject::Input`]. Changes only errors about an input.
    pub fn about(mut self, subject: Subject) -> Self {
        if let Some(of_input) = &mut self.of_input {
            of_input.subject = subject;
        }
        self
    }

    /// Completes the message of an error about an input, and sets `param` to the field that contains the input. The message uses the name
    /// that `route` has for the input. If the input is too long, the message also names the field that truncates inputs.
    pub fn on(mut self, route: Route) -> Self {
        let Some(of_input) = self.of_input.take() else {
            return self;
        };
        let (param, name) = route.input(of_input.subject, of_input.index);
        self.param = Some(param.to_owned());
        self.message = match of_input.problem {
            Problem::TooLong(limit) => {
                let or = match route.truncation() {
                    Some(field) => format!(", or send {field} to truncate it"),
                    None => String::new(),
                };
                format!("{name} has more than {limit} tokens, the model's maximum; shorten it{or}")
            }
            Problem::TooLarge => format!(
                "{name} exceeds the largest batch that the device's memory or the scheduler's rows allow; shorten it"
            ),
            Problem::Other(problem) => format!("{name}{problem}"),
        };
        self
    }

    pub fn invalid(param: &str, message: String) -> Self {
        Self {
            param: Some(param.to_owned()),
            ..Self::new(StatusCode::BAD_REQUEST, "invalid_request", message)
        }
    }

    pub fn key(message: &str) -> Self {
        let status = StatusCode::UNAUTHORIZED;
        Self::new(status, "invalid_api_key", message.to_owned())
    }

    /// Creates an error for an invalid `Host` header. Its status is 400 in every style.
    pub fn host(message: &str) -> Self {
        let status = StatusCode::BAD_REQUEST;
        Self::new(status, "invalid_host", message.to_owned())
    }

    pub fn forbidden(message: &str) -> Self {
        let status = StatusCode::FORBIDDEN;
        Self::new(status, "forbidden", message.to_owned())
    }

    pub fn no_route(path: &str) -> Self {
        let path = excerpt(path);
        let mut routes = super::Route::ALL.map(|(_, name, _)| name).to_vec();
        routes.dedup();
        let message = format!(
            "there is no route `{path}`; there are {}",
            routes.join(", ")
        );
        Self::new(StatusCode::NOT_FOUND, "not_found", message)
    }

    pub fn no_command(known: &str) -> Self {
        let message = format!("there is no such command; there is POST {known}");
        Self::new(StatusCode::NOT_FOUND, "not_found", message)
    }

    /// Creates an error for a method that the path does not support. `expected` are the methods
    /// that it supports.
    pub fn method(found: &Method, expected: &[Method]) -> Self {
        let names = |between: &str| {
            let names: Vec<&str> = expected.iter().map(Method::as_str).collect();
            names.join(between)
        };
        let browser = match *found {
            Method::OPTIONS => "; for web pages, start the server with --cors-origin",
            _ => "",
        };
        let message = format!("this route takes {}, not {found}{browser}", names(" or "));
        Self {
            allow: Some(names(", ")),
            ..Self::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "method_not_allowed",
                message,
            )
        }
    }

    pub fn large_body(most: usize) -> Self {
        let message = format!("the body has more than {most} bytes; split the request");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
    }

    /// Creates an error for a body that has more than `max` bytes after decompression.
    pub fn large_inflated(max: usize) -> Self {
        let message = format!("the body has more than {max} bytes decompressed; split the request");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
    }

    pub fn broken_gzip(problem: &str) -> Self {
        let message = format!(
            "`content-encoding` declares gzip, but the body is not valid gzip data: {problem}"
        );
        Self::new(StatusCode::BAD_REQUEST, "invalid_request", message)
    }

    pub fn encoding(found: &str) -> Self {
        let found = excerpt(found);
        let message = format!(
            "`content-encoding` is `{found}`; expected gzip or identity, or no such header"
        );
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        Self::new(status, "unsupported_encoding", message)
    }

    pub fn origin(found: &str) -> Self {
        let found = excerpt(found);
        let message = format!(
            "pages of `{found}` may not use this server; to allow them, start it with --cors-origin {found}"
        );
        Self::new(StatusCode::FORBIDDEN, "origin_not_allowed", message)
    }

    pub fn slow_body(within: Duration) -> Self {
        let seconds = within.as_secs_f64();
        let message = format!("the body did not arrive within {seconds} s; send it faster");
        Self::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", message)
    }

    /// Creates an error for a body that arrives too slowly: fewer than `expected` bytes arrived in a period of length `within`.
    pub fn stalled_body(expected: usize, within: Duration) -> Self {
        let seconds = within.as_secs_f64();
        let found = match expected {
            0 | 1 => "no byte of the body".to_owned(),
            n => format!("fewer than {n} bytes of the body"),
        };
        let message = format!("{found} arrived within {seconds} s; send it faster");
        Self::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", message)
    }

    pub fn broken_body(problem: &str) -> Self {
        let message = format!("the body ended early: {problem}");
        Self::new(StatusCode::BAD_REQUEST, "invalid_request", message)
    }

    pub fn json(error: &serde_json::Error) -> Self {
        let problem = error.to_string();
        let problem = without_middle(&problem, MAX_QUOTED);
        let message = format!("the body is not a JSON object that this route takes: {problem}");
        Self::new(StatusCode::BAD_REQUEST, "invalid_request", message)
    }

    pub fn reload(error: &ReloadError) -> Self {
        let (status, code) = match error {
            ReloadError::Fixed => (StatusCode::NOT_FOUND, "not_reloadable"),
            ReloadError::Busy => (StatusCode::CONFLICT, "busy"),
            ReloadError::Failed { .. } => (StatusCode::INTERNAL_SERVER_ERROR, "reload_failed"),
        };
        Self::new(status, code, error.to_string())
    }

    pub fn not_ready(why: &'static str) -> Self {
        ServeError::NotReady { why }.into()
    }

    pub fn response(self, style: Style) -> Response<Body> {
        let Self {
            status,
            code,
            param,
            message,
            ..
        } = &self;
        let message = &*without_middle(message, MAX_MESSAGE);
        let kind = match status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            400..500 => "invalid_request_error",
            _ => "server_error",
        };
        let mut response = match style {
            Style::OpenAi => json(
                *status,
                &json!({"error": {"message": message, "type": kind, "param": param, "code": code}}),
            ),
            Style::Cohere => json(*status, &json!({"message": message})),
            Style::Tei => {
                // text-embeddings-inference has its own names and status codes of errors.
                let (status, kind) = match (status.as_u16(), *code) {
                    (400, "invalid_request") => (StatusCode::UNPROCESSABLE_ENTITY, "tokenizer"),
                    (413, _) => (*status, "validation"),
                    (429, _) => (*status, "overloaded"),
                    (503, _) => (*status, "unhealthy"),
                    (500, _) => (StatusCode::FAILED_DEPENDENCY, "backend"),
                    _ => (*status, *code),
                };
                json(status, &json!({"error": message, "error_type": kind}))
            }
        };
        let headers = response.headers_mut();
        if let Some(after) = self.retry_after {
            let seconds = after.as_secs_f64().ceil().max(1.0) as u64;
            let ms = after.as_millis().max(1) as u64;
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
            let name = HeaderName::from_static("retry-after-ms");
            headers.insert(name, HeaderValue::from(ms));
        }
        if self.status == StatusCode::UNSUPPORTED_MEDIA_TYPE {
            headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip, identity"));
        }
        let allow = self
            .allow
            .and_then(|methods| HeaderValue::from_str(&methods).ok());
        if let Some(allow) = allow {
            headers.insert(ALLOW, allow);
        }
        response
    }
}

impl From<ServeError> for Failure {
    fn from(error: ServeError) -> Self {
        let message = error.to_string();
        let (status, code) = match &error {
            ServeError::Invalid { .. } | ServeError::Input { .. } => {
                (StatusCode::BAD_REQUEST, "invalid_request")
            }
            ServeError::ContextLength { .. } => {
                (StatusCode::BAD_REQUEST, "context_length_exceeded")
            }
            ServeError::TooLong { .. }
            | ServeError::TooLarge { .. }
            | ServeError::LargeRequest { .. } => (StatusCode::PAYLOAD_TOO_LARGE, "too_large"),
            ServeError::Overloaded { .. } | ServeError::Hopeless { .. } => {
                (StatusCode::TOO_MANY_REQUESTS, "overloaded")
            }
            ServeError::ShortDeadline { .. } => {
                (StatusCode::TOO_MANY_REQUESTS, "deadline_too_short")
            }
            ServeError::Deadline => (StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded"),
            ServeError::NotReady { .. } => (StatusCode::SERVICE_UNAVAILABLE, "not_ready"),
            ServeError::NoModel { .. } => (StatusCode::NOT_FOUND, "model_not_found"),
            ServeError::UnsupportedTask { .. } => (StatusCode::NOT_FOUND, "unsupported_task"),
            ServeError::Internal(_) | ServeError::Engine(_) => {
                tracing::error!("{message}");
                (StatusCode::INTERNAL_SERVER_ERROR, "internal")
            }
        };
        let mut failure = Self::new(status, code, message);
        let of_input = |index, problem| {
            Some(Box::new(OfInput {
                subject: Subject::Input,
                index,
                problem,
            }))
        };
        match error {
            ServeError::Invalid { param, .. } | ServeError::ContextLength { param, .. } => {
                failure.param = Some(param.to_owned());
            }
            ServeError::TooLong { index, limit } => {
                failure.of_input = of_input(index, Problem::TooLong(limit));
            }
            ServeError::TooLarge { index } => {
                failure.of_input = of_input(index, Problem::TooLarge);
            }
            ServeError::Input { index, problem } => {
                failure.param = Some("input".to_owned());
                failure.of_input = of_input(index, Problem::Other(problem));
            }
            ServeError::Overloaded { retry_after } | ServeError::Hopeless { retry_after } => {
                failure.retry_after = Some(retry_after);
            }
            ServeError::NotReady { .. } => {
                failure.retry_after = Some(Duration::from_secs(1));
            }
            _ => {}
        }
        failure
    }
}
