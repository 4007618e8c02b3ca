//! Routes of text-embeddings-inference (TEI).

use std::{ops::ControlFlow, sync::Arc};

use hyper::{Response, StatusCode, header::HeaderValue};
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    Body, HandlerResult, RequestContext, Route,
    embeddings::{PROMPTS, computed, cut, inputs, normalize, shortened, with_prompt},
    error::Failure,
    fields::kind,
    json, of_type, on_thread,
    ranking::ranked,
    request::Fields,
    vectors::{Weight, weights},
};
use crate::serve::{
    Answer, ClassScore, Kind, Model, Models, OutputKind, ServeError, Submit, Text, TextRole,
    TextToken,
};

/// Handles `POST /`, the base address of a TEI server. Forwards the request to the TEI route that fits the model and the body.
pub(super) async fn base(
    app: &RequestContext<'_>,
    fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let fits = |model: &Model| match &model.kind {
        Kind::Service(service) => {
            service.is_scoring() || service.is_embedding() || service.has_sparse()
        }
        Kind::Generation(_) => false,
    };
    let model = app.models.named(fields.peek("model"), fits)?;
    let service = model.service()?;
    let route = if fields.has("query") || fields.has("texts") {
        Route::TeiRerank
    } else if service.is_scoring() {
        Route::Predict
    } else if fields.is_object("inputs") {
        Route::Similarity
    } else if service.is_embedding() {
        Route::Embed
    } else if service.has_sparse() {
        Route::EmbedSparse
    } else {
        return Err(model.unsupported("embeddings or scores").into());
    };
    Box::pin(app.of_body(route, fields.narrowed(route)?, submit, false)).await
}

pub(super) async fn embed(
    app: &RequestContext<'_>,
    mut fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let model = app.models.embedding(fields.text("model")?.as_deref());
    let model = app.asks(routed(app, &fields, model))?;
    let normalizes = fields.flag("normalize")?.unwrap_or(true);
    let dimensions = fields.count("dimensions", 1..=i64::MAX)?;
    shortened(
        "dimensions",
        vec![0.0; model.service()?.width()],
        dimensions,
    )?;
    let (answers, tokens) = embedded(app, &model, fields, submit).await?;
    let mut rows = Vec::with_capacity(answers.len());
    for answer in answers {
        let mut values = shortened("dimensions", answer.values, dimensions)?;
        if normalizes {
            normalize(&mut values);
        }
        rows.push(values);
    }
    Ok(with_tokens(json(StatusCode::OK, &rows), tokens))
}

/// If the model is a sentence-transformers Router with a route for the task `prompt_name`, returns the model of this route. Otherwise,
/// returns the model itself.
fn routed(
    app: &RequestContext<'_>,
    fields: &Fields,
    model: Result<Arc<Model>, ServeError>,
) -> Result<Arc<Model>, ServeError> {
    let name = fields.peek("prompt_name");
    app.models.routed(model?, name.as_slice())
}

/// Runs the model on the inputs of a request, with the truncation and the prompt that its fields select. Returns the answers and the total
/// number of tokens of the inputs.
async fn embedded(
    app: &RequestContext<'_>,
    model: &Model,
    mut fields: Fields,
    submit: Submit,
) -> Result<(Vec<Answer>, usize), Failure> {
    let submit = cut(&mut fields, submit)?;
    let inputs = inputs("inputs", &fields.value("inputs"))?;
    let service = model.service()?;
    let (inputs, submit) = with_prompt(&mut fields, service, inputs, submit, PROMPTS)?;
    let answers = computed(app, service, inputs, submit, 0).await?;
    let tokens = answers.iter().map(|answer| answer.tokens).sum();
    Ok((answers, tokens))
}

/// Adds a header with the number of tokens, for responses whose bodies have no field for it.
pub(super) fn with_tokens(mut response: Response<Body>, tokens: usize) -> Response<Body> {
    let value = HeaderValue::from(tokens as u64);
    response.headers_mut().insert("x-compute-tokens", value);
    response
}

/// Returns the vectors of all tokens before pooling, including special tokens. For a late-interaction model, returns its token vectors.
pub(super) async fn embed_all(
    app: &RequestContext<'_>,
    mut fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let name = fields.text("model")?;
    let late = || app.models.late(name.as_deref());
    let embedding = app.models.embedding(name.as_deref());
    let model = app.asks(embedding.or_else(|error| late().map_err(|_| error)))?;
    let wanted = match model.service()?.is_embedding() {
        true => OutputKind::AllTokens,
        // The name of the prompt determines whether the text is a query or a document, as in sentence-transformers.
        false => OutputKind::vectors(match fields.peek("prompt_name") {
            Some("query") => TextRole::Query,
            _ => TextRole::Document,
        }),
    };
    let submit = Submit { wanted, ..submit };
    let (answers, tokens) = embedded(app, &model, fields, submit).await?;
    let width = model.service()?.token_width();
    let rows = answers.iter().map(|answer| {
        let width = match wanted {
            OutputKind::AllTokens => answer.values.len() / answer.tokens.max(1),
            _ => width,
        };
        answer.values.chunks_exact(width.max(1)).collect()
    });
    let rows: Vec<Vec<&[f32]>> = rows.collect();
    Ok(with_tokens(json(StatusCode::OK, &rows), tokens))
}

