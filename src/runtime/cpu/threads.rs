//! The threads that the CPU computes on.

use std::{
    collections::HashMap,
    error::Error,
    num::NonZeroUsize,
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak},
};

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

/// Threads cannot be started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct ThreadsError {
    pub problem: String,
}

/// A pool of threads. Engines that ask for the same number share one pool, so that several of them in one process do not
/// get into each other's way. A thread without work sleeps after some microseconds.
#[derive(Clone)]
pub struct Threads {
    /// `None` is the pool that the caller is in, else the process's.
    pool: Option<Arc<ThreadPool>>,
}

impl Threads {
    /// The threads of the pool that the caller is in, else of the process's, which is started at the first call: as many as
    /// the process may run at once by its affinity and by the quota of its control group, or `RAYON_NUM_THREADS`.
    ///
    /// # Errors
    /// Threads that cannot be started. Without this call the first work to be shared out would panic.
    pub fn usual() -> Result<Self, ThreadsError> {
        /// A pool that failed to start is not tried again by rayon.
        static STARTED: OnceLock<Result<(), String>> = OnceLock::new();
        STARTED
            .get_or_init(|| {
                // Otherwise they have the name of whichever thread was the first to compute.
                let builder = ThreadPoolBuilder::new()
                    .thread_name(|i| format!("cpu-{i}"))
                    .start_handler(keep_apart());
                started(builder.build_global())
            })
            .clone()
            .map_err(|problem| ThreadsError { problem })?;
        Ok(Self { pool: None })
    }

    /// So many threads, shared with all who ask for as many.
    ///
    /// # Errors
    /// Threads that cannot be started.
    pub fn of(n: NonZeroUsize) -> Result<Self, ThreadsError> {
        /// A pool takes longer to start than it has threads, and no machine has so many cores.
        const MOST: usize = 1024;
        if n.get() > MOST {
            return Err(ThreadsError {
                problem: format!("{n} are asked for, and at most {MOST} are started"),
            });
        }
        static POOLS: Mutex<Option<HashMap<NonZeroUsize, Weak<ThreadPool>>>> = Mutex::new(None);
        // What a thread that panicked left is sound: an entry is a whole pool or none.
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

    /// How many they are.
    pub fn count(&self) -> usize {
        match &self.pool {
            Some(pool) => pool.current_num_threads(),
            None => rayon::current_num_threads(),
        }
    }

    /// Runs `work` on one of them, from which it is shared out to the others without waking anybody for each part.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            Some(pool) => pool.install(work),
            None => rayon::scope(|_| work()),
        }
    }
}

/// What gives each thread of a pool a CPU of its own, where there are as many threads as the process may run at once, by its
/// affinity and by its quota. Otherwise two that wake for a millisecond may share one for all of it, until the system balances
/// them.
#[cfg(target_os = "linux")]
fn keep_apart() -> impl Fn(usize) {
    use rustix::{
        process::getpid,
        thread::{CpuSet, sched_getaffinity, sched_setaffinity},
    };

    // Those of the main thread: whoever starts this pool may have one CPU itself, which its threads would inherit.
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
        // A system that refuses places threads as it likes.
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
        // What the system said is the source. Without one the pool is there already, as the
        // program that uses this library made it.
        Err(error) => error.source().map_or(Ok(()), |e| Err(e.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_is_there_is_no_error_and_one_that_cannot_start_is() {
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

    /// Also in pools that a thread with a CPU of its own starts.
    #[cfg(target_os = "linux")]
    #[test]
    fn as_many_threads_as_cpus_have_one_each_and_others_have_all() {
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
    fn those_who_ask_for_the_same_number_share_a_pool_and_work_runs_on_it() {
        let of = |n| Threads::of(NonZeroUsize::new(n).expect("not 0")).expect("threads");
        let (a, b, c) = (of(3), of(3), of(2));
        let same = |a: &Threads, b: &Threads| match (&a.pool, &b.pool) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        assert!(same(&a, &b) && !same(&a, &c));
        assert_eq!((a.count(), c.count()), (3, 2));
        assert_eq!(a.run(rayon::current_num_threads), 3);
        // The work of one pool that waits for another's is done, too.
        assert_eq!(a.run(|| c.run(rayon::current_num_threads)), 2);
        let usual = Threads::usual().expect("threads");
        assert_eq!(c.run(|| usual.run(rayon::current_num_threads)), 2);
    }
}
