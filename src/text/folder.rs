//! A published checkpoint folder: the contents of its JSON files.
//!
//! The library transformers writes `config.json` and `tokenizer_config.json`. sentence-transformers adds `modules.json`, a folder for each
//! module, `sentence_…_config.json` and `config_sentence_transformers.json`. The keys that are read, and the precedence of files, are those
//! of `SentenceTransformer(DIR)` and `CrossEncoder(DIR)` of version 6.2. A setting that gemmule does not support is an error that names it.

mod adapters;
mod chunks;
mod config;
mod json;
mod late;
mod modules;
mod multi_vector;
mod prompts;
mod router;
mod score;
mod tokenizer;
mod transformer;

use std::path::Path;

use serde_json::{Map, Value};

use super::TextError;
use crate::{
    files::Kind,
    model::{Description, EMBEDDING, Module, Pooling},
    program::NEXT_LOGITS,
    runtime::weights::ModelFiles,
    tensor::SequenceEnd,
};
pub use chunks::ChunkPooling;
pub(super) use config::no_config;
use config::{SPARSE_STATIC_TYPE, STATIC_TYPE, check_own, parsed, static_config};
pub use config::{config, limit_context};
use json::Json;
pub use late::{LateInteraction, LateScore, TextRole};
use modules::{
    Entry, First, MAX_WIDTH, check_first, check_own_class, dense, dropout, entries, layer_norm,
    logit_score, normalize, pooling, sparse_static, splade, weighted_layers,
};
pub use prompts::Prompt;
use router::{Route, routed};
pub use score::{ClassScore, Score};
use transformer::{MAX_TOKENS, Transformer};

pub(super) use tokenizer::{TokenizerSettings, cleaned_up};

/// Folder that sentence-transformers uses for a Pooling after the transformer.
const POOLING: &str = "1_Pooling";
const CONFIG: &str = "config.json";

/// A checkpoint folder.
#[derive(Clone, Debug)]
pub struct Folder {
    /// Files of the checkpoint folder, including those of its modules.
    root: ModelFiles,
    /// Files of the transformer and its tokenizer.
    trunk: ModelFiles,
    /// Contents of config.json; `None` if the file is missing, as it may be for a compiled model.
    config: Option<Value>,
    /// Modules after the transformer; `None` if there are none. Without a `modules.json`, they are derived from the folder's other files.
    modules: Option<Vec<Module>>,
    /// The routes of a Router, and the one that is loaded; `None` without a Router.
    route: Option<Route>,
    /// Tasks for which the checkpoint has adapters.
    adapters: Vec<String>,
    /// Class of the first module.
    first: First,
    /// Whether pooling includes the tokens of the prompt.
    pools_prompt: bool,
    pub(super) lower_case: bool,
    max_seq_length: Option<usize>,
    /// Settings that take precedence over tokenizer_config.json.
    tokenizer: Map<String, Value>,
    prompts: Vec<(String, String)>,
    /// Number of entries at the beginning of `prompts` that no file of the folder defines.
    n_implicit_prompts: usize,
    default_prompt: Option<String>,
    /// Text of a default prompt that the caller or an adapter sets. It takes precedence over `default_prompt`.
    default_text: Option<String>,
    score: Option<Score>,
    pub(super) messages: Option<Messages>,
    /// Settings for late interaction; `None` for models of other kinds.
    late: Option<LateInteraction>,
}

/// Conversion of texts to messages, for a model that reads conversations.
#[derive(Clone, Debug)]
pub(super) struct Messages {
    /// Whether a message's content is a list of parts, one of which is the text.
    pub(super) has_parts: bool,
    /// Variables for the chat template.
    pub(super) options: Map<String, Value>,
}

/// Properties of a model that determine its token inputs.
pub(super) struct Inputs {
    /// Maximum number of positions.
    pub(super) positions: Option<u32>,
    /// Whether segment ids distinguish the texts of a pair.
    pub(super) has_segments: bool,
    /// Whether the model generates text, and therefore does not take pairs.
    pub(super) writes: bool,
    /// End-of-sequence token, if the model has one.
    pub(super) end: Option<SequenceEnd>,
}

