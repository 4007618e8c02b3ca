//! Compiles all kernels of a program in parallel, unless they are in the cache.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::nvrtc::options;
use super::{CacheFault, CacheKey, Cubin, DiskCache, JitError, Nvrtc, Source, Target};

/// Stack size of a compiling thread, in bytes. The compiler recurses deeply, so this is the usual
/// size of a main thread's stack. The default for a Rust thread is only 2 MiB.
const STACK: usize = 8 << 20;

/// NVRTC with a cache of compiled kernels. Threads share a `Jit` by reference.
#[derive(Debug)]
pub struct Jit {
    nvrtc: Nvrtc,
    cache: Option<DiskCache>,
    n_threads: usize,
    /// Whether compiled kernels are written to the cache. A failed write sets it to false, so that
    /// a full disk does not cause an error for each kernel.
    writes: AtomicBool,
    stats: Mutex<JitStats>,
}

/// Statistics of a [`Jit`].
#[derive(Clone, Debug, Default)]
pub struct JitStats {
    /// Number of kernels found in the cache.
    pub hits: usize,
    /// Number of kernels compiled.
    pub misses: usize,
    /// Total wall time of the calls of [`Jit::compile_all`], in seconds.
    pub seconds: f64,
    /// Time in NVRTC summed over the threads, in seconds.
    pub nvrtc_seconds: f64,
    /// Non-fatal errors of the cache.
    pub cache_notes: Vec<CacheNote>,
}

/// A non-fatal cache error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheNote {
    /// The kind of error.
    pub fault: CacheFault,
    /// The error and its remedy.
    pub message: String,
}

/// A source to compile, with its cache key.
struct Job<'a> {
    source: &'a Source,
    key: CacheKey,
}

impl Jit {
    /// Loads NVRTC with [`Nvrtc::find`] and opens the user's cache. If the environment names no
    /// folder for a cache, every kernel is compiled. The statistics and a warning report this.
    ///
    /// # Errors
    /// Returns the errors of [`Nvrtc::find`].
    pub fn open() -> Result<Jit, JitError> {
        let nvrtc = Nvrtc::find()?;
        match DiskCache::open_default() {
            Ok(cache) => Ok(Jit::new(nvrtc, Some(cache))),
            Err(error) => {
                let jit = Jit::new(nvrtc, None);
                jit.note(&error);
                Ok(jit)
            }
        }
    }

    /// Creates a compiler that uses `nvrtc`, an optional cache, and one thread per core.
    pub fn new(nvrtc: Nvrtc, cache: Option<DiskCache>) -> Jit {
        Jit {
            nvrtc,
            cache,
            n_threads: thread::available_parallelism().map_or(1, usize::from),
            writes: AtomicBool::new(true),
            stats: Mutex::default(),
        }
    }

    /// Sets the maximum number of threads (at least one).
    pub fn with_threads(mut self, n_threads: usize) -> Jit {
        self.n_threads = n_threads.max(1);
        self
    }

    /// Returns the NVRTC library that compiles the kernels.
    pub fn nvrtc(&self) -> &Nvrtc {
        &self.nvrtc
    }

    /// Returns the cache, if there is one.
    pub fn cache(&self) -> Option<&DiskCache> {
        self.cache.as_ref()
    }

    /// Returns the cache if there is one and only the user may write to it. If others may write to it, logs a warning once.
    pub fn own_cache(&self) -> Option<&DiskCache> {
        let cache = self.cache.as_ref()?;
        match cache.check_owner() {
            Ok(()) => Some(cache),
            Err(error) => {
                self.note(&error);
                None
            }
        }
    }

    /// Returns the statistics so far.
    pub fn stats(&self) -> JitStats {
        lock(&self.stats).clone()
    }

