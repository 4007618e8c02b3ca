//! Tokens with their kinds and ids.

use std::collections::HashMap;

use super::{
    super::{
        super::{GgufProblem, Value, error::Result},
        settings::Settings,
        shown, wrong_key,
    },
    problem,
};

/// Maximum size of a token in bytes. All splits of a token are tried, so its size must be bounded.
const MAX_TOKEN: usize = 1024;

/// Kind of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Normal,
    Unknown,
    /// A token that does not occur in texts.
    Control,
    /// A token that is never split.
    UserDefined,
    Unused,
    /// A single byte, used for characters that are not tokens.
    Byte,
}

/// The tokens of a file.
pub(super) struct Vocabulary<'g> {
    pub settings: Settings<'g>,
    pub tokens: &'g [String],
    pub kinds: Vec<Kind>,
    /// Ids of the tokens by text.
    pub ids: HashMap<&'g str, usize>,
}

impl<'g> Vocabulary<'g> {
    pub(super) fn new(settings: &Settings<'g>) -> Result<Self> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        let tokens = settings
            .gguf
            .value(TOKENS, "an array of strings", |value| {
                value.as_array()?.as_strings()
            })?;
        let tokens = tokens.ok_or_else(|| GgufProblem::NoKey {
            key: TOKENS.to_owned(),
            expected: "the tokens of the vocabulary".to_owned(),
        })?;
        let rows = settings.rows("token_embd.weight")?;
        if tokens.len() as u64 > rows {
            let problem = format!(
                "it has {} tokens; expected at most {rows}, the rows of `token_embd.weight`",
                tokens.len()
            );
            return Err(wrong_key(TOKENS, problem));
        }
        let kinds = kinds(settings, tokens.len())?;
        let mut ids = HashMap::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            if token.len() > MAX_TOKEN {
                let problem = format!(
                    "token {id} has {} bytes, above the limit of {MAX_TOKEN}",
                    token.len()
                );
                return Err(wrong_key(TOKENS, problem));
            }
            if let Some(known) = ids.insert(token.as_str(), id) {
                let problem = format!(
                    "tokens {known} and {id} are both `{}`; expected each token once",
                    shown(token)
                );
                return Err(wrong_key(TOKENS, problem));
            }
        }
        Ok(Self {
            settings: *settings,
            tokens,
            kinds,
            ids,
        })
    }

    /// Returns the id of a special token. `key` is its metadata key without the prefix `tokenizer.ggml.`.
    pub(super) fn special(&self, key: &str) -> Result<Option<usize>> {
        let key = format!("tokenizer.ggml.{key}");
        let value = self
            .settings
            .gguf
            .value(&key, "the number of a token", Value::as_u64)?;
        let Some(id) = value else {
            return Ok(None);
        };
        let tokens = self.tokens.len();
        match usize::try_from(id).ok().filter(|&id| id < tokens) {
            Some(id) => Ok(Some(id)),
            None => Err(wrong_key(
                &key,
                format!("it is {id}; expected the number of one of {tokens} tokens"),
            )),
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        let key = format!("tokenizer.ggml.{key}");
        self.settings
            .gguf
            .value(&key, "a truth value", Value::as_bool)
    }

    pub(super) fn bos(&self) -> Result<Option<usize>> {
        self.special("bos_token_id")
    }

    pub(super) fn eos(&self) -> Result<Option<usize>> {
        self.special("eos_token_id")
    }

    /// Returns the token of the first key that exists, or else the token `text`.
    fn first(&self, keys: &[&str], text: &str) -> Result<Option<usize>> {
        for key in keys {
            if let Some(id) = self.special(key)? {
                return Ok(Some(id));
            }
        }
        Ok(self.ids.get(text).copied())
    }

    /// Returns BERT's token at the start of a text.
    pub(super) fn cls(&self) -> Result<Option<usize>> {
        self.first(&["cls_token_id", "bos_token_id"], "[CLS]")
    }

    /// Returns BERT's token at the end of a text. The misspelled key is part of the GGUF format.
    pub(super) fn sep(&self) -> Result<Option<usize>> {
        self.first(&["seperator_token_id", "eos_token_id"], "[SEP]")
    }

    pub(super) fn unknown(&self) -> Result<Option<usize>> {
        let known = self.special("unknown_token_id")?;
        Ok(known.or_else(|| self.kinds.iter().position(|&kind| kind == Kind::Unknown)))
    }

    /// Returns BERT's token for words that cannot be split into tokens.
    pub(super) fn first_unknown(&self) -> Result<usize> {
        let id = self.unknown()?.or_else(|| self.ids.get("[UNK]").copied());
        self.need(id, "token for unknown words")
    }

    /// Returns the name of the pre-tokenizer.
    pub(super) fn pre(&self) -> Result<Option<&'g str>> {
        self.settings
            .gguf
            .value("tokenizer.ggml.pre", "a string", Value::as_str)
    }

    /// Returns whether texts begin with the BOS token. If the file does not state this, the default of llama.cpp applies.
    pub(super) fn adds_bos(&self) -> Result<bool> {
        if let Some(adds) = self.flag("add_bos_token")? {
            return Ok(adds);
        }
        Ok(match super::model(&self.settings)? {
            "llama" => true,
            _ => self.pre()?.is_some_and(super::parts::adds_bos),
        })
    }

    pub(super) fn adds_eos(&self) -> Result<bool> {
        Ok(self.flag("add_eos_token")?.unwrap_or(false))
    }

    pub(super) fn adds_space(&self) -> Result<bool> {
        Ok(self.flag("add_space_prefix")?.unwrap_or(true))
    }

    pub(super) fn scores(&self) -> Result<&'g [f32]> {
        const KEY: &str = "tokenizer.ggml.scores";
        let scores = self
            .settings
            .gguf
            .value(KEY, "an array of f32", |value| value.as_array()?.as_f32s())?;
        let scores = scores.ok_or_else(|| GgufProblem::NoKey {
            key: KEY.to_owned(),
            expected: "a score for each token".to_owned(),
        })?;
        self.check_len(KEY, scores.len())?;
        match scores.iter().position(|score| score.is_nan()) {
            Some(id) => Err(wrong_key(
                KEY,
                format!("the score of token {id} is no number"),
            )),
            None => Ok(scores),
        }
    }

    pub(super) fn merges(&self) -> Result<&'g [String]> {
        const KEY: &str = "tokenizer.ggml.merges";
        let merges = self
            .settings
            .gguf
            .value(KEY, "an array of strings", |value| {
                value.as_array()?.as_strings()
            })?;
        merges.ok_or_else(|| GgufProblem::NoKey {
            key: KEY.to_owned(),
            expected: "the pairs of tokens that are merged".to_owned(),
        })
    }

    fn check_len(&self, key: &str, found: usize) -> Result<()> {
        check_len(key, found, self.tokens.len())
    }

    /// Returns the id of a required token. `name` describes it in messages.
    pub(super) fn need(&self, id: Option<usize>, name: &str) -> Result<usize> {
        id.ok_or_else(|| {
            problem(format!(
                "it has no {name}; expected its number in the metadata"
            ))
        })
    }
}

