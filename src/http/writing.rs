//! OpenAI's routes of texts: completions and conversations, whole or as server-sent events.

use std::{
    task::{Context, Poll},
    time::{SystemTime, UNIX_EPOCH},
};

use hyper::{
    Response, StatusCode,
    header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue},
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    Answered, App,
    body::{Body, Events},
    embeddings::{inputs, kind},
    error::Failure,
    json,
};
use crate::serve::{Ending, Message, Piece, Pieces, Text, Writing};

#[derive(Deserialize)]
struct Asked {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    prompt: Value,
    #[serde(default)]
    messages: Option<Vec<Said>>,
    #[serde(default)]
    max_tokens: Option<usize>,
    #[serde(default)]
    max_completion_tokens: Option<usize>,
    #[serde(default)]
    temperature: Option<f32>,
    #[serde(default)]
    top_p: Option<f32>,
    #[serde(default)]
    seed: Option<i64>,
    #[serde(default)]
    stop: Value,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    stream_options: Option<StreamOptions>,
    /// What is left, of which some would change the result.
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

#[derive(Deserialize)]
struct Said {
    role: String,
    #[serde(default)]
    content: Value,
}

/// What would change the result and is not computed, with the value that asks for nothing.
const NOT_COMPUTED: [(&str, &str); 15] = [
    ("n", "1"),
    ("best_of", "1"),
    ("logprobs", "null"),
    ("top_logprobs", "null"),
    ("echo", "false"),
    ("suffix", "null"),
    ("presence_penalty", "0"),
    ("frequency_penalty", "0"),
    ("logit_bias", "null"),
    ("tools", "null"),
    ("tool_choice", "\"none\""),
    ("functions", "null"),
    ("response_format", "{\"type\":\"text\"}"),
    ("audio", "null"),
    ("prediction", "null"),
];

/// New tokens of a completion that says nothing of them, as OpenAI has it.
const USUAL_TOKENS: usize = 16;

impl Asked {
    fn parse(body: &[u8]) -> Result<Self, Failure> {
        let asked: Self = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
        for (name, neutral) in NOT_COMPUTED {
            let Some(value) = asked.others.get(name) else {
                continue;
            };
            let is_neutral = value.is_null()
                || *value == json!(false)
                || value.as_f64().is_some_and(|v| neutral.parse() == Ok(v))
                || serde_json::from_str::<Value>(neutral).is_ok_and(|neutral| neutral == *value)
                || matches!(value, Value::Object(o) if o.is_empty())
                || matches!(value, Value::Array(a) if a.is_empty());
            if !is_neutral {
                let problem = format!("`{name}` is not computed here; leave it out");
                return Err(Failure::invalid(name, problem));
            }
        }
        Ok(asked)
    }

    fn writing(&self, usual_tokens: Option<usize>) -> Result<Writing, Failure> {
        let stop = match &self.stop {
            Value::Null => Vec::new(),
            Value::String(stop) => vec![stop.clone()],
            Value::Array(stops) => {
                let texts = stops.iter().map(|stop| stop.as_str().map(str::to_owned));
                let texts = texts.collect::<Option<Vec<String>>>();
                texts.filter(|texts| texts.len() <= 16).ok_or_else(|| {
                    let problem = "`stop` is no list of at most 16 texts".to_owned();
                    Failure::invalid("stop", problem)
                })?
            }
            other => {
                let problem = format!("`stop` is {}; expected a text or a list", kind(other));
                return Err(Failure::invalid("stop", problem));
            }
        };
        Ok(Writing {
            max_tokens: self
                .max_completion_tokens
                .or(self.max_tokens)
                .or(usual_tokens),
            temperature: self.temperature,
            top_p: self.top_p,
            seed: self.seed.map(|seed| seed as u64),
            stop,
        })
    }

