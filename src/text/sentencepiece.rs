//! Tokenizers published as a SentencePiece model with a `vocab.json` of ids: models for one language pair (`source.spm`) and for many
//! languages (`sentencepiece.bpe.model`). The library transformers writes no tokenizer.json for them. Other SentencePiece models can be
//! converted to a tokenizer.json with one line of Python. The error for a folder without tokenizer.json contains this line.

mod pieces;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use tokenizers::Encoding;

use super::{
    TextError,
    folder::no_config,
    languages::{Languages, Places, SourcePlace, TargetPlace},
};
use crate::{
    files::{self, Kind},
    runtime::weights::Found,
};
use pieces::Model;

/// Character that represents a space in a piece.
const SPACE: &str = "\u{2581}";

/// A SentencePiece model, the ids of its pieces, and the special tokens around texts.
#[derive(Clone)]
pub(super) struct SentencePiece {
    model: std::sync::Arc<Model>,
    ids: HashMap<String, u32>,
    texts: HashMap<u32, String>,
    /// Id of the unknown token, which replaces pieces without an id.
    unknown: u32,
    /// Special tokens, longest first. They are matched in a text before the model splits it into pieces.
    specials: Vec<Special>,
    before: Vec<u32>,
    after: Vec<u32>,
    kind: Kinds,
    /// SentencePiece model of the target language (`target.spm`), if the folder has one.
    target: Option<std::sync::Arc<Model>>,
    languages: Languages,
    /// Maximum number of tokens of a text, including special tokens, and whether a longer text is truncated at its beginning.
    limit: Option<(usize, bool)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kinds {
    /// A vocabulary of two languages. A text may begin with the code of a target language, enclosed in `>>` and `<<`.
    Pair,
    /// A vocabulary of many languages. The ids of the language tokens follow those of the vocabulary.
    Many,
}

#[derive(Clone)]
struct Special {
    text: String,
    id: u32,
    /// Whether `decode` omits the token if `skips_special` is true.
    is_silent: bool,
}

impl Special {
    fn silent(text: &str, id: u32) -> Self {
        Self {
            text: text.to_owned(),
            id,
            is_silent: true,
        }
    }
}

/// Loads the tokenizer of a folder without tokenizer.json. Returns it with the path of its SentencePiece model.
///
/// # Errors
/// Returns an error if a file is damaged or has an unsupported format.
pub(super) fn published(folder: &Path) -> Result<(SentencePiece, PathBuf), TextError> {
    let has = |name: &str| folder.join(name).is_file();
    let (kind, name) = if has("source.spm") {
        (Kinds::Pair, "source.spm")
    } else if has("sentencepiece.bpe.model") && has("vocab.json") {
        (Kinds::Many, "sentencepiece.bpe.model")
    } else {
        return Err(none(folder));
    };
    let file = folder.join(name);
    let settings = Settings::read(folder)?;
    let model = Model::read(&files::bytes(&file, Kind::SentencePiece)?);
    let model = model.map_err(|problem| broken(&file, problem))?;
    let mut pieces = SentencePiece::new(folder, kind, model, &settings)?;
    let target = folder.join("target.spm");
    if kind == Kinds::Pair && target.is_file() {
        let model = Model::read(&files::bytes(&target, Kind::SentencePiece)?);
        let model = model.map_err(|problem| broken(&target, problem))?;
        pieces.target = Some(model.into());
    }
    Ok((pieces, file))
}

/// Returns the error for a folder without a supported tokenizer. The error names the files found instead.
fn none(folder: &Path) -> TextError {
    const OTHERS: [&str; 6] = [
        "spiece.model",
        "sentencepiece.bpe.model",
        "tokenizer.model",
        "merges.txt",
        "vocab.txt",
        "vocab.json",
    ];
    if !folder.is_dir() {
        return TextError::NoFolder {
            folder: folder.to_owned(),
        };
    }
    let holds = Found::in_folder(folder);
    if holds != Found::Nothing && !folder.join("config.json").is_file() {
        return no_config(folder);
    }
    let found = OTHERS.into_iter().find(|name| folder.join(name).is_file());
    TextError::NoTokenizer {
        folder: folder.to_owned(),
        found,
    }
}

fn broken(file: &Path, problem: impl Into<String>) -> TextError {
    TextError::PublishedTokenizer {
        file: file.to_owned(),
        problem: problem.into(),
    }
}

/// Contents of tokenizer_config.json and special_tokens_map.json.
struct Settings {
    file: PathBuf,
    config: Value,
    map: Value,
}

impl Settings {
    fn read(folder: &Path) -> Result<Self, TextError> {
        let read = |name: &str| {
            let file = folder.join(name);
            if !file.exists() {
                return Ok(json!({}));
            }
            let text = files::text(&file, Kind::Config)?;
            let value: Value = serde_json::from_str(&text)
                .map_err(|e| broken(&file, format!("it is not JSON: {e}")))?;
            match value.is_object() {
                true => Ok(value),
                false => Err(broken(&file, "expected an object")),
            }
        };
        let settings = Self {
            file: folder.join("tokenizer_config.json"),
            config: read("tokenizer_config.json")?,
            map: read("special_tokens_map.json")?,
        };
        // Other values would change token ids and are not supported.
        let off = [
            ("separate_vocabs", json!(false)),
            ("split_special_tokens", json!(false)),
            ("sp_model_kwargs", json!({})),
        ];
        for (key, usual) in off {
            if let Some(value) = settings.get(key).filter(|value| **value != usual) {
                return Err(settings.wrong(
                    key,
                    value,
                    &format!("{usual}, the only supported value"),
                ));
            }
        }
        Ok(settings)
    }

