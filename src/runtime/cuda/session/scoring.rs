//! Runs whose token vectors are scored on the device.

use cudarc::driver::CudaStream;

use super::{CudaSession, Ready};
use crate::runtime::{
    batch::Batch,
    cuda::{
        error::{CudaError, During},
        scorer::{Scorer, TakenRows, Vectors},
    },
};

impl CudaSession {
    /// Returns whether the model has token vectors that [`run_scoring`](Self::run_scoring) can score.
    pub fn can_score(&self) -> bool {
        self.launcher.model.scoring().is_some()
    }

    /// Runs a batch of documents, and returns the late-interaction score of each document for `query`
    /// ([`MaxSim`](crate::kernels::max_sim::MaxSim)). The vectors of the documents stay on the device. The caller must have checked the
    /// batch against the model's limits. `query` is `[query vectors, width]`, with the width of the model's token vectors.
    ///
    /// # Errors
    /// Returns [`CudaError::InFlight`] if two batches are in flight, an error if the model has no token vectors or an allocation fails, and
    /// driver errors.
    pub fn run_scoring(
        &mut self,
        batch: &Batch,
        query: &[f32],
        documents: TakenRows<'_>,
    ) -> Result<Vec<f32>, CudaError> {
        let ready = self.prepare(batch, 0)?;
        let mut scorer = match self.scorer.take() {
            Some(scorer) => scorer,
            None => Scorer::new(&self.launcher.model.device),
        };
        let stream = std::sync::Arc::clone(&self.launcher.stream);
        let ran = self.enqueue_scoring(&ready, batch, &stream, &mut scorer, query, documents);
        // Wait even after an error, because the memory of the batch may be reused or freed afterwards.
        let waited = stream.synchronize();
        self.slots[ready.slot].staging.uploaded();
        ran?;
        waited.during(|| "wait for the run".to_owned())?;
        let n = documents.offsets.len().saturating_sub(1);
        let scores = scorer.scores(n).collect();
        self.scorer = Some(scorer);
        Ok(scores)
    }

    fn enqueue_scoring(
        &mut self,
        ready: &Ready,
        batch: &Batch,
        stream: &CudaStream,
        scorer: &mut Scorer,
        query: &[f32],
        documents: TakenRows<'_>,
    ) -> Result<(), CudaError> {
        let enqueued = self.enqueue(ready, batch)?;
        let model = &self.launcher.model;
        let program = model.program();
        let (tensor, _) = program.token_vectors().ok_or(CudaError::NoTokenVectors)?;
        let outputs = program.outputs_of(ready.own.part);
        let addresses = self.output_addresses(ready);
        let own = outputs.zip(addresses).find(|((_, at), _)| *at == tensor);
        let (_, address) = own.ok_or(CudaError::NoTokenVectors)?;
        let vectors = Vectors::OnDevice(address);
        scorer.enqueue(model, stream, query, &vectors, documents)?;
        self.learn(ready, enqueued)
    }
}
