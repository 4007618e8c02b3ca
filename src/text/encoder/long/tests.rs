//! Checks that tokenizing a long text in pieces gives the same tokens as tokenizing it whole.

use std::{collections::HashSet, fs, path::Path};

use super::*;
use crate::text::Folder;

/// Returns a text of about `bytes` bytes: prose, code, other scripts and runs of spaces.
fn text(bytes: usize) -> String {
    let parts = [
        include_str!("../../../../README.md"),
        include_str!("../long.rs"),
        "Le cœur déçu mais l'âme plutôt naïve, Louÿs rêva.    Съешь ещё этих мягких французских булок! \
         いろはにほへと。ちりぬるを、わかよたれそ。我能吞下玻璃而不伤身体。 don't can't <|end|> [SEP] </s> x1234567890\t\tend\n\n\n",
        "One cold morning a small bird sat on the tower, and it rained. ",
    ];
    let all = parts.into_iter().cycle();
    let mut text = String::new();
    for part in all {
        text.push_str(part);
        if text.len() > bytes {
            return text;
        }
    }
    text
}

/// Returns all small checkpoint folders with a tokenizer.
fn encoders() -> Vec<(String, TextEncoder)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/checkpoints");
    let mut folders: Vec<_> = fs::read_dir(root)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|folder| folder.join("tokenizer.json").is_file())
        .collect();
    folders.sort();
    let mut seen = HashSet::new();
    let open = |folder: std::path::PathBuf| {
        let bytes = fs::read(folder.join("tokenizer.json")).ok()?;
        if !seen.insert(bytes) {
            return None;
        }
        let encoder = TextEncoder::of(Folder::open(&folder).ok()?).ok()?;
        Some((folder.file_name()?.to_str()?.to_owned(), encoder))
    };
    folders.into_iter().filter_map(open).collect()
}

#[test]
fn a_long_text_has_the_tokens_of_the_whole() {
    let text = text(LONG);
    let mut compared = 0;
    for (name, encoder) in encoders() {
        for adds_special in [true, false] {
            let whole = encoder.contained(0, || {
                encoder
                    .tokenizer
                    .encode_fast(EncodeInput::from(text.as_str()), adds_special)
            });
            let Ok(whole) = whole else {
                continue;
            };
            let long = encoder
                .long(0, &text, adds_special, encoder.cut_side())
                .unwrap();
            assert!(long.ids == whole.get_ids(), "{name}");
            let other = encoder.cut_side().other();
            let whole = encoder
                .other_side()
                .encode_fast(EncodeInput::from(text.as_str()), adds_special);
            let long = encoder.long(0, &text, adds_special, other).unwrap();
            assert!(long.ids == whole.unwrap().get_ids(), "{name}");
            compared += 1;
            let all = encoder
                .contained(0, || {
                    encoder
                        .unlimited()
                        .encode(EncodeInput::from(text.as_str()), adds_special)
                })
                .unwrap();
            assert_eq!(long.is_cut, long.ids.len() < all.len(), "{name}");
            let ids = encoder.prompt_within(&text, adds_special, usize::MAX);
            assert!(ids.unwrap().unwrap() == all.get_ids(), "{name}");
            let ids = encoder.prompt_within(&text, adds_special, all.len() - 1);
            assert_eq!(ids.unwrap(), None, "{name}");
            let tokens = encoder.tokens(&text, adds_special).unwrap();
            assert_eq!(tokens.len(), all.len(), "{name}");
            for (at, token) in tokens.iter().enumerate() {
                assert_eq!(token.id, all.get_ids()[at], "{name} {at}");
                let is_special = all.get_special_tokens_mask()[at] != 0;
                assert_eq!(token.is_special, is_special, "{name} {at}");
                let span = (!is_special).then(|| all.get_offsets()[at]);
                assert_eq!(token.span, span, "{name} {at}");
            }
        }
    }
    assert!(compared > 10, "{compared}");
}

#[test]
fn a_pair_with_one_long_text_is_cut_as_when_tokenized_whole() {
    let long = text(LONG);
    let mut compared = 0;
    for (name, encoder) in encoders() {
        for (a, b) in [(long.as_str(), "a small bird"), ("rain", long.as_str())] {
            let whole = encoder.contained(0, || {
                encoder
                    .tokenizer
                    .encode_fast(EncodeInput::from((a, b)), true)
            });
            let pair = encoder.pair(0, a.to_owned(), b, encoder.cut_side());
            let (Ok(whole), Ok(pair)) = (whole, pair) else {
                continue;
            };
            assert!(pair.ids == whole.get_ids(), "{name}");
            compared += 1;
        }
    }
    assert!(compared > 4, "{compared}");
}

#[test]
fn a_long_text_without_token_boundaries_is_an_error() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let encoder = TextEncoder::open(&root.join("tests/checkpoints/st-mean")).unwrap();
    let word = "a".repeat(MAX_PIECE);
    let one = encoder.long(0, &word, true, CutSide::Right).unwrap();
    assert_eq!(one.ids.len(), 3);
    let error = encoder
        .long(0, &word.repeat(2), true, CutSide::Right)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "text 0 cannot be tokenized: it has 524288 bytes, with no token boundary within 262144 consecutive bytes; shorten it or add spaces"
    );
    // The text before the long word already exceeds the token limit.
    let both = format!("{} {}", text(LONG), word.repeat(2));
    let cut = encoder.long(0, &both, true, CutSide::Right);
    assert!(cut.unwrap().is_cut);
    let texts = format!("{} {}", text(5 * LONG), text(5 * LONG));
    let error = encoder.pair(0, texts.clone(), &texts, CutSide::Right);
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("bytes that must be tokenized at once; expected at most 524288"),
        "{error}"
    );
}
