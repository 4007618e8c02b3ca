//! A model on one or several devices. It computes windows, which are groups of rows that are read and sorted together.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
};

use gemmule_corpus::{Column, Model, ModelError, Results, Texts};
use rayon::prelude::*;

use super::{
    model::{Task, Units},
    window::{Place, Window},
};
use crate::{Batch, Engine, EngineError, Outputs, Session, engine::Pending, text::Encoded};

/// Number of rows that are tokenized together.
const PIECE: usize = 1024;

/// Capacity of the queue of packed batches, in addition to one batch per device.
const PACKED: usize = 1;

/// Capacity, in submitted batches, of the queue from a device's thread to its collector thread.
const COMPUTED: usize = 2;

/// Options that affect batches.
#[derive(Clone, Copy)]
pub(super) struct Options {
    /// Max number of tokens of a batch, unless it is a single sequence.
    pub(super) batch_tokens: usize,
    /// Whether a row is refused if one of its texts is too long. Otherwise the text is truncated.
    pub(super) refuses_long: bool,
}

/// Threads that tokenize rows, pack them into batches, compute the batches and collect the results.
pub(super) struct Pool<T: Task> {
    identity: String,
    columns: Vec<Column>,
    /// Sender to the tokenizer. `None` after shutdown has begun.
    windows: Option<SyncSender<Untokenized<T>>>,
    begun: VecDeque<Arc<Window<T>>>,
    threads: Vec<JoinHandle<()>>,
    shared: Arc<Shared<T>>,
}

struct Shared<T> {
    task: T,
    /// The engines of the devices, which compute the same model. There is at least one.
    engines: Vec<Engine>,
    options: Options,
    /// Whether the pool has been dropped, so that results are no longer needed.
    is_stopped: AtomicBool,
    /// Number of rows whose texts were truncated.
    n_cut: AtomicU64,
}

/// A batch of sequences of a window. If it is dropped before it is computed, the window fails.
struct Work<T: Task> {
    window: Arc<Window<T>>,
    places: Vec<Place>,
    batch: Batch,
}

/// A batch that was submitted to a device, or the error of submitting it.
type Submitted<T> = (Work<T>, Result<Pending, EngineError>);

impl<T: Task> Drop for Work<T> {
    fn drop(&mut self) {
        if !self.places.is_empty() {
            self.window.fail(EngineError::PipelineEnded);
        }
    }
}

impl<T: Task> Pool<T> {
    /// Starts the threads. Before that, each engine computes a short text, to find the width of its output.
    ///
    /// # Errors
    /// Returns an error if a session cannot be opened, the short text cannot be computed, [`Task::columns`] fails, or a thread cannot be
    /// started.
    pub(super) fn start(
        engines: Vec<Engine>,
        task: T,
        identity: String,
        options: Options,
    ) -> Result<Self, miette::Report> {
        let mut sessions = Vec::with_capacity(engines.len());
        let mut width = 0;
        for engine in &engines {
            let mut session = engine.session()?;
            width = probe(&mut session, &task)?;
            sessions.push(session);
        }
        let columns = task.columns(width)?;
        let shared = Arc::new(Shared {
            task,
            engines,
            options,
            is_stopped: AtomicBool::new(false),
            n_cut: AtomicU64::new(0),
        });
        // One window can wait while another one is tokenized. At most two windows are in progress, so `begin` never blocks.
        let (windows, to_tokenize) = sync_channel(1);
        let (pieces, to_pack) = sync_channel(0);
        let (packed, work) = sync_channel(PACKED + sessions.len());
        let mut pool = Self {
            identity,
            columns,
            windows: Some(windows),
            begun: VecDeque::new(),
            threads: Vec::new(),
            shared: Arc::clone(&shared),
        };
        let own = Arc::clone(&shared);
        pool.spawn("tokenizer".to_owned(), move || {
            tokenize(to_tokenize, &own, &pieces);
        })?;
        let packer = Packer {
            batch_tokens: options.batch_tokens,
            packed,
        };
        pool.spawn("packer".to_owned(), move || packer.all(to_pack))?;
        let work = Arc::new(Mutex::new(work));
        for (at, session) in sessions.into_iter().enumerate() {
            let (computed, done) = sync_channel(COMPUTED);
            let (work, own) = (Arc::clone(&work), Arc::clone(&shared));
            pool.spawn(format!("device-{at}"), move || {
                compute(session, &work, &own, &computed);
            })?;
            let own = Arc::clone(&shared);
            pool.spawn(format!("collector-{at}"), move || collect(done, &own))?;
        }
        Ok(pool)
    }

    fn spawn(
        &mut self,
        name: String,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), EngineError> {
        let thread = thread::Builder::new().name(name).spawn(run);
        self.threads.push(thread.map_err(|e| EngineError::Threads {
            problem: e.to_string(),
        })?);
        Ok(())
    }

