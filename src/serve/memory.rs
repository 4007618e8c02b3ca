//! Limits the total memory of all requests, and returns freed memory to the system.
//!
//! A request is charged for its body while the body arrives, then for the values in the body, and then for its answer, until the last byte
//! of the answer has been sent.

use std::{
    collections::VecDeque,
    future::{Future, poll_fn},
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        mpsc::{Sender, channel},
    },
    task::Poll,
    time::Duration,
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::ServeError;

/// Max bytes of all bodies that are being read, or twice the max size of a body if that is more. One body may exceed this limit.
const BODIES: u64 = 80 << 20;
/// Max bytes of the values of all bodies that have been read.
const VALUES: u64 = 224 << 20;
/// Max bytes of the inputs and answers of all requests. A request reserves memory for them when it begins, and more memory while its answer
/// grows.
const ANSWERS: u64 = 224 << 20;
/// Small requests and growing answers may exceed a limit by this fraction of the limit: 1 / `EXTRA`.
const EXTRA: u64 = 4;
/// Small requests skip the queue while there is memory, so that larger requests do not block them. A request is small if it takes at most
/// this number of bytes.
const SMALL: u64 = 256 << 10;
/// The limits on values and on answers are at least this many bytes per byte of the longest body.
const FACTOR: u64 = 16;
/// If a request held at least this many bytes, its memory is returned to the system when the request ends.
const LARGE: u64 = 4 << 20;
/// Value of `Retry-After` for a request for which there is too little memory.
const RETRY: Duration = Duration::from_secs(1);

/// Memory of all requests to a server.
///
/// A request waits for memory of three kinds, in this order: for its body, for the values in the body, and for its inputs and answer. A
/// request that holds memory of one kind may wait for a later kind, but never for an earlier one. It may wait for more memory of the kind
/// that it holds only while its body grows, and one body at a time may exceed the limit. Requests therefore cannot deadlock.
pub struct Memory {
    bodies: Arc<Ledger>,
    /// Permit of the body that may exceed the limit.
    turn: Arc<Semaphore>,
    values: Arc<Ledger>,
    answers: Arc<Ledger>,
}

impl Memory {
    /// Creates limits for requests with bodies of at most `max_body` bytes.
    pub fn new(max_body: u64) -> Self {
        let long = FACTOR.saturating_mul(max_body);
        Self {
            bodies: Arc::new(Ledger::new(BODIES.max(max_body.saturating_mul(2)))),
            turn: Arc::new(Semaphore::new(1)),
            values: Arc::new(Ledger::new(VALUES.max(long))),
            answers: Arc::new(Ledger::new(ANSWERS.max(long))),
        }
    }

    /// Returns an empty charge, for a body of which no byte has arrived yet.
    pub fn body(&self) -> BodyMemory {
        BodyMemory {
            held: Held::new(&self.bodies, 0),
            turn: Arc::clone(&self.turn),
            permit: None,
        }
    }

    /// Waits until `bytes` of memory are available for the values of a body.
    ///
    /// # Errors
    /// Returns an error if the values exceed the limit of a single request.
    pub async fn request(&self, bytes: u64) -> Result<Arc<Share>, ServeError> {
        let limit = self.values.limit;
        if bytes > limit {
            return Err(ServeError::LargeRequest { bytes, limit });
        }
        Ok(Share::new(self.values.take(bytes).await, &self.answers))
    }

    /// Returns a share that holds no memory yet.
    pub fn empty_share(&self) -> Arc<Share> {
        Share::new(Held::new(&self.values, 0), &self.answers)
    }
}

/// Memory of a body, which grows while the body arrives.
pub struct BodyMemory {
    held: Held,
    turn: Arc<Semaphore>,
    /// Present if the body may exceed the limit. The body holds the permit until its memory is released.
    permit: Option<OwnedSemaphorePermit>,
}

impl BodyMemory {
    /// Waits until another `bytes` bytes of memory are available, or until it is this body's turn to exceed the limit. If bodies that are
    /// still arriving fill all of the memory, they can therefore still be read to their ends, one after another.
    pub async fn grow(&mut self, bytes: u64) {
        let ledger = Arc::clone(&self.held.ledger);
        if self.permit.is_none() {
            let mut taken = pin!(ledger.take(bytes));
            let mut turn = pin!(Arc::clone(&self.turn).acquire_owned());
            let granted = poll_fn(|context| match taken.as_mut().poll(context) {
                Poll::Ready(held) => Poll::Ready(Ok(held)),
                Poll::Pending => turn.as_mut().poll(context).map(Err),
            });
            match granted.await {
                Ok(mut held) => {
                    self.held.bytes += std::mem::take(&mut held.bytes);
                    return;
                }
                // The semaphore is never closed, so there is a permit.
                Err(permit) => self.permit = permit.ok(),
            }
        }
        ledger.force(bytes);
        self.held.bytes += bytes;
    }

