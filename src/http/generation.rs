//! OpenAI's routes for generated text: completions and chat completions, as whole responses or server-sent events.

mod head;
mod request;

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
};

use hyper::{
    Response, StatusCode,
    header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue},
};
use serde::Serialize;
use serde_json::{Value, json};

use self::{
    head::{Head, usage},
    request::GenerationRequest,
};
use super::{
    App, HandlerResult, RequestContext,
    body::{Body, Events},
    embeddings::inputs,
    error::Failure,
    json, on_thread,
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
    // Limit the number of renderings that use memory at the same time. The permit is held until the work has ended, even if the client has left.
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
    let each = prompts
        .iter()
        .flat_map(|prompt| (0..n).map(move |nth| (prompt, nth)));
    let share = app.share();
    let tokens: usize = prompts.iter().map(Vec::len).sum();
    // Ids are copied: one copy waits, and one is generated from.
    let bytes = 8 * (tokens as u64).saturating_mul(n as u64);
    share.reserve(bytes).await?;
    each.map(|(prompt, nth)| {
        service.submit_within(prompt.clone(), seeded(app, writing, nth), submit, share)
    })
    .collect()
}

/// Returns the settings for `n` texts of one prompt. Several texts are sampled unless the request sets a temperature or `top_p`;
/// greedy decoding would return the same text `n` times.
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

/// Returns the settings of the `nth` text of a prompt. Equal seeds reproduce the texts; without a seed each request gets its own.
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

/// Sends `n` texts of each prompt, as a whole response or as a stream.
async fn answered(
    app: &RequestContext<'_>,
    head: Head,
    params: &GenerationRequest,
    n: usize,
    all: Vec<TokenStream>,
) -> HandlerResult {
    if params.streams() {
        return streamed(head, all).await;
    }
    let (mut choices, mut prompt, mut tokens) = (Vec::with_capacity(all.len()), 0, 0);
    for (index, done) in whole(all, app.share()).await?.into_iter().enumerate() {
        // A prompt counts once, even with several texts.
        prompt += if index % n == 0 { done.used.0 } else { 0 };
        tokens += done.used.1;
        choices.push(head.choice(index, &done));
    }
    let mut answer = head.object(false, Value::Array(choices));
    answer["usage"] = usage(prompt, tokens);
    Ok(json(StatusCode::OK, &answer))
}

/// A finished text, with the numbers of prompt tokens and of its own tokens.
struct Done {
    text: String,
    tokens: Vec<Scored>,
    ending: Ending,
    used: (usize, usize),
}

/// Bytes that a token with its log-probability takes in a JSON response. Each alternative takes the same.
const SCORED_BYTES: u64 = 1000;

/// Waits until all texts are finished.
async fn whole(all: Vec<TokenStream>, share: &Share) -> Result<Vec<Done>, Failure> {
    let mut all: Vec<(TokenStream, Done, bool)> = all
        .into_iter()
        .map(|pieces| {
            let empty = Done {
                text: String::new(),
                tokens: Vec::new(),
                ending: Ending::Stop,
                used: (0, 0),
            };
            (pieces, empty, false)
        })
        .collect();
    // Poll all texts, so that their memory is charged when it is used.
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
                    }) => {
                        (done.ending, done.used) = (ending, (prompt_tokens, tokens));
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

/// Streams pieces as server-sent events. Waits for the first piece, so that an invalid request gets an error status.
async fn streamed(head: Head, mut all: Vec<TokenStream>) -> HandlerResult {
    let first = match all.first_mut() {
        Some(pieces) => pieces.next().await,
        None => None,
    };
    let first = first.unwrap_or_else(|| {
        let why = "it ended before the text began";
        Err(ServeError::NotReady { why })
    })?;
    let mut stream = Stream {
        ready: Vec::new(),
        n_open: all.len(),
        all: all.into_iter().map(Some).collect(),
        used: (0, 0),
        head,
    };
    for index in 0..stream.all.len() {
        if stream.head.is_chat {
            let choice = json!({
                "index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null,
            });
            let begin = stream.head.object(true, json!([choice]));
            add_event(&mut stream.ready, &begin);
        }
    }
    stream.take(0, Ok(first));
    let mut response = Response::new(Body::Events(Box::new(stream)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(response)
}

fn add_event(to: &mut Vec<u8>, value: &impl Serialize) {
    to.extend(b"data: ");
    // Writing to memory cannot fail, and all map keys here are strings.
    let _ = serde_json::to_writer(&mut *to, value);
    to.extend(b"\n\n");
}

struct Stream {
    head: Head,
    /// Unfinished texts by index; `None` for finished ones.
    all: Vec<Option<TokenStream>>,
    n_open: usize,
    /// Numbers of tokens of the prompt and of all texts.
    used: (usize, usize),
    /// Bytes to send next.
    ready: Vec<u8>,
}

impl Stream {
    fn take(&mut self, index: usize, piece: Result<Piece, ServeError>) {
        match piece {
            Ok(Piece::Text { text, tokens }) => {
                let part = Some((text.as_str(), tokens.as_slice()));
                add_event(&mut self.ready, &self.head.chunk(index, part, None));
            }
            Ok(Piece::End {
                ending,
                prompt_tokens,
                tokens,
            }) => {
                add_event(&mut self.ready, &self.head.chunk(index, None, Some(ending)));
                self.used = (prompt_tokens, self.used.1 + tokens);
                self.all[index] = None;
                self.n_open -= 1;
                if self.n_open == 0 {
                    self.end();
                }
            }
            // The status has been sent, so clients read the error from the stream.
            Err(error) => {
                let error =
                    json!({"error": {"message": error.to_string(), "type": "server_error"}});
                add_event(&mut self.ready, &error);
                self.all.clear();
                self.n_open = 0;
            }
        }
    }

    fn end(&mut self) {
        if self.head.with_usage {
            let mut last = self.head.object(true, json!([]));
            last["usage"] = usage(self.used.0, self.used.1);
            add_event(&mut self.ready, &last);
        }
        self.ready.extend(b"data: [DONE]\n\n");
    }
}

impl Events for Stream {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Vec<u8>>> {
        loop {
            if !self.ready.is_empty() {
                return Poll::Ready(Some(std::mem::take(&mut self.ready)));
            }
            if self.n_open == 0 {
                return Poll::Ready(None);
            }
            for index in 0..self.all.len() {
                let Some(pieces) = self.all.get_mut(index).and_then(Option::as_mut) else {
                    continue;
                };
                if let Poll::Ready(piece) = pieces.poll_next(context) {
                    let why = "it ended before the text did";
                    let piece = piece.unwrap_or(Err(ServeError::NotReady { why }));
                    self.take(index, piece);
                }
            }
            if self.ready.is_empty() {
                return Poll::Pending;
            }
        }
    }
}
