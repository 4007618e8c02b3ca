//! Slots for a session's batches in flight. A slot has host memory for the input and the results of one batch.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::{CudaEvent, CudaStream, sys};

use super::staging::Staging;
use crate::{
    runtime::{
        Output,
        cuda::{
            device::Device,
            error::{CudaError, During},
            memory::Pinned,
        },
        extend_values,
    },
    tensor::Element,
};

/// Maximum size of pinned result memory that is kept for the next batch. Larger memory is rarely needed again, so it is freed.
const KEPT_BYTES: usize = 256 << 20;

/// Resources of one batch in flight, except the memory for intermediate tensors, which all runs of a stream share.
pub(super) struct Slot {
    pub(super) staging: Staging,
    output_slot: OutputSlot<PinnedOutput>,
}

/// Result memory for one batch at a time.
struct OutputSlot<L> {
    /// The result memory, unless a batch in flight uses it.
    output: Option<L>,
    submission: Option<Arc<Submission<L>>>,
    /// Sequence number of the last submitted batch.
    nth: u64,
}

/// Memory to which results are being copied.
trait ResultMemory {
    /// Waits until the results have arrived.
    fn synchronize(&self) -> Result<(), CudaError>;
    fn memory(&self) -> &[u8];
}

/// Pinned memory to which results are copied, and an event that marks the end of the copy.
pub(super) struct PinnedOutput {
    memory: Pinned,
    done: CudaEvent,
}

/// Location of one output in the pinned memory.
pub(super) struct Piece {
    pub(super) name: String,
    pub(super) shape: Vec<u64>,
    pub(super) element: Element,
    /// Offset of the first byte.
    pub(super) at: usize,
    pub(super) bytes: usize,
}

/// State of a submitted batch, shared by its session and its ticket.
struct Submission<L>(Mutex<Progress<L>>);

enum Progress<L> {
    Running(L, Vec<Piece>),
    /// Holds the results until the ticket takes them, and the result memory until the session takes it.
    Done(Option<Result<Vec<Output>, CudaError>>, Option<L>),
}

/// Handle to the results of a submitted batch. Any thread may wait for the results. Dropping the ticket discards the results, but the batch
/// still runs.
pub struct CudaTicket(Arc<Submission<PinnedOutput>>);

impl fmt::Debug for CudaTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaTicket").finish_non_exhaustive()
    }
}

impl CudaTicket {
    /// Waits until the batch has run, and returns copies of its outputs, converted to f32.
    ///
    /// # Errors
    /// Returns an error if the batch failed on the device or host memory could not be allocated.
    pub fn wait(self) -> Result<Vec<Output>, CudaError> {
        self.0.results()
    }
}

impl<L: ResultMemory> Submission<L> {
    fn lock(&self) -> MutexGuard<'_, Progress<L>> {
        // The state is consistent even after a panic of another thread, because the progress is replaced by a single assignment.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the batch and takes its results. Must be called at most once.
    fn results(&self) -> Result<Vec<Output>, CudaError> {
        let mut progress = self.lock();
        progress.complete();
        let Progress::Done(results, _) = &mut *progress else {
            unreachable!("it is complete")
        };
        let results = results.take();
        results.expect("a ticket is waited for once, and nobody else takes its results")
    }

    /// Returns whether the results have been copied out of the result memory. Returns `false` while a ticket waits for the results.
    fn is_done(&self) -> bool {
        let progress = self.0.try_lock();
        progress.is_ok_and(|progress| matches!(*progress, Progress::Done(..)))
    }
}

impl<L: ResultMemory> Progress<L> {
    /// Waits for the batch and copies its results out of the result memory.
    fn complete(&mut self) {
        *self = match std::mem::replace(self, Self::Done(None, None)) {
            Self::Running(output, pieces) => {
                let memory = output.memory();
                let results = output
                    .synchronize()
                    .and_then(|()| pieces.iter().map(|p| p.read(memory)).collect());
                let is_kept = memory.len() <= KEPT_BYTES;
                Self::Done(Some(results), is_kept.then_some(output))
            }
            done => done,
        }
    }
}

impl Piece {
    fn no_memory(&self) -> CudaError {
        CudaError::OutputMemory {
            output: self.name.clone(),
            bytes: self.bytes as u64,
        }
    }

