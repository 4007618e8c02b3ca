//! Tests of encoder-decoder models, which generate text from a source text. Encoder states, tokens and scores must be those of Hugging Face
//! transformers.

use std::{collections::BTreeMap, ops::ControlFlow};

use gemmule::{
    DType, DeviceChoice, Engine,
    generate::{AdmitError, Event, Generator, Reason, SamplingParams, Ticket},
    runtime::weights::RandomWeights,
    search::{Beams, EarlyStopping, Rules, Sampling},
};

use crate::written::{Stored, file, request};

/// The weights that `scripts/reference.py` generates.
const WEIGHTS: RandomWeights = RandomWeights {
    seed: 20,
    deviation: 0.3,
};

/// Names of references in `tests/references`, each with the name of its model's description.
const MODELS: [(&str, &str); 7] = [
    ("marian_h64a4", "marian"),
    ("bart_h64a4", "bart"),
    ("mbart_h64a4", "mbart"),
    ("m2m_100_h64a4", "m2m_100"),
    ("t5_h64a4", "t5"),
    ("t5_h72a5", "t5"),
    // A model with attention heads of width 12, which a KV cache pads.
    ("t5_h60a5", "t5"),
];

/// References that only contain results of greedy search and of a beam search without rules.
const SMALL: [(&str, &str); 2] = [
    ("blenderbot_h60a3", "blenderbot"),
    ("blenderbot_small_h60a3", "blenderbot_small"),
];

fn engine_on(device: DeviceChoice, name: &str, description: &str) -> Engine {
    let builder = Engine::builder(description)
        .config(file(&format!("{name}.json")))
        .random_weights(WEIGHTS)
        .dtype(DType::F32)
        .device(device);
    builder.generating().build().expect("the model loads")
}

/// Returns the settings with which the stored translations called `kind` were generated. The end tokens are missing, because they are
/// stored with each result.
fn options(kind: &str) -> SamplingParams {
    let rules = |max_new_tokens| Rules {
        max_new_tokens,
        suppressed: vec![1],
        ..Rules::default()
    };
    let beams = |rules, beams| SamplingParams {
        rules,
        beams: Some(beams),
        ..SamplingParams::default()
    };
    let generate = match kind {
        "greedy" => SamplingParams {
            rules: rules(24),
            ..SamplingParams::default()
        },
        "rules" => SamplingParams {
            rules: Rules {
                repetition_penalty: 1.3,
                no_repeat_ngram: 2,
                ..rules(24)
            },
            ..SamplingParams::default()
        },
        "forced" => SamplingParams {
            rules: Rules {
                forced_first: Some(7),
                ..rules(16)
            },
            ..SamplingParams::default()
        },
        "beams" => beams(rules(16), Beams::of(4)),
        "least" => SamplingParams {
            rules: Rules {
                min_new_tokens: 9,
                ..rules(16)
            },
            ..SamplingParams::default()
        },
        // `min_length` also counts the start token of the decoder.
        "least_beams" => {
            let rules = Rules {
                min_length: 14,
                ..rules(16)
            };
            beams(rules, Beams::of(4))
        }
        "early" => {
            let of = Beams {
                length_penalty: 2.0,
                early_stopping: EarlyStopping::Yes,
                ..Beams::of(3)
            };
            beams(rules(16), of)
        }
        _ => {
            let of = Beams {
                length_penalty: 0.6,
                early_stopping: EarlyStopping::Never,
                ..Beams::of(5)
            };
            let rules = Rules {
                no_repeat_ngram: 2,
                ..rules(16)
            };
            beams(rules, of)
        }
    };
    SamplingParams {
        decoder_start: Some(2),
        ..generate
    }
}

/// Result of a request: its tokens, the finish reason, and the score of the best beam.
type Translated = (Vec<u32>, Option<Reason>, Option<f32>);

