//! Tasks of a service. The outputs of the model determine them.

use super::Service;
use crate::{
    engine::LOGITS,
    heads::{MASK_LOGITS, TOKEN_LOGITS},
    model::EMBEDDING,
    serve::{OutputKind, ServeError, Text},
    tensor::SequenceEnd,
};

impl Service {
    /// Returns whether the model embeds texts.
    pub fn is_embedding(&self) -> bool {
        self.output == EMBEDDING
    }

    /// Returns whether the model computes sparse embeddings, either alone or in addition to another output.
    pub fn has_sparse(&self) -> bool {
        self.has_sparse
    }

    /// Returns whether the model computes token vectors for late interaction, either alone or in addition to another output.
    pub fn has_token_vectors(&self) -> bool {
        self.token_width > 0
    }

    /// Returns the width of the token vectors for late interaction; 0 if there are none.
    pub fn token_width(&self) -> usize {
        self.token_width
    }

    /// Returns whether the model scores pairs or texts by label, like cross-encoders and classifiers.
    pub fn is_scoring(&self) -> bool {
        self.output == LOGITS
    }

    /// Returns whether the model labels tokens.
    pub fn is_tagging(&self) -> bool {
        self.output == TOKEN_LOGITS && !self.is_answering()
    }

    /// Returns whether the model answers questions about a text.
    pub fn is_answering(&self) -> bool {
        self.output == TOKEN_LOGITS && self.encoder().folder().answers_questions()
    }

    /// Returns whether the model fills masks.
    pub fn is_filling(&self) -> bool {
        self.output == MASK_LOGITS
    }

    /// Checks that the model computes the sparse weights and token vectors that are requested.
    pub(super) fn check_vectors(&self, wanted: OutputKind) -> Result<(), ServeError> {
        let (sparse, token_vectors) = match wanted {
            OutputKind::Several(further) => (further.sparse, further.token_vectors),
            OutputKind::QueryVectors | OutputKind::DocumentVectors => (false, true),
            OutputKind::Usual
            | OutputKind::AllTokens
            | OutputKind::Sparse
            | OutputKind::Tokens
            | OutputKind::Logits => (false, false),
        };
        let problem = match (
            sparse && !self.has_sparse,
            token_vectors && !self.has_token_vectors(),
        ) {
            (true, _) => {
                "the model was not loaded for sparse embeddings; start the server with --sparse, if the model has them"
            }
            (_, true) => {
                "the model was not loaded for vectors of tokens; start the server with --token-vectors, if the model has them"
            }
            (false, false) => return Ok(()),
        };
        Err(ServeError::invalid("model", problem))
    }

    /// Checks token ids, and that a text is not empty. This is done before queueing, so that an invalid input does not fail a whole batch.
    pub(super) fn check(&self, index: usize, text: &Text) -> Result<(), ServeError> {
        let ids = match text {
            Text::Ids(ids) => ids,
            Text::One(text) | Text::Prompted(_, text) if text.is_empty() => {
                let problem = " is an empty text; expected at least one character";
                return Err(ServeError::input(index, problem));
            }
            Text::One(_) | Text::Prompted(..) | Text::Pair(..) | Text::Encoded(_) => return Ok(()),
        };
        let limits = self.shared.limits;
        let wrong = |at: usize, problem: String| {
            Err(ServeError::input(
                index,
                format!(
                    ", token {at}, is {problem}; if the ids are from another tokenizer, such as OpenAI's, send texts instead (in LangChain: check_embedding_ctx_length=False)"
                ),
            ))
        };
        if let Some(at) = ids.iter().position(|&id| id >= limits.vocabulary) {
            let vocabulary = limits.vocabulary;
            return wrong(
                at,
                format!("{}, but the model has {vocabulary} tokens", ids[at]),
            );
        }
        if let Some(at) = ids.iter().position(|&id| Some(id) == limits.skipped) {
            return wrong(at, "the model's padding token".to_owned());
        }
        match limits.end.and_then(|end| wrong_end(end, ids)) {
            Some(problem) => wrong(ids.len().saturating_sub(1), problem),
            None => Ok(()),
        }
    }
}

/// Describes the problem if the model does not accept the last of `ids` as the end of a sequence; `None` if there is no problem.
fn wrong_end(end: SequenceEnd, ids: &[u32]) -> Option<String> {
    let last = ids.last().filter(|_| !end.accepts(ids))?;
    match end {
        SequenceEnd::Required(id) => Some(format!(
            "{last}, but the model requires the last token to be {id}"
        )),
        SequenceEnd::Token(id) => Some(format!(
            "the last one, but the model requires the end-of-sequence token {id}"
        )),
        SequenceEnd::NotPadding(_) => {
            Some("the padding token, with which no text may end".to_owned())
        }
        SequenceEnd::Highest | SequenceEnd::BeforePadding(_) => None,
    }
}
