//! The protocols of a server: the routes of OpenAI's API, of text-embeddings-inference (TEI), and those that a balancer and
//! Prometheus ask.
//!
//! | route | |
//! |---|---|
//! | `POST /v1/embeddings` | a text, a list, token ids, lists of them; `float`, `base64` or raw bytes; `dimensions` |
//! | `POST /v1/completions`, `POST /v1/chat/completions` | whole, or as server-sent events; `n`, `logprobs` |
//! | `POST /embed`, `/embed_all`, `/embed_sparse`, `/predict`, `/rerank`, `/similarity`, `/tokenize`, `/decode`, `GET /info` | TEI's shapes |
//! | `POST /` | the TEI route that fits the model and the body |
//! | `POST /v1/rerank`, `/v2/rerank` | Jina's and Cohere's shapes |
//! | `GET /v1/models`, `/v1/models/{model}`, `/health`, `/ready`, `/metrics`, `/openapi.json` | |
//! | `GET /`, `/status.json` | the status page, and what it shows |
//!
//! A route is a line in `Route::ALL` and a function; what it answers to errors is its `Style`, and what it takes and gives is
//! told to clients in `openapi.rs`. Every body is within a limit and a time, and nothing that comes from outside panics.

mod auth;
mod bodies;
mod body;
mod cors;
mod embeddings;
mod error;
mod fields;
mod gzip;
mod health;
mod host;
mod metrics;
mod openai;
mod openapi;
mod received;
mod request;
mod server;
mod socket;
mod status;
mod tei;
#[cfg(test)]
mod tests;
mod transfer;
mod weight;
mod writing;

