//! Tests of KV caches in E4M3.

use std::collections::BTreeMap;

use gemmule::{
    DType, DeviceChoice, Engine, EngineError,
    engine::{Artifact, Builder, CompileOptions, compile, description},
    generate::{Event, Generator, Request, SamplingParams, Ticket},
    machine::Machine,
    runtime::weights::RandomWeights,
    search::{Beams, Rules},
    tensor::Format,
};
use serde_json::{Value, json};

use super::plain_gpt2::{FOLDER, PlainGpt2};

fn writer() -> Builder {
    Engine::from_checkpoint(FOLDER)
        .device(DeviceChoice::Cpu)
        .generating()
}

pub(super) fn options(max_new_tokens: usize) -> SamplingParams {
    SamplingParams {
        rules: Rules {
            max_new_tokens,
            ..Rules::default()
        },
        logits: true,
        // Only encoder-decoder models use this start token of the decoder.
        decoder_start: Some(1),
        ..SamplingParams::default()
    }
}

/// Returns prompts of 3, 40 and 17 tokens with ids below 50.
fn prompts() -> Vec<Vec<u32>> {
    let prompt = |i: u32, n: u32| (0..n).map(|j| (7 * j * j + 3 * i + 11) % 50).collect();
    [(0, 3), (1, 40), (2, 17)].map(|(i, n)| prompt(i, n)).into()
}

/// The new tokens of each request, each with the logits from which it was chosen.
type Written = BTreeMap<Ticket, Vec<(u32, Vec<f32>)>>;

fn drain(generator: &mut Generator) -> Written {
    let mut written = Written::new();
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
    written
}

/// Generates text for all prompts in one batch. Returns the new tokens of each prompt with their logits.
pub(super) fn together(
    engine: &Engine,
    prompts: &[Vec<u32>],
    options: &SamplingParams,
) -> Vec<Vec<(u32, Vec<f32>)>> {
    let mut generator = engine.generator(32 << 20).expect("a generator");
    let admit = |prompt: &Vec<u32>| {
        let request = Request {
            prompt: prompt.clone(),
            options: options.clone(),
        };
        generator.admit(request).expect("there is room")
    };
    let tickets: Vec<Ticket> = prompts.iter().map(admit).collect();
    let mut written = drain(&mut generator);
    tickets
        .iter()
        .map(|t| written.remove(t).expect("tokens"))
        .collect()
}

/// Returns the relative error of `got`: the root mean square of `got - want`, divided by the root mean square of `want`.
fn error(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let off: f64 = got
        .iter()
        .zip(want)
        .map(|(&a, b)| (f64::from(a) - b).powi(2))
        .sum();
    (off / want.iter().map(|v| v * v).sum::<f64>()).sqrt()
}

#[test]
fn texts_are_those_of_plain_loops_with_rounded_keys_and_values() {
    let engine = writer().kv_cache(Format::E4m3).build().expect("it loads");
    let (rounded, exact) = (PlainGpt2::new(true), PlainGpt2::new(false));
    let prompts = prompts();
    let written = together(&engine, &prompts, &options(24));
    let (mut off, mut effect) = (0.0, 0.0);
    for (prompt, written) in prompts.iter().zip(&written) {
        let mut all = prompt.clone();
        all.extend(written.iter().map(|(id, _)| id));
        let (want, other) = (rounded.logits(&all), exact.logits(&all));
        for (i, (id, logits)) in written.iter().enumerate() {
            let at = prompt.len() - 1 + i;
            let is_largest = want[at].iter().all(|&v| v <= want[at][*id as usize] + 1e-2);
            assert!(is_largest, "token {i} of a prompt of {}", prompt.len());
            let error_of = error(logits, &want[at]);
            assert!(error_of < 1e-2, "token {i}: {error_of}");
            off += error_of;
            effect += error(logits, &other[at]);
        }
    }
    // Values near the midpoint of two E4M3 values may be rounded differently, but there are few such values.
    assert!(off < 0.05 * effect, "{off} of {effect}");
    assert!(written.iter().map(Vec::len).sum::<usize>() > 40);
}

