use super::super::{Allocator, Placement};
use super::*;

const MIB: u64 = 1 << 20;

fn record(first_op: u32, last_op: u32, bytes: u64) -> UsageRecord {
    UsageRecord {
        first_op,
        last_op,
        bytes,
    }
}

/// Returns a request of `mib` MiB whose tensors are all alive at the same time.
fn request(mib: u64) -> Vec<UsageRecord> {
    (0..8).map(|op| record(op, 8 + op, mib * MIB / 8)).collect()
}

fn policy(release_after: u32, keep_limit: u64) -> ChunkPolicy {
    ChunkPolicy {
        release_after,
        keep_limit,
        ..ChunkPolicy::default()
    }
}

#[test]
fn a_fresh_request_gets_one_chunk_with_bounded_headroom() {
    for (mib, chunk) in [(4, 4 * MIB + 4 * MIB * 8 / 100), (100, 102 * MIB)] {
        let mut allocator = ChunkAllocator::default();
        allocator.plan(&request(mib)).unwrap();
        // The factor 1.08 is not exact in f64, so the size may differ by one [`ALIGNMENT`].
        let [held] = allocator.held() else {
            panic!("{:?}", allocator.held())
        };
        assert!(held.abs_diff(chunk) <= ALIGNMENT, "{mib} MiB: {held}");
    }
}

#[test]
fn a_longer_request_adds_a_chunk_and_keeps_the_old_one() {
    let mut allocator = ChunkAllocator::default();
    allocator.plan(&request(100)).unwrap();
    let plan = allocator.plan(&request(108)).unwrap();
    plan.validate(&request(108)).unwrap();
    assert_eq!(allocator.held()[0], 102 * MIB);
    let stats = allocator.last_request();
    assert_eq!(stats.newly_allocated, allocator.held()[1]);
    assert!(stats.newly_allocated <= 16 * MIB, "{stats:?}");
    assert_eq!(stats.released, 0);
    // Repeating the request uses the new chunk again.
    allocator.plan(&request(108)).unwrap();
    assert_eq!(allocator.last_request().newly_allocated, 0);
}

#[test]
fn a_much_longer_request_replaces_chunks_that_would_waste_memory() {
    let mut allocator = ChunkAllocator::default();
    allocator.plan(&request(40)).unwrap();
    // None of these tensors fits in the existing chunk.
    let records = [record(0, 1, 50 * MIB), record(0, 1, 50 * MIB)];
    allocator.plan(&records).unwrap();
    assert_eq!(allocator.held(), [102 * MIB]);
    let stats = allocator.last_request();
    assert_eq!(
        (stats.newly_allocated, stats.released),
        (102 * MIB, 42 * MIB)
    );
}

#[test]
fn memory_shrinks_to_the_largest_request_of_the_last_release_after() {
    let mut allocator = ChunkAllocator::new(policy(4, u64::MAX)).unwrap();
    allocator.plan(&request(100)).unwrap();
    for mib in [10, 20, 10] {
        allocator.plan(&request(mib)).unwrap();
        assert_eq!(allocator.held(), [102 * MIB]);
        assert_eq!(allocator.last_request().newly_allocated, 0);
    }
    allocator.plan(&request(4)).unwrap();
    let [held] = allocator.held()[..] else {
        panic!("{:?}", allocator.held())
    };
    assert!((20 * MIB..22 * MIB).contains(&held), "{held}");
    let stats = allocator.last_request();
    assert_eq!((stats.released, stats.newly_allocated), (102 * MIB, held));
    allocator.plan(&request(20)).unwrap();
    assert_eq!(allocator.last_request().newly_allocated, 0);
}

#[test]
fn a_large_request_within_the_run_keeps_the_memory() {
    let mut allocator = ChunkAllocator::new(policy(4, u64::MAX)).unwrap();
    for mib in [100, 10, 10, 95, 10, 10, 10] {
        allocator.plan(&request(mib)).unwrap();
        assert_eq!(allocator.held(), [102 * MIB]);
    }
}

#[test]
fn a_chunk_that_no_request_uses_is_released_alone() {
    let mut allocator = ChunkAllocator::new(policy(3, u64::MAX)).unwrap();
    allocator.plan(&request(100)).unwrap();
    allocator.plan(&request(108)).unwrap();
    let second = allocator.held()[1];
    for _ in 0..2 {
        allocator.plan(&request(100)).unwrap();
        assert_eq!(allocator.held(), [102 * MIB, second]);
    }
    allocator.plan(&request(100)).unwrap();
    assert_eq!(allocator.held(), [102 * MIB, 0]);
    assert_eq!(allocator.last_request().released, second);
}

#[test]
fn memory_above_the_keep_limit_is_released_at_once() {
    for (keep, held) in [(100 * MIB, 102 * MIB), (80 * MIB, 10 * MIB * 108 / 100)] {
        let mut allocator = ChunkAllocator::new(policy(100, keep)).unwrap();
        allocator.plan(&request(100)).unwrap();
        allocator.plan(&request(10)).unwrap();
        let [found] = allocator.held() else {
            panic!("{:?}", allocator.held())
        };
        assert!(found.abs_diff(held) <= ALIGNMENT, "keep {keep}: {found}");
    }
}