    fn wrong(&self, key: &str, value: &Value, expected: &str) -> TextError {
        broken(
            &self.file,
            format!("`{key}` is {value}; expected {expected}"),
        )
    }

    fn get(&self, key: &str) -> Option<&Value> {
        let found = self.config.get(key).filter(|v| !v.is_null());
        found.or_else(|| self.map.get(key).filter(|v| !v.is_null()))
    }

    /// Returns the text of a token, which the files store as a string or as an object.
    fn token(&self, key: &str) -> Result<Option<&str>, TextError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let text = token(value).ok_or_else(|| self.wrong(key, value, "a token"))?;
        Ok(Some(text))
    }

    /// Returns the additional special tokens, such as languages. Their key depends on the version of the library transformers.
    fn tokens(&self) -> Result<Vec<&str>, TextError> {
        let keys = ["additional_special_tokens", "extra_special_tokens"];
        let mut tokens = Vec::new();
        for key in keys {
            let Some(value) = self.get(key) else {
                continue;
            };
            let wrong = || self.wrong(key, value, "a list of tokens");
            for item in value.as_array().ok_or_else(wrong)? {
                let text = token(item).ok_or_else(wrong)?;
                if !tokens.contains(&text) {
                    tokens.push(text);
                }
            }
        }
        Ok(tokens)
    }

    /// Returns the tokens of `added_tokens_decoder` with their ids.
    fn added(&self) -> Result<Vec<Special>, TextError> {
        let key = "added_tokens_decoder";
        let Some(value) = self.get(key) else {
            return Ok(Vec::new());
        };
        let wrong = || {
            broken(
                &self.file,
                format!("`{key}` is not an object of tokens by id"),
            )
        };
        let mut added = Vec::new();
        for (id, value) in value.as_object().ok_or_else(wrong)? {
            let id: u32 = id.parse().map_err(|_| wrong())?;
            let text = token(value).ok_or_else(wrong)?.to_owned();
            let is = |flag: &str| value.get(flag).and_then(Value::as_bool) == Some(true);
            if let Some(flag) = ["lstrip", "rstrip", "single_word"]
                .into_iter()
                .find(|f| is(f))
            {
                return Err(broken(
                    &self.file,
                    format!(
                        "the token `{text}` has `{flag}`, which is not supported with a SentencePiece model; expected false"
                    ),
                ));
            }
            added.push(Special {
                text,
                id,
                is_silent: is("special"),
            });
        }
        Ok(added)
    }
}

fn token(value: &Value) -> Option<&str> {
    let text = value.as_str().or_else(|| value.get("content")?.as_str());
    text.filter(|text| !text.is_empty())
}

/// Reads `vocab.json`: ids by token.
fn vocabulary(file: &Path) -> Result<HashMap<String, u32>, TextError> {
    let text = files::text(file, Kind::Tokenizer)?;
    let ids: HashMap<String, u32> = serde_json::from_str(&text)
        .map_err(|e| broken(file, format!("it is not an object of ids by token: {e}")))?;
    let mut seen: HashMap<u32, &String> = HashMap::new();
    for (text, &id) in &ids {
        if let Some(other) = seen.insert(id, text) {
            let (a, b) = (text.min(other), text.max(other));
            return Err(broken(
                file,
                format!("`{a}` and `{b}` both have the id {id}"),
            ));
        }
    }
    Ok(ids)
}

