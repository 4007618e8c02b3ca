//! CUDA graphs of recurring batch shapes.
//!
//! A graph replays the launches of a run with one call, which removes most of the gaps between kernels. The pointers and grids of a graph
//! are fixed, so each batch shape needs its own graph. The shape is usually that of a [bucket](crate::program::Buckets), to which batches
//! of similar sizes are rounded up. A graph is valid only while the session's memory stays in place and the plan of the shape does not
//! change.

use std::{num::NonZeroUsize, sync::Arc};

use cudarc::driver::{CudaGraph, CudaStream, sys};
use lru::LruCache;

use super::error::{CudaError, During};
use crate::{plan::Plan, runtime::GraphUse, tensor::Extents};

/// Maximum number of graphs of a session. When it is exceeded, the least recently used graph is evicted. A graph of a twelve-layer encoder
/// takes a third of a MiB of device memory. A shape can have two graphs, one for each slot of the session ([`Key`]).
const KEPT: NonZeroUsize = NonZeroUsize::new(128).expect("128 is not zero");

/// Maximum number of remembered shapes that have no graph. They have their own cache, so that shapes that never recur do not evict graphs.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(256).expect("256 is not zero");

/// Key of a graph: the extents, whether the batch is padded, and the index of the session's slot. A session has two slots, each with memory
/// for the data of one batch in flight. Because the key contains the slot, batches that alternate between the slots do not evict each
/// other's graphs.
pub(super) type Key = (Extents, bool, usize);

/// Addresses of a run's tensors and batch data. The addresses can change between runs of a shape: an allocator may place the tensors
/// elsewhere, and chunks may be reallocated.
#[derive(Clone)]
pub(super) struct GraphBinding {
    pub(super) plan: Arc<Plan>,
    /// Addresses of the chunks that the plan uses, and of the batch data.
    pub(super) addresses: Vec<sys::CUdeviceptr>,
}

impl PartialEq for GraphBinding {
    fn eq(&self, other: &Self) -> bool {
        let plans = Arc::ptr_eq(&self.plan, &other.plan) || self.plan == other.plan;
        plans && self.addresses == other.addresses
    }
}

/// The graphs of one session.
pub(super) struct Graphs {
    /// Shapes that were launched and have no graph yet, with the addresses of their last launch.
    seen: LruCache<Key, GraphBinding>,
    kept: LruCache<Key, (GraphBinding, CudaGraph)>,
    used: GraphUse,
}

// SAFETY: any thread may use the handle of a graph, one thread at a time. cudarc binds the context to the calling thread at every use, and
// a session is used through `&mut`.
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
    /// Drops all graphs. This is necessary when the memory to which they refer is freed.
    pub(super) fn clear(&mut self) {
        self.seen.clear();
        self.kept.clear();
    }

    pub(super) fn used(&self) -> GraphUse {
        let kept = self.kept.len();
        GraphUse { kept, ..self.used }
    }

    /// Enqueues a run by replaying its graph. Returns `false` if there is no graph for `key` with the addresses `site`. The caller then
    /// must launch the run.
    pub(super) fn replay(&mut self, key: &Key, site: &GraphBinding) -> Result<bool, CudaError> {
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

    /// Returns whether to capture a graph for a run that had no graph. The graph of an exact shape is captured at its second occurrence,
    /// because a capture takes as much host time as launching one or two runs. A bucket is likely to recur, so its graph is captured at the
    /// first occurrence, unless this would evict another graph.
    pub(super) fn is_due(&mut self, key: &Key, site: &GraphBinding, is_bucket: bool) -> bool {
        let again = self.seen.get(key).is_some_and(|at| at == site);
        let due = again || (is_bucket && self.kept.len() < KEPT.get());
        match due {
            true => _ = self.seen.pop(key),
            false => _ = self.seen.put(*key, site.clone()),
        }
        due
    }

    pub(super) fn keep(&mut self, key: Key, site: &GraphBinding, graph: CudaGraph) {
        self.used.captured += 1;
        self.kept.put(key, (site.clone(), graph));
    }
}

/// Capture mode in which calls of other threads are not captured and do not invalidate the capture.
pub(super) const THREAD: sys::CUstreamCaptureMode =
    sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;

/// Captures the work that `launch` enqueues on `stream` as a graph, without running it.
pub(super) fn capture(
    stream: &Arc<CudaStream>,
    mode: sys::CUstreamCaptureMode,
    launch: impl Fn() -> Result<(), CudaError>,
) -> Result<CudaGraph, CudaError> {
    stream
        .begin_capture(mode)
        .during(|| "begin a capture".to_owned())?;
    let launched = launch();
    // End the capture even if `launch` failed, so that the stream stays usable.
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
    fn a_bucket_is_due_at_once_and_an_exact_shape_at_its_second_occurrence() {
        let key = |n| (Extents::of(&[n]).unwrap(), false, 0);
        let site = |address| GraphBinding {
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
        // Each slot has its own graph.
        let other = (Extents::of(&[10]).unwrap(), false, 1);
        assert!(!graphs.is_due(&other, &site(3), false));
        assert!(!graphs.is_due(&key(10), &site(2), false));
        assert!(graphs.is_due(&other, &site(3), false));
        assert!(graphs.is_due(&key(10), &site(2), false));
        assert_eq!(graphs.used(), GraphUse::default());
    }
}
