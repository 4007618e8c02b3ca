//! Staging memory for batch data. The host writes the data to pinned memory, from which one upload copies all data.

use std::{cell::Cell, sync::Arc};

use cudarc::driver::{CudaEvent, CudaStream};

use crate::{
    kernels::upload::Upload,
    ops::BatchInput,
    plan::ALIGNMENT,
    program::Program,
    runtime::{
        batch::Batch,
        cuda::{
            device::Device,
            error::{CudaError, During},
            memory::{Buffer, Pinned},
            model::{Loaded, Start},
        },
    },
    tensor::Extents,
};

/// Pinned host memory and device memory of equal size, which grow to fit the largest batch.
pub(super) struct Staging {
    device: Device,
    stream: Arc<CudaStream>,
    memory: Option<(Pinned, Buffer)>,
    /// Whether an upload may still be reading the host memory.
    uploading: bool,
    /// Event after the upload, if it was recorded. Without the event, the upload is known to be done only when the stream has no more work.
    event: Option<CudaEvent>,
}

/// Device addresses of a batch's data.
#[derive(Clone, Copy, Default)]
pub(super) struct BatchData {
    pub(super) token_ids: u64,
    pub(super) type_ids: u64,
    pub(super) positions: u64,
    pub(super) cu_lens: u64,
    pub(super) pair_offsets: u64,
    pub(super) valid_lens: u64,
    pub(super) token_slots: u64,
    pub(super) slots: u64,
    pub(super) slot_starts: u64,
    pub(super) key_lens: u64,
    pub(super) source_slots: u64,
    pub(super) source_starts: u64,
    pub(super) source_lens: u64,
    pub(super) seeds: u64,
    /// Id that counts as preceding a sequence's first token, and address of the array with the id before each token
    /// ([`BatchInput::PreviousIds`]); `None` if the program does not read this array.
    pub(super) previous_ids: Option<(u32, u64)>,
    /// Addresses of [`BatchInput::PooledTokens`] and [`BatchInput::PooledCuLens`], if the program reads these arrays.
    pub(super) pooled: Option<[u64; 2]>,
    /// Addresses of the mask, the padded token ids and the padded segment ids, if the batch is padded.
    pub(super) padded: Option<[u64; 3]>,
    /// Device address and size of the data that is uploaded.
    pub(super) start: u64,
    pub(super) bytes: usize,
}

/// Selects the batch data that only some programs read: preceding ids and pooled tokens. The kernels that pack a padded batch on the device
/// do not compute this data.
#[derive(Clone, Copy)]
pub(super) struct Extra {
    /// Id that counts as preceding a sequence's first token; `None` if the program does not read preceding ids.
    first: Option<u32>,
    /// Whether pooling leaves out prompts.
    pools: bool,
}

impl Extra {
    pub(super) fn of(program: &Program) -> Self {
        Self {
            first: program.first_ids().next(),
            pools: program.reads(BatchInput::PooledTokens),
        }
    }

    pub(super) fn is_read(&self) -> bool {
        self.first.is_some() || self.pools
    }
}

impl BatchData {
    pub(super) fn at(&self, meta: BatchInput) -> u64 {
        match meta {
            BatchInput::TokenIds => self.token_ids,
            BatchInput::TypeIds => self.type_ids,
            BatchInput::Positions => self.positions,
            BatchInput::CuLens => self.cu_lens,
            BatchInput::PairOffsets => self.pair_offsets,
            BatchInput::ValidLens => self.valid_lens,
            BatchInput::TokenSlots => self.token_slots,
            BatchInput::Slots => self.slots,
            BatchInput::SlotStarts => self.slot_starts,
            BatchInput::KeyLens => self.key_lens,
            BatchInput::SourceSlots => self.source_slots,
            BatchInput::SourceStarts => self.source_starts,
            BatchInput::SourceLens => self.source_lens,
            BatchInput::Seeds => self.seeds,
            BatchInput::PooledTokens => self.pooled.map_or(0, |[tokens, _]| tokens),
            BatchInput::PooledCuLens => self.pooled.map_or(0, |[_, bounds]| bounds),
            BatchInput::PreviousIds { .. } => self.previous_ids.map_or(0, |(_, at)| at),
            BatchInput::Mask => self.padded.map_or(0, |[mask, ..]| mask),
        }
    }
}

impl Staging {
    pub(super) fn new(device: Device, stream: Arc<CudaStream>) -> Self {
        Self {
            device,
            stream,
            memory: None,
            uploading: false,
            event: None,
        }
    }

    /// Number of bytes held on the device.
    pub(super) fn bytes(&self) -> u64 {
        self.memory.as_ref().map_or(0, |(_, device)| device.bytes())
    }

