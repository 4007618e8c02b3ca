use std::collections::BTreeSet;

use super::{super::*, CTAS_PER_SM, KEY_TILE, Layout};
use crate::machine::{Machine, testing::hopper};
use crate::{
    kernels::{Case, HostTensor, Kernel, trial::Trial},
    tensor::{DType, Extents},
};

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn plain(width: u32) -> HeadView {
    HeadView::TokenMajor {
        offset: 0,
        stride: width,
    }
}

fn scores(heads: u32, head: u32, dtype: DType) -> MhaLongScores {
    MhaLongScores {
        heads,
        head,
        scale: default_scale(head),
        q: plain(heads * head),
        k: plain(heads * head),
        dtype,
    }
}

fn context(heads: u32, head: u32, dtype: DType) -> MhaLongContext {
    MhaLongContext {
        heads,
        head,
        v: plain(heads * head),
        dtype,
    }
}

/// Returns `cu_lens` and `pair_offsets` of sequences with these lengths.
fn starts(lens: &[u32]) -> [Vec<i64>; 2] {
    let running = |f: fn(i64) -> i64| {
        let mut all = vec![0];
        for &n in lens {
            all.push(all[all.len() - 1] + f(n.into()));
        }
        all
    };
    [running(|n| n), running(|n| n * n)]
}

/// Returns batches with lengths around the boundaries of tiles and pitches, in several orders, and with a length whose square needs 64
/// bits.
fn batches() -> Vec<Vec<u32>> {
    let edges = [
        1, 2, 7, 8, 9, 15, 16, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000,
    ];
    let mut all: Vec<Vec<u32>> = edges.iter().map(|&n| vec![n]).collect();
    for &a in &edges {
        for &b in &edges {
            all.push(vec![a, b, a, 3, b, b]);
        }
    }
    all.push((1..300).collect());
    all.push((1..300).rev().collect());
    all.push(vec![70_000, 3, 131_073, 1]);
    all
}

#[test]
fn no_two_rows_share_an_element_and_all_lie_within_their_tensors() {
    for lens in batches() {
        let extents = Extents::of(&lens).expect("a batch");
        let layout = Layout::of(&extents);
        let elements = |shape: crate::tensor::Shape| {
            let n = shape.elements().eval(&extents).expect("it fits");
            n as usize
        };
        let heads = 3;
        let (mut scores_end, mut partials_end) = (0, 0);
        let [cu_lens, pair_offsets] = starts(&lens);
        for h in 0..heads as usize {
            for (b, &len) in lens.iter().enumerate() {
                let (len, pairs) = (len as usize, pair_offsets[b] as usize);
                let tokens = cu_lens[b] as usize;
                let first = layout.scores(h, pairs, tokens);
                assert!(first >= scores_end && first.is_multiple_of(8), "{lens:?}");
                scores_end = first + len * Layout::pitch(len);
                let first = layout.partials(h, pairs, tokens);
                assert!(first >= partials_end, "{lens:?}");
                partials_end = first + len * Layout::tiles(len);
            }
        }
        assert!(scores_end <= elements(scores_shape(heads)), "{lens:?}");
        assert!(
            partials_end * 2 <= elements(partials_shape(heads)),
            "{lens:?}"
        );
    }
}

