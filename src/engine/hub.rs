//! Downloads of models from the Hugging Face hub: selects the files of a model that gemmule reads, and fetches them into the cache
//! ([`fetch`]).
//!
//! A repository may contain the same model in several frameworks' formats. Only the files that [`Folder`](crate::text::Folder) and the
//! weights need are downloaded.

use std::{cell::RefCell, collections::BTreeSet, path::Path, path::PathBuf};

use serde_json::Value;

use super::EngineError;
use crate::{
    files::{self, Kind},
    model::Description,
    runtime::weights::{check_quantization, gguf_models, gguf_parts, gguf_stem},
};

pub use gemmule_hub::{ENDPOINT, Event, Hub, HubError, ModelId, Network, Progress, Proxies, Token};

const MODULES: &str = "modules.json";
const ROUTER: &str = "router_config.json";

/// Files to fetch from the folder that has `modules.json`.
const OF_ROOT: [&str; 4] = [
    MODULES,
    ROUTER,
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
];

/// Files to fetch from the folder of the transformer.
const OF_TRUNK: [&str; 9] = [
    "artifact.metadata",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
];

/// Tokenizer files to fetch if there is no `tokenizer.json`. gemmule cannot read some of them, but fetches them to name them in an error
/// message.
const OTHER_TOKENIZERS: [&str; 8] = [
    "source.spm",
    "target.spm",
    "sentencepiece.bpe.model",
    "vocab.json",
    "spiece.model",
    "tokenizer.model",
    "vocab.txt",
    "merges.txt",
];

/// Names of a single weight file or of the index of sharded weights, in order of preference.
const WEIGHTS: [&str; 4] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];

/// File names, without extension, of heads whose weights are in separate files.
const HEADS: [&str; 2] = ["sparse_linear", "colbert_linear"];

/// Extensions of weight files, including those that gemmule cannot read. If a model has no readable weights, the error lists its files with
/// these extensions.
const ENDINGS: [&str; 9] = [
    ".safetensors",
    ".gguf",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
];

/// The part of a model to fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Files {
    /// All files that gemmule reads.
    All,
    /// The configuration, which determines the program, without weights and tokenizer.
    Config,
}

/// Fetches the files of a model that gemmule reads, and returns their folder. Files in the cache are not fetched again.
///
/// Each GGUF file of a repository is a model. It is selected by its name or its quantization after a colon: `org/name:NAME.gguf`,
/// `org/name:Q8_0`. Without a selection, a repository's only GGUF file is fetched, if there are no other weights. For a GGUF file, the
/// returned path is that of the file.
///
/// # Errors
/// Returns the errors of the hub, and an error if the model has no supported weights or if the selection matches no GGUF file or is
/// ambiguous. An unsupported quantization is refused before the weights are downloaded.
pub fn fetch(
    hub: &Hub,
    id: &ModelId,
    files: Files,
    progress: Progress<'_>,
) -> Result<PathBuf, EngineError> {
    fetch_checked(hub, id, files, &|_| Ok(()), progress)
}

/// Like [`fetch`], but also checks that gemmule has a description for the `model_type` in config.json.
///
/// # Errors
/// Returns the errors of [`fetch`], and an error if the `model_type` has no description. The weights are not downloaded in that case.
pub(crate) fn fetch_described(
    hub: &Hub,
    id: &ModelId,
    files: Files,
    progress: Progress<'_>,
) -> Result<PathBuf, EngineError> {
    let check = |config: &Value| Ok(Description::for_config(config).map(|_| ())?);
    fetch_checked(hub, id, files, &check, progress)
}

