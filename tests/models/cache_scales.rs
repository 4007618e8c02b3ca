//! Tests of KV caches in E4M3 for checkpoints that publish scales of keys and values. `scripts/quantized_checkpoints.py` writes the
//! checkpoints.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use gemmule::{
    DType, DeviceChoice, Engine,
    engine::Builder,
    generate::{Event, Request, SamplingParams, Ticket},
    search::Rules,
    tensor::Format,
};
use insta::assert_snapshot;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::common::{Folder, Stored, Tensors, write_tensors};

const CASES: [&str; 4] = [
    "gemma2-fp8",
    "llama-modelopt",
    "phi3-fp8",
    "qwen3-compressed",
];

/// A prompt and the tokens that Hugging Face transformers generated for it. The logits are for a cache that is rounded to E4M3 (`logits`),
/// and for an exact cache (`exact`).
#[derive(Deserialize)]
struct Expected {
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    logits: Vec<Vec<f32>>,
    exact: Vec<Vec<f32>>,
}

fn folder(case: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join("tests/quantized/cached").join(case)
}

fn expected(case: &str) -> Vec<Expected> {
    let text = std::fs::read_to_string(folder(case).join("expected.json"));
    serde_json::from_str(&text.expect("results")).expect("results")
}

fn writer(folder: &Path, device: DeviceChoice) -> Builder {
    Engine::from_checkpoint(folder).device(device).generating()
}

/// Generates text for all prompts in one batch. Returns the new tokens of each prompt with their logits.
fn written(engine: &Engine, expected: &[Expected]) -> Vec<Vec<(u32, Vec<f32>)>> {
    let mut generator = engine.generator(1 << 20).expect("a generator");
    let admit = |expected: &Expected| {
        let request = Request {
            prompt: expected.prompt.clone(),
            options: SamplingParams {
                rules: Rules {
                    max_new_tokens: expected.tokens.len(),
                    ..Rules::default()
                },
                logits: true,
                ..SamplingParams::default()
            },
        };
        generator.admit(request).expect("there is room")
    };
    let tickets: Vec<Ticket> = expected.iter().map(admit).collect();
    let mut written: BTreeMap<Ticket, Vec<(u32, Vec<f32>)>> = BTreeMap::new();
    while generator.is_busy() {
        for event in generator.poll().expect("a step") {
            match event {
                Event::Token {
                    ticket, id, logits, ..
                } => written.entry(ticket).or_default().push((id, logits)),
                Event::Failed { problem, .. } => panic!("{problem}"),
                Event::Done { .. } | Event::Found { .. } => {}
            }
        }
    }
    let tickets = tickets.iter();
    tickets
        .map(|ticket| written.remove(ticket).expect("tokens"))
        .collect()
}

/// Returns the relative error of `got`: the root mean square of `got - want`, divided by the root mean square of `want`.
fn error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let squares = |values: &mut dyn Iterator<Item = f32>| -> f64 {
        values.map(|v| f64::from(v).powi(2)).sum()
    };
    let off = squares(&mut got.iter().zip(want).map(|(a, b)| a - b));
    (off / squares(&mut want.iter().copied())).sqrt()
}

#[test]
fn texts_are_those_of_transformers_with_a_cache_that_is_rounded_with_the_published_scales() {
    for case in CASES {
        let engine = writer(&folder(case), DeviceChoice::Cpu).kv_cache(Format::E4m3);
        let engine = engine
            .build()
            .unwrap_or_else(|error| panic!("{case}: {error}"));
        assert!(engine.program().pool().scaled, "{case}");
        let expected = expected(case);
        let (mut off, mut effect) = (0.0, 0.0);
        for (text, want) in written(&engine, &expected).iter().zip(&expected) {
            let tokens: Vec<u32> = text.iter().map(|(id, _)| *id).collect();
            assert_eq!(tokens, want.tokens[..tokens.len()], "{case}");
            for (i, (_, logits)) in text.iter().enumerate() {
                let error_of = error(logits, &want.logits[i]);
                assert!(error_of < 2e-2, "{case}: token {i}: {error_of}");
                off += error_of;
                effect += error(logits, &want.exact[i]);
            }
        }
        // Values near the midpoint of two E4M3 values may be rounded differently, but there are few such values.
        assert!(off < 0.05 * effect, "{case}: {off} of {effect}");
    }
}

#[test]
fn a_cache_in_the_type_of_the_activations_has_no_scales() {
    for case in CASES {
        let engine = writer(&folder(case), DeviceChoice::Cpu).build();
        let engine = engine.unwrap_or_else(|error| panic!("{case}: {error}"));
        assert!(!engine.program().pool().scaled, "{case}");
        let expected = expected(case);
        for (text, want) in written(&engine, &expected).iter().zip(&expected) {
            // Compare only the first logits. The expected tokens were generated with a rounded cache, so later steps may follow different
            // tokens.
            assert!(error(&text[0].1, &want.exact[0]) < 1e-4, "{case}");
        }
    }
}

