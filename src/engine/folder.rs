//! A checkpoint's folder as it is published: what stands in its JSON files beside the weights.
//!
//! Hugging Face's transformers write `config.json` and `tokenizer_config.json`. sentence-transformers add `modules.json`,
//! a folder for each module, `sentence_…_config.json` and `config_sentence_transformers.json`; what is read of them and
//! which file wins is what `SentenceTransformer(DIR)` and `CrossEncoder(DIR)` of version 6.2 do. What a file asks for and
//! gemmule does not compute is an error that names it.

mod json;
mod modules;
mod score;

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::EngineError;
use crate::{
    model::{Description, Module},
    names::nearest,
    program::NEXT_LOGITS,
};
use json::Json;
use modules::{Entry, dense, entries, logit_score, messages, pooling, splade};
pub use score::ClassScore;

/// A checkpoint's folder.
#[derive(Clone, Debug)]
pub struct Folder {
    root: PathBuf,
    trunk: PathBuf,
    /// `None` where there is no config.json, which a compiled model does without.
    config: Option<Value>,
    /// `None` in a folder without `modules.json`, or whose only module is the transformer.
    modules: Option<Vec<Module>>,
    /// Whether the prompt's tokens take part in pooling.
    pools_prompt: bool,
    pub(super) lower_case: bool,
    max_seq_length: Option<usize>,
    prompts: Vec<(String, String)>,
    /// Number of prompts, the first ones, that no file of the folder defines.
    n_implicit_prompts: usize,
    default_prompt: Option<String>,
    score: Option<Score>,
    pub(super) messages: Option<Messages>,
}

/// How texts become messages, where the folder's model reads conversations.
#[derive(Clone, Debug)]
pub(super) struct Messages {
    /// Whether a message's content is a list of parts, of which a text is one.
    pub(super) has_parts: bool,
    /// Values for the chat template.
    pub(super) options: Map<String, Value>,
}

/// What a model takes of tokens.
pub(super) struct Inputs {
    /// The longest sequence that it has positions for.
    pub(super) positions: Option<u32>,
    /// Whether it tells the texts of a pair apart by segment ids.
    pub(super) has_segments: bool,
    /// Whether it goes on from texts, and a pair of texts is none of its inputs.
    pub(super) writes: bool,
}

/// What stands before a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prompt<'a> {
    /// The one that the folder has for texts without a choice; none, where it has none.
    #[default]
    Default,
    /// The folder's prompt of this name. `query` and `document` are always there, if only empty.
    Named(&'a str),
    /// This text.
    Text(&'a str),
}

/// What a cross-encoder's logits go through to become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Score {
    Identity,
    Sigmoid,
    Tanh,
}

impl Score {
    /// What logits of so many labels go through unless a folder says otherwise.
    pub fn usual(n_labels: u64) -> Self {
        match n_labels {
            1 => Score::Sigmoid,
            _ => Score::Identity,
        }
    }

    /// The score of a logit.
    pub fn of(self, logit: f32) -> f32 {
        match self {
            Score::Identity => logit,
            Score::Sigmoid => 1.0 / (1.0 + (-logit).exp()),
            Score::Tanh => logit.tanh(),
        }
    }
}

impl Folder {
    /// Reads a folder's JSON files.
    ///
    /// # Errors
    /// Files that are missing or no JSON, and what they ask for that is not there.
    pub fn open(root: &Path) -> Result<Self, EngineError> {
        let listed = Json::optional(root.join("modules.json"))?;
        let listed = listed
            .as_ref()
            .map(entries)
            .transpose()?
            .unwrap_or_default();
        let trunk = match listed.first() {
            Some(entry) => root.join(&entry.folder),
            None => root.to_owned(),
        };
        let config = trunk.join("config.json");
        let config = match config.exists() {
            true => Some(super::config(&config)?),
            false => None,
        };
        let mut folder = Self {
            root: root.to_owned(),
            trunk,
            config,
            modules: None,
            pools_prompt: true,
            lower_case: false,
            max_seq_length: None,
            prompts: Vec::new(),
            n_implicit_prompts: 0,
            default_prompt: None,
            score: None,
            messages: None,
        };
        let own = Json::optional(root.join("config_sentence_transformers.json"))?;
        if !listed.is_empty() {
            folder.read_modules(&listed, own.as_ref())?;
            folder.read_lengths()?;
        }
        folder.read_prompts(own.as_ref())?;
        folder.score = folder.read_score(own.as_ref().filter(|_| !listed.is_empty()))?;
        Ok(folder)
    }

