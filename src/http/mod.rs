//! HTTP protocol of the server: routes of the APIs of OpenAI, text-embeddings-inference (TEI), Cohere and Jina, routes for tasks without a
//! common API, and routes for load balancers and Prometheus.
//!
//! | route | requests and responses |
//! |---|---|
//! | `POST /v1/embeddings` | input: a text, a list of texts, token ids, or lists of token ids; output: `float`, `base64` or raw bytes; `dimensions`, types of values, prompts |
//! | `POST /v1/completions`, `POST /v1/chat/completions` | whole responses or server-sent events; `n`, `logprobs` |
//! | `POST /v1/translate` | translations, whole or as server-sent events |
//! | `POST /embed`, `/embed_all`, `/embed_sparse`, `/predict`, `/rerank`, `/similarity`, `/tokenize`, `/decode`, `GET /info` | TEI's request and response formats |
//! | `POST /` | the TEI route that fits the model and the body |
//! | `POST /v2/embed` | Cohere's request and response format |
//! | `POST /v1/multi-vector` | Jina's request and response format for token vectors |
//! | `POST /v1/rerank`, `/v2/rerank` | Jina's and Cohere's request and response formats |
//! | `POST /v1/token-classification`, `/v1/fill-mask`, `/v1/zero-shot-classification`, `/v1/question-answering`, `/predict_tokens` | task heads |
//! | `GET /v1/models`, `/v1/models/{model}`, `/health`, `/ready`, `/metrics`, `/openapi.json` | |
//! | `GET /`, `/status.json` | the status page and its data |
//!
//! A route is a row of `Route::ALL`, two arms in `dispatch.rs`, and two functions in the file of its API: a handler, and a function that
//! returns its documentation with the schema of the body. The schema determines which fields of a body are accepted. Every body is limited
//! in size and time. No input from a client causes a panic.

mod auth;
mod bodies;
mod body;
mod chunks;
mod cohere;
mod cors;
mod dispatch;
mod embeddings;
mod error;
mod fields;
mod framing;
mod generation;
mod gzip;
mod heads;
mod health;
mod host;
mod late;
mod metrics;
mod openai;
mod openapi;
mod ranking;
mod received;
mod request;
mod route;
mod schema;
mod server;
mod socket;
mod status;
mod tei;
#[cfg(test)]
mod tests;
mod tokens;
mod transfer;
mod translation;
mod vectors;
mod weight;

use std::{
    future::{Future, poll_fn},
    ops::Deref,
    pin::pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::Body as _,
    header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderValue},
};

use auth::Tenant;
pub use auth::{Keys, KeysError};
#[doc(hidden)]
pub use bodies::Bodies;
pub use cors::{Origin, OriginError};
pub use server::{Ended, Server};
use tokio::{
    sync::{Semaphore, watch},
    task::block_in_place,
};

use crate::serve::{Memory, Model, Models, OutputKind, ServeError, Share, Submit};
use body::Body;
use error::Failure;
use fields::FieldTable;
use gzip::Encoding;
use metrics::Counts;
use request::Fields;
use route::Route;
use transfer::Upload;

/// Options of the HTTP server.
#[derive(Clone, Debug)]
pub struct HttpChoice {
    /// Max bytes of a request body.
    pub max_body: usize,
    /// Default time limit of a request. A request can set its own limit.
    pub timeout: Duration,
    /// Time limit for a client to send the headers of a request.
    pub header_time: Duration,
    /// Time limit for a client to send the body of a request.
    pub body_time: Duration,
    /// Max time for which a client may pause while it sends a body. The server checks the progress of the body in periods of this length.
    /// At least one byte must arrive in each period. Once 256 KiB of the body have arrived, at least 64 KiB must arrive in each period.
    pub body_pause: Duration,
    /// Max idle time of a connection between two requests. It should exceed the idle time of proxies in front of the server. Otherwise a
    /// proxy can send a request on a connection that the server is closing, and the request is lost.
    pub idle_time: Duration,
    /// Max time for which a client may stop reading a response.
    pub write_time: Duration,
    /// API keys. If `None`, requests need no key.
    pub keys: Option<Keys>,
    /// Routes that need no key.
    pub public: Public,
    /// Origins of web pages that may use the server (CORS).
    pub cors: Vec<Origin>,
    /// Whether inputs that are too long are truncated if the request does not specify this.
    pub auto_truncate: bool,
    /// Whether `/predict` computes scores like TEI: with a sigmoid for a single label and a softmax for several, whatever the model's
    /// folder specifies.
    pub tei_scores: bool,
    /// Time for which requests are still accepted after `/ready` has begun to fail.
    pub drain_delay: Duration,
    /// Time after `drain_delay` within which in-flight requests must finish.
    pub drain_limit: Duration,
    /// Worker threads for connections.
    pub threads: usize,
}

