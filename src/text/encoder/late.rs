//! Queries and documents of a late-interaction model.

use std::{path::PathBuf, sync::OnceLock};

use tokenizers::{PostProcessor, TruncationParams};

use super::{Coder, CutSide, Encoded, TextEncoder, TextError, contain};
use crate::text::{LateInteraction, Prompt, TextRole};

/// Tokens and tokenizers of a late-interaction model, created from its settings.
pub(super) struct Late {
    settings: LateInteraction,
    /// Prefix token of each role.
    prefixes: [Option<u32>; 2],
    /// Encoder of each role. Its token limit leaves room for the prefix.
    encoders: Box<[TextEncoder; 2]>,
    /// Token that queries are padded with; `None` if they are not padded.
    padding: Option<u32>,
    /// Tokens whose vectors take no part in scores, for the roles that `settings.skips` selects.
    skipped: Vec<u32>,
}

impl TextEncoder {
    /// Adds the tokenizers for late interaction if the folder has settings for it.
    pub(super) fn with_late(mut self, positions: Option<u32>) -> Result<Self, TextError> {
        let Some(settings) = self.folder.late_interaction().cloned() else {
            return Ok(self);
        };
        if self.conversation.is_some() {
            let problem = "a late-interaction model reads texts, not conversations; remove `message` of `modality_config`";
            return Err(self.late_problem(problem.to_owned()));
        }
        let positions = positions.map_or(usize::MAX, |n| n as usize);
        let side = |role: TextRole| {
            let name = role.name();
            let prefix = settings.prefixes[role.index()].as_str();
            let id = match prefix {
                "" => None,
                prefix => Some(self.token_id(prefix).ok_or_else(|| {
                    self.late_problem(format!(
                        "the prefix of a {name}, `{prefix}`, is not a token of the tokenizer; expected one of its tokens, or \"\" for none (PyLate would add the token with random weights)"
                    ))
                })?),
            };
            let length = settings.lengths[role.index()];
            if role == TextRole::Query && settings.expands && settings.floor > positions {
                let length = settings.floor;
                return Err(self.late_problem(format!(
                    "queries are padded to {length} tokens, but the model has {positions} positions; expected a length of at most {positions}"
                )));
            }
            let n_added = self.n_added() + usize::from(id.is_some());
            if length.min(positions) < n_added {
                return Err(self.late_problem(format!(
                    "the length of a {name} is {length} tokens, but {n_added} tokens are added to each text; expected a length of at least {n_added}"
                )));
            }
            let limit = length.min(positions) - usize::from(id.is_some());
            let limited = self.limited(limit).map_err(|problem| {
                self.late_problem(format!(
                    "the length of a {name} is {length}, and the tokenizer cannot cut texts to it: {problem}"
                ))
            })?;
            Ok::<_, TextError>((id, limited))
        };
        let (query, document) = (side(TextRole::Query)?, side(TextRole::Document)?);
        let padding = match settings.expands {
            true => Some(self.filler(&settings)?),
            false => None,
        };
        let skipped = self.skipped(&settings)?;
        self.late = Some(Late {
            prefixes: [query.0, document.0],
            encoders: Box::new([query.1, document.1]),
            padding,
            skipped,
            settings,
        });
        Ok(self)
    }

    /// Tokenizes a query or a document of a late-interaction model, after a prompt. A query that is longer than the folder's query length
    /// is truncated without setting [`Encoded::is_cut`]. If the folder has no settings for late interaction, `role` has no effect.
    ///
    /// # Errors
    /// Returns an error if the tokenizer refuses the text or panics on it, and the errors of [`Folder::prompt`](super::Folder::prompt).
    pub fn encode_as(
        &self,
        role: TextRole,
        text: &str,
        prompt: Prompt,
        side: CutSide,
    ) -> Result<Encoded, TextError> {
        let prompt = self.folder.prompt(self.role_prompt(role, prompt))?;
        let whole = format!("{prompt}{text}");
        let Some(late) = &self.late else {
            return self.encoded(0, &whole, true, side);
        };
        let encoder = &late.encoders[role.index()];
        let whole = match late.settings.strips {
            true => whole.trim_matches(is_space),
            false => &whole,
        };
        let mut encoded = encoder.encoded(0, whole, true, side)?;
        if let Some(prefix) = late.prefixes[role.index()] {
            let at = encoded.ids.len().min(1);
            encoded.ids.insert(at, prefix);
            if let Some(types) = &mut encoded.types {
                types.insert(at, 0);
            }
        }
        if role == TextRole::Query {
            encoded.is_cut = false;
            if let Some(padding) = late.padding {
                let n = encoded.ids.len();
                let length = late.settings.floor.max(n);
                encoded.ids.resize(length, padding);
                if let Some(types) = &mut encoded.types {
                    types.resize(length, 0);
                }
                encoded.attended = (late.settings.hides_expansion() && n < length).then_some(n);
            }
        }
        Ok(encoded)
    }

