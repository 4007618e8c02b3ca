//! What can be wrong with usage records, with a plan, and with the settings of an allocator.

use std::ops::Range;

use super::{ALIGNMENT, MAX_TOTAL_BYTES, UsageRecord};

/// Why there is no plan, or why a plan must not be run. Tensors are named by the index of their
/// usage record.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    #[error(
        "tensor {record} dies at operator {last_op}, before operator {first_op} writes it: number \
         the operators in topological order, with first_op ≤ last_op"
    )]
    LifetimeReversed {
        record: usize,
        first_op: u32,
        last_op: u32,
    },

    #[error(
        "tensor {record} of {bytes} bytes brings the intermediate tensors to more than \
         {MAX_TOTAL_BYTES} bytes (1 EiB), the most that is planned for: check the sizes, or run a \
         smaller batch"
    )]
    TooLarge { record: usize, bytes: u64 },

    #[error(
        "the plan has {n_placements} placements for {n_records} tensors: it was made for other records"
    )]
    PlacementCount {
        n_records: usize,
        n_placements: usize,
    },

    #[error(
        "tensor {record} is placed in chunk {chunk}, and the plan has {n_chunks} chunks, numbered from 0"
    )]
    NoSuchChunk {
        record: usize,
        chunk: u32,
        n_chunks: usize,
    },

    #[error("tensor {record} is placed at offset {offset}, which is not a multiple of {ALIGNMENT}")]
    Misaligned { record: usize, offset: u64 },

    #[error(
        "tensor {record} takes {bytes} bytes from offset {offset} of chunk {chunk}, which ends at \
         {chunk_bytes}"
    )]
    OutsideChunk {
        record: usize,
        bytes: u64,
        offset: u64,
        chunk: u32,
        chunk_bytes: u64,
    },

    #[error(
        "tensors {a} and {b} are both alive at operator {op} and share bytes of chunk {chunk}: {a} \
         lies in {a_range:?}, {b} in {b_range:?}"
    )]
    Overlap {
        a: usize,
        b: usize,
        chunk: u32,
        op: u32,
        a_range: Range<u64>,
        b_range: Range<u64>,
    },

    #[error(
        "the request has {found} tensors, and the declared maximum was planned with {declared}: \
         declare the maximum with the records of the same program"
    )]
    MaximumCount { declared: usize, found: usize },

    #[error(
        "tensor {record} needs {found} bytes, more than the {declared} of the declared maximum: \
         declare a larger maximum, or send a smaller batch"
    )]
    MaximumBytes {
        record: usize,
        declared: u64,
        found: u64,
    },

    #[error(
        "tensor {record} lives over operators {found:?}, and over {declared:?} in the declared \
         maximum: declare the maximum with the records of the same program"
    )]
    MaximumLifetime {
        record: usize,
        declared: (u32, u32),
        found: (u32, u32),
    },

    #[error(
        "the chunk policy has default_chunk = {found}: it must be a multiple of {ALIGNMENT} from \
         {ALIGNMENT} to {MAX_TOTAL_BYTES}"
    )]
    DefaultChunk { found: u64 },

    #[error("the chunk policy has growth = {found}: it must be a factor from 1 to 16")]
    Growth { found: f64 },
}

/// Checks one record on its own.
pub(super) fn check_record(record: usize, usage: &UsageRecord) -> Result<(), PlanError> {
    if usage.first_op > usage.last_op {
        let UsageRecord {
            first_op, last_op, ..
        } = *usage;
        return Err(PlanError::LifetimeReversed {
            record,
            first_op,
            last_op,
        });
    }
    Ok(())
}

/// Checks every record, and that their sizes sum to at most [`MAX_TOTAL_BYTES`].
pub(super) fn check_records(records: &[UsageRecord]) -> Result<(), PlanError> {
    let mut total = 0u64;
    for (record, usage) in records.iter().enumerate() {
        check_record(record, usage)?;
        total = usage
            .bytes
            .checked_next_multiple_of(ALIGNMENT)
            .and_then(|bytes| total.checked_add(bytes))
            .filter(|&total| total <= MAX_TOTAL_BYTES)
            .ok_or(PlanError::TooLarge {
                record,
                bytes: usage.bytes,
            })?;
    }
    Ok(())
}
