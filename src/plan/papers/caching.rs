//! A caching allocator like those of PyTorch and cub, applied to the records in operator order.

use std::collections::BTreeSet;

use crate::plan::error::check_records;
use crate::plan::{Allocator, Plan, PlanError, RequestStats, UsageRecord, release};

/// The allocator of a framework without a planner: the CUDA caching allocator of PyTorch, which follows cub's. Tensors are allocated and
/// freed one by one as the operators run. Freed blocks go to one of two pools, by size, and are reused by best fit. Segments are never
/// returned to the device. Lifetimes are not known in advance.
///
/// The constants are PyTorch's:
///
/// - Sizes are multiples of 512 bytes.
/// - Blocks up to 1 MiB come from the small pool, in segments of 2 MiB.
/// - Larger blocks come from the large pool, in segments of 20 MiB. Blocks of 10 MiB or more have their own segments, in multiples of 2
///   MiB.
/// - A block is split if the remainder is at least 512 bytes (small pool) or more than 1 MiB (large pool). A freed block merges with its
///   free neighbors.
#[derive(Clone, Debug, Default)]
pub struct Caching {
    held: Vec<u64>,
    /// Free blocks of each pool as (bytes, segment, offset). The first block of at least a given size is the best fit.
    free: [BTreeSet<(u64, usize, u64)>; 2],
    stats: RequestStats,
}

const UNIT: u64 = 512;
const SMALL_LIMIT: u64 = 1 << 20;
const SMALL_SEGMENT: u64 = 2 << 20;
const LARGE_SEGMENT: u64 = 20 << 20;
const LARGE_LIMIT: u64 = 10 << 20;
const ROUND_LARGE: u64 = 2 << 20;

const SMALL: usize = 0;
const LARGE: usize = 1;

/// A block in use by a tensor.
#[derive(Clone, Copy, Debug)]
struct Block {
    pool: usize,
    segment: usize,
    offset: u64,
    bytes: u64,
}

impl Caching {
    /// Creates an allocator without segments.
    pub fn new() -> Self {
        Self::default()
    }

    fn allocate(&mut self, bytes: u64) -> Block {
        // Like PyTorch, this allocator has no blocks of zero bytes.
        let size = bytes.max(1).next_multiple_of(UNIT);
        let pool = if size <= SMALL_LIMIT { SMALL } else { LARGE };
        let best_fit = self.free[pool].range((size, 0, 0)..).next().copied();
        let (available, segment, offset) = match best_fit {
            Some(block) => {
                self.free[pool].remove(&block);
                block
            }
            None => {
                let segment_bytes = if pool == SMALL {
                    SMALL_SEGMENT
                } else if size < LARGE_LIMIT {
                    LARGE_SEGMENT
                } else {
                    size.next_multiple_of(ROUND_LARGE)
                };
                self.held.push(segment_bytes);
                (segment_bytes, self.held.len() - 1, 0)
            }
        };
        let left = available - size;
        let splits = if pool == SMALL {
            left >= UNIT
        } else {
            left > SMALL_LIMIT
        };
        if !splits {
            return Block {
                pool,
                segment,
                offset,
                bytes: available,
            };
        }
        self.free[pool].insert((left, segment, offset + size));
        Block {
            pool,
            segment,
            offset,
            bytes: size,
        }
    }

    fn free(&mut self, block: Block) {
        let Block {
            pool,
            segment,
            mut offset,
            mut bytes,
        } = block;
        let free = &mut self.free[pool];
        let neighbors: Vec<_> = free
            .iter()
            .filter(|&&(size, of, at)| {
                of == segment && (at + size == offset || offset + bytes == at)
            })
            .copied()
            .collect();
        for neighbor in neighbors {
            free.remove(&neighbor);
            bytes += neighbor.0;
            offset = offset.min(neighbor.2);
        }
        free.insert((bytes, segment, offset));
    }
}

