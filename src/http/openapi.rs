//! Builds a description of all routes as an OpenAPI 3.1 document. The document is built from `Route::ALL`, so it contains every route.
//!
//! The schemas are written by hand, because most bodies are unions (a text, a list, ids) that a derive macro cannot express. Tests compare
//! the fields in the schemas with the fields that handlers read, and send requests that the document allows or forbids (schemathesis).

mod generation;
mod heads;
mod schema;

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{
    Public, Route,
    fields::{Elsewhere, FIELDS},
    route::Style,
};
use schema::*;

/// Description of a route for clients.
struct Described {
    summary: &'static str,
    /// Schema of the request body, if there is one.
    body: Option<Value>,
    /// Media types of successful responses, with the schemas of their bodies.
    answers: Vec<(&'static str, Value)>,
}

impl Described {
    fn new(
        summary: &'static str,
        body: Option<Value>,
        answers: Vec<(&'static str, Value)>,
    ) -> Self {
        Self {
            summary,
            body,
            answers,
        }
    }
}

/// Returns the OpenAPI document of a server. `public` are the routes that need no key.
pub(super) fn document(public: Public) -> Value {
    let mut paths = json!({});
    for (route, path, method) in Route::ALL {
        paths[path][method.as_str().to_lowercase()] = operation(route, path, public);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "gemmule",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Embeddings, scores and text generation with transformers, in the APIs of OpenAI, text-embeddings-inference, Jina and Cohere.",
        },
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas(),
        },
    })
}

fn operation(route: Route, path: &str, public: Public) -> Value {
    let described = described(route);
    let mut parameters = Vec::new();
    if path.contains('{') {
        parameters.push(json!({
            "name": "model", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1},
        }));
    }
    if described.body.is_some() {
        let header = |name: &str, about: &str, least: u64, most: u64| {
            json!({
                "name": name, "in": "header", "description": about,
                "schema": {"type": "integer", "minimum": least, "maximum": most},
            })
        };
        parameters.push(header(
            "x-request-timeout-ms",
            "Time limit of the request in milliseconds. A request that cannot be answered in time is refused at once.",
            1,
            86_400_000,
        ));
        parameters.push(header(
            "x-priority",
            "Requests of a higher priority go first, up to the maximum priority of the key.",
            0,
            255,
        ));
    }
    let content = |kinds: &[(&str, Value)]| {
        let kinds = kinds.iter();
        let kinds = kinds.map(|(kind, schema)| (kind.to_string(), json!({"schema": schema})));
        Value::Object(kinds.collect())
    };
    let mut responses = json!({
        "200": {"description": "The response.", "content": content(&described.answers)},
    });
    let error = match route.style() {
        Style::OpenAi => "Error",
        Style::Tei => "TeiError",
        Style::Cohere => "CohereError",
    };
    let needs_key = !public.contains(route);
    let key = (401, "The API key is missing or not known.");
    let keyed = needs_key.then_some(key);
    for (status, about) in keyed.into_iter().chain(statuses(route)) {
        responses[status.to_string()] = json!({
            "description": about, "content": content(&[("application/json", named(error))]),
        });
    }
    let mut operation = json!({
        "operationId": format!("{route:?}"),
        "summary": described.summary,
        "parameters": parameters,
        "responses": responses,
    });
    if let Some(body) = described.body {
        let body = match route {
            // Each variant of this body already lists the fields that it accepts.
            Route::Base => body,
            route => closed(route, "", body),
        };
        operation["requestBody"] =
            json!({"required": true, "content": content(&[("application/json", body)])});
    }
    if needs_key {
        // If the server has no list of keys, it accepts requests without a key.
        operation["security"] = json!([{"key": []}, {}]);
    }
    operation
}

