use std::sync::mpsc::Receiver;

use super::{EngineError, Outputs};
use crate::runtime::cuda::CudaTicket;

/// A submitted batch. Dropping it discards the results, but the batch still runs.
#[derive(Debug)]
pub struct Pending(Where);

/// Current state of a submitted batch.
#[derive(Debug)]
enum Where {
    Done(Box<Outputs>),
    /// Runs on a CUDA device. Holds the lengths of the batch's sequences.
    Running(CudaTicket, Vec<u32>),
    /// Sent to a pipeline's thread, which will submit the batch.
    Sent(Receiver<Result<Pending, EngineError>>),
}

impl Pending {
    pub(super) fn done(outputs: Outputs) -> Self {
        Self(Where::Done(Box::new(outputs)))
    }

    /// Creates the handle of a batch that was sent to a pipeline's thread.
    pub(super) fn sent(submitted: Receiver<Result<Self, EngineError>>) -> Self {
        Self(Where::Sent(submitted))
    }

    pub(super) fn running(ticket: CudaTicket, lens: Vec<u32>) -> Self {
        Self(Where::Running(ticket, lens))
    }

    /// Waits for the outputs of the batch. May be called on any thread.
    ///
    /// # Errors
    /// Returns errors of the device. For a batch of a pipeline, also returns the errors of
    /// [`Session::submit`](super::Session::submit), and an error if the pipeline's thread has ended.
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
