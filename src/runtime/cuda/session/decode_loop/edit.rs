//! Changes of a loop's rows, uploaded between two steps.

use cudarc::driver::result;

use super::{
    DecodeLoop,
    table::{SCORE_BYTES, STATE_BYTES},
};
use crate::{
    kernels::decoding::Choice,
    runtime::cuda::{
        error::{CudaError, During},
        memory::Pinned,
    },
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

impl DecodeLoop {
    /// Changes rows before the next step: each gets a sequence, or has none any more.
    ///
    /// # Errors
    /// Failures of the driver.
    pub fn edit(&mut self, edits: &[(usize, Option<Entry>)]) -> Result<(), CudaError> {
        let Some(table) = &self.table else {
            return Ok(());
        };
        if edits.is_empty() {
            return Ok(());
        }
        let width = Choice::WIDTH as usize;
        let ints = |entry: &Option<Entry>| {
            1 + entry.map_or(0, |e| {
                let of_search = e.search.0.len() + e.search.1.len();
                width + e.slots.len() + e.tokens.len() + 1 + e.source.len() + of_search
            })
        };
        let bytes = 4 * edits.iter().map(|(_, entry)| ints(entry)).sum::<usize>();
        let (start, at) = (table.memory.start(), table.at);
        let row_bytes = 4 * table.room.width as u64;
        let source_bytes = 4 * table.room.source_width as u64;
        let upload = self.upload_area(bytes)?;
        let (stream, until) = (self.launcher.stream.cu_stream(), self.enqueued + 1);
        let upload = &mut self.uploads[upload];
        upload.until = until;
        let host: &mut [i32] = bytemuck::cast_slice_mut(&mut upload.memory.as_mut_slice()[..bytes]);
        let mut next = 0;
        let mut copy = |to: u64, values: &mut dyn Iterator<Item = i32>| {
            let from = next;
            for value in values {
                host[next] = value;
                next += 1;
            }
            let piece: &[u8] = bytemuck::cast_slice(&host[from..next]);
            // SAFETY: the table has room at `to`, as the offsets say; the pinned memory is not written again before a
            // later step was received.
            unsafe { result::memcpy_htod_async(start + to, piece, stream) }
                .during(|| "upload a sequence".to_owned())
        };
        for &(row, entry) in edits {
            let row = row as u64;
            let n_known = entry.map_or(0, |e| e.tokens.len() as i32);
            copy(at.known + 4 * row, &mut [n_known].into_iter())?;
            let Some(entry) = entry else { continue };
            let of_row = |first: u64| first + row * row_bytes;
            let request = at.requests + row * u64::from(Choice::WIDTH) * 4;
            copy(request, &mut entry.choice.iter().copied())?;
            let slots = entry.slots.iter().map(|&slot| slot as i32);
            copy(of_row(at.slots), &mut { slots })?;
            let tokens = entry.tokens.iter().map(|&id| id as i32);
            copy(of_row(at.tokens), &mut { tokens })?;
            let n_source = entry.source.len() as i32;
            copy(at.source_lens + 4 * row, &mut [n_source].into_iter())?;
            if n_source > 0 {
                let source = entry.source.iter().map(|&slot| slot as i32);
                copy(at.source_slots + row * source_bytes, &mut { source })?;
            }
            let (scores, states) = entry.search;
            if !scores.is_empty() {
                let scores = scores.iter().map(|x| x.to_bits() as i32);
                copy(at.scores + row * SCORE_BYTES, &mut { scores })?;
                copy(at.states + row * STATE_BYTES, &mut states.iter().copied())?;
            }
        }
        self.refresh()
    }

    /// Index of pinned memory of at least so many bytes that no copy reads any more.
    fn upload_area(&mut self, bytes: usize) -> Result<usize, CudaError> {
        let received = self.received;
        let is_free =
            |upload: &Upload| upload.until <= received && upload.memory.as_slice().len() >= bytes;
        if let Some(at) = self.uploads.iter().position(is_free) {
            return Ok(at);
        }
        let memory = Pinned::new(&self.launcher.model.device, bytes.next_power_of_two())?;
        self.uploads.push(Upload { memory, until: 0 });
        Ok(self.uploads.len() - 1)
    }
}
