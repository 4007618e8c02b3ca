//! Jobs, which turn texts into the sequences that a model computes, and the model's logits into results.

use super::{
    Answer, AnswerOptions, Entailment, Entity, EntityOptions, Filled, LabelScore, MaskOptions,
    ZeroShotOptions,
    answer::{Answers, SpanToken},
    entity::{ScoredToken, entities},
    mask, softmax,
};
use crate::text::{Encoded, Placed, PlacedToken, TextEncoder, TextError};

/// Default for the max number of tokens of a question together with a part of its text.
const MAX_TOKENS: usize = 384;

/// An error in an input or an option of a head.
#[derive(Debug, thiserror::Error)]
#[cfg_attr(feature = "miette", derive(miette::Diagnostic))]
#[non_exhaustive]
pub enum HeadError {
    #[error(transparent)]
    #[cfg_attr(feature = "miette", diagnostic(transparent))]
    Text(#[from] TextError),
    #[error(
        "the tokenizer has no mask token; expected a `mask_token` in tokenizer_config.json, as masked language models have"
    )]
    NoMaskToken,
    #[error("text {index} has no mask; put `{mask}` where a token is missing")]
    NoMask { index: usize, mask: String },
    #[error(
        "the target `{target}` has no token in the model's vocabulary; expected a token, or a word whose first token is known"
    )]
    Target { target: String },
    #[error("the template `{template}` has no `{{}}`; put `{{}}` in the place of the label")]
    Template { template: String },
    #[error("there is no label; expected at least one")]
    NoLabels,
    #[error(
        "the model has the labels {labels}, of which none begins with `entailment`; expected a model of natural language inference (NLI), with that label in `id2label` of config.json"
    )]
    NoEntailment { labels: String },
    #[error("`{option}` is {found}; expected a number from 1 to {max}")]
    Option {
        option: &'static str,
        found: usize,
        max: usize,
    },
    #[error("the model returned {found} values for {tokens} tokens; expected {expected} per token")]
    Logits {
        found: usize,
        tokens: usize,
        expected: usize,
    },
    #[error("the model returned logits for {found} masks; expected {masks}")]
    MaskRows { found: usize, masks: usize },
}

/// Checks that `logits` has `width` values for each of `tokens` tokens.
fn check_logits(logits: &[f32], tokens: usize, width: usize) -> Result<(), HeadError> {
    match logits.len() == tokens * width && width > 0 {
        true => Ok(()),
        false => Err(HeadError::Logits {
            found: logits.len(),
            tokens,
            expected: width,
        }),
    }
}

/// Byte offsets of the characters of a text.
struct Chars<'t> {
    text: &'t str,
    places: Vec<usize>,
}

impl<'t> Chars<'t> {
    fn of(text: &'t str) -> Self {
        let places = text.char_indices().map(|(at, _)| at);
        Self {
            text,
            places: places.chain([text.len()]).collect(),
        }
    }

    /// Returns the characters `start..end`, or an empty string if the range exceeds the text.
    fn range(&self, start: usize, end: usize) -> &'t str {
        let bounds = (self.places.get(start), self.places.get(end));
        let (Some(&start), Some(&end)) = bounds else {
            return "";
        };
        self.text.get(start..end).unwrap_or_default()
    }
}

/// Classification of the tokens of a text.
#[derive(Debug)]
pub struct TokenJob {
    text: String,
    placed: Placed,
}

impl TokenJob {
    /// Tokenizes a text. Errors name the text by `index`.
    ///
    /// # Errors
    /// Returns the errors of [`TextEncoder::place`].
    pub fn new(encoder: &TextEncoder, index: usize, text: &str) -> Result<Self, HeadError> {
        let placed = encoder.place(index, text)?;
        Ok(Self {
            text: text.to_owned(),
            placed,
        })
    }

    /// Returns the sequence that the model computes.
    pub fn input(&self) -> &Encoded {
        &self.placed.encoded
    }

    /// Returns all tokens with the probabilities of the labels, or with the logits if `are_raw`. `logits` is `[tokens, n_labels]`.
    ///
    /// # Errors
    /// Returns an error if the number of logits does not match the tokens and labels.
    pub fn scores(
        &self,
        logits: &[f32],
        n_labels: usize,
        are_raw: bool,
    ) -> Result<Vec<(&PlacedToken, Vec<f32>)>, HeadError> {
        let tokens = &self.placed.tokens;
        check_logits(logits, tokens.len(), n_labels)?;
        let rows = tokens.iter().zip(logits.chunks_exact(n_labels));
        let rows = rows.map(|(token, row)| {
            let mut scores = row.to_vec();
            if !are_raw {
                softmax(&mut scores);
            }
            (token, scores)
        });
        Ok(rows.collect())
    }

