//! Connections: taking them, and letting them end.

use std::{
    convert::Infallible,
    io,
    net::{SocketAddr, TcpListener},
    sync::{Arc, atomic::AtomicU64},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use hyper::{Request, body::Incoming, server::conn::http1, service::service_fn};
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

use super::{App, HttpChoice, metrics::Counts};
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

    /// Waits for SIGTERM or SIGINT, then shuts down: `/ready` says so at once, requests are taken on for the drain's delay, and
    /// those that run then have the drain's limit.
    ///
    /// # Errors
    /// Signals that the system does not let be caught.
    pub fn run_until_signal(self) -> io::Result<()> {
        self.runtime.block_on(async {
            let mut term = signal(SignalKind::terminate())?;
            let mut int = signal(SignalKind::interrupt())?;
            std::future::poll_fn(|context| {
                let either = [term.poll_recv(context), int.poll_recv(context)];
                match either.iter().any(std::task::Poll::is_ready) {
                    true => std::task::Poll::Ready(()),
                    false => std::task::Poll::Pending,
                }
            })
            .await;
            io::Result::Ok(())
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
