//! The body of a response: whole, or events as they come.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};

/// Makes events of what comes.
pub(super) trait Events: Send {
    /// The next bytes; `None` at the end.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Vec<u8>>>;
}

pub(super) enum Body {
    Whole(Option<Bytes>),
    /// Dropped when the client leaves, which ends what makes them.
    Events(Box<dyn Events>),
}

impl Body {
    pub fn whole(bytes: Vec<u8>) -> Self {
        Self::Whole(Some(Bytes::from(bytes)))
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let bytes = match &mut *self {
            Self::Whole(bytes) => Poll::Ready(bytes.take()),
            Self::Events(events) => events.poll(context).map(|next| next.map(Bytes::from)),
        };
        bytes.map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Self::Events(_) => SizeHint::default(),
        }
    }
}
