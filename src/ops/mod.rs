//! The vocabulary of operators: each item says what is computed, with one meaning in f64, and nothing about kernels.
//!
//! The graph, the passes and the kernels share these types. A kernel adds how it computes them: tiles, launches, sources.

mod activation;
mod attention;
mod batch;
mod limits;
mod linear;
mod noise;
mod pooling;
mod rotation;

pub use activation::{Activation, activate_f64, erf, erfc};
pub use attention::{
    AttentionProblem, Bias, DistanceTooLarge, HeadView, InvalidSoftCap, PositionBias, Side,
    SoftCap, default_scale,
};
pub use batch::BatchInput;
pub use limits::{MAX_ROWS, MAX_WIDTH};
pub use linear::Epilogue;
pub(crate) use noise::LATENT;
pub use noise::{noise, seed_of};
pub use pooling::PoolWeights;
pub use rotation::Rotation;
