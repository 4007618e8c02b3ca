//! Routes of generated text.

use serde_json::{Value, json};

use super::{Described, Route, closed, schema::*};

/// Returns the description of a route that responds with a whole result or with a stream of events. `answer` is the name of the schema of
/// the whole result.
fn described(summary: &'static str, body: Value, answer: &str) -> Described {
    let answers = vec![
        ("application/json", named(answer)),
        ("text/event-stream", text()),
    ];
    Described::new(summary, Some(body), answers)
}

pub(super) fn completions() -> Described {
    let mut body = writing();
    body["required"] = json!(["prompt"]);
    body["properties"]["prompt"] = named("Input");
    body["properties"]["best_of"] = or_null(whole(1));
    body["properties"]["logprobs"] = json!({"anyOf": [
        {"type": ["integer", "null"], "minimum": 0, "maximum": 20}, {"const": false},
    ]});
    described("Completes prompts (OpenAI)", body, "Texts")
}

pub(super) fn conversations() -> Described {
    let mut body = writing();
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
        or_null(json!({"type": "integer", "minimum": 0, "maximum": 20}));
    described("Completes conversations (OpenAI)", body, "Texts")
}

pub(super) fn translations(route: Route) -> Described {
    let body = object(&["text"], translating(route));
    described("Translates texts", body, "Translations")
}

fn translating(route: Route) -> Value {
    let count = || or_null(json!({"type": "integer", "minimum": 1, "maximum": 256}));
    let tokens = list(text());
    json!({
        "model": or_null(text()),
        "text": {"anyOf": [text(), {"type": "array", "minItems": 1, "items": text()}]},
        "source_lang": or_null(text()),
        "target_lang": or_null(text()),
        "target_prefix": {"anyOf": [
            {"type": ["string", "null"]},
            list(json!({"anyOf": [{"type": ["string", "null"]}, tokens]})),
        ]},
        "num_beams": count(),
        "num_hypotheses": count(),
        "n": count(),
        "length_penalty": or_null(json!({"type": "number", "minimum": -100, "maximum": 100})),
        "max_tokens": or_null(whole(1)),
        "stream": flag(),
        "stream_options": stream_options(route),
    })
}

fn stream_options(route: Route) -> Value {
    or_null(closed(
        route,
        "stream_options.",
        object(&[], json!({"include_usage": flag()})),
    ))
}

/// Returns the schema of the fields that completions and chat completions have in common.
fn writing() -> Value {
    let penalty = json!({"type": "number", "minimum": -2, "maximum": 2});
    object(
        &[],
        json!({
            "model": or_null(text()),
            "max_tokens": max_tokens(),
            "max_completion_tokens": max_tokens(),
            "temperature": or_null(json!({"type": "number", "minimum": 0})),
            "top_p": or_null(json!({"type": "number", "minimum": 0, "maximum": 1})),
            "seed": or_null(json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX})),
            "n": or_null(json!({"type": "integer", "minimum": 1, "maximum": 128})),
            "stop": {"anyOf": [
                {"type": "null"}, {"type": "string", "minLength": 1},
                {"type": "array", "maxItems": 16, "items": {"type": "string", "minLength": 1}},
            ]},
            "stream": flag(),
            "stream_options": stream_options(Route::Completions),
            "presence_penalty": or_null(penalty.clone()),
            "frequency_penalty": or_null(penalty),
            "logit_bias": {"anyOf": [
                {
                    "type": ["object", "null"], "propertyNames": {"pattern": "^[0-9]+$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                },
                {"type": "array", "maxItems": 0},
            ]},
        }),
    )
}
