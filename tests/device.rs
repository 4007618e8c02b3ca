//! Sessions on a CUDA device: memory that runs out, sessions side by side, allocators, CUDA graphs,
//! invariant programs.
//!
//! `cargo test --test device -- --ignored` on a machine with a device and NVRTC.

mod common;

use common::mates;
use gemmule::{
    AllocatorChoice, Batch, ChunkPolicy, DeviceChoice, Engine, EngineError, Session,
    engine::{Builder, DeviceName},
    program::AttentionChoice,
    runtime::{cuda::CudaError, weights::RandomWeights},
    tensor::{DType, Extents},
};
use serde_json::{Value, json};

const VOCABULARY: u32 = 1000;

/// A small encoder, and one whose intermediate tensors are large.
fn config(hidden: u32, inner: u32, layers: u32, positions: u32) -> Value {
    json!({
        "hidden_size": hidden, "num_attention_heads": hidden / 32, "num_hidden_layers": layers,
        "intermediate_size": inner, "vocab_size": VOCABULARY, "type_vocab_size": 2,
        "max_position_embeddings": positions, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    })
}

fn engine(config: Value) -> Engine {
    builder(config)
        .build()
        .expect("a device and NVRTC are there")
}

fn builder(config: Value) -> Builder {
    Engine::builder("bert")
        .config_value(config)
        .random_weights(RandomWeights {
            seed: 5,
            deviation: 0.1,
        })
        .outputs(["last_hidden_state", "sentence_embedding"])
        .device(DeviceChoice::Cuda(0))
}

fn small_engine() -> Engine {
    engine(config(128, 512, 3, 512))
}

fn batch(lens: &[u32]) -> Batch {
    let n_tokens: u32 = lens.iter().sum();
    let ids = (0..n_tokens).map(|i| (31 * i + n_tokens) % VOCABULARY);
    Batch::from_packed(ids.collect(), lens).expect("a batch")
}

/// The same sequences, padded to the longest.
fn padded(lens: &[u32]) -> Batch {
    let width = lens.iter().copied().max().expect("a sequence");
    let mask: Vec<u32> = lens
        .iter()
        .flat_map(|&n| (0..width).map(move |column| u32::from(column < n)))
        .collect();
    let ids: Vec<u32> = (0..mask.len() as u32)
        .map(|i| 31 * i % VOCABULARY)
        .collect();
    Batch::from_padded(&ids, &mask, width as usize).expect("a batch")
}

/// The bits of all outputs.
fn bits(session: &mut Session, lens: &[u32]) -> Vec<u32> {
    bits_of(session, &batch(lens))
}

fn bits_of(session: &mut Session, batch: &Batch) -> Vec<u32> {
    let outputs = session.run(batch).expect("it runs");
    let bits: Vec<u32> = outputs
        .iter()
        .flat_map(|output| output.values.iter().map(|value| value.to_bits()))
        .collect();
    let finite = |bits: &u32| f32::from_bits(*bits).is_finite();
    let lens = batch.lens();
    assert!(!bits.is_empty() && bits.iter().all(finite), "{lens:?}");
    bits
}

