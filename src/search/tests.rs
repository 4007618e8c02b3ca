use proptest::prelude::*;

use super::*;

#[test]
fn philox_matches_the_published_values() {
    // From Random123's kat_vectors, philox4x32-10.
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
fn greedy_ties_go_to_the_lowest_token() {
    assert_eq!(greedy(&[0.0, 3.0, 1.0, 3.0]), 1);
    assert_eq!(greedy(&[f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0]), 2);
}

#[test]
fn log_probabilities_match_a_softmax() {
    let logits = [0.0, 3f32.ln(), f32::NEG_INFINITY];
    assert!((log_probability(&logits, 1) - 0.75f32.ln()).abs() < 1e-6);
    assert_eq!(log_probability(&logits, 2), f32::NEG_INFINITY);
}

/// Returns logits whose softmax is `probabilities`.
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
fn each_setting_restricts_the_tokens() {
    let all = Sampling {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
    };
    let p = [0.1, 0.4, 0.2, 0.2, 0.1];
    assert_eq!(ids(all, &p), [0, 1, 2, 3, 4]);
    // The second and third largest are equal.
    assert_eq!(ids(Sampling { top_k: 2, ..all }, &p), [1, 2, 3]);
    assert_eq!(ids(Sampling { top_k: 1, ..all }, &p), [1]);
    // The largest probability, 0.4, is below 0.5, so one token with 0.2 is also kept: the one with the lower id.
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
fn invalid_sampling_settings_are_rejected() {
    let with = |change: fn(&mut Sampling)| {
        let mut sampling = Sampling::default();
        change(&mut sampling);
        sampling.check().expect_err("an error").to_string()
    };
    insta::assert_snapshot!(with(|s| s.temperature = 0.0), @"the temperature is 0; expected a number of at least 1e-20; for the most probable token, disable sampling");
    insta::assert_snapshot!(with(|s| s.top_p = 0.0), @"top_p is 0; expected a number above 0, up to 1");
    insta::assert_snapshot!(with(|s| s.top_p = 1.5), @"top_p is 1.5; expected a number above 0, up to 1");
    insta::assert_snapshot!(with(|s| s.min_p = f32::NAN), @"min_p is NaN; expected a number from 0 to 1");
}

#[test]
fn samples_have_the_probabilities_of_their_tokens() {
    // Pearson's χ² of 20,000 draws in 4 cells, with 3 degrees of freedom: 16.3 at p = 0.001.
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
    /// Compares the nucleus found by selection with the one found by sorting.
    #[test]
    fn the_nucleus_matches_sorted_probabilities(weights in prop::collection::vec(0u8..6, 1..60), top_p in 0.01f32..1.0) {
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
        // The two selections may differ in size only if the sum of the probabilities is equal to `top_p` up to rounding.
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
fn no_ngram_occurs_twice() {
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
fn forced_tokens_are_first_and_last() {
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

#[test]
fn a_prefix_is_forced_after_the_first_token() {
    let of = |forced_first, prefix: &[u32], tokens: &[u32]| {
        let rules = Rules {
            forced_first,
            prefix: prefix.to_vec(),
            suppressed_first: vec![0],
            ..Rules::default()
        };
        assert!(!rules.suit_devices());
        let mut x = [5.0, 4.0, 3.0];
        rules.apply(&mut x, tokens, 1);
        greedy(&x)
    };
    assert_eq!(of(Some(2), &[1, 2], &[0]), 2);
    assert_eq!(of(Some(2), &[1, 2], &[0, 2]), 1);
    assert_eq!(of(Some(2), &[1, 2], &[0, 2, 1]), 2);
    assert_eq!(
        of(Some(2), &[1, 2], &[0, 2, 1, 2]),
        1,
        "0 is not chosen first"
    );
    assert_eq!(of(Some(2), &[1, 2], &[0, 2, 1, 2, 1]), 0);
    assert_eq!(of(None, &[2], &[0]), 2);
    assert_eq!(of(None, &[2], &[0, 2]), 1);
}

proptest! {
    /// Compares the two-stage selection with sorting, including ties, infinities and rows shorter
    /// than `k`.
    #[test]
    fn the_largest_logits_match_a_sorted_row(row in prop::collection::vec(prop_oneof![4 => (-5i8..5).prop_map(f32::from), 1 => Just(f32::NEG_INFINITY)], 0..80), k in 0usize..20) {
        let mut want: Vec<(u32, f32)> = (0u32..).zip(row.iter().copied()).filter(|(_, x)| *x > f32::NEG_INFINITY).collect();
        want.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        want.truncate(k);
        prop_assert_eq!(largest(&row, k), want);
    }
}

/// Runs a beam search and returns the best hypotheses. The logits of the next token depend only on the last token: row `t` of `table` has
/// the logits after token `t`.
fn search(beams: Beams, table: &[[f32; 4]], ends: &[u32], most: usize) -> Vec<Hypothesis> {
    let mut search = BeamSearch::new(beams);
    let mut last = vec![0usize; beams.n];
    loop {
        let mut rows: Vec<[f32; 4]> = last.iter().map(|&t| table[t]).collect();
        let mut logits: Vec<&mut [f32]> = rows.iter_mut().map(|r| r.as_mut_slice()).collect();
        match search.step(&mut logits, &|_, _| (), ends, most) {
            None => return search.hypotheses(),
            Some(steps) => last = steps.iter().map(|s| s.token as usize).collect(),
        }
    }
}

#[test]
fn two_beams_find_a_better_sequence_than_greedy_search() {
    let p = |p: [f32; 4]| p.map(f32::ln);
    // Token 0 is followed by 1 (0.6) or 2 (0.4). After 1 all tokens are equally probable; after 2,
    // token 3 is almost certain.
    let table = [
        p([0.0, 0.6, 0.4, 0.0]),
        p([0.25, 0.25, 0.25, 0.25]),
        p([0.0, 0.05, 0.0, 0.95]),
        p([0.25, 0.25, 0.25, 0.25]),
    ];
    let one = search(Beams::of(1), &table, &[], 2);
    assert_eq!(one[0].tokens, [1, 0]);
    let two = search(Beams::of(2), &table, &[], 2);
    assert_eq!(two[0].tokens, [2, 3]);
    assert!((two[0].score - (0.4f32 * 0.95).ln() / 2.0).abs() < 1e-6);
}

#[test]
fn a_length_penalty_prefers_long_sequences_above_0() {
    let p = |p: [f32; 4]| p.map(f32::ln);
    // Token 3 is the end token.
    let table = [
        p([0.0, 0.6, 0.0, 0.4]),
        p([0.0, 0.9, 0.0, 0.1]),
        p([0.0, 0.9, 0.0, 0.1]),
        p([0.0, 0.9, 0.0, 0.1]),
    ];
    let of = |length_penalty| {
        let early_stopping = EarlyStopping::Never;
        let beams = Beams {
            length_penalty,
            early_stopping,
            ..Beams::of(2)
        };
        search(beams, &table, &[3], 6)[0].tokens.clone()
    };
    assert_eq!(of(0.0), [3]);
    assert_eq!(of(2.0).len(), 6);
}

#[test]
fn groups_with_diversity_choose_different_tokens() {
    let table = [[0.0, 0.1, 0.2, 0.3]; 4];
    let beams = |diversity| Beams {
        groups: 2,
        diversity,
        ..Beams::of(2)
    };
    let firsts = |diversity| -> Vec<u32> {
        let all = search(beams(diversity), &table, &[], 3);
        all.iter().map(|h| h.tokens[0]).collect()
    };
    assert_eq!(firsts(0.0), [3, 3]);
    assert_eq!(firsts(1.0), [3, 2]);
}

#[test]
fn invalid_beam_settings_are_rejected() {
    let refused = |beams: Beams| beams.check().expect_err("an error").to_string();
    insta::assert_snapshot!(refused(Beams::of(0)), @"0 beams; expected at least one");
    insta::assert_snapshot!(refused(Beams { groups: 3, ..Beams::of(4) }), @"4 beams do not divide into 3 groups; expected a number of groups that divides the number of beams");
    insta::assert_snapshot!(refused(Beams { diversity: -1.0, ..Beams::of(4) }), @"the diversity is -1; expected a number of at least 0");
}

#[test]
fn beams_without_allowed_tokens_return_the_finished_hypotheses() {
    let never = f32::NEG_INFINITY;
    // Only token 1 is allowed after token 0, and no token is allowed after token 1.
    let table = [
        [never, 0.0, never, never],
        [never; 4],
        [never; 4],
        [never; 4],
    ];
    assert_eq!(search(Beams::of(3), &table, &[], 5), []);
    // Token 1 is now an end token.
    let found = search(Beams::of(3), &table, &[1], 5);
    assert_eq!(found[0].tokens, [1]);
}

#[test]
fn new_tokens_are_penalised_by_their_counts_and_a_bias_is_added() {
    let rules = Rules {
        frequency_penalty: 0.5,
        presence_penalty: 0.25,
        bias: vec![(0, -100.0), (3, 2.0), (9, 1.0)],
        ..Rules::default()
    };
    let mut logits = [1.0; 4];
    // Tokens of the prompt do not count, and a token outside the vocabulary is ignored.
    rules.apply(&mut logits, &[2, 2, 0, 1, 1], 2);
    assert_eq!(logits, [1.0 - 0.75 - 100.0, 1.0 - 1.25, 1.0, 3.0]);
    assert!(!rules.suit_devices() && Rules::default().suit_devices());
    let mut logits = [1.0; 3];
    let negative = Rules {
        presence_penalty: -1.5,
        ..Rules::default()
    };
    negative.apply(&mut logits, &[0, 1, 1], 1);
    assert_eq!(logits, [1.0, 2.5, 1.0]);
    assert!(!negative.suit_devices());
}
