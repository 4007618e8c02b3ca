//! Tests of weights of 8 and 4 bits, and of KV caches of 8 bits: errors relative to f32 on a CPU, and agreement of the device with the CPU.
//!
//! Run them with `cargo test --test kernels low_precision:: -- --ignored` on a machine with a device and NVRTC.

mod kv_cache;
mod plain_gpt2;

use gemmule::{
    Batch, DeviceChoice, Engine, EngineError,
    engine::{Builder, CompileOptions, compile, description},
    kernels::{Instructions, KernelSpec},
    plan::lower_bound,
    program::NEXT_LOGITS,
    runtime::weights::RandomWeights,
    tensor::{DType, Extents, Format},
};
use serde_json::{Value, json};

const VOCABULARY: u32 = 1000;
const FORMATS: [Format; 4] = [Format::FP8, Format::INT8, Format::INT8_32, Format::INT4];

/// Widths that are not multiples of a tile or of a group of 128 columns.
fn encoder() -> (&'static str, Value, &'static [&'static str]) {
    let config = json!({
        "hidden_size": 168, "num_attention_heads": 7, "num_hidden_layers": 3, "intermediate_size": 456,
        "vocab_size": VOCABULARY, "type_vocab_size": 2, "max_position_embeddings": 512, "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
    });
    ("bert", config, &["last_hidden_state", "sentence_embedding"])
}

fn writer() -> (&'static str, Value, &'static [&'static str]) {
    let config = json!({
        "model_type": "llama", "hidden_size": 200, "num_hidden_layers": 2, "num_attention_heads": 5, "num_key_value_heads": 5,
        "head_dim": 40, "intermediate_size": 328, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 1024, "hidden_act": "silu", "tie_word_embeddings": false, "attention_bias": false,
        "mlp_bias": false,
    });
    ("llama", config, &["last_hidden_state"])
}

fn builder((model, config, outputs): (&str, Value, &[&str])) -> Builder {
    Engine::builder(model)
        .config_value(config)
        .random_weights(RandomWeights {
            seed: 11,
            deviation: 0.08,
        })
        .outputs(outputs.iter().copied())
}

fn batch(lens: &[u32]) -> Batch {
    let n_tokens: u32 = lens.iter().sum();
    let ids = (0..n_tokens).map(|i| (31 * i + n_tokens) % VOCABULARY);
    Batch::from_packed(ids.collect(), lens).expect("a batch")
}

fn values(engine: &Engine, lens: &[u32]) -> Vec<f32> {
    let mut session = engine.session().expect("a session");
    let outputs = session.run(&batch(lens)).expect("it runs");
    outputs.iter().flat_map(|o| o.values.clone()).collect()
}

/// Returns the root mean square of the deviation from `want`, relative to the root mean square of `want`.
fn error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |v: f32| f64::from(v) * f64::from(v);
    let off: f64 = got.iter().zip(want).map(|(a, b)| square(a - b)).sum();
    let all: f64 = want.iter().map(|&v| square(v)).sum();
    (off / all).sqrt()
}

#[test]
fn errors_on_a_cpu_are_those_of_the_formats() {
    for model in [encoder(), writer()] {
        let lens = [5, 1, 17];
        let on_cpu = || builder(model.clone()).device(DeviceChoice::Cpu);
        let exact = values(&on_cpu().build().expect("an engine"), &lens);
        let mut errors = Vec::new();
        for (format, bound) in [
            (Format::INT8_32, 0.05),
            (Format::INT8, 0.05),
            (Format::FP8, 0.12),
            (Format::INT4, 0.5),
        ] {
            let engine = on_cpu().quantize(format).build().expect("an engine");
            let error = error(&values(&engine, &lens), &exact);
            assert!(
                error > 1e-4 && error < bound,
                "{} in {format}: {error}",
                model.0
            );
            errors.push(error);
        }
        assert!(errors.is_sorted(), "{}: {errors:?}", model.0);
    }
}

/// For many rows, a launch converts a whole packed weight. All layers share the memory of the largest converted weight.
#[test]
fn batches_of_many_rows_convert_whole_weights_in_memory_that_layers_share() {
    let (hidden, inner) = (1024, 4096);
    let (model, mut config, _) = writer();
    config["hidden_size"] = hidden.into();
    config["intermediate_size"] = inner.into();
    let model = description(model).expect("it is shipped");
    for machine in [crate::common::hopper(), crate::common::usual()] {
        let program = |quantize, invariant| {
            let options = CompileOptions {
                cached: true,
                outputs: Some(vec![NEXT_LOGITS.to_owned()]),
                quantize,
                invariant,
                ..CompileOptions::new(DType::F16, machine.clone())
            };
            let compiled = compile(&model, &config, &options);
            compiled.expect("it compiles").program
        };
        let converts = |kernel: &KernelSpec| matches!(kernel, KernelSpec::UnpackWeight(_));
        assert!(!program(None, false).kernels.iter().any(converts));
        for format in FORMATS {
            assert!(!program(Some(format), true).kernels.iter().any(converts));
            let program = program(Some(format), false);
            program.validate().expect("a sound program");
            // The converted weights of a batch, and the memory that they take together.
            let converted = |tokens: u32| {
                let extents = Extents::of(&[tokens]).expect("a batch");
                let launched = program.launched(&extents).expect("it has launches");
                let steps = launched
                    .iter()
                    .filter(|(_, kernel)| converts(&program.kernels[*kernel]));
                let usage = program.usage(&extents).expect("the sizes fit");
                let tensors = program.planned().zip(usage);
                let unpacked =
                    tensors.filter(|((_, tensor), _)| tensor.name.ends_with(".unpacked"));
                let unpacked: Vec<_> = unpacked.map(|(_, usage)| usage).collect();
                // Each conversion has one later launch that waits for the converted weight.
                let after = launched
                    .iter()
                    .filter(|(step, _)| program.computes_weight_of(step));
                assert_eq!(steps.clone().count(), after.count());
                (steps.count(), lower_bound(&unpacked))
            };
            assert_eq!(converted(64), (0, 0), "{format} on {}", machine.name);
            let (n, bytes) = converted(8192);
            let largest = 2 * 2 * inner * hidden;
            assert!(bytes <= largest, "{format} on {}", machine.name);
            // On other cards, the cost model may prefer kernels that convert in registers for every number of rows.
            if machine.instructions == Instructions::Hopper {
                assert!(n >= 2 && bytes == largest, "{format}: {n}, {bytes}");
            }
        }
    }
}

#[test]
fn a_device_refuses_weights_of_few_bits_beside_activations_in_f32() {
    let built = builder(encoder())
        .device(DeviceChoice::Cuda(0))
        .dtype(DType::F32)
        .quantize(Format::INT4)
        .build();
    match built {
        // Without a device, the error is that there is no device.
        Err(EngineError::FormatOfF32 { format }) => assert_eq!(format, Format::INT4),
        Err(error) => assert!(error.to_string().contains("CUDA"), "{error}"),
        Ok(_) => panic!("an engine with int4 weights and f32 activations"),
    }
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn a_device_computes_what_the_cpu_does() {
    for model in [encoder(), writer()] {
        for format in FORMATS {
            let cpu = builder(model.clone()).device(DeviceChoice::Cpu);
            let cpu = cpu.quantize(format).build().expect("an engine");
            for (dtype, bound) in [(DType::F16, 5e-3), (DType::BF16, 4e-2)] {
                for invariant in [false, true] {
                    let cuda = builder(model.clone())
                        .device(DeviceChoice::Cuda(0))
                        .dtype(dtype)
                        .quantize(format)
                        .invariant(invariant)
                        .build()
                        .expect("an engine");
                    for lens in [&[1][..], &[3, 9], &[5, 1, 130, 40], &[300, 211, 64]] {
                        let error = error(&values(&cuda, lens), &values(&cpu, lens));
                        // The CPU also rounds activations to int8.
                        let bound = match format {
                            Format::INT8 => bound + 4e-2,
                            Format::Plain(_) | Format::Scaled(_) | Format::E4m3 => bound,
                        };
                        println!("{} {format} {dtype} {lens:?}: {error:.2e}", model.0);
                        assert!(
                            error < bound,
                            "{} {format} {dtype} {lens:?}: {error}",
                            model.0
                        );
                    }
                }
            }
        }
    }
}

/// Returns a model whose config has these sizes instead of its own.
fn resized(
    (model, mut config, outputs): (&'static str, Value, &'static [&'static str]),
    sizes: &[(&str, u32)],
) -> (&'static str, Value, &'static [&'static str]) {
    for &(name, size) in sizes {
        config[name] = size.into();
    }
    (model, config, outputs)
}

/// On Hopper, the inputs of products are also in E4M3 if widths are multiples of 16. Inputs have about the same rounding error as weights,
/// so the total error is at most twice the error of rounding the weights alone.
#[test]
#[ignore = "needs a CUDA device with Hopper's instructions and NVRTC"]
fn products_in_fp8_on_a_device_have_the_error_of_the_format() {
    let sizes = [
        ("hidden_size", 160),
        ("num_attention_heads", 5),
        ("intermediate_size", 464),
    ];
    let gated = [
        sizes[0],
        ("intermediate_size", 336),
        ("num_attention_heads", 5),
        ("num_key_value_heads", 5),
        ("head_dim", 32),
    ];
    for model in [resized(encoder(), &sizes), resized(writer(), &gated)] {
        let on_cpu = || builder(model.clone()).device(DeviceChoice::Cpu);
        let exact = on_cpu().build().expect("an engine");
        let weights = on_cpu().quantize(Format::FP8).build().expect("an engine");
        for dtype in [DType::F16, DType::BF16] {
            for invariant in [false, true] {
                let cuda = builder(model.clone())
                    .device(DeviceChoice::Cuda(0))
                    .dtype(dtype)
                    .quantize(Format::FP8)
                    .invariant(invariant);
                let cuda = cuda.build().expect("an engine");
                for lens in [&[1][..], &[3, 9], &[5, 1, 130, 40], &[300, 211, 64]] {
                    let want = values(&exact, lens);
                    let rounded = error(&values(&weights, lens), &want);
                    let got = error(&values(&cuda, lens), &want);
                    println!(
                        "{} {dtype} {lens:?}: {got:.2e}, weights alone {rounded:.2e}",
                        model.0
                    );
                    // The error is larger than that of the weights alone, because inputs are rounded, too. The error of a single token
                    // varies too much for this check.
                    let is_larger = lens.len() == 1 || got > 1.05 * rounded;
                    assert!(
                        is_larger && got < 2.0 * rounded,
                        "{} {dtype} {lens:?}: {got}, weights alone {rounded}",
                        model.0
                    );
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn weights_of_few_bits_take_less_memory() {
    let bytes = |format: Option<Format>| {
        let builder = builder(encoder())
            .device(DeviceChoice::Cuda(0))
            .dtype(DType::F16);
        let builder = match format {
            Some(format) => builder.quantize(format),
            None => builder,
        };
        builder.build().expect("an engine").weight_bytes()
    };
    let plain = bytes(None);
    let [fp8, int8, int8_32, int4] = FORMATS.map(|format| bytes(Some(format)));
    assert!(
        int4 < fp8 && fp8 <= int8 && int8 < int8_32 && int8_32 < plain,
        "{plain} {fp8} {int8} {int8_32} {int4}"
    );
}
