//! The vocabulary of operators. Each item defines a computation in f64, independent of kernels.

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