    /// Frees all memory.
    pub(super) fn release(&mut self) {
        // After a device failure, nothing reads the memory any more.
        let _ = self.settle();
        self.memory = None;
    }

    /// Lays out the batch data of a run with extents `e`, and allocates memory for this data. `e` may exceed the extents of the batch. A
    /// padded batch has `n_padded` token positions.
    pub(super) fn place(
        &mut self,
        n_padded: Option<usize>,
        Extra { first, pools }: Extra,
        e: &Extents,
    ) -> Result<BatchData, CudaError> {
        let end = Cell::new(0u64);
        let place = |bytes: u64| end.replace(end.get() + bytes.next_multiple_of(ALIGNMENT));
        let valid_lens = place(4 * e.batch);
        let seeds = place(8 * e.batch);
        // A padded batch is uploaded unchanged. Kernels compute the arrays below.
        let padded = n_padded.map(|n| {
            let places = [(); 3].map(|()| place(4 * n as u64));
            (places, end.get())
        });
        let per_token = [(); 3].map(|()| place(4 * e.tokens));
        let previous_ids = first.map(|first| (first, place(4 * e.tokens)));
        let pooled = pools.then(|| [place(4 * (e.tokens + 1)), place(4 * (e.batch + 1))]);
        let cu_lens = place(4 * (e.batch + 1));
        let pair_offsets = place(8 * (e.batch + 1));
        // Without a cache, nothing reads these arrays.
        let in_cache = |bytes: u64| place(if e.blocks > 0 { bytes } else { 0 });
        let token_slots = in_cache(4 * e.tokens);
        let slots = in_cache(4 * e.slots);
        let [slot_starts, key_lens] = [(); 2].map(|()| in_cache(4 * e.batch));
        // Without sources, nothing reads these arrays.
        let of_sources = |bytes: u64| place(if e.source_slots > 0 { bytes } else { 0 });
        let source_slots = of_sources(4 * e.source_slots);
        let [source_starts, source_lens] = [(); 2].map(|()| of_sources(4 * e.batch));
        let end = end.get();
        if self.bytes() < end {
            self.settle()?;
            self.memory = None;
            let room = end.next_power_of_two();
            let device = Buffer::new(&self.device, room, "the batch data")?;
            self.memory = Some((Pinned::new(&self.device, room as usize)?, device));
        }
        let start = self.memory.as_ref().map_or(0, |(_, device)| device.start());
        Ok(BatchData {
            token_ids: start + per_token[0],
            type_ids: start + per_token[1],
            positions: start + per_token[2],
            cu_lens: start + cu_lens,
            pair_offsets: start + pair_offsets,
            valid_lens: start + valid_lens,
            token_slots: start + token_slots,
            slots: start + slots,
            slot_starts: start + slot_starts,
            key_lens: start + key_lens,
            source_slots: start + source_slots,
            source_starts: start + source_starts,
            source_lens: start + source_lens,
            seeds: start + seeds,
            previous_ids: previous_ids.map(|(first, at)| (first, start + at)),
            pooled: pooled.map(|places| places.map(|at| start + at)),
            padded: padded.map(|(places, _)| places.map(|at| start + at)),
            start,
            bytes: padded.map_or(end, |(_, end)| end) as usize,
        })
    }

    /// Returns the addresses of the memory on the host and on the device.
    pub(super) fn addresses(&self) -> [u64; 2] {
        let memory = self.memory.as_ref();
        memory.map_or([0; 2], |(pinned, device)| {
            [pinned.as_slice().as_ptr() as u64, device.start()]
        })
    }

    /// Waits for an upload that may still be reading the host memory.
    fn settle(&mut self) -> Result<(), CudaError> {
        if self.uploading {
            let done = match self.event.take() {
                Some(event) => event.synchronize(),
                None => self.stream.synchronize(),
            };
            done.during(|| "wait for the stream".to_owned())?;
            self.uploading = false;
        }
        Ok(())
    }

