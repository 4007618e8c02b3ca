//! What a folder without readable weights holds instead, and what would make weights of it.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::checkpoint::{INDEX, SINGLE};
use crate::files::{self, Kind};

/// Files of a folder that are no weights which gemmule reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// An adapter, with the name of the model that it changes.
    Adapter { base: Option<String> },
    /// A file of llama.cpp.
    Gguf { file: PathBuf },
    /// A file of pickles, or the index of several.
    Pickle { file: PathBuf },
    /// Weights of TensorFlow or Flax.
    OtherFramework { file: PathBuf },
    /// A graph of ONNX or OpenVINO.
    Graph { file: PathBuf },
    /// Shards without their index.
    Shards { file: PathBuf },
    /// A safetensors file of another name.
    OtherName { file: PathBuf },
    /// A folder below with weights.
    Below { folder: PathBuf },
    /// None of these, or weights that are read.
    Nothing,
}

impl Found {
    /// Looks into a folder. What is closest to readable weights is named first.
    pub fn in_folder(folder: &Path) -> Self {
        let (files, folders) = listed(folder);
        let ending = |endings: &[&str]| {
            let mut files = files.iter();
            let is = |file: &&PathBuf| {
                let ending = file.extension().and_then(|e| e.to_str());
                ending.is_some_and(|e| endings.contains(&e))
            };
            files.find(is).cloned()
        };
        let named = |starts: &str| {
            let mut files = files.iter();
            files.find(|file| name(file).starts_with(starts)).cloned()
        };
        if [SINGLE, INDEX]
            .iter()
            .any(|name| folder.join(name).is_file())
        {
            return Self::Nothing;
        }
        let adapter = folder.join("adapter_config.json");
        if adapter.is_file() {
            let base = base(&adapter);
            return Self::Adapter { base };
        }
        if let Some(file) = named("model-00001-of-") {
            return Self::Shards { file };
        }
        if let Some(file) = ending(&["safetensors"]) {
            return Self::OtherName { file };
        }
        let has_weights = |f: &&PathBuf| f.join(SINGLE).is_file() || f.join(INDEX).is_file();
        if let Some(folder) = folders.iter().find(has_weights) {
            return Self::Below {
                folder: folder.clone(),
            };
        }
        if let Some(file) = named("pytorch_model").or_else(|| ending(&["bin", "pt", "pth", "ckpt"]))
        {
            return Self::Pickle { file };
        }
        if let Some(file) = ending(&["gguf"]) {
            return Self::Gguf { file };
        }
        if let Some(file) = ending(&["h5", "msgpack"]) {
            return Self::OtherFramework { file };
        }
        let below = folders.iter().flat_map(|folder| listed(folder).0);
        let graph = |file: &PathBuf| {
            let ending = file.extension().and_then(|e| e.to_str());
            matches!(ending, Some("onnx" | "xml"))
        };
        match files.iter().cloned().chain(below).find(graph) {
            Some(file) => Self::Graph { file },
            None => Self::Nothing,
        }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Adapter { base } => {
                let base = base.as_ref().map(|base| format!(" of `{base}`"));
                write!(
                    f,
                    "an adapter{}, which is merged into its model first: peft.AutoPeftModel.from_pretrained(FOLDER).merge_and_unload().save_pretrained(NEW) in Python",
                    base.unwrap_or_default()
                )
            }
            Self::Gguf { file } => write!(
                f,
                "`{}`, whose format is not read; take the folder that it was converted from, or transformers.AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME).save_pretrained(NEW) in Python",
                name(file)
            ),
            Self::Pickle { file } => write!(
                f,
                "`{}`, a pickle, which runs code of whoever wrote it when it is read; where you trust it, the model's class in transformers converts it: CLASS.from_pretrained(FOLDER).save_pretrained(FOLDER), with the class that config.json names in `architectures`",
                name(file)
            ),
            Self::OtherFramework { file } => write!(
                f,
                "`{}`, weights of another framework; transformers 4 converts them: CLASS.from_pretrained(FOLDER, from_tf=True) or from_flax=True, and save_pretrained(FOLDER)",
                name(file)
            ),
            Self::Graph { file } => write!(
                f,
                "`{}`, an exported graph, which is not read; take the folder that it was exported from",
                file.display()
            ),
            Self::Shards { file } => write!(
                f,
                "`{}` without `{INDEX}`, which says what tensors each shard has; download it too",
                name(file)
            ),
            Self::OtherName { file } => write!(
                f,
                "`{}`, which is not read under that name; if its tensors are named as transformers names them, rename it to `{SINGLE}`, else take the file of that name of the same model",
                name(file)
            ),
            Self::Below { folder } => write!(
                f,
                "weights in `{0}`; give that folder: `{0}`",
                folder.display()
            ),
            Self::Nothing => write!(f, "no weights at all"),
        }
    }
}

fn name(file: &Path) -> String {
    file.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// Files and folders of a folder, by name; none, where it cannot be read.
fn listed(folder: &Path) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<PathBuf> = entries.filter_map(Result::ok).map(|e| e.path()).collect();
    paths.sort();
    let (folders, files) = paths.into_iter().partition(|path| path.is_dir());
    (files, folders)
}

/// The model that an adapter changes.
fn base(file: &Path) -> Option<String> {
    let text = files::text(file, Kind::Config).ok()?;
    let json: Value = serde_json::from_str(&text).ok()?;
    let base = json.get("base_model_name_or_path")?.as_str()?;
    Some(base.to_owned())
}
