//! Request and response bodies on a connection.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use http_body_util::BodyExt;
use hyper::{
    Request, Version,
    body::{Body as HttpBody, Bytes, Frame, Incoming, SizeHint},
    header::EXPECT,
};
use tokio::{runtime::Handle, time::timeout};

use super::Body;

/// Max bytes that are read and discarded from the body of a refused request.
const MAX_DISCARDED: usize = 64 << 20;
/// Max time for which the client may pause while its body is discarded.
const MAX_PAUSE: Duration = Duration::from_secs(2);

/// Request body. If a handler drops it before its end, the rest is received and discarded while the response is sent, up to a limit on
/// bytes and on time. Otherwise, a client that is still sending when the connection closes would get an error instead of the response.
pub(super) struct Upload {
    body: Option<Incoming>,
    is_read: bool,
    /// Whether the client sends the body only after `100 Continue`.
    waits: bool,
    max_time: Duration,
    is_left: Arc<AtomicBool>,
}

impl Upload {
    /// Wraps the body of a request. If the body is dropped before its end, sets `is_left`, and receives and discards the rest for at most
    /// `max_time`.
    pub fn wrap(
        request: Request<Incoming>,
        max_time: Duration,
        is_left: &Arc<AtomicBool>,
    ) -> Request<Self> {
        let waits = request.version() > Version::HTTP_10 && request.headers().contains_key(EXPECT);
        request.map(|body| Self {
            is_read: body.is_end_stream(),
            body: Some(body),
            waits,
            max_time,
            is_left: Arc::clone(is_left),
        })
    }
}

impl HttpBody for Upload {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        self.waits = false;
        let Some(body) = &mut self.body else {
            return Poll::Ready(None);
        };
        let frame = ready!(Pin::new(body).poll_frame(context));
        if !matches!(frame, Some(Ok(_))) {
            self.is_read = true;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let hint = self.body.as_ref().map(HttpBody::size_hint);
        hint.unwrap_or_else(|| SizeHint::with_exact(0))
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let Some(body) = self.body.take() else {
            return;
        };
        if self.is_read || body.is_end_stream() {
            return;
        }
        self.is_left.store(true, Ordering::Relaxed);
        if let Ok(runtime) = Handle::try_current()
            && !self.waits
        {
            runtime.spawn(timeout(self.max_time, discard(body)));
        }
    }
}

async fn discard(mut body: Incoming) {
    let mut n_bytes = 0;
    while let Ok(Some(Ok(frame))) = timeout(MAX_PAUSE, body.frame()).await {
        n_bytes += frame.data_ref().map_or(0, Bytes::len);
        if n_bytes > MAX_DISCARDED {
            return;
        }
    }
}

/// Response body. It holds a clone of the connection's `Arc` until the body has been sent, so that the connection can count its open
/// requests.
pub(super) struct Download {
    body: Body,
    _token: Arc<()>,
}

impl Download {
    pub fn new(body: Body, token: Arc<()>) -> Self {
        Self {
            body,
            _token: token,
        }
    }
}

impl HttpBody for Download {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
