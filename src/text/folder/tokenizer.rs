//! Settings of tokenizer_config.json that take precedence over tokenizer.json, as in the library transformers 5.24.
//!
//! The library transformers rebuilds the tokenizers of most classes from the vocabulary of tokenizer.json and the settings of
//! tokenizer_config.json. Normalizer, pre-tokenizer and decoder are then those of the class (module `made`), whatever tokenizer.json
//! has. The module `classes` lists the settings that each class reads, and the tokens that it puts around texts. In addition, every
//! class reads the special tokens, `split_special_tokens` and `clean_up_tokenization_spaces`. `add_bos_token` and `add_eos_token` have
//! no effect if there is a tokenizer.json.

mod classes;
mod frame;
mod made;
mod parts;

use std::collections::HashMap;

use serde_json::Value;
use tokenizers::{
    AddedToken, Model, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
    Tokenizer,
    normalizers::{self, BertNormalizer},
    pre_tokenizers::{self, metaspace::PrependScheme, punctuation::Punctuation},
    processors::template::TemplateProcessing,
};

use super::json::Json;
use crate::text::{
    TextError,
    languages::{Languages, Places, SourcePlace, TargetPlace},
};
use classes::{Around, Class, Replaces, Setting, Template, class_of};
use parts::{
    before_precompiled, bert_in, normalizers_of, set_decoder_space, set_normalizer, set_space,
    strips_accents,
};

/// Names of special tokens that all classes know.
const NAMED: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// Settings of a tokenizer, with the class that reads them.
pub(in crate::text) struct TokenizerSettings {
    json: Json,
    /// Contents of special_tokens_map.json, which is ignored if there is an `added_tokens_decoder`.
    map: Option<Json>,
    class: Option<&'static Class>,
}

impl TokenizerSettings {
    /// Selects the tokenizer class. `config` is the model's config.json.
    pub(super) fn new(
        json: Json,
        map: Option<Json>,
        config: Option<&Value>,
    ) -> Result<Self, TextError> {
        let named = json.text("tokenizer_class")?;
        let of_model = |key: &str| config.and_then(|c| c.get(key)?.as_str());
        let class = class_of(
            of_model("model_type"),
            named.or(of_model("tokenizer_class")),
        );
        let map = map.filter(|_| json.get("added_tokens_decoder").is_none());
        Ok(Self { json, map, class })
    }

    /// Returns whether the second text of a pair has its own segment ids. False if `model_input_names` of the folder lacks
    /// `token_type_ids`.
    pub(in crate::text) fn has_segments(&self) -> Result<bool, TextError> {
        let key = "model_input_names";
        let Some(names) = self.json.get(key) else {
            return Ok(true);
        };
        let names = names
            .as_array()
            .ok_or_else(|| self.json.wrong(key, "a list of names"))?;
        Ok(names.iter().any(|name| name == "token_type_ids"))
    }

    /// Returns whether spaces before punctuation are removed from decoded texts. Texts of a byte pair encoding (`is_bpe`) keep them unless
    /// another setting forces the removal.
    pub(in crate::text) fn cleans_up(&self, is_bpe: bool) -> Result<bool, TextError> {
        let forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output";
        let cleans_up = self.json.flag("clean_up_tokenization_spaces", false)?;
        Ok(cleans_up && (!is_bpe || self.json.flag(forced, false)?))
    }

    /// Applies the settings to a tokenizer loaded from tokenizer.json.
    ///
    /// # Errors
    /// Returns an error if a setting cannot be applied to the tokenizer.
    pub(in crate::text) fn apply(&self, tokenizer: &mut Tokenizer) -> Result<(), TextError> {
        let class = self.class.filter(|class| !class.keeps(tokenizer));
        if let Some(parts) = class.and_then(|class| class.parts) {
            if let Some((expected, found)) = parts.other_model(tokenizer) {
                return Err(self.other_model(expected, found));
            }
            let replaced = parts.replace(tokenizer).map_err(|e| self.failed(e))?;
            if !replaced.is_empty() {
                tracing::info!(
                    "the {} of tokenizer.json is replaced by that of the tokenizer class, as in the library transformers",
                    replaced.join(", ")
                );
            }
        }
        for setting in class.map_or(&[][..], |class| class.settings) {
            match *setting {
                Setting::BertNormalizer => self.bert_normalizer(tokenizer)?,
                Setting::LowerCase => self.lower_case(tokenizer)?,
                Setting::Accents => self.accents(tokenizer)?,
                Setting::PrefixSpace(without) => self.prefix_space(without, tokenizer)?,
                Setting::LegacySpace => self.legacy_space(tokenizer)?,
                Setting::Punctuation => self.punctuation(tokenizer)?,
                Setting::Language(around) => self.language(around, tokenizer)?,
                Setting::SpacedMask => {}
            }
        }
        self.add_tokens(tokenizer)?;
        match class.map_or(Template::Stored, |class| class.template) {
            Template::Stored => {}
            Template::Empty => {
                tokenizer.with_post_processor(None::<PostProcessorWrapper>);
            }
            Template::Around(frame) => {
                let is_replaced = match frame.replaces {
                    Replaces::Any => true,
                    Replaces::Missing => tokenizer.get_post_processor().is_none(),
                    Replaces::Present => tokenizer.get_post_processor().is_some(),
                };
                if is_replaced {
                    self.frame(&frame, tokenizer)?;
                }
            }
            Template::Language => self.check_end(tokenizer)?,
        }
        if class.is_some() {
            self.check_unknown(tokenizer)?;
        }
        tokenizer.set_encode_special_tokens(self.json.flag("split_special_tokens", false)?);
        Ok(())
    }

