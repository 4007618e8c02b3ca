//! Code shared by the routes for embeddings and scores.

use std::sync::Arc;

use serde_json::Value;

use super::{RequestContext, error::Failure, fields::kind, request::Fields};
use crate::names::excerpt;
use crate::serve::{Answer, CutSide, Service, Submit, Text};

/// Computes the inputs of a request and returns their answers in the same order. Fails if any input fails. `extra` is the number of bytes
/// that the response takes in addition to the answers.
pub(super) async fn computed(
    app: &RequestContext<'_>,
    service: &Service,
    inputs: Vec<Text>,
    submit: Submit,
    extra: u64,
) -> Result<Vec<Answer>, Failure> {
    let memory = service.memory(inputs.len(), submit.wanted);
    app.share().reserve(memory.saturating_add(extra)).await?;
    answers(app, service, inputs, submit).await
}

/// Does the same as [`computed`], but the caller has already reserved the memory.
pub(super) async fn answers(
    app: &RequestContext<'_>,
    service: &Service,
    inputs: Vec<Text>,
    submit: Submit,
) -> Result<Vec<Answer>, Failure> {
    let mut answers = Vec::with_capacity(inputs.len());
    // An early return drops the remaining replies, which cancels them.
    for reply in service.submit_within(inputs, submit, app.share())? {
        answers.push(reply.await?);
    }
    app.has_values();
    Ok(answers)
}

/// Parses `input` of OpenAI's API: a text, a list of texts, token ids, or a list of lists of token ids.
pub(super) fn inputs(param: &'static str, value: &Value) -> Result<Vec<Text>, Failure> {
    let wrong = |what: String| {
        let expected =
            "expected a text, a list of texts, token ids or a list of lists of token ids";
        Err(Failure::invalid(
            param,
            format!("`{param}` is {what}; {expected}"),
        ))
    };
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids = |values: &[Value]| values.iter().map(id).collect::<Option<Vec<u32>>>();
    let list = match value {
        Value::String(text) => return Ok(vec![Text::One(text.clone())]),
        Value::Array(list) => list,
        other => return wrong(kind(other).to_owned()),
    };
    match list.first() {
        None => wrong("an empty list".to_owned()),
        Some(Value::Number(_)) => match ids(list) {
            Some(ids) => Ok(vec![Text::Ids(ids)]),
            None => wrong("a list of numbers that are not all token ids".to_owned()),
        },
        Some(_) => {
            let mut inputs = Vec::with_capacity(list.len());
            for (at, value) in list.iter().enumerate() {
                inputs.push(match value {
                    Value::String(text) => Text::One(text.clone()),
                    Value::Array(values) => match ids(values) {
                        Some(ids) => Text::Ids(ids),
                        None => {
                            return wrong(format!(
                                "a list whose item {at} is not a list of token ids"
                            ));
                        }
                    },
                    other => return wrong(format!("a list whose item {at} is {}", kind(other))),
                });
            }
            Ok(inputs)
        }
    }
}

/// Reads the fields `truncate` and `truncation_direction`.
pub(super) fn cut(fields: &mut Fields, submit: Submit) -> Result<Submit, Failure> {
    let side = match fields.text("truncation_direction")?.as_deref() {
        None => submit.cut_side,
        Some("Left" | "left") => Some(CutSide::Left),
        Some("Right" | "right") => Some(CutSide::Right),
        Some(other) => {
            let other = excerpt(other);
            let problem = format!("`truncation_direction` is `{other}`; expected Left or Right");
            return Err(Failure::invalid("truncation_direction", problem));
        }
    };
    Ok(Submit {
        truncate: fields.flag("truncate")?.unwrap_or(submit.truncate),
        cut_side: side,
        ..submit
    })
}

