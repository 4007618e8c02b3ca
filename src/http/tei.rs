//! The routes of text-embeddings-inference (TEI).

use std::{ops::ControlFlow, sync::Arc};

use hyper::{Response, StatusCode, header::HeaderValue};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    Answered, Asking, Body,
    embeddings::{computed, inputs, kind, normalize, not_computed, ranked, shortened},
    error::Failure,
    json, of_type, on_thread,
};
use crate::serve::{Answer, Kind, Models, Score, Submit, Text, TextToken, Wanted};

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
pub(super) struct Embed {
    #[serde(default)]
    inputs: Value,
    #[serde(default)]
    truncate: Option<bool>,
    #[serde(default = "yes")]
    normalize: bool,
    #[serde(default)]
    dimensions: Option<usize>,
    #[serde(default)]
    prompt_name: Option<String>,
    #[serde(default)]
    truncation_direction: Option<String>,
}

/// Prompts and the side that is cut are the folder's affair.
fn usual_text(prompt: Option<&str>, direction: Option<&str>) -> Result<(), Failure> {
    let asked = [
        ("prompt_name", prompt),
        ("truncation_direction", direction.filter(|&d| d != "Right")),
    ];
    match asked.into_iter().find(|(_, value)| value.is_some()) {
        None => Ok(()),
        Some((name, _)) => Err(not_computed(name)),
    }
}

/// Scores of one text as TEI gives them, whatever the folder lets logits go through: a sigmoid of one label's, and what several have
/// sums to one.
fn scored(logits: &mut [f32], are_raw: bool) {
    match logits {
        _ if are_raw => {}
        [one] => *one = Score::Sigmoid.of(*one),
        several => {
            let top = several.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            several.iter_mut().for_each(|x| *x = (*x - top).exp());
            let sum: f32 = several.iter().sum();
            several.iter_mut().for_each(|x| *x /= sum);
        }
    }
}

pub(super) async fn embed(app: &Asking<'_>, body: &[u8], submit: Submit) -> Answered {
    let asked: Embed = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
    usual_text(
        asked.prompt_name.as_deref(),
        asked.truncation_direction.as_deref(),
    )?;
    let model = app.asks(app.models.embedding(None))?;
    let service = model.service()?;
    shortened(vec![0.0; service.width()], asked.dimensions)?;
    let submit = Submit {
        truncate: asked.truncate.unwrap_or_default(),
        ..submit
    };
    let answers = computed(app, service, inputs("inputs", &asked.inputs)?, submit).await?;
    let tokens = answers.iter().map(|answer| answer.tokens).sum();
    let mut rows = Vec::with_capacity(answers.len());
    for answer in answers {
        let mut values = shortened(answer.values, asked.dimensions)?;
        if asked.normalize {
            normalize(&mut values);
        }
        rows.push(values);
    }
    Ok(with_tokens(json(StatusCode::OK, &rows), tokens))
}

/// Says how many tokens were computed, where a body has no place for it.
fn with_tokens(mut response: Response<Body>, tokens: usize) -> Response<Body> {
    let value = HeaderValue::from(tokens as u64);
    response.headers_mut().insert("x-compute-tokens", value);
    response
}

#[derive(Deserialize)]
pub(super) struct EmbedAll {
    #[serde(default)]
    inputs: Value,
    #[serde(default)]
    truncate: Option<bool>,
    #[serde(default)]
    prompt_name: Option<String>,
    #[serde(default)]
    truncation_direction: Option<String>,
}

/// The vectors of all tokens, special ones included, before pooling.
pub(super) async fn embed_all(app: &Asking<'_>, body: &[u8], submit: Submit) -> Answered {
    let asked: EmbedAll = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
    usual_text(
        asked.prompt_name.as_deref(),
        asked.truncation_direction.as_deref(),
    )?;
    let model = app.asks(app.models.embedding(None))?;
    let submit = Submit {
        truncate: asked.truncate.unwrap_or_default(),
        wanted: Wanted::AllTokens,
        ..submit
    };
    let inputs = inputs("inputs", &asked.inputs)?;
    let answers = computed(app, model.service()?, inputs, submit).await?;
    let tokens = answers.iter().map(|answer| answer.tokens).sum();
    let rows = answers.iter().map(|answer| {
        let width = answer.values.len() / answer.tokens.max(1);
        answer.values.chunks_exact(width.max(1)).collect()
    });
    let rows: Vec<Vec<&[f32]>> = rows.collect();
    Ok(with_tokens(json(StatusCode::OK, &rows), tokens))
}