    /// Returns the number of rows whose texts were truncated.
    pub(super) fn n_cut(&self) -> u64 {
        self.shared.n_cut.load(Ordering::Relaxed)
    }
}

/// Runs the model on a short text. Returns the number of output values per sequence or per token.
fn probe<T: Task>(session: &mut Session, task: &T) -> Result<usize, miette::Report> {
    let texts = ["a".to_owned(), "a".to_owned()];
    let Units { sequences, .. } = task.encode(&texts).map_err(|reason| {
        miette::miette!("the test of the model with the text `a` failed: {reason}")
    })?;
    let batch = Encoded::batch(sequences.iter()).map_err(EngineError::from)?;
    let outputs = session.run(&batch)?;
    let shape = &outputs.get(task.output())?.shape;
    Ok(shape.last().map_or(0, |&n| n as usize))
}

impl<T: Task> Model for Pool<T> {
    fn identity(&self) -> String {
        self.identity.clone()
    }

    fn columns(&self) -> Vec<Column> {
        self.columns.clone()
    }

    fn begin(&mut self, rows: Vec<Texts>) {
        let window = Arc::new(Window::new(rows));
        self.begun.push_back(Arc::clone(&window));
        let window = Untokenized {
            window,
            is_done: false,
        };
        if let Some(windows) = &self.windows {
            // A window that cannot be sent is dropped, so it fails.
            let _ = windows.send(window);
        }
    }

    fn finish(&mut self) -> Result<Results, ModelError> {
        match self.begun.pop_front() {
            Some(window) => Ok(window.wait()?),
            None => Err("no window is begun".into()),
        }
    }
}

impl<T: Task> Drop for Pool<T> {
    fn drop(&mut self) {
        self.shared.is_stopped.store(true, Ordering::Relaxed);
        self.windows = None;
        for thread in self.threads.drain(..) {
            // Ignore a panic of the thread. It was printed when it happened.
            let _ = thread.join();
        }
    }
}

/// A window for the tokenizer. If it is dropped before it is tokenized, the window fails.
struct Untokenized<T: Task> {
    window: Arc<Window<T>>,
    is_done: bool,
}

impl<T: Task> Drop for Untokenized<T> {
    fn drop(&mut self) {
        if !self.is_done {
            self.window.fail(EngineError::PipelineEnded);
        }
    }
}

/// The index of a row, and either its sequences or the reason why it is refused.
type Encoding<T> = (usize, Result<Units<<T as Task>::Row>, String>);

/// Tokenized rows of a window. If it is dropped before the rows are packed, the window fails.
struct Piece<T: Task> {
    window: Arc<Window<T>>,
    rows: Vec<Encoding<T>>,
    is_last: bool,
}

impl<T: Task> Drop for Piece<T> {
    fn drop(&mut self) {
        if !self.rows.is_empty() || thread::panicking() {
            self.window.fail(EngineError::PipelineEnded);
        }
    }
}

/// Tokenizes the rows of each window, in order of the number of bytes of their texts, until results are no longer needed.
fn tokenize<T: Task>(
    windows: Receiver<Untokenized<T>>,
    shared: &Shared<T>,
    tokenized: &SyncSender<Piece<T>>,
) {
    for mut untokenized in windows {
        let window = Arc::clone(&untokenized.window);
        let bytes = |row: &usize| window.texts[*row].iter().map(String::len).sum::<usize>();
        let mut order: Vec<usize> = (0..window.texts.len()).collect();
        order.sort_by_key(bytes);
        let mut pieces = order.chunks(PIECE).peekable();
        while let Some(piece) = pieces.next() {
            let encode = |&row: &usize| (row, shared.encode(&window.texts[row]));
            let piece = Piece {
                window: Arc::clone(&window),
                rows: piece.par_iter().map(encode).collect(),
                is_last: pieces.peek().is_none(),
            };
            if shared.is_stopped.load(Ordering::Relaxed) || tokenized.send(piece).is_err() {
                return;
            }
        }
        untokenized.is_done = true;
    }
}

impl<T: Task> Shared<T> {
    /// Tokenizes a row. A row with a truncated text is refused or counted. A row with a sequence that the model does not accept is refused,
    /// so that it does not make a batch fail.
    fn encode(&self, texts: &[String]) -> Result<Units<T::Row>, String> {
        let units = self.task.encode(texts)?;
        let cut = units.sequences.iter().find(|one| one.is_cut);
        if let (Some(cut), true) = (cut, self.options.refuses_long) {
            return Err(format!(
                "the text has more tokens than the {} that the model takes",
                cut.ids.len()
            ));
        }
        for (index, sequence) in units.sequences.iter().enumerate() {
            let checked = self.engines[0].check(sequence);
            checked.map_err(|error| error.of_sequence(|_| index).to_string())?;
        }
        if cut.is_some() {
            self.n_cut.fetch_add(1, Ordering::Relaxed);
        }
        Ok(units)
    }
}

struct Packer<T: Task> {
    batch_tokens: usize,
    packed: SyncSender<Work<T>>,
}

