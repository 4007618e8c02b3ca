//! OpenAI's routes of texts: completions and conversations, whole or as server-sent events.

use std::{
    collections::BTreeMap,
    sync::Arc,
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
    Answered, App, Asking,
    body::{Body, Events},
    embeddings::{inputs, kind, neutral_only},
    error::Failure,
    json, on_thread,
};
use crate::serve::{
    Ending, Message, Piece, Pieces, Scored, ServeError, Submit, Text, Tool, Writer, Writing,
};

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
    frequency_penalty: Option<f32>,
    #[serde(default)]
    presence_penalty: Option<f32>,
    /// By token id.
    #[serde(default)]
    logit_bias: Option<BTreeMap<String, f32>>,
    #[serde(default)]
    tools: Option<Vec<Tool>>,
    #[serde(default)]
    tool_choice: Value,
    #[serde(default)]
    stop: Value,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    stream_options: Option<StreamOptions>,
    /// How many texts go on from each prompt.
    #[serde(default)]
    n: Option<usize>,
    /// A number in completions, true or false in conversations.
    #[serde(default)]
    logprobs: Value,
    #[serde(default)]
    top_logprobs: Option<usize>,
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
    /// For the template: a name, calls of tools, and of which call it is the result.
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// What would change the result and is not computed, with the value that asks for nothing.
const NOT_COMPUTED: [(&str, &str); 27] = [
    ("best_of", "1"),
    ("echo", "false"),
    ("suffix", "null"),
    ("functions", "null"),
    ("function_call", "\"none\""),
    ("response_format", "{\"type\":\"text\"}"),
    ("audio", "null"),
    ("modalities", "[\"text\"]"),
    ("prediction", "null"),
    ("web_search_options", "null"),
    // What other servers take beside OpenAI's.
    ("top_k", "-1"),
    ("min_p", "0"),
    ("repetition_penalty", "1"),
    ("length_penalty", "1"),
    ("use_beam_search", "false"),
    ("min_tokens", "0"),
    ("ignore_eos", "false"),
    ("stop_token_ids", "null"),
    ("bad_words", "null"),
    ("allowed_token_ids", "null"),
    ("guided_json", "null"),
    ("guided_regex", "null"),
    ("guided_choice", "null"),
    ("guided_grammar", "null"),
    ("chat_template", "null"),
    ("chat_template_kwargs", "null"),
    ("continue_final_message", "false"),
];
/// Penalties by counts and the bias of a logit at most, as OpenAI has them.
const MOST_PENALTY: f32 = 2.0;
const MOST_BIAS: f32 = 100.0;

/// New tokens of a completion that says nothing of them, as OpenAI has it.
const USUAL_TOKENS: usize = 16;
/// Texts of one prompt at most, and alternatives of a token, as OpenAI has it.
const MOST_TEXTS: usize = 128;
const MOST_ALTERNATIVES: usize = 20;
/// What stands for the logarithm of 0, which JSON cannot say.
const LEAST: f32 = -9999.0;

impl Asked {
    fn parse(body: &[u8]) -> Result<Self, Failure> {
        let asked: Self = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
        for (name, neutral) in NOT_COMPUTED {
            if let Some(value) = asked.others.get(name) {
                neutral_only(name, value, neutral)?;
            }
        }
        Ok(asked)
    }

    /// The texts that go on from each prompt.
    fn n(&self) -> Result<usize, Failure> {
        let n = self.n.unwrap_or(1);
        match (1..=MOST_TEXTS).contains(&n) {
            true => Ok(n),
            false => {
                let problem = format!("`n` is {n}; expected from 1 to {MOST_TEXTS}");
                Err(Failure::invalid("n", problem))
            }
        }
    }

