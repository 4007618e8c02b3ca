//! What `modules.json` lists, and the folders of its entries.

use std::path::{Component, Path};

use serde_json::{Map, Value};

use super::{Messages, json::Json};
use crate::{
    engine::EngineError,
    kernels::gemm::Activation,
    model::{EMBEDDING, Module, Pooling},
};

/// An entry of `modules.json`.
pub(super) struct Entry {
    pub(super) folder: String,
    pub(super) class: String,
}

/// What `modules.json` lists; the first is the transformer.
pub(super) fn entries(json: &Json) -> Result<Vec<Entry>, EngineError> {
    let list = json.value.as_array();
    let list = list.ok_or_else(|| json.problem("expected a list of modules"))?;
    let mut entries = Vec::new();
    for module in list {
        let text = |key: &str| module.get(key).and_then(Value::as_str);
        let (Some(folder), Some(class)) = (text("path"), text("type")) else {
            return Err(json.problem("expected a `path` and a `type` of every module"));
        };
        // The file comes from elsewhere: it may name folders beside itself only.
        let mut parts = Path::new(folder).components();
        let plain = matches!(
            (parts.next(), parts.next()),
            (Some(Component::Normal(_)), None)
        );
        let is_root = folder.is_empty() && entries.is_empty();
        if !(plain || is_root) {
            return Err(json.problem(format!("`{folder}` is no folder beside it")));
        }
        entries.push(Entry {
            folder: folder.to_owned(),
            // Another's class of the same name may be another module.
            class: match class.starts_with("sentence_transformers.") {
                true => class.rsplit('.').next().unwrap_or(class).to_owned(),
                false => class.to_owned(),
            },
        });
    }
    match entries.first() {
        // The second is what older versions called one that ends in the head of a masked language model.
        Some(first) if ["Transformer", "MLMTransformer"].contains(&first.class.as_str()) => {
            Ok(entries)
        }
        Some(first) => Err(json.problem(format!(
            "the first module is `{}`; expected a Transformer",
            first.class
        ))),
        None => Err(json.problem("it lists no module")),
    }
}

/// What rows a Pooling's config.json asks for, in the order in which they are joined.
pub(super) fn pooling(json: &Json) -> Result<Vec<Pooling>, EngineError> {
    // Their order in the result is this one, whatever the file's.
    const FLAGS: [&str; 6] = [
        "cls_token",
        "max_tokens",
        "mean_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
        "lasttoken",
    ];
    let mode = |name: &str| match name {
        "cls" | "cls_token" => Ok(Pooling::First),
        "lasttoken" => Ok(Pooling::Last),
        "mean" | "mean_tokens" => Ok(Pooling::Mean),
        "max" | "max_tokens" => Ok(Pooling::Max),
        other => Err(json.problem(format!(
            "pooling by `{other}` is not known; gemmule pools by cls, max, mean and lasttoken"
        ))),
    };
    match json.get("pooling_mode") {
        Some(Value::String(one)) => Ok(vec![mode(one)?]),
        Some(Value::Array(several)) if !several.is_empty() => {
            let names = several.iter().map(|name| name.as_str());
            let names = names.map(|n| n.ok_or_else(|| json.wrong("pooling_mode", "names")));
            names.map(|name| mode(name?)).collect()
        }
        Some(_) => Err(json.wrong("pooling_mode", "a name or a list of names")),
        None => {
            let mut modes = Vec::new();
            for flag in FLAGS {
                if json.flag(&format!("pooling_mode_{flag}"), false)? {
                    modes.push(mode(flag)?);
                }
            }
            Ok(match modes.is_empty() {
                true => vec![Pooling::Mean],
                false => modes,
            })
        }
    }
}

pub(super) fn splade(json: &Json, folder: String) -> Result<Module, EngineError> {
    match json.text("pooling_strategy")? {
        None | Some("max") => {}
        Some(_) => return Err(json.wrong("pooling_strategy", "max")),
    }
    let twice = match json.text("activation_function")? {
        None | Some("relu") => false,
        Some("log1p_relu") => true,
        Some(_) => return Err(json.wrong("activation_function", "relu or log1p_relu")),
    };
    Ok(Module::Splade { folder, twice })
}

pub(super) fn logit_score(json: &Json, folder: String) -> Result<Module, EngineError> {
    let key = "module_input_name";
    if json.text(key)?.is_some_and(|name| name != "causal_logits") {
        return Err(json.wrong(key, "`causal_logits`"));
    }
    let token = |key: &str| match json.get(key) {
        None => Ok(None),
        Some(v) => match v.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) => Ok(Some(id)),
            None => Err(json.wrong(key, "the id of a token")),
        },
    };
    let yes = token("true_token_id")?;
    let yes = yes.ok_or_else(|| json.problem("there is no `true_token_id`"))?;
    let no = token("false_token_id")?;
    Ok(Module::LogitScore { folder, yes, no })
}

pub(super) fn dense(json: &Json, folder: String) -> Result<Module, EngineError> {
    if json.flag("use_residual", false)? {
        return Err(json.problem("`use_residual` is true, which gemmule does not compute"));
    }
    let key = "activation_function";
    let activation = match json.class(key)? {
        // The default of the class.
        None | Some("Tanh") => Some(Activation::Tanh),
        Some("Identity") => None,
        Some("ReLU") => Some(Activation::Relu),
        Some("GELU") => Some(Activation::GeluExact),
        Some(_) => return Err(json.wrong(key, "Identity, Tanh, ReLU or GELU of torch.nn")),
    };
    for (key, usual) in [
        ("module_input_name", EMBEDDING),
        ("module_output_name", EMBEDDING),
    ] {
        if json.text(key)?.is_some_and(|name| name != usual) {
            return Err(json.wrong(key, &format!("`{usual}`")));
        }
    }
    Ok(Module::Dense {
        folder,
        inputs: json.needed("in_features")?,
        outputs: json.needed("out_features")?,
        bias: json.flag("bias", true)?,
        activation,
    })
}

/// How texts become messages, by the file that says what the Transformer takes. Without a `modality_config` they never do.
pub(super) fn messages(json: &Json) -> Result<Option<Messages>, EngineError> {
    let key = "modality_config";
    let Some(message) = json.get(key).and_then(|config| config.get("message")) else {
        return Ok(None);
    };
    let has_parts = match message.get("format").and_then(Value::as_str) {
        Some("flat") => false,
        Some("structured") => true,
        _ => return Err(json.wrong(key, "a `format` of `message` that is flat or structured")),
    };
    // What else the library would be told of texts changes their tokens, and is not read here.
    let key = "processing_kwargs";
    let none = Map::new();
    let given = match json.get(key) {
        None => &none,
        Some(given) => given
            .as_object()
            .ok_or_else(|| json.wrong(key, "an object"))?,
    };
    let mut options = Map::new();
    for (bucket, values) in given {
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
        let expected = format!("values that the template itself asks for, and no `{name}`");
        return Err(json.wrong(key, &expected));
    }
    Ok(Some(Messages { has_parts, options }))
}
