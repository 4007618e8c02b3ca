//! Tests of sessions on a CUDA device: errors of memory, concurrent sessions, allocators, CUDA graphs, buckets (batch shapes rounded up to
//! share a graph) and invariant programs.
//!
//! Run them with `cargo test --test kernels device:: -- --ignored` on a machine with a device and NVRTC.

use std::{
    collections::VecDeque,
    sync::{
        PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::common::mates;
use gemmule::{
    AllocatorChoice, Batch, ChunkPolicy, DeviceChoice, Engine, EngineError, GraphChoice, Session,
    engine::{Builder, DeviceName, Pending, Pipeline},
    generate::{Request, SamplingParams},
    program::AttentionChoice,
    runtime::{cuda::CudaError, weights::RandomWeights},
    search::Rules,
    tensor::{DType, Extents},
};
use serde_json::{Value, json};

const VOCABULARY: u32 = 1000;

/// Lock of the device's memory. Tests that need little memory acquire it as readers; tests that fill the memory acquire it as writers.
static MEMORY: RwLock<()> = RwLock::new(());

fn some_memory() -> RwLockReadGuard<'static, ()> {
    MEMORY.read().unwrap_or_else(PoisonError::into_inner)
}

fn all_memory() -> RwLockWriteGuard<'static, ()> {
    MEMORY.write().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the config of a BERT encoder with heads of width 32. `inner` is the width of the feed-forward network.
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

/// Returns a batch with sequences of these lengths, padded to the longest.
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

/// Returns the bits of all outputs.
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

/// Batches, as lengths of sequences. Some batches occur repeatedly, so their graphs are captured and replayed, and the memory plan changes
/// in between.
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

/// Returns the bits of the outputs for each batch of [`STREAM`]. Each batch runs in a new session.
fn alone(engine: &Engine) -> Vec<Vec<u32>> {
    STREAM
        .iter()
        .map(|lens| bits(&mut engine.session().expect("a session"), lens))
        .collect()
}

const LENGTH: u32 = 4096;
const INNER: u32 = 65_536;

/// Returns the out-of-memory error of a batch: its text, and the requested, free and total bytes.
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
    let _memory = all_memory();
    let engine = engine(config(64, INNER, 1, LENGTH));
    let DeviceName::Cuda(info) = engine.device().clone() else {
        panic!("the engine is on a CUDA device");
    };
    // The largest tensor of the batch alone takes twice the device's memory.
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
        // The graph is captured in the first or the second run, so the third run replays it.
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
    let _memory = some_memory();
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
    let _memory = some_memory();
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
    let _memory = some_memory();
    let engine = small_engine();
    for lens in [&[1][..], &[300, 2, 80], &[512; 16]] {
        let mut session = engine.session().expect("a session");
        // The first run launches the kernels one by one. This run or the second one captures a graph, which later runs replay.
        let first = bits(&mut session, lens);
        for run in 1..5 {
            assert!(bits(&mut session, lens) == first, "run {run} of {lens:?}");
        }
        // With other ids, the replayed graph computes the same values as a new session.
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
    let _memory = some_memory();
    // With these sizes, a program that is not invariant would use different kernels for different batches. Each storage type uses a
    // different attention kernel.
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

/// Compares programmatic dependent launches, which start before the previous launch ends, with plain launches. A kernel that did not wait
/// for the previous kernels would read values of an earlier batch from reused memory, and give other results.
#[test]
#[ignore = "needs a CUDA device"]
fn kernels_that_begin_early_give_the_bits_of_plain_launches() {
    let _memory = some_memory();
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
        // The first run of a shape launches its kernels one by one. This run or the next one captures a graph, which later rounds replay.
        // Other shapes run in between.
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
        // Run each shape several times in a new session, so that no other shape runs between its replays.
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
    let _memory = some_memory();
    let engine = small_engine();
    let mut session = engine.session().expect("a session");
    // A session keeps at most 128 graphs. There are 152 shapes, each in a different bucket, so some graphs are evicted and captured again.
    let shapes: Vec<Vec<u32>> = (2..=20u32)
        .flat_map(|eights| (1..=8u32).map(move |n| (8 * eights, n)))
        .map(|(n_tokens, n)| {
            let mut lens = vec![1; n as usize];
            lens[0] = n_tokens + 1 - n;
            lens
        })
        .collect();
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
    let used = session.graph_use();
    assert_eq!(used.kept, 128, "{used:?}");
    assert!(used.captured > shapes.len() as u64, "{used:?}");
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn models_are_loaded_and_generators_grow_while_graphs_are_captured() {
    let _memory = some_memory();
    let exact = builder(config(128, 512, 3, 512)).graphs(GraphChoice::Exact);
    let engine = exact.build().expect("a device and NVRTC are there");
    /// Sets its flag when it is dropped, even by a panic. The other thread runs until the flag is set.
    struct Ends<'a>(&'a AtomicBool);
    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (engine, ended) = (&engine, &ended);
        let ends = Ends(ended);
        // This thread captures many graphs: nearly every shape is new, and a shape is captured when it runs for the second time.
        let captures = scope.spawn(move || {
            let mut session = engine.session().expect("a session");
            let mut n = 0;
            while !ended.load(Ordering::Relaxed) {
                let lens = [1 + n % 500, 1 + n / 500];
                let first = bits(&mut session, &lens);
                assert_eq!(bits(&mut session, &lens), first, "{lens:?}");
                n += 1;
            }
            session.graph_use().captured
        });
        let writes = Engine::builder("gpt2")
            .config_value(json!({
                "model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 4096, "vocab_size": 300,
                "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
            }))
            .random_weights(RandomWeights { seed: 3, deviation: 0.1 })
            .device(DeviceChoice::Cuda(0))
            .generating()
            .build()
            .expect("the model loads");
        for _ in 0..20 {
            small_engine();
            let mut generator = writes.generator(64 << 20).expect("a generator");
            // Each request needs a larger table of cache blocks than the previous request.
            for max_new_tokens in [8, 500, 1000, 2000] {
                let options = SamplingParams {
                    rules: Rules {
                        max_new_tokens,
                        ..Rules::default()
                    },
                    ..SamplingParams::default()
                };
                let ticket = generator.admit(Request {
                    prompt: vec![5, 6, 7],
                    options,
                });
                let ticket = ticket.expect("there is room");
                for _ in 0..3 {
                    generator.poll().expect("a step");
                }
                generator.cancel(ticket);
            }
        }
        drop(ends);
        let captured = captures.join().expect("all runs agree");
        assert!(captured > 20, "{captured} graphs were captured meanwhile");
    });
}

