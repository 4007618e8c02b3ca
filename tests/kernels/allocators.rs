//! Tests of all memory allocators with the CPU executor: results are the same with every allocator, and sessions report memory and time.

use crate::common::tiny_config;
use gemmule::{
    AllocatorChoice, Batch, ChunkPolicy, DeviceChoice, Engine, EngineError, Session,
    runtime::weights::RandomWeights, tensor::Extents,
};
use insta::assert_snapshot;
use serde_json::{Value, json};

fn engine(config: Value) -> gemmule::Builder {
    Engine::builder("bert")
        .config_value(config)
        .random_weights(RandomWeights {
            seed: 3,
            deviation: 0.1,
        })
        .outputs(["last_hidden_state", "sentence_embedding"])
        .device(DeviceChoice::Cpu)
}

fn choices(longest: u32, n: usize) -> [(&'static str, AllocatorChoice); 6] {
    let maximum = Extents::of(&vec![longest; n]).expect("a batch");
    let eager = ChunkPolicy {
        release_after: 1,
        keep_limit: 0,
        ..ChunkPolicy::default()
    };
    [
        ("chunk", AllocatorChoice::default()),
        ("chunk, eager", AllocatorChoice::Chunk(eager)),
        ("turbo", AllocatorChoice::Turbo),
        ("gsoc", AllocatorChoice::Gsoc),
        ("caching", AllocatorChoice::Caching),
        ("maximum", AllocatorChoice::Maximum(maximum)),
    ]
}

fn batch(lens: &[u32]) -> Batch {
    let ids = |n: u32| (0..n).map(|i| (7 * i + n) % 20).collect::<Vec<u32>>();
    Batch::from_sequences(&lens.iter().map(|&n| ids(n)).collect::<Vec<_>>()).expect("a batch")
}

/// Returns the bits of all outputs.
fn bits(session: &mut Session, lens: &[u32]) -> Vec<u32> {
    let outputs = session.run(&batch(lens)).expect("it runs");
    outputs
        .iter()
        .flat_map(|output| output.values.iter().map(|value| value.to_bits()))
        .collect()
}

/// Returns the config of a model whose batches need several chunks of memory of the default size.
fn wide() -> Value {
    let mut config = tiny_config();
    config["hidden_size"] = json!(64);
    config["intermediate_size"] = json!(2048);
    config["num_hidden_layers"] = json!(2);
    config["max_position_embeddings"] = json!(600);
    config
}

#[test]
fn runs_are_equal_under_all_allocators() {
    let engine = engine(wide()).build().expect("an engine");
    let stream: [&[u32]; 7] = [
        &[5],
        &[300, 2, 80],
        &[17, 18, 52],
        &[600; 4],
        &[5],
        &[300, 2, 80],
        &[1; 6],
    ];
    let mut expected: Vec<Vec<u32>> = Vec::new();
    for lens in stream {
        // Each batch runs in a new session, so no state of a previous batch remains.
        expected.push(bits(&mut engine.session().expect("a session"), lens));
    }
    for (name, choice) in choices(600, 6) {
        let mut session = engine.session_with(&choice).expect("a session");
        for (lens, expected) in stream.iter().zip(&expected) {
            let (lens, run) = (*lens, bits(&mut session, lens));
            assert!(run == *expected, "{name}: {lens:?} differs");
            let work = session.memory_work();
            assert_eq!(work.request.held, session.memory().activations, "{name}");
            assert!(work.request.footprint <= work.request.held, "{name}");
        }
    }
}

#[test]
fn an_engine_answers_for_the_allocator_it_was_built_with() {
    let long = batch(&[600, 600, 600, 600]);
    let mut needed = Vec::new();
    for (name, choice) in choices(600, 6) {
        let engine = engine(wide()).allocator(choice).build().expect("an engine");
        assert_eq!(*engine.allocator(), choice);
        let footprint = engine.footprint(&long).expect("it is planned");
        assert_eq!(
            engine.bytes_needed(&long).expect("it is planned"),
            footprint.chunks
        );
        let mut session = engine.session().expect("a session");
        session.run(&long).expect("it runs");
        let work = session.memory_work();
        assert_eq!(work.request.footprint, footprint.chunks, "{name}");
        assert_eq!(work.request.newly_allocated, work.request.held, "{name}");
        assert!(!work.planning.is_zero() && !work.allocating.is_zero());
        needed.push((name, footprint.chunks, footprint.lower_bound));
    }
    let of = |name| needed.iter().find(|n| n.0 == name).expect("it was planned");
    let (chunk, gsoc, maximum) = (of("chunk"), of("gsoc"), of("maximum"));
    assert!(gsoc.1 >= gsoc.2 && gsoc.1 < chunk.1 && chunk.1 < maximum.1);
}

#[test]
fn the_chunk_policy_says_when_memory_is_given_back() {
    let policy = ChunkPolicy {
        release_after: 2,
        ..ChunkPolicy::default()
    };
    let engine = engine(wide()).chunk_policy(policy).build();
    let mut session = engine.expect("an engine").session().expect("a session");
    let mut held = |lens: &[u32]| {
        session.run(&batch(lens)).expect("it runs");
        let stats = session.memory_work().request;
        (stats.held, stats.released)
    };
    let (large, _) = held(&[600, 600, 600, 600]);
    assert_eq!(held(&[5]), (large, 0));
    let (small, released) = held(&[5]);
    assert!(small < large && released == large);
    let cannot_be = ChunkPolicy {
        growth: 99.0,
        ..policy
    };
    assert_snapshot!(error(engine_with(cannot_be)), @"the chunk policy has growth = 99: it must be a factor from 1 to 16");
}

fn engine_with(policy: ChunkPolicy) -> Result<Engine, EngineError> {
    engine(tiny_config()).chunk_policy(policy).build()
}

fn error<T>(result: Result<T, EngineError>) -> String {
    let error = result.err().expect("it is refused");
    let chain = std::iter::successors(Some(&error as &dyn std::error::Error), |e| e.source());
    chain
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("\ncaused by: ")
}

#[test]
fn a_batch_beyond_the_declared_maximum_is_an_error_and_the_next_one_runs() {
    let maximum = AllocatorChoice::Maximum(Extents::of(&[6, 6]).expect("a batch"));
    let engine = engine(tiny_config())
        .allocator(maximum)
        .build()
        .expect("an engine");
    let mut session = engine.session().expect("a session");
    let before = bits(&mut session, &[6, 5]);
    assert_snapshot!(error(session.run(&batch(&[7]))), @"the batch of 1 sequence, 7 tokens, 7 in the longest, 49 pairs of tokens is beyond the declared maximum of 2 sequences, 12 tokens, 6 in the longest, 72 pairs of tokens; declare a larger maximum, or send a smaller batch");
    assert_snapshot!(error(engine.bytes_needed(&batch(&[2, 2, 2]))), @"the batch of 3 sequences, 6 tokens, 2 in the longest, 12 pairs of tokens is beyond the declared maximum of 2 sequences, 12 tokens, 6 in the longest, 72 pairs of tokens; declare a larger maximum, or send a smaller batch");
    assert_eq!(bits(&mut session, &[6, 5]), before);
}

/// In f32, the attention scores of 8 heads for a sequence of 2²¹ tokens take 2⁴⁷ bytes, the size of a process's whole address space.
#[test]
fn a_batch_that_no_memory_holds_leaves_the_session_usable_under_every_allocator() {
    let mut config = tiny_config();
    config["num_attention_heads"] = json!(8);
    config["max_position_embeddings"] = json!(1 << 21);
    let engine = engine(config)
        .without(["fuse_attention"])
        .build()
        .expect("an engine");
    let huge = Batch::from_packed(vec![1; 1 << 21], &[1 << 21]).expect("a batch");
    let small = [3, 12, 1];
    let before = bits(&mut engine.session().expect("a session"), &small);
    for (name, choice) in choices(1 << 21, 1) {
        let mut session = engine.session_with(&choice).expect("a session");
        let message = error(session.run(&huge));
        assert!(
            message.contains("of host memory that the intermediate tensors need could not be allocated; send fewer tokens at once"),
            "{name}: {message}"
        );
        assert_eq!(session.memory().activations, 0, "{name}");
        if name != "maximum" {
            assert!(bits(&mut session, &small) == before, "{name}");
        }
    }
}