impl Default for HttpChoice {
    fn default() -> Self {
        Self {
            max_body: 8 << 20,
            timeout: Duration::from_secs(60),
            header_time: Duration::from_secs(10),
            body_time: Duration::from_secs(30),
            body_pause: Duration::from_secs(5),
            idle_time: Duration::from_secs(75),
            write_time: Duration::from_secs(30),
            keys: None,
            public: Public::All,
            cors: Vec::new(),
            auto_truncate: false,
            tei_scores: false,
            drain_delay: Duration::from_secs(5),
            drain_limit: Duration::from_secs(25),
            threads: 2,
        }
    }
}

/// Routes that need no key on a server with API keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Public {
    /// No route.
    None,
    /// `/health` and `/ready`.
    Health,
    /// All routes for load balancers and monitoring. In addition to `/health` and `/ready`, these are the metrics, the status page and its
    /// data, and the OpenAPI document.
    All,
}

impl Public {
    /// Returns whether `route` needs no key.
    fn contains(self, route: Route) -> bool {
        match self {
            Self::None => false,
            Self::Health => matches!(route, Route::Health | Route::Ready),
            Self::All => route.is_monitoring(),
        }
    }
}

/// State shared by all connections.
struct App {
    models: Models,
    choice: HttpChoice,
    fields: &'static FieldTable,
    counts: Counts,
    /// Limits the number of chat templates that are rendered concurrently.
    rendering: Arc<Semaphore>,
    memory: Memory,
    next_id: AtomicU64,
    /// Set to true to abort all requests in progress.
    cut: watch::Sender<bool>,
    /// Whether a reload requested by SIGHUP waits for another reload to finish.
    reload_waits: AtomicBool,
    began: Instant,
    /// Start time in microseconds. Request ids begin with it, so that they differ between servers and between starts.
    started: u64,
}

/// A request in progress. All fields except `app` are set while the request is handled.
struct RequestContext<'a> {
    app: &'a App,
    model: OnceLock<Arc<Model>>,
    /// Time when the computed values of the response were ready, before serialization.
    has_values: OnceLock<Instant>,
    /// Share of the server's memory that is charged for the request.
    share: OnceLock<Arc<Share>>,
}

impl Deref for RequestContext<'_> {
    type Target = App;

    fn deref(&self) -> &App {
        self.app
    }
}

/// Max number of conversations that are rendered concurrently. Each rendering may use memory up to the limit for a chat template.
const MAX_RENDERINGS: usize = 4;
/// Size in bytes above which parsing a body may block a thread for more than a millisecond.
const LARGE: usize = 128 << 10;

type HandlerResult = Result<Response<Body>, Failure>;

