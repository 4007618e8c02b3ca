//! Batch data on their way to the device: written once on the host, copied in one piece.

use std::{cell::Cell, sync::Arc};

use cudarc::driver::{CudaStream, result};

use crate::{
    kernels::Meta,
    plan::ALIGNMENT,
    runtime::{
        batch::Batch,
        cuda::{
            device::Device,
            error::{CudaError, During},
            memory::{Buffer, Pinned},
        },
    },
};

/// Room for batch data on the host and on the device; grows with the largest batch.
pub(super) struct Staging {
    device: Device,
    stream: Arc<CudaStream>,
    memory: Option<(Pinned, Buffer)>,
    /// A copy may still read the host's memory.
    copying: bool,
}

/// Where the data of a batch lie on the device.
#[derive(Clone, Copy, Default)]
pub(super) struct BatchData {
    pub(super) token_ids: u64,
    pub(super) type_ids: u64,
    pub(super) positions: u64,
    pub(super) cu_lens: u64,
    pub(super) pair_offsets: u64,
    valid_lens: u64,
    /// Mask, padded ids and padded segment ids, where the batch came padded.
    pub(super) padded: Option<[u64; 3]>,
    /// Where the piece begins that is copied, and its bytes.
    start: u64,
    bytes: usize,
}

impl BatchData {
    pub(super) fn at(&self, meta: Meta) -> u64 {
        match meta {
            Meta::TokenIds => self.token_ids,
            Meta::TypeIds => self.type_ids,
            Meta::Positions => self.positions,
            Meta::CuLens => self.cu_lens,
            Meta::PairOffsets => self.pair_offsets,
            Meta::ValidLens => self.valid_lens,
            Meta::Mask => self.padded.map_or(0, |[mask, ..]| mask),
        }
    }
}

impl Staging {
    pub(super) fn new(device: Device, stream: Arc<CudaStream>) -> Self {
        Self {
            device,
            stream,
            memory: None,
            copying: false,
        }
    }

    /// Bytes held on the device.
    pub(super) fn bytes(&self) -> u64 {
        self.memory.as_ref().map_or(0, |(_, device)| device.bytes())
    }

    /// Gives everything back.
    pub(super) fn release(&mut self) {
        // Where the device has failed nothing reads the memory any more.
        let _ = self.settle();
        self.memory = None;
    }

    /// Gives every piece of batch data its place. Says too whether the memory has grown, and moved.
    pub(super) fn place(&mut self, batch: &Batch) -> Result<(BatchData, bool), CudaError> {
        let e = batch.extents();
        let end = Cell::new(0u64);
        let place = |bytes: u64| end.replace(end.get() + bytes.next_multiple_of(ALIGNMENT));
        let valid_lens = place(4 * e.batch);
        // What a padded batch is packed into is made on the device.
        let padded = batch.padded().map(|p| {
            let places = [(); 3].map(|()| place(4 * p.mask.len() as u64));
            (places, end.get())
        });
        let per_token = [(); 3].map(|()| place(4 * e.tokens));
        let cu_lens = place(4 * (e.batch + 1));
        let pair_offsets = place(8 * (e.batch + 1));
        let end = end.get();
        let moved = self.bytes() < end;
        if moved {
            self.settle()?;
            self.memory = None;
            let room = end.next_power_of_two();
            let device = Buffer::new(&self.device, room, "the batch data")?;
            self.memory = Some((Pinned::new(&self.device, room as usize)?, device));
        }
        let start = self.memory.as_ref().map_or(0, |(_, device)| device.start());
        let data = BatchData {
            token_ids: start + per_token[0],
            type_ids: start + per_token[1],
            positions: start + per_token[2],
            cu_lens: start + cu_lens,
            pair_offsets: start + pair_offsets,
            valid_lens: start + valid_lens,
            padded: padded.map(|(places, _)| places.map(|at| start + at)),
            start,
            bytes: padded.map_or(end, |(_, end)| end) as usize,
        };
        Ok((data, moved))
    }

    /// Waits for a copy that may still read the host's memory.
    fn settle(&mut self) -> Result<(), CudaError> {
        if self.copying {
            self.stream
                .synchronize()
                .during(|| "wait for the stream".to_owned())?;
            self.copying = false;
        }
        Ok(())
    }

    /// Writes a batch where `copy` takes it from.
    pub(super) fn fill(&mut self, data: &BatchData, batch: &Batch) -> Result<(), CudaError> {
        self.settle()?;
        let Some((pinned, _)) = &mut self.memory else {
            return Ok(());
        };
        self.copying = true;
        let e = batch.extents();
        let (tokens, sequences) = (e.tokens as usize, e.batch as usize);
        let host = pinned.as_mut_slice();
        let mut ints = |at: u64, len: usize, write: &dyn Fn(&mut [i32])| {
            let from = (at - data.start) as usize;
            write(bytemuck::cast_slice_mut(&mut host[from..from + 4 * len]));
        };
        ints(data.valid_lens, sequences, &|to| batch.write_valid_lens(to));
        if let (Some(places), Some(padded)) = (data.padded, batch.padded()) {
            let all = [&padded.mask, &padded.token_ids, &padded.type_ids];
            for (at, values) in places.into_iter().zip(all) {
                let values: &[i32] = bytemuck::cast_slice(values);
                ints(at, values.len(), &|to| to.copy_from_slice(values));
            }
            return Ok(());
        }
        ints(data.token_ids, tokens, &|to| batch.write_token_ids(to));
        ints(data.type_ids, tokens, &|to| batch.write_type_ids(to));
        ints(data.positions, tokens, &|to| batch.write_positions(to));
        ints(data.cu_lens, sequences + 1, &|to| batch.write_cu_lens(to));
        let from = (data.pair_offsets - data.start) as usize;
        let offsets = &mut host[from..from + 8 * (sequences + 1)];
        batch.write_pair_offsets(bytemuck::cast_slice_mut(offsets));
        Ok(())
    }

    /// Copies to the device what `fill` wrote.
    pub(super) fn copy(&self, data: &BatchData) -> Result<(), CudaError> {
        let Some((pinned, _)) = &self.memory else {
            return Ok(());
        };
        let from = &pinned.as_slice()[..data.bytes];
        // SAFETY: the device buffer is as large as the pinned one, which is written or freed only
        // after `settle`, or by the session's drop, which waits for the stream.
        unsafe { result::memcpy_htod_async(data.start, from, self.stream.cu_stream()) }
            .during(|| "upload the batch".to_owned())
    }

    /// Says that the stream was waited for since the last copy.
    pub(super) fn copied(&mut self) {
        self.copying = false;
    }
}
