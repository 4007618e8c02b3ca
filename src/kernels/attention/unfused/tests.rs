use std::collections::BTreeSet;

use super::{super::*, ScoresPlan, visitor_launch};
use crate::{
    kernels::{Kernel, KernelSpec, trial::Trial},
    tensor::{DType, Extents},
};

fn columns(offset: u32, stride: u32) -> HeadView {
    HeadView::TokenMajor { offset, stride }
}

fn scores(heads: u32, head: u32, dtype: DType) -> AttentionScores {
    let plain = columns(0, heads * head);
    AttentionScores {
        heads,
        kv_heads: heads,
        head,
        scale: default_scale(head),
        q: plain,
        k: plain,
        dtype,
    }
}

fn context(heads: u32, head: u32, dtype: DType) -> AttentionContext {
    let plain = columns(0, heads * head);
    AttentionContext {
        heads,
        kv_heads: heads,
        head,
        v: plain,
        out: plain,
        dtype,
    }
}

#[test]
fn tensor_cores_take_16_bit_heads_whose_rows_start_at_16_bytes() {
    for dtype in [DType::F16, DType::BF16] {
        for head in (8..=256).step_by(8) {
            assert!(scores(3, head, dtype).tensor_cores(), "{head}");
            assert!(context(3, head, dtype).tensor_cores(), "{head}");
        }
        for head in [1, 4, 17, 100, 264] {
            assert!(!scores(3, head, dtype).tensor_cores(), "{head}");
            assert!(!context(3, head, dtype).tensor_cores(), "{head}");
        }
        for view in [columns(4, 128), columns(8, 100)] {
            for (q, k) in [(view, columns(0, 64)), (columns(0, 64), view)] {
                let kernel = scores(2, 32, dtype);
                assert!(!AttentionScores { q, k, ..kernel }.tensor_cores());
                let kernel = context(2, 32, dtype);
                let views = AttentionContext {
                    v: q,
                    out: k,
                    ..kernel
                };
                assert!(!views.tensor_cores());
            }
        }
    }
    assert!(!scores(12, 64, DType::F32).tensor_cores());
    assert!(!context(12, 64, DType::F32).tensor_cores());
}

#[test]
fn the_two_forms_have_different_templates_and_symbols() {
    let names = |kernel: &dyn Kernel| (kernel.template(), kernel.symbol());
    let (template, symbol) = names(&scores(12, 64, DType::F16));
    assert_eq!(template, "attention_scores");
    assert_eq!(symbol, "attention_scores_f16_h12x64");
    let (template, symbol) = names(&scores(12, 64, DType::F32));
    assert_eq!(template, "attention_scores_simt");
    assert_eq!(symbol, "attention_scores_simt_f32_h12x64");
    let (template, symbol) = names(&context(12, 64, DType::BF16));
    assert_eq!(template, "attention_context");
    assert_eq!(symbol, "attention_context_bf16_h12x64");
    let (template, symbol) = names(&context(3, 17, DType::BF16));
    assert_eq!(template, "attention_context_simt");
    assert_eq!(symbol, "attention_context_simt_bf16_h3x17");
}

#[test]
fn both_forms_of_both_kernels_are_represented_in_16_bits() {
    for dtype in [DType::F16, DType::BF16] {
        let templates: BTreeSet<&str> = super::representative(dtype)
            .iter()
            .map(|kernel| kernel.as_kernel().template())
            .collect();
        assert_eq!(templates.len(), 4, "{templates:?}");
    }
    let stages = |head| scores(1, head, DType::F16).plan().stages;
    assert_eq!([stages(160), stages(168)], [2, 1]);
}

#[test]
fn launches_fit_every_target_at_every_head_size() {
    let extents = Extents::of(&[7, 300]).expect("a batch");
    for head in (8..=256).step_by(8) {
        for dtype in [DType::F16, DType::BF16] {
            let (scores, context) = (scores(3, head, dtype), context(3, head, dtype));
            let ScoresPlan { tile, threads, .. } = scores.plan();
            assert_eq!(tile[0], threads / 2, "16 queries to a warp");
            assert_eq!(tile[1], 64, "two keys to a lane");
            for (kernel, launch) in [
                (
                    &scores as &dyn Kernel,
                    scores.launch(&extents, &crate::machine::testing::hopper()),
                ),
                (
                    &context,
                    context.launch(&extents, &crate::machine::testing::hopper()),
                ),
            ] {
                assert!(launch.shared_bytes <= 99 * 1024, "head {head}: {launch:?}");
                assert_eq!(launch.threads, kernel.threads());
            }
        }
    }
}

