/// A loading step, reported to [`Builder::progress`](super::Builder::progress).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Kernels,
    Tuning,
    Weights,
}
