/// A named result of a run, widened to f32.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    pub name: String,
    /// Sizes, slowest first: `[tokens, width]` or `[batch, width]`.
    pub shape: Vec<u64>,
    /// Row-major.
    pub values: Vec<f32>,
}

/// Bytes that a session and its model hold on their device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Weights, in their storage type; shared by all sessions.
    pub weights: u64,
    /// Chunks of intermediate tensors, as planned.
    pub activations: u64,
    /// Token ids, lengths and offsets of the largest batch so far.
    pub batch_data: u64,
}