/// Returns a pseudorandom integer between `from` and `to`, both inclusive.
fn draw(state: &mut u64, from: u32, to: u32) -> u32 {
    *state = state
        .wrapping_mul(6364136223846793005)
        .wrapping_add(1442695040888963407);
    from + ((*state >> 33) % u64::from(to - from + 1)) as u32
}

/// Runs all batches twice in a session with buckets, and compares the bits of the outputs with those of a session without graphs, which
/// runs the exact shapes. Returns how often the first session used graphs.
fn compare_with_exact_shapes(engine: &Engine, batches: &[Batch]) -> gemmule::runtime::GraphUse {
    let mut plain = engine
        .session_replaying(GraphChoice::Off)
        .expect("a session");
    let mut session = engine.session().expect("a session");
    for round in 0..2 {
        for batch in batches {
            let (found, expected) = (bits_of(&mut session, batch), bits_of(&mut plain, batch));
            let kernels = &engine.program().kernels;
            let kernel = kernels.first().map(|k| k.as_kernel().symbol());
            assert!(
                found == expected,
                "round {round}: {:?}, {kernel:?}",
                batch.lens()
            );
        }
    }
    assert_eq!(plain.graph_use().launched, 2 * batches.len() as u64);
    session.graph_use()
}

#[test]
#[ignore = "needs a CUDA device"]
fn batches_of_random_lengths_share_graphs_and_have_the_bits_of_their_exact_shapes() {
    let _memory = some_memory();
    let mut state = 7;
    let mut random = |n: u32, longest: u32| -> Batch {
        let lens: Vec<u32> = (0..n).map(|_| draw(&mut state, 1, longest)).collect();
        batch(&lens)
    };
    let narrow: Vec<Batch> = (0..40).map(|_| random(16, 40)).collect();
    let wide: Vec<Batch> = (0..30).map(|i| random(1 + i % 37, 512)).collect();
    let programs = [
        (DType::F16, 128, 512, 4, AttentionChoice::Auto),
        (DType::F16, 768, 3072, 12, AttentionChoice::Auto),
        (DType::F16, 768, 3072, 24, AttentionChoice::Auto),
        (DType::BF16, 768, 3072, 8, AttentionChoice::Auto),
        (DType::BF16, 768, 3072, 12, AttentionChoice::Online),
        (DType::F32, 320, 640, 10, AttentionChoice::Auto),
    ];
    for (dtype, hidden, inner, heads, attention) in programs {
        let mut config = config(hidden, inner, 2, 512);
        config["num_attention_heads"] = heads.into();
        let engine = builder(config)
            .outputs(["last_hidden_state", "sentence_embedding", "pooler_output"])
            .dtype(dtype)
            .attention(attention)
            .build()
            .expect("a device and NVRTC are there");
        let used = compare_with_exact_shapes(&engine, &narrow);
        assert!(used.replayed > 40, "{dtype}, {hidden} wide: {used:?}");
        compare_with_exact_shapes(&engine, &wide);
    }
    // Grouped attention stores scores, whose size depends on the exact shape. Batches therefore share no graphs.
    let engine = builder(config(128, 512, 2, 512))
        .attention(AttentionChoice::Grouped)
        .build()
        .expect("a device and NVRTC are there");
    let used = compare_with_exact_shapes(&engine, &narrow);
    assert_eq!(used.replayed, 0, "{used:?}");
}

