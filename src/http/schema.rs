//! Documentation of a route, and the JSON schemas that several routes share.

use serde_json::{Value, json};

use super::vectors::TYPES;

/// Documentation of a route for the OpenAPI document.
///
/// Schemas are written by hand, because most bodies are unions (a text, a list, ids) that a derive macro cannot express.
pub(super) struct RouteDoc {
    pub summary: &'static str,
    /// Schema of the request body, if there is one. Its properties are the fields that the route supports
    /// ([`FieldTable`](super::fields::FieldTable)).
    pub body: Option<Value>,
    /// Media types of successful responses, with the schemas of their bodies.
    pub answers: Vec<(&'static str, Value)>,
}

impl RouteDoc {
    /// Returns the documentation of a route that has a request body and responds with JSON.
    pub fn post(summary: &'static str, body: Value, answer: Value) -> Self {
        Self {
            body: Some(body),
            ..Self::get(summary, answer)
        }
    }

    /// Returns the documentation of a route that responds with a whole result in JSON, or with a stream of events. `answer` is the name of
    /// the schema of the whole result.
    pub fn streamed(summary: &'static str, body: Value, answer: &str) -> Self {
        Self::post(summary, body, named(answer)).or("text/event-stream", text())
    }

    /// Returns the documentation of a route without a request body that responds with JSON.
    pub fn get(summary: &'static str, answer: Value) -> Self {
        Self::get_as(summary, "application/json", answer)
    }

    /// Returns the documentation of a route without a request body that responds with another media type.
    pub fn get_as(summary: &'static str, media_type: &'static str, answer: Value) -> Self {
        Self {
            summary,
            body: None,
            answers: vec![(media_type, answer)],
        }
    }

    /// Adds a further media type of responses.
    pub fn or(mut self, media_type: &'static str, schema: Value) -> Self {
        self.answers.push((media_type, schema));
        self
    }
}

pub(super) fn named(schema: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{schema}")})
}

pub(super) fn list(of: Value) -> Value {
    json!({"type": "array", "items": of})
}

/// Returns the schema of an object with some required fields.
pub(super) fn object(required: &[&str], properties: Value) -> Value {
    json!({"type": "object", "required": required, "properties": properties})
}

pub(super) fn text() -> Value {
    json!({"type": "string"})
}

pub(super) fn some_text() -> Value {
    json!({"type": "string", "minLength": 1})
}

pub(super) fn whole(least: u64) -> Value {
    json!({"type": "integer", "minimum": least})
}

pub(super) fn number() -> Value {
    json!({"type": "number"})
}

pub(super) fn yes_or_no() -> Value {
    json!({"type": "boolean"})
}

pub(super) fn or_null(mut schema: Value) -> Value {
    if let Some(kind) = schema.get("type").cloned() {
        schema["type"] = json!([kind, "null"]);
        return schema;
    }
    json!({"anyOf": [schema, {"type": "null"}]})
}

/// Returns a schema that accepts only the given values. In a request, the routes refuse any other value.
pub(super) fn only(values: Value) -> Value {
    json!({"enum": values})
}

/// Returns the schema of a field that selects the type of the values in embeddings. If `is_optional`, the field may be null.
pub(super) fn value_type(is_optional: bool) -> Value {
    let null = is_optional.then_some(Value::Null);
    let names = TYPES.iter().map(|(name, _)| json!(name));
    only(null.into_iter().chain(names).collect())
}

pub(super) fn direction() -> Value {
    only(json!([null, "Left", "Right", "left", "right"]))
}

pub(super) fn flag() -> Value {
    or_null(yes_or_no())
}

/// Returns the schemas that [`named`] refers to.
pub(super) fn schemas() -> Value {
    let error = |code: Value| {
        object(
            &["message", "type", "param", "code"],
            json!({"message": text(), "type": text(), "param": or_null(text()), "code": code}),
        )
    };
    let scores = json!({"type": ["object", "null"]});
    json!({
        "Input": {"anyOf": [
            some_text(),
            {"type": "array", "minItems": 1, "items": some_text()},
            {"type": "array", "minItems": 1, "items": whole(0)},
            {"type": "array", "minItems": 1, "items": {"type": "array", "minItems": 1, "items": whole(0)}},
        ]},
        "Embeddings": object(&["object", "data", "model", "usage"], json!({
            "object": text(), "model": text(), "usage": named("Usage"),
            "data": list(object(&["object", "index", "embedding"], json!({
                "object": text(), "index": whole(0), "embedding": {"anyOf": [list(number()), text()]},
                "sparse_embedding": list(object(&["index", "value"], json!({"index": whole(0), "value": number()}))),
                "embeddings": list(json!({"anyOf": [list(number()), text()]})),
            }))),
        })),
        "Usage": object(&["prompt_tokens", "total_tokens"], json!({
            "prompt_tokens": whole(0), "completion_tokens": whole(0), "total_tokens": whole(0),
        })),
        "Message": object(&["role", "content"], json!({
            "role": text(),
            "content": {"anyOf": [
                {"type": ["string", "null"]},
                list(object(&["type", "text"], json!({"type": {"const": "text"}, "text": text()}))),
            ]},
        })),
        "Texts": object(&["id", "object", "created", "model", "choices", "usage"], json!({
            "id": text(), "object": text(), "created": whole(0), "model": text(), "usage": named("Usage"),
            "choices": list(object(&["index", "finish_reason", "logprobs"], json!({
                "index": whole(0), "finish_reason": only(json!(["stop", "length"])), "logprobs": scores,
                "text": text(),
                "message": object(&["role", "content"], json!({"role": text(), "content": text()})),
            }))),
        })),
        "Translations": object(&["id", "object", "created", "model", "translations", "usage"], json!({
            "id": text(), "object": text(), "created": whole(0), "model": text(), "usage": named("Usage"),
            "translations": list(object(&["index", "text", "score", "finish_reason", "alternatives"], json!({
                "index": whole(0), "text": text(), "score": or_null(number()),
                "finish_reason": only(json!(["stop", "length"])),
                "alternatives": list(object(&["text", "score"], json!({"text": text(), "score": number()}))),
            }))),
        })),
        "Label": object(&["label", "score"], json!({"label": text(), "score": number()})),
        "Token": object(&["id", "text", "special", "start", "stop"], json!({
            "id": whole(0), "text": text(), "special": yes_or_no(),
            "start": or_null(whole(0)), "stop": or_null(whole(0)),
        })),
        "Model": object(&["id", "object", "created", "owned_by"], json!({
            "id": text(), "object": text(), "created": whole(0), "owned_by": text(),
        })),
        "Error": object(&["error"], json!({"error": error(text())})),
        "TeiError": object(&["error", "error_type"], json!({"error": text(), "error_type": text()})),
        "CohereError": object(&["message"], json!({"message": text()})),
    })
}
