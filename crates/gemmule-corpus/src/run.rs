//! Runs a job. One thread reads windows, the calling thread passes them to the model, and another thread writes the results.

use std::{
    any::Any,
    collections::VecDeque,
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
    Column, CorpusError, Job, Model, Results,
    input::{self, Inferred, Source},
    job::Checked,
    journal::Entry,
    model::{fit, problem, unwritable},
    output::{self, Batch, Encoder, Layout},
    store::{Opened, Store},
    window::{Kept, Position, Row, Window},
};

/// Maximum number of windows that the model has in progress.
const BEGUN: usize = 2;

/// Maximum length in bytes of a reason in the list of refused rows.
const MAX_REASON: usize = 1000;

/// The result of a completed run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Number of rows of the input.
    pub rows: u64,
    /// Number of rows with values.
    pub written: u64,
    /// Number of rows that are refused.
    pub refused: u64,
    /// Number of rows that earlier, interrupted runs finished.
    pub resumed: u64,
    /// Number of tokens of all windows; `None` if the model did not return it for every window.
    pub tokens: Option<u64>,
    pub output: PathBuf,
    /// The list of refused rows, if there are any.
    pub errors: Option<PathBuf>,
}

/// The state of a run after a window is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Number of rows that are computed or refused, including rows of earlier runs.
    pub rows: u64,
    /// Number of rows of the input, if its format states it.
    pub total_rows: Option<u64>,
    /// Number of decompressed bytes that have been read; 0 for Parquet.
    pub bytes: u64,
    /// Size of the input in bytes, if it is not compressed and not Parquet.
    pub total_bytes: Option<u64>,
    /// Number of rows that are refused.
    pub refused: u64,
    /// Number of tokens of all computed rows; `None` if the model did not return it for every window.
    pub tokens: Option<u64>,
}

/// A progress callback and a cancellation flag.
#[derive(Default)]
pub struct Hooks<'h> {
    /// Called after each window.
    pub progress: Option<&'h mut dyn FnMut(&Progress)>,
    /// Set to stop the run. Windows that are already computed are written first.
    pub cancel: Option<&'h AtomicBool>,
}

/// Computes values for the rows of a file, and writes them. An interrupted run resumes where it stopped.
///
/// # Errors
/// Returns an error if options contradict each other, or if the input cannot be read. Returns an error if the output exists, is being
/// written by another run, or has a format that cannot hold the columns. Returns an error if the model fails, the disk is full, or the run
/// is canceled. After [`CorpusError::Stopped`], the same command resumes the run.
pub fn run(job: &Job, model: &mut dyn Model, hooks: Hooks<'_>) -> Result<Report, CorpusError> {
    let columns = model.columns();
    if let Some(problem) = problem(&columns) {
        return Err(CorpusError::BadModel { problem });
    }
    job.check(&columns)?;
    let job = &job.followed()?;
    let checked = job.checked(&columns)?;
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
    let mut identity = checked.options();
    identity.extend(input.clone());
    identity.insert("model".to_owned(), model.identity());
    let computed = columns
        .iter()
        .map(|column| format!("{}: {}", column.name, column.kind));
    let computed: Vec<String> = computed.collect();
    identity.insert("computed columns".to_owned(), computed.join("; "));
    let mut store = match Store::open(job, identity)? {
        Opened::Published(report) => return Ok(report),
        Opened::Unfinished(store) => store,
    };
    if store.state().complete.is_none() {
        let finished = finish(&checked, model, columns, hooks, &mut store, &input);
        if let Err(error) = finished {
            store.abandon_empty();
            return Err(stopped(error, &store, job));
        }
    }
    store.publish()
}

/// Wraps the error of a run. If the run can be resumed, the result states the number of finished rows.
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

