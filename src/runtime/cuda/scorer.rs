//! Scores of late interaction on a device, for token vectors in device memory or in host memory.

use std::{
    mem,
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::driver::{CudaStream, result};
use rayon::prelude::*;

use super::{
    device::Device,
    error::{CudaError, During},
    memory::{Buffer, Pinned},
    model::{CudaModel, Loaded, Start},
};
use crate::{kernels::HostTensor, plan::ALIGNMENT, runtime::encode_tensor, tensor::Extents};

/// Maximum bytes of document vectors that are copied to the device at once, unless one document has more. While these vectors are copied to
/// the device, the next ones are copied to pinned memory.
const COPIED_BYTES: usize = 16 << 20;
/// Bytes that a thread copies to pinned memory at once.
const PIECE_BYTES: usize = 256 << 10;

/// Documents whose vectors are rows of a matrix.
#[derive(Clone, Copy)]
pub struct TakenRows<'a> {
    /// Indices of the rows of all documents, one document after another.
    pub rows: &'a [i32],
    /// Offsets in `rows` of the first index of each document, and as the last element the length of `rows`.
    pub offsets: &'a [i32],
}

/// Location of the vectors of documents.
pub(super) enum Vectors<'a> {
    /// A matrix at a device address, in the storage type of the model.
    OnDevice(u64),
    /// The vectors of each document, in f32. [`TakenRows::rows`] must then list the rows of all documents in order.
    OnHost(&'a [&'a [f32]]),
}

/// Host and device memory for launches of the scoring kernel. Only one launch at a time can use it. It grows to fit the largest launch.
pub(super) struct Scorer {
    device: Device,
    /// Operands that come from the host.
    operands: Option<(Pinned, Buffer)>,
    scores: Option<(Pinned, Buffer)>,
    /// The tensors `arrived` and `largest` of [`MaxSim`](crate::kernels::max_sim::MaxSim), in which all bits are set before and after a
    /// launch.
    state: Option<Buffer>,
}

