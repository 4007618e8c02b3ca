//! Tests of tokenizers that are published as SentencePiece models and a vocab.json, without a tokenizer.json. `scripts/pieces.py` creates
//! the files and stores the ids that transformers computes.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::common::Folder;
use gemmule::text::TextEncoder;
use insta::assert_snapshot;
use serde::Deserialize;

#[derive(Deserialize)]
struct Expected {
    runs: Vec<Run>,
}

#[derive(Deserialize)]
struct Run {
    text: String,
    ids: Vec<u32>,
    /// Decoded text without special tokens.
    decoded: String,
    whole: String,
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/tokenizers")
        .join(name)
}

fn encoder(folder: &Path) -> Result<TextEncoder, gemmule::TextError> {
    TextEncoder::for_prompts(gemmule::text::Folder::open(folder)?)
}

#[test]
fn ids_and_texts_are_those_of_transformers() {
    let (mut wrong, mut n_folders) = (Vec::new(), 0);
    for entry in fs::read_dir(folder("")).expect("the folders are there") {
        let path = entry.expect("an entry").path();
        let text = fs::read_to_string(path.join("expected.json")).expect("results");
        let expected: Expected = serde_json::from_str(&text).expect("results of a known form");
        let encoder = encoder(&path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        n_folders += 1;
        for Run {
            text,
            ids,
            decoded,
            whole,
        } in expected.runs
        {
            let name = path.file_name().expect("a name").display();
            let got = encoder.prompts(&[&text]).expect("a text").remove(0);
            if got != ids {
                wrong.push(format!("{name}: {text:?}\n  got {got:?}\n  not {ids:?}"));
            }
            for (skips, want) in [(true, decoded), (false, whole)] {
                let got = encoder.decode_with(&ids, skips).expect("tokens");
                if got != want {
                    wrong.push(format!(
                        "{name}: {text:?}, {ids:?}\n  got {got:?}\n  not {want:?}"
                    ));
                }
            }
            for token in encoder.tokens(&text, true).expect("a text") {
                let (start, end) = token.span.unwrap_or_default();
                assert!(text.get(start..end).is_some(), "{name}: {text:?} {token:?}");
            }
        }
    }
    assert_eq!(n_folders, 9);
    let n = wrong.len();
    wrong.truncate(20);
    assert!(wrong.is_empty(), "{n} differ\n{}", wrong.join("\n"));
}

/// Returns the error of opening the tokenizer of a folder with these files.
fn refused(files: &[(&str, &[u8])]) -> String {
    let folder = Folder::new();
    for (name, bytes) in files {
        folder.write(name, bytes);
    }
    let error = encoder(folder.path()).err().expect("it is refused");
    folder.text(&error)
}

#[test]
fn a_tokenizer_that_is_missing_or_not_read_is_said_with_how_to_mend_it() {
    assert_snapshot!(refused(&[]), @"`[dir]` has no tokenizer.json; expected one, or a SentencePiece model with the vocab.json of its ids: source.spm, or sentencepiece.bpe.model");
    assert_snapshot!(refused(&[("spiece.model", b"")]), @"`[dir]` has no tokenizer.json, and `spiece.model` is not supported on its own; create a tokenizer.json in Python: transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)");
    for name in [
        "sentencepiece.bpe.model",
        "tokenizer.model",
        "merges.txt",
        "vocab.txt",
    ] {
        assert!(refused(&[(name, b"")]).contains(&format!("`{name}` is not supported on its own")));
    }
}

/// Returns the names and the contents of the files of a valid folder.
fn files(name: &str) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder(name)).expect("the folder is there");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let named = paths.map(|path| {
        let name = path.file_name().expect("a name").display().to_string();
        (name, fs::read(&path).expect("it is read"))
    });
    named.collect()
}

/// Returns the error of opening the tokenizer of the folder `of` after the contents of the file `name` are replaced.
fn changed(of: &str, name: &str, bytes: &[u8]) -> String {
    let all = files(of);
    let mut all: Vec<(&str, &[u8])> = all
        .iter()
        .map(|(n, b)| (n.as_str(), b.as_slice()))
        .collect();
    all.push((name, bytes));
    refused(&all)
}

