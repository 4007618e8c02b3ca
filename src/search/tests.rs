use proptest::prelude::*;

use super::*;

#[test]
fn philox_gives_the_published_answers() {
    // Random123's kat_vectors, philox4x32-10.
    assert_eq!(
        Philox::new(0).numbers([0; 4]),
        [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
    );
    assert_eq!(
        Philox::new(u64::MAX).numbers([u32::MAX; 4]),
        [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
    );
    let key = 0x299f_31d0_a409_3822;
    assert_eq!(
        Philox::new(key).numbers([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]),
        [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
    );
}

#[test]
fn of_equal_logits_the_lowest_token_is_greedy() {
    assert_eq!(greedy(&[0.0, 3.0, 1.0, 3.0]), 1);
    assert_eq!(greedy(&[f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0]), 2);
}

#[test]
fn log_probabilities_are_those_of_a_softmax() {
    let logits = [0.0, 3f32.ln(), f32::NEG_INFINITY];
    assert!((log_probability(&logits, 1) - 0.75f32.ln()).abs() < 1e-6);
    assert_eq!(log_probability(&logits, 2), f32::NEG_INFINITY);
}

/// Logits of these probabilities.
fn logits(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln()).collect()
}

fn ids(of: Sampling, probabilities: &[f32]) -> Vec<u32> {
    let all = of.distribution(&logits(probabilities));
    let sum: f64 = all.iter().map(|(_, p)| p).sum();
    assert!((sum - 1.0).abs() < 1e-9);
    all.into_iter().map(|(id, _)| id).collect()
}

#[test]
fn each_setting_narrows_what_may_come() {
    let all = Sampling {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
    };
    let p = [0.1, 0.4, 0.2, 0.2, 0.1];
    assert_eq!(ids(all, &p), [0, 1, 2, 3, 4]);
    // The second largest has an equal.
    assert_eq!(ids(Sampling { top_k: 2, ..all }, &p), [1, 2, 3]);
    assert_eq!(ids(Sampling { top_k: 1, ..all }, &p), [1]);
    // 0.4 + 0.2 is enough for 0.5, and 0.4 alone is not: of the two of 0.2, the lower stays.
    assert_eq!(ids(Sampling { top_p: 0.5, ..all }, &p), [1, 2]);
    assert_eq!(ids(Sampling { top_p: 0.3, ..all }, &p), [1]);
    assert_eq!(ids(Sampling { min_p: 0.45, ..all }, &p), [1, 2, 3]);
    let sharp = Sampling {
        temperature: 0.1,
        min_p: 0.01,
        ..all
    };
    assert_eq!(ids(sharp, &p), [1]);
}

#[test]
fn settings_that_sample_nothing_are_refused() {
    let with = |change: fn(&mut Sampling)| {
        let mut sampling = Sampling::default();
        change(&mut sampling);
        sampling.check().expect_err("an error").to_string()
    };
    insta::assert_snapshot!(with(|s| s.temperature = 0.0), @"the temperature is 0; expected a number above 0 (for the most probable token, do not sample)");
    insta::assert_snapshot!(with(|s| s.top_p = 0.0), @"top_p is 0; expected a number above 0, up to 1");
    insta::assert_snapshot!(with(|s| s.top_p = 1.5), @"top_p is 1.5; expected a number above 0, up to 1");
    insta::assert_snapshot!(with(|s| s.min_p = f32::NAN), @"min_p is NaN; expected a number from 0 to 1");
}

#[test]
fn samples_have_the_probabilities_of_their_tokens() {
    // Pearson's χ² of 20,000 draws in 4 cells: 3 degrees of freedom, 16.3 at one in a thousand.
    let p = [0.05, 0.5, 0.15, 0.3];
    let sampling = Sampling {
        top_k: 0,
        ..Sampling::default()
    };
    for seed in 0..3 {
        let philox = Philox::new(seed);
        let n = 20_000;
        let mut counts = [0f64; 4];
        for position in 0..n {
            let uniform = philox.uniform(position, 0);
            counts[sampling.choose(&logits(&p), uniform) as usize] += 1.0;
        }
        let chi: f64 = counts
            .iter()
            .zip(p)
            .map(|(&got, p)| {
                let want = f64::from(p) * n as f64;
                (got - want).powi(2) / want
            })
            .sum();
        assert!(chi < 16.3, "seed {seed}: {chi}, {counts:?}");
    }
}

proptest! {
    /// The nucleus by selection is the one by sorting.
    #[test]
    fn the_nucleus_is_that_of_sorted_probabilities(weights in prop::collection::vec(0u8..6, 1..60), top_p in 0.01f32..1.0) {
        prop_assume!(weights.iter().any(|&w| w > 0));
        let sum: f32 = weights.iter().map(|&w| f32::from(w)).sum();
        let p: Vec<f32> = weights.iter().map(|&w| f32::from(w) / sum).collect();
        let sampling = Sampling { top_k: 0, top_p, ..Sampling::default() };
        let got: Vec<u32> = sampling.distribution(&logits(&p)).into_iter().map(|(id, _)| id).collect();
        let mut sorted: Vec<u32> = (0..p.len() as u32).filter(|&id| p[id as usize] > 0.0).collect();
        sorted.sort_by(|&a, &b| p[b as usize].total_cmp(&p[a as usize]).then(a.cmp(&b)));
        let mut mass = 0.0;
        let mut want = Vec::new();
        for id in sorted {
            if mass >= top_p - 1e-6 { break; }
            mass += p[id as usize];
            want.push(id);
        }
        want.sort_unstable();
        // A sum within rounding of the limit may go either way.
        let near = (mass - top_p).abs() < 1e-5 || want.len().abs_diff(got.len()) == 0;
        prop_assert!(near, "{:?} {:?}", got, want);
        if want.len() == got.len() { prop_assert_eq!(got, want); }
    }
}

#[test]
fn rules_change_logits_as_transformers_does() {
    let rules = Rules {
        repetition_penalty: 2.0,
        end: vec![4],
        min_new_tokens: 1,
        suppressed: vec![3],
        ..Rules::default()
    };
    let mut x = [1.0, -1.0, 5.0, 5.0, 9.0];
    rules.apply(&mut x, &[0, 1, 0], 3);
    let never = f32::NEG_INFINITY;
    assert_eq!(x, [0.5, -2.0, 5.0, never, never]);
    let mut x = [1.0, -1.0, 5.0, 5.0, 9.0];
    rules.apply(&mut x, &[0, 1, 0], 2);
    assert_eq!(x[4], 9.0);
}

#[test]
fn no_ngram_comes_twice() {
    let rules = Rules {
        no_repeat_ngram: 2,
        ..Rules::default()
    };
    let mut x = [0.0; 4];
    rules.apply(&mut x, &[1, 2, 3, 1], 1);
    assert_eq!(x, [0.0, 0.0, f32::NEG_INFINITY, 0.0]);
    let single = Rules {
        no_repeat_ngram: 1,
        ..Rules::default()
    };
    let mut x = [0.0; 4];
    single.apply(&mut x, &[1, 3], 1);
    assert_eq!(x, [0.0, f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY]);
}

#[test]
fn forced_tokens_come_first_and_last() {
    let rules = Rules {
        forced_first: Some(2),
        forced_last: vec![1],
        max_new_tokens: 3,
        ..Rules::default()
    };
    let forced = |tokens: &[u32]| {
        let mut x = [5.0, 4.0, 3.0];
        rules.apply(&mut x, tokens, 1);
        greedy(&x)
    };
    assert_eq!(forced(&[0]), 2);
    assert_eq!(forced(&[0, 2]), 0);
    assert_eq!(forced(&[0, 2, 0]), 1);
}
