//! Concurrent prefill on a device.
//!
//! Decoding a few sequences leaves most of the device idle. Prompts are therefore processed (prefill) on a separate stream, concurrently
//! with the decode steps. Each prefill run reads all weights. To share this cost, a run takes all waiting prompts, up to a maximum number
//! of tokens. Prompts that arrive during a run wait for the next one, so on a busier device, more prompts share a run.

use std::{collections::VecDeque, sync::Arc};

use super::{Executor, GenerateError, Generator, Row};
use crate::runtime::cuda::Fence;

/// Max number of prefill runs in flight: one that runs and one that is enqueued.
const MAX_IN_FLIGHT: usize = 2;

/// Prefill runs in flight, oldest first.
#[derive(Default)]
pub(super) struct Fills(VecDeque<Arc<Fence>>);

impl Fills {
    /// Returns whether another run can be enqueued without waiting for an earlier run to free its memory.
    pub(super) fn has_room(&mut self) -> Result<bool, GenerateError> {
        while let Some(first) = self.0.front()
            && first.is_passed()?
        {
            self.0.pop_front();
        }
        Ok(self.0.len() < MAX_IN_FLIGHT)
    }

    /// Records a run that was just enqueued. `filled` is its fence; `None` on a CPU.
    pub(super) fn push(&mut self, filled: Option<Fence>) -> Option<Arc<Fence>> {
        let filled = filled.map(Arc::new);
        self.0.extend(filled.clone());
        filled
    }

    /// Returns the fence of the newest run. Once it has passed, all earlier fences have passed, too.
    pub(super) fn last(&self) -> Option<Arc<Fence>> {
        self.0.back().cloned()
    }

    /// Waits until another run can be enqueued.
    pub(super) fn wait_for_room(&mut self) -> Result<(), GenerateError> {
        if !self.has_room()?
            && let Some(first) = self.0.pop_front()
        {
            first.wait()?;
        }
        Ok(())
    }
}

impl Generator {
    /// Adds waiting prompts to the cache, except for the last token of each prompt, which is the input of the first decode step. If the
    /// device is idle, all waiting prompts fit in one run, and none of their requests uses beam search,
    /// [`fill_and_choose`](Self::fill_and_choose) adds whole prompts instead.
    pub(super) fn fill_caches(&mut self) -> Result<(), GenerateError> {
        let awaits = |row: &Row| row.suits_device() && row.row.is_none() && row.open() > 1;
        let mut left = self.max_prompt_tokens;
        let mut taken = Vec::new();
        for (at, row) in self.rows.iter().enumerate() {
            if awaits(row) && left > 0 {
                let n = (row.open() - 1).min(left);
                left -= n;
                taken.push((at, n));
            }
        }
        if taken.is_empty() || !self.fills.has_room()? {
            return Ok(());
        }
        let is_complete = |&(at, n): &(usize, usize)| {
            let row = &self.rows[at];
            n + 1 == row.open() && row.beams().is_none()
        };
        let n_tokens: usize = taken.iter().map(|&(_, n)| n + 1).sum();
        let fits = n_tokens <= self.max_prompt_tokens;
        if self.in_flight() == 0 && fits && taken.iter().all(is_complete) {
            return self.fill_and_choose(&taken);
        }
        let batch = self.batch(&taken)?;
        let filled = self.executor.fill(&batch)?;
        let filled = self.fills.push(filled);
        for (at, n) in taken {
            self.rows[at].cached += n;
            self.rows[at].filled.clone_from(&filled);
        }
        Ok(())
    }

    /// Adds whole prompts to the cache and selects their first new tokens in the same run, which saves a decode step. This is only called
    /// if no step is in flight. While steps are in flight, this saves nothing: the last token of a prompt joins the next decode step,
    /// which reads the weights for all sequences anyway. `taken` has, for each prompt, its index in `rows` and the number of tokens to add
    /// before its last token.
    fn fill_and_choose(&mut self, taken: &[(usize, usize)]) -> Result<(), GenerateError> {
        let whole: Vec<_> = taken.iter().map(|&(at, n)| (at, n + 1)).collect();
        let batch = self.batch(&whole)?;
        let (Executor::Cuda(session, cache), Some(device)) = (&mut self.executor, &mut self.device)
        else {
            return Ok(());
        };
        let (filled, logits) = session.fill_to_logits(&batch, cache)?;
        let filled = self.fills.push(Some(filled));
        for &(at, n) in taken {
            self.rows[at].cached += n;
            self.rows[at].filled.clone_from(&filled);
        }
        device.seat(&mut self.rows)?;
        let which = taken.iter().map(|&(at, _)| at);
        let chosen = device.choose(&mut self.rows, which, logits)?;
        // The next prefill run overwrites the logits, so it must wait until the tokens have been chosen from them.
        session.wait_behind(&chosen)?;
        self.run_ahead()
    }
}