impl Scorer {
    pub(super) fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            operands: None,
            scores: None,
            state: None,
        }
    }

    /// Enqueues the copies of the operands, a launch, and the copy of the scores. Rows of the query have the width of the model's vectors.
    /// The previous launch must be done. After an error, the caller must wait for the stream and drop the scorer.
    pub(super) fn enqueue(
        &mut self,
        model: &CudaModel,
        stream: &CudaStream,
        query: &[f32],
        vectors: &Vectors<'_>,
        documents: TakenRows<'_>,
    ) -> Result<(), CudaError> {
        let scoring = model.scoring().ok_or(CudaError::NoTokenVectors)?;
        let (kernel, own): (&Loaded, &[&[f32]]) = match vectors {
            Vectors::OnDevice(_) => (&scoring.stored, &[]),
            Vectors::OnHost(rows) => (scoring.of_f32(), rows),
        };
        let width = scoring.width as usize;
        let element = kernel
            .kernel()
            .as_kernel()
            .dtype()
            .unwrap_or(model.program().dtype);
        let query_rows = query.len() / width;
        let query = HostTensor::Real(query.to_vec());
        let query = encode_tensor(&query, element.into(), width);
        let n = documents.offsets.len().saturating_sub(1);
        let longest = documents.offsets.windows(2).map(|ends| ends[1] - ends[0]);
        let extents = Extents {
            tokens: documents.rows.len() as u64,
            batch: n as u64,
            longest: longest.max().unwrap_or(0).max(1) as u64,
            rows: query_rows as u64,
            ..Extents::default()
        };
        let parts = [
            own.iter().map(|rows| mem::size_of_val(*rows)).sum(),
            query.len(),
            mem::size_of_val(documents.rows),
            mem::size_of_val(documents.offsets),
        ];
        let mut end = 0;
        let places = parts.map(|bytes: usize| {
            let place = end;
            end += bytes.next_multiple_of(ALIGNMENT as usize);
            place
        });
        let stream = stream.cu_stream();
        let (pinned, operands) = with_room(
            &self.device,
            &mut self.operands,
            end,
            "a query and documents",
        )?;
        let host = pinned.as_mut_slice();
        copy_rows(own, &mut host[..parts[0]]);
        let rest = [
            &query[..],
            bytemuck::cast_slice(documents.rows),
            bytemuck::cast_slice(documents.offsets),
        ];
        for (bytes, place) in rest.into_iter().zip(&places[1..]) {
            host[*place..][..bytes.len()].copy_from_slice(bytes);
        }
        // SAFETY: both memories have this size. The pinned memory is written again only after the launch is done.
        unsafe { result::memcpy_htod_async(operands.start(), &host[..end], stream) }
            .during(|| "upload a query and documents".to_owned())?;
        let [rows, query, taken, offsets] = places.map(|place| operands.start() + place as u64);
        let rows = match vectors {
            Vectors::OnDevice(address) => *address,
            Vectors::OnHost(_) => rows,
        };
        let counts = (4 * n as u64).next_multiple_of(ALIGNMENT);
        let state = counts + 4 * n as u64 * query_rows as u64;
        if self.state.as_ref().is_none_or(|own| own.bytes() < state) {
            self.state = None;
            let room = state.next_power_of_two();
            let buffer = Buffer::new(&self.device, room, "the max products of documents")?;
            // SAFETY: the buffer has this size, and nothing else uses it yet.
            unsafe { result::memset_d8_async(buffer.start(), 0xff, room as usize, stream) }
                .during(|| "initialize max products".to_owned())?;
            self.state = Some(buffer);
        }
        let arrived = self.state.as_ref().map_or(0, Buffer::start);
        let (results, out) = with_room(
            &self.device,
            &mut self.scores,
            4 * n,
            "the scores of documents",
        )?;
        let operands = [
            query,
            rows,
            taken,
            offsets,
            out.start(),
            arrived + counts,
            arrived,
        ];
        // SAFETY: the operands have the shapes that the kernel's parameters require for these extents.
        unsafe { kernel.launch(stream, &extents, &operands, "the scores", Start::Plain) }?;
        let results = &mut results.as_mut_slice()[..4 * n];
        // SAFETY: both memories have this size. The pinned memory is read only after the launch is done.
        unsafe { result::memcpy_dtoh_async(results, out.start(), stream) }
            .during(|| "download scores".to_owned())
    }

    /// Returns the scores of the `n` documents of the last launch. The launch must be done.
    pub(super) fn scores(&self, n: usize) -> impl Iterator<Item = f32> {
        let bytes = self
            .scores
            .as_ref()
            .map_or(&[][..], |(pinned, _)| pinned.as_slice());
        let (scores, _) = bytes.as_chunks::<4>();
        scores
            .iter()
            .take(n)
            .map(|bytes| f32::from_ne_bytes(*bytes))
    }
}

/// Returns pinned memory and device memory of at least `bytes` bytes each.
fn with_room<'a>(
    device: &Device,
    own: &'a mut Option<(Pinned, Buffer)>,
    bytes: usize,
    what: &'static str,
) -> Result<(&'a mut Pinned, &'a mut Buffer), CudaError> {
    let (pinned, buffer) = match own.take() {
        Some(memory) if memory.1.bytes() >= bytes as u64 => own.insert(memory),
        _ => {
            let room = bytes.next_power_of_two();
            let buffer = Buffer::new(device, room as u64, what)?;
            own.insert((Pinned::new(device, room)?, buffer))
        }
    };
    Ok((pinned, buffer))
}

/// Copies the rows of all documents to `to`, one document after another, on the threads of the caller's rayon pool.
fn copy_rows(rows: &[&[f32]], mut to: &mut [u8]) {
    let mut pieces = Vec::new();
    for piece in rows.iter().flat_map(|rows| rows.chunks(PIECE_BYTES / 4)) {
        let (own, rest) = mem::take(&mut to).split_at_mut(mem::size_of_val(piece));
        pieces.push((own, piece));
        to = rest;
    }
    let pieces = pieces.into_par_iter();
    pieces.for_each(|(own, piece)| own.copy_from_slice(bytemuck::cast_slice(piece)));
}

