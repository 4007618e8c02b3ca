//! Tests of text generation with a KV cache. The tokens must be those of Hugging Face transformers. They must not depend on how prompts are
//! split into steps, or on the other requests that run at the same time.

use std::{
    collections::BTreeMap,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use gemmule::{
    AttentionChoice, Batch, DType, DeviceChoice, Engine,
    generate::{
        AdmitError, Event, Failure, Generator, Reason, Request, SamplingParams, Stop, Ticket,
    },
    runtime::weights::RandomWeights,
    search::{Beams, EarlyStopping, Rules, Sampling},
};

use crate::written::{Stored, all_found, file, request};

/// The weights that `scripts/reference.py` generates.
const WEIGHTS: RandomWeights = RandomWeights {
    seed: 20,
    deviation: 0.1,
};

/// Names of references in `tests/references`, each with the name of its model's description.
const MODELS: [(&str, &str); 31] = [
    ("gpt2_h320a5", "gpt2"),
    ("llama_h320a5", "llama"),
    ("qwen3_h192a6", "qwen3"),
    ("qwen2_head24", "qwen2"),
    ("gemma_head24", "gemma"),
    ("phi3_head24", "phi3"),
    ("phi3_longrope", "phi3"),
    ("phi3_long_context", "phi3"),
    ("olmo2_head24", "olmo2"),
    ("starcoder2_head24", "starcoder2"),
    ("stablelm_parallel", "stablelm"),
    ("phi_head24", "phi"),
    ("smollm3_head24", "smollm3"),
    ("granite_head24", "granite"),
    ("opt_head24", "opt"),
    ("gpt_neox_head24", "gpt_neox"),
    ("bloom_head12", "bloom"),
    ("gemma3_writer", "gemma3_text"),
    ("gemma2_head24", "gemma2"),
    ("sinks_head24", "examples/sinks_decoder.ron"),
    ("cohere_head24", "cohere"),
    ("cohere_norms", "cohere"),
    ("gptj_head24", "gptj"),
    ("falcon_head24", "falcon"),
    ("falcon_groups", "falcon"),
    ("falcon_rw", "falcon"),
    ("falcon_rw_head12", "falcon"),
    // Models with untied heads, scaled rotary frequencies, and biases.
    ("gpt2_head24", "gpt2"),
    ("llama_head24", "llama"),
    // Models whose attention heads have a width that a KV cache pads.
    ("gpt2_head20", "gpt2"),
    ("llama_head20", "llama"),
];

/// References that only contain results of greedy search.
const GREEDY: [(&str, &str); 25] = [
    ("cohere2_head24", "cohere2"),
    ("cohere2_biases", "cohere2"),
    ("glm_head24", "glm"),
    ("glm4_head20", "glm"),
    ("exaone4_head24", "exaone4"),
    ("exaone4_full", "exaone4"),
    ("exaone_head24", "exaone"),
    ("hyperclovax_head24", "granite"),
    ("internlm3_head24", "internlm3"),
    ("seed_oss_head20", "seed_oss"),
    ("ernie4_5_head20", "ernie4_5"),
    ("helium_head24", "helium"),
    ("hunyuan_v1_dense_head20", "hunyuan_v1_dense"),
    ("hunyuan_v1_dense_head24", "hunyuan_v1_dense"),
    ("arcee_head20", "arcee"),
    ("nemotron_head24", "nemotron"),
    ("olmo_head24", "olmo"),
    ("mpt_head12", "mpt"),
    ("gpt_bigcode_head24", "gpt_bigcode"),
    ("gpt_bigcode_heads", "gpt_bigcode"),
    ("gpt_neo_head24", "gpt_neo"),
    ("xglm_head24", "xglm"),
    ("biogpt_head24", "biogpt"),
    ("openai_gpt_head24", "openai_gpt"),
    ("modernbert_decoder_head24", "modernbert_decoder"),
];

fn engine(name: &str, description: &str) -> Engine {
    engine_on(DeviceChoice::Cpu, name, description)
}

fn engine_on(device: DeviceChoice, name: &str, description: &str) -> Engine {
    engine_of(device, file(&format!("{name}.json")), description)
}

fn engine_of(device: DeviceChoice, config: PathBuf, description: &str) -> Engine {
    let builder = Engine::builder(description)
        .config(config)
        .random_weights(WEIGHTS)
        .dtype(DType::F32)
        .device(device);
    builder.generating().build().expect("the model loads")
}

/// Returns the prompt and the generated tokens of each stored continuation with the settings called `rules`.
fn stored(name: &str, rules: &str) -> Vec<(Vec<u32>, Vec<u32>)> {
    let stored = Stored::read(&format!("{name}.written.safetensors"));
    let one = |i: usize| {
        let key = |what: &str| format!("{rules}.{i}.{what}");
        // Leave out continuations with a step in which the two best logits are so close that rounding decides which token is chosen.
        let is_clear = stored.real(&key("margin")) > 1e-3;
        is_clear.then(|| (stored.ids(&key("prompt")), stored.ids(&key("tokens"))))
    };
    (0..3).filter_map(one).collect()
}

/// Returns the settings of the stored beam searches called `name`. The end tokens are missing, because they are stored with each result.
fn beams(name: &str) -> (Beams, Rules) {
    let rules = Rules {
        max_new_tokens: 16,
        ..Rules::default()
    };
    match name {
        "beams" => (Beams::of(4), rules),
        "early" => {
            let early_stopping = EarlyStopping::Yes;
            let length_penalty = 2.0;
            let beams = Beams {
                length_penalty,
                early_stopping,
                ..Beams::of(3)
            };
            (beams, rules)
        }
        _ => {
            let early_stopping = EarlyStopping::Never;
            let length_penalty = 0.6;
            let beams = Beams {
                length_penalty,
                early_stopping,
                ..Beams::of(5)
            };
            let no_repeat_ngram = 2;
            let rules = Rules {
                no_repeat_ngram,
                ..rules
            };
            (beams, rules)
        }
    }
}

#[test]
fn beams_are_those_of_transformers() {
    beams_on(DeviceChoice::Cpu);
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn beams_on_a_device_are_those_of_transformers() {
    beams_on(DeviceChoice::Cuda(0));
}

fn beams_on(device: DeviceChoice) {
    for (name, description) in MODELS {
        let engine = engine_on(device, name, description);
        let mut generator = engine.generator(64 << 20).expect("a generator");
        let mut wanted = BTreeMap::new();
        // Run all requests at once, so that a step contains beams of several requests.
        for kind in ["beams", "early", "never"] {
            for i in 0..3 {
                let stored = Stored::read(&format!("{name}.written.safetensors"));
                let key = |what: &str| format!("{kind}.{i}.{what}");
                let (beams, rules) = beams(kind);
                let options = SamplingParams {
                    rules: Rules {
                        end: stored.ids(&key("ends")),
                        ..rules
                    },
                    beams: Some(beams),
                    ..SamplingParams::default()
                };
                let prompt = stored.ids(&key("prompt"));
                let admitted = generator.admit(request(&prompt, &options));
                let ticket = admitted.expect("there is room");
                let want = (stored.ids(&key("tokens")), stored.real(&key("score")));
                wanted.insert(ticket, (key(""), want));
            }
        }
        let found = all_found(&mut generator);
        for (ticket, (what, (tokens, score))) in &wanted {
            let best = &found[ticket][0];
            assert_eq!(&best.tokens, tokens, "{name} {what}");
            assert!(
                (best.score - score).abs() < 1e-4,
                "{name} {what}: {} {score}",
                best.score
            );
        }
        assert_eq!(generator.cache_bytes().0, 0);
    }
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
        crate::written::compare_groups(name, &engine, |_, options| options);
    }
}

#[test]
fn no_sequence_ends_before_its_least_length() {
    least_lengths_on(DeviceChoice::Cpu);
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn no_sequence_ends_before_its_least_length_on_a_device() {
    least_lengths_on(DeviceChoice::Cuda(0));
}

fn least_lengths_on(device: DeviceChoice) {
    let mut compared = 0;
    let mut longer = [0, 0];
    for (name, description) in MODELS {
        let engine = engine_on(device, name, description);
        let stored = Stored::read(&format!("{name}.written.safetensors"));
        for kind in ["least", "least_beams"] {
            for i in 0..3 {
                let key = |what: &str| format!("{kind}.{i}.{what}");
                let beams = (kind == "least_beams").then(|| Beams::of(4));
                if beams.is_none() && stored.real(&key("margin")) < 1e-3 {
                    continue;
                }
                let prompt = stored.ids(&key("prompt"));
                // `min_length` counts the prompt, `min_new_tokens` does not.
                let (min_length, min_new_tokens) = match beams {
                    Some(_) => (14, 0),
                    None => (0, 9),
                };
                let write = |min_length, min_new_tokens| {
                    let options = SamplingParams {
                        rules: Rules {
                            end: stored.ids(&key("ends")),
                            max_new_tokens: 16,
                            min_length,
                            min_new_tokens,
                            ..Rules::default()
                        },
                        beams,
                        ..SamplingParams::default()
                    };
                    let go_on = |_: usize, _: &Event| ControlFlow::Continue(());
                    let prompt = std::slice::from_ref(&prompt);
                    let mut written = engine.generate(prompt, &options, go_on);
                    written.as_mut().expect("it writes").remove(0)
                };
                let own = write(min_length, min_new_tokens);
                assert_eq!(own.tokens, stored.ids(&key("tokens")), "{name} {}", key(""));
                if let Some(score) = own.score {
                    assert!((score - stored.real(&key("score"))).abs() < 1e-4, "{name}");
                }
                let least = min_new_tokens.max(min_length.saturating_sub(prompt.len()));
                assert!(own.tokens.len() >= least, "{name} {}", key(""));
                longer[usize::from(beams.is_some())] +=
                    usize::from(write(0, 0).tokens.len() < least);
                compared += 1;
            }
        }
    }
    assert!(compared >= 25, "{compared}");
    // The min lengths have an effect: without them, some texts of greedy search and of beam search would end earlier.
    assert!(longer.iter().all(|&n| n > 0), "{longer:?}");
}

fn rules(name: &str) -> Rules {
    let plain = Rules {
        max_new_tokens: 24,
        ..Rules::default()
    };
    match name {
        "greedy" => plain,
        _ => Rules {
            repetition_penalty: 1.3,
            no_repeat_ngram: 2,
            ..plain
        },
    }
}

/// Runs a generator until all its requests are complete. Returns the tokens and the finish reason of each request.
fn drain(generator: &mut Generator) -> BTreeMap<Ticket, (Vec<u32>, Option<Reason>)> {
    let mut all: BTreeMap<Ticket, (Vec<u32>, Option<Reason>)> = BTreeMap::new();
    while generator.is_busy() {
        collect(generator.poll().expect("a step"), &mut all);
    }
    all
}

fn collect(events: Vec<Event>, into: &mut BTreeMap<Ticket, (Vec<u32>, Option<Reason>)>) {
    for event in events {
        let own = into.entry(event.ticket()).or_default();
        match event {
            Event::Token { id, .. } => own.0.push(id),
            Event::Done { reason, .. } => own.1 = Some(reason),
            Event::Found { .. } => {}
            Event::Failed { problem, .. } => panic!("{problem}"),
        }
    }
}

#[test]
fn greedy_tokens_are_those_of_transformers() {
    greedy_tokens_on(DeviceChoice::Cpu);
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn greedy_tokens_on_a_device_are_those_of_transformers() {
    greedy_tokens_on(DeviceChoice::Cuda(0));
}

fn greedy_tokens_on(device: DeviceChoice) {
    let mut compared = 0;
    for (name, description) in MODELS.into_iter().chain(GREEDY) {
        let engine = engine_on(device, name, description);
        for kind in ["greedy", "rules"] {
            let stored = stored(name, kind);
            let prompts: Vec<Vec<u32>> = stored.iter().map(|(p, _)| p.clone()).collect();
            let options = SamplingParams {
                rules: rules(kind),
                ..SamplingParams::default()
            };
            let go_on = |_: usize, _: &Event| ControlFlow::Continue(());
            let written = engine
                .generate(&prompts, &options, go_on)
                .expect("it writes");
            for (written, (prompt, want)) in written.iter().zip(&stored) {
                assert_eq!(&written.tokens, want, "{name}, {kind}, behind {prompt:?}");
                assert_eq!(written.reason, Some(Reason::Length));
                compared += 1;
            }
        }
    }
    assert!(compared >= 14, "{compared}");
}

/// Returns a pseudorandom prompt for each length in `lens`.
fn prompts(lens: &[usize]) -> Vec<Vec<u32>> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 16
    };
    let ids = |&n: &usize| (0..n).map(|_| 5 + next() % 900).collect();
    lens.iter().map(ids).collect::<Vec<_>>()
}

/// Returns the logits of the token after `tokens`, computed from the whole sequence without a KV cache.
fn whole(engine: &Engine, tokens: &[u32]) -> Vec<f32> {
    let batch = Batch::from_sequences(&[tokens]).expect("a batch");
    let outputs = engine.session().expect("a session").run(&batch);
    let outputs = outputs.expect("it runs");
    outputs
        .get("next_token_logits")
        .expect("logits")
        .values
        .clone()
}

#[test]
fn a_sequence_gives_the_same_however_it_is_cut_into_steps() {
    for (name, description) in MODELS {
        let cached = engine(name, description);
        let fresh = Engine::builder(description)
            .config(file(&format!("{name}.json")))
            .random_weights(WEIGHTS)
            .outputs(["next_token_logits"])
            .device(DeviceChoice::Cpu)
            .build()
            .expect("the model loads");
        let options = SamplingParams {
            rules: Rules {
                max_new_tokens: 40,
                ..Rules::default()
            },
            ..SamplingParams::default()
        };
        let prompts = prompts(&[1, 31, 32, 33, 88]);
        let of = |step: usize| {
            let lens: Vec<usize> = prompts.iter().map(Vec::len).collect();
            let bytes = cached.cache_bytes_needed(&lens, &options);
            let bytes = bytes.expect("it writes");
            let mut generator = cached.generator(bytes).expect("a generator");
            generator.prompt_tokens_per_step(step);
            for prompt in &prompts {
                generator
                    .admit(request(prompt, &options))
                    .expect("there is room");
            }
            drain(&mut generator)
        };
        let want = of(usize::MAX);
        for step in [1, 7, 64] {
            assert_eq!(of(step), want, "{name}, {step} tokens of prompts a step");
        }
        // Each token has the largest logit (up to rounding) if the logits are computed without a cache.
        for (prompt, (tokens, _)) in prompts.iter().zip(want.values()) {
            let mut all = prompt.clone();
            for &token in tokens.iter().take(3) {
                let logits = whole(&fresh, &all);
                let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                assert!(best - logits[token as usize] < 1e-3, "{name}");
                all.push(token);
            }
        }
    }
}

#[test]
fn requests_come_and_go_without_a_trace_in_others() {
    requests_come_and_go_on(DeviceChoice::Cpu);
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn requests_come_and_go_on_a_device() {
    requests_come_and_go_on(DeviceChoice::Cuda(0));
}

fn requests_come_and_go_on(device: DeviceChoice) {
    let (name, description) = MODELS[2];
    let engine = engine_on(device, name, description);
    let prompts = prompts(&[5, 40, 3, 70, 12, 33]);
    let options = |i: usize| SamplingParams {
        rules: Rules {
            max_new_tokens: 10 + 7 * i,
            ..Rules::default()
        },
        sampling: (i % 2 == 1).then(Sampling::default),
        seed: 7 + i as u64,
        ..SamplingParams::default()
    };
    let alone: Vec<Vec<u32>> = prompts
        .iter()
        .enumerate()
        .map(|(i, prompt)| {
            let go_on = |_: usize, _: &Event| ControlFlow::Continue(());
            let written = engine.generate(std::slice::from_ref(prompt), &options(i), go_on);
            written.expect("it writes")[0].tokens.clone()
        })
        .collect();
    let mut generator = engine.generator(4 << 20).expect("a generator");
    let (empty, _) = generator.cache_bytes();
    assert_eq!(empty, 0);
    let mut all = BTreeMap::new();
    let mut tickets = Vec::new();
    for (i, prompt) in prompts.iter().enumerate() {
        tickets.push(
            generator
                .admit(request(prompt, &options(i)))
                .expect("there is room"),
        );
        // Run a few steps, so that earlier requests are in the middle of generation when the next one is admitted.
        for _ in 0..3 {
            collect(generator.poll().expect("a step"), &mut all);
        }
    }
    let (before, _) = generator.cache_bytes();
    assert!(generator.cancel(tickets[3]));
    assert!(!generator.cancel(tickets[3]), "it has ended");
    let (after, _) = generator.cache_bytes();
    assert!(after < before, "its memory is free at once");
    for (ticket, (tokens, reason)) in drain(&mut generator) {
        let own: &mut (Vec<u32>, Option<Reason>) = all.entry(ticket).or_default();
        own.0.extend(tokens);
        own.1 = own.1.or(reason);
    }
    assert_eq!(
        generator.cache_bytes().0,
        0,
        "all memory is free in the end"
    );
    for (i, ticket) in tickets.iter().enumerate() {
        let (tokens, reason) = &all[ticket];
        match i {
            3 => {
                assert_eq!(*reason, Some(Reason::Cancelled));
                assert!(alone[3].starts_with(tokens));
            }
            _ => assert_eq!(tokens, &alone[i], "request {i}"),
        }
    }
}

#[test]
fn memory_of_a_sequence_that_ended_is_used_again_while_others_run() {
    let (name, description) = MODELS[0];
    let engine = engine(name, description);
    let options = |max_new_tokens| SamplingParams {
        rules: Rules {
            max_new_tokens,
            ..Rules::default()
        },
        ..SamplingParams::default()
    };
    let prompts = prompts(&[20, 20, 20]);
    // The cache has room for the long request and one of the two short requests.
    let needed = |new| engine.cache_bytes_needed(&[20], &options(new));
    let one = needed(10).expect("it writes");
    let bytes = needed(60).expect("it writes") + one;
    let mut generator = engine.generator(bytes).expect("a generator");
    generator
        .admit(request(&prompts[0], &options(60)))
        .expect("there is room");
    generator
        .admit(request(&prompts[1], &options(10)))
        .expect("there is room");
    let third = request(&prompts[2], &options(10));
    let full = AdmitError::Full { missing_bytes: one };
    assert_eq!(generator.admit(third.clone()), Err(full));
    for _ in 0..10 {
        generator.poll().expect("a step");
    }
    // The short request is complete and has freed its memory. The long request is still running.
    generator.admit(third).expect("its memory is free");
    let all = drain(&mut generator);
    assert_eq!(all.len(), 2);
    assert_eq!(generator.cache_bytes(), (0, bytes));
}

/// Returns settings of greedy search with at most 20 new tokens.
fn short() -> SamplingParams {
    let mut options = SamplingParams::default();
    options.rules.max_new_tokens = 20;
    options
}

#[test]
fn more_prompts_than_there_is_room_for_are_written_one_after_another_and_fail_one_by_one() {
    let (name, description) = MODELS[0];
    let engine = engine(name, description);
    let mut all = prompts(&[20, 7, 31, 20, 3, 12]);
    let options = short();
    let go_on = |_: usize, _: &Event| ControlFlow::Continue(());
    let alone = |prompt: &Vec<u32>| {
        let mut written = engine.generate(std::slice::from_ref(prompt), &options, go_on);
        written.as_mut().expect("it writes").remove(0)
    };
    let want: Vec<_> = all.iter().map(alone).collect();
    all.insert(2, vec![7; 600]);
    all.insert(4, Vec::new());
    let room = engine.cache_bytes_needed(&[31, 20], &options);
    let mut generator = engine.generator(room.expect("bytes")).expect("a generator");
    let requests = all.iter().map(|prompt| request(prompt, &options));
    let mut seen = Vec::new();
    let written = generator.write_all(requests, |index, event| {
        if matches!(event, Event::Done { .. }) {
            seen.push(index);
        }
        ControlFlow::Continue(())
    });
    let mut written = written.expect("it writes");
    assert_eq!(seen.len(), 6);
    let positions = 512;
    let (prompt, new) = (600, 20);
    let long = AdmitError::TooLong {
        extended: None,
        prompt,
        new,
        positions,
    };
    assert_eq!(
        written.remove(4).problem,
        Some(Failure::Refused(AdmitError::EmptyPrompt))
    );
    assert_eq!(written.remove(2).problem, Some(Failure::Refused(long)));
    assert_eq!(written, want);
    assert_eq!(generator.cache_bytes().0, 0);
    // If settings are invalid, the whole call fails, not only a prompt.
    let none = SamplingParams {
        beams: Some(Beams::of(0)),
        ..SamplingParams::default()
    };
    let refused = engine.generate(&all, &none, go_on).expect_err("an error");
    insta::assert_snapshot!(refused, @"0 beams; expected at least one");
}

#[test]
fn a_request_that_is_stopped_computes_nothing_more() {
    let (name, description) = MODELS[0];
    let engine = engine(name, description);
    let all = prompts(&[20, 7, 31]);
    let options = short();
    let go_on = |_: usize, _: &Event| ControlFlow::Continue(());
    let want = engine.generate(&all, &options, go_on).expect("it writes");
    let bytes = engine.cache_bytes_needed(&[20, 7, 31], &options);
    let mut generator = engine
        .generator(bytes.expect("bytes"))
        .expect("a generator");
    let mut told = [0; 3];
    let requests = all.iter().map(|prompt| request(prompt, &options));
    // The callback stops the second text at its first token, and the other texts at their fifth token.
    let written = generator.write_all(requests, |index, _| {
        told[index] += 1;
        match told[index] >= [5, 1, 5][index] {
            true => ControlFlow::Break(Stop::One),
            false => ControlFlow::Continue(()),
        }
    });
    for ((written, want), n) in written.expect("it writes").iter().zip(&want).zip([5, 1, 5]) {
        assert_eq!(written.tokens, want.tokens[..n]);
        assert_eq!(written.reason, None);
    }
    assert_eq!(told, [5, 1, 5]);
    assert_eq!(generator.steps(), 5);
    assert_eq!(generator.cache_bytes().0, 0);
    let requests = all.iter().map(|prompt| request(prompt, &options));
    let written = generator.write_all(requests, |_, _| ControlFlow::Break(Stop::All));
    assert_eq!(written.expect("it writes").len(), 3);
    assert_eq!(generator.cache_bytes().0, 0);
}

#[test]
fn what_cannot_run_is_refused_in_words() {
    let (name, description) = MODELS[0];
    let engine = engine(name, description);
    let mut generator = engine.generator(1 << 20).expect("a generator");
    let mut refused = |prompt: &[u32], change: fn(&mut SamplingParams)| {
        let mut options = short();
        change(&mut options);
        let refused = generator.admit(request(prompt, &options));
        refused.expect_err("an error").to_string()
    };
    let plain = |_: &mut SamplingParams| ();
    insta::assert_snapshot!(refused(&[], plain), @"the prompt has no tokens; begin with the model's first token, if it has one");
    insta::assert_snapshot!(refused(&[7; 500], plain), @"the prompt's 500 tokens and 20 new ones are more than the model's 512 positions; shorten the prompt, or request at most 12 new tokens");
    insta::assert_snapshot!(refused(&[7; 600], plain), @"the prompt's 600 tokens and 20 new ones are more than the model's 512 positions; shorten the prompt to at most 492 tokens");
    insta::assert_snapshot!(refused(&[7; 512], |o| o.rules.max_new_tokens = Rules::NO_LIMIT), @"the prompt's 512 tokens and 1 new ones are more than the model's 512 positions; shorten the prompt to at most 511 tokens");
    insta::assert_snapshot!(refused(&[1], |o| o.beams = Some(Beams::of(0))), @"0 beams; expected at least one");
    insta::assert_snapshot!(refused(&[1], |o| o.beams = Some(Beams::of(257))), @"257 beams; expected at most 256");
    insta::assert_snapshot!(refused(&[1], |o| (o.beams, o.logits) = (Some(Beams::of(2)), true)), @"beam search cannot return logits, which belong to one sequence; request one of the two");
    insta::assert_snapshot!(refused(&[1], |o| o.sampling = Some(Sampling { top_p: 0.0, ..Sampling::default() })), @"top_p is 0; expected a number above 0, up to 1");
    insta::assert_snapshot!(refused(&[1], |o| o.sampling = Some(Sampling { top_p: 1.5, ..Sampling::default() })), @"top_p is 1.5; expected a number above 0, up to 1");
    insta::assert_snapshot!(refused(&[1, 5000], plain), @"token 1 of the prompt is 5000, but the vocabulary has 1003 tokens");
    insta::assert_snapshot!(refused(&[1], |o| o.rules.max_new_tokens = 0), @"max_new_tokens is 0; expected at least one token");
    insta::assert_snapshot!(refused(&[1], |o| o.rules.repetition_penalty = 0.0), @"the repetition penalty is 0; expected a number above 0");
    insta::assert_snapshot!(refused(&[1; 400], |o| o.rules.max_new_tokens = 100), @"the request needs 3932160 bytes of KV cache, and its total size is 983040; use a larger cache, a shorter prompt or fewer new tokens");
    let encoder = Engine::builder(description)
        .config(file(&format!("{name}.json")))
        .random_weights(WEIGHTS)
        .device(DeviceChoice::Cpu)
        .build()
        .expect("the model loads");
    let refused = encoder.generator(1).err().expect("an error");
    insta::assert_snapshot!(refused, @"the engine was built to compute outputs, not to generate; build it with `Builder::generating`");
    let bert = Engine::builder("bert")
        .config(file("bert_head32.json"))
        .random_weights(WEIGHTS)
        .device(DeviceChoice::Cpu)
        .generating();
    assert!(bert.build().is_err(), "it has no such output");
}

#[test]
fn a_step_without_a_token_that_may_come_ends_its_sequence_and_no_other() {
    let (name, description) = MODELS[0];
    let engine = engine(name, description);
    let mut generator = engine.generator(1 << 20).expect("a generator");
    let none = SamplingParams {
        rules: Rules {
            suppressed: (0..1003).collect(),
            ..short().rules
        },
        ..SamplingParams::default()
    };
    let bad = generator
        .admit(request(&[7, 8], &none))
        .expect("there is room");
    let good = generator
        .admit(request(&[7, 8], &short()))
        .expect("there is room");
    let events = generator.poll().expect("a step");
    assert!(matches!(&events[0], Event::Failed { ticket, problem }
        if *ticket == bad && *problem == Failure::NoToken { step: 0 }));
    assert!(matches!(events[1], Event::Token { ticket, .. } if ticket == good));
    assert_eq!(drain(&mut generator)[&good].1, Some(Reason::Length));
}

/// Returns a copy of `tests/checkpoints/writer`, a GPT-2 that generates stories, after `change` has modified it.
fn writer_with(change: impl FnOnce(&Path)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for entry in std::fs::read_dir("tests/checkpoints/writer").expect("the checkpoint") {
        let file = entry.expect("a file").path();
        let name = file.file_name().expect("a name");
        std::fs::copy(&file, folder.path().join(name)).expect("it is copied");
    }
    change(folder.path());
    folder
}

#[test]
fn a_logit_that_is_no_number_fails_its_request_and_no_other() {
    // Damage the embedding of the position before the last position. Only a sequence that reaches it fails. The embedding of the last
    // position itself is never read, because the token there is never an input.
    let folder = writer_with(|folder| {
        let file = folder.join("model.safetensors");
        let mut bytes = std::fs::read(&file).expect("weights");
        let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).expect("a header");
        let table = metadata.info("transformer.wpe.weight").expect("positions");
        let (rows, width) = (table.shape[0], table.shape[1]);
        let at = 8 + header + table.data_offsets.0 + (rows - 2) * width * 2;
        for element in bytes[at..at + width * 2].chunks_exact_mut(2) {
            element.copy_from_slice(&0x7e00u16.to_le_bytes());
        }
        std::fs::write(&file, bytes).expect("it is written");
    });
    let engine = Engine::from_checkpoint(folder.path()).device(DeviceChoice::Cpu);
    let engine = engine.generating().build().expect("it loads");
    let options = |new, beams: usize| SamplingParams {
        rules: Rules {
            max_new_tokens: new,
            ..Rules::default()
        },
        beams: (beams > 1).then(|| Beams::of(beams)),
        ..SamplingParams::default()
    };
    let prompt: Vec<u32> = (0..250).map(|i| 1 + i % 40).collect();
    let asked = [options(6, 1), options(5, 1), options(6, 3), options(4, 3)];
    let mut generator = engine.generator(64 << 20).expect("a generator");
    let tickets: Vec<Ticket> = asked
        .iter()
        .map(|options| {
            generator
                .admit(request(&prompt, options))
                .expect("there is room")
        })
        .collect();
    let mut said: BTreeMap<Ticket, String> = BTreeMap::new();
    while generator.is_busy() {
        for event in generator.poll().expect("a step") {
            match event {
                Event::Failed { ticket, problem } => {
                    drop(said.insert(ticket, problem.to_string()));
                }
                Event::Done { ticket, reason } => drop(said.insert(ticket, format!("{reason:?}"))),
                Event::Token { .. } | Event::Found { .. } => {}
            }
        }
    }
    let said: Vec<&String> = tickets.iter().map(|ticket| &said[ticket]).collect();
    insta::assert_debug_snapshot!(said);
    assert_eq!(generator.cache_bytes().0, 0);
}

#[test]
fn a_key_that_would_change_the_result_is_refused_with_its_file() {
    let folder = writer_with(|folder| {
        let config = r#"{"eos_token_id": 0, "guidance_scale": 2.5}"#;
        std::fs::write(folder.join("generation_config.json"), config).expect("it is written");
    });
    let refused = gemmule::generate::generation_config(folder.path()).expect_err("an error");
    let text = refused.to_string();
    let text = text.replace(&folder.path().display().to_string(), "[dir]");
    insta::assert_snapshot!(text, @"`[dir]/generation_config.json`: `guidance_scale` is 2.5, which changes the result and is not supported; remove it in a copy of the folder to ignore it");
}

#[test]
fn a_callback_that_panics_ends_its_call_and_the_engine_goes_on() {
    let (name, description) = MODELS[0];
    let engine = engine(name, description);
    let prompts = prompts(&[4, 9]);
    let options = short();
    let go_on = |_: usize, _: &Event| ControlFlow::Continue(());
    let want = engine.generate(&prompts, &options, go_on);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        engine.generate(&prompts, &options, |index, _| match index {
            0 => ControlFlow::Continue(()),
            _ => panic!("the caller's own"),
        })
    }));
    let payload = caught.expect_err("it panics");
    assert_eq!(payload.downcast_ref(), Some(&"the caller's own"));
    let again = engine.generate(&prompts, &options, go_on);
    assert_eq!(again.expect("it writes"), want.expect("it writes"));
}

