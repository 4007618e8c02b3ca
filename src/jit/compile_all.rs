//! All the kernels of a program: from the cache where they are there, else compiled in parallel.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::nvrtc::options;
use super::{CacheFault, CacheKey, Cubin, DiskCache, JitError, Nvrtc, Source, Target};

/// Stack of a thread that compiles, in bytes: what a program's main thread has, for which the
/// compiler's recursion was made. The 2 MiB of a Rust thread are fewer.
const STACK: usize = 8 << 20;

/// NVRTC with a cache before it. Shared by reference between threads.
#[derive(Debug)]
pub struct Jit {
    nvrtc: Nvrtc,
    cache: Option<DiskCache>,
    n_threads: usize,
    /// Cleared when a write fails, so that a full disk is not filled again for each kernel.
    writes: AtomicBool,
    stats: Mutex<JitStats>,
}

/// What a [`Jit`] has done so far.
#[derive(Clone, Debug, Default)]
pub struct JitStats {
    /// Kernels that came from the cache.
    pub hits: usize,
    /// Kernels that were compiled.
    pub misses: usize,
    /// Time from the calls of [`Jit::compile_all`] to their ends, in seconds.
    pub seconds: f64,
    /// Time within NVRTC, in seconds, added up over the threads.
    pub nvrtc_seconds: f64,
    /// What was wrong with the cache. None of it stopped a compilation.
    pub cache_notes: Vec<CacheNote>,
}

/// A trouble with the cache that was met and got over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheNote {
    /// What kind it is.
    pub fault: CacheFault,
    /// What it is, and how to mend it.
    pub message: String,
}

/// A source to compile, and where it goes.
struct Job<'a> {
    source: &'a Source,
    key: CacheKey,
}

impl Jit {
    /// NVRTC as [`Nvrtc::find`] finds it, and the user's cache. Without a folder for a cache, the
    /// statistics and a warning say so, and every kernel is compiled.
    ///
    /// # Errors
    /// As [`Nvrtc::find`].
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

    /// This NVRTC with this cache, or without one, on every core.
    pub fn new(nvrtc: Nvrtc, cache: Option<DiskCache>) -> Jit {
        Jit {
            nvrtc,
            cache,
            n_threads: thread::available_parallelism().map_or(1, usize::from),
            writes: AtomicBool::new(true),
            stats: Mutex::default(),
        }
    }

    /// Compiles on at most this many threads (at least one).
    pub fn with_threads(mut self, n_threads: usize) -> Jit {
        self.n_threads = n_threads.max(1);
        self
    }

    /// The compiler.
    pub fn nvrtc(&self) -> &Nvrtc {
        &self.nvrtc
    }

    /// The cache, if there is one.
    pub fn cache(&self) -> Option<&DiskCache> {
        self.cache.as_ref()
    }

    /// The cache, if there is one that only the user may write to. That others may is told once.
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

    /// What was done so far.
    pub fn stats(&self) -> JitStats {
        lock(&self.stats).clone()
    }

    /// The cubins of `sources`, in their order. A source that occurs several times is compiled
    /// once.
    ///
    /// `progress` is called with how many of how many different sources are ready: at first with
    /// those from the cache, then after each compilation, never by two threads at once and never
    /// with a smaller number than before.
    ///
    /// Trouble with the cache never fails a compilation: it is traced as a warning and listed in
    /// [`JitStats::cache_notes`]. A damaged entry is compiled again and replaced.
    ///
    /// # Errors
    /// As [`Nvrtc::compile`]; when several sources fail, the error is that of the first of them,
    /// whichever thread was quicker. What was compiled until then is in the cache.
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
        // Also when all is in the cache: an answer must not depend on what was compiled before.
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
        // The longest first, so that none of the long ones is left to one thread at the end.
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
        // Once a job has failed, only jobs before it can change which error is returned.
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
                    // Those that run do the work of the others.
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

    /// The cubin of a job, when the cache has it.
    fn cached(&self, job: &Job) -> Option<Cubin> {
        match self.cache.as_ref()?.get(&job.key) {
            // The symbol is no part of the key. Asked for by another name, the text is compiled,
            // which tells whether it has a kernel of that name.
            Ok(found) => found.filter(|cubin| cubin.symbol == job.source.symbol),
            Err(error) => {
                self.note(&error);
                None
            }
        }
    }

    /// Tells of a trouble with the cache: each damaged entry, any other kind once.
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

/// The value, also when a thread has panicked with it in its hands: each update leaves it whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
