//! Socket of a connection. It has a write timeout and detects clients that have disconnected.

use std::{
    future::Future,
    io,
    os::fd::AsFd,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use super::framing::Framing;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Sleep, sleep},
};

/// Interval at which [`Watch`] checks whether the client of a half-closed connection has disconnected.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Interim response that probes a half-closed connection. A client that still reads ignores it. If the client has closed the connection,
/// its operating system answers with a reset.
const PROBE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// A connection with a write timeout: the client must accept further bytes of a response within `write_time`.
pub(super) struct Socket {
    shared: Arc<Shared>,
    framing: Framing,
    write_time: Duration,
    stuck: Option<Pin<Box<Sleep>>>,
}

struct Shared {
    stream: TcpStream,
    /// Whether the operating system has accepted all bytes written so far.
    is_flushed: AtomicBool,
    /// Whether the client has begun a request that has no response yet. Becomes true when bytes arrive. Becomes false when a response is
    /// written, unless a part of the next request has already arrived.
    has_begun: AtomicBool,
}

/// Detects that a client has disconnected while its response is computed.
///
/// A client that closes the connection sends FIN. A client that only closes its sending half, and still waits for its response, also sends
/// FIN. Only a client that has closed the connection answers further bytes with a reset, so the server sends [`PROBE`] to distinguish the
/// two cases.
pub(super) struct Watch {
    shared: Arc<Shared>,
    has_ended: bool,
    next: Option<Pin<Box<Sleep>>>,
}

impl Socket {
    pub fn new(stream: TcpStream, write_time: Duration) -> (Self, Watch) {
        let shared = Arc::new(Shared {
            stream,
            is_flushed: AtomicBool::new(true),
            has_begun: AtomicBool::new(false),
        });
        let watch = Watch {
            shared: Arc::clone(&shared),
            has_ended: false,
            next: None,
        };
        let socket = Self {
            shared,
            framing: Framing::default(),
            write_time,
            stuck: None,
        };
        (socket, watch)
    }

    /// Writes bytes. Returns an error if the client accepts no bytes within `write_time`.
    fn written(&mut self, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            if self.shared.stream.poll_write_ready(context)?.is_pending() {
                let time = self.write_time;
                let stuck = self.stuck.get_or_insert_with(|| Box::pin(sleep(time)));
                ready!(stuck.as_mut().poll(context));
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            match self.shared.stream.try_write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => {
                    self.stuck = None;
                    return Poll::Ready(done);
                }
            }
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.shared.stream.poll_read_ready(context))?;
            let read = self.shared.stream.try_read(into.initialize_unfilled());
            match read {
                Ok(n) => {
                    self.framing.read(&into.initialize_unfilled()[..n]);
                    self.shared.has_begun.store(true, Ordering::Relaxed);
                    into.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.shared.is_flushed.store(false, Ordering::Relaxed);
        // The client may have sent a part of its next request already.
        let has_begun = !self.framing.is_between();
        self.shared.has_begun.store(has_begun, Ordering::Relaxed);
        self.written(context, bytes)
    }

    /// Called by hyper after all bytes are written.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shared.is_flushed.store(true, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Shut down a duplicate of the descriptor, because the stream itself is shared with the watch.
        let same = self.shared.stream.as_fd().try_clone_to_owned()?;
        Poll::Ready(std::net::TcpStream::from(same).shutdown(std::net::Shutdown::Write))
    }
}

impl Watch {
    /// Returns whether the client has begun to send a request that has no response yet.
    pub fn has_begun(&self) -> bool {
        self.shared.has_begun.load(Ordering::Relaxed)
    }

    /// Completes when the client of the current request has disconnected. If the client has closed its sending half and `takes_interim` is
    /// set, the connection is probed with an interim response. `takes_interim` must be false for HTTP/1.0, which has no interim responses.
    pub fn poll_gone(&mut self, context: &mut Context<'_>, takes_interim: bool) -> Poll<()> {
        let stream = &self.shared.stream;
        if !self.has_ended {
            let mut byte = [0];
            match ready!(stream.poll_peek(context, &mut ReadBuf::new(&mut byte))) {
                Ok(0) => self.has_ended = true,
                // The client has already sent bytes of its next request. They hide whether it has closed its sending half.
                Ok(_) => return Poll::Pending,
                Err(_) => return Poll::Ready(()),
            }
            if takes_interim && self.shared.is_flushed.load(Ordering::Relaxed) {
                // If the send buffer is full, the bytes in it serve as the probe.
                let _ = stream.try_write(PROBE);
            }
        }
        loop {
            if !matches!(stream.take_error(), Ok(None)) {
                return Poll::Ready(());
            }
            let next = self
                .next
                .get_or_insert_with(|| Box::pin(sleep(CHECK_INTERVAL)));
            ready!(next.as_mut().poll(context));
            self.next = None;
        }
    }
}
