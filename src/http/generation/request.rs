//! Request bodies of completions and chat completions.

use serde::Deserialize;
use serde_json::{Value, json};

use super::super::{
    error::Failure,
    fields::{kind, shown},
    request::{Fields, as_whole},
    schema::{RouteDoc, flag, named, object, only, or_null, text, whole},
};
use crate::names::excerpt;
use crate::serve::{ChatOptions, GenerationParams, Json, Message, TextSource, Tool};

pub(super) struct GenerationRequest {
    pub model: Option<String>,
    pub prompt: Value,
    pub messages: Option<Vec<ChatMessage>>,
    /// Max number of new tokens; -1 allows all remaining positions of the model.
    max_tokens: Option<i64>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    seed: Option<i64>,
    frequency_penalty: f32,
    presence_penalty: f32,
    /// Biases by token id.
    logit_bias: Vec<(u32, f32)>,
    tools: Option<Vec<Tool>>,
    tool_choice: Value,
    /// Whether the prompt ends with the header of an assistant message.
    add_generation_prompt: Option<bool>,
    /// Whether the model continues the last message.
    continue_final_message: bool,
    /// Variables for the chat template.
    chat_template_kwargs: Option<Json>,
    stop: Vec<String>,
    stream: bool,
    include_usage: bool,
    /// Number of texts for each prompt.
    n: usize,
    /// Number of alternative tokens to return for each token, with log-probabilities; `None` if log-probabilities are not requested.
    alternatives: Option<usize>,
}

#[derive(Deserialize)]
pub(super) struct ChatMessage {
    role: String,
    #[serde(default)]
    content: Value,
    /// Other fields, which the chat template can use: for example a name, tool calls, or the id of the call that this message answers.
    #[serde(flatten)]
    others: Json,
}

/// Max magnitude of the frequency and presence penalties (`MAX_PENALTY`) and of a logit's bias (`MAX_BIAS`), as in OpenAI's API.
const MAX_PENALTY: f32 = 2.0;
const MAX_BIAS: f64 = 100.0;
/// Default of `max_tokens` for completions, as in OpenAI's API.
const DEFAULT_TOKENS: usize = 16;
/// Max number of texts for each prompt (`MAX_TEXTS`) and of alternative tokens for each token (`MAX_ALTERNATIVES`), as in OpenAI's API.
const MAX_TEXTS: i64 = 128;
const MAX_ALTERNATIVES: i64 = 20;
const MAX_STOPS: usize = 16;

/// Reads `max_tokens` or `max_completion_tokens`. Some clients send -1 for no limit.
fn max_tokens(fields: &mut Fields, name: &'static str) -> Result<Option<i64>, Failure> {
    let value = fields.value(name);
    if value.is_null() {
        return Ok(None);
    }
    match as_whole(&value).filter(|&n| n == -1 || n > 0) {
        Some(n) => Ok(Some(n)),
        None => {
            let problem = format!(
                "`{name}` is {}; expected a whole number, at least 1, or -1 for all positions that are left",
                shown(&value)
            );
            Err(Failure::invalid(name, problem))
        }
    }
}

/// Reads `stop`: the texts at which a generation ends.
fn stops(value: Value) -> Result<Vec<String>, Failure> {
    let wrong = |found: &str| {
        let problem =
            format!("`stop` is {found}; expected a text, or a list of at most {MAX_STOPS} texts");
        Err(Failure::invalid("stop", problem))
    };
    let list = match value {
        Value::Null => return Ok(Vec::new()),
        Value::String(stop) => return Ok(vec![stop]),
        Value::Array(list) => list,
        other => return wrong(&shown(&other)),
    };
    if list.len() > MAX_STOPS {
        return wrong(&format!("a list of {} items", list.len()));
    }
    let mut stops = Vec::with_capacity(list.len());
    for (at, stop) in list.into_iter().enumerate() {
        match stop {
            Value::String(stop) => stops.push(stop),
            other => return wrong(&format!("a list whose item {at} is {}", shown(&other))),
        }
    }
    Ok(stops)
}

