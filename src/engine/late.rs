//! Late interaction: token vectors of texts, and scores of documents.

use super::{Engine, EngineError, heads::BATCH_TOKENS};
use crate::{
    heads::{TokenVectors, max_sim},
    model::TOKEN_VECTORS,
    text::{Encoded, Prompt, TextRole},
};

impl Engine {
    /// Computes the token vectors of queries or documents with a late-interaction model, one matrix per text. Texts are tokenized as the
    /// checkpoint folder specifies (`ColBERT.encode` of PyLate): a prefix token is inserted, queries are padded, and the vectors of skipped
    /// words are removed from documents. Each vector has length 1. The folder's default prompt is put before each text. For BGE-M3, these
    /// are the rows of the output `colbert` without the first token's row.
    ///
    /// # Errors
    /// Returns an error if the engine has no checkpoint folder or lacks the output `colbert`, if the tokenizer refuses a text, or if a
    /// batch fails.
    pub fn token_vectors<S: AsRef<str>>(
        &self,
        role: TextRole,
        texts: &[S],
    ) -> Result<Vec<TokenVectors>, EngineError> {
        let encoder = self.text_encoder()?;
        let side = encoder.cut_side();
        let encode = |text: &&str| encoder.encode_as(role, text, Prompt::Default, side);
        let texts: Vec<&str> = texts.iter().map(AsRef::as_ref).collect();
        let inputs = self.encode_all::<_, EngineError>(&texts, encode, || Ok(()))?;
        let inputs: Vec<&Encoded> = inputs.iter().collect();
        self.head(&inputs, TOKEN_VECTORS, BATCH_TOKENS, |index, rows| {
            TokenVectors::of(encoder, role, &inputs[index].ids, rows)
        })
    }

    /// Scores documents for a query by their token vectors. Each vector of the query contributes its max dot product with a vector of the
    /// document. The products are summed in f32. For BGE-M3, the sum is divided by the number of the query's vectors, as in FlagEmbedding.
    /// Scores are computed on the CPU.
    ///
    /// # Errors
    /// Returns an error if the vectors have different widths, or if threads cannot be started.
    pub fn max_sim(
        &self,
        query: &TokenVectors,
        documents: &[TokenVectors],
    ) -> Result<Vec<f32>, EngineError> {
        let mut all = documents.iter();
        let is_other = |vectors: &&TokenVectors| vectors.width != query.width;
        if let Some(other) = all.find(is_other) {
            return Err(EngineError::OtherWidth {
                query: query.width,
                document: other.width,
            });
        }
        let score = self.text_encoder()?.folder().late_score();
        self.on_threads(|| max_sim(query, documents, score))
    }

    /// Returns whether the engine computes token vectors for late interaction.
    pub fn has_token_vectors(&self) -> bool {
        let mut outputs = self.program().outputs.iter();
        outputs.any(|(name, _)| name == TOKEN_VECTORS)
    }

    /// Scores documents for a query with a late-interaction model.
    pub(super) fn rerank_late<S: AsRef<str>>(
        &self,
        query: &str,
        documents: &[S],
    ) -> Result<Vec<f32>, EngineError> {
        let query = self.token_vectors(TextRole::Query, &[query])?;
        let documents = self.token_vectors(TextRole::Document, documents)?;
        match query.first() {
            Some(query) => self.max_sim(query, &documents),
            None => Ok(Vec::new()),
        }
    }
}