#[derive(Serialize)]
struct Weight {
    index: u32,
    value: f32,
}

/// The entries of the vocabulary that a text weighs, with their weights.
pub(super) async fn embed_sparse(app: &Asking<'_>, body: &[u8], submit: Submit) -> Answered {
    let asked: EmbedAll = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
    usual_text(
        asked.prompt_name.as_deref(),
        asked.truncation_direction.as_deref(),
    )?;
    let model = app.asks(app.models.sparse(None))?;
    let submit = Submit {
        truncate: asked.truncate.unwrap_or_default(),
        wanted: Wanted::Sparse,
        ..submit
    };
    let inputs = inputs("inputs", &asked.inputs)?;
    let answers = computed(app, model.service()?, inputs, submit).await?;
    let tokens = answers.iter().map(|answer| answer.tokens).sum();
    let row = |answer: &Answer| -> Vec<Weight> {
        let weights = answer.entries.iter().zip(&answer.values);
        let weights = weights.map(|(&index, &value)| Weight { index, value });
        weights.collect()
    };
    let rows: Vec<Vec<Weight>> = answers.iter().map(row).collect();
    Ok(with_tokens(json(StatusCode::OK, &rows), tokens))
}

#[derive(Deserialize)]
pub(super) struct Similarity {
    inputs: Compared,
    #[serde(default)]
    parameters: Option<Parameters>,
}

#[derive(Deserialize)]
pub(super) struct Compared {
    source_sentence: String,
    sentences: Vec<String>,
}

#[derive(Default, Deserialize)]
pub(super) struct Parameters {
    #[serde(default)]
    truncate: Option<bool>,
    #[serde(default)]
    prompt_name: Option<String>,
    #[serde(default)]
    truncation_direction: Option<String>,
}

/// The cosine of the angle between a text and each other one.
pub(super) async fn similarity(app: &Asking<'_>, body: &[u8], submit: Submit) -> Answered {
    let asked: Similarity = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
    let parameters = asked.parameters.unwrap_or_default();
    usual_text(
        parameters.prompt_name.as_deref(),
        parameters.truncation_direction.as_deref(),
    )?;
    let Compared {
        source_sentence,
        sentences,
    } = asked.inputs;
    if sentences.is_empty() {
        let problem = "`sentences` is an empty list; expected at least one text".to_owned();
        return Err(Failure::invalid("sentences", problem));
    }
    let model = app.asks(app.models.embedding(None))?;
    let submit = Submit {
        truncate: parameters.truncate.unwrap_or_default(),
        ..submit
    };
    let texts = [source_sentence].into_iter().chain(sentences);
    let inputs = texts.map(Text::One).collect();
    let mut answers = computed(app, model.service()?, inputs, submit).await?;
    let tokens = answers.iter().map(|answer| answer.tokens).sum();
    answers.iter_mut().for_each(|a| normalize(&mut a.values));
    let Some((source, others)) = answers.split_first() else {
        return Err(Failure::not_ready("it has no answer"));
    };
    let cosine = |other: &Answer| -> f32 {
        let both = source.values.iter().zip(&other.values);
        both.map(|(&a, &b)| f64::from(a) * f64::from(b))
            .sum::<f64>() as f32
    };
    let cosines: Vec<f32> = others.iter().map(cosine).collect();
    Ok(with_tokens(json(StatusCode::OK, &cosines), tokens))
}

#[derive(Deserialize)]
pub(super) struct Tokenize {
    #[serde(default)]
    inputs: Value,
    #[serde(default = "yes")]
    add_special_tokens: bool,
    #[serde(default)]
    prompt_name: Option<String>,
}

