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
#[derive(Debug)]
pub struct Pending(Where);

/// Where a batch is.
#[derive(Debug)]
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceChoice, Engine, runtime::weights::RandomWeights};

    #[test]
    fn what_is_submitted_has_the_results_of_runs_also_where_nobody_takes_them() {
        let config = serde_json::json!({
            "model_type": "bert", "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 64, "hidden_act": "gelu", "max_position_embeddings": 16, "type_vocab_size": 2,
            "layer_norm_eps": 1e-12,
        });
        let engine = Engine::builder("bert")
            .config_value(config)
            .random_weights(RandomWeights {
                seed: 1,
                deviation: 0.1,
            })
            .outputs(["last_hidden_state", "sentence_embedding"])
            .device(DeviceChoice::Cpu)
            .build()
            .expect("the model loads");
        let batches: Vec<Batch> = (1..=9)
            .map(|n| Batch::from_sequences(&[vec![n; n as usize], vec![2; 3]]).expect("a batch"))
            .collect();
        let mut session = engine.session().expect("a session");
        let expected: Vec<Outputs> = batches
            .iter()
            .map(|batch| session.run(batch).expect("it runs"))
            .collect();
        let pipeline = Pipeline::new(session).expect("a thread");
        let pending: Vec<Pending> = batches
            .iter()
            .map(|batch| pipeline.submit(batch.clone()).expect("a thread"))
            .collect();
        let too_long = Batch::from_sequences(&[vec![1; 17]]).expect("a batch");
        let wrong = pipeline.submit(too_long).expect("a thread");
        // The last first, each on a thread of its own, and one not at all.
        for (at, (pending, expected)) in pending.into_iter().zip(expected).enumerate().rev() {
            if at == 4 {
                continue;
            }
            let found = std::thread::spawn(move || pending.wait()).join();
            assert_eq!(found.expect("no panic").expect("it ran"), expected);
        }
        assert!(matches!(wrong.wait(), Err(EngineError::Batch(_))));
        let mut session = pipeline.into_session().expect("the thread ends well");
        assert!(session.run(&batches[0]).is_ok());
        assert_eq!(
            session
                .gaps(&batches[0], 1, 2)
                .expect("it is checked")
                .len(),
            0
        );
    }
}
