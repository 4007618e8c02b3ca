//! Compares settings of tokenizer_config.json with transformers' `AutoTokenizer`, for each kind of tokenizer class.
//! `scripts/tokenizer_settings.py` creates the folders and the results.

use std::{fs, path::Path};

use crate::common::Folder;
use gemmule::text::{Encoded, Input, Prompt, TextEncoder};
use insta::assert_snapshot;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// The contents of a folder's `expected.json`.
#[derive(Deserialize)]
struct Expected {
    texts: Vec<String>,
    pair: (String, String),
    cases: Vec<Case>,
    /// Results of transformers after parts of tokenizer.json are replaced. They show whether transformers uses the parts of the file or
    /// those of the tokenizer class.
    foreign: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    changes: Map<String, Value>,
    /// `None` if transformers raises an error.
    results: Option<Changed>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Changed {
    Results(Results),
    /// The results equal those of the first case.
    Unchanged(String),
}

#[derive(Clone, Debug, Deserialize, PartialEq)]
struct Results {
    ids: Vec<Vec<u32>>,
    pair: Vec<u32>,
    types: Option<Vec<u32>>,
    decoded: Option<Vec<String>>,
}

/// Ids of texts, the encoding of a pair (`None` if the model has no pairs), and decoded texts.
type Tokenized = (Vec<Vec<u32>>, Option<Encoded>, Vec<String>);

/// Tokenizes all texts of `expected` with gemmule and the tokenizer of a folder. Decodes `ids`.
fn results(folder: &Folder, expected: &Expected, ids: &[Vec<u32>]) -> Result<Tokenized, String> {
    let encoder = TextEncoder::open(folder.path()).map_err(|e| folder.text(&e))?;
    let encode = |input| encoder.encode_one(input, Prompt::Default);
    let mut texts = Vec::new();
    for text in &expected.texts {
        let encoded = encode(Input::Text(text)).map_err(|e| folder.text(&e))?;
        texts.push(encoded.ids);
    }
    let decoded = ids.iter().map(|row| encoder.decode_with(row, false));
    let decoded = decoded.collect::<Result<_, _>>();
    let pair = encode(Input::Pair(&expected.pair.0, &expected.pair.1)).ok();
    Ok((texts, pair, decoded.map_err(|e| folder.text(&e))?))
}

#[test]
fn settings_change_tokens_as_in_transformers_or_are_refused_by_name() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tokenizer_settings");
    let mut names: Vec<_> = fs::read_dir(&root)
        .expect("the folders are there")
        .filter_map(Result::ok)
        .filter(|entry| entry.path().is_dir())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    assert!(names.len() >= 20, "{names:?}");
    let (mut wrong, mut refused, mut n_applied) = (Vec::new(), Vec::new(), 0);
    for name in names {
        let read = |file: &str| fs::read_to_string(root.join(&name).join(file)).expect("a file");
        let expected: Expected = serde_json::from_str(&read("expected.json")).expect("results");
        let kept: Map<String, Value> =
            serde_json::from_str(&read("tokenizer_config.json")).expect("an object");
        let folder = Folder::new();
        folder.write("tokenizer.json", read("tokenizer.json"));
        // Leave out the model type in config.json. With it, gemmule would parse a description, which would take most of the test's time.
        folder.write(
            "config.json",
            match name.as_str() {
                "modernbert" => read("config.json"),
                _ => "{}".to_owned(),
            },
        );
        let Some(Changed::Results(base)) = &expected.cases[0].results else {
            panic!("{name}: the first case has results");
        };
        for case in &expected.cases {
            let mut config = kept.clone();
            config.extend(case.changes.clone());
            folder.write("tokenizer_config.json", Value::Object(config).to_string());
            let what = format!("{name} {}", Value::Object(case.changes.clone()));
            let key = case.changes.keys().next().map_or("", String::as_str);
            let right = match &case.results {
                Some(Changed::Results(results)) => Some(results),
                Some(Changed::Unchanged(word)) => {
                    assert_eq!(word, "unchanged", "{what}");
                    Some(base)
                }
                None => None,
            };
            let got = results(&folder, &expected, right.map_or(&[][..], |r| &r.ids));
            let (right, (ids, pair, decoded)) = match (right, got) {
                (_, Err(problem)) if problem.contains(&format!("`{key}`")) => {
                    refused.push(format!("{what}: {problem}"));
                    continue;
                }
                (_, Err(problem)) => {
                    wrong.push(format!("{what}: {problem}"));
                    continue;
                }
                (None, Ok(_)) => {
                    wrong.push(format!("{what}: transformers refuses it"));
                    continue;
                }
                (Some(right), Ok(got)) => (right, got),
            };
            n_applied += usize::from(right != base);
            if ids != right.ids {
                wrong.push(format!("{what}: {ids:?}, not {:?}", right.ids));
            }
            if let Some(right) = &right.decoded
                && decoded != *right
            {
                wrong.push(format!("{what}: {decoded:?}, not {right:?}"));
            }
            let Some(pair) = pair else { continue };
            if pair.ids != right.pair {
                wrong.push(format!("{what}: pair {:?}, not {:?}", pair.ids, right.pair));
            }
            // Many tokenizer classes of transformers return no segment ids. gemmule's segment ids do not depend on the class, so they
            // are then not compared. If the case changes `model_input_names`, which selects the inputs of the model, they must be zeros
            // instead.
            let types = match (&right.types, key) {
                (Some(types), _) => types.clone(),
                (None, "model_input_names") => vec![0; pair.ids.len()],
                (None, _) => continue,
            };
            let own = pair.types.unwrap_or_else(|| vec![0; types.len()]);
            if own != types {
                wrong.push(format!("{what}: types {own:?}, not {types:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(n_applied > 200, "{n_applied}");
    assert_snapshot!(refused.join("\n"));
}

/// Most tokenizer classes of transformers replace parts of tokenizer.json. Without such a class, the parts of the file are used.
#[test]
fn parts_of_tokenizer_json_are_used_or_replaced_as_in_transformers() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tokenizer_settings");
    let (mut wrong, mut n_replaced, mut n_used) = (Vec::new(), 0, 0);
    for entry in fs::read_dir(&root).expect("the folders are there") {
        let path = entry.expect("a folder").path();
        if !path.is_dir() {
            continue;
        }
        let name = path
            .file_name()
            .map(|n| n.to_string_lossy())
            .unwrap_or_default();
        let read = |file: &str| fs::read_to_string(path.join(file)).expect("a file");
        let expected: Expected = serde_json::from_str(&read("expected.json")).expect("results");
        let Some(Changed::Results(base)) = &expected.cases[0].results else {
            panic!("{name}: the first case has results");
        };
        let own: Map<String, Value> =
            serde_json::from_str(&read("tokenizer.json")).expect("an object");
        let folder = Folder::new();
        folder.write("config.json", read("config.json"));
        folder.write("tokenizer_config.json", read("tokenizer_config.json"));
        for case in &expected.foreign {
            let mut tokenizer = own.clone();
            tokenizer.extend(case.changes.clone());
            folder.write("tokenizer.json", Value::Object(tokenizer).to_string());
            let right = match case.results.as_ref().expect("transformers has results") {
                Changed::Results(results) => results,
                Changed::Unchanged(_) => base,
            };
            let what = format!("{name} {}", Value::Object(case.changes.clone()));
            match results(&folder, &expected, &right.ids) {
                Err(problem) => wrong.push(format!("{what}: {problem}")),
                Ok((ids, _, _)) if ids != right.ids => {
                    wrong.push(format!("{what}: {ids:?}, not {:?}", right.ids));
                }
                Ok((_, _, decoded))
                    if right
                        .decoded
                        .as_ref()
                        .is_some_and(|right| decoded != *right) =>
                {
                    wrong.push(format!("{what}: {decoded:?}, not {:?}", right.decoded));
                }
                Ok(_) if right == base => n_replaced += 1,
                Ok(_) => n_used += 1,
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(n_replaced > 100 && n_used > 10, "{n_replaced} {n_used}");
}

/// The contents of `arguments.json`.
#[derive(Deserialize)]
struct Arguments {
    texts: Vec<String>,
    cases: Vec<Argument>,
}

#[derive(Deserialize)]
struct Argument {
    changes: Map<String, Value>,
    /// `None` if sentence-transformers raises an error.
    ids: Option<Vec<Vec<u32>>>,
}

#[test]
fn arguments_of_sentence_transformers_change_tokens_or_are_refused_by_name() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let text = fs::read_to_string(root.join("tokenizer_settings/arguments.json"));
    let expected: Arguments = serde_json::from_str(&text.expect("a file")).expect("results");
    let folder = Folder::new();
    for file in [
        "config.json",
        "modules.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "1_Pooling/config.json",
    ] {
        let text = fs::read(root.join("checkpoints/st-mean").join(file)).expect("a file");
        fs::create_dir_all(folder.file(file).parent().expect("a folder")).expect("room");
        folder.write(file, text);
    }
    let (mut refused, mut n_applied) = (Vec::new(), 0);
    for case in &expected.cases {
        let mut config = Map::from_iter([("max_seq_length".to_owned(), json!(16))]);
        config.extend(case.changes.clone());
        folder.write(
            "sentence_bert_config.json",
            Value::Object(config).to_string(),
        );
        let what = Value::Object(case.changes.clone());
        let encoder = match TextEncoder::open(folder.path()) {
            Ok(encoder) => encoder,
            Err(error) => {
                refused.push(format!("{what}: {}", folder.text(&error)));
                continue;
            }
        };
        let ids: Vec<Vec<u32>> = expected
            .texts
            .iter()
            .map(|text| encoder.encode_one(Input::Text(text), Prompt::Default))
            .map(|encoded| encoded.expect("a text").ids)
            .collect();
        assert_eq!(Some(&ids), case.ids.as_ref(), "{what}");
        n_applied += usize::from(case.ids != expected.cases[0].ids);
    }
    assert!(n_applied >= 8, "{n_applied}");
    assert_snapshot!(refused.join("\n"));
}

/// Returns a copy of a tokenizer with other settings.
fn with(name: &str, settings: Value) -> Folder {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tokenizer_settings");
    let folder = Folder::new();
    for file in ["tokenizer.json", "config.json"] {
        let text = fs::read_to_string(root.join(name).join(file)).expect("a file");
        folder.write(file, text);
    }
    folder.write("tokenizer_config.json", settings.to_string());
    folder
}

fn refused(folder: &Folder) -> String {
    let opened = TextEncoder::open(folder.path());
    folder.text(&opened.err().expect("it is refused"))
}

/// A source language can also be an argument of a call. The ids must be those that transformers computes with this language as `src_lang`.
/// The target language determines the first token of the translation. In mBART, it instead determines the start token of the decoder.
#[test]
fn languages_of_a_call_are_those_of_the_setting() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tokenizer_settings");
    let mut n_checked = 0;
    for (name, is_start) in [("mbart", true), ("mbart50", false), ("nllb", false)] {
        let read = |file: &str| fs::read_to_string(root.join(name).join(file)).expect("a file");
        let expected: Expected = serde_json::from_str(&read("expected.json")).expect("results");
        let settings = serde_json::from_str(&read("tokenizer_config.json")).expect("JSON");
        let encoder = TextEncoder::open(with(name, settings).path()).expect("a tokenizer");
        for case in &expected.cases {
            let language = case.changes.get("src_lang").and_then(Value::as_str);
            let (Some(language), 1) = (language, case.changes.len()) else {
                continue;
            };
            let pair = encoder.language_pair(Some(&language.to_uppercase()), Some(language));
            let token = encoder.token_id(language);
            if token.is_none() {
                // If there is no token for a language, transformers uses the unknown token or fails. gemmule always returns an error.
                assert!(pair.is_err());
                continue;
            }
            let pair = pair.expect("a language");
            let target = (pair.decoder_start, pair.forced_first);
            assert_eq!(
                target,
                if is_start {
                    (token, None)
                } else {
                    (None, token)
                }
            );
            if let Some(Changed::Results(results)) = &case.results {
                for (text, ids) in expected.texts.iter().zip(&results.ids) {
                    let source = encoder.source(0, text, &pair).expect("ids");
                    assert_eq!(&source, ids, "{name} {language} {text}");
                    n_checked += 1;
                }
            }
        }
    }
    assert!(n_checked >= 9, "{n_checked}");
}

#[test]
fn settings_without_a_place_in_the_tokenizer_are_refused() {
    let class =
        |class: &str, key: &str, value: Value| json!({"tokenizer_class": class, key: value});
    let settings = class("BertTokenizerFast", "do_lower_case", true.into());
    assert_snapshot!(refused(&with("gpt2", settings)), @"`[dir]/tokenizer_config.json`: the tokenizer class `BertTokenizer` reads a vocabulary of the kind WordPiece, and that of tokenizer.json is BPE; to use tokenizer.json unchanged, set `tokenizer_class` to `PreTrainedTokenizerFast` in a copy of the folder");
    let settings = class("XLMRobertaTokenizer", "add_prefix_space", true.into());
    assert_snapshot!(refused(&with("bert", settings)), @"`[dir]/tokenizer_config.json`: the tokenizer class `XLMRobertaTokenizer` reads a vocabulary of the kind Unigram, and that of tokenizer.json is WordPiece; to use tokenizer.json unchanged, set `tokenizer_class` to `PreTrainedTokenizerFast` in a copy of the folder");
    let settings = class("LlamaTokenizer", "legacy", false.into());
    assert_snapshot!(refused(&with("bert", settings)), @"`[dir]/tokenizer_config.json`: the tokenizer class `LlamaTokenizer` reads a vocabulary of the kind BPE, and that of tokenizer.json is WordPiece; to use tokenizer.json unchanged, set `tokenizer_class` to `PreTrainedTokenizerFast` in a copy of the folder");
    let settings = class("BertTokenizer", "do_lower_case", true.into());
    assert_snapshot!(refused(&with("mpnet", settings)), @"`[dir]/tokenizer_config.json`: `cls_token` is `[CLS]`, which the tokenizer class puts around texts, and tokenizer.json lacks it; expected a token of tokenizer.json");
    let settings = class("NllbTokenizer", "src_lang", "xyz".into());
    assert_snapshot!(refused(&with("nllb", settings)), @r#"`[dir]/tokenizer_config.json`: `src_lang` is "xyz"; expected a language whose token tokenizer.json has"#);
    let settings = class("BertTokenizer", "do_lower_case", "yes".into());
    assert_snapshot!(refused(&with("bert", settings)), @r#"`[dir]/tokenizer_config.json`: `do_lower_case` is "yes"; expected true or false"#);
    let settings = class("BertTokenizer", "added_tokens_decoder", json!({"x": "a"}));
    assert_snapshot!(refused(&with("bert", settings)), @"`[dir]/tokenizer_config.json`: `added_tokens_decoder` is not an object of tokens by id");
}

#[test]
fn lengths_are_checked_when_they_are_read() {
    for length in [json!(0), json!(-1), json!(2.5), json!("512")] {
        let folder = with("bert", json!({"model_max_length": length}));
        let expected = format!(
            "`[dir]/tokenizer_config.json`: `model_max_length` is {length}; expected a whole number from 1 to 16777216"
        );
        assert_eq!(refused(&folder), expected);
    }
    for length in [json!(null), json!(1e30), json!(16_777_217), json!(u64::MAX)] {
        let folder = with("bert", json!({"model_max_length": length}));
        assert!(TextEncoder::open(folder.path()).is_ok(), "{length}");
    }
}

#[test]
fn a_tokenizer_that_draws_its_merges_is_refused() {
    let folder = with("gpt2", json!({}));
    let text = fs::read_to_string(folder.file("tokenizer.json")).expect("a file");
    let mut tokenizer: Value = serde_json::from_str(&text).expect("it is JSON");
    tokenizer["model"]["dropout"] = json!(0.1);
    folder.write("tokenizer.json", tokenizer.to_string());
    assert_snapshot!(refused(&folder));
}
