//! Tests of quantized checkpoints, written by `scripts/quantized_checkpoints.py`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use gemmule::{
    Batch, DType, DeviceChoice, Engine,
    engine::{Builder, Compiled, compile},
    graph::{WeightExpr, WeightNames},
    model::Description,
    program::Storage,
    runtime::weights::{Checkpoint, WeightSource, encode, evaluate, evaluate_quantized},
    tensor::{Element, Format, Group, Scaled, Values},
};
use insta::assert_snapshot;
use serde_json::{Value, json};

use crate::common::{Folder, Stored, Tensors, options, tiny_config, tiny_tensors, write_tensors};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/quantized")
}

fn open(folder: &Path) -> Checkpoint {
    let opened = Checkpoint::open(folder, folder, WeightNames::default());
    opened.unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
}

/// Name, dimensions and values of a tensor.
type Matrix = (String, Vec<u64>, Vec<f32>);

#[test]
fn every_layout_is_read_bitwise_as_its_writers_read_it() {
    let bytes = std::fs::read(fixtures().join("matrices.safetensors")).expect("it is there");
    let all = safetensors::SafeTensors::deserialize(&bytes).expect("it is valid");
    let mut cases: BTreeMap<String, Vec<Matrix>> = BTreeMap::new();
    for (full, tensor) in all.iter() {
        let (case, name) = full.split_once('/').expect("a case and a name");
        let dims = tensor.shape().iter().map(|&d| d as u64).collect();
        let quads = tensor.data().as_chunks::<4>().0.iter();
        let values = quads.map(|&quad| f32::from_le_bytes(quad)).collect();
        let tensors = cases.entry(case.to_owned()).or_default();
        tensors.push((name.to_owned(), dims, values));
    }
    assert_eq!(cases.len(), 28);
    for (case, tensors) in cases {
        let checkpoint = open(&fixtures().join("matrices").join(&case));
        for (name, dims, values) in &tensors {
            let read = checkpoint.read(name, dims);
            assert_eq!(read.as_ref().ok(), Some(values), "{case}: {name}: {read:?}");
            for dtype in DType::ALL {
                let bytes = checkpoint.read_as(name, dims, dtype).expect("it was read");
                assert_eq!(bytes, encode(values, dtype), "{case}: {name} as {dtype}");
            }
        }
        let used: Vec<(&str, &[u64])> = tensors
            .iter()
            .map(|(name, dims, _)| (name.as_str(), dims.as_slice()))
            .collect();
        checkpoint.check(&used).expect("all are there");
        // Scales and column orders belong to their matrices, so they are not reported as surplus tensors.
        assert_eq!(checkpoint.surplus(&used), Vec::<String>::new(), "{case}");
    }
}

