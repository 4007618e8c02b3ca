//! Builds a description of all routes as an OpenAPI 3.1 document. The document is built from `Route::ALL`, so it contains every route.
//!
//! Tests with schemathesis send requests that the document allows, and requests that it forbids.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{
    Public, Route,
    fields::{Elsewhere, FieldTable},
    route::Style,
    schema::{RouteDoc, named, only, schemas},
};

/// Returns the OpenAPI document of a server. `public` are the routes that need no key, `fields` are the fields that requests may contain,
/// and `documented` returns the documentation of a route.
pub(super) fn document(
    public: Public,
    fields: &FieldTable,
    documented: impl Fn(Route) -> RouteDoc,
) -> Value {
    let mut paths = json!({});
    for (route, path, method) in Route::ALL {
        let needs_key = !public.contains(route);
        let operation = operation(route, path, documented(route), needs_key, fields);
        paths[path][method.as_str().to_lowercase()] = operation;
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

pub(super) fn doc() -> RouteDoc {
    RouteDoc::get("This document", json!({"type": "object"}))
}

fn operation(
    route: Route,
    path: &str,
    doc: RouteDoc,
    needs_key: bool,
    fields: &FieldTable,
) -> Value {
    let mut parameters = Vec::new();
    if path.contains('{') {
        parameters.push(json!({
            "name": "model", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1},
        }));
    }
    if doc.body.is_some() {
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
        "200": {"description": "The response.", "content": content(&doc.answers)},
    });
    let error = match route.style() {
        Style::OpenAi => "Error",
        Style::Tei => "TeiError",
        Style::Cohere => "CohereError",
    };
    let key = (401, "The API key is missing or not known.");
    let keyed = needs_key.then_some(key);
    for (status, about) in keyed.into_iter().chain(statuses(route, doc.body.is_some())) {
        responses[status.to_string()] = json!({
            "description": about, "content": content(&[("application/json", named(error))]),
        });
    }
    let mut operation = json!({
        "operationId": format!("{route:?}"),
        "summary": doc.summary,
        "parameters": parameters,
        "responses": responses,
    });
    if let Some(body) = doc.body {
        let body = closed(fields, "", body);
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
fn statuses(route: Route, has_body: bool) -> Vec<(u16, &'static str)> {
    let wrong = "The request is not valid; the message names the problem and how to fix it.";
    match route {
        Route::Ready => vec![(503, "The server is loading or shutting down.")],
        Route::Model => vec![(404, "There is no such model.")],
        _ if !has_body => Vec::new(),
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

/// Adds rules to `schema`, the schema of an object, for fields that it does not list. A field that the server ignores may have any value.
/// Another field of the table may be null or have one of its neutral values. All other fields must be null. The rules are also added to the
/// schemas of objects in the object, and to each variant of a union (`anyOf`). `prefix` is the path of the object with a trailing dot;
/// empty for the body.
fn closed(fields: &FieldTable, prefix: &str, mut schema: Value) -> Value {
    if let Some(Value::Array(variants)) = schema.get_mut("anyOf") {
        for variant in variants {
            *variant = closed(fields, prefix, variant.take());
        }
        return schema;
    }
    let Some(Value::Object(properties)) = schema.get_mut("properties") else {
        return schema;
    };
    let mut accepted: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for field in fields.all() {
        let own = field.name.strip_prefix(prefix);
        let Some(name) = own.filter(|name| !name.contains('.') && !properties.contains_key(*name))
        else {
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
    for (name, property) in properties {
        if property.get("properties").is_some() {
            *property = closed(fields, &format!("{prefix}{name}."), property.take());
        }
    }
    let patterns = accepted.into_iter().map(|(values, names)| {
        let values: Value = serde_json::from_str(&values).unwrap_or_default();
        (format!("^({})$", names.join("|")), values)
    });
    schema["patternProperties"] = Value::Object(patterns.collect());
    schema["additionalProperties"] = json!({"type": "null"});
    schema
}
