//! Late chunking: the inputs of a request are chunks of one text.

use std::sync::Arc;

use super::{RequestContext, embeddings::answers, error::Failure, on_thread};
use crate::{
    heads::pool_chunks,
    serve::{Answer, Model, OutputKind, Submit, Text},
    text::{Chunks, Prompt, TextError},
};

/// Field that asks for it.
const FIELD: &str = "late_chunking";

/// Computes inputs as one sequence, and returns the vector of each.
pub(super) async fn chunked(
    app: &RequestContext<'_>,
    model: &Arc<Model>,
    inputs: Vec<Text>,
    submit: Submit,
) -> Result<Vec<Answer>, Failure> {
    let mut given: Option<Arc<str>> = None;
    let text = |input| match input {
        Text::One(text) => Ok(text),
        Text::Prompted(prompt, text) => {
            given = Some(prompt);
            Ok(text)
        }
        Text::Pair(..) | Text::Ids(_) | Text::Encoded(_) => {
            let problem = format!("`{FIELD}` joins texts, and the input has token ids; send texts");
            Err(Failure::invalid(FIELD, problem))
        }
    };
    let texts: Vec<String> = inputs.into_iter().map(text).collect::<Result<_, _>>()?;
    let n_bytes: usize = texts.iter().map(String::len).sum();
    let service = model.service()?;
    let memory = service.memory(texts.len(), OutputKind::Usual);
    let memory = memory.saturating_add(BYTES * n_bytes as u64);
    app.share().reserve(memory).await?;
    let encode = {
        let model = Arc::clone(model);
        move || {
            let encoder = model.encoder();
            let named = submit
                .prompt
                .and_then(|at| encoder.folder().prompt_name(at));
            let prompt = match (&given, named) {
                (Some(text), _) => Prompt::Text(text),
                (None, Some(name)) => Prompt::Named(name),
                (None, None) => Prompt::Default,
            };
            let chunks = encoder.encode_chunks(&texts, prompt)?;
            Ok::<_, TextError>((chunks, encoder.folder().chunk_pooling()?))
        }
    };
    let (chunks, pooling) = on_thread(encode)
        .await?
        .map_err(|error| Failure::invalid(FIELD, error.to_string()))?;
    let Chunks { encoded, ranges } = chunks;
    let submit = Submit {
        wanted: OutputKind::AllTokens,
        ..submit
    };
    let whole = answers(app, service, vec![Text::Encoded(encoded)], submit).await?;
    let Some(whole) = whole.into_iter().next() else {
        return Err(Failure::not_ready("it has no answer"));
    };
    let rows = pool_chunks(&whole.values, whole.tokens, &ranges, pooling);
    let each = ranges.iter().zip(rows).map(|(range, values)| Answer {
        values,
        entries: Vec::new(),
        tokens: range.len(),
    });
    Ok(each.collect())
}

/// Bytes that tokenizing takes for each byte of the texts.
const BYTES: u64 = 8;
