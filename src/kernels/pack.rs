//! Packing of a padded batch by prefix sums (ByteTransformer III.D, figure 4).
//!
//! There are two launches: [`PackScan`] counts every sequence's tokens and computes offsets from the counts, and [`PackTokens`] moves the
//! tokens to these offsets. `longest` is the padded length, which is the number of columns of the mask. Both kernels support masks with
//! holes (a zero between ones). Callers decide whether to accept such masks.

use serde::{Deserialize, Serialize};

use super::{
    Case, Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance,
    rows::{COPIED, blocks, count, offsets, one_per, read, read_meta, write},
};
use crate::{
    machine::Machine,
    ops::BatchInput,
    tensor::{Element, Extents, Shape, Symbol},
};

/// `mask [batch, longest]` → `cu_lens [batch + 1]`, `pair_offsets [batch + 1]`. A warp counts the tokens of a sequence, and one CTA scans
/// the counts.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PackScan;

/// `mask`, `padded_ids`, `padded_types [batch, longest]`, `cu_lens [batch + 1]` → `ids`, `types`, `positions [tokens]`. One warp moves the
/// tokens of a sequence.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PackTokens;

/// Threads of the scan's CTA: the max number that CUDA allows, because a single CTA counts the whole mask.
const SCAN_THREADS: u32 = 1024;

/// Threads of a CTA that moves tokens: a warp for each of four sequences.
const MOVE_THREADS: u32 = 128;

/// `[batch, longest]`.
fn padded() -> Shape {
    Shape::new([Symbol::Batch.into(), Symbol::Longest.into()])
}

/// Returns the rows of the mask.
fn sentences<'a>(mask: &'a HostTensor, extents: &Extents) -> impl Iterator<Item = &'a [i64]> {
    mask.index().chunks_exact(extents.longest as usize)
}

/// Returns the standard batches and two more. The first has more sequences than the scan has threads, so the scan has several steps and
/// carries its sum from each step to the next. The second has lengths around the 32 lanes of a warp and the 128 columns of a step.
fn cases() -> Vec<Case> {
    let many: Vec<u32> = (0..2500).map(|i| 1 + i * 7 % 5).collect();
    let mut cases = Case::standard();
    cases.push(Case::new("many", &many));
    cases.push(Case::new("edges", &[31, 32, 33, 127, 128, 129, 300]));
    cases
}

impl Kernel for PackScan {
    fn symbol(&self) -> String {
        "pack_scan".into()
    }

    fn template(&self) -> &'static str {
        "pack_scan"
    }

    fn constants(&self) -> Constants {
        Constants::new()
    }

    fn params(&self) -> Vec<Param> {
        vec![
            read_meta("mask", BatchInput::Mask, padded()),
            write("cu_lens", BatchInput::CuLens.element(), offsets()),
            write("pair_offsets", BatchInput::PairOffsets.element(), offsets()),
            count(Symbol::Batch),
            count(Symbol::Longest),
        ]
    }

    fn launch(&self, _: &Extents, _: &Machine) -> Launch {
        Launch {
            grid: [1, 1, 1],
            threads: SCAN_THREADS,
            shared_bytes: 0,
        }
    }

    fn threads(&self) -> u32 {
        SCAN_THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [mask] = reads else {
            unreachable!("the parameter list has one operand")
        };
        let (mut tokens, mut pairs) = (vec![0], vec![0]);
        let (mut n_tokens, mut n_pairs) = (0, 0);
        for sentence in sentences(mask, extents) {
            let n = sentence.iter().filter(|&&m| m != 0).count() as i64;
            n_tokens += n;
            n_pairs += n * n;
            tokens.push(n_tokens);
            pairs.push(n_pairs);
        }
        vec![HostTensor::Index(tokens), HostTensor::Index(pairs)]
    }

    fn cases(&self) -> Vec<Case> {
        cases()
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance {
            reason: "whole numbers",
            ..COPIED
        }
    }
}

