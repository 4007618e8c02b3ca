//! Settings of the Transformer in sentence-transformers' sentence_bert_config.json.

use serde_json::{Map, Value};

use super::{
    Messages,
    json::{Json, check_known},
};
use crate::text::TextError;

/// Maximum number of tokens of a text. A batch has the same maximum.
pub(super) const MAX_TOKENS: u32 = 1 << 24;

/// Keys of late interaction.
pub(super) const LATE_KEYS: [&str; 3] = ["query_length", "document_length", "query_expansion"];

/// Known keys of the file.
const KEYS: [&str; 18] = [
    "max_seq_length",
    "do_lower_case",
    "transformer_task",
    "modality_config",
    "module_output_name",
    "processing_kwargs",
    "unpad_inputs",
    "query_length",
    "document_length",
    "query_expansion",
    "tokenizer_name_or_path",
    "backend",
    "model_args",
    "model_kwargs",
    "tokenizer_args",
    "processor_kwargs",
    "config_args",
    "config_kwargs",
];

/// Arguments for the location and loading of files.
const SOURCE: [&str; 6] = [
    "trust_remote_code",
    "revision",
    "code_revision",
    "token",
    "cache_dir",
    "local_files_only",
];

/// Model arguments that are ignored. They do not change results, except for the storage type, which gemmule chooses itself.
const MODEL: [&str; 10] = [
    "attn_implementation",
    "_attn_implementation",
    "torch_dtype",
    "dtype",
    "device_map",
    "low_cpu_mem_usage",
    "use_safetensors",
    "add_pooling_layer",
    "use_cache",
    "weights_only",
];

/// Tokenizer arguments that are read as if they were in tokenizer_config.json.
const TOKENIZER: [&str; 23] = [
    "additional_special_tokens",
    "added_tokens_decoder",
    "add_prefix_space",
    "bos_token",
    "clean_up_tokenization_spaces",
    "cls_token",
    "do_lower_case",
    "eos_token",
    "extra_special_tokens",
    "keep_accents",
    "legacy",
    "legacy_behaviour",
    "mask_token",
    "model_input_names",
    "model_max_length",
    "pad_token",
    "sep_token",
    "split_by_punct",
    "split_special_tokens",
    "src_lang",
    "strip_accents",
    "tokenize_chinese_chars",
    "truncation_side",
];

/// Tokenizer arguments that are ignored, since they do not change the tokens of packed batches.
const PADDING: [&str; 5] = [
    "padding",
    "padding_side",
    "pad_to_multiple_of",
    "return_tensors",
    "use_fast",
];

/// Contents of sentence_bert_config.json.
#[derive(Debug, Default)]
pub(super) struct Transformer {
    pub(super) max_seq_length: Option<usize>,
    pub(super) lower_case: bool,
    pub(super) messages: Option<Messages>,
    /// Settings that take precedence over tokenizer_config.json.
    pub(super) tokenizer: Map<String, Value>,
    /// Keys that take precedence over config.json.
    pub(super) config: Map<String, Value>,
}

impl Transformer {
    /// Reads the file. If `is_multi_vector`, the module `multi_vector` reads the settings for late interaction. Otherwise, these settings
    /// are refused.
    pub(super) fn read(json: &Json, is_multi_vector: bool) -> Result<Self, TextError> {
        json.check_keys(&KEYS)?;
        let late = LATE_KEYS.into_iter().filter(|_| !is_multi_vector);
        for key in late.chain(["tokenizer_name_or_path"]) {
            if json.get(key).is_some() {
                return Err(json.wrong(key, "null, as gemmule does not apply it"));
            }
        }
        let tasks = [
            "feature-extraction",
            "fill-mask",
            "sequence-classification",
            "text-generation",
        ];
        one_of(json, "transformer_task", &tasks)?;
        let names = ["token_embeddings", "scores", "causal_logits"];
        one_of(json, "module_output_name", &names)?;
        one_of(json, "backend", &["torch"])?;
        check_text(json)?;
        let known: Vec<&str> = MODEL.into_iter().chain(SOURCE).collect();
        arguments(json, ["model_args", "model_kwargs"], &known)?;
        let known: Vec<&str> = [&TOKENIZER[..], &PADDING, &SOURCE].concat();
        let mut tokenizer = arguments(json, ["tokenizer_args", "processor_kwargs"], &known)?;
        tokenizer.retain(|key, _| TOKENIZER.contains(&key.as_str()));
        let mut config = either(json, ["config_args", "config_kwargs"])?.1;
        config.retain(|key, _| ![&MODEL[..], &SOURCE].concat().contains(&key.as_str()));
        let messages = messages(json)?;
        let processing = match messages {
            // With a chat template, the call of `messages` above has already read `processing_kwargs` and refused a maximum length there.
            Some(_) => None,
            None => processing(json)?,
        };
        let of_tokenizer = Json {
            file: json.file.clone(),
            value: Value::Object(tokenizer.clone()),
        };
        // The last of these lengths that is set applies.
        let lengths = [
            json.count("max_seq_length", MAX_TOKENS)?,
            of_tokenizer.count("model_max_length", MAX_TOKENS)?,
            processing,
        ];
        Ok(Self {
            max_seq_length: lengths.into_iter().flatten().last().map(|n| n as usize),
            lower_case: json.flag("do_lower_case", false)?,
            messages,
            tokenizer,
            config,
        })
    }
}

