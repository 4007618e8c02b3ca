//! Entries of `modules.json`, and the configuration files of the modules.

use std::path::{Component, Path, PathBuf};

use serde_json::{Value, json};

use super::{
    adapters::OWN_TRANSFORMER,
    json::{Json, check_known},
};
use crate::{
    model::{EMBEDDING, Module, Pooling},
    ops::{Activation, PoolWeights},
    runtime::weights::{ModelFiles, vector},
    text::TextError,
};

/// Maximum width of an embedding.
pub(super) const MAX_WIDTH: u32 = 1 << 20;

/// Class of a table with a vector for each token. The embedding of a text is the mean of the vectors of its tokens.
const STATIC: &str = "StaticEmbedding";

/// Class of a table with a weight for each token. The sparse embedding of a text has the weights of the text's tokens.
const SPARSE_STATIC: &str = "SparseStaticEmbedding";

/// Class of the first module of a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum First {
    /// A transformer. Folders without modules have this class, too.
    Transformer,
    /// A table with a vector for each token. Its tokenizer adds no special tokens. All settings of the tokenizer are in tokenizer.json.
    Static,
    /// A table with a weight for each token. Its tokenizer adds no special tokens.
    SparseStatic,
}

impl First {
    /// Returns the class of the first entry, or `Transformer` if there are no entries.
    pub(super) fn of(entries: &[Entry]) -> Self {
        match entries.first().map(|first| first.class.as_str()) {
            Some(STATIC) => Self::Static,
            Some(SPARSE_STATIC) => Self::SparseStatic,
            _ => Self::Transformer,
        }
    }
}

/// Maximum number of layers of a WeightedLayerPooling.
const MAX_LAYERS: u32 = 1 << 10;

/// An entry of `modules.json`.
pub(super) struct Entry {
    pub(super) folder: String,
    pub(super) class: String,
}

pub(super) fn entries(json: &Json) -> Result<Vec<Entry>, TextError> {
    let list = json.value.as_array();
    let list = list.ok_or_else(|| json.problem("expected a list of modules"))?;
    let mut entries = Vec::new();
    for module in list {
        let text = |key: &str| module.get(key).and_then(Value::as_str);
        let (Some(folder), Some(class), Some(keys)) =
            (text("path"), text("type"), module.as_object())
        else {
            return Err(json.problem("expected a `path` and a `type` of every module"));
        };
        let known = ["idx", "name", "path", "type", "kwargs"];
        check_known(keys, &known).map_err(|problem| json.problem(problem))?;
        // `kwargs` names arguments that a caller may pass to the module.
        let is_none = |v: &Value| v.is_null() || v.as_array().is_some_and(Vec::is_empty);
        let gives_task = |v: &Value| class == OWN_TRANSFORMER && *v == json!(["task"]);
        if let Some(kwargs) = keys.get("kwargs").filter(|v| !is_none(v) && !gives_task(v)) {
            return Err(json.problem(format!(
                "`kwargs` of the module `{class}` is {kwargs}; gemmule gives modules no arguments, so expected none"
            )));
        }
        entries.push(entry(json, folder, class, entries.is_empty())?);
    }
    match entries.is_empty() {
        true => Err(json.problem("it lists no module")),
        false => Ok(entries),
    }
}

/// Creates an entry from the `folder` and the `class` in an untrusted file. `folder` must name a direct subfolder of the checkpoint or, if
/// `may_be_root`, the checkpoint folder itself.
pub(super) fn entry(
    json: &Json,
    folder: &str,
    class: &str,
    may_be_root: bool,
) -> Result<Entry, TextError> {
    let mut parts = Path::new(folder).components();
    let plain = matches!(
        (parts.next(), parts.next()),
        (Some(Component::Normal(_)), None)
    );
    // model2vec writes `.` for the checkpoint folder itself.
    let is_root = ["", "."].contains(&folder) && may_be_root;
    if !(plain || is_root) {
        return Err(json.problem(format!("`{folder}` is not a folder next to it")));
    }
    Ok(Entry {
        folder: match is_root {
            true => String::new(),
            false => folder.to_owned(),
        },
        // Keep the path of a class from another package, because a class of the same name may compute something else.
        class: match class.starts_with("sentence_transformers.") {
            true => class.rsplit('.').next().unwrap_or(class).to_owned(),
            false => class.to_owned(),
        },
    })
}

