//! Reads the results of text generation that `scripts/reference.py` stored, and compares diverse beam searches (beams in groups) with them.
#![allow(
    dead_code,
    reason = "each test file is a crate of its own and uses a part"
)]

use std::{collections::BTreeMap, path::Path};

use gemmule::{
    Engine,
    generate::{Event, Generator, Request, SamplingParams, Ticket},
    search::{Beams, EarlyStopping, Hypothesis, Rules},
};

/// Returns the path of a reference file. It is relative to the package, because the tests may run in another folder than the one where they
/// were compiled.
pub fn file(name: &str) -> std::path::PathBuf {
    Path::new("tests/references").join(name)
}

/// The bytes of a safetensors file with stored results.
pub struct Stored(Vec<u8>);

impl Stored {
    pub fn read(name: &str) -> Self {
        Self(std::fs::read(file(name)).expect("a reference"))
    }

    pub fn bytes(&self, key: &str) -> Vec<u8> {
        let tensors = safetensors::SafeTensors::deserialize(&self.0).expect("tensors");
        tensors.tensor(key).expect("it is stored").data().to_vec()
    }

    pub fn ids(&self, key: &str) -> Vec<u32> {
        let bytes = self.bytes(key);
        let all = bytes.chunks_exact(8);
        all.map(|b| i64::from_le_bytes(b.try_into().expect("eight bytes")) as u32)
            .collect()
    }

    pub fn reals(&self, key: &str) -> Vec<f32> {
        let bytes = self.bytes(key);
        let all = bytes.chunks_exact(4);
        all.map(|b| f32::from_le_bytes(b.try_into().expect("four bytes")))
            .collect()
    }

    pub fn real(&self, key: &str) -> f32 {
        self.reals(key)[0]
    }
}

pub fn request(prompt: &[u32], options: &SamplingParams) -> Request {
    Request {
        prompt: prompt.to_vec(),
        options: options.clone(),
    }
}

/// Runs a generator until all its requests are complete. Returns the hypotheses of each request.
pub fn all_found(generator: &mut Generator) -> BTreeMap<Ticket, Vec<Hypothesis>> {
    let mut found = BTreeMap::new();
    while generator.is_busy() {
        for event in generator.poll().expect("a step") {
            match event {
                Event::Found { ticket, hypotheses } => drop(found.insert(ticket, hypotheses)),
                Event::Failed { problem, .. } => panic!("{problem}"),
                Event::Token { .. } | Event::Done { .. } => {}
            }
        }
    }
    found
}

/// Names of the stored diverse beam searches. `groups` has no rules on logits. The rules of the other searches are applied after the
/// diversity penalty.
const KINDS: [&str; 4] = ["groups", "ruled", "full", "summed"];

/// Returns the settings of the stored search called `kind`. The end tokens are missing, because they are stored with each result.
fn asked(kind: &str) -> (Beams, Rules) {
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

/// Compares the hypotheses of a search, best first, with the stored hypotheses. `tokens` contains the tokens of all stored hypotheses, one
/// hypothesis after another, `lens` their lengths, and `scores` their scores.
fn compare(what: &str, found: &[Hypothesis], tokens: &[u32], lens: &[u32], scores: &[f32]) {
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

/// Runs all stored diverse beam searches of the model `name` at once, and compares the results with the stored ones. `more` returns the
/// settings to use, given the name of a search and its stored settings.
pub fn compare_groups(
    name: &str,
    engine: &Engine,
    more: impl Fn(&str, SamplingParams) -> SamplingParams,
) {
    let mut generator = engine.generator(64 << 20).expect("a generator");
    let stored = Stored::read(&format!("{name}.written.safetensors"));
    let mut wanted = BTreeMap::new();
    for kind in KINDS {
        for i in 0..3 {
            let key = |what: &str| format!("{kind}.{i}.{what}");
            let (beams, rules) = asked(kind);
            let options = SamplingParams {
                rules: Rules {
                    end: stored.ids(&key("ends")),
                    ..rules
                },
                beams: Some(beams),
                ..SamplingParams::default()
            };
            let request = request(&stored.ids(&key("prompt")), &more(kind, options));
            let ticket = generator.admit(request).expect("there is room");
            wanted.insert(ticket, format!("{kind}.{i}"));
        }
    }
    let found = all_found(&mut generator);
    for (ticket, key) in &wanted {
        let of = |what: &str| format!("{key}.{what}");
        let (tokens, lens) = (stored.ids(&of("tokens")), stored.ids(&of("lens")));
        let scores = stored.reals(&of("scores"));
        let what = format!("{name} {key}");
        compare(&what, &found[ticket], &tokens, &lens, &scores);
    }
}
