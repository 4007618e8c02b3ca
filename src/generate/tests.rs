//! Property tests: block ownership and results while requests are admitted and canceled in random order.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::ControlFlow,
    sync::LazyLock,
};

use proptest::prelude::*;
use serde_json::json;

use super::{AdmitError, Event, Failure, Generator, Reason, Request, SamplingParams, Ticket};
use crate::{
    DeviceChoice, Engine,
    kernels::cache::BLOCK,
    runtime::weights::RandomWeights,
    search::{Beams, EarlyStopping, Rules, Sampling},
};

/// A model, its requests, and the result of each request when it runs alone.
struct Subject {
    engine: Engine,
    requests: Vec<Request>,
    alone: Vec<Ended>,
}

/// Tokens of a finished request, and its end reason or failure.
#[derive(Clone, Debug, Default, PartialEq)]
struct Ended {
    tokens: Vec<u32>,
    reason: Option<Reason>,
    problem: Option<Failure>,
}

impl Ended {
    fn take(&mut self, event: Event) {
        match event {
            Event::Token { id, .. } => self.tokens.push(id),
            Event::Done { reason, .. } => self.reason = Some(reason),
            Event::Failed { problem, .. } => self.problem = Some(problem),
            Event::Found { .. } => {}
        }
    }
}

const VOCABULARY: u32 = 61;

/// Requests of each kind: greedy, sampled, beam search, diverse beam groups, and one that fails.
fn requests(decoder_start: Option<u32>) -> Vec<Request> {
    let rules = |max_new_tokens| Rules {
        max_new_tokens,
        end: vec![7, 11],
        ..Rules::default()
    };
    let plain = |max_new_tokens| SamplingParams {
        rules: rules(max_new_tokens),
        decoder_start,
        ..SamplingParams::default()
    };
    let beams = Beams {
        early_stopping: EarlyStopping::Never,
        ..Beams::of(3)
    };
    let groups = Beams {
        groups: 2,
        diversity: 0.7,
        ..Beams::of(4)
    };
    let options = [
        plain(1),
        plain(70),
        SamplingParams {
            sampling: Some(Sampling::default()),
            seed: 3,
            ..plain(40)
        },
        SamplingParams {
            beams: Some(beams),
            ..plain(36)
        },
        SamplingParams {
            beams: Some(groups),
            ..plain(12)
        },
        SamplingParams {
            rules: Rules {
                end: Vec::new(),
                no_repeat_ngram: 2,
                ..rules(33)
            },
            ..plain(33)
        },
        // Only one token is allowed, and only once, so the request fails.
        SamplingParams {
            rules: Rules {
                suppressed: (0..VOCABULARY).filter(|&id| id != 5).collect(),
                no_repeat_ngram: 1,
                ..rules(9)
            },
            ..plain(9)
        },
    ];
    let prompt = |(n, options): (u32, SamplingParams)| {
        let len = [1, 3, 31, 33, 64, 2, 5][n as usize];
        Request {
            prompt: (0..len).map(|i| 12 + (i * 7 + n * 5) % 40).collect(),
            options,
        }
    };
    (0..).zip(options).map(prompt).collect()
}

impl Subject {
    fn new(description: &str, config: serde_json::Value, start: Option<u32>) -> Self {
        let weights = RandomWeights {
            seed: 4,
            deviation: 0.3,
        };
        let engine = Engine::builder(description)
            .config_value(config)
            .random_weights(weights)
            .device(DeviceChoice::Cpu)
            .generating()
            .build()
            .expect("the model loads");
        let requests = requests(start);
        let alone = requests.iter().map(|Request { prompt, options }| {
            let mut ended = Ended::default();
            let take = |_: usize, event: &Event| {
                ended.take(event.clone());
                ControlFlow::Continue(())
            };
            let written = engine.generate(std::slice::from_ref(prompt), options, take);
            written.expect("it runs");
            ended
        });
        Self {
            alone: alone.collect(),
            engine,
            requests,
        }
    }
}