fn check_len(key: &str, found: usize, tokens: usize) -> Result<()> {
    match found == tokens {
        true => Ok(()),
        false => Err(wrong_key(
            key,
            format!("it has {found} elements; expected {tokens}, one for each token"),
        )),
    }
}

/// Returns the kinds of the tokens. If the file has none, all tokens are normal.
fn kinds(settings: &Settings<'_>, tokens: usize) -> Result<Vec<Kind>> {
    const KEY: &str = "tokenizer.ggml.token_type";
    let found = settings.gguf.value(KEY, "an array of integers", |value| {
        value.as_array()?.to_u64s()
    })?;
    let Some(found) = found else {
        return Ok(vec![Kind::Normal; tokens]);
    };
    check_len(KEY, found.len(), tokens)?;
    let kind = |(id, number)| match number {
        0 | 1 => Ok(Kind::Normal),
        2 => Ok(Kind::Unknown),
        3 => Ok(Kind::Control),
        4 => Ok(Kind::UserDefined),
        5 => Ok(Kind::Unused),
        6 => Ok(Kind::Byte),
        _ => Err(wrong_key(
            KEY,
            format!("that of token {id} is {number}; expected a number from 0 to 6"),
        )),
    };
    found.into_iter().enumerate().map(kind).collect()
}