/// Checks that matrices whose format kernels support are read without rounding. A snapshot lists them by format.
#[test]
fn matrices_in_formats_of_kernels_keep_their_values() {
    let bytes = std::fs::read(fixtures().join("matrices.safetensors")).expect("it is there");
    let all = safetensors::SafeTensors::deserialize(&bytes).expect("it is valid");
    let mut kept: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for (full, tensor) in all.iter() {
        let (case, name) = full.split_once('/').expect("a case and a name");
        let checkpoint = open(&fixtures().join("matrices").join(case));
        let dims: Vec<u64> = tensor.shape().iter().map(|&d| d as u64).collect();
        let Some(format) = checkpoint.published(name, &dims) else {
            continue;
        };
        kept.entry(Format::Scaled(format).to_string())
            .or_default()
            .insert(full);
        // The values are also exact if only some rows of the matrix are read, in another order, and concatenated with other matrices.
        let rows = WeightExpr::Rows {
            name: name.to_owned(),
            dims: dims.clone(),
            groups: 1,
            from: 1,
            rows: dims[0] - 1,
            interleaved: (dims[0] - 1) / 2 * 2,
        };
        let whole = WeightExpr::Stored {
            name: name.to_owned(),
            dims,
        };
        let expr = WeightExpr::ConcatRows(vec![rows, whole]);
        let want = evaluate(&expr, &checkpoint).expect("it is read");
        let got = evaluate_quantized(&expr, &checkpoint, format).expect("it is read");
        assert_eq!(got.values(), want, "{full}");
    }
    assert_snapshot!(format!("{kept:#?}"), @r#"
    {
        "fp8": {
            "ct-fp8-channel/up.weight",
            "ct-fp8/up.weight",
            "ct-mixed/layers.1.gate.weight",
            "fbgemm/up.weight",
            "fp8-block/small.weight",
            "fp8-powers/whole.weight",
            "fp8/down.weight",
            "fp8/up.weight",
            "modelopt/up.weight",
        },
        "fp8_g128": {
            "fp8-128/wide.weight",
        },
        "int4": {
            "awq-whole/model.up.weight",
            "ct-w4-channel-zeros/up.weight",
            "gptq-large-group/model.layers.0.up.weight",
        },
        "int8": {
            "ct-int8-tensor/mlp.gate_proj.weight",
            "ct-int8/mlp.gate_proj.weight",
            "ct-mixed/layers.1.down.weight",
        },
    }
    "#);
}

/// Returns an engine builder for the model of a test case, its input sequences, and the logits that transformers computes.
fn model(case: &str) -> (Builder, Vec<Vec<u32>>, Vec<f32>) {
    let folder = fixtures().join("models").join(case);
    let text = std::fs::read_to_string(folder.join("expected.json")).expect("results");
    let expected: Value = serde_json::from_str(&text).expect("results");
    let ids = serde_json::from_value(expected["ids"].clone()).expect("ids");
    let logits: Vec<Vec<f32>> =
        serde_json::from_value(expected["next_logits"].clone()).expect("logits");
    let builder = Engine::from_checkpoint(&folder).outputs(["next_token_logits"]);
    (builder, ids, logits.concat())
}

/// Compares the logits of an engine with those of transformers.
fn compare(case: &str, engine: &Engine, ids: &[Vec<u32>], expected: &[f32], bound: f32) {
    let mut session = engine.session().expect("a session");
    let batch = Batch::from_sequences(ids).expect("a batch");
    let outputs = session.run(&batch).expect("a run");
    let values = &outputs
        .get("next_token_logits")
        .expect("it is computed")
        .values;
    assert_eq!(values.len(), expected.len());
    for (value, expected) in values.iter().zip(expected) {
        let bound = bound * (1.0 + expected.abs());
        assert!(
            (value - expected).abs() < bound,
            "{case}: {value} for {expected}"
        );
    }
}

/// Models whose weights are published in a format that kernels support, each with this format.
const KEPT: [(&str, Format); 5] = [
    ("llama-gptq-32", INT4_32),
    ("qwen2-awq-32", INT4_32),
    ("phi3-w4-32", INT4_32),
    ("qwen3-fp8-128", Format::FP8_128),
    ("qwen3-fp8-rows", Format::FP8),
];
const INT4_32: Format = Format::Scaled(Scaled {
    values: Values::Int4,
    group: Group::Columns(32),
});

#[test]
fn whole_models_have_the_logits_of_their_dequantized_weights() {
    let others = [
        "qwen3-fp8",
        "phi3-gptq",
        "qwen2-awq",
        "llama-w4",
        "llama-int8-head",
    ];
    let all = others.into_iter().chain(KEPT.map(|(case, _)| case));
    for case in all.chain(ORDERED) {
        let (builder, ids, logits) = model(case);
        let engine = builder.device(DeviceChoice::Cpu).build();
        let engine = engine.unwrap_or_else(|error| panic!("{case}: {error}"));
        compare(case, &engine, &ids, &logits, 2e-4);
    }
}

/// Quantizing a model again to the format of its checkpoint changes no value, so the logits are the same.
#[test]
fn models_that_are_quantized_to_their_published_format_have_the_same_logits() {
    // Leave out `FP8_128`. Checkpoints in this format also contain another format: matrices with fewer than 128 columns have a scale for
    // each row.
    let of_one_format = KEPT.iter().filter(|(_, format)| *format != Format::FP8_128);
    for &(case, format) in of_one_format {
        let (builder, ids, logits) = model(case);
        let engine = builder.device(DeviceChoice::Cpu).quantize(format).build();
        let engine = engine.unwrap_or_else(|error| panic!("{case}: {error}"));
        compare(case, &engine, &ids, &logits, 2e-4);
    }
}

/// Models with GPTQ weights whose columns are sorted (`desc_act`). On a GPU, only linear layers that read the result of a gated activation
/// (`down_proj`) keep their published int4 values, because their inputs can be reordered. Other weights are dequantized.
const ORDERED: [&str; 2] = ["llama-gptq-order-32", "phi3-gptq-order-32"];

#[test]
fn layers_after_an_activation_keep_their_values_in_the_order_of_their_groups() {
    for case in ORDERED {
        let folder = fixtures().join("models").join(case);
        let text = std::fs::read_to_string(folder.join("config.json")).expect("a config");
        let config: Value = serde_json::from_str(&text).expect("a config");
        let description = Description::for_config(&config).expect("it is shipped");
        let mut options = options(DType::F16);
        options.outputs = Some(vec!["next_token_logits".to_owned()]);
        let plain = compile(&description, &config, &options).expect("it compiles");
        let names = plain.model.weight_names.clone();
        let source = Checkpoint::open(&folder, &folder, names).expect("a checkpoint");
        let weights = |compiled: &Compiled| {
            let tensors = compiled.program.tensors.clone().into_iter();
            let weights = tensors.filter_map(|tensor| match tensor.place {
                Storage::Weight(expr) => Some((tensor.element, expr)),
                _ => None,
            });
            weights.collect::<Vec<_>>()
        };
        for (_, expr) in weights(&plain) {
            for (name, dims) in expr.stored() {
                if let Some((format, order)) = source.ordered(name, dims).expect("an order") {
                    let (own, mut sorted) = (order.clone(), order);
                    sorted.sort_unstable();
                    assert!(sorted.iter().copied().eq(0..dims[1] as u32) && own != sorted);
                    let format = Format::Scaled(format);
                    options.ordered.insert(name.to_owned(), format);
                }
            }
        }
        assert!(options.ordered.len() > 2, "{case}");
        let compiled = compile(&description, &config, &options).expect("it compiles");
        compiled.program.validate().expect("it is sound");
        let mut kept = Vec::new();
        for (element, expr) in weights(&compiled) {
            let want = evaluate(&expr, &source).expect("it is read");
            if let Element::Scaled(format) = element {
                assert_eq!(Format::Scaled(format), INT4_32, "{case}");
                let got = evaluate_quantized(&expr, &source, format).expect("it is read");
                assert_eq!(got.values(), want, "{case}: {expr:?}");
                kept.push(expr.stored()[0].0.to_owned());
            }
        }
        let down = |layer| format!("layers.{layer}.mlp.down_proj.weight");
        assert_eq!(kept, [0, 1].map(down), "{case}");
        let report = format!("{:?}", compiled.report.entries);
        assert!(report.contains("which has no rows to reorder"), "{report}");
        // If intermediate values are requested, inputs are not reordered, because the returned values would have the wrong order.
        options.intermediates = vec!["last_hidden_state".to_owned()];
        let compiled = compile(&description, &config, &options).expect("it compiles");
        let mut elements = weights(&compiled).into_iter().map(|(element, _)| element);
        assert!(!elements.any(|element| matches!(element, Element::Scaled(_))));
    }
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn a_device_keeps_the_values_of_layers_in_an_order_of_inputs() {
    for case in ORDERED {
        for (dtype, bound) in [(DType::F16, 2e-2), (DType::BF16, 2e-1)] {
            let build = |dequantize| {
                let (builder, ids, logits) = model(case);
                let builder = builder.device(DeviceChoice::Cuda(0)).dtype(dtype);
                let engine = builder.dequantize(dequantize).build();
                let engine = engine.unwrap_or_else(|error| panic!("{case}: {error}"));
                compare(case, &engine, &ids, &logits, bound);
                engine
            };
            let (kept, plain) = (build(false), build(true));
            assert_eq!(kept.program().weight_format(), Some(INT4_32), "{case}");
            assert!(kept.weight_bytes() < plain.weight_bytes(), "{case}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn a_device_keeps_published_values() {
    for (case, format) in KEPT {
        for (dtype, bound) in [(DType::F16, 2e-2), (DType::BF16, 2e-1)] {
            let build = |dequantize| {
                let (builder, ids, logits) = model(case);
                let builder = builder.device(DeviceChoice::Cuda(0)).dtype(dtype);
                let engine = builder.dequantize(dequantize).build();
                let engine = engine.unwrap_or_else(|error| panic!("{case}: {error}"));
                compare(case, &engine, &ids, &logits, bound);
                engine
            };
            let (kept, plain) = (build(false), build(true));
            assert_eq!(kept.program().weight_format(), Some(format), "{case}");
            assert_eq!(plain.program().weight_format(), None, "{case}");
            assert!(kept.weight_bytes() < plain.weight_bytes(), "{case}");
        }
    }
}

const QUERY: &str = "encoder.layer.0.attention.self.query";

/// Returns a BERT checkpoint in which the tensors `parts` replace the query's weight.
fn with_query(config: Option<Value>, parts: &[(&str, safetensors::Dtype, &[usize])]) -> Folder {
    let mut tensors: Tensors = tiny_tensors(DType::F32);
    tensors.remove(&format!("{QUERY}.weight"));
    for &(part, dtype, shape) in parts {
        let bits = shape.iter().product::<usize>() * dtype.bitsize();
        let tensor = Stored {
            dtype,
            shape: shape.to_vec(),
            bytes: vec![0x3f; bits / 8],
        };
        tensors.insert(format!("{QUERY}.{part}"), tensor);
    }
    let folder = Folder::new();
    let mut whole = tiny_config();
    if let Some(config) = config {
        whole["quantization_config"] = config;
    }
    folder.write("config.json", whole.to_string());
    write_tensors(&folder.file("model.safetensors"), &tensors);
    folder
}

#[test]
fn a_quantization_that_is_not_read_is_refused_by_its_name() {
    let group = json!({"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}});
    let refused = [
        json!({"quant_method": "hqq", "weight_quant_params": {}}),
        json!({"load_in_8bit": true, "_load_in_8bit": true}),
        json!({"quant_method": "aqlm"}),
        json!({"bits": 4}),
        json!("gptq"),
        json!({
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": group},
        }),
        json!({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}),
    ];
    let errors = refused.map(|config| with_query(Some(config), &[]).load_error());
    assert_snapshot!(errors.join("\n"), @r"
    `[dir]/config.json`: its weights are quantized with the method `hqq`, which is not read; expected one of awq, compressed-tensors, fbgemm_fp8, fp8, gptq, modelopt; use the model's checkpoint that is not quantized, or one of these methods, or save it dequantized: AutoModelForCausalLM.from_pretrained(FOLDER).dequantize().save_pretrained(NEW) in Python
    `[dir]/config.json`: its weights are quantized with the method `bitsandbytes`, which is not read; expected one of awq, compressed-tensors, fbgemm_fp8, fp8, gptq, modelopt; use the model's checkpoint that is not quantized, or one of these methods, or save it dequantized: AutoModelForCausalLM.from_pretrained(FOLDER).dequantize().save_pretrained(NEW) in Python
    `[dir]/config.json`: its weights are quantized with the method `aqlm`, which is not read; expected one of awq, compressed-tensors, fbgemm_fp8, fp8, gptq, modelopt; use the model's checkpoint that is not quantized, or one of these methods
    `[dir]/config.json`: its key `quantization_config.quant_method` is missing, so the method of quantization is unknown; copy it from the published config.json
    `[dir]/config.json`: its key `quantization_config` is a text, expected an object
    `[dir]/config.json`: its key `quantization_config.format` is `nvfp4-pack-quantized`, which is not read; expected one of dense, float-quantized, int-quantized, naive-quantized, pack-quantized; use the model in one of these formats
    `[dir]/config.json`: its key `quantization_config.version` is `gemv`, expected gemm; use the checkpoint in that layout
    ");
}

#[test]
fn quantized_tensors_without_a_configuration_are_refused_by_their_name() {
    use safetensors::Dtype::{BF16, F8_E4M3, F16, I8, I32};
    let refused = |parts: &[_]| with_query(None, parts).load_error();
    assert_snapshot!(refused(&[("weight", F8_E4M3, &[16, 16])]), @"`[dir]/model.safetensors`: the tensor `encoder.layer.0.attention.self.query.weight` is stored as F8_E4M3, a part of a quantized checkpoint, but config.json has no `quantization_config`, which says how to read it; use the published config.json. Older checkpoints have it in quantize_config.json (GPTQ, AWQ) or hf_quant_config.json (ModelOpt): copy its content there, with its `quant_method`");
    let error = refused(&[("weight", I8, &[16, 16]), ("SCB", F16, &[16])]);
    assert!(
        error.contains("query.weight` is stored as I8, a part of"),
        "{error}"
    );
    let error = refused(&[("qweight", I32, &[2, 16]), ("scales", F16, &[1, 16])]);
    assert!(
        error.contains("query.qweight` is stored as I32, a part of"),
        "{error}"
    );
    // A weight in bf16, which needs no scale, together with a scale.
    let error = refused(&[
        ("weight", BF16, &[16, 16]),
        ("weight_scale", BF16, &[16, 1]),
    ]);
    assert!(
        error.contains("query.weight_scale` is stored as BF16, a part of"),
        "{error}"
    );
}

#[test]
fn a_wrong_shape_of_a_quantized_weight_is_an_error_with_both_shapes() {
    use safetensors::Dtype::{F8_E4M3, F32};
    let config = json!({"quant_method": "fp8", "activation_scheme": "dynamic"});
    let parts: [(&str, _, &[usize]); 2] =
        [("weight", F8_E4M3, &[8, 16]), ("weight_scale", F32, &[])];
    assert_snapshot!(with_query(Some(config), &parts).load_error(), @"`[dir]/model.safetensors`: the tensor `encoder.layer.0.attention.self.query.weight` is [8, 16], but the model needs [16, 16]; does the config.json belong to this checkpoint?");
}

#[test]
fn a_quantized_matrix_is_not_transposed() {
    use safetensors::Dtype::{F8_E4M3, F32};
    let config = json!({"quant_method": "fp8"});
    let parts: [(&str, _, &[usize]); 2] =
        [("weight", F8_E4M3, &[16, 16]), ("weight_scale", F32, &[])];
    let folder = with_query(Some(config), &parts);
    let (name, dims) = (format!("{QUERY}.weight"), vec![16, 16]);
    let stored = WeightExpr::Stored {
        name: name.clone(),
        dims: dims.clone(),
    };
    let source = open(folder.path());
    assert_eq!(evaluate(&stored, &source).expect("it is there").len(), 256);
    let error = evaluate(&WeightExpr::Transposed { name, dims }, &source).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("query.weight` is quantized as the weight of a linear layer"),
        "{text}"
    );
}

/// Kernels support groups of 32 columns. Groups of 64 or 128 columns are split into groups of 32 columns with the same scale.
#[test]
fn groups_of_8_bit_integers_keep_their_values() {
    use safetensors::Dtype::{BF16, F32, I8};
    const ROWS: usize = 5;
    let cases: [(usize, usize, _, _); 5] = [
        (32, 96, BF16, true),
        (64, 192, BF16, true),
        (128, 384, BF16, true),
        (128, 384, F32, false),
        (48, 96, BF16, false),
    ];
    for (size, columns, scales, is_kept) in cases {
        let groups = columns.div_ceil(size);
        let codes = (0..ROWS * columns).map(|at| (at * 31 % 256) as u8);
        let scale = |at: usize| 0.01 + at as f32 / 64.0;
        let scale_bytes = (0..ROWS * groups).flat_map(|at| match scales {
            F32 => scale(at).to_le_bytes().to_vec(),
            _ => half::bf16::from_f32(scale(at)).to_le_bytes().to_vec(),
        });
        let stored = |dtype, shape: [usize; 2], bytes: Vec<u8>| Stored {
            dtype,
            shape: shape.to_vec(),
            bytes,
        };
        let mut tensors = Tensors::new();
        let weight = stored(I8, [ROWS, columns], codes.collect());
        tensors.insert("up.weight".to_owned(), weight);
        let scale = stored(scales, [ROWS, groups], scale_bytes.collect());
        tensors.insert("up.weight_scale".to_owned(), scale);
        let weights = json!({
            "num_bits": 8, "type": "int", "strategy": "group", "group_size": size, "symmetric": true,
        });
        let config = json!({"quantization_config": {
            "quant_method": "compressed-tensors", "format": "int-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }});
        let folder = Folder::new();
        folder.write("config.json", config.to_string());
        write_tensors(&folder.file("model.safetensors"), &tensors);
        let source = open(folder.path());
        let (name, dims) = ("up.weight".to_owned(), vec![ROWS as u64, columns as u64]);
        let format = source.published(&name, &dims);
        let expected = is_kept.then_some(Format::INT8_32);
        assert_eq!(format.map(Format::Scaled), expected, "{size}");
        let Some(format) = format else {
            continue;
        };
        let expr = WeightExpr::Stored { name, dims };
        let want = evaluate(&expr, &source).expect("it is read");
        let got = evaluate_quantized(&expr, &source, format).expect("it is read");
        assert_eq!(got.values(), want, "{size}");
    }
}
