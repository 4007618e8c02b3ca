//! Errors in usage records, plans and allocator settings.

use std::ops::Range;

use super::{ALIGNMENT, MAX_TOTAL_BYTES, UsageRecord};

/// An error in planning or in a plan. Tensors are identified by the index of their usage record.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    #[error(
        "tensor {record} is last read at operator {last_op}, before operator {first_op} writes it: number \
         the operators in topological order, with first_op ≤ last_op"
    )]
    LifetimeReversed {
        record: usize,
        first_op: u32,
        last_op: u32,
    },

    #[error(
        "tensor {record} of {bytes} bytes brings the intermediate tensors to more than \
         {MAX_TOTAL_BYTES} bytes (1 EiB), the maximum that can be planned: check the sizes, or run a \
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
        "tensor {record} is placed in chunk {chunk}, but the plan has {n_chunks} chunks, numbered from 0"
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
        "the request has {found} tensors, but the declared maximum has {declared}: \
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
        "tensor {record} is alive at operators {found:?}, but at {declared:?} in the declared \
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

#[cfg(test)]
mod tests {
    use super::super::{Allocator, ChunkAllocator, ChunkPolicy, Gsoc, Placement, Plan};
    use super::*;

    fn record(first_op: u32, last_op: u32, bytes: u64) -> UsageRecord {
        UsageRecord {
            first_op,
            last_op,
            bytes,
        }
    }

    fn refused(places: &[(u32, u64)]) -> String {
        let placements = places
            .iter()
            .map(|&(chunk, offset)| Placement { chunk, offset })
            .collect();
        let plan = Plan {
            chunks: vec![1024, 512],
            placements,
        };
        plan.validate(&[record(0, 3, 700), record(2, 4, 256)])
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn invalid_plans_are_rejected_with_an_explanation() {
        assert_eq!(
            refused(&[(0, 0), (0, 512)]),
            "tensors 0 and 1 are both alive at operator 2 and share bytes of chunk 0: 0 lies in \
             0..700, 1 in 512..768"
        );
        assert_eq!(
            refused(&[(1, 0), (0, 0)]),
            "tensor 0 takes 700 bytes from offset 0 of chunk 1, which ends at 512"
        );
        assert_eq!(
            refused(&[(0, 0), (0, u64::MAX - 255)]),
            "tensor 1 takes 256 bytes from offset 18446744073709551360 of chunk 0, which ends at 1024"
        );
        assert_eq!(
            refused(&[(0, 0), (0, 704)]),
            "tensor 1 is placed at offset 704, which is not a multiple of 256"
        );
        assert_eq!(
            refused(&[(0, 0), (2, 0)]),
            "tensor 1 is placed in chunk 2, but the plan has 2 chunks, numbered from 0"
        );
        assert_eq!(
            refused(&[(0, 0)]),
            "the plan has 1 placements for 2 tensors: it was made for other records"
        );
    }

    #[test]
    fn invalid_records_are_rejected_with_an_explanation() {
        let refused = |records: &[UsageRecord]| Gsoc::new().plan(records).unwrap_err().to_string();
        assert_eq!(
            refused(&[record(3, 2, 1)]),
            "tensor 0 is last read at operator 2, before operator 3 writes it: number the operators in \
             topological order, with first_op ≤ last_op"
        );
        let too_large = "bytes brings the intermediate tensors to more than 1152921504606846976 \
                         bytes (1 EiB), the maximum that can be planned: check the sizes, or run a \
                         smaller batch";
        for bytes in [u64::MAX, 1 << 60] {
            assert_eq!(
                refused(&[record(0, 0, 1), record(5, 5, bytes)]),
                format!("tensor 1 of {bytes} {too_large}")
            );
        }
    }

    #[test]
    fn invalid_settings_are_rejected_with_an_explanation() {
        let policy = ChunkPolicy {
            default_chunk: 1000,
            ..ChunkPolicy::default()
        };
        assert_eq!(
            ChunkAllocator::new(policy).unwrap_err().to_string(),
            "the chunk policy has default_chunk = 1000: it must be a multiple of 256 from 256 to \
             1152921504606846976"
        );
        let policy = ChunkPolicy {
            growth: 0.5,
            ..ChunkPolicy::default()
        };
        assert_eq!(
            ChunkAllocator::new(policy).unwrap_err().to_string(),
            "the chunk policy has growth = 0.5: it must be a factor from 1 to 16"
        );
    }
}
