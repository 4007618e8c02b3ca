//! Routes of text-embeddings-inference (TEI) for embeddings and scores.

use std::sync::Arc;

use hyper::{Response, StatusCode, header::HeaderValue};
use serde_json::{Value, json};

use super::{
    Body, HandlerResult, RequestContext, Route,
    embeddings::{PROMPTS, computed, cut, inputs, normalize, shortened, with_prompt},
    error::Failure,
    fields::kind,
    json,
    ranking::ranked,
    request::Fields,
    schema::{
        RouteDoc, direction, flag, list, named, number, object, or_null, some_text, text, whole,
    },
    vectors::{Weight, weights},
};
use crate::serve::{
    Answer, ClassScore, Kind, Model, Models, OutputKind, ServeError, Submit, Text, TextRole,
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

pub(super) fn base_doc() -> RouteDoc {
    let routes = [embed_doc(), predict_doc(), rerank_doc(), similarity_doc()];
    let bodies: Vec<Value> = routes.into_iter().filter_map(|doc| doc.body).collect();
    RouteDoc::post(
        "The TEI route that fits the model and the body",
        json!({"anyOf": bodies}),
        list(json!({})),
    )
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

pub(super) fn embed_doc() -> RouteDoc {
    RouteDoc::post(
        "Embeds texts (TEI)",
        body(
            &["inputs"],
            json!({
                "inputs": named("Input"), "normalize": flag(), "dimensions": or_null(whole(1)),
                "prompt_name": or_null(text()), "prompt": or_null(text()),
            }),
        ),
        list(list(number())),
    )
}

/// If the model is a sentence-transformers Router with a route for the task `prompt_name`, returns the model of this route. Otherwise,
/// returns the model itself.
pub(super) fn routed(
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

pub(super) fn embed_all_doc() -> RouteDoc {
    RouteDoc::post(
        "Vectors of all tokens (TEI)",
        texts_body(),
        list(list(list(number()))),
    )
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

pub(super) fn embed_sparse_doc() -> RouteDoc {
    RouteDoc::post(
        "Sparse embeddings, as of SPLADE and BGE-M3 (TEI)",
        texts_body(),
        list(list(object(
            &["index", "value"],
            json!({"index": whole(0), "value": number()}),
        ))),
    )
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

pub(super) fn similarity_doc() -> RouteDoc {
    RouteDoc::post(
        "Cosine similarities of a text with others (TEI)",
        object(
            &["inputs"],
            json!({
                "model": or_null(text()),
                "inputs": object(&["source_sentence", "sentences"], json!({
                    "source_sentence": some_text(),
                    "sentences": {"type": "array", "items": some_text(), "minItems": 1},
                })),
                "parameters": or_null(object(&[], json!({
                    "truncate": flag(), "prompt_name": or_null(text()), "prompt": or_null(text()),
                    "truncation_direction": direction(), "dimensions": or_null(whole(1)),
                }))),
            }),
        ),
        list(number()),
    )
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

pub(super) fn predict_doc() -> RouteDoc {
    RouteDoc::post(
        "Scores texts or pairs by label (TEI)",
        body(
            &["inputs"],
            json!({
                "inputs": {"anyOf": [
                    some_text(),
                    {"type": "array", "items": some_text(), "minItems": 1, "maxItems": 2},
                    {"type": "array", "minItems": 1, "items":
                        {"type": "array", "items": some_text(), "minItems": 1, "maxItems": 2}},
                ]},
                "raw_scores": flag(),
            }),
        ),
        json!({"anyOf": [list(named("Label")), list(list(named("Label")))]}),
    )
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

pub(super) fn rerank_doc() -> RouteDoc {
    RouteDoc::post(
        "Ranks texts by a query (TEI)",
        body(
            &["query", "texts"],
            json!({
                "query": text(), "texts": {"type": "array", "items": text(), "minItems": 1},
                "return_text": flag(), "raw_scores": flag(),
            }),
        ),
        list(object(
            &["index", "score"],
            json!({"index": whole(0), "score": number(), "text": text()}),
        )),
    )
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

pub(super) fn info_doc() -> RouteDoc {
    RouteDoc::get(
        "The first model (TEI)",
        object(
            &["model_id", "model_dtype", "model_type", "version"],
            json!({
                "model_id": text(), "model_dtype": text(), "model_type": {"type": "object"},
                "max_input_length": or_null(whole(0)), "version": text(), "device": text(),
            }),
        ),
    )
}

/// Returns the schema of a body with the fields in `own`, and with the fields that all of TEI's routes for texts have: the model, and the
/// options for truncation.
fn body(required: &[&str], mut own: Value) -> Value {
    own["model"] = or_null(text());
    own["truncate"] = flag();
    own["truncation_direction"] = direction();
    object(required, own)
}

/// Returns the schema of a body with texts, for routes that compute vectors.
fn texts_body() -> Value {
    body(
        &["inputs"],
        json!({"inputs": named("Input"), "prompt_name": or_null(text()), "prompt": or_null(text())}),
    )
}
