pub mod jit;
pub mod plan;
