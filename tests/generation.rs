//! Writing with a KV cache: tokens of Hugging Face transformers, and results that do not depend on how a sequence is cut into
//! steps or on what runs beside it.

use std::{collections::BTreeMap, ops::ControlFlow, path::Path};

use gemmule::{
    Batch, DeviceChoice, Engine,
    engine::{AdmitError, Event, Generate, Generator, Reason, Request, Ticket},
    runtime::weights::RandomWeights,
    search::{Rules, Sampling},
};

/// As in `scripts/reference.py`.
const WEIGHTS: RandomWeights = RandomWeights {
    seed: 20,
    deviation: 0.1,
};

/// References by name, and the description that each is of.
const MODELS: [(&str, &str); 3] = [
    ("gpt2_h320a5", "gpt2"),
    ("llama_h320a5", "llama"),
    ("qwen3_h192a6", "qwen3"),
];

fn file(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/references")
        .join(name)
}

fn engine(name: &str, description: &str) -> Engine {
    let builder = Engine::builder(description)
        .config(file(&format!("{name}.json")))
        .random_weights(WEIGHTS)
        .device(DeviceChoice::Cpu);
    builder.generating().build().expect("the model loads")
}

/// Prompt and tokens of each stored continuation, by its name.
fn stored(name: &str, rules: &str) -> Vec<(Vec<u32>, Vec<u32>)> {
    let bytes = std::fs::read(file(&format!("{name}.written.safetensors"))).expect("a reference");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("tensors");
    let ids = |key: String| -> Vec<u32> {
        let tensor = tensors.tensor(&key).expect("it is stored");
        let all = tensor.data().chunks_exact(8);
        all.map(|b| i64::from_le_bytes(b.try_into().expect("eight bytes")) as u32)
            .collect()
    };
    let one = |i: usize| {
        let margin = tensors.tensor(&format!("{rules}.{i}.margin")).expect("it is stored");
        let margin = f32::from_le_bytes(margin.data().try_into().expect("one number"));
        // Where the two best are nearer than f32 in another order, the token is a toss.
        (margin > 1e-3).then(|| {
            let key = |what: &str| format!("{rules}.{i}.{what}");
            (ids(key("prompt")), ids(key("tokens")))
        })
    };
    (0..3).filter_map(one).collect()
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

fn request(prompt: &[u32], options: &Generate) -> Request {
    Request {
        prompt: prompt.to_vec(),
        options: options.clone(),
    }
}

/// Runs until nothing is left; the tokens and the end of each.
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
            Event::Failed { problem, .. } => panic!("{problem}"),
        }
    }
}

#[test]
fn greedy_tokens_are_those_of_transformers() {
    let mut compared = 0;
    for (name, description) in MODELS {
        let engine = engine(name, description);
        for kind in ["greedy", "rules"] {
            let stored = stored(name, kind);
            let prompts: Vec<Vec<u32>> = stored.iter().map(|(p, _)| p.clone()).collect();
            let options = Generate {
                rules: rules(kind),
                ..Generate::default()
            };
            let go_on = |_: usize, _: &Event| ControlFlow::Continue(());
            let written = engine.generate(&prompts, &options, go_on).expect("it writes");
            for (written, (prompt, want)) in written.iter().zip(&stored) {
                assert_eq!(&written.tokens, want, "{name}, {kind}, behind {prompt:?}");
                assert_eq!(written.reason, Some(Reason::Length));
                compared += 1;
            }
        }
    }
    assert!(compared >= 14, "{compared}");
}

/// Prompts of these lengths, from a seed.
fn prompts(lens: &[usize]) -> Vec<Vec<u32>> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 16
    };
    let ids = |&n: &usize| (0..n).map(|_| 5 + next() % 900).collect();
    lens.iter().map(ids).collect::<Vec<_>>()
}