/// The tokens of texts, whatever the model does with them.
pub(super) async fn tokenize(app: &Asking<'_>, body: &[u8]) -> Answered {
    let asked: Tokenize = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
    usual_text(asked.prompt_name.as_deref(), None)?;
    let model = app.asks(app.models.named(None, |_| true))?;
    let texts: Vec<String> = inputs("inputs", &asked.inputs)?
        .into_iter()
        .map(|input| match input {
            Text::One(text) => Ok(text),
            Text::Pair(..) | Text::Ids(_) => {
                let problem = "`inputs` has token ids; expected a text or a list of texts";
                Err(Failure::invalid("inputs", problem.to_owned()))
            }
        })
        .collect::<Result<_, _>>()?;
    let bytes: usize = texts.iter().map(String::len).sum();
    // A word of some letters has an object of some sixty; more is charged as it comes.
    let reserved = TOKEN_LETTER * bytes as u64;
    app.share().reserve(reserved).await?;
    let share = Arc::clone(app.share());
    let rows = on_thread(move || {
        let mut body = b"[".to_vec();
        // A vector that grows is copied.
        let mut charged = reserved as usize / 3 * 2;
        for (at, text) in texts.iter().enumerate() {
            body.extend_from_slice(if at > 0 { b",[" } else { b"[" });
            let mut is_first = true;
            let stopped = model
                .encoder()
                .for_each_token(text, asked.add_special_tokens, |token| {
                    if !std::mem::take(&mut is_first) {
                        body.push(b',');
                    }
                    // Memory takes all, and the token has no maps.
                    let _ = serde_json::to_writer(&mut body, &Token::of(token));
                    match body.len() > charged + ANSWER_STEP {
                        true => {
                            let grown = (body.len() - charged) as u64;
                            charged = body.len();
                            match share.add(grown + grown / 2) {
                                Ok(()) => ControlFlow::Continue(()),
                                Err(error) => ControlFlow::Break(error),
                            }
                        }
                        false => ControlFlow::Continue(()),
                    }
                });
            match stopped {
                Ok(None) => {}
                Ok(Some(error)) => return Err(Failure::from(error)),
                Err(error) => return Err(Failure::invalid("inputs", error.to_string())),
            }
            body.push(b']');
        }
        body.push(b']');
        Ok(body)
    });
    let rows = rows.await??;
    Ok(of_type(StatusCode::OK, "application/json", rows))
}

/// Bytes that tokens take for each byte of their texts, for which memory is reserved.
const TOKEN_LETTER: u64 = 20;
/// Bytes of an answer for which a request is charged at once as it grows.
const ANSWER_STEP: usize = 64 << 10;
/// Bytes that decoding takes for each token, beside its text.
const DECODED_TOKEN: u64 = 100;

/// A token as TEI says it.
#[derive(Serialize)]
struct Token {
    id: u32,
    text: String,
    special: bool,
    start: Option<usize>,
    stop: Option<usize>,
}

impl Token {
    fn of(token: TextToken) -> Self {
        let (start, stop) = token.span.unzip();
        Self {
            id: token.id,
            text: token.text,
            special: token.is_special,
            start,
            stop,
        }
    }
}

#[derive(Deserialize)]
pub(super) struct Decode {
    #[serde(default)]
    ids: Value,
    #[serde(default = "yes")]
    skip_special_tokens: bool,
}

