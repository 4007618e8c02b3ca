use std::{collections::HashSet, sync::Arc};

use super::*;
use crate::tensor::Element;
use crate::{
    kernels::{
        HostTensor,
        attention::{MhaLongContext, MhaLongReduce, MhaLongScores, representative},
        trial::Trial,
    },
    ops::HeadView,
};

/// Test operands, in the types that kernels take.
enum Held {
    Real(Vec<f32>),
    I32(Vec<i32>),
    I64(Vec<i64>),
}

impl Held {
    fn of(element: Element, tensor: &HostTensor) -> Self {
        match (tensor, element) {
            (HostTensor::Real(x), _) => Held::Real(x.clone()),
            (HostTensor::Index(x), Element::I64) => Held::I64(x.clone()),
            (
                HostTensor::Index(x),
                Element::I8 | Element::I32 | Element::Value(_) | Element::Scaled(_) | Element::E4m3,
            ) => Held::I32(x.iter().map(|&x| x as i32).collect()),
        }
    }

    fn read(&self) -> Read<'_> {
        match self {
            Held::Real(x) => Read::Real(x),
            Held::I32(x) => Read::I32(x),
            Held::I64(x) => Read::I64(x),
        }
    }
}

#[test]
fn grouped_attention_agrees_with_its_references_on_their_cases() {
    let f32_only = |k: &KernelSpec| match k {
        KernelSpec::MhaLongScores(k) => k.dtype == F32 && k.head <= 80,
        KernelSpec::MhaLongContext(k) => k.dtype == F32 && k.head <= 80,
        KernelSpec::MhaLongReduce(k) => k.heads <= 3,
        _ => false,
    };
    let kernels: Vec<KernelSpec> = representative().into_iter().filter(f32_only).collect();
    assert!(kernels.len() > 8, "{}", kernels.len());
    agree(kernels);
}

/// Maximum number of tokens of a case. Larger cases test the tiles and clusters of GPUs, and would take long on a CPU.
const MAX_TOKENS: u64 = 300;

/// Compares kernels with their references, in the cases with at most [`MAX_TOKENS`] tokens.
pub(super) fn agree(kernels: Vec<KernelSpec>) {
    let mut seen = HashSet::new();
    for spec in kernels {
        let kernel = spec.as_kernel();
        // Kernels with equal definitions have the same CPU implementation and the same reference.
        if !seen.insert(kernel.definition()) {
            continue;
        }
        let trials = Trial::all(kernel, 11, MAX_TOKENS).unwrap();
        assert!(!trials.is_empty(), "{}", kernel.symbol());
        for (case, trial) in trials {
            // The executor rounds packed weights when it loads them, so they are rounded here.
            let stored = |&(element, ref tensor): &(Element, Arc<HostTensor>)| match (
                element,
                kernel.weight(),
            ) {
                (Element::Scaled(format), Some([_, k])) => {
                    let values = format.quantize(tensor.real(), k as usize).values();
                    Held::of(element, &HostTensor::Real(values))
                }
                _ => Held::of(element, tensor),
            };
            let held: Vec<Held> = trial.reads.iter().map(stored).collect();
            let reads: Vec<Read<'_>> = held.iter().map(Held::read).collect();
            let mut written: Vec<Vec<f32>> = trial
                .writes
                .iter()
                .map(|(_, _, want)| vec![f32::NAN; want.real().len()])
                .collect();
            let mut writes: Vec<&mut [f32]> = written.iter_mut().map(Vec::as_mut_slice).collect();
            run(&spec, &trial.extents, &reads, &mut writes).unwrap();
            for ((_, name, want), got) in trial.writes.iter().zip(&written) {
                let difference = kernel.tolerance().compare(got, want.real());
                assert!(
                    difference.worst <= 1.0,
                    "{} on {}: `{name}` {difference:?}",
                    kernel.symbol(),
                    case.name
                );
            }
        }
    }
}

const WIDTH: u32 = 16;
const OWN_ROWS: HeadView = HeadView::TokenMajor {
    offset: 0,
    stride: WIDTH,
};

fn specs() -> (MhaLongScores, MhaLongReduce, MhaLongContext) {
    let (heads, head) = (2, 8);
    let scores = MhaLongScores {
        heads,
        head,
        scale: 1.0,
        q: OWN_ROWS,
        k: OWN_ROWS,
        dtype: F32,
    };
    let context = MhaLongContext {
        heads,
        head,
        v: OWN_ROWS,
        dtype: F32,
    };
    (scores, MhaLongReduce { heads }, context)
}

#[test]
fn tensors_between_the_grouped_products_must_have_their_room() {
    let batch = Batch::new(&[3, 5]);
    let (scores, reduce, context) = specs();
    let x = noise(batch.tokens() * WIDTH as usize, 1);
    let (cu_lens, pairs) = (Read::I32(&batch.cu_lens), Read::I64(&batch.pair_offsets));
    // There are 2 heads, 34 pairs and 8 tokens.
    let (mut room, mut partials) = (vec![0.0; 2 * (34 + 64)], vec![0.0; 2 * 8 * 2]);
    let reads = [Read::Real(&x), Read::Real(&x), cu_lens, pairs];
    let run_scores = |room: &mut [f32], partials: &mut [f32]| {
        run(
            &KernelSpec::from(scores.clone()),
            &batch.extents,
            &reads,
            &mut [room, partials],
        )
    };
    run_scores(&mut room, &mut partials).unwrap();
    insta::assert_snapshot!(run_scores(&mut room[1..], &mut partials).unwrap_err(), @"mha_long_scores_simt: `out` has 195 elements; expected 196");
    insta::assert_snapshot!(run_scores(&mut room, &mut partials[2..]).unwrap_err(), @"mha_long_scores_simt: `partials` has 30 elements; expected 32");
    let one = run(
        &KernelSpec::from(scores.clone()),
        &batch.extents,
        &reads,
        &mut [&mut room],
    );
    insta::assert_snapshot!(one.unwrap_err(), @"mha_long_scores_simt writes two tensors; 1 were given");
    let mut statistics = vec![0.0; 2 * 8 * 2];
    let short = run(
        &KernelSpec::from(reduce),
        &batch.extents,
        &[Read::Real(&partials[1..]), cu_lens, pairs],
        &mut [&mut statistics],
    );
    insta::assert_snapshot!(short.unwrap_err(), @"mha_long_reduce: `partials` has 31 elements; expected 32");
    let reads = [
        Read::Real(&room[2..]),
        Read::Real(&statistics),
        Read::Real(&x),
        cu_lens,
        pairs,
    ];
    let mut out = x.clone();
    let short = run(
        &KernelSpec::from(context),
        &batch.extents,
        &reads,
        &mut [&mut out],
    );
    insta::assert_snapshot!(short.unwrap_err(), @"mha_long_context_simt: `scores` has 194 elements; expected 196");
}
