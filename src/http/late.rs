//! The route for token vectors (late interaction), in the format of Jina's API.

use hyper::StatusCode;
use serde::Serialize;
use serde_json::json;

use super::{
    HandlerResult, RequestContext,
    embeddings::{computed, cut, inputs, is_query, shortened},
    error::Failure,
    json,
    openai::Usage,
    request::Fields,
    schema::{
        RouteDoc, direction, flag, list, named, number, object, only, or_null, text, value_type,
        whole,
    },
    vectors::{ValueType, Values, is_base64},
};
use crate::names::excerpt;
use crate::serve::{OutputKind, Submit, TextRole};

#[derive(Serialize)]
struct MultiVectors<'a> {
    model: &'a str,
    object: &'static str,
    usage: Usage,
    data: Vec<MultiVector>,
}

/// The token vectors of a text.
#[derive(Serialize)]
struct MultiVector {
    object: &'static str,
    index: usize,
    embeddings: Vec<Values>,
}

/// Reads `input_type`. Without it, texts are documents, as in Jina's API.
fn role(fields: &mut Fields) -> Result<TextRole, Failure> {
    let Some(name) = fields.text("input_type")? else {
        return Ok(TextRole::Document);
    };
    match is_query(&name) {
        Some(true) => Ok(TextRole::Query),
        Some(false) => Ok(TextRole::Document),
        None => {
            let name = excerpt(&name);
            let problem = format!("`input_type` is `{name}`; expected query or document");
            Err(Failure::invalid("input_type", problem))
        }
    }
}

/// Reads the type of the values, and whether they are encoded in base64.
fn form(fields: &mut Fields) -> Result<(ValueType, bool), Failure> {
    let is_base64 = is_base64(fields)?;
    let of = fields.text("embedding_type")?;
    let of = of.map(|of| ValueType::named("embedding_type", &of));
    Ok((of.transpose()?.unwrap_or(ValueType::Float), is_base64))
}

/// Returns the token vectors of queries or documents.
pub(super) async fn multi_vector(
    app: &RequestContext<'_>,
    mut fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let model = app.asks(app.models.late(fields.text("model")?.as_deref()))?;
    let service = model.service()?;
    let width = service.token_width();
    let (of, is_base64) = form(&mut fields)?;
    let dimensions = fields.count("dimensions", 1..=i64::MAX)?;
    shortened("dimensions", vec![0.0; width], dimensions)?;
    let submit = Submit {
        wanted: OutputKind::vectors(role(&mut fields)?),
        ..cut(&mut fields, submit)?
    };
    let inputs = inputs("input", &fields.value("input"))?;
    let answers = computed(app, service, inputs, submit, 0).await?;
    let tokens = answers.iter().map(|answer| answer.tokens).sum();
    let mut data = Vec::with_capacity(answers.len());
    for (index, answer) in answers.into_iter().enumerate() {
        let n_rows = answer.values.len() / width.max(1);
        let row = of.memory(dimensions.unwrap_or(width));
        app.share().add(row.saturating_mul(n_rows as u64))?;
        let rows = answer.values.chunks_exact(width.max(1)).map(|row| {
            let row = shortened("dimensions", row.to_vec(), dimensions)?;
            Ok(Values::new(row, of, is_base64))
        });
        data.push(MultiVector {
            object: "embeddings",
            index,
            embeddings: rows.collect::<Result<_, Failure>>()?,
        });
    }
    let answer = MultiVectors {
        model: &model.name,
        object: "list",
        usage: Usage::of_prompt(tokens),
        data,
    };
    Ok(json(StatusCode::OK, &answer))
}

pub(super) fn multi_vector_doc() -> RouteDoc {
    RouteDoc::post(
        "Vectors of the tokens of queries or documents (Jina)",
        object(
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
        ),
        object(
            &["model", "object", "usage", "data"],
            json!({
                "model": text(), "object": text(), "usage": named("Usage"),
                "data": list(object(&["object", "index", "embeddings"], json!({
                    "object": text(), "index": whole(0),
                    "embeddings": list(json!({"anyOf": [list(number()), text()]})),
                }))),
            }),
        ),
    )
}
