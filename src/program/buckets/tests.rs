use super::*;
use crate::select::{Dispatch, Entry};

#[test]
fn rounding_is_monotone_idempotent_and_adds_little() {
    for (rounded, most) in [
        (rounded_tokens as fn(u64) -> u64, 1.0 / 32.0),
        (rounded_sequences, 0.25),
    ] {
        for n in 1..40_000 {
            let up = rounded(n);
            assert!(up >= n && rounded(up) == up, "{n}: {up}");
            assert!(rounded(n + 1) >= up, "{n}: {up}");
            // Small numbers of tokens are rounded to multiples of 8, which may add more than the fraction `most`.
            assert!(
                up - n < 8 || (up - n) as f64 <= n as f64 * most,
                "{n}: {up}"
            );
        }
    }
    let ends = [1, 8, 9, 256, 257, 511, 513, 1025, 4097, 100_001];
    let up = ends.map(rounded_tokens);
    assert_eq!(up, [8, 8, 16, 256, 264, 512, 528, 1056, 4224, 100_096]);
    assert_eq!(rounded_tokens(Extents::MAX_TOKENS), Extents::MAX_TOKENS);
    let up = [1, 7, 8, 9, 16, 17, 33].map(rounded_sequences);
    assert_eq!(up, [1, 7, 8, 10, 16, 20, 40]);
}

fn by_rows(ends: &[u64]) -> Dispatch<usize> {
    let ranges = ends.iter().enumerate();
    let ranges = ranges.map(|(kernel, &end)| (Some(end), Some(kernel)));
    Dispatch::by_rows(ranges.chain([(None, Some(ends.len()))]))
}

fn buckets(dispatch: Dispatch<usize>, max_longest: Option<u64>, rows: Symbol) -> Buckets {
    let step = Step {
        name: "step".to_owned(),
        dispatch: dispatch.map(|_| 0),
        max_longest,
        operands: Vec::new(),
        rows: rows.into(),
        by_token: false,
        part: 0,
    };
    let program = Program {
        dtype: crate::tensor::DType::F32,
        invariant: false,
        kernels: vec![crate::kernels::KernelSpec::runtime()[0].clone()],
        tensors: Vec::new(),
        steps: vec![step],
        caches: Vec::new(),
        parts: Vec::new(),
        outputs: Vec::new(),
    };
    Buckets::of(&program)
}

fn of_batch(buckets: &Buckets, lens: &[u32]) -> (u64, u64, u64) {
    let bucket = buckets.of_batch(&Extents::of(lens).expect("a batch"));
    (bucket.tokens, bucket.batch, bucket.longest)
}

#[test]
fn a_bucket_does_not_cross_a_change_of_kernel() {
    let most = Extents::MAX_TOKENS;
    let rows = buckets(by_rows(&[12, 100]), None, Symbol::Tokens);
    assert_eq!(of_batch(&rows, &[9]), (12, 1, most));
    assert_eq!(of_batch(&rows, &[12]), (12, 1, most));
    assert_eq!(of_batch(&rows, &[13]), (16, 1, most));
    assert_eq!(of_batch(&rows, &[97]), (100, 1, most));
    let sequences = buckets(by_rows(&[9]), None, Symbol::Batch);
    assert_eq!(of_batch(&sequences, &[1; 9]), (16, 9, most));
    assert_eq!(of_batch(&sequences, &[1; 11]), (16, 12, most));
    let part = Entry {
        batches: Batches {
            keys: Interval::ALL,
            rows: Interval::ALL,
            longest: Interval::new(5, Some(20)),
        },
        choice: 0,
    };
    let longest = buckets(Dispatch::of(vec![part]), None, Symbol::Tokens);
    assert_eq!(of_batch(&longest, &[4]), (8, 1, 5));
    assert_eq!(of_batch(&longest, &[20]), (24, 1, 20));
    assert_eq!(of_batch(&longest, &[21]), (24, 1, most));
}

#[test]
fn a_bucket_does_not_cross_a_change_of_kernel_by_keys() {
    let part = |rows, keys, choice| Entry {
        batches: Batches {
            rows,
            keys,
            ..Batches::ALL
        },
        choice,
    };
    let (few, many) = (Interval::new(0, Some(8)), Interval::new(8, None));
    let [short, long] = [Interval::new(0, Some(512)), Interval::new(512, None)];
    let parts = vec![
        part(few, short, 0),
        part(few, long, 1),
        part(many, Interval::ALL, 0),
    ];
    let buckets = buckets(Dispatch::of(parts), None, Symbol::Tokens);
    let keys = |lens: &[u32], cached: &[u32]| {
        let batch = Extents::continuing(lens, cached, 64).expect("a batch");
        let bucket = buckets.of_batch(&batch);
        assert_eq!(buckets.of_batch(&bucket), bucket);
        assert!(bucket.longest <= bucket.cached_keys);
        bucket.cached_keys
    };
    assert_eq!(keys(&[1, 1], &[0, 511]), 512);
    assert_eq!(keys(&[1, 1], &[512, 0]), Extents::MAX_TOKENS);
    assert_eq!(keys(&[1; 9], &[0; 9]), Extents::MAX_TOKENS);
}

#[test]
fn batches_of_one_bucket_have_equal_extents() {
    let any = buckets(by_rows(&[]), None, Symbol::Tokens);
    let bucket = |lens: &[u32]| any.of_batch(&Extents::of(lens).expect("a batch"));
    assert_eq!(bucket(&[9, 1, 7]), bucket(&[4, 8, 8]));
}

#[test]
fn sequences_are_added_only_with_an_added_token() {
    let any = buckets(by_rows(&[]), None, Symbol::Tokens);
    let most = Extents::MAX_TOKENS;
    assert_eq!(of_batch(&any, &[2; 9]), (24, 10, most));
    assert_eq!(of_batch(&any, &[8, 8, 1, 1, 1, 1, 1, 1, 2]), (24, 9, most));
}

#[test]
fn unsupported_shapes_and_those_that_depend_on_more_than_tokens_are_not_rounded() {
    let short = buckets(by_rows(&[]), Some(20), Symbol::Tokens);
    assert_eq!(of_batch(&short, &[19, 3]), (24, 2, 20));
    assert_eq!(of_batch(&short, &[21, 4]), (25, 2, 21));
    let pairs = buckets(by_rows(&[]), None, Symbol::Pairs);
    assert_eq!(of_batch(&pairs, &[19, 3]), (22, 2, 19));
    let none = Buckets::none();
    assert_eq!(of_batch(&none, &[19, 3]), (22, 2, 19));
    let rows = |shape: [Size; 3]| has_rows_in_front(&Shape::new(shape));
    let (tokens, two) = (Size::from(Symbol::Tokens), Size::constant(2));
    assert!(rows([tokens.clone(), two.clone(), two.clone()]));
    assert!(!rows([two.clone(), tokens.clone(), two.clone()]));
    assert!(!rows([&tokens * &two, two.clone(), two]));
}
