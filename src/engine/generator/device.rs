//! Sequences that a device decodes by itself: where each lies in its loop, and what comes back.

use std::collections::{HashMap, HashSet, VecDeque};

use super::{
    Ticket,
    row::{Advanced, Row},
};
use crate::{
    kernels::decoding::Advance,
    runtime::cuda::{ChosenRows, CudaError, DecodeLoop, Entry},
};

/// Steps that are on their way at most: one that runs, and enough behind it for a host that is late. A request that comes in
/// between waits for them.
const AHEAD: usize = 3;
/// Tokens of a sequence that there is room for at least.
const LEAST_WIDTH: usize = 256;

/// The loop of a generator, and the rows of its sequences.
pub(super) struct DeviceRows {
    decode: DecodeLoop,
    /// Who has each row.
    rows: Vec<Option<Ticket>>,
    /// The sequences of each step on its way, with their rows.
    steps: VecDeque<Vec<(usize, Ticket)>>,
    /// Rows whose sequence was cancelled, which the device does not know yet.
    leaving: Vec<usize>,
    /// Whether all sequences get rows anew as soon as no step is on its way.
    must_reseat: bool,
}

impl DeviceRows {
    pub(super) fn new(decode: DecodeLoop) -> Self {
        Self {
            decode,
            rows: Vec::new(),
            steps: VecDeque::new(),
            leaving: Vec::new(),
            must_reseat: false,
        }
    }

    /// Notes that a sequence has ended, of which the device knows or is to be told.
    pub(super) fn leave(&mut self, row: usize, device_knows: bool) {
        match device_knows {
            true => self.rows[row] = None,
            false => self.leaving.push(row),
        }
    }

    /// Tells the device of cancelled sequences. To be called before their blocks are used again.
    pub(super) fn clear(&mut self) -> Result<(), CudaError> {
        let edits: Vec<_> = self.leaving.iter().map(|&row| (row, None)).collect();
        self.decode.edit(&edits)?;
        for row in self.leaving.drain(..) {
            self.rows[row] = None;
        }
        Ok(())
    }

    /// Gives rows to sequences that have none, all of whose tokens but one are in the cache.
    pub(super) fn seat(&mut self, sequences: &mut [Row]) -> Result<(), CudaError> {
        let waits = |sequence: &Row| sequence.is_ready_for_device() && sequence.row.is_none();
        let n_waiting = sequences.iter().filter(|s| waits(s)).count();
        let n_seated = self.rows.iter().flatten().count();
        let width = sequences.iter().map(|s| s.most_tokens()).max();
        let width = width.unwrap_or(0).max(LEAST_WIDTH).next_power_of_two();
        let n = (n_seated + n_waiting).min(Advance::ROWS);
        let last = self.rows.iter().rposition(Option::is_some);
        // Rows behind the last sequence cost a step nothing; many between do.
        let is_sparse = last.is_some_and(|last| last >= 8 && last + 1 >= 2 * n);
        let lacks_room = n_waiting > 0 && !self.decode.has_room(n, width);
        self.must_reseat |= is_sparse || lacks_room;
        if self.must_reseat {
            if self.decode.in_flight() > 0 {
                return Ok(());
            }
            self.must_reseat = false;
            if !self.decode.has_room(n, width) {
                self.rows.clear();
                self.decode.make_room(n.next_power_of_two(), width)?;
            }
            let mut all = vec![None; self.rows.len()];
            std::mem::swap(&mut self.rows, &mut all);
            let left = (0..all.len()).map(|row| (row, None)).collect::<Vec<_>>();
            self.decode.edit(&left)?;
            sequences.iter_mut().for_each(|s| s.row = None);
        }
        let mut entering = Vec::new();
        for (at, sequence) in sequences.iter_mut().enumerate() {
            if !waits(sequence) {
                continue;
            }
            let row = match self.rows.iter().position(Option::is_none) {
                Some(row) => row,
                None if self.rows.len() < Advance::ROWS => {
                    self.rows.push(None);
                    self.rows.len() - 1
                }
                None => break,
            };
            if !self.decode.has_room(row + 1, width) {
                // A row between two others was not free in time.
                self.must_reseat = true;
                break;
            }
            self.rows[row] = Some(sequence.ticket);
            sequence.take_row(row);
            entering.push((at, row, sequence.all_slots()));
        }
        let edits: Vec<(usize, Option<Entry>)> = entering
            .iter()
            .map(|(at, row, slots)| {
                let sequence = &sequences[*at];
                let entry = Entry {
                    tokens: &sequence.lanes[0].tokens,
                    slots,
                    choice: &sequence.choice,
                };
                (*row, Some(entry))
            })
            .collect();
        self.decode.edit(&edits)
    }

    /// Puts steps on their way while some sequence goes on. Returns how many.
    pub(super) fn run_ahead(&mut self, sequences: &mut [Row]) -> Result<u64, CudaError> {
        let mut n = 0;
        while !self.must_reseat && self.decode.in_flight() < AHEAD {
            let mut step = Vec::new();
            for sequence in sequences.iter_mut() {
                if let Some(row) = sequence.row
                    && sequence.awaits_steps()
                {
                    step.push((row, sequence.ticket));
                }
            }
            let Some(last) = step.iter().map(|&(row, _)| row).max() else {
                break;
            };
            self.decode.enqueue(last + 1)?;
            let asked = step.iter().map(|&(_, ticket)| ticket);
            let asked: HashSet<Ticket> = asked.collect();
            let stepped = sequences.iter_mut().filter(|s| asked.contains(&s.ticket));
            stepped.for_each(|sequence| sequence.n_asked += 1);
            self.steps.push_back(step);
            n += 1;
        }
        Ok(n)
    }

    /// What the oldest step on its way gave, by sequence; waits for it if `wait`.
    pub(super) fn receive(
        &mut self,
        sequences: &mut [Row],
        wait: bool,
    ) -> Result<Vec<(usize, Ticket, Advanced)>, CudaError> {
        let Some(chosen): Option<ChosenRows> = self.decode.receive(wait)? else {
            return Ok(Vec::new());
        };
        let step = self.steps.pop_front().unwrap_or_default();
        let of_ticket = sequences.iter().enumerate().map(|(at, s)| (s.ticket, at));
        let at_of: HashMap<Ticket, usize> = of_ticket.collect();
        let mut advanced = Vec::with_capacity(step.len());
        for (row, ticket) in step {
            // One that has ended since is not there any more.
            let Some(&at) = at_of.get(&ticket) else {
                continue;
            };
            let (token, value) = chosen[row];
            advanced.push((at, ticket, sequences[at].accept_computed(token, value)));
        }
        Ok(advanced)
    }
}