/// Returns the index of the prompt to put before all inputs. It is the first of `names` that is a prompt of the model's folder. If the
/// folder has none of these prompts, `names` may instead contain a task of a sentence-transformers Router. Returns `None` if the loaded
/// route of the Router is for such a task. `param` is the field that contains the name, for errors.
///
/// # Errors
/// Returns an error if no name is a prompt or such a task, or if there is a prompt to put before an input that has token ids.
pub(super) fn prompted(
    service: &Service,
    param: &'static str,
    names: &[&str],
    inputs: &[Text],
) -> Result<Option<usize>, Failure> {
    let folder = service.encoder().folder();
    let index = match service.prompt(param, names) {
        Ok(index) => index,
        Err(_) if names.iter().any(|name| folder.is_route_for(name)) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    check_texts(param, inputs).map(|()| Some(index))
}

/// Returns an error if an input consists of token ids, because a prompt can only be put before a text.
fn check_texts(param: &str, inputs: &[Text]) -> Result<(), Failure> {
    match inputs.iter().any(|input| matches!(input, Text::Ids(_))) {
        false => Ok(()),
        true => {
            let problem = format!(
                "`{param}` puts a prompt before texts, but the input has token ids, to which no prompt can be added; send texts, or leave `{param}` out"
            );
            Err(Failure::invalid(param, problem))
        }
    }
}

/// Returns the index of the prompt for a purpose, such as `search_query`. `param` is the field that contains the purpose.
pub(super) fn prompted_by_purpose(
    service: &Service,
    param: &'static str,
    name: &str,
    inputs: &[Text],
) -> Result<Option<usize>, Failure> {
    let names = alike(name);
    service.check_adapter(param, &names)?;
    prompted(service, param, &names, inputs)
}

/// Returns whether a purpose is for queries (true) or for documents (false); `None` for any other purpose.
pub(super) fn is_query(name: &str) -> Option<bool> {
    let alike = alike(name);
    match (alike.contains(&"query"), alike.contains(&"document")) {
        (true, _) => Some(true),
        (_, true) => Some(false),
        (false, false) => None,
    }
}

/// Returns `name`, followed by the names of the same purpose in other models. For `search_query`, one of these is `query`.
pub(super) fn alike(name: &str) -> Vec<&str> {
    const ALIKE: [&[&str]; 2] = [
        &[
            "query",
            "search_query",
            "retrieval.query",
            "retrieval_query",
        ],
        &[
            "document",
            "passage",
            "search_document",
            "retrieval.passage",
            "retrieval_document",
            "corpus",
        ],
    ];
    let others = ALIKE.iter().find(|names| names.contains(&name));
    let others = others.into_iter().flat_map(|names| names.iter().copied());
    [name].into_iter().chain(others).collect()
}

/// Names of the fields that select a prompt by its name or give its text.
pub(super) const PROMPTS: [&str; 2] = ["prompt_name", "prompt"];

/// Reads `prompt_name` or `prompt`, and applies it to the inputs. `by_name` and `as_text` are the paths of these two fields, for errors.
pub(super) fn with_prompt(
    fields: &mut Fields,
    service: &Service,
    mut inputs: Vec<Text>,
    submit: Submit,
    [by_name, as_text]: [&'static str; 2],
) -> Result<(Vec<Text>, Submit), Failure> {
    let name = fields.text("prompt_name")?;
    let text = fields.text("prompt")?;
    let (prompt, text) = match (name, text) {
        (Some(_), Some(_)) => {
            let problem =
                format!("`{by_name}` and `{as_text}` both give a prompt; send one of them");
            return Err(Failure::invalid(as_text, problem));
        }
        (Some(name), None) => (prompted(service, by_name, &[&name], &inputs)?, None),
        (None, text) => (None, text),
    };
    if let Some(text) = text {
        check_texts(as_text, &inputs)?;
        let prompt: Arc<str> = text.into();
        for input in &mut inputs {
            if let Text::One(text) = input {
                *input = Text::Prompted(Arc::clone(&prompt), std::mem::take(text));
            }
        }
    }
    Ok((inputs, Submit { prompt, ..submit }))
}

/// Returns the first `dimensions` values of an embedding, scaled to length 1 (Matryoshka representation learning). `param` is the field
/// that contains the number of dimensions, for errors.
pub(super) fn shortened(
    param: &str,
    mut values: Vec<f32>,
    dimensions: Option<usize>,
) -> Result<Vec<f32>, Failure> {
    let Some(n) = dimensions else {
        return Ok(values);
    };
    let width = values.len();
    if n == 0 || n > width {
        let problem = format!("`{param}` is {n}; expected from 1 to {width}, the model's own");
        return Err(Failure::invalid(param, problem));
    }
    if n < width {
        values.truncate(n);
        normalize(&mut values);
    }
    Ok(values)
}

/// Divides a vector by its Euclidean norm, unless the norm is zero.
pub(super) fn normalize(values: &mut [f32]) {
    let square: f64 = values.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
    let length = square.sqrt();
    if length > 0.0 {
        values
            .iter_mut()
            .for_each(|v| *v = (f64::from(*v) / length) as f32);
    }
}
