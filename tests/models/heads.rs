//! Tests of the heads of checkpoints: heads that are tied to the embedding table, heads with separate weights, and heads for classification
//! and other tasks.

mod pipelines;

use crate::common::{Folder, Tensors, options, tensors_of, write_tensors};
use gemmule::{
    Batch, DType, DeviceChoice, Engine, EngineError,
    engine::{compile, description},
    generate::{Event, Request, SamplingParams},
    model::{Description, ModelError},
    runtime::weights::RandomWeights,
    search::Rules,
};
use insta::assert_snapshot;
use serde_json::{Value, json};

/// Random weights that are large enough to give different results for different tokens.
const WIDE: RandomWeights = RandomWeights {
    seed: 3,
    deviation: 0.5,
};

/// Returns a config.json that contains the size keys of all families of models, and the keys of `more`.
fn config(more: Value) -> Value {
    let mut config = json!({
        "vocab_size": 30, "hidden_size": 16, "n_embd": 16, "dim": 16, "num_attention_heads": 2, "n_head": 2, "n_heads": 2,
        "num_hidden_layers": 1, "n_layer": 1, "n_layers": 1, "intermediate_size": 24, "n_inner": 24, "hidden_dim": 24,
        "max_position_embeddings": 40, "n_positions": 40, "type_vocab_size": 2, "num_labels": 3, "embedding_size": 16,
        "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "head_dim": 8, "num_key_value_heads": 1,
    });
    let own = config.as_object_mut().expect("an object");
    own.extend(more.as_object().expect("an object").clone());
    config
}

/// Returns all tensors that the outputs of a model read from a checkpoint, with random values.
fn tensors(model: &str, config: &Value, outputs: &[&str]) -> Tensors {
    let mut options = options(DType::F32);
    options.outputs = Some(outputs.iter().map(|&o| o.to_owned()).collect());
    let description = description(model).expect("it is shipped");
    let compiled = compile(&description, config, &options).expect("it compiles");
    tensors_of(&compiled, DType::F32)
}

fn folder(config: &Value, tensors: &Tensors) -> Folder {
    let folder = Folder::new();
    folder.write("config.json", config.to_string());
    write_tensors(&folder.file("model.safetensors"), tensors);
    folder
}

fn engine(folder: &Folder, model: &str, output: &str) -> Result<Engine, EngineError> {
    let builder = Engine::builder(model).checkpoint(folder.path());
    builder.outputs([output]).device(DeviceChoice::Cpu).build()
}

fn values(engine: &Engine, output: &str) -> Vec<f32> {
    let batch = Batch::from_sequences(&[vec![5, 6, 7, 8], vec![9]]).expect("a batch");
    let outputs = engine.session().expect("a session").run(&batch);
    let outputs = outputs.expect("it runs");
    outputs
        .get(output)
        .expect("it was asked for")
        .values
        .clone()
}

/// For each head: a description, an output of the head, the tensor of the head's weights, and the embedding table that a tied head uses as
/// its weights.
const TIED: [(&str, &str, &str, &str); 11] = [
    (
        "llama",
        "next_token_logits",
        "lm_head.weight",
        "embed_tokens.weight",
    ),
    (
        "qwen3",
        "token_logits",
        "lm_head.weight",
        "embed_tokens.weight",
    ),
    ("gpt2", "next_token_logits", "lm_head.weight", "wte.weight"),
    (
        "bert",
        "mlm_logits",
        "cls.predictions.decoder.weight",
        "embeddings.word_embeddings.weight",
    ),
    (
        "roberta",
        "mlm_logits",
        "lm_head.decoder.weight",
        "embeddings.word_embeddings.weight",
    ),
    (
        "xlm_roberta_xl",
        "mlm_logits",
        "lm_head.decoder.weight",
        "embeddings.word_embeddings.weight",
    ),
    (
        "mpnet",
        "mlm_logits",
        "lm_head.decoder.weight",
        "embeddings.word_embeddings.weight",
    ),
    (
        "distilbert",
        "mlm_logits",
        "vocab_projector.weight",
        "embeddings.word_embeddings.weight",
    ),
    (
        "albert",
        "mlm_logits",
        "predictions.decoder.weight",
        "embeddings.word_embeddings.weight",
    ),
    (
        "electra",
        "mlm_logits",
        "generator_lm_head.weight",
        "embeddings.word_embeddings.weight",
    ),
    (
        "modernbert",
        "mlm_logits",
        "decoder.weight",
        "embeddings.tok_embeddings.weight",
    ),
];

