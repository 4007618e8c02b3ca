//! Bytes of single tokens. If the bytes of a token are only a part of a UTF-8 character, a decoder shows U+FFFD instead of them.

use tokenizers::DecoderWrapper;

use super::{Coder, TextEncoder};
use crate::text::TextError;

impl TextEncoder {
    /// Returns the bytes that the token `id` adds after the token `before`, including special tokens. Unlike the [text](Self::text_after),
    /// the bytes are exact for a token that is part of a character.
    ///
    /// # Errors
    /// Returns the errors of [`decode`](Self::decode).
    pub fn bytes_after(&self, before: Option<u32>, id: u32) -> Result<Vec<u8>, TextError> {
        match self.partial_bytes(id) {
            Some(bytes) => Ok(bytes),
            None => self.text_after(before, id).map(String::into_bytes),
        }
    }

    /// Returns the bytes of a token that contains incomplete characters; `None` for all other tokens.
    fn partial_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let Coder::Json(tokenizer, _) = &self.tokenizer else {
            return None;
        };
        let token = tokenizer.id_to_token(id)?;
        let decoder = tokenizer.get_decoder()?;
        let bytes = match (
            has(decoder, |d| matches!(d, DecoderWrapper::ByteLevel(_))),
            has(decoder, |d| matches!(d, DecoderWrapper::ByteFallback(_))),
        ) {
            (true, _) => token.chars().map(byte_of_char).collect(),
            (_, true) => byte_of_name(&token).map(|byte| vec![byte]),
            _ => None,
        };
        bytes.filter(|bytes: &Vec<u8>| std::str::from_utf8(bytes).is_err())
    }
}

fn has(decoder: &DecoderWrapper, which: fn(&DecoderWrapper) -> bool) -> bool {
    match decoder {
        DecoderWrapper::Sequence(all) => all.get_decoders().iter().any(|d| has(d, which)),
        one => which(one),
    }
}

/// Returns the byte of a character in the vocabulary of a byte-level BPE (GPT-2). Printable bytes of Latin-1 map to
/// themselves, and the other 68 to the characters from U+0100 on, in order.
fn byte_of_char(c: char) -> Option<u8> {
    let code = u32::from(c);
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// Returns the byte of a SentencePiece byte fallback token such as `<0xE2>`.
fn byte_of_name(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_byte = digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    is_byte.then(|| u8::from_str_radix(digits, 16).ok())?
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;
    use crate::text::Folder;

    #[test]
    fn byte_level_characters_map_to_all_bytes() {
        let mut bytes: Vec<u8> = (0u32..=0x143)
            .filter_map(|code| byte_of_char(char::from_u32(code)?))
            .collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        // Tests a space, a line break, the second-to-last mapped character, and the character after the last mapped one.
        assert_eq!(byte_of_char('\u{120}'), Some(b' '));
        assert_eq!(byte_of_char('\u{10a}'), Some(b'\n'));
        assert_eq!(byte_of_char('\u{142}'), Some(0xa0));
        assert_eq!(byte_of_char('\u{144}'), None);
        assert_eq!(byte_of_name("<0xE2>"), Some(0xe2));
        assert_eq!(byte_of_name("<0x+2>"), None);
    }

    /// Creates an encoder with this model, decoder and pre-tokenizer.
    fn encoder(
        model: Value,
        decoder: Value,
        pre_tokenizer: Value,
    ) -> (tempfile::TempDir, TextEncoder) {
        let folder = tempfile::tempdir().expect("a folder");
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": decoder, "model": model,
        });
        let written = Path::new("tests/checkpoints/writer/config.json");
        std::fs::copy(written, folder.path().join("config.json")).expect("it is copied");
        let file = folder.path().join("tokenizer.json");
        std::fs::write(file, tokenizer.to_string()).expect("it is written");
        let settings = r#"{"tokenizer_class": "PreTrainedTokenizerFast"}"#;
        let file = folder.path().join("tokenizer_config.json");
        std::fs::write(file, settings).expect("it is written");
        let opened = Folder::open(folder.path()).expect("a folder");
        let encoder = TextEncoder::for_prompts(opened).expect("a tokenizer");
        (folder, encoder)
    }

    /// Returns the bytes of each token of a text, after checking that they concatenate to the text.
    #[track_caller]
    fn bytes(encoder: &TextEncoder, text: &str) -> Vec<Vec<u8>> {
        let ids = encoder.prompts(&[text]).expect("tokens").remove(0);
        let mut before = None;
        let mut all = Vec::new();
        for id in ids {
            all.push(encoder.bytes_after(before, id).expect("bytes"));
            before = Some(id);
        }
        assert_eq!(all.concat(), text.as_bytes());
        all
    }

    #[test]
    fn parts_of_characters_have_their_own_bytes() {
        // Byte-level BPE with one merge: the first two bytes of U+2019.
        let name = |byte: u8| {
            let code = (0u32..=0x143).filter_map(char::from_u32);
            let mut names = code.filter(|&c| byte_of_char(c) == Some(byte));
            names.next().expect("a name").to_string()
        };
        let mut vocabulary = json!({});
        for byte in 0..=255 {
            vocabulary[name(byte)] = json!(u32::from(byte) + 1);
        }
        let (e2, x80) = (name(0xe2), name(0x80));
        vocabulary[format!("{e2}{x80}")] = json!(257);
        let model = json!({
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": [[e2, x80]],
        });
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let (_folder, encoder) = self::encoder(model, byte_level.clone(), byte_level);
        assert_eq!(
            bytes(&encoder, "a\u{2019}b\u{1f98a}"),
            [
                &b"a"[..],
                b"\xe2\x80",
                b"\x99",
                b"b",
                b"\xf0",
                b"\x9f",
                b"\xa6",
                b"\x8a"
            ]
        );

        let mut vocabulary = json!({"a": 257, "▁": 258});
        for byte in 0..=255 {
            vocabulary[format!("<0x{byte:02X}>")] = json!(byte + 1);
        }
        let model = json!({
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": true, "byte_fallback": true, "vocab": vocabulary, "merges": [],
        });
        let decoder = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        ]});
        let (_folder, encoder) = self::encoder(model, decoder, Value::Null);
        assert_eq!(
            bytes(&encoder, "a\u{2019}a"),
            [&b"a"[..], b"\xe2", b"\x80", b"\x99", b"a"]
        );
    }
}
