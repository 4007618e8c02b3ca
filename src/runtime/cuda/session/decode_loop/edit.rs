//! Changes of a loop's rows between two steps: the host writes where in the table each number goes, and a kernel brings all of them
//! there at once. A copy for each piece of a row took longer than the step that waits for them (docs/history, entry 60).

use super::{
    DecodeLoop, Launcher,
    table::{LoopRoom, Places, SCORE_BYTES, STATE_BYTES},
};
use crate::{
    kernels::decoding::Choice,
    runtime::cuda::{error::CudaError, memory::Pinned, model::Start},
    tensor::Extents,
};

/// What a row holds from the next step on.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// All tokens of the sequence; the last is not in the cache yet.
    pub tokens: &'a [u32],
    /// The slots of all positions that it can come to have.
    pub slots: &'a [u32],
    /// [`Choice::encode`]
    pub choice: &'a [i32],
    /// The slots of what it is written from; none where there is nothing.
    pub source: &'a [u32],
    /// The scores and states that its search begins with ([`BeamStep::start`](crate::kernels::beam_search::BeamStep::start)); none where there is no search.
    pub search: (&'a [f32], &'a [i32]),
}

/// Pinned memory that is being uploaded until a step is received.
pub(super) struct Upload {
    memory: Pinned,
    /// The step that is received after the upload is done.
    until: u64,
}

/// Numbers of 32 bits and the places that they go to, counted in such numbers from the table's first.
#[derive(Default)]
struct Changes {
    places: Vec<i32>,
    values: Vec<i32>,
}

impl Changes {
    /// Puts values to bytes `at` and behind.
    fn put(&mut self, at: u64, values: impl Iterator<Item = i32>) {
        let before = self.values.len();
        self.values.extend(values);
        let first = (at / 4) as i32;
        self.places
            .extend((first..).take(self.values.len() - before));
    }

    /// What `edits` change of a table.
    fn of(edits: &[(usize, Option<Entry>)], at: &Places, room: LoopRoom) -> Self {
        let mut all = Self::default();
        for &(row, entry) in edits {
            let of_row = |first: u64, ints: u64| first + 4 * row as u64 * ints;
            let (width, source_width) = (room.width as u64, room.source_width as u64);
            let n_known = entry.map_or(0, |entry| entry.tokens.len() as i32);
            all.put(of_row(at.known, 1), [n_known].into_iter());
            let Some(entry) = entry else { continue };
            let choice = u64::from(Choice::WIDTH);
            all.put(of_row(at.requests, choice), entry.choice.iter().copied());
            all.put(of_row(at.slots, width), ints(entry.slots));
            all.put(of_row(at.tokens, width), ints(entry.tokens));
            let n_source = entry.source.len() as i32;
            all.put(of_row(at.source_lens, 1), [n_source].into_iter());
            all.put(of_row(at.source_slots, source_width), ints(entry.source));
            let (scores, states) = entry.search;
            let bits = scores.iter().map(|score| score.to_bits() as i32);
            all.put(of_row(at.scores, SCORE_BYTES / 4), bits);
            all.put(of_row(at.states, STATE_BYTES / 4), states.iter().copied());
        }
        all
    }
}

impl DecodeLoop {
    /// Changes rows before the next step: each gets a sequence, or has none any more.
    ///
    /// # Errors
    /// Failures of the driver.
    pub fn edit(&mut self, edits: &[(usize, Option<Entry>)]) -> Result<(), CudaError> {
        let (Some(table), Some([.., scatter])) =
            (&self.table, self.launcher.model.decoding.as_deref())
        else {
            return Ok(());
        };
        if edits.is_empty() {
            return Ok(());
        }
        let Changes { places, values } = Changes::of(edits, &table.at, table.room);
        let bytes = 4 * places.len();
        let start = table.memory.start();
        let upload = upload_area(&mut self.uploads, &self.launcher, self.received, 2 * bytes)?;
        upload.until = self.enqueued + 1;
        let (first, second) = upload.memory.as_mut_slice()[..2 * bytes].split_at_mut(bytes);
        first.copy_from_slice(bytemuck::cast_slice(&places));
        second.copy_from_slice(bytemuck::cast_slice(&values));
        let from = upload.memory.device_address()?;
        let extents = Extents {
            tokens: places.len() as u64,
            ..Extents::default()
        };
        let args = [from, from + bytes as u64, start];
        let stream = self.launcher.stream.cu_stream();
        // SAFETY: the table has all of the places, each of which comes once; the pinned memory is not written again before a later step was
        // received.
        unsafe { scatter.launch(stream, &extents, &args, "the sequences", Start::Plain) }?;
        self.refresh()
    }
}