#[test]
#[ignore = "needs a CUDA device"]
fn buckets_end_where_the_model_does_and_serve_batches_at_their_edges() {
    let _memory = some_memory();
    // The longest sequence uses the last row of the position table, and all tokens use the last row of the word table. The tokens that a
    // bucket adds must not read beyond these tables.
    let engine = engine(config(128, 512, 2, 509));
    let last = |lens: &[u32]| {
        let n_tokens: u32 = lens.iter().sum();
        let ids = vec![VOCABULARY - 1; n_tokens as usize];
        let types = vec![1; n_tokens as usize];
        let batch = Batch::from_packed(ids, lens).expect("a batch");
        batch.with_type_ids(types).expect("segment ids")
    };
    let mut batches: Vec<Batch> = (1..=33).map(|n| last(&[n])).collect();
    for n in [255, 256, 257, 264, 265, 508, 509] {
        batches.push(last(&[n]));
        batches.push(last(&[n, 1, 1, 1, 1, 1, 1, 1, 1]));
    }
    batches.push(last(&[509; 9]));
    batches.push(last(&[1; 33]));
    batches.push(last(&[64; 33]));
    let used = compare_with_exact_shapes(&engine, &batches);
    assert!(used.replayed > 33, "{used:?}");
    // Batches that the caller padded are not rounded to a bucket: they run with their exact shapes.
    for lens in [&[7, 1, 3][..], &[509, 1], &[40; 9]] {
        let batch = padded(lens);
        compare_with_exact_shapes(&engine, &[batch]);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_batch_that_fits_where_its_bucket_does_not_runs() {
    let _memory = all_memory();
    // The allocator `Gsoc` allocates exactly the planned memory, without headroom. The bucket has 127 more tokens than the batch, and the
    // tensors of these tokens take 16 MiB.
    let with = |graphs| {
        let builder = builder(config(64, INNER, 1, LENGTH)).graphs(graphs);
        let builder = builder.allocator(AllocatorChoice::Gsoc);
        builder.build().expect("a device and NVRTC are there")
    };
    let (exact, buckets) = (with(GraphChoice::Off), with(GraphChoice::Buckets));
    let of = |n_tokens: u32| {
        let mut lens = vec![LENGTH; (n_tokens / LENGTH) as usize];
        lens.extend((!n_tokens.is_multiple_of(LENGTH)).then_some(n_tokens % LENGTH));
        batch(&lens)
    };
    let needed = |engine: &Engine, n| engine.bytes_needed(&of(n)).expect("it is planned");
    const TOKENS: u32 = 2 * LENGTH + 1;
    let (alone, bucket) = (needed(&exact, TOKENS), needed(&buckets, TOKENS));
    assert!(alone + (14 << 20) < bucket, "{alone} and {bucket}");
    let expected = bits_of(&mut exact.session().expect("a session"), &of(TOKENS));
    // Let another session take the device's memory, except for what the batch needs with its exact shape, and 8 MiB. First estimate how
    // many tokens the other session must run to take this much. After each run, correct the number by the memory that is still free.
    let huge = batch(&vec![LENGTH; 1 << 10]);
    let free = || out_of_memory(exact.session().expect("a session").run(&huge)).2;
    let left = alone + (8 << 20);
    let a_token = (bucket - alone) / 127;
    let mut n_tokens = ((free() - left) / a_token) as u32 - 1000;
    let mut other = exact.session().expect("a session");
    for _ in 0..3 {
        other.run(&of(n_tokens)).expect("it fits");
        let beyond = (free() as i64 - left as i64) / a_token as i64;
        n_tokens = n_tokens.checked_add_signed(beyond as i32).expect("tokens");
    }
    other.run(&of(n_tokens)).expect("it fits");
    let mut session = buckets.session().expect("a session");
    for _ in 0..3 {
        assert!(bits_of(&mut session, &of(TOKENS)) == expected);
        assert_eq!(session.memory().activations, alone);
    }
    // After the other session has freed its memory, the bucket fits again.
    drop(other);
    let mut session = buckets.session().expect("a session");
    assert!(bits_of(&mut session, &of(TOKENS)) == expected);
    assert_eq!(session.memory().activations, bucket);
}

/// Returns the hidden states of a batch, `[tokens, width]`, and `width`.
fn rows_of(session: &mut Session, batch: &Batch) -> (Vec<f32>, usize) {
    let outputs = session.run(batch).expect("it runs");
    let hidden = outputs.get("last_hidden_state").expect("it was asked for");
    (hidden.values.clone(), hidden.shape[1] as usize)
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        let products = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b));
        products.sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
#[ignore = "needs a CUDA device"]
fn sixteen_bits_keep_the_direction_of_every_row_whatever_the_lengths() {
    let _memory = some_memory();
    // Use the sizes of BERT-base, because the choice of kernels depends on the model's sizes and on the lengths of sequences.
    let mut config = config(768, 3072, 12, 512);
    config["num_attention_heads"] = json!(12);
    let of = |dtype: DType| {
        let weights = RandomWeights {
            seed: 5,
            deviation: 0.03,
        };
        let builder = builder(config.clone()).random_weights(weights).dtype(dtype);
        builder.build().expect("a device and NVRTC are there")
    };
    let (exact, half) = (of(DType::F32), of(DType::F16));
    let (mut exact, mut half) = (exact.session().unwrap(), half.session().unwrap());
    let mut state = 7;
    let mut several = |n: usize, to: u32| -> Vec<u32> {
        let lens = (0..n).map(|_| draw(&mut state, 1, to));
        lens.collect()
    };
    let mut batches: Vec<Vec<u32>> = [1, 5, 10, 20, 40, 64, 80, 100, 128, 200, 300, 512]
        .map(|n| vec![n])
        .to_vec();
    for (n, to) in [
        (8, 64),
        (8, 128),
        (16, 64),
        (16, 128),
        (8, 384),
        (16, 256),
        (16, 512),
    ] {
        batches.push(several(n, to));
    }
    batches.extend([several(64, 64), several(64, 256)]);
    for lens in batches {
        let batch = batch(&lens);
        let (want, width) = rows_of(&mut exact, &batch);
        let (got, _) = rows_of(&mut half, &batch);
        let rows = want.chunks_exact(width).zip(got.chunks_exact(width));
        let least = rows.map(|(a, b)| cosine(a, b)).fold(1.0, f64::min);
        assert!(least >= 0.9999, "{lens:?}: {least}");
    }
}

fn all_bits(outputs: &gemmule::Outputs) -> Vec<u32> {
    let values = outputs.iter().flat_map(|output| &output.values);
    values.map(|value| value.to_bits()).collect()
}

/// Returns `n` small and large batches with sequences of random lengths, so that the session allocates memory while other batches are in
/// flight. One in ten batches is padded.
fn random_batches(n: usize) -> Vec<Batch> {
    let mut state = 11;
    let of = |_| {
        let most = [4, 40, 12][draw(&mut state, 0, 2) as usize];
        let n = draw(&mut state, 1, most);
        let longest = [16, 100, 512][draw(&mut state, 0, 2) as usize];
        let lens: Vec<u32> = (0..n).map(|_| draw(&mut state, 1, longest)).collect();
        match draw(&mut state, 0, 9) {
            0 => padded(&lens),
            _ => batch(&lens),
        }
    };
    (0..n).map(of).collect()
}

#[test]
#[ignore = "needs a CUDA device"]
fn batches_that_are_submitted_behind_one_another_have_the_bits_of_runs() {
    let _memory = some_memory();
    let engine = small_engine();
    let batches = random_batches(80);
    for (name, choice) in choices(&[512; 40]) {
        let mut alone = engine.session_with(&choice).expect("a session");
        let expected: Vec<Vec<u32>> = batches.iter().map(|b| bits_of(&mut alone, b)).collect();
        let mut session = engine.session_with(&choice).expect("a session");
        if name == "chunk" {
            session.reserve(&batches[0].extents()).expect("room");
        }
        // A session runs up to two batches at a time, one in each slot. In two rounds, graphs are captured in both slots and then replayed.
        for round in 0..2 {
            let mut in_flight: VecDeque<(usize, Pending)> = VecDeque::new();
            let check = |(at, pending): (usize, Pending)| {
                // A new thread waits for every third result. It must first make the device's context current.
                let outputs = match at % 3 {
                    0 => std::thread::spawn(move || pending.wait()).join(),
                    _ => Ok(pending.wait()),
                };
                let found = all_bits(&outputs.expect("no panic").expect("it ran"));
                assert!(found == expected[at], "{name}, round {round}, batch {at}");
            };
            for (at, batch) in batches.iter().enumerate() {
                if in_flight.len() == 2 {
                    check(in_flight.pop_front().expect("two are in flight"));
                }
                let pending = session.submit(batch).expect("there is a place");
                match at % 7 {
                    // Dropping a pending batch frees its slot.
                    5 => drop(pending),
                    _ => in_flight.push_back((at, pending)),
                }
                // Sometimes wait for the later of the two batches first.
                if at % 11 == 3
                    && let Some(last) = in_flight.pop_back()
                {
                    check(last);
                }
            }
            in_flight.into_iter().for_each(check);
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_third_batch_in_flight_is_refused_and_tickets_outlive_their_session() {
    let _memory = some_memory();
    let engine = small_engine();
    let lens: [&[u32]; 3] = [&[300, 2, 80], &[7], &[64; 8]];
    let expected = lens.map(|lens| bits(&mut engine.session().expect("a session"), lens));
    let mut session = engine.session().expect("a session");
    let first = session.submit(&batch(lens[0])).expect("a place");
    let second = session.submit(&batch(lens[1])).expect("a place");
    let third = session.submit(&batch(lens[2])).map(|_| ());
    let error = third.expect_err("both places are taken");
    assert!(
        matches!(error, EngineError::Cuda(CudaError::InFlight)),
        "{error:?}"
    );
    assert_eq!(
        error.to_string(),
        "the session already has two batches in flight; wait for the ticket of one of them first"
    );
    // A batch that the model refuses takes no slot, and does not change the results of other batches.
    assert!(session.submit(&batch(&[513])).is_err());
    drop(first);
    let third = session.submit(&batch(lens[2])).expect("a place");
    drop(session);
    drop(engine);
    assert!(all_bits(&third.wait().expect("it ran")) == expected[2]);
    assert!(all_bits(&second.wait().expect("it ran")) == expected[1]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_pipeline_goes_on_while_nobody_takes_results() {
    let _memory = some_memory();
    let engine = small_engine();
    let batches = random_batches(20);
    let mut alone = engine.session().expect("a session");
    let expected: Vec<Vec<u32>> = batches.iter().map(|b| bits_of(&mut alone, b)).collect();
    let pipeline = Pipeline::new(engine.session().expect("a session")).expect("a thread");
    let pending: Vec<Pending> = batches
        .iter()
        .map(|batch| pipeline.submit(batch.clone()).expect("the thread is there"))
        .collect();
    for (at, (pending, expected)) in pending.into_iter().zip(&expected).enumerate().rev() {
        let found = all_bits(&pending.wait().expect("it ran"));
        assert!(found == *expected, "batch {at}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_batch_without_memory_leaves_those_in_flight_whole() {
    let _memory = all_memory();
    let engine = engine(config(64, INNER, 1, LENGTH));
    let DeviceName::Cuda(info) = engine.device().clone() else {
        panic!("the engine is on a CUDA device");
    };
    let bytes_a_sequence = 2 * u64::from(LENGTH) * u64::from(INNER);
    let huge = batch(&vec![
        LENGTH;
        (2 * info.memory / bytes_a_sequence) as usize + 1
    ]);
    let small: [u32; 3] = [5, 300, 17];
    let expected = bits(&mut engine.session().expect("a session"), &small);
    let mut session = engine.session().expect("a session");
    for round in 0..3 {
        let before = session.submit(&batch(&small)).expect("a place");
        out_of_memory(session.submit(&huge).and_then(Pending::wait));
        let behind = session.submit(&batch(&small)).expect("a place");
        for pending in [before, behind] {
            let found = all_bits(&pending.wait().expect("it ran"));
            assert!(found == expected, "round {round}");
        }
    }
}

/// Returns the median and the 90th percentile of some values.
fn spread(mut of: Vec<f32>) -> (f32, f32) {
    of.sort_by(f32::total_cmp);
    (of[of.len() / 2], of[of.len() * 9 / 10])
}

#[test]
#[ignore = "needs a CUDA device"]
fn the_device_goes_on_with_the_next_batch_at_once() {
    // No other test may use the device, because its kernels would run between the batches.
    let _memory = all_memory();
    let mut config = config(768, 3072, 12, 512);
    config["num_attention_heads"] = json!(12);
    let engine = builder(config)
        .outputs(["sentence_embedding"])
        .build()
        .expect("a device and NVRTC are there");
    for lens in [&[250; 20][..], &[250; 4], &[16]] {
        let batch = batch(lens);
        let mut session = engine.session().expect("a session");
        let (median, most) = spread(session.gaps(&batch, 10, 200).expect("it runs"));
        let alone = session.time(&batch, 5, 50).expect("it runs").median();
        let runs = 200;
        let began = std::time::Instant::now();
        let mut ahead = None;
        for _ in 0..runs {
            let pending = session.submit(&batch).expect("a place");
            if let Some(done) = ahead.replace(pending) {
                Pending::wait(done).expect("it ran");
            }
        }
        ahead.map(|last| last.wait().expect("it ran"));
        let each = began.elapsed().as_secs_f64() * 1e3 / f64::from(runs);
        println!(
            "{} × {} tokens: the device waits {median:.2} µs between batches (9 of 10: {most:.2}); {each:.4} ms a batch two at a time, {alone:.4} ms of the device alone",
            lens.len(),
            lens[0]
        );
        // The host prepares a batch while the device runs the previous one. If the previous batch is as short as this preparation, the
        // device may have to wait for the host.
        assert!(median < 20.0 || lens.len() == 1, "{median} µs");
    }
}
