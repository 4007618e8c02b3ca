//! OpenAI's routes for embeddings and models, and the rerank routes of Jina and Cohere.

use std::{ops::ControlFlow, sync::Arc, time::UNIX_EPOCH};

use hyper::{
    HeaderMap, Response, StatusCode,
    header::{ACCEPT, HeaderValue},
};
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    Body, HandlerResult, RequestContext,
    chunks::chunked,
    embeddings::{
        PROMPTS, alike, computed, cut, inputs, normalize, prompted_by_purpose, shortened,
        with_prompt,
    },
    error::Failure,
    fields::shown,
    json, of_type, on_thread,
    ranking::ranked,
    request::Fields,
    schema::{
        RouteDoc, direction, flag, list, named, number, object, only, or_null, text, value_type,
        whole,
    },
    vectors::{ValueType, Values, Weight, is_base64, weights},
};
use crate::serve::{Answer, Further, Model, Models, OutputKind, Service, Submit, Text};

#[derive(Serialize)]
struct Embeddings<'a> {
    object: &'a str,
    data: Vec<Embedding>,
    model: &'a str,
    usage: Usage,
}

#[derive(Serialize)]
struct Embedding {
    object: &'static str,
    index: usize,
    embedding: Values,
    /// Sparse weights, if the request sets `return_sparse`.
    #[serde(skip_serializing_if = "Option::is_none")]
    sparse_embedding: Option<Vec<Weight>>,
    /// Token vectors, if the request sets `return_multivector`.
    #[serde(skip_serializing_if = "Option::is_none")]
    embeddings: Option<Vec<Values>>,
}

#[derive(Serialize)]
pub(super) struct Usage {
    prompt_tokens: usize,
    total_tokens: usize,
}

impl Usage {
    pub(super) fn of_prompt(tokens: usize) -> Self {
        Self {
            prompt_tokens: tokens,
            total_tokens: tokens,
        }
    }
}

/// Media type of raw vectors: rows of little-endian f32, concatenated.
pub(super) const RAW: &str = "application/octet-stream";

/// Returns whether the first media type in `Accept` is that of raw vectors.
pub(super) fn wants_raw(headers: &HeaderMap) -> bool {
    let accept = headers.get(ACCEPT).and_then(|value| value.to_str().ok());
    let first = accept.and_then(|text| text.split([',', ';']).next());
    first.is_some_and(|kind| kind.trim().eq_ignore_ascii_case(RAW))
}

/// Applies a prompt to the inputs. `input_type` (Cohere, NVIDIA, Voyage), `task` (Jina) or `prompt_name` select a prompt of the model;
/// `prompt` is the text of a prompt.
fn prompted(
    fields: &mut Fields,
    service: &Service,
    inputs: Vec<Text>,
    submit: Submit,
) -> Result<(Vec<Text>, Submit), Failure> {
    let mut found: Option<(&str, Option<usize>)> = None;
    for param in ["input_type", "task"] {
        let Some(name) = fields.text(param)? else {
            continue;
        };
        let index = prompted_by_purpose(service, param, &name, &inputs)?;
        if found.is_some_and(|(_, other)| other != index) {
            let problem = "`input_type` and `task` name different prompts; send one of them";
            return Err(Failure::invalid("task", problem.to_owned()));
        }
        found = Some((param, index));
    }
    let Some((param, index)) = found else {
        return with_prompt(fields, service, inputs, submit, PROMPTS);
    };
    if let Some(other) = PROMPTS.into_iter().find(|name| fields.has(name)) {
        let problem = format!("`{param}` and `{other}` both give a prompt; send one of them");
        return Err(Failure::invalid(other, problem));
    }
    let submit = Submit {
        prompt: index,
        ..submit
    };
    Ok((inputs, submit))
}

