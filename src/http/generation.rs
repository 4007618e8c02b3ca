//! OpenAI's routes for generated text: completions and chat completions, as whole responses or server-sent events.

mod head;
mod request;
mod stream;

use std::{future::poll_fn, sync::Arc, task::Poll};

use hyper::StatusCode;
use serde_json::Value;

use self::{head::Head, request::GenerationRequest};
pub(super) use self::{
    head::{reason, usage},
    request::{chat_doc, completions_doc, stream_options_schema},
    stream::{End, Events, add_event, streamed},
};
use super::{
    App, HandlerResult, RequestContext, embeddings::inputs, error::Failure, json, on_thread,
    request::Fields,
};
use crate::serve::{
    Ending, GenerationParams, GenerationService, Message, Piece, Scored, ServeError, Share, Submit,
    Text, TokenStream,
};

pub(super) async fn completions(
    app: &RequestContext<'_>,
    fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let params = GenerationRequest::parse(fields, false)?;
    let model = app.asks(app.models.writing(params.model.as_deref()))?;
    let service = model.generation()?;
    let prompts = inputs("prompt", &params.prompt)?;
    let (n, writing) = (params.n(), params.writing(false));
    if params.streams() && prompts.len() != 1 {
        let problem = format!(
            "there are {} prompts; expected one prompt for a stream",
            prompts.len()
        );
        return Err(Failure::invalid("prompt", problem));
    }
    let texts = (prompts.len() as u64).saturating_mul(n as u64);
    service.has_place(texts, submit)?;
    let holds = Arc::clone(&model);
    let prompts = on_thread(move || {
        let service = holds.generation()?;
        let ids = prompts.into_iter().map(|prompt| match prompt {
            Text::Ids(ids) => Ok(ids),
            Text::Encoded(encoded) => Ok(encoded.ids),
            Text::One(text) | Text::Prompted(_, text) | Text::Pair(text, _) => {
                Ok(service.prompts(&[&text])?.pop().unwrap_or_default())
            }
        });
        ids.collect::<Result<Vec<Vec<u32>>, ServeError>>()
    });
    let all = written(app, service, prompts.await??, n, &writing, submit).await?;
    let head = Head::new(app, &model.name, false, &params);
    answered(app, head, &params, n, all).await
}

pub(super) async fn chat(
    app: &RequestContext<'_>,
    fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let mut params = GenerationRequest::parse(fields, true)?;
    let model = app.asks(app.models.writing(params.model.as_deref()))?;
    let service = model.generation()?;
    let said = params
        .messages
        .take()
        .filter(|said| !said.is_empty())
        .ok_or_else(|| {
            let problem = "`messages` has no message; expected at least one".to_owned();
            Failure::invalid("messages", problem)
        })?;
    let messages = said
        .into_iter()
        .enumerate()
        .map(|(at, said)| said.message(at));
    let messages = messages.collect::<Result<Vec<Message>, Failure>>()?;
    let (n, writing) = (params.n(), params.writing(true));
    let options = params.chat_options()?;
    service.has_place(n as u64, submit)?;
    let holds = Arc::clone(&model);
    // Limit the number of chat templates that are rendered concurrently, because each uses memory. The permit is held until the rendering
    // has ended, even if the client disconnects.
    let permit = Arc::clone(&app.rendering).acquire_owned().await;
    let prompt = on_thread(move || {
        let _permit = permit;
        holds.generation()?.conversation(&messages, &options)
    });
    let all = written(app, service, vec![prompt.await??], n, &writing, submit).await?;
    let head = Head::new(app, &model.name, true, &params);
    answered(app, head, &params, n, all).await
}

/// Starts `n` generations for each prompt.
async fn written(
    app: &RequestContext<'_>,
    service: &GenerationService,
    prompts: Vec<Vec<u32>>,
    n: usize,
    writing: &GenerationParams,
    submit: Submit,
) -> Result<Vec<TokenStream>, ServeError> {
    let writing = &varied(service, n, writing);
    let each = prompts.iter().enumerate();
    let each = each.flat_map(|(at, prompt)| (0..n).map(move |nth| (at, prompt, nth)));
    let share = app.share();
    let tokens: usize = prompts.iter().map(Vec::len).sum();
    // Each token id has 4 bytes and is stored twice: in the queue and in the generator.
    let bytes = 8 * (tokens as u64).saturating_mul(n as u64);
    share.reserve(bytes).await?;
    each.map(|(at, prompt, nth)| {
        let writing = seeded(app, writing, nth);
        let submitted = service.submit_within(prompt.clone(), writing, submit, share);
        submitted.map_err(|error| match prompts.len() {
            1 => error,
            _ => error.of_text("prompt", at),
        })
    })
    .collect()
}

