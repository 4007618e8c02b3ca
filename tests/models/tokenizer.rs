//! Tests of unusual and damaged tokenizer.json files: they result in an error, never in a panic.

use crate::common::Folder;
use gemmule::text::{Input, Prompt, TextEncoder};
use insta::assert_snapshot;
use serde_json::{Value, json};

const SEEDS: [&str; 4] = [
    include_str!("../../fuzz/seeds/tokenizer/wordpiece.json"),
    include_str!("../../fuzz/seeds/tokenizer/bpe.json"),
    include_str!("../../fuzz/seeds/tokenizer/unigram.json"),
    include_str!("../../fuzz/seeds/tokenizer/wordlevel.json"),
];

const TEXTS: [&str; 3] = ["a text of words!", "", " ab\u{301}b\n文 \u{0} [SEP]"];

fn seed(at: usize) -> Value {
    serde_json::from_str(SEEDS[at]).expect("the seeds are JSON")
}

/// Returns the error of loading a tokenizer, or of encoding a text with it.
fn error(folder: &Folder, tokenizer: &Value) -> Option<String> {
    folder.write("tokenizer.json", tokenizer.to_string());
    let encoded = TextEncoder::open(folder.path()).and_then(|e| e.encode(&TEXTS[..1]));
    encoded.err().map(|error| folder.text(&error))
}

fn with(at: usize, key: &str, value: Value) -> Value {
    let mut tokenizer = seed(at);
    tokenizer[key] = value;
    tokenizer
}

#[test]
fn panics_of_the_tokenizers_crate_are_errors() {
    gemmule::cli::silence_contained_panics();
    let folder = Folder::new();
    let error = |tokenizer: Value| error(&folder, &tokenizer).expect("it is refused");
    assert_snapshot!(error(with(0, "normalizer", json!({"type": "Precompiled", "precompiled_charsmap": ""}))), @r#"`[dir]/tokenizer.json` is not a tokenizer: the tokenizers crate panics on it: Precompiled: Error("Cannot parse precompiled_charsmap", line: 0, column: 0); expected the tokenizer.json of a checkpoint"#);
    assert_snapshot!(error(with(0, "pre_tokenizer", json!({"type": "FixedLength", "length": 0}))), @"text 0 cannot be tokenized: `[dir]/tokenizer.json` makes the tokenizers crate panic: chunk size must be non-zero; expected the tokenizer.json of a checkpoint");
    let truncation =
        json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 4});
    assert_snapshot!(error(with(0, "truncation", truncation)), @"`[dir]/tokenizer.json` is not a tokenizer: tokenizer stride set to 4, which is greater than or equal to its effective max length of 2 (= 4 original max length - 2 added special tokens), ; expected the tokenizer.json of a checkpoint");
    let mut merges = seed(1);
    merges["model"]["merges"] = json!([["a", "zz"]]);
    assert_snapshot!(error(merges), @"`[dir]/tokenizer.json` is not a tokenizer: Token `zz` out of vocabulary at line 1 column 647; expected the tokenizer.json of a checkpoint");
    assert_snapshot!(error(json!({"model": 3})), @"`[dir]/tokenizer.json` is not a tokenizer: data did not match any variant of untagged enum ModelUntagged at line 1 column 11; expected the tokenizer.json of a checkpoint");
}

#[test]
fn sound_tokenizers_encode() {
    let folder = Folder::new();
    for at in [0, 3] {
        folder.write("tokenizer.json", SEEDS[at]);
        let encoder = TextEncoder::open(folder.path()).expect("it is sound");
        let batch = encoder.encode(&["a text of words!", "a"]).expect("texts");
        assert_eq!(batch.lens().len(), 2);
    }
}

/// Truncated texts are reported as such. The `tokenizers` crate stops tokenizing at the length limit, and does not always report the
/// truncation.
#[test]
fn a_text_that_is_cut_is_said_to_be() {
    let folder = Folder::new();
    let limit =
        json!({"direction": "Right", "max_length": 6, "strategy": "LongestFirst", "stride": 0});
    for at in [0, 3] {
        folder.write(
            "tokenizer.json",
            with(at, "truncation", limit.clone()).to_string(),
        );
        let encoder = TextEncoder::open(folder.path()).expect("it is sound");
        for text in [
            "a",
            "a a a a",
            "a a a a a a",
            "a a a a a a a",
            "a a a a a a a a a a a a a a a a",
        ] {
            let whole = encoder.tokens(text, true).expect("a text").len();
            let encoded = encoder
                .encode_one(Input::Text(text), Prompt::Default)
                .expect("a text");
            assert_eq!(encoded.ids.len(), whole.min(6), "{at} {text}");
            assert_eq!(encoded.is_cut, whole > 6, "{at} {text}");
        }
    }
}

/// Returns the number of JSON values that are nested in `value`, including `value` itself.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(entries) => entries.values().map(count).sum(),
        _ => 0,
    }
}

/// Returns the `at`th nested value, in the order of [`count`].
fn nth<'a>(value: &'a mut Value, at: &mut usize) -> Option<&'a mut Value> {
    if *at == 0 {
        return Some(value);
    }
    *at -= 1;
    match value {
        Value::Array(items) => items.iter_mut().find_map(|item| nth(item, at)),
        Value::Object(entries) => entries.values_mut().find_map(|item| nth(item, at)),
        _ => None,
    }
}

#[test]
fn no_panic_escapes_from_damaged_tokenizers() {
    gemmule::cli::silence_contained_panics();
    let odd = [
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(u32::MAX),
        json!(1e300),
        json!(""),
        json!("a"),
        json!("AAQAAAAAAAAAAAAA"),
        json!([]),
        json!({}),
        json!([["a", "b"]]),
        json!({"type": "FixedLength", "length": 0}),
        json!({"type": "Precompiled", "precompiled_charsmap": ""}),
        json!({"String": ""}),
        json!({"Regex": "("}),
    ];
    let folder = Folder::new();
    // The generator SplitMix64 (Steele et al., 2014).
    let mut state = 7u64;
    let mut below = |n: usize| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    };
    let (mut n_errors, mut n_panics) = (0, 0);
    for _ in 0..600 {
        let mut tokenizer = seed(below(SEEDS.len()));
        for _ in 0..=below(2) {
            let mut at = 1 + below(count(&tokenizer) - 1);
            if let Some(value) = nth(&mut tokenizer, &mut at) {
                *value = odd[below(odd.len())].clone();
            }
        }
        folder.write("tokenizer.json", tokenizer.to_string());
        let encoder = TextEncoder::open(folder.path());
        let results = match &encoder {
            Ok(encoder) => TEXTS
                .iter()
                .map(|text| encoder.encode(&[text]).err())
                .collect(),
            Err(_) => Vec::new(),
        };
        let errors = encoder
            .as_ref()
            .err()
            .into_iter()
            .chain(results.iter().flatten());
        let texts: Vec<String> = errors.map(ToString::to_string).collect();
        n_errors += usize::from(!texts.is_empty());
        n_panics += usize::from(texts.iter().any(|text| text.contains("panic")));
    }
    // Some damaged files cause panics in the `tokenizers` crate. gemmule catches them and returns errors.
    assert!(n_errors > 100 && n_panics > 5, "{n_errors}, {n_panics}");
}
