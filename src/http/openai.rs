//! OpenAI's routes of embeddings and models, and the reranking of Jina and Cohere.

use std::time::UNIX_EPOCH;

use hyper::{Response, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    Answered, App, Body,
    embeddings::{base64, computed, inputs, ranked, shortened},
    error::Failure,
    json,
};
use crate::serve::{Models, Submit};

/// Fields that say nothing of the result, as `user`, are left out.
#[derive(Deserialize)]
struct Asked {
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

pub(super) async fn embeddings(app: &App, body: &[u8], submit: Submit) -> Answered {
    let asked: Asked = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
    let is_base64 = match asked.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let problem = format!("`encoding_format` is `{other}`; expected float or base64");
            return Err(Failure::invalid("encoding_format", problem));
        }
    };
    let (model, service) = app.models.embedding(asked.model.as_deref())?;
    // What is wrong with this is known before anything runs.
    shortened(vec![0.0; service.width()], asked.dimensions)?;
    let submit = Submit {
        truncate: asked.truncate,
        ..submit
    };
    let answers = computed(service, inputs("input", &asked.input)?, submit).await?;
    let tokens = answers.iter().map(|answer| answer.tokens).sum();
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

pub(super) fn models(models: &Models) -> Response<Body> {
    let data: Vec<Value> = models
        .iter()
        .map(|model| {
            let since = model.since.duration_since(UNIX_EPOCH).unwrap_or_default();
            json!({
                "id": model.name, "object": "model", "created": since.as_secs(), "owned_by": "gemmule",
            })
        })
        .collect();
    json(StatusCode::OK, &json!({"object": "list", "data": data}))
}

/// What is ranked: a text, or an object with one.
#[derive(Deserialize)]
#[serde(untagged)]
enum Document {
    Text(String),
    Object { text: String },
}

#[derive(Deserialize)]
struct Rerank {
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

pub(super) async fn rerank(app: &App, body: &[u8], submit: Submit) -> Answered {
    let asked: Rerank = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
    let (model, service) = app.models.scoring(asked.model.as_deref())?;
    let text = |document| match document {
        Document::Text(text) | Document::Object { text } => text,
    };
    let documents: Vec<String> = asked.documents.into_iter().map(text).collect();
    let submit = Submit {
        truncate: asked.truncate,
        ..submit
    };
    let (ranks, tokens) = ranked(service, &asked.query, &documents, submit).await?;
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
