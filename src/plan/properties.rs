//! Experiments
use super::workloads::*;
use super::*;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

#[test]
#[ignore]
fn measure() {
    let mut runner = TestRunner::new_with_rng(
        Config::default(),
        TestRng::deterministic_rng(RngAlgorithm::ChaCha),
    );
    for kind in 0..2 {
        for name in ["arena", "chunks-fresh", "turbo", "gsoc"] {
            let mut runner = runner.clone();
            let mut ratios = vec![];
            let t = std::time::Instant::now();
            let mut spent = std::time::Duration::ZERO;
            for _ in 0..2000 {
                let r = if kind == 0 {
                    random_graph(1..150)
                        .new_tree(&mut runner)
                        .unwrap()
                        .current()
                } else {
                    random_lifetimes(1..150)
                        .new_tree(&mut runner)
                        .unwrap()
                        .current()
                };
                let t = std::time::Instant::now();
                let f = match name {
                    "arena" => pack::search(&pack::items(&r), r.len(), &[]).open_top as f64,
                    "chunks-fresh" => {
                        ChunkAllocator::default().plan(&r).unwrap().footprint() as f64
                            - (2 << 20) as f64
                    }
                    "turbo" => Turbo::new().plan(&r).unwrap().footprint() as f64 - (2 << 20) as f64,
                    _ => Gsoc::new().plan(&r).unwrap().footprint() as f64,
                };
                spent += t.elapsed();
                let lb = lower_bound(&r) as f64;
                if lb > 0. {
                    ratios.push(f / lb);
                }
            }
            ratios.sort_by(f64::total_cmp);
            let q = |p: f64| ratios[((ratios.len() - 1) as f64 * p) as usize];
            println!(
                "kind {kind} {name}: p50 {:.4} p90 {:.4} p99 {:.4} max {:.4}  {:?}/plan",
                q(0.5),
                q(0.9),
                q(0.99),
                q(1.0),
                spent / 2000
            );
            let _ = t;
        }
    }
    for shape in [BASE, BASE_UNFUSED] {
        for name in ["arena", "turbo", "gsoc"] {
            let mut worst: f64 = 0.0;
            let mut w2: f64 = 0.0;
            for batch in [1, 4, 20] {
                for len in (1..=512).step_by(7) {
                    let (_, r) = encoder(shape, batch, len);
                    let f = match name {
                        "arena" => pack::search(&pack::items(&r), r.len(), &[]).open_top as f64,
                        "turbo" => {
                            Turbo::new().plan(&r).unwrap().footprint() as f64 - (2 << 20) as f64
                        }
                        _ => Gsoc::new().plan(&r).unwrap().footprint() as f64,
                    };
                    worst = worst.max(f / lower_bound(&r) as f64);
                    w2 += f / lower_bound(&r) as f64;
                }
            }
            println!(
                "{name} {} worst {worst} mean {}",
                encoder(shape, 1, 1).1.len(),
                w2 / (3. * 74.)
            );
        }
    }
    let _ = &mut runner;
}
