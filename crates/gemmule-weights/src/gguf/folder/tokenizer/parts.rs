//! Parts of tokenizer.json other than the model.

use serde_json::{Value as Json, json};

use super::{
    super::{super::error::Result, shown},
    problem,
    vocabulary::Vocabulary,
};

/// Splitting of texts before byte pair encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Split {
    /// By the regular expression of GPT-2.
    Gpt2,
    /// By single digits, then by the regular expression of GPT-2.
    Digits,
    /// By several regular expressions in turn.
    Expressions(&'static [&'static str]),
}

/// Properties of the tokenizers that share a value of `tokenizer.ggml.pre`.
#[derive(Clone, Copy)]
struct Pre {
    names: &'static [&'static str],
    split: Split,
    /// Whether texts are normalized to composed characters (NFC).
    composes: bool,
    /// Whether merges are skipped for a part of the split text that is itself a token.
    ignores_merges: bool,
    /// Whether a text begins with the BOS token by default.
    adds_bos: bool,
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Default of llama.cpp for unknown tokenizers.
const DEFAULT: &[&str] = &[
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
];

const PLAIN: Pre = Pre {
    names: &[],
    split: Split::Gpt2,
    composes: false,
    ignores_merges: false,
    adds_bos: false,
};

const PRE: [Pre; 9] = [
    Pre {
        names: &[
            "gpt-2",
            "gpt2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "roberta-bpe",
        ],
        ..PLAIN
    },
    Pre {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        split: Split::Expressions(&[LLAMA3]),
        ignores_merges: true,
        adds_bos: true,
        ..PLAIN
    },
    Pre {
        names: &["dbrx", "smaug-bpe"],
        split: Split::Expressions(&[LLAMA3]),
        ..PLAIN
    },
    Pre {
        names: &["qwen2"],
        split: Split::Expressions(&[QWEN2]),
        composes: true,
        ..PLAIN
    },
    Pre {
        names: &["deepseek-r1-qwen"],
        split: Split::Expressions(&[QWEN2]),
        ..PLAIN
    },
    Pre {
        names: &["smollm", "starcoder", "refact"],
        split: Split::Digits,
        ..PLAIN
    },
    Pre {
        names: &["gpt-4o", "llama4", "kanana2"],
        split: Split::Expressions(&[GPT4O]),
        ..PLAIN
    },
    Pre {
        names: &["tekken"],
        split: Split::Expressions(&[TEKKEN]),
        ignores_merges: true,
        ..PLAIN
    },
    Pre {
        names: &["default"],
        split: Split::Expressions(DEFAULT),
        ..PLAIN
    },
];

fn find(name: &str) -> Option<&'static Pre> {
    PRE.iter().find(|pre| pre.names.contains(&name))
}

/// Returns whether texts begin with the BOS token by default.
pub(super) fn adds_bos(name: &str) -> bool {
    find(name).is_some_and(|pre| pre.adds_bos)
}

/// The parts of tokenizer.json that are applied before byte pair encoding.
pub(super) struct Before {
    pub normalizer: Json,
    pub pre_tokenizer: Json,
    pub ignores_merges: bool,
}

/// Returns the parts that are applied before byte pair encoding.
pub(super) fn before(vocabulary: &Vocabulary<'_>) -> Result<Before> {
    let known = || {
        let names: Vec<_> = PRE.iter().flat_map(|pre| pre.names).copied().collect();
        names.join(", ")
    };
    let name = vocabulary.pre()?.ok_or_else(|| {
        problem(format!(
            "it has no key `tokenizer.ggml.pre`, which says how texts are split; expected one of {}; convert the model again with a current llama.cpp",
            known()
        ))
    })?;
    let pre = find(name).ok_or_else(|| {
        problem(format!(
            "its `tokenizer.ggml.pre` is `{}`, which is not read; expected one of {}",
            shown(name),
            known()
        ))
    })?;
    let byte_level = |use_regex: bool| {
        json!({
            "type": "ByteLevel",
            "add_prefix_space": false,
            "trim_offsets": true,
            "use_regex": use_regex,
        })
    };
    let sequence = |parts: Vec<Json>| json!({"type": "Sequence", "pretokenizers": parts});
    let pre_tokenizer = match pre.split {
        Split::Gpt2 => byte_level(true),
        Split::Digits => sequence(vec![
            json!({"type": "Digits", "individual_digits": true}),
            byte_level(true),
        ]),
        Split::Expressions(list) => {
            let split = |expression: &&str| {
                json!({
                    "type": "Split",
                    "pattern": {"Regex": expression},
                    "behavior": "Isolated",
                    "invert": false,
                })
            };
            let mut parts: Vec<Json> = list.iter().map(split).collect();
            parts.push(byte_level(false));
            sequence(parts)
        }
    };
    Ok(Before {
        normalizer: match pre.composes {
            true => json!({"type": "NFC"}),
            false => Json::Null,
        },
        pre_tokenizer,
        ignores_merges: pre.ignores_merges,
    })
}

/// Returns the part that adds tokens before, after and between texts; `None` if none are added.
pub(super) fn around(vocabulary: &Vocabulary<'_>) -> Result<Option<Json>> {
    let token = |adds: bool, id: Option<usize>, name: &str| match adds {
        true => vocabulary.need(id, name).map(Some),
        false => Ok(None),
    };
    let bos = token(
        vocabulary.adds_bos()?,
        vocabulary.bos()?,
        "token that begins a text",
    )?;
    let eos = token(
        vocabulary.adds_eos()?,
        vocabulary.eos()?,
        "token that ends a text",
    )?;
    if bos.is_none() && eos.is_none() {
        return Ok(None);
    }
    let of = |text: &str, segment: u64| {
        let pieces = [
            bos.map(|id| special(vocabulary, id, segment)),
            Some(json!({"Sequence": {"id": text, "type_id": segment}})),
            eos.map(|id| special(vocabulary, id, segment)),
        ];
        pieces.into_iter().flatten()
    };
    let single = of("A", 0).collect();
    let pair = of("A", 0).chain(of("B", 1)).collect();
    let tokens: Vec<usize> = bos.into_iter().chain(eos).collect();
    Ok(Some(template(vocabulary, single, pair, &tokens)))
}

/// Returns a special token of a template.
pub(super) fn special(vocabulary: &Vocabulary<'_>, id: usize, segment: u64) -> Json {
    json!({"SpecialToken": {"id": vocabulary.tokens[id], "type_id": segment}})
}

/// Returns the part that adds special tokens to texts.
pub(super) fn template(
    vocabulary: &Vocabulary<'_>,
    single: Vec<Json>,
    pair: Vec<Json>,
    tokens: &[usize],
) -> Json {
    let entry = |&id: &usize| {
        let token = &vocabulary.tokens[id];
        (
            token.clone(),
            json!({"id": token, "ids": [id], "tokens": [token]}),
        )
    };
    let special: serde_json::Map<String, Json> = tokens.iter().map(entry).collect();
    json!({
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": special,
    })
}
