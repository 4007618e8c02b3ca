//! Tests of [`Padding::Kept`], which computes all sequences at the length of the longest sequence: launches differ, but the results of each
//! token are the same.

use crate::common::{WEIGHTS, tiny_config};
use gemmule::{
    Batch, Builder, DeviceChoice, Engine, EngineError, Outputs, engine::Padding,
    measure::Comparison, passes,
};
use insta::assert_snapshot;

/// Lengths of the sequences of each batch that is compared.
const RAGGED: [&[u32]; 6] = [
    &[5, 1, 3],
    &[1, 12],
    &[4, 4],
    &[7],
    &[1, 1, 1],
    &[12, 2, 11, 1],
];

/// Outputs in every layout: a row for each token, for each head and token, for each head and pair of tokens, and for each sequence.
const VALUES: [&str; 6] = [
    "last_hidden_state",
    "pooler_output",
    "token_logits",
    "layer.0.query_heads",
    "layer.0.probabilities",
    "layer.0.context",
];

fn builder(model: &str) -> Builder {
    Engine::builder(model)
        .config_value(tiny_config())
        .random_weights(WEIGHTS)
        .device(DeviceChoice::Cpu)
}

fn unfused() -> Vec<&'static str> {
    passes::all().iter().map(|p| p.name()).collect()
}

/// Returns a batch with segment ids. Adjacent rows have different ids, so that mixed-up rows are detected.
fn batch(lens: &[u32]) -> Batch {
    let n = lens.iter().sum::<u32>();
    Batch::from_packed((0..n).map(|i| i * 7 % 20).collect(), lens)
        .and_then(|b| b.with_type_ids((0..n).map(|i| i % 2).collect()))
        .expect("a batch")
}

fn run(engine: &Engine, batch: &Batch) -> Outputs {
    let mut session = engine.session().expect("a session");
    session.run(batch).expect("it runs")
}

#[track_caller]
fn error(builder: Builder) -> String {
    let error: EngineError = builder.build().err().expect("it is refused");
    error.to_string()
}

#[test]
fn padded_results_equal_packed_ones() {
    let packed = builder("bert").intermediates(VALUES).without(unfused());
    let padded = builder("bert").intermediates(VALUES).without(unfused());
    let packed = packed.build().expect("it loads");
    let padded = padded.padding(Padding::Kept).build().expect("it loads");
    for lens in RAGGED {
        let batch = batch(lens);
        let (want, got) = (run(&packed, &batch), run(&padded, &batch));
        for name in VALUES {
            let want = want.get(name).expect("it is computed");
            let got = got.get(name).expect("it is computed");
            assert_eq!(got.shape, want.shape, "{name} of {lens:?}");
            let difference = Comparison::between(got, want).max;
            assert!(difference < 2e-6, "{name} of {lens:?}: {difference}");
        }
    }
}

#[test]
fn padded_results_equal_fused_ones_with_all_passes_but_attention() {
    let fused = builder("bert").outputs(["last_hidden_state"]);
    let padded = builder("bert").outputs(["last_hidden_state"]);
    let fused = fused.build().expect("it loads");
    let padded = padded
        .without(["fuse_attention"])
        .padding(Padding::Kept)
        .build()
        .expect("it loads");
    for lens in RAGGED {
        let batch = batch(lens);
        let (want, got) = (run(&fused, &batch), run(&padded, &batch));
        let [want, got] = [&want, &got].map(|o| o.get("last_hidden_state").expect("an output"));
        assert_eq!(got.shape, want.shape);
        let difference = Comparison::between(got, want).max;
        assert!(difference < 5e-6, "{lens:?}: {difference}");
    }
}

#[test]
fn an_ordinary_session_takes_no_padding_for_tokens() {
    let ordinary = builder("bert").build().expect("it loads");
    let padded = batch(&[4, 4, 2]).with_padding().expect("it fits");
    let mut session = ordinary.session().expect("a session");
    assert_snapshot!(session.run(&padded).expect_err("it is padded"), @"sequence 2 has 2 tokens and 2 of padding, which this session would treat as tokens; run the batch without `with_padding`, or build the engine with `Padding::Kept`");
    assert!(session.time(&padded, 0, 1).is_err());
    assert!(ordinary.footprint(&padded).is_err());
    // A batch in which no sequence has padding is accepted.
    let even = batch(&[3, 3]);
    let same = even.with_padding().expect("it fits");
    assert_eq!(run(&ordinary, &same), run(&ordinary, &even));
    // An engine that keeps padding accepts a batch with padding.
    let keeping = builder("bert")
        .outputs(["last_hidden_state"])
        .without(unfused());
    let keeping = keeping.padding(Padding::Kept).build().expect("it loads");
    let own = run(&keeping, &batch(&[4, 4, 2]));
    let given = run(&keeping, &padded);
    let rows = |outputs: &Outputs| {
        outputs
            .get("last_hidden_state")
            .expect("it is there")
            .clone()
    };
    assert_eq!(rows(&own), rows(&given));
    assert!(
        given
            .sequence("last_hidden_state", 2)
            .is_ok_and(|rows| rows.len() == 2 * 16)
    );
}

