//! A run: a thread reads windows, the calling thread embeds them, and a thread writes them.

use std::{
    any::Any,
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
};

use crate::{
    CorpusError, Embedded, Embedder, Job,
    input::{self, Inferred, Source},
    job::Checked,
    journal::Entry,
    output::{self, Batch, Encoder, Layout},
    store::{Opened, Store},
    window::{Position, Window},
};

/// Number of windows that wait to be embedded. None waits to be written, as a crash would lose it.
const WAITING: usize = 1;

/// Max number of bytes of a reason in the list of refused rows.
const MAX_REASON: usize = 1000;

/// The result of a run that is complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Number of rows of the input.
    pub rows: u64,
    /// Number of rows with a vector.
    pub written: u64,
    /// Number of rows that are refused.
    pub refused: u64,
    /// Number of rows that earlier, interrupted runs finished.
    pub resumed: u64,
    /// Number of tokens, if the embedder gave it for each window.
    pub tokens: Option<u64>,
    pub output: PathBuf,
    /// List of refused rows, if there are any.
    pub errors: Option<PathBuf>,
}

/// The state of a run after a window is embedded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Number of rows that are embedded or refused, including those of earlier runs.
    pub rows: u64,
    /// Number of rows of the input, if its format states it.
    pub total_rows: Option<u64>,
    /// Number of decompressed bytes that were read; 0 for Parquet.
    pub bytes: u64,
    /// Number of bytes of the input, if it is not compressed and not Parquet.
    pub total_bytes: Option<u64>,
    /// Number of rows that are refused.
    pub refused: u64,
    /// Number of tokens, if the embedder gave it for each window.
    pub tokens: Option<u64>,
}

/// A callback and a flag that a run uses between windows.
#[derive(Default)]
pub struct Hooks<'h> {
    /// Called after each window.
    pub progress: Option<&'h mut dyn FnMut(&Progress)>,
    /// Set to stop the run. Windows that are embedded are written first.
    pub cancel: Option<&'h AtomicBool>,
}

/// Embeds the texts of a file, and writes their vectors. An interrupted run resumes where it stopped.
///
/// # Errors
/// Returns an error for contradictory options, an input that cannot be read, an output that exists or that another run
/// writes, a failure of the embedder, a full disk or cancellation. See [`CorpusError::Stopped`] for the errors after
/// which the same command resumes the run.
pub fn run(
    job: &Job,
    embedder: &mut dyn Embedder,
    hooks: Hooks<'_>,
) -> Result<Report, CorpusError> {
    let checked = job.check()?;
    let width = embedder.width();
    if width == 0 || i32::try_from(width).is_err() {
        let problem = format!("a vector of {width} values");
        return Err(CorpusError::BadEmbedder { problem });
    }
    let is_same = match (fs::canonicalize(&job.input), fs::canonicalize(&job.output)) {
        (Ok(input), Ok(output)) => input == output,
        _ => false,
    };
    if is_same {
        return Err(CorpusError::SameFile {
            path: job.input.clone(),
        });
    }
    let input = input::identity(&job.input)?;
    let model = embedder.identity();
    let mut identity = checked.options();
    identity.extend(input.clone());
    identity.insert("model".to_owned(), model.clone());
    identity.insert("values of a vector".to_owned(), width.to_string());
    let mut store = match Store::open(job, identity)? {
        Opened::Published(report) => return Ok(report),
        Opened::Unfinished(store) => store,
    };
    if store.state().complete.is_none() {
        let finished = finish(
            &checked,
            embedder,
            hooks,
            &mut store,
            (width, model),
            &input,
        );
        if let Err(error) = finished {
            store.abandon_empty();
            return Err(stopped(error, &store, job));
        }
    }
    store.publish()
}

/// Returns the error of a run, with the number of finished rows if it can be resumed.
fn stopped(error: CorpusError, store: &Store, job: &Job) -> CorpusError {
    match error {
        CorpusError::InputChanged { .. } => error,
        _ if store.rows() == 0 => error,
        error => CorpusError::Stopped {
            error: Box::new(error),
            rows: store.rows(),
            partial: job.partial(),
        },
    }
}

