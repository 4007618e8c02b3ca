mod fields;

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::Arc,
    time::Duration,
};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{
    Bodies, Body, Ended, HttpChoice, Public, Route, Server,
    dispatch::{document, field_table},
    embeddings::{inputs, normalize, shortened},
    error::Failure,
    route::{Style, Subject},
    unescaped,
};
use crate::{
    DeviceChoice,
    schedule::{CostTable, Settings, scheduler},
    serve::{Kind, Model, ModelChoice, Models, ReloadError, ServeError, Text},
};

#[test]
fn inputs_have_the_four_shapes_of_openai() {
    let read = |value: Value| inputs("input", &value).ok();
    let text = |text: &str| Text::One(text.to_owned());
    assert_eq!(read(json!("a")), Some(vec![text("a")]));
    assert_eq!(read(json!(["a", "b"])), Some(vec![text("a"), text("b")]));
    assert_eq!(read(json!([1, 2])), Some(vec![Text::Ids(vec![1, 2])]));
    let lists = vec![Text::Ids(vec![1]), Text::Ids(vec![2, 3])];
    assert_eq!(read(json!([[1], [2, 3]])), Some(lists));
    for wrong in [
        json!(null),
        json!(1),
        json!([]),
        json!([1, "a"]),
        json!([[1.5]]),
        json!([-1]),
    ] {
        assert_eq!(read(wrong.clone()), None, "{wrong}");
    }
}

proptest! {
    #[test]
    fn shortened_embeddings_have_unit_length(
        values in prop::collection::vec(-10.0_f32..10.0, 2..40),
        n in 1_usize..40,
    ) {
        let n = n.min(values.len() - 1);
        let short = shortened("dimensions", values.clone(), Some(n)).unwrap();
        prop_assert_eq!(short.len(), n);
        let length: f32 = short.iter().map(|v| v * v).sum();
        prop_assert!(length == 0.0 || (length - 1.0).abs() < 1e-5);
        prop_assert_eq!(shortened("dimensions", values.clone(), Some(values.len())).unwrap(), values.clone());
        prop_assert!(shortened("dimensions", values.clone(), Some(values.len() + 1)).is_err());
        prop_assert!(shortened("dimensions", values, Some(0)).is_err());
    }
}

#[test]
fn a_zero_vector_stays_zero() {
    let mut zeros = [0.0; 3];
    normalize(&mut zeros);
    assert_eq!(zeros, [0.0; 3]);
}

#[test]
fn the_document_has_every_route() {
    let document = document(Public::All);
    for (route, path, method) in Route::ALL {
        let operation = &document["paths"][path][method.as_str().to_lowercase()];
        assert_eq!(operation["operationId"], format!("{route:?}"));
        assert_eq!(
            operation["requestBody"].is_object(),
            method == hyper::Method::POST,
            "{path}"
        );
        let sample = path.replace("{model}", "a%2Fb");
        assert_eq!(
            Route::of(&sample, &method),
            (route, method, if sample == path { "" } else { "a%2Fb" })
        );
    }
    assert_eq!(unescaped("a%2Fb%zz%"), "a/b%zz%");
    // Every reference resolves.
    let text = document.to_string();
    for part in text.split("#/components/schemas/").skip(1) {
        let name = part.split('"').next().unwrap();
        assert!(
            document["components"]["schemas"][name].is_object(),
            "{name}"
        );
    }
}

#[test]
fn errors_recommend_a_field_that_the_route_has() {
    for (route, path, method) in Route::ALL {
        let field = |name| field_table().get(name);
        let has = |name| field(name).is_some_and(|field| field.is_computed(route));
        let has_field = has("truncate") || has("parameters.truncate");
        // The errors of `POST /` are those of the route that it forwards to.
        let expected = has_field && route != Route::Base;
        assert_eq!(route.truncation().is_some(), expected, "{path}");
        let (param, _) = route.input(Subject::Input, 1);
        if method == hyper::Method::POST && !OTHERS.contains(&route) {
            assert!(has(param), "{path} {param}");
        }
    }
}

