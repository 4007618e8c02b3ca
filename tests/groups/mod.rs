//! Searches in groups that `scripts/reference.py` stored, and how what is found compares with them.

use gemmule::search::{Beams, EarlyStopping, Hypothesis, Rules};

/// What the stored searches are called: plain groups, and groups with rules, which come after the diversity.
pub const KINDS: [&str; 4] = ["groups", "ruled", "full", "summed"];

/// What a search of a kind was asked for, but for the tokens that end sequences.
pub fn asked(kind: &str) -> (Beams, Rules) {
    let of = |n, groups, diversity| Beams {
        groups,
        diversity,
        ..Beams::of(n)
    };
    let rules = Rules {
        max_new_tokens: 16,
        ..Rules::default()
    };
    match kind {
        "groups" => (of(4, 2, 0.5), rules),
        "ruled" => {
            let rules = Rules {
                repetition_penalty: 1.3,
                no_repeat_ngram: 2,
                ..rules
            };
            (of(6, 3, 0.8), rules)
        }
        "full" => {
            let beams = Beams {
                early_stopping: EarlyStopping::Yes,
                length_penalty: 2.0,
                ..of(4, 2, 1.0)
            };
            let rules = Rules {
                repetition_penalty: 0.8,
                ..rules
            };
            (beams, rules)
        }
        _ => {
            let beams = Beams {
                early_stopping: EarlyStopping::Never,
                length_penalty: 0.6,
                ..of(6, 3, 2.0)
            };
            let rules = Rules {
                repetition_penalty: 1.3,
                renormalize: true,
                ..rules
            };
            (beams, rules)
        }
    }
}

/// Compares all that a search found, the best first, with what is stored: tokens one behind another, lengths, and scores.
pub fn compare(what: &str, found: &[Hypothesis], tokens: &[u32], lens: &[u32], scores: &[f32]) {
    assert_eq!(found.len(), lens.len(), "{what}");
    let mut rest = tokens;
    for ((own, &len), score) in found.iter().zip(lens).zip(scores) {
        let (want, behind) = rest.split_at(len as usize);
        rest = behind;
        assert_eq!(own.tokens, want, "{what}");
        let near = (own.score - score).abs() < 1e-4 * score.abs().max(1.0);
        assert!(near, "{what}: {} {score}", own.score);
    }
}
