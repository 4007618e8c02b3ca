//! Tokenizer classes of the library transformers, with the settings that each class reads.

use tokenizers::{DecoderWrapper, Tokenizer, pre_tokenizers::metaspace::PrependScheme};

use super::{
    made::{self, Parts},
    parts::has_byte_level,
};

/// A tokenizer class of the library transformers.
pub(super) struct Class {
    /// Names in `tokenizer_class`, without the suffix `Fast`.
    pub(super) names: &'static [&'static str],
    pub(super) settings: &'static [Setting],
    /// Parts that the class creates, whatever tokenizer.json has; `None` for a class that keeps the parts of tokenizer.json.
    pub(super) parts: Option<&'static Parts>,
    pub(super) template: Template,
}

impl Class {
    /// Returns whether tokenizer.json is used unchanged. The library transformers does this for `LlamaTokenizer` if the vocabulary is
    /// byte-level, because this class splits texts only at spaces.
    pub(super) fn keeps(&self, tokenizer: &Tokenizer) -> bool {
        let is_llama = self
            .settings
            .iter()
            .any(|s| matches!(s, Setting::LegacySpace));
        let decodes_bytes = matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_)));
        is_llama && (decodes_bytes || tokenizer.get_pre_tokenizer().is_some_and(has_byte_level))
    }
}

/// Special tokens around texts.
#[derive(Clone, Copy)]
pub(super) enum Template {
    /// Tokens of the template in tokenizer.json.
    Stored,
    /// No tokens.
    Empty,
    /// Tokens of the class.
    Around(Frame),
    /// Tokens that [`Setting::Language`] puts around texts, or the tokens of the template in tokenizer.json if there is no token for the
    /// source language. In both cases, the `eos_token` must be one of the tokens.
    Language,
}

/// Tokens before and after texts. In `single` and `pair`, `F` is the token `first`, `L` is the token `last`, and `A` and `B` are the texts.
/// A `1` after an element means segment 1; otherwise, the segment is 0.
#[derive(Clone, Copy)]
pub(super) struct Frame {
    pub(super) first: Option<Special>,
    pub(super) last: Option<Special>,
    pub(super) single: &'static str,
    pub(super) pair: &'static str,
    /// Whether the class reads `trim_offsets`. If that setting is true or missing, offsets leave out the space before a word.
    pub(super) trims: bool,
    pub(super) replaces: Replaces,
}

/// Cases in which a class uses its own template instead of the one in tokenizer.json.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Replaces {
    Any,
    /// Only if tokenizer.json has no template.
    Missing,
    /// Only if tokenizer.json has a template. If it has none, there are no tokens around texts.
    Present,
}

/// Key of a special token in tokenizer_config.json, and the token to use if the key is missing.
pub(super) type Special = (&'static str, &'static str);

/// `[CLS] A [SEP]` and `[CLS] A [SEP] B [SEP]`, with two segments.
const fn segments(replaces: Replaces) -> Template {
    Template::Around(Frame {
        first: Some(("cls_token", "[CLS]")),
        last: Some(("sep_token", "[SEP]")),
        single: "F A L",
        pair: "F A L B1 L1",
        trims: false,
        replaces,
    })
}

/// `<s> A </s>` and `<s> A </s> </s> B </s>`.
const fn doubled(first: Special, last: Special, trims: bool) -> Template {
    Template::Around(Frame {
        first: Some(first),
        last: Some(last),
        single: "F A L",
        pair: "F A L L B L",
        trims,
        replaces: Replaces::Any,
    })
}

/// Tokens on only one side of texts: before them or after them.
const fn one_sided(
    first: Option<Special>,
    last: Option<Special>,
    single: &'static str,
    pair: &'static str,
) -> Template {
    Template::Around(Frame {
        first,
        last,
        single,
        pair,
        trims: false,
        replaces: Replaces::Any,
    })
}