    fn read(&self, memory: &[u8]) -> Result<Output, CudaError> {
        let raw = &memory[self.at..self.at + self.bytes];
        let mut values = Vec::new();
        let n = self.bytes / self.element.bytes() as usize;
        values.try_reserve_exact(n).map_err(|_| self.no_memory())?;
        extend_values(&mut values, raw, self.element);
        Ok(Output {
            name: self.name.clone(),
            shape: self.shape.clone(),
            values,
        })
    }
}

impl<L: ResultMemory> OutputSlot<L> {
    fn is_taken(&self) -> bool {
        let taken = |submission: &Arc<Submission<L>>| {
            !submission.is_done() && Arc::strong_count(submission) > 1
        };
        self.submission.as_ref().is_some_and(taken)
    }

    fn nth(&self) -> Option<u64> {
        let submission = self.submission.as_ref();
        submission.filter(|f| !f.is_done()).map(|_| self.nth)
    }

    /// Waits for the batch in flight and takes the result memory back. Returns whether there was a batch.
    fn clear(&mut self) -> bool {
        let Some(submission) = self.submission.take() else {
            return false;
        };
        let mut progress = submission.lock();
        // If the ticket was dropped, nobody reads the results.
        if Arc::strong_count(&submission) == 1
            && let Progress::Running(_, pieces) = &mut *progress
        {
            pieces.clear();
        }
        progress.complete();
        if let Progress::Done(_, output) = &mut *progress {
            self.output = output.take();
        }
        true
    }

    fn detach(&mut self, pieces: Vec<Piece>, nth: u64) -> Option<Arc<Submission<L>>> {
        let output = self.output.take()?;
        let submission = Arc::new(Submission(Mutex::new(Progress::Running(output, pieces))));
        self.submission = Some(Arc::clone(&submission));
        self.nth = nth;
        Some(submission)
    }
}

impl Slot {
    pub(super) fn new(device: Device, stream: Arc<CudaStream>) -> Self {
        Self {
            staging: Staging::new(device, stream),
            output_slot: OutputSlot {
                output: None,
                submission: None,
                nth: 0,
            },
        }
    }

    /// Returns whether the session must wait for a ticket before the slot can take another batch. A slot whose ticket was dropped is not
    /// taken.
    pub(super) fn is_taken(&self) -> bool {
        self.output_slot.is_taken()
    }

    /// Returns the sequence number of the batch in flight, if its results have not been copied out of the result memory.
    pub(super) fn nth(&self) -> Option<u64> {
        self.output_slot.nth()
    }

    /// Waits for the batch in flight, keeps its results for the ticket and takes its memory back.
    pub(super) fn clear(&mut self) {
        if self.output_slot.clear() {
            // Nothing reads the host memory any more, not even after a device failure.
            self.staging.uploaded();
        }
    }

    /// Allocates memory for results of `bytes` bytes. An out-of-memory error names the largest output in `of`.
    pub(super) fn reserve(
        &mut self,
        device: &Device,
        bytes: usize,
        of: &[Piece],
    ) -> Result<(), CudaError> {
        let held = self.output_slot.output.as_ref();
        if held.is_some_and(|output| output.memory.as_slice().len() >= bytes) {
            return Ok(());
        }
        self.output_slot.output = None;
        let room = match bytes <= KEPT_BYTES {
            true => bytes.next_power_of_two(),
            false => bytes,
        };
        let memory = Pinned::new(device, room).map_err(|error| match (error, of) {
            (CudaError::Driver { source, .. }, [first, ..])
                if source.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY =>
            {
                let largest = of.iter().max_by_key(|p| p.bytes).unwrap_or(first);
                largest.no_memory()
            }
            (error, _) => error,
        })?;
        let done = device.context().new_event(None);
        let done = done.during(|| "make an event".to_owned())?;
        self.output_slot.output = Some(PinnedOutput { memory, done });
        Ok(())
    }

    /// Returns the result memory, which exists after [`reserve`](Self::reserve).
    pub(super) fn output(&mut self) -> Option<&mut PinnedOutput> {
        self.output_slot.output.as_mut()
    }

    /// Passes the result memory to a new ticket for the `nth` batch.
    pub(super) fn detach(&mut self, pieces: Vec<Piece>, nth: u64) -> Option<CudaTicket> {
        self.output_slot.detach(pieces, nth).map(CudaTicket)
    }

    /// Frees all memory that no batch in flight uses.
    pub(super) fn release(&mut self) {
        self.staging.release();
        self.output_slot.output = None;
    }
}

