//! Tasks of a service, which its outputs determine.

use super::Service;
use crate::{
    engine::LOGITS,
    heads::{MASK_LOGITS, TOKEN_LOGITS},
    model::EMBEDDING,
    serve::{OutputKind, ServeError},
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
}