/// Returns the parameters for `n` texts of one prompt. If `n` > 1 and the request sets neither a temperature nor `top_p`, the model's
/// default temperature is used, because greedy decoding would return the same text `n` times.
fn varied(service: &GenerationService, n: usize, writing: &GenerationParams) -> GenerationParams {
    let is_open = n > 1 && writing.temperature.is_none() && writing.top_p.is_none();
    GenerationParams {
        temperature: match is_open {
            true => service.default_temperature(),
            false => writing.temperature,
        },
        ..writing.clone()
    }
}

/// Returns the parameters for the `nth` text of a prompt. Requests with the same seed get the same texts. Without a seed in the request,
/// each text gets a new seed.
fn seeded(app: &App, writing: &GenerationParams, nth: usize) -> GenerationParams {
    let seed = match writing.seed {
        Some(seed) => seed.wrapping_add(nth as u64),
        None => app.new_seed(),
    };
    GenerationParams {
        seed: Some(seed),
        ..writing.clone()
    }
}

/// Responds with `n` texts for each prompt, as a whole response or as a stream.
async fn answered(
    app: &RequestContext<'_>,
    head: Head,
    params: &GenerationRequest,
    n: usize,
    all: Vec<TokenStream>,
) -> HandlerResult {
    if params.streams() {
        return streamed(head, all.into_iter().map(Some).collect()).await;
    }
    let (mut choices, mut prompt, mut tokens) = (Vec::with_capacity(all.len()), 0, 0);
    for (index, done) in finished(all, app.share()).await?.into_iter().enumerate() {
        // Count each prompt once, even if it has several texts.
        prompt += if index % n == 0 { done.used.0 } else { 0 };
        tokens += done.used.1;
        choices.push(head.choice(index, &done));
    }
    let mut answer = head.object(false, Value::Array(choices));
    answer["usage"] = usage(prompt, tokens);
    Ok(json(StatusCode::OK, &answer))
}

/// A finished text. `used` contains the number of prompt tokens and the number of generated tokens.
pub(super) struct Done {
    pub(super) text: String,
    tokens: Vec<Scored>,
    pub(super) ending: Ending,
    pub(super) used: (usize, usize),
    /// The requested hypotheses of a beam search with their scores, best first.
    pub(super) hypotheses: Vec<(String, f32)>,
}

impl Done {
    /// A text without tokens.
    pub(super) fn empty() -> Self {
        Self {
            text: String::new(),
            tokens: Vec::new(),
            ending: Ending::Stop,
            used: (0, 0),
            hypotheses: Vec::new(),
        }
    }
}

/// Estimated bytes of one token in a JSON response, including its log-probability. An alternative token is charged in the same way.
const SCORED_BYTES: u64 = 1000;

/// Waits until all texts are finished, and returns them. Charges their memory to `share`.
pub(super) async fn finished(all: Vec<TokenStream>, share: &Share) -> Result<Vec<Done>, Failure> {
    let mut all: Vec<(TokenStream, Done, bool)> = all
        .into_iter()
        .map(|pieces| (pieces, Done::empty(), false))
        .collect();
    // Poll all texts, not only the first unfinished one, so that the memory of each text is charged while it grows.
    poll_fn(|context| {
        let mut is_done = true;
        for (pieces, done, is_over) in &mut all {
            while !*is_over {
                let Poll::Ready(piece) = pieces.poll_next(context) else {
                    break;
                };
                match piece.transpose()? {
                    Some(Piece::Text { text, tokens }) => {
                        let scored = |token: &Scored| 1 + token.top_tokens.len() as u64;
                        let scored: u64 = tokens.iter().map(scored).sum();
                        share.add(3 * text.len() as u64 + SCORED_BYTES * scored)?;
                        done.text += &text;
                        done.tokens.extend(tokens);
                    }
                    Some(Piece::End {
                        ending,
                        prompt_tokens,
                        tokens,
                        hypotheses,
                    }) => {
                        let bytes = hypotheses
                            .iter()
                            .map(|(text, _)| 3 * text.len() as u64 + 64);
                        share.add(bytes.sum())?;
                        (done.ending, done.used) = (ending, (prompt_tokens, tokens));
                        done.hypotheses = hypotheses;
                        *is_over = true;
                    }
                    None => {
                        let failure = Failure::not_ready("it ended before the text did");
                        return Poll::Ready(Err(failure));
                    }
                }
            }
            is_done &= *is_over;
        }
        match is_done {
            true => Poll::Ready(Ok(())),
            false => Poll::Pending,
        }
    })
    .await?;
    Ok(all.into_iter().map(|(_, done, _)| done).collect())
}