#[test]
fn the_policy_of_the_paper_releases_at_once() {
    for release_after in [0, 1] {
        let mut allocator = ChunkAllocator::new(policy(release_after, u64::MAX)).unwrap();
        allocator.plan(&request(100)).unwrap();
        allocator.plan(&request(20)).unwrap();
        let [held] = allocator.held() else {
            panic!("{:?}", allocator.held())
        };
        assert!((20 * MIB..22 * MIB).contains(held), "{held}");
    }
}

#[test]
fn tensors_of_zero_bytes_have_an_address_in_a_chunk() {
    let mut allocator = ChunkAllocator::default();
    let empty = [record(0, 0, 0), record(0, 5, 0)];
    let plan = allocator.plan(&empty).unwrap();
    plan.validate(&empty).unwrap();
    assert_eq!(
        plan.placements,
        [Placement {
            chunk: 0,
            offset: 0
        }; 2]
    );
    assert_eq!(plan.footprint(), SMALLEST_CHUNK);
    assert!(allocator.plan(&[]).unwrap().placements.is_empty());
    assert_eq!(allocator.last_request().footprint, 0);
}

#[test]
fn after_release_all_nothing_is_held_and_no_plan_is_current() {
    let mut allocator = ChunkAllocator::default();
    let plan = allocator.plan(&request(10)).unwrap();
    assert!(allocator.is_current(&plan));
    assert_eq!(allocator.release_all(), plan.footprint());
    assert!(!allocator.is_current(&plan));
    assert_eq!(allocator.last_request().held, 0);
    assert_eq!(allocator.plan(&request(10)).unwrap(), plan);
    assert!(allocator.is_current(&plan));
}

#[test]
fn a_rejected_request_changes_nothing() {
    let mut allocator = ChunkAllocator::default();
    allocator.plan(&request(10)).unwrap();
    let (held, stats) = (allocator.held().to_vec(), allocator.last_request());
    allocator.plan(&[record(0, 0, u64::MAX)]).unwrap_err();
    allocator.plan(&[record(1, 0, 1)]).unwrap_err();
    assert_eq!(
        (allocator.held(), allocator.last_request()),
        (&held[..], stats)
    );
}

#[test]
fn invalid_settings_are_rejected() {
    let refused = |policy| ChunkAllocator::new(policy).unwrap_err();
    for found in [0, 100, MAX_TOTAL_BYTES + ALIGNMENT] {
        let policy = ChunkPolicy {
            default_chunk: found,
            ..ChunkPolicy::default()
        };
        assert_eq!(refused(policy), PlanError::DefaultChunk { found });
    }
    for growth in [0.9, 17.0, f64::INFINITY] {
        let policy = ChunkPolicy {
            growth,
            ..ChunkPolicy::default()
        };
        assert_eq!(refused(policy), PlanError::Growth { found: growth });
    }
    let not_a_number = ChunkPolicy {
        growth: f64::NAN,
        ..ChunkPolicy::default()
    };
    assert!(matches!(refused(not_a_number), PlanError::Growth { .. }));
}

#[test]
fn the_maximum_sizes_do_not_overflow() {
    let half = MAX_TOTAL_BYTES / 2;
    for growth in [1.0, 16.0] {
        let policy = ChunkPolicy {
            growth,
            default_chunk: MAX_TOTAL_BYTES,
            ..policy(1, 0)
        };
        let mut allocator = ChunkAllocator::new(policy).unwrap();
        for records in [
            &[record(0, 0, half), record(0, 0, half)][..],
            &[record(0, 0, 1)],
        ] {
            allocator.plan(records).unwrap().validate(records).unwrap();
        }
    }
}

/// The keep limit may force a release even if the allocator's [`Excess`] is empty. It is empty if the largest request of the series needs
/// all memory that is held.
#[test]
fn a_small_request_after_a_release_has_a_chunk_that_is_large_enough() {
    let mut allocator = ChunkAllocator::new(ChunkPolicy {
        growth: 1.0,
        ..policy(2, 8 * MIB)
    })
    .unwrap();
    let large = record(0, 1, 44 * MIB);
    let requests = [
        vec![large],
        // Adds a second chunk, which the next two requests do not use.
        vec![large, record(0, 1, 17 * MIB / 4)],
        vec![large],
        // This request begins a series of requests that need less memory than is held. It is also the second request that does not use the
        // second chunk, so this chunk is released.
        vec![record(0, 1, 41 * MIB)],
        vec![record(0, 1, MIB)],
    ];
    for records in requests {
        let plan = allocator.plan(&records).unwrap();
        plan.validate(&records).unwrap();
    }
    assert_eq!(allocator.held().iter().sum::<u64>(), MIB);
}
