//! Device memory for the state of a loop's sequences.

use cudarc::driver::result;

use super::{
    super::{launcher::Launcher, staging::BatchData},
    ring::RING_BYTES,
};
use crate::{
    kernels::{
        beam_search::BeamStep,
        decoding::{Beam, ChooseToken, Chosen, DeviceSamplingParams},
    },
    plan::ALIGNMENT,
    runtime::cuda::{
        error::{CudaError, During},
        memory::{Buffer, Pinned, Uploads},
    },
    tensor::Extents,
};

/// Capacity of a table: rows, tokens per sequence and tokens per source text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoopRoom {
    pub rows: usize,
    pub width: usize,
    pub source_width: usize,
}

/// State of the sequences on the device.
pub(super) struct Table {
    pub(super) room: LoopRoom,
    pub(super) memory: Buffer,
    pub(super) at: Places,
    /// Results of finished beam searches: token ids, `[rows, width]`, followed by the score, the length and the token row of each
    /// hypothesis, `[3, rows]`. The token row is the row of the token ids that contains the hypothesis, counted from the first row of the
    /// search. The device writes these results, and the host reads them once a search is done.
    pub(super) found: Pinned,
    pub(super) found_address: u64,
}

/// Byte offsets of the arrays in a table's memory.
#[derive(Clone, Copy)]
pub(super) struct Places {
    pub(super) zeros: u64,
    pub(super) ones: u64,
    pub(super) idle: u64,
    pub(super) cu_lens: u64,
    pub(super) pair_offsets: u64,
    pub(super) slot_starts: u64,
    pub(super) known: u64,
    pub(super) token_ids: u64,
    pub(super) positions: u64,
    pub(super) key_lens: u64,
    pub(super) token_slots: u64,
    pub(super) best_of_group: u64,
    pub(super) sum_of_group: u64,
    pub(super) raw_of_group: u64,
    pub(super) n_arrived: u64,
    pub(super) chosen: u64,
    pub(super) log_probability: u64,
    pub(super) n_candidates: u64,
    pub(super) candidate_ids: u64,
    pub(super) candidate_values: u64,
    pub(super) requests: u64,
    pub(super) slots: u64,
    pub(super) tokens: u64,
    pub(super) source_slots: u64,
    pub(super) source_starts: u64,
    pub(super) source_lens: u64,
    pub(super) scores: u64,
    pub(super) states: u64,
    pub(super) step: u64,
    /// Offset of a dummy step number and, 256 bytes later, a dummy ring. `DecodeLoop::refresh` launches a kernel that writes both. The
    /// kernel thus leaves the loop's own step number and ring unchanged.
    pub(super) unread: u64,
    pub(super) end: u64,
}

impl Places {
    pub(super) fn of(room: LoopRoom) -> Self {
        let LoopRoom {
            rows,
            width,
            source_width,
        } = room;
        let mut end = 0u64;
        let mut place = |ints: usize| {
            let at = end;
            end += (4 * ints as u64).next_multiple_of(ALIGNMENT);
            at
        };
        let at = Self {
            zeros: place(rows),
            ones: place(rows),
            idle: place(rows),
            cu_lens: place(rows + 1),
            pair_offsets: place(2 * (rows + 1)),
            slot_starts: place(rows),
            known: place(rows),
            token_ids: place(rows),
            positions: place(rows),
            key_lens: place(rows),
            token_slots: place(rows),
            best_of_group: place(2 * rows * ChooseToken::GROUPS),
            sum_of_group: place(rows * ChooseToken::GROUPS),
            raw_of_group: place(2 * rows * ChooseToken::GROUPS),
            n_arrived: place(rows),
            chosen: place(rows),
            log_probability: place(rows),
            n_candidates: place(rows),
            candidate_ids: place(rows * Beam::MOST_CANDIDATES),
            candidate_values: place(rows * Beam::MOST_CANDIDATES),
            requests: place(rows * DeviceSamplingParams::WIDTH as usize),
            slots: place(rows * width),
            tokens: place(rows * width),
            source_slots: place(rows * source_width),
            source_starts: place(rows),
            source_lens: place(rows),
            scores: place(rows * BeamStep::SCORES),
            states: place(rows * BeamStep::STATES),
            step: place(1),
            // 256 bytes for the dummy step number, followed by the dummy ring.
            unread: place(64 + RING_BYTES as usize / 4),
            end: 0,
        };
        Self { end, ..at }
    }
}

impl LoopRoom {
    /// Bytes of device memory for the sequences of a loop.
    pub fn bytes(self) -> u64 {
        Places::of(self).end
    }