/// Fetches the files of a model. Calls `check` with its config.json before the tokenizer and the weights are fetched.
fn fetch_checked(
    hub: &Hub,
    id: &ModelId,
    files: Files,
    check: &dyn Fn(&Value) -> Result<(), EngineError>,
    progress: Progress<'_>,
) -> Result<PathBuf, EngineError> {
    let listed = RefCell::new(Vec::new());
    let refused = RefCell::new(None);
    let wanted = |names: &[&str], folder: &Path| {
        *listed.borrow_mut() = names.iter().map(|&name| name.to_owned()).collect();
        match gguf(names, id.file()) {
            Gguf::Model(name) => gguf_parts(name),
            Gguf::Unclear(_) => Vec::new(),
            Gguf::No => {
                let config = wanted(names, folder, Files::Config);
                let is_absent = |name: &String| !folder.join(name).is_file();
                if files == Files::Config || config.iter().any(is_absent) {
                    return config;
                }
                if let Err(error) = check_config(names, folder, check) {
                    *refused.borrow_mut() = Some(error);
                    return config;
                }
                wanted(names, folder, files)
            }
        }
    };
    let folder = hub.snapshot_by(id, wanted, progress)?;
    if let Some(error) = refused.into_inner() {
        return Err(error);
    }
    let names = listed.into_inner();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    match gguf(&names, id.file()) {
        Gguf::Model(name) => return Ok(folder.join(name)),
        Gguf::Unclear(known) => {
            return Err(EngineError::HubGguf {
                model: id.to_string(),
                is_named: id.file().is_some(),
                known: known.into_iter().map(str::to_owned).collect(),
            });
        }
        Gguf::No => {}
    }
    let has_weights = trunks(&folder).iter().all(|trunk| {
        let is_there = |name: &str| names.contains(&format!("{trunk}{name}").as_str());
        // A folder with an adapter passes, because opening it returns a better error, which names the adapter's base model.
        WEIGHTS.iter().any(|name| is_there(name)) || is_there("adapter_config.json")
    });
    if files == Files::All && !has_weights {
        let is_other = |name: &&&str| ENDINGS.iter().any(|ending| name.ends_with(ending));
        let others = names.iter().filter(is_other).take(3);
        return Err(EngineError::HubWeights {
            model: id.to_string(),
            found: others.map(|&name| name.to_owned()).collect(),
        });
    }
    Ok(folder)
}

/// Checks the config.json and the quantization of a model. A file that cannot be parsed is not an error here, because the code that loads
/// the model reports it.
fn check_config(
    names: &[&str],
    folder: &Path,
    check: &dyn Fn(&Value) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    let trunks = trunks(folder);
    for trunk in &trunks {
        let has = |name: &str| names.contains(&format!("{trunk}{name}").as_str());
        let folder = folder.join(trunk);
        // A folder with an adapter is not checked here, because opening it returns an error that names the adapter's base model.
        if has("config.json")
            && !has("adapter_config.json")
            && let Some(config) = json(&folder.join("config.json"), Kind::Config)
            // Some routes of a Router are static embeddings. Their config.json has no `model_type` and is not checked.
            && (trunks.len() == 1 || config.get("model_type").is_some())
        {
            check(&config)?;
            check_quantization(&folder)?;
        }
    }
    Ok(())
}

/// The choice among the GGUF files of a repository.
#[derive(Debug, PartialEq, Eq)]
enum Gguf<'n> {
    /// The selected model, given by the name of its first file.
    Model(&'n str),
    /// No file matches the given name, several matching names are equally short, or there are several files and no name is given. Holds the
    /// names of all GGUF models.
    Unclear(Vec<&'n str>),
    /// No GGUF file is used, because no name is given and the repository has other weights or no GGUF file.
    No,
}

/// Selects a GGUF file by its name, or by the end of its name without extension, such as `Q8_0`. If several match, the shortest name wins.
fn gguf<'n>(names: &[&'n str], file: Option<&str>) -> Gguf<'n> {
    let known = gguf_models(names);
    let Some(file) = file else {
        return match known.as_slice() {
            _ if names
                .iter()
                .any(|name| WEIGHTS.contains(name) || *name == MODULES) =>
            {
                Gguf::No
            }
            [] => Gguf::No,
            [one] => Gguf::Model(one),
            _ => Gguf::Unclear(known),
        };
    };
    let wanted = file.to_ascii_lowercase();
    let is_it = |name: &&&str| {
        let name = name.to_ascii_lowercase();
        let stem = gguf_stem(&name);
        let ends = stem.strip_suffix(wanted.as_str());
        name == wanted || ends.is_some_and(|before| before.ends_with(['-', '.', '/']))
    };
    let mut found: Vec<&str> = known.iter().filter(is_it).copied().collect();
    found.sort_by_key(|name| name.len());
    match found.as_slice() {
        [one] => Gguf::Model(one),
        [one, second, ..] if one.len() < second.len() => Gguf::Model(one),
        _ => Gguf::Unclear(known),
    }
}