impl Folder {
    /// Reads the JSON files of a folder, or the equivalent contents of a GGUF file; see [`ModelFiles::open`].
    ///
    /// # Errors
    /// Returns an error if a file is missing or not JSON, refers to a file that does not exist, or has a setting that is not supported.
    pub fn open(root: &Path) -> Result<Self, TextError> {
        Self::of(ModelFiles::open(root)?)
    }

    /// Reads the JSON files of a model.
    ///
    /// # Errors
    /// Returns the errors of [`open`](Self::open).
    pub fn of(root: ModelFiles) -> Result<Self, TextError> {
        Self::of_task(root, None)
    }

    /// Reads the JSON files of a folder for a task such as `query` or `document`, which chooses the pipeline (route) of a Router, or an
    /// adapter of the weights. Without a task, the Router's default route is read, and no adapter is used.
    ///
    /// # Errors
    /// Returns the errors of [`open`](Self::open), and an error if the folder distinguishes no tasks or has no route or adapter for `task`.
    pub fn open_for(root: &Path, task: Option<&str>) -> Result<Self, TextError> {
        Self::of_task(ModelFiles::open(root)?, task)
    }

    fn of_task(root: ModelFiles, task: Option<&str>) -> Result<Self, TextError> {
        let listed = Json::optional(&root, "modules.json")?;
        let (listed, route) = match listed.as_ref().map(entries).transpose()? {
            None => (Vec::new(), None),
            Some(listed) => {
                let (listed, route) = routed(&root, listed, task)?;
                check_first(root.name("modules.json"), &listed)?;
                (listed, route)
            }
        };
        let trunk = match listed.first() {
            Some(entry) => root.below(&entry.folder),
            None => root.clone(),
        };
        let first = First::of(&listed);
        let config = match first {
            First::Static => static_config(&trunk, STATIC_TYPE).transpose(),
            First::SparseStatic => {
                sparse_static(&Json::read(&trunk, CONFIG)?)?;
                static_config(&trunk, SPARSE_STATIC_TYPE).transpose()
            }
            First::Transformer => {
                let text = trunk.text(CONFIG, Kind::Config)?;
                text.map(|text| parsed(&trunk.name(CONFIG), &text))
            }
        };
        let mut config = config.transpose()?;
        let of_adapter = task.filter(|_| route.is_none());
        let adapters = adapters::chosen(&root, config.as_mut(), of_adapter)?;
        check_own_class(root.name("modules.json"), &listed, !adapters.is_empty())?;
        if let (Some(task), true) = (of_adapter, adapters.is_empty()) {
            return Err(TextError::NoTasks {
                folder: root.path().to_owned(),
                task: task.to_owned(),
            });
        }
        let own = Json::optional(&root, "config_sentence_transformers.json")?;
        let mut folder = Self {
            root,
            trunk,
            config,
            modules: None,
            route,
            adapters,
            first,
            pools_prompt: true,
            lower_case: false,
            max_seq_length: None,
            tokenizer: Map::new(),
            prompts: Vec::new(),
            n_implicit_prompts: 0,
            default_prompt: None,
            default_text: None,
            score: None,
            messages: None,
            late: None,
        };
        if let Some(own) = &own {
            check_own(own)?;
        }
        match listed.is_empty() {
            false => {
                folder.read_modules(&listed, own.as_ref())?;
                if first == First::Transformer {
                    folder.read_transformer()?;
                }
            }
            true => folder.read_without_modules()?,
        }
        folder.read_prompts(own.as_ref())?;
        folder.read_instruction();
        folder.score = folder.read_score(own.as_ref().filter(|_| !listed.is_empty()))?;
        Ok(folder)
    }

    /// Returns the folder with `config.json`, the transformer's weights and its tokenizer, or the GGUF file that has them.
    pub fn trunk(&self) -> &Path {
        self.trunk.path()
    }

    /// Returns the files of the transformer and its tokenizer.
    pub fn files(&self) -> &ModelFiles {
        &self.trunk
    }

    /// Returns the files of the checkpoint folder, including those of its modules.
    pub fn root_files(&self) -> &ModelFiles {
        &self.root
    }