/// Computes the remaining rows and completes the output file.
fn finish(
    checked: &Checked<'_>,
    model: &mut dyn Model,
    columns: Vec<Column>,
    mut hooks: Hooks<'_>,
    store: &mut Store,
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
        fields: source.fields(),
        columns: columns.clone(),
        vectors: job.vectors,
        model: model.identity(),
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
    let mut computing = Computing {
        job,
        model,
        columns,
        begun: VecDeque::new(),
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
            // The channels have no buffer. A buffer of windows would not help, because the model already has the next window. A buffer of
            // results would be lost in a crash.
            let (to_compute, windows) = sync_channel(0);
            let (to_write, batches) = sync_channel(0);
            scope.spawn(move || read(checked, source.as_mut(), &to_compute));
            let writer = scope.spawn(move || contain("writer", || writing.all(&batches)));
            let computed = computing.all(first, windows, to_write, &mut hooks);
            let written = writer
                .join()
                .unwrap_or_else(|panic| Err(panicked("writer", &panic)));
            // If the writer fails, `computed` is `Ok`, so return the writer's error first.
            written.and(computed)
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

/// Reads windows until the input ends, an error occurs, or the receiver is dropped.
fn read(
    checked: &Checked<'_>,
    source: &mut dyn Source,
    to_compute: &SyncSender<Result<Window, CorpusError>>,
) {
    loop {
        let window = contain_reader(checked, || source.window()).transpose();
        let Some(window) = window else {
            return;
        };
        let is_last = window.is_err();
        if to_compute.send(window).is_err() || is_last {
            return;
        }
    }
}

/// The part of a run that is executed on the calling thread.
struct Computing<'r> {
    job: &'r Job,
    model: &'r mut dyn Model,
    columns: Vec<Column>,
    /// Windows that the model has in progress, oldest first.
    begun: VecDeque<Begun>,
    progress: Progress,
}

/// A window that the model has in progress.
struct Begun {
    first: u64,
    /// For each row, `Ok` if its texts were passed to the model, or the reason why it is refused.
    rows: Vec<Result<(), String>>,
    kept: Kept,
    end: Position,
}

/// A computed window. `refused` and `tokens` count all refused rows and all tokens from the start of the input to the end of the window.
struct Done {
    batch: Batch,
    end: Position,
    refused: u64,
    tokens: Option<u64>,
}

impl Computing<'_> {
    fn all(
        &mut self,
        first: Window,
        windows: Receiver<Result<Window, CorpusError>>,
        to_write: SyncSender<Done>,
        hooks: &mut Hooks<'_>,
    ) -> Result<(), CorpusError> {
        let mut windows = std::iter::once(Ok(first)).chain(windows).fuse();
        // Error of the reader, returned after the windows before the error are computed.
        let mut end = Ok(());
        loop {
            if hooks
                .cancel
                .is_some_and(|cancel| cancel.load(Ordering::Relaxed))
            {
                return Err(CorpusError::Cancelled);
            }
            while self.begun.len() < BEGUN && end.is_ok() {
                match windows.next() {
                    Some(Ok(window)) => self.begin(window),
                    Some(Err(error)) => end = Err(error),
                    None => break,
                }
            }
            let Some(begun) = self.begun.pop_front() else {
                return end;
            };
            let done = self.finish(begun)?;
            if to_write.send(done).is_err() {
                return Ok(());
            }
            if let Some(progress) = &mut hooks.progress {
                progress(&self.progress);
            }
        }
    }

    /// Passes a window to the model.
    fn begin(&mut self, window: Window) {
        let Window {
            first,
            rows,
            kept,
            end,
        } = window;
        let mut given = Vec::with_capacity(rows.len());
        let give = |row: Row| row.map(|texts| given.push(texts));
        let rows: Vec<Result<(), String>> = rows.into_iter().map(give).collect();
        if !given.is_empty() {
            self.model.begin(given);
        }
        self.begun.push_back(Begun {
            first,
            rows,
            kept,
            end,
        });
    }

    /// Waits for the results of `window`, the oldest window in progress, and checks them.
    fn finish(&mut self, window: Begun) -> Result<Done, CorpusError> {
        let Begun {
            first,
            rows,
            kept,
            end,
        } = window;
        let n_given = rows.iter().flatten().count();
        let results = match n_given {
            0 => Ok(Results {
                rows: Vec::new(),
                tokens: Some(0),
            }),
            _ => self.model.finish(),
        };
        let results = results.map_err(|source| CorpusError::Model {
            first,
            last: end.row.saturating_sub(1),
            source,
        })?;
        let bad = |problem: String| Err(CorpusError::BadModel { problem });
        if results.rows.len() != n_given {
            return bad(format!("{} results for {n_given} rows", results.rows.len()));
        }
        let mut values = results.rows.into_iter();
        let mut done = Vec::with_capacity(rows.len());
        for row in rows {
            let row = row.and_then(|()| values.next().unwrap_or_else(|| Err(String::new())));
            done.push(match row {
                Ok(row) if !fit(&self.columns, &row) => {
                    let expected = self.columns.iter();
                    let expected = expected.map(|c| format!("`{}`, {}", c.name, c.kind));
                    let expected: Vec<String> = expected.collect();
                    return bad(format!(
                        "a row has other values than its columns, {}",
                        expected.join("; ")
                    ));
                }
                Ok(row) => {
                    let mut all = row.iter();
                    let reason = all.find_map(|value| unwritable(value, self.job.vectors));
                    reason.map_or(Ok(row), Err)
                }
                refused => refused,
            });
        }
        self.progress.rows = end.row;
        self.progress.bytes = end.byte;
        self.progress.refused += done.iter().filter(|row| row.is_err()).count() as u64;
        self.progress.tokens = match (self.progress.tokens, results.tokens) {
            (Some(before), Some(tokens)) => Some(before + tokens),
            _ => None,
        };
        Ok(Done {
            batch: Batch {
                first,
                kept,
                rows: done,
            },
            end,
            refused: self.progress.refused,
            tokens: self.progress.tokens,
        })
    }
}

/// The part of a run that writes results.
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

/// Returns the lines for the refused rows of a window in the list of refused rows.
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

/// Calls a function that encodes or decodes, and converts a panic to an error.
fn contain<T>(
    thread: &'static str,
    call: impl FnOnce() -> Result<T, CorpusError>,
) -> Result<T, CorpusError> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(panicked(thread, &panic)))
}

/// Calls a function that reads the input, and converts a panic to an input error.
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
