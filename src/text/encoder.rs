mod bytes;
mod chunks;
mod coder;
mod encoded;
mod language;
mod late;
mod long;
mod placed;
mod prompted;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use tokenizers::{EncodeInput, Encoding, ModelWrapper};

use super::{
    Folder, Input, Prompt, TextError, contain::contain, conversation::Conversation,
    folder::cleaned_up, languages::Languages, sentencepiece::published, word_cache::WordCache,
};
use crate::{files::Kind, runtime::batch::Batch, tensor::SequenceEnd};
pub use chunks::Chunks;
pub use coder::CutSide;
use coder::{Coder, cut_side, loaded};
pub use encoded::Encoded;
pub use language::TargetPrefix;
use late::Late;
use long::LONG;
pub use placed::{Placed, PlacedToken};

/// Tokenizer of a checkpoint folder, with the folder's settings for texts: maximum length, lower case and prompts.
pub struct TextEncoder {
    tokenizer: Coder,
    /// Copy of the tokenizer that truncates texts on the side opposite to `cut_side`, created on first use.
    other_side: OnceLock<Coder>,
    /// Side on which the tokenizer truncates texts.
    cut_side: CutSide,
    /// Copy of the tokenizer that never truncates, created on first use.
    unlimited: OnceLock<Coder>,
    folder: Folder,
    /// Tokenizer file, for error messages.
    file: PathBuf,
    /// Whether segment ids distinguish the texts of a pair.
    has_segments: bool,
    /// Whether the model generates text, and therefore does not take pairs.
    writes: bool,
    /// End-of-sequence token, if the model has one.
    end: Option<SequenceEnd>,
    /// Whether spaces before punctuation are removed from decoded texts.
    cleans_up: bool,
    /// Conversion of texts to a conversation, if the model reads conversations.
    conversation: Option<Conversation>,
    /// Languages of a translation model and their tokens; `None` if the tokenizer has no language tokens.
    languages: Option<Languages>,
    /// Tokens and tokenizers of a late-interaction model.
    late: Option<Late>,
}

/// A token of a text, for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextToken {
    pub id: u32,
    /// The token's text in the input, or the name of a special token.
    pub text: String,
    /// Whether the token was added by the tokenizer and is not part of the text.
    pub is_special: bool,
    /// Byte range in the text; `None` for special tokens.
    pub span: Option<(usize, usize)>,
}

impl TextEncoder {
    /// Loads the tokenizer of a checkpoint folder.
    ///
    /// # Errors
    /// Returns the errors of [`TextEncoder::of`] and [`Folder::open`].
    pub fn open(folder: &Path) -> Result<Self, TextError> {
        Self::of(Folder::open(folder)?)
    }

    /// Loads `tokenizer.json` of a folder or, without one, a SentencePiece model (`source.spm`, `sentencepiece.bpe.model`) with its
    /// `vocab.json`. Texts are truncated to the folder's `max_seq_length`, or else to the minimum of the tokenizer's `model_max_length` and
    /// the model's positions. If all three are unknown, the truncation setting in tokenizer.json applies. Padding is ignored, since batches
    /// are packed.
    ///
    /// # Errors
    /// Returns an error if the file is missing, too large, or not a tokenizer (including a file on which the tokenizers crate panics), or
    /// if the folder has only tokenizer files of an unsupported format.
    pub fn of(folder: Folder) -> Result<Self, TextError> {
        Self::with(folder, true)
    }

    /// Loads the tokenizer for prompts of a generator, which are never truncated. The generator refuses a prompt that is too long.
    ///
    /// # Errors
    /// Returns the errors of [`of`](Self::of).
    pub fn for_prompts(folder: Folder) -> Result<Self, TextError> {
        Self::with(folder, false)
    }

