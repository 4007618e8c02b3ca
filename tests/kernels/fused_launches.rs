//! Tests of launches that fuse linear layers with neighboring LayerNorms or with the preparation of attention: which cards and batches use
//! them, that each value is computed once for every batch, and that results are the same as without them.

use std::collections::BTreeSet;

use crate::common::{WEIGHTS, hopper, usual};
use gemmule::{
    AllocatorChoice, Batch, DType,
    engine::{CompileOptions, compile, description},
    kernels::{KernelSpec, gemm::StreamNorm},
    model::Description,
    program::{Program, Step},
    runtime::cpu::{CpuModel, CpuSession},
    select::Batches,
    tensor::Extents,
};
use serde_json::{Value, json};

fn config() -> Value {
    json!({
        "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 2,
        "intermediate_size": 3072, "vocab_size": 20, "max_position_embeddings": 512,
        "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    })
}

fn program(change: impl Fn(&mut CompileOptions)) -> Program {
    program_of("bert", &config(), change)
}

fn program_of(model: &str, config: &Value, change: impl Fn(&mut CompileOptions)) -> Program {
    let mut options = CompileOptions::new(DType::F16, hopper());
    change(&mut options);
    let model = description(model).expect("it is shipped");
    let compiled = compile(&model, config, &options).expect("it compiles");
    compiled.program.validate().expect("it is sound");
    // The counts of `expect:` in a description hold for programs without a KV cache and with all passes.
    if !options.cached && options.without.is_empty() {
        let expected = compiled.model.check_expectations(&compiled.graph);
        expected.expect("the graph is as expected");
    }
    compiled.program
}

/// Models that generate text, each with the number of launches per layer for few tokens: with Hopper's instructions, and without them.
const WRITERS: [(&str, [usize; 2]); 3] = [("gpt2", [5, 7]), ("llama", [6, 9]), ("qwen3", [6, 9])];

fn writer(model: &str, layers: u32) -> Value {
    json!({
        "model_type": model, "vocab_size": 20, "hidden_size": 256, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": layers,
        "intermediate_size": 512, "max_position_embeddings": 512, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true,
        "n_embd": 256, "n_head": 4, "n_layer": layers, "n_positions": 512,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    })
}

/// Returns the kernels that a batch with this number of tokens launches.
fn launched(program: &Program, tokens: u32) -> Vec<&KernelSpec> {
    let batch = Extents::of(&[tokens]).expect("a batch");
    let steps = program.steps.iter();
    steps
        .filter_map(|step| step.launch(&batch).expect("every batch has a kernel"))
        .map(|(kernel, _)| &program.kernels[kernel])
        .collect()
}

fn fused(kernels: &[&KernelSpec]) -> usize {
    let is_fused = |k: &&&KernelSpec| matches!(k, KernelSpec::GemmResidualNorm(_));
    kernels.iter().filter(is_fused).count()
}

/// Returns the number of deferred LayerNorms. Each is computed by two GEMMs: the first writes the statistics of its output rows, and the
/// second uses them to normalize its input.
fn deferred(kernels: &[&KernelSpec]) -> usize {
    let leaves = |k: &&&KernelSpec| matches!(k, KernelSpec::GemmResidualRowStats(_));
    let reads = |k: &&&KernelSpec| matches!(k, KernelSpec::DeferredLayerNormGemm(_));
    let left = kernels.iter().filter(leaves).count();
    assert_eq!(left, kernels.iter().filter(reads).count());
    left
}

#[test]
fn a_launch_is_saved_wherever_a_pair_is_fused() {
    let unfused = program(|options| options.no_fused_launches = true);
    let unfused = launched(&unfused, 1);
    let program = program(|_| ());
    let mut most = 0;
    for tokens in (1..9000).step_by(37) {
        let kernels = launched(&program, tokens);
        let saved = fused(&kernels) + deferred(&kernels);
        assert_eq!(kernels.len() + saved, unfused.len(), "{tokens} tokens");
        most = most.max(fused(&kernels));
    }
    // Each of the two layers has two fused launches: after attention and at the end of the layer.
    assert_eq!(most, 4);
}

#[test]
fn what_one_of_many_layers_launches_is_compiled_for_fewer_sizes() {
    let bert = description("bert").expect("it is shipped");
    let options = CompileOptions::new(DType::F16, hopper());
    let with_layers = |layers: u32| {
        let mut config = config();
        config["num_hidden_layers"] = json!(layers);
        let compiled = compile(&bert, &config, &options).expect("it compiles");
        compiled.program.validate().expect("it is sound");
        compiled.program
    };
    // The QKV projection of the first layer is never fused with a LayerNorm, because the kernel of the embeddings normalizes its input.
    let first = |program: &Program| {
        let of_tokens = |tokens| {
            let kernels = launched(program, tokens).into_iter();
            let mut symbols = kernels.map(|kernel| kernel.as_kernel().symbol());
            let found = symbols.find(|symbol| symbol.starts_with("gemm_bias_f16_n2304_"));
            found.expect("every batch has one")
        };
        // For 1 to 127 tokens, the QKV projections of all layers after the first are fused with the LayerNorm before them. Only the first
        // layer launches a separate QKV projection. Count the different kernels of this projection.
        (1..128).map(of_tokens).collect::<BTreeSet<_>>().len()
    };
    let (few, many) = (with_layers(2), with_layers(12));
    assert!(
        first(&many) < first(&few),
        "{} {}",
        first(&many),
        first(&few)
    );
    assert!(many.kernels.len() < few.kernels.len());
    // NVRTC takes 0.1 to 0.4 seconds to compile each kernel.
    assert!(many.kernels.len() <= 52, "{}", many.kernels.len());
}

#[test]
fn what_is_not_computed_for_a_batch_takes_no_memory() {
    let program = program(|_| ());
    let tokens = (1..9000).find(|&t| fused(&launched(&program, t)) == 4);
    let batch = Extents::of(&[tokens.expect("some batch fuses all")]).expect("a batch");
    let usage = program.usage(&batch).expect("its sizes fit");
    let records = program.planned().zip(usage);
    let empty: Vec<String> = records
        .filter(|(_, record)| record.bytes == 0)
        .map(|((_, tensor), _)| tensor.name.clone())
        .collect();
    // A tensor whose name ends with `.product` is the output of a GEMM. Some batches store it. Others fuse the GEMM into the next launch.
    // This batch fuses all of these GEMMs, so their outputs take no memory.
    let is_product = |name: &&String| name.ends_with(".product");
    let products = program
        .planned()
        .filter(|(_, tensor)| tensor.name.ends_with(".product"));
    let n_products = products.count();
    assert_eq!(empty.iter().filter(is_product).count(), n_products);
    assert!(n_products >= 2, "{n_products}");
    // Only batches of few tokens use the tensors whose names end with `.scaled` and `.row_stats`. There is one of each for each of the
    // three LayerNorms whose output a linear layer reads.
    let of_few = |name: &&String| name.ends_with(".scaled") || name.ends_with(".row_stats");
    assert_eq!(empty.iter().filter(of_few).count(), 6);
    assert_eq!(empty.len(), n_products + 6);
}

#[test]
fn pairs_are_unfused_where_no_kernel_fuses_them_or_batches_must_not_differ() {
    let all = [
        program(|o| o.machine = usual()),
        program(|o| o.invariant = true),
        // Without these two passes, a residual sum has a separate launch, so its GEMM cannot be fused with the LayerNorm.
        program(|o| {
            let passes = ["fuse_bias_residual_layer_norm", "fuse_residual"];
            o.without = passes.map(str::to_owned).into();
        }),
    ];
    for program in all {
        let serves_some =
            |s: &&gemmule::program::Step| !Batches::ALL.is_covered_by(&s.dispatch.covered());
        assert_eq!(program.steps.iter().filter(serves_some).count(), 0);
        assert_eq!(fused(&launched(&program, 4915)), 0);
        assert_eq!(deferred(&launched(&program, 5)), 0);
        assert_eq!(deferred(&launched(&program, 100)), 0);
    }
}

#[test]
fn a_sum_that_a_linear_layer_adds_to_itself_is_stored_beside_its_norm() {
    let program = program(|o| o.without = ["fuse_bias_residual_layer_norm".to_owned()].into());
    program.validate().expect("it is sound");
    let kernels = launched(&program, 4915);
    let keeps = |k: &&&KernelSpec| matches!(k, KernelSpec::GemmResidualNorm(k) if k.keeps_sum);
    let kept = kernels.iter().filter(keeps).count();
    assert!(kept > 0 && kept == fused(&kernels), "{kept}");
}

#[test]
fn what_no_batch_launches_is_not_compiled() {
    let program = program(|_| ());
    let mut launched_by_some = Vec::new();
    for tokens in 1..200 {
        launched_by_some.extend(launched(&program, tokens));
    }
    let streams = |kernel: &&KernelSpec| matches!(kernel, KernelSpec::GemmStream(_));
    let streaming: Vec<&KernelSpec> = program.kernels.iter().filter(streams).collect();
    assert!(!streaming.is_empty());
    for kernel in streaming {
        assert!(launched_by_some.contains(&kernel), "{kernel:?}");
    }
}

#[test]
fn few_tokens_are_normalized_by_row_stats_beside_them() {
    let program = program(|_| ());
    for (tokens, expected) in [(1, 3), (9, 3), (64, 3), (128, 3), (129, 0)] {
        let kernels = launched(&program, tokens);
        assert_eq!(deferred(&kernels), expected, "{tokens} tokens");
        // Row statistics take memory only in batches that defer LayerNorms.
        let batch = Extents::of(&[tokens]).expect("a batch");
        let usage = program.usage(&batch).expect("its sizes fit");
        let records = program.planned().zip(usage);
        let of_few = records.filter(|((_, t), _)| t.name.ends_with(".row_stats"));
        let bytes: Vec<u64> = of_few.map(|(_, record)| record.bytes).collect();
        let each = if expected > 0 {
            u64::from(tokens) * 24 * 4
        } else {
            0
        };
        assert!(
            bytes.len() == 3 && bytes.iter().all(|&b| b >= each && (b > 0) == (each > 0)),
            "{bytes:?}"
        );
    }
}

#[test]
fn norms_are_unfused_where_that_is_asked_for() {
    let program = program(|options| options.no_fused_launches = true);
    for tokens in [1, 100, 600, 1229, 4915, 9000] {
        let kernels = launched(&program, tokens);
        assert_eq!(
            (fused(&kernels), deferred(&kernels)),
            (0, 0),
            "{tokens} tokens"
        );
    }
}

/// Converts a program to f32, in which the CPU computes. Fused launches are compiled only in f16 and bf16.
fn in_f32(program: &Program) -> Program {
    let text = ron::to_string(program).expect("plain data");
    ron::from_str(&text.replace("F16", "F32")).expect("a program")
}

fn session(program: &Program) -> CpuSession {
    let model = CpuModel::load(
        in_f32(program),
        gemmule::engine::Threads::usual().unwrap(),
        &WEIGHTS,
        &|_, _| (),
    )
    .expect("it loads");
    CpuSession::new(model.into(), &AllocatorChoice::default()).expect("a session")
}

#[test]
fn a_layer_of_a_model_that_writes_is_so_few_launches() {
    for (model, expected) in WRITERS {
        for (machine, expected) in [hopper(), usual()].into_iter().zip(expected) {
            let launches = |layers| {
                let program = program_of(model, &writer(model, layers), |options| {
                    options.cached = true;
                    options.machine = machine.clone();
                });
                launched(&program, 1).len()
            };
            assert_eq!(launches(3) - launches(2), expected, "{model}");
        }
    }
}

#[test]
fn norms_within_gemms_give_the_results_of_launches_for_each_operator() {
    for (model, _) in WRITERS {
        let config = writer(model, 2);
        let together = program_of(model, &config, |_| ());
        let unfused = program_of(model, &config, |options| options.no_fused_launches = true);
        let within = |program: &Program, tokens| {
            let kernels = launched(program, tokens).into_iter();
            let is_one = |kernel: &&KernelSpec| matches!(kernel, KernelSpec::GemmStream(k) if matches!(k.norm, StreamNorm::After { .. }));
            kernels.filter(is_one).count()
        };
        for (tokens, expected) in [(1, 3), (7, 3), (1000, 0)] {
            assert_eq!(
                within(&together, tokens),
                expected,
                "{model}, {tokens} tokens"
            );
            assert_eq!(within(&unfused, tokens), 0, "{model}, {tokens} tokens");
        }
        let (mut with, mut without) = (session(&together), session(&unfused));
        for tokens in [1, 7] {
            assert_same(&mut with, &mut without, tokens);
        }
    }
}

#[test]
fn joint_launches_give_the_results_of_launches_for_each_operator() {
    let (together, unfused) = (
        program(|_| ()),
        program(|options| options.no_fused_launches = true),
    );
    let (mut with, mut without) = (session(&together), session(&unfused));
    let all_fused = (129..2000).find(|&t| fused(&launched(&together, t)) > 0);
    let all_fused = all_fused.expect("some batch fuses a linear layer and a LayerNorm");
    for (tokens, joint) in [
        (5, deferred as fn(&[&KernelSpec]) -> usize),
        (100, deferred),
        (all_fused, fused),
    ] {
        assert!(joint(&launched(&together, tokens)) > 0, "{tokens} tokens");
        assert_same(&mut with, &mut without, tokens);
    }
}

/// Compares the results of two sessions for a batch with this number of tokens.
fn assert_same(with: &mut CpuSession, without: &mut CpuSession, tokens: u32) {
    // Sequences have at most 500 tokens.
    let ids: Vec<u32> = (0..tokens).map(|i| (i * 7 + 3) % 20).collect();
    let lens: Vec<u32> = [tokens % 500]
        .into_iter()
        .chain(std::iter::repeat_n(500, tokens as usize / 500))
        .filter(|&n| n > 0)
        .collect();
    let batch = Batch::from_packed(ids, &lens).expect("a batch");
    let got = with.run(&batch).expect("it runs");
    let want = without.run(&batch).expect("it runs");
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(&want) {
        let pairs = got.values.iter().zip(&want.values);
        let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-4, "{tokens} tokens: {} by {worst}", got.name);
    }
}

/// Returns, for a batch of `tokens` tokens, the number of launches that only append keys and values to a cache, and the number of launches
/// that also prepare the operands of attention.
fn appends(program: &Program, tokens: u32) -> [usize; 2] {
    let kernels = launched(program, tokens);
    let count = |is_one: fn(&KernelSpec) -> bool| kernels.iter().filter(|k| is_one(k)).count();
    [
        count(|k| matches!(k, KernelSpec::AppendCache(_))),
        count(|k| matches!(k, KernelSpec::PrepareAttention(_))),
    ]
}

#[test]
fn keys_and_values_are_appended_by_one_launch_where_they_come_of_one_projection() {
    for (model, together) in [("gpt2", [2, 0]), ("llama", [0, 2]), ("qwen3", [0, 2])] {
        // In GPT-2, the attention kernel itself appends the keys and values of a single token.
        let one = if model == "gpt2" { [0, 0] } else { together };
        let program = |change: &dyn Fn(&mut CompileOptions)| {
            program_of(model, &writer(model, 2), |options| {
                options.cached = true;
                change(options);
            })
        };
        let usual = program(&|_| ());
        assert_eq!(appends(&usual, 1), one, "{model}");
        assert_eq!(appends(&usual, 2), together, "{model}");
        let apart = program(&|options| options.no_fused_launches = true);
        assert_eq!(appends(&apart, 1), [4, 0], "{model}");
        let invariant = program(&|options| options.invariant = true);
        assert_eq!(appends(&invariant, 1), appends(&invariant, 2), "{model}");
        // Without the pass `merge_projections`, Q, K and V have separate projections. GPT-2 stores them as one matrix anyway.
        let stacked = if model == "gpt2" { together } else { [4, 0] };
        let apart = program(&|o| o.without = ["merge_projections".to_owned()].into());
        assert_eq!(appends(&apart, 2), stacked, "{model}");
    }
}

#[test]
fn heads_are_normalized_and_turned_by_one_launch_also_without_a_cache() {
    for (model, apart) in [("llama", [0, 4]), ("qwen3", [4, 4])] {
        let model_of = writer(model, 2);
        let prepared = |program: &Program| {
            let kernels = launched(program, 100);
            let count =
                |is_one: fn(&KernelSpec) -> bool| kernels.iter().filter(|k| is_one(k)).count();
            let norms = count(|k| matches!(k, KernelSpec::RmsNorm(k) if k.width == 64));
            let turns = count(|k| matches!(k, KernelSpec::Rotary(_)));
            (
                count(|k| matches!(k, KernelSpec::PrepareAttention(_))),
                [norms, turns],
            )
        };
        let with = program_of(model, &model_of, |_| ());
        assert_eq!(prepared(&with), (2, [0, 0]), "{model}");
        let without = program_of(model, &model_of, |o| o.no_fused_launches = true);
        assert_eq!(prepared(&without), (0, apart), "{model}");
    }
}

#[test]
fn queries_that_are_the_keys_are_computed_once() {
    let source = r#"Model(
        name: "shared",
        graph: [
            Let("x", embedding(ids: "token_ids", rows: 20, width: 64, table: "table")),
            Let("rows", linear(x: "x", out: 64, weight: "weight")),
            Let("normed", rms_norm(x: "rows", weight: "norm", eps: 1e-6, heads: 1)),
            Let("heads", split_heads(x: "normed", heads: 1)),
            Let("values", split_heads(x: "x", heads: 1)),
            Let("scores", matmul(a: "heads", b: "heads", transpose_b: true)),
            Let("probabilities", softmax(x: "scores")),
            Let("context", matmul(a: "probabilities", b: "values")),
            Let("y", merge_heads(x: "context")),
        ],
        outputs: {"y": "y"},
        default: ["y"],
    )"#;
    let model = Description::parse("shared.ron", source).expect("a description");
    let options = CompileOptions::new(DType::F16, hopper());
    let compiled = compile(&model, &json!({}), &options).expect("it compiles");
    compiled.program.validate().expect("it is sound");
    let norms = |step: &&Step| step.name == "normed";
    assert_eq!(compiled.program.steps.iter().filter(norms).count(), 1);
}

#[test]
fn a_launch_that_appends_to_other_heads_than_the_caches_have_is_refused() {
    let mut program = program_of("qwen3", &writer("qwen3", 2), |o| o.cached = true);
    // The first launch appends four heads to consecutive caches: two heads of keys and two of values. Change the first three caches to two,
    // one and three heads, so that no run of caches that starts with the first one has exactly four heads.
    program.caches[1].heads = 1;
    program.caches[2].heads = 3;
    let problem = program.validate().expect_err("refused");
    assert!(
        problem.contains("which does not have the layout of `prepare_attention_"),
        "{problem}"
    );
}