/// A setting, or several related settings.
#[derive(Clone, Copy)]
pub(super) enum Setting {
    /// `do_lower_case`, `strip_accents` and `tokenize_chinese_chars` of BERT's normalizer.
    BertNormalizer,
    /// The setting `do_lower_case`, which adds or removes the normalizer `Lowercase`.
    LowerCase,
    /// The setting `keep_accents`.
    Accents,
    /// The setting `add_prefix_space`. If it is false, `Metaspace` gets the scheme in this variant.
    PrefixSpace(PrependScheme),
    /// The settings `add_prefix_space` and `legacy`.
    LegacySpace,
    /// The setting `split_by_punct`.
    Punctuation,
    /// `src_lang`. In addition, if tokenizer.json lacks the mask token, it is added with `lstrip`, and then includes the space before it.
    Language(Around),
    /// `mask_token`. If tokenizer.json lacks the mask token, it is added with `lstrip`, and then includes the space before it.
    SpacedMask,
}

/// Position of the language token.
#[derive(Clone, Copy)]
pub(super) enum Around {
    /// Before the text.
    Before,
    /// After the text and its end token.
    After,
    /// Before or after the text, depending on `legacy_behaviour`.
    ByLegacyBehaviour,
    /// Before the text, in the form `__en__`.
    Underscored,
}