    fn streams(&self) -> bool {
        self.stream == Some(true)
    }
}

impl Said {
    /// The text of a message, of which parts are put together.
    fn message(self, at: usize) -> Result<Message, Failure> {
        let wrong = |problem: String| Failure::invalid("messages", problem);
        let content = match self.content {
            Value::String(text) => text,
            Value::Null => String::new(),
            Value::Array(parts) => {
                let mut text = String::new();
                for part in &parts {
                    let is_text = part.get("type").and_then(Value::as_str) == Some("text");
                    let own = part.get("text").and_then(Value::as_str).filter(|_| is_text);
                    text += own.ok_or_else(|| {
                        wrong(format!(
                            "message {at} has a part that is no text; this model reads texts"
                        ))
                    })?;
                }
                text
            }
            other => {
                let kind = kind(&other);
                return Err(wrong(format!(
                    "the content of message {at} is {kind}; expected a text"
                )));
            }
        };
        Ok(Message::new(self.role, content))
    }
}

/// What chunks and answers of one request begin with.
#[derive(Clone)]
struct Head {
    id: String,
    model: String,
    created: u64,
    is_chat: bool,
    with_usage: bool,
}

impl Head {
    fn new(app: &App, model: &str, is_chat: bool, asked: &Asked) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            id: app.new_id(if is_chat { "chatcmpl" } else { "cmpl" }),
            model: model.to_owned(),
            created: now.unwrap_or_default().as_secs(),
            is_chat,
            with_usage: asked
                .stream_options
                .as_ref()
                .is_some_and(|o| o.include_usage),
        }
    }

    fn object(&self, kind: &str, choices: Value) -> Value {
        json!({
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "choices": choices,
        })
    }

    fn chunk(&self, text: Option<&str>, ending: Option<Ending>) -> Value {
        let reason = ending.map(reason);
        let choice = match (self.is_chat, text) {
            (true, Some(text)) => {
                json!({"index": 0, "delta": {"content": text}, "logprobs": null, "finish_reason": reason})
            }
            (true, None) => {
                json!({"index": 0, "delta": {}, "logprobs": null, "finish_reason": reason})
            }
            (false, text) => {
                let text = text.unwrap_or_default();
                json!({"index": 0, "text": text, "logprobs": null, "finish_reason": reason})
            }
        };
        let kind = match self.is_chat {
            true => "chat.completion.chunk",
            false => "text_completion",
        };
        self.object(kind, json!([choice]))
    }
}

fn reason(ending: Ending) -> &'static str {
    match ending {
        Ending::Stop => "stop",
        Ending::Length => "length",
    }
}

