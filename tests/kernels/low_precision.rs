//! Tests of weights of 8 and 4 bits, and of KV caches of 8 bits: errors relative to f32 on a CPU, and agreement of the device with the CPU.
//!
//! Run the tests that need a device with `cargo test --test kernels low_precision:: -- --ignored` on a machine with a device and NVRTC.

mod kv_cache;
mod plain_gpt2;

use gemmule::{
    AllocatorChoice, Batch, DeviceChoice, Engine, EngineError,
    engine::{Builder, CompileOptions, compile, description},
    kernels::{Instructions, KernelSpec},
    machine::Machine,
    model::Description,
    passes::QUANTIZE_INPUTS,
    plan::lower_bound,
    program::{NEXT_LOGITS, Program, Storage},
    runtime::{
        cpu::{CpuModel, CpuSession},
        weights::RandomWeights,
    },
    tensor::{DType, Element, Extents, Format},
};
use serde_json::{Value, json};

const VOCABULARY: u32 = 1000;
const FORMATS: [Format; 4] = [Format::FP8, Format::INT8, Format::INT8_32, Format::INT4];

/// Returns the description, the config and the outputs of an encoder whose widths are not multiples of a tile or of a group of 128 columns.
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

/// Returns the relative error of `got`: the root mean square of `got - want`, divided by the root mean square of `want`.
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

/// For batches of many rows, a launch first converts the whole packed weight to 16 bits in memory, and a GEMM multiplies the converted
/// weight. All layers share the memory, whose size is that of the largest converted weight.
#[test]
fn batches_of_many_rows_convert_whole_weights_in_memory_that_layers_share() {
    let (hidden, inner) = (1024, 4096);
    let (model, mut config, _) = writer();
    config["hidden_size"] = hidden.into();
    config["intermediate_size"] = inner.into();
    let model = description(model).expect("it is shipped");
    for machine in [crate::common::hopper(), crate::common::usual()] {
        // Disable the pass `QUANTIZE_INPUTS`. With it, 8-bit GEMMs would round the inputs instead of converting the weight.
        let program = |quantize, invariant| {
            writing(&model, &config, &machine, |options| {
                options.quantize = quantize;
                options.invariant = invariant;
                options.without = [QUANTIZE_INPUTS.to_owned()].into();
            })
        };
        let converts = |kernel: &KernelSpec| matches!(kernel, KernelSpec::UnpackWeight(_));
        assert!(!program(None, false).kernels.iter().any(converts));
        for format in FORMATS {
            assert!(!program(Some(format), true).kernels.iter().any(converts));
            let program = program(Some(format), false);
            program.validate().expect("a sound program");
            // Returns the number of weights that a batch converts, and the bytes of memory that all converted weights share.
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
                // Each converted weight is read by one later launch, which waits for the conversion.
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
            // On other cards, the cost model may prefer GEMMs that convert weights in registers, for any number of rows.
            if machine.instructions == Instructions::Hopper {
                assert!(n >= 2 && bytes == largest, "{format}: {n}, {bytes}");
            }
        }
    }
}

/// Returns the program of a model that generates text, with a KV cache.
fn writing(
    model: &Description,
    config: &Value,
    machine: &Machine,
    change: impl FnOnce(&mut CompileOptions),
) -> Program {
    let mut options = CompileOptions {
        cached: true,
        outputs: Some(vec![NEXT_LOGITS.to_owned()]),
        ..CompileOptions::new(DType::F16, machine.clone())
    };
    change(&mut options);
    let compiled = compile(model, config, &options);
    compiled.expect("it compiles").program
}

/// Whether a kernel rounds the rows of a linear layer's input to 8 bits.
fn converts_rows(kernel: &KernelSpec) -> bool {
    matches!(
        kernel,
        KernelSpec::QuantizeRows(_) | KernelSpec::QuantizeGroups(_)
    )
}

/// Whether a kernel multiplies inputs that were rounded to 8 bits.
fn multiplies_rows(kernel: &KernelSpec) -> bool {
    match kernel {
        KernelSpec::GemmWgmma(gemm) => gemm.problem.quantized_rows,
        KernelSpec::Gemm(gemm) => gemm.problem.quantized_rows,
        _ => false,
    }
}

