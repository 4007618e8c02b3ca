//! The routes of text-embeddings-inference (TEI).

use hyper::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    Answered, App,
    embeddings::{computed, inputs, kind, normalize, ranked, shortened},
    error::Failure,
    json,
};
use crate::serve::{Kind, Models, Submit, Text};

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
struct Embed {
    #[serde(default)]
    inputs: Value,
    #[serde(default)]
    truncate: bool,
    #[serde(default = "yes")]
    normalize: bool,
    #[serde(default)]
    dimensions: Option<usize>,
}

pub(super) async fn embed(app: &App, body: &[u8], submit: Submit) -> Answered {
    let asked: Embed = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
    let (_, service) = app.models.embedding(None)?;
    shortened(vec![0.0; service.width()], asked.dimensions)?;
    let submit = Submit {
        truncate: asked.truncate,
        ..submit
    };
    let answers = computed(service, inputs("inputs", &asked.inputs)?, submit).await?;
    let mut rows = Vec::with_capacity(answers.len());
    for answer in answers {
        let mut values = shortened(answer.values, asked.dimensions)?;
        if asked.normalize {
            normalize(&mut values);
        }
        rows.push(values);
    }
    Ok(json(StatusCode::OK, &rows))
}

#[derive(Deserialize)]
struct Predict {
    #[serde(default)]
    inputs: Value,
    #[serde(default)]
    truncate: bool,
}

/// A text, `[query, document]`, or a list of one-element or two-element lists.
fn predicted(value: &Value) -> Result<(Vec<Text>, bool), Failure> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let one = |value: &Value| -> Option<Text> {
        match value {
            Value::String(text) => Some(Text::One(text.clone())),
            Value::Array(both) => match both.as_slice() {
                [a] => Some(Text::One(text(a)?)),
                [a, b] => Some(Text::Pair(text(a)?, text(b)?)),
                _ => None,
            },
            _ => None,
        }
    };
    let wrong = || {
        let problem = format!(
            "`inputs` is {}; expected a text, two texts, or a list of lists of one or two",
            kind(value)
        );
        Failure::invalid("inputs", problem)
    };
    match value {
        Value::Array(list) if list.iter().all(Value::is_array) && !list.is_empty() => {
            let inputs = list.iter().map(one).collect::<Option<_>>();
            Ok((inputs.ok_or_else(wrong)?, true))
        }
        _ => Ok((vec![one(value).ok_or_else(wrong)?], false)),
    }
}

pub(super) async fn predict(app: &App, body: &[u8], submit: Submit) -> Answered {
    let asked: Predict = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
    let (_, service) = app.models.scoring(None)?;
    let (inputs, is_list) = predicted(&asked.inputs)?;
    let submit = Submit {
        truncate: asked.truncate,
        ..submit
    };
    let answers = computed(service, inputs, submit).await?;
    let labels = answers.iter().map(|answer| {
        let mut scores: Vec<(usize, f32)> = answer.values.iter().copied().enumerate().collect();
        scores.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let score = |&(label, score): &(usize, f32)| json!({"score": score, "label": format!("LABEL_{label}")});
        Value::Array(scores.iter().map(score).collect())
    });
    let mut labels: Vec<Value> = labels.collect();
    Ok(match (is_list, labels.pop()) {
        (false, Some(only)) => json(StatusCode::OK, &only),
        (_, last) => {
            labels.extend(last);
            json(StatusCode::OK, &labels)
        }
    })
}

#[derive(Deserialize)]
struct Rerank {
    query: String,
    texts: Vec<String>,
    #[serde(default)]
    truncate: bool,
    #[serde(default)]
    return_text: bool,
}

pub(super) async fn rerank(app: &App, body: &[u8], submit: Submit) -> Answered {
    let asked: Rerank = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
    let (_, service) = app.models.scoring(None)?;
    let submit = Submit {
        truncate: asked.truncate,
        ..submit
    };
    let (ranks, _) = ranked(service, &asked.query, &asked.texts, submit).await?;
    let rank = |(index, score)| match asked.return_text {
        true => json!({"index": index, "score": score, "text": asked.texts[index]}),
        false => json!({"index": index, "score": score}),
    };
    let ranks: Vec<Value> = ranks.into_iter().map(rank).collect();
    Ok(json(StatusCode::OK, &ranks))
}

pub(super) fn info(models: &Models) -> Answered {
    let Some(model) = models.iter().next() else {
        return Err(Failure::not_ready("it has no model"));
    };
    let (kind, longest) = match &model.kind {
        Kind::Service(service) if service.is_scoring() => {
            (json!({"reranker": {}}), service.longest())
        }
        Kind::Service(service) => (json!({"embedding": {}}), service.longest()),
        Kind::Writer(_) => (json!({"writer": {}}), None),
    };
    let info = json!({
        "model_id": model.name, "model_dtype": model.dtype.name(), "model_type": kind,
        "max_input_length": longest, "version": env!("CARGO_PKG_VERSION"), "device": model.device,
    });
    Ok(json(StatusCode::OK, &info))
}
