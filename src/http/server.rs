//! Accepting, serving and shutting down connections.

use std::{
    convert::Infallible,
    future::{Future, poll_fn},
    io,
    net::{SocketAddr, TcpListener},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::{Duration, Instant},
};

use hyper::{
    Method, Request, Response, StatusCode, Version,
    body::Incoming,
    header::{CONNECTION, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::json;
use tokio::{
    net::{TcpListener as Listener, TcpStream},
    runtime::{Builder, Runtime},
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{Sleep, sleep},
};

use super::{
    App, Body, HttpChoice, Keys, Route,
    error::Failure,
    host, json, on_thread,
    route::Style,
    socket::Socket,
    transfer::{Download, Upload},
};
use crate::serve::{Models, ReloadError};

/// A running server.
pub struct Server {
    runtime: Runtime,
    app: Arc<App>,
    address: SocketAddr,
    /// Set to true to end connections.
    stop: watch::Sender<bool>,
    /// Returns when all connections have ended; never receives a value.
    closed: mpsc::Receiver<()>,
    accepting: JoinHandle<()>,
    /// Handlers that were installed before the first connection was accepted.
    signals: Option<Signals>,
}

/// Handlers of the signals that a server reacts to.
struct Signals {
    term: Signal,
    int: Signal,
    hangup: Signal,
    /// Without a handler, writing beyond the file size limit of the process kills it. With a handler, the write fails.
    _file_size: Signal,
}

impl Signals {
    fn install() -> io::Result<Self> {
        let xfsz = rustix::process::Signal::XFSZ.as_raw();
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            _file_size: signal(SignalKind::from_raw(xfsz))?,
        })
    }
}

/// Reason why a server has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended<E> {
    /// A signal stopped it.
    Asked,
    /// A device was lost.
    DeviceLost,
    /// The models could not be loaded.
    NotLoaded(E),
}

/// Interval between checks for lost devices.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Time for aborted requests to send their error response.
const ABORT_TIME: Duration = Duration::from_secs(1);
/// Time that an idle connection stays open when the server ends. A request that is on its way is answered.
const LINGER: Duration = Duration::from_millis(500);
/// Min time between two warnings about connections that are not accepted.
const WARNINGS: Duration = Duration::from_secs(10);
/// Max bytes of the headers of a request.
const MAX_HEADERS: usize = 64 << 10;

impl Server {
    /// Starts to serve requests on a socket.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be used, or the system cannot start threads.
    pub fn start(socket: TcpListener, models: Models, choice: HttpChoice) -> io::Result<Self> {
        Self::started(socket, models, choice, false)
    }

    /// Like [`start`](Self::start), but first installs the signal handlers of [`Server::run`], so that a client that
    /// gets a response can rely on them.
    ///
    /// # Errors
    /// Same as [`start`](Self::start). Also returns an error if the system does not allow handlers for the signals.
    pub fn start_with_signals(
        socket: TcpListener,
        models: Models,
        choice: HttpChoice,
    ) -> io::Result<Self> {
        Self::started(socket, models, choice, true)
    }

