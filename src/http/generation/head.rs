//! JSON of generated text: whole responses and chunks of streams.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::{Value, json};

use super::{
    super::App,
    Done, GenerationRequest,
    stream::{End, Events, add_event},
};
use crate::serve::{Ending, Scored};

/// Value that replaces the logarithm of 0, because JSON has no infinity.
const MIN_LOG_PROBABILITY: f32 = -9999.0;

/// Fields shared by all chunks and choices of a response.
#[derive(Clone)]
pub(super) struct Head {
    id: String,
    model: String,
    created: u64,
    is_chat: bool,
    with_usage: bool,
    with_scores: bool,
}

/// Chunk of a stream, with one part of a text. It borrows its fields, because copies would be expensive: a server sends hundreds of
/// thousands of chunks per second.
#[derive(Serialize)]
pub(super) struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: [Choice<'a>; 1],
    /// Serialized as `null` in each chunk if the last event carries the usage; omitted otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<()>>,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<Delta<'a>>,
    logprobs: Value,
    finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

impl Head {
    pub fn new(app: &App, model: &str, is_chat: bool, params: &GenerationRequest) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            id: app.new_id(if is_chat { "chatcmpl" } else { "cmpl" }),
            model: model.to_owned(),
            created: now.unwrap_or_default().as_secs(),
            is_chat,
            with_usage: params.wants_usage(),
            with_scores: params.wants_scores(),
        }
    }

    fn kind(&self, is_part: bool) -> &'static str {
        match (self.is_chat, is_part) {
            (true, true) => "chat.completion.chunk",
            (true, false) => "chat.completion",
            (false, _) => "text_completion",
        }
    }

    pub fn object(&self, is_part: bool, choices: Value) -> Value {
        let mut object = json!({
            "id": self.id, "object": self.kind(is_part), "created": self.created, "model": self.model,
            "choices": choices,
        });
        if is_part && self.with_usage {
            object["usage"] = Value::Null;
        }
        object
    }

    /// Returns a chunk with a part of text `index`, or with the end of the text.
    pub fn chunk<'a>(
        &'a self,
        index: usize,
        part: Option<(&'a str, &[Scored])>,
        ending: Option<Ending>,
    ) -> Chunk<'a> {
        let text = part.map(|(text, _)| text);
        Chunk {
            id: &self.id,
            object: self.kind(true),
            created: self.created,
            model: &self.model,
            choices: [Choice {
                index,
                text: (!self.is_chat).then(|| text.unwrap_or_default()),
                delta: self.is_chat.then_some(Delta { content: text }),
                logprobs: part.map_or(Value::Null, |(_, tokens)| self.scores(tokens)),
                finish_reason: ending.map(reason),
            }],
            usage: self.with_usage.then_some(None),
        }
    }

    /// Returns the choice that contains a whole text.
    pub fn choice(&self, index: usize, done: &Done) -> Value {
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

    /// Returns the log-probabilities of tokens, or null if they were not requested.
    fn scores(&self, tokens: &[Scored]) -> Value {
        let number = |value: f32| value.max(MIN_LOG_PROBABILITY);
        if !self.with_scores {
            return Value::Null;
        }
        if self.is_chat {
            let one = |bytes: &[u8], value: f32| json!({"token": token_text(bytes), "logprob": number(value), "bytes": bytes});
            let each = tokens.iter().map(|token| {
                let mut entry = one(&token.bytes, token.log_probability);
                let most = token.top_tokens.iter();
                entry["top_logprobs"] = most.map(|(bytes, value)| one(bytes, *value)).collect();
                entry
            });
            return json!({"content": each.collect::<Vec<Value>>(), "refusal": null});
        }
        let most = |token: &Scored| {
            let most = token.top_tokens.iter();
            let most = most.map(|(bytes, value)| (bytes, *value));
            // The chosen token has an entry even if it is not among the most probable tokens.
            let all = [(&token.bytes, token.log_probability)]
                .into_iter()
                .chain(most);
            let all = all.map(|(bytes, value)| (token_key(bytes), json!(number(value))));
            Value::Object(all.collect())
        };
        let tokens = || tokens.iter();
        json!({
            "tokens": tokens().map(|token| token_key(&token.bytes)).collect::<Vec<_>>(),
            "token_logprobs": tokens().map(|token| number(token.log_probability)).collect::<Vec<_>>(),
            "top_logprobs": tokens().map(most).collect::<Vec<_>>(),
            "text_offset": tokens().map(|token| token.offset).collect::<Vec<_>>(),
        })
    }
}

/// Returns the text of a token. Bytes that do not form a whole character are escaped, for example as `\xe2`.
fn token_text(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    text
}

/// Returns the text of a token in completions. If its bytes are not valid UTF-8, the text is prefixed with `bytes:`, as in OpenAI's API.
fn token_key(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => format!("bytes:{}", token_text(bytes)),
    }
}

pub(in crate::http) fn reason(ending: Ending) -> &'static str {
    match ending {
        Ending::Stop => "stop",
        Ending::Length => "length",
    }
}

pub(in crate::http) fn usage(prompt: usize, tokens: usize) -> Value {
    json!({"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens})
}

impl Events for Head {
    fn begin(&self, to: &mut Vec<u8>, index: usize) {
        if self.is_chat {
            let choice = json!({
                "index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null,
            });
            add_event(to, &self.object(true, json!([choice])));
        }
    }

    fn part(&self, to: &mut Vec<u8>, index: usize, text: &str, tokens: &[Scored]) {
        add_event(to, &self.chunk(index, Some((text, tokens)), None));
    }

    fn end(&self, to: &mut Vec<u8>, index: usize, end: End) {
        add_event(to, &self.chunk(index, None, Some(end.ending)));
    }

    fn usage(&self, to: &mut Vec<u8>, used: (usize, usize)) {
        if self.with_usage {
            let mut last = self.object(true, json!([]));
            last["usage"] = usage(used.0, used.1);
            add_event(to, &last);
        }
    }

    fn has_own_prompts(&self) -> bool {
        false
    }
}