static WRITER: LazyLock<Subject> = LazyLock::new(|| {
    let config = json!({
        "model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 160,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    });
    Subject::new("gpt2", config, None)
});

static TRANSLATOR: LazyLock<Subject> = LazyLock::new(|| {
    let config = json!({
        "model_type": "marian", "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 48,
        "max_position_embeddings": 160, "activation_function": "swish", "scale_embedding": true, "pad_token_id": 1,
    });
    Subject::new("marian", config, Some(2))
});

/// Checks that no two requests hold the same block, and that no cache slot holds two positions of a request.
fn check_blocks(generator: &Generator) {
    let mut owned = BTreeSet::new();
    for row in &generator.rows {
        let own: BTreeSet<u32> = row.blocks().collect();
        for &block in &own {
            assert!(block < generator.blocks.total());
            assert!(owned.insert(block), "block {block} has two owners");
        }
        let mut positions: HashMap<u32, usize> = HashMap::new();
        for lane in &row.lanes {
            // The last token may have no slot, since it is never in the cache.
            assert!(lane.slots.len() <= lane.tokens.len());
            for (position, &slot) in lane.slots.iter().enumerate() {
                assert!(
                    own.contains(&(slot / BLOCK)),
                    "slot {slot} is another request's"
                );
                let first = *positions.entry(slot).or_insert(position);
                assert_eq!(first, position, "slot {slot} has two positions");
            }
        }
        for &slot in row.source_slots() {
            assert!(own.contains(&(slot / BLOCK)));
            assert!(
                !positions.contains_key(&slot),
                "slot {slot} is the source's, too"
            );
        }
        // In the next step, each lane must write to a different slot.
        let next: Vec<u32> = row
            .lanes
            .iter()
            .flat_map(|l| l.slots.get(row.cached..).unwrap_or_default())
            .copied()
            .collect();
        let distinct: BTreeSet<u32> = next.iter().copied().collect();
        assert_eq!(distinct.len(), next.len(), "two lanes write into one slot");
    }
    assert_eq!(
        owned.len() as u32,
        generator.blocks.held(),
        "blocks without an owner are held"
    );
}

#[derive(Clone, Debug)]
enum Action {
    Admit(usize),
    Poll,
    Cancel(usize),
    PromptTokens(usize),
}

fn acts() -> impl Strategy<Value = Vec<Action>> {
    let act = prop_oneof![
        4 => (0usize..7).prop_map(Action::Admit),
        6 => Just(Action::Poll),
        1 => any::<prop::sample::Index>().prop_map(|i| Action::Cancel(i.index(1000))),
        1 => prop_oneof![1usize..4, 30usize..80].prop_map(Action::PromptTokens),
    ];
    prop::collection::vec(act, 1..90)
}

/// Applies all actions, then runs the remaining requests until they end.
fn run(subject: &Subject, bytes: u64, acts: &[Action]) {
    let mut generator = subject.engine.generator(bytes).expect("a generator");
    let mut running: BTreeMap<Ticket, usize> = BTreeMap::new();
    let mut ended: BTreeMap<Ticket, Ended> = BTreeMap::new();
    let mut cancelled = BTreeSet::new();
    let step = |generator: &mut Generator, ended: &mut BTreeMap<Ticket, Ended>| {
        for event in generator.poll().expect("a step") {
            ended.entry(event.ticket()).or_default().take(event);
        }
        check_blocks(generator);
    };
    for act in acts {
        match *act {
            Action::Admit(which) => {
                let (held, total) = generator.cache_bytes();
                match generator.admit(subject.requests[which].clone()) {
                    Ok(ticket) => {
                        running.insert(ticket, which);
                    }
                    Err(AdmitError::Full { missing_bytes }) => {
                        assert!(held > 0 && missing_bytes <= total);
                        assert_eq!(
                            generator.cache_bytes().0,
                            held,
                            "a refused request holds memory"
                        );
                    }
                    Err(AdmitError::NeverFits {
                        needed_bytes,
                        bytes,
                    }) => {
                        assert!(needed_bytes > bytes && bytes == total);
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            Action::Poll => step(&mut generator, &mut ended),
            Action::Cancel(nth) if !running.is_empty() => {
                let ticket = *running.keys().nth(nth % running.len()).expect("one runs");
                if generator.cancel(ticket) {
                    cancelled.insert(ticket);
                }
                assert!(!generator.cancel(ticket), "it has ended");
            }
            Action::Cancel(_) => {}
            Action::PromptTokens(n) => generator.prompt_tokens_per_step(n),
        }
        check_blocks(&generator);
    }
    while generator.is_busy() {
        step(&mut generator, &mut ended);
    }
    assert_eq!(
        generator.cache_bytes().0,
        0,
        "memory is held when nothing runs"
    );
    for (ticket, which) in running {
        let (own, alone) = (&ended[&ticket], &subject.alone[which]);
        match cancelled.contains(&ticket) {
            true => {
                assert_eq!(own.reason, Some(Reason::Cancelled));
                assert!(alone.tokens.starts_with(&own.tokens), "request {which}");
            }
            false => assert_eq!(own, alone, "request {which}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Admits, runs and cancels requests of a model that continues a prompt, and checks their blocks, cache slots and results.
    #[test]
    fn prompts_own_their_blocks_and_have_the_results_of_running_alone(blocks in 2u64..40, acts in acts()) {
        let block = WRITER.engine.generator(0).map_or(0, |g| g.block_bytes);
        run(&WRITER, blocks * block, &acts);
    }

    /// Admits, runs and cancels requests of a model that generates from a source, and checks their blocks, cache slots and results.
    #[test]
    fn sources_own_their_blocks_and_have_the_results_of_running_alone(blocks in 2u64..40, acts in acts()) {
        let block = TRANSLATOR.engine.generator(0).map_or(0, |g| g.block_bytes);
        run(&TRANSLATOR, blocks * block, &acts);
    }
}

#[test]
fn requests_alone_end_in_each_way() {
    for subject in [&*WRITER, &*TRANSLATOR] {
        let reasons: BTreeSet<String> = subject
            .alone
            .iter()
            .map(|ended| format!("{:?}", ended.reason))
            .collect();
        assert!(
            reasons.contains("Some(Length)") && reasons.contains("None"),
            "{reasons:?}"
        );
        let failed = subject.alone[6].problem.clone();
        assert_eq!(failed, Some(Failure::NoToken { step: 1 }));
    }
}

#[test]
fn a_decoder_starts_with_its_own_token_or_the_first_token_of_a_text() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, value: serde_json::Value| {
        std::fs::write(folder.path().join(name), value.to_string()).expect("it is written");
    };
    let start = || {
        super::generation_config(folder.path())
            .expect("it is read")
            .decoder_start
    };
    write("config.json", serde_json::json!({"bos_token_id": 4}));
    assert_eq!(start(), Some(4));
    write(
        "config.json",
        serde_json::json!({"bos_token_id": 4, "decoder_start_token_id": 5}),
    );
    assert_eq!(start(), Some(5));
    write(
        "generation_config.json",
        serde_json::json!({"bos_token_id": null}),
    );
    assert_eq!(start(), Some(5));
    write(
        "generation_config.json",
        serde_json::json!({"bos_token_id": 6}),
    );
    assert_eq!(start(), Some(6));
    write(
        "generation_config.json",
        serde_json::json!({"bos_token_id": 6, "decoder_start_token_id": 7}),
    );
    assert_eq!(start(), Some(7));
}