/// Classes that differ from [`GENERIC`]. Any other class uses tokenizer.json unchanged.
pub(super) const CLASSES: &[Class] = &[
    Class {
        names: &[
            "BertTokenizer",
            "ConvBertTokenizer",
            "DistilBertTokenizer",
            "DPRContextEncoderTokenizer",
            "DPRQuestionEncoderTokenizer",
            "DPRReaderTokenizer",
            "ElectraTokenizer",
            "LayoutLMTokenizer",
            "LxmertTokenizer",
            "MobileBertTokenizer",
            "SqueezeBertTokenizer",
        ],
        settings: &[Setting::BertNormalizer],
        parts: Some(&made::BERT),
        template: segments(Replaces::Any),
    },
    Class {
        names: &["MPNetTokenizer"],
        settings: &[Setting::BertNormalizer],
        parts: Some(&made::BERT),
        template: doubled(("cls_token", "<s>"), ("sep_token", "</s>"), true),
    },
    Class {
        names: &["AlbertTokenizer"],
        settings: &[
            Setting::LowerCase,
            Setting::Accents,
            Setting::PrefixSpace(PrependScheme::Never),
        ],
        parts: Some(&made::ALBERT),
        template: segments(Replaces::Missing),
    },
    Class {
        names: &["DebertaV2Tokenizer"],
        settings: &[
            Setting::LowerCase,
            Setting::Punctuation,
            Setting::PrefixSpace(PrependScheme::First),
        ],
        parts: Some(&made::DEBERTA_V2),
        template: segments(Replaces::Any),
    },
    Class {
        names: &["RemBertTokenizer"],
        settings: &[
            Setting::LowerCase,
            Setting::Accents,
            Setting::PrefixSpace(PrependScheme::Never),
        ],
        parts: Some(&made::REMBERT),
        template: segments(Replaces::Present),
    },
    Class {
        names: &["XLMRobertaTokenizer", "CamembertTokenizer"],
        settings: &[Setting::PrefixSpace(PrependScheme::Never)],
        parts: Some(&made::SENTENCEPIECE),
        template: doubled(("bos_token", "<s>"), ("eos_token", "</s>"), false),
    },
    Class {
        names: &["XGLMTokenizer"],
        settings: &[Setting::PrefixSpace(PrependScheme::Never)],
        parts: Some(&made::XGLM),
        template: one_sided(Some(("eos_token", "</s>")), None, "F A", "F A F F B"),
    },
    Class {
        names: &[
            "BartTokenizer",
            "LEDTokenizer",
            "LongformerTokenizer",
            "MvpTokenizer",
            "RobertaTokenizer",
        ],
        settings: &[Setting::PrefixSpace(PrependScheme::Never)],
        parts: Some(&made::BYTES),
        template: doubled(("cls_token", "<s>"), ("sep_token", "</s>"), true),
    },
    Class {
        names: &["DebertaTokenizer"],
        settings: &[Setting::PrefixSpace(PrependScheme::Never)],
        parts: Some(&made::BYTES),
        template: doubled(("cls_token", "[CLS]"), ("sep_token", "[SEP]"), false),
    },
    Class {
        names: &["BlenderbotTokenizer"],
        settings: &[
            Setting::PrefixSpace(PrependScheme::Never),
            Setting::SpacedMask,
        ],
        parts: Some(&made::BLENDERBOT),
        template: Template::Stored,
    },
    Class {
        names: &["CodeGenTokenizer", "GPT2Tokenizer"],
        settings: &[Setting::PrefixSpace(PrependScheme::Never)],
        parts: Some(&made::BYTES),
        template: Template::Stored,
    },
    Class {
        names: &["Qwen2Tokenizer"],
        settings: &[Setting::PrefixSpace(PrependScheme::Never)],
        parts: Some(&made::QWEN2),
        template: Template::Stored,
    },
    Class {
        names: &["CohereTokenizer"],
        settings: &[Setting::PrefixSpace(PrependScheme::Never)],
        parts: Some(&made::COHERE),
        template: Template::Stored,
    },
    Class {
        names: &["GPTNeoXTokenizer"],
        settings: &[Setting::PrefixSpace(PrependScheme::Never)],
        parts: Some(&made::GPT_NEOX),
        template: Template::Empty,
    },
    Class {
        names: &["LlamaTokenizer"],
        settings: &[Setting::LegacySpace],
        parts: Some(&made::LLAMA),
        template: Template::Stored,
    },
    Class {
        names: &["GemmaTokenizer"],
        settings: &[],
        parts: Some(&made::GEMMA),
        template: Template::Stored,
    },
    Class {
        names: &["OpenAIGPTTokenizer"],
        settings: &[],
        parts: Some(&made::OPENAI_GPT),
        template: Template::Stored,
    },
    Class {
        names: &["CLIPTokenizer"],
        settings: &[],
        parts: Some(&made::CLIP),
        template: doubled(
            ("bos_token", "<|startoftext|>"),
            ("eos_token", "<|endoftext|>"),
            false,
        ),
    },
    Class {
        names: &["T5Tokenizer"],
        settings: &[],
        parts: Some(&made::SENTENCEPIECE),
        template: one_sided(None, Some(("eos_token", "</s>")), "A L", "A L B L"),
    },
    Class {
        names: &["PegasusTokenizer"],
        settings: &[],
        parts: Some(&made::PEGASUS),
        template: one_sided(None, Some(("eos_token", "</s>")), "A L", "A B L"),
    },
    Class {
        names: &["MBartTokenizer"],
        settings: &[Setting::Language(Around::After)],
        parts: Some(&made::MBART),
        template: Template::Language,
    },
    Class {
        names: &["MBart50Tokenizer"],
        settings: &[Setting::Language(Around::Before)],
        parts: Some(&made::XGLM),
        template: Template::Language,
    },
    Class {
        names: &["NllbTokenizer"],
        settings: &[Setting::Language(Around::ByLegacyBehaviour)],
        parts: Some(&made::NLLB),
        template: Template::Language,
    },
    Class {
        names: &["M2M100Tokenizer"],
        settings: &[Setting::Language(Around::Underscored)],
        parts: None,
        template: Template::Language,
    },
];

/// The class that uses tokenizer.json unchanged.
const GENERIC: &str = "TokenizersBackend";

