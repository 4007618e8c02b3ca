//! Compares the tokenizers of GGUF files with the token ids of the original tokenizers.

use std::str::FromStr;

use serde_json::json;
use tokenizers::Tokenizer;

use super::{fixture, open_bytes, opened};
use crate::gguf::folder::Folder;

const TOKENIZERS: [&str; 11] = [
    "gpt-2",
    "llama-bpe",
    "dbrx",
    "qwen2",
    "smollm",
    "gpt-4o",
    "tekken",
    "llama",
    "gemma",
    "bert",
    "bert-cased",
];

fn folder(name: &str) -> Folder {
    Folder::new(opened(&format!("tokenizer-{name}.gguf"))).expect("a known architecture")
}

fn tokenizer(folder: &Folder) -> Tokenizer {
    let json = folder.tokenizer().expect("a known tokenizer").to_string();
    Tokenizer::from_str(&json).expect("a valid tokenizer.json")
}

#[test]
fn tokens_are_those_of_the_original_tokenizers() {
    for name in TOKENIZERS {
        let folder = folder(name);
        let expected = folder.gguf().metadata()["expected"]
            .as_str()
            .expect("a text");
        let expected: Vec<(String, Vec<u32>)> = serde_json::from_str(expected).expect("pairs");
        let tokenizer = tokenizer(&folder);
        let mut compared = 0;
        for (text, ids) in &expected {
            // For some texts, the original tokenizer returned no ids.
            if ids.is_empty() && !text.is_empty() {
                continue;
            }
            let found = tokenizer.encode(text.as_str(), true).expect("an encoding");
            assert_eq!(
                found.get_ids(),
                ids,
                "{name}: {text:?}: {:?}",
                found.get_tokens()
            );
            compared += 1;
        }
        assert!(compared >= 10, "{name}");
    }
}

#[test]
fn pairs_of_texts_have_segments() {
    let encoding = |name: &str| {
        let tokenizer = tokenizer(&folder(name));
        tokenizer.encode(("the", "the"), true).expect("an encoding")
    };
    let bert = encoding("bert");
    assert_eq!(bert.get_tokens(), ["[CLS]", "the", "[SEP]", "the", "[SEP]"]);
    assert_eq!(bert.get_type_ids(), [0, 0, 0, 1, 1]);
    let llama = encoding("llama");
    assert_eq!(llama.get_tokens(), ["<s>", "▁the", "<s>", "▁the"]);
    assert_eq!(llama.get_type_ids(), [0, 0, 1, 1]);
}

#[test]
fn decoding_gives_the_text_again() {
    let text = "The dog läuft über 狐狸 🦊  x\n";
    for name in TOKENIZERS.iter().filter(|name| !name.starts_with("bert")) {
        let tokenizer = tokenizer(&folder(name));
        let found = tokenizer.encode(text, true).expect("an encoding");
        let decoded = tokenizer.decode(found.get_ids(), true).expect("a text");
        assert_eq!(decoded, text, "{name}");
    }
}

#[test]
fn special_tokens_and_templates_are_settings() {
    assert_eq!(
        folder("llama").tokenizer_config().expect("settings"),
        json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": false,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "add_bos_token": true,
            "add_eos_token": false,
            "chat_template": "{{ messages }}",
        })
    );
    assert_eq!(
        folder("qwen2").tokenizer_config().expect("settings"),
        json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": false,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_bos_token": false,
            "add_eos_token": true,
        })
    );
    assert_eq!(
        folder("bert").tokenizer_config().expect("settings"),
        json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": false,
            "unk_token": "[UNK]",
            "pad_token": "[PAD]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "mask_token": "[MASK]",
        })
    );
    let generation = folder("llama").generation_config().expect("settings");
    assert_eq!(generation, json!({"bos_token_id": 1, "eos_token_id": 2}));
    // The file has three templates and three end tokens.
    let templates = folder("templates");
    assert_eq!(
        templates.tokenizer_config().expect("settings")["chat_template"],
        json!([
            {"name": "default", "template": "D"},
            {"name": "rag", "template": "R"},
            {"name": "tool_use", "template": "T"},
        ])
    );
    assert_eq!(
        templates.generation_config().expect("settings"),
        json!({"bos_token_id": 0, "eos_token_id": [1, 3, 4], "pad_token_id": 2})
    );
}

#[test]
fn tokens_of_phi_3_take_the_spaces_after_them() {
    let json = folder("phi3").tokenizer().expect("a known tokenizer");
    let added = json["added_tokens"].as_array().expect("a list").iter();
    let strips: Vec<_> = added
        .filter(|token| token["rstrip"] == true)
        .map(|token| token["content"].as_str().expect("a text"))
        .collect();
    assert_eq!(strips, ["</s>", "<|user|>"]);
}

