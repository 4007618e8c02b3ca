mod bytes;
mod coder;
mod long;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use tokenizers::{EncodeInput, Encoding, ModelWrapper};

use super::{
    EngineError, Folder, Prompt, contain::contain, conversation::Conversation, folder::cleaned_up,
    published::published, words::Words,
};
use crate::{
    runtime::batch::{Batch, BatchError},
    tensor::SequenceEnd,
};
pub use coder::CutSide;
use coder::{Coder, cut_side, loaded};
use long::LONG;

/// The tokenizer of a checkpoint, with what its folder says of texts: how long they may be, whether they are in lower
/// case, and what stands before them.
pub struct TextEncoder {
    tokenizer: Coder,
    /// Copy of the tokenizer that cuts texts on the other side, made when a request asks for it.
    other_side: OnceLock<Coder>,
    /// Side on which the tokenizer cuts texts.
    cut_side: CutSide,
    /// The same one without a limit, made when somebody wants to see all tokens of a text.
    unlimited: OnceLock<Coder>,
    folder: Folder,
    /// For messages.
    file: PathBuf,
    /// Whether the model tells the texts of a pair apart by segment ids.
    has_segments: bool,
    /// Whether the model goes on from texts, and takes no pairs.
    writes: bool,
    /// The token that ends a sequence, where the model knows it.
    end: Option<SequenceEnd>,
    /// Whether decoded texts lose the spaces before punctuation.
    cleans_up: bool,
    /// How texts are written down, where the model reads them as conversations.
    conversation: Option<Conversation>,
}

/// A text, or a pair of texts, as a server takes them one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input<'a> {
    Text(&'a str),
    /// As a cross-encoder takes them: a query and a document.
    Pair(&'a str, &'a str),
}

/// Token ids of one sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    pub ids: Vec<u32>,
    /// Segment ids, one for each token, where they are not all 0 and the model has segments.
    pub types: Option<Vec<u32>>,
    /// Whether the text was longer than the checkpoint takes, and was cut.
    pub is_cut: bool,
}

impl Encoded {
    /// The batch of these, one after another.
    ///
    /// # Errors
    /// Those of [`Batch::from_packed`].
    pub fn batch<'e>(all: impl Iterator<Item = &'e Self> + Clone) -> Result<Batch, BatchError> {
        let lens: Vec<u32> = all.clone().map(|one| one.ids.len() as u32).collect();
        let ids = all.clone().flat_map(|one| one.ids.iter().copied());
        let batch = Batch::from_packed(ids.collect(), &lens)?;
        if all.clone().all(|one| one.types.is_none()) {
            return Ok(batch);
        }
        let types = all.flat_map(|one| match &one.types {
            Some(types) => types.clone(),
            None => vec![0; one.ids.len()],
        });
        batch.with_type_ids(types.collect())
    }
}

/// A token of a text, as people look at it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextToken {
    pub id: u32,
    /// What stands in the text, or the token's own name where it is special.
    pub text: String,
    /// Whether the tokenizer added it.
    pub is_special: bool,
    /// Where it stands, in bytes; `None` for special ones.
    pub span: Option<(usize, usize)>,
}

impl TextEncoder {
    /// Loads `tokenizer.json` of a checkpoint's folder.
    ///
    /// # Errors
    /// As [`TextEncoder::of`], and those of [`Folder::open`].
    pub fn open(folder: &Path) -> Result<Self, EngineError> {
        Self::of(Folder::open(folder)?)
    }

    /// Loads `tokenizer.json` of a folder, or, where it has none, a SentencePiece model with a `vocab.json` beside it (`source.spm`,
    /// `sentencepiece.bpe.model`). Texts are cut to `max_seq_length` tokens where the folder gives that, else to the
    /// tokenizer's `model_max_length` and the model's positions; tokenizer.json's own truncation counts only where none of
    /// these is known. Its padding never does: batches are packed.
    ///
    /// # Errors
    /// A file that is missing, too large, or no tokenizer, one on which the tokenizers crate panics included. A folder whose
    /// tokenizer is in files that are not read.
    pub fn of(folder: Folder) -> Result<Self, EngineError> {
        Self::with(folder, true)
    }

    /// As [`of`](Self::of), for texts that a model goes on from, which are never cut: one that is too long is an error of
    /// whoever runs it.
    ///
    /// # Errors
    /// As `of`.
    pub fn for_prompts(folder: Folder) -> Result<Self, EngineError> {
        Self::with(folder, false)
    }

