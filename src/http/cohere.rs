//! Embeddings in the format of version 2 of Cohere's API.

use std::collections::BTreeMap;

use hyper::StatusCode;
use serde_json::{Value, json};

use super::{
    HandlerResult, RequestContext,
    embeddings::{alike, computed, prompted_by_purpose, shortened},
    error::Failure,
    json,
    request::Fields,
    schema::{RouteDoc, list, number, object, only, or_null, some_text, text, value_type, whole},
    vectors::{ValueType, Values},
};
use crate::names::excerpt;
use crate::serve::{CutSide, Submit, Text};

/// Values of `input_type` in Cohere's API, which requires the field.
const INPUT_TYPES: [&str; 4] = [
    "search_document",
    "search_query",
    "classification",
    "clustering",
];

/// Reads `truncate`: the side on which inputs that are too long are truncated, or `NONE` to refuse them.
fn cut(fields: &mut Fields, submit: Submit) -> Result<Submit, Failure> {
    let side = match fields.text("truncate")?.as_deref() {
        None | Some("END") => Some(CutSide::Right),
        Some("START") => Some(CutSide::Left),
        Some("NONE") => None,
        Some(other) => {
            let other = excerpt(other);
            let problem = format!("`truncate` is `{other}`; expected NONE, START or END");
            return Err(Failure::invalid("truncate", problem));
        }
    };
    Ok(Submit {
        truncate: side.is_some(),
        cut_side: side,
        ..submit
    })
}

/// Reads `embedding_types`, and removes repeated types. The default is `float`.
fn types(fields: &mut Fields) -> Result<Vec<ValueType>, Failure> {
    if !fields.has("embedding_types") {
        return Ok(vec![ValueType::Float]);
    }
    let names = fields.texts("embedding_types")?;
    let types = names.iter();
    let types = types.map(|name| ValueType::named("embedding_types", name));
    let mut types: Vec<ValueType> = types.collect::<Result<_, _>>()?;
    types.sort_unstable();
    types.dedup();
    match types.is_empty() {
        false => Ok(types),
        true => {
            let problem = "`embedding_types` is an empty list; expected at least one type";
            Err(Failure::invalid("embedding_types", problem.to_owned()))
        }
    }
}

pub(super) async fn embed(
    app: &RequestContext<'_>,
    mut fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let name = fields.required_text("model")?;
    let tasks = fields.peek("input_type").map(alike).unwrap_or_default();
    let model = app.models.embedding(Some(&name));
    let model = app.asks(model.and_then(|model| app.models.routed(model, &tasks)))?;
    let service = model.service()?;
    let types = types(&mut fields)?;
    let dimensions = fields.count("output_dimension", 1..=i64::MAX)?;
    shortened("output_dimension", vec![0.0; service.width()], dimensions)?;
    let submit = cut(&mut fields, submit)?;
    let texts = fields.texts("texts")?;
    if texts.is_empty() {
        let problem = "`texts` is an empty list; expected at least one text".to_owned();
        return Err(Failure::invalid("texts", problem));
    }
    let inputs: Vec<Text> = texts.iter().cloned().map(Text::One).collect();
    let purpose = fields.text("input_type")?;
    // Cohere's API requires `input_type`, so clients send it to any model. For a model without prompts, ignore the values that the API
    // defines.
    let purpose =
        purpose.filter(|purpose| service.has_prompts() || !INPUT_TYPES.contains(&purpose.as_str()));
    let prompt = purpose.map(|name| prompted_by_purpose(service, "input_type", &name, &inputs));
    let submit = Submit {
        prompt: prompt.transpose()?.flatten(),
        ..submit
    };
    let width = dimensions.unwrap_or(service.width());
    let each: u64 = types.iter().map(|of| of.memory(width)).sum();
    let bytes: usize = texts.iter().map(String::len).sum();
    let extra = each.saturating_mul(texts.len() as u64);
    let answers = computed(app, service, inputs, submit, extra + 2 * bytes as u64).await?;
    let tokens: usize = answers.iter().map(|answer| answer.tokens).sum();
    let mut rows: BTreeMap<&str, Vec<Values>> = BTreeMap::new();
    for answer in answers {
        let values = shortened("output_dimension", answer.values, dimensions)?;
        for &of in &types {
            let row = Values::new(values.clone(), of, false);
            rows.entry(of.name()).or_default().push(row);
        }
    }
    let meta: Value = json!({
        "api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens},
    });
    let answer = json!({
        "id": app.new_id("embed"), "response_type": "embeddings_by_type", "embeddings": rows,
        "texts": texts, "meta": meta,
    });
    Ok(json(StatusCode::OK, &answer))
}

pub(super) fn embed_doc() -> RouteDoc {
    RouteDoc::post(
        "Embeds texts (Cohere API version 2)",
        object(
            &["model", "texts"],
            json!({
                "model": text(), "texts": {"type": "array", "minItems": 1, "items": some_text()},
                "input_type": or_null(text()), "output_dimension": or_null(whole(1)),
                "truncate": only(json!([null, "NONE", "START", "END"])),
                "embedding_types":
                    or_null(json!({"type": "array", "minItems": 1, "items": value_type(false)})),
            }),
        ),
        object(
            &["id", "response_type", "embeddings", "texts", "meta"],
            json!({
                "id": text(), "response_type": text(), "texts": list(text()),
                "meta": {"type": "object"},
                "embeddings": {"type": "object", "additionalProperties":
                    list(json!({"anyOf": [list(number()), text()]}))},
            }),
        ),
    )
}
