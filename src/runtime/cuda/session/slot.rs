//! Places for batches on a session's stream: what the host writes for a batch, and what it reads of its results.

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

/// Pinned memory for results that is kept for the next batch, at most: a larger piece is rarely needed again, and takes
/// memory from everything else on the host.
const KEPT_BYTES: usize = 256 << 20;

/// What one batch in flight needs beside the session's memory for intermediate tensors, which runs of one stream share.
pub(super) struct Slot {
    pub(super) staging: Staging,
    berth: Berth<Landing>,
}

/// Where the results of one batch at a time land.
struct Berth<L> {
    /// While no batch has it.
    landing: Option<L>,
    flight: Option<Arc<Flight<L>>>,
    /// The number of its batch among those that were submitted.
    nth: u64,
}

/// Memory that results are on their way to.
trait Lands {
    /// Waits until they are there.
    fn settle(&self) -> Result<(), CudaError>;
    fn memory(&self) -> &[u8];
}

/// Pinned memory that results are copied to, and what tells that they are there.
pub(super) struct Landing {
    memory: Pinned,
    done: CudaEvent,
}

/// One output in the pinned memory.
pub(super) struct Piece {
    pub(super) name: String,
    pub(super) shape: Vec<u64>,
    pub(super) element: Element,
    /// The offset of its first byte.
    pub(super) at: usize,
    pub(super) bytes: usize,
}

/// A batch that was submitted, as its session and its ticket see it.
struct Flight<L>(Mutex<Progress<L>>);

enum Progress<L> {
    Running(L, Vec<Piece>),
    /// The results until the ticket takes them, and the memory until the session does.
    Landed(Option<Result<Vec<Output>, CudaError>>, Option<L>),
}

/// The results to come of a batch that was submitted. Any thread may wait for them; a ticket that is dropped gives them up, and
/// the batch runs all the same.
pub struct CudaTicket(Arc<Flight<Landing>>);

impl fmt::Debug for CudaTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaTicket").finish_non_exhaustive()
    }
}

impl CudaTicket {
    /// Waits until the batch has run, and copies its outputs out, widened to f32.
    ///
    /// # Errors
    /// What went wrong on the device, and memory of the host that could not be had.
    pub fn wait(self) -> Result<Vec<Output>, CudaError> {
        self.0.results()
    }
}

impl<L: Lands> Flight<L> {
    fn lock(&self) -> MutexGuard<'_, Progress<L>> {
        // What a thread that panicked left is whole: progress is replaced by one assignment.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The results, which are taken once.
    fn results(&self) -> Result<Vec<Output>, CudaError> {
        let mut progress = self.lock();
        progress.land();
        let Progress::Landed(results, _) = &mut *progress else {
            unreachable!("it has just landed")
        };
        let results = results.take();
        results.expect("a ticket is waited for once, and nobody else takes its results")
    }

    /// Whether its results have been copied out. One that a ticket waits for right now has not landed.
    fn has_landed(&self) -> bool {
        let progress = self.0.try_lock();
        progress.is_ok_and(|progress| matches!(*progress, Progress::Landed(..)))
    }
}

