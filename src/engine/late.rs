//! Late interaction: token vectors of texts, and scores of documents.

use std::sync::Arc;

use super::{
    Engine, EngineError, Padding, Session, SessionBackend,
    heads::{BATCH_TOKENS, warn_of_cut},
    padding,
};
use crate::{
    Batch,
    heads::{TokenVectors, max_sim},
    model::TOKEN_VECTORS,
    runtime::{
        LoadedModel,
        cuda::{HostScorer, TakenRows},
    },
    text::{Encoded, LateScore, Prompt, TextEncoder, TextRole},
};

/// Multiply-adds per second of a CPU thread, from timings of 16 threads on the host of an H200 (`docs/history/other.md`, entry 75).
const PRODUCTS_PER_SECOND: f64 = 15e9;
/// Bytes per second that a CPU thread copies to pinned memory on the host of an H200.
const COPIED_PER_SECOND: f64 = 6e9;
/// Max bytes per second that reach an H200 from pageable host memory, with any number of copying threads.
const MOST_COPIED_PER_SECOND: f64 = 27e9;

/// Scores documents for a query by their token vectors, which are in host memory.
#[derive(Clone)]
pub struct LateScorer {
    model: LoadedModel,
    score: LateScore,
    /// Scorer on the model's GPU; `None` if the model runs on a CPU, or if no kernel supports the width of its token vectors.
    device: Option<Arc<HostScorer>>,
}

impl Engine {
    /// Computes the token vectors of queries or documents with a late-interaction model, one matrix per text. Texts are tokenized as the
    /// checkpoint folder specifies (`ColBERT.encode` of PyLate): a prefix token is inserted, queries are padded, and the vectors of skipped
    /// words are removed from documents. Each vector has length 1. The folder's default prompt is put before each text. For BGE-M3, the
    /// vectors of a text are the rows of the output `colbert`, without the row of the text's first token.
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
    /// [`LateScorer::scores`] describes which device computes the scores.
    ///
    /// # Errors
    /// Returns the errors of [`LateScorer::scores`], and an error if the engine has no checkpoint folder.
    pub fn max_sim(
        &self,
        query: &TokenVectors,
        documents: &[TokenVectors],
    ) -> Result<Vec<f32>, EngineError> {
        let score = self.text_encoder()?.folder().late_score();
        self.late_scorer(score).scores(query, documents)
    }

    /// Returns a scorer for token vectors. All scorers of an engine share buffers in GPU and pinned memory.
    pub fn late_scorer(&self, score: LateScore) -> LateScorer {
        let device = self.host_scorer.get_or_init(|| match &self.model {
            LoadedModel::Cpu(_) => None,
            LoadedModel::Cuda(model) => HostScorer::new(model).map(Arc::new),
        });
        LateScorer {
            model: self.model.clone(),
            score,
            device: device.clone(),
        }
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
        let encoder = self.text_encoder()?;
        let side = encoder.cut_side();
        let query = encoder.encode_as(TextRole::Query, query, Prompt::Default, side)?;
        let encode =
            |text: &&str| encoder.encode_as(TextRole::Document, text, Prompt::Default, side);
        let documents: Vec<&str> = documents.iter().map(AsRef::as_ref).collect();
        let documents = self.encode_all::<_, EngineError>(&documents, encode, || Ok(()))?;
        warn_of_cut(documents.iter().chain([&query]));
        let mut session = self.session()?;
        self.late_scores(
            &mut session,
            encoder,
            &query,
            &documents,
            BATCH_TOKENS,
            || Ok(()),
        )
    }

    /// Scores documents for a query with a late-interaction model, in batches of up to `max_tokens` tokens. On a CUDA device, the scores of
    /// each batch are computed on the device after the batch has run, and only scores are copied to the host. On a CPU, [`LateScorer`]
    /// computes the scores after all batches have run. Calls `between` after each batch. `session` must be a session of this engine, and
    /// `encoder` must be opened from the engine's folder.
    ///
    /// # Errors
    /// Returns an error if a batch fails, if vectors are not finite, or if `between` fails.
    #[doc(hidden)]
    pub fn late_scores<E: From<EngineError>>(
        &self,
        session: &mut Session,
        encoder: &TextEncoder,
        query: &Encoded,
        documents: &[Encoded],
        max_tokens: usize,
        mut between: impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<f32>, E> {
        let query =
            session.vectors(encoder, TextRole::Query, &[query], max_tokens, &mut between)?;
        let query = query.into_iter().next().unwrap_or_default();
        if !session.scores_on_device() {
            let role = TextRole::Document;
            let documents = session.vectors(encoder, role, documents, max_tokens, between)?;
            return Ok(self.max_sim(&query, &documents)?);
        }
        let mut scores = vec![0.0; documents.len()];
        let run = |session: &mut Session, batch: &Batch, at: &[usize]| {
            let (mut rows, mut offsets, mut first) = (Vec::new(), vec![0], 0);
            for &index in at {
                let ids = &documents[index].ids;
                let ids = ids.iter().enumerate();
                let taken = ids
                    .clone()
                    .filter(|&(at, &id)| encoder.takes_part(TextRole::Document, at, id));
                rows.extend(taken.map(|(at, _)| first + at as i32));
                first += ids.len() as i32;
                offsets.push(rows.len() as i32);
            }
            let taken = TakenRows {
                rows: &rows,
                offsets: &offsets,
            };
            let own = session.run_scoring(batch, &query, taken);
            let own = own.map_err(|error| error.of_sequence(|nth| at[nth]))?;
            for (&index, score) in at.iter().zip(own) {
                scores[index] = score;
            }
            Ok(())
        };
        session.each_batch(documents, max_tokens, run, between)?;
        check_finite(&scores)?;
        let score = encoder.folder().late_score();
        score.of_sums(&mut scores, query.rows().len());
        Ok(scores)
    }
}

impl LateScorer {
    /// Scores documents for a query, in f32. The model's GPU computes the scores if copying the documents' vectors to it is estimated to
    /// take less time than computing the products on the CPU. This is the case if the query has many vectors or if the CPU has few threads.
    /// Otherwise, the CPU computes the scores.
    ///
    /// # Errors
    /// Returns an error if the vectors have different widths, if threads cannot be started, or if the device fails.
    pub fn scores(
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
        let n_query = query.rows().len();
        self.model.on_threads(|| {
            if is_worth_copying(n_query, rayon::current_num_threads())
                && let Some(scores) = self.on_device(query, documents)?
            {
                return Ok(scores);
            }
            Ok(max_sim(query, documents, self.score))
        })?
    }

