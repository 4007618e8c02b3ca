//! Tests of the table of fields, and of errors about fields and headers.

use std::{collections::BTreeMap, path::Path};

use serde_json::{Value, json};

use super::{
    super::{
        Bodies, Body, Origin, Route,
        dispatch::field_table,
        fields::{ELSEWHERE, Elsewhere},
        request::Fields,
        route::Style,
    },
    small,
};
use crate::serve::{Models, Tool};

/// Returns the message and the parameter of the error for a body; `None` if the table accepts the
/// body.
fn refusal(route: Route, body: &Value) -> Option<(String, Value)> {
    let failure = Fields::read(field_table(), route, body.to_string().into_bytes()).err()?;
    let Body::Whole(Some(bytes)) = failure.response(Style::OpenAi).into_body() else {
        panic!("an error has a body")
    };
    let told: Value = serde_json::from_slice(&bytes).unwrap();
    let message = told["error"]["message"].as_str().unwrap().to_owned();
    Some((message, told["error"]["param"].clone()))
}

fn body_routes() -> impl Iterator<Item = Route> {
    let posts = Route::ALL.into_iter();
    posts
        .filter(|(.., method)| *method == hyper::Method::POST)
        .map(|(route, ..)| route)
}

#[test]
fn each_field_of_the_table_is_computed_or_ignored_or_refused() {
    let mut names: Vec<&str> = ELSEWHERE.iter().map(|(name, _)| *name).collect();
    names.sort_unstable();
    assert!(names.is_sorted_by(|a, b| a < b), "a field is listed twice");
    let fields = field_table().all();
    for field in fields.filter(|field| !field.name.contains('.')) {
        let name = field.name.as_str();
        for route in body_routes().filter(|&route| !field.is_computed(route)) {
            for value in field.neutral().into_iter().chain([Value::Null]) {
                assert_eq!(refusal(route, &json!({name: value})), None, "{name}");
            }
            let other = json!({name: {"other": [1.5]}});
            match field.elsewhere {
                Elsewhere::Ignored => assert_eq!(refusal(route, &other), None, "{name}"),
                Elsewhere::Refused(_) => {
                    let (message, param) = refusal(route, &other).unwrap();
                    assert_eq!(param, name);
                    assert!(message.contains(&format!("`{name}` is ")), "{message}");
                }
            }
        }
    }
    // A number that equals a neutral value is accepted in any notation. A value of another type is refused.
    let chat = Route::ChatCompletions;
    assert_eq!(refusal(chat, &json!({"repeat_penalty": 1.0})), None);
    assert!(refusal(chat, &json!({"mirostat": false})).is_some());
    assert!(refusal(chat, &json!({"repeat_penalty": 1.000_001})).is_some());
}

#[test]
fn refused_and_unknown_fields_are_named() {
    let cases = [
        (Route::ChatCompletions, json!({"repeat_penalty": 1.1})),
        (Route::ChatCompletions, json!({"top_k": 40})),
        (Route::ChatCompletions, json!({"grammar": "root ::= \"x\""})),
        (
            Route::ChatCompletions,
            json!({"response_format": {"type": "json_object"}}),
        ),
        (
            Route::ChatCompletions,
            json!({"structured_outputs": {"regex": "a+"}}),
        ),
        (
            Route::Completions,
            json!({"guided_json": {"type": "object"}}),
        ),
        (Route::Completions, json!({"temprature": 0.5})),
        (
            Route::Completions,
            json!({"stream_options.include_usage": true}),
        ),
        (Route::Embeddings, json!({"temperature": 0.5})),
        (Route::Embed, json!({"something_else": []})),
        (Route::TeiRerank, json!({"documents": [{"title": "x"}]})),
        (Route::Base, json!({"input": "x"})),
        (Route::Embeddings, json!(["x"])),
        (Route::Embeddings, json!("x")),
    ];
    let shown = cases.map(|(route, body)| match refusal(route, &body) {
        Some((message, param)) => format!("{} {body}\n{param} {message}\n", route.name()),
        None => format!("{} {body}\naccepted\n", route.name()),
    });
    insta::assert_snapshot!(shown.join("\n"));
    let body = br#"{"input": "x", "input": "y"}"#;
    let twice = Fields::read(field_table(), Route::Embeddings, body.to_vec());
    let told = format!("{:?}", twice.err());
    assert!(told.contains("the field `input` is given twice"), "{told}");
}

#[test]
fn objects_for_chat_templates_keep_the_order_of_their_keys() {
    let body = br#"{"tools": [{"zebra": 1, "type": 2, "apple": {"yak": 1, "xor": 2}}], "n": 1}"#;
    let mut fields = Fields::read(field_table(), Route::ChatCompletions, body.to_vec()).unwrap();
    let tools = fields.parsed::<Vec<Tool>>("tools").unwrap();
    let shown = format!("{tools:?}");
    let places = ["zebra", "type", "apple", "yak", "xor"].map(|key| shown.find(key));
    assert!(places.is_sorted() && places[0].is_some(), "{shown}");
    assert!(fields.parsed::<Vec<Tool>>("tools").unwrap().is_none());
    assert_eq!(fields.count("n", 1..=2).unwrap(), Some(1));
}

