//! Attention of packed sequences to themselves or to a source, independent of the kernels that compute it.

mod position_bias;
mod problem;
mod view;

pub use position_bias::{Bias, DistanceTooLarge, InvalidSoftCap, PositionBias, SoftCap};
pub use problem::AttentionProblem;
pub use view::{HeadView, Side, default_scale};