/// Routes whose handlers compute neither embeddings nor scores.
const OTHERS: [Route; 5] = [
    Route::Base,
    Route::Decode,
    Route::Completions,
    Route::ChatCompletions,
    Route::Translate,
];

#[test]
fn each_error_has_a_status_and_a_text_in_each_style() {
    let seconds = Duration::from_secs;
    let errors: Vec<Failure> = [
        ServeError::invalid("input", "`input` is missing"),
        ServeError::TooLong {
            index: 2,
            limit: 512,
        },
        ServeError::TooLarge { index: 0 },
        ServeError::Overloaded {
            retry_after: Duration::from_millis(1300),
        },
        ServeError::Hopeless {
            retry_after: Duration::from_millis(4200),
        },
        ServeError::ShortDeadline {
            takes: Duration::from_millis(12_340),
            within: Duration::from_secs(2),
        },
        ServeError::Deadline,
        ServeError::NotReady {
            why: "it is shutting down",
        },
        ServeError::NoModel {
            name: "a".to_owned(),
            known: vec!["b".to_owned(), "c".to_owned()],
        },
        ServeError::UnsupportedTask {
            model: "b".to_owned(),
            does: "embeds texts",
            asked: "scores",
        },
        ServeError::Internal("a thread panicked".to_owned()),
    ]
    .into_iter()
    .map(Failure::from)
    .chain([
        Failure::key("there is no API key; send `Authorization: Bearer KEY`"),
        Failure::key("the API key is not known here"),
        Failure::large_body(8 << 20),
        Failure::slow_body(seconds(30)),
        Failure::broken_body("connection closed"),
        Failure::method(&hyper::Method::GET, &[hyper::Method::POST]),
        Failure::method(
            &hyper::Method::OPTIONS,
            &[hyper::Method::GET, hyper::Method::POST],
        ),
        Failure::large_inflated(8 << 20),
        Failure::broken_gzip("unexpected end of file"),
        Failure::encoding("br"),
        Failure::origin("https://example.com"),
        Failure::no_command("/admin/reload"),
        Failure::host("the request has more than one Host header; send one"),
        Failure::forbidden(
            "commands from web pages are refused; send the request without an Origin header",
        ),
        Failure::reload(&ReloadError::Fixed),
        Failure::reload(&ReloadError::Busy),
        Failure::reload(&ReloadError::Failed {
            problem: "`serve.ron`: the configuration has no model".to_owned(),
        }),
    ])
    .collect();
    let mut shown = String::new();
    for error in errors {
        for style in [Style::OpenAi, Style::Tei, Style::Cohere] {
            let response = error.clone().response(style);
            let headers = response.headers().iter();
            let headers = headers.filter(|(name, _)| *name != "content-type");
            let headers: Vec<String> = headers
                .map(|(name, value)| format!(" {name}: {}", value.to_str().unwrap()))
                .collect();
            let status = response.status().as_u16();
            let Body::Whole(Some(bytes)) = response.into_body() else {
                panic!("an error has a body")
            };
            let body = String::from_utf8(bytes.to_vec()).unwrap();
            shown += &format!("{status}{}\n{body}\n", headers.concat());
        }
        shown += "\n";
    }
    insta::assert_snapshot!(shown);
}

fn small(name: &str) -> Model {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let costs = CostTable::parse(include_str!("../../examples/costs.ron")).unwrap();
    Model::open(ModelChoice {
        folder: root.join("tests/checkpoints").join(name),
        // `name` may be a path to a folder elsewhere. The model is named after the last part of the path.
        name: name.rsplit('/').next().unwrap().to_owned(),
        devices: vec![DeviceChoice::Cpu],
        dtype: None,
        kv_dtype: Default::default(),
        max_context: None,
        invariant: false,
        scheduler: scheduler("packed", &Settings::default()).unwrap(),
        costs: Some(costs),
        batch_bytes: 1 << 30,
        cache_bytes: None,
        queue: Duration::from_secs(60),
        tokenizers: 1,
        all_tokens: true,
        sparse: false,
        token_vectors: false,
        fill_mask: name.ends_with("-mlm"),
        default_prompt: Default::default(),
        task: None,
        route_of: None,
        share: None,
        previous: None,
        trace: None,
        cache: None,
    })
    .unwrap()
}