#[test]
fn all_three_kernels_match_a_worked_example() {
    // Sequence 0 has one token. In sequence 1, only the first of the 8 columns is nonzero. Its values are 1 and 0 in the two queries, and 0
    // and ln 3 in the two keys. The softmax weights are thus 1/4 and 3/4 for the first query, and 1/2 and 1/2 for the second.
    let lens = [1, 2];
    let extents = Extents::of(&lens).expect("a batch");
    let [cu_lens, pair_offsets] = starts(&lens).map(HostTensor::Index);
    let rows = |firsts: [f32; 3]| {
        let rows = firsts.map(|x| [x, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        HostTensor::Real(rows.concat())
    };
    let (q, k) = (rows([5.0, 1.0, 0.0]), rows([7.0, 0.0, 3f32.ln()]));
    let kernel = MhaLongScores {
        scale: 1.0,
        ..scores(1, 8, DType::F32)
    };
    let written = kernel.reference(&extents, &[&q, &k, &cu_lens, &pair_offsets]);
    let [of_scores, partials] = &written[..] else {
        panic!("two tensors");
    };
    // There are three rows with a pitch of 8. The row of sequence 0 starts at 0. The rows of sequence 1 start at 8·1 + ⌊1 / 8⌋·8.
    let mut row = [f32::NAN; 29];
    row[..24].fill(0.0);
    (row[0], row[9]) = (35.0, 3f32.ln());
    for (i, (got, want)) in of_scores.real().iter().zip(row).enumerate() {
        assert!(
            (got - want).abs() < 1e-6 || (got.is_nan() && want.is_nan()),
            "{i}: {got}"
        );
    }
    assert_eq!(of_scores.real().len(), row.len());
    let want = [35.0, 1.0, 3f32.ln(), 4.0 / 3.0, 0.0, 2.0];
    for (got, want) in partials.real().iter().zip(want) {
        assert!((got - want).abs() < 1e-6, "{got}");
    }
    assert_eq!(partials.real().len(), want.len());
    let reduce = MhaLongReduce { heads: 1 };
    let statistics = reduce.reference(&extents, &[partials, &cu_lens, &pair_offsets]);
    assert_eq!(statistics[0].real(), partials.real(), "one tile of keys");
    let v = rows([-2.0, 4.0, 8.0]);
    let reads = [of_scores, &statistics[0], &v, &cu_lens, &pair_offsets];
    let out = context(1, 8, DType::F32).reference(&extents, &reads);
    for (got, want) in out[0].real().iter().zip(rows([-2.0, 7.0, 6.0]).real()) {
        assert!((got - want).abs() < 1e-5, "{got}");
    }
}

#[test]
fn the_three_kernels_together_equal_online_attention() {
    let case = Case::new("several tiles", &[300, 1, 128, 129, 5]);
    for view in [HeadView::HeadMajor, plain(48)] {
        let online = MhaOnline {
            of: AttentionProblem::full(2, 24, default_scale(24), [view; 3]),
            dtype: DType::F32,
        };
        let trial = Trial::new(&online, &case, 5).expect("a batch");
        let [q, k, v, cu_lens] = &trial.reads[..] else {
            panic!("four tensors");
        };
        let pair_offsets = HostTensor::Index(starts(&case.lens)[1].clone());
        let (extents, cu_lens) = (&trial.extents, &cu_lens.1);
        let first = MhaLongScores {
            q: view,
            k: view,
            ..scores(2, 24, DType::F32)
        };
        let written = first.reference(extents, &[&q.1, &k.1, cu_lens, &pair_offsets]);
        let reduce = MhaLongReduce { heads: 2 };
        let statistics = reduce.reference(extents, &[&written[1], cu_lens, &pair_offsets]);
        let last = MhaLongContext {
            v: view,
            ..context(2, 24, DType::F32)
        };
        let reads = [&written[0], &statistics[0], &v.1, cu_lens, &pair_offsets];
        let out = last.reference(extents, &reads);
        let want = trial.writes[0].2.real();
        for (i, (got, want)) in out[0].real().iter().zip(want).enumerate() {
            assert!((got - want).abs() < 1e-5, "{i}: {got}, {want}");
        }
    }
}

#[test]
fn partials_are_computed_from_the_stored_scores() {
    let case = Case::new("one", &[40]);
    let kernel = scores(1, 8, DType::BF16);
    let trial = Trial::new(&kernel, &case, 3).expect("a batch");
    let (of_scores, partials) = (trial.writes[0].2.real(), trial.writes[1].2.real());
    for (row, partial) in of_scores.chunks(40).zip(partials.chunks(2)).take(40) {
        let stored: Vec<f32> = row.iter().map(|&s| DType::BF16.round(s)).collect();
        let top = stored.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = stored.iter().map(|s| (s - top).exp()).sum();
        assert_eq!(partial[0], top);
        assert!((partial[1] - sum).abs() < 1e-4 * sum);
    }
}

/// Models `partials/attention_visitor.cu`: visits the tiles of CTA `block`, 32 at a time. Returns the sequence of each tile, and the index
/// of the tile in its sequence. The sequence is found by binary search over the prefix sums of the tiles of 32 sequences (a window).
fn visit(
    lens: &[u32],
    heads: u64,
    tiles: impl Fn(u64) -> u64,
    block: u64,
    n_blocks: u64,
) -> Vec<(usize, u64)> {
    let mut all = Vec::new();
    let mut visited = 0;
    loop {
        let numbers: Vec<u64> = (0..32)
            .map(|lane| block + (visited + lane) * n_blocks)
            .collect();
        let mut ahead = [None; 32];
        let mut before = 0;
        for window in (0..lens.len()).step_by(32) {
            let mut upto = [0; 32];
            let mut sum = before;
            for (lane, upto) in upto.iter_mut().enumerate() {
                sum += lens
                    .get(window + lane)
                    .map_or(0, |&n| heads * tiles(n.into()));
                *upto = sum;
            }
            for (ahead, &number) in ahead.iter_mut().zip(&numbers) {
                let mut owner = 0;
                for step in [16, 8, 4, 2, 1] {
                    if upto[owner + step - 1] <= number {
                        owner += step;
                    }
                }
                let lower = upto[(owner + 31) % 32];
                if number >= before && number < upto[31] {
                    let local = number - if owner == 0 { before } else { lower };
                    *ahead = Some((window + owner, local));
                }
            }
            if numbers[31] < upto[31] {
                break;
            }
            before = upto[31];
        }
        for tile in ahead {
            match tile {
                Some(tile) => all.push(tile),
                None => return all,
            }
        }
        visited += 32;
    }
}

/// Returns the max number of CTAs of a grouped GEMM on `machine`.
fn most(machine: &Machine) -> u64 {
    CTAS_PER_SM * u64::from(machine.sms)
}

#[test]
fn ctas_visit_every_tile_of_every_problem_once() {
    let crowd: Vec<u32> = (0..1500).map(|i| 1 + i % 3).collect();
    let ones = vec![1; 33];
    let batches = [vec![1], vec![513, 3, 129], (1..200).collect(), ones, crowd];
    for lens in batches {
        for (heads, rows) in [(1, 128), (3, 64), (12, 128)] {
            let tiles = |n: u64| n.div_ceil(rows) * n.div_ceil(KEY_TILE.into());
            let extents = Extents::of(&lens).expect("a batch");
            let total: u64 = lens.iter().map(|&n| heads * tiles(n.into())).sum();
            let launch = scores(heads as u32, 64, DType::F16)
                .launch(&extents, &crate::machine::testing::hopper());
            for n_blocks in [u64::from(launch.grid[0]), 7, most(&hopper())] {
                let mut seen = BTreeSet::new();
                for block in 0..n_blocks {
                    for (sequence, local) in visit(&lens, heads, tiles, block, n_blocks) {
                        assert!(local < heads * tiles(lens[sequence].into()));
                        assert!(seen.insert((sequence, local)), "{sequence}, {local}");
                    }
                }
                assert_eq!(seen.len() as u64, total, "{} sequences", lens.len());
            }
        }
    }
}

#[test]
fn a_grid_has_one_cta_per_tile_up_to_the_max() {
    for lens in batches() {
        let extents = Extents::of(&lens).expect("a batch");
        for dtype in DTYPES {
            let kernel = scores(2, 64, dtype);
            let rows: u64 = if dtype == DType::F32 { 64 } else { 128 };
            let tiles = |n: u64| n.div_ceil(rows) * n.div_ceil(KEY_TILE.into());
            let total: u64 = lens.iter().map(|&n| 2 * tiles(n.into())).sum();
            let blocks = kernel
                .launch(&extents, &crate::machine::testing::hopper())
                .grid[0];
            assert!(u64::from(blocks) >= total.min(most(&hopper())), "{lens:?}");
            let rows: u64 = if dtype == DType::F32 { 32 } else { 128 };
            let total: u64 = lens.iter().map(|&n| 2 * u64::from(n).div_ceil(rows)).sum();
            let blocks = context(2, 64, dtype)
                .launch(&extents, &crate::machine::testing::hopper())
                .grid[0];
            assert!(u64::from(blocks) >= total.min(most(&hopper())), "{lens:?}");
            assert!(u64::from(blocks) <= most(&hopper()));
        }
    }
}

#[test]
fn launches_fit_every_target_at_every_head_size() {
    let extents = Extents::of(&[7, 300]).expect("a batch");
    for head in (8..=256).step_by(8) {
        for dtype in DTYPES {
            let (scores, context) = (scores(3, head, dtype), context(3, head, dtype));
            scores.check().expect("a kernel of scores");
            context.check().expect("a kernel of context");
            for launch in [
                scores.launch(&extents, &crate::machine::testing::hopper()),
                context.launch(&extents, &crate::machine::testing::hopper()),
            ] {
                assert!(launch.shared_bytes <= 99 * 1024, "head {head}: {launch:?}");
                assert!(launch.threads <= 256 && launch.threads.is_multiple_of(32));
            }
        }
    }
}

#[test]
fn unsupported_grouped_attention_is_rejected_with_a_reason() {
    let good = scores(2, 32, DType::F16);
    assert_eq!(good.check(), Ok(()));
    let text = |result: Result<(), AttentionError>| result.expect_err("an error").to_string();
    let odd = text(scores(2, 20, DType::F16).check());
    insta::assert_snapshot!(odd, @"the head size is 20; fused attention takes multiples of 8 up to 256, use the unfused kernels");
    assert_eq!(odd, text(context(2, 20, DType::F16).check()));
    insta::assert_snapshot!(text(context(1, 264, DType::F16).check()), @"the head size is 264; fused attention takes multiples of 8 up to 256, use the unfused kernels");
    let misaligned = HeadView::TokenMajor {
        offset: 4,
        stride: 192,
    };
    let k = MhaLongScores {
        k: misaligned,
        ..good.clone()
    };
    insta::assert_snapshot!(text(k.check()), @"`k` starts at column 4 of rows of 192; fused attention reads 16 bytes at a time and takes multiples of 8 only");
    let scale = f32::NAN;
    insta::assert_snapshot!(text(MhaLongScores { scale, ..good }.check()), @"the scale is NaN; fused attention takes finite scales above 0, use the unfused kernels");
}