fn choices(maximum: &[u32]) -> [(&'static str, AllocatorChoice); 6] {
    let eager = ChunkPolicy {
        release_after: 1,
        keep_limit: 0,
        ..ChunkPolicy::default()
    };
    let maximum = Extents::of(maximum).expect("a batch");
    [
        ("chunk", AllocatorChoice::default()),
        ("chunk, eager", AllocatorChoice::Chunk(eager)),
        ("turbo", AllocatorChoice::Turbo),
        ("gsoc", AllocatorChoice::Gsoc),
        ("caching", AllocatorChoice::Caching),
        ("maximum", AllocatorChoice::Maximum(maximum)),
    ]
}

/// Shapes that come again, so that graphs are captured and replayed while memory moves.
const STREAM: [&[u32]; 12] = [
    &[7],
    &[300, 2, 80],
    &[7],
    &[7],
    &[300, 2, 80],
    &[512; 16],
    &[300, 2, 80],
    &[300, 2, 80],
    &[1; 9],
    &[512; 16],
    &[512; 16],
    &[7],
];

/// The bits of each batch of [`STREAM`], by sessions that run nothing else.
fn alone(engine: &Engine) -> Vec<Vec<u32>> {
    STREAM
        .iter()
        .map(|lens| bits(&mut engine.session().expect("a session"), lens))
        .collect()
}

const LENGTH: u32 = 4096;
const INNER: u32 = 65_536;

/// What a batch too large for the device fails with, as the driver's numbers make it.
#[track_caller]
fn out_of_memory(result: Result<gemmule::Outputs, EngineError>) -> (String, u64, u64, u64) {
    let error = result.expect_err("it does not fit");
    let text = error.to_string();
    match error {
        EngineError::Cuda(CudaError::OutOfMemory {
            bytes, free, total, ..
        }) => (text, bytes, free, total),
        other => panic!("expected an error of memory, found {other:?}"),
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_batch_larger_than_the_device_says_what_fits_and_leaves_the_session_usable() {
    let engine = engine(config(64, INNER, 1, LENGTH));
    let DeviceName::Cuda(info) = engine.device().clone() else {
        panic!("the engine is on a CUDA device");
    };
    // The widest tensor alone takes twice the device's memory.
    let bytes_a_sequence = 2 * u64::from(LENGTH) * u64::from(INNER);
    let n_sequences = (2 * info.memory / bytes_a_sequence) as usize + 1;
    let huge = vec![LENGTH; n_sequences];
    let huge_batch = batch(&huge);
    let n_tokens = huge_batch.extents().tokens;
    let small: [u32; 3] = [5, 300, 17];
    let expected = bits(&mut engine.session().expect("a session"), &small);
    for (name, choice) in choices(&huge) {
        let mut session = engine.session_with(&choice).expect("a session");
        if name == "maximum" {
            let (text, bytes, free, total) = out_of_memory(session.run(&batch(&small)));
            let fits = u128::from(n_tokens) * u128::from(free) / u128::from(bytes);
            assert_eq!(
                text,
                format!(
                    "the device has no {bytes} bytes left for the intermediate tensors: {free} of {total} bytes are free; the declared maximum of {n_tokens} tokens needs {bytes} bytes; about {fits} would fit, declare a smaller maximum"
                )
            );
            continue;
        }
        assert!(bits(&mut session, &small) == expected, "{name}");
        let (text, bytes, free, total) = out_of_memory(session.run(&huge_batch));
        assert!(bytes > info.memory && free < total, "{name}: {text}");
        let fits = u128::from(n_tokens) * u128::from(free) / u128::from(bytes);
        assert_eq!(
            text,
            format!(
                "the device has no {bytes} bytes left for the intermediate tensors: {free} of {total} bytes are free; {n_tokens} tokens need {bytes} bytes; about {fits} tokens of such a batch would fit"
            ),
            "{name}"
        );
        assert_eq!(session.memory().activations, 0, "{name}");
        assert!(bits(&mut session, &small) == expected, "{name}");
        // Twice, as the second run captures a graph and the third replays it.
        assert!(bits(&mut session, &small) == expected, "{name}");
        assert!(bits(&mut session, &small) == expected, "{name}");
    }
    assert_eq!(
        engine.bytes_needed(&huge_batch).expect("it is planned"),
        out_of_memory(engine.session().expect("a session").run(&huge_batch)).1
    );
}

#[test]
#[ignore = "needs a CUDA device"]
fn sessions_side_by_side_give_the_bits_of_one() {
    let engine = small_engine();
    let expected = alone(&engine);
    std::thread::scope(|scope| {
        for offset in [0, 5] {
            let (engine, expected) = (&engine, &expected);
            scope.spawn(move || {
                let mut session = engine.session().expect("a session");
                for i in 0..8 * STREAM.len() {
                    let at = (i + offset) % STREAM.len();
                    let found = bits(&mut session, STREAM[at]);
                    assert!(found == expected[at], "run {i}: {:?} differs", STREAM[at]);
                }
            });
        }
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn runs_are_equal_under_all_allocators() {
    let engine = small_engine();
    let expected = alone(&engine);
    for (name, choice) in choices(&[512; 16]) {
        let mut session = engine.session_with(&choice).expect("a session");
        for round in 0..3 {
            for (lens, expected) in STREAM.iter().zip(&expected) {
                let (lens, found) = (*lens, bits(&mut session, lens));
                assert!(
                    found == *expected,
                    "{name}, round {round}: {lens:?} differs"
                );
                let work = session.memory_work();
                assert_eq!(work.request.held, session.memory().activations, "{name}");
                assert!(!work.planning.is_zero(), "{name}");
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_replayed_graph_gives_the_bits_of_the_first_launch() {
    let engine = small_engine();
    for lens in [&[1][..], &[300, 2, 80], &[512; 16]] {
        let mut session = engine.session().expect("a session");
        // Launched, captured and replayed, replayed.
        let first = bits(&mut session, lens);
        for run in 1..5 {
            assert!(bits(&mut session, lens) == first, "run {run} of {lens:?}");
        }
        // Other ids under the same graph give other values.
        let n_tokens: u32 = lens.iter().sum();
        let other = Batch::from_packed(vec![3; n_tokens as usize], lens).expect("a batch");
        let values = |session: &mut Session| {
            let outputs = session.run(&other).expect("it runs");
            outputs.get("last_hidden_state").expect("an output").clone()
        };
        let replayed = values(&mut session);
        assert!(replayed == values(&mut engine.session().expect("a session")));
        assert!(bits(&mut session, lens) == first);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn batch_mates_do_not_change_a_bit_of_an_invariant_program() {
    // Sizes for which other programs have several kernels, and a head size of its own kernels each.
    for (dtype, hidden, inner) in [
        (DType::F16, 768, 3072),
        (DType::BF16, 768, 3072),
        (DType::F32, 320, 640),
    ] {
        for attention in [AttentionChoice::Auto, AttentionChoice::Grouped] {
            let engine = builder(config(hidden, inner, 2, 600))
                .dtype(dtype)
                .attention(attention)
                .invariant(true)
                .build()
                .expect("a device and NVRTC are there");
            let changed = mates::n_changed(&engine, &[1, 15, 64, 130, 512, 600], 600);
            assert_eq!(changed, 0, "{dtype}, {attention} attention");
        }
    }
}

/// On cards that start a kernel while the one before still runs. A kernel that did not wait where it
/// must would read what a batch before left in the memory that is used again.
#[test]
#[ignore = "needs a CUDA device"]
fn kernels_that_begin_early_give_the_bits_of_plain_launches() {
    let sizes = [config(128, 512, 3, 512), config(768, 3072, 4, 512)];
    for (config, dtype) in sizes
        .iter()
        .flat_map(|c| [(c, DType::F16), (c, DType::F32)])
    {
        let with = |plain| {
            let builder = builder(config.clone()).dtype(dtype).plain_launches(plain);
            builder.build().expect("a device and NVRTC are there")
        };
        let (plain, early) = (with(true), with(false));
        let mut session = early.session().expect("a session");
        let batches: Vec<Batch> = STREAM.iter().flat_map(|l| [batch(l), padded(l)]).collect();
        let expected: Vec<Vec<u32>> = batches
            .iter()
            .map(|batch| bits_of(&mut plain.session().expect("a session"), batch))
            .collect();
        // Launched, captured and replayed, replayed; between runs of other shapes.
        for round in 0..4 {
            for (batch, expected) in batches.iter().zip(&expected) {
                let found = bits_of(&mut session, batch);
                let lens = batch.lens();
                assert!(
                    found == *expected,
                    "{dtype}, round {round}: {lens:?} differs"
                );
            }
        }
        // A shape alone, so that nothing else runs between its replays.
        for (batch, expected) in batches.iter().zip(&expected) {
            let mut session = early.session().expect("a session");
            for run in 0..6 {
                let found = bits_of(&mut session, batch);
                let lens = batch.lens();
                assert!(found == *expected, "{dtype}, run {run}: {lens:?} differs");
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn more_shapes_than_graphs_are_kept_give_the_same_bits_every_time() {
    let engine = small_engine();
    let mut session = engine.session().expect("a session");
    // 64 graphs are kept: some of these are pushed out, and captured again.
    let shapes: Vec<[u32; 2]> = (1..=80).map(|n| [n, 3]).collect();
    let mut expected: Vec<Vec<u32>> = Vec::new();
    for shape in &shapes {
        expected.push(bits(&mut session, shape));
    }
    for round in 0..3 {
        for (shape, expected) in shapes.iter().zip(&expected) {
            for run in 0..2 {
                let found = bits(&mut session, shape);
                assert!(found == *expected, "round {round}, run {run}: {shape:?}");
            }
        }
    }
}