/// Checks that the first module turns tokens into vectors.
pub(super) fn check_first(file: PathBuf, entries: &[Entry]) -> Result<(), TextError> {
    let known = [
        // `MLMTransformer` is the name in older versions for a transformer with the head of a masked language model.
        "Transformer",
        "MLMTransformer",
        STATIC,
        SPARSE_STATIC,
        OWN_TRANSFORMER,
    ];
    match entries.first() {
        Some(first) if known.contains(&first.class.as_str()) => Ok(()),
        Some(first) => Err(unknown_first(file, first)),
        None => {
            let problem = "the route has no module".to_owned();
            Err(TextError::Folder { file, problem })
        }
    }
}

/// Returns an error if the first module has the class [`OWN_TRANSFORMER`] and the checkpoint has no adapters. The class is supported only
/// with adapters.
pub(super) fn check_own_class(
    file: PathBuf,
    entries: &[Entry],
    has_adapters: bool,
) -> Result<(), TextError> {
    match entries.first() {
        Some(first) if first.class == OWN_TRANSFORMER && !has_adapters => {
            Err(unknown_first(file, first))
        }
        Some(_) | None => Ok(()),
    }
}

fn unknown_first(file: PathBuf, first: &Entry) -> TextError {
    let problem = format!(
        "the first module is `{}`; expected a Transformer, a StaticEmbedding or a SparseStaticEmbedding",
        first.class
    );
    TextError::Folder { file, problem }
}

/// Reads a Pooling's config.json. Returns the pooling modes in the order in which their results are concatenated, and whether the tokens of
/// a prompt are left out.
pub(super) fn pooling(json: &Json) -> Result<(Vec<Pooling>, bool), TextError> {
    let modes = modes(json)?;
    let after_prompt = !json.flag("include_prompt", true)?;
    let by_position = Pooling::Weighted(PoolWeights::Position);
    match after_prompt && modes.contains(&by_position) {
        // `weightedmean` weights tokens by position. Positions count the tokens of the prompt, so the prompt cannot be left out.
        true => Err(json.wrong("include_prompt", "true with pooling by `weightedmean`")),
        false => Ok((modes, after_prompt)),
    }
}