/// The texts of token ids.
pub(super) async fn decode(app: &Asking<'_>, body: &[u8]) -> Answered {
    let asked: Decode = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
    let model = app.asks(app.models.named(None, |_| true))?;
    let all: Vec<Vec<u32>> = inputs("ids", &asked.ids)?
        .into_iter()
        .map(|input| match input {
            Text::Ids(ids) => Ok(ids),
            Text::Pair(..) | Text::One(_) => {
                let problem = "`ids` has texts; expected token ids or a list of lists of them";
                Err(Failure::invalid("ids", problem.to_owned()))
            }
        })
        .collect::<Result<_, _>>()?;
    let (bytes, all) = {
        let model = Arc::clone(&model);
        on_thread(move || {
            let each = all.iter();
            let bytes = each.map(|ids| {
                // The text, the answer, and what is decoded one token after another.
                3 * model.encoder().max_text_bytes(ids) + DECODED_TOKEN * ids.len() as u64
            });
            (bytes.sum(), all)
        })
        .await?
    };
    app.share().reserve(bytes).await?;
    let texts = on_thread(move || {
        let mut texts = Vec::with_capacity(all.len());
        for ids in &all {
            let text = model.decode(ids, asked.skip_special_tokens);
            texts.push(text.map_err(|problem| Failure::invalid("ids", problem))?);
        }
        Ok::<Vec<String>, Failure>(texts)
    });
    let texts = texts.await??;
    Ok(json(StatusCode::OK, &texts))
}

#[derive(Deserialize)]
pub(super) struct Predict {
    #[serde(default)]
    inputs: Value,
    #[serde(default)]
    truncate: Option<bool>,
    #[serde(default)]
    raw_scores: bool,
    #[serde(default)]
    truncation_direction: Option<String>,
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

pub(super) async fn predict(app: &Asking<'_>, body: &[u8], submit: Submit) -> Answered {
    let asked: Predict = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
    usual_text(None, asked.truncation_direction.as_deref())?;
    let model = app.asks(app.models.scoring(None))?;
    let service = model.service()?;
    let (inputs, is_list) = predicted(&asked.inputs)?;
    let submit = Submit {
        truncate: asked.truncate.unwrap_or_default(),
        wanted: Wanted::Logits,
        ..submit
    };
    let mut answers = computed(app, service, inputs, submit).await?;
    let tokens = answers.iter().map(|answer| answer.tokens).sum();
    let names = service.labels();
    let labels = answers.iter_mut().map(|answer| {
        scored(&mut answer.values, asked.raw_scores);
        let mut scores: Vec<(usize, f32)> = answer.values.iter().copied().enumerate().collect();
        scores.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let score =
            |&(label, score): &(usize, f32)| json!({"score": score, "label": names.get(label)});
        Value::Array(scores.iter().map(score).collect())
    });
    let mut labels: Vec<Value> = labels.collect();
    let response = match (is_list, labels.pop()) {
        (false, Some(only)) => json(StatusCode::OK, &only),
        (_, last) => {
            labels.extend(last);
            json(StatusCode::OK, &labels)
        }
    };
    Ok(with_tokens(response, tokens))
}

#[derive(Deserialize)]
pub(super) struct Rerank {
    query: String,
    texts: Vec<String>,
    #[serde(default)]
    truncate: Option<bool>,
    #[serde(default)]
    return_text: bool,
    #[serde(default)]
    raw_scores: bool,
    #[serde(default)]
    truncation_direction: Option<String>,
}

pub(super) async fn rerank(app: &Asking<'_>, body: &[u8], submit: Submit) -> Answered {
    let asked: Rerank = serde_json::from_slice(body).map_err(|e| Failure::json(&e))?;
    usual_text(None, asked.truncation_direction.as_deref())?;
    let model = app.asks(app.models.scoring(None))?;
    let service = model.service()?;
    let submit = Submit {
        truncate: asked.truncate.unwrap_or_default(),
        wanted: Wanted::Logits,
        ..submit
    };
    let (mut ranks, tokens) = ranked(app, service, &asked.query, &asked.texts, submit).await?;
    for (_, score) in &mut ranks {
        scored(std::slice::from_mut(score), asked.raw_scores);
    }
    let rank = |(index, score)| match asked.return_text {
        true => json!({"index": index, "score": score, "text": asked.texts[index]}),
        false => json!({"index": index, "score": score}),
    };
    let ranks: Vec<Value> = ranks.into_iter().map(rank).collect();
    Ok(with_tokens(json(StatusCode::OK, &ranks), tokens))
}

pub(super) fn info(models: &Models) -> Answered {
    let all = models.all();
    let Some(model) = all.first() else {
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