/// A tokenized row.
struct Tokenized {
    row: usize,
    tokens: usize,
    sequences: Vec<Encoded>,
}

impl<T: Task> Packer<T> {
    /// Packs the rows of each window in order of their number of tokens, until results are no longer needed.
    fn all(&self, pieces: Receiver<Piece<T>>) {
        let mut left: Vec<Tokenized> = Vec::new();
        for mut piece in pieces {
            let window = Arc::clone(&piece.window);
            for (row, units) in piece.rows.drain(..) {
                match units {
                    Ok(Units {
                        row: own,
                        sequences,
                    }) => {
                        let tokens = sequences.iter().map(|one| one.ids.len()).sum();
                        window.encoded(row, own, sequences.len(), tokens as u64);
                        left.push(Tokenized {
                            row,
                            tokens,
                            sequences,
                        });
                    }
                    Err(reason) => window.set(row, Err(reason)),
                }
            }
            left.sort_by_key(|one| one.tokens);
            // Rows that do not fill a batch wait for the next piece of this window, but not for the next window. A resumed run may begin
            // with the next window, and must then form the same batches.
            if !self.pack(&window, &mut left, piece.is_last) {
                window.fail(EngineError::PipelineEnded);
                return;
            }
        }
    }

    /// Sends full batches of the rows, and keeps the remaining rows in `rows`. With `is_last`, which marks the last rows of the window,
    /// also sends the remaining rows. Returns false if results are no longer needed.
    fn pack(&self, window: &Arc<Window<T>>, rows: &mut Vec<Tokenized>, is_last: bool) -> bool {
        let limit = self.batch_tokens;
        let mut tokens: usize = rows.iter().map(|row| row.tokens).sum();
        let mut left = std::mem::take(rows).into_iter().peekable();
        while left.peek().is_some() && (is_last || tokens > limit) {
            let mut taken = Vec::new();
            let mut n = 0;
            while let Some(row) = left.next_if(|row| n == 0 || n + row.tokens <= limit) {
                n += row.tokens;
                taken.push(row);
            }
            tokens -= n;
            if !self.send(window, taken) {
                return false;
            }
        }
        rows.extend(left);
        true
    }

    /// Sends rows as one batch, or as several batches if a single row is larger than the limit.
    fn send(&self, window: &Arc<Window<T>>, rows: Vec<Tokenized>) -> bool {
        let limit = self.batch_tokens;
        let all = rows.iter().flat_map(|row| {
            let place = |(sequence, own)| {
                (
                    Place {
                        row: row.row,
                        sequence,
                    },
                    own,
                )
            };
            row.sequences.iter().enumerate().map(place)
        });
        let mut all = all.peekable();
        while all.peek().is_some() {
            let (mut places, mut sequences) = (Vec::new(), Vec::new());
            let mut n = 0;
            while let Some((place, own)) =
                all.next_if(|(_, own): &(Place, &Encoded)| n == 0 || n + own.ids.len() <= limit)
            {
                n += own.ids.len();
                places.push(place);
                sequences.push(own);
            }
            let batch = match Encoded::batch(sequences.into_iter()) {
                Ok(batch) => batch,
                Err(error) => {
                    window.fail(error.into());
                    return true;
                }
            };
            let work = Work {
                window: Arc::clone(window),
                places,
                batch,
            };
            if self.packed.send(work).is_err() {
                return false;
            }
        }
        true
    }
}

/// Submits batches to a device. One batch runs while another one waits.
fn compute<T: Task>(
    mut session: Session,
    work: &Mutex<Receiver<Work<T>>>,
    shared: &Shared<T>,
    computed: &SyncSender<Submitted<T>>,
) {
    loop {
        // Take a batch only when the device can accept it. Until then, another device can take the batch.
        session.make_place();
        // The lock is held while this device waits for a batch. Other devices wait for the lock.
        let next = work.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(next) = next else {
            return;
        };
        if shared.is_stopped.load(Ordering::Relaxed) {
            continue;
        }
        let submitted = session.submit(&next.batch);
        if computed.send((next, submitted)).is_err() {
            return;
        }
    }
}

/// Computes the values of rows from the outputs of batches.
fn collect<T: Task>(done: Receiver<Submitted<T>>, shared: &Shared<T>) {
    for (mut work, submitted) in done {
        let outputs = submitted.and_then(Pending::wait);
        let added = outputs.and_then(|outputs| add(&work, &outputs, shared));
        if let Err(error) = added {
            work.window.fail(error);
        }
        work.places.clear();
    }
}

/// Adds the outputs of a batch to its window.
fn add<T: Task>(work: &Work<T>, outputs: &Outputs, shared: &Shared<T>) -> Result<(), EngineError> {
    for (at, place) in work.places.iter().enumerate() {
        let values = outputs.sequence(shared.task.output(), at)?;
        work.window.add(&shared.task, *place, values);
    }
    Ok(())
}
