//! Late interaction (ColBERT): how queries and documents become tokens, and which of their vectors take part in scores.
//!
//! Settings are read from `config_sentence_transformers.json`, like `ColBERT(DIR)` of PyLate 1.6, or from `artifact.metadata` in a
//! checkpoint of stanford-nlp.

use serde_json::Value;

use super::{
    json::Json,
    modules::{Entry, MAX_WIDTH, dense},
    transformer::MAX_TOKENS,
};
use crate::{model::Module, runtime::weights::ModelFiles, text::TextError};

/// Keys that PyLate adds to `config_sentence_transformers.json`.
pub(super) const KEYS: [&str; 7] = [
    "query_prefix",
    "document_prefix",
    "query_length",
    "document_length",
    "attend_to_expansion_tokens",
    "skiplist_words",
    "do_query_expansion",
];
/// Class of PyLate's Dense in `modules.json`.
const DENSE: &str = "pylate.models.Dense.Dense";
/// Architecture of the checkpoints of stanford-nlp.
const STANFORD: &str = "HF_ColBERT";
const METADATA: &str = "artifact.metadata";
/// Name of the value that the modules of a late-interaction model read and write.
pub(super) const VALUE: &str = "token_embeddings";
/// Default prefixes and default max lengths in tokens in PyLate, for queries and for documents.
const PREFIXES: [&str; 2] = ["[Q] ", "[D] "];
const LENGTHS: [u32; 2] = [32, 180];
/// Python's `string.punctuation`, the default of `skiplist_words`.
const PUNCTUATION: &str = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~";

/// Role of a text in late interaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TextRole {
    Query,
    Document,
}

impl TextRole {
    pub(in crate::text) fn index(self) -> usize {
        match self {
            Self::Query => 0,
            Self::Document => 1,
        }
    }

    /// Returns the names of the prompts for texts of this role, in order of preference, as in sentence-transformers.
    pub fn prompt_names(self) -> &'static [&'static str] {
        match self {
            Self::Query => &["query"],
            Self::Document => &["document", "passage", "corpus"],
        }
    }

    /// Returns the name of the role, which prefixes the keys of its settings.
    pub fn name(self) -> &'static str {
        match self {
            Self::Query => "query",
            Self::Document => "document",
        }
    }
}

/// Rule for the score of a document. For each vector of the query, the max dot product with a vector of the document is computed. The rule
/// combines these max products into the score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LateScore {
    Sum,
    /// The sum divided by the number of the query's vectors.
    Mean,
}

impl LateScore {
    /// Turns `sums`, each document's sum of max products, into scores. `n` is the number of the query's vectors.
    pub fn of_sums(self, sums: &mut [f32], n: usize) {
        match self {
            Self::Sum => {}
            Self::Mean => {
                let n = n.max(1) as f32;
                sums.iter_mut().for_each(|sum| *sum /= n);
            }
        }
    }
}

/// Settings of a late-interaction model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LateInteraction {
    /// Tokens that are inserted after the first token of a query and of a document; empty for none.
    pub(in crate::text) prefixes: [String; 2],
    /// Max number of tokens of a query and of a document, prefix and special tokens included.
    pub(in crate::text) lengths: [usize; 2],
    /// Whether queries are padded to `floor` tokens. The vectors of the padding take part in scores.
    pub(in crate::text) expands: bool,
    pub(in crate::text) floor: usize,
    /// Name of the token that pads queries. If it is `None`, the tokenizer's mask token is used, or else its end-of-sequence token or
    /// padding token.
    pub(in crate::text) padding: Option<String>,
    /// Whether tokens attend to the padding of queries.
    pub(super) attends: bool,
    /// Words whose vectors do not count in scores. `skips` selects whether this applies to queries, to documents, or to both.
    pub(in crate::text) skipped: Vec<String>,
    /// Whether `skipped` applies to queries, and whether it applies to documents.
    pub(in crate::text) skips: [bool; 2],
    /// Whether a word of `skipped` that is not a token selects the unknown token. If false, such a word is ignored.
    pub(in crate::text) skips_unknown: bool,
    /// Ids of the tokens whose vectors are kept in documents; all other vectors are dropped. `None` keeps all vectors.
    pub(in crate::text) kept: Option<Vec<u32>>,
    /// Whether white space at both ends of a text is removed.
    pub(in crate::text) strips: bool,
    /// Whether queries and documents get the folder's prompt for their role by default.
    pub(in crate::text) has_role_prompts: bool,
    /// Rule for the score of a document.
    pub(super) score: LateScore,
}

impl LateInteraction {
    /// Returns whether queries are padded with tokens that no token attends to, not even the padding itself.
    pub fn hides_expansion(&self) -> bool {
        self.expands && !self.attends
    }

    /// Returns the max number of tokens of a query or a document, prefix and special tokens included.
    pub fn length(&self, role: TextRole) -> usize {
        self.lengths[role.index()]
    }

    /// Returns default settings. `lengths` are the max lengths of queries and of documents.
    pub(super) fn of_lengths(lengths: [usize; 2]) -> Self {
        Self {
            prefixes: Default::default(),
            lengths,
            expands: false,
            floor: lengths[0],
            padding: None,
            attends: false,
            skipped: Vec::new(),
            skips: [false, true],
            skips_unknown: true,
            kept: None,
            strips: true,
            has_role_prompts: false,
            score: LateScore::Sum,
        }
    }

