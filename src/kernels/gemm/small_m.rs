//! Constants of the GEMMs for few rows of x (small M) on Hopper. Their MMAs swap the operands: rows of the weight are the M extent of an
//! MMA, and rows of x the N extent.

/// Rows of the weight per tile: the M extent of an MMA.
pub(super) const BLOCK_N: u32 = 64;
/// Elements of k per step: 128 bytes, the span of the widest swizzle.
pub(super) const BLOCK_K: u32 = 64;
/// Bytes of a step's `BLOCK_N × BLOCK_K` weights in 16 bits.
pub(super) const STEP_BYTES: u32 = BLOCK_N * BLOCK_K * 2;
/// Threads per CTA: one warpgroup.
pub(super) const THREADS: u32 = 128;
/// Alignment of swizzled TMA boxes in shared memory, in bytes.
pub(super) const ALIGNMENT: u32 = 1024;
/// Max bytes of dynamic shared memory per CTA. The rest of the 227 KiB that a CTA may use is for static shared memory, such as barriers.
pub(super) const SHARED_LIMIT: u32 = 226 * 1024;
/// Bytes of a warpgroup's accumulators for eight tokens (rows of x).
pub(super) const PARTIAL_BYTES: u32 = THREADS * 16;