/// Reads `logit_bias`: pairs of a token id and a bias.
fn biases(value: &Value) -> Result<Vec<(u32, f32)>, Failure> {
    let wrong = |problem: String| Failure::invalid("logit_bias", problem);
    let all = match value {
        Value::Null => return Ok(Vec::new()),
        Value::Array(list) if list.is_empty() => return Ok(Vec::new()),
        Value::Object(all) => all,
        other => {
            let found = shown(other);
            return Err(wrong(format!(
                "`logit_bias` is {found}; expected an object of numbers by token id"
            )));
        }
    };
    let bias = |(id, bias): (&String, &Value)| {
        let token = id.parse().map_err(|_| {
            let id = excerpt(id);
            wrong(format!("`logit_bias` has `{id}`, which is not a token id"))
        })?;
        match bias.as_f64().filter(|bias| bias.abs() <= MAX_BIAS) {
            Some(bias) => Ok((token, bias as f32)),
            None => Err(wrong(format!(
                "`logit_bias` of token {id} is {}; expected a number from -{MAX_BIAS} to {MAX_BIAS}",
                shown(bias)
            ))),
        }
    };
    let mut biases = all.iter().map(bias).collect::<Result<Vec<_>, _>>()?;
    biases.sort_by_key(|&(token, _)| token);
    Ok(biases)
}

/// Reads the number of alternative tokens for each token of a completion, from `logprobs`.
fn alternatives(fields: &mut Fields) -> Result<Option<usize>, Failure> {
    let value = fields.value("logprobs");
    if value.is_null() || value == Value::Bool(false) {
        return Ok(None);
    }
    match as_whole(&value).filter(|n| (0..=MAX_ALTERNATIVES).contains(n)) {
        Some(n) => Ok(usize::try_from(n).ok()),
        None => {
            let problem = format!(
                "`logprobs` is {}; expected a whole number from 0 to {MAX_ALTERNATIVES}",
                shown(&value)
            );
            Err(Failure::invalid("logprobs", problem))
        }
    }
}