    /// How many alternatives come with each token's log-probability, if that was asked for.
    fn alternatives(&self, is_chat: bool) -> Result<Option<usize>, Failure> {
        let (param, asked) = match (is_chat, &self.logprobs) {
            (_, Value::Null) => ("top_logprobs", None),
            (true, Value::Bool(false)) => ("top_logprobs", None),
            (true, Value::Bool(true)) => ("top_logprobs", Some(self.top_logprobs.unwrap_or(0))),
            (false, Value::Number(n)) if n.is_u64() => {
                ("logprobs", n.as_u64().and_then(|n| usize::try_from(n).ok()))
            }
            (_, other) => {
                let expected = match is_chat {
                    true => "true or false",
                    false => "a whole number",
                };
                let problem = format!("`logprobs` is {other}; expected {expected}");
                return Err(Failure::invalid("logprobs", problem));
            }
        };
        if asked.is_none() && self.top_logprobs.is_some() {
            let problem = "`top_logprobs` says how many come with `logprobs`, a conversation's; send `\"logprobs\": true` there, and in completions a number".to_owned();
            return Err(Failure::invalid("top_logprobs", problem));
        }
        match asked.filter(|&n| n > MOST_ALTERNATIVES) {
            None => Ok(asked),
            Some(n) => {
                let problem = format!("`{param}` is {n}; expected at most {MOST_ALTERNATIVES}");
                Err(Failure::invalid(param, problem))
            }
        }
    }