    /// Returns the path of the model: the folder that contains the module folders, or a GGUF file.
    pub fn root(&self) -> &Path {
        self.root.path()
    }

    /// Returns the contents of `config.json`.
    ///
    /// # Errors
    /// Returns an error if the folder lacks the file.
    pub fn config(&self) -> Result<&Value, TextError> {
        match &self.config {
            Some(config) => Ok(config),
            None => Err(no_config(self.trunk.path())),
        }
    }

    /// Returns the modules after the transformer; `None` if there are none.
    pub fn modules(&self) -> Option<&[Module]> {
        self.modules.as_deref()
    }

    /// Returns the settings for late interaction; `None` for models of other kinds.
    pub fn late_interaction(&self) -> Option<&LateInteraction> {
        self.late.as_ref()
    }

    /// Returns the rule that combines the max dot products of a query's vectors into a score. The settings for late interaction contain the
    /// rule. Models that have token vectors but no such settings (FlagEmbedding) use the mean.
    pub fn late_score(&self) -> LateScore {
        match &self.late {
            Some(late) => late.score,
            None => LateScore::Mean,
        }
    }

    /// Returns the activation for logits of `n_labels` labels, as `CrossEncoder.predict` chooses it.
    pub fn score(&self, n_labels: u64) -> Score {
        self.score.unwrap_or_else(|| Score::usual(n_labels))
    }

    /// Returns the names of `n` labels from `id2label` of config.json. As in the library transformers, the label with id `i` is called
    /// `LABEL_i` if it has no name.
    pub fn labels(&self, n: usize) -> Vec<String> {
        let names = self.config.as_ref().and_then(|c| c.get("id2label"));
        let name = |id: usize| names?.get(id.to_string())?.as_str().map(str::to_owned);
        let all = (0..n).map(|id| name(id).unwrap_or_else(|| format!("LABEL_{id}")));
        all.collect()
    }