    fn failed(&self, error: tokenizers::Error) -> TextError {
        self.json.problem(error.to_string())
    }

    /// Returns the error for a class whose kind of vocabulary (such as BPE) differs from that of tokenizer.json.
    fn other_model(&self, expected: &str, found: &str) -> TextError {
        let name = self.class.and_then(|class| class.names.first());
        self.json.problem(format!(
            "the tokenizer class `{}` reads a vocabulary of the kind {expected}, and that of tokenizer.json is {found}; to use tokenizer.json unchanged, set `tokenizer_class` to `PreTrainedTokenizerFast` in a copy of the folder",
            name.copied().unwrap_or_default()
        ))
    }

    fn bert_normalizer(&self, tokenizer: &mut Tokenizer) -> Result<(), TextError> {
        let strip_accents = match self.json.value.get("strip_accents") {
            None => None,
            Some(_) => Some(self.json.optional_flag("strip_accents")?),
        };
        let lowercase = self.json.optional_flag("do_lower_case")?;
        let parts = self.json.optional_flag("tokenize_chinese_chars")?;
        let mut normalizer = tokenizer.get_normalizer().cloned();
        let Some(bert) = normalizer.as_mut().and_then(bert_in) else {
            return Ok(());
        };
        let new = BertNormalizer::new(
            bert.clean_text,
            parts.unwrap_or(bert.handle_chinese_chars),
            strip_accents.unwrap_or(bert.strip_accents),
            lowercase.unwrap_or(bert.lowercase),
        );
        *bert = new;
        set_normalizer(tokenizer, normalizer).map_err(|e| self.failed(e))
    }

    fn lower_case(&self, tokenizer: &mut Tokenizer) -> Result<(), TextError> {
        let is_lower = |n: &NormalizerWrapper| matches!(n, NormalizerWrapper::Lowercase(_));
        let Some(lowercase) = self.json.optional_flag("do_lower_case")? else {
            return Ok(());
        };
        let mut all = normalizers_of(tokenizer);
        match lowercase {
            false => all.retain(|n| !is_lower(n)),
            true if all.iter().any(is_lower) => return Ok(()),
            true => {
                let at = before_precompiled(&all);
                all.insert(at, NormalizerWrapper::Lowercase(normalizers::Lowercase));
            }
        }
        let sequence = normalizers::Sequence::new(all);
        set_normalizer(tokenizer, Some(sequence.into())).map_err(|e| self.failed(e))
    }

    fn accents(&self, tokenizer: &mut Tokenizer) -> Result<(), TextError> {
        let Some(keeps) = self.json.optional_flag("keep_accents")? else {
            return Ok(());
        };
        let mut all = normalizers_of(tokenizer);
        match keeps {
            true => all.retain(|n| {
                !matches!(
                    n,
                    NormalizerWrapper::NFKD(_) | NormalizerWrapper::StripAccents(_)
                )
            }),
            false if all.iter().any(strips_accents) => return Ok(()),
            false => {
                let is_lower = |n: &NormalizerWrapper| matches!(n, NormalizerWrapper::Lowercase(_));
                let at = all.iter().position(is_lower);
                let at = at.unwrap_or_else(|| before_precompiled(&all));
                let two = [normalizers::NFKD.into(), normalizers::StripAccents.into()];
                all.splice(at..at, two);
            }
        }
        let sequence = normalizers::Sequence::new(all);
        set_normalizer(tokenizer, Some(sequence.into())).map_err(|e| self.failed(e))
    }

