//! Tokenizes many texts on all threads, and runs them in batches of similar lengths. The device computes a batch while the caller uses the
//! results of the previous batch.

use std::borrow::Borrow;

use rayon::prelude::*;

use super::{Engine, EngineError, Pending, Session};
use crate::{
    Batch, Outputs,
    text::{Encoded, TextError},
};

/// Number of inputs that are tokenized between two calls of the callback `between`.
const TOKENIZED_AT_ONCE: usize = 256;

impl Engine {
    /// Tokenizes inputs on the engine's threads, and returns them in order. Calls `between` after every `TOKENIZED_AT_ONCE` inputs. If
    /// `between` returns an error, no more inputs are tokenized.
    ///
    /// # Errors
    /// Returns an error if an input cannot be tokenized (the error names the index of the first such input), or if `between` fails.
    #[doc(hidden)]
    pub fn encode_all<I: Sync, E: From<EngineError>>(
        &self,
        inputs: &[I],
        encode: impl Fn(&I) -> Result<Encoded, TextError> + Sync,
        mut between: impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<Encoded>, E> {
        let mut all = Vec::with_capacity(inputs.len());
        for piece in inputs.chunks(TOKENIZED_AT_ONCE) {
            let ones = || piece.par_iter().map(&encode).collect::<Vec<_>>();
            for one in self.on_threads(ones)? {
                let index = all.len();
                all.push(one.map_err(|error| EngineError::from(error.of_text(index)))?);
            }
            between()?;
        }
        Ok(all)
    }

    /// Runs texts in batches of up to `max_tokens` tokens. Calls `row` once per text with the outputs of the text's batch, the text's
    /// position in the batch, and its index in `encoded`. Returns the results of `row` in the order of `encoded`.
    ///
    /// # Errors
    /// Returns the errors of [`Session::each_output`] and of `row`.
    pub(super) fn in_order<T>(
        &self,
        encoded: &[impl Borrow<Encoded>],
        max_tokens: usize,
        row: impl Fn(&Outputs, usize, usize) -> Result<T, EngineError>,
    ) -> Result<Vec<T>, EngineError> {
        let mut rows: Vec<Option<T>> = encoded.iter().map(|_| None).collect();
        let take = |outputs: &Outputs, batch: &[usize]| {
            for (at, &index) in batch.iter().enumerate() {
                rows[index] = Some(row(outputs, at, index)?);
            }
            Ok(())
        };
        let mut session = self.session()?;
        session.each_output::<EngineError>(encoded, max_tokens, take, || Ok(()))?;
        Ok(rows.into_iter().flatten().collect())
    }

    /// Calls `work` on the threads of the CPU executor. If the engine uses a GPU, calls it on [`Threads::usual`](super::Threads::usual).
    ///
    /// # Errors
    /// Returns an error if threads cannot be started.
    pub(super) fn on_threads<T: Send>(
        &self,
        work: impl FnOnce() -> T + Send,
    ) -> Result<T, EngineError> {
        Ok(self.model.on_threads(work)?)
    }
}

impl Session {
    /// Splits texts into batches of up to `max_tokens` tokens. For each batch, calls `run` with the batch and the indices of its texts in
    /// `encoded`, and then `between`.
    ///
    /// # Errors
    /// Returns an error if `run` or `between` fails, or if the sequences of a batch are not a valid [`Batch`]. The latter error names a
    /// sequence by its index in `encoded`.
    #[doc(hidden)]
    pub fn each_batch<E: From<EngineError>>(
        &mut self,
        encoded: &[impl Borrow<Encoded>],
        max_tokens: usize,
        mut run: impl FnMut(&mut Session, &Batch, &[usize]) -> Result<(), E>,
        mut between: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let lens: Vec<usize> = encoded.iter().map(|own| own.borrow().ids.len()).collect();
        for indices in batches_of_texts(&lens, max_tokens) {
            let sequences = indices.iter().map(|&index| encoded[index].borrow());
            let batch = Encoded::batch(sequences);
            let batch = batch.map_err(|e| EngineError::from(e.of_sequence(|at| indices[at])))?;
            run(self, &batch, &indices)?;
            between()?;
        }
        Ok(())
    }

    /// Runs texts in batches of up to `max_tokens` tokens. Calls `take` with the outputs of each batch and the indices of its texts in
    /// `encoded`, while the device computes the next batch. Calls `between` after each batch is submitted.
    ///
    /// # Errors
    /// Returns an error if a batch fails, if an output has values that are not finite, or if `take` or `between` fails. An error about an
    /// invalid sequence names it by its index in `encoded`.
    #[doc(hidden)]
    pub fn each_output<E: From<EngineError>>(
        &mut self,
        encoded: &[impl Borrow<Encoded>],
        max_tokens: usize,
        mut take: impl FnMut(&Outputs, &[usize]) -> Result<(), E>,
        between: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let mut take = |(pending, at): (Pending, Vec<usize>)| {
            let outputs = pending.wait()?;
            outputs.check_finite()?;
            take(&outputs, &at)
        };
        let mut last: Option<(Pending, Vec<usize>)> = None;
        let run = |session: &mut Session, batch: &Batch, at: &[usize]| {
            let pending = session.submit(batch);
            let pending = pending.map_err(|error| error.of_sequence(|nth| at[nth]))?;
            let next = (pending, at.to_vec());
            last.replace(next).map_or(Ok(()), &mut take)
        };
        self.each_batch(encoded, max_tokens, run, between)?;
        last.map_or(Ok(()), take)
    }
}

/// Splits sequences of lengths `lens` into batches of up to `max_tokens` tokens, and returns the indices of the sequences of each batch.
/// Batches with the longest sequences come first, because they are the most likely to run out of memory, and such an error should come
/// early. A sequence with more than `max_tokens` tokens is a batch by itself.
fn batches_of_texts(lens: &[usize], max_tokens: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lens.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(lens[index]));
    let mut batches: Vec<Vec<usize>> = Vec::new();
    let mut tokens = 0;
    for index in order {
        tokens += lens[index];
        match batches.last_mut() {
            Some(batch) if tokens <= max_tokens => batch.push(index),
            _ => {
                batches.push(vec![index]);
                tokens = lens[index];
            }
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_hold_every_sequence_once_within_their_tokens() {
        let lengths = [9_000, 3, 16_384, 8_000, 1, 20_000];
        let expected = vec![vec![5], vec![2], vec![0], vec![3, 1, 4]];
        assert_eq!(batches_of_texts(&lengths, 16_384), expected);
        assert!(batches_of_texts(&[], 16_384).is_empty());
    }
}