/// Returns the error statuses of a route, except 401 for a missing key and 405 for a method that the path does not support.
fn statuses(route: Route) -> Vec<(u16, &'static str)> {
    let wrong = "The request is not valid; the message names the problem and how to fix it.";
    match route {
        Route::Health
        | Route::Metrics
        | Route::OpenApi
        | Route::Page
        | Route::Status
        | Route::Models
        | Route::Info
        | Route::Unknown => Vec::new(),
        Route::Ready => vec![(503, "The server is loading or shutting down.")],
        Route::Model => vec![(404, "There is no such model.")],
        _ => {
            let mut all = vec![
                (404, "There is no such model, or it has another task."),
                (408, "The body did not arrive in time."),
                (413, "The body is too large, or an input is too long."),
                (415, "The body has a compression other than gzip."),
                (
                    429,
                    "The server is overloaded; `Retry-After` says when to retry.",
                ),
                (
                    503,
                    "The server is shutting down; another server may answer.",
                ),
                (504, "The deadline passed."),
            ];
            all.extend(match route.style() {
                Style::Tei => [(422, wrong), (424, "A batch failed.")],
                _ => [(400, wrong), (500, "A batch failed.")],
            });
            all
        }
    }
}

/// Restricts the fields of an object that `schema` does not list. A field that the route ignores may have any value. Other known fields may
/// have their neutral values. All other fields must be null. `prefix` is the path of the object with a trailing dot; empty for the body.
fn closed(route: Route, prefix: &str, mut schema: Value) -> Value {
    let mut accepted: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for field in FIELDS.iter().filter(|field| !field.is_computed(route)) {
        let own = field.name.strip_prefix(prefix);
        let Some(name) = own.filter(|name| !name.contains('.')) else {
            continue;
        };
        let neutral = field.neutral();
        let values = match field.elsewhere {
            Elsewhere::Ignored => json!({}),
            Elsewhere::Refused(_) if neutral.is_empty() => continue,
            Elsewhere::Refused(_) => {
                let null = [Value::Null].into_iter();
                only(null.chain(neutral).collect())
            }
        };
        accepted.entry(values.to_string()).or_default().push(name);
    }
    let patterns = accepted.into_iter().map(|(values, names)| {
        let values: Value = serde_json::from_str(&values).unwrap_or_default();
        (format!("^({})$", names.join("|")), values)
    });
    schema["patternProperties"] = Value::Object(patterns.collect());
    schema["additionalProperties"] = json!({"type": "null"});
    schema
}