    fn with(folder: Folder, cuts: bool) -> Result<Self, TextError> {
        const NAME: &str = "tokenizer.json";
        let file = folder.files().name(NAME);
        let Some(json) = folder.files().text(NAME, Kind::Tokenizer)? else {
            if !folder.adds_special() {
                // Tokenizers in other formats always add special tokens, but the tokenizer of a static embedding must not.
                return Err(folder.files().missing(NAME).into());
            }
            return Self::of_pieces(folder, cuts);
        };
        let inputs = folder.inputs();
        let cut_side = cut_side(&folder)?;
        let settings = folder.tokenizer_settings()?;
        let tokenizer = loaded(&folder, (&file, &json), &settings, inputs.positions, cuts)?;
        let languages = settings.languages(&tokenizer)?;
        let is_bpe = matches!(tokenizer.get_model(), ModelWrapper::BPE(_));
        let words = WordCache::of(&tokenizer).map(Arc::new);
        Self {
            tokenizer: Coder::Json(Box::new(tokenizer), words),
            other_side: OnceLock::new(),
            cut_side,
            unlimited: OnceLock::new(),
            conversation: Conversation::of(&folder)?,
            folder,
            file,
            has_segments: inputs.has_segments && settings.has_segments()?,
            writes: inputs.writes,
            end: inputs.end,
            cleans_up: settings.cleans_up(is_bpe)?,
            languages,
            late: None,
        }
        .with_late(inputs.positions)
    }

    /// Loads the tokenizer of a folder without tokenizer.json.
    fn of_pieces(folder: Folder, cuts: bool) -> Result<Self, TextError> {
        let (mut pieces, file) = published(folder.trunk())?;
        if folder.lower_case {
            return Err(TextError::PublishedTokenizer {
                file,
                problem:
                    "the folder sets lower case, which gemmule supports only with a tokenizer.json"
                        .to_owned(),
            });
        }
        if let Some(argument) = folder.tokenizer_argument() {
            return Err(TextError::PublishedTokenizer {
                file,
                problem: format!(
                    "the folder sets the tokenizer argument `{argument}`, which gemmule supports only with a tokenizer.json"
                ),
            });
        }
        let inputs = folder.inputs();
        let cut_side = cut_side(&folder)?;
        let limit = match cuts {
            true => folder.limit(inputs.positions)?,
            false => None,
        };
        pieces.limit(limit.map(|limit| (limit, cut_side == CutSide::Left)));
        let cleans_up = folder.tokenizer_settings()?.cleans_up(false)?;
        let languages = Some(pieces.languages().clone());
        Self {
            tokenizer: Coder::SentencePiece(Box::new(pieces)),
            other_side: OnceLock::new(),
            cut_side,
            unlimited: OnceLock::new(),
            conversation: Conversation::of(&folder)?,
            folder,
            file,
            has_segments: inputs.has_segments,
            writes: inputs.writes,
            end: inputs.end,
            cleans_up,
            languages,
            late: None,
        }
        .with_late(inputs.positions)
    }

    /// Returns the checkpoint folder.
    pub fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Tokenizes texts, each after the folder's default prompt, into one batch. Logs a warning for each truncated text.
    ///
    /// # Errors
    /// Returns an error if the tokenizer refuses a text or panics on it, or if there are too many tokens for one batch.
    pub fn encode<S: AsRef<str>>(&self, texts: &[S]) -> Result<Batch, TextError> {
        self.encode_with(texts, Prompt::Default)
    }

    /// Tokenizes texts, each after the given prompt, into one batch.
    ///
    /// # Errors
    /// Returns the errors of [`encode`](Self::encode) and [`Folder::prompt`].
    pub fn encode_with<S: AsRef<str>>(
        &self,
        texts: &[S],
        prompt: Prompt,
    ) -> Result<Batch, TextError> {
        self.batch(texts.iter().map(|t| Input::Text(t.as_ref())), prompt)
    }

    /// Returns the token ids of each prompt of a generator.
    ///
    /// # Errors
    /// Returns an error if the tokenizer refuses a text or panics on it.
    pub fn prompts<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Vec<u32>>, TextError> {
        let each = texts.iter().enumerate();
        each.map(|(index, text)| {
            let encoded = self.encoded(index, text.as_ref(), true, self.cut_side);
            encoded.map(|encoded| encoded.ids)
        })
        .collect()
    }

    /// Returns the token ids of a text that contains its special tokens, such as the output of a [`ChatTemplate`](super::ChatTemplate). No
    /// special tokens are added.
    ///
    /// # Errors
    /// Returns an error if the tokenizer refuses a text or panics on it.
    pub fn prompt_as_written(&self, text: &str) -> Result<Vec<u32>, TextError> {
        Ok(self.encoded(0, text, false, self.cut_side)?.ids)
    }

