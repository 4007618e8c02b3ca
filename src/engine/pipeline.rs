//! Pipelined execution: the next batch is enqueued while the current one runs.

use std::{
    sync::mpsc::{SyncSender, sync_channel},
    thread::JoinHandle,
};

use super::{EngineError, Pending, Session};
use crate::Batch;

/// Capacity of the queue of batches that the pipeline's thread has not yet received.
const QUEUE: usize = 1;

/// Runs batches on a separate thread, in order of submission. While one batch runs, the next one is already enqueued: on the CUDA stream
/// or, if the model runs on a CPU, in the queue of the thread. The executor is therefore not idle between batches. Further calls of
/// [`submit`](Self::submit) block until the queue has room. Batches run even if the caller does not wait for their results.
pub struct Pipeline {
    /// `None` after shutdown has begun.
    batches: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<Session>>,
}

struct Job {
    batch: Batch,
    answer: SyncSender<Result<Pending, EngineError>>,
}

impl Pipeline {
    /// Starts a thread that owns the session.
    ///
    /// # Errors
    /// Returns an error if the system cannot start a thread.
    pub fn new(mut session: Session) -> Result<Self, EngineError> {
        let (batches, jobs) = sync_channel::<Job>(QUEUE);
        let run = move || {
            for Job { batch, answer } in jobs {
                session.make_place();
                // The receiver may have been dropped.
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

    /// Enqueues a batch, and blocks while the queue is full. Errors of the batch are returned by [`Pending::wait`].
    ///
    /// # Errors
    /// Returns [`EngineError::PipelineEnded`] if the thread has ended.
    pub fn submit(&self, batch: Batch) -> Result<Pending, EngineError> {
        let (answer, pending) = sync_channel(1);
        let job = Job { batch, answer };
        let batches = self.batches.as_ref().ok_or(EngineError::PipelineEnded)?;
        match batches.send(job) {
            Ok(()) => Ok(Pending::sent(pending)),
            Err(_) => Err(EngineError::PipelineEnded),
        }
    }

    /// Waits until all batches have been submitted to the executor, and returns the session.
    pub fn into_session(mut self) -> Result<Session, EngineError> {
        self.batches = None;
        let thread = self.thread.take().ok_or(EngineError::PipelineEnded)?;
        thread.join().map_err(|_| EngineError::PipelineEnded)
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.batches = None;
        if let Some(thread) = self.thread.take() {
            // The panic hook has already printed the panic.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceChoice, Engine, Outputs, runtime::weights::RandomWeights};

    #[test]
    fn a_pipeline_returns_the_results_of_runs_in_any_order() {
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
        // Waits for the batches in reverse order, each on its own thread, except for one batch that is dropped.
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
