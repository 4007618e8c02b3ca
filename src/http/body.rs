//! Response bodies: a whole body, or a stream of events.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};

use crate::serve::Share;

/// Source of the bytes of a stream.
pub(super) trait Events: Send {
    /// Returns the next bytes; `None` at the end.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Vec<u8>>>;
}

pub(super) enum Body {
    Whole(Option<Bytes>),
    /// A stream of events. When the client disconnects, the stream is dropped, and the drop cancels the source of the events.
    Events(Box<dyn Events>),
}

/// Max bytes of a frame of a whole body. hyper copies a frame and asks for the next one only after the frame has been sent, so this also
/// limits the size of the copy.
const MAX_FRAME: usize = 64 << 10;

/// A response body, together with the memory that is charged for its request. The charge ends when the body is dropped.
struct Charged<T>(
    T,
    #[expect(dead_code, reason = "it ends the charge when it is dropped")] Arc<Share>,
);

impl AsRef<[u8]> for Charged<Bytes> {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Events for Charged<Box<dyn Events>> {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Vec<u8>>> {
        self.0.poll(context)
    }
}

impl Body {
    pub fn whole(bytes: Vec<u8>) -> Self {
        Self::Whole(Some(Bytes::from(bytes)))
    }

    /// Returns a body that keeps `share`, the memory charged for its request, until the last byte is sent.
    pub fn holding(self, share: &Arc<Share>) -> Self {
        let share = Arc::clone(share);
        match self {
            Self::Whole(bytes) => {
                share.is_answered(bytes.as_ref().map(|bytes| bytes.len() as u64));
                Self::Whole(bytes.map(|bytes| Bytes::from_owner(Charged(bytes, share))))
            }
            Self::Events(events) => {
                share.is_answered(None);
                Self::Events(Box::new(Charged(events, share)))
            }
        }
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
            Self::Whole(rest) => Poll::Ready(rest.take().map(|mut bytes| {
                let frame = bytes.split_to(bytes.len().min(MAX_FRAME));
                *rest = Some(bytes).filter(|bytes| !bytes.is_empty());
                frame
            })),
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
