//! The bodies of requests for texts, and what they may ask for.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::super::{
    embeddings::{kind, neutral_only},
    error::Failure,
};
use crate::serve::{ChatOptions, Json, Message, Tool, Writing};

#[derive(Deserialize)]
pub(super) struct Asked {
    #[serde(default)]
    pub model: Option<String>,
    #[serde(default)]
    pub prompt: Value,
    #[serde(default)]
    pub messages: Option<Vec<Said>>,
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
    /// Whether the prompt ends with what begins an answer.
    #[serde(default)]
    add_generation_prompt: Option<bool>,
    /// Whether the model goes on with the last message.
    #[serde(default)]
    continue_final_message: Option<bool>,
    /// Values for the chat template.
    #[serde(default)]
    chat_template_kwargs: Option<Json>,
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
pub(super) struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

#[derive(Deserialize)]
pub(super) struct Said {
    role: String,
    #[serde(default)]
    content: Value,
    /// For the template: a name, calls of tools, and of which call it is the result.
    #[serde(flatten)]
    others: Json,
}

/// What would change the result and is not computed, with the value that asks for nothing.
const NOT_COMPUTED: [(&str, &str); 25] = [
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
];
/// Penalties by counts and the bias of a logit at most, as OpenAI has them.
const MOST_PENALTY: f32 = 2.0;
const MOST_BIAS: f32 = 100.0;

/// New tokens of a completion that says nothing of them, as OpenAI has it.
const USUAL_TOKENS: usize = 16;
/// Texts of one prompt at most, and alternatives of a token, as OpenAI has it.
const MOST_TEXTS: usize = 128;
const MOST_ALTERNATIVES: usize = 20;

impl Asked {
    pub fn parse(body: &[u8]) -> Result<Self, Failure> {
        let asked: Self = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
        for (name, neutral) in NOT_COMPUTED {
            if let Some(value) = asked.others.get(name) {
                neutral_only(name, value, neutral)?;
            }
        }
        Ok(asked)
    }

    /// The texts that go on from each prompt.
    pub fn n(&self) -> Result<usize, Failure> {
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

    pub fn writing(&self, is_chat: bool) -> Result<Writing, Failure> {
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
            goes_on: !is_chat,
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
    pub fn tools(&self) -> Result<&[Tool], Failure> {
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

    /// How the conversation is written down. Without options it ends where the model's answer begins.
    pub fn chat_options(&self) -> Result<ChatOptions, Failure> {
        let continues = self.continue_final_message.unwrap_or(false);
        let kwargs = match &self.chat_template_kwargs {
            None | Some(Json::Null) => Vec::new(),
            Some(Json::Object(fields)) => fields.clone(),
            Some(other) => {
                let name = "chat_template_kwargs";
                let problem = format!("`{name}` is {}; expected an object", other.kind());
                return Err(Failure::invalid(name, problem));
            }
        };
        // A conversation that must not use its tools is one without.
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

    /// Refuses options of conversations, for a request that has a prompt.
    pub fn check_no_conversation(&self) -> Result<(), Failure> {
        let kwargs = self.chat_template_kwargs.as_ref();
        let has_kwargs = kwargs.is_some_and(|kwargs| *kwargs != Json::Object(Vec::new()));
        let given = [
            ("tools", !self.tools()?.is_empty()),
            (
                "chat_template_kwargs",
                has_kwargs && !kwargs.is_some_and(Json::is_null),
            ),
            (
                "continue_final_message",
                self.continue_final_message == Some(true),
            ),
            (
                "add_generation_prompt",
                self.add_generation_prompt == Some(true),
            ),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            None => Ok(()),
            Some((name, _)) => {
                let problem = format!(
                    "`{name}` is an option of conversations; ask /v1/chat/completions, or write it into the prompt"
                );
                Err(Failure::invalid(name, problem))
            }
        }
    }

    pub fn streams(&self) -> bool {
        self.stream == Some(true)
    }

    /// Whether the last event of a stream says how many tokens there were.
    pub fn wants_usage(&self) -> bool {
        let options = self.stream_options.as_ref();
        options.is_some_and(|options| options.include_usage)
    }

    pub fn wants_scores(&self) -> bool {
        !matches!(self.logprobs, Value::Null | Value::Bool(false))
    }
}

impl Said {
    /// The text of a message, of which parts are put together.
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
