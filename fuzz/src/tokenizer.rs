//! Reads arbitrary text as a tokenizer.json. Either the tokenizer loads and encodes texts, or an error states the reason. The `tokenizers`
//! crate panics on some inputs. gemmule must return these panics as errors.
//!
//! The target writes the file to the system's folder for temporary files. Set `TMPDIR` to a file system in memory.

use std::{fs, path::PathBuf, sync::LazyLock};

use gemmule::text::TextEncoder;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("gemmule-tokenizer-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("the folder can be made");
    folder
});

pub fn run(text: &str) {
    fs::write(FOLDER.join("tokenizer.json"), text).expect("room for a tokenizer");
    let encoder = match TextEncoder::open(&FOLDER) {
        Ok(encoder) => encoder,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    for text in ["", "a text of words!", " ab\u{301}b\n文 \u{0} [SEP]"] {
        if let Ok(batch) = encoder.encode(&[text]) {
            let n = batch.extents().tokens;
            assert_eq!(batch.token_ids().len() as u64, n);
            assert_eq!(batch.type_ids().len() as u64, n);
        }
    }
}
