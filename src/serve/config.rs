//! `serve.ron`: the models to serve, with their devices, names and limits.

use std::{path::PathBuf, str::FromStr};

use serde::{Deserialize, Deserializer, de::Error as _};

use super::DefaultPrompt;
use crate::{
    DType, DeviceChoice,
    engine::KvCacheChoice,
    schedule::{self, Settings},
};

/// A model in `serve.ron`. If its scheduler, number of tokenizers or one of its limits is missing, the value from the command line applies.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Folder of the checkpoint. A relative path is relative to the folder of `serve.ron`.
    #[serde(default)]
    pub weights: PathBuf,
    /// Name of a model on the Hugging Face hub, instead of a folder: `org/name` or `org/name@revision`.
    #[serde(default)]
    pub model: Option<String>,
    #[serde(default)]
    pub name: Option<String>,
    /// Devices to run on; `auto` by default. Each device holds all of the weights.
    #[serde(default, deserialize_with = "devices")]
    pub devices: Vec<DeviceChoice>,
    #[serde(default, deserialize_with = "parsed")]
    pub dtype: Option<DType>,
    /// Format of the KV cache of a model that generates text; `auto` by default.
    #[serde(default, deserialize_with = "parsed")]
    pub kv_dtype: Option<KvCacheChoice>,
    /// Maximum number of tokens of a sequence; by default the model's number of positions.
    #[serde(default)]
    pub max_context: Option<u32>,
    #[serde(default)]
    pub invariant: bool,
    #[serde(default, deserialize_with = "scheduler")]
    pub scheduler: Option<String>,
    /// Path of a cost table ([`CostTable`](crate::schedule::CostTable)).
    #[serde(default)]
    pub costs: Option<PathBuf>,
    #[serde(default)]
    pub batch_bytes: Option<u64>,
    #[serde(default, alias = "kv_bytes")]
    pub kv_cache_bytes: Option<u64>,
    #[serde(default, alias = "queue_ms")]
    pub max_queue_ms: Option<u64>,
    #[serde(default)]
    pub tokenizers: Option<usize>,
    #[serde(default)]
    pub all_tokens: bool,
    #[serde(default)]
    pub sparse: bool,
    #[serde(default)]
    pub token_vectors: bool,
    /// Whether a masked language model fills masks instead of embedding texts.
    #[serde(default)]
    pub fill_mask: bool,
    /// Task for which the model is loaded. It selects an adapter, or a route of a sentence-transformers Router.
    #[serde(default)]
    pub task: Option<String>,
    /// Name of one of the folder's prompts. This prompt is put before texts if a request specifies no prompt.
    #[serde(default)]
    pub default_prompt_name: Option<String>,
    /// Text that is put before texts if a request specifies no prompt.
    #[serde(default)]
    pub default_prompt: Option<String>,
    /// Share of the device's time, relative to the shares of other models on the device; 1 by default.
    #[serde(default, deserialize_with = "share")]
    pub share: Option<f64>,
}

/// Contents of `serve.ron`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename = "Serve")]
pub struct ServeConfig {
    pub models: Vec<ModelConfig>,
}

/// Error in `serve.ron`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServeConfigError {
    #[error("line {line}, column {column}: {problem}")]
    Syntax {
        line: usize,
        column: usize,
        problem: String,
    },
    #[error("the configuration has no model; expected at least one in `models`")]
    Empty,
    #[error("model {at} has {found}; expected `weights`, a folder, or `model`, a name on the hub")]
    Source { at: usize, found: &'static str },
    #[error("model {at} has both `default_prompt` and `default_prompt_name`; expected one of them")]
    Prompts { at: usize },
    #[error("the name of model {at} cannot be used: {problem}")]
    Name { at: usize, problem: &'static str },
    #[error(
        "models {first} and {second} are both called `{name}`; give one of them another `name`"
    )]
    Twice {
        name: String,
        first: usize,
        second: usize,
    },
}

impl ModelConfig {
    /// Returns the prompt that is put before texts if a request specifies none.
    pub fn prompt(&self) -> DefaultPrompt {
        match (&self.default_prompt_name, &self.default_prompt) {
            (Some(name), _) => DefaultPrompt::Named(name.clone()),
            (None, Some(text)) => DefaultPrompt::Text(text.clone()),
            (None, None) => DefaultPrompt::OfFolder,
        }
    }
}

impl ServeConfig {
    /// Parses the text of `serve.ron`.
    ///
    /// # Errors
    /// Returns an error if the syntax is invalid (with its position), if the list of models is empty, if a model has both or neither of
    /// `weights` and `model`, two default prompts or an invalid name, or if two models have the same name.
    pub fn parse(text: &str) -> Result<Self, ServeConfigError> {
        let options = ron::Options::default()
            .with_default_extension(ron::extensions::Extensions::IMPLICIT_SOME);
        let config: Self = options
            .from_str(text)
            .map_err(|error| ServeConfigError::Syntax {
                line: error.span.start.line,
                column: error.span.start.col,
                problem: error.code.to_string(),
            })?;
        if config.models.is_empty() {
            return Err(ServeConfigError::Empty);
        }
        for (second, model) in config.models.iter().enumerate() {
            let has_folder = !model.weights.as_os_str().is_empty();
            if has_folder == model.model.is_some() {
                return Err(ServeConfigError::Source {
                    at: second,
                    found: match has_folder {
                        true => "both",
                        false => "neither",
                    },
                });
            }
            if model.default_prompt.is_some() && model.default_prompt_name.is_some() {
                return Err(ServeConfigError::Prompts { at: second });
            }
            if let Some(Err(problem)) = model.name.as_deref().map(check_name) {
                return Err(ServeConfigError::Name {
                    at: second,
                    problem,
                });
            }
            let same = |other: &ModelConfig| model.name.is_some() && other.name == model.name;
            if let Some(first) = config.models[..second].iter().position(same) {
                let name = model.name.clone().unwrap_or_default();
                return Err(ServeConfigError::Twice {
                    name,
                    first,
                    second,
                });
            }
        }
        Ok(config)
    }
}

