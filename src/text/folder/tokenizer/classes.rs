//! Tokenizer classes of the library transformers, with the settings that each class reads.

use tokenizers::pre_tokenizers::metaspace::PrependScheme;

/// A tokenizer class of the library transformers.
pub(super) struct Class {
    /// Names in `tokenizer_class`, without the suffix `Fast`.
    pub(super) names: &'static [&'static str],
    pub(super) settings: &'static [Setting],
    /// Special tokens that the class puts around texts, regardless of tokenizer.json.
    pub(super) around: &'static [&'static str],
}

/// A setting, or several related settings.
#[derive(Clone, Copy)]
pub(super) enum Setting {
    /// `do_lower_case`, `strip_accents` and `tokenize_chinese_chars` of BERT's normalizer.
    BertNormalizer,
    /// `do_lower_case` of a sequence of normalizers.
    LowerCase,
    /// `keep_accents`.
    Accents,
    /// `add_prefix_space`. If false, Metaspace gets this scheme.
    PrefixSpace(PrependScheme),
    /// `add_prefix_space` and `legacy`, for a Metaspace that tokenizer.json may express as normalizers.
    LegacySpace,
    /// `split_by_punct`.
    Punctuation,
    /// `src_lang`.
    Language(Around),
    /// No tokens around texts, also if tokenizer.json has a template with such tokens.
    NoTemplate,
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

/// Classes with settings of their own. Any other class uses tokenizer.json unchanged.
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
            "MPNetTokenizer",
            "SqueezeBertTokenizer",
        ],
        settings: &[Setting::BertNormalizer],
        around: &["cls_token", "sep_token"],
    },
    Class {
        names: &["AlbertTokenizer"],
        settings: &[
            Setting::LowerCase,
            Setting::Accents,
            Setting::PrefixSpace(PrependScheme::Never),
        ],
        around: &["cls_token", "sep_token"],
    },
    Class {
        names: &["DebertaV2Tokenizer"],
        settings: &[
            Setting::LowerCase,
            Setting::Punctuation,
            Setting::PrefixSpace(PrependScheme::First),
        ],
        around: &["cls_token", "sep_token"],
    },
    Class {
        names: &["XLMRobertaTokenizer", "CamembertTokenizer"],
        settings: &[Setting::PrefixSpace(PrependScheme::Never)],
        around: &["bos_token", "eos_token"],
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
        around: &["cls_token", "sep_token"],
    },
    Class {
        names: &["GPT2Tokenizer", "Qwen2Tokenizer"],
        settings: &[Setting::PrefixSpace(PrependScheme::Never)],
        around: &[],
    },
    Class {
        names: &["GPTNeoXTokenizer"],
        settings: &[
            Setting::PrefixSpace(PrependScheme::Never),
            Setting::NoTemplate,
        ],
        around: &[],
    },
    Class {
        names: &["LlamaTokenizer"],
        settings: &[Setting::LegacySpace],
        around: &[],
    },
    Class {
        names: &["CLIPTokenizer"],
        settings: &[],
        around: &["bos_token", "eos_token"],
    },
    Class {
        names: &["T5Tokenizer"],
        settings: &[],
        around: &["eos_token"],
    },
    Class {
        names: &["MBartTokenizer"],
        settings: &[Setting::Language(Around::After)],
        around: &["eos_token"],
    },
    Class {
        names: &["MBart50Tokenizer"],
        settings: &[Setting::Language(Around::Before)],
        around: &["eos_token"],
    },
    Class {
        names: &["NllbTokenizer"],
        settings: &[Setting::Language(Around::ByLegacyBehaviour)],
        around: &["eos_token"],
    },
    Class {
        names: &["M2M100Tokenizer"],
        settings: &[Setting::Language(Around::Underscored)],
        around: &["eos_token"],
    },
];

/// The class that uses tokenizer.json unchanged.
const GENERIC: &str = "TokenizersBackend";

/// Classes that the library transformers uses for a `model_type` if the folder names none. If the listed class is [`GENERIC`], a class that
/// the folder names is ignored.
const MODEL_CLASSES: &[(&str, &str)] = &[
    ("albert", "AlbertTokenizer"),
    ("bart", "RobertaTokenizer"),
    ("bert", "BertTokenizer"),
    ("camembert", "CamembertTokenizer"),
    ("clip", "CLIPTokenizer"),
    ("deberta-v2", "DebertaV2Tokenizer"),
    ("distilbert", "BertTokenizer"),
    ("electra", "BertTokenizer"),
    ("gpt2", "GPT2Tokenizer"),
    ("m2m_100", "M2M100Tokenizer"),
    ("mbart", "MBartTokenizer"),
    ("mistral", GENERIC),
    ("modernbert", GENERIC),
    ("mpnet", "MPNetTokenizer"),
    ("mt5", "T5Tokenizer"),
    ("nomic_bert", "BertTokenizer"),
    ("qwen3", "Qwen2Tokenizer"),
    ("roberta", "RobertaTokenizer"),
    ("t5", "T5Tokenizer"),
    ("umt5", GENERIC),
    ("xlm-roberta", "XLMRobertaTokenizer"),
    ("xlm-roberta-xl", GENERIC),
];

/// Returns the class that the library transformers uses for a model's tokenizer. `named` is the class in the folder's files. Returns `None`
/// for a class without settings of its own.
pub(super) fn class_of(model_type: Option<&str>, named: Option<&str>) -> Option<&'static Class> {
    let mut registered = MODEL_CLASSES.iter();
    let registered = registered.find(|(model, _)| Some(*model) == model_type);
    let registered = registered.map(|(_, class)| *class);
    let name = match registered {
        Some(GENERIC) => GENERIC,
        _ => named.or(registered)?,
    };
    let name = name.strip_suffix("Fast").unwrap_or(name);
    CLASSES.iter().find(|class| class.names.contains(&name))
}