/// Returns the error for a copy of a file in which a string is replaced by another one of the same length.
fn error_with(name: &str, from: &[u8], to: &[u8]) -> String {
    assert_eq!(from.len(), to.len());
    let mut bytes = std::fs::read(fixture(&format!("tokenizer-{name}.gguf"))).expect("a file");
    let at = bytes.windows(from.len()).position(|part| part == from);
    let at = at.unwrap_or_else(|| panic!("{name} has no {from:?}"));
    bytes[at..at + to.len()].copy_from_slice(to);
    let folder = Folder::new(open_bytes(&bytes).expect("a valid file"));
    let folder = folder.expect("a known architecture");
    let error = folder.tokenizer().expect_err("a damaged tokenizer");
    error.to_string()
}

/// Encodes a string as in GGUF files: its length, then its bytes.
fn text(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

#[test]
fn refuses_unknown_tokenizers_by_name() {
    let cases = [
        (
            "gpt-2",
            "gpt-2",
            "gpt-9",
            "`tokenizer.ggml.pre` is `gpt-9`, which is not read; expected one of gpt-2",
        ),
        (
            "gpt-2",
            "tokenizer.ggml.pre",
            "tokenizer.ggml.prx",
            "no key `tokenizer.ggml.pre`",
        ),
        (
            "gpt-2",
            "gpt2",
            "rwkv",
            "its kind `rwkv` is not read; expected bert, gpt2 or llama",
        ),
        (
            "gpt-2",
            "tokenizer.ggml.model",
            "tokenizer.ggml.modex",
            "no key `tokenizer.ggml.model`",
        ),
        (
            "gpt-2",
            "tokenizer.ggml.merges",
            "tokenizer.ggml.mergex",
            "no key `tokenizer.ggml.merges`",
        ),
        (
            "gpt-2",
            "tokenizer.ggml.tokens",
            "tokenizer.ggml.tokenx",
            "no key `tokenizer.ggml.tokens`",
        ),
        (
            "llama",
            "tokenizer.ggml.scores",
            "tokenizer.ggml.scorex",
            "no key `tokenizer.ggml.scores`",
        ),
        (
            "gpt-2",
            "Ġ t",
            "Ġ-t",
            "is `Ġ-t`; expected two tokens that make up a third one",
        ),
        (
            "gpt-2",
            "Ġ t",
            "Ġ ~",
            "is `Ġ ~`; expected two tokens that make up a third one",
        ),
        (
            "templates",
            "<s>",
            "<p>",
            "tokens 0 and 2 are both `<p>`; expected each token once",
        ),
    ];
    for (name, from, to, expected) in cases {
        let error = error_with(name, &text(from), &text(to));
        assert!(error.contains(expected), "{from}: {error}");
    }
    let id = |id: u32| {
        let mut bytes = text("tokenizer.ggml.bos_token_id");
        bytes.extend(4u32.to_le_bytes());
        bytes.extend(id.to_le_bytes());
        bytes
    };
    let error = error_with("llama", &id(1), &id(999));
    let expected = "`tokenizer.ggml.bos_token_id`: it is 999; expected the number of one of";
    assert!(error.contains(expected), "{error}");
    let kinds = |first: u32| {
        let mut bytes = text("tokenizer.ggml.token_type");
        for n in [9, 5, 520, 0, first] {
            bytes.extend(n.to_le_bytes());
        }
        bytes
    };
    let error = error_with("llama", &kinds(2), &kinds(7));
    assert!(
        error.contains("that of token 0 is 7; expected a number from 0 to 6"),
        "{error}"
    );
}

#[test]
fn no_damaged_tokenizer_panics() {
    for name in ["gpt-2", "llama", "bert", "templates"] {
        let bytes = std::fs::read(fixture(&format!("tokenizer-{name}.gguf"))).expect("a file");
        // Leave out the second half of the file, which contains the embedding table.
        for at in (0..bytes.len() / 2).step_by(7) {
            let mut bytes = bytes.clone();
            bytes[at] ^= 0x15;
            let Ok(folder) = open_bytes(&bytes).and_then(Folder::new) else {
                continue;
            };
            if let Ok(json) = folder.tokenizer() {
                _ = Tokenizer::from_str(&json.to_string());
            }
            _ = folder.tokenizer_config();
            _ = folder.generation_config();
        }
    }
}
