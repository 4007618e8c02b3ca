//! Sequences in the device's decode loop: their assignment to rows of the loop's table, and their results.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    ops::Range,
};

use super::{
    Ticket,
    row::{Advanced, Row},
};
use crate::{
    kernels::{
        beam_search::BeamStep,
        decoding::{Advance, Chosen},
    },
    runtime::cuda::{ChosenRows, CudaError, DecodeLoop, Entry, Fence, LoopRoom, TokenSelection},
};

/// Max number of steps in flight: one that runs and one that is enqueued, to hide host latency. A new request waits for both steps.
const AHEAD: usize = 2;
/// Minimum capacity of a row for the tokens of its sequence.
const MIN_WIDTH: usize = 256;
/// Minimum capacity of a row for the tokens of its source, in encoder-decoder models.
const MIN_SOURCE_WIDTH: usize = 64;

/// The device's decode loop, and the assignment of its rows.
pub(super) struct DeviceRows {
    decode: DecodeLoop,
    /// The request of each row; beams occupy adjacent rows.
    rows: Vec<Option<Ticket>>,
    /// The requests of each step in flight, with their first rows.
    steps: VecDeque<Vec<(usize, Ticket)>>,
    /// Rows of canceled sequences that have not been reported to the device yet.
    leaving: Vec<usize>,
    /// Whether to compact all sequences when no step is in flight, into a larger table if needed.
    must_compact: bool,
}

impl DeviceRows {
    pub(super) fn new(decode: DecodeLoop) -> Self {
        Self {
            decode,
            rows: Vec::new(),
            steps: VecDeque::new(),
            leaving: Vec::new(),
            must_compact: false,
        }
    }

    /// Releases the rows of an ended request. `device_knows` is whether the device's loop has already ended these rows. If
    /// `device_knows` is false, the next call of [`clear`](Self::clear) tells the device.
    pub(super) fn leave(&mut self, rows: Range<usize>, device_knows: bool) {
        match device_knows {
            true => self.rows[rows].fill(None),
            false => self.leaving.extend(rows),
        }
    }

