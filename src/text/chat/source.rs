//! Locations of chat templates in a checkpoint folder.

use std::path::{Path, PathBuf};

use super::Json;
use crate::{files::Kind, runtime::weights::ModelFiles, text::TextError};

/// The source of a template.
pub(super) struct Source {
    pub file: PathBuf,
    pub text: String,
}

/// The templates of a folder; at least one exists.
pub(super) struct Sources {
    pub default: Option<Source>,
    pub tool_use: Option<Source>,
    /// Special tokens by their key in tokenizer_config.json.
    pub tokens: Vec<(String, Json)>,
    /// File or folder of the templates, for error messages.
    pub file: PathBuf,
}

impl Sources {
    /// Reads the templates as the library transformers does: `chat_template.jinja` and `additional_chat_templates/tool_use.jinja`, or else
    /// `chat_template` in `tokenizer_config.json`, which is a template or a list of named templates.
    pub fn read(files: &ModelFiles) -> Result<Self, TextError> {
        const CONFIG: &str = "tokenizer_config.json";
        let (folder, config) = (files.path(), files.name(CONFIG));
        let broken = |file: &Path, problem: String| TextError::ChatTemplate {
            file: file.to_owned(),
            problem,
        };
        let settings = match files.text(CONFIG, Kind::Config)? {
            Some(text) => serde_json::from_str(&text)
                .map_err(|e| broken(&config, format!("it is not JSON: {e}")))?,
            None => Json::Null,
        };
        let read = |name: &str| {
            let text = files.text(name, Kind::Config)?;
            let file = files.name(name);
            Ok::<_, TextError>(text.map(|text| Source { file, text }))
        };
        let mut default = read("chat_template.jinja")?;
        let mut tool_use = read("additional_chat_templates/tool_use.jinja")?;
        let mut file = default
            .as_ref()
            .map_or(folder, |source| &source.file)
            .to_owned();
        if default.is_none() && tool_use.is_none() {
            let named = |text: &str| Source {
                file: config.clone(),
                text: text.to_owned(),
            };
            file.clone_from(&config);
            match settings.get("chat_template") {
                Some(Json::String(text)) => default = Some(named(text)),
                Some(Json::Array(several)) => {
                    let by_name = |name: &str| {
                        let is_named =
                            |one: &&Json| one.get("name").and_then(Json::as_str) == Some(name);
                        let found = several.iter().find(is_named)?;
                        found.get("template").and_then(Json::as_str).map(named)
                    };
                    (default, tool_use) = (by_name("default"), by_name("tool_use"));
                    if default.is_none() && tool_use.is_none() {
                        return Err(broken(
                            &config,
                            "`chat_template` is a list without a template named `default`"
                                .to_owned(),
                        ));
                    }
                }
                _ => {
                    return Err(broken(
                        folder,
                        "it has neither chat_template.jinja nor `chat_template` in tokenizer_config.json; the model is not a chat model: give it a plain prompt".to_owned(),
                    ));
                }
            }
        }
        let tokens = match settings {
            Json::Object(fields) => fields.into_iter().filter_map(token).collect(),
            _ => Vec::new(),
        };
        Ok(Self {
            default,
            tool_use,
            tokens,
            file,
        })
    }
}

/// Returns a special token such as `bos_token`, published as a string or as an object.
fn token((key, value): (String, Json)) -> Option<(String, Json)> {
    if !key.ends_with("_token") {
        return None;
    }
    let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
    let text = Json::String(text.to_owned());
    Some((key, text))
}