    fn prefix_space(
        &self,
        without: PrependScheme,
        tokenizer: &mut Tokenizer,
    ) -> Result<(), TextError> {
        let Some(adds) = self.json.optional_flag("add_prefix_space")? else {
            return Ok(());
        };
        let scheme = match adds {
            true => PrependScheme::Always,
            false => without,
        };
        let mut pre_tokenizer = tokenizer.get_pre_tokenizer().cloned();
        if let Some(pre_tokenizer) = &mut pre_tokenizer {
            set_space(pre_tokenizer, adds, scheme);
        }
        tokenizer.with_pre_tokenizer(pre_tokenizer);
        set_decoder_space(tokenizer, scheme);
        Ok(())
    }

    fn legacy_space(&self, tokenizer: &mut Tokenizer) -> Result<(), TextError> {
        let adds = self.json.optional_flag("add_prefix_space")?;
        let legacy = self.json.optional_flag("legacy")?;
        if adds.is_none() && legacy.is_none() {
            return Ok(());
        }
        let scheme = match (adds.unwrap_or(true), legacy.unwrap_or(false)) {
            (false, _) => PrependScheme::Never,
            (true, true) => PrependScheme::Always,
            (true, false) => PrependScheme::First,
        };
        let mut pre_tokenizer = tokenizer.get_pre_tokenizer().cloned();
        if let Some(pre_tokenizer) = &mut pre_tokenizer {
            set_space(pre_tokenizer, true, scheme);
        }
        tokenizer.with_pre_tokenizer(pre_tokenizer);
        set_decoder_space(tokenizer, scheme);
        Ok(())
    }

    fn punctuation(&self, tokenizer: &mut Tokenizer) -> Result<(), TextError> {
        let key = "split_by_punct";
        let Some(splits) = self.json.optional_flag(key)? else {
            return Ok(());
        };
        let mut all = match tokenizer.get_pre_tokenizer().cloned() {
            Some(PreTokenizerWrapper::Sequence(all)) => all.into_iter().collect(),
            one => one.into_iter().collect::<Vec<_>>(),
        };
        all.retain(|p| !matches!(p, PreTokenizerWrapper::Punctuation(_)));
        if splits {
            all.insert(0, Punctuation::default().into());
        }
        tokenizer.with_pre_tokenizer(Some(pre_tokenizers::sequence::Sequence::new(all)));
        Ok(())
    }

    /// Returns two settings: whether the language token comes after the source text, and the source language to use by default (`None` if
    /// neither `src_lang` nor the class sets one).
    fn source_language(&self, around: Around) -> Result<(bool, Option<&str>), TextError> {
        let source = self.json.text("src_lang")?;
        Ok(match around {
            Around::Underscored => (false, source),
            Around::Before => (false, source.or(Some("en_XX"))),
            Around::After => (true, source.or(Some("en_XX"))),
            Around::ByLegacyBehaviour => {
                let is_after = self.json.flag("legacy_behaviour", false)?;
                (is_after, source.or(Some("eng_Latn")))
            }
        })
    }

    /// Returns the languages of a tokenizer; `None` if its class has no languages. Each special token is a language, except for tokens with
    /// another role, such as `<s>` or the `eos_token`.
    pub(in crate::text) fn languages(
        &self,
        tokenizer: &Tokenizer,
    ) -> Result<Option<Languages>, TextError> {
        let mut settings = self.class.map_or(&[][..], |class| class.settings).iter();
        let around = settings.find_map(|setting| match setting {
            Setting::Language(around) => Some(*around),
            _ => None,
        });
        let Some(around) = around else {
            return Ok(None);
        };
        let mut named = vec!["<s>", "</s>", "<unk>", "<pad>", "<mask>"];
        for key in NAMED {
            named.extend(self.token(key)?);
        }
        let added = tokenizer.get_added_tokens_decoder();
        let added = added.iter();
        let added = added.filter(|(_, t)| t.special && !named.contains(&t.content.as_str()));
        let ids = added.filter_map(|(&id, token)| {
            let name = match around {
                Around::Underscored => token.content.strip_prefix("__")?.strip_suffix("__")?,
                Around::Before | Around::After | Around::ByLegacyBehaviour => &token.content,
            };
            Some((name.to_owned(), id))
        });
        let ids = ids.collect();
        let end = self.token("eos_token")?.unwrap_or("</s>");
        let end = tokenizer.token_to_id(end).ok_or_else(|| {
            let problem = format!("`{end}` ends texts, and tokenizer.json lacks it");
            self.json.problem(problem)
        })?;
        let (is_after, _) = self.source_language(around)?;
        let places = Places::Both {
            source: match is_after {
                true => SourcePlace::After,
                false => SourcePlace::Before,
            },
            end,
            // With `Around::After`, the target's language token is the start token of the decoder.
            target: match around {
                Around::After => TargetPlace::Start,
                Around::Before | Around::ByLegacyBehaviour | Around::Underscored => {
                    TargetPlace::First
                }
            },
        };
        Ok(Some(Languages { ids, places }))
    }