impl SentencePiece {
    fn new(
        folder: &Path,
        kind: Kinds,
        model: Model,
        settings: &Settings,
    ) -> Result<Self, TextError> {
        let file = folder.join("vocab.json");
        let mut ids = vocabulary(&file)?;
        let usual: &[(&str, &str)] = match kind {
            Kinds::Pair => &[
                ("eos_token", "</s>"),
                ("unk_token", "<unk>"),
                ("pad_token", "<pad>"),
            ],
            Kinds::Many => &[
                ("bos_token", "<s>"),
                ("pad_token", "<pad>"),
                ("eos_token", "</s>"),
                ("unk_token", "<unk>"),
            ],
        };
        let n_ids = ids.len() as u32;
        let mut specials = settings.added()?;
        for &Special { ref text, id, .. } in &specials {
            if let Some(known) = ids.insert(text.clone(), id).filter(|&known| known != id) {
                return Err(broken(
                    &settings.file,
                    format!(
                        "the token `{text}` has the id {id}; expected {known}, its id in vocab.json"
                    ),
                ));
            }
        }
        let (mut end, mut unknown) = (0, 0);
        for &(key, usual) in usual {
            let text = settings.token(key)?.unwrap_or(usual);
            let id = ids.get(text).copied().ok_or_else(|| {
                broken(
                    &file,
                    format!(
                        "there is no token `{text}`, which is the `{key}` of the folder's settings"
                    ),
                )
            })?;
            match key {
                "eos_token" => end = id,
                "unk_token" => unknown = id,
                _ => {}
            }
            specials.push(Special::silent(text, id));
        }
        let listed = settings.tokens()?;
        // Languages without an id get the ids after the vocabulary.
        let mut numbers = n_ids..;
        for text in listed {
            let id = match (ids.get(text), kind) {
                (Some(&id), _) => id,
                (None, Kinds::Many) => numbers.next().unwrap_or(u32::MAX),
                (None, Kinds::Pair) => {
                    return Err(broken(
                        &settings.file,
                        format!(
                            "the special token `{text}` has no id; expected one in vocab.json or `added_tokens_decoder`"
                        ),
                    ));
                }
            };
            ids.insert(text.to_owned(), id);
            specials.push(Special::silent(text, id));
        }
        let mut before = Vec::new();
        if kind == Kinds::Many {
            let source = settings.get("src_lang");
            let source = source.map_or(Some("en"), Value::as_str).unwrap_or_default();
            let language = format!("__{source}__");
            before.push(*ids.get(&language).ok_or_else(|| {
                broken(
                    &settings.file,
                    format!("the token `{language}` of `src_lang`, which is put before each text, is unknown; expected it in `additional_special_tokens`, here or in special_tokens_map.json"),
                )
            })?);
        }
        let named = |begin: &str, end: &str| {
            let named = ids.iter().filter_map(|(text, &id)| {
                let name = text.strip_prefix(begin)?.strip_suffix(end)?;
                (!name.is_empty()).then(|| (name.to_owned(), id))
            });
            named.collect()
        };
        let setting = |key: &str| settings.get(key).and_then(Value::as_str).map(str::to_owned);
        let languages = match kind {
            Kinds::Pair => Languages {
                ids: named(">>", "<<"),
                places: Places::InSource {
                    source: setting("source_lang"),
                    target: setting("target_lang"),
                },
            },
            Kinds::Many => Languages {
                ids: named("__", "__"),
                places: Places::Both {
                    source: SourcePlace::Before,
                    end,
                    target: TargetPlace::First,
                },
            },
        };
        // If several tokens have equal text, only the first one is kept. The tokens of `added_tokens_decoder` come first.
        specials.sort_by(|a, b| (b.text.len(), &a.text).cmp(&(a.text.len(), &b.text)));
        specials.dedup_by(|later, first| later.text == first.text);
        Ok(Self {
            model: model.into(),
            texts: ids.iter().map(|(t, &id)| (id, t.clone())).collect(),
            ids,
            unknown,
            specials,
            before,
            after: vec![end],
            kind,
            target: None,
            languages,
            limit: None,
        })
    }

    /// Sets the maximum number of tokens of a text, and whether a longer text is truncated at its beginning.
    pub(super) fn limit(&mut self, limit: Option<(usize, bool)>) {
        self.limit = limit;
    }

    /// Returns the maximum number of tokens of a text.
    pub(super) fn max_tokens(&self) -> Option<usize> {
        self.limit.map(|(limit, _)| limit)
    }

    pub(super) fn languages(&self) -> &Languages {
        &self.languages
    }

    /// Tokenizes the beginning of a translation, without special tokens around it.
    pub(super) fn prefix(&self, text: &str) -> Vec<u32> {
        match &self.target {
            Some(target) => {
                let pieces = target.cut(text).into_iter();
                let id = |piece: String| self.id(&piece).unwrap_or(self.unknown);
                pieces.map(|cut| id(cut.text)).collect()
            }
            None => self.tokens(text).into_iter().map(|(id, ..)| id).collect(),
        }
    }

