//! A tiny model and a temporary folder, which the tests of all packages share.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::{Value, json};

/// Returns the config.json of a minimal BERT: one layer, and two heads of width 8.
pub fn tiny_config() -> Value {
    json!({
        "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
        "intermediate_size": 32, "vocab_size": 20, "max_position_embeddings": 12,
        "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    })
}

/// A temporary folder that is deleted when it is dropped.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let file = self.file(name);
        std::fs::write(&file, content).expect("the folder is there");
        file
    }

    /// Returns `text` with `[dir]` for the path of this folder.
    pub fn redact(&self, text: &str) -> String {
        text.replace(&self.path().display().to_string(), "[dir]")
    }
}

/// Runs a program in a folder. Returns whether it succeeded, and its standard output and standard error with `[dir]` for the folder's path.
pub fn said(folder: &Folder, command: &mut Command) -> (bool, String, String) {
    let output = command
        .current_dir(folder.path())
        .env("NO_COLOR", "1")
        .env("LANG", "C.UTF-8")
        .env("COLUMNS", "100")
        .output()
        .expect("the program starts");
    let text = |bytes: &[u8]| folder.redact(&String::from_utf8_lossy(bytes));
    let (out, errors) = (text(&output.stdout), text(&output.stderr));
    for said in [&out, &errors] {
        assert!(!said.contains("panicked"), "{command:?}: {said}");
    }
    (output.status.success(), out, errors)
}

/// Joins the lines of an error message. miette wraps messages at the width of the terminal, and starts each line with a bar.
pub fn on_one_line(errors: &str) -> String {
    let words = errors.split_whitespace().filter(|w| *w != "│");
    words.collect::<Vec<_>>().join(" ")
}
