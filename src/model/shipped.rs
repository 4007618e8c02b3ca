//! The descriptions that come with the crate, and their selection by a checkpoint's `config.json`.

use std::sync::OnceLock;

use serde_json::{Map, Value};

use super::{
    Description, ModelError, Problem,
    config::{lookup, object},
    error::{File, quoted},
};

/// Names and sources of the shipped descriptions.
macro_rules! shipped {
    ($($name:literal),*) => {
        &[$(($name, include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/models/", $name, ".ron")))),*]
    };
}

const SHIPPED: &[(&str, &str)] = shipped![
    "bert",
    "jina_bert",
    "roberta",
    "roberta_prelayernorm",
    "roformer",
    "xlm_roberta_flash",
    "xlm_roberta_xl",
    "distilbert",
    "albert",
    "electra",
    "mpnet",
    "megatron_bert",
    "rembert",
    "nomic_bert",
    "gte",
    "deberta",
    "deberta_v2",
    "modernbert",
    "modernbert_decoder",
    "neobert",
    "eurobert",
    "gemma",
    "gemma2",
    "gemma3_text",
    "clip_text",
    "gpt2",
    "openai_gpt",
    "gpt_bigcode",
    "gpt_neo",
    "llama",
    "internlm3",
    "exaone",
    "exaone4",
    "seed_oss",
    "ernie4_5",
    "helium",
    "hunyuan_v1_dense",
    "arcee",
    "nemotron",
    "glm",
    "qwen2",
    "qwen3",
    "phi3",
    "olmo",
    "olmo2",
    "olmo3",
    "starcoder2",
    "stablelm",
    "phi",
    "smollm3",
    "granite",
    "opt",
    "xglm",
    "biogpt",
    "gpt_neox",
    "gptj",
    "falcon",
    "cohere",
    "cohere2",
    "bloom",
    "mpt",
    "marian",
    "bart_classifier",
    "bart",
    "mbart",
    "m2m_100",
    "pegasus",
    "blenderbot",
    "blenderbot_small",
    "t5",
    "vae",
    "static_embedding",
    "sparse_static_embedding"
];

/// Names of [`SHIPPED`], in the same order.
const NAMES: [&str; SHIPPED.len()] = {
    let mut names = [""; SHIPPED.len()];
    let mut i = 0;
    while i < names.len() {
        names[i] = SHIPPED[i].0;
        i += 1;
    }
    names
};

/// The parsed descriptions of [`SHIPPED`], in the same order. A description is parsed when it is first needed.
static PARSED: [OnceLock<Description>; SHIPPED.len()] = [const { OnceLock::new() }; SHIPPED.len()];

/// Returns the parsed description at an index of [`SHIPPED`].
fn parsed(at: usize) -> Result<&'static Description, ModelError> {
    if let Some(known) = PARSED[at].get() {
        return Ok(known);
    }
    let (name, source) = SHIPPED[at];
    let description = Description::parse(&format!("{name}.ron"), source)?;
    Ok(PARSED[at].get_or_init(|| description))
}

impl Description {
    /// Returns a shipped description, or `None` if there is none with this name.
    pub fn shipped(name: &str) -> Option<Result<Self, ModelError>> {
        let at = NAMES.iter().position(|n| *n == name)?;
        Some(parsed(at).cloned())
    }

    /// Source text of a shipped description, as a starting point for a new one.
    pub fn shipped_source(name: &str) -> Option<&'static str> {
        let found = SHIPPED.iter().find(|(n, _)| *n == name);
        found.map(|&(_, source)| source)
    }

    /// Names that [`shipped`](Self::shipped) accepts.
    pub fn shipped_names() -> &'static [&'static str] {
        &NAMES
    }

    /// Selects the shipped description for a checkpoint by the `model_type` of its config.json, or by `architectures` if there is no
    /// `model_type`. (For such a checkpoint, transformers takes the `model_type` from the Python class that `auto_map` names.)
    ///
    /// # Errors
    /// Returns an error if no description supports the `model_type` or, without one, the `architectures`.
    pub fn for_config(config: &Value) -> Result<Self, ModelError> {
        let file = File::new("config.json", "");
        let config = object(&file, config)?;
        let known = "`gemmule models` lists the descriptions; give one, or the path of a RON file, as MODEL";
        let (description, problem) = match lookup(config, "model_type").and_then(Value::as_str) {
            Some(found) => {
                let found = found.to_owned();
                (
                    described_by(&found, config)?,
                    Problem::UnknownModelType { found },
                )
            }
            None => {
                let classes = lookup(config, "architectures").and_then(Value::as_array);
                let of_classes = |classes: &Vec<Value>| {
                    let classes: Vec<&str> = classes.iter().filter_map(Value::as_str).collect();
                    first_for(config, &classes, |description| {
                        let mut known = description.ast.architectures.iter();
                        known.any(|(name, _)| classes.contains(&name.as_str()))
                    })
                };
                let description = classes.map_or(Ok(None), of_classes)?;
                (description, Problem::NoModelType)
            }
        };
        description.ok_or_else(|| file.error_elsewhere(problem).help(known))
    }

    /// Returns whether a config.json meets the requirements that apply to all outputs.
    fn takes(&self, config: &Map<String, Value>) -> bool {
        let of_all = self.ast.requirements.iter().filter(|r| r.outputs.is_none());
        of_all
            .into_iter()
            .all(|requirement| requirement.is_met_by(config))
    }

    /// Returns an error if config.json is for another model. A config.json without a `model_type` is accepted.
    pub(super) fn check_model_type(&self, config: &Value) -> Result<(), ModelError> {
        let types = self.model_types();
        let found = lookup(object(&self.file, config)?, "model_type").and_then(Value::as_str);
        let Some(found) = found.filter(|f| !types.is_empty() && !types.iter().any(|t| t == f))
        else {
            return Ok(());
        };
        let types: Vec<&str> = types.iter().map(String::as_str).collect();
        let problem = Problem::OtherModel {
            name: self.ast.name.clone(),
            found: found.to_owned(),
            expected: quoted(&types),
        };
        let help = match described_by(found, object(&self.file, config)?)? {
            Some(right) => format!("give `{}` as MODEL, or leave MODEL out", right.name()),
            None => {
                "no description that comes with gemmule is for it; a RON file of your own may be"
                    .to_owned()
            }
        };
        Err(self.file.error_elsewhere(problem).help(help))
    }
}