    /// Writes a batch to pinned memory. If the extents `e` of the run exceed those of the batch, the additional sequences are empty, and
    /// the additional tokens have id 0 and belong to no sequence.
    pub(super) fn fill(
        &mut self,
        data: &BatchData,
        batch: &Batch,
        e: &Extents,
    ) -> Result<(), CudaError> {
        self.settle()?;
        let Some((pinned, _)) = &mut self.memory else {
            return Ok(());
        };
        self.uploading = true;
        let own = batch.extents();
        let (tokens, sequences) = (own.tokens as usize, own.batch as usize);
        let host = pinned.as_mut_slice();
        let mut ints = |at: u64, len: u64, write: &dyn Fn(&mut [i32])| {
            let from = (at - data.start) as usize;
            write(bytemuck::cast_slice_mut(
                &mut host[from..from + 4 * len as usize],
            ));
        };
        ints(data.valid_lens, e.batch, &|to| {
            filled_up(to, sequences, &|to| batch.write_valid_lens(to));
        });
        ints(data.seeds, 2 * e.batch, &|to| {
            filled_up(to, 2 * sequences, &|to| batch.write_seeds(to));
        });
        if let (Some(places), Some(padded)) = (data.padded, batch.padded()) {
            let all = [&padded.mask, &padded.token_ids, &padded.type_ids];
            for (at, values) in places.into_iter().zip(all) {
                let values: &[i32] = bytemuck::cast_slice(values);
                ints(at, values.len() as u64, &|to| to.copy_from_slice(values));
            }
            return Ok(());
        }
        ints(data.token_ids, e.tokens, &|to| {
            filled_up(to, tokens, &|to| batch.write_token_ids(to));
        });
        ints(data.type_ids, e.tokens, &|to| {
            filled_up(to, tokens, &|to| batch.write_type_ids(to));
        });
        ints(data.positions, e.tokens, &|to| {
            filled_up(to, tokens, &|to| batch.write_positions(to));
        });
        if let Some((first, at)) = data.previous_ids {
            ints(at, e.tokens, &|to| {
                filled_up(to, tokens, &|to| batch.write_previous_ids(first, to));
            });
        }
        if let Some([pooled_tokens, bounds]) = data.pooled {
            ints(pooled_tokens, e.tokens + 1, &|to| {
                batch.write_pooled_tokens(to);
            });
            ints(bounds, e.batch + 1, &|to| {
                let (own, none) = to.split_at_mut(sequences + 1);
                batch.write_pooled_cu_lens(own);
                none.fill(own[sequences]);
            });
        }
        ints(data.cu_lens, e.batch + 1, &|to| {
            let (own, none) = to.split_at_mut(sequences + 1);
            batch.write_cu_lens(own);
            none.fill(own[sequences]);
        });
        if e.blocks > 0 {
            ints(data.token_slots, e.tokens, &|to| {
                filled_up(to, tokens, &|to| batch.write_token_slots(to));
            });
            ints(data.slots, e.slots, &|to| batch.write_slots(to));
            ints(data.slot_starts, e.batch, &|to| {
                filled_up(to, sequences, &|to| batch.write_slot_starts(to));
            });
            ints(data.key_lens, e.batch, &|to| {
                filled_up(to, sequences, &|to| batch.write_key_lens(to));
            });
        }
        if e.source_slots > 0 {
            ints(data.source_slots, e.source_slots, &|to| {
                batch.write_source_slots(to);
            });
            ints(data.source_starts, e.batch, &|to| {
                filled_up(to, sequences, &|to| batch.write_source_starts(to));
            });
            ints(data.source_lens, e.batch, &|to| {
                filled_up(to, sequences, &|to| batch.write_source_lens(to));
            });
        }
        let from = (data.pair_offsets - data.start) as usize;
        let offsets = &mut host[from..from + 8 * (e.batch as usize + 1)];
        let (own, none) = bytemuck::cast_slice_mut(offsets).split_at_mut(sequences + 1);
        batch.write_pair_offsets(own);
        none.fill(own[sequences]);
        Ok(())
    }

    /// Launches the kernel that uploads the data written by `fill`.
    pub(super) fn upload(&self, data: &BatchData, kernel: &Loaded) -> Result<(), CudaError> {
        let Some((pinned, _)) = &self.memory else {
            return Ok(());
        };
        let from = pinned.device_address()?;
        let pieces = Extents::default().with_rows(data.bytes as u64 / Upload::PIECE);
        // SAFETY: the pinned memory and the device memory have `data.bytes` bytes. The pinned memory is written or freed only after
        // `settle`, or when the session is dropped, which waits for the stream.
        unsafe {
            let stream = self.stream.cu_stream();
            kernel.launch(
                stream,
                &pieces,
                &[from, data.start],
                "the batch",
                Start::Plain,
            )
        }
    }

    /// Records that the stream has been synchronized since the last upload.
    pub(super) fn uploaded(&mut self) {
        (self.uploading, self.event) = (false, None);
    }

    /// Records an event after the upload, so that a wait for the upload does not include later work. The upload must be the last work on
    /// the stream.
    pub(super) fn note_upload(&mut self) -> Result<(), CudaError> {
        let event = self.device.context().new_event(None);
        let event = event.during(|| "make an event".to_owned())?;
        event
            .record(&self.stream)
            .during(|| "record an event".to_owned())?;
        self.event = Some(event);
        Ok(())
    }
}

/// Writes the first `n` values and fills the rest with zeros.
fn filled_up(to: &mut [i32], n: usize, write: &dyn Fn(&mut [i32])) {
    let (own, none) = to.split_at_mut(n);
    write(own);
    none.fill(0);
}