impl ResultMemory for PinnedOutput {
    fn synchronize(&self) -> Result<(), CudaError> {
        let done = self.done.synchronize();
        done.during(|| "wait for the run".to_owned())
    }

    fn memory(&self) -> &[u8] {
        self.memory.as_slice()
    }
}

impl PinnedOutput {
    /// Returns the address on the device.
    pub(super) fn address(&self) -> Result<u64, CudaError> {
        self.memory.device_address()
    }

    pub(super) fn memory_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut_slice()
    }

    /// Records the event that marks the end of the copy.
    pub(super) fn note(&self, stream: &CudaStream) -> Result<(), CudaError> {
        let noted = self.done.record(stream);
        noted.during(|| "record an event".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Results that are available immediately.
    struct Fake {
        memory: Vec<u8>,
        /// Number of calls that waited for the results.
        waits: Arc<AtomicUsize>,
        is_lost: bool,
    }

    impl ResultMemory for Fake {
        fn synchronize(&self) -> Result<(), CudaError> {
            self.waits.fetch_add(1, Ordering::Relaxed);
            match self.is_lost {
                true => Err(CudaError::NoDevice),
                false => Ok(()),
            }
        }

        fn memory(&self) -> &[u8] {
            &self.memory
        }
    }

    fn output_slot(is_lost: bool) -> (OutputSlot<Fake>, Arc<AtomicUsize>) {
        let waits = Arc::new(AtomicUsize::new(0));
        let halves = [1.0, -2.0].map(half::f16::from_f64);
        let output = Fake {
            memory: halves.iter().flat_map(|half| half.to_le_bytes()).collect(),
            waits: Arc::clone(&waits),
            is_lost,
        };
        let output_slot = OutputSlot {
            output: Some(output),
            submission: None,
            nth: 0,
        };
        (output_slot, waits)
    }

    fn pieces() -> Vec<Piece> {
        vec![Piece {
            name: "x".to_owned(),
            shape: vec![1, 2],
            element: Element::Value(crate::DType::F16),
            at: 0,
            bytes: 4,
        }]
    }

    #[test]
    fn an_output_slot_is_taken_until_its_ticket_is_waited_for_or_dropped() {
        let (mut output_slot, waits) = output_slot(false);
        assert!(!output_slot.is_taken() && !output_slot.clear());
        let ticket = output_slot.detach(pieces(), 7).expect("there is memory");
        assert!(output_slot.is_taken() && output_slot.output.is_none());
        assert_eq!(output_slot.nth(), Some(7));
        let results = std::thread::spawn(move || ticket.results()).join();
        let results = results.expect("no panic").expect("it ran");
        assert_eq!(
            (results[0].name.as_str(), &results[0].values[..]),
            ("x", &[1.0, -2.0][..])
        );
        assert!(!output_slot.is_taken() && output_slot.nth().is_none());
        assert!(output_slot.clear() && output_slot.output.is_some());
        drop(
            output_slot
                .detach(pieces(), 8)
                .expect("the memory came back"),
        );
        assert!(!output_slot.is_taken(), "nobody waits for it");
        assert_eq!(output_slot.nth(), Some(8), "but it runs");
        // The slot waits for the batch, because the device may still write to the memory.
        assert!(output_slot.clear() && output_slot.output.is_some());
        assert_eq!(waits.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn results_are_kept_for_a_ticket_after_its_slot_is_reused() {
        let (mut output_slot, waits) = output_slot(false);
        let ticket = output_slot.detach(pieces(), 1).expect("there is memory");
        assert!(output_slot.clear());
        let next = output_slot
            .detach(pieces(), 2)
            .expect("the memory came back");
        drop(output_slot);
        for ticket in [ticket, next] {
            assert_eq!(ticket.results().expect("it ran")[0].values, [1.0, -2.0]);
        }
        assert_eq!(waits.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn every_ticket_reports_a_lost_device() {
        let lost = [output_slot(true).0, output_slot(true).0];
        let tickets = lost.map(|mut output_slot| {
            let ticket = output_slot.detach(pieces(), 1).expect("there is memory");
            // Both sessions take their memory back.
            output_slot.clear();
            ticket
        });
        for ticket in tickets {
            assert!(matches!(ticket.results(), Err(CudaError::NoDevice)));
        }
    }
}