/// The logits of the next token, of a sequence as a whole in one batch without a cache.
fn whole(engine: &Engine, tokens: &[u32]) -> Vec<f32> {
    let batch = Batch::from_sequences(&[tokens]).expect("a batch");
    let outputs = engine.session().expect("a session").run(&batch);
    let outputs = outputs.expect("it runs");
    outputs.get("next_token_logits").expect("logits").values.clone()
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
        let options = Generate {
            rules: Rules {
                max_new_tokens: 40,
                ..Rules::default()
            },
            ..Generate::default()
        };
        let prompts = prompts(&[1, 31, 32, 33, 100]);
        let of = |step: usize| {
            let lens: Vec<(usize, usize)> = prompts.iter().map(|p| (p.len(), 40)).collect();
            let bytes = cached.cache_bytes_needed(&lens).expect("it writes");
            let mut generator = cached.generator(bytes).expect("a generator");
            generator.prompt_tokens_per_step(step);
            for prompt in &prompts {
                generator.admit(request(prompt, &options)).expect("there is room");
            }
            drain(&mut generator)
        };
        let want = of(usize::MAX);
        for step in [1, 7, 64] {
            assert_eq!(of(step), want, "{name}, {step} tokens of prompts a step");
        }
        // Each token is the best of a batch that has the whole sequence.
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
    let (name, description) = MODELS[2];
    let engine = engine(name, description);
    let prompts = prompts(&[5, 40, 3, 70, 12, 33]);
    let options = |i: usize| Generate {
        rules: Rules {
            max_new_tokens: 10 + 7 * i,
            ..Rules::default()
        },
        sampling: (i % 2 == 1).then(Sampling::default),
        seed: 7 + i as u64,
    };
    let alone: Vec<Vec<u32>> = prompts
        .iter()
        .enumerate()
        .map(|(i, prompt)| {
            let go_on = |_: usize, _: &Event| ControlFlow::Continue(());
            let written = engine.generate(&[prompt.clone()], &options(i), go_on);
            written.expect("it writes")[0].tokens.clone()
        })
        .collect();
    let mut generator = engine.generator(4 << 20).expect("a generator");
    let (empty, _) = generator.cache_bytes();
    assert_eq!(empty, 0);
    let mut all = BTreeMap::new();
    let mut tickets = Vec::new();
    for (i, prompt) in prompts.iter().enumerate() {
        tickets.push(generator.admit(request(prompt, &options(i))).expect("there is room"));
        // Others are in the middle of theirs when the next one comes.
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
    assert_eq!(generator.cache_bytes().0, 0, "all memory is free in the end");
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
    let options = |max_new_tokens| Generate {
        rules: Rules {
            max_new_tokens,
            ..Rules::default()
        },
        ..Generate::default()
    };
    let prompts = prompts(&[20, 20, 20]);
    // Room for the long one and one of the short ones.
    let bytes = engine
        .cache_bytes_needed(&[(20, 60), (20, 10)])
        .expect("it writes");
    let mut generator = engine.generator(bytes).expect("a generator");
    generator.admit(request(&prompts[0], &options(60))).expect("there is room");
    generator.admit(request(&prompts[1], &options(10))).expect("there is room");
    let third = request(&prompts[2], &options(10));
    let one = engine.cache_bytes_needed(&[(20, 10)]).expect("it writes");
    let full = AdmitError::Full { missing_bytes: one };
    assert_eq!(generator.admit(third.clone()), Err(full));
    for _ in 0..10 {
        generator.poll().expect("a step");
    }
    // The second has ended, the first is in the middle.
    generator.admit(third).expect("its memory is free");
    let all = drain(&mut generator);
    assert_eq!(all.len(), 2);
    assert_eq!(generator.cache_bytes(), (0, bytes));
}

#[test]
fn what_cannot_run_is_refused_in_words() {
    let (name, description) = MODELS[0];
    let engine = engine(name, description);
    let mut generator = engine.generator(1 << 20).expect("a generator");
    let mut refused = |prompt: &[u32], change: fn(&mut Generate)| {
        let mut options = Generate::default();
        change(&mut options);
        let refused = generator.admit(request(prompt, &options));
        refused.expect_err("an error").to_string()
    };
    let plain = |_: &mut Generate| ();
    insta::assert_snapshot!(refused(&[], plain), @"the prompt has no token; begin with the model's first token, if it has one");
    insta::assert_snapshot!(refused(&[7; 500], plain), @"the prompt's 500 tokens and 20 new ones are more than the model's 512 positions; shorten the prompt, or ask for at most 12 new tokens");
    insta::assert_snapshot!(refused(&[1, 5000], plain), @"token 1 of the prompt is 5000, but the vocabulary has 1003");
    insta::assert_snapshot!(refused(&[1], |o| o.rules.max_new_tokens = 0), @"max_new_tokens is 0; expected at least one token");
    insta::assert_snapshot!(refused(&[1], |o| o.rules.repetition_penalty = 0.0), @"the repetition penalty is 0; expected a number above 0");
    insta::assert_snapshot!(refused(&[1; 400], |o| o.rules.max_new_tokens = 100), @"the request needs 3932160 bytes of KV cache, and there are 983040 in all; ask for a larger cache, a shorter prompt or fewer new tokens");
    let encoder = Engine::builder(description)
        .config(file(&format!("{name}.json")))
        .random_weights(WEIGHTS)
        .device(DeviceChoice::Cpu)
        .build()
        .expect("the model loads");
    let refused = encoder.generator(1).err().expect("an error");
    insta::assert_snapshot!(refused, @"the engine was built to compute outputs, not to write; build it with `Builder::generating`");
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
    let none = Generate {
        rules: Rules {
            suppressed: (0..1003).collect(),
            ..Rules::default()
        },
        ..Generate::default()
    };
    let bad = generator.admit(request(&[7, 8], &none)).expect("there is room");
    let good = generator
        .admit(request(&[7, 8], &Generate::default()))
        .expect("there is room");
    let events = generator.poll().expect("a step");
    assert!(matches!(&events[0], Event::Failed { ticket, problem }
        if *ticket == bad && problem == "the rules allow no token for new token 0"));
    assert!(matches!(events[1], Event::Token { ticket, .. } if ticket == good));
    assert_eq!(drain(&mut generator)[&good].1, Some(Reason::Length));
}