    /// Number of bytes that are charged.
    pub fn bytes(&self) -> u64 {
        self.held.bytes
    }

    /// Releases the charge, because the caller has charged the memory elsewhere.
    pub fn end(self) {
        self.held.end();
    }
}

/// Memory of a request whose body has been read.
#[derive(Debug)]
pub struct Share {
    /// `None` after the answer is ready.
    values: Mutex<Option<Held>>,
    answer: Mutex<Held>,
}

impl Share {
    fn new(values: Held, answers: &Arc<Ledger>) -> Arc<Self> {
        Arc::new(Self {
            values: Mutex::new(Some(values)),
            answer: Mutex::new(Held::new(answers, 0)),
        })
    }

    /// Returns a share without a limit, for callers that limit their requests themselves.
    pub fn unlimited() -> Arc<Self> {
        let ledger = Arc::new(Ledger::new(u64::MAX));
        Self::new(Held::new(&ledger, 0), &ledger)
    }

    fn answer(&self) -> MutexGuard<'_, Held> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `bytes` of memory are available for inputs and an answer. A request calls this once.
    ///
    /// # Errors
    /// Returns an error if `bytes` exceeds the limit for a single request.
    pub async fn reserve(&self, bytes: u64) -> Result<(), ServeError> {
        let ledger = Arc::clone(&self.answer().ledger);
        if bytes > ledger.limit {
            let limit = ledger.limit;
            return Err(ServeError::LargeRequest { bytes, limit });
        }
        let mut taken = ledger.take(bytes).await;
        self.answer().bytes += std::mem::take(&mut taken.bytes);
        Ok(())
    }

    /// Charges the request for `bytes` by which its answer grows. Does not wait.
    ///
    /// # Errors
    /// Returns an error if the limit for a single request or for all requests is exceeded.
    pub fn add(&self, bytes: u64) -> Result<(), ServeError> {
        let mut answer = self.answer();
        let sum = answer.bytes.saturating_add(bytes);
        let limit = answer.ledger.limit;
        if sum > limit {
            return Err(ServeError::LargeRequest { bytes: sum, limit });
        }
        if !answer.ledger.try_take(bytes) {
            return Err(ServeError::Overloaded { retry_after: RETRY });
        }
        answer.bytes = sum;
        Ok(())
    }

    /// Reduces the charge to an answer of `bytes` bytes. With `None`, the length is not known yet, and only the charge for the values is
    /// released.
    pub fn is_answered(&self, bytes: Option<u64>) {
        let values = self.values.lock();
        drop(values.unwrap_or_else(PoisonError::into_inner).take());
        let mut answer = self.answer();
        let freed = answer.bytes.saturating_sub(bytes.unwrap_or(u64::MAX));
        answer.bytes -= freed;
        drop(Held::new(&answer.ledger, freed));
    }

    /// Reduces the charge by `bytes` that the request has freed.
    pub fn free(&self, bytes: u64) {
        let mut answer = self.answer();
        let bytes = bytes.min(answer.bytes);
        answer.bytes -= bytes;
        answer.ledger.give_back(bytes);
    }
}

/// Memory that remains charged until this value is dropped.
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
        // The memory remains charged until it has been returned to the system.
        return_to_system(Held::new(&self.ledger, bytes));
    }
}

/// A limited amount of memory, with a queue of requests that wait for memory.
#[derive(Debug)]
struct Ledger {
    limit: u64,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    bytes: u64,
    waiting: VecDeque<(u64, oneshot::Sender<Held>)>,
}