use std::{
    future::{Future, poll_fn},
    ops::Deref,
    pin::pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
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

use crate::serve::{self, Memory, Model, Models, ServeError, Share, Submit, Wanted};
use body::Body;
use error::{Failure, Style};
use gzip::Encoding;
use metrics::Counts;
use request::Fields;
use transfer::Upload;

/// How a server speaks.
#[derive(Clone, Debug)]
pub struct HttpChoice {
    /// Bytes of a body at most.
    pub most_body: usize,
    /// How long a request is of use where it does not say so itself.
    pub timeout: Duration,
    /// How long a client may take to send headers, and a body.
    pub header_time: Duration,
    pub body_time: Duration,
    /// How long a connection may be idle between two requests: longer than those before the server keep theirs, as one that closes while a
    /// request is on the way loses it.
    pub idle_time: Duration,
    /// How long it may take none of the bytes of an answer.
    pub write_time: Duration,
    /// Who may ask; `None` for everybody.
    pub keys: Option<Keys>,
    /// Which routes need no key.
    pub public: Public,
    /// Origins of web pages that may use the server.
    pub cors: Vec<Origin>,
    /// Whether texts that are too long are cut where a request does not say.
    pub auto_truncate: bool,
    /// Whether `/predict` scores by a sigmoid of one label and a softmax of several, as TEI does, whatever the folder asks for.
    pub tei_scores: bool,
    /// How long requests are taken on after the server has said that it is not ready.
    pub drain_delay: Duration,
    /// How long requests that run have then.
    pub drain_limit: Duration,
    /// Threads for connections.
    pub threads: usize,
}

impl Default for HttpChoice {
    fn default() -> Self {
        Self {
            most_body: 8 << 20,
            timeout: Duration::from_secs(60),
            header_time: Duration::from_secs(10),
            body_time: Duration::from_secs(30),
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

/// The routes that need no key where others do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Public {
    /// No route.
    None,
    /// `/health` and `/ready`.
    Health,
    /// All routes of balancers and monitors: metrics, the status page and its counts, and the OpenAPI document, too.
    All,
}

impl Public {
    /// Whether a route needs no key.
    fn contains(self, route: Route) -> bool {
        match self {
            Self::None => false,
            Self::Health => matches!(route, Route::Health | Route::Ready),
            Self::All => route.is_monitoring(),
        }
    }
}

/// What all connections share.
struct App {
    models: Models,
    choice: HttpChoice,
    counts: Counts,
    /// Limits the chat templates that are rendered at the same time.
    rendering: Arc<Semaphore>,
    memory: Memory,
    next_id: AtomicU64,
    /// Whether what still runs is given up.
    cut: watch::Sender<bool>,
    began: Instant,
    /// The first digits of ids, which tell servers and starts apart.
    started: u64,
}

/// What is asked, by path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    Embeddings,
    Completions,
    ChatCompletions,
    Embed,
    EmbedAll,
    EmbedSparse,
    Predict,
    TeiRerank,
    Similarity,
    Tokenize,
    Decode,
    Rerank,
    RerankV2,
    Info,
    Models,
    Model,
    Health,
    Ready,
    Metrics,
    OpenApi,
    Page,
    Base,
    Status,
    Unknown,
}

impl Route {
    const ALL: [(Route, &'static str, Method); 23] = [
        (Route::Embeddings, "/v1/embeddings", Method::POST),
        (Route::Completions, "/v1/completions", Method::POST),
        (Route::ChatCompletions, "/v1/chat/completions", Method::POST),
        (Route::Embed, "/embed", Method::POST),
        (Route::EmbedAll, "/embed_all", Method::POST),
        (Route::EmbedSparse, "/embed_sparse", Method::POST),
        (Route::Predict, "/predict", Method::POST),
        (Route::TeiRerank, "/rerank", Method::POST),
        (Route::Similarity, "/similarity", Method::POST),
        (Route::Tokenize, "/tokenize", Method::POST),
        (Route::Decode, "/decode", Method::POST),
        (Route::Rerank, "/v1/rerank", Method::POST),
        (Route::RerankV2, "/v2/rerank", Method::POST),
        (Route::Info, "/info", Method::GET),
        (Route::Models, "/v1/models", Method::GET),
        (Route::Model, "/v1/models/{model}", Method::GET),
        (Route::Health, "/health", Method::GET),
        (Route::Ready, "/ready", Method::GET),
        (Route::Metrics, "/metrics", Method::GET),
        (Route::OpenApi, "/openapi.json", Method::GET),
        (Route::Page, "/", Method::GET),
        (Route::Base, "/", Method::POST),
        (Route::Status, "/status.json", Method::GET),
    ];

    /// What stands in the variable place of a path; `None` where it is another path.
    fn matched<'p>(known: &str, path: &'p str) -> Option<&'p str> {
        match known.split_once('{') {
            None => (known == path).then_some(""),
            Some((before, _)) => path.strip_prefix(before).filter(|rest| !rest.is_empty()),
        }
    }

    /// The routes of a path with their methods.
    fn all_of(path: &str) -> impl Iterator<Item = (Self, Method, &str)> {
        Self::ALL
            .into_iter()
            .filter_map(move |(route, known, method)| {
                Some((route, method, Self::matched(known, path)?))
            })
    }

    /// The route of a path and a method, its own method, and what stands in the path's variable place. A method that the path does
    /// not have gives the first route of the path.
    fn of<'p>(path: &'p str, method: &Method) -> (Self, Method, &'p str) {
        let exact = Self::all_of(path).find(|(_, own, _)| own == method);
        let found = exact.or_else(|| Self::all_of(path).next());
        found.unwrap_or((Self::Unknown, Method::GET, ""))
    }

    fn name(self) -> &'static str {
        let found = Self::ALL.iter().find(|(route, ..)| *route == self);
        found.map_or("other", |(_, name, _)| name)
    }

    /// The name that tells the route apart in metrics.
    fn label(self) -> &'static str {
        match self {
            Self::Base => "POST /",
            route => route.name(),
        }
    }

    fn style(self) -> Style {
        match self {
            Self::Embed
            | Self::EmbedAll
            | Self::EmbedSparse
            | Self::Predict
            | Self::TeiRerank
            | Self::Similarity
            | Self::Tokenize
            | Self::Decode
            | Self::Base
            | Self::Info => Style::Tei,
            Self::RerankV2 => Style::Cohere,
            _ => Style::OpenAi,
        }
    }

    /// Whether it is for balancers and monitors.
    fn is_monitoring(self) -> bool {
        matches!(
            self,
            Self::Health | Self::Ready | Self::Metrics | Self::OpenApi | Self::Page | Self::Status
        )
    }
}

/// A request while it is answered: what it turns out to ask of a server.
struct Asking<'a> {
    app: &'a App,
    model: OnceLock<Arc<Model>>,
    /// When the values of its answer were there.
    has_values: OnceLock<Instant>,
    /// The memory that it is charged for.
    share: OnceLock<Arc<Share>>,
}

