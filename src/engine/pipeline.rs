//! Batches in flight: while one runs, the next one waits right behind it.

use std::{
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread::JoinHandle,
};

use super::{EngineError, Outputs, Session};
use crate::{Batch, runtime::cuda::CudaTicket};

/// Batches that were submitted and that the thread has not taken.
const BEHIND: usize = 1;

/// Runs batches one after another, in the order in which they were submitted, from a thread of its own. One runs and one waits
/// behind it, on a CUDA device's stream or before the thread that computes, so that the executor has its next batch the moment
/// it is done. Who submits many more waits in [`submit`](Self::submit), also while nobody takes the results.
pub struct Pipeline {
    /// `None` once it is to end.
    batches: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<Session>>,
}

struct Job {
    batch: Batch,
    answer: SyncSender<Result<Pending, EngineError>>,
}

/// A batch that was submitted. Dropping it gives its results up; it runs all the same.
pub struct Pending(Where);

/// Where a batch is.
enum Where {
    Done(Box<Outputs>),
    /// On a device, with the lengths of its sequences.
    Running(CudaTicket, Vec<u32>),
    /// On its way to a pipeline's thread, which submits it.
    Sent(Receiver<Result<Pending, EngineError>>),
}

impl Pipeline {
    /// Takes a session to its thread.
    ///
    /// # Errors
    /// A thread that the system does not give.
    pub fn new(mut session: Session) -> Result<Self, EngineError> {
        let (batches, jobs) = sync_channel::<Job>(BEHIND);
        let run = move || {
            for Job { batch, answer } in jobs {
                session.make_place();
                // Who gave a batch up hears nothing of it.
                let _ = answer.send(session.submit(&batch));
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
            Ok(()) => Ok(Pending(Where::Sent(pending))),
            Err(_) => Err(EngineError::PipelineEnded),
        }
    }

    /// Waits until the executor has taken all batches, and gives the session back.
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
    pub(super) fn done(outputs: Outputs) -> Self {
        Self(Where::Done(Box::new(outputs)))
    }

    pub(super) fn running(ticket: CudaTicket, lens: Vec<u32>) -> Self {
        Self(Where::Running(ticket, lens))
    }

    /// The outputs of the batch, on any thread.
    ///
    /// # Errors
    /// What went wrong with the batch: what [`Session::submit`] refuses, where a pipeline submitted it, and what failed on the
    /// device. A pipeline's thread that has ended.
    pub fn wait(self) -> Result<Outputs, EngineError> {
        match self.0 {
            Where::Done(outputs) => Ok(*outputs),
            Where::Running(ticket, lens) => Ok(Outputs {
                outputs: ticket.wait()?,
                lens,
            }),
            Where::Sent(submitted) => {
                let submitted = submitted.recv().map_err(|_| EngineError::PipelineEnded)?;
                submitted?.wait()
            }
        }
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