fn one_of(json: &Json, key: &str, known: &[&str]) -> Result<(), TextError> {
    match json.text(key)? {
        Some(found) if !known.contains(&found) => Err(json.wrong(key, &known.join(", "))),
        _ => Ok(()),
    }
}

/// Returns the object under the key `old` or else under the key `new`, which newer versions of sentence-transformers use. Also returns
/// which of the two keys it read.
fn either<'n>(
    json: &Json,
    [old, new]: [&'n str; 2],
) -> Result<(&'n str, Map<String, Value>), TextError> {
    match json.get(old) {
        Some(_) => Ok((old, json.object(old)?)),
        None => Ok((new, json.object(new)?)),
    }
}

/// Returns the arguments in the object under one of the keys `names`. Refuses arguments that are not in `known`.
fn arguments(
    json: &Json,
    names: [&str; 2],
    known: &[&str],
) -> Result<Map<String, Value>, TextError> {
    let (name, found) = either(json, names)?;
    check_known(&found, known).map_err(|problem| json.problem(format!("`{name}`: {problem}")))?;
    Ok(found)
}

/// Refuses a `modality_config` that uses an unsupported method or output of the model for texts.
fn check_text(json: &Json) -> Result<(), TextError> {
    let key = "modality_config";
    let Some(text) = json.get(key).and_then(|config| config.get("text")) else {
        return Ok(());
    };
    let is = |key: &str, known: &[&str]| {
        let value = text.get(key).and_then(Value::as_str);
        value.is_none_or(|value| known.contains(&value))
    };
    match is("method", &["forward"]) && is("method_output_name", &["last_hidden_state", "logits"]) {
        true => Ok(()),
        false => Err(json.wrong(
            key,
            "the method `forward` of `text`, and its output `last_hidden_state` or `logits`",
        )),
    }
}

/// Returns the maximum number of tokens of a text from `processing_kwargs`.
fn processing(json: &Json) -> Result<Option<u32>, TextError> {
    let key = "processing_kwargs";
    let given = json.object(key)?;
    let buckets = ["common", "text", "audio", "image", "video", "chat_template"];
    check_known(&given, &buckets).map_err(|problem| json.problem(format!("`{key}`: {problem}")))?;
    let mut limit = None;
    // Settings for all kinds of inputs take precedence over those for texts.
    for bucket in ["text", "common"] {
        let of_bucket = Json {
            file: json.file.clone(),
            value: given.get(bucket).cloned().unwrap_or(Value::Null),
        };
        if of_bucket.value.is_null() {
            continue;
        }
        let values = of_bucket.value.as_object();
        let values = values.ok_or_else(|| json.wrong(key, "objects by name"))?;
        let known = [
            &PADDING[..],
            &["max_length", "truncation", "add_special_tokens"],
        ]
        .concat();
        let named = |problem| json.problem(format!("`{key}`, `{bucket}`: {problem}"));
        check_known(values, &known).map_err(named)?;
        let cuts = |v: &Value| v == true || v == "longest_first";
        if let Some(value) = of_bucket.get("truncation").filter(|v| !cuts(v)) {
            return Err(named(format!("`truncation` is {value}; expected true")));
        }
        if !of_bucket.flag("add_special_tokens", true)? {
            return Err(named(
                "`add_special_tokens` is false; expected true".to_owned(),
            ));
        }
        limit = of_bucket.count("max_length", MAX_TOKENS)?.or(limit);
    }
    Ok(limit)
}

/// Returns the conversion of texts to messages; `None` if `modality_config` has no `message`.
fn messages(json: &Json) -> Result<Option<Messages>, TextError> {
    let key = "modality_config";
    let Some(message) = json.get(key).and_then(|config| config.get("message")) else {
        return Ok(None);
    };
    let has_parts = match message.get("format").and_then(Value::as_str) {
        Some("flat") => false,
        Some("structured") => true,
        _ => return Err(json.wrong(key, "a `format` of `message` that is flat or structured")),
    };
    // Only the settings of `chat_template` are supported. Other settings for texts would change tokens.
    let key = "processing_kwargs";
    let mut options = Map::new();
    for (bucket, values) in &json.object(key)? {
        let values = values
            .as_object()
            .ok_or_else(|| json.wrong(key, "objects by name"))?;
        match bucket.as_str() {
            "chat_template" => options.extend(values.clone()),
            "audio" | "image" | "video" => {}
            _ if values.is_empty() => {}
            _ => return Err(json.wrong(key, "values of `chat_template` alone")),
        }
    }
    let of_tokenizer = [
        "chat_template",
        "max_length",
        "padding",
        "restore_suffix",
        "return_tensors",
        "truncation",
    ];
    if let Some(name) = of_tokenizer
        .iter()
        .find(|name| options.contains_key(**name))
    {
        let expected = format!("only variables of the template, not `{name}`");
        return Err(json.wrong(key, &expected));
    }
    Ok(Some(Messages { has_parts, options }))
}