/// Returns the kernels that a program launches for one sequence of `tokens` tokens.
fn launched(program: &Program, tokens: u32) -> Vec<&KernelSpec> {
    let extents = Extents::of(&[tokens]).expect("a batch");
    let launched = program.launched(&extents).expect("it has launches");
    let kernels = launched.iter();
    kernels.map(|&(_, at)| &program.kernels[at]).collect()
}

/// For long prompts, the inputs of linear layers are rounded to 8 bits and multiplied by packed weights: in E4M3 and int8 on Hopper, and
/// only in int8 on earlier cards. Inputs are not rounded in invariant programs, with `keeps_inputs`, or without the pass `QUANTIZE_INPUTS`.
#[test]
fn prompts_multiply_8_bits_if_inputs_may_be_rounded() {
    let (name, config, _) = writer();
    let sized = |hidden: u32, inner: u32| {
        let mut config = config.clone();
        config["hidden_size"] = hidden.into();
        config["intermediate_size"] = inner.into();
        // With this head size, the number of rows of each weight is a multiple of 16, as Hopper's 8-bit GEMMs require.
        config["head_dim"] = 48.into();
        config
    };
    let model = description(name).expect("it is shipped");
    let (hopper, usual) = (crate::common::hopper(), crate::common::usual());
    for (machine, format, multiplies) in [
        (&hopper, Format::FP8, true),
        (&hopper, Format::INT8, true),
        (&hopper, Format::FP8_128, true),
        (&hopper, Format::INT8_32, false),
        (&hopper, Format::INT4, false),
        (&usual, Format::FP8, false),
        (&usual, Format::FP8_128, false),
        (&usual, Format::INT8, true),
    ] {
        // With a scale for every 128 columns, 8-bit GEMMs are faster only in large layers. Other layers convert the whole weight.
        let of_groups = format == Format::FP8_128;
        let (config, tokens, conversions) = match of_groups {
            true => (sized(4096, 14_336), 1024, 2),
            false => (sized(1024, 4096), 4096, 6),
        };
        let program = |change: fn(&mut CompileOptions)| {
            let program = writing(&model, &config, machine, |options| {
                options.quantize = Some(format);
                change(options);
            });
            program.validate().expect("a sound program");
            program
        };
        let any = |program: &Program| program.kernels.iter().any(converts_rows);
        let what = format!("{format} on {}", machine.name);
        let chosen = program(|_| ());
        assert_eq!(any(&chosen), multiplies, "{what}");
        assert!(!any(&program(|options| options.invariant = true)), "{what}");
        let kept = program(|options| options.without = [QUANTIZE_INPUTS.to_owned()].into());
        assert!(!any(&kept), "{what}");
        // Compiles a checkpoint in which one weight is stored in this format. Returns whether its program rounds inputs.
        let published = |keeps_inputs| {
            let program = writing(&model, &config, machine, |options| {
                let name = "layers.1.mlp.down_proj.weight".to_owned();
                options.published = [(name, format)].into();
                options.keeps_inputs = keeps_inputs;
            });
            any(&program)
        };
        assert_eq!(published(false), multiplies, "{what}");
        assert!(!published(true), "{what}");
        if !multiplies {
            continue;
        }
        // Each launch that rounds inputs has one GEMM that multiplies them. If a format has a scale for each row, no launch converts a
        // whole weight to 16 bits.
        let kernels = launched(&chosen, tokens);
        let n = |is: fn(&KernelSpec) -> bool| kernels.iter().filter(|kernel| is(kernel)).count();
        assert_eq!(n(converts_rows), n(multiplies_rows), "{what}");
        assert!(n(converts_rows) >= conversions, "{what}");
        let unpacks = n(|kernel| matches!(kernel, KernelSpec::UnpackWeight(_)));
        assert!(of_groups || unpacks == 0, "{what}");
    }
}