/// Runs a generator until all its requests are complete. Returns their results.
fn drain(generator: &mut Generator) -> BTreeMap<Ticket, Translated> {
    let mut all: BTreeMap<Ticket, Translated> = BTreeMap::new();
    while generator.is_busy() {
        for event in generator.poll().expect("a step") {
            let own = all.entry(event.ticket()).or_default();
            match event {
                Event::Token { id, .. } => own.0.push(id),
                Event::Done { reason, .. } => own.1 = Some(reason),
                Event::Found { hypotheses, .. } => own.2 = hypotheses.first().map(|h| h.score),
                Event::Failed { problem, .. } => panic!("{problem}"),
            }
        }
    }
    all
}

#[test]
fn translations_are_those_of_transformers() {
    translations_on(DeviceChoice::Cpu);
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn translations_on_a_device_are_those_of_transformers() {
    translations_on(DeviceChoice::Cuda(0));
}

/// Translates all sources with all kinds of settings at once, so that sources and beams of several requests run in the same steps. Compares
/// the results with the stored ones.
fn translations_on(device: DeviceChoice) {
    let mut compared = 0;
    for (name, description) in MODELS.into_iter().chain(SMALL) {
        let engine = engine_on(device, name, description);
        assert!(engine.has_source());
        let mut generator = engine.generator(16 << 20).expect("a generator");
        generator.prompt_tokens_per_step(44);
        let stored = Stored::read(&format!("{name}.written.safetensors"));
        let mut wanted = BTreeMap::new();
        let kinds = ["greedy", "rules", "forced", "beams", "early", "never"];
        for kind in kinds.into_iter().chain(["least", "least_beams"]) {
            let is_small = SMALL.iter().any(|(small, _)| *small == name);
            if is_small && !["greedy", "rules", "forced", "beams"].contains(&kind) {
                continue;
            }
            for i in 0..3 {
                let key = |what: &str| format!("{kind}.{i}.{what}");
                let is_beams = ["beams", "early", "never", "least_beams"].contains(&kind);
                // Skip translations with a step in which the two best logits are so close that rounding decides which token is chosen.
                if !is_beams && stored.reals(&key("margin"))[0] < 1e-3 {
                    continue;
                }
                let mut options = options(kind);
                if options.rules.max_new_tokens == 16 {
                    options.rules.end = stored.ids(&key("ends"));
                }
                let source = stored.ids(&key("prompt"));
                let ticket = generator.admit(request(&source, &options));
                let score = is_beams.then(|| stored.reals(&key("score"))[0]);
                let want = (stored.ids(&key("tokens")), score);
                wanted.insert(ticket.expect("there is room"), (key(""), want));
            }
        }
        let found = drain(&mut generator);
        for (ticket, (what, (tokens, score))) in &wanted {
            let (own, _, own_score) = &found[ticket];
            assert_eq!(own, tokens, "{name} {what}");
            if let (Some(a), Some(b)) = (own_score, score) {
                assert!((a - b).abs() < 1e-4, "{name} {what}: {a} {b}");
            }
            compared += 1;
        }
        assert_eq!(generator.cache_bytes().0, 0);
    }
    assert!(compared >= 60, "{compared}");
}

#[test]
fn groups_of_beams_are_those_of_the_published_search() {
    groups_on(DeviceChoice::Cpu);
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn groups_of_beams_on_a_device_are_those_of_the_published_search() {
    groups_on(DeviceChoice::Cuda(0));
}

fn groups_on(device: DeviceChoice) {
    for (name, description) in MODELS {
        let engine = engine_on(device, name, description);
        crate::written::compare_groups(name, &engine, |kind, options| SamplingParams {
            rules: Rules {
                suppressed: vec![1],
                // A forced token gets no diversity penalty, even if another group chose it.
                forced_first: (kind == "full").then_some(7),
                ..options.rules
            },
            decoder_start: Some(2),
            ..options
        });
    }
}

#[test]
fn encoder_states_are_those_of_transformers() {
    for (name, description) in MODELS.into_iter().chain(SMALL) {
        let engine = Engine::builder(description)
            .config(file(&format!("{name}.json")))
            .random_weights(WEIGHTS)
            .dtype(DType::F32)
            .device(DeviceChoice::Cpu)
            .outputs(["encoder_last_hidden_state"])
            .build()
            .expect("the encoder loads");
        let stored = Stored::read(&format!("{name}.safetensors"));
        let (ids, lens) = (stored.ids("tiny.ids"), stored.ids("tiny.lens"));
        let batch = gemmule::Batch::from_packed(ids, &lens).expect("a batch");
        let outputs = engine.session().expect("a session").run(&batch);
        let outputs = outputs.expect("it runs");
        let states = outputs
            .get("encoder_last_hidden_state")
            .expect("it was asked for");
        let width = states.shape[1] as usize;
        let wanted = stored.reals("tiny.encoder_last_hidden_state");
        let rows = stored.ids("tiny.rows");
        for (row, want) in rows.iter().zip(wanted.chunks_exact(width)) {
            let own = &states.values[*row as usize * width..][..width];
            for (a, b) in own.iter().zip(want) {
                assert!((a - b).abs() < 2e-4, "{name}, row {row}: {a} {b}");
            }
        }
    }
}

#[test]
fn company_and_cancelled_requests_change_nothing() {
    company_changes_nothing(DeviceChoice::Cpu);
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn company_and_cancelled_requests_change_nothing_on_a_device() {
    company_changes_nothing(DeviceChoice::Cuda(0));
}

fn company_changes_nothing(device: DeviceChoice) {
    let engine = engine_on(device, "marian_h64a4", "marian");
    let sources: Vec<Vec<u32>> = [3, 40, 1, 17, 65]
        .map(|n: u32| (0..n).map(|i| 5 + (i * 37 + n * 11) % 490).collect())
        .to_vec();
    let drawn = SamplingParams {
        sampling: Some(Sampling::default()),
        seed: 5,
        ..options("greedy")
    };
    for options in [options("greedy"), drawn, options("beams")] {
        let alone: Vec<Vec<u32>> = sources
            .iter()
            .map(|source| {
                let go_on = |_: usize, _: &Event| ControlFlow::Continue(());
                let one = std::slice::from_ref(source);
                let mut written = engine.generate(one, &options, go_on).expect("it writes");
                written.remove(0).tokens
            })
            .collect();
        let mut generator = engine.generator(16 << 20).expect("a generator");
        generator.prompt_tokens_per_step(30);
        let mut tickets = Vec::new();
        let mut found: BTreeMap<Ticket, Vec<u32>> = BTreeMap::new();
        let cancelled = generator.admit(request(&sources[4], &options));
        for source in &sources {
            tickets.push(generator.admit(request(source, &options)).expect("room"));
            for event in generator.poll().expect("a step") {
                if let Event::Token { ticket, id, .. } = event {
                    found.entry(ticket).or_default().push(id);
                }
            }
        }
        assert!(generator.cancel(cancelled.expect("room")));
        for (ticket, (tokens, ..)) in drain(&mut generator) {
            found.entry(ticket).or_default().extend(tokens);
        }
        for (ticket, want) in tickets.iter().zip(&alone) {
            assert_eq!(&found[ticket], want);
        }
        assert_eq!(generator.cache_bytes().0, 0);
    }
}

#[test]
fn what_cannot_run_is_said_before_it_runs() {
    let engine = engine_on(DeviceChoice::Cpu, "m2m_100_h64a4", "m2m_100");
    let mut generator = engine.generator(1 << 20).expect("a generator");
    let mut refused = |source: &[u32], options: &SamplingParams| -> AdmitError {
        generator
            .admit(request(source, options))
            .expect_err("an error")
    };
    let plain = options("greedy");
    insta::assert_snapshot!(refused(&[], &plain), @"the prompt has no tokens; begin with the model's first token, if it has one");
    insta::assert_snapshot!(refused(&[5; 161], &plain), @"the source has 161 tokens, more than the model's 160 positions; shorten or split it");
    insta::assert_snapshot!(refused(&[5, 1], &plain), @"token 1 of the prompt is 1, the model's padding token, which has no position; remove it");
    let no_start = SamplingParams {
        decoder_start: None,
        ..plain
    };
    insta::assert_snapshot!(refused(&[5], &no_start), @"the model generates from a source and needs a start token; set `SamplingParams::decoder_start`, or `decoder_start_token_id` in generation_config.json");
}

#[test]
fn what_a_latent_variable_writes_is_the_reference_s() {
    latents_on(DeviceChoice::Cpu);
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn what_a_latent_variable_writes_on_a_device_is_the_reference_s() {
    latents_on(DeviceChoice::Cuda(0));
}

fn latents_on(device: DeviceChoice) {
    let stored = Stored::read("vae_h64a4.written.safetensors");
    let seed = |key: &str| {
        let bytes = stored.bytes(key).try_into().expect("eight bytes");
        i64::from_le_bytes(bytes) as u64
    };
    let names = ["latent_mean", "latent_log_variance", "latent"];
    let encoder = Engine::builder("vae")
        .config(file("vae_h64a4.json"))
        .random_weights(WEIGHTS)
        .dtype(DType::F32)
        .device(device)
        .outputs(names)
        .build()
        .expect("the encoder loads");
    let sources = [0, 1, 2].map(|i| stored.ids(&format!("greedy.{i}.prompt")));
    let seeds = [0, 1, 2].map(|i| seed(&format!("greedy.{i}.seed")));
    let batch = gemmule::Batch::from_sequences(&sources).expect("a batch");
    let batch = batch.with_seeds(seeds.to_vec()).expect("a seed for each");
    let outputs = encoder.session().expect("a session").run(&batch);
    let outputs = outputs.expect("it runs");
    for name in names {
        let found = outputs.get(name).expect("it was asked for");
        let rows = found.values.chunks_exact(found.shape[1] as usize);
        for (i, own) in rows.enumerate() {
            let want = stored.reals(&format!("greedy.{i}.{name}"));
            for (a, b) in own.iter().zip(&want) {
                assert!((a - b).abs() < 2e-4, "{name} {i}: {a} {b}");
            }
        }
    }
    // For the source of a sequence, a VAE stores a single position in the cache, whatever the source's length.
    let engine = engine_on(device, "vae_h64a4", "vae");
    let plain = options("greedy");
    let needed = |n: usize| engine.cache_bytes_needed(&[n], &plain).expect("bytes");
    assert_eq!(needed(1), needed(150));
    let mut generator = engine.generator(16 << 20).expect("a generator");
    let mut wanted = BTreeMap::new();
    for kind in ["greedy", "beams"] {
        for i in 0..3 {
            let key = |what: &str| format!("{kind}.{i}.{what}");
            if kind == "greedy" && stored.reals(&key("margin"))[0] < 1e-3 {
                continue;
            }
            let mut options = options(kind);
            options.rules.max_new_tokens = 16;
            options.seed = seed(&key("seed"));
            let ticket = generator.admit(request(&stored.ids(&key("prompt")), &options));
            wanted.insert(ticket.expect("room"), (key(""), stored.ids(&key("tokens"))));
        }
    }
    let found = drain(&mut generator);
    assert!(wanted.len() >= 5, "{}", wanted.len());
    for (ticket, (what, tokens)) in &wanted {
        assert_eq!(&found[ticket].0, tokens, "{what}");
    }
    // Another seed draws another latent variable, and so gives another text.
    let write = |seed: u64| {
        let options = SamplingParams {
            seed,
            ..plain.clone()
        };
        let go_on = |_: usize, _: &Event| ControlFlow::Continue(());
        let mut written = engine
            .generate(&sources[..1], &options, go_on)
            .expect("it writes");
        written.remove(0).tokens
    };
    assert_eq!(write(1), write(1));
    assert!((2..6).any(|seed| write(seed) != write(1)));
}