impl Deref for Asking<'_> {
    type Target = App;

    fn deref(&self) -> &App {
        self.app
    }
}

/// Conversations that are written down at once, each within the memory bound of a chat template.
const MAX_RENDERINGS: usize = 4;
/// Bytes of a body of which reading and answering takes a millisecond and more.
const LARGE: usize = 128 << 10;

type Answered = Result<Response<Body>, Failure>;

impl App {
    fn new(models: Models, choice: HttpChoice) -> Self {
        let started = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            memory: Memory::new(choice.most_body as u64),
            models,
            choice,
            counts: Counts::default(),
            rendering: Arc::new(Semaphore::new(MAX_RENDERINGS)),
            next_id: AtomicU64::new(0),
            cut: watch::Sender::new(false),
            began: Instant::now(),
            started: started.map_or(0, |since| since.as_micros() as u64),
        }
    }

    /// Answers a request, whatever is in it.
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
        // Who asks for a head alone is answered as if it asked for all; hyper leaves the body out.
        let is_head = request.method() == Method::HEAD && method == Method::GET;
        // What takes long to read and to write down leaves its thread to other connections.
        let length = request.body().size_hint().exact();
        let is_coded = request.headers().contains_key(CONTENT_ENCODING);
        let is_large =
            method == Method::POST && (is_coded || length.is_none_or(|bytes| bytes > LARGE as u64));
        let asking = Asking::of(&self);
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
                // The answer counts until its last byte was sent.
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

impl<'a> Asking<'a> {
    fn of(app: &'a App) -> Self {
        Self {
            app,
            model: OnceLock::new(),
            has_values: OnceLock::new(),
            share: OnceLock::new(),
        }
    }

    /// The memory that the request is charged for.
    fn share(&self) -> &Arc<Share> {
        self.share.get_or_init(|| self.memory.empty_share())
    }

    /// Notes the model that is asked, if there is one.
    fn asks(&self, found: Result<Arc<Model>, ServeError>) -> Result<Arc<Model>, ServeError> {
        if let Ok(model) = &found {
            let _ = self.model.set(Arc::clone(model));
        }
        found
    }

    /// The answer's values are there, and are written down from now on.
    fn has_values(&self) {
        let _ = self.has_values.set(Instant::now());
    }

    fn count(&self, route: Route, status: StatusCode, began: Instant) {
        let model = self.model.get();
        let name = model.map(|model| model.name.as_str());
        self.counts.add(route, name, status, began.elapsed());
        if let (Some(model), Some(since)) = (model, self.has_values.get()) {
            let seconds = since.elapsed().as_secs_f64();
            model.metrics().serialise.add(seconds);
        }
    }

    async fn routed(&self, route: Route, request: Request<Upload>, began: Instant) -> Answered {
        let tenant = match (&self.choice.keys, self.choice.public.contains(route)) {
            (Some(keys), false) => keys.tenant(request.headers())?,
            _ => Tenant::default(),
        };
        match route {
            Route::Health => return Ok(health::health()),
            Route::Ready => return health::ready(&self.models),
            Route::Metrics => return Ok(metrics::response(self.app)),
            Route::OpenApi => {
                let document = openapi::document(self.choice.public);
                return Ok(json(StatusCode::OK, &document));
            }
            Route::Page => return Ok(status::page()),
            Route::Status => return Ok(status::counts(self.app)),
            Route::Unknown => return Err(Failure::no_route(request.uri().path())),
            _ if !self.models.is_loaded() => return Err(Failure::not_ready(serve::LOADING)),
            Route::Models => return Ok(openai::models(&self.models)),
            Route::Model => {
                let (.., name) = Route::of(request.uri().path(), request.method());
                return openai::model(&self.models, &unescaped(name));
            }
            Route::Info => return tei::info(&self.models),
            _ => {}
        }
        let timeout = self.timeout(request.headers())?;
        let left = || timeout.saturating_sub(began.elapsed());
        let class = class(request.headers())?.min(tenant.max_priority);
        let is_raw = openai::wants_raw(request.headers());
        let late = |_| Failure::from(ServeError::Deadline);
        let encoding = Encoding::from_headers(request.headers())?;
        let received = tokio::time::timeout(left(), self.body(request, encoding)).await;
        let mut body = received.map_err(late)??;
        body.bytes = encoding.decoded(body.bytes, self.choice.most_body)?;
        let weight = self.memory.request(weight::weight(&body.bytes));
        let share = tokio::time::timeout(left(), weight).await.map_err(late)??;
        let _ = self.share.set(share);
        let fields = Fields::read(route, body.charged())?;
        let submit = Submit {
            truncate: self.choice.auto_truncate,
            cut_side: None,
            prompt: None,
            within: Some(left()),
            class,
            tenant: tenant.number,
            wanted: Wanted::Usual,
        };
        // What is given up cancels what waits for it.
        match tokio::time::timeout(left(), self.of_body(route, fields, submit, is_raw)).await {
            Ok(answered) => answered,
            Err(_) => Err(ServeError::Deadline.into()),
        }
    }

