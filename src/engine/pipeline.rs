//! A session with two places: while a batch runs, the next one waits right behind it.

use std::{
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread::JoinHandle,
};

use super::{EngineError, Outputs, Session};
use crate::Batch;

/// Batches that were submitted and have not begun.
const BEHIND: usize = 1;

/// Runs batches one after another, in the order in which they were submitted, on a thread of its own. One runs and one waits
/// behind it, so that the executor has its next batch the moment it is done; a third waits in [`submit`](Self::submit).
pub struct Pipeline {
    /// `None` once it is to end.
    batches: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<Session>>,
}

struct Job {
    batch: Batch,
    answer: SyncSender<Result<Outputs, EngineError>>,
}

/// A batch that was submitted. Dropping it gives its results up; it runs all the same.
#[derive(Debug)]
pub struct Pending(Receiver<Result<Outputs, EngineError>>);

impl Pipeline {
    /// Takes a session to its thread.
    ///
    /// # Errors
    /// A thread that the system does not give.
    pub fn new(mut session: Session) -> Result<Self, EngineError> {
        let (batches, jobs) = sync_channel::<Job>(BEHIND);
        let run = move || {
            for Job { batch, answer } in jobs {
                // Who gave a batch up hears nothing of it.
                let _ = answer.send(session.run(&batch));
            }
            session
        };
        let thread = std::thread::Builder::new().name("batches".to_owned());
        let thread = thread.spawn(run).map_err(|e| EngineError::Threads {
            problem: e.to_string(),
        })?;
        Ok(Self {
            batches: Some(batches),
            thread: Some(thread),
        })
    }

    /// Gives a batch to the executor, and waits while both places are taken.
    ///
    /// # Errors
    /// A thread that has ended. What is wrong with the batch is told by [`Pending::wait`].
    pub fn submit(&self, batch: Batch) -> Result<Pending, EngineError> {
        let (answer, pending) = sync_channel(1);
        let job = Job { batch, answer };
        let batches = self.batches.as_ref().ok_or(EngineError::PipelineEnded)?;
        match batches.send(job) {
            Ok(()) => Ok(Pending(pending)),
            Err(_) => Err(EngineError::PipelineEnded),
        }
    }

    /// Waits until all batches have run, and gives the session back.
    ///
    /// # Errors
    /// A thread that ended by a panic.
    pub fn into_session(mut self) -> Result<Session, EngineError> {
        self.batches = None;
        let thread = self.thread.take().ok_or(EngineError::PipelineEnded)?;
        thread.join().map_err(|_| EngineError::PipelineEnded)
    }
}

impl Pending {
    /// The outputs of the batch, on any thread.
    ///
    /// # Errors
    /// Those of [`Session::run`], and a thread that has ended.
    pub fn wait(self) -> Result<Outputs, EngineError> {
        self.0.recv().map_err(|_| EngineError::PipelineEnded)?
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.batches = None;
        if let Some(thread) = self.thread.take() {
            // A panic was shown when it happened.
            let _ = thread.join();
        }
    }
}