    /// Returns the id of a token by its name in the checkpoint's files, such as `__de__`.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        match &self.tokenizer {
            Coder::Json(tokenizer, _) => tokenizer.token_to_id(token),
            Coder::SentencePiece(pieces) => pieces.id(token),
        }
    }

    /// Returns the tokens without a weight in lexical (sparse) embeddings: the begin, end, padding and unknown tokens of
    /// `tokenizer_config.json` (FlagEmbedding's `_process_token_weights`). For a SparseStaticEmbedding, the list is empty, since all of its
    /// tokens have a weight.
    ///
    /// # Errors
    /// Returns an error if `tokenizer_config.json` is not JSON.
    pub fn unweighed(&self) -> Result<Vec<u32>, TextError> {
        if !self.folder.adds_special() {
            return Ok(Vec::new());
        }
        let names = ["cls_token", "eos_token", "pad_token", "unk_token"];
        let tokens = self.folder.special_tokens(&names)?;
        Ok(tokens.iter().filter_map(|t| self.token_id(t)).collect())
    }

    /// Removes the tokens after the end of the sequence, if the model has an end-of-sequence token.
    pub fn ended(&self, mut encoded: Encoded) -> Encoded {
        let place = self.end.and_then(|end| end.place(&encoded.ids));
        if let Some(at) = place {
            encoded.ids.truncate(at + 1);
            if let Some(types) = &mut encoded.types {
                types.truncate(at + 1);
            }
        }
        encoded
    }

    /// Returns whether a token has this id.
    pub fn knows(&self, id: u32) -> bool {
        match &self.tokenizer {
            Coder::Json(tokenizer, _) => tokenizer.id_to_token(id).is_some(),
            Coder::SentencePiece(pieces) => pieces.knows(id),
        }
    }

    /// Returns an upper bound on the length of the tokens' text, in bytes.
    pub fn max_text_bytes(&self, ids: &[u32]) -> u64 {
        let bytes = |&id: &u32| match &self.tokenizer {
            Coder::Json(tokenizer, _) => tokenizer.id_to_token(id).map_or(0, |token| token.len()),
            Coder::SentencePiece(pieces) => pieces.text_bytes(id),
        };
        ids.iter().map(|id| bytes(id) as u64 + 1).sum()
    }

    /// Returns the text of tokens, without special tokens. Incomplete characters are decoded as U+FFFD.
    ///
    /// # Errors
    /// Returns an error if the tokenizer does not know a token or panics on it.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        self.decode_with(ids, true)
    }

    /// Returns the text of tokens, with special tokens unless `skips_special`.
    ///
    /// # Errors
    /// Returns the errors of [`decode`](Self::decode).
    pub fn decode_with(&self, ids: &[u32], skips_special: bool) -> Result<String, TextError> {
        let decoded = contain(|| self.tokenizer.decode(ids, skips_special));
        let broken = |problem: String| {
            let file = self.file.clone();
            match self.tokenizer {
                Coder::Json(..) => TextError::Tokenizer { file, problem },
                Coder::SentencePiece(_) => TextError::PublishedTokenizer { file, problem },
            }
        };
        let text = decoded
            .map_err(|panic| {
                broken(format!(
                    "the tokenizers crate panics on the tokens: {panic}"
                ))
            })?
            .map_err(|e| broken(e.to_string()))?;
        Ok(match self.cleans_up {
            true => cleaned_up(&text),
            false => text,
        })
    }

    /// Returns the text that the token `id` adds after the token `before`, including special tokens. The tokens are decoded together,
    /// because some tokenizers drop a space at the beginning of a text.
    ///
    /// # Errors
    /// Returns the errors of [`decode`](Self::decode).
    pub fn text_after(&self, before: Option<u32>, id: u32) -> Result<String, TextError> {
        let Some(before) = before else {
            return self.decode_with(&[id], false);
        };
        let first = self.decode_with(&[before], false)?;
        let both = self.decode_with(&[before, id], false)?;
        Ok(match both.strip_prefix(&first) {
            Some(text) => text.to_owned(),
            // The two tokens are parts of one character.
            None => self.decode_with(&[id], false)?,
        })
    }

    fn other_side(&self) -> &Coder {
        self.other_side
            .get_or_init(|| self.tokenizer.cutting(self.cut_side.other()))
    }

    fn unlimited(&self) -> &Coder {
        if self.max_tokens().is_none() {
            return &self.tokenizer;
        }
        self.unlimited.get_or_init(|| {
            let mut tokenizer = self.tokenizer.clone();
            match &mut tokenizer {
                // Removing the limit cannot fail; only setting a limit can.
                Coder::Json(tokenizer, _) => drop(tokenizer.with_truncation(None)),
                Coder::SentencePiece(pieces) => pieces.limit(None),
            }
            tokenizer
        })
    }

    /// Returns the maximum number of tokens of a text, including special tokens; `None` if there is no maximum.
    pub fn max_tokens(&self) -> Option<usize> {
        match &self.tokenizer {
            Coder::Json(tokenizer, _) => tokenizer.get_truncation().map(|limit| limit.max_length),
            Coder::SentencePiece(pieces) => pieces.max_tokens(),
        }
    }

    /// Tokenizes pairs of a query and a document, for a cross-encoder. The prompt is put before the query. If a pair is too long, the
    /// longer text is truncated first. For a model that reads conversations, the chat template writes each pair as one text. If this text
    /// is too long, it is truncated, and its last tokens are replaced by the last tokens of the template.
    ///
    /// # Errors
    /// Returns the errors of [`encode_with`](Self::encode_with), and an error if the model generates text or the template omits a text of a
    /// pair.
    pub fn encode_pairs<S: AsRef<str>>(
        &self,
        pairs: &[(S, S)],
        prompt: Prompt,
    ) -> Result<Batch, TextError> {
        let pairs = pairs.iter();
        self.batch(
            pairs.map(|(a, b)| Input::Pair(a.as_ref(), b.as_ref())),
            prompt,
        )
    }

    /// Tokenizes one input after a prompt. [`Encoded::is_cut`] is set if the input was truncated.
    ///
    /// # Errors
    /// Returns an error if the tokenizer refuses a text or panics on it, and the errors of [`Folder::prompt`].
    pub fn encode_one(&self, input: Input<'_>, prompt: Prompt) -> Result<Encoded, TextError> {
        self.encode_cut(input, prompt, self.cut_side)
    }

    /// Tokenizes one input after a prompt. An input that is too long is truncated on the given side.
    ///
    /// # Errors
    /// Returns the errors of [`encode_one`](Self::encode_one).
    pub fn encode_cut(
        &self,
        input: Input<'_>,
        prompt: Prompt,
        side: CutSide,
    ) -> Result<Encoded, TextError> {
        let prompt = self.folder.prompt(prompt)?;
        self.coded(0, input, prompt, side)
    }

    /// Returns the side on which texts are truncated, according to the checkpoint's files.
    pub fn cut_side(&self) -> CutSide {
        self.cut_side
    }

    fn coded(
        &self,
        index: usize,
        input: Input<'_>,
        prompt: &str,
        side: CutSide,
    ) -> Result<Encoded, TextError> {
        self.check_not_late()?;
        if let Some(conversation) = &self.conversation {
            return self.written_down(conversation, index, input, prompt, side);
        }
        match (input, prompt) {
            (Input::Pair(..), _) if self.writes => Err(TextError::Folder {
                file: self.folder.files().name("config.json"),
                problem: "the model generates text, and no modules.json specifies how it scores pairs; expected a LogitScore module and a chat template for a query and a document, which `CrossEncoder(DIR).save(DIR)` of sentence-transformers writes".to_owned(),
            }),
            (Input::Text(text), "") => self.encoded(index, text, true, side),
            (Input::Text(text), _) if self.folder.leaves_out_prompts() => {
                self.prompted(index, text, prompt, side)
            }
            (Input::Text(text), _) => self.encoded(index, &format!("{prompt}{text}"), true, side),
            (Input::Pair(a, b), _) => self.pair(index, format!("{prompt}{a}"), b, side),
        }
    }

    /// Tokenizes a text of any length.
    fn encoded(
        &self,
        index: usize,
        text: &str,
        adds_special: bool,
        side: CutSide,
    ) -> Result<Encoded, TextError> {
        if text.len() > LONG {
            return self.long(index, text, adds_special, side);
        }
        let input = EncodeInput::from(text);
        let (encoding, is_cut) = self.encoding(index, input, adds_special, side)?;
        Ok(self.with_types(&encoding, is_cut))
    }

    fn with_types(&self, encoding: &Encoding, is_cut: bool) -> Encoded {
        let types = encoding.get_type_ids();
        let has_types = self.has_segments && types.iter().any(|&t| t != 0);
        Encoded {
            ids: encoding.get_ids().to_vec(),
            types: has_types.then(|| types.to_vec()),
            is_cut,
            attended: None,
            left_out: 0,
        }
    }

    /// Tokenizes a text written by the chat template. If the text is truncated, its last tokens are replaced by the last tokens of the
    /// template, which tell the model to respond.
    fn written_down(
        &self,
        conversation: &Conversation,
        index: usize,
        input: Input<'_>,
        prompt: &str,
        side: CutSide,
    ) -> Result<Encoded, TextError> {
        let text = conversation.write(input, prompt)?;
        let Encoded {
            mut ids, is_cut, ..
        } = self.encoded(index, &text, false, side)?;
        if is_cut {
            let whole = |filler| {
                let filled = match input {
                    Input::Text(_) => Input::Text(filler),
                    Input::Pair(..) => Input::Pair(filler, filler),
                };
                let text = conversation.write(filled, prompt)?;
                let encode = || self.unlimited().encode_fast(EncodeInput::from(text), false);
                Ok::<_, TextError>(self.contained(index, encode)?.get_ids().to_vec())
            };
            // The two texts have no tokens in common, so their common suffix comes from the template.
            let (one, other) = (whole("0")?, whole("1 2 3 4")?);
            let pairs = one.iter().rev().zip(other.iter().rev());
            let same = pairs.take_while(|(a, b)| a == b).count();
            if same < one.len().min(other.len()) {
                let kept = same.min(ids.len());
                let from = ids.len() - kept;
                ids[from..].copy_from_slice(&one[one.len() - kept..]);
            }
        }
        Ok(Encoded {
            ids,
            types: None,
            is_cut,
            attended: None,
            left_out: 0,
        })
    }

    /// Returns the encoding of an input, and whether it was truncated.
    fn encoding(
        &self,
        index: usize,
        input: EncodeInput<'_>,
        adds_special: bool,
        side: CutSide,
    ) -> Result<(Encoding, bool), TextError> {
        let mut encoding = self.encoding_of(index, input.clone(), adds_special)?;
        let mut is_cut = !encoding.get_overflowing().is_empty();
        if let Coder::Json(tokenizer, _) = &self.tokenizer
            && let Some(limit) = tokenizer.get_truncation()
            && encoding.len() == limit.max_length
            && !is_cut
        {
            // The tokenizers crate stops at the limit, and does not report that it cut off tokens if it adds no token after the text.
            // Therefore, count the tokens without a limit.
            let input = input.clone();
            let whole =
                self.contained(index, || self.unlimited().encode_fast(input, adds_special))?;
            is_cut = whole.len() > encoding.len();
        }
        if is_cut && side != self.cut_side {
            let encode = || self.other_side().encode_fast(input, adds_special);
            encoding = self.contained(index, encode)?;
        }
        Ok((encoding, is_cut))
    }

    /// Returns the encoding of an input, with or without added special tokens.
    fn encoding_of(
        &self,
        index: usize,
        input: EncodeInput<'_>,
        adds_special: bool,
    ) -> Result<Encoding, TextError> {
        self.contained(index, || self.tokenizer.encode_fast(input, adds_special))
    }

    /// Calls `encode`, and turns errors and panics of the tokenizers crate into errors that name the text by `index`.
    fn contained(
        &self,
        index: usize,
        encode: impl FnOnce() -> tokenizers::Result<Encoding>,
    ) -> Result<Encoding, TextError> {
        contain(encode)
            .map_err(|problem| TextError::TokenizerPanic {
                file: self.file.clone(),
                index,
                problem,
            })?
            .map_err(|e| TextError::Text {
                index,
                problem: e.to_string(),
            })
    }

    fn batch<'s>(
        &self,
        inputs: impl Iterator<Item = Input<'s>>,
        prompt: Prompt,
    ) -> Result<Batch, TextError> {
        let prompt = self.folder.prompt(prompt)?;
        let mut all = Vec::new();
        for (index, input) in inputs.enumerate() {
            let coded = self.coded(index, input, prompt, self.cut_side)?;
            if coded.is_cut {
                tracing::warn!(
                    "text {index} is cut to {} tokens, the checkpoint's maximum",
                    coded.ids.len()
                );
            }
            all.push(coded);
        }
        Ok(Encoded::batch(all.iter())?)
    }
}
