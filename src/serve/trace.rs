//! Writes the scheduling events of a service as lines of a trace (`simulate::Event`), on a separate thread.

use std::{
    fs::File,
    io::{self, BufWriter, Write},
    path::Path,
    sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel},
    thread::JoinHandle,
};

use crate::{
    EngineError,
    files::own::open_private,
    simulate::{Event, Happened},
};

/// Max number of events that wait to be written.
const MAX_QUEUED: usize = 1 << 16;

/// Recorder of scheduling events. It never waits for the disk. If writing is too slow or the file reaches its max size, the trace ends with
/// a warning.
pub struct Recorder {
    events: Option<SyncSender<Event>>,
    thread: Option<JoinHandle<()>>,
}

impl Recorder {
    /// Creates a file of at most `max_bytes` bytes, which only its owner may read.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created, or the system cannot start a thread.
    pub fn create(file: &Path, max_bytes: u64) -> Result<Self, EngineError> {
        let mut options = File::options();
        options.write(true).create(true).truncate(true);
        let opened = open_private(file, &mut options).map_err(|source| EngineError::Write {
            file: file.to_owned(),
            source,
        })?;
        let name = file.display().to_string();
        let (events, queue) = sync_channel(MAX_QUEUED);
        let thread = std::thread::Builder::new().name("trace".to_owned());
        let thread = thread.spawn(move || {
            if let Err(problem) = write(opened, &queue, max_bytes) {
                tracing::warn!("the trace `{name}` ends here: {problem}");
            }
        });
        let thread = thread.map_err(|e| EngineError::Threads {
            problem: e.to_string(),
        })?;
        Ok(Self {
            events: Some(events),
            thread: Some(thread),
        })
    }

    /// Records an event.
    pub(super) fn record(&mut self, event: Event) {
        let sent = self.events.as_ref().map(|events| events.try_send(event));
        if let Some(Err(_)) = sent {
            // A trace with a gap cannot be replayed, so stop tracing. If the thread has ended, it has logged the reason.
            tracing::warn!("nothing more is traced");
            self.events = None;
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.events = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn write(file: File, queue: &Receiver<Event>, max_bytes: u64) -> io::Result<()> {
    let mut file = BufWriter::new(file);
    let mut written = 0;
    loop {
        let event = match queue.try_recv() {
            Ok(event) => event,
            Err(TryRecvError::Disconnected) => return file.flush(),
            // Flush when no event is waiting, so that readers of the file see all events.
            Err(TryRecvError::Empty) => {
                file.flush()?;
                match queue.recv() {
                    Ok(event) => event,
                    Err(_) => return Ok(()),
                }
            }
        };
        let line = event.to_string();
        written += line.len() as u64 + 1;
        if written > max_bytes {
            file.flush()?;
            let problem = format!("it has reached its max size of {max_bytes} bytes");
            return Err(io::Error::other(problem));
        }
        writeln!(file, "{line}")?;
    }
}

/// Returns the `began` event, which is the first event of a trace.
pub(super) fn began(bytes: Vec<u64>, depth: u8) -> Event {
    Event::Happened(crate::schedule::Micros(0), Happened::Began { bytes, depth })
}