    /// Returns the entities of the text. `logits` is `[tokens, labels]`, for all tokens of the sequence.
    ///
    /// # Errors
    /// Returns an error if the number of logits does not match the tokens and labels, or if the tokenizer cannot join tokens into text.
    pub fn finish(
        &self,
        encoder: &TextEncoder,
        logits: &[f32],
        labels: &[String],
        options: &EntityOptions,
    ) -> Result<Vec<Entity>, HeadError> {
        let tokens = &self.placed.tokens;
        check_logits(logits, tokens.len(), labels.len())?;
        let chars = Chars::of(&self.text);
        let marks = encoder.marks_continuations();
        let unknown = encoder.named_token("unk_token")?;
        let rows = tokens.iter().zip(logits.chunks_exact(labels.len()));
        let rows = rows
            .enumerate()
            .filter(|(_, (token, _))| token.part.is_some());
        let scored = rows.map(|(index, (token, row))| {
            let own = chars.range(token.start, token.end);
            let is_unknown = unknown == Some(token.id);
            let length = |text: &str| text.chars().count();
            // If the vocabulary marks continuations, a token continues a word if its name and its text have different lengths, because the
            // name then includes the mark. In other vocabularies, words end at spaces. These are the rules of the library transformers.
            let continues = match marks {
                true => length(&token.name) != length(own),
                false => {
                    let from = token.start.saturating_sub(1);
                    let until = (token.start + 1).min(chars.places.len() - 1);
                    token.start > 0 && !chars.range(from, until).contains(' ')
                }
            };
            let mut scores = row.to_vec();
            softmax(&mut scores);
            ScoredToken {
                index,
                word: match is_unknown {
                    true => own.to_owned(),
                    false => token.name.clone(),
                },
                start: token.start,
                end: token.end,
                continues: continues && !is_unknown,
                scores,
            }
        });
        let join = |words| encoder.join(words).map_err(HeadError::from);
        entities(scored.collect(), labels, options, join)
    }
}

/// A text with masks to fill.
#[derive(Debug)]
pub struct MaskJob {
    encoded: Encoded,
    /// Indices of the masks among the tokens.
    masks: Vec<usize>,
}

impl MaskJob {
    /// Tokenizes a text. Errors name the text by `index`.
    ///
    /// # Errors
    /// Returns the errors of [`TextEncoder::place`], and an error if the text or the tokenizer has no mask.
    pub fn new(encoder: &TextEncoder, index: usize, text: &str) -> Result<Self, HeadError> {
        let mask = encoder.named_token("mask_token")?;
        let mask = mask.ok_or(HeadError::NoMaskToken)?;
        let encoded = encoder.place(index, text)?.encoded;
        let ids = encoded.ids.iter().enumerate();
        let masks: Vec<usize> = ids
            .filter(|(_, id)| **id == mask)
            .map(|(at, _)| at)
            .collect();
        match masks.is_empty() {
            false => Ok(Self { encoded, masks }),
            true => Err(HeadError::NoMask {
                index,
                mask: encoder.decode_with(&[mask], false)?,
            }),
        }
    }

    /// Returns the sequence that the model computes.
    pub fn input(&self) -> &Encoded {
        &self.encoded
    }

    /// Returns the indices of the masks among the tokens.
    pub fn masks(&self) -> &[usize] {
        &self.masks
    }

    /// Returns the ids of the targets of `options`. Each target is the name of a token, or a word, which is represented by its first token.
    /// Logs a warning for a word of several tokens.
    ///
    /// # Errors
    /// Returns an error if a target has no token, or if its first token is the unknown token.
    pub fn targets(encoder: &TextEncoder, options: &MaskOptions) -> Result<Vec<u32>, HeadError> {
        let unknown = encoder.named_token("unk_token")?;
        let ids = options.targets.iter().map(|target| {
            if let Some(id) = encoder.token_id(target) {
                return Ok(id);
            }
            let tokens = match target.is_empty() {
                true => Vec::new(),
                false => encoder.tokens(target, false)?,
            };
            match tokens.as_slice() {
                [first, others @ ..] if Some(first.id) != unknown => {
                    if !others.is_empty() {
                        let (name, n) = (encoder.decode_with(&[first.id], false)?, tokens.len());
                        tracing::warn!("the target `{target}` has {n} tokens; only the first one, `{name}`, is considered");
                    }
                    Ok(first.id)
                }
                _ => Err(HeadError::Target {
                    target: target.chars().take(80).collect(),
                }),
            }
        });
        ids.collect()
    }

    /// Returns the `top_k` most probable tokens for each mask, most probable first. `rows` has a row of vocabulary logits for each mask. If
    /// `targets` is not empty, only these token ids are considered.
    ///
    /// # Errors
    /// Returns an error if the number of rows is not the number of masks, or if tokens cannot be decoded.
    pub fn finish(
        &self,
        encoder: &TextEncoder,
        rows: &[&[f32]],
        top_k: usize,
        targets: &[u32],
    ) -> Result<Vec<Vec<Filled>>, HeadError> {
        if rows.len() != self.masks.len() {
            return Err(HeadError::MaskRows {
                found: rows.len(),
                masks: self.masks.len(),
            });
        }
        let padding = encoder.named_token("pad_token")?;
        let masks = self.masks.iter().zip(rows).map(|(&at, row)| {
            let best = mask::best(row.to_vec(), top_k, targets);
            let best = best.into_iter().map(|(token, score)| {
                let mut ids = self.encoded.ids.clone();
                ids[at] = token;
                ids.retain(|id| Some(*id) != padding);
                Ok(Filled {
                    score,
                    token,
                    token_str: encoder.decode_with(&[token], false)?,
                    // In a text with several masks, special tokens are kept, so that the other masks remain visible.
                    sequence: encoder.decode_with(&ids, self.masks.len() == 1)?,
                })
            });
            best.collect::<Result<Vec<Filled>, HeadError>>()
        });
        masks.collect()
    }
}

