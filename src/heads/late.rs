//! Late interaction (ColBERT): token vectors of texts, and scores of documents for a query.

use gemmule_cpu::max_sim::MaxSim;

use crate::text::{LateScore, TextEncoder, TextRole};

/// Token vectors of a text, `[tokens, width]`. Tokens that do not take part in scores are left out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenVectors {
    pub width: usize,
    /// The vectors, row-major.
    pub values: Vec<f32>,
}

impl TokenVectors {
    /// Selects the vectors of the tokens that take part in scores. `rows` has one vector for each token in `ids`.
    ///
    /// # Panics
    /// Panics if the length of `rows` is not a multiple of the number of `ids`.
    pub fn of(encoder: &TextEncoder, role: TextRole, ids: &[u32], rows: &[f32]) -> Self {
        let width = rows.len() / ids.len().max(1);
        assert_eq!(width * ids.len(), rows.len(), "each token has a row");
        let rows = ids.iter().enumerate().zip(rows.chunks_exact(width.max(1)));
        let kept = rows.filter(|((at, id), _)| encoder.takes_part(role, *at, **id));
        Self {
            width,
            values: kept.flat_map(|(_, row)| row).copied().collect(),
        }
    }

    /// Returns the vector of each token.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.values.chunks_exact(self.width.max(1))
    }
}

/// Scores documents for a query. Each vector of the query contributes its max dot product with a vector of the document. The score is the
/// f32 sum of these products or their mean, as `score` says. A document without vectors scores 0. Runs on the CPU, in the caller's rayon
/// thread pool.
///
/// # Panics
/// Panics if the width of a document differs from that of the query.
pub fn max_sim(query: &TokenVectors, documents: &[TokenVectors], score: LateScore) -> Vec<f32> {
    let fits = |own: &TokenVectors| own.values.is_empty() || own.width == query.width;
    assert!(
        documents.iter().all(fits),
        "vectors of one model have one width"
    );
    let rows: Vec<&[f32]> = documents.iter().map(|own| &own.values[..]).collect();
    let mut scores = vec![0.0; documents.len()];
    let run = MaxSim {
        query: &query.values,
        documents: &rows,
        width: query.width.max(1),
        out: &mut scores,
    };
    run.run();
    score.of_sums(&mut scores, query.rows().len());
    scores
}