    fn writing(&self, is_chat: bool) -> Result<Writing, Failure> {
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
                .or((!is_chat).then_some(USUAL_TOKENS)),
            temperature: self.temperature,
            top_p: self.top_p,
            seed: self.seed.map(|seed| seed as u64),
            frequency_penalty: Self::penalty("frequency_penalty", self.frequency_penalty)?,
            presence_penalty: Self::penalty("presence_penalty", self.presence_penalty)?,
            bias: self.bias()?,
            stop,
            log_probabilities: self.alternatives(is_chat)?,
        })
    }

    /// A penalty within its limits; none where it is not given.
    fn penalty(name: &str, asked: Option<f32>) -> Result<f32, Failure> {
        let found = asked.unwrap_or(0.0);
        match found.abs() <= MOST_PENALTY {
            true => Ok(found),
            false => {
                let problem = format!("`{name}` is {found}; expected from -2 to 2");
                Err(Failure::invalid(name, problem))
            }
        }
    }

    /// What is added to the logits of tokens.
    fn bias(&self) -> Result<Vec<(u32, f32)>, Failure> {
        let wrong = |problem: String| Failure::invalid("logit_bias", problem);
        let all = self.logit_bias.iter().flatten().map(|(id, &bias)| {
            let token = id
                .parse()
                .map_err(|_| wrong(format!("`logit_bias` has `{id}`, which is no token id")))?;
            match bias.abs() <= MOST_BIAS {
                true => Ok((token, bias)),
                false => Err(wrong(format!(
                    "`logit_bias` of token {id} is {bias}; expected from -100 to 100"
                ))),
            }
        });
        all.collect()
    }

    /// The tools that the model may call. That it calls one, or which, cannot be forced upon it.
    fn tools(&self) -> Result<&[Tool], Failure> {
        let tools = self.tools.as_deref().unwrap_or_default();
        match (&self.tool_choice, self.tool_choice.as_str()) {
            (Value::Null, _) | (_, Some("auto")) => Ok(tools),
            (_, Some("none")) => Ok(&[]),
            (other, _) => {
                let problem = format!(
                    "`tool_choice` is {other}; expected \"auto\" or \"none\", as a model is not forced to call a tool here"
                );
                Err(Failure::invalid("tool_choice", problem))
            }
        }
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
        Ok(Message {
            others: self.others,
            ..Message::new(self.role, content)
        })
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
    with_scores: bool,
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
            with_scores: !matches!(asked.logprobs, Value::Null | Value::Bool(false)),
        }
    }

    fn kind(&self, is_part: bool) -> &'static str {
        match (self.is_chat, is_part) {
            (true, true) => "chat.completion.chunk",
            (true, false) => "chat.completion",
            (false, _) => "text_completion",
        }
    }

    fn object(&self, is_part: bool, choices: Value) -> Value {
        let mut object = json!({
            "id": self.id, "object": self.kind(is_part), "created": self.created, "model": self.model,
            "choices": choices,
        });
        if is_part && self.with_usage {
            object["usage"] = Value::Null;
        }
        object
    }

    /// A part of a text, of those that a request asked for the one of this index.
    fn chunk(
        &self,
        index: usize,
        part: Option<(&str, &[Scored])>,
        ending: Option<Ending>,
    ) -> Value {
        let scores = part.map_or(Value::Null, |(_, tokens)| self.scores(tokens));
        let mut choice = json!({
            "index": index, "logprobs": scores, "finish_reason": ending.map(reason),
        });
        match (self.is_chat, part) {
            (true, Some((text, _))) => choice["delta"] = json!({"content": text}),
            (true, None) => choice["delta"] = json!({}),
            (false, part) => choice["text"] = json!(part.map_or("", |(text, _)| text)),
        }
        self.object(true, json!([choice]))
    }

    /// A whole text.
    fn choice(&self, index: usize, done: &Done) -> Value {
        let mut choice = json!({
            "index": index, "logprobs": self.scores(&done.tokens), "finish_reason": reason(done.ending),
        });
        match self.is_chat {
            true => {
                choice["message"] =
                    json!({"role": "assistant", "content": done.text, "refusal": null});
            }
            false => choice["text"] = json!(done.text),
        }
        choice
    }

    /// The log-probabilities of tokens, where they were asked for.
    fn scores(&self, tokens: &[Scored]) -> Value {
        let number = |value: f32| value.max(LEAST);
        if !self.with_scores {
            return Value::Null;
        }
        if self.is_chat {
            let one = |text: &str, value: f32| {
                // A part of a character has no text, and its bytes are not known.
                let bytes = (!text.contains('\u{fffd}')).then(|| text.as_bytes().to_vec());
                json!({"token": text, "logprob": number(value), "bytes": bytes})
            };
            let each = tokens.iter().map(|token| {
                let mut entry = one(&token.text, token.log_probability);
                let most = token.most_probable.iter();
                entry["top_logprobs"] = most.map(|(text, value)| one(text, *value)).collect();
                entry
            });
            return json!({"content": each.collect::<Vec<Value>>(), "refusal": null});
        }
        let most = |token: &Scored| {
            let most = token
                .most_probable
                .iter()
                .map(|(text, value)| (text, *value));
            // The chosen token is always among them.
            let all = [(&token.text, token.log_probability)]
                .into_iter()
                .chain(most);
            let all = all.map(|(text, value)| (text.clone(), json!(number(value))));
            Value::Object(all.collect())
        };
        let tokens = || tokens.iter();
        json!({
            "tokens": tokens().map(|token| token.text.as_str()).collect::<Vec<_>>(),
            "token_logprobs": tokens().map(|token| number(token.log_probability)).collect::<Vec<_>>(),
            "top_logprobs": tokens().map(most).collect::<Vec<_>>(),
            "text_offset": tokens().map(|token| token.offset).collect::<Vec<_>>(),
        })
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

pub(super) async fn completions(app: &Asking<'_>, body: &[u8], submit: Submit) -> Answered {
    let asked = Asked::parse(body)?;
    let model = app.asks(app.models.writing(asked.model.as_deref()))?;
    let writer = model.writer()?;
    let prompts = inputs("prompt", &asked.prompt)?;
    if !asked.tools()?.is_empty() {
        let problem =
            "`tools` are of conversations; ask /v1/chat/completions, or write them into the prompt";
        return Err(Failure::invalid("tools", problem.to_owned()));
    }
    let (n, writing) = (asked.n()?, asked.writing(false)?);
    if asked.streams() && prompts.len() != 1 {
        let problem = format!("there are {} prompts; a stream is of one", prompts.len());
        return Err(Failure::invalid("prompt", problem));
    }
    writer.has_place()?;
    let holds = Arc::clone(&model);
    let prompts = on_thread(move || {
        let writer = holds.writer()?;
        let ids = prompts.into_iter().map(|prompt| match prompt {
            Text::Ids(ids) => Ok(ids),
            Text::One(text) | Text::Pair(text, _) => {
                Ok(writer.prompts(&[&text])?.pop().unwrap_or_default())
            }
        });
        ids.collect::<Result<Vec<Vec<u32>>, ServeError>>()
    });
    let all = written(app, writer, prompts.await??, n, &writing, submit)?;
    answered(Head::new(app, &model.name, false, &asked), &asked, n, all).await
}

pub(super) async fn chat(app: &Asking<'_>, body: &[u8], submit: Submit) -> Answered {
    let mut asked = Asked::parse(body)?;
    let model = app.asks(app.models.writing(asked.model.as_deref()))?;
    let writer = model.writer()?;
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
    let (n, writing) = (asked.n()?, asked.writing(true)?);
    let tools = asked.tools()?.to_vec();
    writer.has_place()?;
    let holds = Arc::clone(&model);
    let prompt = on_thread(move || holds.writer()?.conversation(&messages, &tools));
    let all = written(app, writer, vec![prompt.await??], n, &writing, submit)?;
    answered(Head::new(app, &model.name, true, &asked), &asked, n, all).await
}

/// `n` texts of each prompt, which are being written.
fn written(
    app: &App,
    writer: &Writer,
    prompts: Vec<Vec<u32>>,
    n: usize,
    writing: &Writing,
    submit: Submit,
) -> Result<Vec<Pieces>, ServeError> {
    let each = prompts
        .iter()
        .flat_map(|prompt| (0..n).map(move |nth| (prompt, nth)));
    each.map(|(prompt, nth)| writer.go_on(prompt.clone(), seeded(app, writing, nth), submit))
        .collect()
}

/// What the nth text of a prompt is drawn by. One seed gives the same texts again; without one they differ from request to
/// request.
fn seeded(app: &App, writing: &Writing, nth: usize) -> Writing {
    let seed = match writing.seed {
        Some(seed) => seed.wrapping_add(nth as u64),
        None => app.new_seed(),
    };
    Writing {
        seed: Some(seed),
        ..writing.clone()
    }
}

/// Texts, `n` of each prompt, as they were asked for.
async fn answered(head: Head, asked: &Asked, n: usize, all: Vec<Pieces>) -> Answered {
    if asked.streams() {
        return streamed(head, all).await;
    }
    let (mut choices, mut prompt, mut tokens) = (Vec::with_capacity(all.len()), 0, 0);
    for (index, pieces) in all.into_iter().enumerate() {
        let done = whole(pieces).await?;
        // A prompt counts once, however many texts go on from it.
        prompt += if index % n == 0 { done.used.0 } else { 0 };
        tokens += done.used.1;
        choices.push(head.choice(index, &done));
    }
    let mut answer = head.object(false, Value::Array(choices));
    answer["usage"] = usage(prompt, tokens);
    Ok(json(StatusCode::OK, &answer))
}

/// A text that is done, with the tokens of its prompt and its own.
struct Done {
    text: String,
    tokens: Vec<Scored>,
    ending: Ending,
    used: (usize, usize),
}

/// A text when it is done.
async fn whole(mut pieces: Pieces) -> Result<Done, Failure> {
    let (mut all, mut scored) = (String::new(), Vec::new());
    while let Some(piece) = pieces.next().await {
        match piece? {
            Piece::Text { text, tokens } => {
                all += &text;
                scored.extend(tokens);
            }
            Piece::End {
                ending,
                prompt_tokens,
                tokens,
            } => {
                return Ok(Done {
                    text: all,
                    tokens: scored,
                    ending,
                    used: (prompt_tokens, tokens),
                });
            }
        }
    }
    Err(Failure::not_ready("it ended before the text did"))
}

/// Pieces as server-sent events. The first is waited for, so that what is wrong with the request has its own status.
async fn streamed(head: Head, mut all: Vec<Pieces>) -> Answered {
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
            stream.ready.extend(event(&begin));
        }
    }
    stream.take(0, Ok(first));
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
    /// The texts by index; `None` for those that are done.
    all: Vec<Option<Pieces>>,
    n_open: usize,
    /// Tokens of the prompt and of all texts.
    used: (usize, usize),
    /// What is to be sent next.
    ready: Vec<u8>,
}

impl Stream {
    fn take(&mut self, index: usize, piece: Result<Piece, ServeError>) {
        match piece {
            Ok(Piece::Text { text, tokens }) => {
                let part = Some((text.as_str(), tokens.as_slice()));
                self.ready
                    .extend(event(&self.head.chunk(index, part, None)));
            }
            Ok(Piece::End {
                ending,
                prompt_tokens,
                tokens,
            }) => {
                self.ready
                    .extend(event(&self.head.chunk(index, None, Some(ending))));
                self.used = (prompt_tokens, self.used.1 + tokens);
                self.all[index] = None;
                self.n_open -= 1;
                if self.n_open == 0 {
                    self.end();
                }
            }
            // The status was sent; clients read an error from the stream.
            Err(error) => {
                let error =
                    json!({"error": {"message": error.to_string(), "type": "server_error"}});
                self.ready.extend(event(&error));
                self.all.clear();
                self.n_open = 0;
            }
        }
    }

    fn end(&mut self) {
        if self.head.with_usage {
            let mut last = self.head.object(true, json!([]));
            last["usage"] = usage(self.used.0, self.used.1);
            self.ready.extend(event(&last));
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
