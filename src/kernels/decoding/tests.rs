use super::*;
use crate::search::{Philox, Sampling};

#[test]
fn a_choice_survives_encoding_and_decoding() {
    for row in 0..84 {
        let mut choice = DeviceSamplingParams::of_row(row, 50257);
        choice.n_prompt = row;
        let numbers = choice.encode().expect("its lists are short");
        assert_eq!(numbers.len(), DeviceSamplingParams::WIDTH as usize);
        let numbers: Vec<i64> = numbers.into_iter().map(i64::from).collect();
        // Decoding does not restore the order and duplicates of `forced_last`. `min_length` and `min_new_tokens` are encoded as one min
        // length.
        choice.rules.forced_last.sort_unstable();
        choice.rules.forced_last.dedup();
        choice.rules.min_length = choice.rules.min_length.max(row);
        let sampling = choice.sampling;
        let back = DeviceSamplingParams::decode(&numbers);
        assert_eq!(back.sampling, sampling, "{row}");
        assert_eq!(back, choice, "{row}");
    }
}

#[test]
fn lists_that_are_too_long_are_not_encoded() {
    let mut choice = DeviceSamplingParams::of_row(0, 1000);
    let room = DeviceSamplingParams::WIDTH as usize
        - DeviceSamplingParams::HEADER
        - choice.rules.end.len();
    choice.rules.suppressed = (0..room as u32).collect();
    assert!(choice.encode().is_some());
    choice.rules.suppressed.push(999);
    assert_eq!(choice.encode(), None);
}

#[test]
fn outcomes_have_distinct_codes() {
    let all = [
        Chosen::Token(0),
        Chosen::Token(151_935),
        Chosen::Idle,
        Chosen::NotANumber,
        Chosen::NoToken,
        Chosen::Found,
    ];
    for chosen in all {
        assert_eq!(Chosen::of_code(chosen.code()), chosen);
    }
}

/// Returns the probability with which each token is sampled, computed by sorting and summing in f64. The settings apply in the order top-k,
/// top-p, min-p. Each restricts the tokens that the settings before it have left.
fn probabilities(sampling: Sampling, logits: &[f32]) -> Vec<f64> {
    let softmax = |kept: &[(usize, f64)]| {
        let most = kept.iter().fold(f64::NEG_INFINITY, |m, k| m.max(k.1));
        let sum: f64 = kept.iter().map(|k| (k.1 - most).exp()).sum();
        let shares = kept.iter().map(|k| (k.0, k.1, (k.1 - most).exp() / sum));
        shares.collect::<Vec<_>>()
    };
    let temperature = f64::from(sampling.temperature);
    let scaled = logits.iter().map(|&x| f64::from(x) / temperature);
    let mut kept: Vec<(usize, f64)> = scaled.enumerate().collect();
    kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if sampling.top_k > 0 && sampling.top_k < kept.len() {
        let least = kept[sampling.top_k - 1].1;
        kept.retain(|k| k.1 >= least);
    }
    let mut before = 0.0;
    let nucleus = softmax(&kept).into_iter().filter(|share| {
        let is_kept = before < f64::from(sampling.top_p);
        before += share.2;
        is_kept
    });
    kept = nucleus.map(|share| (share.0, share.1)).collect();
    let shares = softmax(&kept);
    let least = shares[0].2 * f64::from(sampling.min_p);
    let kept: Vec<(usize, f64)> = shares
        .iter()
        .filter(|s| s.2 >= least)
        .map(|s| (s.0, s.1))
        .collect();
    let mut all = vec![0.0; logits.len()];
    for (id, _, share) in softmax(&kept) {
        all[id] = share;
    }
    all
}

/// Pearson's χ² test of 8,000 draws for each combination of settings. The draws are at consecutive positions of one sequence, or at one
/// position of sequences with different seeds.
#[test]
fn sampled_tokens_have_the_probabilities_of_a_plain_softmax() {
    // Logits are sums of three uniform numbers, and some logits are equal.
    let uniform = |i, j| Philox::new(77).uniform(i, j);
    let logits: Vec<f32> = (0..400u64)
        .map(|i| {
            let sum: f64 = (0..3).map(|j| uniform(i, j)).sum();
            ((sum * 40.0).round() / 8.0) as f32
        })
        .collect();
    let of = |temperature, top_k, top_p, min_p| Sampling {
        temperature,
        top_k,
        top_p,
        min_p,
    };
    let settings = [
        of(1.0, 0, 1.0, 0.0),
        of(0.7, 50, 1.0, 0.0),
        of(1.4, 0, 0.8, 0.0),
        of(1.0, 0, 1.0, 0.05),
        of(0.9, 40, 0.9, 0.02),
        of(2.0, 120, 0.95, 0.1),
        of(0.3, 200, 0.99, 0.001),
    ];
    for (n, sampling) in settings.into_iter().enumerate() {
        let want = probabilities(sampling, &logits);
        for of_one_sequence in [true, false] {
            let draws = 8_000usize;
            let mut counts = vec![0usize; logits.len()];
            let tokens = vec![0u32; draws];
            for draw in 0..draws {
                let (seed, len) = match of_one_sequence {
                    true => (n as u64, draw),
                    false => (1000 * n as u64 + draw as u64, 5),
                };
                let choice = DeviceSamplingParams {
                    sampling: Some(sampling),
                    seed,
                    n_prompt: 0,
                    rules: Rules::default(),
                    log_probability: false,
                    beam: None,
                };
                let (Chosen::Token(id), _) = choice.choose(&logits, &tokens[..len]) else {
                    panic!("no token is drawn");
                };
                counts[id as usize] += 1;
            }
            // Tokens with an expected count below five share one cell of the χ² statistic.
            let (mut chi, mut cells) = (0.0, 0u32);
            let mut rest = (0.0, 0.0);
            let mut add = |got: f64, expected: f64| {
                chi += (got - expected).powi(2) / expected;
                cells += 1;
            };
            for (&got, share) in counts.iter().zip(&want) {
                let expected = share * draws as f64;
                match expected {
                    0.0 => assert_eq!(got, 0, "a token is drawn that may not come"),
                    x if x < 5.0 => rest = (rest.0 + got as f64, rest.1 + expected),
                    _ => add(got as f64, expected),
                }
            }
            if rest.1 > 0.0 {
                add(rest.0, rest.1);
            }
            // Wilson and Hilferty's approximation of the quantile at four standard deviations.
            let free = f64::from(cells - 1);
            let spread = 2.0 / (9.0 * free);
            let most = free * (1.0 - spread + 4.0 * spread.sqrt()).powi(3);
            assert!(
                cells > 2 && chi < most,
                "{sampling:?}: {chi} of {most} in {cells} cells"
            );
        }
    }
}

#[test]
fn non_finite_logits_are_reported_with_their_index() {
    let choice = DeviceSamplingParams::of_row(0, 8);
    let mut logits = [0.5, 2.0, 2.0, f32::NEG_INFINITY];
    assert_eq!(choice.choose(&logits, &[3]).0, Chosen::Token(1));
    for wrong in [f32::NAN, f32::INFINITY] {
        logits[2] = wrong;
        assert_eq!(choice.choose(&logits, &[3]), (Chosen::NotANumber, 2.0));
    }
    let none = [f32::NEG_INFINITY; 4];
    assert_eq!(choice.choose(&none, &[3]).0, Chosen::NoToken);
}