    /// Number of steps in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.decode.in_flight()
    }

    /// Tells the device about canceled sequences. This must be called before their blocks are reused. Work on other streams that reuses
    /// these blocks must wait for the returned fence.
    pub(super) fn clear(&mut self) -> Result<Option<Fence>, CudaError> {
        if self.leaving.is_empty() {
            return Ok(None);
        }
        let edits: Vec<_> = self.leaving.iter().map(|&row| (row, None)).collect();
        self.decode.edit(&edits)?;
        for row in self.leaving.drain(..) {
            self.rows[row] = None;
        }
        self.decode.fence().map(Some)
    }

    /// Assigns rows to requests whose prompts, except for the last token, are in the KV cache. While steps are in flight, requests whose
    /// prefill is still running are skipped, because the next steps would wait for it.
    pub(super) fn seat(&mut self, sequences: &mut [Row]) -> Result<(), CudaError> {
        let is_idle = self.decode.in_flight() == 0;
        for sequence in sequences.iter_mut() {
            sequence.note_filled()?;
        }
        let waits = |sequence: &Row| {
            let may_enter = is_idle || sequence.filled.is_none();
            sequence.is_ready_for_device() && sequence.row.is_none() && may_enter
        };
        let n_waiting = sequences.iter().filter(|s| waits(s)).count();
        let max = |of: fn(&Row) -> usize| sequences.iter().map(of).max().unwrap_or(0);
        let source = max(|row| row.source_slots().len());
        // Requests whose prefill is still running will need rows soon. Their rows are counted now, because the table can only be enlarged
        // when no step is in flight.
        let coming = sequences.iter().filter(|row| row.suits_device());
        let n_rows = coming.map(Row::n_rows).sum();
        let wanted = room(n_rows, max(Row::max_tokens), source);
        let last = self.rows.iter().rposition(Option::is_some);
        // Unused rows after the last sequence cost nothing in a step, but unused rows between sequences cost time.
        let is_sparse = last.is_some_and(|last| last >= 8 && last + 1 >= 2 * wanted.rows);
        let lacks_room = n_waiting > 0 && !self.decode.has_room(wanted);
        self.must_compact |= is_sparse || lacks_room;
        if self.must_compact {
            if self.decode.in_flight() > 0 {
                return Ok(());
            }
            self.compact(sequences, wanted)?;
        }
        let mut entering = Vec::new();
        for (at, sequence) in sequences.iter_mut().enumerate() {
            if !waits(sequence) {
                continue;
            }
            let n = sequence.n_rows();
            let taken: usize = self.rows.iter().flatten().count();
            if taken + n > Advance::ROWS {
                break;
            }
            let first = self.free_rows(n);
            let room = LoopRoom {
                rows: first + n,
                ..wanted
            };
            if !self.decode.has_room(room) {
                // The free rows are fragmented: no range is long enough.
                self.must_compact = true;
                break;
            }
            if let Some(filled) = sequence.filled.take() {
                self.decode.wait_behind(&filled)?;
            }
            self.rows.resize(self.rows.len().max(first + n), None);
            self.rows[first..first + n].fill(Some(sequence.ticket));
            sequence.take_row(first);
            let search = sequence.beams().map(BeamStep::start);
            let slots = (0..n).map(|lane| sequence.all_slots(lane)).collect();
            entering.push(Entering {
                at,
                first,
                choices: sequence.encoded(),
                slots,
                search: search.unwrap_or_default(),
            });
        }
        let edits: Vec<(usize, Option<Entry>)> = entering
            .iter()
            .flat_map(|entering| entering.entries(&sequences[entering.at]))
            .collect();
        self.decode.edit(&edits)
    }

    /// Returns the first of `n` adjacent free rows.
    fn free_rows(&self, n: usize) -> usize {
        let end = self
            .rows
            .iter()
            .rposition(Option::is_some)
            .map_or(0, |last| last + 1);
        let is_free = |first: &usize| self.rows[*first..*first + n].iter().all(Option::is_none);
        (0..end.saturating_sub(n - 1)).find(is_free).unwrap_or(end)
    }

    /// Moves all sequences to the first rows of the table, and gives the table the capacity `wanted`, with the number of rows rounded up to
    /// a power of two.
    fn compact(&mut self, sequences: &mut [Row], wanted: LoopRoom) -> Result<(), CudaError> {
        let wanted = LoopRoom {
            rows: wanted.rows.next_power_of_two(),
            ..wanted
        };
        let seated = self.rows.iter().enumerate();
        let seated = seated.filter_map(|(row, ticket)| ticket.map(|ticket| (row, ticket)));
        let moves: Vec<(usize, Ticket)> = seated.collect();
        let rows: Vec<(usize, usize)> = moves
            .iter()
            .enumerate()
            .map(|(to, &(from, _))| (from, to))
            .collect();
        self.decode.relocate(wanted, &rows)?;
        self.must_compact = false;
        self.rows = moves.iter().map(|&(_, ticket)| Some(ticket)).collect();
        for sequence in sequences {
            let moved = |from: usize| rows.iter().find(|&&(old, _)| old == from);
            if let Some(&(_, to)) = sequence.row.and_then(moved) {
                sequence.row = Some(to);
            }
        }
        Ok(())
    }

    /// Enqueues steps while a sequence needs them, up to [`AHEAD`] steps in flight. Returns the number of steps that were enqueued.
    pub(super) fn run_ahead(&mut self, sequences: &mut [Row]) -> Result<u64, CudaError> {
        let mut n = 0;
        while !self.must_compact && self.decode.in_flight() < AHEAD {
            let mut step = Vec::new();
            let (mut end, mut keys) = (0, 1);
            let (mut has_singles, mut has_beams) = (false, false);
            for sequence in sequences.iter_mut() {
                if let Some(rows) = sequence.device_rows()
                    && sequence.awaits_steps()
                {
                    step.push((rows.start, sequence.ticket));
                    end = end.max(rows.end);
                    keys = keys.max(sequence.max_keys());
                    has_beams |= sequence.beams().is_some();
                    has_singles |= sequence.beams().is_none();
                }
            }
            if step.is_empty() {
                break;
            }
            self.decode
                .enqueue(end, keys, TokenSelection::of(has_singles, has_beams))?;
            let stepped = step.iter().map(|&(_, ticket)| ticket);
            let tickets: HashSet<Ticket> = stepped.collect();
            let stepped = sequences.iter_mut().filter(|s| tickets.contains(&s.ticket));
            stepped.for_each(|sequence| sequence.n_enqueued += 1);
            self.steps.push_back(step);
            n += 1;
        }
        Ok(n)
    }

    /// Enqueues the selection of first new tokens from the logits at the device address `logits`. `which` yields, for each row of logits,
    /// the index of its sequence in `sequences`. Sequences without a row in the loop are left out. Returns a fence after which the logits
    /// are no longer read.
    pub(super) fn choose(
        &mut self,
        sequences: &mut [Row],
        which: impl Iterator<Item = usize>,
        logits: u64,
    ) -> Result<Fence, CudaError> {
        let (mut rows, mut step) = (Vec::new(), Vec::new());
        for (nth, at) in which.enumerate() {
            let sequence = &mut sequences[at];
            if let Some(row) = sequence.row {
                rows.push((nth, row));
                step.push((row, sequence.ticket));
                sequence.n_enqueued += 1;
            }
        }
        self.decode.enqueue_choice(logits, &rows)?;
        if !step.is_empty() {
            self.steps.push_back(step);
        }
        self.decode.fence()
    }

    /// Returns the results of the oldest step in flight: one for each request in the step, with the index of the request in `sequences`.
    /// If `wait` is true, waits until the step has finished. Returns an empty list if no step is in flight, or if the step has not finished
    /// and `wait` is false.
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
            // Skip requests that have ended in the meantime.
            let Some(&at) = at_of.get(&ticket) else {
                continue;
            };
            let (token, value) = chosen[row];
            let sequence = &mut sequences[at];
            let n_rows = sequence.n_rows();
            let wrong = match (token, sequence.beams()) {
                (Chosen::NotANumber, Some(_)) => self.decode.wrong_beam(row, n_rows)?,
                _ => None,
            };
            let found = || self.decode.found(row, n_rows);
            let accepted = sequence.accept_computed(token, value, wrong, found);
            advanced.push((at, ticket, accepted));
        }
        Ok(advanced)
    }
}

