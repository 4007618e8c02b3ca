//! Thread pools of the CPU executor.

use std::{
    collections::HashMap,
    error::Error,
    num::NonZeroUsize,
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak},
};

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

/// Error if the threads of a pool cannot be started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct ThreadsError {
    pub problem: String,
}

/// A pool of threads. Engines that request the same number of threads share one pool, so that several engines in one process do not
/// compete. A thread without work sleeps after some microseconds.
#[derive(Clone)]
pub struct Threads {
    /// `None` means the pool of the calling thread, or the global pool if the calling thread belongs to no pool.
    pool: Option<Arc<ThreadPool>>,
}

impl Threads {
    /// Returns the pool of the calling thread, or the global pool if the calling thread belongs to no pool. The first call starts the
    /// global pool. The global pool has `RAYON_NUM_THREADS` threads. By default, it has as many threads as the process may run at once
    /// under its CPU affinity and its cgroup quota.
    ///
    /// # Errors
    /// Returns an error if threads cannot be started. In a process that never calls this function, the first parallel work would panic
    /// instead.
    pub fn usual() -> Result<Self, ThreadsError> {
        /// Result of the first attempt to start the global pool. rayon does not retry after a failure.
        static STARTED: OnceLock<Result<(), String>> = OnceLock::new();
        STARTED
            .get_or_init(|| {
                // Without names, the threads would inherit the name of the first thread that computes.
                let builder = ThreadPoolBuilder::new()
                    .thread_name(|i| format!("cpu-{i}"))
                    .start_handler(keep_apart());
                started(builder.build_global())
            })
            .clone()
            .map_err(|problem| ThreadsError { problem })?;
        Ok(Self { pool: None })
    }

    /// Returns a pool of `n` threads, shared by all callers that request the same number.
    ///
    /// # Errors
    /// Returns an error if threads cannot be started.
    pub fn of(n: NonZeroUsize) -> Result<Self, ThreadsError> {
        /// Upper bound on the threads of a pool: larger pools start slowly and exceed the cores of any machine.
        const MAX: usize = 1024;
        if n.get() > MAX {
            return Err(ThreadsError {
                problem: format!("{n} threads are requested, but the maximum is {MAX}"),
            });
        }
        static POOLS: Mutex<Option<HashMap<NonZeroUsize, Weak<ThreadPool>>>> = Mutex::new(None);
        // A panicking thread leaves a consistent map: each entry is a complete pool.
        let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
        let pools = pools.get_or_insert_default();
        if let Some(pool) = pools.get(&n).and_then(Weak::upgrade) {
            return Ok(Self { pool: Some(pool) });
        }
        let built = ThreadPoolBuilder::new()
            .num_threads(n.get())
            .thread_name(|i| format!("cpu-{i}"))
            .start_handler(keep_apart())
            .build();
        let pool = Arc::new(built.map_err(|error| ThreadsError {
            problem: error.to_string(),
        })?);
        pools.insert(n, Arc::downgrade(&pool));
        Ok(Self { pool: Some(pool) })
    }

    /// Number of threads.
    pub fn count(&self) -> usize {
        match &self.pool {
            Some(pool) => pool.current_num_threads(),
            None => rayon::current_num_threads(),
        }
    }

    /// Runs `work` on a thread of the pool. From there, `work` can distribute parallel parts to the other threads without waking them up
    /// for each part.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            Some(pool) => pool.install(work),
            None => rayon::scope(|_| work()),
        }
    }
}

/// Returns a start handler for the threads of a pool. If the pool has one thread for each CPU of the process's affinity, the handler pins
/// each thread to its own CPU. Without pinning, two threads may wake up on the same CPU, and parallel work of a millisecond ends before the
/// scheduler moves one of the threads.
#[cfg(target_os = "linux")]
fn keep_apart() -> impl Fn(usize) {
    use rustix::{
        process::getpid,
        thread::{CpuSet, sched_getaffinity, sched_setaffinity},
    };

    // Use the affinity of the main thread: the thread that starts this pool may be pinned to one CPU, and new threads inherit its affinity.
    let allowed = sched_getaffinity(Some(getpid()));
    move |thread| {
        let Ok(allowed) = allowed else {
            return;
        };
        let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
        let mut own = allowed;
        if rayon::current_num_threads() == allowed.count() as usize
            && let Some(cpu) = cpus.nth(thread)
        {
            own.clear();
            own.set(cpu);
        }
        // An error is ignored: the system then chooses the CPU of the thread.
        let _ = sched_setaffinity(None, &own);
    }
}

#[cfg(not(target_os = "linux"))]
fn keep_apart() -> impl Fn(usize) {
    |_| {}
}

fn started(built: Result<(), ThreadPoolBuildError>) -> Result<(), String> {
    match built {
        Ok(()) => Ok(()),
        // The source of `error` is the error that the operating system reported. If there is no source, the application has already created
        // the global pool.
        Err(error) => error.source().map_or(Ok(()), |e| Err(e.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_existing_pool_is_accepted_and_a_failed_start_is_an_error() {
        let spawn = |_: rayon::ThreadBuilder| Err(std::io::Error::other("no thread left"));
        let failed = ThreadPoolBuilder::new()
            .num_threads(1)
            .spawn_handler(spawn)
            .build();
        let failed = failed.map(drop);
        assert_eq!(started(failed), Err("no thread left".to_owned()));
        assert!(Threads::usual().is_ok_and(|threads| threads.count() > 0));
        let again = ThreadPoolBuilder::new().build_global();
        assert!(again.is_err());
        assert_eq!(started(again), Ok(()));
    }

    /// Tests pinning, also in pools that a pinned thread starts.
    #[cfg(target_os = "linux")]
    #[test]
    fn threads_are_pinned_if_there_is_one_per_cpu() {
        use rustix::thread::{CpuSet, sched_getaffinity};

        let all = sched_getaffinity(Some(rustix::process::getpid())).expect("a mask");
        let n_cpus = all.count() as usize;
        let masks = |n: usize| {
            let pool = Threads::of(NonZeroUsize::new(n).expect("not 0")).expect("threads");
            let own = |_: rayon::BroadcastContext<'_>| sched_getaffinity(None).expect("a mask");
            pool.pool.expect("its own").broadcast(own)
        };
        let each: Vec<CpuSet> = masks(n_cpus);
        assert!(each.iter().all(|mask| mask.count() == 1));
        let together = (0..CpuSet::MAX_CPU).filter(|&cpu| each.iter().any(|m| m.is_set(cpu)));
        assert_eq!(together.count(), n_cpus);
        let pool = Threads::of(NonZeroUsize::new(n_cpus).expect("not 0")).expect("threads");
        let others = pool.run(|| masks(n_cpus + 1));
        assert!(others.iter().all(|mask| *mask == all));
    }

    #[test]
    fn requests_for_the_same_number_of_threads_share_a_pool() {
        let of = |n| Threads::of(NonZeroUsize::new(n).expect("not 0")).expect("threads");
        let (a, b, c) = (of(3), of(3), of(2));
        let same = |a: &Threads, b: &Threads| match (&a.pool, &b.pool) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        assert!(same(&a, &b) && !same(&a, &c));
        assert_eq!((a.count(), c.count()), (3, 2));
        assert_eq!(a.run(rayon::current_num_threads), 3);
        // Work of one pool may wait for another pool.
        assert_eq!(a.run(|| c.run(rayon::current_num_threads)), 2);
        let usual = Threads::usual().expect("threads");
        assert_eq!(c.run(|| usual.run(rayon::current_num_threads)), 2);
    }
}