#[test]
fn a_tied_head_with_values_of_its_own_is_read() {
    for (model, output, head, table) in TIED {
        let [tied, untied] = [true, false].map(|tie| config(json!({"tie_word_embeddings": tie})));
        let mut all = tensors(model, &untied, &[output]);
        assert!(all.contains_key(head), "{model}");
        let own = values(
            &engine(&folder(&tied, &all), model, output).expect("it loads"),
            output,
        );
        let expected = engine(&folder(&untied, &all), model, output).expect("it loads");
        assert_eq!(own, values(&expected, output), "{model}");
        // A separate head that equals the table gives the same results as a tied head.
        all.insert(head.to_owned(), all[table].clone());
        let copied = values(
            &engine(&folder(&tied, &all), model, output).expect("it loads"),
            output,
        );
        assert_ne!(copied, own, "{model}");
        all.remove(head);
        let without = values(
            &engine(&folder(&tied, &all), model, output).expect("it loads"),
            output,
        );
        assert_eq!(copied, without, "{model}");
    }
}

/// The head of a masked language model may have two bias tensors: `decoder.bias`, and a second one that is usually tied to it and has the
/// same values. If the head is not tied, `decoder.bias` is used.
#[test]
fn the_bias_of_an_untied_decoder_is_its_own() {
    let untied = config(json!({"tie_word_embeddings": false}));
    for (model, decoder, other) in [
        (
            "bert",
            "cls.predictions.decoder.bias",
            "cls.predictions.bias",
        ),
        (
            "megatron_bert",
            "cls.predictions.decoder.bias",
            "cls.predictions.bias",
        ),
        (
            "roformer",
            "cls.predictions.decoder.bias",
            "cls.predictions.bias",
        ),
        ("albert", "predictions.decoder.bias", "predictions.bias"),
        ("roberta", "lm_head.decoder.bias", "lm_head.bias"),
        (
            "roberta_prelayernorm",
            "lm_head.decoder.bias",
            "lm_head.bias",
        ),
        ("xlm_roberta_xl", "lm_head.decoder.bias", "lm_head.bias"),
        ("mpnet", "lm_head.decoder.bias", "lm_head.bias"),
    ] {
        let logits = |all: &Tensors| {
            let engine = engine(&folder(&untied, all), model, "mlm_logits");
            values(&engine.expect("it loads"), "mlm_logits")
        };
        let mut all = tensors(model, &untied, &["mlm_logits"]);
        let own = logits(&all);
        let mut zeros = all[decoder].clone();
        zeros.bytes.fill(0);
        all.insert(other.to_owned(), zeros);
        assert_eq!(logits(&all), own, "{model}");
        // Checkpoints of older versions of transformers lack `decoder.bias`. The second bias is then used instead.
        let bias = all.remove(decoder).expect("it is there");
        assert_ne!(logits(&all), own, "{model}");
        all.insert(other.to_owned(), bias);
        assert_eq!(logits(&all), own, "{model}");
    }
}