/// For each text, returns the vocabulary entries whose weights are not 0, with these weights.
pub(super) async fn embed_sparse(
    app: &RequestContext<'_>,
    mut fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let model = app.models.sparse(fields.text("model")?.as_deref());
    let model = app.asks(routed(app, &fields, model))?;
    let submit = Submit {
        wanted: OutputKind::Sparse,
        ..submit
    };
    let (answers, tokens) = embedded(app, &model, fields, submit).await?;
    let row = |answer: &Answer| weights(&answer.entries, &answer.values);
    let rows: Vec<Vec<Weight>> = answers.iter().map(row).collect();
    Ok(with_tokens(json(StatusCode::OK, &rows), tokens))
}

/// Returns the cosine similarities between a text and each of several other texts.
pub(super) async fn similarity(
    app: &RequestContext<'_>,
    mut fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let model = app.models.embedding(fields.text("model")?.as_deref());
    let mut parameters = fields.object("parameters", "parameters.")?;
    let model = app.asks(routed(app, &parameters, model))?;
    let submit = cut(&mut parameters, submit)?;
    let mut compared = fields.object("inputs", "inputs.")?;
    let source = compared.required_text("source_sentence")?;
    let sentences = compared.texts("sentences")?;
    if sentences.is_empty() {
        let problem = "`inputs.sentences` is an empty list; expected at least one text".to_owned();
        return Err(Failure::invalid("inputs.sentences", problem));
    }
    let service = model.service()?;
    let texts = [source].into_iter().chain(sentences);
    let inputs: Vec<Text> = texts.map(Text::One).collect();
    let dimensions = parameters.count("dimensions", 1..=i64::MAX)?;
    let param = "parameters.dimensions";
    shortened(param, vec![0.0; service.width()], dimensions)?;
    let params = ["parameters.prompt_name", "parameters.prompt"];
    let (inputs, submit) = with_prompt(&mut parameters, service, inputs, submit, params)?;
    let mut answers = computed(app, service, inputs, submit, 0).await?;
    let tokens = answers.iter().map(|answer| answer.tokens).sum();
    for answer in &mut answers {
        let values = std::mem::take(&mut answer.values);
        answer.values = shortened(param, values, dimensions)?;
        normalize(&mut answer.values);
    }
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

/// Returns the tokens of texts. Works with any kind of model.
pub(super) async fn tokenize(app: &RequestContext<'_>, mut fields: Fields) -> HandlerResult {
    let model = app.models.named(fields.text("model")?.as_deref(), |_| true);
    let model = app.asks(routed(app, &fields, model))?;
    let adds_special = fields.flag("add_special_tokens")?.unwrap_or(true);
    let prompt = match (fields.text("prompt_name")?, fields.text("prompt")?) {
        (Some(_), Some(_)) => {
            let problem = "`prompt_name` and `prompt` both give a prompt; send one of them";
            return Err(Failure::invalid("prompt", problem.to_owned()));
        }
        (Some(name), None) => match model.prompt_text("prompt_name", &name) {
            Ok(text) => text.to_owned(),
            Err(_) if model.encoder().folder().is_route_for(&name) => String::new(),
            Err(error) => return Err(error.into()),
        },
        (None, Some(text)) => text,
        // The routes for embeddings put the default prompt before the text, too.
        (None, None) => model.default_prompt()?.to_owned(),
    };
    let texts: Vec<String> = inputs("inputs", &fields.value("inputs"))?
        .into_iter()
        .map(|input| match input {
            Text::One(text) => Ok(format!("{prompt}{text}")),
            Text::Prompted(..) | Text::Pair(..) | Text::Ids(_) | Text::Encoded(_) => {
                let problem = "`inputs` has token ids; expected a text or a list of texts";
                Err(Failure::invalid("inputs", problem.to_owned()))
            }
        })
        .collect::<Result<_, _>>()?;
    let bytes: usize = texts.iter().map(String::len).sum();
    // Reserve memory for the response. A token of a few letters becomes a JSON object of about 60 bytes. If the response grows beyond the
    // reservation, further memory is charged.
    let reserved = TOKEN_LETTER * bytes as u64;
    app.share().reserve(reserved).await?;
    let share = Arc::clone(app.share());
    let rows = on_thread(move || {
        let mut body = b"[".to_vec();
        // When a vector grows, it is copied to a buffer of twice the size. Use two thirds of the reservation for the new buffer, and leave
        // one third for the old buffer.
        let mut charged = reserved as usize / 3 * 2;
        for (at, text) in texts.iter().enumerate() {
            body.extend_from_slice(if at > 0 { b",[" } else { b"[" });
            let mut is_first = true;
            let stopped = model.encoder().for_each_token(text, adds_special, |token| {
                if !std::mem::take(&mut is_first) {
                    body.push(b',');
                }
                // Writing to memory cannot fail, and a token always serializes.
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

/// Bytes that are reserved for the response per byte of text.
const TOKEN_LETTER: u64 = 20;
/// Bytes by which a response may exceed its charged memory before further memory is charged.
const ANSWER_STEP: usize = 64 << 10;
/// Estimated bytes for decoding a token, in addition to its text.
const DECODED_TOKEN: u64 = 100;

/// A token in TEI's format.
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

/// Decodes token ids.
pub(super) async fn decode(app: &RequestContext<'_>, mut fields: Fields) -> HandlerResult {
    let model = app.models.named(fields.text("model")?.as_deref(), |_| true);
    let model = app.asks(model)?;
    let skips_special = fields.flag("skip_special_tokens")?.unwrap_or(true);
    let all: Vec<Vec<u32>> = inputs("ids", &fields.value("ids"))?
        .into_iter()
        .map(|input| match input {
            Text::Ids(ids) => Ok(ids),
            Text::Prompted(..) | Text::Pair(..) | Text::One(_) | Text::Encoded(_) => {
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
                // Memory for three copies of the text: the text itself, the response, and the texts of the single tokens.
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
            let text = model.decode(ids, skips_special);
            texts.push(text.map_err(|problem| Failure::invalid("ids", problem))?);
        }
        Ok::<Vec<String>, Failure>(texts)
    });
    let texts = texts.await??;
    Ok(json(StatusCode::OK, &texts))
}

/// Parses `inputs` of `/predict`: a text, `[query, document]`, or a list whose items are lists of one or two texts. The returned flag is
/// true for such a list of lists.
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

/// Returns the scores of all labels for texts or pairs.
pub(super) async fn predict(
    app: &RequestContext<'_>,
    mut fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let model = app.asks(app.models.scoring(fields.text("model")?.as_deref()))?;
    let submit = cut(&mut fields, submit)?;
    let are_raw = fields.flag("raw_scores")?.unwrap_or(false);
    let (inputs, is_list) = predicted(&fields.value("inputs"))?;
    let service = model.service()?;
    let score = match (are_raw, app.choice.tei_scores) {
        (true, _) => ClassScore::Identity,
        (false, true) => ClassScore::usual(service.width()),
        (false, false) => service.class_score(),
    };
    let submit = Submit {
        wanted: OutputKind::Logits,
        ..submit
    };
    let mut answers = computed(app, service, inputs, submit, 0).await?;
    let tokens = answers.iter().map(|answer| answer.tokens).sum();
    let names = service.labels();
    let labels = answers.iter_mut().map(|answer| {
        score.apply(&mut answer.values);
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

/// Ranks texts by a query. The score is the sigmoid of the logit, as in TEI, whatever the model's folder specifies; with `raw_scores`, it
/// is the logit. Scores of late interaction are returned as they are, because there is no logit.
pub(super) async fn rerank(
    app: &RequestContext<'_>,
    mut fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let model = app.asks(app.models.ranking(fields.text("model")?.as_deref()))?;
    let submit = cut(&mut fields, submit)?;
    let are_raw = fields.flag("raw_scores")?.unwrap_or(false);
    let return_text = fields.flag("return_text")?.unwrap_or(false);
    let query = fields.required_text("query")?;
    let texts = fields.texts("texts")?;
    let submit = Submit {
        wanted: OutputKind::Logits,
        ..submit
    };
    let (mut ranks, tokens) = ranked(app, model.service()?, &query, &texts, submit).await?;
    if !are_raw && model.service()?.is_scoring() {
        for (_, score) in &mut ranks {
            ClassScore::Sigmoid.apply(std::slice::from_mut(score));
        }
    }
    let rank = |(index, score)| match return_text {
        true => json!({"index": index, "score": score, "text": texts[index]}),
        false => json!({"index": index, "score": score}),
    };
    let ranks: Vec<Value> = ranks.into_iter().map(rank).collect();
    Ok(with_tokens(json(StatusCode::OK, &ranks), tokens))
}

pub(super) fn info(models: &Models) -> HandlerResult {
    let all = models.all();
    let Some(model) = all.first() else {
        return Err(Failure::not_ready("it has no model"));
    };
    let (kind, longest) = match &model.kind {
        Kind::Service(service) if service.is_scoring() => {
            (json!({"reranker": {}}), service.max_text_tokens())
        }
        Kind::Service(service) if service.is_tagging() => (
            json!({"token_classification": {}}),
            service.max_text_tokens(),
        ),
        Kind::Service(service) => (json!({"embedding": {}}), service.max_text_tokens()),
        Kind::Generation(service) => (json!({"writer": {}}), service.max_prompt_tokens()),
    };
    let info = json!({
        "model_id": model.name, "model_dtype": model.dtype.name(), "model_type": kind,
        "max_input_length": longest, "version": env!("CARGO_PKG_VERSION"), "device": model.device,
    });
    Ok(json(StatusCode::OK, &info))
}