/// Returns the names of the files to fetch. Must be called again after these are fetched, because `modules.json` and the index of the
/// weights name further files.
fn wanted(names: &[&str], folder: &Path, files: Files) -> Vec<String> {
    let has = |name: &str| names.contains(&name);
    if has(MODULES) && !folder.join(MODULES).is_file() {
        return vec![MODULES.to_owned()];
    }
    let mut wanted: Vec<String> = OF_ROOT.map(str::to_owned).into();
    for modules in pipelines(folder) {
        let (trunk, modules) = match modules.split_first() {
            Some((trunk, modules)) => (trunk.as_str(), modules),
            None => ("", &[][..]),
        };
        wanted.extend(OF_TRUNK.map(|name| format!("{trunk}{name}")));
        let is_length = |name: &&&str| {
            let name = name.strip_prefix(trunk);
            name.is_some_and(|name| {
                name.starts_with("sentence_")
                    && name.ends_with("_config.json")
                    && !name.contains('/')
            })
        };
        wanted.extend(names.iter().filter(is_length).map(|&name| name.to_owned()));
        for module in modules {
            wanted.extend(["config.json", ROUTER].map(|name| format!("{module}{name}")));
        }
        if files == Files::All {
            match has(&format!("{trunk}tokenizer.json")) {
                true => wanted.push(format!("{trunk}tokenizer.json")),
                false => wanted.extend(OTHER_TOKENIZERS.map(|name| format!("{trunk}{name}"))),
            }
            for stem in HEADS {
                let both = [".safetensors", ".pt"].map(|ending| format!("{trunk}{stem}{ending}"));
                wanted.extend(both.into_iter().find(|name| has(name)));
            }
            wanted.extend(weights(&has, folder, trunk));
            for module in modules {
                wanted.extend(weights(&has, folder, module));
            }
        }
    }
    let wanted: BTreeSet<String> = wanted.into_iter().filter(|name| has(name)).collect();
    wanted.into_iter().collect()
}

/// Returns the names of the weight files under `prefix`: a single file, or an index and the shards that it lists.
fn weights(has: &impl Fn(&str) -> bool, folder: &Path, prefix: &str) -> Vec<String> {
    let names = WEIGHTS.iter().map(|name| format!("{prefix}{name}"));
    let Some(name) = names.into_iter().find(|name| has(name)) else {
        return Vec::new();
    };
    let file = folder.join(&name);
    let mut wanted = vec![name];
    if wanted[0].ends_with(".index.json")
        && let Some(index) = json(&file, Kind::ShardIndex)
        && let Some(map) = index.get("weight_map").and_then(Value::as_object)
    {
        let shards: BTreeSet<&str> = map.values().filter_map(Value::as_str).collect();
        wanted.extend(shards.into_iter().map(|shard| format!("{prefix}{shard}")));
    }
    wanted
}

/// Returns the folders of the transformer modules, as prefixes of file names such as `0_Transformer/`: one folder, or one for each route of
/// a Router.
fn trunks(folder: &Path) -> BTreeSet<String> {
    let first = |modules: Vec<String>| modules.into_iter().next().unwrap_or_default();
    pipelines(folder).into_iter().map(first).collect()
}