/// Classes that the library transformers uses for a `model_type` if the folder names none. The class [`GENERIC`] is used even if the folder
/// names another class.
const MODEL_CLASSES: &[(&str, &str)] = &[
    ("albert", "AlbertTokenizer"),
    ("bart", "RobertaTokenizer"),
    ("bert", "BertTokenizer"),
    ("blenderbot", "BlenderbotTokenizer"),
    ("camembert", "CamembertTokenizer"),
    ("clip", "CLIPTokenizer"),
    ("cohere", "CohereTokenizer"),
    ("cohere2", "CohereTokenizer"),
    ("data2vec-text", "RobertaTokenizer"),
    ("deberta", "DebertaTokenizer"),
    ("deberta-v2", "DebertaV2Tokenizer"),
    ("distilbert", "BertTokenizer"),
    ("electra", "BertTokenizer"),
    ("ernie4_5", GENERIC),
    ("gemma", "GemmaTokenizer"),
    ("gemma2", "GemmaTokenizer"),
    ("gemma3_text", "GemmaTokenizer"),
    ("glm", GENERIC),
    ("glm4", GENERIC),
    ("gpt2", "GPT2Tokenizer"),
    ("gpt_bigcode", GENERIC),
    ("gpt_neo", "GPT2Tokenizer"),
    ("gpt_neox", "GPTNeoXTokenizer"),
    ("gptj", "GPT2Tokenizer"),
    ("granite", GENERIC),
    ("gte", "XLMRobertaTokenizer"),
    ("hyperclovax", GENERIC),
    ("internlm3", GENERIC),
    ("m2m_100", "M2M100Tokenizer"),
    ("mbart", "MBartTokenizer"),
    ("megatron-bert", "BertTokenizer"),
    ("mistral", GENERIC),
    ("modernbert", GENERIC),
    ("modernbert-decoder", GENERIC),
    ("mpnet", "MPNetTokenizer"),
    ("mpt", "GPTNeoXTokenizer"),
    ("mt5", "T5Tokenizer"),
    ("nemotron", GENERIC),
    ("nomic_bert", "BertTokenizer"),
    ("olmo", "GPTNeoXTokenizer"),
    ("olmo2", GENERIC),
    ("olmo3", GENERIC),
    ("openai-gpt", "OpenAIGPTTokenizer"),
    ("opt", "GPT2Tokenizer"),
    ("pegasus", "PegasusTokenizer"),
    ("phi", "GPT2Tokenizer"),
    ("phi3", GENERIC),
    ("qwen2", "Qwen2Tokenizer"),
    ("qwen3", "Qwen2Tokenizer"),
    ("rembert", "RemBertTokenizer"),
    ("roberta", "RobertaTokenizer"),
    ("roberta-prelayernorm", "RobertaTokenizer"),
    ("stablelm", GENERIC),
    ("starcoder2", "GPT2Tokenizer"),
    ("t5", "T5Tokenizer"),
    ("umt5", GENERIC),
    ("xglm", "XGLMTokenizer"),
    ("xlm-roberta", "XLMRobertaTokenizer"),
    ("xlm-roberta-xl", GENERIC),
];

/// Values of `model_type` whose class is used even if the folder names another class.
const FIXED: &[&str] = &["qwen2"];

/// Returns the class that the library transformers uses for a model's tokenizer. `named` is the class in the folder's files. Returns `None`
/// for [`GENERIC`] and for classes that are not listed.
pub(super) fn class_of(model_type: Option<&str>, named: Option<&str>) -> Option<&'static Class> {
    let mut registered = MODEL_CLASSES.iter();
    let registered = registered.find(|(model, _)| Some(*model) == model_type);
    let registered = registered.map(|(_, class)| *class);
    let name = match registered {
        Some(GENERIC) => GENERIC,
        Some(class) if model_type.is_some_and(|model| FIXED.contains(&model)) => class,
        _ => named.or(registered)?,
    };
    let name = name.strip_suffix("Fast").unwrap_or(name);
    CLASSES.iter().find(|class| class.names.contains(&name))
}
