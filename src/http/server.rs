//! Connections: taking them, and letting them end.

use std::{
    convert::Infallible,
    io,
    net::{SocketAddr, TcpListener},
    sync::{Arc, atomic::AtomicU64},
    task::Poll,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use hyper::{
    Method, Request, Response, StatusCode, body::Incoming, server::conn::http1, service::service_fn,
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
};
use tokio::{
    net::TcpListener as Listener,
    runtime::{Builder, Runtime},
    signal::unix::{SignalKind, signal},
    task::JoinHandle,
};

use serde_json::json;

use super::{
    App, Body, HttpChoice,
    error::{Failure, Style},
    json,
    metrics::Counts,
    on_thread,
};
use crate::serve::Models;

/// A server that answers, until it is shut down.
pub struct Server {
    runtime: Runtime,
    app: Arc<App>,
    address: SocketAddr,
    graceful: Arc<GracefulShutdown>,
    accepting: JoinHandle<()>,
}

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
        let started = SystemTime::now().duration_since(UNIX_EPOCH);
        let app = Arc::new(App {
            models,
            choice,
            counts: Counts::default(),
            next_id: AtomicU64::new(0),
            began: Instant::now(),
            started: started.map_or(0, |since| since.as_micros() as u64),
        });
        let graceful = Arc::new(GracefulShutdown::new());
        let (shared, watched) = (Arc::clone(&app), Arc::clone(&graceful));
        let listener = {
            let _inside = runtime.enter();
            Listener::from_std(socket)?
        };
        let accepting = runtime.spawn(async move {
            loop {
                let stream = match listener.accept().await {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        // Too many open files, mostly: others close soon.
                        tracing::warn!("a connection is not taken: {error}");
                        tokio::time::sleep(Duration::from_millis(50)).await;
                        continue;
                    }
                };
                let _ = stream.set_nodelay(true);
                let app = Arc::clone(&shared);
                let header_time = app.choice.header_time;
                let service = service_fn(move |request: Request<Incoming>| {
                    let app = Arc::clone(&app);
                    async move { Ok::<_, Infallible>(app.answer(request).await) }
                });
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(header_time)
                    .max_buf_size(MOST_HEADERS)
                    .serve_connection(TokioIo::new(stream), service);
                let answering = watched.watch(connection);
                tokio::spawn(async move {
                    // What breaks a connection is its client's affair.
                    let _ = answering.await;
                });
            }
        });
        Ok(Self {
            runtime,
            app,
            address,
            graceful,
            accepting,
        })
    }

    /// Where it answers.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes commands on another socket, which is for those who run the server: `POST /admin/reload` loads the models anew, and
    /// answers when the last request of the old ones is answered.
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
        self.runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
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
            }
        });
        Ok(address)
    }

    /// Waits for SIGTERM or SIGINT, loading the models anew by SIGHUP; then shuts down: `/ready` says so at once, requests are taken on for the drain's delay, and
    /// those that run then have the drain's limit.
    ///
    /// # Errors
    /// Signals that the system does not let be caught.
    pub fn run_until_signal(self) -> io::Result<()> {
        self.runtime.block_on(async {
            let mut term = signal(SignalKind::terminate())?;
            let mut int = signal(SignalKind::interrupt())?;
            let mut hangup = signal(SignalKind::hangup())?;
            loop {
                let ends = std::future::poll_fn(|context| {
                    let either = [term.poll_recv(context), int.poll_recv(context)];
                    if either.iter().any(Poll::is_ready) {
                        return Poll::Ready(true);
                    }
                    hangup.poll_recv(context).map(|_| false)
                });
                if ends.await {
                    return io::Result::Ok(());
                }
                let app = Arc::clone(&self.app);
                // Not waited for: it may be told to end in the meantime.
                drop(tokio::task::spawn_blocking(move || {
                    if let Err(error) = app.models.reload() {
                        tracing::error!("{error}");
                    }
                }));
            }
        })?;
        let delay = self.app.choice.drain_delay;
        self.shut_down(delay);
        Ok(())
    }

    /// Says that it is not ready, takes requests for `delay` more, and lets those that run end. What has not ended within the
    /// drain's limit is broken off.
    pub fn shut_down(self, delay: Duration) {
        let limit = self.app.choice.drain_limit;
        self.app.models.retire();
        let (accepting, graceful) = (self.accepting, self.graceful);
        self.runtime.block_on(async move {
            tokio::time::sleep(delay).await;
            accepting.abort();
            // When it has ended, nobody else watches connections.
            let _ = accepting.await;
            let Some(graceful) = Arc::into_inner(graceful) else {
                return;
            };
            if tokio::time::timeout(limit, graceful.shutdown())
                .await
                .is_err()
            {
                tracing::warn!("requests that still run after {limit:?} are broken off");
            }
        });
        self.runtime.shutdown_timeout(Duration::from_secs(1));
    }
}

impl App {
    /// Does what those ask who run the server.
    async fn command(self: Arc<Self>, request: &Request<Incoming>) -> Response<Body> {
        const PATH: &str = "/admin/reload";
        let done = match (request.uri().path(), request.method()) {
            (PATH, &Method::POST) => {
                let began = Instant::now();
                let app = Arc::clone(&self);
                let reloaded = on_thread(move || app.models.reload()).await;
                let reloaded = reloaded.and_then(|done| done.map_err(|e| Failure::reload(&e)));
                reloaded.map(|names| {
                    let seconds = began.elapsed().as_secs_f64();
                    json(
                        StatusCode::OK,
                        &json!({"models": names, "seconds": seconds}),
                    )
                })
            }
            (PATH, method) => Err(Failure::method(method, &Method::POST)),
            _ => Err(Failure::no_command(PATH)),
        };
        done.unwrap_or_else(|failure| failure.response(Style::OpenAi))
    }
}
