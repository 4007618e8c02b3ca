use super::*;

/// The device applies the diversity penalty after the rules, although it is defined to apply before them. The test checks that the most
/// probable tokens are the same in both orders.
#[test]
fn diversity_after_the_rules_equals_diversity_before_them() {
    let forced = |rules: &mut Rules| (rules.forced_first, rules.max_new_tokens) = (Some(3), 9);
    let last = |rules: &mut Rules| {
        (rules.forced_last, rules.max_new_tokens) = (vec![2, 3, 9], 3);
    };
    let penalised = |rules: &mut Rules| rules.repetition_penalty = 1.3;
    let preferred = |rules: &mut Rules| {
        (rules.repetition_penalty, rules.no_repeat_ngram) = (0.7, 2);
    };
    let changes: [&dyn Fn(&mut Rules); 5] = [&|_| (), &forced, &last, &penalised, &preferred];
    let logits: Vec<f32> = (0..12).map(|i| ((i * 7 + 3) % 12) as f32 * 0.3).collect();
    let taken = [3, 3, 5];
    for (change, n_prompt) in changes
        .iter()
        .flat_map(|&change| [(change, 3), (change, 5)])
    {
        let there: Vec<u32> = vec![1, 3, 8, 5, 1];
        let of = Beams {
            groups: 4,
            diversity: 0.6,
            ..Beams::of(4)
        };
        let mut choice = DeviceSamplingParams {
            rules: Rules::default(),
            sampling: None,
            seed: 0,
            n_prompt,
            log_probability: false,
            beam: Some(Beam { of, nth: 3 }),
        };
        change(&mut choice.rules);
        let sum = log_sum(&logits);
        let plain: Vec<f32> = logits.iter().map(|x| x - sum).collect();

        let mut before = plain.clone();
        taken.iter().for_each(|&id| before[id as usize] -= 0.6);
        choice.rules.apply(&mut before, &there, n_prompt);
        let want = largest(&before, of.kept(0));

        let mut after = plain;
        choice.rules.apply(&mut after, &there, n_prompt);
        let mut found = largest(&after, of.candidates(0));
        let there: Vec<i64> = there.into_iter().map(i64::from).collect();
        diversify(&mut found, &taken, &choice, &there);
        found.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));

        let rules = &choice.rules;
        assert!(found.len() >= want.len(), "{rules:?}");
        for ((id, x), (own, y)) in want.iter().zip(&found) {
            assert!(
                id == own && (x - y).abs() < 1e-5,
                "{rules:?}: {want:?} {found:?}"
            );
        }
    }
}
