//! Tokenizing on threads of its own, as it takes ten times what JSON does.

use std::sync::{
    Arc, Mutex, PoisonError,
    mpsc::{Receiver, Sender, channel},
};

use super::ServeError;
use crate::{
    EngineError,
    engine::{Encoded, Input, Prompt, TextEncoder},
};

/// What is to be computed of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Text {
    One(String),
    /// A query and a document.
    Pair(String, String),
    /// Token ids, which are taken as they are.
    Ids(Vec<u32>),
}

impl Text {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::One(text) => text.len(),
            Self::Pair(a, b) => a.len() + b.len(),
            Self::Ids(ids) => 4 * ids.len(),
        }
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// Threads that tokenize.
#[derive(Clone)]
pub(super) struct Pool {
    work: Sender<Work>,
}

impl Pool {
    /// Starts threads, which end when the pool is dropped and its work is done.
    pub fn new(n_threads: usize) -> Result<Self, EngineError> {
        let (work, queue) = channel::<Work>();
        let queue = Arc::new(Mutex::new(queue));
        for _ in 0..n_threads.max(1) {
            let queue = Arc::clone(&queue);
            let next = move |queue: &Mutex<Receiver<Work>>| {
                let queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
                queue.recv()
            };
            let run = move || {
                while let Ok(work) = next(&queue) {
                    work();
                }
            };
            let thread = std::thread::Builder::new().name("tokenize".to_owned());
            thread.spawn(run).map_err(|e| EngineError::Threads {
                problem: e.to_string(),
            })?;
        }
        Ok(Self { work })
    }

    pub fn run(&self, work: impl FnOnce() + Send + 'static) -> Result<(), ServeError> {
        let sent = self.work.send(Box::new(work));
        sent.map_err(|_| ServeError::Internal("no thread tokenizes any more".to_owned()))
    }
}

/// Token ids of a text; `index` is its place in the request.
pub(super) fn encode(
    encoder: &TextEncoder,
    text: &Text,
    index: usize,
    truncate: bool,
    limit: Option<u32>,
) -> Result<Encoded, ServeError> {
    let encoded = match text {
        Text::One(text) => encoder.encode_one(Input::Text(text), Prompt::Default),
        Text::Pair(a, b) => encoder.encode_one(Input::Pair(a, b), Prompt::Default),
        Text::Ids(ids) => {
            let mut ids = ids.clone();
            let limit = limit.map_or(usize::MAX, |limit| limit as usize);
            let is_cut = ids.len() > limit;
            ids.truncate(limit);
            Ok(Encoded {
                ids,
                types: None,
                is_cut,
            })
        }
    };
    let encoded = encoded.map_err(|error| match error {
        EngineError::Text { problem, .. } => ServeError::invalid(
            "input",
            format!("input {index} cannot be tokenized: {problem}"),
        ),
        other => ServeError::Internal(other.to_string()),
    })?;
    if encoded.ids.is_empty() {
        return Err(ServeError::invalid(
            "input",
            format!("input {index} is empty; expected at least one token"),
        ));
    }
    if encoded.is_cut && !truncate {
        let limit = encoded.ids.len();
        return Err(ServeError::TooLong { index, limit });
    }
    Ok(encoded)
}