impl App {
    fn new(models: Models, choice: HttpChoice) -> Self {
        let started = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            memory: Memory::new(choice.max_body as u64),
            models,
            choice,
            fields: dispatch::field_table(),
            counts: Counts::default(),
            rendering: Arc::new(Semaphore::new(MAX_RENDERINGS)),
            next_id: AtomicU64::new(0),
            cut: watch::Sender::new(false),
            reload_waits: AtomicBool::new(false),
            began: Instant::now(),
            started: started.map_or(0, |since| since.as_micros() as u64),
        }
    }

    /// Handles a request. Errors are converted to responses.
    async fn answer(self: Arc<Self>, request: Request<Upload>) -> Response<Body> {
        let began = Instant::now();
        let (route, method, _) = Route::of(request.uri().path(), request.method());
        let methods: Vec<Method> = Route::all_of(request.uri().path())
            .map(|(_, method, _)| method)
            .collect();
        let allowed = cors::allowed(&self.choice.cors, request.headers());
        let is_preflight = request.method() == Method::OPTIONS
            && !self.choice.cors.is_empty()
            && route != Route::Unknown;
        let style = route.style();
        let id = self.request_id(request.headers());
        // HEAD is handled like GET. hyper then omits the body.
        let is_head = request.method() == Method::HEAD && method == Method::GET;
        // Parsing a large body may block this thread for a long time. `block_in_place` moves the other connections of this thread to other
        // threads.
        let length = request.body().size_hint().exact();
        let is_coded = request.headers().contains_key(CONTENT_ENCODING);
        let is_large =
            method == Method::POST && (is_coded || length.is_none_or(|bytes| bytes > LARGE as u64));
        let asking = RequestContext::of(&self);
        let answered = match request.method() == method || is_head || route == Route::Unknown {
            false if is_preflight => {
                cors::preflight(&self.choice.cors, request.headers(), &methods)
            }
            true => {
                let mut routed = pin!(asking.routed(route, request, began));
                let mut cut = pin!(server::ends(self.cut.subscribe()));
                let mut poll = |context: &mut Context<'_>| match is_large {
                    true => block_in_place(|| routed.as_mut().poll(context)),
                    false => routed.as_mut().poll(context),
                };
                poll_fn(|context| match poll(context) {
                    Poll::Ready(answered) => Poll::Ready(answered),
                    Poll::Pending => {
                        let cut = cut.as_mut().poll(context);
                        cut.map(|()| Err(Failure::not_ready("it is shutting down")))
                    }
                })
                .await
            }
            false => Err(Failure::method(request.method(), &methods)),
        };
        let mut response = match answered {
            Ok(response) => match asking.share.get() {
                // The body keeps the request's share of memory until the last byte of the response is sent.
                Some(share) => response.map(|body| body.holding(share)),
                None => response,
            },
            Err(failure) => failure.response(style),
        };
        if let Ok(id) = HeaderValue::from_str(&id) {
            response.headers_mut().insert("x-request-id", id);
        }
        cors::mark(&self.choice.cors, allowed, response.headers_mut());
        asking.count(route, response.status(), began);
        response
    }
}

impl<'a> RequestContext<'a> {
    fn of(app: &'a App) -> Self {
        Self {
            app,
            model: OnceLock::new(),
            has_values: OnceLock::new(),
            share: OnceLock::new(),
        }
    }

    /// Returns the request's share of memory. Before the body has been read, this is an empty share.
    fn share(&self) -> &Arc<Share> {
        self.share.get_or_init(|| self.memory.empty_share())
    }

    /// Records the model of the request, if `found` contains one. Returns `found` unchanged.
    fn asks(&self, found: Result<Arc<Model>, ServeError>) -> Result<Arc<Model>, ServeError> {
        if let Ok(model) = &found {
            let _ = self.model.set(Arc::clone(model));
        }
        found
    }

    /// Records that the computed values are ready, before the caller serializes them.
    fn has_values(&self) {
        let _ = self.has_values.set(Instant::now());
    }

    fn count(&self, route: Route, status: StatusCode, began: Instant) {
        let model = self.model.get();
        let name = model.map(|model| model.name.as_str());
        self.counts.add(route, name, status, began.elapsed());
        if let (Some(model), Some(since)) = (model, self.has_values.get()) {
            let seconds = since.elapsed().as_secs_f64();
            model.metrics().serialize.add(seconds);
        }
    }

    async fn routed(
        &self,
        route: Route,
        request: Request<Upload>,
        began: Instant,
    ) -> HandlerResult {
        let tenant = match (&self.choice.keys, self.choice.public.contains(route)) {
            (Some(keys), false) => keys.tenant(request.headers())?,
            _ => Tenant::default(),
        };
        if let Some(answered) = dispatch::without_body(self, route, &request) {
            return answered;
        }
        let timeout = self.timeout(request.headers())?;
        let left = || timeout.saturating_sub(began.elapsed());
        let class = class(request.headers())?.min(tenant.max_priority);
        let is_raw = openai::wants_raw(request.headers());
        let late = |_| Failure::from(ServeError::Deadline);
        let encoding = Encoding::from_headers(request.headers())?;
        let received = tokio::time::timeout(left(), self.body(request, encoding)).await;
        let mut body = received.map_err(late)??;
        body.bytes = encoding.decoded(body.bytes, self.choice.max_body)?;
        let weight = self.memory.request(weight::weight(&body.bytes));
        let share = tokio::time::timeout(left(), weight).await.map_err(late)??;
        let _ = self.share.set(share);
        let fields = Fields::read(self.fields, route, body.charged())?;
        let submit = Submit {
            truncate: self.choice.auto_truncate,
            cut_side: None,
            prompt: None,
            within: Some(left()),
            class,
            tenant: tenant.number,
            wanted: OutputKind::Usual,
            is_joint: true,
        };
        // At the time limit, the future is dropped, which cancels everything that it waits for.
        match tokio::time::timeout(left(), self.of_body(route, fields, submit, is_raw)).await {
            Ok(answered) => answered,
            Err(_) => Err(ServeError::Deadline.into()),
        }
    }