#[test]
fn padding_is_computed_and_takes_memory() {
    let of = |padding| {
        let engine = builder("bert").outputs(["last_hidden_state"]);
        let engine = engine.without(unfused()).padding(padding);
        engine.build().expect("it loads")
    };
    let (packed, padded) = (of(Padding::Removed), of(Padding::Kept));
    let batch = batch(&[12, 1, 1]);
    let tokens = |engine: &Engine| engine.tokens_computed(&batch).expect("a count");
    assert_eq!((tokens(&packed), tokens(&padded)), (14, 36));
    let bytes = |engine: &Engine| engine.footprint(&batch).expect("a size").lower_bound;
    assert!(bytes(&padded) > 2 * bytes(&packed));
    // A batch that is created from padded rows and a mask gives the same results as the batch of its sequences.
    let ids: Vec<u32> = (0..6).collect();
    let came_padded = Batch::from_padded(&ids, &[1, 1, 1, 1, 0, 0], 3).expect("a batch");
    let same = Batch::from_sequences(&[vec![0, 1, 2], vec![3]]).expect("a batch");
    assert_eq!(run(&padded, &came_padded), run(&padded, &same));
}

#[test]
fn what_would_mix_padding_into_results_is_refused() {
    let kept = |b: Builder| error(b.padding(Padding::Kept));
    let hidden = || builder("bert").outputs(["last_hidden_state"]);
    assert_snapshot!(kept(hidden()), @"`layer.0.context` is fused attention, which has no mask for padding; to keep padding, switch the pass `fuse_attention` off");
    let unfused = || builder("bert").without(unfused());
    assert_snapshot!(kept(unfused()), @"the output `sentence_embedding` is a mean over tokens (`mean`), which would average padding too; to keep padding, ask for other outputs, such as values per token");
    assert_snapshot!(kept(unfused().outputs(["pooler_output", "sentence_embedding"])), @"the output `sentence_embedding` is a mean over tokens (`mean`), which would average padding too; to keep padding, ask for other outputs, such as values per token");
    let only = builder("bert").without(["fuse_attention"]);
    assert_snapshot!(kept(only.outputs(["sentence_embedding"])), @"the output `sentence_embedding` is a mean over tokens (`sentence_embedding`), which would average padding too; to keep padding, ask for other outputs, such as values per token");
}

#[test]
fn other_pools_would_read_padding_too() {
    let kept = |pool: &str| {
        let source = format!(
            r#"Model(
                name: "pooled",
                graph: [
                    Let("x", embedding(ids: "token_ids", rows: 9, width: 4, table: "words")),
                    Let("y", {pool}(x: "x")),
                    Let("z", concat(of: ["y", "y"])),
                ],
                outputs: {{"z": "z"}},
                default: ["z"],
            )"#
        );
        let builder = Engine::from_source("pooled.ron", source)
            .config_value(serde_json::json!({}))
            .random_weights(WEIGHTS)
            .device(DeviceChoice::Cpu);
        builder.padding(Padding::Kept)
    };
    assert!(kept("first_token").build().is_ok());
    assert_snapshot!(error(kept("max_pool")), @"the output `z` takes the maximum over tokens (`y`), which may be padding; to keep padding, ask for other outputs, such as values per token");
    assert_snapshot!(error(kept("last_token")), @"the output `z` reads last tokens (`y`), which may be padding; to keep padding, ask for other outputs, such as values per token");
}

#[test]
fn an_artifact_does_not_keep_padding() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("tiny");
    let compiled = crate::common::tiny_compiled(gemmule::DType::F32);
    gemmule::engine::Artifact::of(compiled, Vec::new())
        .write(&file)
        .expect("it is written");
    let builder = Engine::from_artifact(&file)
        .random_weights(WEIGHTS)
        .device(DeviceChoice::Cpu);
    let text = error(builder.padding(Padding::Kept));
    assert_snapshot!(text.replace(&folder.path().display().to_string(), "[dir]"), @"the artifact `[dir]/tiny` was compiled to run without padding; build the engine from the description to keep padding");
}

/// Checks that outputs that stay on the device equal outputs that are copied to the host, also after later batches have run.
fn outputs_stay_on(device: DeviceChoice) {
    let engine = builder("bert")
        .outputs(["last_hidden_state", "pooler_output"])
        .device(device)
        .build()
        .expect("it loads");
    let mut session = engine.session().expect("a session");
    let runs = RAGGED.map(|lens| {
        let batch = batch(lens);
        let want = session.run(&batch).expect("it runs");
        // On a device, the first run of a shape launches kernels, and a later run replays a graph.
        let got = [(); 3].map(|()| session.run_on_device(&batch).expect("it runs"));
        (want, got)
    });
    for (want, got) in &runs {
        for outputs in got {
            assert_eq!(outputs.len(), 2);
            for output in outputs {
                let is_cuda = matches!(device, DeviceChoice::Cuda(_));
                assert_eq!(output.cuda_device().is_some(), is_cuda);
                assert!(!output.address().is_null());
                let copied = output.to_output().expect("it is copied");
                assert_eq!(&copied, want.get(&output.name).expect("an output"));
            }
        }
        let [first, second, _] = got;
        assert_ne!(first[0].address(), second[0].address());
    }
}

#[test]
fn outputs_stay_in_memory_of_their_own() {
    outputs_stay_on(DeviceChoice::Cpu);
    let keeping = builder("bert")
        .outputs(["last_hidden_state"])
        .without(unfused())
        .padding(Padding::Kept);
    let mut keeping = keeping
        .build()
        .and_then(|engine| engine.session())
        .expect("it loads");
    let error = keeping.run_on_device(&batch(&[4, 2]));
    assert_snapshot!(error.expect_err("it is padded"), @"the engine keeps padding, which is removed from outputs on the host, so they cannot stay on the device that computes them; call `Session::run`, or build the engine without `Padding::Kept`");
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn outputs_stay_in_memory_of_their_own_on_a_device() {
    outputs_stay_on(DeviceChoice::Cuda(0));
}
