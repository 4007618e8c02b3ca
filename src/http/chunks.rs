//! Late chunking: the inputs of a request are chunks of one text. The model computes them as one sequence, and the token vectors of each
//! chunk are then pooled.

use std::sync::Arc;

use super::{RequestContext, embeddings::answers, error::Failure, on_thread};
use crate::serve::{Answer, JoinedTexts, Model, OutputKind, Submit, Text};

/// Computes all inputs as one sequence, and returns the vector of each input.
pub(super) async fn chunked(
    app: &RequestContext<'_>,
    model: &Arc<Model>,
    inputs: Vec<Text>,
    submit: Submit,
) -> Result<Vec<Answer>, Failure> {
    let texts = JoinedTexts::new(inputs)?;
    let service = model.service()?;
    let memory = service.memory(texts.count(), OutputKind::Usual);
    let memory = memory.saturating_add(BYTES * texts.bytes() as u64);
    app.share().reserve(memory).await?;
    let (whole, tokens) = {
        let model = Arc::clone(model);
        on_thread(move || texts.join(&model, submit)).await??
    };
    let submit = Submit {
        wanted: OutputKind::AllTokens,
        ..submit
    };
    let whole = answers(app, service, vec![whole], submit).await?;
    match whole.first() {
        Some(whole) => Ok(tokens.pool(whole)),
        None => Err(Failure::not_ready("it has no answer")),
    }
}

/// Estimated bytes of memory that tokenization needs for each byte of text.
const BYTES: u64 = 8;