fn modes(json: &Json) -> Result<Vec<Pooling>, TextError> {
    // The results of several modes are concatenated in this order, whatever the order of the flags in the file.
    const FLAGS: [&str; 6] = [
        "cls_token",
        "max_tokens",
        "mean_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
        "lasttoken",
    ];
    let known = [
        "embedding_dimension",
        "word_embedding_dimension",
        "pooling_mode",
        "pooling_mode_cls_token",
        "pooling_mode_max_tokens",
        "pooling_mode_mean_tokens",
        "pooling_mode_mean_sqrt_len_tokens",
        "pooling_mode_weightedmean_tokens",
        "pooling_mode_lasttoken",
        "include_prompt",
    ];
    json.check_keys(&known)?;
    let mode = |name: &str| {
        match name {
        "cls" | "cls_token" => Ok(Pooling::First),
        "lasttoken" => Ok(Pooling::Last),
        "mean" | "mean_tokens" => Ok(Pooling::Mean),
        "max" | "max_tokens" => Ok(Pooling::Max),
        "mean_sqrt_len_tokens" => Ok(Pooling::Weighted(PoolWeights::RootLength)),
        "weightedmean" | "weightedmean_tokens" => Ok(Pooling::Weighted(PoolWeights::Position)),
        other => Err(json.problem(format!(
            "pooling by `{other}` is not known; gemmule pools by cls, max, mean, mean_sqrt_len_tokens, weightedmean and lasttoken"
        ))),
    }
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

/// Returns the module that computes a weighted sum of the hidden states of layers. The weights are read from `files`, the module's folder,
/// and divided by their sum.
pub(super) fn weighted_layers(
    json: &Json,
    files: &ModelFiles,
    folder: String,
) -> Result<Module, TextError> {
    let (width, n, start) = ("embedding_dimension", "num_hidden_layers", "layer_start");
    json.check_keys(&[width, "word_embedding_dimension", n, start])?;
    let layers = json.count(n, MAX_LAYERS)?.unwrap_or(12);
    let from = match json.get(start) {
        None => 4.min(layers),
        Some(found) => {
            let from = found.as_u64().and_then(|n| u32::try_from(n).ok());
            let expected = || json.wrong(start, &format!("a whole number from 0 to {layers}"));
            from.filter(|&from| from <= layers).ok_or_else(expected)?
        }
    };
    let count = layers + 1 - from;
    let weights = vector(files, "layer_weights", count.into());
    let weights = weights.map_err(|error| TextError::Weights(Box::new(error)))?;
    let sum: f64 = weights.iter().map(|&weight| f64::from(weight)).sum();
    let share = |&weight: &f32| (f64::from(weight) / sum) as f32;
    let weights: Vec<f32> = weights.iter().map(share).collect();
    match weights.iter().all(|weight| weight.is_finite()) {
        true => Ok(Module::WeightedLayers {
            folder,
            from,
            weights,
        }),
        false => Err(json.problem("the sum of its `layer_weights` is 0, or not finite")),
    }
}

pub(super) fn splade(json: &Json, folder: String) -> Result<Module, TextError> {
    json.check_keys(&[
        "pooling_strategy",
        "activation_function",
        "embedding_dimension",
        "word_embedding_dimension",
        "chunk_size",
    ])?;
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

pub(super) fn logit_score(json: &Json, folder: String) -> Result<Module, TextError> {
    let key = "module_input_name";
    json.check_keys(&[key, "true_token_id", "false_token_id"])?;
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

/// Returns a Dense that reads and writes `value`: sentence embeddings, or the vectors of tokens.
pub(super) fn dense(json: &Json, folder: String, value: &str) -> Result<Module, TextError> {
    json.check_keys(&[
        "in_features",
        "out_features",
        "bias",
        "activation_function",
        "module_input_name",
        "module_output_name",
        "use_residual",
    ])?;
    let key = "activation_function";
    let activation = match json.class(key)? {
        // The default of the class is Tanh.
        None | Some("Tanh") => Some(Activation::Tanh),
        Some("Identity") => None,
        Some("ReLU") => Some(Activation::Relu),
        Some("GELU") => Some(Activation::GeluExact),
        Some(_) => return Err(json.wrong(key, "Identity, Tanh, ReLU or GELU of torch.nn")),
    };
    check_values(json, value)?;
    Ok(Module::Dense {
        folder,
        inputs: json.needed("in_features", MAX_WIDTH)?,
        outputs: json.needed("out_features", MAX_WIDTH)?,
        bias: json.flag("bias", true)?,
        activation,
        residual: json.flag("use_residual", false)?,
    })
}

pub(super) fn layer_norm(json: &Json, folder: String) -> Result<Module, TextError> {
    let key = "dimension";
    json.check_keys(&[key])?;
    let width = json.needed(key, MAX_WIDTH)?;
    Ok(Module::LayerNorm { folder, width })
}

/// Returns a Normalize module. Older versions of sentence-transformers write no file for it.
pub(super) fn normalize(json: Option<&Json>, folder: String) -> Result<Module, TextError> {
    if let Some(json) = json {
        json.check_keys(&["module_input_name", "module_output_name"])?;
        check_values(json, EMBEDDING)?;
    }
    Ok(Module::Normalize { folder })
}

/// Checks the file of a SparseStaticEmbedding.
pub(super) fn sparse_static(json: &Json) -> Result<(), TextError> {
    let key = "path";
    // `frozen` only concerns training.
    json.check_keys(&["frozen", key])?;
    match json.get(key) {
        None => Ok(()),
        Some(_) => Err(json.wrong(key, "null, with the weights in model.safetensors, as `SparseEncoder.save_pretrained` of sentence-transformers writes them")),
    }
}

/// Checks the file of a Dropout, which has no effect outside of training.
pub(super) fn dropout(json: Option<&Json>) -> Result<(), TextError> {
    json.map_or(Ok(()), |json| json.check_keys(&["dropout"]))
}

/// Refuses a module that reads or writes a value other than `value`.
fn check_values(json: &Json, value: &str) -> Result<(), TextError> {
    for key in ["module_input_name", "module_output_name"] {
        if json.text(key)?.is_some_and(|name| name != value) {
            return Err(json.wrong(key, &format!("`{value}`")));
        }
    }
    Ok(())
}