#[test]
fn without_the_option_keys_and_values_are_exact() {
    let engine = writer().build().expect("it loads");
    let same = writer()
        .kv_cache(Format::Plain(DType::F32))
        .build()
        .expect("it loads");
    assert_eq!(engine.program(), same.program());
    let exact = PlainGpt2::new(false);
    let prompts = prompts();
    for (prompt, written) in prompts.iter().zip(together(&engine, &prompts, &options(4))) {
        let want = exact.logits(prompt);
        assert!(error(&written[0].1, &want[prompt.len() - 1]) < 1e-5);
    }
}

#[test]
fn beams_share_and_reorder_rounded_blocks() {
    let engine = writer().kv_cache(Format::E4m3).build().expect("it loads");
    let rounded = PlainGpt2::new(true);
    let mut generator = engine.generator(4 << 20).expect("a generator");
    let prompts = prompts();
    let mut tickets = Vec::new();
    for prompt in &prompts {
        let request = Request {
            prompt: prompt.clone(),
            options: SamplingParams {
                logits: false,
                beams: Some(Beams::of(4)),
                // With 40 new tokens, a sequence takes more than one cache block of 32 positions.
                ..options(40)
            },
        };
        tickets.push(generator.admit(request).expect("there is room"));
    }
    let mut n = 0;
    while generator.is_busy() {
        for event in generator.poll().expect("a step") {
            let Event::Found { ticket, hypotheses } = event else {
                continue;
            };
            let nth = tickets.iter().position(|&own| own == ticket);
            let prompt = &prompts[nth.expect("a ticket")];
            let best = &hypotheses[0];
            let all = [prompt.as_slice(), &best.tokens].concat();
            let logits = rounded.logits(&all);
            let log_probability = |i: usize| {
                let row = &logits[prompt.len() - 1 + i];
                let sum: f64 = row.iter().map(|v| v.exp()).sum();
                row[best.tokens[i] as usize] - sum.ln()
            };
            let sum: f64 = (0..best.tokens.len()).map(log_probability).sum();
            let want = sum / best.tokens.len() as f64;
            let score = f64::from(best.score);
            assert!((score - want).abs() < 5e-3, "{score}, expected {want}");
            n += 1;
        }
    }
    assert_eq!(n, prompts.len());
}

#[test]
fn an_invariant_engine_writes_the_same_alone_and_together() {
    let engine = writer().kv_cache(Format::E4m3).invariant(true);
    let engine = engine.build().expect("it loads");
    let (prompts, options) = (prompts(), options(12));
    let all = together(&engine, &prompts, &options);
    for (prompt, all) in prompts.into_iter().zip(all) {
        assert_eq!(together(&engine, &[prompt], &options), [all]);
    }
}

#[test]
fn a_cache_has_a_quarter_of_the_bytes_of_f32_and_half_of_f16() {
    let [plain, stored] = [None, Some(Format::E4m3)].map(|format| {
        let builder = match format {
            Some(format) => writer().kv_cache(format),
            None => writer(),
        };
        builder.build().expect("it loads")
    });
    assert_eq!(
        plain.program().block_bytes(),
        4 * stored.program().block_bytes()
    );
    // Bytes of a block: 4 layers × 2 (keys and values) × 32 positions × width 96, with one byte per element.
    assert_eq!(stored.program().block_bytes(), 4 * 2 * 32 * 96);
    let options = SamplingParams {
        logits: false,
        ..options(30)
    };
    let prompts = [3, 100, 20];
    let needed = |engine: &Engine| {
        engine
            .cache_bytes_needed(&prompts, &options)
            .expect("bytes")
    };
    assert_eq!(needed(&plain), 4 * needed(&stored));
    let held = |engine: &Engine| {
        let cache = needed(engine);
        engine
            .generator_bytes(&prompts, &options, cache)
            .expect("bytes")
    };
    let (plain_bytes, stored_bytes) = (held(&plain), held(&stored));
    assert_eq!(plain_bytes.cache, 4 * stored_bytes.cache);
    assert_eq!(plain_bytes.weights, stored_bytes.weights);
    assert_eq!(plain_bytes.intermediates, stored_bytes.intermediates);
    assert_eq!(plain_bytes.state, stored_bytes.state);
    let in_f16 = |kv_cache| program_options(DType::F16, kv_cache);
    let bytes = |options: &CompileOptions| {
        let compiled = compile(
            &description("llama").expect("shipped"),
            &llama(4, 2, 64),
            options,
        );
        compiled.expect("it compiles").program.block_bytes()
    };
    assert_eq!(bytes(&in_f16(None)), 2 * bytes(&in_f16(Some(Format::E4m3))));
}

