//! Reads arbitrary text as the generation_config.json, the tokenizer_config.json or the chat template of a checkpoint folder. The result
//! must be valid settings of a request, a formatted conversation, or an error. The first byte selects the file.

use std::{fs, path::Path, sync::LazyLock};

use gemmule::{
    generate::generation_config,
    text::{ChatTemplate, Message},
};

static FOLDER: LazyLock<tempfile::TempDir> =
    LazyLock::new(|| tempfile::tempdir().expect("a folder can be made"));

const FILES: [&str; 3] = [
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];

pub fn run(bytes: &[u8]) {
    let Some((first, rest)) = bytes.split_first() else {
        return;
    };
    let folder: &Path = FOLDER.path();
    for file in FILES {
        let _ = fs::remove_file(folder.join(file));
    }
    let file = FILES[usize::from(*first) % FILES.len()];
    fs::write(folder.join(file), rest).expect("room for a file");
    match generation_config(folder) {
        Ok(options) => assert!(options.rules.repetition_penalty.is_finite()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    let messages = [
        Message::new("system", "Be brief."),
        Message::new("user", "What is rain?"),
    ];
    if let Ok(template) = ChatTemplate::open(folder) {
        let _ = template.render(&messages);
    }
}
