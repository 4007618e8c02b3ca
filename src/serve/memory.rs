//! Memory that requests hold: a bound on all of them together, and its return to the system.
//!
//! A request is charged for its body before it is read, then for what reading its JSON takes at most, and for its answer. Memory is
//! given back when the last byte of the answer was sent.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        mpsc::{Sender, channel},
    },
    time::Duration,
};

use tokio::sync::oneshot;

use super::ServeError;

/// Bodies that are being read hold at most this much together, unless one is longer.
const BODIES: u64 = 96 << 20;
/// Bodies up to this length do not wait behind longer ones.
const SHORT_BODY: u64 = 64 << 10;
/// Requests whose bodies have been read hold at most this much together.
const WORK: u64 = 448 << 20;
/// Part of that, as its divisor, that is left to requests that run already.
const GROWTH: u64 = 4;
/// Memory for each byte of the longest body, where that is more than the above.
const FACTOR: u64 = 16;
/// Memory that is returned to the system when a request that held as much ends.
const LARGE: u64 = 4 << 20;
/// When a request should be sent again that found too little memory.
const RETRY: Duration = Duration::from_secs(1);

/// The memory of all requests to a server.
pub struct Memory {
    bodies: Arc<Ledger>,
    work: Arc<Ledger>,
}

impl Memory {
    /// Memory for requests with bodies of at most `max_body` bytes.
    pub fn new(max_body: u64) -> Self {
        let work = WORK.max(FACTOR.saturating_mul(max_body));
        Self {
            bodies: Arc::new(Ledger::new(BODIES.max(max_body), 0)),
            work: Arc::new(Ledger::new(work, work / GROWTH)),
        }
    }

    /// Waits until there is memory for a body of this many bytes.
    pub async fn body(&self, bytes: u64) -> Held {
        // Short ones may exceed the limit by a quarter.
        let extra = self.bodies.limit + self.bodies.limit / 4;
        if bytes <= SHORT_BODY && self.bodies.try_take(bytes, extra) {
            return Held::new(&self.bodies, bytes);
        }
        self.bodies.take(bytes.min(self.bodies.limit)).await
    }

    /// Waits until there is memory for a request that takes this many bytes.
    ///
    /// # Errors
    /// A request that takes more than one may.
    pub async fn request(&self, bytes: u64) -> Result<Arc<Share>, ServeError> {
        let limit = self.max_request();
        if bytes > limit {
            return Err(ServeError::LargeRequest { bytes, limit });
        }
        let held = self.work.take(bytes).await;
        Ok(self.share(held))
    }

    /// A share that holds nothing yet.
    pub fn empty_share(&self) -> Arc<Share> {
        self.share(Held::new(&self.work, 0))
    }

    fn share(&self, held: Held) -> Arc<Share> {
        Arc::new(Share {
            limit: self.max_request(),
            held: Mutex::new(held),
        })
    }

    /// The most memory that a request may take when it begins, and later.
    fn max_request(&self) -> u64 {
        self.work.limit - self.work.growth
    }
}

/// The memory of a request.
#[derive(Debug)]
pub struct Share {
    limit: u64,
    held: Mutex<Held>,
}

impl Share {
    /// Memory for a caller that bounds its requests itself.
    pub fn unlimited() -> Arc<Self> {
        let ledger = Arc::new(Ledger::new(u64::MAX, 0));
        Arc::new(Self {
            limit: u64::MAX,
            held: Mutex::new(Held::new(&ledger, 0)),
        })
    }

    /// Charges the request for more memory, which it does not wait for.
    ///
    /// # Errors
    /// More memory than one request may take, or than all of them leave.
    pub fn add(&self, bytes: u64) -> Result<(), ServeError> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let sum = held.bytes.saturating_add(bytes);
        if sum > self.limit {
            let limit = self.limit;
            return Err(ServeError::LargeRequest { bytes: sum, limit });
        }
        if !held.ledger.try_take(bytes, held.ledger.limit) {
            return Err(ServeError::Overloaded { retry_after: RETRY });
        }
        held.bytes = sum;
        Ok(())
    }

    /// Ends the charge for memory that the request has freed.
    pub fn free(&self, bytes: u64) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = bytes.min(held.bytes);
        held.bytes -= bytes;
        held.ledger.give_back(bytes);
    }
}

/// Memory that is charged until this is dropped.
#[derive(Debug)]
pub struct Held {
    ledger: Arc<Ledger>,
    bytes: u64,
}