/// Embeds the rows that are left, and completes the data.
fn finish(
    checked: &Checked<'_>,
    embedder: &mut dyn Embedder,
    mut hooks: Hooks<'_>,
    store: &mut Store,
    (width, model): (usize, String),
    input: &[(String, String); 3],
) -> Result<(), CorpusError> {
    let job = checked.job;
    let state = store.state();
    let (last, inferred) = (state.last.clone(), state.inferred.clone());
    let (mut source, first) = contain_reader(checked, || {
        let mut source = input::open(checked, last.end, inferred)?;
        let first = source.window()?;
        Ok((source, first))
    })?;
    let layout = Layout {
        row: job.row_column.clone(),
        vector: job.vector_column.clone(),
        fields: source.fields(),
        vectors: job.vectors,
        width,
        model,
    };
    let inferred = source.inferred();
    let encoder = output::encoder(checked, layout)?;
    let problem = |problem| CorpusError::Encode {
        first: 0,
        last: last.end.row,
        format: checked.output.name(),
        problem,
    };
    let head = encoder.head().map_err(problem)?;
    let mut embedding = Embedding {
        job,
        embedder,
        width,
        progress: Progress {
            rows: last.end.row,
            total_rows: source.total(),
            bytes: last.end.byte,
            total_bytes: source.total_bytes(),
            refused: last.refused,
            tokens: last.tokens.or((last.end.row == 0).then_some(0)),
        },
    };
    let mut writing = Writing {
        encoder: encoder.as_ref(),
        head: &head,
        inferred,
        store,
        format: checked.output.name(),
    };
    if let Some(first) = first {
        thread::scope(|scope| {
            let (to_embed, windows) = sync_channel(WAITING);
            let (to_write, batches) = sync_channel(0);
            scope.spawn(move || read(checked, source.as_mut(), &to_embed));
            let writer = scope.spawn(move || contain("writer", || writing.all(&batches)));
            let embedded = embedding.all(first, windows, to_write, &mut hooks);
            let written = writer
                .join()
                .unwrap_or_else(|panic| Err(panicked("writer", &panic)));
            // The embedding thread stops without an error if the writer fails.
            written.and(embedded)
        })?;
    }
    if input::identity(&job.input)? != *input {
        return Err(CorpusError::InputChanged {
            path: job.input.clone(),
        });
    }
    let state = store.state();
    let at = state.last.data.max(head.len() as u64);
    let tail = encoder
        .tail(&state.parts, store.rows(), at)
        .map_err(problem)?;
    store.complete(&head, &tail)
}

/// Reads windows until the end of the input, an error, or the receiver is gone.
fn read(
    checked: &Checked<'_>,
    source: &mut dyn Source,
    to_embed: &SyncSender<Result<Window, CorpusError>>,
) {
    loop {
        let window = contain_reader(checked, || source.window()).transpose();
        let Some(window) = window else {
            return;
        };
        let is_last = window.is_err();
        if to_embed.send(window).is_err() || is_last {
            return;
        }
    }
}

/// The part of a run on the calling thread.
struct Embedding<'r> {
    job: &'r Job,
    embedder: &'r mut dyn Embedder,
    width: usize,
    progress: Progress,
}

/// A window that is embedded, and the counts up to it.
struct Done {
    batch: Batch,
    end: Position,
    refused: u64,
    tokens: Option<u64>,
}

