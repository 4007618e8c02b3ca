//! A checkpoint's folder as it is published: what stands in its JSON files beside the weights.
//!
//! Hugging Face's transformers write `config.json` and `tokenizer_config.json`. sentence-transformers add `modules.json`,
//! a folder for each module, `sentence_…_config.json` and `config_sentence_transformers.json`; what is read of them and
//! which file wins is what `SentenceTransformer(DIR)` and `CrossEncoder(DIR)` of version 6.2 do. What a file asks for and
//! gemmule does not compute is an error that names it.

mod json;
mod modules;
mod score;
mod tokenizer;
mod transformer;

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::EngineError;
use crate::{
    model::{Description, EMBEDDING, Module},
    names::nearest,
    program::NEXT_LOGITS,
    runtime::weights::Found,
    tensor::SequenceEnd,
};
use json::Json;
use modules::{Entry, MAX_WIDTH, dense, dropout, entries, logit_score, normalize, pooling, splade};
pub use score::ClassScore;
use transformer::{MAX_TOKENS, Transformer};

pub(super) use tokenizer::{TokenizerSettings, cleaned_up};

/// The folder that sentence-transformers give a Pooling behind the transformer.
const POOLING: &str = "1_Pooling";

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
    /// Settings that win over those of tokenizer_config.json.
    tokenizer: Map<String, Value>,
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
    /// The token that ends a sequence, where it knows that.
    pub(super) end: Option<SequenceEnd>,
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
            tokenizer: Map::new(),
            prompts: Vec::new(),
            n_implicit_prompts: 0,
            default_prompt: None,
            score: None,
            messages: None,
        };
        let own = Json::optional(root.join("config_sentence_transformers.json"))?;
        if let Some(own) = &own {
            check_own(own)?;
        }
        match listed.is_empty() {
            false => {
                folder.read_modules(&listed, own.as_ref())?;
                folder.read_transformer()?;
            }
            true => folder.read_pooling()?,
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
            None => Err(no_config(&self.trunk)),
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
            // Of a head that the description lacks, the trunk is what can be asked for.
            let outputs = description.outputs_for(config);
            let outputs = outputs.unwrap_or_else(|_| description.default_outputs());
            let writes = outputs.contains(&NEXT_LOGITS);
            Some((description.build(config, Some(&outputs)).ok()?, writes))
        });
        match built {
            Some((model, writes)) => Inputs {
                positions: model.max_positions,
                has_segments: model.type_rows.is_some(),
                writes: writes && self.modules.is_none(),
                end: model.end,
            },
            None => {
                let positions = config.and_then(|c| c.get("max_position_embeddings")?.as_u64());
                Inputs {
                    positions: positions.and_then(|n| u32::try_from(n).ok()),
                    has_segments: true,
                    writes: false,
                    end: None,
                }
            }
        }
    }

    /// The most tokens of a text that are kept, specials included, where the folder says; `positions` are those that the
    /// model has.
    ///
    /// # Errors
    /// A `tokenizer_config.json` that is no JSON, and a length out of range.
    pub(super) fn limit(&self, positions: Option<u32>) -> Result<Option<usize>, EngineError> {
        if self.max_seq_length.is_some() {
            return Ok(self.max_seq_length);
        }
        let tokenizer = self.tokenizer_config()?;
        let key = "model_max_length";
        // Tokenizers without a limit are published with 10³⁰.
        let is_none = |v: &Value| v.as_f64().is_some_and(|n| n > f64::from(MAX_TOKENS));
        let length = match tokenizer.get(key) {
            Some(v) if is_none(v) => None,
            _ => tokenizer.count(key, MAX_TOKENS)?,
        };
        let length = length.map(|n| n as usize);
        let positions = positions.map(|n| n as usize);
        Ok(length.into_iter().chain(positions).min())
    }

    /// Whether a text that is too long loses its beginning.
    pub(super) fn cuts_the_front(&self) -> Result<bool, EngineError> {
        let tokenizer = self.tokenizer_config()?;
        match tokenizer.text("truncation_side")? {
            None | Some("right") => Ok(false),
            Some("left") => Ok(true),
            Some(_) => Err(tokenizer.wrong("truncation_side", "left or right")),
        }
    }

    /// The tokens that have these names in `tokenizer_config.json`.
    pub(super) fn special_tokens(&self, names: &[&str]) -> Result<Vec<String>, EngineError> {
        let config = self.tokenizer_config()?;
        let values = names.iter().filter_map(|name| config.get(name));
        let texts = values.filter_map(|v| v.as_str().or_else(|| v.get("content")?.as_str()));
        Ok(texts.map(str::to_owned).collect())
    }

    /// `tokenizer_config.json`, with the settings that win over it; empty where there is none.
    fn tokenizer_config(&self) -> Result<Json, EngineError> {
        let file = self.trunk.join("tokenizer_config.json");
        let mut json = match Json::optional(file.clone())? {
            Some(json) => json,
            None => Json {
                file,
                value: Value::Object(Map::new()),
            },
        };
        let Value::Object(settings) = &mut json.value else {
            return Err(json.problem("expected an object"));
        };
        settings.extend(self.tokenizer.clone());
        Ok(json)
    }

    /// Settings that win over tokenizer.json.
    ///
    /// # Errors
    /// A file that is no JSON object.
    pub(super) fn tokenizer_settings(&self) -> Result<TokenizerSettings, EngineError> {
        let map = Json::optional(self.trunk.join("special_tokens_map.json"))?;
        TokenizerSettings::new(self.tokenizer_config()?, map, self.config.as_ref())
    }

    /// The first setting of the tokenizer that sentence-transformers' files have, but for the length of texts.
    pub(super) fn tokenizer_argument(&self) -> Option<&str> {
        let mut keys = self.tokenizer.keys().map(String::as_str);
        keys.find(|key| !["model_max_length", "truncation_side"].contains(key))
    }

    fn read_modules(&mut self, listed: &[Entry], own: Option<&Json>) -> Result<(), EngineError> {
        let mut modules = Vec::new();
        for entry in &listed[1..] {
            let folder = entry.folder.clone();
            let file = self.root.join(&entry.folder).join("config.json");
            let config = || Json::read(file.clone());
            let optional = || Json::optional(file.clone());
            modules.push(match entry.class.as_str() {
                "Pooling" => {
                    let config = config()?;
                    self.pools_prompt &= config.flag("include_prompt", true)?;
                    let modes = pooling(&config)?;
                    Module::Pooling { folder, modes }
                }
                "Dense" => dense(&config()?, folder)?,
                "Normalize" => normalize(optional()?.as_ref(), folder)?,
                "Dropout" => {
                    dropout(optional()?.as_ref())?;
                    continue;
                }
                "SpladePooling" => splade(&config()?, folder)?,
                "LogitScore" => logit_score(&config()?, folder)?,
                other => {
                    let file = self.root.join("modules.json");
                    let problem = format!(
                        "the module `{other}` is not known; gemmule computes Transformer, Pooling, Dense, Dropout, Normalize, SpladePooling and LogitScore"
                    );
                    return Err(EngineError::Folder { file, problem });
                }
            });
        }
        if modules.is_empty() {
            return Ok(());
        }
        if let Some(width) = own
            .map(|o| o.count("truncate_dim", MAX_WIDTH))
            .transpose()?
            .flatten()
        {
            modules.push(Module::Truncate { width });
        }
        self.modules = Some(modules);
        Ok(())
    }

    /// Reads the pooling of a folder whose `modules.json` is missing, as text-embeddings-inference does.
    fn read_pooling(&mut self) -> Result<(), EngineError> {
        let Some(json) = Json::optional(self.root.join(POOLING).join("config.json"))? else {
            return Ok(());
        };
        let embeds = self.config.as_ref().is_some_and(|config| {
            // A description or a head that is missing is an error of the build.
            let description = Description::for_config(config).ok();
            description.is_some_and(|description| {
                let outputs = description.outputs_for(config);
                outputs.is_ok_and(|outputs| outputs.contains(&EMBEDDING))
            })
        });
        if !embeds {
            return Ok(());
        }
        self.pools_prompt = json.flag("include_prompt", true)?;
        let modes = pooling(&json)?;
        self.modules = Some(vec![
            Module::Pooling {
                folder: POOLING.to_owned(),
                modes,
            },
            Module::Normalize {
                folder: "2_Normalize".to_owned(),
            },
        ]);
        self.read_transformer()
    }

    /// Reads `sentence_bert_config.json`, which older folders have under several names.
    fn read_transformer(&mut self) -> Result<(), EngineError> {
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
        let transformer = Transformer::read(&Json::read(file.clone())?)?;
        self.max_seq_length = transformer.max_seq_length;
        self.lower_case = transformer.lower_case;
        self.messages = transformer.messages;
        self.tokenizer = transformer.tokenizer;
        if let Some(Value::Object(config)) = &mut self.config {
            config.extend(transformer.config);
        }
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

/// The error of a folder without a config.json, which names what it has instead.
pub(super) fn no_config(folder: &Path) -> EngineError {
    let file = folder.join("config.json");
    match Found::in_folder(folder) {
        Found::Nothing => {
            // Reading it says why there is none.
            let read = super::config(&file);
            read.err().unwrap_or(EngineError::NoConfig)
        }
        found => EngineError::Folder {
            file: folder.to_owned(),
            problem: format!(
                "there is no config.json; expected a checkpoint folder as published on the Hugging Face hub. It has {found}"
            ),
        },
    }
}

/// Checks the keys of `config_sentence_transformers.json`.
fn check_own(own: &Json) -> Result<(), EngineError> {
    own.check_keys(&[
        "__version__",
        "activation_fn",
        "default_prompt_name",
        "keep_in_fp32_modules",
        "max_active_dims",
        "model_type",
        "prompts",
        "requirements",
        "similarity_fn_name",
        "truncate_dim",
    ])?;
    match own.get("max_active_dims") {
        Some(_) => Err(own.wrong("max_active_dims", "null, as gemmule keeps all weights")),
        None => Ok(()),
    }
}