    /// Returns the name of the folder's prompt for a role, if `prompt` is the default and the folder has such a prompt. Otherwise returns
    /// `prompt`.
    fn role_prompt<'p>(&self, role: TextRole, prompt: Prompt<'p>) -> Prompt<'p> {
        let late = self
            .late
            .as_ref()
            .filter(|late| late.settings.has_role_prompts);
        let named = || {
            let mut names = role.prompt_names().iter().copied();
            names.find(|name| self.folder.prompt_index(&[name]).is_some())
        };
        match (prompt, late.and_then(|_| named())) {
            (Prompt::Default, Some(name)) => Prompt::Named(name),
            (prompt, _) => prompt,
        }
    }

    /// Returns an error for a late-interaction model, which needs to know whether a text is a query or a document.
    pub(super) fn check_not_late(&self) -> Result<(), TextError> {
        let problem = "a late-interaction model reads queries and documents differently, and the text is neither; in Rust, use `Engine::token_vectors` or `TextEncoder::encode_as`, and in Python `MultiVectorEncoder`, or give token ids";
        match &self.late {
            None => Ok(()),
            Some(_) => Err(self.late_problem(problem.to_owned())),
        }
    }

    /// Returns whether the vector of a token takes part in scores. `at` is the index of the token in the sequence, special tokens included.
    /// Without settings for late interaction, all tokens except the first take part.
    pub fn takes_part(&self, role: TextRole, at: usize, id: u32) -> bool {
        match (&self.late, role) {
            (None, _) => at > 0,
            (Some(late), role) => {
                let settings = &late.settings;
                let is_skipped = settings.skips[role.index()] && late.skipped.contains(&id);
                let kept = settings
                    .kept
                    .as_ref()
                    .filter(|_| role == TextRole::Document);
                !is_skipped && kept.is_none_or(|kept| kept.contains(&id))
            }
        }
    }

    /// Returns the number of tokens that the tokenizer adds to a text.
    fn n_added(&self) -> usize {
        match &self.tokenizer {
            Coder::Json(tokenizer, _) => tokenizer
                .get_post_processor()
                .map_or(0, |post| post.added_tokens(false)),
            // SentencePiece adds one token, at the end.
            Coder::SentencePiece(_) => 1,
        }
    }

    /// Returns a copy that truncates texts to `limit` tokens.
    fn limited(&self, limit: usize) -> Result<Self, String> {
        let mut tokenizer = self.tokenizer.clone();
        match &mut tokenizer {
            Coder::Json(tokenizer, _) => {
                let limit = TruncationParams {
                    max_length: limit,
                    direction: self.cut_side.direction(),
                    ..TruncationParams::default()
                };
                let limited = contain(|| tokenizer.with_truncation(Some(limit)).map(drop));
                limited?.map_err(|e| e.to_string())?;
            }
            Coder::SentencePiece(pieces) => {
                pieces.limit(Some((limit, self.cut_side == CutSide::Left)));
            }
        }
        Ok(Self {
            tokenizer,
            other_side: OnceLock::new(),
            cut_side: self.cut_side,
            unlimited: OnceLock::new(),
            folder: self.folder.clone(),
            file: self.file.clone(),
            has_segments: self.has_segments,
            writes: self.writes,
            end: self.end,
            cleans_up: self.cleans_up,
            conversation: None,
            languages: None,
            late: None,
        })
    }

    /// Returns the token that queries are padded with: the one in the settings, else the mask token, the end-of-sequence
    /// token or the padding token.
    fn filler(&self, settings: &LateInteraction) -> Result<u32, TextError> {
        if let Some(token) = &settings.padding {
            return self.token_id(token).ok_or_else(|| {
                self.late_problem(format!(
                    "queries are padded with `{token}`, which is not a token of the tokenizer; expected one of its tokens"
                ))
            });
        }
        for name in ["mask_token", "eos_token", "pad_token"] {
            if let Some(id) = self.named_token(name)? {
                return Ok(id);
            }
        }
        let problem = "queries are padded, and tokenizer_config.json names no `mask_token`, `eos_token` or `pad_token`; add one, or set `do_query_expansion` to false";
        Err(self.late_problem(problem.to_owned()))
    }

    /// Returns the ids of the words in `settings.skipped`. If `settings.skips_unknown`, a word that is not a token gets the id of the
    /// unknown token, as in `convert_tokens_to_ids` of the library transformers. Otherwise, such a word is ignored.
    fn skipped(&self, settings: &LateInteraction) -> Result<Vec<u32>, TextError> {
        let unknown = self.named_token("unk_token")?;
        let is_known = |word: &&String| settings.skips_unknown || self.token_id(word).is_some();
        let words = settings.skipped.iter().filter(is_known);
        let ids = words.map(|word| {
            self.token_id(word).or(unknown).ok_or_else(|| {
                self.late_problem(format!(
                    "`{word}` of `skiplist_words` is no token, and the tokenizer has no unknown token; remove the word"
                ))
            })
        });
        let mut ids: Vec<u32> = ids.collect::<Result<_, _>>()?;
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    fn late_problem(&self, problem: String) -> TextError {
        let files = self.folder.root_files();
        let own = "config_sentence_transformers.json";
        let name = match files.has(own) {
            true => own,
            false => "artifact.metadata",
        };
        let file: PathBuf = files.name(name);
        TextError::Folder { file, problem }
    }
}

/// Returns whether Python's `str.strip` removes a character.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}
