//! Streams of generated texts as server-sent events.

use std::task::{Context, Poll};

use hyper::{
    Response,
    header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue},
};
use serde::Serialize;
use serde_json::json;

use crate::{
    http::{
        HandlerResult,
        body::{self, Body},
    },
    serve::{Ending, Piece, Scored, ServeError, TokenStream},
};

/// End of a text.
pub(in crate::http) struct End {
    pub ending: Ending,
    /// The requested hypotheses of a beam search with their scores, best first.
    pub hypotheses: Vec<(String, f32)>,
}

/// Writes the server-sent events of a route.
pub(in crate::http) trait Events: Send {
    /// Writes the events at the beginning of text `index`.
    fn begin(&self, _to: &mut Vec<u8>, _index: usize) {}

    /// Writes the event of a part of text `index`.
    fn part(&self, to: &mut Vec<u8>, index: usize, text: &str, tokens: &[Scored]);

    /// Writes the event of the end of text `index`.
    fn end(&self, to: &mut Vec<u8>, index: usize, end: End);

    /// Writes the event with the numbers of prompt tokens and of generated tokens, if the request asks for it.
    fn usage(&self, to: &mut Vec<u8>, used: (usize, usize));

    /// Returns whether each text has its own prompt. Otherwise, all texts have the same prompt, and its tokens are counted once.
    fn has_own_prompts(&self) -> bool;
}

/// Streams texts as server-sent events. Waits for the first piece of text before it responds, so that an invalid request gets an error
/// status. `all` has an entry for each text. If the entry is `None`, the text is empty, and nothing is generated for it.
pub(in crate::http) async fn streamed(
    events: impl Events + 'static,
    mut all: Vec<Option<TokenStream>>,
) -> HandlerResult {
    let mut open = all.iter_mut().enumerate();
    let first = match open.find_map(|(index, pieces)| Some((index, pieces.as_mut()?))) {
        None => None,
        Some((index, pieces)) => {
            let piece = pieces.next().await.unwrap_or_else(|| {
                let why = "it ended before the text began";
                Err(ServeError::NotReady { why })
            });
            Some((index, piece?))
        }
    };
    let mut stream = Stream {
        ready: Vec::new(),
        n_open: all.len(),
        all,
        used: (0, 0),
        events,
    };
    for index in 0..stream.all.len() {
        stream.events.begin(&mut stream.ready, index);
    }
    for index in 0..stream.all.len() {
        if stream.all[index].is_none() {
            stream.close(index, Ending::Stop, Vec::new());
        }
    }
    if let Some((index, first)) = first {
        stream.take(index, Ok(first));
    }
    let mut response = Response::new(Body::Events(Box::new(stream)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(response)
}

/// Appends a server-sent event.
pub(in crate::http) fn add_event(to: &mut Vec<u8>, value: &impl Serialize) {
    to.extend(b"data: ");
    // Writing to memory cannot fail, and all map keys here are strings.
    let _ = serde_json::to_writer(&mut *to, value);
    to.extend(b"\n\n");
}

struct Stream<E> {
    events: E,
    /// Unfinished texts by index; `None` for finished texts.
    all: Vec<Option<TokenStream>>,
    n_open: usize,
    /// Number of prompt tokens, and number of generated tokens of all texts.
    used: (usize, usize),
    /// Bytes to send next.
    ready: Vec<u8>,
}

impl<E: Events> Stream<E> {
    fn take(&mut self, index: usize, piece: Result<Piece, ServeError>) {
        match piece {
            Ok(Piece::Text { text, tokens }) => {
                self.events.part(&mut self.ready, index, &text, &tokens);
            }
            Ok(Piece::End {
                ending,
                prompt_tokens,
                tokens,
                hypotheses,
            }) => {
                let before = match self.events.has_own_prompts() {
                    true => self.used.0,
                    false => 0,
                };
                self.used = (before + prompt_tokens, self.used.1 + tokens);
                self.close(index, ending, hypotheses);
            }
            // The status has already been sent, so the error is sent as an event.
            Err(error) => {
                let error =
                    json!({"error": {"message": error.to_string(), "type": "server_error"}});
                add_event(&mut self.ready, &error);
                self.all.clear();
                self.n_open = 0;
            }
        }
    }

    /// Ends a text. After the last text, ends the stream.
    fn close(&mut self, index: usize, ending: Ending, hypotheses: Vec<(String, f32)>) {
        let end = End { ending, hypotheses };
        self.events.end(&mut self.ready, index, end);
        self.all[index] = None;
        self.n_open -= 1;
        if self.n_open == 0 {
            self.events.usage(&mut self.ready, self.used);
            self.ready.extend(b"data: [DONE]\n\n");
        }
    }
}

impl<E: Events> body::Events for Stream<E> {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Vec<u8>>> {
        loop {
            if !self.ready.is_empty() {
                return Poll::Ready(Some(std::mem::take(&mut self.ready)));
            }
            if self.n_open == 0 {
                return Poll::Ready(None);
            }
            for index in 0..self.all.len() {
                let Some(pieces) = self.all.get_mut(index).and_then(Option::as_mut) else {
                    continue;
                };
                if let Poll::Ready(piece) = pieces.poll_next(context) {
                    let why = "it ended before the text did";
                    let piece = piece.unwrap_or(Err(ServeError::NotReady { why }));
                    self.take(index, piece);
                }
            }
            if self.ready.is_empty() {
                return Poll::Pending;
            }
        }
    }
}
