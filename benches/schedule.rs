//! What schedulers take: a decision over 10,000 requests that wait, and a second of simulated load. A decision is to take at
//! most a hundredth of its batch's time; an H200 computes BERT-base's batches of 5,000 tokens in 1.5 ms.

use std::hint::black_box;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use gemmule::{
    schedule::{CostTable, Desk, Micros, Settings, scheduler},
    simulate::{Devices, Load, simulate},
};

const WAITING: usize = 10_000;

fn costs() -> CostTable {
    CostTable::parse(include_str!("../examples/costs.ron")).expect("the example is sound")
}

fn load(rate: f64, requests: usize, deadlines: Option<(Micros, Micros)>) -> Load {
    Load {
        rate,
        requests,
        lengths: "normal:5,500,250,90".parse().expect("these are lengths"),
        steps: 1,
        deadlines,
        seed: 0,
    }
}

fn decision(c: &mut Criterion) {
    let costs = costs();
    let mut group = c.benchmark_group("decision");
    let far = (Micros(1_000_000_000), Micros(9_000_000_000));
    let arrivals = load(1e6, WAITING, Some(far)).arrivals();
    for name in ["packed", "concat-das", "slotted-das"] {
        // A scheduler that has seen the requests come, as it does one after another.
        let seen = || {
            let mut scheduler = scheduler(name, &Settings::default()).expect("it is there");
            let mut desk = Desk::new(&[u64::MAX], 1);
            for waiting in &arrivals {
                desk.arrive(*waiting);
            }
            let first = desk.decide(Micros(0), &mut *scheduler, &costs);
            black_box(first).expect("a decision");
            desk.finished(Micros(1), 0, &[], true, &mut *scheduler);
            (desk, scheduler)
        };
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter_batched_ref(
                seen,
                |(desk, scheduler)| desk.decide(Micros(2), &mut **scheduler, &costs),
                BatchSize::LargeInput,
            );
        });
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
        let arrivals = load(rate, 20_000, None).arrivals();
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
