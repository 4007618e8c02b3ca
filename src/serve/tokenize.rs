//! Tokenizes texts on separate threads, because tokenizing a text takes ten times as long as parsing the JSON of its request.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

use super::{ServeError, Submit};
use crate::{
    EngineError,
    names::excerpt,
    text::{CutSide, Encoded, Folder, Input, Prompt, TextEncoder, TextError},
};

/// Input of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Text {
    One(String),
    /// A prompt, and the text that follows it.
    Prompted(Arc<str>, String),
    /// A query and a document.
    Pair(String, String),
    /// Token ids, used unchanged.
    Ids(Vec<u32>),
    /// Tokens that the model's tokenizer returned.
    Encoded(Encoded),
}

impl Text {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::One(text) => text.len(),
            Self::Prompted(prompt, text) => prompt.len() + text.len(),
            Self::Pair(a, b) => a.len() + b.len(),
            Self::Ids(ids) => 4 * ids.len(),
            Self::Encoded(encoded) => 8 * encoded.ids.len(),
        }
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// Cost of passing a text to a thread, expressed as the number of bytes of text that a thread could tokenize in that time.
const PER_WORK: u64 = 64;

/// Pool of threads that tokenize. Higher classes go first. Tenants of a class take turns, and the texts of a tenant are tokenized in order
/// of arrival.
#[derive(Clone)]
pub(super) struct Pool(Arc<Handle>);

/// Handle of the threads. When the handle is dropped, the threads end after they have done all queued work.
struct Handle(Arc<Line>);

#[derive(Default)]
struct Line {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    /// Queued work, ordered by class (highest first), start tag of fair queueing, and arrival.
    work: BTreeMap<(Reverse<u8>, u64, u64), Work>,
    n_came: u64,
    /// Finish tag of each tenant's last work in start-time fair queueing, in bytes of text. Tags of at most `now` have no effect.
    given: HashMap<u32, u64>,
    /// Start tag of the work that was taken last (the virtual time).
    now: u64,
    is_over: bool,
}

impl Line {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // A poisoned lock is usable: every change is a single call, so a panic cannot leave the state inconsistent.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> Option<Work> {
        let mut waiting = self.lock();
        loop {
            if let Some(((_, place, _), work)) = waiting.work.pop_first() {
                waiting.now = waiting.now.max(place);
                if waiting.work.is_empty() {
                    waiting.given.clear();
                }
                return Some(work);
            }
            if waiting.is_over {
                return None;
            }
            let woken = self.changed.wait(waiting);
            waiting = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.lock().is_over = true;
        self.0.changed.notify_all();
    }
}

impl Pool {
    /// Starts the threads. They end when the pool has been dropped and all work is done.
    pub fn new(n_threads: usize) -> Result<Self, EngineError> {
        let pool = Self(Arc::new(Handle(Arc::default())));
        for _ in 0..n_threads.max(1) {
            let line = Arc::clone(&pool.0.0);
            let run = move || {
                while let Some(work) = line.next() {
                    work();
                }
            };
            let thread = std::thread::Builder::new().name("tokenize".to_owned());
            thread.spawn(run).map_err(|e| EngineError::Threads {
                problem: e.to_string(),
            })?;
        }
        Ok(pool)
    }

    /// Queues work for a request. For fair queueing, the work counts as much as tokenizing `bytes` bytes of text.
    pub fn run(&self, submit: Submit, bytes: usize, work: impl FnOnce() + Send + 'static) {
        let line = &self.0.0;
        let mut waiting = line.lock();
        let now = waiting.now;
        let given = waiting.given.entry(submit.tenant).or_insert(now);
        let place = (*given).max(now);
        *given = place.saturating_add(bytes as u64 + PER_WORK);
        let turn = (Reverse(submit.class), place, waiting.n_came);
        waiting.n_came += 1;
        waiting.work.insert(turn, Box::new(work));
        drop(waiting);
        line.changed.notify_one();
    }
}

