//! Tests of settings of late-interaction models (ColBERT) that are wrong or not supported.

use gemmule::text::{TextEncoder, TextRole};
use insta::assert_snapshot;
use serde_json::{Value, json};

use super::{Folder, Prompt, change, copy, refused};

const OWN: &str = "config_sentence_transformers.json";

/// Returns the error of loading the tokenizer of a folder with changed settings.
#[track_caller]
fn unread(name: &str, file: &str, changes: Value) -> String {
    let folder = copy(name);
    change(&folder, file, changes);
    folder.text(
        &TextEncoder::open(folder.path())
            .err()
            .expect("it is refused"),
    )
}

#[test]
fn a_folder_without_a_projection_is_refused() {
    let folder = copy("late-bert");
    let modules = json!([{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]);
    folder.write("modules.json", modules.to_string());
    assert_snapshot!(refused(&folder), @"`[dir]/modules.json`: the settings are those of a late-interaction model, and there is no Dense (`pylate.models.Dense.Dense`) after the transformer; PyLate would add one with random weights, so save a trained model with `ColBERT.save_pretrained`");
    let mut modules = modules;
    let pooling = json!({"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"});
    modules.as_array_mut().expect("a list").push(pooling);
    folder.write("modules.json", modules.to_string());
    assert_snapshot!(refused(&folder), @"`[dir]/modules.json`: the module `Pooling` is not computed in a late-interaction model, which has a vector for each token; gemmule computes Transformer and Dense there");
    let folder = copy("late-bert");
    std::fs::remove_file(folder.file("1_Dense/model.safetensors")).expect("it is there");
    assert_snapshot!(refused(&folder), @"`[dir]/1_Dense` contains none of `model.safetensors`, `model.safetensors.index.json`, `pytorch_model.bin` and `pytorch_model.bin.index.json`; expected a checkpoint folder as published on the Hugging Face hub. It has no weights at all");
    std::fs::remove_file(folder.file("1_Dense/config.json")).expect("it is there");
    assert_snapshot!(refused(&folder), @"
`[dir]/1_Dense/config.json` cannot be read
caused by: No such file or directory (os error 2)
");
    let folder = copy("late-bert");
    change(
        &folder,
        "1_Dense/config.json",
        json!({"activation_function": null}),
    );
    assert_snapshot!(refused(&folder), @"`[dir]/1_Dense/config.json`: there is no `activation_function`");
    change(
        &folder,
        "1_Dense/config.json",
        json!({"activation_function": "torch.nn.modules.linear.Identity", "out_features": 12}),
    );
    assert_snapshot!(refused(&folder), @"`[dir]/1_Dense/model.safetensors`: the tensor `1_Dense/linear.weight` is [16, 32], but the model needs [12, 32]; does the config.json belong to this checkpoint?");
}

#[test]
fn settings_of_late_interaction_that_are_wrong_are_named() {
    let with = |changes: Value| unread("late-bert", OWN, changes);
    assert_snapshot!(with(json!({"similarity_fn_name": "cosine"})), @r#"`[dir]/config_sentence_transformers.json`: `similarity_fn_name` is "cosine"; expected MaxSim, the only one of a late-interaction model"#);
    assert_snapshot!(with(json!({"query_prefix": "[R] "})), @r#"`[dir]/config_sentence_transformers.json`: the prefix of a query, `[R] `, is not a token of the tokenizer; expected one of its tokens, or "" for none (PyLate would add the token with random weights)"#);
    assert_snapshot!(with(json!({"document_prefix": 3})), @"`[dir]/config_sentence_transformers.json`: `document_prefix` is 3; expected a string");
    assert_snapshot!(with(json!({"query_length": 0})), @"`[dir]/config_sentence_transformers.json`: `query_length` is 0; expected a whole number from 1 to 16777216");
    assert_snapshot!(with(json!({"query_length": 65})), @"`[dir]/config_sentence_transformers.json`: queries are padded to 65 tokens, but the model has 64 positions; expected a length of at most 64");
    assert_snapshot!(with(json!({"document_length": 2})), @"`[dir]/config_sentence_transformers.json`: the length of a document is 2 tokens, but 3 tokens are added to each text; expected a length of at least 3");
    assert_snapshot!(with(json!({"skiplist_words": [",", 3]})), @r#"`[dir]/config_sentence_transformers.json`: `skiplist_words` is [",",3]; expected a list of words"#);
    assert_snapshot!(with(json!({"do_query_expansion": "yes"})), @r#"`[dir]/config_sentence_transformers.json`: `do_query_expansion` is "yes"; expected true or false"#);
    assert_snapshot!(with(json!({"query_prefixes": "[Q] "})), @"`[dir]/config_sentence_transformers.json`: `query_prefixes` is not known (did you mean `query_prefix`?); remove it if it has no effect on the results");
    // This word is not a token, and the byte-level tokenizer of this folder has no unknown token to use instead.
    assert_snapshot!(unread("late-modernbert", OWN, json!({"skiplist_words": ["no such token"]})), @"`[dir]/config_sentence_transformers.json`: `no such token` of `skiplist_words` is no token, and the tokenizer has no unknown token; remove the word");
    let without = json!({"mask_token": null, "pad_token": null});
    assert_snapshot!(unread("late-bert", "tokenizer_config.json", without), @"`[dir]/config_sentence_transformers.json`: queries are padded, and tokenizer_config.json names no `mask_token`, `eos_token` or `pad_token`; add one, or set `do_query_expansion` to false");
}

#[test]
fn settings_of_stanford_that_are_wrong_are_named() {
    let with = |changes: Value| unread("late-stanford", "artifact.metadata", changes);
    assert_snapshot!(with(json!({"similarity": "l2"})), @r#"`[dir]/artifact.metadata`: `similarity` is "l2"; expected cosine"#);
    assert_snapshot!(with(json!({"dim": null})), @"`[dir]/artifact.metadata`: there is no `dim`");
    assert_snapshot!(with(json!({"query_token_id": "[unused7]"})), @r#"`[dir]/artifact.metadata`: the prefix of a query, `[unused7]`, is not a token of the tokenizer; expected one of its tokens, or "" for none (PyLate would add the token with random weights)"#);
    let folder = copy("late-stanford");
    change(&folder, "artifact.metadata", json!({"dim": 24}));
    assert_snapshot!(refused(&folder), @"`[dir]/model.safetensors`: the tensor `linear.weight` is [16, 32], but the model needs [24, 32]; does the config.json belong to this checkpoint?");
    std::fs::remove_file(folder.file("artifact.metadata")).expect("it is there");
    assert_snapshot!(refused(&folder), @"
`[dir]/artifact.metadata` cannot be read
caused by: No such file or directory (os error 2)
");
}

#[test]
fn a_text_without_a_side_is_refused() {
    let folder = copy("late-bert");
    let encoder = TextEncoder::open(folder.path()).expect("a tokenizer");
    assert_snapshot!(folder.text(&encoder.encode(&["bread"]).expect_err("refused")), @"`[dir]/config_sentence_transformers.json`: a late-interaction model reads queries and documents differently, and the text is neither; in Rust, use `Engine::token_vectors` or `TextEncoder::encode_as`, and in Python `MultiVectorEncoder`, or give token ids");
    let pair = encoder.encode_pairs(&[("a", "b")], Prompt::Default);
    assert!(pair.is_err());
    let engine = gemmule::Engine::from_checkpoint(folder.path())
        .device(gemmule::DeviceChoice::Cpu)
        .build()
        .expect("it loads");
    assert_snapshot!(folder.text(&engine.embed(&["bread"]).expect_err("refused")), @"`[dir]/config_sentence_transformers.json`: a late-interaction model reads queries and documents differently, and the text is neither; in Rust, use `Engine::token_vectors` or `TextEncoder::encode_as`, and in Python `MultiVectorEncoder`, or give token ids");
}

/// PyLate truncates documents to the document length, and pads queries to the query length. If a setting is null, PyLate uses its default.
#[test]
fn lengths_without_a_value_have_the_defaults_of_pylate() {
    let folder = copy("late-bert");
    let none = json!({"query_length": null, "document_length": null, "query_prefix": null, "skiplist_words": null});
    change(&folder, OWN, none);
    let encoder = TextEncoder::open(folder.path()).expect("it has defaults");
    let encode = |role, text: &str| {
        let encoded = encoder.encode_as(role, text, Prompt::Default, encoder.cut_side());
        encoded.expect("a text")
    };
    let query = encode(TextRole::Query, "bread");
    let [q, d] = ["[Q] ", "[D] "].map(|prefix| encoder.token_id(prefix).expect("a token"));
    assert_eq!(
        (query.ids.len(), query.ids[1], query.attended),
        (32, q, Some(8))
    );
    // The model has 64 positions, fewer than the default length of 180 tokens.
    let document = encode(TextRole::Document, &"bread ".repeat(99));
    assert_eq!(
        (document.ids.len(), document.ids[1], document.is_cut),
        (64, d, true)
    );
    let comma = encoder.token_id(",").expect("a token");
    assert!(!encoder.takes_part(TextRole::Document, 5, comma));
    assert!(encoder.takes_part(TextRole::Query, 5, comma));
    assert!(encoder.takes_part(TextRole::Document, 0, query.ids[0]));
}

#[test]
fn query_expansion_is_no_engine_of_bitwise_independence() {
    let built = gemmule::Engine::from_checkpoint(super::published("late-bert"))
        .device(gemmule::DeviceChoice::Cpu)
        .invariant(true)
        .build();
    let folder = Folder::new();
    assert_snapshot!(folder.text(&built.err().expect("it is refused")), @"`layer.0.probabilities` (softmax): masks the query expansion of a late-interaction model, which has kernels only for stored scores; these sum rows in an order that depends on the other sequences, so do not use --invariant");
}

#[test]
fn settings_of_a_multi_vector_encoder_that_are_wrong_are_named() {
    let folder = copy("late-multi");
    let text = std::fs::read_to_string(folder.file("modules.json")).expect("it is there");
    let modules: Vec<Value> = serde_json::from_str(&text).expect("a list");
    let of = |modules: &[Value]| {
        folder.write("modules.json", Value::from(modules.to_vec()).to_string());
        refused(&folder)
    };
    let mut pooled = modules.clone();
    pooled.push(json!({"idx": 4, "name": "4", "path": "4_HierarchicalTokenPooling", "type": "sentence_transformers.multi_vector_encoder.modules.token_pooling.HierarchicalTokenPooling"}));
    assert_snapshot!(of(&pooled), @"`[dir]/modules.json`: the module `HierarchicalTokenPooling` is not computed in a model with a vector for each token; gemmule computes Transformer, Dense, Dropout, Normalize and MultiVectorMask there");
    assert_snapshot!(of(&[&modules[..2], &modules[3..]].concat()), @"`[dir]/modules.json`: there is no `Normalize` of `token_embeddings`; expected vectors of length 1");
    assert_snapshot!(of(&modules[..3]), @"`[dir]/modules.json`: queries are padded (`query_expansion`), and there is no MultiVectorMask, with which the padding takes part in scores");
    let with = |changes: Value| unread("late-multi", "sentence_bert_config.json", changes);
    assert_snapshot!(with(json!({"query_length": 8})), @"`[dir]/sentence_bert_config.json`: `query_length` is 8; expected at least 20, the length to which queries are padded");
    assert_snapshot!(with(json!({"query_expansion": {"strategy": "max", "length": 8}})), @r#"`[dir]/sentence_bert_config.json`: `query_expansion`: `strategy` is "max"; expected fixed or min"#);
    assert_snapshot!(with(json!({"query_expansion": {"strategy": "min", "length": 8, "token": "[NONE]"}})), @"`[dir]/config_sentence_transformers.json`: queries are padded with `[NONE]`, which is not a token of the tokenizer; expected one of its tokens");
    let with = |changes: Value| unread("late-multi", OWN, changes);
    assert_snapshot!(with(json!({"similarity_fn_name": "dot"})), @r#"`[dir]/config_sentence_transformers.json`: `similarity_fn_name` is "dot"; expected maxsim or meanmaxsim"#);
}
