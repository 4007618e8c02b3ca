//! Benchmarks of memory planning, which runs before the launches of each batch. They time a plan for the 87 intermediate tensors of a
//! 12-layer encoder, a plan for 90 tensors with random lifetimes (for which the search does not end early), and the lookup of a cached
//! plan.
//!
//! Targets: at most 100 µs for a plan, at most 2 µs for a lookup.

use std::hint::black_box;
use std::num::NonZeroUsize;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use gemmule::plan::{Allocator, ChunkAllocator, Gsoc, PlanCache, PlanError, Turbo, UsageRecord};

/// Returns the lifetimes and sizes of the intermediate tensors of a 12-layer post-norm encoder on `tokens` tokens, with fused kernels,
/// width 768 and two bytes per value.
fn encoder(tokens: u64) -> Vec<UsageRecord> {
    let record = |first_op, last_op, width: u64| UsageRecord {
        first_op,
        last_op,
        bytes: 2 * tokens * width,
    };
    let mut records = vec![record(0, 1, 768), record(1, 5, 768)];
    for layer in 0..12 {
        let op = 2 + 7 * layer;
        records.extend([
            record(op, op + 1, 2304),     // query, key and value
            record(op + 1, op + 2, 768),  // context
            record(op + 2, op + 3, 768),  // attention output
            record(op + 3, op + 6, 768),  // first norm, also the residual
            record(op + 4, op + 5, 3072), // feed-forward, inner
            record(op + 5, op + 6, 768),  // feed-forward, outer
            record(op + 6, op + 10, 768), // second norm, also the residual of the next layer
        ]);
    }
    records.push(record(86, 86, 1));
    records
}

/// Returns `n_records` tensors with random lifetimes and sizes, the same in every run.
fn random(n_records: usize) -> Vec<UsageRecord> {
    let mut state = 20_210_227u64;
    let mut next = |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    (0..n_records)
        .map(|_| {
            let first_op = next(100) as u32;
            UsageRecord {
                first_op,
                last_op: first_op + next(30) as u32,
                bytes: (1 << next(25)) + next(1 << 20),
            }
        })
        .collect()
}

fn plans(c: &mut Criterion) {
    let workloads = [("encoder_87", encoder(512)), ("random_90", random(90))];
    for (name, records) in &workloads {
        c.bench_function(&format!("plan/chunks_fresh/{name}"), |b| {
            let plan = |mut fresh: ChunkAllocator| fresh.plan(black_box(records));
            b.iter_batched(ChunkAllocator::default, plan, BatchSize::SmallInput);
        });
        c.bench_function(&format!("plan/chunks_again/{name}"), |b| {
            let mut allocator = ChunkAllocator::default();
            b.iter(|| allocator.plan(black_box(records)));
        });
        c.bench_function(&format!("plan/turbo/{name}"), |b| {
            let mut allocator = Turbo::new();
            b.iter(|| allocator.plan(black_box(records)));
        });
        c.bench_function(&format!("plan/gsoc/{name}"), |b| {
            let mut allocator = Gsoc::new();
            b.iter(|| allocator.plan(black_box(records)));
        });
    }
    c.bench_function("plan/chunks_growing/encoder_87", |b| {
        // A chunk for 470 tokens per sequence is too small for 512, despite its headroom. The plan arranges the tensors in this chunk
        // again, and adds a second chunk.
        let (shorter, records) = (encoder(20 * 470), encoder(20 * 512));
        let mut held = ChunkAllocator::default();
        held.plan(&shorter).expect("the records are well formed");
        let mut grown = held.clone();
        grown.plan(&records).expect("the records are well formed");
        assert!(grown.last_request().newly_allocated > 0);
        let plan = |mut held: ChunkAllocator| held.plan(black_box(&records));
        b.iter_batched(|| held.clone(), plan, BatchSize::SmallInput);
    });
}

fn lookups(c: &mut Criterion) {
    let mut cache = PlanCache::new(NonZeroUsize::new(1024).expect("1024 is not zero"));
    let mut allocator = ChunkAllocator::default();
    let key = |tokens: u64| (tokens, 1, tokens, tokens * tokens);
    // Alternate long and short lengths. After many short batches in a row, the allocator would release memory, and the cached plans that
    // use it would have to be made again.
    let lengths = (0..512u64).map(|i| 512 - (i * 199) % 512);
    let mut lookup = |tokens: u64| {
        let records = || Ok::<_, PlanError>(encoder(tokens));
        cache.plan(black_box(key(tokens)), &mut allocator, records)
    };
    for tokens in lengths.clone() {
        lookup(tokens).expect("the records are well formed");
    }
    let mut stream = lengths.cycle();
    c.bench_function("plan/cached", |b| b.iter(|| stream.next().map(&mut lookup)));
    assert_eq!(cache.n_misses(), 512, "what was timed are lookups");
}

criterion_group!(benches, plans, lookups);
criterion_main!(benches);
