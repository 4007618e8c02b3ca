//! Compares small models of each architecture with the settings and tensors of Hugging Face transformers.

use serde_json::{Value as Json, json};

use super::{fixture, open_bytes, opened};
use crate::{
    Element,
    gguf::{Gguf, Value, folder::Folder},
};

const MODELS: [&str; 12] = [
    "llama",
    "llama-bias",
    "qwen2",
    "qwen3",
    "gpt2",
    "bert",
    "nomic-bert",
    "gemma",
    "gemma3",
    "gemma-embedding",
    "phi3",
    "olmo2",
];

fn folder(name: &str) -> Folder {
    Folder::new(opened(&format!("{name}.gguf"))).expect("a known architecture")
}

fn published(name: &str) -> Gguf {
    opened(&format!("{name}-published.gguf"))
}

#[test]
fn tensors_are_those_of_transformers() {
    let mut n_divided = 0;
    for model in MODELS {
        let (folder, published) = (folder(model), published(model));
        let mut expected: Vec<_> = published
            .tensors()
            .iter()
            .map(|t| t.name.as_str())
            .collect();
        expected.sort_unstable();
        assert_eq!(folder.names().collect::<Vec<_>>(), expected, "{model}");
        for tensor in published.tensors() {
            let name = &tensor.name;
            let weight = folder.weight(name).expect("a name of the folder");
            assert_eq!(weight.dims, tensor.dims, "{model}: {name}");
            let expected = published.read(tensor).expect("values");
            assert_eq!(
                folder.read(weight).expect("values"),
                expected,
                "{model}: {name}"
            );
            let parts = weight.in_parts(3);
            n_divided += parts.iter().flatten().count();
            let of_parts = parts.iter().flatten();
            let read = of_parts.map(|part| folder.read(part).expect("values"));
            let read: Vec<f32> = read.flatten().collect();
            assert!(
                parts.is_none() || read == expected,
                "{model}: {name}, in parts"
            );
            let raw = folder.read_raw(weight);
            let Some(element) = weight.element() else {
                assert!(raw.is_err(), "{model}: {name}");
                continue;
            };
            let found = elements(element, &raw.expect("bytes"));
            assert_eq!(found, expected, "{model}: {name}, raw");
        }
    }
    assert!(n_divided > 100, "{n_divided} parts");
}

fn elements(element: Element, bytes: &[u8]) -> Vec<f32> {
    match element {
        Element::F32 => bytes
            .as_chunks()
            .0
            .iter()
            .map(|&x| f32::from_le_bytes(x))
            .collect(),
        _ => {
            let halves = bytes.as_chunks().0.iter();
            halves
                .map(|&x| half::f16::from_le_bytes(x).to_f32())
                .collect()
        }
    }
}

#[test]
fn settings_are_those_of_transformers() {
    for model in MODELS {
        let (folder, published) = (folder(model), published(model));
        let expected = published.metadata()["config"].as_str().expect("a text");
        let expected: Json = serde_json::from_str(expected).expect("an object");
        let expected = expected.as_object().expect("an object");
        assert!(expected.len() > 8);
        for (key, expected) in expected {
            let found = &folder.config()[key];
            let is_equal = match (found.as_f64(), expected.as_f64()) {
                (Some(found), Some(expected)) => found == expected,
                _ => found == expected,
            };
            assert!(
                is_equal,
                "{model}: {key}: found {found}, expected {expected}"
            );
        }
    }
}

#[test]
fn pooling_is_that_of_sentence_transformers() {
    let pooling = |model| folder(model).pooling_config().expect("a known kind");
    assert_eq!(pooling("llama"), None);
    let expected = json!({
        "word_embedding_dimension": 16,
        "pooling_mode_cls_token": false,
        "pooling_mode_mean_tokens": true,
        "pooling_mode_lasttoken": false,
    });
    assert_eq!(pooling("bert"), Some(expected));
}