#[test]
fn a_grid_has_one_cta_per_tile_up_to_the_max() {
    let most =
        u64::from(visitor_launch(u64::MAX, 1, 32, 0, &crate::machine::testing::hopper()).grid[0]);
    for lens in [
        vec![1],
        vec![64],
        vec![65, 1, 1, 128, 63],
        (1..200).collect(),
    ] {
        let extents = Extents::of(&lens).expect("a batch");
        for heads in [1, 12] {
            for head in [32, 64, 128, 256] {
                let scores = scores(heads, head, DType::F16);
                let [rows, keys] = scores.plan().tile;
                let tiles = lens.iter().map(|n| n.div_ceil(rows) * n.div_ceil(keys));
                let total = u64::from(heads * tiles.sum::<u32>());
                let grid = scores
                    .launch(&extents, &crate::machine::testing::hopper())
                    .grid;
                assert!(u64::from(grid[0]) >= total.min(most), "{lens:?}");
                assert_eq!(grid[1..], [1, 1], "heads are part of a tile's number");
                let context = context(heads, head, DType::F16);
                let rows = context.plan().rows;
                let total = u64::from(heads * lens.iter().map(|n| n.div_ceil(rows)).sum::<u32>());
                let grid = context
                    .launch(&extents, &crate::machine::testing::hopper())
                    .grid;
                assert!(u64::from(grid[0]) >= total.min(most), "{lens:?}");
                assert_eq!(grid[1..], [1, 1], "heads are part of a tile's number");
            }
        }
    }
    // Without tensor cores, a launch has one thread per result: for each head, a score per pair, or 64 outputs per token.
    let extents = Extents::of(&[100]).expect("a batch");
    let launch = scores(3, 64, DType::F32).launch(&extents, &crate::machine::testing::hopper());
    assert_eq!(launch.grid, [40, 3, 1]);
    let launch = context(3, 64, DType::F32).launch(&extents, &crate::machine::testing::hopper());
    assert_eq!(launch.grid, [25, 3, 1]);
}

#[test]
fn a_warp_writes_each_score_of_a_row_once_and_pairs_where_they_are_aligned() {
    // Models `write_row` in `attention_scores.cu.tera` for a row that begins at element `start` of the tensor.
    const KEYS: u32 = 64;
    for start in 0..8u32 {
        for width in (1..=KEYS).chain([1000]) {
            let mut written = BTreeSet::new();
            for lane in 0..32u32 {
                let odd = start % 2;
                let low = (lane * 2).wrapping_sub(odd) % KEYS;
                let high = lane * 2 + 1 - odd;
                let stored: Vec<u32> = if low < high && high < width {
                    assert_eq!(high, low + 1);
                    assert!((start + low).is_multiple_of(2), "four bytes at once");
                    vec![low, high]
                } else {
                    [low, high].into_iter().filter(|&e| e < width).collect()
                };
                for element in stored {
                    assert!(written.insert(element), "{start}, {width}: {element}");
                }
            }
            let all: Vec<u32> = (0..width.min(KEYS)).collect();
            assert_eq!(Vec::from_iter(written), all, "{start}, {width}");
        }
    }
}

#[test]
fn lanes_find_every_probability_wherever_its_row_starts() {
    // Models how `attention_context.cu.tera` reads a row of `n` probabilities that begins at element `row_start`: it copies 16-byte chunks
    // to shared memory, from where a lane extracts a pair of elements with a funnel shift of two words. Each element holds its own index
    // plus 1, and elements outside the row must be read as 0.
    for keys in [32u32, 64] {
        let chunks = keys / 8 + 1;
        for row_start in 0..16u32 {
            for n in [1, 2, 3, 7, 8, 31, 32, 33, 57, 63, 64, 65, 129] {
                let elements = row_start + n; // the tensor ends with the row
                for key in (0..n).step_by(keys as usize) {
                    let mut shared = vec![0u16; (chunks * 8) as usize];
                    for chunk in 0..chunks {
                        let from = key + chunk * 8;
                        let end = row_start % 8 + n;
                        let left = if from < end { (end - from).min(8) } else { 0 };
                        for i in 0..left {
                            let read = row_start / 8 * 8 + from + i;
                            assert!(read < elements, "past the tensor");
                            shared[(chunk * 8 + i) as usize] = read as u16 + 1;
                        }
                    }
                    let word = |i: u32| {
                        let at = i as usize * 2;
                        u64::from(shared[at]) | u64::from(shared[at + 1]) << 16
                    };
                    for lane in 0..4 {
                        let element = row_start % 8 + lane * 2;
                        let (begin, past) = (element / 2 * 4, element % 2 * 16);
                        for k_step in 0..keys / 16 {
                            for half in 0..2 {
                                let at = (begin + k_step * 32 + half * 16) / 4;
                                let pair = (word(at) | word(at + 1) << 32) >> past;
                                let column = key + k_step * 16 + half * 8 + lane * 2;
                                for (i, got) in
                                    [pair & 0xffff, pair >> 16 & 0xffff].into_iter().enumerate()
                                {
                                    let j = column + i as u32;
                                    let want = if j < n { row_start + j + 1 } else { 0 };
                                    assert_eq!(got, u64::from(want), "{row_start}, {n}, {j}");
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn both_forms_have_one_definition_and_the_cases_reach_several_tiles() {
    // Both kernels get the same inputs, which f16 represents exactly.
    let (simt, tensor) = (scores(2, 16, DType::F32), scores(2, 16, DType::F16));
    let case = &simt.cases()[2];
    let trial = Trial::new(&tensor, case, 3).expect("a batch");
    let reads: Vec<_> = trial.reads.iter().map(|(_, tensor)| &**tensor).collect();
    let want = simt.reference(&trial.extents, &reads);
    assert_eq!(trial.writes[0].2, want[0]);
    for kernel in super::representative(DType::F16) {
        let cases = kernel.as_kernel().cases();
        let lens = || cases.iter().flat_map(|case| &case.lens);
        assert!(lens().any(|&n| n > 5 * 128), "several tiles");
        assert!(lens().any(|&n| n > 128 && n % 2 == 1), "odd rows");
        assert!(matches!(
            kernel,
            KernelSpec::AttentionScores(_) | KernelSpec::AttentionContext(_)
        ));
    }
}
