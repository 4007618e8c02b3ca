//! Messages, tools and options of a conversation.

use serde::{Deserialize, Deserializer, de::Error as _};

use super::Json;

/// Names under which clients may send a model's reasoning before its answer. Templates read the first two.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Usually `system`, `user`, `assistant` or `tool`.
    pub role: String,
    pub content: String,
    /// Other fields that a template may read, such as `tool_calls`. The `arguments` of a tool call may be an object, or an object as a JSON
    /// string, as in OpenAI's API. Templates can read the fields of an object in such a string, and print the string unchanged.
    pub others: Vec<(String, Json)>,
}

impl Message {
    /// Creates a message without other fields.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
            others: Vec::new(),
        }
    }

    /// Converts the message to the form that the library transformers passes to templates. Null fields and empty tool calls are removed,
    /// and the reasoning is written under each name that templates read.
    pub(super) fn to_json(&self) -> Json {
        let reasoning = REASONING.iter().find_map(|name| {
            let found = self.others.iter().find(|(known, _)| known == name);
            found
                .map(|(_, value)| value)
                .filter(|value| !value.is_null())
        });
        let has = |name: &str| self.others.iter().any(|(known, _)| known == name);
        let mut fields = Vec::with_capacity(self.others.len() + 4);
        if let (Some(reasoning), false) = (reasoning, has("thinking")) {
            fields.push(("thinking".to_owned(), reasoning.clone()));
        }
        fields.push(("role".to_owned(), Json::String(self.role.clone())));
        fields.push(("content".to_owned(), Json::String(self.content.clone())));
        let is_kept = |(name, value): &&(String, Json)| {
            let is_own = ["role", "content", REASONING[0]].contains(&&**name);
            let is_empty = name == "tool_calls" && *value == Json::Array(Vec::new());
            !is_own && !is_empty && !value.is_null()
        };
        fields.extend(self.others.iter().filter(is_kept).cloned());
        if let Some(reasoning) = reasoning {
            fields.push((REASONING[0].to_owned(), reasoning.clone()));
        }
        Json::Object(fields)
    }
}

/// A tool that a model may call: a JSON object, whose fields keep their order.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool(pub(super) Json);

impl<'de> Deserialize<'de> for Tool {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Json::deserialize(deserializer)? {
            json @ Json::Object(_) => Ok(Self(json)),
            other => Err(D::Error::custom(format!(
                "a tool is {}; expected an object",
                other.kind()
            ))),
        }
    }
}

/// Options for rendering a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatOptions {
    /// Tools that the model may call; `None` for a conversation without tools, which templates distinguish from an empty
    /// list.
    pub tools: Option<Vec<Tool>>,
    /// Whether the text ends with the beginning of the model's response.
    pub add_generation_prompt: bool,
    /// Whether the text ends with the last message, so that the model continues it.
    pub continue_final_message: bool,
    /// Other variables of the template, such as `enable_thinking`.
    pub kwargs: Vec<(String, Json)>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self {
            tools: None,
            add_generation_prompt: true,
            continue_final_message: false,
            kwargs: Vec::new(),
        }
    }
}