impl Ledger {
    fn new(limit: u64) -> Self {
        Self {
            limit,
            taken: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        // A poisoned lock is usable, because no code that holds the lock can panic between two related changes.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes memory without waiting, even if other requests are waiting. The limit may be exceeded as described for [`EXTRA`]. Returns
    /// whether memory was taken.
    fn try_take(&self, bytes: u64) -> bool {
        let mut taken = self.lock();
        let sum = taken.bytes.saturating_add(bytes);
        let fits = sum <= self.limit.saturating_add(self.limit / EXTRA);
        if fits {
            taken.bytes = sum;
        }
        fits
    }

    /// Takes memory without checking the limit.
    fn force(&self, bytes: u64) {
        let mut taken = self.lock();
        taken.bytes = taken.bytes.saturating_add(bytes);
    }

    /// Waits until `bytes` bytes of memory are available within the limit. A small request does not wait if [`try_take`](Self::try_take)
    /// succeeds.
    async fn take(self: &Arc<Self>, bytes: u64) -> Held {
        if bytes <= SMALL && self.try_take(bytes) {
            return Held::new(self, bytes);
        }
        let granted = {
            let mut taken = self.lock();
            let (sender, granted) = oneshot::channel();
            taken.waiting.push_back((bytes, sender));
            granted
        };
        self.grant();
        match granted.await {
            Ok(held) => held,
            // The sender is dropped only together with the ledger, and `self` keeps the ledger alive.
            Err(_) => Held::new(self, 0),
        }
    }

    /// Grants memory to the waiting requests in order, while there is room.
    fn grant(self: &Arc<Self>) {
        let mut unclaimed = Vec::new();
        {
            let mut taken = self.lock();
            while let Some(&(bytes, ref sender)) = taken.waiting.front() {
                let is_gone = sender.is_closed();
                let sum = taken.bytes.saturating_add(bytes);
                if !is_gone && taken.bytes > 0 && sum > self.limit {
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
        // Drop these after the lock is released, because dropping acquires the lock.
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

/// Returns free memory to the system and then releases the charge, on a separate thread.
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
    /// Releases the charge without returning memory to the system. The memory is either charged elsewhere or has already been returned.
    pub fn end(mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        self.ledger.give_back(bytes);
    }
}

/// Returns free pages of the heap to the system. By itself, glibc keeps free pages while a block at a higher address is in use.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn trim() {
    // SAFETY: malloc_trim touches only free memory of the allocator, under its locks.
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
    fn requests_wait_for_memory_in_order_of_arrival() {
        let memory = Memory::new(8 << 20);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let [first, second, third] = [1, 2, 3].map(|_| block_on(memory.request(1)).unwrap());
        block_on(first.reserve(ANSWERS)).unwrap();
        let mut waits = Box::pin(second.reserve(2 << 20));
        let mut after = Box::pin(third.reserve(1 << 20));
        assert!(waits.as_mut().poll(&mut context).is_pending());
        assert!(after.as_mut().poll(&mut context).is_pending());
        let error = first.add(1).unwrap_err();
        assert!(matches!(error, ServeError::LargeRequest { .. }));
        first.free(2 << 20);
        // Unlike a waiting request, a growing answer may exceed the limit.
        first.add(1 << 20).unwrap();
        assert!(waits.as_mut().poll(&mut context).is_ready());
        assert!(after.as_mut().poll(&mut context).is_pending());
        first.free(2 << 20);
        assert!(after.as_mut().poll(&mut context).is_ready());
        drop((waits, after));
        third.add(ANSWERS / EXTRA).unwrap();
        let error = second.add(ANSWERS / 2).unwrap_err();
        assert!(matches!(error, ServeError::Overloaded { .. }));
        first.free(ANSWERS);
        drop((second, third, first));
        let began = std::time::Instant::now();
        while used(&memory.answers) > 0 {
            assert!(began.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(used(&memory.values), 0);
    }

    #[test]
    fn a_cancelled_request_leaves_the_queue_and_one_that_is_too_large_never_waits() {
        let memory = Memory::new(8 << 20);
        let share = block_on(memory.request(VALUES)).unwrap();
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let mut gone = Box::pin(memory.request(VALUES));
        assert!(gone.as_mut().poll(&mut context).is_pending());
        drop(gone);
        let error = block_on(memory.request(VALUES + 1)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the request and its response need about 234881025 bytes of the server's memory; expected at most 234881024, so split it into several requests"
        );
        let next = memory.request(1 << 20);
        drop(share);
        block_on(next).unwrap();
    }

    #[test]
    fn short_bodies_skip_the_queue_and_large_memory_is_released_after_a_trim() {
        let memory = Memory::new(8 << 20);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let mut held: Vec<BodyMemory> = (0..11).map(|_| memory.body()).collect();
        for body in &mut held {
            block_on(body.grow(4 << 20));
            assert_eq!(body.bytes(), 4 << 20);
        }
        // The bodies cannot all grow to 8 MiB. One body may exceed the limit, so it can be read to its end.
        let last = BODIES / (4 << 20);
        let (first, second) = held.split_at_mut(last as usize - 11);
        first
            .iter_mut()
            .for_each(|body| block_on(body.grow(4 << 20)));
        assert_eq!(used(&memory.bodies), BODIES);
        block_on(second[0].grow(4 << 20));
        let mut long = Box::pin(second[1].grow(4 << 20));
        assert!(long.as_mut().poll(&mut context).is_pending());
        let mut short = memory.body();
        block_on(short.grow(1 << 10));
        drop(short);
        drop(long);
        // The next body gets its turn when the memory of the first one is released.
        let mut rest: Vec<BodyMemory> = held.drain(last as usize - 11..).collect();
        let mut next = rest.remove(1);
        let mut long = Box::pin(next.grow(4 << 20));
        assert!(long.as_mut().poll(&mut context).is_pending());
        rest.remove(0).end();
        block_on(long);
        drop((rest, held, next));
        let began = std::time::Instant::now();
        while used(&memory.bodies) > 0 {
            assert!(began.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
