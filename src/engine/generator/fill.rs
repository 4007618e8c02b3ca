//! When a device reads prompts while it writes for others.
//!
//! A run that fills caches reads all weights, as a step does, so that it costs much the same for one short prompt as for ten, and
//! every sequence that is written waits for it. So short prompts that come one by one are gathered for some steps.

use std::{collections::VecDeque, sync::Arc};

use super::{Generator, Row};
use crate::{engine::EngineError, runtime::cuda::Fence};

/// A step is taken to last as long as so many runs of short prompts, by their launches alone: what gathering gains in a server was not
/// measured apart from its clients.
const RUNS_OF_A_STEP: u64 = 2;
/// Steps that a prompt waits for others at most.
const MOST_STEPS: u64 = 8;
/// Prompts of so many tokens together are worth a run, as their products and not the weights take its time.
const WORTH_A_RUN: usize = 256;

/// Runs that read prompts on a device at most: one that runs, and one right behind it.
const ON_THEIR_WAY: usize = 2;

/// Runs that read prompts and sources, on a stream of their own.
#[derive(Default)]
pub(super) struct Fills(VecDeque<Arc<Fence>>);

impl Fills {
    /// Whether another one would not wait for long, and the host not for its memory.
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

/// A prompt that is not all in the cache.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    /// Its tokens that a run would add.
    open: usize,
    /// Steps since it came.
    steps: u64,
    /// Whether a part of it is in the cache.
    has_begun: bool,
}

/// Whether prompts are read now: as soon as they have waited together, in steps, for as long as the `seated` sequences would wait
/// for the run. Whoever knew which requests come next would save half of that at most (ski rental, Karlin et al. 1988).
fn is_due(waiting: &[Waiting], seated: usize) -> bool {
    let open: usize = waiting.iter().map(|prompt| prompt.open).sum();
    let waits = waiting.iter().map(|prompt| prompt.steps + 1).sum::<u64>();
    seated == 0
        || open >= WORTH_A_RUN
        || waits.saturating_mul(RUNS_OF_A_STEP) >= seated as u64
        || waiting
            .iter()
            .any(|prompt| prompt.has_begun || prompt.steps >= MOST_STEPS)
}

impl Generator {
    /// Adds prompts to the cache, all but their last tokens, for the device to go on with, when that is due.
    pub(super) fn fill_caches(&mut self) -> Result<(), EngineError> {
        let awaits = |row: &Row| row.suits_device() && row.row.is_none() && row.open() > 1;
        let waiting = self.rows.iter().filter(|row| awaits(row));
        let waiting: Vec<Waiting> = waiting
            .map(|row| Waiting {
                open: row.open() - 1,
                steps: self.steps - row.came_at,
                has_begun: row.cached > 0,
            })
            .collect();
        let seated = self.rows.iter().filter(|row| row.row.is_some());
        let seated = seated.map(Row::n_rows).sum();
        if waiting.is_empty() || !is_due(&waiting, seated) || !self.fills.have_place()? {
            return Ok(());
        }
        let mut left = self.most_prompt_tokens;
        let mut taken = Vec::new();
        for (at, row) in self.rows.iter().enumerate() {
            if awaits(row) && left > 0 {
                let n = (row.open() - 1).min(left);
                left -= n;
                taken.push((at, n));
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(open: usize, steps: u64) -> Waiting {
        Waiting {
            open,
            steps,
            has_begun: false,
        }
    }

    #[test]
    fn a_prompt_is_read_at_once_where_few_are_written() {
        for seated in 0..=2 {
            assert!(is_due(&[prompt(5, 0)], seated), "{seated} are written");
        }
        assert!(!is_due(&[prompt(5, 0)], 3));
    }

    #[test]
    fn prompts_are_gathered_until_their_waits_reach_what_a_run_costs_the_others() {
        // One comes at each step, and 40 are written: 1 + 2 + … + 6 steps of waiting are 20 or more.
        let first_due = (0..10u64).find(|&now| {
            let waiting: Vec<Waiting> = (0..=now).map(|steps| prompt(5, steps)).collect();
            is_due(&waiting, 40)
        });
        assert_eq!(first_due, Some(5));
    }

    #[test]
    fn no_prompt_waits_for_ever_or_in_pieces() {
        assert!(!is_due(&[prompt(5, MOST_STEPS - 1)], 1000));
        assert!(is_due(&[prompt(5, MOST_STEPS)], 1000));
        assert!(is_due(&[prompt(WORTH_A_RUN, 0)], 1000));
        assert!(is_due(&[prompt(WORTH_A_RUN / 2, 0); 2], 1000));
        let begun = Waiting {
            has_begun: true,
            ..prompt(5, 0)
        };
        assert!(is_due(&[begun], 1000));
    }
}