    /// Reads PyLate's settings; `None` for a folder that has neither a key nor the model type nor a module of PyLate.
    pub(super) fn read(own: Option<&Json>, listed: &[Entry]) -> Result<Option<Self>, TextError> {
        let has_key = |own: &Json| KEYS.iter().any(|key| own.get(key).is_some());
        let is_type = |own: &Json| {
            own.get("model_type")
                .is_some_and(|found| found == "ColBERT")
        };
        let is_late = own.is_some_and(|own| has_key(own) || is_type(own))
            || listed.iter().any(|entry| entry.class == DENSE);
        if !is_late {
            return Ok(None);
        }
        let none = Json {
            file: Default::default(),
            value: Value::Null,
        };
        let own = own.unwrap_or(&none);
        let key = "similarity_fn_name";
        if own.text(key)?.is_some_and(|name| name != "MaxSim") {
            return Err(own.wrong(key, "MaxSim, the only one of a late-interaction model"));
        }
        let prefix = |at: usize| {
            let prefix = own.text(["query_prefix", "document_prefix"][at])?;
            Ok::<_, TextError>(prefix.unwrap_or(PREFIXES[at]).to_owned())
        };
        let length = |at: usize| length(own, ["query_length", "document_length"][at], at);
        let expands = own.flag("do_query_expansion", true)?;
        let lengths = [length(0)?, length(1)?];
        Ok(Some(Self {
            prefixes: [prefix(0)?, prefix(1)?],
            expands,
            attends: expands && own.flag("attend_to_expansion_tokens", false)?,
            skipped: words(own)?,
            ..Self::of_lengths(lengths)
        }))
    }

    /// Reads the settings and the projection of a checkpoint of stanford-nlp; `None` for another checkpoint.
    pub(super) fn of_stanford(
        files: &ModelFiles,
        config: Option<&Value>,
    ) -> Result<Option<(Self, Vec<Module>)>, TextError> {
        let named = config.and_then(|config| config.get("architectures")?.get(0));
        if named.is_none_or(|name| name != STANFORD) {
            return Ok(None);
        }
        // The file `artifact.metadata` must exist, because the output width of the projection is read from it.
        let json = Json::read(files, METADATA)?;
        let key = "similarity";
        if json.text(key)?.is_some_and(|name| name != "cosine") {
            return Err(json.wrong(key, "cosine"));
        }
        let width = config.and_then(|config| config.get("hidden_size")?.as_u64());
        let width = width.and_then(|width| u32::try_from(width).ok());
        let inputs = width.ok_or_else(|| TextError::Folder {
            file: files.name(super::CONFIG),
            problem: format!(
                "there is no `hidden_size`, the width that the projection of {STANFORD} reads"
            ),
        })?;
        let prefix = |key: &str, usual: &str| {
            let prefix = json.text(key)?;
            Ok::<_, TextError>(prefix.unwrap_or(usual).to_owned())
        };
        let lengths = [
            length(&json, "query_maxlen", 0)?,
            length(&json, "doc_maxlen", 1)?,
        ];
        let late = Self {
            prefixes: [
                prefix("query_token_id", "[unused0]")?,
                prefix("doc_token_id", "[unused1]")?,
            ],
            expands: true,
            attends: json.flag("attend_to_mask_tokens", false)?,
            skipped: match json.flag("mask_punctuation", true)? {
                true => punctuation(),
                false => Vec::new(),
            },
            ..Self::of_lengths(lengths)
        };
        let projection = Module::Dense {
            folder: String::new(),
            inputs,
            outputs: json.needed("dim", MAX_WIDTH)?,
            bias: false,
            activation: None,
            residual: false,
        };
        let hides_expansion = late.hides_expansion();
        let modules = vec![projection, Module::NormalizeTokens { hides_expansion }];
        Ok(Some((late, modules)))
    }
}

/// Returns the modules after the transformer of a PyLate folder.
pub(super) fn modules(
    root: &ModelFiles,
    listed: &[Entry],
    late: &LateInteraction,
) -> Result<Vec<Module>, TextError> {
    let refused = |problem: String| TextError::Folder {
        file: root.name("modules.json"),
        problem,
    };
    let mut modules = Vec::new();
    for entry in listed {
        let file = format!("{}/{}", entry.folder, super::CONFIG);
        match entry.class.as_str() {
            DENSE | "Dense" => {
                let json = Json::read(root, &file)?;
                if json.get("activation_function").is_none() {
                    return Err(json.problem("there is no `activation_function`"));
                }
                modules.push(dense(&json, entry.folder.clone(), VALUE)?);
            }
            // Token vectors are always scaled to norm 1, so this module changes nothing.
            "Normalize" => {}
            other => {
                return Err(refused(format!(
                    "the module `{other}` is not computed in a late-interaction model, which has a vector for each token; gemmule computes Transformer and Dense there"
                )));
            }
        }
    }
    if modules.is_empty() {
        let problem = format!(
            "the settings are those of a late-interaction model, and there is no Dense (`{DENSE}`) after the transformer; PyLate would add one with random weights, so save a trained model with `ColBERT.save_pretrained`"
        );
        return Err(refused(problem));
    }
    let hides_expansion = late.hides_expansion();
    modules.push(Module::NormalizeTokens { hides_expansion });
    Ok(modules)
}

fn length(json: &Json, key: &str, at: usize) -> Result<usize, TextError> {
    let length = json.count(key, MAX_TOKENS)?;
    Ok(length.unwrap_or(LENGTHS[at]) as usize)
}

fn punctuation() -> Vec<String> {
    PUNCTUATION.chars().map(String::from).collect()
}

/// Returns the words of `skiplist_words`, by default all punctuation.
fn words(own: &Json) -> Result<Vec<String>, TextError> {
    let key = "skiplist_words";
    let Some(value) = own.get(key) else {
        return Ok(punctuation());
    };
    let words = value.as_array().map(|list| list.iter());
    let words = words.and_then(|list| list.map(|word| Some(word.as_str()?.to_owned())).collect());
    words.ok_or_else(|| own.wrong(key, "a list of words"))
}
