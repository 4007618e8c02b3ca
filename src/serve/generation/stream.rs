//! Streams of generated text.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use tokio::sync::mpsc::UnboundedReceiver;

use crate::serve::{ServeError, Share};

/// A token of a text, with its log-probability before rules and sampling.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// Bytes that the token adds to the text. They may be only a part of a character.
    pub bytes: Vec<u8>,
    pub log_probability: f32,
    /// Alternatives with their log-probabilities, most probable first.
    pub top_tokens: Vec<(Vec<u8>, f32)>,
    /// Position of the token in the whole text, in bytes.
    pub start: usize,
    /// Position of the token in the whole text, in characters.
    pub offset: usize,
}

/// Reason why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The text ended at an end token or before a stop string.
    Stop,
    /// The text reached the max number of tokens.
    Length,
}

/// Part of a stream of generated text.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// Next part of the text. `tokens` are the tokens that begin in this part, if log-probabilities were requested. Text that has been sent
    /// never changes.
    Text { text: String, tokens: Vec<Scored> },
    /// Last piece, with the number of tokens of the prompt and of the text.
    End {
        ending: Ending,
        prompt_tokens: usize,
        tokens: usize,
        /// The requested number of hypotheses of a beam search with their scores, best first.
        hypotheses: Vec<(String, f32)>,
    },
}

impl Piece {
    /// Returns the number of bytes of memory that the piece takes until it is read.
    pub(super) fn memory(&self) -> u64 {
        let scored = |(bytes, _): &(Vec<u8>, f32)| bytes.len() + 64;
        let token = |token: &Scored| {
            let most = token.top_tokens.iter().map(scored);
            token.bytes.len() + 128 + most.sum::<usize>()
        };
        match self {
            Self::Text { text, tokens } => {
                let tokens: usize = tokens.iter().map(token).sum();
                (text.len() + 128 + tokens) as u64
            }
            Self::End { hypotheses, .. } => {
                let bytes = hypotheses.iter().map(|(text, _)| text.len() + 64);
                bytes.sum::<usize>() as u64
            }
        }
    }
}

/// Stream of the pieces of a text. Dropping it cancels the generation.
pub struct TokenStream {
    pub(super) pieces: UnboundedReceiver<Result<Piece, ServeError>>,
    pub(super) ending: Arc<EarlyEnd>,
    /// Memory that is charged to the request. It includes the pieces that have not been read yet.
    pub(super) share: Arc<Share>,
}

/// Flags that tell the generator to end a text early.
#[derive(Default)]
pub(super) struct EarlyEnd {
    /// The [`TokenStream`] was dropped.
    pub(super) is_abandoned: AtomicBool,
    /// Set after a stop string was found or decoding failed, but before the last piece is sent. If a reader drops the stream after the last
    /// piece, the flag is therefore already set.
    is_complete: AtomicBool,
}

impl EarlyEnd {
    pub(super) fn is_abandoned(&self) -> bool {
        self.is_abandoned.load(Ordering::Acquire)
    }

    pub(super) fn is_complete(&self) -> bool {
        self.is_complete.load(Ordering::Acquire)
    }

    pub(super) fn complete(&self) {
        self.is_complete.store(true, Ordering::Release);
    }
}

impl TokenStream {
    /// Waits for the next piece. Returns `None` after the last piece or an error.
    pub async fn next(&mut self) -> Option<Result<Piece, ServeError>> {
        let piece = self.pieces.recv().await;
        self.note_read(piece.as_ref());
        piece
    }

    fn note_read(&self, piece: Option<&Result<Piece, ServeError>>) {
        if let Some(Ok(piece)) = piece {
            self.share.free(piece.memory());
        }
    }

    /// Like [`next`](Self::next), but as a poll function, for response bodies.
    pub fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Piece, ServeError>>> {
        let polled = self.pieces.poll_recv(context);
        if let Poll::Ready(piece) = &polled {
            self.note_read(piece.as_ref());
        }
        polled
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        self.ending.is_abandoned.store(true, Ordering::Release);
    }
}
