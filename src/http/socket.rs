//! The bytes of a connection, and whether there is still a client for them.

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

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Sleep, sleep},
};

/// How often it is looked whether a client that sends no more has gone.
const LOOKS: Duration = Duration::from_millis(50);
/// What a client that reads on passes over, and the system of one that has gone answers with a reset.
const PROBE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// A connection whose client has so long to take the next bytes of an answer.
pub(super) struct Socket {
    shared: Arc<Shared>,
    write_time: Duration,
    stuck: Option<Pin<Box<Sleep>>>,
}

struct Shared {
    stream: TcpStream,
    /// Whether all that was to be written lies with the system.
    is_flushed: AtomicBool,
    /// Whether bytes came since the last ones of an answer went.
    has_begun: AtomicBool,
}

/// Looks for a client's leaving while its answer is computed.
///
/// One that closes and one that only sends no more look alike: both send an end. The first has no ear any more, and the next
/// bytes for it are answered by a reset; the second one waits for its answer. So it is sent what HTTP lets pass over.
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
            write_time,
            stuck: None,
        };
        (socket, watch)
    }

    /// Bytes that were written at last, or an end of the client's time.
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
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.shared.stream.poll_read_ready(context))?;
            match self.shared.stream.try_read(into.initialize_unfilled()) {
                Ok(n) => {
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
        self.shared.has_begun.store(false, Ordering::Relaxed);
        self.written(context, bytes)
    }

    /// Asked when all was written.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shared.is_flushed.store(true, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Its other half is the watch's, too.
        let same = self.shared.stream.as_fd().try_clone_to_owned()?;
        Poll::Ready(std::net::TcpStream::from(same).shutdown(std::net::Shutdown::Write))
    }
}

impl Watch {
    /// Whether a client has begun to send what was not answered yet.
    pub fn has_begun(&self) -> bool {
        self.shared.has_begun.load(Ordering::Relaxed)
    }

    /// Ends when the client of the request that is being computed has gone. A client that has closed its half is probed if it
    /// `takes_interim` responses, which HTTP/1.0 does not have.
    pub fn poll_gone(&mut self, context: &mut Context<'_>, takes_interim: bool) -> Poll<()> {
        let stream = &self.shared.stream;
        if !self.has_ended {
            let mut byte = [0];
            match ready!(stream.poll_peek(context, &mut ReadBuf::new(&mut byte))) {
                Ok(0) => self.has_ended = true,
                // The next request: whether there comes an end behind it cannot be seen from here.
                Ok(_) => return Poll::Pending,
                Err(_) => return Poll::Ready(()),
            }
            if takes_interim && self.shared.is_flushed.load(Ordering::Relaxed) {
                // Where there is no room for it, the client has much to read and will be met by that.
                let _ = stream.try_write(PROBE);
            }
        }
        loop {
            if !matches!(stream.take_error(), Ok(None)) {
                return Poll::Ready(());
            }
            let next = self.next.get_or_insert_with(|| Box::pin(sleep(LOOKS)));
            ready!(next.as_mut().poll(context));
            self.next = None;
        }
    }
}