/// Returns the folders of the modules of each pipeline in `modules.json`, as prefixes of file names. There is one pipeline, or one for each
/// route of a Router. The first folder of a pipeline is that of the transformer. A malformed file is ignored here, because
/// [`Folder`](crate::text::Folder) reports it.
fn pipelines(folder: &Path) -> Vec<Vec<String>> {
    let list = json(&folder.join(MODULES), Kind::Config);
    let list = list.as_ref().and_then(Value::as_array);
    let paths = list.into_iter().flatten();
    let paths = paths.filter_map(|module| module.get("path")?.as_str());
    let prefixes = paths.map(|path| match path {
        "" | "." => String::new(),
        path => format!("{path}/"),
    });
    let prefixes: Vec<String> = prefixes.collect();
    let router = |(at, prefix): (usize, &String)| {
        let file = folder.join(format!("{prefix}{ROUTER}"));
        let router = json(&file, Kind::Config)?;
        Some((at, router.get("structure")?.as_object()?.clone()))
    };
    let Some((at, routes)) = prefixes.iter().enumerate().find_map(router) else {
        return vec![prefixes];
    };
    let route = |modules: &Value| {
        let modules = modules.as_array().into_iter().flatten();
        let modules = modules.filter_map(|module| module.as_str());
        let modules = modules.map(|module| format!("{}{module}/", prefixes[at]));
        let mut all = prefixes.clone();
        all.splice(at..=at, modules);
        all
    };
    routes.values().map(route).collect()
}