fn program_options(dtype: DType, kv_cache: Option<Format>) -> CompileOptions {
    let machine = Machine::of_capability((9, 0))
        .expect("described")
        .expect("Hopper");
    CompileOptions {
        outputs: Some(vec!["next_token_logits".to_owned()]),
        kv_cache,
        cached: true,
        ..CompileOptions::new(dtype, machine)
    }
}

fn llama(heads: u32, kv_heads: u32, head: u32) -> Value {
    json!({
        "model_type": "llama", "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head, "intermediate_size": 200, "vocab_size": 300, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 1024, "hidden_act": "silu", "tie_word_embeddings": false,
        "attention_bias": false, "mlp_bias": false,
    })
}

#[test]
fn an_artifact_carries_the_format_of_its_cache() {
    let gpt2 = description("gpt2").expect("shipped");
    let config = std::fs::read_to_string(format!("{FOLDER}/config.json")).expect("a config");
    let config: Value = serde_json::from_str(&config).expect("JSON");
    let options = program_options(DType::F32, Some(Format::E4m3));
    let compiled = compile(&gpt2, &config, &options).expect("it compiles");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("model.gemmule");
    Artifact::of(compiled, Vec::new())
        .write(&file)
        .expect("it is written");
    let open = || {
        let builder = Engine::from_artifact(&file).checkpoint(FOLDER);
        builder.device(DeviceChoice::Cpu).generating()
    };
    let engine = open().build().expect("it loads");
    assert_eq!(engine.program().cache_format(), Format::E4m3);
    let direct = writer().kv_cache(Format::E4m3).build().expect("it loads");
    let (prompts, options) = (prompts(), self::options(5));
    assert_eq!(
        together(&engine, &prompts, &options),
        together(&direct, &prompts, &options)
    );
    match open().kv_cache(Format::Plain(DType::F32)).build() {
        Err(EngineError::ArtifactCache { stored, asked, .. }) => {
            assert_eq!((stored, asked), (Format::E4m3, Format::Plain(DType::F32)));
        }
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("an artifact with a cache in another format"),
    }
}

#[test]
fn unsupported_formats_and_engines_without_a_cache_are_refused() {
    let refused = |builder: Builder| match builder.build() {
        Err(error) => error.to_string(),
        Ok(_) => panic!("it is accepted"),
    };
    insta::assert_snapshot!(
        refused(writer().kv_cache(Format::INT8)),
        @"a KV cache in int8 is not supported with activations in f32; the cache is in f32 or in e4m3"
    );
    insta::assert_snapshot!(
        refused(writer().kv_cache(Format::FP8)),
        @"a KV cache in fp8 is not supported with activations in f32; the cache is in f32 or in e4m3"
    );
    insta::assert_snapshot!(
        refused(writer().kv_cache(Format::Plain(DType::F16))),
        @"a KV cache in f16 is not supported with activations in f32; the cache is in f32 or in e4m3"
    );
    let embeds = Engine::from_checkpoint(FOLDER).device(DeviceChoice::Cpu);
    insta::assert_snapshot!(
        refused(embeds.kv_cache(Format::E4m3)),
        @"a KV cache in e4m3 is for engines that generate text, and this one computes whole sequences without a cache; omit the format, or use `Builder::generating` (`gemmule generate`, `translate` or `serve`)"
    );
}