/// Returns the index and the text of a prompt of the folder: the prompt with the first of `names` that the folder defines.
///
/// # Errors
/// Returns an error if there is no such prompt, or if texts with this prompt need a route of a Router that is not loaded. `param` is the
/// field that names the prompt.
pub(super) fn prompt<'f>(
    folder: &'f Folder,
    param: &'static str,
    names: &[&str],
) -> Result<(usize, &'f str), ServeError> {
    let Some(index) = folder.prompt_index(names) else {
        let name = names.first().copied().unwrap_or_default();
        let known = match folder.prompt_names().as_slice() {
            [] => "no prompts".to_owned(),
            known => format!("the prompts {}", known.join(", ")),
        };
        let problem = format!(
            "`{param}` is `{}`, and the model's folder has {known}; leave `{param}` out to use the text without a prompt",
            excerpt(name)
        );
        return Err(ServeError::Invalid { param, problem });
    };
    let name = folder.prompt_name(index).unwrap_or_default();
    match folder.prompt(Prompt::Named(name)) {
        Ok(text) => Ok((index, text)),
        Err(error) => Err(ServeError::invalid(param, error.to_string())),
    }
}

/// Tokenizes a text. `index` is the text's index in the request, for errors.
pub(super) fn encode(
    encoder: &TextEncoder,
    text: &Text,
    index: usize,
    submit: Submit,
    limit: Option<u32>,
) -> Result<Encoded, ServeError> {
    let side = submit.cut_side.unwrap_or(encoder.cut_side());
    let prompt = submit
        .prompt
        .and_then(|at| encoder.folder().prompt_name(at));
    let prompt = prompt.map_or(Prompt::Default, Prompt::Named);
    let encoded = match (submit.wanted.role(), text) {
        (Some(role), Text::One(text)) => encoder.encode_as(role, text, prompt, side),
        (Some(role), Text::Prompted(prompt, text)) => {
            encoder.encode_as(role, text, Prompt::Text(prompt), side)
        }
        (_, text) => encoded(encoder, text, prompt, side, limit),
    };
    let encoded = encoded.map_err(|error| match error {
        TextError::Text { problem, .. } => {
            ServeError::input(index, format!(" cannot be tokenized: {problem}"))
        }
        other => ServeError::Internal(other.to_string()),
    })?;
    let encoded = match submit.wanted.role() {
        Some(_) => encoded,
        None => encoder.ended(encoded),
    };
    if encoded.ids.is_empty() {
        let problem = " is empty; expected at least one token";
        return Err(ServeError::input(index, problem));
    }
    if encoded.is_cut && !submit.truncate {
        let limit = encoded.ids.len();
        return Err(ServeError::TooLong { index, limit });
    }
    Ok(encoded)
}

/// Tokenizes an input that is not for late interaction.
fn encoded(
    encoder: &TextEncoder,
    text: &Text,
    prompt: Prompt<'_>,
    side: CutSide,
    limit: Option<u32>,
) -> Result<Encoded, TextError> {
    match text {
        Text::One(text) => encoder.encode_cut(Input::Text(text), prompt, side),
        Text::Prompted(prompt, text) => {
            encoder.encode_cut(Input::Text(text), Prompt::Text(prompt), side)
        }
        Text::Pair(a, b) => encoder.encode_cut(Input::Pair(a, b), prompt, side),
        Text::Encoded(encoded) => Ok(encoded.clone()),
        Text::Ids(ids) => {
            let limit = limit.map_or(usize::MAX, |limit| limit as usize);
            let is_cut = ids.len() > limit;
            let n = ids.len().min(limit);
            let ids = match side {
                CutSide::Left => ids[ids.len() - n..].to_vec(),
                CutSide::Right => ids[..n].to_vec(),
            };
            Ok(Encoded {
                ids,
                types: None,
                is_cut,
                attended: None,
                left_out: 0,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn urgent_texts_are_tokenized_first_then_tenants_take_turns() {
        let pool = Pool::new(1).unwrap();
        let (open, opened) = channel::<()>();
        let (begin, began) = channel::<()>();
        let (done, all) = channel();
        let submit = |class, tenant| Submit {
            class,
            tenant,
            ..Submit::default()
        };
        pool.run(submit(0, 0), 0, move || {
            begin.send(()).unwrap();
            opened.recv().unwrap();
        });
        began.recv().unwrap();
        for (class, name) in [(0, 'a'), (7, 'b'), (0, 'c'), (255, 'd'), (7, 'e')] {
            let done = done.clone();
            pool.run(submit(class, 0), 9, move || done.send(name).unwrap());
        }
        // Queue work of a second tenant. The work of a tenant counts in every class. The urgent work `b` of the first tenant therefore
        // delays its work `c`, which comes after `3`.
        for name in ['1', '2', '3', '4'] {
            let done = done.clone();
            pool.run(submit(0, 1), 0, move || done.send(name).unwrap());
        }
        drop((pool, done));
        open.send(()).unwrap();
        assert_eq!(all.iter().collect::<String>(), "dbea123c4");
    }
}
