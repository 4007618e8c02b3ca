//! Ranks documents for a query, with a cross-encoder (which scores pairs) or by late interaction.

use super::{RequestContext, embeddings::answers, error::Failure, on_thread, route::Subject};
use crate::serve::{Answer, OutputKind, ServeError, Service, Submit, Text, TextRole, TokenVectors};

/// Scores documents against a query. Returns the index and the score of each document, best first, and the number of tokens.
pub(super) async fn ranked(
    app: &RequestContext<'_>,
    service: &Service,
    query: &str,
    documents: &[String],
    submit: Submit,
) -> Result<(Vec<(usize, f32)>, usize), Failure> {
    if documents.is_empty() {
        let problem = "there is no document; expected at least one".to_owned();
        return Err(Failure::invalid("documents", problem));
    }
    if service.has_token_vectors() && !service.is_scoring() {
        return ranked_late(app, service, query, documents, submit).await;
    }
    if service.width() != 1 {
        let problem = format!(
            "the model has {} labels; expected a model with one score for each document",
            service.width()
        );
        return Err(ServeError::Invalid {
            param: "model",
            problem,
        }
        .into());
    }
    // Each pair of the query and a document contains a copy of the query.
    let copies = (query.len() as u64).saturating_mul(documents.len() as u64);
    let memory = service.memory(documents.len(), submit.wanted);
    app.share().reserve(copies.saturating_add(memory)).await?;
    let pair = |document: &String| Text::Pair(query.to_owned(), document.clone());
    let pairs = documents.iter().map(pair).collect();
    let answers = answers(app, service, pairs, submit).await;
    let answers = answers.map_err(|failure| failure.about(Subject::Pair))?;
    let tokens = answers.iter().map(|answer| answer.tokens).sum();
    let score = |answer: &Answer| answer.values.first().copied().unwrap_or(0.0);
    Ok((best_first(answers.iter().map(score)), tokens))
}

/// Scores documents against a query by their token vectors. Returns the index and the score of each document, best first, and the number of
/// tokens. The token vectors of documents are cached like other responses, in host memory.
async fn ranked_late(
    app: &RequestContext<'_>,
    service: &Service,
    query: &str,
    documents: &[String],
    submit: Submit,
) -> Result<(Vec<(usize, f32)>, usize), Failure> {
    let as_side = |role| Submit {
        wanted: OutputKind::vectors(role),
        ..submit
    };
    let (of_query, of_documents) = (as_side(TextRole::Query), as_side(TextRole::Document));
    let memory = service.memory(1 + documents.len(), of_query.wanted);
    let bytes: usize = documents.iter().map(String::len).sum();
    app.share()
        .reserve(memory.saturating_add(bytes as u64))
        .await?;
    let query = vec![Text::One(query.to_owned())];
    let query = service.submit_within(query, of_query, app.share());
    let query = query.map_err(|error| Failure::from(error).about(Subject::Query))?;
    let documents = documents.iter().cloned().map(Text::One).collect();
    let documents = answers(app, service, documents, of_documents).await?;
    let mut tokens: usize = documents.iter().map(|answer| answer.tokens).sum();
    let width = service.token_width();
    let vectors = |values| TokenVectors { width, values };
    let mut sides = TokenVectors::default();
    for reply in query {
        let answer = reply.await;
        let answer = answer.map_err(|error| Failure::from(error).about(Subject::Query))?;
        tokens += answer.tokens;
        sides = vectors(answer.values);
    }
    let documents: Vec<TokenVectors> = documents
        .into_iter()
        .map(|answer| vectors(answer.values))
        .collect();
    let scorer = service.late_scorer().clone();
    let scores = on_thread(move || scorer.scores(&sides, &documents)).await?;
    let scores = scores.map_err(|e| ServeError::Internal(e.to_string()))?;
    Ok((best_first(scores), tokens))
}

/// Returns scores with their indices, best first. Equal scores keep their order.
fn best_first(scores: impl IntoIterator<Item = f32>) -> Vec<(usize, f32)> {
    let mut ranks: Vec<(usize, f32)> = scores.into_iter().enumerate().collect();
    ranks.sort_by(|a, b| b.1.total_cmp(&a.1));
    ranks
}