/// Checks that a separate head in the checkpoint is used even if `tie_word_embeddings` is true.
#[test]
fn a_head_of_its_own_is_read_where_config_json_can_only_tie_it() {
    let config = config(json!({"tie_word_embeddings": true, "query_pre_attn_scalar": 8}));
    let mut all = tensors("gemma3_text", &config, &["token_logits"]);
    let tied = engine(&folder(&config, &all), "gemma3_text", "token_logits").expect("it loads");
    let mut head = all["embed_tokens.weight"].clone();
    head.bytes.chunks_exact_mut(4).for_each(|element| {
        let value = f32::from_le_bytes([element[0], element[1], element[2], element[3]]);
        element.copy_from_slice(&(2.0 * value).to_le_bytes());
    });
    all.insert("lm_head.weight".to_owned(), head);
    let own = engine(&folder(&config, &all), "gemma3_text", "token_logits").expect("it loads");
    let doubled = values(&tied, "token_logits").into_iter().map(|v| 2.0 * v);
    let off = doubled
        .zip(values(&own, "token_logits"))
        .map(|(a, b)| (a - b).abs());
    assert!(off.fold(0.0, f32::max) < 1e-4);
}

#[test]
fn two_names_of_one_tensor_agree() {
    let config = config(json!({}));
    let mut all = tensors("bert", &config, &["last_hidden_state"]);
    let (name, other) = (
        "embeddings.word_embeddings.weight",
        "bert.embeddings.word_embeddings.weight",
    );
    let table = all[name].clone();
    all.insert(other.to_owned(), table);
    engine(&folder(&config, &all), "bert", "last_hidden_state").expect("they are equal");
    all.get_mut(other).expect("it is there").bytes[..4].copy_from_slice(&1f32.to_le_bytes());
    let folder = folder(&config, &all);
    let error = engine(&folder, "bert", "last_hidden_state")
        .err()
        .expect("they differ");
    assert_snapshot!(folder.text(&error), @"`[dir]/model.safetensors` has the tensors `embeddings.word_embeddings.weight` and `bert.embeddings.word_embeddings.weight`, which are two names of one tensor of the model, with different values; remove one of them");
}

fn for_architecture(model_type: &str, architecture: &str) -> (Description, Value) {
    let config = config(json!({"model_type": model_type, "architectures": [architecture]}));
    (
        Description::for_config(&config).expect("it is shipped"),
        config,
    )
}

#[test]
fn heads_of_tasks_are_computed_by_default() {
    for (model_type, architecture, output, writes) in [
        ("llama", "LlamaForCausalLM", "next_token_logits", true),
        (
            "llama",
            "LlamaForSequenceClassification",
            "sequence_logits",
            false,
        ),
        (
            "llama",
            "LlamaForTokenClassification",
            "token_logits",
            false,
        ),
        (
            "mistral",
            "MistralForSequenceClassification",
            "sequence_logits",
            false,
        ),
        (
            "gpt2",
            "GPT2ForSequenceClassification",
            "sequence_logits",
            false,
        ),
        ("gpt2", "GPT2ForTokenClassification", "token_logits", false),
        (
            "qwen3",
            "Qwen3ForSequenceClassification",
            "sequence_logits",
            false,
        ),
        (
            "qwen3",
            "Qwen3ForTokenClassification",
            "token_logits",
            false,
        ),
        ("bert", "BertForMaskedLM", "last_hidden_state", false),
        (
            "t5",
            "T5ForConditionalGeneration",
            "encoder_last_hidden_state",
            true,
        ),
        ("t5", "T5EncoderModel", "last_hidden_state", false),
        ("marian", "MarianMTModel", "encoder_last_hidden_state", true),
    ] {
        let (description, config) = for_architecture(model_type, architecture);
        let outputs = description.outputs_for(&config).expect("it has the head");
        assert_eq!(outputs[0], output, "{architecture}");
        assert_eq!(description.writes(&config), writes, "{architecture}");
    }
}