/// Reads a field that has different names in two APIs. Returns the name that the request uses and the value. Both names may be given with
/// the same value.
fn either<T: PartialEq>(
    [name, other]: [&'static str; 2],
    mut read: impl FnMut(&'static str) -> Result<Option<T>, Failure>,
) -> Result<Option<(&'static str, T)>, Failure> {
    match (read(name)?, read(other)?) {
        (Some(value), Some(same)) if value != same => {
            let problem = format!("`{name}` and `{other}` differ; send one of them");
            Err(Failure::invalid(other, problem))
        }
        (Some(value), _) => Ok(Some((name, value))),
        (None, value) => Ok(value.map(|value| (other, value))),
    }
}

/// Format of the vectors in a response.
struct Form {
    /// Name of the field that contains the number of dimensions.
    param: &'static str,
    dimensions: Option<usize>,
    normalizes: bool,
    of: ValueType,
    is_base64: bool,
    is_raw: bool,
}

impl Form {
    /// Reads the fields of the APIs of OpenAI, Jina and Voyage. `width` is the number of values of an embedding.
    fn read(fields: &mut Fields, width: usize, is_raw: bool) -> Result<Self, Failure> {
        let is_base64 = is_base64(fields)?;
        let of = either(["embedding_type", "output_dtype"], |name| {
            let of = fields.text(name)?;
            of.map(|of| ValueType::named(name, &of)).transpose()
        })?;
        let names = ["dimensions", "output_dimension"];
        let dimensions = either(names, |name| fields.count(name, 1..=i64::MAX))?;
        let form = Self {
            param: dimensions.map_or("dimensions", |(name, _)| name),
            dimensions: dimensions.map(|(_, n)| n),
            normalizes: fields.flag("normalized")?.unwrap_or(false),
            of: of.map_or(ValueType::Float, |(_, of)| of),
            is_base64,
            is_raw,
        };
        if let (true, Some((name, of))) = (is_raw, of)
            && of != ValueType::Float
        {
            let problem = format!(
                "`{name}` is `{}`, and `Accept` requests raw f32; leave one of them out",
                of.name()
            );
            return Err(Failure::invalid(name, problem));
        }
        // Return an error for an invalid number of dimensions before anything is computed.
        form.floats(vec![0.0; width])?;
        Ok(form)
    }

    fn floats(&self, values: Vec<f32>) -> Result<Vec<f32>, Failure> {
        let mut values = shortened(self.param, values, self.dimensions)?;
        if self.normalizes {
            normalize(&mut values);
        }
        Ok(values)
    }
}

/// Reads which outputs to return in addition to the embedding; `None` if there are none.
fn further(fields: &mut Fields, is_raw: bool) -> Result<Option<Further>, Failure> {
    let further = Further {
        sparse: fields.flag("return_sparse")?.unwrap_or(false),
        token_vectors: fields.flag("return_multivector")?.unwrap_or(false),
    };
    let param = match further {
        Further { sparse: true, .. } => "return_sparse",
        Further {
            token_vectors: true,
            ..
        } => "return_multivector",
        Further { .. } => return Ok(None),
    };
    match is_raw {
        false => Ok(Some(further)),
        true => {
            let problem =
                format!("`{param}` is true, and `Accept` requests raw f32; leave one of them out");
            Err(Failure::invalid(param, problem))
        }
    }
}

pub(super) async fn embeddings(
    app: &RequestContext<'_>,
    mut fields: Fields,
    submit: Submit,
    is_raw: bool,
) -> HandlerResult {
    let model = app.models.embedding(fields.text("model")?.as_deref());
    let mut names = ["input_type", "task"].into_iter();
    let purpose = names.find_map(|name| fields.peek(name));
    let tasks = match (purpose, fields.peek("prompt_name")) {
        (Some(purpose), _) => alike(purpose),
        (None, name) => name.into_iter().collect(),
    };
    let model = app.asks(model.and_then(|model| app.models.routed(model, &tasks)))?;
    let service = model.service()?;
    let form = Form::read(&mut fields, service.width(), is_raw)?;
    let mut submit = cut(&mut fields, submit)?;
    if let Some(truncates) = fields.flag("truncation")? {
        submit.truncate = truncates;
    }
    let further = further(&mut fields, is_raw)?;
    if let Some(further) = further {
        submit.wanted = OutputKind::Several(further);
    }
    let are_chunks = fields.flag("late_chunking")?.unwrap_or(false);
    if are_chunks && further.is_some() {
        let problem = "`late_chunking` computes embeddings alone; leave `return_sparse` and `return_multivector` out";
        return Err(Failure::invalid("late_chunking", problem.to_owned()));
    }
    let inputs = inputs("input", &fields.value("input"))?;
    let (inputs, submit) = prompted(&mut fields, service, inputs, submit)?;
    let answers = match are_chunks {
        true => chunked(app, &model, inputs, submit).await?,
        false => computed(app, service, inputs, submit, 0).await?,
    };
    let tokens = answers.iter().map(|answer| answer.tokens).sum();
    if form.is_raw {
        return raw(answers, &form, tokens);
    }
    let mut data = Vec::with_capacity(answers.len());
    for (index, mut answer) in answers.into_iter().enumerate() {
        let rest = answer
            .values
            .split_off(service.width().min(answer.values.len()));
        let (sparse, tokens) = rest.split_at(answer.entries.len().min(rest.len()));
        let value = |row: &[f32]| Values::new(row.to_vec(), form.of, form.is_base64);
        let rows = tokens.chunks_exact(service.token_width().max(1));
        let asks = |of: fn(&Further) -> bool| further.as_ref().is_some_and(of);
        data.push(Embedding {
            object: "embedding",
            index,
            embedding: Values::new(form.floats(answer.values)?, form.of, form.is_base64),
            sparse_embedding: asks(|f| f.sparse).then(|| weights(&answer.entries, sparse)),
            embeddings: asks(|f| f.token_vectors).then(|| rows.map(value).collect()),
        });
    }
    let embeddings = Embeddings {
        object: "list",
        data,
        model: &model.name,
        usage: Usage::of_prompt(tokens),
    };
    Ok(json(StatusCode::OK, &embeddings))
}

pub(super) fn embeddings_doc() -> RouteDoc {
    let about = concat!(
        "Rows of little-endian f32 if `Accept` requests them; the headers x-rows, x-width and x-tokens have the numbers of rows, ",
        "values per row, and tokens.",
    );
    RouteDoc::post(
        "Embeds texts (OpenAI)",
        object(
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
        ),
        named("Embeddings"),
    )
    .or(
        RAW,
        json!({"type": "string", "format": "binary", "description": about}),
    )
}

/// Returns vectors as raw bytes of little-endian f32. Response headers contain the number of rows, their width and the number of tokens.
fn raw(answers: Vec<Answer>, form: &Form, tokens: usize) -> HandlerResult {
    let n = answers.len();
    let mut bytes = Vec::new();
    for answer in answers {
        let values = form.floats(answer.values)?;
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }
    let width = bytes.len() / 4 / n.max(1);
    let mut response = of_type(StatusCode::OK, RAW, bytes);
    for (name, value) in [("x-rows", n), ("x-width", width), ("x-tokens", tokens)] {
        let value = HeaderValue::from(value as u64);
        response.headers_mut().insert(name, value);
    }
    Ok(response)
}

fn described(model: &Model) -> Value {
    let since = model.since.duration_since(UNIX_EPOCH).unwrap_or_default();
    json!({
        "id": model.name, "object": "model", "created": since.as_secs(), "owned_by": "gemmule",
    })
}

pub(super) fn models(models: &Models) -> Response<Body> {
    let models = models.all();
    let data: Vec<Value> = models.iter().map(|model| described(model)).collect();
    json(StatusCode::OK, &json!({"object": "list", "data": data}))
}

pub(super) fn models_doc() -> RouteDoc {
    RouteDoc::get(
        "The models (OpenAI)",
        object(
            &["object", "data"],
            json!({"object": text(), "data": list(named("Model"))}),
        ),
    )
}

pub(super) fn model(models: &Models, name: &str) -> HandlerResult {
    let model = models.named(Some(name), |_| true)?;
    Ok(json(StatusCode::OK, &described(&model)))
}

pub(super) fn model_doc() -> RouteDoc {
    RouteDoc::get("A model (OpenAI)", named("Model"))
}

/// Reads the documents to rank. Each is a text, or an object with a `text` field.
fn documents(fields: &mut Fields) -> Result<Vec<String>, Failure> {
    let list = match fields.value("documents") {
        Value::Array(list) => list,
        other => {
            let found = match other.is_null() {
                true => "missing".to_owned(),
                false => shown(&other),
            };
            let problem = format!("`documents` is {found}; expected a list of texts");
            return Err(Failure::invalid("documents", problem));
        }
    };
    let text = |(at, document): (usize, Value)| {
        let found = match document {
            Value::String(text) => return Ok(text),
            Value::Object(mut object) => match object.remove("text") {
                Some(Value::String(text)) => return Ok(text),
                Some(other) => format!("an object whose `text` is {}", shown(&other)),
                None => "an object without `text`".to_owned(),
            },
            other => shown(&other),
        };
        let problem = format!(
            "item {at} of `documents` is {found}; expected a text, or an object with a `text`"
        );
        Err(Failure::invalid("documents", problem))
    };
    list.into_iter().enumerate().map(text).collect()
}

/// Ranks documents in the format of Jina's API and of version 1 of Cohere's API.
pub(super) async fn rerank(
    app: &RequestContext<'_>,
    mut fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let model = app.asks(app.models.ranking(fields.text("model")?.as_deref()))?;
    let query = fields.required_text("query")?;
    let documents = documents(&mut fields)?;
    // Clients of vLLM send 0 to get all documents.
    let top_n = fields.count("top_n", 0..=i64::MAX)?.filter(|&n| n > 0);
    let return_documents = fields.flag("return_documents")?.unwrap_or(false);
    let submit = cut(&mut fields, submit)?;
    let (ranks, tokens) = ranked(app, model.service()?, &query, &documents, submit).await?;
    let results: Vec<Value> = ranks
        .into_iter()
        .take(top_n.unwrap_or(usize::MAX))
        .map(|(index, score)| match return_documents {
            true => json!({
                "index": index, "relevance_score": score, "document": {"text": documents[index]},
            }),
            false => json!({"index": index, "relevance_score": score}),
        })
        .collect();
    let answer = json!({
        "id": app.new_id("rerank"), "model": model.name, "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    });
    Ok(json(StatusCode::OK, &answer))
}

pub(super) fn rerank_doc() -> RouteDoc {
    RouteDoc::post(
        "Ranks documents by a query (Jina, Cohere API version 1)",
        object(
            &["query", "documents"],
            json!({
                "model": or_null(text()), "query": text(),
                "documents": {"type": "array", "minItems": 1, "items": {"anyOf": [
                    text(), object(&["text"], json!({"text": text()})),
                ]}},
                "top_n": or_null(whole(0)), "return_documents": flag(), "truncate": flag(),
                "truncation_direction": direction(),
            }),
        ),
        object(
            &["id", "model", "results", "usage"],
            json!({
                "id": text(), "model": text(), "usage": named("Usage"),
                "results": list(object(&["index", "relevance_score"], json!({
                    "index": whole(0), "relevance_score": number(),
                    "document": object(&["text"], json!({"text": text()})),
                }))),
            }),
        ),
    )
}

/// Default of `max_tokens_per_doc` in Cohere's API.
const DEFAULT_TOKENS_PER_DOC: usize = 4096;

/// Ranks documents in the format of version 2 of Cohere's API, which truncates long documents.
pub(super) async fn rerank_v2(
    app: &RequestContext<'_>,
    mut fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let name = fields.required_text("model")?;
    let model = app.asks(app.models.ranking(Some(&name)))?;
    let query = fields.required_text("query")?;
    let mut documents = fields.texts("documents")?;
    let top_n = fields.count("top_n", 1..=i64::MAX)?;
    let max_tokens = fields.count("max_tokens_per_doc", 1..=i64::MAX)?;
    let service = model.service()?;
    let most = max_tokens.unwrap_or(DEFAULT_TOKENS_PER_DOC);
    // Skip the truncation if it has no effect: pairs are truncated to the model's limit later, and a document with at most `most` bytes has
    // at most `most` tokens.
    let limit = service.max_text_tokens().unwrap_or(usize::MAX);
    if most < limit && documents.iter().any(|document| document.len() > most) {
        let model = Arc::clone(&model);
        documents = on_thread(move || {
            let cut = documents.into_iter().map(|document| {
                let mut n = 0;
                let next = model.encoder().for_each_token(&document, false, |token| {
                    n += 1;
                    match n > most {
                        true => ControlFlow::Break(token.span),
                        false => ControlFlow::Continue(()),
                    }
                });
                let end = next.map_err(|e| e.to_string())?.flatten();
                match end.and_then(|(end, _)| document.get(..end)) {
                    Some(cut) => Ok(cut.to_owned()),
                    None => Ok(document),
                }
            });
            cut.collect::<Result<Vec<String>, String>>()
        })
        .await?
        .map_err(|problem| Failure::invalid("documents", problem))?;
    }
    let submit = Submit {
        truncate: true,
        ..submit
    };
    let (ranks, tokens) = ranked(app, service, &query, &documents, submit).await?;
    let results: Vec<Value> = ranks
        .into_iter()
        .take(top_n.unwrap_or(usize::MAX))
        .map(|(index, score)| json!({"index": index, "relevance_score": score}))
        .collect();
    let answer = json!({
        "id": app.new_id("rerank"), "results": results,
        "meta": {
            "api_version": {"version": "2"}, "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": tokens},
        },
    });
    Ok(json(StatusCode::OK, &answer))
}

pub(super) fn rerank_v2_doc() -> RouteDoc {
    RouteDoc::post(
        "Ranks documents by a query (Cohere API version 2)",
        object(
            &["model", "query", "documents"],
            json!({
                "model": text(), "query": text(),
                "documents": {"type": "array", "minItems": 1, "items": text()},
                "top_n": or_null(whole(1)), "max_tokens_per_doc": or_null(whole(1)),
            }),
        ),
        object(
            &["id", "results", "meta"],
            json!({
                "id": text(), "meta": {"type": "object"},
                "results": list(object(&["index", "relevance_score"], json!({
                    "index": whole(0), "relevance_score": number(),
                }))),
            }),
        ),
    )
}