    /// Returns the worst-case extents of a decode step over the first `rows` rows: every sequence has the maximum number of keys. `blocks`
    /// is the number of blocks of the cache, including the spare block that belongs to no sequence. `part` is the index of the part of the
    /// model that generates text.
    pub fn extents(self, rows: usize, blocks: u64, part: u32) -> Extents {
        let (n, keys) = (rows as u64, (rows * self.width) as u64);
        let source_keys = (rows * self.source_width) as u64;
        Extents {
            tokens: n,
            batch: n,
            longest: 1,
            pairs: keys,
            slots: keys,
            blocks,
            cached_keys: self.width.max(self.source_width) as u64,
            source_slots: source_keys,
            source_pairs: source_keys,
            part,
            rows: n,
        }
    }
}

impl Table {
    /// Returns the first nine operands of the token selection for the table's rows from `first` on. `logits` is the address of the logits
    /// of row `first`.
    pub(super) fn choice_operands(&self, logits: u64, first: usize) -> [u64; 9] {
        let (memory, at) = (self.memory.start(), self.at);
        let of = |offset: u64, ints: u32| memory + offset + 4 * u64::from(ints) * first as u64;
        [
            logits,
            of(at.requests, DeviceSamplingParams::WIDTH),
            of(at.known, 1),
            // This address does not depend on `first`, because the entries of `slot_starts` are offsets from the start of `tokens`.
            memory + at.tokens,
            of(at.slot_starts, 1),
            // Scratch memory, which does not depend on `first`.
            memory + at.best_of_group,
            memory + at.sum_of_group,
            memory + at.raw_of_group,
            memory + at.n_arrived,
        ]
    }

    pub(super) fn new(launcher: &Launcher, room: LoopRoom) -> Result<Self, CudaError> {
        let at = Places::of(room);
        let LoopRoom {
            rows,
            width,
            source_width,
        } = room;
        let numbers = at.end / 4;
        // Kernels use 32-bit indices of rows, and edits of rows (`edit.rs`) use 32-bit indices of values.
        let limit = i32::MAX as u64;
        if numbers > limit {
            return Err(CudaError::TooLarge {
                step: "the choice of tokens".to_owned(),
                what: format!("the table of {rows} sequences with {width} tokens each"),
                value: numbers,
                limit,
            });
        }
        let device = &launcher.model.device;
        let memory = Buffer::new(device, at.end, "the sequences of a generator")?;
        let uploads = Uploads::new(device)?;
        // SAFETY: the memory has this size.
        unsafe { uploads.clear(memory.start(), at.end as usize) }
            .during(|| "clear the sequences of a generator".to_owned())?;
        let upload = |offset: u64, bytes: &[u8]| {
            // SAFETY: the table has room for the bytes at this offset.
            unsafe { uploads.copy(memory.start() + offset, bytes) }
                .during(|| "upload the sequences of a generator".to_owned())
        };
        let numbers =
            |of: &dyn Fn(usize) -> i32, n: usize| -> Vec<i32> { (0..n).map(of).collect() };
        let ones = numbers(&|_| 1, rows);
        let idle = numbers(&|_| Chosen::Idle.code(), rows);
        let cu_lens = numbers(&|row| row as i32, rows + 1);
        let starts = numbers(&|row| (row * width) as i32, rows);
        let source_starts = numbers(&|row| (row * source_width) as i32, rows);
        let pairs: Vec<i64> = (0..=rows as i64).collect();
        upload(at.ones, bytemuck::cast_slice(&ones))?;
        upload(at.idle, bytemuck::cast_slice(&idle))?;
        // The value −1 means that no CTA has arrived.
        upload(at.n_arrived, bytemuck::cast_slice(&vec![-1i32; rows]))?;
        upload(at.cu_lens, bytemuck::cast_slice(&cu_lens))?;
        upload(at.slot_starts, bytemuck::cast_slice(&starts))?;
        upload(at.source_starts, bytemuck::cast_slice(&source_starts))?;
        upload(at.pair_offsets, bytemuck::cast_slice(&pairs))?;
        uploads
            .finish()
            .during(|| "wait for the sequences of a generator".to_owned())?;
        let found = Pinned::new(device, found_bytes(room))?;
        Ok(Self {
            room,
            memory,
            at,
            found_address: found.device_address()?,
            found,
        })
    }

    /// Offset and row size in bytes of each array that has an entry per row. The row sizes of slots, tokens and source slots depend on the
    /// room.
    fn pieces(&self) -> [(u64, u64); 8] {
        let (at, room) = (self.at, self.room);
        [
            (at.slots, 4 * room.width as u64),
            (at.tokens, 4 * room.width as u64),
            (at.source_slots, 4 * room.source_width as u64),
            (at.source_lens, 4),
            (at.known, 4),
            (at.requests, 4 * u64::from(DeviceSamplingParams::WIDTH)),
            (at.scores, SCORE_BYTES),
            (at.states, STATE_BYTES),
        ]
    }