/// Models that do not generate text also multiply inputs in int8.
#[test]
fn encoders_multiply_int8_if_inputs_may_be_rounded() {
    let (name, mut config, _) = encoder();
    config["hidden_size"] = 768.into();
    config["num_attention_heads"] = 12.into();
    config["intermediate_size"] = 3072.into();
    let model = description(name).expect("it is shipped");
    for machine in [crate::common::hopper(), crate::common::usual()] {
        let program = |without: Option<&str>| {
            let options = CompileOptions {
                quantize: Some(Format::INT8),
                without: without.map(str::to_owned).into_iter().collect(),
                ..CompileOptions::new(DType::F16, machine.clone())
            };
            let compiled = compile(&model, &config, &options);
            compiled.expect("it compiles").program
        };
        let chosen = program(None);
        let n = |kernels: &[&KernelSpec]| {
            kernels
                .iter()
                .filter(|kernel| multiplies_rows(kernel))
                .count()
        };
        // At least three of the four linear layers in each of the three encoder layers multiply rounded inputs. The linear layer after
        // attention may instead be fused with the norm after it. `n` does not count this launch.
        assert!(n(&launched(&chosen, 4096)) >= 9, "{}", machine.name);
        let kept = program(Some(QUANTIZE_INPUTS));
        assert_eq!(n(&launched(&kept, 4096)), 0, "{}", machine.name);
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
        // On a machine without a CUDA device, the error reports the missing device.
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
                        .without([QUANTIZE_INPUTS])
                        .invariant(invariant)
                        .build()
                        .expect("an engine");
                    for lens in [&[1][..], &[3, 9], &[5, 1, 130, 40], &[300, 211, 64]] {
                        let error = error(&values(&cuda, lens), &values(&cpu, lens));
                        // For int8 weights, the CPU also rounds activations to int8.
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

/// Returns a model with the given sizes in its config.
fn resized(
    (model, mut config, outputs): (&'static str, Value, &'static [&'static str]),
    sizes: &[(&str, u32)],
) -> (&'static str, Value, &'static [&'static str]) {
    for &(name, size) in sizes {
        config[name] = size.into();
    }
    (model, config, outputs)
}

/// Returns a model without gated feed-forward networks and a model with them. Their widths are multiples of 16, as E4M3 products require.
fn models_of_products_in_fp8() -> [(&'static str, Value, &'static [&'static str]); 2] {
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
    [resized(encoder(), &sizes), resized(writer(), &gated)]
}

/// Programs for Hopper and for other cards compute the same E4M3 products with different kernels. The CPU runs both programs in f32.
#[test]
fn programs_in_fp8_for_hopper_and_for_other_cards_have_the_same_results() {
    for (name, config, outputs) in models_of_products_in_fp8() {
        let of = |machine: Machine| {
            let options = CompileOptions {
                outputs: Some(outputs.iter().map(|&output| output.to_owned()).collect()),
                quantize: Some(Format::FP8),
                ..CompileOptions::new(DType::F16, machine)
            };
            let model = description(name).expect("it is shipped");
            let compiled = compile(&model, &config, &options).expect("it compiles");
            compiled.program.validate().expect("it is sound");
            compiled.program
        };
        let (ada, hopper) = (of(crate::common::ada()), of(crate::common::hopper()));
        let converts = |is_one: fn(&KernelSpec) -> bool| ada.kernels.iter().any(is_one);
        assert!(converts(
            |k| matches!(k, KernelSpec::Gemm(k) if k.problem.is_fp8())
        ));
        assert!(converts(|k| matches!(k, KernelSpec::MhaToE4m3(_))));
        assert!(converts(|k| matches!(k, KernelSpec::NormToE4m3(_))));
        let is_gated = name == "llama";
        assert_eq!(
            converts(|k| matches!(k, KernelSpec::GateToE4m3(_))),
            is_gated
        );
        assert_eq!(
            converts(|k| matches!(k, KernelSpec::Gemm(k) if k.problem.to_e4m3)),
            !is_gated
        );
        let weights = RandomWeights {
            seed: 11,
            deviation: 0.08,
        };
        let mut sessions = [&ada, &hopper].map(|program| {
            // The kernels are compiled only in f16 and bf16. Replace the types, because the CPU computes in f32.
            let text = ron::to_string(program).expect("plain data");
            let text = text.replace("F16", "F32");
            let mut program: Program = ron::from_str(&text).expect("a program");
            for tensor in &mut program.tensors {
                if tensor.element == Element::E4m3
                    && matches!(tensor.place, Storage::Planned { .. })
                {
                    tensor.element = DType::F32.into();
                }
            }
            let threads = gemmule::engine::Threads::usual().expect("threads");
            let model = CpuModel::load(program, threads, &weights, &|_, _| ());
            let model = model.expect("it loads").into();
            CpuSession::new(model, &AllocatorChoice::default()).expect("a session")
        });
        for lens in [&[1][..], &[3, 9], &[5, 1, 130, 40], &[300, 211, 64]] {
            let [ada, hopper] = sessions.each_mut().map(|session| {
                let outputs = session.run(&batch(lens)).expect("it runs");
                let values = outputs.iter().flat_map(|output| output.values.clone());
                values.collect::<Vec<f32>>()
            });
            assert!(ada.iter().all(|value| value.is_finite()));
            // The programs compute sums in a different order, so a result may be rounded to a neighboring E4M3 value.
            let error = error(&ada, &hopper);
            assert!(error < 5e-3, "{name} {lens:?}: {error}");
        }
    }
}

/// On cards with E4M3 products, inputs of linear layers are also rounded to E4M3 if the widths are multiples of 16. Inputs have about the
/// same rounding error as weights, so the total error is at most twice the error of rounding only the weights.
#[test]
#[ignore = "needs NVRTC and a CUDA device that multiplies in E4M3"]
fn products_in_fp8_on_a_device_have_the_error_of_the_format() {
    for model in models_of_products_in_fp8() {
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
                    // The error is larger than with rounded weights and exact inputs, because the device also rounds inputs. Do not check
                    // this for a single token, whose error varies too much.
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

/// On Hopper, inputs of linear layers are also rounded to 8 bits for long prompts, so the rounding errors of inputs and weights add up.
#[test]
#[ignore = "needs a CUDA device with Hopper's instructions and NVRTC"]
fn long_prompts_in_fp8_on_a_device_have_the_error_of_the_format() {
    let sizes = [
        ("hidden_size", 1024),
        ("intermediate_size", 4096),
        ("num_attention_heads", 16),
        ("num_key_value_heads", 16),
        ("head_dim", 64),
    ];
    let (model, config, _) = resized(writer(), &sizes);
    let of = |device| {
        let builder = Engine::builder(model).config_value(config.clone());
        let weights = RandomWeights {
            seed: 11,
            deviation: 0.03,
        };
        builder.random_weights(weights).device(device).generating()
    };
    let prompt: Vec<u32> = (0..600).map(|i| (31 * i * i + 7) % VOCABULARY).collect();
    let logits = |builder: Builder| {
        let engine = builder.build().expect("an engine");
        let options = kv_cache::options(1);
        kv_cache::together(&engine, std::slice::from_ref(&prompt), &options)[0][0]
            .1
            .clone()
    };
    let want = logits(of(DeviceChoice::Cpu));
    for format in [Format::FP8, Format::FP8_128] {
        let rounded = error(&logits(of(DeviceChoice::Cpu).quantize(format)), &want);
        for dtype in [DType::F16, DType::BF16] {
            let cuda = || of(DeviceChoice::Cuda(0)).dtype(dtype).quantize(format);
            let got = error(&logits(cuda()), &want);
            let kept = error(&logits(cuda().without([QUANTIZE_INPUTS])), &want);
            println!(
                "{format} {dtype}: {got:.2e}, rows in 16 bits {kept:.2e}, weights alone {rounded:.2e}"
            );
            assert!(
                kept < 1.2 * rounded + 5e-3,
                "{format} {dtype}: {kept}, {rounded}"
            );
            // The logits differ from those with inputs in 16 bits, which shows that inputs are rounded.
            assert!(
                got != kept && got < 2.5 * rounded,
                "{format} {dtype}: {got}, {rounded}"
            );
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