    fn language(&self, around: Around, tokenizer: &mut Tokenizer) -> Result<(), TextError> {
        let key = "src_lang";
        let (is_after, source) = self.source_language(around)?;
        let Some(source) = source else { return Ok(()) };
        let language = match around {
            Around::Underscored => format!("__{source}__"),
            Around::Before | Around::After | Around::ByLegacyBehaviour => source.to_owned(),
        };
        // `src_lang` is missing, and tokenizer.json has no token for the class's default language: keep the template of tokenizer.json.
        if self.json.get(key).is_none() && tokenizer.token_to_id(&language).is_none() {
            return Ok(());
        }
        let end = self.token("eos_token")?.unwrap_or("</s>").to_owned();
        let id = |token: &str, problem: &dyn Fn() -> TextError| {
            tokenizer.token_to_id(token).ok_or_else(problem)
        };
        let ids = [
            id(&language, &|| {
                let expected = "a language whose token tokenizer.json has";
                self.json.wrong(key, expected)
            })?,
            id(&end, &|| {
                let problem = format!("`{end}` ends texts, and tokenizer.json lacks it");
                self.json.problem(problem)
            })?,
        ];
        let with = |texts: &[&str]| -> Vec<String> {
            let texts = texts.iter().copied();
            let (before, after) = match is_after {
                true => (None, [Some(end.as_str()), Some(language.as_str())]),
                false => (Some(language.as_str()), [Some(end.as_str()), None]),
            };
            let all = before.into_iter().chain(texts);
            let all = all.chain(after.into_iter().flatten());
            all.map(str::to_owned).collect()
        };
        let template = TemplateProcessing::builder()
            .try_single(with(&["$A"]))
            .and_then(|builder| builder.try_pair(with(&["$A", "$B"])))
            .map_err(|e| self.json.problem(e.to_string()))?
            .special_tokens(vec![(language.clone(), ids[0]), (end.clone(), ids[1])])
            .build()
            .map_err(|e| self.json.problem(e.to_string()))?;
        tokenizer.with_post_processor(Some(template));
        Ok(())
    }

    /// Adds each token that tokenizer.json lacks, or that it stores with other flags.
    fn add_tokens(&self, tokenizer: &mut Tokenizer) -> Result<(), TextError> {
        let named = self.special_tokens()?;
        let known = tokenizer.get_added_tokens_decoder();
        let known: HashMap<&str, &AddedToken> =
            known.values().map(|t| (t.content.as_str(), t)).collect();
        // Some classes create a mask token that strips the space before it.
        let is_spaced = |class: &Class| {
            let mut settings = class.settings.iter();
            settings.any(|s| matches!(s, Setting::Language(_) | Setting::SpacedMask))
        };
        let mask = match self.class.is_some_and(is_spaced) {
            true => self.token("mask_token")?,
            false => None,
        };
        let mut new = self.added_tokens()?;
        for token in &mut new {
            token.special |= named.contains(&token.content);
        }
        new.retain(|token| known.get(token.content.as_str()) != Some(&token));
        for text in named {
            if !known.contains_key(text.as_str()) && !new.iter().any(|t| t.content == text) {
                let is_mask = mask == Some(text.as_str());
                new.push(AddedToken::from(text, true).lstrip(is_mask));
            }
        }
        // Adding an empty list of tokens is as slow as adding several tokens.
        if !new.is_empty() {
            tokenizer.add_tokens(new).map_err(|e| self.failed(e))?;
        }
        Ok(())
    }

    /// Returns `added_tokens_decoder`, in order of the ids.
    fn added_tokens(&self) -> Result<Vec<AddedToken>, TextError> {
        let key = "added_tokens_decoder";
        let Some(table) = self.json.get(key) else {
            return Ok(Vec::new());
        };
        let wrong = || {
            let problem = format!("`{key}` is not an object of tokens by id");
            self.json.problem(problem)
        };
        let mut tokens = Vec::new();
        for (id, value) in table.as_object().ok_or_else(wrong)? {
            let id: u32 = id.parse().map_err(|_| wrong())?;
            let text = token_text(value).ok_or_else(wrong)?;
            let is = |flag: &str| value.get(flag).and_then(Value::as_bool);
            let special = is("special").unwrap_or(false);
            let token = AddedToken::from(text, special)
                .single_word(is("single_word").unwrap_or(false))
                .lstrip(is("lstrip").unwrap_or(false))
                .rstrip(is("rstrip").unwrap_or(false))
                .normalized(is("normalized").unwrap_or(!special));
            tokens.push((id, token));
        }
        tokens.sort_by_key(|(id, _)| *id);
        Ok(tokens.into_iter().map(|(_, token)| token).collect())
    }