#[test]
fn a_server_whose_device_is_lost_is_not_ready_and_ends() {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let choice = HttpChoice {
        drain_delay: Duration::from_secs(1),
        ..HttpChoice::default()
    };
    let models = Models::loading(|_| Ok(Vec::new()));
    let server = Server::start(socket, models, choice).unwrap();
    let to = server.address();
    let ask = move |path: &str, body: &str| {
        let mut stream = TcpStream::connect(to).ok()?;
        let method = if body.is_empty() { "GET" } else { "POST" };
        let length = body.len();
        let text = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        stream.write_all(text.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    };
    let probes = std::thread::spawn(move || {
        let mut answers = Vec::new();
        while let Some(answer) = ask("/ready", "") {
            let is_last = answer.contains("its device was lost");
            answers.push(answer);
            if is_last {
                answers.extend(ask("/v1/embeddings", "{\"input\": \"x\"}"));
                break;
            }
        }
        answers
    });
    let ended = server.run(|models| {
        let model = small("st-mean");
        if let Kind::Service(service) = &model.kind {
            service.lose_device();
        }
        models.begin(vec![model]);
        Ok::<(), ()>(())
    });
    assert_eq!(ended.unwrap(), Ended::DeviceLost);
    let answers = probes.join().unwrap();
    let told = "the server is not ready: its device was lost, and it is shutting down; another server may answer";
    assert!(answers.len() > 1);
    assert!(
        answers.iter().all(|a| a.starts_with("HTTP/1.1 503")),
        "{answers:?}"
    );
    for answer in &answers[answers.len() - 2..] {
        assert!(answer.contains(told), "{answer}");
    }
}

/// Values of fields, valid and invalid.
fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        prop_oneof![
            Just(0_i64),
            Just(1),
            Just(2),
            Just(-1),
            Just(40_000),
            any::<i64>()
        ]
        .prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop_oneof![
            Just(""),
            Just("x"),
            Just("st-mean"),
            Just("float"),
            Just("base64"),
            Just("a tower")
        ]
        .prop_map(Value::from),
        "\\PC{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        let key = prop_oneof![
            Just("text"),
            Just("role"),
            Just("content"),
            Just("source_sentence"),
            Just("sentences"),
            Just("type"),
            Just("include_usage"),
            Just("truncation_direction"),
            Just("5")
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(key.prop_map(str::to_owned), inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

#[test]
fn no_body_breaks_a_route() {
    let bodies = Bodies::new(Models::new(
        ["st-mean", "ce-one", "writer"].map(small).into(),
    ))
    .unwrap();
    let bodies = Arc::new(bodies);
    let paths: Vec<&str> = Bodies::paths().collect();
    let body = prop::sample::select(paths).prop_flat_map(|path| {
        let (route, ..) = Route::of(path, &hyper::Method::POST);
        let fields = field_table()
            .all()
            .map(|field| (field.is_computed(route), &field.name));
        let fields = fields.filter(|(is_computed, name)| *is_computed && !name.contains('.'));
        let fields: Vec<&str> = fields.map(|(_, name)| name.as_str()).collect();
        let fields = prop::sample::select(fields);
        let fields = prop::collection::btree_map(fields, values(), 0..5);
        (Just(path), fields)
    });
    let damage = prop::option::of((any::<prop::sample::Index>(), any::<u8>()));
    let config = ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |((path, fields) in body, damage in damage)| {
        let mut body = serde_json::to_vec(&fields).unwrap();
        if let Some((at, byte)) = damage {
            let at = at.index(body.len());
            body[at] = byte;
        }
        // A valid body gets a response, and an invalid body gets an error. The OpenAPI document lists the statuses of both responses.
        bodies.post(path, &body);
    });
    for (path, body) in [
        ("/v1/embeddings", json!({"input": "x"})),
        (
            "/v1/completions",
            json!({"prompt": "One", "max_tokens": 2, "stream": true}),
        ),
        ("/predict", json!({"inputs": "x"})),
    ] {
        assert_eq!(bodies.post(path, body.to_string().as_bytes()).0, 200);
    }
}