    fn started(
        socket: TcpListener,
        models: Models,
        choice: HttpChoice,
        handles_signals: bool,
    ) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(choice.threads.max(1))
            .thread_name("http")
            .enable_all()
            .build()?;
        socket.set_nonblocking(true)?;
        let address = socket.local_addr()?;
        let app = Arc::new(App::new(models, choice));
        let (stop, stopped) = watch::channel(false);
        let (open, closed) = mpsc::channel(1);
        let shared = Arc::clone(&app);
        let (listener, signals) = {
            let _inside = runtime.enter();
            let signals = handles_signals.then(Signals::install).transpose()?;
            (Listener::from_std(socket)?, signals)
        };
        let until = stopped.clone();
        let accepting = runtime.spawn(accept(listener, until, move |stream| {
            let (app, open) = (Arc::clone(&shared), open.clone());
            let stopped = stopped.clone();
            tokio::spawn(async move {
                serve(app, stream, stopped).await;
                drop(open);
            });
        }));
        Ok(Self {
            runtime,
            app,
            address,
            stop,
            closed,
            accepting,
            signals,
        })
    }

    /// Address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts administrative commands on another socket. `POST /admin/reload` reads the file of keys and loads the
    /// models again. It responds once the last request of the old models has finished. If either step fails, neither
    /// keys nor models change. Commands of web pages are refused.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be used.
    pub fn listen_admin(&self, socket: TcpListener) -> io::Result<SocketAddr> {
        socket.set_nonblocking(true)?;
        let address = socket.local_addr()?;
        let listener = {
            let _inside = self.runtime.enter();
            Listener::from_std(socket)?
        };
        let app = Arc::clone(&self.app);
        let until = self.stop.subscribe();
        self.runtime.spawn(accept(listener, until, move |stream| {
            let app = Arc::clone(&app);
            let service = service_fn(move |request: Request<Incoming>| {
                let app = Arc::clone(&app);
                async move { Ok::<_, Infallible>(app.command(&request).await) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(Duration::from_secs(10))
                .serve_connection(TokioIo::new(stream), service);
            tokio::spawn(connection);
        }));
        Ok(address)
    }

    /// Loads the models with `load`, and serves until SIGTERM or SIGINT. Requests get 503 while the models load. SIGHUP reloads
    /// keys and models. On SIGTERM `/ready` fails at once, requests are accepted during `drain_delay`, and in-flight requests then
    /// have `drain_limit`; SIGINT skips the delay. A signal also stops the server while models load, and a lost device stops it
    /// at any time.
    ///
    /// # Errors
    /// Returns an error if the system does not allow handlers for the signals.
    pub fn run<E: Send + 'static>(
        mut self,
        load: impl FnOnce(&Models) -> Result<(), E> + Send + 'static,
    ) -> io::Result<Ended<E>> {
        let mut delay = self.app.choice.drain_delay;
        let installed = self.signals.take();
        let ended = self.runtime.block_on(async {
            let Signals {
                mut term,
                mut int,
                mut hangup,
                _file_size,
            } = installed.map_or_else(Signals::install, Ok)?;
            let app = Arc::clone(&self.app);
            let mut loading = Some(tokio::task::spawn_blocking(move || load(&app.models)));
            let mut looks = tokio::time::interval(CHECK_INTERVAL);
            loop {
                let happened = poll_fn(|context| {
                    if term.poll_recv(context).is_ready() {
                        return Poll::Ready(Some(Ended::Asked));
                    }
                    // Someone pressed Ctrl-C, so no load balancer routes requests here.
                    if int.poll_recv(context).is_ready() {
                        delay = Duration::ZERO;
                        return Poll::Ready(Some(Ended::Asked));
                    }
                    if let Some(task) = &mut loading
                        && let Poll::Ready(loaded) = Pin::new(task).poll(context)
                    {
                        loading = None;
                        match loaded {
                            Ok(Ok(())) => {}
                            Ok(Err(error)) => return Poll::Ready(Some(Ended::NotLoaded(error))),
                            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
                        }
                    }
                    if looks.poll_tick(context).is_ready() && self.app.models.is_lost() {
                        return Poll::Ready(Some(Ended::DeviceLost));
                    }
                    hangup.poll_recv(context).map(|_| None)
                });
                match happened.await {
                    None => {}
                    Some(Ended::Asked) => {
                        self.hurry_at([term, int]);
                        return io::Result::Ok(Ended::Asked);
                    }
                    Some(ended) => return Ok(ended),
                }
                let app = Arc::clone(&self.app);
                // Not awaited: a signal may arrive during the reload.
                drop(tokio::task::spawn_blocking(move || {
                    if let Err(error) = app.reload() {
                        tracing::error!("{error}");
                    }
                }));
            }
        })?;
        if !self.app.models.is_loaded() {
            delay = Duration::ZERO;
        }
        self.shut_down(delay);
        Ok(ended)
    }

    /// Aborts running requests when a second signal arrives.
    fn hurry_at(&self, mut signals: [Signal; 2]) {
        tracing::warn!("shutting down; a second signal aborts requests that still run");
        let cut = self.app.cut.clone();
        tokio::spawn(async move {
            let second = poll_fn(|context| {
                let mut signals = signals.iter_mut();
                match signals.any(|signal| signal.poll_recv(context).is_ready()) {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                }
            });
            second.await;
            cut.send_replace(true);
        });
    }

    /// Fails `/ready`, accepts requests during `delay`, and waits for in-flight requests. Requests without a response after the
    /// drain limit get 503, and streams that have begun are cut off.
    pub fn shut_down(self, delay: Duration) {
        let limit = self.app.choice.drain_limit;
        self.app.models.retire();
        let (accepting, mut closed) = (self.accepting, self.closed);
        self.runtime.block_on(async move {
            let _ = tokio::time::timeout(delay, ends(self.app.cut.subscribe())).await;
            let _ = self.stop.send(true);
            let _ = accepting.await;
            if tokio::time::timeout(limit, closed.recv()).await.is_err() {
                tracing::warn!("requests that still run after {limit:?} are aborted");
                self.app.cut.send_replace(true);
                let _ = tokio::time::timeout(ABORT_TIME, closed.recv()).await;
            }
        });
        self.runtime.shutdown_timeout(Duration::from_secs(1));
    }
}

/// Accepts connections until `stopped`.
async fn accept(
    listener: Listener,
    stopped: watch::Receiver<bool>,
    mut take: impl FnMut(TcpStream),
) {
    let mut failures = Failures::default();
    loop {
        let mut ends = pin!(ends(stopped.clone()));
        // Accept connections that are already queued, even if the server is about to stop.
        let accepted = poll_fn(|context| match listener.poll_accept(context) {
            Poll::Ready(accepted) => Poll::Ready(Some(accepted)),
            Poll::Pending => ends.as_mut().poll(context).map(|()| None),
        });
        match accepted.await {
            None => return,
            Some(Ok((stream, _))) => {
                let _ = stream.set_nodelay(true);
                take(stream);
            }
            Some(Err(error)) => {
                // Usually the limit of open files. Other connections close soon.
                if let Some(n) = failures.add(Instant::now()) {
                    tracing::warn!("connections are not accepted: {error}; failed attempts: {n}");
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Failed attempts to accept a connection, reported at most once in [`WARNINGS`].
#[derive(Default)]
struct Failures {
    unreported: u64,
    reported: Option<Instant>,
}

impl Failures {
    /// Counts a failure. Returns the number of failures since the last report if it is time for the next one.
    fn add(&mut self, now: Instant) -> Option<u64> {
        self.unreported += 1;
        let is_early = self
            .reported
            .is_some_and(|reported| now.duration_since(reported) < WARNINGS);
        (!is_early).then(|| {
            self.reported = Some(now);
            std::mem::take(&mut self.unreported)
        })
    }
}

/// Waits until `stopped` is true.
pub(super) async fn ends(mut stopped: watch::Receiver<bool>) {
    // A dropped sender means that the server is gone, which also counts as stopped.
    let _ = stopped.wait_for(|stopped| *stopped).await;
}

/// Serves the requests of a connection until the client or the server ends it.
async fn serve(app: Arc<App>, stream: TcpStream, stopped: watch::Receiver<bool>) {
    let has_asked = Arc::new(AtomicBool::new(false));
    let is_computed = Arc::new(AtomicBool::new(false));
    let takes_interim = Arc::new(AtomicBool::new(false));
    // Copies belong to requests whose responses are not sent yet.
    let token = Arc::new(());
    let requests = Arc::downgrade(&token);
    let (socket, mut watch) = Socket::new(stream, app.choice.write_time);
    let (header_time, idle_time) = (app.choice.header_time, app.choice.idle_time);
    let service = {
        let (asked, computed) = (Arc::clone(&has_asked), Arc::clone(&is_computed));
        let interim = Arc::clone(&takes_interim);
        service_fn(move |request: Request<Incoming>| {
            asked.store(true, Ordering::Relaxed);
            interim.store(request.version() > Version::HTTP_10, Ordering::Relaxed);
            let (app, computed) = (Arc::clone(&app), Arc::clone(&computed));
            let token = Arc::clone(&token);
            async move {
                computed.store(true, Ordering::Relaxed);
                let response = app.received(request).await;
                computed.store(false, Ordering::Relaxed);
                Ok::<_, Infallible>(response.map(|body| Download::new(body, token)))
            }
        })
    };
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(idle_time.max(header_time))
        .max_buf_size(MAX_HEADERS)
        // A client that half-closes still gets its response; the watch detects clients that have left.
        .half_close(true)
        .serve_connection(TokioIo::new(socket), service);
    let mut connection = pin!(connection);
    let mut ends = pin!(ends(stopped));
    let (mut has_stopped, mut is_ending) = (false, false);
    // Time limit for the first request, or for a request that has begun.
    let mut coming: Option<Pin<Box<Sleep>>> = None;
    // Time limit without a request while the server ends.
    let mut linger: Option<Pin<Box<Sleep>>> = None;
    // Poll the connection before the end of the server. I/O errors are ignored.
    poll_fn(|context| {
        loop {
            if connection.as_mut().poll(context).is_ready() {
                return Poll::Ready(());
            }
            let is_computed = is_computed.load(Ordering::Relaxed);
            if is_computed || (has_asked.load(Ordering::Relaxed) && !watch.has_begun()) {
                coming = None;
            } else {
                let time = coming.get_or_insert_with(|| Box::pin(sleep(header_time)));
                if time.as_mut().poll(context).is_ready() {
                    return Poll::Ready(());
                }
            }
            let takes_interim = takes_interim.load(Ordering::Relaxed);
            if is_computed && watch.poll_gone(context, takes_interim).is_ready() {
                return Poll::Ready(());
            }
            has_stopped = has_stopped || ends.as_mut().poll(context).is_ready();
            if !has_stopped || is_ending {
                return Poll::Pending;
            }
            // Responses carry `Connection: close`. Only idle connections are closed from here.
            let is_idle = requests.strong_count() <= 1 && !watch.has_begun();
            if !is_idle {
                linger = None;
                return Poll::Pending;
            }
            let time = linger.get_or_insert_with(|| Box::pin(sleep(LINGER)));
            if time.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            is_ending = true;
            connection.as_mut().graceful_shutdown();
        }
    })
    .await;
}

impl App {
    /// Handles an HTTP request. Sends `Connection: close` if the server is about to end, or if the client still sends a body that
    /// is not read.
    async fn received(self: Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        let is_left = Arc::new(AtomicBool::new(false));
        let checked = host::check(&request);
        let has_host = checked.is_ok();
        let (route, ..) = Route::of(request.uri().path(), request.method());
        let request = Upload::wrap(request, self.choice.header_time, &is_left);
        let mut response = match checked {
            Ok(()) => Arc::clone(&self).answer(request).await,
            Err(failure) => {
                drop(request);
                failure.response(route.style())
            }
        };
        if !has_host || is_left.load(Ordering::Relaxed) || self.models.is_retired() {
            let close = HeaderValue::from_static("close");
            response.headers_mut().insert(CONNECTION, close);
        }
        response
    }

    /// Reads the keys and loads the models again. Either both are replaced or neither is.
    fn reload(&self) -> Result<Vec<String>, ReloadError> {
        let keys = self.choice.keys.as_ref().map(Keys::reload).transpose();
        let keys = keys.map_err(|error| ReloadError::Failed {
            problem: error.to_string(),
        })?;
        self.models.reload(|| {
            if let Some(replace) = keys {
                replace();
            }
        })
    }

    /// Executes an administrative command.
    async fn command(self: Arc<Self>, request: &Request<Incoming>) -> Response<Body> {
        const PATH: &str = "/admin/reload";
        if let Err(failure) = host::check_command(request) {
            return failure.response(Style::OpenAi);
        }
        let done = match (request.uri().path(), request.method()) {
            (PATH, &Method::POST) => {
                let began = Instant::now();
                let app = Arc::clone(&self);
                let reloaded = on_thread(move || app.reload()).await;
                let reloaded = reloaded.and_then(|done| done.map_err(|e| Failure::reload(&e)));
                reloaded.map(|names| {
                    let seconds = began.elapsed().as_secs_f64();
                    json(
                        StatusCode::OK,
                        &json!({"models": names, "seconds": seconds}),
                    )
                })
            }
            (PATH, method) => Err(Failure::method(method, &[Method::POST])),
            _ => Err(Failure::no_command(PATH)),
        };
        done.unwrap_or_else(|failure| failure.response(Style::OpenAi))
    }
}
