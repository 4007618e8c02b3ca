//! How a device reads prompts while it writes for others.
//!
//! A run that reads prompts reads all weights, as a step does, and writing for few sequences leaves most of the device idle. So prompts
//! are read on a stream of their own beside the steps. A run takes all that wait, and those that come while it runs wait for
//! the next: the busier the device, the more prompts share a run.

use std::{collections::VecDeque, sync::Arc};

use super::{Generator, Row};
use crate::{engine::EngineError, runtime::cuda::Fence};

/// Runs that read prompts on a device at most: one that runs, and one right behind it.
const ON_THEIR_WAY: usize = 2;

/// Runs that read prompts and sources on a stream of their own, the oldest first.
#[derive(Default)]
pub(super) struct Fills(VecDeque<Arc<Fence>>);

impl Fills {
    /// Whether another one may be put on the stream. The host would wait for the memory of a further one.
    pub(super) fn have_place(&mut self) -> Result<bool, EngineError> {
        while let Some(first) = self.0.front()
            && first.is_passed()?
        {
            self.0.pop_front();
        }
        Ok(self.0.len() < ON_THEIR_WAY)
    }

    /// Notes one that is on its way now; there is none on a CPU.
    pub(super) fn note(&mut self, filled: Option<Fence>) -> Option<Arc<Fence>> {
        let filled = filled.map(Arc::new);
        self.0.extend(filled.clone());
        filled
    }

    /// The youngest, which all of them are done before.
    pub(super) fn last(&self) -> Option<Arc<Fence>> {
        self.0.back().cloned()
    }

    /// Waits until there is place for another one.
    pub(super) fn wait_for_place(&mut self) -> Result<(), EngineError> {
        if !self.have_place()?
            && let Some(first) = self.0.pop_front()
        {
            first.wait()?;
        }
        Ok(())
    }
}

impl Generator {
    /// Adds prompts to the cache, all but their last tokens, for the device to go on with.
    pub(super) fn fill_caches(&mut self) -> Result<(), EngineError> {
        let awaits = |row: &Row| row.suits_device() && row.row.is_none() && row.open() > 1;
        let mut left = self.most_prompt_tokens;
        let mut taken = Vec::new();
        for (at, row) in self.rows.iter().enumerate() {
            if awaits(row) && left > 0 {
                let n = (row.open() - 1).min(left);
                left -= n;
                taken.push((at, n));
            }
        }
        if taken.is_empty() || !self.fills.have_place()? {
            return Ok(());
        }
        let batch = self.batch(&taken)?;
        let filled = self.executor.fill(&batch)?;
        let filled = self.fills.note(filled);
        for (at, n) in taken {
            self.rows[at].cached += n;
            self.rows[at].filled.clone_from(&filled);
        }
        Ok(())
    }
}