    /// Where `config.json`, the transformer's weights and its tokenizer lie.
    pub fn trunk(&self) -> &Path {
        &self.trunk
    }

    /// Where folders of modules lie.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Its `config.json`.
    ///
    /// # Errors
    /// A folder without one.
    pub fn config(&self) -> Result<&Value, EngineError> {
        match &self.config {
            Some(config) => Ok(config),
            // Reading it says why there is none.
            None => Err(super::config(&self.trunk.join("config.json"))
                .err()
                .unwrap_or(EngineError::NoConfig)),
        }
    }

    /// What is computed behind the transformer, in a sentence-transformers folder.
    pub fn modules(&self) -> Option<&[Module]> {
        self.modules.as_deref()
    }

    /// What turns logits of so many labels into scores, as `CrossEncoder.predict` does.
    pub fn score(&self, n_labels: u64) -> Score {
        self.score.unwrap_or_else(|| Score::usual(n_labels))
    }

    /// What `n` labels are called, by `id2label` of config.json as transformers reads it: `LABEL_0` and so on where it has no name.
    pub fn labels(&self, n: usize) -> Vec<String> {
        let names = self.config.as_ref().and_then(|c| c.get("id2label"));
        let name = |id: usize| names?.get(id.to_string())?.as_str().map(str::to_owned);
        let all = (0..n).map(|id| name(id).unwrap_or_else(|| format!("LABEL_{id}")));
        all.collect()
    }

    /// The prompt that a choice means.
    ///
    /// # Errors
    /// A name that the folder does not have, and a prompt that its pooling leaves out.
    pub fn prompt<'s>(&'s self, choice: Prompt<'s>) -> Result<&'s str, EngineError> {
        let name = match choice {
            Prompt::Text(text) => return self.pooled(text),
            Prompt::Named(name) => Some(name),
            Prompt::Default => self.default_prompt.as_deref(),
        };
        let Some(name) = name else {
            return Ok("");
        };
        match self.prompts.iter().find(|(n, _)| n == name) {
            Some((_, text)) => self.pooled(text),
            None => {
                let known = self.prompts.iter().map(|(n, _)| n.as_str());
                let mut known: Vec<&str> = known.collect();
                known.sort_unstable();
                Err(EngineError::NoPrompt {
                    name: name.to_owned(),
                    near: nearest(name, known.iter().copied()).map(str::to_owned),
                    known: known.join(", "),
                })
            }
        }
    }

    /// Index of the first of `names` that a file of the folder defines as a prompt.
    pub fn prompt_index(&self, names: &[&str]) -> Option<usize> {
        let own = |name: &&str| {
            let at = self.prompts.iter().position(|(n, _)| n == name)?;
            (at >= self.n_implicit_prompts).then_some(at)
        };
        names.iter().find_map(own)
    }

    /// Name of the prompt at this index.
    pub fn prompt_name(&self, index: usize) -> Option<&str> {
        self.prompts.get(index).map(|(name, _)| name.as_str())
    }

    /// Names of the prompts that a file of the folder defines, sorted.
    pub fn prompt_names(&self) -> Vec<&str> {
        let own = self.prompts.iter().skip(self.n_implicit_prompts);
        let mut names: Vec<&str> = own.map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        names
    }

    /// Whether texts become messages of a conversation.
    pub fn has_messages(&self) -> bool {
        self.messages.is_some()
    }