/// Reads a JSON file. Returns `None` if it cannot be parsed, because the code that loads the model reports that.
fn json(file: &Path, kind: Kind) -> Option<Value> {
    let text = files::text(file, kind).ok()?;
    serde_json::from_str(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the files to fetch from a repository with files `names`. `contents` has the names and texts of files that were already
    /// fetched.
    fn chosen(names: &[&str], contents: &[(&str, &str)], files: Files) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in contents {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        wanted(names, folder.path(), files)
    }

    #[test]
    fn only_the_files_of_one_format_are_chosen() {
        let names = [
            ".gitattributes",
            "1_Pooling/config.json",
            "README.md",
            "config.json",
            "config_sentence_transformers.json",
            "flax_model.msgpack",
            "model.safetensors",
            "modules.json",
            "onnx/model.onnx",
            "openvino/openvino_model.bin",
            "pytorch_model.bin",
            "rust_model.ot",
            "sentence_bert_config.json",
            "special_tokens_map.json",
            "spiece.model",
            "tf_model.h5",
            "tokenizer.json",
            "tokenizer_config.json",
            "vocab.txt",
        ];
        assert_eq!(chosen(&names, &[], Files::All), ["modules.json"]);
        let modules = r#"[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Normalize"}]"#;
        let modules = [("modules.json", modules)];
        let config = [
            "1_Pooling/config.json",
            "config.json",
            "config_sentence_transformers.json",
            "modules.json",
            "sentence_bert_config.json",
            "special_tokens_map.json",
            "tokenizer_config.json",
        ];
        assert_eq!(chosen(&names, &modules, Files::Config), config);
        let mut all = [&config[..], &["model.safetensors", "tokenizer.json"]].concat();
        all.sort_unstable();
        assert_eq!(chosen(&names, &modules, Files::All), all);
    }

    #[test]
    fn the_index_of_the_weights_names_the_shards() {
        let names = [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "original/consolidated.pth",
            "pytorch_model.bin",
        ];
        let index = "model.safetensors.index.json";
        assert_eq!(chosen(&names, &[], Files::All), ["config.json", index]);
        let map = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors", "c": "../../evil", "d": "absent"}}"#;
        let all = chosen(&names, &[(index, map)], Files::All);
        assert_eq!(all, names[..4]);
        assert_eq!(chosen(&names, &[(index, "{")], Files::All).len(), 2);
    }

    #[test]
    fn a_router_has_the_files_of_its_routes() {
        let names = [
            "document_0_MLMTransformer/config.json",
            "document_0_MLMTransformer/model.safetensors",
            "document_1_SpladePooling/config.json",
            "modules.json",
            "other/model.safetensors",
            "query_0_SparseStaticEmbedding/config.json",
            "query_0_SparseStaticEmbedding/model.safetensors",
            "router_config.json",
        ];
        let router = r#"{"structure": {"query": ["query_0_SparseStaticEmbedding"],
            "document": ["document_0_MLMTransformer", "document_1_SpladePooling"]}, "parameters": {"default_route": "document"}}"#;
        let modules = ("modules.json", r#"[{"path": ""}]"#);
        let first = chosen(&names, &[modules], Files::All);
        assert_eq!(first, ["modules.json", "router_config.json"]);
        let all = chosen(
            &names,
            &[modules, ("router_config.json", router)],
            Files::All,
        );
        let expected = [&names[..4], &names[5..]].concat();
        assert_eq!(all, expected);
        let names = [
            "1_Router/document_0_Dense/config.json",
            "1_Router/document_0_Dense/model.safetensors",
            "1_Router/query_0_Dense/model.safetensors",
            "1_Router/router_config.json",
            "config.json",
            "modules.json",
        ];
        let modules = ("modules.json", r#"[{"path": ""}, {"path": "1_Router"}]"#);
        assert_eq!(chosen(&names, &[modules], Files::All), names[3..]);
    }

    #[test]
    fn modules_and_transformers_in_folders_have_their_files() {
        let names = [
            "0_Transformer/config.json",
            "0_Transformer/pytorch_model.bin",
            "0_Transformer/sentence_bert_config.json",
            "0_Transformer/vocab.txt",
            "2_Dense/config.json",
            "2_Dense/model.safetensors",
            "2_Dense/pytorch_model.bin",
            "config.json",
            "modules.json",
            "pytorch_model.bin",
            "sentence_bert_config.json",
        ];
        let modules =
            r#"[{"path": "0_Transformer"}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {}]"#;
        let all = chosen(&names, &[("modules.json", modules)], Files::All);
        assert_eq!(
            all,
            [
                "0_Transformer/config.json",
                "0_Transformer/pytorch_model.bin",
                "0_Transformer/sentence_bert_config.json",
                "0_Transformer/vocab.txt",
                "2_Dense/config.json",
                "2_Dense/model.safetensors",
                "modules.json",
            ]
        );
    }

    #[test]
    fn a_gguf_file_is_chosen_by_name_or_quantization() {
        let names = [
            "README.md",
            "a-Q4_K_M.gguf",
            "a-Q8_0-00001-of-00002.gguf",
            "a-Q8_0-00002-of-00002.gguf",
            "a-UD-Q4_K_M.gguf",
            "config.json",
            "mmproj-F16.gguf",
        ];
        let known = vec![names[1], names[2], names[4]];
        assert_eq!(gguf(&names, None), Gguf::Unclear(known.clone()));
        for unclear in ["Q4_K", "F16", "K_M", "mmproj-F16.gguf", "-Q8_0"] {
            assert_eq!(
                gguf(&names, Some(unclear)),
                Gguf::Unclear(known.clone()),
                "{unclear}"
            );
        }
        for (file, expected) in [
            ("q4_k_m", names[1]),
            ("UD-Q4_K_M", names[4]),
            ("a-ud-q4_k_m.gguf", names[4]),
            ("Q8_0", names[2]),
        ] {
            assert_eq!(gguf(&names, Some(file)), Gguf::Model(expected), "{file}");
        }
        assert_eq!(gguf(&names[..2], None), Gguf::Model(names[1]));
        assert_eq!(gguf(&[names[1], "model.safetensors"], None), Gguf::No);
        assert_eq!(gguf(&["README.md"], None), Gguf::No);
        assert_eq!(
            gguf(&["README.md"], Some("Q8_0")),
            Gguf::Unclear(Vec::new())
        );
    }

    #[test]
    fn heads_and_other_tokenizers_are_chosen() {
        let names = [
            "artifact.metadata",
            "colbert_linear.pt",
            "config.json",
            "pytorch_model.bin",
            "sentencepiece.bpe.model",
            "sparse_linear.pt",
            "vocab.json",
        ];
        assert_eq!(chosen(&names, &[], Files::All), names);
        let with = [&names[..], &["tokenizer.json"]].concat();
        let all = chosen(&with, &[], Files::All);
        assert!(!all.contains(&"vocab.json".to_owned()), "{all:?}");
    }
}