impl Embedding<'_> {
    fn all(
        &mut self,
        first: Window,
        windows: Receiver<Result<Window, CorpusError>>,
        to_write: SyncSender<Done>,
        hooks: &mut Hooks<'_>,
    ) -> Result<(), CorpusError> {
        for window in std::iter::once(Ok(first)).chain(windows) {
            if hooks
                .cancel
                .is_some_and(|cancel| cancel.load(Ordering::Relaxed))
            {
                return Err(CorpusError::Cancelled);
            }
            let done = self.window(window?)?;
            if to_write.send(done).is_err() {
                return Ok(());
            }
            if let Some(progress) = &mut hooks.progress {
                progress(&self.progress);
            }
        }
        Ok(())
    }

    /// Embeds a window.
    fn window(&mut self, window: Window) -> Result<Done, CorpusError> {
        let Window {
            first,
            texts,
            kept,
            end,
        } = window;
        let given: Vec<&str> = texts.iter().flatten().map(String::as_str).collect();
        let embedded = match given.is_empty() {
            true => Ok(Embedded {
                rows: Vec::new(),
                tokens: Some(0),
            }),
            false => self.embedder.embed(&given),
        };
        let Embedded { rows, tokens } = embedded.map_err(|source| CorpusError::Embedder {
            first,
            last: end.row.saturating_sub(1),
            source,
        })?;
        let bad = |problem: String| Err(CorpusError::BadEmbedder { problem });
        if rows.len() != given.len() {
            return bad(format!("{} vectors for {} texts", rows.len(), given.len()));
        }
        let mut vectors = rows.into_iter();
        let mut rows = Vec::with_capacity(texts.len());
        for text in texts {
            let row = text.and_then(|_| vectors.next().unwrap_or_else(|| Err(String::new())));
            rows.push(match row {
                Ok(vector) if vector.len() != self.width => {
                    let width = self.width;
                    return bad(format!("a vector of {} values, not {width}", vector.len()));
                }
                Ok(vector) => output::check(&vector, self.job.vectors).map(|()| vector),
                refused => refused,
            });
        }
        self.progress.rows = end.row;
        self.progress.bytes = end.byte;
        self.progress.refused += rows.iter().filter(|row| row.is_err()).count() as u64;
        self.progress.tokens = match (self.progress.tokens, tokens) {
            (Some(before), Some(tokens)) => Some(before + tokens),
            _ => None,
        };
        Ok(Done {
            batch: Batch { first, kept, rows },
            end,
            refused: self.progress.refused,
            tokens: self.progress.tokens,
        })
    }
}

/// The part of a run that writes.
struct Writing<'r> {
    encoder: &'r dyn Encoder,
    head: &'r [u8],
    inferred: Option<Inferred>,
    store: &'r mut Store,
    format: &'static str,
}

impl Writing<'_> {
    fn all(&mut self, batches: &Receiver<Done>) -> Result<(), CorpusError> {
        for done in batches {
            self.window(&done)?;
        }
        Ok(())
    }

    fn window(&mut self, done: &Done) -> Result<(), CorpusError> {
        let Done { batch, end, .. } = done;
        let part = self
            .encoder
            .window(batch)
            .map_err(|problem| CorpusError::Encode {
                first: batch.first,
                last: end.row.saturating_sub(1),
                format: self.format,
                problem,
            })?;
        let entry = Entry {
            end: *end,
            refused: done.refused,
            tokens: done.tokens,
            note: part.note,
            inferred: self.inferred.take().filter(|_| batch.first == 0),
            ..Entry::default()
        };
        self.store
            .append(self.head, &part.bytes, &refused(batch), entry)
    }
}

/// Returns the lines of refused rows.
fn refused(batch: &Batch) -> Vec<u8> {
    let mut lines = Vec::new();
    for (row, number) in batch.rows.iter().zip(batch.first..) {
        if let Err(reason) = row {
            let reason: String = reason.chars().take(MAX_REASON).collect();
            let line = serde_json::json!({"row": number, "reason": reason});
            lines.extend_from_slice(line.to_string().as_bytes());
            lines.push(b'\n');
        }
    }
    lines
}

/// Calls a function that decodes or encodes, and returns its panic as an error.
fn contain<T>(
    thread: &'static str,
    call: impl FnOnce() -> Result<T, CorpusError>,
) -> Result<T, CorpusError> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(panicked(thread, &panic)))
}

/// Calls a function that reads, and returns its panic as an error of the input.
fn contain_reader<T>(
    checked: &Checked<'_>,
    call: impl FnOnce() -> Result<T, CorpusError>,
) -> Result<T, CorpusError> {
    contain("reader", call).map_err(|error| match error {
        CorpusError::Panicked { problem, .. } => CorpusError::input(
            &checked.job.input,
            checked.input.name(),
            format!("it is damaged ({problem})"),
        ),
        error => error,
    })
}

fn panicked(thread: &'static str, panic: &Box<dyn Any + Send>) -> CorpusError {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    CorpusError::Panicked {
        thread,
        problem: text.unwrap_or_else(|| "a panic without a text".to_owned()),
    }
}
