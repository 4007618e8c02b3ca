//! Benchmarks of schedulers: the time of one decision with 10,000 waiting requests (long or short), and the time to simulate the serving of
//! 20,000 requests. A decision should take at most 1 % of the time of its batch. An H200 computes a BERT-base batch of 5,000 tokens in
//! 1.5 ms.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use gemmule::{
    schedule::{CostTable, Micros, SchedulerState, Settings, scheduler},
    simulate::{Devices, Load, simulate},
};

const WAITING: usize = 10_000;

fn costs() -> CostTable {
    CostTable::parse(include_str!("../examples/costs.ron")).expect("the example is sound")
}

const LENGTHS: &str = "normal:5,500,250,90";
const SHORT: &str = "normal:3,100,20,4.5";

fn load(lengths: &str, rate: f64, n: usize, deadlines: Option<(Micros, Micros)>) -> Load {
    Load {
        rate,
        requests: n,
        lengths: lengths.parse().expect("these are lengths"),
        steps: 1,
        deadlines,
        seed: 0,
    }
}

fn decision(c: &mut Criterion) {
    // Approximate costs of BERT-base on an H200, in microseconds. With them, the scheduler `packed` plans batches that take about 1 ms if
    // requests have deadlines, and about 4 ms otherwise.
    let costs = CostTable::parse(
        "(about: \"\", packed: (x: [32, 512, 1024, 2048, 4096, 16384], y: [16, 512], values: [[140, 150], [200, 230], \
        [330, 360], [620, 650], [1200, 1300], [4800, 5200]]), overhead: 20.0, multiple: 64)",
    )
    .expect("a sound table");
    let mut group = c.benchmark_group("decision");
    let far = (Micros(1_000_000_000), Micros(9_000_000_000));
    for (lengths, case, tenants) in [
        (LENGTHS, "250", 1),
        (SHORT, "20", 1),
        (LENGTHS, "250 of 64 tenants", 64),
    ] {
        let mut arrivals = load(lengths, 1e6, 4 * WAITING, Some(far)).arrivals();
        for (at, waiting) in arrivals.iter_mut().enumerate() {
            waiting.tenant = at as u32 % tenants;
        }
        for name in ["packed", "concat-das", "slotted-das"] {
            let mut of = scheduler(name, &Settings::default()).expect("it is there");
            let mut scheduling = SchedulerState::new(&[u64::MAX], 1);
            let mut next = arrivals.iter().cycle();
            let mut now = Micros(0);
            // Refill the queue to `WAITING` requests before each decision, like in a service under full load.
            let mut come = |scheduling: &mut SchedulerState| {
                while scheduling.waiting().len() < WAITING {
                    scheduling.arrive(*next.next().expect("it goes on"));
                }
            };
            group.bench_function(BenchmarkId::new(name, case), |b| {
                b.iter_custom(|n| {
                    let mut took = std::time::Duration::ZERO;
                    for _ in 0..n {
                        come(&mut scheduling);
                        let began = std::time::Instant::now();
                        let decision = scheduling.decide(now, &mut *of, &costs);
                        let decision = black_box(decision).expect("a decision");
                        took += began.elapsed();
                        for planned in &decision.run {
                            now = now.plus(Micros(planned.estimate.0 % 7));
                            scheduling.finished(now, 0, &[], true, &mut *of);
                        }
                    }
                    took
                });
            });
        }
    }
    group.finish();
}

fn simulation(c: &mut Criterion) {
    let costs = costs();
    let devices = Devices {
        costs: &costs,
        bytes: vec![u64::MAX],
        depth: 2,
    };
    let mut group = c.benchmark_group("simulation");
    for rate in [100.0, 400.0] {
        let arrivals = load(LENGTHS, rate, 20_000, None).arrivals();
        group.throughput(Throughput::Elements(arrivals.len() as u64));
        for name in ["packed", "dp", "concat-das"] {
            group.bench_function(BenchmarkId::new(name, rate), |b| {
                b.iter(|| {
                    let mut of = scheduler(name, &Settings::default()).expect("it is there");
                    black_box(simulate(&arrivals, &mut *of, &devices)).expect("it ends")
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, decision, simulation);
criterion_main!(benches);
