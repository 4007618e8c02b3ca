//! Detects what a folder without readable weights contains, and explains how to obtain weights from it.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::files::{self, Kind};

pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
pub(super) const TORCH_SINGLE: &str = "pytorch_model.bin";
pub(super) const TORCH_INDEX: &str = "pytorch_model.bin.index.json";
/// Files that [`Checkpoint::open`](super::Checkpoint::open) reads, in order of preference.
pub(super) const WEIGHTS: [&str; 4] = [SINGLE, INDEX, TORCH_SINGLE, TORCH_INDEX];

/// Contents of a folder that has no readable weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// An adapter, with the name of its base model.
    Adapter { base: Option<String> },
    /// A llama.cpp file.
    Gguf { file: PathBuf },
    /// TensorFlow or Flax weights.
    OtherFramework { file: PathBuf },
    /// An ONNX or OpenVINO graph.
    Graph { file: PathBuf },
    /// Shards without their index.
    Shards { file: PathBuf },
    /// A file of safetensors or of PyTorch under an unexpected name.
    OtherName { file: PathBuf },
    /// A subfolder with weights.
    Below { folder: PathBuf },
    /// None of the above, or readable weights.
    Nothing,
}

impl Found {
    /// Inspects a folder. If several variants match, returns the variant that is easiest to convert to readable weights.
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
        let has_weights = |folder: &Path| WEIGHTS.iter().any(|name| folder.join(name).is_file());
        if has_weights(folder) {
            return Self::Nothing;
        }
        let adapter = folder.join("adapter_config.json");
        if adapter.is_file() {
            let base = base(&adapter);
            return Self::Adapter { base };
        }
        let shard = named("model-00001-of-").or_else(|| named("pytorch_model-00001-of-"));
        if let Some(file) = shard {
            return Self::Shards { file };
        }
        if let Some(file) = ending(&["safetensors"]) {
            return Self::OtherName { file };
        }
        if let Some(folder) = folders.iter().find(|folder| has_weights(folder)) {
            return Self::Below {
                folder: folder.clone(),
            };
        }
        if let Some(file) = ending(&["bin", "pt", "pth", "ckpt"]) {
            return Self::OtherName { file };
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
                    "an adapter{}; merge it into its model first: peft.AutoPeftModel.from_pretrained(FOLDER).merge_and_unload().save_pretrained(NEW) in Python",
                    base.unwrap_or_default()
                )
            }
            Self::Gguf { file } => write!(
                f,
                "`{}`, a whole model of llama.cpp; give the path of this file instead of the folder",
                name(file)
            ),
            Self::OtherFramework { file } => write!(
                f,
                "`{}`, weights of another framework; convert them with transformers 4: CLASS.from_pretrained(FOLDER, from_tf=True) or from_flax=True, and save_pretrained(FOLDER)",
                name(file)
            ),
            Self::Graph { file } => write!(
                f,
                "`{}`, an exported graph, which gemmule does not read; use the folder that it was exported from",
                file.display()
            ),
            Self::Shards { file } => write!(
                f,
                "`{}` without `{}`, which lists the tensors of each shard; download it too",
                name(file),
                match is_torch(file) {
                    true => TORCH_INDEX,
                    false => INDEX,
                }
            ),
            Self::OtherName { file } => write!(
                f,
                "`{}`, a file name that is not recognized; if its tensors have transformers' names, rename it to `{}`, else use the file of that name from the same model",
                name(file),
                match is_torch(file) {
                    true => TORCH_SINGLE,
                    false => SINGLE,
                }
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

fn is_torch(file: &Path) -> bool {
    file.extension()
        .is_none_or(|ending| ending != "safetensors")
}

fn name(file: &Path) -> String {
    file.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// Returns the files and the subfolders of a folder, sorted by name. Both lists are empty if the folder cannot be read.
fn listed(folder: &Path) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<PathBuf> = entries.filter_map(Result::ok).map(|e| e.path()).collect();
    paths.sort();
    let (folders, files) = paths.into_iter().partition(|path| path.is_dir());
    (files, folders)
}

/// Returns the base model of an adapter.
fn base(file: &Path) -> Option<String> {
    let text = files::text(file, Kind::Config).ok()?;
    let json: Value = serde_json::from_str(&text).ok()?;
    let base = json.get("base_model_name_or_path")?.as_str()?;
    Some(base.to_owned())
}