/// Returns the capacity for `rows` rows of up to `tokens` tokens and `source` source tokens.
pub(super) fn room(rows: usize, tokens: usize, source: usize) -> LoopRoom {
    LoopRoom {
        rows: rows.min(Advance::ROWS),
        width: tokens.max(MIN_WIDTH).next_power_of_two(),
        source_width: match source {
            0 => 0,
            n => n.max(MIN_SOURCE_WIDTH).next_power_of_two(),
        },
    }
}

/// A request that is added to the device's loop.
struct Entering {
    /// Index of the request among the sequences.
    at: usize,
    first: usize,
    choices: Vec<Vec<i32>>,
    slots: Vec<Vec<u32>>,
    /// Initial scores and states of beam search for all rows; empty without beam search.
    search: (Vec<f32>, Vec<i32>),
}

impl Entering {
    fn entries<'a>(
        &'a self,
        sequence: &'a Row,
    ) -> impl Iterator<Item = (usize, Option<Entry<'a>>)> + 'a {
        let (scores, states) = (&self.search.0, &self.search.1);
        let of_row = |nth: usize, n: usize, len: usize| match len {
            0 => 0..0,
            _ => nth * n..(nth + 1) * n,
        };
        self.choices.iter().enumerate().map(move |(nth, choice)| {
            let entry = Entry {
                tokens: &sequence.lanes[0].tokens,
                slots: &self.slots[nth],
                choice,
                source: sequence.source_slots(),
                search: (
                    &scores[of_row(nth, BeamStep::SCORES, scores.len())],
                    &states[of_row(nth, BeamStep::STATES, states.len())],
                ),
            };
            (self.first + nth, Some(entry))
        })
    }
}
