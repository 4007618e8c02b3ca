/// A named output of a run, converted to f32.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    pub name: String,
    /// Dimensions, outermost first: `[tokens, width]` or `[batch, width]`.
    pub shape: Vec<u64>,
    /// Values in row-major order.
    pub values: Vec<f32>,
}

/// Bytes that a session and its model hold on their device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes of the weights in their storage type, shared by all sessions.
    pub weights: u64,
    /// Bytes of the planned chunks for intermediate tensors.
    pub activations: u64,
    /// Bytes for the token ids, lengths and offsets of the largest batch so far.
    pub batch_data: u64,
}