fn described(route: Route) -> Described {
    let of = Described::new;
    match route {
        Route::Embeddings => of(
            "Embeds texts (OpenAI)",
            Some(object(
                &["input"],
                json!({
                    "model": or_null(text()),
                    "input": named("Input"),
                    "encoding_format": only(json!([null, "float", "base64"])),
                    "dimensions": or_null(whole(1)),
                    "input_type": or_null(text()),
                    "task": or_null(text()),
                    "truncate": flag(),
                    "truncation": flag(),
                    "truncation_direction": direction(),
                    "prompt_name": or_null(text()),
                    "prompt": or_null(text()),
                    "embedding_type": value_type(true),
                    "output_dtype": value_type(true),
                    "output_dimension": or_null(whole(1)),
                    "normalized": flag(),
                    "late_chunking": flag(),
                    "return_sparse": flag(),
                    "return_multivector": flag(),
                }),
            )),
            vec![
                ("application/json", named("Embeddings")),
                (
                    super::openai::RAW,
                    json!({"type": "string", "format": "binary", "description": "Rows of little-endian f32 if `Accept` requests them; the headers x-rows, x-width and x-tokens have the numbers of rows, values per row, and tokens."}),
                ),
            ],
        ),
        Route::MultiVector => of(
            "Vectors of the tokens of queries or documents (Jina)",
            Some(object(
                &["input"],
                json!({
                    "model": or_null(text()),
                    "input": named("Input"),
                    "input_type": or_null(text()),
                    "embedding_type": value_type(true),
                    "encoding_format": only(json!([null, "float", "base64"])),
                    "dimensions": or_null(whole(1)),
                    "truncate": flag(),
                    "truncation_direction": direction(),
                }),
            )),
            json_answer(object(
                &["model", "object", "usage", "data"],
                json!({
                    "model": text(), "object": text(), "usage": named("Usage"),
                    "data": list(object(&["object", "index", "embeddings"], json!({
                        "object": text(), "index": whole(0),
                        "embeddings": list(json!({"anyOf": [list(number()), text()]})),
                    }))),
                }),
            )),
        ),
        Route::Completions => generation::completions(),
        Route::ChatCompletions => generation::conversations(),
        Route::Translate => generation::translations(route),
        Route::Embed => of(
            "Embeds texts (TEI)",
            Some(tei(
                &["inputs"],
                json!({
                    "inputs": named("Input"), "normalize": flag(), "dimensions": or_null(whole(1)),
                    "prompt_name": or_null(text()), "prompt": or_null(text()),
                }),
            )),
            json_answer(list(list(number()))),
        ),
        Route::EmbedSparse => of(
            "Sparse embeddings, as of SPLADE and BGE-M3 (TEI)",
            Some(all_of_texts()),
            json_answer(list(list(object(
                &["index", "value"],
                json!({"index": whole(0), "value": number()}),
            )))),
        ),
        Route::EmbedAll => of(
            "Vectors of all tokens (TEI)",
            Some(all_of_texts()),
            json_answer(list(list(list(number())))),
        ),
        Route::Predict => of(
            "Scores texts or pairs by label (TEI)",
            Some(tei(
                &["inputs"],
                json!({
                    "inputs": {"anyOf": [
                        some_text(),
                        {"type": "array", "items": some_text(), "minItems": 1, "maxItems": 2},
                        {"type": "array", "minItems": 1, "items":
                            {"type": "array", "items": some_text(), "minItems": 1, "maxItems": 2}},
                    ]},
                    "raw_scores": flag(),
                }),
            )),
            json_answer(json!({"anyOf": [list(named("Label")), list(list(named("Label")))]})),
        ),
        Route::TeiRerank => of(
            "Ranks texts by a query (TEI)",
            Some(tei(
                &["query", "texts"],
                json!({
                    "query": text(), "texts": {"type": "array", "items": text(), "minItems": 1},
                    "return_text": flag(), "raw_scores": flag(),
                }),
            )),
            json_answer(list(object(
                &["index", "score"],
                json!({"index": whole(0), "score": number(), "text": text()}),
            ))),
        ),
        Route::Similarity => of(
            "Cosine similarities of a text with others (TEI)",
            Some(object(
                &["inputs"],
                json!({
                    "model": or_null(text()),
                    "inputs": closed(route, "inputs.", object(&["source_sentence", "sentences"], json!({
                        "source_sentence": some_text(),
                        "sentences": {"type": "array", "items": some_text(), "minItems": 1},
                    }))),
                    "parameters": or_null(closed(route, "parameters.", object(&[], json!({
                        "truncate": flag(), "prompt_name": or_null(text()), "prompt": or_null(text()),
                        "truncation_direction": direction(), "dimensions": or_null(whole(1)),
                    })))),
                }),
            )),
            json_answer(list(number())),
        ),
        Route::Tokenize => of(
            "Tokenizes texts (TEI)",
            Some(object(
                &["inputs"],
                json!({
                    "inputs": {"anyOf": [text(), {"type": "array", "items": text(), "minItems": 1}]},
                    "model": or_null(text()), "add_special_tokens": flag(),
                    "prompt_name": or_null(text()), "prompt": or_null(text()),
                }),
            )),
            json_answer(list(list(named("Token")))),
        ),
        Route::Decode => of(
            "Decodes token ids (TEI)",
            Some(object(
                &["ids"],
                json!({
                    "ids": {"anyOf": [
                        {"type": "array", "items": whole(0), "minItems": 1},
                        {"type": "array", "items": list(whole(0)), "minItems": 1},
                    ]},
                    "model": or_null(text()), "skip_special_tokens": flag(),
                }),
            )),
            json_answer(list(text())),
        ),
        Route::Rerank => of(
            "Ranks documents by a query (Jina, Cohere API version 1)",
            Some(object(
                &["query", "documents"],
                json!({
                    "model": or_null(text()), "query": text(),
                    "documents": {"type": "array", "minItems": 1, "items": {"anyOf": [
                        text(), object(&["text"], json!({"text": text()})),
                    ]}},
                    "top_n": or_null(whole(0)), "return_documents": flag(), "truncate": flag(),
                    "truncation_direction": direction(),
                }),
            )),
            json_answer(object(
                &["id", "model", "results", "usage"],
                json!({
                    "id": text(), "model": text(), "usage": named("Usage"),
                    "results": list(object(&["index", "relevance_score"], json!({
                        "index": whole(0), "relevance_score": number(),
                        "document": object(&["text"], json!({"text": text()})),
                    }))),
                }),
            )),
        ),
        Route::RerankV2 => of(
            "Ranks documents by a query (Cohere API version 2)",
            Some(object(
                &["model", "query", "documents"],
                json!({
                    "model": text(), "query": text(),
                    "documents": {"type": "array", "minItems": 1, "items": text()},
                    "top_n": or_null(whole(1)), "max_tokens_per_doc": or_null(whole(1)),
                }),
            )),
            json_answer(object(
                &["id", "results", "meta"],
                json!({
                    "id": text(), "meta": {"type": "object"},
                    "results": list(object(&["index", "relevance_score"], json!({
                        "index": whole(0), "relevance_score": number(),
                    }))),
                }),
            )),
        ),
        Route::EmbedV2 => of(
            "Embeds texts (Cohere API version 2)",
            Some(object(
                &["model", "texts"],
                json!({
                    "model": text(), "texts": {"type": "array", "minItems": 1, "items": some_text()},
                    "input_type": or_null(text()), "output_dimension": or_null(whole(1)),
                    "truncate": only(json!([null, "NONE", "START", "END"])),
                    "embedding_types":
                        or_null(json!({"type": "array", "minItems": 1, "items": value_type(false)})),
                }),
            )),
            json_answer(object(
                &["id", "response_type", "embeddings", "texts", "meta"],
                json!({
                    "id": text(), "response_type": text(), "texts": list(text()),
                    "meta": {"type": "object"},
                    "embeddings": {"type": "object", "additionalProperties":
                        list(json!({"anyOf": [list(number()), text()]}))},
                }),
            )),
        ),
        Route::TokenClassification
        | Route::PredictTokens
        | Route::FillMask
        | Route::ZeroShot
        | Route::QuestionAnswering => heads::described(route),
        Route::Base => of(
            "The TEI route that fits the model and the body",
            Some({
                let bodies = [
                    Route::Embed,
                    Route::Predict,
                    Route::TeiRerank,
                    Route::Similarity,
                ];
                let bodies = bodies
                    .map(|route| closed(route, "", described(route).body.unwrap_or_default()));
                json!({"anyOf": bodies})
            }),
            json_answer(list(json!({}))),
        ),
        Route::Info => of(
            "The first model (TEI)",
            None,
            json_answer(object(
                &["model_id", "model_dtype", "model_type", "version"],
                json!({
                    "model_id": text(), "model_dtype": text(), "model_type": {"type": "object"},
                    "max_input_length": or_null(whole(0)), "version": text(), "device": text(),
                }),
            )),
        ),
        Route::Models => of(
            "The models (OpenAI)",
            None,
            json_answer(object(
                &["object", "data"],
                json!({"object": text(), "data": list(named("Model"))}),
            )),
        ),
        Route::Model => of("A model (OpenAI)", None, json_answer(named("Model"))),
        Route::Health => of("Whether the process is alive", None, json_answer(state())),
        Route::Ready => of(
            "Whether the server accepts new requests",
            None,
            json_answer(state()),
        ),
        Route::Metrics => of("Metrics for Prometheus", None, vec![("text/plain", text())]),
        Route::OpenApi => of(
            "This document",
            None,
            json_answer(json!({"type": "object"})),
        ),
        Route::Page => of("The status page", None, vec![("text/html", text())]),
        Route::Status => of(
            "Data of the status page, counted since the start",
            None,
            json_answer(object(
                &[
                    "version",
                    "ready",
                    "uptime_seconds",
                    "answers",
                    "seconds",
                    "models",
                ],
                json!({
                    "version": text(), "ready": yes_or_no(), "uptime_seconds": number(),
                    "answers": {"type": "object", "additionalProperties": whole(0)},
                    "seconds": object(&["ends", "below", "count", "sum"], json!({
                        "ends": list(number()), "below": list(whole(0)), "count": whole(0), "sum": number(),
                    })),
                    "models": list(object(&["name", "does", "device", "dtype"], json!({
                        "name": text(), "does": text(), "device": text(), "dtype": text(),
                        "full_batch": or_null(whole(1)),
                    }))),
                }),
            )),
        ),
        Route::Unknown => of("Nothing", None, Vec::new()),
    }
}

fn all_of_texts() -> Value {
    tei(
        &["inputs"],
        json!({"inputs": named("Input"), "prompt_name": or_null(text()), "prompt": or_null(text())}),
    )
}