/// For token classification, the width of `token_logits` is the number of labels in config.json, not the size of the vocabulary.
#[test]
fn logits_of_tokens_are_those_of_labels_where_a_checkpoint_classifies_tokens() {
    for (model_type, architecture, weight) in [
        ("llama", "LlamaForTokenClassification", "score.weight"),
        ("gpt2", "GPT2ForTokenClassification", "classifier.weight"),
        ("qwen3", "Qwen3ForTokenClassification", "score.weight"),
    ] {
        let (description, config) = for_architecture(model_type, architecture);
        let all = tensors(description.name(), &config, &["token_logits"]);
        assert_eq!(all[weight].shape, [3, 16], "{architecture}");
        let engine = engine(&folder(&config, &all), description.name(), "token_logits");
        assert_eq!(
            values(&engine.expect("it loads"), "token_logits").len(),
            5 * 3
        );
    }
}

#[test]
fn heads_that_a_description_lacks_are_named() {
    let refused = |model_type: &str, architecture: &str| -> ModelError {
        let (description, config) = for_architecture(model_type, architecture);
        assert!(!description.writes(&config), "{architecture}");
        let trunk = description.output_names()[0].to_owned();
        // The description lacks this head. The output of the trunk can still be requested by its name.
        description
            .build(&config, Some(&[&trunk]))
            .expect("it has the output");
        let error = description
            .outputs_for(&config)
            .expect_err("it lacks the head");
        let built = description
            .build(&config, None)
            .expect_err("it lacks the head");
        assert_eq!(built.to_string(), error.to_string());
        error
    };
    assert_snapshot!(refused("llama", "LlamaForQuestionAnswering"), @"config.json: `architectures` names `LlamaForQuestionAnswering`, whose head the description `llama` does not have; it has `LlamaForCausalLM`, `MistralForCausalLM`, `LlamaForSequenceClassification`, `MistralForSequenceClassification`, `LlamaForTokenClassification` and `MistralForTokenClassification`");
    for (model_type, architecture) in [
        ("bert", "BertForMultipleChoice"),
        ("bert", "BertForNextSentencePrediction"),
        ("bert", "BertLMHeadModel"),
        ("gpt2", "GPT2ForQuestionAnswering"),
        ("qwen3", "Qwen3ForQuestionAnswering"),
        ("t5", "T5ForSequenceClassification"),
        ("t5", "T5ForTokenClassification"),
    ] {
        let text = refused(model_type, architecture).to_string();
        assert!(text.contains(&format!("`{architecture}`")), "{text}");
    }
}

/// Returns the error of building an engine for text generation from a folder that contains only the tensors of `outputs`.
#[track_caller]
fn refused_generation(description: &str, config: &Value, outputs: &[&str]) -> String {
    let folder = folder(config, &tensors(description, config, outputs));
    let builder = Engine::from_checkpoint(folder.path()).device(DeviceChoice::Cpu);
    let error = builder.generating().build().err().expect("it is refused");
    folder.text(&error)
}

#[test]
fn a_classifier_generates_no_text() {
    let (_, config) = for_architecture("llama", "LlamaForSequenceClassification");
    let outputs = ["sequence_logits", "next_token_logits"];
    assert_snapshot!(refused_generation("llama", &config, &outputs), @"config.json: `architectures` names `LlamaForSequenceClassification`, which does not generate text; `gemmule run` computes its outputs");
}

#[test]
fn a_model_without_the_mask_generates_no_text() {
    let config =
        config(json!({"model_type": "qwen3", "is_causal": false, "tie_word_embeddings": true}));
    assert_snapshot!(refused_generation("qwen3", &config, &["sentence_embedding"]), @"config.json: `is_causal` is `false`, but this description is for `true`");
}