    /// Answers a request that has a body.
    async fn of_body(
        &self,
        route: Route,
        fields: Fields,
        submit: Submit,
        is_raw: bool,
    ) -> Answered {
        match route {
            Route::Embeddings => openai::embeddings(self, fields, submit, is_raw).await,
            Route::Completions => writing::completions(self, fields, submit).await,
            Route::ChatCompletions => writing::chat(self, fields, submit).await,
            Route::Embed => tei::embed(self, fields, submit).await,
            Route::EmbedAll => tei::embed_all(self, fields, submit).await,
            Route::EmbedSparse => tei::embed_sparse(self, fields, submit).await,
            Route::Similarity => tei::similarity(self, fields, submit).await,
            Route::Tokenize => tei::tokenize(self, fields).await,
            Route::Decode => tei::decode(self, fields).await,
            Route::Predict => tei::predict(self, fields, submit).await,
            Route::TeiRerank => tei::rerank(self, fields, submit).await,
            Route::RerankV2 => openai::rerank_v2(self, fields, submit).await,
            Route::Base => tei::base(self, fields, submit).await,
            _ => openai::rerank(self, fields, submit).await,
        }
    }
}

impl App {
    /// The time that an answer is of use.
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
                        "the header {name} is no number of milliseconds from 1 to 86400000"
                    );
                    Failure::invalid(name, problem)
                })?;
            return Ok(Duration::from_millis(ms));
        }
        Ok(self.choice.timeout)
    }

    /// The id that the client gave, if it is one, or a new one.
    fn request_id(&self, headers: &HeaderMap) -> String {
        let given = headers.get("x-request-id").and_then(|id| id.to_str().ok());
        match given.filter(|id| (1..=128).contains(&id.len())) {
            Some(id) => id.to_owned(),
            None => self.new_id("req"),
        }
    }

    /// A seed that no other request has.
    fn new_seed(&self) -> u64 {
        let n = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.started.wrapping_add(n)
    }

    fn new_id(&self, kind: &str) -> String {
        let n = self.next_id.fetch_add(1, Ordering::Relaxed);
        format!("{kind}-{:012x}{n:08x}", self.started & 0xffff_ffff_ffff)
    }
}

/// What a request matters beside others.
fn class(headers: &HeaderMap) -> Result<u8, Failure> {
    let Some(value) = headers.get("x-priority") else {
        return Ok(0);
    };
    let class = value
        .to_str()
        .ok()
        .and_then(|text| text.trim().parse().ok());
    class.ok_or_else(|| {
        let problem = "the header x-priority is no whole number from 0 to 255".to_owned();
        Failure::invalid("x-priority", problem)
    })
}

/// What `%2F` and its like stand for in a path.
fn unescaped(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, behind)) = rest.split_first() {
        let digits = behind
            .get(..2)
            .and_then(|two| std::str::from_utf8(two).ok());
        let escaped = digits.and_then(|two| u8::from_str_radix(two, 16).ok());
        match escaped.filter(|_| byte == b'%') {
            Some(escaped) => {
                bytes.push(escaped);
                rest = &behind[2..];
            }
            None => {
                bytes.push(byte);
                rest = behind;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Does what takes long on a thread where no connection waits for it.
async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| ServeError::Internal(e.to_string()).into())
}

/// A response in JSON.
fn json(status: StatusCode, value: &impl serde::Serialize) -> Response<Body> {
    match serde_json::to_vec(value) {
        Ok(bytes) => of_type(status, "application/json", bytes),
        // Values of this crate are all JSON; a number that is none was refused before.
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