/// Ids or slots as a table has them.
fn ints(ids: &[u32]) -> impl Iterator<Item = i32> + '_ {
    ids.iter().map(|&id| id as i32)
}

/// Pinned memory of at least so many bytes that nothing on the stream reads any more, `received` steps being done.
fn upload_area<'a>(
    uploads: &'a mut Vec<Upload>,
    launcher: &Launcher,
    received: u64,
    bytes: usize,
) -> Result<&'a mut Upload, CudaError> {
    let is_free =
        |upload: &Upload| upload.until <= received && upload.memory.as_slice().len() >= bytes;
    let at = match uploads.iter().position(is_free) {
        Some(at) => at,
        None => {
            let memory = Pinned::new(&launcher.model.device, bytes.next_power_of_two())?;
            uploads.push(Upload { memory, until: 0 });
            uploads.len() - 1
        }
    };
    Ok(&mut uploads[at])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::beam_search::BeamStep;

    #[test]
    fn every_number_of_a_row_has_a_place_of_its_own() {
        let room = LoopRoom {
            rows: 3,
            width: 8,
            source_width: 4,
        };
        let at = Places::of(room);
        let choice = vec![7; Choice::WIDTH as usize];
        let (scores, states) = (vec![1.5; BeamStep::SCORES], vec![9; BeamStep::STATES]);
        let entry = Entry {
            tokens: &[5, 6],
            slots: &[32, 33, 64],
            choice: &choice,
            source: &[96],
            search: (&scores, &states),
        };
        let Changes { places, values } =
            Changes::of(&[(1, Some(entry)), (2, None), (0, Some(entry))], &at, room);
        let mut table = vec![0i32; at.end as usize / 4];
        let mut written = vec![false; table.len()];
        assert_eq!(places.len(), values.len());
        for (&place, &value) in places.iter().zip(&values) {
            assert!(
                !std::mem::replace(&mut written[place as usize], true),
                "{place} twice"
            );
            table[place as usize] = value;
        }
        let of = |first: u64, n: usize| &table[first as usize / 4..][..n];
        assert_eq!(of(at.known, 3), [2, 2, 0]);
        assert_eq!(of(at.source_lens, 3), [1, 1, 0]);
        for row in 0..2 {
            assert_eq!(of(at.tokens + 32 * row, 8), [5, 6, 0, 0, 0, 0, 0, 0]);
            assert_eq!(of(at.slots + 32 * row, 8), [32, 33, 64, 0, 0, 0, 0, 0]);
            assert_eq!(of(at.source_slots + 16 * row, 4), [96, 0, 0, 0]);
        }
        let whole = |first: u64, width: usize, value: i32| {
            assert!(of(first, 2 * width).iter().all(|&x| x == value));
            assert!(of(first + 8 * width as u64, width).iter().all(|&x| x == 0));
        };
        whole(at.requests, choice.len(), 7);
        whole(at.scores, BeamStep::SCORES, 1.5f32.to_bits() as i32);
        whole(at.states, BeamStep::STATES, 9);
        let known = of(at.known, 3).len() + of(at.source_lens, 3).len() - 1;
        let of_row = 2 + 3 + 1 + choice.len() + scores.len() + states.len();
        assert_eq!(values.len(), known + 2 * of_row);
    }
}
