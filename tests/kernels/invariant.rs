//! Tests of invariant programs. The bits of a sequence's results depend neither on its position in the batch nor on the other sequences of
//! the batch.

use crate::common::{
    Folder, hopper,
    mates::{self, Numbers},
    tiny_compiled, tiny_config, usual,
};
use gemmule::{
    Batch, Builder, DType, DeviceChoice, Engine, EngineError,
    engine::{Artifact, CompileOptions, Padding, TuneMode, compile, description},
    program::AttentionChoice,
    runtime::weights::RandomWeights,
    select::{Batches, Timings},
};
use insta::assert_snapshot;
use serde_json::{Value, json};

const VOCABULARY: u32 = 500;
const LONGEST: u32 = 700;

/// Returns a config whose widths are not multiples of a block or tile. The inner width, 2000, is larger than a GEMM's blocks along the
/// summed dimension, so a GEMM splits its sums.
fn config() -> Value {
    json!({
        "hidden_size": 72, "num_attention_heads": 3, "num_hidden_layers": 2,
        "intermediate_size": 2000, "vocab_size": VOCABULARY, "max_position_embeddings": LONGEST,
        "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    })
}

fn builder() -> Builder {
    Engine::builder("bert")
        .config_value(config())
        .random_weights(RandomWeights {
            seed: 9,
            deviation: 0.1,
        })
        .outputs(["last_hidden_state", "sentence_embedding"])
        .device(DeviceChoice::Cpu)
}

/// Returns the number of batches that change the bits of a sequence's results. Tests sequences of one token, of about as many tokens as a
/// tile or block has rows, and of more tokens than a block of queries or keys.
fn n_changed(engine: &Engine) -> usize {
    mates::n_changed(engine, &[1, 7, 63, 64, 65, 130, 600], LONGEST)
}

#[test]
fn batch_mates_do_not_change_a_bit() {
    assert_eq!(
        n_changed(&builder().invariant(true).build().expect("it builds")),
        0
    );
}

/// On the CPU, the order of a sum over a row never depends on the batch, even if the program is not invariant.
#[test]
fn on_a_cpu_they_do_not_without_the_mode_either() {
    assert_eq!(n_changed(&builder().build().expect("it builds")), 0);
}

/// Shows that [`n_changed`](mates::n_changed) can find differences. With kept padding, attention sums also include padding, up to the
/// length of the longest sequence of the batch.
#[test]
fn where_padding_is_kept_they_do() {
    let builder = builder().padding(Padding::Kept).without(["fuse_attention"]);
    let engine = builder.outputs(["last_hidden_state"]).build();
    let n_changed = mates::n_changed(&engine.expect("it builds"), &[7, 65], 100);
    assert!(n_changed > 0);
}

#[test]
fn attention_that_is_asked_for_by_name_is_invariant_too() {
    for attention in [AttentionChoice::Grouped, AttentionChoice::Online] {
        let builder = builder().invariant(true).attention(attention);
        let changed = n_changed(&builder.build().expect("it builds"));
        assert_eq!(changed, 0, "{attention}");
    }
}

#[test]
fn the_results_are_those_of_other_programs_but_for_rounding() {
    let mut numbers = Numbers(3);
    let sequences = [
        numbers.sequence(5, VOCABULARY),
        numbers.sequence(301, VOCABULARY),
        numbers.sequence(64, VOCABULARY),
    ];
    let batch = Batch::from_sequences(&sequences).expect("a batch");
    let values = |builder: Builder| {
        let engine = builder.build().expect("it builds");
        let outputs = engine.session().expect("a session").run(&batch);
        let outputs = outputs.expect("it runs");
        outputs
            .get("last_hidden_state")
            .expect("an output")
            .values
            .clone()
    };
    let (plain, invariant) = (values(builder()), values(builder().invariant(true)));
    let far = plain.iter().zip(&invariant).map(|(a, b)| (a - b).abs());
    assert!(far.fold(0.0, f32::max) < 1e-4);
}

#[test]
fn every_step_has_one_kernel_for_all_batches() {
    let bert = description("bert").expect("it is shipped");
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for machine in [usual(), hopper()] {
            let options = |invariant| CompileOptions {
                invariant,
                ..CompileOptions::new(dtype, machine.clone())
            };
            let program = |invariant| {
                compile(&bert, &tiny_config(), &options(invariant))
                    .expect("it compiles")
                    .program
            };
            let invariant = program(true);
            invariant.validate().expect("it is sound");
            let one = |s: &gemmule::program::Step| s.dispatch.covered() == [Batches::ALL];
            assert!(invariant.steps.iter().all(one));
            assert!(!program(false).steps.iter().all(one));
        }
    }
}

/// An invariant program may use wgmma attention, because the rounding of a sequence's softmax weights depends only on the sequence's own
/// rows. `tests/kernels/device.rs` compares the bits.
#[test]
fn attention_by_warpgroup_products_is_one_kernel_of_an_invariant_program() {
    let bert = description("bert").expect("it is shipped");
    // The config has two heads of width 32.
    let mut config = tiny_config();
    (config["hidden_size"], config["num_attention_heads"]) = (json!(64), json!(2));
    config["max_position_embeddings"] = json!(512); // A program that is not invariant uses another kernel for short sequences.
    let attention = |invariant, attention| -> Vec<String> {
        let options = CompileOptions {
            invariant,
            attention,
            ..CompileOptions::new(DType::F16, hopper())
        };
        let program = compile(&bert, &config, &options)
            .expect("it compiles")
            .program;
        let symbols = program.kernels.iter().map(|k| k.as_kernel().symbol());
        symbols
            .filter(|symbol| symbol.starts_with("mha_"))
            .collect()
    };
    assert!(attention(false, AttentionChoice::Auto).len() > 1);
    for choice in [AttentionChoice::Auto, AttentionChoice::Wgmma] {
        let kernels = attention(true, choice);
        assert!(
            matches!(&kernels[..], [one] if one.starts_with("mha_wgmma")),
            "{kernels:?}"
        );
    }
    let online = attention(true, AttentionChoice::Online);
    assert!(
        matches!(&online[..], [one] if one.starts_with("mha_online")),
        "{online:?}"
    );
}

#[test]
fn softmax_in_memory_and_the_tuner_are_refused_with_the_reason() {
    let text = |builder: Builder| {
        let error = builder.invariant(true).build().err().expect("an error");
        error.to_string()
    };
    assert_snapshot!(text(builder().without(["fuse_attention"])), @"`layer.0.probabilities` (softmax): sums rows in an order that depends on their address, and so on the other sequences; enable the pass `fuse_attention` (`gemmule explain` shows why it refuses), or do not use --invariant");
    assert_snapshot!(text(builder().tune(TuneMode::Quick)), @"timings select kernels by size, and an invariant model uses one kernel for all sizes; omit one of the two");
    assert_snapshot!(text(builder().timings("absent.ron")), @"timings select kernels by size, and an invariant model uses one kernel for all sizes; omit one of the two");
}

#[test]
fn whatever_timings_say_one_kernel_serves_every_batch() {
    let bert = description("bert").expect("it is shipped");
    for machine in [usual(), hopper()] {
        let program = |timings: Option<Timings>| {
            let options = CompileOptions {
                invariant: true,
                timings,
                ..CompileOptions::new(DType::F16, machine.clone())
            };
            let compiled = compile(&bert, &tiny_config(), &options).expect("it compiles");
            compiled.program.validate().expect("it is sound");
            compiled.program
        };
        let untimed = program(None);
        let mut timings = Timings::default();
        for kernel in &untimed.kernels {
            for rows in [64, 1 << 14] {
                timings.add(&kernel.as_kernel().symbol(), rows, 1e6);
            }
        }
        let timed = program(Some(timings));
        // The program avoids the kernels that are slow according to the timings.
        assert_ne!(timed, untimed);
        let mut steps = timed.steps.iter();
        assert!(steps.all(|s| s.dispatch.covered() == [Batches::ALL]));
    }
}

#[test]
fn an_artifact_says_whether_it_is_invariant() {
    let folder = Folder::new();
    let file = folder.file("tiny");
    let mut compiled = tiny_compiled(DType::F32);
    compiled.options.invariant = true;
    let compiled = compiled.with_timings(None).expect("it lowers");
    let artifact = Artifact::of(compiled, Vec::new());
    artifact.write(&file).expect("it is written");
    let read = Artifact::read(&file).expect("it is sound");
    assert!(read.program.invariant && read == artifact);

    // An artifact whose program claims to be invariant, but has steps with several kernels.
    let mut hostile = Artifact::of(tiny_compiled(DType::F32), Vec::new());
    hostile.program.invariant = true;
    hostile.write(&file).expect("it is written");
    let error = Artifact::read(&file).expect_err("its steps have several kernels");
    assert_snapshot!(folder.text(&error), @"`[dir]/tiny` is not an artifact of this version of gemmule: it is invariant, but which kernel computes `layer.0.query+key+value` depends on the batch; compile the model again");

    // `Builder::invariant` refuses an artifact whose program is not invariant.
    Artifact::of(tiny_compiled(DType::F32), Vec::new())
        .write(&file)
        .expect("it is written");
    let engine = Engine::from_artifact(&file).device(DeviceChoice::Cpu);
    let error: EngineError = engine.invariant(true).build().err().expect("an error");
    assert_snapshot!(folder.text(&error), @"the artifact `[dir]/tiny` selects kernels by batch size, so results depend on it; compile the model to be invariant");
}