    /// Scores documents on the model's GPU. Returns `None` if the model runs on a CPU, or if the query's vectors do not have the width of
    /// the model's token vectors.
    #[doc(hidden)]
    pub fn on_device(
        &self,
        query: &TokenVectors,
        documents: &[TokenVectors],
    ) -> Result<Option<Vec<f32>>, EngineError> {
        let device = self.device.as_ref();
        let Some(device) = device.filter(|device| device.width() == query.width) else {
            return Ok(None);
        };
        let rows: Vec<&[f32]> = documents.iter().map(|own| &own.values[..]).collect();
        let mut scores = device.scores(&query.values, &rows)?;
        self.score.of_sums(&mut scores, query.rows().len());
        Ok(Some(scores))
    }
}

/// Returns whether copying one element of a document's vectors to a GPU takes less time than its products with `n_query` query vectors on
/// the CPU.
fn is_worth_copying(n_query: usize, threads: usize) -> bool {
    let threads = threads as f64;
    let copied = (COPIED_PER_SECOND * threads).min(MOST_COPIED_PER_SECOND);
    4.0 / copied < n_query as f64 / (PRODUCTS_PER_SECOND * threads)
}

impl Session {
    /// Computes the token vectors of queries or documents, in batches of up to `max_tokens` tokens.
    #[doc(hidden)]
    pub fn vectors<E: From<EngineError>>(
        &mut self,
        encoder: &TextEncoder,
        role: TextRole,
        inputs: &[impl std::borrow::Borrow<Encoded>],
        max_tokens: usize,
        between: impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<TokenVectors>, E> {
        let mut vectors = vec![TokenVectors::default(); inputs.len()];
        let take = |outputs: &super::Outputs, at: &[usize]| {
            for (nth, &index) in at.iter().enumerate() {
                let rows = outputs.sequence(TOKEN_VECTORS, nth)?;
                vectors[index] = TokenVectors::of(encoder, role, &inputs[index].borrow().ids, rows);
            }
            Ok(())
        };
        self.each_output(inputs, max_tokens, take, between)?;
        Ok(vectors)
    }

    /// Returns whether this session can score documents on its device with [`run_scoring`](Self::run_scoring).
    fn scores_on_device(&self) -> bool {
        match &self.backend {
            SessionBackend::Cpu(_) => false,
            SessionBackend::Cuda(session) => self.padding != Padding::Kept && session.can_score(),
        }
    }

    /// Runs a batch of documents, and returns the score of each document for `query`: each vector of `query` contributes its max dot
    /// product with a vector of the document, and the score is the sum of these products.
    ///
    /// # Panics
    /// Panics unless the session [scores on its device](Self::scores_on_device).
    fn run_scoring(
        &mut self,
        batch: &Batch,
        query: &TokenVectors,
        documents: TakenRows<'_>,
    ) -> Result<Vec<f32>, EngineError> {
        let batch = &*self.checked(batch)?;
        let laid_out = padding::laid_out(batch, self.padding)?;
        match &mut self.backend {
            SessionBackend::Cpu(_) => unreachable!("a CPU does not score on its device"),
            SessionBackend::Cuda(session) => {
                Ok(session.run_scoring(&laid_out, &query.values, documents)?)
            }
        }
    }
}

/// Checks that all scores are finite. This check also detects NaN in the vectors of a document, because NaN propagates to the score.
fn check_finite(scores: &[f32]) -> Result<(), EngineError> {
    let is_bad = |score: &f32| !score.is_finite();
    match scores.iter().position(is_bad) {
        None => Ok(()),
        Some(first) => Err(EngineError::NotFinite {
            output: TOKEN_VECTORS.to_owned(),
            n_bad: scores.iter().filter(|score| is_bad(score)).count(),
            n_values: scores.len(),
            first: format!("document {first}"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_copied_to_a_device_for_large_queries_and_few_threads() {
        assert!(is_worth_copying(512, 16));
        assert!(!is_worth_copying(1, 1) && !is_worth_copying(32, 16));
        let thresholds = [1, 2, 8, 16, 64].map(|threads| {
            let worth = |n: &usize| is_worth_copying(*n, threads);
            (1..10_000).find(worth).expect("some query is large enough")
        });
        assert!(thresholds.is_sorted(), "{thresholds:?}");
    }
}