impl<L: Lands> Progress<L> {
    /// Waits for the batch, and copies its results out.
    fn land(&mut self) {
        *self = match std::mem::replace(self, Self::Landed(None, None)) {
            Self::Running(landing, pieces) => {
                let memory = landing.memory();
                let results = landing
                    .settle()
                    .and_then(|()| pieces.iter().map(|p| p.read(memory)).collect());
                let is_kept = memory.len() <= KEPT_BYTES;
                Self::Landed(Some(results), is_kept.then_some(landing))
            }
            landed => landed,
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

impl<L: Lands> Berth<L> {
    fn is_taken(&self) -> bool {
        let taken = |flight: &Arc<Flight<L>>| !flight.has_landed() && Arc::strong_count(flight) > 1;
        self.flight.as_ref().is_some_and(taken)
    }

    fn nth(&self) -> Option<u64> {
        let flight = self.flight.as_ref();
        flight.filter(|f| !f.has_landed()).map(|_| self.nth)
    }

    /// Waits for its batch, and takes the memory back. Tells whether there was one.
    fn clear(&mut self) -> bool {
        let Some(flight) = self.flight.take() else {
            return false;
        };
        let mut progress = flight.lock();
        // A ticket that was dropped takes no results, so they need not be read.
        if Arc::strong_count(&flight) == 1
            && let Progress::Running(_, pieces) = &mut *progress
        {
            pieces.clear();
        }
        progress.land();
        if let Progress::Landed(_, landing) = &mut *progress {
            self.landing = landing.take();
        }
        true
    }

    fn depart(&mut self, pieces: Vec<Piece>, nth: u64) -> Option<Arc<Flight<L>>> {
        let landing = self.landing.take()?;
        let flight = Arc::new(Flight(Mutex::new(Progress::Running(landing, pieces))));
        self.flight = Some(Arc::clone(&flight));
        self.nth = nth;
        Some(flight)
    }
}

impl Slot {
    pub(super) fn new(device: Device, stream: Arc<CudaStream>) -> Self {
        Self {
            staging: Staging::new(device, stream),
            berth: Berth {
                landing: None,
                flight: None,
                nth: 0,
            },
        }
    }

    /// Whether a ticket still has to be waited for before the slot takes another batch. One that was dropped has not.
    pub(super) fn is_taken(&self) -> bool {
        self.berth.is_taken()
    }

    /// The number of its batch, where it has one that has not landed.
    pub(super) fn nth(&self) -> Option<u64> {
        self.berth.nth()
    }

    /// Waits for its batch, whose results are kept for the ticket, and takes the batch's memory back.
    pub(super) fn clear(&mut self) {
        if self.berth.clear() {
            // What failed on the device reads the host's memory no more.
            self.staging.uploaded();
        }
    }

    /// Makes room for results of so many bytes; `of` names them in an error.
    pub(super) fn reserve(
        &mut self,
        device: &Device,
        bytes: usize,
        of: &[Piece],
    ) -> Result<(), CudaError> {
        let held = self.berth.landing.as_ref();
        if held.is_some_and(|landing| landing.memory.as_slice().len() >= bytes) {
            return Ok(());
        }
        self.berth.landing = None;
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
        self.berth.landing = Some(Landing { memory, done });
        Ok(())
    }

    /// Where results land. There is memory since [`reserve`](Self::reserve).
    pub(super) fn landing(&mut self) -> Option<&mut Landing> {
        self.berth.landing.as_mut()
    }

    /// Gives the memory that results are on their way to, as the `nth` batch, to a ticket.
    pub(super) fn depart(&mut self, pieces: Vec<Piece>, nth: u64) -> Option<CudaTicket> {
        self.berth.depart(pieces, nth).map(CudaTicket)
    }

    /// Frees what no batch in flight has.
    pub(super) fn release(&mut self) {
        self.staging.release();
        self.berth.landing = None;
    }
}

impl Lands for Landing {
    fn settle(&self) -> Result<(), CudaError> {
        let done = self.done.synchronize();
        done.during(|| "wait for the run".to_owned())
    }

    fn memory(&self) -> &[u8] {
        self.memory.as_slice()
    }
}

impl Landing {
    /// Its address on the device.
    pub(super) fn address(&self) -> Result<u64, CudaError> {
        self.memory.device_address()
    }

    pub(super) fn memory_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut_slice()
    }

    /// Notes that all results are copied when the stream comes here.
    pub(super) fn note(&self, stream: &CudaStream) -> Result<(), CudaError> {
        let noted = self.done.record(stream);
        noted.during(|| "record an event".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Results that are there as soon as somebody waits for them.
    struct Fake {
        memory: Vec<u8>,
        /// How often somebody waited.
        waits: Arc<AtomicUsize>,
        is_lost: bool,
    }

    impl Lands for Fake {
        fn settle(&self) -> Result<(), CudaError> {
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

    fn berth(is_lost: bool) -> (Berth<Fake>, Arc<AtomicUsize>) {
        let waits = Arc::new(AtomicUsize::new(0));
        let halves = [1.0, -2.0].map(half::f16::from_f64);
        let landing = Fake {
            memory: halves.iter().flat_map(|half| half.to_le_bytes()).collect(),
            waits: Arc::clone(&waits),
            is_lost,
        };
        let berth = Berth {
            landing: Some(landing),
            flight: None,
            nth: 0,
        };
        (berth, waits)
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
    fn a_berth_is_taken_until_its_ticket_was_waited_for_or_dropped() {
        let (mut berth, waits) = berth(false);
        assert!(!berth.is_taken() && !berth.clear());
        let ticket = berth.depart(pieces(), 7).expect("there is memory");
        assert!(berth.is_taken() && berth.landing.is_none());
        assert_eq!(berth.nth(), Some(7));
        let results = std::thread::spawn(move || ticket.results()).join();
        let results = results.expect("no panic").expect("it ran");
        assert_eq!(
            (results[0].name.as_str(), &results[0].values[..]),
            ("x", &[1.0, -2.0][..])
        );
        assert!(!berth.is_taken() && berth.nth().is_none());
        assert!(berth.clear() && berth.landing.is_some());
        drop(berth.depart(pieces(), 8).expect("the memory came back"));
        assert!(!berth.is_taken(), "nobody waits for it");
        assert_eq!(berth.nth(), Some(8), "but it runs");
        // Its memory is written to until the device is done.
        assert!(berth.clear() && berth.landing.is_some());
        assert_eq!(waits.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn results_are_kept_for_a_ticket_whose_place_another_batch_has() {
        let (mut berth, waits) = berth(false);
        let ticket = berth.depart(pieces(), 1).expect("there is memory");
        assert!(berth.clear());
        let behind = berth.depart(pieces(), 2).expect("the memory came back");
        drop(berth);
        for ticket in [ticket, behind] {
            assert_eq!(ticket.results().expect("it ran")[0].values, [1.0, -2.0]);
        }
        assert_eq!(waits.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn every_ticket_hears_of_a_device_that_is_lost() {
        let lost = [berth(true).0, berth(true).0];
        let tickets = lost.map(|mut berth| {
            let ticket = berth.depart(pieces(), 1).expect("there is memory");
            // Also one whose place was taken back.
            berth.clear();
            ticket
        });
        for ticket in tickets {
            assert!(matches!(ticket.results(), Err(CudaError::NoDevice)));
        }
    }
}
