//! CUDA graphs of batch shapes that recur.
//!
//! A graph replays the launches of a run with one call, which removes most of the gap between
//! kernels. Its pointers and grids are fixed, so it serves one shape (mostly a bucket), and only while the
//! session's memory stays where it is and the shape has the same plan.

use std::{num::NonZeroUsize, sync::Arc};

use cudarc::driver::{CudaGraph, CudaStream, sys};
use lru::LruCache;

use super::error::{CudaError, During};
use crate::{plan::Plan, runtime::GraphUse, tensor::Extents};

/// Most graphs of a session; the least recently used makes room. A graph of a twelve-layer encoder takes a third of a
/// MiB of device memory, and a shape that comes while another batch is in flight has two.
const KEPT: NonZeroUsize = NonZeroUsize::new(128).expect("128 is not zero");

/// Most shapes without a graph that are remembered, in a cache of their own, so that shapes that never recur evict no
/// graph.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(256).expect("256 is not zero");

/// What a run's launches depend on: the extents, whether the batch came padded, and by its slot the addresses of its batch
/// data, so that batches that run by turns in two slots do not evict each other's graphs.
pub(super) type Key = (Extents, bool, usize);

/// Addresses of a run's tensors and batch data. An allocator may place a shape elsewhere when it recurs, and chunks are
/// reallocated.
#[derive(Clone)]
pub(super) struct Site {
    pub(super) plan: Arc<Plan>,
    /// Addresses of the chunks that the plan uses, and of the batch data.
    pub(super) addresses: Vec<sys::CUdeviceptr>,
}

impl PartialEq for Site {
    fn eq(&self, other: &Self) -> bool {
        let plans = Arc::ptr_eq(&self.plan, &other.plan) || self.plan == other.plan;
        plans && self.addresses == other.addresses
    }
}

/// The graphs of one session.
pub(super) struct Graphs {
    /// Shapes that were launched without a graph.
    seen: LruCache<Key, Site>,
    kept: LruCache<Key, (Site, CudaGraph)>,
    used: GraphUse,
}

// SAFETY: a graph is a handle that any thread may use, one at a time; cudarc binds the context to
// the calling thread at every use, and a session is used through `&mut`.
unsafe impl Send for Graphs {}

impl Default for Graphs {
    fn default() -> Self {
        Self {
            seen: LruCache::new(REMEMBERED),
            kept: LruCache::new(KEPT),
            used: GraphUse::default(),
        }
    }
}

impl Graphs {
    /// Drops all graphs, because the memory that they name is freed.
    pub(super) fn clear(&mut self) {
        self.seen.clear();
        self.kept.clear();
    }

    pub(super) fn used(&self) -> GraphUse {
        let kept = self.kept.len();
        GraphUse { kept, ..self.used }
    }

    /// Enqueues a run by its graph. `false` where there is none, and the caller must launch it.
    pub(super) fn replay(&mut self, key: &Key, site: &Site) -> Result<bool, CudaError> {
        if let Some((at, graph)) = self.kept.get(key) {
            if at == site {
                self.used.replayed += 1;
                graph.launch().during(|| "launch a graph".to_owned())?;
                return Ok(true);
            }
            self.kept.pop(key);
        }
        self.used.launched += 1;
        Ok(false)
    }

    /// Whether a run that had no graph is to get one: at the second occurrence of its shape, and at the first of a
    /// bucket, which is likely to recur, while no other graph is evicted for it. A capture takes the host as long as
    /// launching one or two runs.
    pub(super) fn is_due(&mut self, key: &Key, site: &Site, is_bucket: bool) -> bool {
        let again = self.seen.get(key).is_some_and(|at| at == site);
        let due = again || (is_bucket && self.kept.len() < KEPT.get());
        match due {
            true => _ = self.seen.pop(key),
            false => _ = self.seen.put(*key, site.clone()),
        }
        due
    }

    pub(super) fn keep(&mut self, key: Key, site: &Site, graph: CudaGraph) {
        self.used.captured += 1;
        self.kept.put(key, (site.clone(), graph));
    }
}

/// Calls of other threads are neither captured nor able to invalidate the capture.
pub(super) const THREAD: sys::CUstreamCaptureMode =
    sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;

/// Captures what `launch` enqueues on `stream` as a graph, without running it.
pub(super) fn capture(
    stream: &Arc<CudaStream>,
    mode: sys::CUstreamCaptureMode,
    launch: impl Fn() -> Result<(), CudaError>,
) -> Result<CudaGraph, CudaError> {
    stream
        .begin_capture(mode)
        .during(|| "begin a capture".to_owned())?;
    let launched = launch();
    // The capture ends also after an error, so that the stream stays usable.
    let captured = stream.end_capture(sys::CUgraphInstantiate_flags(0));
    launched?;
    let missing = cudarc::driver::DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    captured
        .and_then(|graph| graph.ok_or(missing))
        .during(|| "capture a graph".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_due_at_once_and_an_exact_shape_when_it_comes_again_where_it_was() {
        let key = |n| (Extents::of(&[n]).unwrap(), false, 0);
        let site = |address| Site {
            plan: Arc::new(Plan {
                placements: Vec::new(),
                chunks: vec![256],
            }),
            addresses: vec![address],
        };
        let mut graphs = Graphs::default();
        assert!(graphs.is_due(&key(8), &site(1), true));
        assert!(!graphs.is_due(&key(9), &site(1), false));
        assert!(!graphs.is_due(&key(10), &site(1), false));
        assert!(graphs.is_due(&key(9), &site(1), false));
        // A shape whose memory has moved counts as new.
        assert!(!graphs.is_due(&key(10), &site(2), false));
        assert!(graphs.is_due(&key(10), &site(2), false));
        // Another slot's graph is one of its own.
        let other = (Extents::of(&[10]).unwrap(), false, 1);
        assert!(!graphs.is_due(&other, &site(3), false));
        assert!(!graphs.is_due(&key(10), &site(2), false));
        assert!(graphs.is_due(&other, &site(3), false));
        assert!(graphs.is_due(&key(10), &site(2), false));
        assert_eq!(graphs.used(), GraphUse::default());
    }
}
