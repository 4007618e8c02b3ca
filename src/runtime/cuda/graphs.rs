//! CUDA graphs of batch shapes that come again.
//!
//! A graph replays the launches of a run with one call, which removes most of the gap between
//! kernels. It bakes in pointers and grids, so it serves one shape, and only while the session's
//! memory stays where it is and the shape is planned the same.

use std::{collections::HashMap, sync::Arc};

use cudarc::driver::{CudaGraph, CudaStream, sys};

use super::error::{CudaError, During};
use crate::{plan::Plan, tensor::Extents};

/// Shapes that are remembered. When there are more, all are forgotten: shapes that come again come
/// back soon, and a bound is what matters.
const REMEMBERED: usize = 64;

/// What a run's launches depend on, besides addresses.
pub(super) type Key = (Extents, bool);

/// The graphs of one session.
#[derive(Default)]
pub(super) struct Graphs {
    seen: HashMap<Key, Seen>,
}

/// A shape that came before.
struct Seen {
    /// Where its tensors were. An allocator may place a shape elsewhere when it comes again,
    /// without any chunk having moved.
    plan: Arc<Plan>,
    /// `None` for a shape that was seen once: capturing costs more than one run gains.
    graph: Option<CudaGraph>,
}

// SAFETY: a graph is a handle that any thread may use, one at a time; cudarc binds the context to
// the calling thread at every use, and a session is used through `&mut`.
unsafe impl Send for Graphs {}

impl Graphs {
    /// Forgets all graphs: the memory that they name has moved.
    pub(super) fn clear(&mut self) {
        self.seen.clear();
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
        let same_plan = |seen: &&mut Seen| Arc::ptr_eq(&seen.plan, plan) || seen.plan == *plan;
        match self.seen.get_mut(&key).filter(same_plan) {
            None => {
                if self.seen.len() >= REMEMBERED {
                    self.seen.clear();
                }
                launch()?;
                let plan = Arc::clone(plan);
                self.seen.insert(key, Seen { plan, graph: None });
                Ok(())
            }
            Some(Seen {
                graph: Some(graph), ..
            }) => graph.launch().during(|| "launch a graph".to_owned()),
            Some(Seen { graph: slot, .. }) => {
                let graph = capture(stream, THREAD, launch)?;
                graph.launch().during(|| "launch a graph".to_owned())?;
                *slot = Some(graph);
                Ok(())
            }
        }
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