fn usage(prompt: usize, tokens: usize) -> Value {
    json!({"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens})
}

pub(super) async fn completions(app: &App, body: &[u8]) -> Answered {
    let asked = Asked::parse(body)?;
    let (model, writer) = app.models.writing(asked.model.as_deref())?;
    let prompts = inputs("prompt", &asked.prompt)?;
    let writing = asked.writing(Some(USUAL_TOKENS))?;
    let head = Head::new(app, &model.name, false, &asked);
    if asked.streams() && prompts.len() != 1 {
        let problem = format!("there are {} prompts; a stream is of one", prompts.len());
        return Err(Failure::invalid("prompt", problem));
    }
    let mut all = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        all.push(match prompt {
            Text::Ids(ids) => writer.go_on(ids, writing.clone())?,
            Text::One(text) | Text::Pair(text, _) => writer.write(&text, writing.clone())?,
        });
    }
    if asked.streams() {
        return match all.pop() {
            Some(pieces) => streamed(head, pieces).await,
            None => Err(Failure::invalid("prompt", "there is no prompt".to_owned())),
        };
    }
    let (mut choices, mut prompt, mut tokens) = (Vec::new(), 0, 0);
    for (index, pieces) in all.into_iter().enumerate() {
        let (text, ending, used) = whole(pieces).await?;
        (prompt, tokens) = (prompt + used.0, tokens + used.1);
        choices.push(json!({
            "index": index, "text": text, "logprobs": null, "finish_reason": reason(ending),
        }));
    }
    let mut answer = head.object("text_completion", Value::Array(choices));
    answer["usage"] = usage(prompt, tokens);
    Ok(json(StatusCode::OK, &answer))
}

pub(super) async fn chat(app: &App, body: &[u8]) -> Answered {
    let mut asked = Asked::parse(body)?;
    let (model, writer) = app.models.writing(asked.model.as_deref())?;
    let said = asked
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
    let writing = asked.writing(None)?;
    let head = Head::new(app, &model.name, true, &asked);
    let pieces = writer.answer(&messages, writing)?;
    if asked.streams() {
        return streamed(head, pieces).await;
    }
    let (text, ending, (prompt, tokens)) = whole(pieces).await?;
    let choice = json!({
        "index": 0, "message": {"role": "assistant", "content": text, "refusal": null},
        "logprobs": null, "finish_reason": reason(ending),
    });
    let mut answer = head.object("chat.completion", json!([choice]));
    answer["usage"] = usage(prompt, tokens);
    Ok(json(StatusCode::OK, &answer))
}

/// A text when it is done, with how it ended and the tokens of prompt and text.
async fn whole(mut pieces: Pieces) -> Result<(String, Ending, (usize, usize)), Failure> {
    let mut text = String::new();
    while let Some(piece) = pieces.next().await {
        match piece? {
            Piece::Text(part) => text += &part,
            Piece::End {
                ending,
                prompt_tokens,
                tokens,
            } => return Ok((text, ending, (prompt_tokens, tokens))),
        }
    }
    Err(Failure::not_ready("it ended before the text did"))
}

/// Pieces as server-sent events. The first is waited for, so that what is wrong with the request has its own status.
async fn streamed(head: Head, mut pieces: Pieces) -> Answered {
    let first = match pieces.next().await {
        Some(piece) => piece?,
        None => return Err(Failure::not_ready("it ended before the text began")),
    };
    let role = head.is_chat.then(|| {
        let choice = json!({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null});
        event(&head.object("chat.completion.chunk", json!([choice])))
    });
    let mut stream = Stream {
        head,
        pieces,
        ready: role.unwrap_or_default(),
        is_over: false,
    };
    stream.take(Ok(first));
    let mut response = Response::new(Body::Events(Box::new(stream)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(response)
}

fn event(value: &Value) -> Vec<u8> {
    format!("data: {value}\n\n").into_bytes()
}

struct Stream {
    head: Head,
    pieces: Pieces,
    /// What is to be sent next.
    ready: Vec<u8>,
    is_over: bool,
}

impl Stream {
    fn take(&mut self, piece: Result<Piece, crate::serve::ServeError>) {
        match piece {
            Ok(Piece::Text(text)) => self
                .ready
                .extend(event(&self.head.chunk(Some(&text), None))),
            Ok(Piece::End {
                ending,
                prompt_tokens,
                tokens,
            }) => {
                self.ready
                    .extend(event(&self.head.chunk(None, Some(ending))));
                if self.head.with_usage {
                    let kind = match self.head.is_chat {
                        true => "chat.completion.chunk",
                        false => "text_completion",
                    };
                    let mut last = self.head.object(kind, json!([]));
                    last["usage"] = usage(prompt_tokens, tokens);
                    self.ready.extend(event(&last));
                }
                self.ready.extend(b"data: [DONE]\n\n");
                self.is_over = true;
            }
            // The status was sent; clients read an error from the stream.
            Err(error) => {
                let error =
                    json!({"error": {"message": error.to_string(), "type": "server_error"}});
                self.ready.extend(event(&error));
                self.is_over = true;
            }
        }
    }
}

impl Events for Stream {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Vec<u8>>> {
        loop {
            if !self.ready.is_empty() {
                return Poll::Ready(Some(std::mem::take(&mut self.ready)));
            }
            if self.is_over {
                return Poll::Ready(None);
            }
            match self.pieces.poll_next(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(piece)) => self.take(piece),
                Poll::Ready(None) => self.is_over = true,
            }
        }
    }
}