#[test]
fn files_are_those_of_sentence_transformers() {
    let json = |model, name| folder(model).json(name).expect("it is translated");
    assert_eq!(
        json("bert", "config.json").as_ref(),
        Some(folder("bert").config())
    );
    assert_eq!(json("bert", "model.safetensors"), None);
    assert_eq!(json("llama", "modules.json"), None);
    assert_eq!(json("bert", "2_Dense/config.json"), None);
    let expected = json!([
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"path": "4_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]);
    assert_eq!(json("bert", "modules.json"), Some(expected));
}

/// Returns the error for a copy of a file in which a string is replaced by another one of the same length.
#[track_caller]
fn error_with(model: &str, from: &str, to: &str) -> String {
    assert_eq!(from.len(), to.len());
    let mut bytes = std::fs::read(fixture(&format!("{model}.gguf"))).expect("a file");
    let mut at = 0;
    let mut n = 0;
    while let Some(next) = bytes[at..]
        .windows(from.len())
        .position(|part| part == from.as_bytes())
    {
        at += next;
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        n += 1;
    }
    assert!(n > 0, "{from} is not in the file");
    let folder = Folder::new(open_bytes(&bytes).expect("a valid file"));
    folder.map(drop).expect_err("a wrong folder").to_string()
}

#[test]
fn refuses_unknown_models_by_name() {
    let cases = [
        (
            "qwen2",
            "qwen2",
            "mamba",
            "architecture `mamba` is not read; expected one of llama, qwen2",
        ),
        (
            "qwen2",
            "blk.1.attn_q.weight",
            "blk.2.attn_q.weight",
            "`blk.2.attn_q.weight`: a model of",
        ),
        (
            "qwen2",
            "blk.1.attn_q.weight",
            "blk.1.attn_z.weight",
            "`blk.1.attn_z.weight`: a model of",
        ),
        (
            "qwen2",
            "token_embd.weight",
            "token_embd.weighs",
            "`token_embd.weight`: it is missing",
        ),
        (
            "qwen2",
            "qwen2.block_count",
            "qwen2.block_counx",
            "no key `qwen2.block_count`",
        ),
        (
            "bert",
            "token_types.weight",
            "token_typed.weight",
            "DistilBERT",
        ),
        (
            "llama-bias",
            "blk.0.attn_q.bias",
            "blk.0.attn_z.bias",
            "`blk.0.attn_q.bias` is missing",
        ),
        (
            "phi3",
            "rope_factors_short",
            "rope_factors_shirt",
            "`rope_factors_short.weight`: it is missing",
        ),
    ];
    for (model, from, to, expected) in cases {
        let error = error_with(model, from, to);
        assert!(error.contains(expected), "{from}: {error}");
    }
}

#[test]
fn refuses_other_factors_than_those_of_llama_3() {
    let gguf = opened("llama.gguf");
    assert_eq!(
        gguf.metadata()["llama.rope.freq_base"],
        Value::F32(500_000.0)
    );
    let mut bytes = std::fs::read(fixture("llama.gguf")).expect("a file");
    let (from, to) = (500_000f32.to_le_bytes(), 10_000f32.to_le_bytes());
    let at = bytes
        .windows(4)
        .position(|part| part == from)
        .expect("the base");
    bytes[at..at + 4].copy_from_slice(&to);
    let error = Folder::new(open_bytes(&bytes).expect("a valid file")).map(drop);
    let error = error.expect_err("other factors").to_string();
    assert!(
        error.contains("`rope_freqs.weight`: its factors are not those of Llama 3"),
        "{error}"
    );
}

#[test]
fn no_damaged_folder_panics() {
    for model in ["llama", "phi3", "gpt2"] {
        let bytes = std::fs::read(fixture(&format!("{model}.gguf"))).expect("a file");
        let header = bytes
            .windows(9)
            .rposition(|part| part == b"ffn_down.")
            .unwrap_or(0)
            + 60;
        for at in 0..header {
            let mut bytes = bytes.clone();
            bytes[at] ^= 0x81;
            let Ok(gguf) = open_bytes(&bytes) else {
                continue;
            };
            let Ok(folder) = Folder::new(gguf) else {
                continue;
            };
            for name in folder.names() {
                let weight = folder.weight(name).expect("a name of the folder");
                assert!(folder.read(weight).is_ok());
                if weight.element().is_some() {
                    assert!(folder.read_raw(weight).is_ok());
                }
            }
            _ = folder.tokenizer();
            _ = folder.tokenizer_config();
            _ = folder.generation_config();
            _ = folder.json("modules.json");
        }
    }
}
