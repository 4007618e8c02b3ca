//! What a service counts. Every handle is a field: nothing is looked up by name while it serves.

use std::sync::atomic::{AtomicU64, Ordering};

/// Upper ends of the buckets of times, in seconds.
const SECONDS: [f64; 16] = [
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.035, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    10.0,
];

/// A distribution of times, in seconds.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; SECONDS.len()],
    count: AtomicU64,
    micros: AtomicU64,
}

impl Histogram {
    pub fn add(&self, seconds: f64) {
        let at = SECONDS.partition_point(|&end| end < seconds);
        if let Some(bucket) = self.buckets.get(at) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        let micros = (seconds * 1e6).max(0.0) as u64;
        self.micros.fetch_add(micros, Ordering::Relaxed);
    }

    /// Upper ends with how many times lie at or below them, then the count and the sum in seconds.
    pub fn read(&self) -> (Vec<(f64, u64)>, u64, f64) {
        let mut below = 0;
        let ends = SECONDS.iter().zip(&self.buckets).map(|(&end, n)| {
            below += n.load(Ordering::Relaxed);
            (end, below)
        });
        let ends = ends.collect();
        let sum = self.micros.load(Ordering::Relaxed) as f64 / 1e6;
        (ends, self.count.load(Ordering::Relaxed), sum)
    }
}

/// What one model's service has done so far.
#[derive(Debug, Default)]
pub struct Metrics {
    pub tokenize: Histogram,
    pub queue: Histogram,
    pub device: Histogram,
    pub tokens: AtomicU64,
    pub batches: AtomicU64,
    pub batch_sequences: AtomicU64,
    pub failed_batches: AtomicU64,
    pub expired: AtomicU64,
    pub hopeless: AtomicU64,
    pub too_large: AtomicU64,
    pub overloaded: AtomicU64,
    pub cancelled: AtomicU64,
    pub queue_tokens: AtomicU64,
    pub queue_requests: AtomicU64,
    /// Device time over its estimate, in thousandths, of the last batch.
    pub estimate_ratio: AtomicU64,
    pub cache: super::Lookups,
}

impl Metrics {
    pub(super) fn count(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    pub(super) fn set(gauge: &AtomicU64, value: u64) {
        gauge.store(value, Ordering::Relaxed);
    }
}
