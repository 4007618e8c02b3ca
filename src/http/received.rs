//! Reads request bodies within limits on size, time and memory.

use std::time::Duration;

use http_body_util::BodyExt;
use hyper::{Request, body::Body as _};
use tokio::time::{Instant, timeout, timeout_at};

use super::{App, error::Failure, gzip::Encoding, transfer::Upload};
use crate::serve::BodyMemory;

/// Bytes that are charged first for a body. Each further charge doubles the memory of the body.
const FIRST: u64 = 16 << 10;
/// Once `LARGE` bytes of a body have arrived, at least [`PROGRESS`] bytes must arrive in each period. Before that, one byte is enough.
const LARGE: usize = 256 << 10;
const PROGRESS: usize = 64 << 10;

/// A body, and the memory that is charged for it. This charge ends when memory for the whole request is charged.
pub(super) struct Received {
    pub bytes: Vec<u8>,
    memory: BodyMemory,
}

impl Received {
    /// Returns the bytes and ends their charge. The caller must already have charged memory for the whole request, which includes the
    /// bytes.
    pub fn charged(self) -> Vec<u8> {
        self.memory.end();
        self.bytes
    }

    /// Charges and reserves memory for a body that now has `length` bytes and will have at most `max`. The charge doubles at each step, up
    /// to `max`.
    async fn grow(&mut self, length: u64, max: u64) {
        let charged = self.memory.bytes();
        if length <= charged {
            return;
        }
        let step = charged.saturating_mul(2).max(FIRST);
        let wanted = step.min(max).max(length);
        self.memory.grow(wanted - charged).await;
        self.bytes.reserve_exact(wanted as usize - self.bytes.len());
    }
}

/// Checks, in periods of length `pause`, that a body keeps arriving.
struct Progress {
    pause: Duration,
    until: Instant,
    /// Number of bytes that had arrived when the current period began.
    before: usize,
}

impl Progress {
    fn new(pause: Duration) -> Self {
        Self {
            pause,
            until: Instant::now() + pause,
            before: 0,
        }
    }

    /// Begins a new period. `n_bytes` bytes have arrived so far.
    fn begin(&mut self, n_bytes: usize) {
        (self.until, self.before) = (Instant::now() + self.pause, n_bytes);
    }

    /// Returns the number of bytes that must arrive in a period.
    fn expected(&self) -> usize {
        match self.before >= LARGE {
            true => PROGRESS,
            false => 1,
        }
    }

    /// Ends a period and begins the next. `n_bytes` bytes have arrived so far.
    ///
    /// # Errors
    /// Returns an error if too few bytes have arrived in the period.
    fn end(&mut self, n_bytes: usize) -> Result<(), Failure> {
        if n_bytes - self.before < self.expected() {
            return Err(Failure::stalled_body(self.expected(), self.pause));
        }
        self.begin(n_bytes);
        Ok(())
    }
}

impl App {
    /// Reads the body of a request, within its size and time limits.
    pub(super) async fn body(
        &self,
        request: Request<Upload>,
        encoding: Encoding,
    ) -> Result<Received, Failure> {
        let max = self.choice.max_body;
        if request.body().size_hint().lower() > max as u64 {
            return Err(Failure::large_body(max));
        }
        let mut received = Received {
            bytes: Vec::new(),
            memory: self.memory.body(),
        };
        let reading = self.read(request.into_body(), &mut received);
        match timeout(self.choice.body_time, reading).await {
            Ok(read) => read?,
            Err(_) => return Err(Failure::slow_body(self.choice.body_time)),
        }
        if encoding == Encoding::Gzip {
            received.memory.grow(max as u64).await;
        }
        Ok(received)
    }

    async fn read(&self, mut body: Upload, into: &mut Received) -> Result<(), Failure> {
        let max = self.choice.max_body;
        let expected = body.size_hint().exact().unwrap_or(max as u64);
        let mut progress = Progress::new(self.choice.body_pause);
        loop {
            let Ok(frame) = timeout_at(progress.until, body.frame()).await else {
                progress.end(into.bytes.len())?;
                continue;
            };
            let Some(frame) = frame else {
                return Ok(());
            };
            let frame = frame.map_err(|error| Failure::broken_body(&error.to_string()))?;
            let Ok(data) = frame.into_data() else {
                continue;
            };
            let length = into.bytes.len() + data.len();
            if length > max {
                return Err(Failure::large_body(max));
            }
            let began = Instant::now();
            into.grow(length as u64, expected).await;
            into.bytes.extend_from_slice(&data);
            // While the body waits for memory, the client cannot send. Extend the period by this time.
            progress.until += began.elapsed();
        }
    }
}