impl Held {
    fn new(ledger: &Arc<Ledger>, bytes: u64) -> Self {
        Self {
            ledger: Arc::clone(ledger),
            bytes,
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        if bytes < LARGE {
            return self.ledger.give_back(bytes);
        }
        // It counts until the system has it again.
        return_to_system(Held::new(&self.ledger, bytes));
    }
}

/// Who holds how much of a limited amount, and who waits for it in the order of arrival.
#[derive(Debug)]
struct Ledger {
    limit: u64,
    /// Part of the limit that is left to those that were let in.
    growth: u64,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    bytes: u64,
    waiting: VecDeque<(u64, oneshot::Sender<Held>)>,
}

impl Ledger {
    fn new(limit: u64, growth: u64) -> Self {
        Self {
            limit,
            growth,
            taken: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        // Each change is whole.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an amount at once, up to a limit, also where others wait.
    fn try_take(&self, bytes: u64, limit: u64) -> bool {
        let mut taken = self.lock();
        let sum = taken.bytes.saturating_add(bytes);
        let fits = sum <= limit;
        if fits {
            taken.bytes = sum;
        }
        fits
    }

    /// Waits for an amount within the limit.
    async fn take(self: &Arc<Self>, bytes: u64) -> Held {
        let granted = {
            let mut taken = self.lock();
            let (sender, granted) = oneshot::channel();
            taken.waiting.push_back((bytes, sender));
            granted
        };
        self.grant();
        match granted.await {
            Ok(held) => held,
            // The line is only dropped with the ledger, which this holds.
            Err(_) => Held::new(self, 0),
        }
    }

    /// Lets those in for whom there is room.
    fn grant(self: &Arc<Self>) {
        let mut unclaimed = Vec::new();
        {
            let mut taken = self.lock();
            while let Some(&(bytes, ref sender)) = taken.waiting.front() {
                let is_gone = sender.is_closed();
                let sum = taken.bytes.saturating_add(bytes);
                if !is_gone && taken.bytes > 0 && sum > self.limit - self.growth {
                    break;
                }
                let Some((_, sender)) = taken.waiting.pop_front() else {
                    break;
                };
                if is_gone {
                    continue;
                }
                taken.bytes = sum;
                unclaimed.extend(sender.send(Held::new(self, bytes)).err());
            }
        }
        // Given back without the lock.
        drop(unclaimed);
    }

    fn give_back(self: &Arc<Self>, bytes: u64) {
        let mut taken = self.lock();
        taken.bytes = taken.bytes.saturating_sub(bytes);
        let waits = !taken.waiting.is_empty();
        drop(taken);
        if waits {
            self.grant();
        }
    }
}

/// Returns free memory to the system, then gives back what was held of it.
fn return_to_system(held: Held) {
    static THREAD: OnceLock<Option<Sender<Held>>> = OnceLock::new();
    let thread = THREAD.get_or_init(|| {
        let (sender, freed) = channel::<Held>();
        let run = move || {
            while let Ok(first) = freed.recv() {
                let all: Vec<Held> = std::iter::once(first).chain(freed.try_iter()).collect();
                trim();
                all.into_iter().for_each(Held::end);
            }
        };
        let thread = std::thread::Builder::new().name("memory".to_owned());
        thread.spawn(run).ok().map(|_| sender)
    });
    let unsent = match thread {
        Some(thread) => thread.send(held).err().map(|unsent| unsent.0),
        None => Some(held),
    };
    if let Some(held) = unsent {
        held.end();
    }
}

impl Held {
    /// Gives it back at once, without returning memory to the system: somebody else is charged for it now.
    pub fn end(mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        self.ledger.give_back(bytes);
    }
}

/// Returns the free pages of the heap, which glibc keeps otherwise where a block in use lies behind them.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn trim() {
    // SAFETY: it touches nothing but the allocator's own free memory, under its locks.
    unsafe { libc::malloc_trim(0) };
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn trim() {}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.unwrap().block_on(future)
    }

    fn used(ledger: &Ledger) -> u64 {
        ledger.lock().bytes
    }

    #[test]
    fn requests_wait_for_memory_in_the_order_in_which_they_came() {
        let memory = Memory::new(8 << 20);
        let limit = memory.max_request();
        let all = block_on(memory.request(limit)).unwrap();
        let mut second = Box::pin(memory.request(2 << 20));
        let mut third = Box::pin(memory.request(1 << 20));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(second.as_mut().poll(&mut context).is_pending());
        assert!(third.as_mut().poll(&mut context).is_pending());
        // What runs may grow beside those that wait.
        let grown = all.add(1);
        assert!(matches!(grown, Err(ServeError::LargeRequest { .. })));
        all.free(limit - (1 << 20));
        assert!(all.add(1 << 10).is_ok());
        assert!(block_on(second).is_ok());
        assert!(block_on(third).is_ok());
        drop(all);
        assert_eq!(used(&memory.work), 0);
    }

    #[test]
    fn a_request_that_is_given_up_keeps_no_place_and_one_that_is_too_large_never_waits() {
        let memory = Memory::new(8 << 20);
        let limit = memory.max_request();
        let share = block_on(memory.request(limit)).unwrap();
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let mut gone = Box::pin(memory.request(limit));
        assert!(gone.as_mut().poll(&mut context).is_pending());
        drop(gone);
        let mut next = Box::pin(memory.request(1 << 20));
        assert!(next.as_mut().poll(&mut context).is_pending());
        share.free(limit);
        assert!(next.as_mut().poll(&mut context).is_ready());
        let error = block_on(memory.request(limit + 1)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the request takes about 352321537 bytes of the server's memory, with its answer; expected at most 352321536, so split it into several requests"
        );
    }

    #[test]
    fn short_bodies_pass_long_ones_that_wait_and_large_memory_comes_back_after_a_trim() {
        let memory = Memory::new(8 << 20);
        let held: Vec<Held> = (0..12).map(|_| block_on(memory.body(8 << 20))).collect();
        assert_eq!(used(&memory.bodies), BODIES);
        let mut long = Box::pin(memory.body(8 << 20));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(long.as_mut().poll(&mut context).is_pending());
        drop(block_on(memory.body(1 << 10)));
        drop(held);
        drop(block_on(long));
        let began = std::time::Instant::now();
        while used(&memory.bodies) > 0 {
            assert!(began.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