/// Returns models that generate text. Their attention heads have width 12.
fn writers() -> [(&'static str, Value); 4] {
    let twelve = json!({"head_dim": 12, "hidden_size": 24, "n_embd": 24, "d_model": 24, "d_kv": 12, "num_heads": 2, "d_ff": 20,
        "num_layers": 1, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "activation_function": "relu", "tie_word_embeddings": true});
    ["llama", "qwen3", "gpt2", "t5"].map(|model| (model, config(twelve.clone())))
}

/// Returns the greedy continuation of a prompt, computed with a KV cache.
fn written(engine: &Engine, prompt: &[u32], n: usize) -> Vec<u32> {
    let mut generator = engine.generator(1 << 20).expect("a generator");
    let rules = Rules {
        max_new_tokens: n,
        ..Rules::default()
    };
    let options = SamplingParams {
        rules,
        ..SamplingParams::default()
    };
    let prompt = prompt.to_vec();
    generator
        .admit(Request { prompt, options })
        .expect("it can be written");
    let mut tokens = Vec::new();
    while generator.is_busy() {
        for event in generator.poll().expect("a step") {
            if let Event::Token { id, .. } = event {
                tokens.push(id);
            }
        }
    }
    tokens
}

/// Returns the `n` tokens of the greedy continuation of a prompt, computed without a KV cache: each step runs the whole sequence.
fn written_anew(engine: &Engine, prompt: &[u32], n: usize) -> Vec<u32> {
    let mut all = prompt.to_vec();
    for _ in 0..n {
        let batch = Batch::from_sequences(std::slice::from_ref(&all)).expect("a batch");
        let outputs = engine.session().expect("a session").run(&batch);
        let outputs = outputs.expect("it runs");
        let logits = &outputs
            .get("next_token_logits")
            .expect("it was asked for")
            .values;
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        all.push(best.expect("there are tokens").0 as u32);
    }
    all.split_off(prompt.len())
}

#[test]
fn heads_that_a_cache_pads_are_lowered_for_every_card() {
    for (model, config) in writers() {
        let mut options = options(DType::F32);
        options.outputs = Some(vec!["next_token_logits".to_owned()]);
        options.cached = true;
        let description = description(model).expect("it is shipped");
        let compiled = compile(&description, &config, &options).expect("it compiles");
        let heads = compiled.program.caches.iter().map(|cache| cache.head);
        assert!(heads.clone().all(|head| head == 16), "{model}");
        compiled.check_everywhere().expect("every card has kernels");
    }
}

#[test]
fn padded_heads_write_what_whole_sequences_say() {
    for (model, config) in writers().into_iter().filter(|(model, _)| *model != "t5") {
        let builder = || {
            let builder = Engine::builder(model).config_value(config.clone());
            builder.random_weights(WIDE).device(DeviceChoice::Cpu)
        };
        let cached = builder().generating().build().expect("it loads");
        let plain = builder()
            .outputs(["next_token_logits"])
            .build()
            .expect("it loads");
        let prompt = [5, 6, 7, 8, 9];
        assert_eq!(
            written(&cached, &prompt, 12),
            written_anew(&plain, &prompt, 12),
            "{model}"
        );
    }
}

/// Checks that sliding windows also apply to decode steps, which read the KV cache.
#[test]
fn a_window_writes_what_whole_sequences_say() {
    for (model, window) in [
        (
            "llama",
            json!({"model_type": "mistral", "sliding_window": 3}),
        ),
        (
            "qwen3",
            json!({"use_sliding_window": true, "sliding_window": 3, "max_window_layers": 0}),
        ),
    ] {
        let config = config(window.clone());
        let builder = |config: &Value| {
            let builder = Engine::builder(model).config_value(config.clone());
            builder.random_weights(WIDE).device(DeviceChoice::Cpu)
        };
        let cached = builder(&config).generating().build().expect("it loads");
        let plain = |config: &Value| {
            let builder = builder(config).outputs(["next_token_logits"]);
            written_anew(&builder.build().expect("it loads"), &[5, 6, 7, 8, 9], 12)
        };
        let found = written(&cached, &[5, 6, 7, 8, 9], 12);
        assert_eq!(found, plain(&config), "{model}");
        let mut without = config.clone();
        for key in window.as_object().expect("an object").keys() {
            without.as_object_mut().expect("an object").remove(key);
        }
        assert_ne!(found, plain(&without), "{model}");
    }
}