#[test]
fn files_that_no_tokenizer_can_be_made_of_are_said() {
    let source = fs::read(folder("pair").join("source.spm")).expect("it is read");
    assert_snapshot!(changed("pair", "source.spm", &source[..source.len() / 2]), @"no tokenizer can be loaded from `[dir]/source.spm`: it is not a SentencePiece model, or is damaged: failed to decode Protobuf message: File.pieces: buffer underflow");
    assert_snapshot!(changed("pair", "source.spm", b""), @"no tokenizer can be loaded from `[dir]/source.spm`: it has 0 pieces; expected 1 to 1048576, as a SentencePiece model has");
    assert_snapshot!(changed("pair", "vocab.json", b"[]"), @"no tokenizer can be loaded from `[dir]/vocab.json`: it is not an object of ids by token: invalid type: sequence, expected a map at line 1 column 0");
    assert_snapshot!(changed("pair", "vocab.json", br#"{"a": 1, "b": 1}"#), @"no tokenizer can be loaded from `[dir]/vocab.json`: `a` and `b` both have the id 1");
    assert_snapshot!(changed("pair", "vocab.json", br#"{"a": 1}"#), @"no tokenizer can be loaded from `[dir]/vocab.json`: there is no token `</s>`, which is the `eos_token` of the folder's settings");
    assert_snapshot!(changed("pair", "tokenizer_config.json", br#"{"separate_vocabs": true}"#), @"no tokenizer can be loaded from `[dir]/tokenizer_config.json`: `separate_vocabs` is true; expected false, the only supported value");
    assert_snapshot!(changed("pair", "tokenizer_config.json", br#"{"additional_special_tokens": ["<x>"]}"#), @"no tokenizer can be loaded from `[dir]/tokenizer_config.json`: the special token `<x>` has no id; expected one in vocab.json or `added_tokens_decoder`");
    assert_snapshot!(changed("pair", "tokenizer_config.json", br#"{"added_tokens_decoder": {"1": {"content": "</s>"}}}"#), @"no tokenizer can be loaded from `[dir]/tokenizer_config.json`: the token `</s>` has the id 1; expected 0, its id in vocab.json");
    assert_snapshot!(changed("pair", "tokenizer_config.json", br#"{"added_tokens_decoder": {"0": {"content": "</s>", "lstrip": true}}}"#), @"no tokenizer can be loaded from `[dir]/tokenizer_config.json`: the token `</s>` has `lstrip`, which is not supported with a SentencePiece model; expected false");
    assert_snapshot!(changed("many", "tokenizer_config.json", br#"{"src_lang": "xx"}"#), @"no tokenizer can be loaded from `[dir]/tokenizer_config.json`: the token `__xx__` of `src_lang`, which is put before each text, is unknown; expected it in `additional_special_tokens`, here or in special_tokens_map.json");
}

#[test]
fn bytes_that_are_changed_are_errors_or_tokenizers() {
    let source = fs::read(folder("pair-defined").join("source.spm")).expect("it is read");
    let folder = Folder::new();
    for (name, bytes) in files("pair-defined") {
        folder.write(&name, bytes);
    }
    let mut state = 9u32;
    let mut next = |n: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as usize % n
    };
    for _ in 0..400 {
        let mut bytes = source.clone();
        for _ in 0..1 + next(4) {
            let at = next(bytes.len());
            bytes[at] = next(256) as u8;
        }
        bytes.truncate(bytes.len() - if next(4) == 0 { next(bytes.len()) } else { 0 });
        folder.write("source.spm", bytes);
        if let Ok(encoder) = encoder(folder.path()) {
            let text = "The ﬁrst letter, [URL] o\u{308} ab\u{a0}<abc>\u{200b}ﬂoat";
            let ids = encoder.prompts(&[text]).expect("a text").remove(0);
            encoder.decode(&ids).expect("tokens");
            encoder.tokens(text, false).expect("a text");
        }
    }
}

#[test]
fn a_text_is_cut_where_the_folder_says_and_pairs_are_refused() {
    let folder = Folder::new();
    for (name, bytes) in files("pair") {
        folder.write(&name, bytes);
    }
    let text = "The river runs to the sea";
    let whole = encoder(folder.path())
        .expect("a tokenizer")
        .prompts(&[text]);
    let whole = whole.expect("a text").remove(0);
    folder.write("tokenizer_config.json", r#"{"model_max_length": 6}"#);
    let encoder = TextEncoder::open(folder.path()).expect("a tokenizer");
    let cut = encoder.encode(&[text]).expect("a text");
    let mut want: Vec<i32> = whole[..5].iter().map(|&id| id as i32).collect();
    want.push(whole[whole.len() - 1] as i32);
    assert_eq!(cut.token_ids(), want);
    let input = gemmule::text::Input::Pair("a", "b");
    let pair = encoder.encode_one(input, Default::default());
    assert_snapshot!(pair.expect_err("an error"), @"text 0 cannot be tokenized: the tokenizer is a SentencePiece model for translation, which does not take pairs of texts; give one text");
}