    /// Returns a value of special_tokens_map.json, if it is used, or of tokenizer_config.json.
    fn get(&self, key: &str) -> Option<&Value> {
        let map = self.map.as_ref().and_then(|map| map.get(key));
        map.or_else(|| self.json.get(key))
    }

    fn token(&self, key: &str) -> Result<Option<&str>, TextError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => token_text(value)
                .map(Some)
                .ok_or_else(|| self.json.wrong(key, "a token")),
        }
    }

    /// Returns all special tokens in the folder's files: the values of keys such as `mask_token`, and the list of additional tokens.
    fn special_tokens(&self) -> Result<Vec<String>, TextError> {
        let mut tokens = Vec::new();
        for key in NAMED {
            tokens.extend(self.token(key)?.map(str::to_owned));
        }
        let keys = self.json.value.as_object().into_iter().flatten();
        let own = keys.filter(|(key, _)| key.ends_with("_token") && !NAMED.contains(&key.as_str()));
        tokens.extend(own.filter_map(|(_, value)| token_text(value).map(str::to_owned)));
        let is_empty = |v: &Value| {
            v.as_array().is_some_and(Vec::is_empty) || v.as_object().is_some_and(|o| o.is_empty())
        };
        let keys = ["extra_special_tokens", "additional_special_tokens"];
        let lists = keys.map(|key| (key, self.get(key).filter(|v| !is_empty(v))));
        let Some((key, list)) = lists.into_iter().find_map(|(key, list)| Some((key, list?))) else {
            return Ok(tokens);
        };
        let items: Vec<&Value> = match list {
            Value::Array(items) => items.iter().collect(),
            Value::Object(items) => items.values().collect(),
            _ => return Err(self.json.wrong(key, "a list of tokens")),
        };
        for item in items {
            let text = token_text(item).ok_or_else(|| self.json.wrong(key, "a list of tokens"))?;
            tokens.push(text.to_owned());
        }
        Ok(tokens)
    }

    /// Returns an error if the tokenizer does not add the `eos_token` to texts.
    fn check_end(&self, tokenizer: &Tokenizer) -> Result<(), TextError> {
        let key = "eos_token";
        let Some(token) = self.token(key)? else {
            return Ok(());
        };
        let empty = tokenizer.encode("", true).map_err(|e| self.failed(e))?;
        let id = tokenizer.token_to_id(token);
        if id.is_some_and(|id| empty.get_ids().contains(&id)) {
            return Ok(());
        }
        Err(self.json.problem(format!(
            "`{key}` is `{token}`; expected a token that tokenizer.json puts around texts, of which there are {:?}",
            empty.get_tokens()
        )))
    }

    /// Returns an error if the unknown token is not that of tokenizer.json.
    fn check_unknown(&self, tokenizer: &Tokenizer) -> Result<(), TextError> {
        let Some(unknown) = self.token("unk_token")? else {
            return Ok(());
        };
        let is_right = match tokenizer.get_model() {
            ModelWrapper::WordPiece(model) => unknown == model.unk_token,
            ModelWrapper::BPE(model) => {
                let own = model.get_unk_token().as_deref();
                own.is_none_or(|own| own == unknown)
            }
            model => model.token_to_id(unknown).is_some(),
        };
        match is_right {
            true => Ok(()),
            false => Err(self.json.wrong("unk_token", "that of tokenizer.json")),
        }
    }
}

/// Returns the text of a token, which the files store as a string or as an object.
pub(super) fn token_text(value: &Value) -> Option<&str> {
    let text = value.as_str().or_else(|| value.get("content")?.as_str());
    text.filter(|text| !text.is_empty())
}

/// Removes the spaces that tokenizers leave before punctuation and English contractions, like `clean_up_tokenization` of the library
/// transformers.
pub(in crate::text) fn cleaned_up(text: &str) -> String {
    const PAIRS: [(&str, &str); 10] = [
        (" .", "."),
        (" ?", "?"),
        (" !", "!"),
        (" ,", ","),
        (" ' ", "'"),
        (" n't", "n't"),
        (" 'm", "'m"),
        (" 's", "'s"),
        (" 've", "'ve"),
        (" 're", "'re"),
    ];
    PAIRS
        .iter()
        .fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}
