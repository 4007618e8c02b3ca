//! Sequences that a device decodes by itself: where each lies in its loop, and what comes back.

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
    runtime::cuda::{Behind, ChosenRows, CudaError, DecodeLoop, Entry, Fence, LoopRoom},
};

/// Steps that are on their way at most: one that runs, and one behind it for a host that is late. A request that comes in
/// between waits for them, and its row is idle meanwhile.
const AHEAD: usize = 2;
/// Tokens of a sequence that there is room for at least.
const LEAST_WIDTH: usize = 256;
/// Tokens of a source that there is room for at least, where there are sources.
const LEAST_SOURCE_WIDTH: usize = 64;

/// The loop of a generator, and the rows of its sequences.
pub(super) struct DeviceRows {
    decode: DecodeLoop,
    /// Who has each row; beams have neighbouring ones.
    rows: Vec<Option<Ticket>>,
    /// The requests of each step on its way, with their first rows.
    steps: VecDeque<Vec<(usize, Ticket)>>,
    /// Rows whose sequence was cancelled, which the device does not know yet.
    leaving: Vec<usize>,
    /// Whether all sequences move together, into a larger table if need be, as soon as no step is on its way.
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

    /// Notes that a request has ended, of which the device knows or is to be told.
    pub(super) fn leave(&mut self, rows: Range<usize>, device_knows: bool) {
        match device_knows {
            true => self.rows[rows].fill(None),
            false => self.leaving.extend(rows),
        }
    }

    /// Steps that are on their way.
    pub(super) fn in_flight(&self) -> usize {
        self.decode.in_flight()
    }

    /// Tells the device of cancelled sequences. To be called before their blocks are used again, and what uses them on another
    /// stream waits for the fence.
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

    /// Gives rows to requests that have none, all of whose tokens but one are in the cache. Where steps are on their way these do
    /// not wait for prompts that are still being read.
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
        let most = |of: fn(&Row) -> usize| sequences.iter().map(of).max().unwrap_or(0);
        let source = most(|row| row.source_slots().len());
        // Those whose prompts are still being read come soon: making room stops the steps, so that it is made once.
        let coming = sequences.iter().filter(|row| row.suits_device());
        let n_rows = coming.map(Row::n_rows).sum();
        let wanted = room(n_rows, most(Row::most_tokens), source);
        let last = self.rows.iter().rposition(Option::is_some);
        // Rows behind the last sequence cost a step nothing; many between do.
        let is_sparse = last.is_some_and(|last| last >= 8 && last + 1 >= 2 * wanted.rows);
        let lacks_room = n_waiting > 0 && !self.decode.has_room(wanted);
        self.must_reseat |= is_sparse || lacks_room;
        if self.must_reseat {
            if self.decode.in_flight() > 0 {
                return Ok(());
            }
            self.move_together(sequences, wanted)?;
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
                // Rows between others were not free in time.
                self.must_reseat = true;
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

    /// The first of so many neighbouring rows that nobody has.
    fn free_rows(&self, n: usize) -> usize {
        let behind = self
            .rows
            .iter()
            .rposition(Option::is_some)
            .map_or(0, |last| last + 1);
        let is_free = |first: &usize| self.rows[*first..*first + n].iter().all(Option::is_none);
        (0..behind.saturating_sub(n - 1))
            .find(is_free)
            .unwrap_or(behind)
    }

    /// Moves all sequences to the first rows, and makes room.
    fn move_together(&mut self, sequences: &mut [Row], wanted: LoopRoom) -> Result<(), CudaError> {
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
        self.must_reseat = false;
        self.rows = moves.iter().map(|&(_, ticket)| Some(ticket)).collect();
        for sequence in sequences {
            let moved = |from: usize| rows.iter().find(|&&(old, _)| old == from);
            if let Some(&(_, to)) = sequence.row.and_then(moved) {
                sequence.row = Some(to);
            }
        }
        Ok(())
    }

    /// Puts steps on their way while some sequence goes on. Returns how many.
    pub(super) fn run_ahead(&mut self, sequences: &mut [Row]) -> Result<u64, CudaError> {
        let mut n = 0;
        while !self.must_reseat && self.decode.in_flight() < AHEAD {
            let mut step = Vec::new();
            let (mut end, mut keys) = (0, 1);
            let (mut has_singles, mut has_beams) = (false, false);
            for sequence in sequences.iter_mut() {
                if let Some(rows) = sequence.device_rows()
                    && sequence.awaits_steps()
                {
                    step.push((rows.start, sequence.ticket));
                    end = end.max(rows.end);
                    keys = keys.max(sequence.most_keys());
                    has_beams |= sequence.beams().is_some();
                    has_singles |= sequence.beams().is_none();
                }
            }
            if step.is_empty() {
                break;
            }
            self.decode
                .enqueue(end, keys, Behind::of(has_singles, has_beams))?;
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

/// The room that is made for so many rows, with so many tokens and tokens of a source at most.
pub(super) fn room(rows: usize, tokens: usize, source: usize) -> LoopRoom {
    LoopRoom {
        rows: rows.min(Advance::ROWS),
        width: tokens.max(LEAST_WIDTH).next_power_of_two(),
        source_width: match source {
            0 => 0,
            n => n.max(LEAST_SOURCE_WIDTH).next_power_of_two(),
        },
    }
}

/// What a request's rows are to hold.
struct Entering {
    /// Its place among the sequences.
    at: usize,
    first: usize,
    choices: Vec<Vec<i32>>,
    slots: Vec<Vec<u32>>,
    /// Scores and states of all rows; none without a search.
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