    fn pooled<'s>(&'s self, prompt: &'s str) -> Result<&'s str, EngineError> {
        // In a conversation a prompt is a message, which pooling leaves in.
        match self.pools_prompt || prompt.is_empty() || self.messages.is_some() {
            true => Ok(prompt),
            false => Err(EngineError::PromptLeftOut {
                folder: self.root.clone(),
                prompt: prompt.to_owned(),
            }),
        }
    }

    /// What the model takes of tokens. A description that does not come with gemmule is not known here: the config says what it
    /// can.
    pub(super) fn inputs(&self) -> Inputs {
        let config = self.config.as_ref();
        let built = config.and_then(|config| {
            let description = Description::for_config(config).ok()?;
            let writes = description.outputs_for(config).contains(&NEXT_LOGITS);
            Some((description.build(config, None).ok()?, writes))
        });
        match built {
            Some((model, writes)) => Inputs {
                positions: model.max_positions,
                has_segments: model.type_rows.is_some(),
                writes: writes && self.modules.is_none(),
            },
            None => {
                let positions = config.and_then(|c| c.get("max_position_embeddings")?.as_u64());
                Inputs {
                    positions: positions.and_then(|n| u32::try_from(n).ok()),
                    has_segments: true,
                    writes: false,
                }
            }
        }
    }

    /// The most tokens of a text that are kept, specials included, where the folder says; `positions` are those that the
    /// model has.
    ///
    /// # Errors
    /// A `tokenizer_config.json` that is no JSON.
    pub(super) fn limit(&self, positions: Option<u32>) -> Result<Option<usize>, EngineError> {
        if self.max_seq_length.is_some() {
            return Ok(self.max_seq_length);
        }
        let tokenizer = self.tokenizer_config()?;
        let length = tokenizer.as_ref().and_then(|t| t.get("model_max_length"));
        // Tokenizers without a limit are published with 10³⁰.
        let length = length.and_then(Value::as_u64);
        let length = length.map(|n| usize::try_from(n).unwrap_or(usize::MAX));
        let positions = positions.map(|n| n as usize);
        Ok(length.into_iter().chain(positions).min())
    }

    /// Whether a text that is too long loses its beginning.
    pub(super) fn cuts_the_front(&self) -> Result<bool, EngineError> {
        let Some(tokenizer) = self.tokenizer_config()? else {
            return Ok(false);
        };
        match tokenizer.text("truncation_side")? {
            None | Some("right") => Ok(false),
            Some("left") => Ok(true),
            Some(_) => Err(tokenizer.wrong("truncation_side", "left or right")),
        }
    }

    /// The tokens that have these names in `tokenizer_config.json`.
    pub(super) fn special_tokens(&self, names: &[&str]) -> Result<Vec<String>, EngineError> {
        let config = self.tokenizer_config()?;
        let values = names.iter().filter_map(|name| config.as_ref()?.get(name));
        let texts = values.filter_map(|v| v.as_str().or_else(|| v.get("content")?.as_str()));
        Ok(texts.map(str::to_owned).collect())
    }

    fn tokenizer_config(&self) -> Result<Option<Json>, EngineError> {
        Json::optional(self.trunk.join("tokenizer_config.json"))
    }

    fn read_modules(&mut self, listed: &[Entry], own: Option<&Json>) -> Result<(), EngineError> {
        let mut modules = Vec::new();
        for entry in &listed[1..] {
            let folder = entry.folder.clone();
            let config = || Json::read(self.root.join(&entry.folder).join("config.json"));
            modules.push(match entry.class.as_str() {
                "Pooling" => {
                    let config = config()?;
                    self.pools_prompt &= config.flag("include_prompt", true)?;
                    let modes = pooling(&config)?;
                    Module::Pooling { folder, modes }
                }
                "Dense" => dense(&config()?, folder)?,
                "Normalize" => Module::Normalize { folder },
                "SpladePooling" => splade(&config()?, folder)?,
                "LogitScore" => logit_score(&config()?, folder)?,
                other => {
                    let file = self.root.join("modules.json");
                    let problem = format!(
                        "the module `{other}` is not known; gemmule computes Transformer, Pooling, Dense, Normalize, SpladePooling and LogitScore"
                    );
                    return Err(EngineError::Folder { file, problem });
                }
            });
        }
        if modules.is_empty() {
            return Ok(());
        }
        if let Some(width) = own.map(|o| o.count("truncate_dim")).transpose()?.flatten() {
            modules.push(Module::Truncate { width });
        }
        self.modules = Some(modules);
        Ok(())
    }

