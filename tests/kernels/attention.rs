//! Tests of the selection of attention kernels through the API: the user names a kernel, a program chooses a kernel by the longest sequence
//! of a batch, and a kernel that cannot be used is an error.

use std::sync::Arc;

use crate::common::{WEIGHTS, difference, hopper, options, usual};
use gemmule::{
    AllocatorChoice, AttentionChoice, Batch, DType, DeviceChoice, Engine, EngineError,
    engine::{Artifact, CompileOptions, Compiled, compile, description},
    kernels::KernelSpec,
    program::{Program, Step, Storage, TensorIndex},
    runtime::{
        Output,
        cpu::{CpuModel, CpuSession},
    },
    select::{Batches, Dispatch, Entry, Interval},
    tensor::Extents,
};
use insta::assert_snapshot;
use serde_json::{Value, json};

/// Returns a config with two heads of width 16, and positions for long sequences.
fn config() -> Value {
    json!({
        "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 48, "vocab_size": 20, "max_position_embeddings": 600,
        "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    })
}

fn compiled(options: &CompileOptions) -> Result<Compiled, EngineError> {
    compile(&description("bert")?, &config(), options)
}

fn engine(attention: AttentionChoice) -> Engine {
    Engine::builder("bert")
        .config_value(config())
        .random_weights(WEIGHTS)
        .device(DeviceChoice::Cpu)
        .outputs(["last_hidden_state", "sentence_embedding"])
        .attention(attention)
        .build()
        .expect("it builds")
}

fn batch(lens: &[u32]) -> Batch {
    let sequences: Vec<Vec<u32>> = lens
        .iter()
        .map(|&n| (0..n).map(|i| (i * 7 + n) % 20).collect())
        .collect();
    Batch::from_sequences(&sequences).expect("a batch")
}

fn kernels_of(program: &Program, step: &Step) -> Vec<String> {
    let symbol = |kernel: usize| program.kernels[kernel].as_kernel().symbol();
    step.dispatch.choices().copied().map(symbol).collect()
}

#[test]
fn every_kind_of_attention_gives_the_same() {
    let online = engine(AttentionChoice::Online);
    let kinds = [
        AttentionChoice::Auto,
        AttentionChoice::Grouped,
        AttentionChoice::Short,
    ];
    for kind in kinds {
        let engine = engine(kind);
        let mut sets = vec![vec![1], vec![17, 18, 52, 63, 77], vec![256, 3, 128, 129]];
        if kind != AttentionChoice::Short {
            sets.push(vec![300, 1, 513]);
        }
        for lens in sets {
            let batch = batch(&lens);
            let got = engine.session().unwrap().run(&batch).unwrap();
            let want = online.session().unwrap().run(&batch).unwrap();
            let difference = difference(&got, &want);
            assert!(difference < 2e-5, "{kind} on {lens:?}: {difference}");
        }
    }
}

#[test]
fn grouped_attention_is_three_launches_a_layer() {
    let mut options = options(DType::F16);
    options.attention = AttentionChoice::Grouped;
    let program = compiled(&options).unwrap().program;
    program.validate().unwrap();
    let text = program.to_string();
    let lines: Vec<&str> = text.lines().collect();
    let attention: Vec<String> = lines
        .windows(2)
        .filter(|pair| pair[1].contains("mha"))
        .map(|pair| format!("{}\n{}", pair[0].trim(), pair[1].trim()))
        .collect();
    assert_snapshot!(attention[..3].join("\n"), @r"
    2 layer.0.context.scores (layer.0.query+key+value, layer.0.query+key+value, cu_lens, pair_offsets, layer.0.context.scores, layer.0.context.partials) over tokens
    any batch: mha_long_scores_f16_h2x16_q0of96_k32of96
    3 layer.0.context.statistics (layer.0.context.partials, cu_lens, pair_offsets, layer.0.context.statistics) over tokens
    any batch: mha_long_reduce_f32_h2
    4 layer.0.context (layer.0.context.scores, layer.0.context.statistics, layer.0.query+key+value, cu_lens, pair_offsets, layer.0.context) over tokens
    any batch: mha_long_context_f16_h2x16_v64of96
    ");
    assert_eq!(attention.len(), 6);
}

#[test]
fn a_sequence_beyond_the_short_kernel_is_an_error_before_it_runs() {
    let engine = engine(AttentionChoice::Short);
    let long = batch(&[3, 257]);
    let mut session = engine.session().unwrap();
    assert_snapshot!(session.run(&long).unwrap_err(), @"the longest sequence of the batch has 257 tokens, but the kernels of `layer.0.context` take at most 256; send shorter sequences, or compile the model with attention auto, online or grouped");
    let asked = engine.bytes_needed(&long).unwrap_err().to_string();
    assert_eq!(asked, session.run(&long).unwrap_err().to_string());
    session.run(&batch(&[256, 3])).expect("within the limit");
}

#[test]
fn what_cannot_be_had_is_refused_and_not_replaced() {
    let mut options = options(DType::F32);
    options.attention = AttentionChoice::Grouped;
    options.without.insert("fuse_attention".to_owned());
    assert_snapshot!(compiled(&options).err().unwrap(), @"grouped attention was requested, but `layer.0.probabilities` belongs to attention that was not fused; enable the pass `fuse_attention` (`gemmule explain` shows why it refuses), or choose auto");
    // The pass `fuse_attention` does not support heads of width 12.
    options.without.clear();
    let mut odd = config();
    (odd["hidden_size"], odd["intermediate_size"]) = (json!(24), json!(48));
    let refused = compile(&description("bert").unwrap(), &odd, &options);
    assert_snapshot!(refused.err().unwrap(), @"grouped attention was requested, but `layer.0.probabilities` belongs to attention that was not fused; enable the pass `fuse_attention` (`gemmule explain` shows why it refuses), or choose auto");
    assert_snapshot!("flash".parse::<AttentionChoice>().unwrap_err(), @"`flash` is not a kind of attention; expected auto, short, grouped, online or wgmma");
}

#[test]
fn warpgroup_attention_is_for_hopper_and_its_head_sizes() {
    let mut options = options(DType::F16);
    options.attention = AttentionChoice::Wgmma;
    assert_snapshot!(compiled(&options).err().unwrap(), @"`layer.0.context` cannot be wgmma attention: warpgroup attention needs compute capability 9.0, which not all targets have; use the online kernel");
    options.machine = hopper();
    assert_snapshot!(compiled(&options).err().unwrap(), @"`layer.0.context` cannot be wgmma attention: the head size is 16; warpgroup attention takes 32, 64, 96, 128 and 256, use the online kernel");
    // The config has two heads of width 32.
    let mut wide = config();
    wide["hidden_size"] = json!(64);
    let program = |options: &CompileOptions| {
        let compiled = compile(&description("bert").unwrap(), &wide, options).unwrap();
        compiled.program.validate().unwrap();
        compiled.program
    };
    let asked = program(&options);
    let kernels: Vec<String> = asked
        .steps
        .iter()
        .flat_map(|step| kernels_of(&asked, step))
        .filter(|symbol| symbol.starts_with("mha"))
        .collect();
    assert!(!kernels.is_empty());
    let wgmma = "mha_wgmma_f16_h2x32_qkv192_";
    assert!(kernels.iter().all(|k| k.starts_with(wgmma)), "{kernels:?}");
}

#[test]
fn few_tokens_have_a_kernel_of_their_own_on_hopper() {
    // The config has two heads of width 32.
    let mut wide = config();
    wide["hidden_size"] = json!(64);
    let launched = |change: &dyn Fn(&mut CompileOptions), lens: &[u32]| -> String {
        let mut options = CompileOptions::new(DType::F16, hopper());
        change(&mut options);
        let compiled = compile(&description("bert").unwrap(), &wide, &options).unwrap();
        compiled.program.validate().unwrap();
        let extents = Extents::of(lens).unwrap();
        let steps = compiled.program.steps.iter();
        let kernels = steps.filter_map(|step| step.launch(&extents).unwrap());
        let symbols = kernels.map(|(kernel, _)| {
            let kernel = compiled.program.kernels[kernel].as_kernel();
            kernel.symbol()
        });
        let mut attention: Vec<String> = symbols.filter(|s| s.starts_with("mha")).collect();
        attention.dedup();
        assert_eq!(attention.len(), 1, "{attention:?}");
        attention.remove(0).replace("_f16_h2x32_qkv192", "")
    };
    let asked = |lens: &[u32]| launched(&|_| (), lens);
    assert_eq!(asked(&[64]), "mha_split_keys");
    assert_eq!(asked(&[1, 40, 23]), "mha_split_keys");
    // Batches with more than 64 tokens.
    for lens in [&[65][..], &[33, 32]] {
        assert_eq!(asked(lens), "mha_wgmma_64x64x5");
    }
    let others: [&dyn Fn(&mut CompileOptions); 3] = [
        &|options| options.attention = AttentionChoice::Wgmma,
        &|options| options.invariant = true,
        &|options| options.machine = usual(),
    ];
    for change in others {
        assert_ne!(launched(change, &[64]), "mha_split_keys");
    }
}

#[test]
fn an_artifact_has_its_attention_already() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("grouped");
    let mut options = options(DType::F32);
    options.attention = AttentionChoice::Grouped;
    let artifact = Artifact::of(compiled(&options).unwrap(), Vec::new());
    artifact.write(&file).unwrap();
    assert_eq!(Artifact::read(&file).unwrap(), artifact);
    let builder = Engine::from_artifact(&file)
        .random_weights(WEIGHTS)
        .device(DeviceChoice::Cpu);
    let error = builder.attention(AttentionChoice::Online).build().err();
    let text = error.unwrap().to_string();
    assert_snapshot!(text.replace(&file.display().to_string(), "grouped"), @"the artifact `grouped` already contains its kernels, so online attention cannot be selected; compile the model with it");
}

/// Returns the operands of a step in the program `from` as indices of the tensors with the same names in the program `to`.
fn bound(from: &Program, step: &Step, to: &Program) -> Vec<TensorIndex> {
    let index = |&operand: &TensorIndex| {
        let name = &from.tensors[operand].name;
        let found = to.tensors.iter().position(|tensor| tensor.name == *name);
        found.unwrap_or_else(|| panic!("no tensor is `{name}`"))
    };
    step.operands.iter().map(index).collect()
}

/// Returns a program with three attention kernels: the short kernel for lengths up to 64, grouped attention for 65 to 256, and the online
/// kernel for longer sequences. `select` never creates such a program, but an artifact may contain one, so executors must support it.
fn by_length(dtype: DType) -> Program {
    let of = |attention| {
        let mut options = options(dtype);
        options.attention = attention;
        compiled(&options).unwrap().program
    };
    let (auto, mut program) = (of(AttentionChoice::Auto), of(AttentionChoice::Grouped));
    let kernels_before = program.kernels.len();
    let short = auto.kernels.iter().find_map(|k| match k {
        KernelSpec::MhaShort(short) => Some(short.clone()),
        _ => None,
    });
    let short = short.expect("short sequences have a kernel");
    for max_len in [32, 64] {
        let mut short = short.clone();
        short.max_len = max_len;
        program.kernels.push(short.into());
    }
    let online = auto
        .kernels
        .iter()
        .find(|k| matches!(k, KernelSpec::MhaOnline(_)));
    program
        .kernels
        .push(online.expect("long ones have another").clone());
    let (few, long) = (Some(64), Some(256));
    for layer in 0..2 {
        let name = format!("layer.{layer}.context");
        let at = program
            .steps
            .iter()
            .position(|step| step.name == name)
            .unwrap();
        let own = auto.steps.iter().find(|step| step.name == name).unwrap();
        let operands = bound(&auto, own, &program);
        for step in &mut program.steps[at - 2..=at] {
            let kernel = step.kernels()[0];
            step.dispatch = Dispatch::by_longest([(few, None), (long, Some(kernel))]);
        }
        let further = [
            Dispatch::by_longest([
                (Some(32), Some(kernels_before)),
                (few, Some(kernels_before + 1)),
            ]),
            Dispatch::by_longest([(long, None), (None, Some(kernels_before + 2))]),
        ];
        for dispatch in further {
            let step = Step {
                dispatch,
                operands: operands.clone(),
                ..own.clone()
            };
            program.steps.insert(at + 1, step);
        }
        // Extend the lifetimes of the operands to the two new steps, and shift all later lifetimes by two steps.
        for (index, tensor) in program.tensors.iter_mut().enumerate() {
            if let Storage::Planned { first, last } = &mut tensor.place {
                let is_read = operands.contains(&index);
                *first += if *first > at as u32 { 2 } else { 0 };
                *last += if *last > at as u32 || (is_read && *last == at as u32) {
                    2
                } else {
                    0
                };
            }
        }
    }
    program
}

fn run(program: &Program, lens: &[u32], allocator: &AllocatorChoice) -> Vec<Output> {
    let model = CpuModel::load(
        program.clone(),
        gemmule::engine::Threads::usual().unwrap(),
        &WEIGHTS,
        &|_, _| (),
    )
    .unwrap();
    let mut session = CpuSession::new(Arc::new(model), allocator).unwrap();
    session.run(&batch(lens)).unwrap()
}

#[test]
fn ranges_of_lengths_are_steps_that_run_only_then() {
    let program = by_length(DType::F32);
    program.validate().unwrap();
    let conditional: Vec<(String, Vec<String>)> = program
        .steps
        .iter()
        .filter(|step| !Batches::ALL.is_covered_by(&step.dispatch.covered()))
        .map(|step| {
            let parts: Vec<String> = step
                .dispatch
                .covered()
                .iter()
                .map(|b| b.to_string())
                .collect();
            (parts.join("; "), kernels_of(&program, step))
        })
        .collect();
    let stems: Vec<(&str, Vec<&str>)> = conditional
        .iter()
        .map(|(when, kernels)| {
            let stems = kernels.iter().map(|k| k.split("_f32").next().unwrap());
            (when.as_str(), stems.collect())
        })
        .collect();
    let layer = [
        ("longest 65 to 256", vec!["mha_long_scores"]),
        ("longest 65 to 256", vec!["mha_long_reduce"]),
        ("longest 65 to 256", vec!["mha_long_context"]),
        ("longest above 256", vec!["mha_online"]),
        (
            "longest up to 32; longest 33 to 64",
            vec!["mha_short", "mha_short"],
        ),
    ];
    assert_eq!(stems, [&layer[..], &layer[..]].concat());
    let mut options = options(DType::F32);
    options.attention = AttentionChoice::Online;
    let online = compiled(&options).unwrap().program;
    let maximum = AllocatorChoice::Maximum(Extents::of(&[400, 400]).unwrap());
    for lens in [[20, 3], [64, 1], [65, 9], [256, 256], [257, 2]] {
        let want = run(&online, &lens, &AllocatorChoice::default());
        // `maximum` reserves memory for two sequences of 400 tokens, which use online attention. The memory also suffices for the batches
        // that use grouped attention, although grouped attention stores scores.
        for allocator in [AllocatorChoice::default(), maximum] {
            let got = run(&program, &lens, &allocator);
            for (got, want) in got.iter().zip(&want) {
                let pairs = got.values.iter().zip(&want.values);
                let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst < 2e-5, "{lens:?}: {worst}");
            }
        }
    }
}

#[test]
fn tensors_of_steps_that_do_not_run_have_no_bytes() {
    let program = by_length(DType::F16);
    let scores = |longest: u32| -> u64 {
        let usage = program.usage(&Extents::of(&[longest, 5]).unwrap()).unwrap();
        let planned = program.planned().zip(usage);
        let between = planned.filter(|((_, t), _)| {
            [".scores", ".partials", ".statistics"]
                .iter()
                .any(|end| t.name.ends_with(end))
        });
        let bytes: Vec<u64> = between.map(|(_, record)| record.bytes).collect();
        assert_eq!(bytes.len(), 6, "three of each layer");
        bytes.iter().sum()
    };
    for longest in [1, 64, 257, 600] {
        assert_eq!(scores(longest), 0, "{longest}");
    }
    for longest in [65u64, 256] {
        let (pairs, tokens) = (longest * longest + 25, longest + 5);
        // Bytes of one head in one layer: scores in f16, two f32 values for each tile of a row of scores, and two f32 values for each row.
        // The model has two heads and two layers.
        let each = 2 * (pairs + 8 * tokens) + 8 * (pairs / 128 + tokens) + 8 * tokens;
        assert_eq!(scores(longest as u32), 4 * each, "{longest}");
    }
}

#[test]
fn a_program_that_leaves_lengths_out_is_refused() {
    let good = by_length(DType::F32);
    let refused = |damage: &dyn Fn(&mut Vec<Step>)| {
        let mut program = good.clone();
        damage(&mut program.steps);
        program.validate().expect_err("it is damaged")
    };
    let first = |steps: &[Step], stem: &str| {
        let is_one = |k: usize| {
            matches!(
                (&good.kernels[k], stem),
                (KernelSpec::MhaLongScores(_), "scores")
                    | (KernelSpec::MhaLongReduce(_), "reduce")
                    | (KernelSpec::MhaOnline(_), "online")
            )
        };
        let found = steps.iter().position(|s| is_one(s.kernels()[0]));
        found.expect("there is one")
    };
    let damaged = |stem: &str, above, up_to| {
        refused(&|steps| {
            let at = first(steps, stem);
            let kernel = steps[at].kernels()[0];
            let range = Batches::by_longest(Interval::new(above, up_to));
            let choice = Entry {
                batches: range,
                choice: kernel,
            };
            steps[at].dispatch = Dispatch::of(vec![choice]);
        })
    };
    assert_snapshot!(damaged("online", 300, None), @"the step `layer.0.projected.product` reads `layer.0.context`, which is not computed for all its batches");
    assert_snapshot!(damaged("online", 0, None), @"the step `layer.0.context` computes `layer.0.context`, which is already computed for the same batch");
    assert_snapshot!(damaged("online", 256, Some(256)), @"the step `layer.0.context` has a kernel for an empty range of batches (longest 257 to 256)");
    assert_snapshot!(damaged("scores", 65, Some(256)), @"the step `layer.0.context.statistics` reads `layer.0.context.partials`, which is not computed for all its batches");
    assert_snapshot!(damaged("reduce", 0, None), @"the step `layer.0.context.statistics` reads `layer.0.context.partials`, which is not computed for all its batches");
}