    /// Returns the properties of the model that determine its token inputs. They come from the shipped description for config.json. If none
    /// fits, the number of positions is read from config.json, and the other properties have defaults.
    pub(super) fn inputs(&self) -> Inputs {
        let config = self.config.as_ref();
        let built = config.and_then(|config| {
            let description = Description::for_config(config).ok()?;
            // If the description lacks the checkpoint's head, the outputs of the trunk are used.
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

    /// Returns the maximum number of tokens of a text, including special tokens; `None` if there is no limit. `positions` is the maximum
    /// number of tokens that the model reads.
    ///
    /// # Errors
    /// Returns an error if `tokenizer_config.json` is not JSON, or if a length is out of range.
    pub(super) fn limit(&self, positions: Option<u32>) -> Result<Option<usize>, TextError> {
        if self.max_seq_length.is_some() {
            return Ok(self.max_seq_length);
        }
        let tokenizer = self.tokenizer_config()?;
        let key = "model_max_length";
        // Published tokenizers without a limit have a maximum length of 10³⁰.
        let is_none = |v: &Value| v.as_f64().is_some_and(|n| n > f64::from(MAX_TOKENS));
        let length = match tokenizer.get(key) {
            Some(v) if is_none(v) => None,
            _ => tokenizer.count(key, MAX_TOKENS)?,
        };
        let length = length.map(|n| n as usize);
        let positions = positions.map(|n| n as usize);
        Ok(length.into_iter().chain(positions).min())
    }

    /// Returns whether the tokenizer adds special tokens.
    pub(super) fn adds_special(&self) -> bool {
        self.first == First::Transformer
    }

    /// Returns whether a text that is too long is truncated at its beginning.
    pub(super) fn cuts_the_front(&self) -> Result<bool, TextError> {
        let tokenizer = self.tokenizer_config()?;
        match tokenizer.text("truncation_side")? {
            None | Some("right") => Ok(false),
            Some("left") => Ok(true),
            Some(_) => Err(tokenizer.wrong("truncation_side", "left or right")),
        }
    }

    /// Returns the tokens that `tokenizer_config.json` assigns to `names`.
    pub(super) fn special_tokens(&self, names: &[&str]) -> Result<Vec<String>, TextError> {
        let config = self.tokenizer_config()?;
        let values = names.iter().filter_map(|name| config.get(name));
        let texts = values.filter_map(|v| v.as_str().or_else(|| v.get("content")?.as_str()));
        Ok(texts.map(str::to_owned).collect())
    }

    /// Returns the settings of tokenizer_config.json, overridden by the tokenizer settings in the files of sentence-transformers. A missing
    /// tokenizer_config.json counts as empty. For a StaticEmbedding, it is not read.
    fn tokenizer_config(&self) -> Result<Json, TextError> {
        const NAME: &str = "tokenizer_config.json";
        let stored = match self.first {
            First::Static => None,
            First::Transformer | First::SparseStatic => Json::optional(&self.trunk, NAME)?,
        };
        let mut json = match stored {
            Some(json) => json,
            None => Json {
                file: self.trunk.name(NAME),
                value: Value::Object(Map::new()),
            },
        };
        let Value::Object(settings) = &mut json.value else {
            return Err(json.problem("expected an object"));
        };
        settings.extend(self.tokenizer.clone());
        Ok(json)
    }

    /// Returns the settings that take precedence over tokenizer.json.
    ///
    /// # Errors
    /// Returns an error if tokenizer_config.json or special_tokens_map.json is not a JSON object.
    pub(super) fn tokenizer_settings(&self) -> Result<TokenizerSettings, TextError> {
        let map = match self.first {
            First::Static => None,
            First::Transformer | First::SparseStatic => {
                Json::optional(&self.trunk, "special_tokens_map.json")?
            }
        };
        TokenizerSettings::new(self.tokenizer_config()?, map, self.config.as_ref())
    }

    /// Returns the first key of the tokenizer settings in sentence-transformers' files, skipping the keys for truncation.
    pub(super) fn tokenizer_argument(&self) -> Option<&str> {
        let mut keys = self.tokenizer.keys().map(String::as_str);
        keys.find(|key| !["model_max_length", "truncation_side"].contains(key))
    }

    fn read_modules(&mut self, listed: &[Entry], own: Option<&Json>) -> Result<(), TextError> {
        if multi_vector::is_multi_vector(own, listed) {
            let file = self.transformer_file()?;
            let (late, modules) = multi_vector::read(&self.root, own, listed, file.as_ref())?;
            (self.late, self.modules) = (Some(late), Some(modules));
            return Ok(());
        }
        self.late = LateInteraction::read(own, listed)?;
        if let Some(late) = &self.late {
            self.modules = Some(late::modules(&self.root, &listed[1..], late)?);
            return Ok(());
        }
        let mut modules = Vec::new();
        if self.first == First::Static {
            modules.push(Module::Pooling {
                folder: "0_StaticEmbedding".to_owned(),
                modes: vec![Pooling::Mean],
                after_prompt: false,
            });
        }
        for entry in &listed[1..] {
            let folder = entry.folder.clone();
            let file = format!("{}/{CONFIG}", entry.folder);
            let config = || Json::read(&self.root, &file);
            let optional = || Json::optional(&self.root, &file);
            modules.push(match entry.class.as_str() {
                "Pooling" => {
                    let config = config()?;
                    let (modes, after_prompt) = pooling(&config)?;
                    self.pools_prompt &= !after_prompt;
                    Module::Pooling {
                        folder,
                        modes,
                        after_prompt,
                    }
                }
                "WeightedLayerPooling" if !modules.is_empty() => {
                    let file = self.root.name("modules.json");
                    let problem = "the module `WeightedLayerPooling` follows another module than the Transformer; expected it right after that".to_owned();
                    return Err(TextError::Folder { file, problem });
                }
                "WeightedLayerPooling" => {
                    // Without this setting, the Transformer does not pass the hidden states of layers to the module, so the module has no
                    // effect.
                    let key = "output_hidden_states";
                    let gives = self.config.as_ref().and_then(|config| config.get(key));
                    if gives != Some(&Value::Bool(true)) {
                        continue;
                    }
                    weighted_layers(&config()?, &self.root.below(&folder), folder)?
                }
                "Dense" => dense(&config()?, folder, EMBEDDING)?,
                "LayerNorm" => layer_norm(&config()?, folder)?,
                "Normalize" => normalize(optional()?.as_ref(), folder)?,
                "Dropout" => {
                    dropout(optional()?.as_ref())?;
                    continue;
                }
                "SpladePooling" => splade(&config()?, folder)?,
                "LogitScore" => logit_score(&config()?, folder)?,
                other => {
                    let file = self.root.name("modules.json");
                    let problem = format!(
                        "the module `{other}` is not known; gemmule computes Transformer, StaticEmbedding, SparseStaticEmbedding, Pooling, WeightedLayerPooling, Dense, Dropout, LayerNorm, Normalize, SpladePooling and LogitScore"
                    );
                    return Err(TextError::Folder { file, problem });
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

    /// Reads the settings for late interaction, or else the pooling, of a folder without `modules.json`.
    fn read_without_modules(&mut self) -> Result<(), TextError> {
        match LateInteraction::of_stanford(&self.root, self.config.as_ref())? {
            Some((late, modules)) => {
                (self.late, self.modules) = (Some(late), Some(modules));
                Ok(())
            }
            None => self.read_pooling(),
        }
    }

    /// Reads the pooling of a folder without `modules.json`, as text-embeddings-inference does.
    fn read_pooling(&mut self) -> Result<(), TextError> {
        let Some(json) = Json::optional(&self.root, &format!("{POOLING}/{CONFIG}"))? else {
            return Ok(());
        };
        let embeds = self.config.as_ref().is_some_and(|config| {
            // A missing description or head is reported when the engine is built.
            let description = Description::for_config(config).ok();
            description.is_some_and(|description| {
                let outputs = description.outputs_for(config);
                outputs.is_ok_and(|outputs| outputs.contains(&EMBEDDING))
            })
        });
        if !embeds {
            return Ok(());
        }
        let (modes, after_prompt) = pooling(&json)?;
        self.pools_prompt = !after_prompt;
        self.modules = Some(vec![
            Module::Pooling {
                folder: POOLING.to_owned(),
                modes,
                after_prompt,
            },
            Module::Normalize {
                folder: "2_Normalize".to_owned(),
            },
        ]);
        self.read_transformer()
    }

    /// Reads `sentence_bert_config.json`, which has other names in older folders.
    fn transformer_file(&self) -> Result<Option<Json>, TextError> {
        let paths = self.trunk.paths().map_err(|source| TextError::Read {
            file: self.trunk.path().to_owned(),
            source,
        })?;
        let is_it = |name: &&str| name.starts_with("sentence_") && name.ends_with("_config.json");
        let names = paths.iter().filter_map(|path| path.file_name()?.to_str());
        let mut files: Vec<&str> = names.filter(is_it).collect();
        files.sort_unstable();
        let &[file] = files.as_slice() else {
            return match files.as_slice() {
                [] => Ok(None),
                [first, ..] => Err(TextError::Folder {
                    file: self.trunk.name(first),
                    problem: format!(
                        "{} files match `sentence_…_config.json`, so the maximum text length is ambiguous; keep one of them",
                        files.len()
                    ),
                }),
            };
        };
        Json::read(&self.trunk, file).map(Some)
    }

    fn read_transformer(&mut self) -> Result<(), TextError> {
        let Some(json) = self.transformer_file()? else {
            return self.settle_lengths();
        };
        // The settings of late interaction in this file are read with the modules.
        let is_multi = self.late.as_ref().is_some_and(|late| late.has_role_prompts);
        let transformer = Transformer::read(&json, is_multi)?;
        self.max_seq_length = transformer.max_seq_length;
        self.lower_case = transformer.lower_case;
        self.messages = transformer.messages;
        self.tokenizer = transformer.tokenizer;
        if let Some(Value::Object(config)) = &mut self.config {
            config.extend(transformer.config);
        }
        self.settle_lengths()
    }

    /// Returns the activation of a cross-encoder, if a file sets it.
    fn read_score(&self, own: Option<&Json>) -> Result<Option<Score>, TextError> {
        let config = Json {
            file: self.trunk.name(CONFIG),
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