    /// Handles a request whose body has been parsed. Completes the message of an error about an input, because the message depends on the
    /// route.
    async fn of_body(
        &self,
        route: Route,
        fields: Fields,
        submit: Submit,
        is_raw: bool,
    ) -> HandlerResult {
        let handled = dispatch::handled(self, route, fields, submit, is_raw).await;
        handled.map_err(|failure| failure.on(route))
    }
}

impl App {
    /// Returns the time limit of a request: from its headers, or else the default.
    fn timeout(&self, headers: &HeaderMap) -> Result<Duration, Failure> {
        for name in ["x-request-timeout-ms", "x-envoy-expected-rq-timeout-ms"] {
            let Some(value) = headers.get(name) else {
                continue;
            };
            let ms = value
                .to_str()
                .ok()
                .and_then(|text| text.trim().parse().ok());
            let ms = ms
                .filter(|ms| (1..=86_400_000).contains(ms))
                .ok_or_else(|| {
                    let problem = format!(
                        "the header {name} is not a number of milliseconds from 1 to 86400000"
                    );
                    Failure::invalid(name, problem)
                })?;
            return Ok(Duration::from_millis(ms));
        }
        Ok(self.choice.timeout)
    }

    /// Returns the id that the client sent if it has 1 to 128 characters, and a new id otherwise.
    fn request_id(&self, headers: &HeaderMap) -> String {
        let given = headers.get("x-request-id").and_then(|id| id.to_str().ok());
        match given.filter(|id| (1..=128).contains(&id.len())) {
            Some(id) => id.to_owned(),
            None => self.new_id("req"),
        }
    }

    /// Returns a seed that no other request of this server gets.
    fn new_seed(&self) -> u64 {
        let n = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.started.wrapping_add(n)
    }

    fn new_id(&self, kind: &str) -> String {
        let n = self.next_id.fetch_add(1, Ordering::Relaxed);
        format!("{kind}-{:012x}{n:08x}", self.started & 0xffff_ffff_ffff)
    }
}

/// Returns the priority of a request, which is 0 without an `x-priority` header.
fn class(headers: &HeaderMap) -> Result<u8, Failure> {
    let Some(value) = headers.get("x-priority") else {
        return Ok(0);
    };
    let class = value
        .to_str()
        .ok()
        .and_then(|text| text.trim().parse().ok());
    class.ok_or_else(|| {
        let problem = "the header x-priority is not a whole number from 0 to 255".to_owned();
        Failure::invalid("x-priority", problem)
    })
}

/// Decodes the percent escapes of a path.
fn unescaped(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let digits = after.get(..2).and_then(|two| std::str::from_utf8(two).ok());
        let escaped = digits.and_then(|two| u8::from_str_radix(two, 16).ok());
        match escaped.filter(|_| byte == b'%') {
            Some(escaped) => {
                bytes.push(escaped);
                rest = &after[2..];
            }
            None => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Runs blocking work on a thread that does not serve connections.
async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| ServeError::Internal(e.to_string()).into())
}

fn json(status: StatusCode, value: &impl serde::Serialize) -> Response<Body> {
    match serde_json::to_vec(value) {
        Ok(bytes) => of_type(status, "application/json", bytes),
        // This branch is unreachable, because the values of this crate can always be serialized.
        Err(_) => of_type(
            StatusCode::INTERNAL_SERVER_ERROR,
            "application/json",
            b"{}".to_vec(),
        ),
    }
}

fn of_type(status: StatusCode, kind: &'static str, bytes: Vec<u8>) -> Response<Body> {
    let mut response = Response::new(Body::whole(bytes));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static(kind);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}
