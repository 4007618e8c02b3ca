//! Connections: taking them, and letting them end.

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
    Method, Request, Response, StatusCode, body::Incoming, server::conn::http1, service::service_fn,
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
    App, Body, HttpChoice,
    error::{Failure, Style},
    json, on_thread,
    socket::Socket,
};
use crate::serve::{Models, ReloadError};

/// A server that answers, until it is shut down.
pub struct Server {
    runtime: Runtime,
    app: Arc<App>,
    address: SocketAddr,
    /// Whether connections are to end.
    stop: watch::Sender<bool>,
    /// Gives nothing, until all connections have ended.
    closed: mpsc::Receiver<()>,
    accepting: JoinHandle<()>,
}

/// Why a server has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended<E> {
    /// It was told to by a signal.
    Asked,
    /// A device computes nothing any more.
    DeviceLost,
    /// There are no models to serve.
    NotLoaded(E),
}

/// How often it is looked whether all devices are there.
const LOOKS: Duration = Duration::from_millis(200);
/// How long those have for their answer who are told that theirs is given up.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long a connection may be without a request when the server ends.
const FIRST_REQUEST: Duration = Duration::from_millis(500);
/// Where headers may be this long together, in bytes.
const MOST_HEADERS: usize = 64 << 10;

impl Server {
    /// Answers on a socket from now on.
    ///
    /// # Errors
    /// A socket that cannot be used, and threads that the system does not give.
    pub fn start(socket: TcpListener, models: Models, choice: HttpChoice) -> io::Result<Self> {
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
        let listener = {
            let _inside = runtime.enter();
            Listener::from_std(socket)?
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
        })
    }

    /// Where it answers.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes commands on another socket, which is for those who run the server: `POST /admin/reload` loads the models anew, and
    /// answers when the last request of the old ones is answered; the file of keys is read again before.
    ///
    /// # Errors
    /// A socket that cannot be used.
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

    /// Lets `load` bring the models, while requests are told to wait for them, and serves until SIGTERM or SIGINT, loading the
    /// models anew by SIGHUP; then shuts down: `/ready` says so at once, requests are taken on for the drain's delay, and those
    /// that run then have the drain's limit. A signal ends it while models are loaded, too, and a device that is lost at any time.
    ///
    /// # Errors
    /// Signals that the system does not let be caught.
    pub fn run<E: Send + 'static>(
        self,
        load: impl FnOnce(&Models) -> Result<(), E> + Send + 'static,
    ) -> io::Result<Ended<E>> {
        let mut delay = self.app.choice.drain_delay;
        let ended = self.runtime.block_on(async {
            let mut term = signal(SignalKind::terminate())?;
            let mut int = signal(SignalKind::interrupt())?;
            let mut hangup = signal(SignalKind::hangup())?;
            let app = Arc::clone(&self.app);
            let mut loading = Some(tokio::task::spawn_blocking(move || load(&app.models)));
            let mut looks = tokio::time::interval(LOOKS);
            loop {
                let happened = poll_fn(|context| {
                    if term.poll_recv(context).is_ready() {
                        return Poll::Ready(Some(Ended::Asked));
                    }
                    // By hand: no balancer sends requests here.
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
                // Not waited for: it may be told to end in the meantime.
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

    /// Gives up what still runs when another of these signals comes.
    fn hurry_at(&self, mut signals: [Signal; 2]) {
        tracing::warn!("ending; a second signal gives up requests that still run");
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

    /// Says that it is not ready, takes requests for `delay` more, and lets those that run end. What has no answer within the
    /// drain's limit is told that it gets none here; a stream that has begun is broken off.
    pub fn shut_down(self, delay: Duration) {
        let limit = self.app.choice.drain_limit;
        self.app.models.retire();
        let (accepting, mut closed) = (self.accepting, self.closed);
        self.runtime.block_on(async move {
            let _ = tokio::time::timeout(delay, ends(self.app.cut.subscribe())).await;
            let _ = self.stop.send(true);
            let _ = accepting.await;
            if tokio::time::timeout(limit, closed.recv()).await.is_err() {
                tracing::warn!("requests that still run after {limit:?} are given up");
                self.app.cut.send_replace(true);
                let _ = tokio::time::timeout(LAST_WORDS, closed.recv()).await;
            }
        });
        self.runtime.shutdown_timeout(Duration::from_secs(1));
    }
}

/// Takes connections until it is told to end.
async fn accept(
    listener: Listener,
    stopped: watch::Receiver<bool>,
    mut take: impl FnMut(TcpStream),
) {
    loop {
        let mut ends = pin!(ends(stopped.clone()));
        // Who has come already is taken, however soon it is to stop.
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
                // Too many open files, mostly: others close soon.
                tracing::warn!("a connection is not taken: {error}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Ends when this is said.
pub(super) async fn ends(mut stopped: watch::Receiver<bool>) {
    // Without a server there is nobody to serve for.
    let _ = stopped.wait_for(|stopped| *stopped).await;
}

/// Answers the requests of a connection until it ends, by its client or as the server does.
async fn serve(app: Arc<App>, stream: TcpStream, stopped: watch::Receiver<bool>) {
    let has_asked = Arc::new(AtomicBool::new(false));
    let is_computed = Arc::new(AtomicBool::new(false));
    let (asked, computed) = (Arc::clone(&has_asked), Arc::clone(&is_computed));
    let (socket, mut watch) = Socket::new(stream, app.choice.write_time);
    let (header_time, idle_time) = (app.choice.header_time, app.choice.idle_time);
    let service = service_fn(move |request: Request<Incoming>| {
        asked.store(true, Ordering::Relaxed);
        let (app, computed) = (Arc::clone(&app), Arc::clone(&computed));
        async move {
            computed.store(true, Ordering::Relaxed);
            let answer = app.answer(request).await;
            computed.store(false, Ordering::Relaxed);
            Ok::<_, Infallible>(answer)
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(idle_time.max(header_time))
        .max_buf_size(MOST_HEADERS)
        // Who sends no more waits for its answer; the watch sees who has gone.
        .half_close(true)
        .serve_connection(TokioIo::new(socket), service);
    let mut connection = pin!(connection);
    let mut ends = pin!(async {
        ends(stopped).await;
        // A new connection has its request on the way, and would be closed without an answer.
        let began = Instant::now();
        while !has_asked.load(Ordering::Relaxed) && began.elapsed() < FIRST_REQUEST {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let mut is_ending = false;
    // A first request, and one that has begun.
    let mut coming: Option<Pin<Box<Sleep>>> = None;
    // What has come is read before the end is looked at. What breaks a connection is its client's affair.
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
            if is_computed && watch.poll_gone(context).is_ready() {
                return Poll::Ready(());
            }
            if is_ending || ends.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            is_ending = true;
            connection.as_mut().graceful_shutdown();
        }
    })
    .await;
}

impl App {
    /// Reads the keys again, then loads the models anew. Who has a key no more is told so before models are loaded.
    fn reload(&self) -> Result<Vec<String>, ReloadError> {
        if let Some(keys) = &self.choice.keys {
            keys.reload().map_err(|error| ReloadError::Keys {
                problem: error.to_string(),
            })?;
        }
        self.models.reload()
    }

    /// Does what those ask who run the server.
    async fn command(self: Arc<Self>, request: &Request<Incoming>) -> Response<Body> {
        const PATH: &str = "/admin/reload";
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
