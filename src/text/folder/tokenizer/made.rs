//! Normalizers, pre-tokenizers and decoders that tokenizer classes of the library transformers 5.24 create.

use serde_json::Value;
use tokenizers::{
    DecoderWrapper, ModelWrapper, NormalizerWrapper, PreTokenizerWrapper, Tokenizer, normalizers,
};

use super::parts::{normalizers_of, set_normalizer};

/// Parts that a tokenizer class creates, in the format of tokenizer.json, before the settings of tokenizer_config.json are applied.
pub(super) struct Parts {
    model: Kind,
    /// List of normalizers. If tokenizer.json has SentencePiece rules, they replace the entry `Precompiled`.
    normalizers: &'static str,
    /// Normalizers to use if tokenizer.json has no SentencePiece rules. `None` means `normalizers` without the entry `Precompiled`.
    without_rules: Option<&'static str>,
    pre_tokenizer: &'static str,
    decoder: &'static str,
}

/// Kind of a vocabulary.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    WordPiece,
    Unigram,
    /// A byte pair encoding. If `falls_back` is true, it replaces unknown characters with tokens of their bytes. If `fuses` is true, it
    /// joins unknown tokens.
    Bpe {
        falls_back: bool,
        fuses: bool,
    },
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::WordPiece => "WordPiece",
            Self::Unigram => "Unigram",
            Self::Bpe { .. } => "BPE",
        }
    }

    fn is_of(self, model: &ModelWrapper) -> bool {
        match self {
            Self::WordPiece => matches!(model, ModelWrapper::WordPiece(_)),
            Self::Unigram => matches!(model, ModelWrapper::Unigram(_)),
            Self::Bpe { .. } => matches!(model, ModelWrapper::BPE(_)),
        }
    }
}

const PLAIN_BPE: Kind = Kind::Bpe {
    falls_back: false,
    fuses: false,
};

const BYTE_LEVEL: &str =
    r#"{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}"#;
const BYTES_DECODED: &str =
    r#"{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}"#;
const SPACE: &str =
    r#"{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}"#;
const WORDS: &str = r#"{"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}]}"#;
const BERT_WORDS: &str = r#"{"type": "BertPreTokenizer"}"#;

pub(super) const BERT: Parts = Parts {
    model: Kind::WordPiece,
    normalizers: r#"[{"type": "BertNormalizer", "clean_text": true,
        "handle_chinese_chars": true, "strip_accents": null, "lowercase": true}]"#,
    without_rules: None,
    pre_tokenizer: BERT_WORDS,
    decoder: r###"{"type": "WordPiece", "prefix": "##", "cleanup": true}"###,
};

pub(super) const OPENAI_GPT: Parts = Parts {
    model: PLAIN_BPE,
    decoder: r#"{"type": "BPEDecoder", "suffix": "</w>"}"#,
    ..BERT
};

pub(super) const ALBERT: Parts = Parts {
    model: Kind::Unigram,
    normalizers: r#"[{"type": "Replace", "pattern": {"String": "``"}, "content": "\""},
        {"type": "Replace", "pattern": {"String": "''"}, "content": "\""},
        {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}, {"type": "Precompiled"}]"#,
    ..SENTENCEPIECE
};

pub(super) const REMBERT: Parts = Parts {
    normalizers: r#"[{"type": "Replace", "pattern": {"String": "``"}, "content": "\""},
        {"type": "Replace", "pattern": {"String": "''"}, "content": "\""},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}, {"type": "Precompiled"}]"#,
    ..XGLM
};

pub(super) const DEBERTA_V2: Parts = Parts {
    model: Kind::Unigram,
    normalizers: r#"[{"type": "Replace", "pattern": {"Regex": "\\s{2,}|[\\n\\r\\t]"}, "content": " "}, {"type": "NFC"},
        {"type": "Strip", "strip_left": false, "strip_right": true}]"#,
    without_rules: None,
    pre_tokenizer: SPACE,
    decoder: SPACE,
};

pub(super) const SENTENCEPIECE: Parts = Parts {
    model: Kind::Unigram,
    normalizers: r#"[{"type": "Precompiled"}]"#,
    without_rules: None,
    pre_tokenizer: WORDS,
    decoder: SPACE,
};

pub(super) const MBART: Parts = Parts {
    normalizers: "[]",
    ..SENTENCEPIECE
};

pub(super) const XGLM: Parts = Parts {
    model: Kind::Unigram,
    normalizers: r#"[{"type": "Precompiled"}, {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]"#,
    without_rules: None,
    pre_tokenizer: SPACE,
    decoder: SPACE,
};

pub(super) const PEGASUS: Parts = Parts {
    without_rules: Some(
        r#"[{"type": "Replace", "pattern": {"Regex": "\\n"}, "content": " "},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]"#,
    ),
    ..XGLM
};

pub(super) const NLLB: Parts = Parts {
    model: Kind::Bpe {
        falls_back: false,
        fuses: true,
    },
    without_rules: Some("[]"),
    ..XGLM
};