/// Zero-shot classification of a text.
#[derive(Debug)]
pub struct ZeroShotJob {
    nli: Entailment,
    labels: Vec<String>,
    inputs: Vec<Encoded>,
}

impl ZeroShotJob {
    /// Tokenizes the text with a sentence for each label. `names` are the labels of the model.
    ///
    /// # Errors
    /// Returns an error if there is no label, if the template does not contain `{}`, or if [`Entailment::new`] returns `None`. Also returns
    /// the errors of [`TextEncoder::pair_cutting_first`].
    pub fn new(
        encoder: &TextEncoder,
        names: &[String],
        text: &str,
        labels: &[String],
        template: &str,
    ) -> Result<Self, HeadError> {
        let nli = Entailment::new(names).ok_or_else(|| HeadError::NoEntailment {
            labels: names.join(", "),
        })?;
        if labels.is_empty() {
            return Err(HeadError::NoLabels);
        }
        if !template.contains("{}") {
            return Err(HeadError::Template {
                template: template.chars().take(80).collect(),
            });
        }
        let pair =
            |label: &String| encoder.pair_cutting_first(text, &template.replace("{}", label));
        let inputs = labels.iter().map(pair).collect::<Result<_, TextError>>()?;
        Ok(Self {
            nli,
            labels: labels.to_vec(),
            inputs,
        })
    }

    /// Returns the sequences that the model computes, one for each label.
    pub fn inputs(&self) -> &[Encoded] {
        &self.inputs
    }

    /// Returns the labels with their scores, highest first. `rows` has the model's logits for each sequence of [`inputs`](Self::inputs).
    pub fn finish(&self, rows: &[&[f32]], options: &ZeroShotOptions) -> Vec<LabelScore> {
        let scores = self.nli.scores(rows, options.multi_label);
        LabelScore::ranked(&self.labels, scores)
    }
}

/// A question about a text.
#[derive(Debug)]
pub struct QuestionJob {
    text: String,
    parts: Vec<Placed>,
    first: Option<u32>,
}

impl QuestionJob {
    /// Max number of parts into which a text is divided. The model processes each part as one sequence.
    pub const MAX_PARTS: usize = Placed::MAX_PARTS;

    /// Tokenizes a question with each part of its text.
    ///
    /// # Errors
    /// Returns an error if an option is out of range, and the errors of [`TextEncoder::place_parts`].
    pub fn new(
        encoder: &TextEncoder,
        question: &str,
        text: &str,
        options: &AnswerOptions,
    ) -> Result<Self, HeadError> {
        let limit = encoder.max_tokens().unwrap_or(MAX_TOKENS);
        let max_tokens = options.max_tokens.unwrap_or(MAX_TOKENS.min(limit));
        let check = |option, found: usize, max: usize| match (1..=max).contains(&found) {
            true => Ok(()),
            false => Err(HeadError::Option { option, found, max }),
        };
        check("max_tokens", max_tokens, limit)?;
        check("top_k", options.top_k, MAX_ANSWERS)?;
        check("max_answer_tokens", options.max_answer_tokens, limit)?;
        let parts = encoder.place_parts(question, text, max_tokens, options.stride)?;
        Ok(Self {
            text: text.to_owned(),
            parts,
            first: encoder.named_token("cls_token")?,
        })
    }

    /// Returns the sequences that the model computes.
    pub fn inputs(&self) -> impl Iterator<Item = &Encoded> {
        self.parts.iter().map(|part| &part.encoded)
    }

    /// Returns the answers, best first. `rows` has, for each sequence of [`inputs`](Self::inputs), the start and end logits of all tokens,
    /// `[tokens, 2]`.
    ///
    /// # Errors
    /// Returns an error if a sequence does not have two logits for each token.
    pub fn finish(
        &self,
        rows: &[&[f32]],
        options: &AnswerOptions,
    ) -> Result<Vec<Answer>, HeadError> {
        let chars = Chars::of(&self.text);
        let mut answers = Answers::new(options);
        for (part, logits) in self.parts.iter().zip(rows) {
            check_logits(logits, part.tokens.len(), 2)?;
            let tokens = part.tokens.iter().map(|token| {
                let is_own = token.part == Some(1);
                SpanToken {
                    start: token.start,
                    end: token.end,
                    is_allowed: is_own || self.first == Some(token.id),
                    word: token.word.filter(|_| is_own),
                }
            });
            let tokens: Vec<SpanToken> = tokens.collect();
            answers.add(&tokens, logits, |start, end| {
                chars.range(start, end).to_owned()
            });
        }
        Ok(answers.best())
    }
}

/// Max number of answers to a question.
const MAX_ANSWERS: usize = 1000;