impl Allocator for Caching {
    fn name(&self) -> &'static str {
        "caching"
    }

    fn plan(&mut self, records: &[UsageRecord]) -> Result<Plan, PlanError> {
        check_records(records)?;
        let before = self.held.clone();
        // Events as (operator, whether the event is an allocation, record). Tensors whose lifetime has ended are freed before the next
        // operator allocates.
        let mut events = Vec::with_capacity(2 * records.len());
        for (record, usage) in records.iter().enumerate() {
            events.push((u64::from(usage.first_op), true, record));
            events.push((u64::from(usage.last_op) + 1, false, record));
        }
        events.sort_unstable();
        let mut blocks: Vec<Option<Block>> = vec![None; records.len()];
        for (_, is_allocation, record) in events {
            if is_allocation {
                blocks[record] = Some(self.allocate(records[record].bytes));
            } else if let Some(block) = blocks[record] {
                self.free(block);
            }
        }
        let place = |block: &Option<Block>| block.map(|block| (block.segment, block.offset));
        let places: Vec<_> = blocks.iter().map(place).collect();
        let plan = Plan::new(&places, &self.held);
        self.stats = RequestStats::new(&plan, &before, &self.held);
        Ok(plan)
    }

    fn held(&self) -> &[u64] {
        &self.held
    }

    fn last_request(&self) -> RequestStats {
        self.stats
    }

    /// Releases all segments, as PyTorch does when the device is out of memory.
    fn release_all(&mut self) -> u64 {
        self.free = Default::default();
        release(&mut self.held, &mut self.stats)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn record(first_op: u32, last_op: u32, bytes: u64) -> UsageRecord {
        UsageRecord {
            first_op,
            last_op,
            bytes,
        }
    }

    #[test]
    fn segments_have_the_sizes_of_the_pools() {
        for (bytes, segment) in [
            (0, 2 * MIB),
            (MIB, 2 * MIB),
            (MIB + 1, 20 * MIB),
            (10 * MIB - 512, 20 * MIB),
            (10 * MIB, 10 * MIB),
            (11 * MIB, 12 * MIB),
        ] {
            let mut caching = Caching::new();
            caching.plan(&[record(0, 0, bytes)]).unwrap();
            assert_eq!(caching.held(), [segment], "{bytes} bytes");
        }
    }

    #[test]
    fn a_freed_block_is_given_to_the_next_operator() {
        let mut caching = Caching::new();
        let plan = caching
            .plan(&[record(0, 1, 700), record(1, 2, 700), record(2, 2, 700)])
            .unwrap();
        // An operand is alive until its operator ends, so the second tensor cannot reuse the first one's block.
        assert_eq!(
            plan.placements
                .iter()
                .map(|at| at.offset)
                .collect::<Vec<_>>(),
            [0, 1024, 0]
        );
    }

    #[test]
    fn neighbors_merge_when_they_are_free() {
        let mut caching = Caching::new();
        let quarters = [0, 1, 2, 3].map(|_| record(0, 0, 5 * MIB));
        let plan = caching.plan(
            &[
                &quarters[..],
                &[record(1, 1, 9 * MIB), record(1, 1, 9 * MIB)],
            ]
            .concat(),
        );
        assert_eq!(plan.unwrap().footprint(), 20 * MIB);
        assert_eq!(caching.free[LARGE].len(), 1);
    }

    #[test]
    fn segments_are_never_given_back() {
        let mut caching = Caching::new();
        caching.plan(&[record(0, 0, 100 * MIB)]).unwrap();
        caching.plan(&[record(0, 0, 64)]).unwrap();
        assert_eq!(caching.held(), [100 * MIB, 2 * MIB]);
        let stats = RequestStats {
            footprint: 2 * MIB,
            newly_allocated: 2 * MIB,
            released: 0,
            held: 102 * MIB,
        };
        assert_eq!(caching.last_request(), stats);
    }
}