    /// `max_seq_length`, `do_lower_case` and whether texts become messages, in the one file of several names that older folders have it in.
    fn read_lengths(&mut self) -> Result<(), EngineError> {
        let entries = std::fs::read_dir(&self.trunk).map_err(|source| EngineError::Read {
            file: self.trunk.clone(),
            source,
        })?;
        let is_it = |name: &str| name.starts_with("sentence_") && name.ends_with("_config.json");
        let mut files: Vec<PathBuf> = entries
            .filter_map(Result::ok)
            .filter(|e| e.file_name().to_str().is_some_and(is_it))
            .map(|e| e.path())
            .collect();
        files.sort();
        let [file] = files.as_slice() else {
            return match files.as_slice() {
                [] => Ok(()),
                [first, ..] => Err(EngineError::Folder {
                    file: first.clone(),
                    problem: format!(
                        "{} files are called `sentence_…_config.json`, so the length of texts is not clear; keep one",
                        files.len()
                    ),
                }),
            };
        };
        let json = Json::read(file.clone())?;
        self.max_seq_length = json.count("max_seq_length")?.map(|n| n as usize);
        self.lower_case = json.flag("do_lower_case", false)?;
        self.messages = messages(&json)?;
        Ok(())
    }

    fn read_prompts(&mut self, own: Option<&Json>) -> Result<(), EngineError> {
        // Every folder has these two.
        self.prompts = ["query", "document"]
            .map(|name| (name.to_owned(), String::new()))
            .into();
        self.n_implicit_prompts = self.prompts.len();
        let Some(own) = own else { return Ok(()) };
        let prompts = match own.get("prompts") {
            None => Vec::new(),
            Some(Value::Object(prompts)) => prompts.iter().collect(),
            Some(_) => return Err(own.wrong("prompts", "texts by name")),
        };
        let n_own = prompts.len();
        for (name, text) in prompts {
            let text = text.as_str();
            let text =
                text.ok_or_else(|| own.problem(format!("the prompt `{name}` is no text")))?;
            self.prompts.retain(|(n, _)| n != name);
            self.prompts.push((name.clone(), text.to_owned()));
        }
        self.n_implicit_prompts = self.prompts.len() - n_own;
        self.default_prompt = own.text("default_prompt_name")?.map(str::to_owned);
        let known = |name: &String| self.prompts.iter().any(|(n, _)| n == name);
        match &self.default_prompt {
            Some(name) if !known(name) => Err(own.problem(format!(
                "`default_prompt_name` is `{name}`, and there is no such prompt"
            ))),
            _ => Ok(()),
        }
    }

    /// The activation of a cross-encoder, where a file says.
    fn read_score(&self, own: Option<&Json>) -> Result<Option<Score>, EngineError> {
        let config = Json {
            file: self.trunk.join("config.json"),
            value: self.config.clone().unwrap_or_default(),
        };
        let nested = config.get("sentence_transformers").map(|value| Json {
            file: config.file.clone(),
            value: value.clone(),
        });
        let old = "sbert_ce_default_activation_function";
        let places = [
            (own, "activation_fn"),
            (nested.as_ref(), "activation_fn"),
            (Some(&config), old),
        ];
        for (json, key) in places {
            let Some(json) = json else { continue };
            return Ok(Some(match json.class(key)? {
                None => continue,
                Some("Identity") => Score::Identity,
                Some("Sigmoid") => Score::Sigmoid,
                Some("Tanh") => Score::Tanh,
                Some(_) => return Err(json.wrong(key, "Identity, Sigmoid or Tanh of torch.nn")),
            }));
        }
        Ok(None)
    }
}