/// Checks the name of a model. Requests contain this name in their bodies or paths.
///
/// # Errors
/// Returns an error if the name is empty, begins or ends with white space, or has control characters.
pub fn check_name(name: &str) -> Result<(), &'static str> {
    if name.trim().is_empty() {
        return Err("it is empty; expected a name, or no `name` to use that of the folder");
    }
    if name.trim() != name {
        return Err("it begins or ends with white space; remove the white space");
    }
    match name.chars().any(char::is_control) {
        true => Err("it has control characters; leave them out"),
        false => Ok(()),
    }
}

/// Deserializes a string and parses it. A parse error then has the position of the string in the file.
fn parsed<'de, D: Deserializer<'de>, T: FromStr<Err: std::fmt::Display>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    let value = text.map(|text| text.parse().map_err(D::Error::custom));
    value.transpose()
}

struct Device(DeviceChoice);

impl<'de> Deserialize<'de> for Device {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(D::Error::custom)
    }
}

fn devices<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<DeviceChoice>, D::Error> {
    let devices = Vec::<Device>::deserialize(deserializer)?;
    Ok(devices.into_iter().map(|device| device.0).collect())
}

fn scheduler<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let name = Option::<String>::deserialize(deserializer)?;
    if let Some(name) = &name {
        schedule::served(name, &Settings::default()).map_err(D::Error::custom)?;
    }
    Ok(name)
}

fn share<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    let share = Option::<f64>::deserialize(deserializer)?;
    match share.filter(|share| !(0.001..=1000.0).contains(share)) {
        None => Ok(share),
        Some(wrong) => Err(D::Error::custom(format!(
            "`share` is {wrong}; expected a number from 0.001 to 1000"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_the_options_of_each_model() {
        let text = r#"(models: [
            (weights: "minilm", name: "small", devices: ["cuda:0", "cuda:1"], dtype: "bf16", max_queue_ms: 500, share: 2),
            (weights: "/data/writer", kv_cache_bytes: 1000000, scheduler: "no-batch", kv_dtype: "fp8"),
        ])"#;
        let config = ServeConfig::parse(text).unwrap();
        assert_eq!(
            config.models[0].devices,
            [DeviceChoice::Cuda(0), DeviceChoice::Cuda(1)]
        );
        assert_eq!(config.models[0].dtype, Some(DType::BF16));
        assert_eq!(
            (config.models[0].share, config.models[1].share),
            (Some(2.0), None)
        );
        assert_eq!(config.models[1].scheduler.as_deref(), Some("no-batch"));
        let kv_dtypes = [0, 1].map(|i: usize| config.models[i].kv_dtype);
        assert_eq!(kv_dtypes, [None, Some(KvCacheChoice::Fp8)]);
        assert_eq!(
            ServeConfig::parse(include_str!("../../examples/serve.ron")).map(|c| c.models.len()),
            Ok(2)
        );
    }

    #[test]
    fn keys_of_the_last_release_are_still_read() {
        let old = r#"(models: [(weights: "a", queue_ms: 5, kv_bytes: 7)])"#;
        let old = ServeConfig::parse(old).unwrap();
        assert_eq!(
            (old.models[0].max_queue_ms, old.models[0].kv_cache_bytes),
            (Some(5), Some(7))
        );
    }

    #[test]
    fn what_is_wrong_has_its_place() {
        let texts = [
            "(models: [",
            "(models: [])",
            "(models: [(weights: \"a\",\n  device: \"cpu\")])",
            "(models: [(weights: \"a\",\n  devices: [\"gpu\"])])",
            "(models: [(weights: \"a\", dtype: \"f8\")])",
            "(models: [(weights: \"a\", scheduler: \"pakced\")])",
            "(models: [(weights: \"a\", share: 0)])",
            "(models: [(weights: \"a\", max_queue_ms: -1)])",
            "(models: [(name: \"a\")])",
            "(models: [(weights: \"a\", model: \"a/b\")])",
            "(models: [(weights: \"a\", default_prompt: \"x\", default_prompt_name: \"y\")])",
            "(models: [(weights: \"a\", name: \"\")])",
            "(models: [(weights: \"a\"), (weights: \"b\", name: \"  \")])",
            "(models: [(weights: \"a\", name: \"x \")])",
            "(models: [(weights: \"a\", name: \"x\\ny\")])",
            "(models: [(weights: \"a\", name: \"x\"), (weights: \"b\", name: \"x\")])",
        ];
        let shown: Vec<String> = texts
            .iter()
            .map(|text| format!("{text}\n{}\n", ServeConfig::parse(text).unwrap_err()))
            .collect();
        insta::assert_snapshot!(shown.join("\n"));
    }
}