#[test]
fn an_engine_that_writes_has_no_sessions_and_one_kernel_of_attention() {
    let (name, description) = MODELS[0];
    let refused = engine(name, description).session().err().expect("an error");
    insta::assert_snapshot!(refused, @"the engine was built to generate, and a session computes whole sequences; create a generator, or build the engine without `Builder::generating`");
    let asked = Engine::builder(description)
        .config(file(&format!("{name}.json")))
        .random_weights(WEIGHTS)
        .device(DeviceChoice::Cpu)
        .attention(AttentionChoice::Online)
        .generating();
    let refused = asked.build().err().expect("an error").to_string();
    assert!(
        refused.contains(
            "online attention was requested, but attention to a KV cache has only one kernel"
        ),
        "{refused}"
    );
}

/// Returns settings of random sampling, with different samplers and rules on logits.
fn ways_to_draw() -> Vec<SamplingParams> {
    let sampling = |temperature, top_k, top_p, min_p| {
        Some(Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
        })
    };
    let mut all: Vec<SamplingParams> = [
        None,
        sampling(1.0, 50, 1.0, 0.0),
        sampling(0.8, 50, 0.9, 0.0),
        sampling(1.0, 0, 0.7, 0.0),
        sampling(1.5, 0, 1.0, 0.0),
        sampling(2.0, 0, 0.98, 0.0),
        sampling(1.0, 0, 1.0, 0.1),
        sampling(1.0, 800, 0.95, 0.0),
    ]
    .into_iter()
    .enumerate()
    .map(|(i, sampling)| SamplingParams {
        sampling,
        seed: 40 + i as u64,
        log_probabilities: i % 3 == 0,
        rules: Rules {
            max_new_tokens: 24 + 5 * i,
            ..Rules::default()
        },
        ..SamplingParams::default()
    })
    .collect();
    all[1].rules.repetition_penalty = 1.4;
    all[2].rules.no_repeat_ngram = 2;
    all[3].rules.suppressed = (0..300).step_by(2).collect();
    all[4].rules.forced_first = Some(17);
    (all[5].rules.end, all[5].rules.min_new_tokens) = ((0..400).step_by(4).collect(), 6);
    all[6].rules.forced_last = vec![3];
    // This list has more ids than the device supports. The host then chooses the tokens.
    all[7].rules.suppressed = (0..500).step_by(2).collect();
    all
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn draws_on_a_device_are_those_of_the_cpu() {
    let (name, description) = MODELS[2];
    let prompts = prompts(&[5, 40, 3, 70, 12, 33, 1, 300]);
    let draw = |device: DeviceChoice, together: bool| {
        let engine = engine_on(device, name, description);
        let mut generator = engine.generator(16 << 20).expect("a generator");
        let mut all = BTreeMap::new();
        for (prompt, options) in prompts.iter().zip(ways_to_draw()) {
            let ticket = generator.admit(request(prompt, &options));
            ticket.expect("there is room");
            if !together {
                all.extend(drain(&mut generator));
            }
        }
        all.extend(drain(&mut generator));
        all.into_values().collect::<Vec<_>>()
    };
    let want = draw(DeviceChoice::Cpu, true);
    assert_eq!(draw(DeviceChoice::Cuda(0), true), want);
    assert_eq!(draw(DeviceChoice::Cuda(0), false), want);
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn many_requests_on_a_device_move_together_and_grow_apart() {
    let (name, description) = MODELS[2];
    let ways = ways_to_draw();
    let lens: Vec<usize> = (0..70).map(|i| 1 + 7 * i % 45).collect();
    let prompts = prompts(&lens);
    let options = |i: usize| {
        let mut options = ways[i % 3].clone();
        // Most sequences end early, so that the other sequences move to other rows of the device's token table. Two sequences have more
        // tokens than a row of the table holds initially.
        options.rules.max_new_tokens = if i % 30 == 20 { 280 } else { 5 + i % 9 };
        options.seed = i as u64;
        options
    };
    let tokens = |device: DeviceChoice| {
        let engine = engine_on(device, name, description);
        let mut generator = engine.generator(64 << 20).expect("a generator");
        let mut all: BTreeMap<Ticket, (Vec<u32>, Option<Reason>)> = BTreeMap::new();
        for (i, prompt) in prompts.iter().enumerate() {
            let ticket = generator.admit(request(prompt, &options(i)));
            ticket.expect("there is room");
            // Run a step after each of the last admissions, so that these requests are admitted while earlier requests are running.
            if i >= 40 {
                collect(generator.poll().expect("a step"), &mut all);
            }
        }
        for (ticket, (tokens, reason)) in drain(&mut generator) {
            let own = all.entry(ticket).or_default();
            own.0.extend(tokens);
            own.1 = own.1.or(reason);
        }
        assert_eq!(generator.cache_bytes().0, 0);
        all
    };
    assert_eq!(tokens(DeviceChoice::Cuda(0)), tokens(DeviceChoice::Cpu));
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn sequences_that_come_to_more_keys_than_a_kernel_is_chosen_for_go_on_as_on_a_cpu() {
    let (name, description) = MODELS[2];
    let config = std::fs::read_to_string(file(&format!("{name}.json"))).expect("it is there");
    // With YaRN, the number of positions is `factor` times the original number.
    let longer = config.replace(
        "\"original_max_position_embeddings\": 128",
        "\"original_max_position_embeddings\": 512",
    );
    assert_ne!(longer, config);
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("config.json");
    std::fs::write(&config, longer).expect("it is written");
    let options = SamplingParams {
        rules: Rules {
            max_new_tokens: 60,
            ..Rules::default()
        },
        ..SamplingParams::default()
    };
    // In f32 with heads of 64, steps of few sequences use other attention kernels once the longest sequence has more than 128 keys, and
    // again once it has more than 384.
    for lens in [[90, 20, 100, 75], [350, 20, 370, 100]] {
        let prompts = prompts(&lens);
        let tokens = |device: DeviceChoice| {
            let engine = engine_of(device, config.clone(), description);
            let mut generator = engine.generator(16 << 20).expect("a generator");
            for prompt in &prompts {
                let ticket = generator.admit(request(prompt, &options));
                ticket.expect("there is room");
            }
            drain(&mut generator)
        };
        assert_eq!(
            tokens(DeviceChoice::Cuda(0)),
            tokens(DeviceChoice::Cpu),
            "{lens:?}"
        );
    }
}

/// Returns settings of beam searches of many kinds, which together contain all rules on logits.
fn ways_to_search() -> Vec<SamplingParams> {
    let of = |n: usize, max_new_tokens: usize| SamplingParams {
        rules: Rules {
            max_new_tokens,
            end: vec![3, 40],
            ..Rules::default()
        },
        beams: Some(Beams::of(n)),
        ..SamplingParams::default()
    };
    let mut all: Vec<SamplingParams> = (0..10).map(|i| of([4, 2, 1, 5][i % 4], 14 + i)).collect();
    all[0].rules.repetition_penalty = 1.4;
    all[0].rules.renormalize = true;
    all[1].rules.no_repeat_ngram = 2;
    all[1].rules.forced_last = vec![3];
    all[2].rules.min_new_tokens = 9;
    all[3].beams = Some(Beams {
        groups: 3,
        diversity: 0.8,
        ..Beams::of(6)
    });
    all[4].rules.suppressed = (0..60).collect();
    all[4].rules.renormalize = true;
    all[5].rules.forced_first = Some(7);
    all[5].rules.repetition_penalty = 0.8;
    all[6].beams = Some(Beams {
        early_stopping: EarlyStopping::Never,
        length_penalty: 0.3,
        groups: 2,
        diversity: 0.5,
        ..Beams::of(4)
    });
    all[7].rules.suppressed_first = (0..100).collect();
    // The device supports at most 16 beams. The host runs the search with 17 beams.
    all[8].beams = Some(Beams::of(17));
    all[9].beams = Some(Beams::of(16));
    all
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn searches_on_a_device_are_those_of_the_cpu_and_move_and_grow() {
    let (name, description) = MODELS[2];
    let ways = ways_to_search();
    let lens: Vec<usize> = (0..40).map(|i| 1 + 7 * i % 45).collect();
    let prompts = prompts(&lens);
    let options = |i: usize| {
        let mut options = ways[i % ways.len()].clone();
        // One in four requests has no beams. Two searches may have more tokens than the device's token table holds initially, so it grows.
        if i % 4 == 3 {
            options.beams = None;
        }
        if i % 20 == 16 {
            options.rules.max_new_tokens = 280;
            options.rules.end = Vec::new();
        }
        options
    };
    let search = |device: DeviceChoice| {
        let engine = engine_on(device, name, description);
        let mut generator = engine.generator(256 << 20).expect("a generator");
        let mut all: BTreeMap<Ticket, (Vec<u32>, Vec<f32>)> = BTreeMap::new();
        let mut cancelled = None;
        let mut take = |events: Vec<Event>| {
            for event in events {
                let own = all.entry(event.ticket()).or_default();
                match event {
                    Event::Token { id, .. } => own.0.push(id),
                    Event::Found { hypotheses, .. } => {
                        own.1 = hypotheses.iter().map(|h| h.score).collect();
                    }
                    Event::Failed { problem, .. } => panic!("{problem}"),
                    Event::Done { .. } => {}
                }
            }
        };
        for (i, prompt) in prompts.iter().enumerate() {
            let ticket = generator.admit(request(prompt, &options(i)));
            let ticket = ticket.expect("there is room");
            if i == 36 {
                cancelled = Some(ticket);
            }
            if i >= 20 {
                take(generator.poll().expect("a step"));
            }
        }
        let cancelled = cancelled.expect("it was admitted");
        assert!(generator.cancel(cancelled));
        while generator.is_busy() {
            take(generator.poll().expect("a step"));
        }
        assert_eq!(generator.cache_bytes().0, 0);
        all.remove(&cancelled);
        all
    };
    let (device, host) = (search(DeviceChoice::Cuda(0)), search(DeviceChoice::Cpu));
    assert_eq!(device.len(), host.len());
    for (ticket, (tokens, scores)) in &host {
        let (own, own_scores) = &device[ticket];
        assert_eq!(own, tokens, "{ticket:?}");
        let best = |scores: &[f32]| scores.first().copied().unwrap_or(0.0);
        let (a, b) = (best(own_scores), best(scores));
        assert!((a - b).abs() < 1e-4, "{ticket:?}: {a} {b}");
        assert_eq!(own_scores.len(), scores.len(), "{ticket:?}");
    }
}

#[test]
fn logits_come_with_the_tokens_of_who_asks() {
    logits_on(DeviceChoice::Cpu);
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn logits_come_with_the_tokens_of_who_asks_on_a_device() {
    logits_on(DeviceChoice::Cuda(0));
}

fn logits_on(device: DeviceChoice) {
    let (name, description) = MODELS[2];
    let engine = engine_on(device, name, description);
    let fresh = Engine::builder(description)
        .config(file(&format!("{name}.json")))
        .random_weights(WEIGHTS)
        .dtype(DType::F32)
        .outputs(["next_token_logits"])
        .device(DeviceChoice::Cpu)
        .build()
        .expect("the model loads");
    let prompts = prompts(&[5, 40]);
    let options = |logits: bool, suppressed: Vec<u32>| SamplingParams {
        rules: Rules {
            max_new_tokens: 5,
            suppressed,
            ..Rules::default()
        },
        log_probabilities: true,
        logits,
        ..SamplingParams::default()
    };
    let mut generator = engine.generator(16 << 20).expect("a generator");
    // Forbid the best token. The returned logits must still contain its logit, because rules do not change them.
    let best = gemmule::search::greedy(&whole(&fresh, &prompts[0]));
    let asks = generator.admit(request(&prompts[0], &options(true, vec![best])));
    let asks = asks.expect("there is room");
    let other = generator.admit(request(&prompts[1], &options(false, Vec::new())));
    other.expect("there is room");
    let mut all = prompts[0].clone();
    while generator.is_busy() {
        for event in generator.poll().expect("a step") {
            let Event::Token {
                ticket,
                id,
                log_probability,
                logits,
                ..
            } = event
            else {
                continue;
            };
            if ticket != asks {
                assert!(logits.is_empty());
                continue;
            }
            let want = whole(&fresh, &all);
            assert_eq!(logits.len(), want.len());
            for (a, b) in logits.iter().zip(&want) {
                assert!((a - b).abs() < 1e-3, "{a} {b}");
            }
            assert_ne!(id, best);
            let own = gemmule::search::log_probability(&logits, id);
            assert_eq!(log_probability, Some(own));
            all.push(id);
        }
    }
    assert_eq!(all.len(), prompts[0].len() + 5);
}

/// Result of a request. The first list contains its tokens. Without beam search, the second list has an entry for each log-probability of a
/// token: an empty list and the bits of the number. With beam search, it has an entry for each hypothesis: its tokens and the bits of its
/// score.
type Bits = (Vec<u32>, Vec<(Vec<u32>, u32)>);

fn collect_bits(events: Vec<Event>, into: &mut BTreeMap<Ticket, Bits>) {
    for event in events {
        let own = into.entry(event.ticket()).or_default();
        match event {
            Event::Token {
                id,
                log_probability,
                ..
            } => {
                own.0.push(id);
                own.1
                    .extend(log_probability.map(|x| (Vec::new(), x.to_bits())));
            }
            Event::Found { hypotheses, .. } => {
                let all = hypotheses.into_iter();
                own.1.extend(all.map(|h| (h.tokens, h.score.to_bits())));
            }
            Event::Failed { problem, .. } => panic!("{problem}"),
            Event::Done { .. } => {}
        }
    }
}

fn drain_bits(generator: &mut Generator, into: &mut BTreeMap<Ticket, Bits>) {
    while generator.is_busy() {
        collect_bits(generator.poll().expect("a step"), into);
    }
}

/// Returns the result of `request` if `generator` runs no other request.
fn written_alone(mut generator: Generator, request: &Request) -> Bits {
    let ticket = generator.admit(request.clone()).expect("there is room");
    let mut all = BTreeMap::new();
    drain_bits(&mut generator, &mut all);
    all.remove(&ticket).expect("it wrote")
}

#[test]
fn an_invariant_engine_on_a_cpu_writes_to_the_bit_what_it_writes_alone() {
    for (name, description) in [MODELS[0], MODELS[2], MODELS[4]] {
        let engine = Engine::builder(description)
            .config(file(&format!("{name}.json")))
            .random_weights(WEIGHTS)
            .dtype(DType::F32)
            .invariant(true)
            .device(DeviceChoice::Cpu)
            .generating()
            .build()
            .expect("the model loads");
        let prompts = prompts(&[5, 40, 3, 70, 12, 33, 1, 90]);
        // The requests use greedy search, sampling, beams and beam groups.
        let options = |i: usize| SamplingParams {
            rules: Rules {
                max_new_tokens: 12 + i,
                ..Rules::default()
            },
            sampling: (i % 4 == 1).then(Sampling::default),
            beams: match i % 4 {
                2 => Some(Beams::of(3)),
                3 => Some(Beams {
                    groups: 2,
                    diversity: 0.5,
                    ..Beams::of(4)
                }),
                _ => None,
            },
            seed: 7 + i as u64,
            log_probabilities: true,
            ..SamplingParams::default()
        };
        let generator = || engine.generator(16 << 20).expect("a generator");
        let alone: Vec<Bits> = prompts
            .iter()
            .enumerate()
            .map(|(i, prompt)| written_alone(generator(), &request(prompt, &options(i))))
            .collect();
        // Steps split prompts into parts of at most 11 tokens. Some requests are admitted while others run, and one running request is
        // canceled.
        let mut generator = generator();
        generator.prompt_tokens_per_step(11);
        let mut all = BTreeMap::new();
        let mut tickets = Vec::new();
        for (i, prompt) in prompts.iter().enumerate() {
            let admitted = generator.admit(request(prompt, &options(i)));
            tickets.push(admitted.expect("there is room"));
            collect_bits(generator.poll().expect("a step"), &mut all);
            if i == 6 {
                assert!(generator.cancel(tickets[4]), "{name}: it runs");
            }
        }
        drain_bits(&mut generator, &mut all);
        for (i, (ticket, want)) in tickets.iter().zip(&alone).enumerate() {
            match i {
                4 => assert!(want.0.starts_with(&all[ticket].0), "{name}"),
                _ => assert_eq!(&all[ticket], want, "{name}, request {i}"),
            }
        }
    }
}

#[test]
fn blocks_of_cancelled_requests_are_clean_for_the_next() {
    churn_on(DeviceChoice::Cpu, 40);
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn blocks_of_cancelled_requests_are_clean_for_the_next_on_a_device() {
    churn_on(DeviceChoice::Cuda(0), 400);
}

/// Cancels requests in all stages, so that other requests reuse their cache blocks at once. The results of the other requests must not
/// change, although prompt batches and steps in flight on a device may still write to these blocks.
fn churn_on(device: DeviceChoice, n: usize) {
    const LENS: [usize; 8] = [1, 40, 3, 100, 12, 33, 1, 70];
    let (name, description) = MODELS[2];
    let engine = Engine::builder(description)
        .config(file(&format!("{name}.json")))
        .random_weights(WEIGHTS)
        .dtype(DType::F32)
        .invariant(true)
        .device(device)
        .generating()
        .build()
        .expect("the model loads");
    let prompts = prompts(&LENS);
    let options = |kind: usize| SamplingParams {
        rules: Rules {
            max_new_tokens: 6 + 3 * kind,
            ..Rules::default()
        },
        sampling: (kind % 2 == 1).then(Sampling::default),
        seed: 7 + kind as u64,
        log_probabilities: true,
        ..SamplingParams::default()
    };
    let new_generator = |kinds: &[usize]| {
        let bytes = kinds.iter().map(|&kind| {
            let needed = engine.cache_bytes_needed(&[LENS[kind]], &options(kind));
            needed.expect("the engine writes")
        });
        let generator = engine.generator(bytes.sum());
        generator.expect("a generator")
    };
    let alone: Vec<Bits> = (0..LENS.len())
        .map(|kind| {
            let request = request(&prompts[kind], &options(kind));
            written_alone(new_generator(&[kind]), &request)
        })
        .collect();
    // The cache has room only for a few requests, so that new requests reuse freed blocks at once.
    let mut generator = new_generator(&[3, 7, 1]);
    generator.prompt_tokens_per_step(23);
    let mut chance = 1u64;
    let mut draw = |below: u64| {
        chance = chance
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (chance >> 33) % below
    };
    let mut all = BTreeMap::new();
    let mut kinds = BTreeMap::new();
    let (mut running, mut cancelled) = (Vec::new(), 0);
    while kinds.len() < n {
        let kind = draw(LENS.len() as u64) as usize;
        match generator.admit(request(&prompts[kind], &options(kind))) {
            Ok(ticket) => {
                kinds.insert(ticket, kind);
                running.push(ticket);
            }
            Err(AdmitError::Full { .. }) => {
                let at = draw(running.len() as u64) as usize;
                cancelled += usize::from(generator.cancel(running.swap_remove(at)));
            }
            Err(other) => panic!("{other}"),
        }
        for _ in 0..draw(4) {
            collect_bits(generator.poll().expect("a step"), &mut all);
        }
    }
    drain_bits(&mut generator, &mut all);
    assert!(4 * cancelled > n, "{cancelled} of {n} were cancelled");
    let mut whole = 0;
    for (ticket, kind) in kinds {
        let want = &alone[kind];
        let Some(found) = all.get(&ticket) else {
            continue;
        };
        assert!(want.0.starts_with(&found.0), "{ticket:?} of kind {kind}");
        assert!(want.1.starts_with(&found.1), "{ticket:?} of kind {kind}");
        whole += usize::from(found == want);
    }
    assert!(4 * whole > n, "{whole} of {n} were written to their end");
    assert_eq!(generator.cache_bytes().0, 0);
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn an_invariant_engine_writes_to_the_bit_what_it_writes_alone() {
    for (name, description) in MODELS {
        let engine = Engine::builder(description)
            .config(file(&format!("{name}.json")))
            .random_weights(WEIGHTS)
            .dtype(DType::F16)
            .invariant(true)
            .device(DeviceChoice::Cuda(0))
            .generating()
            .build()
            .expect("the model loads");
        let prompts = prompts(&[5, 40, 3, 70, 12, 33, 1, 100]);
        let options = SamplingParams {
            rules: Rules {
                max_new_tokens: 30,
                ..Rules::default()
            },
            log_probabilities: true,
            ..SamplingParams::default()
        };
        let write = |prompts: &[Vec<u32>]| {
            let go_on = |_: usize, _: &Event| ControlFlow::Continue(());
            engine
                .generate(prompts, &options, go_on)
                .expect("it writes")
        };
        let together = write(&prompts);
        for (prompt, want) in prompts.iter().zip(&together) {
            let alone = &write(std::slice::from_ref(prompt))[0];
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(alone.tokens, want.tokens, "{name}");
            assert_eq!(
                bits(&alone.log_probabilities),
                bits(&want.log_probabilities),
                "{name}"
            );
        }
    }
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn logits_that_overflow_on_a_device_fail_their_requests() {
    let (name, description) = MODELS[2];
    let engine = Engine::builder(description)
        .config(file(&format!("{name}.json")))
        .random_weights(RandomWeights {
            deviation: 3000.0,
            ..WEIGHTS
        })
        .dtype(DType::F16)
        .device(DeviceChoice::Cuda(0));
    let engine = engine.generating().build().expect("the model loads");
    let mut generator = engine.generator(1 << 20).expect("a generator");
    let short = SamplingParams {
        rules: Rules {
            max_new_tokens: 20,
            ..Rules::default()
        },
        ..SamplingParams::default()
    };
    let beams = SamplingParams {
        beams: Some(Beams::of(3)),
        ..short.clone()
    };
    for (prompt, options) in prompts(&[3, 9]).iter().zip([short, beams]) {
        let ticket = generator.admit(request(prompt, &options));
        ticket.expect("there is room");
    }
    let mut problems = Vec::new();
    while generator.is_busy() {
        for event in generator.poll().expect("a step") {
            match event {
                Event::Failed { problem, .. } => problems.push(problem),
                event => panic!("{event:?}"),
            }
        }
    }
    let wrong = |problem: &Failure| match problem {
        Failure::NotANumber { step, beam, .. } => Some((*step, *beam)),
        Failure::NoToken { .. } | Failure::Refused(_) => None,
    };
    let wrong: Vec<_> = problems.iter().map(wrong).collect();
    assert!(wrong.contains(&Some((0, None))), "{problems:?}");
    assert!(wrong.contains(&Some((0, Some(0)))), "{problems:?}");
    assert_eq!(wrong.len(), 2);
    assert_eq!(generator.cache_bytes().0, 0);
}

#[test]
fn a_max_context_extends_the_positions_and_selects_the_rotation() {
    let build = |tokens: Option<u32>| {
        let mut builder = Engine::builder("phi3")
            .config(file("phi3_longrope.json"))
            .random_weights(WEIGHTS)
            .dtype(DType::F32)
            .device(DeviceChoice::Cpu);
        if let Some(tokens) = tokens {
            builder = builder.max_context(tokens);
        }
        builder.generating().build()
    };
    let options = SamplingParams {
        rules: Rules {
            max_new_tokens: 24,
            ..Rules::default()
        },
        ..SamplingParams::default()
    };
    let go_on = |_: usize, _: &Event| ControlFlow::Continue(());
    let written = |engine: &Engine, prompt: Vec<u32>| {
        let written = engine.generate(&[prompt], &options, go_on);
        written.expect("it writes").remove(0)
    };
    let long = build(Some(512)).expect("the model loads");
    for (prompt, tokens) in stored("phi3_long_context", "greedy") {
        assert_eq!(written(&long, prompt).tokens, tokens);
    }
    let short = build(None).expect("the model loads");
    assert_eq!(short.limits().longest, Some(128));
    for (prompt, tokens) in stored("phi3_longrope", "greedy") {
        assert_eq!(written(&short, prompt).tokens, tokens);
    }
    assert_eq!(written(&long, vec![7; 300]).tokens.len(), 24);
    let refused = written(&short, vec![7; 300]).problem.expect("an error");
    insta::assert_snapshot!(refused, @"the prompt's 300 tokens and 24 new ones are more than the model's 128 positions; shorten the prompt to at most 104 tokens, or build the model with a `max_context` (`--max-context`) of up to 512 tokens");
    let lower = build(Some(200)).expect("the model loads");
    let refused = written(&lower, vec![7; 300]).problem.expect("an error");
    insta::assert_snapshot!(refused, @"the prompt's 300 tokens and 24 new ones are more than the model's 200 positions; shorten the prompt to at most 176 tokens, or build the model with a `max_context` (`--max-context`) of up to 512 tokens");
    let refused = build(Some(513)).map(drop).expect_err("an error");
    insta::assert_snapshot!(refused, @"`max_context` is 513; expected at most 512, the number of positions of the model");
}