/// Reads the number of alternative tokens for each token of a chat completion, from `logprobs` (a flag) and `top_logprobs`.
fn chat_alternatives(fields: &mut Fields) -> Result<Option<usize>, Failure> {
    let wanted = fields.flag("logprobs")?.unwrap_or(false);
    let n = fields.count("top_logprobs", 0..=MAX_ALTERNATIVES)?;
    match (wanted, n) {
        (true, n) => Ok(Some(n.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(n)) => {
            let problem = format!("`top_logprobs` is {n}, which needs `\"logprobs\": true`");
            Err(Failure::invalid("top_logprobs", problem))
        }
    }
}

/// Checks that `best_of` is 1 or `n`. Other values would require ranking the generated texts.
fn check_best_of(fields: &mut Fields, n: usize) -> Result<(), Failure> {
    let best_of = fields.count("best_of", 1..=i64::MAX)?;
    match best_of.filter(|&best_of| best_of != 1 && best_of != n) {
        None => Ok(()),
        Some(best_of) => {
            let problem = format!(
                "`best_of` is {best_of}; expected {n}, the value of `n`, because texts are not ranked here"
            );
            Err(Failure::invalid("best_of", problem))
        }
    }
}

impl GenerationRequest {
    /// Reads the fields of a completion or a chat completion.
    ///
    /// # Errors
    /// Returns an error for the first field with an invalid value.
    pub fn parse(mut fields: Fields, is_chat: bool) -> Result<Self, Failure> {
        let penalty = -MAX_PENALTY..=MAX_PENALTY;
        let mut options = fields.object("stream_options", "stream_options.")?;
        let n = fields.count("n", 1..=MAX_TEXTS)?.unwrap_or(1);
        if !is_chat {
            check_best_of(&mut fields, n)?;
        }
        let old_name = max_tokens(&mut fields, "max_tokens")?;
        Ok(Self {
            model: fields.text("model")?,
            prompt: fields.value("prompt"),
            messages: fields.parsed("messages")?,
            max_tokens: max_tokens(&mut fields, "max_completion_tokens")?.or(old_name),
            temperature: fields.number("temperature", 0.0..=f32::INFINITY)?,
            top_p: fields.number("top_p", 0.0..=1.0)?,
            seed: fields.whole("seed", i64::MIN..=i64::MAX)?,
            frequency_penalty: fields
                .number("frequency_penalty", penalty.clone())?
                .unwrap_or(0.0),
            presence_penalty: fields.number("presence_penalty", penalty)?.unwrap_or(0.0),
            logit_bias: biases(&fields.value("logit_bias"))?,
            tools: fields.parsed("tools")?,
            tool_choice: fields.value("tool_choice"),
            add_generation_prompt: fields.flag("add_generation_prompt")?,
            continue_final_message: fields.flag("continue_final_message")?.unwrap_or(false),
            chat_template_kwargs: fields.parsed("chat_template_kwargs")?,
            stop: stops(fields.value("stop"))?,
            stream: fields.flag("stream")?.unwrap_or(false),
            include_usage: options.flag("include_usage")?.unwrap_or(false),
            n,
            alternatives: match is_chat {
                true => chat_alternatives(&mut fields)?,
                false => alternatives(&mut fields)?,
            },
        })
    }

    /// Returns the number of texts for each prompt.
    pub fn n(&self) -> usize {
        self.n
    }

    pub fn writing(&self, is_chat: bool) -> GenerationParams {
        GenerationParams {
            max_tokens: self.max_tokens.and_then(|n| usize::try_from(n).ok()),
            default_max_tokens: match self.max_tokens {
                None => (!is_chat).then_some(DEFAULT_TOKENS),
                // -1 means no limit. The generator lowers `usize::MAX` to the number of remaining positions.
                Some(n) => (n < 0).then_some(usize::MAX),
            },
            temperature: self.temperature,
            // A `top_p` of 0 becomes the smallest positive value, which keeps only the most probable token, as in OpenAI's API.
            top_p: self.top_p.map(|p| p.max(f32::MIN_POSITIVE)),
            seed: self.seed.map(|seed| seed as u64),
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            bias: self.logit_bias.clone(),
            stop: self.stop.clone(),
            source: match is_chat {
                true => TextSource::Messages,
                false => TextSource::Prompt,
            },
            log_probabilities: self.alternatives,
            ..GenerationParams::default()
        }
    }

    /// Returns the tools that the model may call.
    ///
    /// # Errors
    /// Returns an error if `tool_choice` is neither `auto` nor `none`, because a call cannot be forced.
    pub fn tools(&self) -> Result<&[Tool], Failure> {
        let tools = self.tools.as_deref().unwrap_or_default();
        match (&self.tool_choice, self.tool_choice.as_str()) {
            (Value::Null, _) | (_, Some("auto")) => Ok(tools),
            (_, Some("none")) => Ok(&[]),
            (other, _) => {
                let problem = format!(
                    "`tool_choice` is {}; expected \"auto\" or \"none\", because tool calls cannot be forced here",
                    shown(other)
                );
                Err(Failure::invalid("tool_choice", problem))
            }
        }
    }

    /// Returns the options of the chat template. By default, the prompt ends with the header of an assistant message.
    pub fn chat_options(&self) -> Result<ChatOptions, Failure> {
        let continues = self.continue_final_message;
        let kwargs = match &self.chat_template_kwargs {
            None | Some(Json::Null) => Vec::new(),
            Some(Json::Object(fields)) => fields.clone(),
            Some(other) => {
                let name = "chat_template_kwargs";
                let problem = format!("`{name}` is {}; expected an object", other.kind());
                return Err(Failure::invalid(name, problem));
            }
        };
        // With `tool_choice: "none"`, the conversation is rendered without tools.
        let tools = match self.tools()? {
            [] if self.tool_choice.as_str() == Some("none") => None,
            _ => self.tools.clone(),
        };
        Ok(ChatOptions {
            tools,
            add_generation_prompt: self.add_generation_prompt.unwrap_or(!continues),
            continue_final_message: continues,
            kwargs,
        })
    }

    pub fn streams(&self) -> bool {
        self.stream
    }

    /// Returns whether the last event of a stream contains the numbers of tokens.
    pub fn wants_usage(&self) -> bool {
        self.include_usage
    }

    pub fn wants_scores(&self) -> bool {
        self.alternatives.is_some()
    }
}

impl ChatMessage {
    /// Converts a message, and concatenates its text parts. `at` is the index of the message, for errors.
    pub fn message(self, at: usize) -> Result<Message, Failure> {
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
                            "message {at} has a part that is not text; this model reads only text"
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
        let others = match self.others {
            Json::Object(fields) => fields,
            _ => Vec::new(),
        };
        Ok(Message {
            others,
            ..Message::new(self.role, content)
        })
    }
}

pub(in crate::http) fn completions_doc() -> RouteDoc {
    let mut body = sampling_body();
    body["required"] = json!(["prompt"]);
    body["properties"]["prompt"] = named("Input");
    body["properties"]["best_of"] = or_null(whole(1));
    body["properties"]["logprobs"] = json!({"anyOf": [
        {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_ALTERNATIVES}, {"const": false},
    ]});
    RouteDoc::streamed("Completes prompts (OpenAI)", body, "Texts")
}

pub(in crate::http) fn chat_doc() -> RouteDoc {
    let mut body = sampling_body();
    body["required"] = json!(["messages"]);
    body["properties"]["messages"] =
        json!({"type": "array", "minItems": 1, "items": named("Message")});
    body["properties"]["tools"] = or_null(json!({"type": "array", "items": {"type": "object"}}));
    body["properties"]["tool_choice"] = only(json!([null, "auto", "none"]));
    body["properties"]["logprobs"] = flag();
    body["properties"]["chat_template_kwargs"] = json!({"type": ["object", "null"]});
    for name in ["add_generation_prompt", "continue_final_message"] {
        body["properties"][name] = flag();
    }
    body["properties"]["top_logprobs"] =
        or_null(json!({"type": "integer", "minimum": 0, "maximum": MAX_ALTERNATIVES}));
    RouteDoc::streamed("Completes conversations (OpenAI)", body, "Texts")
}

pub(in crate::http) fn stream_options_schema() -> Value {
    or_null(object(&[], json!({"include_usage": flag()})))
}

/// Returns the schema of a body with the fields that completions and chat completions have in common.
fn sampling_body() -> Value {
    let penalty = json!({"type": "number", "minimum": -MAX_PENALTY, "maximum": MAX_PENALTY});
    object(
        &[],
        json!({
            "model": or_null(text()),
            "max_tokens": max_tokens_schema(),
            "max_completion_tokens": max_tokens_schema(),
            "temperature": or_null(json!({"type": "number", "minimum": 0})),
            "top_p": or_null(json!({"type": "number", "minimum": 0, "maximum": 1})),
            "seed": or_null(json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX})),
            "n": or_null(json!({"type": "integer", "minimum": 1, "maximum": MAX_TEXTS})),
            "stop": {"anyOf": [
                {"type": "null"}, {"type": "string", "minLength": 1},
                {"type": "array", "maxItems": MAX_STOPS, "items": {"type": "string", "minLength": 1}},
            ]},
            "stream": flag(),
            "stream_options": stream_options_schema(),
            "presence_penalty": or_null(penalty.clone()),
            "frequency_penalty": or_null(penalty),
            "logit_bias": {"anyOf": [
                {
                    "type": ["object", "null"], "propertyNames": {"pattern": "^[0-9]+$"},
                    "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
                },
                {"type": "array", "maxItems": 0},
            ]},
        }),
    )
}

/// Returns the schema of the max number of new tokens: a positive integer, or -1 to allow all remaining positions of the model.
fn max_tokens_schema() -> Value {
    json!({"type": ["integer", "null"], "minimum": -1, "not": {"const": 0}})
}