/// Returns the error of loading a folder with changed tensors or settings and a cache in E4M3.
fn refused(change: impl FnOnce(&mut Tensors, &mut Value)) -> String {
    let source = folder("llama-modelopt");
    let text = std::fs::read_to_string(source.join("config.json")).expect("a config");
    let mut config: Value = serde_json::from_str(&text).expect("a config");
    let bytes = std::fs::read(source.join("model.safetensors")).expect("tensors");
    let stored = safetensors::SafeTensors::deserialize(&bytes).expect("tensors");
    let owned = |(name, tensor): (String, safetensors::tensor::TensorView<'_>)| {
        let tensor = Stored {
            dtype: tensor.dtype(),
            shape: tensor.shape().to_vec(),
            bytes: tensor.data().to_vec(),
        };
        (name, tensor)
    };
    let mut tensors: Tensors = stored.tensors().into_iter().map(owned).collect();
    change(&mut tensors, &mut config);
    let changed = Folder::new();
    changed.write("config.json", config.to_string());
    write_tensors(&changed.file("model.safetensors"), &tensors);
    // If the cache is not in E4M3, the scales are not read, so the folder loads.
    if let Err(error) = writer(changed.path(), DeviceChoice::Cpu).build() {
        panic!("{error}");
    }
    let builder = writer(changed.path(), DeviceChoice::Cpu).kv_cache(Format::E4m3);
    let refused = builder.build().err().expect("it is refused");
    changed.text(&refused)
}

const SCALE: &str = "model.layers.1.self_attn.v_proj.v_scale";

#[test]
fn scales_that_are_missing_or_wrong_are_refused_by_name() {
    assert_snapshot!(refused(|tensors, _| drop(tensors.remove(SCALE))), @"the checkpoint has scales for a KV cache in fp8, but none for the rows that `layers.1.self_attn.v_proj` computes; expected one of `layers.1.self_attn.v_scale`, `layers.1.self_attn.attn.v_scale`, `layers.1.self_attn.qkv_proj.v_scale`, `layers.1.self_attn.kv_scale`, `layers.1.self_attn.attn.kv_scale`, `layers.1.self_attn.v_proj.v_scale`, `layers.1.self_attn.v_proj.output_scale`, `layers.1.self_attn.v_proj.kv_scale`. Use the cache in the type of the activations (`--kv-dtype auto`), or a checkpoint with the scales of all layers");
    for value in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-40] {
        let error = refused(|tensors, _| {
            let scale = tensors.get_mut(SCALE).expect("it is there");
            scale.bytes = value.to_le_bytes().to_vec();
        });
        let expected = format!("the tensor `{SCALE}` is {value}, expected a positive number");
        assert!(error.contains(&expected), "{error}");
    }
    let of_heads = |tensors: &mut Tensors, _: &mut Value| {
        let scale = tensors.get_mut(SCALE).expect("it is there");
        scale.shape = vec![2];
        scale.bytes = [0.5f32, 0.25].map(f32::to_le_bytes).concat();
    };
    assert_snapshot!(refused(of_heads), @"`[dir]/model.safetensors`: the tensor `model.layers.1.self_attn.v_proj.v_scale` is [2], expected one number: a KV cache in fp8 has one scale for the keys of a layer and one for its values; use the cache in the type of the activations");
    // Add a second tensor for the scale of the same layer's values, under another published name.
    let twice = |tensors: &mut Tensors, _: &mut Value| {
        let other = Stored {
            dtype: tensors[SCALE].dtype,
            shape: tensors[SCALE].shape.clone(),
            bytes: 1.5f32.to_le_bytes().to_vec(),
        };
        tensors.insert("model.layers.1.self_attn.v_scale".to_owned(), other);
    };
    let error = refused(twice);
    let both = "model.layers.1.self_attn.v_scale` and `model.layers.1.self_attn.v_proj.v_scale`";
    assert!(error.contains(both), "{error}");
}

#[test]
fn scales_of_another_format_are_refused_by_the_key_of_the_configuration() {
    let of_integers = |_: &mut _, config: &mut Value| {
        let quantization = &mut config["quantization_config"];
        quantization["kv_cache_scheme"] = json!({"num_bits": 8, "type": "int", "symmetric": false});
    };
    assert_snapshot!(refused(of_integers), @"`[dir]/config.json`: its key `quantization_config.kv_cache_scheme` has 8 bits of type `int` with zero points, but its scales are used for a KV cache in fp8; use the cache in the type of the activations");
    let of_4_bits = |_: &mut _, config: &mut Value| {
        config["quantization_config"]["kv_cache_quant_algo"] = json!("NVFP4");
    };
    assert_snapshot!(refused(of_4_bits), @"`[dir]/config.json`: its key `quantization_config.kv_cache_quant_algo` is `nvfp4`, but its scales are used for a KV cache in fp8; use the cache in the type of the activations");
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn a_device_writes_what_the_cpu_does_with_scales() {
    for case in CASES {
        let expected = expected(case);
        // A key near the midpoint of two E4M3 values may be rounded up in one run and down in the other. The two rounded values differ by
        // up to an eighth.
        for (dtype, bound) in [(DType::F32, 2e-2), (DType::F16, 0.1), (DType::BF16, 0.3)] {
            for invariant in [false, true] {
                let cuda = writer(&folder(case), DeviceChoice::Cuda(0))
                    .dtype(dtype)
                    .invariant(invariant)
                    .kv_cache(Format::E4m3);
                let cuda = cuda
                    .build()
                    .unwrap_or_else(|error| panic!("{case}: {error}"));
                let mut largest = 0.0f64;
                for (text, want) in written(&cuda, &expected).iter().zip(&expected) {
                    // Compare the logits of all steps up to the first step that chooses different tokens. The logits of this step are
                    // included, because all tokens before it are equal.
                    let steps = want.tokens.iter().zip(&want.logits);
                    for ((id, logits), (other, want)) in text.iter().zip(steps) {
                        largest = largest.max(error(logits, want));
                        if id != other {
                            break;
                        }
                    }
                }
                println!("{case} {dtype} invariant={invariant}: {largest:.2e}");
                assert!(largest < bound, "{case} {dtype}: {largest}");
            }
        }
    }
}
