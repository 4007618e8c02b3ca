//! tokenizer.json, tokenizer_config.json and generation_config.json.

mod models;
mod parts;
mod vocabulary;

use serde_json::{Map, Value as Json, json};

use super::{
    super::{GgufProblem, Value, error::Result},
    settings::Settings,
    shown,
};
use vocabulary::{Kind, Vocabulary};

/// Supported kinds of tokenizers.
const MODELS: &str = "bert, gpt2 or llama";
/// Tokens that end a text or a turn. llama.cpp stops at them if a file names no end tokens.
const ENDINGS: [&str; 9] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<EOT>",
    "_<EOT>",
];

/// Special tokens of Phi-3 that do not include the spaces after them.
const PHI3_PLAIN: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

fn problem(problem: impl Into<String>) -> GgufProblem {
    GgufProblem::Tokenizer {
        problem: problem.into(),
    }
}

/// Returns the kind of the tokenizer.
fn model<'g>(settings: &Settings<'g>) -> Result<&'g str> {
    const KEY: &str = "tokenizer.ggml.model";
    let model = settings.gguf.value(KEY, "a string", Value::as_str)?;
    model.ok_or_else(|| GgufProblem::NoKey {
        key: KEY.to_owned(),
        expected: format!("the kind of the tokenizer, {MODELS}"),
    })
}

/// Returns the contents of tokenizer.json.
pub(super) fn tokenizer(settings: &Settings<'_>) -> Result<Json> {
    let vocabulary = Vocabulary::new(settings)?;
    let mut tokenizer = match model(settings)? {
        "gpt2" => models::byte_pairs(&vocabulary)?,
        "llama" => models::sentencepiece(&vocabulary)?,
        "bert" => models::wordpiece(&vocabulary)?,
        other => {
            return Err(problem(format!(
                "its kind `{}` is not read; expected {MODELS}",
                shown(other)
            )));
        }
    };
    tokenizer["version"] = "1.0".into();
    tokenizer["truncation"] = Json::Null;
    tokenizer["padding"] = Json::Null;
    let is_phi3 = settings.architecture.name == "phi3" && model(settings)? == "llama";
    tokenizer["added_tokens"] = added_tokens(&vocabulary, is_phi3);
    Ok(tokenizer)
}

/// Returns the tokens that are matched before a text is split. In Phi-3, the match of a token other than [`PHI3_PLAIN`] includes the spaces
/// after it. No key of a GGUF file states this property.
fn added_tokens(vocabulary: &Vocabulary<'_>, is_phi3: bool) -> Json {
    let added = vocabulary.tokens.iter().zip(&vocabulary.kinds).enumerate();
    added
        .filter_map(|(id, (content, kind))| {
            let is_special = match kind {
                Kind::Control | Kind::Unknown => true,
                Kind::UserDefined => false,
                Kind::Normal | Kind::Unused | Kind::Byte => return None,
            };
            Some(json!({
                "id": id,
                "content": content,
                "single_word": false,
                "lstrip": false,
                "rstrip": is_phi3 && !PHI3_PLAIN.contains(&content.as_str()),
                "normalized": false,
                "special": is_special,
            }))
        })
        .collect()
}

/// Returns the contents of tokenizer_config.json.
pub(super) fn tokenizer_config(settings: &Settings<'_>) -> Result<Json> {
    let vocabulary = Vocabulary::new(settings)?;
    let mut config = Map::new();
    config.insert(
        "tokenizer_class".to_owned(),
        "PreTrainedTokenizerFast".into(),
    );
    config.insert("clean_up_tokenization_spaces".to_owned(), false.into());
    let is_bert = model(settings)? == "bert";
    let special = [
        ("bos_token", vocabulary.bos()?.filter(|_| !is_bert)),
        ("eos_token", vocabulary.eos()?.filter(|_| !is_bert)),
        ("unk_token", vocabulary.unknown()?),
        ("pad_token", vocabulary.special("padding_token_id")?),
        ("cls_token", vocabulary.cls()?.filter(|_| is_bert)),
        ("sep_token", vocabulary.sep()?.filter(|_| is_bert)),
        ("mask_token", vocabulary.special("mask_token_id")?),
    ];
    for (name, id) in special {
        if let Some(id) = id {
            config.insert(name.to_owned(), vocabulary.tokens[id].as_str().into());
        }
    }
    if !is_bert {
        config.insert("add_bos_token".to_owned(), vocabulary.adds_bos()?.into());
        config.insert("add_eos_token".to_owned(), vocabulary.adds_eos()?.into());
    }
    if let Some(template) = chat_template(settings)? {
        config.insert("chat_template".to_owned(), template);
    }
    Ok(config.into())
}

/// Returns the chat template as a string, or a list of objects if there are several templates.
fn chat_template(settings: &Settings<'_>) -> Result<Option<Json>> {
    const KEY: &str = "tokenizer.chat_template";
    let gguf = settings.gguf;
    let default = gguf.value(KEY, "a string", Value::as_str)?;
    let named = gguf.value("tokenizer.chat_templates", "an array of strings", |value| {
        value.as_array()?.as_strings()
    })?;
    let Some(names) = named.filter(|names| !names.is_empty()) else {
        return Ok(default.map(Json::from));
    };
    let mut templates = Vec::new();
    if let Some(template) = default {
        templates.push(json!({"name": "default", "template": template}));
    }
    for name in names.iter().filter(|&name| name != "default") {
        let key = format!("{KEY}.{name}");
        let template = gguf.value(&key, "a string", Value::as_str)?;
        let template = template.ok_or_else(|| GgufProblem::NoKey {
            key: shown(&key),
            expected: "the template that `tokenizer.chat_templates` names".to_owned(),
        })?;
        templates.push(json!({"name": name, "template": template}));
    }
    Ok(Some(templates.into()))
}

/// Returns the contents of generation_config.json.
pub(super) fn generation_config(settings: &Settings<'_>) -> Result<Json> {
    let vocabulary = Vocabulary::new(settings)?;
    let mut config = Map::new();
    if let Some(id) = vocabulary.special("bos_token_id")? {
        config.insert("bos_token_id".to_owned(), id.into());
    }
    if let Some(id) = vocabulary.special("padding_token_id")? {
        config.insert("pad_token_id".to_owned(), id.into());
    }
    let mut endings = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        endings.extend(vocabulary.special(key)?);
    }
    let is_ending = |id: &usize| {
        vocabulary.kinds[*id] == Kind::Control && ENDINGS.contains(&vocabulary.tokens[*id].as_str())
    };
    endings.extend((0..vocabulary.tokens.len()).filter(is_ending));
    let mut ids: Vec<usize> = Vec::new();
    for id in endings {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    match ids.as_slice() {
        [] => {}
        &[id] => _ = config.insert("eos_token_id".to_owned(), id.into()),
        _ => _ = config.insert("eos_token_id".to_owned(), ids.into()),
    }
    Ok(config.into())
}