    pub(super) fn id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    pub(super) fn text_bytes(&self, id: u32) -> usize {
        self.texts.get(&id).map_or(0, String::len)
    }

    pub(super) fn knows(&self, id: u32) -> bool {
        self.texts.contains_key(&id)
    }

    /// Returns the tokens of a text and their byte ranges.
    fn tokens(&self, text: &str) -> Vec<(u32, String, (usize, usize))> {
        let mut tokens = Vec::new();
        let (mut from, mut at) = (0, 0);
        while let Some(first) = text[at..].chars().next() {
            let mut specials = self.specials.iter();
            let Some(special) = specials.find(|s| text[at..].starts_with(&s.text)) else {
                at += first.len_utf8();
                continue;
            };
            self.cut(&text[from..at], from, &mut tokens);
            let end = at + special.text.len();
            tokens.push((special.id, special.text.clone(), (at, end)));
            (from, at) = (end, end);
        }
        self.cut(&text[from..], from, &mut tokens);
        tokens
    }

    /// Appends the tokens of `text`, which contains no special tokens, to `tokens`. `from` is the byte offset of `text` in the whole text.
    fn cut(&self, text: &str, from: usize, tokens: &mut Vec<(u32, String, (usize, usize))>) {
        let mut skipped = 0;
        let id = |piece: &str| self.id(piece).unwrap_or(self.unknown);
        if self.kind == Kinds::Pair
            && text.starts_with(">>")
            && let Some(end) = text.find("<<")
        {
            skipped = end + 2;
            let code = &text[..skipped];
            tokens.push((id(code), code.to_owned(), (from, from + skipped)));
        }
        let from = from + skipped;
        for cut in self.model.cut(&text[skipped..]) {
            let span = (from + cut.span.0, from + cut.span.1);
            tokens.push((id(&cut.text), cut.text, span));
        }
    }

    /// Sets whether texts that are too long are truncated at their beginning instead of their end.
    pub(super) fn cut_front(&mut self, cuts_front: bool) {
        self.limit = self.limit.map(|(limit, _)| (limit, cuts_front));
    }

    /// Encodes a text, with special tokens if requested, and truncates it to the limit.
    pub(super) fn encode(&self, text: &str, adds_special: bool) -> Encoding {
        let mut tokens = self.tokens(text);
        let (before, after) = match adds_special {
            true => (self.before.as_slice(), self.after.as_slice()),
            false => (&[][..], &[][..]),
        };
        let around = before.len() + after.len();
        let mut overflowing = Vec::new();
        if let Some((limit, cuts_front)) = self.limit {
            let most = limit.saturating_sub(around);
            if tokens.len() > most {
                overflowing.push(Encoding::default());
                match cuts_front {
                    true => drop(tokens.drain(..tokens.len() - most)),
                    false => tokens.truncate(most),
                }
            }
        }
        let special = |&id: &u32| {
            let text = self.texts.get(&id).cloned();
            (id, text.unwrap_or_default(), (0, 0), 1)
        };
        let own = tokens.into_iter();
        let own = own.map(|(id, text, span)| (id, text, span, 0));
        let around = (before.iter().map(special), after.iter().map(special));
        let all: Vec<_> = around.0.chain(own).chain(around.1).collect();
        let n = all.len();
        Encoding::new(
            all.iter().map(|t| t.0).collect(),
            vec![0; n],
            all.iter().map(|t| t.1.clone()).collect(),
            vec![None; n],
            all.iter().map(|t| t.2).collect(),
            all.iter().map(|t| t.3).collect(),
            vec![1; n],
            overflowing,
            Default::default(),
        )
    }

    /// Returns the text of tokens, without special tokens if `skips_special`.
    ///
    /// # Errors
    /// Returns a message that names the first unknown id.
    pub(super) fn decode(&self, ids: &[u32], skips_special: bool) -> Result<String, String> {
        let (mut text, mut run) = (String::new(), Vec::new());
        for id in ids {
            let piece = self.texts.get(id);
            let piece = piece.ok_or_else(|| format!("there is no token of id {id}"))?;
            let special = self.specials.iter().find(|s| s.id == *id && s.is_silent);
            match special {
                None => run.push(piece.as_str()),
                Some(_) if skips_special => {}
                Some(_) => {
                    text += &self.model.text(run.drain(..));
                    text += piece;
                    if self.kind == Kinds::Pair {
                        text.push(' ');
                    }
                }
            }
        }
        text += &self.model.text(run);
        if self.kind == Kinds::Pair {
            text = text.replace(SPACE, " ");
        }
        // Strips whitespace as Python does.
        let is_space = |c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c);
        Ok(text.trim_matches(is_space).to_owned())
    }
}