    /// Compiles `sources`, and returns the cubins in the same order. Duplicate sources are compiled
    /// once.
    ///
    /// `progress(ready, total)` receives the number of distinct sources whose cubin is ready, and the number of all distinct sources. The
    /// first call reports the sources found in the cache, and one more call follows each compilation. Calls do not overlap, and `ready`
    /// never decreases.
    ///
    /// A cache error never fails a compilation. It is logged as a warning and listed in
    /// [`JitStats::cache_notes`]. A damaged entry is compiled again and replaced.
    ///
    /// # Errors
    /// Returns the errors of [`Nvrtc::compile`]. If several sources fail, the error is that of the
    /// first one, whatever the order of the threads. Sources compiled before the failure are in the
    /// cache.
    pub fn compile_all(
        &self,
        sources: &[Source],
        target: Target,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<Vec<Cubin>, JitError> {
        let start = Instant::now();
        let outcome = self.compile_distinct(sources, target, progress);
        lock(&self.stats).seconds += start.elapsed().as_secs_f64();
        outcome
    }

    fn compile_distinct(
        &self,
        sources: &[Source],
        target: Target,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<Vec<Cubin>, JitError> {
        // Check the target even if everything is cached, so that the result does not depend on the
        // cache.
        self.nvrtc.check_target(target)?;
        let options = options(target, self.nvrtc.version());
        let mut jobs: Vec<Job> = Vec::new();
        let mut job_of: HashMap<&Source, usize> = HashMap::new();
        let places: Vec<usize> = sources
            .iter()
            .map(|source| {
                *job_of.entry(source).or_insert_with(|| {
                    let version = self.nvrtc.version();
                    let key = CacheKey::new(&source.text, &options, version, target);
                    jobs.push(Job { source, key });
                    jobs.len() - 1
                })
            })
            .collect();

        let mut cubins: Vec<Option<Cubin>> = jobs.iter().map(|job| self.cached(job)).collect();
        let n_hits = cubins.iter().flatten().count();
        lock(&self.stats).hits += n_hits;
        progress(n_hits, jobs.len());

        let mut missing: Vec<usize> = (0..jobs.len()).filter(|&at| cubins[at].is_none()).collect();
        // Compile the longest sources first, so that no long source is left for a single thread at
        // the end.
        missing.sort_by_key(|&at| std::cmp::Reverse(jobs[at].source.text.len()));
        let compiled = self.compile_missing(&jobs, &missing, target, &|n_compiled| {
            progress(n_hits + n_compiled, jobs.len());
        })?;
        for (at, cubin) in compiled {
            cubins[at] = Some(cubin);
        }
        let cubin_at = |at: usize| {
            cubins[at]
                .clone()
                .expect("cached, or else compiled just now")
        };
        Ok(places.into_iter().map(cubin_at).collect())
    }

    /// Compiles `jobs[at]` for every `at` in `missing`, in that order, on several threads.
    fn compile_missing(
        &self,
        jobs: &[Job],
        missing: &[usize],
        target: Target,
        progress: &(dyn Fn(usize) + Sync),
    ) -> Result<Vec<(usize, Cubin)>, JitError> {
        let next = AtomicUsize::new(0);
        // After a failure, jobs with larger indices are skipped, because only the error of the job with the smallest index is returned.
        let first_failure = AtomicUsize::new(usize::MAX);
        let finished = Mutex::new((Vec::with_capacity(missing.len()), None));
        let work = || {
            while let Some(&at) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                if at > first_failure.load(Ordering::Relaxed) {
                    continue;
                }
                match self.compile_one(&jobs[at], target) {
                    Ok(cubin) => {
                        let mut finished = lock(&finished);
                        finished.0.push((at, cubin));
                        progress(finished.0.len());
                    }
                    Err(error) => {
                        let mut finished = lock(&finished);
                        if at < first_failure.fetch_min(at, Ordering::Relaxed) {
                            finished.1 = Some(error);
                        }
                    }
                }
            }
        };

        thread::scope(|scope| {
            for n_running in 0..self.n_threads.min(missing.len()) {
                let builder = thread::Builder::new()
                    .name("nvrtc".to_owned())
                    .stack_size(STACK);
                match builder.spawn_scoped(scope, work) {
                    Ok(_) => {}
                    // The threads that were started compile all kernels.
                    Err(error) if n_running > 0 => {
                        tracing::warn!(%error, n_running, "compiling on fewer threads");
                        break;
                    }
                    Err(error) => return Err(JitError::Thread { error }),
                }
            }
            Ok(())
        })?;

        match finished
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
        {
            (compiled, None) => Ok(compiled),
            (_, Some(error)) => Err(error),
        }
    }

    fn compile_one(&self, job: &Job, target: Target) -> Result<Cubin, JitError> {
        let start = Instant::now();
        let cubin = self.nvrtc.compile(job.source, target)?;
        let took: Duration = start.elapsed();
        tracing::debug!(symbol = job.source.symbol, %target, ?took, "compiled");
        {
            let mut stats = lock(&self.stats);
            stats.misses += 1;
            stats.nvrtc_seconds += took.as_secs_f64();
        }
        if let Some(cache) = &self.cache
            && self.writes.load(Ordering::Relaxed)
            && let Err(error) = cache.put(&job.key, &cubin)
        {
            self.writes.store(false, Ordering::Relaxed);
            self.note(&error);
        }
        Ok(cubin)
    }

    fn cached(&self, job: &Job) -> Option<Cubin> {
        match self.cache.as_ref()?.get(&job.key) {
            // The symbol is not part of the key. If the cached symbol differs from that of the job, the source is compiled again, and the
            // compilation checks that it defines a kernel of this name.
            Ok(found) => found.filter(|cubin| cubin.symbol == job.source.symbol),
            Err(error) => {
                self.note(&error);
                None
            }
        }
    }

    /// Reports a cache error. Every damaged entry is reported; errors of any other kind are
    /// reported once per kind.
    fn note(&self, error: &JitError) {
        let Some(fault) = error.cache_fault() else {
            return;
        };
        let message = error.to_string();
        let notes = &mut lock(&self.stats).cache_notes;
        if fault == CacheFault::Damaged || notes.iter().all(|note| note.fault != fault) {
            tracing::warn!("{message}");
            notes.push(CacheNote { fault, message });
        }
    }
}

/// Locks a mutex even if a thread panicked while holding it. This is safe because every update
/// leaves the value consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
