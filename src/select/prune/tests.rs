use super::*;
use crate::{
    kernels::KernelSpec,
    machine::testing::{hopper, usual},
    select::testing::{encoder, question},
    tensor::DType,
};

/// Returns the cycles of all chains at one sample, each multiplied by the number of its occurrences. `covers` holds the cover of each chain
/// with its cycles.
fn total(edges: &[Edges], covers: &[(f64, Cover)]) -> f64 {
    let each = edges.iter().zip(covers);
    each.map(|(edges, (cycles, _))| cycles * edges.times as f64)
        .sum()
}

#[test]
fn every_kept_kernel_is_worth_it_and_the_total_loss_is_small() {
    for (machine, width, dtype) in [
        (hopper(), 768, DType::F16),
        (hopper(), 384, DType::F16),
        (hopper(), 1024, DType::BF16),
        (hopper(), 768, DType::F32),
        (usual(), 768, DType::F16),
        (usual(), 72, DType::F32),
    ] {
        let chains = encoder(width, 4 * width, dtype);
        let question = question(&chains, &machine);
        let (kernels, edges) = question.edges();
        let is_kept = prune(&edges, &kernels);
        let n_kept = is_kept.iter().filter(|&&kept| kept).count();
        let n = is_kept.len();
        assert!(n_kept >= 4 && n_kept < n, "{n_kept} of {n}");
        let samples = kernels.times_on(&coarse_rows());
        let mut kept = samples.clone();
        remove(&mut kept, &is_kept);
        let none = vec![1.0; samples.len()];
        let everything = Pruning::new(&edges, samples, &none, n);
        let best: Vec<f64> = everything.covers.iter().map(|c| total(&edges, c)).collect();
        let mut pruning = Pruning::new(&edges, kept, &best, n);
        // Each kept kernel is used at some number of rows.
        assert_eq!(pruning.used(), is_kept);
        let mut useless = Vec::new();
        for kernel in (0..n).filter(|&kernel| is_kept[kernel]) {
            let worth = pruning.loss_without(kernel);
            if worth < WORTH_A_KERNEL {
                let symbol = kernels.spec(kernel).as_kernel().symbol();
                useless.push(format!("{symbol} saves {worth}"));
            }
        }
        assert!(useless.is_empty(), "{width} {dtype}: {useless:?}");
        let lost = pruning.covers.iter().zip(&best);
        let lost: Vec<f64> = lost
            .map(|(c, best)| total(&edges, c) / best - 1.0)
            .collect();
        let mean = lost.iter().sum::<f64>() / lost.len() as f64;
        let worst = lost.iter().copied().fold(0.0, f64::max);
        assert!(
            mean < 0.01 && worst < 0.08,
            "{width} {dtype}: {mean}, at worst {worst}"
        );
    }
}

#[test]
fn timings_affect_only_their_kernel_within_an_octave() {
    const AT: u64 = 1000;
    let machine = hopper();
    let chains = encoder(768, 3072, DType::F16);
    let untimed = question(&chains, &machine);
    let (kernels, _) = untimed.edges();
    let is_wide = |kernel: &usize| match kernels.spec(*kernel) {
        KernelSpec::GemmWgmma(gemm) => gemm.problem.n == 3072,
        _ => false,
    };
    let numbers = 0..kernels.candidates.len();
    let slow = numbers.clone().find(is_wide).expect("there is one");
    let kernel = kernels.spec(slow).as_kernel();
    let cycles = kernel.cycles(AT, &machine).expect("it has an estimate");
    let mut timings = Timings::default();
    let us = 3.0 * cycles / f64::from(machine.clock_mhz);
    timings.add(&kernel.symbol(), AT, us);
    let mut timed = question(&chains, &machine);
    timed.timings = Some(&timings);
    let (corrected, _) = timed.edges();
    let rows = [
        1,
        AT / 2,
        AT / 2 + 1,
        AT - 1,
        AT,
        AT + 1,
        2 * AT - 1,
        2 * AT,
        16_384,
    ];
    let pairs = kernels
        .times_on(&rows)
        .into_iter()
        .zip(corrected.times_on(&rows));
    for ((rows, before), (_, after)) in pairs {
        for number in numbers.clone() {
            let is_near = number == slow && rows > AT / 2 && rows < 2 * AT;
            assert_eq!(before[number] != after[number], is_near, "{rows}");
        }
        if rows == AT {
            assert!((after[slow] / before[slow] - 3.0).abs() < 1e-9);
        }
    }
}

#[test]
fn samples_ascend_to_the_maximum_rows() {
    let rows = coarse_rows();
    assert!(rows.windows(2).all(|pair| pair[0] < pair[1]));
    assert_eq!((rows.first(), rows.last()), (Some(&1), Some(&MAX_ROWS)));
}