/// Returns a valid body of a route.
fn sound(route: Route) -> Value {
    match route {
        Route::Embeddings | Route::MultiVector => json!({"input": "x"}),
        Route::Completions => json!({"prompt": "One", "max_tokens": 1}),
        Route::ChatCompletions => json!({"messages": [{"role": "user", "content": "x"}]}),
        Route::Translate => json!({"text": "7"}),
        Route::TeiRerank => json!({"query": "x", "texts": ["x"]}),
        Route::Rerank => json!({"query": "x", "documents": ["x"]}),
        Route::RerankV2 => json!({"model": "ce-one", "query": "x", "documents": ["x"]}),
        Route::EmbedV2 => json!({"model": "st-mean", "texts": ["x"]}),
        Route::FillMask => json!({"inputs": "x [MASK]"}),
        Route::ZeroShot => json!({"model": "ce-nli", "inputs": "x", "candidate_labels": ["x"]}),
        Route::QuestionAnswering => json!({"question": "x", "context": "x"}),
        Route::Decode => json!({"ids": [5]}),
        Route::Similarity => json!({"inputs": {"source_sentence": "x", "sentences": ["x"]}}),
        _ => json!({"inputs": "x"}),
    }
}

#[test]
fn each_computed_field_is_read_and_an_invalid_value_is_an_error_that_names_it() {
    let models = [
        "st-mean",
        "ce-one",
        "writer",
        "translator",
        "st-splade",
        "ce-nli",
        "hf-electra-mlm",
        "late-bert",
        "../pipelines/ner",
        "../pipelines/qa",
    ];
    let models = models.map(small);
    let bodies = Bodies::new(Models::new(models.into())).unwrap();
    let told = |route: Route, body: &Value| {
        let (status, bytes) = bodies.post(route.name(), body.to_string().as_bytes());
        (status, String::from_utf8(bytes).unwrap())
    };
    for route in body_routes().filter(|&route| route != Route::Base) {
        let (status, text) = told(route, &sound(route));
        // The chat route fails because the model has no chat template.
        let is_missing = route == Route::ChatCompletions;
        assert!(status == 200 || is_missing, "{route:?} {text}");
        for field in field_table().all().filter(|field| field.is_computed(route)) {
            let mut body = sound(route);
            let name = field.name.as_str();
            let nested = name.split_once('.');
            let absurd = match name {
                // Any object is valid.
                "chat_template_kwargs" => json!(["absurd"]),
                _ => json!({"absurd": 1}),
            };
            match nested {
                None => body[name] = absurd,
                Some((object, own)) => body[object][own] = absurd,
            }
            let (status, text) = told(route, &body);
            let own = nested.map_or(name, |(_, own)| own);
            assert!([400, 422].contains(&status), "{route:?} {body} {text}");
            assert!(
                text.contains(own) || text.contains("absurd"),
                "{route:?} {text}"
            );
            // For a field that is not required, null has the same effect as a missing field.
            let needed = sound(route).get(name).is_some();
            if nested.is_none() && !needed && !is_missing {
                body[name] = Value::Null;
                let (status, text) = told(route, &body);
                assert_eq!(status, 200, "{route:?} {body} {text}");
            }
        }
    }
}

/// Returns the table of fields for `docs/serving.md`.
fn table() -> String {
    let code = |names: &[&str]| {
        let names = names.iter().map(|name| format!("`{name}`"));
        names.collect::<Vec<_>>().join(", ")
    };
    let mut routes: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let mut neutral: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let mut ignored = Vec::new();
    for field in field_table().all() {
        let name = field.name.as_str();
        let all: Vec<&str> = field.routes().map(Route::name).collect();
        let is_computed = !all.is_empty();
        if is_computed {
            let all = match all.len() == body_routes().count() - 1 {
                true => "all".to_owned(),
                false => code(&all),
            };
            routes.entry(all).or_default().push(name);
        }
        match field.elsewhere {
            Elsewhere::Ignored => ignored.push(name),
            Elsewhere::Refused("[]") if is_computed => {}
            Elsewhere::Refused(_) => {
                let values = field.neutral().into_iter().chain([Value::Null]);
                let values: Vec<String> = values.map(|value| value.to_string()).collect();
                let values: Vec<&str> = values.iter().map(String::as_str).collect();
                neutral.entry(code(&values)).or_default().push(name);
            }
        }
    }
    let mut text = "| fields | used by |\n|---|---|\n".to_owned();
    for (routes, names) in routes {
        text += &format!("| {} | {routes} |\n", code(&names));
    }
    text += "\n| fields | accepted values on routes that do not use them |\n|---|---|\n";
    text += &format!("| {} | any, which are ignored |\n", code(&ignored));
    for (values, names) in neutral {
        text += &format!("| {} | {values} |\n", code(&names));
    }
    text
}

#[test]
fn the_documentation_has_the_table_of_fields() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/serving.md");
    let text = std::fs::read_to_string(file).unwrap();
    let table = table();
    assert!(
        text.contains(&table),
        "docs/serving.md has another table of fields; expected this:\n\n{table}"
    );
}

#[test]
fn origins_have_no_path() {
    let parsed = |text: &str| text.parse::<Origin>().is_ok();
    for sound in [
        "*",
        "null",
        "https://example.com",
        "http://localhost:3000",
        "HTTPS://Example.com",
    ] {
        assert!(parsed(sound), "{sound}");
    }
    for wrong in [
        "",
        "example.com",
        "https://example.com/",
        "https://example.com/path",
        "https://me@example.com",
        "https://*.example.com",
        "https://a b",
    ] {
        assert!(!parsed(wrong), "{wrong}");
    }
}
