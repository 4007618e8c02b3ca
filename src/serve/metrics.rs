//! Metrics of a model. Each metric is a field, so updating it needs no lookup by name.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::Engine;

/// Upper bounds of histogram buckets for times, in seconds.
const SECONDS: [f64; 16] = [
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.035, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    10.0,
];

/// Upper bounds of histogram buckets for tokens per batch.
const TOKENS: [f64; 16] = [
    16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0,
    65536.0, 131_072.0, 262_144.0, 524_288.0,
];

/// Histogram. The values are times in seconds, except for [`Metrics::batch_tokens`].
#[derive(Debug)]
pub struct Histogram {
    ends: &'static [f64; SECONDS.len()],
    buckets: [AtomicU64; SECONDS.len()],
    count: AtomicU64,
    millionths: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self::of(&SECONDS)
    }
}

impl Histogram {
    fn of(ends: &'static [f64; SECONDS.len()]) -> Self {
        Self {
            ends,
            buckets: Default::default(),
            count: AtomicU64::new(0),
            millionths: AtomicU64::new(0),
        }
    }

    pub fn add(&self, value: f64) {
        let at = self.ends.partition_point(|&end| end < value);
        if let Some(bucket) = self.buckets.get(at) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        let millionths = (value * 1e6).max(0.0) as u64;
        self.millionths.fetch_add(millionths, Ordering::Relaxed);
    }

    /// Returns each upper bound with the number of values at or below it, then the total count and the sum.
    pub fn read(&self) -> (Vec<(f64, u64)>, u64, f64) {
        let mut below = 0;
        let ends = self.ends.iter().zip(&self.buckets).map(|(&end, n)| {
            below += n.load(Ordering::Relaxed);
            (end, below)
        });
        let ends = ends.collect();
        let sum = self.millionths.load(Ordering::Relaxed) as f64 / 1e6;
        (ends, self.count.load(Ordering::Relaxed), sum)
    }
}

/// Metrics of one device of a model.
#[derive(Debug, Default)]
pub struct LaneMetrics {
    /// Name of the device.
    pub device: String,
    /// Times of the batches, without the time that a batch waits for earlier batches.
    pub seconds: Histogram,
    pub weight_bytes: AtomicU64,
    /// Bytes of the KV cache in use.
    pub cache_bytes: AtomicU64,
    /// Current memory limit for a batch's intermediate tensors, in bytes.
    pub batch_bytes: AtomicU64,
}

/// Metrics of one model.
#[derive(Debug, Default)]
pub struct Metrics {
    pub tokenize: Histogram,
    pub queue: Histogram,
    pub device: Histogram,
    pub tokens: AtomicU64,
    /// Time to serialize responses.
    pub serialize: Histogram,
    pub batch_tokens: Histogram,
    /// Metrics of the model's devices, in the order of the devices.
    pub lanes: Vec<LaneMetrics>,
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
    /// Device time of the last batch divided by its estimated time, in thousandths.
    pub estimate_ratio: AtomicU64,
    pub cache: super::Lookups,
}

impl Metrics {
    /// Creates the metrics of a model that runs on the devices of these engines.
    pub(super) fn of<'a>(engines: impl IntoIterator<Item = &'a Engine>) -> Self {
        let lane = |engine: &Engine| LaneMetrics {
            device: engine.device().to_string(),
            weight_bytes: engine.weight_bytes().into(),
            ..LaneMetrics::default()
        };
        Self {
            batch_tokens: Histogram::of(&TOKENS),
            lanes: engines.into_iter().map(lane).collect(),
            ..Self::default()
        }
    }

    pub(super) fn count(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    pub(super) fn set(gauge: &AtomicU64, value: u64) {
        gauge.store(value, Ordering::Relaxed);
    }
}