    pub(super) fn data(&self) -> BatchData {
        let of = |offset: u64| self.memory.start() + offset;
        let at = self.at;
        BatchData {
            token_ids: of(at.token_ids),
            type_ids: of(at.zeros),
            positions: of(at.positions),
            cu_lens: of(at.cu_lens),
            pair_offsets: of(at.pair_offsets),
            valid_lens: of(at.ones),
            token_slots: of(at.token_slots),
            slots: of(at.slots),
            slot_starts: of(at.slot_starts),
            key_lens: of(at.key_lens),
            source_slots: of(at.source_slots),
            source_starts: of(at.source_starts),
            source_lens: of(at.source_lens),
            ..BatchData::default()
        }
    }
}

/// Sizes in bytes of a table row's beam search scores (`SCORE_BYTES`) and beam search states (`STATE_BYTES`).
pub(super) const SCORE_BYTES: u64 = 4 * BeamStep::SCORES as u64;
pub(super) const STATE_BYTES: u64 = 4 * BeamStep::STATES as u64;

/// Bytes of the results of beam searches over all rows of a table.
pub(super) fn found_bytes(room: LoopRoom) -> usize {
    4 * room.rows * (room.width + 3)
}

/// Moves rows from the table `from` to the table `to`, or within `to` if `from` is `None`. `moves` lists pairs (old row, new row) in row
/// order.
pub(super) fn move_rows(
    from: Option<&Table>,
    to: &mut Table,
    moves: &[(usize, usize)],
    stream: cudarc::driver::sys::CUstream,
) -> Result<(), CudaError> {
    for Run {
        from: source,
        to: target,
        rows,
    } in runs(moves, from.is_none())
    {
        let (old, new) = (from.unwrap_or(to), &*to);
        for ((at, bytes), (to_at, to_bytes)) in old.pieces().into_iter().zip(new.pieces()) {
            // If a row has the same number of bytes in both tables, one copy moves all rows of the run.
            let (copies, rows) = match bytes == to_bytes {
                true => (1, rows as u64),
                false => (rows as u64, 1),
            };
            for row in 0..copies * u64::from(bytes > 0) {
                let source = old.memory.start() + at + (source as u64 + row) * bytes;
                let target = new.memory.start() + to_at + (target as u64 + row) * to_bytes;
                let bytes = (rows * bytes) as usize;
                // SAFETY: both tables have these rows, and a row of the new table is at least as long as a row of the old table.
                unsafe { result::memcpy_dtod_async(target, source, bytes, stream) }
                    .during(|| "move a sequence".to_owned())?;
            }
        }
        let (width, to_width) = (4 * old.room.width, 4 * new.room.width);
        for row in 0..rows {
            let old = &from.unwrap_or(to).found;
            let own = old.as_slice()[(source + row) * width..][..width].to_vec();
            to.found.as_mut_slice()[(target + row) * to_width..][..width].copy_from_slice(&own);
        }
    }
    Ok(())
}

/// A run of adjacent rows that stay adjacent when they are moved.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Run {
    from: usize,
    to: usize,
    rows: usize,
}

/// Merges moves of adjacent rows into runs, in order. `within` tells whether the moves are within one table. In this case, rows that keep
/// their index are skipped, and the source and the target of a run do not overlap.
fn runs(moves: &[(usize, usize)], within: bool) -> Vec<Run> {
    let mut all: Vec<Run> = Vec::new();
    for &(from, to) in moves {
        if within && from == to {
            continue;
        }
        match all.last_mut() {
            Some(run)
                if (run.from + run.rows, run.to + run.rows) == (from, to)
                    && !(within && run.rows == from - to) =>
            {
                run.rows += 1;
            }
            _ => all.push(Run { from, to, rows: 1 }),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_rows_move_together_and_never_onto_themselves() {
        let run = |from, to, rows| Run { from, to, rows };
        let moves = |all: &[usize]| -> Vec<(usize, usize)> {
            all.iter()
                .enumerate()
                .map(|(to, &from)| (from, to))
                .collect()
        };
        assert_eq!(runs(&moves(&[]), true), []);
        assert_eq!(runs(&moves(&[0, 1, 2]), true), []);
        assert_eq!(runs(&moves(&[0, 1, 2]), false), [run(0, 0, 3)]);
        assert_eq!(runs(&moves(&[4, 5, 6, 7]), true), [run(4, 0, 4)]);
        // A shift by two moves two rows at once.
        let shifted = [run(2, 0, 2), run(4, 2, 2), run(6, 4, 1)];
        assert_eq!(runs(&moves(&[2, 3, 4, 5, 6]), true), shifted);
        assert_eq!(runs(&moves(&[2, 3, 4, 5, 6]), false), [run(2, 0, 5)]);
        let apart = [run(3, 1, 1), run(5, 2, 2), run(9, 4, 1)];
        assert_eq!(runs(&moves(&[0, 3, 5, 6, 9]), true), apart);
    }
}