/// Returns models that differ in the head size and in the number of query heads per key head. They have rotary embeddings or none, and one
/// is an encoder-decoder model.
fn random_models() -> Vec<(&'static str, Value)> {
    let gpt2 = |heads: u32, head: u32| {
        json!({
            "model_type": "gpt2", "n_embd": heads * head, "n_head": heads, "n_layer": 2, "n_positions": 512, "vocab_size": 300,
            "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
        })
    };
    let marian = json!({
        "model_type": "marian", "vocab_size": 300, "max_position_embeddings": 512, "d_model": 128, "encoder_layers": 2,
        "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256, "activation_function": "relu", "scale_embedding": true,
    });
    vec![
        ("gpt2", gpt2(3, 64)),
        ("gpt2", gpt2(5, 20)),
        ("gpt2", gpt2(2, 16)),
        ("llama", llama(8, 2, 64)),
        ("llama", llama(4, 1, 80)),
        ("llama", llama(2, 2, 96)),
        ("llama", llama(6, 2, 128)),
        ("llama", llama(2, 1, 256)),
        ("llama", llama(2, 1, 40)),
        ("marian", marian),
    ]
}

fn random(name: &str, config: &Value, device: DeviceChoice) -> Builder {
    Engine::builder(name)
        .config_value(config.clone())
        .random_weights(RandomWeights {
            seed: 5,
            deviation: 0.1,
        })
        .device(device)
        .generating()
}

/// Returns prompts of several lengths, for kernels of one tile and of several tiles.
fn random_prompts() -> Vec<Vec<u32>> {
    let prompt = |n: u32| (0..n).map(|j| (31 * j + n) % 300).collect();
    [1, 5, 33, 100, 260].map(prompt).into()
}

#[test]
fn models_of_all_shapes_generate_with_a_rounded_cache() {
    for (name, config) in random_models() {
        let [plain, stored] = [Format::Plain(DType::F32), Format::E4m3].map(|format| {
            let builder = random(name, &config, DeviceChoice::Cpu).kv_cache(format);
            let engine = builder.build().expect("it loads");
            together(&engine, &random_prompts()[..3], &options(3))
        });
        for (plain, stored) in plain.iter().zip(&stored) {
            let want: Vec<f64> = plain[0].1.iter().map(|&v| v.into()).collect();
            let error = error(&stored[0].1, &want);
            assert!(error > 1e-5 && error < 0.2, "{name} {config}: {error}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn a_device_generates_with_a_rounded_cache_what_the_cpu_does() {
    for (name, config) in random_models() {
        let cpu = random(name, &config, DeviceChoice::Cpu).kv_cache(Format::E4m3);
        let cpu = cpu.build().expect("an engine");
        let want = together(&cpu, &random_prompts(), &options(40));
        // A key near the midpoint of two E4M3 values may be rounded up on one device and down on the other. The two rounded values differ
        // by up to an eighth. A storage type with larger rounding errors has more keys and values that are rounded differently.
        for (dtype, bound) in [(DType::F32, 1e-2), (DType::F16, 0.1), (DType::BF16, 0.25)] {
            for invariant in [false, true] {
                let cuda = random(name, &config, DeviceChoice::Cuda(0))
                    .dtype(dtype)
                    .invariant(invariant)
                    .kv_cache(Format::E4m3);
                let cuda = cuda.build().expect("an engine");
                let got = together(&cuda, &random_prompts(), &options(40));
                let mut largest = 0.0f64;
                for (got, want) in got.iter().zip(&want) {
                    // Compare the logits of all steps up to the first step that chooses different tokens. The logits of this step are
                    // included, because all tokens before it are equal.
                    for ((id, logits), (other, want)) in got.iter().zip(want) {
                        let want: Vec<f64> = want.iter().map(|&v| v.into()).collect();
                        largest = largest.max(error(logits, &want));
                        if id != other {
                            break;
                        }
                    }
                }
                println!("{name} {dtype} invariant={invariant}: {largest:.2e} {config}");
                assert!(largest < bound, "{name} {dtype} {config}: {largest}");
            }
        }
    }
}