/// Returns the shipped description for a `model_type`; `None` if there is none.
fn described_by(
    model_type: &str,
    config: &Map<String, Value>,
) -> Result<Option<Description>, ModelError> {
    first_for(config, &[model_type], |description| {
        description.model_types().iter().any(|t| t == model_type)
    })
}

/// Selects among the candidates: the shipped descriptions that contain one of the strings `words` and for which `is_candidate` returns
/// true. (Descriptions without these strings are not parsed.) A `model_type` can have several candidates, which require different values of
/// another key.
///
/// Returns the first candidate whose requirements `config` meets. If there is none, returns the first candidate, which later reports its
/// unmet requirement. Returns `None` if there are no candidates.
fn first_for(
    config: &Map<String, Value>,
    words: &[&str],
    is_candidate: impl Fn(&Description) -> bool,
) -> Result<Option<Description>, ModelError> {
    let words: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    let mut first = None;
    for (at, (_, source)) in SHIPPED.iter().enumerate() {
        if !words.iter().any(|word| source.contains(word)) {
            continue;
        }
        let description = parsed(at)?;
        if !is_candidate(description) {
            continue;
        }
        if description.takes(config) {
            return Ok(Some(description.clone()));
        }
        first.get_or_insert(description);
    }
    Ok(first.cloned())
}
