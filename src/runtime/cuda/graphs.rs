//! CUDA graphs of batch shapes that come again.
//!
//! A graph replays the launches of a run with one call, which removes most of the gap between
//! kernels. It bakes in pointers and grids, so it serves one shape, and only while the session's
//! memory stays where it is and the shape is planned the same.

use std::{num::NonZeroUsize, sync::Arc};

use cudarc::driver::{CudaGraph, CudaStream, sys};
use lru::LruCache;

use super::error::{CudaError, During};
use crate::{plan::Plan, tensor::Extents};

/// Graphs that are kept; the one unused for longest makes room.
const KEPT: NonZeroUsize = NonZeroUsize::new(64).expect("64 is not zero");

/// Shapes without a graph that are remembered. Apart from the graphs, so that shapes that never
/// come again push out none.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(256).expect("256 is not zero");

/// What a run's launches depend on, besides addresses.
pub(super) type Key = (Extents, bool);

/// The graphs of one session.
pub(super) struct Graphs {
    /// Shapes that were seen once, as capturing costs more than one run gains; and where their
    /// tensors were, as an allocator may place a shape elsewhere when it comes again, without any
    /// chunk having moved.
    seen: LruCache<Key, Arc<Plan>>,
    kept: LruCache<Key, (Arc<Plan>, CudaGraph)>,
}

// SAFETY: a graph is a handle that any thread may use, one at a time; cudarc binds the context to
// the calling thread at every use, and a session is used through `&mut`.
unsafe impl Send for Graphs {}

impl Default for Graphs {
    fn default() -> Self {
        Self {
            seen: LruCache::new(REMEMBERED),
            kept: LruCache::new(KEPT),
        }
    }
}

impl Graphs {
    /// Forgets all graphs: the memory that they name has moved.
    pub(super) fn clear(&mut self) {
        self.seen.clear();
        self.kept.clear();
    }

    /// Enqueues the run of `key` on `stream`: by `launch` when the shape or its plan is new, else
    /// by a graph, which is captured from `launch` the second time.
    pub(super) fn run(
        &mut self,
        key: Key,
        plan: &Arc<Plan>,
        stream: &Arc<CudaStream>,
        launch: impl Fn() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let same = |other: &Arc<Plan>| Arc::ptr_eq(other, plan) || other == plan;
        let replay = |graph: &CudaGraph| graph.launch().during(|| "launch a graph".to_owned());
        if let Some((of, graph)) = self.kept.get(&key) {
            if same(of) {
                return replay(graph);
            }
            self.kept.pop(&key);
        }
        if self.seen.get(&key).is_some_and(same) {
            let graph = capture(stream, THREAD, launch)?;
            replay(&graph)?;
            self.seen.pop(&key);
            self.kept.put(key, (Arc::clone(plan), graph));
        } else {
            launch()?;
            self.seen.put(key, Arc::clone(plan));
        }
        Ok(())
    }
}

/// What other threads do meanwhile is no part of a graph, and may not disturb it.
pub(super) const THREAD: sys::CUstreamCaptureMode =
    sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;

/// What `launch` puts on `stream`, as a graph; nothing of it runs.
pub(super) fn capture(
    stream: &Arc<CudaStream>,
    mode: sys::CUstreamCaptureMode,
    launch: impl Fn() -> Result<(), CudaError>,
) -> Result<CudaGraph, CudaError> {
    stream
        .begin_capture(mode)
        .during(|| "begin a capture".to_owned())?;
    let launched = launch();
    // Ended in any case, so that the stream stays usable.
    let captured = stream.end_capture(sys::CUgraphInstantiate_flags(0));
    launched?;
    let missing = cudarc::driver::DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    captured
        .and_then(|graph| graph.ok_or(missing))
        .during(|| "capture a graph".to_owned())
}