/// Scores documents whose vectors are in host memory. Pinned memory is kept for the next call.
pub struct HostScorer {
    model: Arc<CudaModel>,
    free: Mutex<Vec<Lane>>,
}

/// A stream with the memory of its launches.
struct Lane {
    stream: Arc<CudaStream>,
    scorer: Scorer,
    /// Number of documents of the launch in flight.
    n: usize,
}

impl HostScorer {
    /// Creates a scorer. Returns `None` if the model has no token vectors, or if they are wider than the kernels support.
    pub fn new(model: &Arc<CudaModel>) -> Option<Self> {
        model.scoring()?;
        Some(Self {
            model: Arc::clone(model),
            free: Mutex::default(),
        })
    }

    /// Returns the width of the model's token vectors.
    pub fn width(&self) -> usize {
        self.model
            .scoring()
            .map_or(0, |scoring| scoring.width as usize)
    }

    /// Returns the score of each document: for each vector of the query, the maximum dot product with a vector of the document, summed over
    /// the query. `query` and each document are `[vectors, width]`, with the [`width`](Self::width) of the model's token vectors.
    ///
    /// # Errors
    /// Returns an error if an allocation fails, and driver errors.
    pub fn scores(&self, query: &[f32], documents: &[&[f32]]) -> Result<Vec<f32>, CudaError> {
        let device = self.model.device();
        let bound = device.context().bind_to_thread();
        bound.during(|| "use the device on this thread".to_owned())?;
        let mut lanes = [self.lane()?, self.lane()?];
        let mut scores = Vec::with_capacity(documents.len());
        let ran = self.run(&mut lanes, query, documents, &mut scores);
        // Wait even after an error, because copies may still read the pinned memory.
        let waited: Result<(), CudaError> = lanes.iter().try_for_each(Lane::wait);
        ran.and(waited)?;
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.extend(lanes);
        Ok(scores)
    }

    fn run(
        &self,
        lanes: &mut [Lane; 2],
        query: &[f32],
        documents: &[&[f32]],
        scores: &mut Vec<f32>,
    ) -> Result<(), CudaError> {
        let width = self.width();
        let mut rest = documents;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fit = rest.iter().take_while(|rows| {
                bytes += mem::size_of_val(**rows);
                bytes <= COPIED_BYTES
            });
            let n = fit.count().max(1);
            let (own, others) = rest.split_at(n);
            rest = others;
            let ends = own.iter().scan(0, |end, rows| {
                *end += (rows.len() / width) as i32;
                Some(*end)
            });
            let offsets: Vec<i32> = std::iter::once(0).chain(ends).collect();
            let rows: Vec<i32> = (0..offsets[n]).collect();
            let [first, _] = lanes;
            first.finish(scores)?;
            let taken = TakenRows {
                rows: &rows,
                offsets: &offsets,
            };
            let vectors = Vectors::OnHost(own);
            let Lane { stream, scorer, .. } = first;
            scorer.enqueue(&self.model, stream, query, &vectors, taken)?;
            first.n = n;
            lanes.swap(0, 1);
        }
        lanes.iter_mut().try_for_each(|lane| lane.finish(scores))
    }

    fn lane(&self) -> Result<Lane, CudaError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lane) = free.pop() {
            return Ok(lane);
        }
        let device = self.model.device();
        let stream = device.context().new_stream();
        Ok(Lane {
            stream: stream.during(|| "make a stream".to_owned())?,
            scorer: Scorer::new(device),
            n: 0,
        })
    }
}

impl Lane {
    fn wait(&self) -> Result<(), CudaError> {
        let done = self.stream.synchronize();
        done.during(|| "wait for scores".to_owned())
    }

    /// Waits for the launch in flight, and appends its scores to `scores`.
    fn finish(&mut self, scores: &mut Vec<f32>) -> Result<(), CudaError> {
        self.wait()?;
        scores.extend(self.scorer.scores(mem::take(&mut self.n)));
        Ok(())
    }
}
