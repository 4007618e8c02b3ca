//! Accepts, serves and shuts down connections.

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
    /// Set to true to close all connections.
    stop: watch::Sender<bool>,
    /// Channel whose `recv` returns when all connections have ended. No value is ever sent.
    closed: mpsc::Receiver<()>,
    accepting: JoinHandle<()>,
    /// Signal handlers, if they were installed before the first connection was accepted.
    signals: Option<Signals>,
}

/// Handlers of the signals to which a server reacts.
struct Signals {
    term: Signal,
    int: Signal,
    hangup: Signal,
    /// Handler of SIGXFSZ, which the kernel sends when a write exceeds the file size limit of the process. With a handler, the write fails;
    /// without one, the process is killed.
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

/// Reason why a server stopped.
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
/// Time limit for sending the error responses of aborted requests.
const ABORT_TIME: Duration = Duration::from_secs(1);
/// Time for which idle connections stay open during the shutdown, so that a request that is already on its way is answered.
const LINGER: Duration = Duration::from_millis(500);
/// Min time between two warnings about connections that could not be accepted.
const WARNINGS: Duration = Duration::from_secs(10);
/// Max bytes of the headers of a request.
const MAX_HEADERS: usize = 64 << 10;

impl Server {
    /// Starts serving requests on a socket.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be used, or the system cannot start threads.
    pub fn start(socket: TcpListener, models: Models, choice: HttpChoice) -> io::Result<Self> {
        Self::started(socket, models, choice, false)
    }

    /// Does the same as [`start`](Self::start), but installs the signal handlers of [`Server::run`] before it accepts connections. The
    /// handlers are therefore installed before any client gets a response.
    ///
    /// # Errors
    /// Returns the errors of [`start`](Self::start). Also returns an error if the signal handlers cannot be installed.
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

    /// Returns the address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts administrative commands on this socket, which serves nothing else. `POST /admin/reload` reads the file of keys and loads the
    /// models again. It responds once the last request of the old models has finished, but after at most a minute. If reading or loading
    /// fails, neither keys nor models change. Commands from web pages are refused.
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

    /// Loads the models with `load`, and serves requests until a signal stops the server, loading fails, or a device is lost. While the
    /// models load, requests get 503.
    ///
    /// - SIGTERM: `/ready` fails at once, requests are accepted for `drain_delay`, and in-flight requests then have `drain_limit` to
    ///   finish.
    /// - SIGINT: the same without `drain_delay`. While models load, SIGTERM also has no delay.
    /// - SIGHUP: keys and models are reloaded, and the server continues.
    ///
    /// # Errors
    /// Returns an error if the signal handlers cannot be installed.
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
                    // SIGINT means that someone pressed Ctrl-C. There is no delay, because no load balancer has to notice that `/ready`
                    // fails.
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
                // If a reload already waits for its turn, it has not yet read the keys and models. It therefore also serves this signal.
                if self.app.reload_waits.swap(true, Ordering::AcqRel) {
                    continue;
                }
                let app = Arc::clone(&self.app);
                // Do not wait for the reload, so that signals are handled during it.
                drop(tokio::task::spawn_blocking(move || app.reload_in_turn()));
            }
        })?;
        if !self.app.models.is_loaded() {
            delay = Duration::ZERO;
        }
        self.shut_down(delay);
        Ok(ended)
    }

    /// Aborts requests in progress when a second signal arrives.
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

    /// Makes `/ready` fail, accepts requests for `delay`, and then waits for in-flight requests. After the drain limit, requests without a
    /// response get 503, and streams that have begun are cut off.
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

/// Accepts connections and passes them to `take`, until `stopped` is true.
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
                // The usual cause is the limit on open files. Wait, because connections may close in the meantime.
                if let Some(n) = failures.add(Instant::now()) {
                    tracing::warn!("connections are not accepted: {error}; failed attempts: {n}");
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Failed attempts to accept a connection. They are reported at most once per [`WARNINGS`].
#[derive(Default)]
struct Failures {
    unreported: u64,
    reported: Option<Instant>,
}

impl Failures {
    /// Counts a failure. If there was no report within the last [`WARNINGS`], returns the number of failures since the last report.
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
    // An error means that the sender was dropped: the server is gone, which also counts as stopped.
    let _ = stopped.wait_for(|stopped| *stopped).await;
}

/// Serves the requests of a connection until the client or the server ends it.
async fn serve(app: Arc<App>, stream: TcpStream, stopped: watch::Receiver<bool>) {
    let has_asked = Arc::new(AtomicBool::new(false));
    let is_computed = Arc::new(AtomicBool::new(false));
    let takes_interim = Arc::new(AtomicBool::new(false));
    // Each request holds a clone of the token until its response is sent.
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
        // A client that has closed its sending half still gets its response. `watch` detects clients that have disconnected.
        .half_close(true)
        .serve_connection(TokioIo::new(socket), service);
    let mut connection = pin!(connection);
    let mut ends = pin!(ends(stopped));
    let (mut has_stopped, mut is_ending) = (false, false);
    // Timer that limits the wait for the first request, or for the rest of a request that has begun to arrive.
    let mut coming: Option<Pin<Box<Sleep>>> = None;
    // Timer that limits how long the connection may be idle during the shutdown.
    let mut linger: Option<Pin<Box<Sleep>>> = None;
    // Poll the connection before `ends`. I/O errors are ignored.
    poll_fn(|context| {
        loop {
            if connection.as_mut().poll(context).is_ready() {
                return Poll::Ready(());
            }
            let is_computed = is_computed.load(Ordering::Relaxed);
            let is_answering = is_computed || requests.strong_count() > 1;
            if is_answering || (has_asked.load(Ordering::Relaxed) && !watch.has_begun()) {
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
            // Only close idle connections here. A connection with a request ends after the response, which contains `Connection: close`.
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
    /// Handles an HTTP request. The response contains `Connection: close` if the server is about to stop, if the `Host` header is invalid,
    /// or if the handler left a part of the request body unread.
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

    /// Reads the keys and loads the models again. On an error, neither is replaced.
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

    /// Reloads as soon as no other reload runs. Logs an error if the reload fails.
    fn reload_in_turn(&self) {
        loop {
            self.reload_waits.store(false, Ordering::Release);
            match self.reload() {
                Ok(_) => return,
                Err(ReloadError::Busy) if !self.models.is_retired() => {}
                Err(error) => return tracing::error!("{error}"),
            }
            // Set the flag before sleeping, so that a SIGHUP during the sleep does not start another reload.
            self.reload_waits.store(true, Ordering::Release);
            std::thread::sleep(CHECK_INTERVAL);
        }
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