impl Kernel for PackTokens {
    fn symbol(&self) -> String {
        "pack_tokens".into()
    }

    fn template(&self) -> &'static str {
        "pack_tokens"
    }

    fn constants(&self) -> Constants {
        Constants::new()
    }

    fn params(&self) -> Vec<Param> {
        let tokens = || one_per(Symbol::Tokens);
        vec![
            read_meta("mask", BatchInput::Mask, padded()),
            read("padded_ids", Element::I32, padded(), Fill::Below(1000)),
            read("padded_types", Element::I32, padded(), Fill::Below(2)),
            read_meta("cu_lens", BatchInput::CuLens, offsets()),
            write("ids", Element::I32, tokens()),
            write("types", Element::I32, tokens()),
            write("positions", Element::I32, tokens()),
            count(Symbol::Batch),
            count(Symbol::Longest),
        ]
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        Launch {
            grid: [blocks(extents.batch, (MOVE_THREADS / 32).into()), 1, 1],
            threads: MOVE_THREADS,
            shared_bytes: 0,
        }
    }

    fn threads(&self) -> u32 {
        MOVE_THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [mask, padded_ids, padded_types, _cu_lens] = reads else {
            unreachable!("the parameter list has four operands")
        };
        let (mut ids, mut types, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        for (row, sentence) in sentences(mask, extents).enumerate() {
            let valid = (0..sentence.len()).filter(|&column| sentence[column] != 0);
            for (position, column) in valid.enumerate() {
                let from = row * sentence.len() + column;
                ids.push(padded_ids.index()[from]);
                types.push(padded_types.index()[from]);
                positions.push(position as i64);
            }
        }
        [ids, types, positions].map(HostTensor::Index).into()
    }

    fn cases(&self) -> Vec<Case> {
        cases()
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance {
            reason: "whole numbers",
            ..COPIED
        }
    }
}

/// Instances for the device check and the compile tests.
pub fn representative() -> Vec<KernelSpec> {
    vec![PackScan.into(), PackTokens.into()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_batch_of_figure_4_is_packed() {
        // Sequences of 5, 2 and 4 tokens, padded to 5 (ByteTransformer, figure 4).
        let extents = Extents::of(&[5, 2, 4]).unwrap();
        let mask = HostTensor::Index(vec![1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0]);
        let out = PackScan.reference(&extents, &[&mask]);
        assert_eq!(out[0].index(), [0, 5, 7, 11]);
        assert_eq!(out[1].index(), [0, 25, 29, 45]);

        let padded_ids = HostTensor::Index((100..115).collect());
        let padded_types = HostTensor::Index((0..15).map(|i| i % 2).collect());
        let reads = [&mask, &padded_ids, &padded_types, &out[0]];
        let packed = PackTokens.reference(&extents, &reads);
        let ids = [100, 101, 102, 103, 104, 105, 106, 110, 111, 112, 113];
        assert_eq!(packed[0].index(), ids);
        assert_eq!(packed[1].index(), ids.map(|id| id % 2));
        assert_eq!(packed[2].index(), [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3]);
    }

    #[test]
    fn a_sequence_has_one_warp_and_the_scan_has_one_cta() {
        let extents = Extents::of(&[1; 9]).unwrap();
        assert_eq!(
            PackTokens
                .launch(&extents, &crate::machine::testing::hopper())
                .grid,
            [3, 1, 1]
        );
        assert_eq!(
            PackScan
                .launch(&extents, &crate::machine::testing::hopper())
                .grid,
            [1, 1, 1]
        );
    }

    #[test]
    fn the_offsets_have_one_more_entry_than_the_batch() {
        let names: Vec<&str> = PackScan.params().iter().map(|p| p.name).collect();
        assert_eq!(
            names,
            ["mask", "cu_lens", "pair_offsets", "batch", "longest"]
        );
        assert_eq!(offsets().to_string(), "[1 + batch]");
    }
}