    fn with(folder: Folder, cuts: bool) -> Result<Self, EngineError> {
        let file = folder.trunk().join("tokenizer.json");
        if !file.is_file() {
            return Self::of_pieces(folder, cuts);
        }
        let inputs = folder.inputs();
        let cut_side = cut_side(&folder)?;
        let settings = folder.tokenizer_settings()?;
        let tokenizer = loaded(&folder, &file, &settings, inputs.positions, cuts)?;
        let is_bpe = matches!(tokenizer.get_model(), ModelWrapper::BPE(_));
        let words = Words::of(&tokenizer).map(Arc::new);
        Ok(Self {
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
        })
    }

    /// The tokenizer of a folder without tokenizer.json.
    fn of_pieces(folder: Folder, cuts: bool) -> Result<Self, EngineError> {
        let (mut pieces, file) = published(folder.trunk())?;
        if folder.lower_case {
            return Err(EngineError::PublishedTokenizer {
                file,
                problem: "the folder asks for texts in lower case, which gemmule has with a tokenizer.json only".to_owned(),
            });
        }
        if let Some(argument) = folder.tokenizer_argument() {
            return Err(EngineError::PublishedTokenizer {
                file,
                problem: format!(
                    "the folder gives its tokenizer the argument `{argument}`, which gemmule applies with a tokenizer.json only"
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
        Ok(Self {
            tokenizer: Coder::Pieces(Box::new(pieces)),
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
        })
    }

    /// What stands in the folder beside the tokenizer.
    pub fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Token ids and segment ids of texts, each behind the folder's default prompt. A text that is cut is warned about.
    ///
    /// # Errors
    /// A text that the tokenizer refuses or panics on, and too many tokens for one batch.
    pub fn encode<S: AsRef<str>>(&self, texts: &[S]) -> Result<Batch, EngineError> {
        self.encode_with(texts, Prompt::Default)
    }

    /// As [`encode`](Self::encode), behind another prompt.
    ///
    /// # Errors
    /// As `encode`, and those of [`Folder::prompt`].
    pub fn encode_with<S: AsRef<str>>(
        &self,
        texts: &[S],
        prompt: Prompt,
    ) -> Result<Batch, EngineError> {
        self.batch(texts.iter().map(|t| Input::Text(t.as_ref())), prompt)
    }

    /// Token ids of texts to go on from, each by itself.
    ///
    /// # Errors
    /// A text that the tokenizer refuses or panics on.
    pub fn prompts<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Vec<u32>>, EngineError> {
        let each = texts.iter().enumerate();
        each.map(|(index, text)| {
            let encoded = self.encoded(index, text.as_ref(), true, self.cut_side);
            encoded.map(|encoded| encoded.ids)
        })
        .collect()
    }

    /// Token ids of a text in which special tokens are written out, as a [`ChatTemplate`](super::ChatTemplate) writes them: none is
    /// added.
    ///
    /// # Errors
    /// A text that the tokenizer refuses or panics on.
    pub fn prompt_as_written(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        Ok(self.encoded(0, text, false, self.cut_side)?.ids)
    }

    /// The id of a token as the checkpoint's files have it, such as `__de__`.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        match &self.tokenizer {
            Coder::Json(tokenizer, _) => tokenizer.token_to_id(token),
            Coder::Pieces(pieces) => pieces.id(token),
        }
    }

    /// Tokens that say nothing of a text, which weights of tokens leave out: those that begin, end and fill up a sequence, and the
    /// one for what is not known, as `tokenizer_config.json` names them (FlagEmbedding's `_process_token_weights`).
    ///
    /// # Errors
    /// A `tokenizer_config.json` that is no JSON.
    pub fn unweighed(&self) -> Result<Vec<u32>, EngineError> {
        let names = ["cls_token", "eos_token", "pad_token", "unk_token"];
        let tokens = self.folder.special_tokens(&names)?;
        Ok(tokens.iter().filter_map(|t| self.token_id(t)).collect())
    }

    /// Token ids without those behind the end of a sequence, where the model knows the token that ends one.
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

    /// Whether a token has this id.
    pub fn knows(&self, id: u32) -> bool {
        match &self.tokenizer {
            Coder::Json(tokenizer, _) => tokenizer.id_to_token(id).is_some(),
            Coder::Pieces(pieces) => pieces.knows(id),
        }
    }

    /// Upper estimate of the length of the text of tokens, in bytes.
    pub fn max_text_bytes(&self, ids: &[u32]) -> u64 {
        let bytes = |&id: &u32| match &self.tokenizer {
            Coder::Json(tokenizer, _) => tokenizer.id_to_token(id).map_or(0, |token| token.len()),
            Coder::Pieces(pieces) => pieces.text_bytes(id),
        };
        ids.iter().map(|id| bytes(id) as u64 + 1).sum()
    }

    /// The text of tokens, without special ones. What is not whole yet, as bytes of a character may be, is U+FFFD.
    ///
    /// # Errors
    /// Tokens that the tokenizer does not know or panics on.
    pub fn decode(&self, ids: &[u32]) -> Result<String, EngineError> {
        self.decode_with(ids, true)
    }

    /// As [`decode`](Self::decode), with special tokens if they are not skipped.
    ///
    /// # Errors
    /// As `decode`.
    pub fn decode_with(&self, ids: &[u32], skips_special: bool) -> Result<String, EngineError> {
        let decoded = contain(|| self.tokenizer.decode(ids, skips_special));
        let broken = |problem: String| {
            let file = self.file.clone();
            match self.tokenizer {
                Coder::Json(..) => EngineError::Tokenizer { file, problem },
                Coder::Pieces(_) => EngineError::PublishedTokenizer { file, problem },
            }
        };
        let text = decoded
            .map_err(|panic| broken(format!("the tokenizers crate panics on tokens: {panic}")))?
            .map_err(|e| broken(e.to_string()))?;
        Ok(match self.cleans_up {
            true => cleaned_up(&text),
            false => text,
        })
    }

    /// The text of a token behind another one, special ones included; some tokenizers drop a space at a text's beginning.
    ///
    /// # Errors
    /// As [`decode`](Self::decode).
    pub fn text_behind(&self, before: Option<u32>, id: u32) -> Result<String, EngineError> {
        let Some(before) = before else {
            return self.decode_with(&[id], false);
        };
        let first = self.decode_with(&[before], false)?;
        let both = self.decode_with(&[before, id], false)?;
        Ok(match both.strip_prefix(&first) {
            Some(text) => text.to_owned(),
            // Bytes of one character, which become whole together.
            None => self.decode_with(&[id], false)?,
        })
    }

    fn other_side(&self) -> &Coder {
        self.other_side
            .get_or_init(|| self.tokenizer.cutting(self.cut_side.other()))
    }

    fn unlimited(&self) -> &Coder {
        if self.limit().is_none() {
            return &self.tokenizer;
        }
        self.unlimited.get_or_init(|| {
            let mut tokenizer = self.tokenizer.clone();
            match &mut tokenizer {
                // Only a limit can be refused.
                Coder::Json(tokenizer, _) => drop(tokenizer.with_truncation(None)),
                Coder::Pieces(pieces) => pieces.limit(None),
            }
            tokenizer
        })
    }

    /// Maximum number of tokens of a text, if there is one.
    fn limit(&self) -> Option<usize> {
        match &self.tokenizer {
            Coder::Json(tokenizer, _) => tokenizer.get_truncation().map(|limit| limit.max_length),
            Coder::Pieces(pieces) => pieces.max_tokens(),
        }
    }

    /// Token ids and segment ids of pairs of texts, as a cross-encoder takes them: a query and a document. Of a pair that is
    /// too long the longer text is cut first. The prompt stands before the first. Where the model reads conversations, its template
    /// writes a pair down as one text, of which the end is cut that stands before what the template ends with.
    ///
    /// # Errors
    /// As [`encode_with`](Self::encode_with), a model that goes on from texts, and a template that leaves out a text of a pair.
    pub fn encode_pairs<S: AsRef<str>>(
        &self,
        pairs: &[(S, S)],
        prompt: Prompt,
    ) -> Result<Batch, EngineError> {
        let pairs = pairs.iter();
        self.batch(
            pairs.map(|(a, b)| Input::Pair(a.as_ref(), b.as_ref())),
            prompt,
        )
    }

    /// Token ids and segment ids of one input, behind a prompt. Unlike [`encode`](Self::encode) it leaves it to the caller what
    /// a text that is cut means.
    ///
    /// # Errors
    /// A text that the tokenizer refuses or panics on, and those of [`Folder::prompt`].
    pub fn encode_one(&self, input: Input<'_>, prompt: Prompt) -> Result<Encoded, EngineError> {
        self.encode_cut(input, prompt, self.cut_side)
    }

    /// As [`encode_one`](Self::encode_one), cutting a text that is too long on the given side.
    ///
    /// # Errors
    /// As `encode_one`.
    pub fn encode_cut(
        &self,
        input: Input<'_>,
        prompt: Prompt,
        side: CutSide,
    ) -> Result<Encoded, EngineError> {
        let prompt = self.folder.prompt(prompt)?;
        self.coded(0, input, prompt, side)
    }

    /// Side on which texts are cut, by the checkpoint's files.
    pub fn cut_side(&self) -> CutSide {
        self.cut_side
    }

    fn coded(
        &self,
        index: usize,
        input: Input<'_>,
        prompt: &str,
        side: CutSide,
    ) -> Result<Encoded, EngineError> {
        if let Some(conversation) = &self.conversation {
            return self.written_down(conversation, index, input, prompt, side);
        }
        match (input, prompt) {
            (Input::Pair(..), _) if self.writes => Err(EngineError::Folder {
                file: self.folder.trunk().join("config.json"),
                problem: "its model goes on from texts, and there is no modules.json that says how it scores pairs of texts; a ranker of this kind has a LogitScore module, and a chat template for a query and a document: `CrossEncoder(DIR).save(DIR)` of sentence-transformers writes them".to_owned(),
            }),
            (Input::Text(text), "") => self.encoded(index, text, true, side),
            (Input::Text(text), _) => self.encoded(index, &format!("{prompt}{text}"), true, side),
            (Input::Pair(a, b), _) => self.pair(index, format!("{prompt}{a}"), b, side),
        }
    }

    /// Token ids of a text.
    fn encoded(
        &self,
        index: usize,
        text: &str,
        adds_special: bool,
        side: CutSide,
    ) -> Result<Encoded, EngineError> {
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
        }
    }

    /// Token ids of what a template writes. Of one that is too long the last tokens are those that the template ends with, by
    /// which the model knows that it is to answer.
    fn written_down(
        &self,
        conversation: &Conversation,
        index: usize,
        input: Input<'_>,
        prompt: &str,
        side: CutSide,
    ) -> Result<Encoded, EngineError> {
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
                Ok::<_, EngineError>(self.contained(index, encode)?.get_ids().to_vec())
            };
            // What follows two texts that have no token in common is the template's.
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
        })
    }

    /// The encoding of an input, and whether it was cut.
    fn encoding(
        &self,
        index: usize,
        input: EncodeInput<'_>,
        adds_special: bool,
        side: CutSide,
    ) -> Result<(Encoding, bool), EngineError> {
        let mut encoding = self.encoding_of(index, input.clone(), adds_special)?;
        let mut is_cut = !encoding.get_overflowing().is_empty();
        if let Coder::Json(tokenizer, _) = &self.tokenizer
            && let Some(limit) = tokenizer.get_truncation()
            && encoding.len() == limit.max_length
            && !is_cut
        {
            // The crate stops at the limit, and where no token is added behind it says nothing of what it left out.
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

    /// The encoding of an input, with the special tokens that the tokenizer adds or without.
    fn encoding_of(
        &self,
        index: usize,
        input: EncodeInput<'_>,
        adds_special: bool,
    ) -> Result<Encoding, EngineError> {
        self.contained(index, || self.tokenizer.encode_fast(input, adds_special))
    }

    /// What the tokenizers crate makes of an input, whatever it does.
    fn contained(
        &self,
        index: usize,
        encode: impl FnOnce() -> tokenizers::Result<Encoding>,
    ) -> Result<Encoding, EngineError> {
        contain(encode)
            .map_err(|problem| EngineError::TokenizerPanic {
                file: self.file.clone(),
                index,
                problem,
            })?
            .map_err(|e| EngineError::Text {
                index,
                problem: e.to_string(),
            })
    }

    fn batch<'s>(
        &self,
        inputs: impl Iterator<Item = Input<'s>>,
        prompt: Prompt,
    ) -> Result<Batch, EngineError> {
        let prompt = self.folder.prompt(prompt)?;
        let mut all = Vec::new();
        for (index, input) in inputs.enumerate() {
            let coded = self.coded(index, input, prompt, self.cut_side)?;
            if coded.is_cut {
                tracing::warn!(
                    "text {index} is cut to {} tokens, the most that the checkpoint takes",
                    coded.ids.len()
                );
            }
            all.push(coded);
        }
        Ok(Encoded::batch(all.iter())?)
    }
}
