//! Edits of a loop's rows between two steps. The host writes values and their target positions, and one kernel scatters the values into the
//! table. Separate copies of the pieces of a row would take longer than a step.

use super::{
    DecodeLoop, Launcher,
    table::{LoopRoom, Places, SCORE_BYTES, STATE_BYTES},
};
use crate::{
    kernels::decoding::DeviceSamplingParams,
    runtime::cuda::{error::CudaError, memory::Pinned, model::Start},
    tensor::Extents,
};

/// Contents of a row from the next step on.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// All tokens of the sequence. The last token is not in the cache yet.
    pub tokens: &'a [u32],
    /// Cache slots, enough for the maximum length of the sequence.
    pub slots: &'a [u32],
    /// Sampling parameters, encoded by [`DeviceSamplingParams::encode`].
    pub choice: &'a [i32],
    /// Cache slots of the source text; empty without a source text.
    pub source: &'a [u32],
    /// Initial scores and states of the beam search ([`BeamStep::start`](crate::kernels::beam_search::BeamStep::start)); empty without a
    /// beam search.
    pub search: (&'a [f32], &'a [i32]),
}

/// Pinned memory of an upload that may be in flight.
pub(super) struct Upload {
    memory: Pinned,
    /// Number of a step that is enqueued after the upload. Once the result of this step has been received, `memory` can be reused.
    until: u64,
}

/// 32-bit values and their target positions, counted in 32-bit units from the start of the table.
#[derive(Default)]
struct Changes {
    places: Vec<i32>,
    values: Vec<i32>,
}

impl Changes {
    /// Appends a change for each of `values`. Their targets are consecutive positions, starting at byte offset `at` of the table.
    fn put(&mut self, at: u64, values: impl Iterator<Item = i32>) {
        let before = self.values.len();
        self.values.extend(values);
        let first = (at / 4) as i32;
        self.places
            .extend((first..).take(self.values.len() - before));
    }

    /// Returns the changes that `edits` make to a table.
    fn of(edits: &[(usize, Option<Entry>)], at: &Places, room: LoopRoom) -> Self {
        let mut all = Self::default();
        for &(row, entry) in edits {
            let of_row = |first: u64, ints: u64| first + 4 * row as u64 * ints;
            let (width, source_width) = (room.width as u64, room.source_width as u64);
            let n_known = entry.map_or(0, |entry| entry.tokens.len() as i32);
            all.put(of_row(at.known, 1), [n_known].into_iter());
            let Some(entry) = entry else { continue };
            let choice = u64::from(DeviceSamplingParams::WIDTH);
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
    /// Edits rows before the next step. Each of these rows gets a sequence or becomes empty.
    ///
    /// # Errors
    /// Returns driver errors.
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
        // SAFETY: the table contains all positions, and each position occurs once. The pinned memory is not overwritten before the result
        // of a later step is received.
        unsafe { scatter.launch(stream, &extents, &args, "the sequences", Start::Plain) }?;
        self.refresh()
    }
}

/// Converts ids or slots to the element type of the table.
fn ints(ids: &[u32]) -> impl Iterator<Item = i32> + '_ {
    ids.iter().map(|&id| id as i32)
}

/// Returns pinned memory of at least `bytes` bytes that no work on the stream still reads. `received` is the number of the last step whose
/// result has been received.
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
    fn every_value_of_a_row_has_its_own_position() {
        let room = LoopRoom {
            rows: 3,
            width: 8,
            source_width: 4,
        };
        let at = Places::of(room);
        let choice = vec![7; DeviceSamplingParams::WIDTH as usize];
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
