//! OpenAI's routes of embeddings and models, and the reranking of Jina and Cohere.

use std::{ops::ControlFlow, sync::Arc, time::UNIX_EPOCH};

use hyper::{
    HeaderMap, Response, StatusCode,
    header::{ACCEPT, HeaderValue},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    Answered, Asking, Body,
    embeddings::{base64, computed, inputs, ranked, shortened},
    error::Failure,
    json, of_type, on_thread,
};
use crate::serve::{Answer, Model, Models, Submit};

/// Fields that say nothing of the result, as `user`, are left out.
#[derive(Deserialize)]
pub(super) struct Asked {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    input: Value,
    #[serde(default)]
    encoding_format: Option<String>,
    #[serde(default)]
    dimensions: Option<usize>,
    /// Not OpenAI's: cuts texts that are too long.
    #[serde(default)]
    truncate: bool,
}

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
}

#[derive(Serialize)]
#[serde(untagged)]
enum Values {
    Floats(Vec<f32>),
    Base64(String),
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: usize,
    total_tokens: usize,
}

/// The type of raw vectors: rows of little-endian f32, one after another.
pub(super) const RAW: &str = "application/octet-stream";

/// Whether a client takes raw vectors, and says so first.
pub(super) fn wants_raw(headers: &HeaderMap) -> bool {
    let accept = headers.get(ACCEPT).and_then(|value| value.to_str().ok());
    let first = accept.and_then(|text| text.split([',', ';']).next());
    first.is_some_and(|kind| kind.trim().eq_ignore_ascii_case(RAW))
}

pub(super) async fn embeddings(
    app: &Asking<'_>,
    body: &[u8],
    submit: Submit,
    is_raw: bool,
) -> Answered {
    let asked: Asked = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
    let is_base64 = match asked.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let problem = format!("`encoding_format` is `{other}`; expected float or base64");
            return Err(Failure::invalid("encoding_format", problem));
        }
    };
    let model = app.asks(app.models.embedding(asked.model.as_deref()))?;
    let service = model.service()?;
    // What is wrong with this is known before anything runs.
    shortened(vec![0.0; service.width()], asked.dimensions)?;
    let submit = Submit {
        truncate: asked.truncate,
        ..submit
    };
    let answers = computed(app, service, inputs("input", &asked.input)?, submit).await?;
    let tokens = answers.iter().map(|answer| answer.tokens).sum();
    if is_raw {
        return raw(answers, asked.dimensions, tokens);
    }
    let mut data = Vec::with_capacity(answers.len());
    for (index, answer) in answers.into_iter().enumerate() {
        let values = shortened(answer.values, asked.dimensions)?;
        data.push(Embedding {
            object: "embedding",
            index,
            embedding: match is_base64 {
                true => Values::Base64(base64(&values)),
                false => Values::Floats(values),
            },
        });
    }
    let embeddings = Embeddings {
        object: "list",
        data,
        model: &model.name,
        usage: Usage {
            prompt_tokens: tokens,
            total_tokens: tokens,
        },
    };
    Ok(json(StatusCode::OK, &embeddings))
}

/// Vectors as their bytes; the headers say how many there are, how wide they are, and the tokens that were computed.
fn raw(answers: Vec<Answer>, dimensions: Option<usize>, tokens: usize) -> Answered {
    let n = answers.len();
    let mut bytes = Vec::new();
    for answer in answers {
        let values = shortened(answer.values, dimensions)?;
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

pub(super) fn model(models: &Models, name: &str) -> Answered {
    let model = models.named(Some(name), |_| true)?;
    Ok(json(StatusCode::OK, &described(&model)))
}

/// What is ranked: a text, or an object with one.
#[derive(Deserialize)]
#[serde(untagged)]
enum Document {
    Text(String),
    Object { text: String },
}

#[derive(Deserialize)]
pub(super) struct Rerank {
    #[serde(default)]
    model: Option<String>,
    query: String,
    documents: Vec<Document>,
    #[serde(default)]
    top_n: Option<usize>,
    #[serde(default)]
    return_documents: bool,
    #[serde(default)]
    truncate: bool,
}

pub(super) async fn rerank(app: &Asking<'_>, body: &[u8], submit: Submit) -> Answered {
    let asked: Rerank = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
    let model = app.asks(app.models.scoring(asked.model.as_deref()))?;
    let service = model.service()?;
    let text = |document| match document {
        Document::Text(text) | Document::Object { text } => text,
    };
    let documents: Vec<String> = asked.documents.into_iter().map(text).collect();
    let submit = Submit {
        truncate: asked.truncate,
        ..submit
    };
    let (ranks, tokens) = ranked(app, service, &asked.query, &documents, submit).await?;
    let results: Vec<Value> = ranks
        .into_iter()
        .take(asked.top_n.unwrap_or(usize::MAX))
        .map(|(index, score)| match asked.return_documents {
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

/// Cohere's second shape. Documents are always cut, as there.
#[derive(Deserialize)]
pub(super) struct RerankV2 {
    model: String,
    query: String,
    documents: Vec<String>,
    #[serde(default)]
    top_n: Option<usize>,
    #[serde(default)]
    max_tokens_per_doc: Option<usize>,
}

/// The tokens of a document that are read, where a request does not say so.
const USUAL_TOKENS: usize = 4096;

pub(super) async fn rerank_v2(app: &Asking<'_>, body: &[u8], submit: Submit) -> Answered {
    let asked: RerankV2 = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
    let model = app.asks(app.models.scoring(Some(&asked.model)))?;
    let service = model.service()?;
    for (name, value) in [
        ("top_n", asked.top_n),
        ("max_tokens_per_doc", asked.max_tokens_per_doc),
    ] {
        if value == Some(0) {
            let problem = format!("`{name}` is 0; expected at least 1");
            return Err(Failure::invalid(name, problem));
        }
    }
    let most = asked.max_tokens_per_doc.unwrap_or(USUAL_TOKENS);
    let mut documents = asked.documents;
    // Pairs are cut to the model's own limit anyway; a token has at least a byte.
    let limit = service.longest().map_or(usize::MAX, |n| n as usize);
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
    let (ranks, tokens) = ranked(app, service, &asked.query, &documents, submit).await?;
    let results: Vec<Value> = ranks
        .into_iter()
        .take(asked.top_n.unwrap_or(usize::MAX))
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