pub(super) const BYTES: Parts = Parts {
    model: PLAIN_BPE,
    normalizers: "[]",
    without_rules: None,
    pre_tokenizer: BYTE_LEVEL,
    decoder: BYTES_DECODED,
};

pub(super) const BLENDERBOT: Parts = Parts {
    pre_tokenizer: r#"{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}"#,
    ..BYTES
};

pub(super) const GPT_NEOX: Parts = Parts {
    normalizers: r#"[{"type": "NFC"}]"#,
    ..BYTES
};

pub(super) const COHERE: Parts = Parts {
    pre_tokenizer: r#"{"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]}"#,
    ..GPT_NEOX
};

pub(super) const QWEN2: Parts = Parts {
    pre_tokenizer: r#"{"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": "Isolated", "invert": false, "pattern": {"Regex":
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]}"#,
    ..GPT_NEOX
};

pub(super) const CLIP: Parts = Parts {
    normalizers: r#"[{"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "}, {"type": "Lowercase"}]"#,
    pre_tokenizer: r#"{"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": "Removed", "invert": true, "pattern": {"Regex":
        "<\\|startoftext\\|>|<\\|endoftext\\|>|'s|'t|'re|'ve|'m|'ll|'d|[\\p{L}]+|[\\p{N}]|[^\\s\\p{L}\\p{N}]+"}},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]}"#,
    ..BYTES
};

pub(super) const GEMMA: Parts = Parts {
    model: Kind::Bpe {
        falls_back: true,
        fuses: true,
    },
    normalizers: r#"[{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]"#,
    without_rules: None,
    pre_tokenizer: r#"{"type": "Split", "behavior": "MergedWithPrevious", "invert": false, "pattern": {"String": " "}}"#,
    decoder: r#"{"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"}]}"#,
};

pub(super) const LLAMA: Parts = Parts {
    normalizers: "[]",
    pre_tokenizer: r#"{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false}"#,
    decoder: r#"{"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}"#,
    ..GEMMA
};

impl Parts {
    /// Compares the vocabulary kind of the tokenizer class with that of `tokenizer`. If they differ, returns both names, first that of the
    /// class.
    pub(super) fn other_model(
        &self,
        tokenizer: &Tokenizer,
    ) -> Option<(&'static str, &'static str)> {
        let model = tokenizer.get_model();
        let found = match model {
            ModelWrapper::BPE(_) => "BPE",
            ModelWrapper::WordPiece(_) => "WordPiece",
            ModelWrapper::WordLevel(_) => "WordLevel",
            ModelWrapper::Unigram(_) => "Unigram",
        };
        (!self.model.is_of(model)).then_some((self.model.name(), found))
    }

    /// Replaces the parts of a tokenizer. Returns the names of those that were different.
    pub(super) fn replace(
        &self,
        tokenizer: &mut Tokenizer,
    ) -> tokenizers::Result<Vec<&'static str>> {
        let mut replaced = Vec::new();
        let rules = normalizers_of(tokenizer);
        let is_rules = |n: &NormalizerWrapper| matches!(n, NormalizerWrapper::Precompiled(_));
        let rules = rules.into_iter().find(is_rules);
        let listed = match (&rules, self.without_rules) {
            (None, Some(listed)) => listed,
            _ => self.normalizers,
        };
        let mut all: Vec<NormalizerWrapper> = Vec::new();
        for value in serde_json::from_str::<Vec<Value>>(listed)? {
            match value["type"] == "Precompiled" {
                true => all.extend(rules.clone()),
                false => all.push(serde_json::from_value(value)?),
            }
        }
        let normalizer = match all.len() {
            0 => None,
            1 => all.pop(),
            _ => Some(normalizers::Sequence::new(all).into()),
        };
        if differ(&normalizer, &tokenizer.get_normalizer())? {
            set_normalizer(tokenizer, normalizer)?;
            replaced.push("normalizer");
        }
        let pre_tokenizer: Option<PreTokenizerWrapper> = serde_json::from_str(self.pre_tokenizer)?;
        if differ(&pre_tokenizer, &tokenizer.get_pre_tokenizer())? {
            tokenizer.with_pre_tokenizer(pre_tokenizer);
            replaced.push("pre_tokenizer");
        }
        let decoder: Option<DecoderWrapper> = serde_json::from_str(self.decoder)?;
        if differ(&decoder, &tokenizer.get_decoder())? {
            tokenizer.with_decoder(decoder);
            replaced.push("decoder");
        }
        if let (Kind::Bpe { falls_back, fuses }, ModelWrapper::BPE(model)) =
            (self.model, tokenizer.get_model())
            && (model.byte_fallback, model.fuse_unk, model.ignore_merges)
                != (falls_back, fuses, false)
        {
            let mut model = model.clone();
            (model.byte_fallback, model.fuse_unk) = (falls_back, fuses);
            model.ignore_merges = false;
            tokenizer.with_model(model);
            replaced.push("model");
        }
        Ok(replaced)
    }
}

/// Returns whether two parts serialize to different JSON.
fn differ<T: serde::Serialize, U: serde::Serialize>(a: &T, b: &U) -> serde_json::Result<bool> {
    Ok(serde_json::to_value(a)? != serde_json::to_value(b)?)
}
