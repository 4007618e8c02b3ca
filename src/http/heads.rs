//! Routes for task heads: entities, masks, zero-shot labels, and questions about a text. Their responses have the format of the pipelines
//! of Hugging Face transformers, except for `/predict_tokens`.

use std::sync::Arc;

use hyper::{Response, StatusCode};
use serde_json::{Map, Value, json};

use super::{
    Body, HandlerResult, RequestContext,
    embeddings::answers,
    error::Failure,
    fields::kind,
    json, on_thread,
    request::Fields,
    schema::{RouteDoc, flag, list, number, object, only, or_null, some_text, text, whole},
    tei::with_tokens,
};
use crate::serve::{
    Aggregation, Answer, AnswerOptions, EntityOptions, MaskJob, MaskOptions, Model, OutputKind,
    QuestionJob, ServeError, Submit, Text, TokenJob, ZeroShotJob, ZeroShotOptions,
};

/// Estimated bytes of memory, per byte of text, for the tokens and their positions during tokenization.
const PLACED_BYTE: u64 = 400;
/// Estimated bytes of one token in a JSON response. Each label score of a token is charged with the same number of bytes.
const TOKEN: u64 = 200;
/// Max number of proposed tokens per mask, and of answers per question.
const MAX_TOP_K: i64 = 1000;

/// Reads a text or a list of texts. The returned flag is true for a list.
fn texts(param: &'static str, value: Value) -> Result<(Vec<String>, bool), Failure> {
    let wrong = |what: &str| {
        let problem = format!("`{param}` is {what}; expected a text or a list of texts");
        Failure::invalid(param, problem)
    };
    match value {
        Value::String(text) => Ok((vec![text], false)),
        Value::Array(list) if list.is_empty() => Err(wrong("an empty list")),
        Value::Array(list) => {
            let text = |(at, value)| match value {
                Value::String(text) => Ok(text),
                // Clients for `/predict` send each text as a list. Accept such a list if it contains one text.
                Value::Array(one) => match <[Value; 1]>::try_from(one) {
                    Ok([Value::String(text)]) => Ok(text),
                    _ => Err(wrong(&format!("a list whose item {at} is a list"))),
                },
                other => Err(wrong(&format!(
                    "a list whose item {at} is {}",
                    kind(&other)
                ))),
            };
            let all: Result<Vec<String>, Failure> =
                list.into_iter().enumerate().map(text).collect();
            Ok((all?, true))
        }
        other => Err(wrong(kind(&other))),
    }
}

/// Returns the results of a request as a list. If the request had a single text instead of a list, returns only its result.
fn unlisted(mut all: Vec<Value>, is_list: bool) -> Value {
    match (is_list, all.len()) {
        (false, 1) => all.remove(0),
        _ => Value::Array(all),
    }
}

/// Runs the model on the texts of a request. `begin` tokenizes the texts into sequences, and `finish` converts the model's answers for
/// these sequences into results. `bytes` is the total length of the texts, and `n` is the number of sequences. Returns the results and the
/// number of tokens.
async fn computed<J: Send + 'static, R: Send + 'static>(
    app: &RequestContext<'_>,
    model: &Arc<Model>,
    submit: Submit,
    (bytes, n): (usize, usize),
    begin: impl FnOnce(&Model) -> Result<(J, Vec<Text>), ServeError> + Send + 'static,
    finish: impl FnOnce(&Model, J, Vec<Answer>) -> Result<R, ServeError> + Send + 'static,
) -> Result<(R, usize), Failure> {
    let service = model.service()?;
    let memory = service.memory(n, submit.wanted);
    let placed = PLACED_BYTE.saturating_mul(bytes as u64);
    app.share().reserve(memory.saturating_add(placed)).await?;
    let own = Arc::clone(model);
    let (jobs, inputs) = on_thread(move || begin(&own)).await??;
    let found = answers(app, service, inputs, submit).await?;
    let tokens = found.iter().map(|answer| answer.tokens).sum();
    let own = Arc::clone(model);
    let done = on_thread(move || finish(&own, jobs, found)).await??;
    Ok((done, tokens))
}

/// Returns the response with the results, and with a header that contains the number of tokens.
fn respond((rows, tokens): (Vec<Value>, usize), is_list: bool) -> Response<Body> {
    with_tokens(json(StatusCode::OK, &unlisted(rows, is_list)), tokens)
}

/// Reads `truncate`, and selects the output `wanted`.
fn wanted(fields: &mut Fields, submit: Submit, wanted: OutputKind) -> Result<Submit, Failure> {
    Ok(Submit {
        truncate: fields.flag("truncate")?.unwrap_or(submit.truncate),
        wanted,
        ..submit
    })
}

/// Returns the total length of texts in bytes.
fn length(texts: &[String]) -> usize {
    texts.iter().map(String::len).sum()
}

fn entity_options(fields: &mut Fields) -> Result<EntityOptions, Failure> {
    let mut options = EntityOptions::default();
    if let Some(name) = fields.text("aggregation_strategy")? {
        let parsed = name.to_lowercase().parse();
        options.aggregation =
            parsed.map_err(|problem: String| Failure::invalid("aggregation_strategy", problem))?;
    }
    if fields.has("ignore_labels") {
        options.ignored = fields.texts("ignore_labels")?;
    }
    Ok(options)
}

/// Tokenizes texts one by one.
fn token_jobs(model: &Model, texts: &[String]) -> Result<(Vec<TokenJob>, Vec<Text>), ServeError> {
    let jobs = texts.iter().enumerate();
    let jobs = jobs.map(|(index, text)| TokenJob::new(model.encoder(), index, text));
    let jobs: Vec<TokenJob> = jobs.collect::<Result<_, _>>()?;
    let inputs = jobs.iter().map(|job| Text::Encoded(job.input().clone()));
    let inputs = inputs.collect();
    Ok((jobs, inputs))
}

/// Returns entities, or the labels of tokens, for each text.
pub(super) async fn entities(
    app: &RequestContext<'_>,
    mut fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let model = app.asks(app.models.tagging(fields.text("model")?.as_deref()))?;
    let submit = wanted(&mut fields, submit, OutputKind::Tokens)?;
    let options = entity_options(&mut fields)?;
    let (texts, is_list) = texts("inputs", fields.value("inputs"))?;
    let size = (length(&texts), texts.len());
    let begin = move |model: &Model| token_jobs(model, &texts);
    let finish = move |model: &Model, jobs: Vec<TokenJob>, answers: Vec<Answer>| {
        let labels = model.service()?.labels();
        let rows = jobs.iter().zip(&answers).map(|(job, answer)| {
            let found = job.finish(model.encoder(), &answer.values, labels, &options)?;
            Ok::<_, ServeError>(json!(found))
        });
        rows.collect::<Result<Vec<Value>, ServeError>>()
    };
    let found = computed(app, &model, submit, size, begin, finish).await?;
    Ok(respond(found, is_list))
}

pub(super) fn entities_doc() -> RouteDoc {
    let mut entity = span_schema();
    entity["entity"] = text();
    entity["entity_group"] = text();
    entity["index"] = whole(0);
    entity["word"] = text();
    entity["score"] = number();
    RouteDoc::post(
        "Labels tokens or finds entities, like the pipeline of transformers",
        object(
            &["inputs"],
            json!({
                "model": or_null(text()), "inputs": inputs_schema(), "truncate": flag(),
                "aggregation_strategy": aggregation_schema(), "ignore_labels": labels_schema(),
            }),
        ),
        one_or_list(list(object(&["word", "score", "start", "end"], entity))),
    )
}

/// Returns all tokens with the scores of all labels, or entities, in the format of TEI's `/predict_tokens`.
pub(super) async fn predict_tokens(
    app: &RequestContext<'_>,
    mut fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let model = app.asks(app.models.tagging(fields.text("model")?.as_deref()))?;
    let submit = wanted(&mut fields, submit, OutputKind::Tokens)?;
    let are_raw = fields.flag("raw_scores")?.unwrap_or(false);
    let options = entity_options(&mut fields)?;
    if are_raw && options.aggregation != Aggregation::None {
        let problem = "`raw_scores` requests the logits of single tokens, but `aggregation_strategy` combines tokens by their probabilities; leave one of them out";
        return Err(Failure::invalid("raw_scores", problem.to_owned()));
    }
    let (texts, _) = texts("inputs", fields.value("inputs"))?;
    let size = (length(&texts), texts.len());
    let share = Arc::clone(app.share());
    let begin = move |model: &Model| token_jobs(model, &texts);
    let finish = move |model: &Model, jobs: Vec<TokenJob>, answers: Vec<Answer>| {
        let labels = model.service()?.labels();
        let rows =
            jobs.iter().zip(&answers).map(|(job, answer)| {
                let scored = |start: usize,
                              end: usize,
                              token: &str,
                              results: Map<String, Value>| {
                    json!({"token": token, "start": start, "end": end, "results": results})
                };
                if options.aggregation != Aggregation::None {
                    let found = job.finish(model.encoder(), &answer.values, labels, &options)?;
                    let found = found.iter().map(|entity| {
                        let results = [(entity.label.clone(), json!(entity.score))];
                        let results = results.into_iter().collect();
                        scored(entity.start, entity.end, &entity.word, results)
                    });
                    return Ok(found.collect());
                }
                share.add(TOKEN * (answer.tokens * (1 + labels.len())) as u64)?;
                let rows = job.scores(&answer.values, labels.len(), are_raw)?;
                let rows = rows.into_iter().map(|(token, scores)| {
                    let results = labels
                        .iter()
                        .cloned()
                        .zip(scores.into_iter().map(Value::from));
                    let mut row = scored(token.start, token.end, &token.name, results.collect());
                    row["token_id"] = json!(token.id);
                    row
                });
                Ok::<Vec<Value>, ServeError>(rows.collect())
            });
        rows.collect::<Result<Vec<Vec<Value>>, ServeError>>()
    };
    let (rows, tokens) = computed(app, &model, submit, size, begin, finish).await?;
    Ok(with_tokens(json(StatusCode::OK, &rows), tokens))
}

pub(super) fn predict_tokens_doc() -> RouteDoc {
    let mut token = span_schema();
    token["token"] = text();
    token["token_id"] = whole(0);
    token["results"] = json!({"type": "object", "additionalProperties": number()});
    RouteDoc::post(
        "Scores all labels of tokens, or finds entities (TEI)",
        object(
            &["inputs"],
            json!({
                "model": or_null(text()), "inputs": inputs_schema(), "truncate": flag(),
                "raw_scores": flag(), "aggregation_strategy": aggregation_schema(), "ignore_labels": labels_schema(),
            }),
        ),
        list(list(object(&["token", "start", "end", "results"], token))),
    )
}

/// Returns the most probable tokens for each mask.
pub(super) async fn fill_mask(
    app: &RequestContext<'_>,
    mut fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let model = app.asks(app.models.filling(fields.text("model")?.as_deref()))?;
    let submit = wanted(&mut fields, submit, OutputKind::Tokens)?;
    let mut options = MaskOptions::default();
    if let Some(n) = fields.count("top_k", 1..=MAX_TOP_K)? {
        options.top_k = n;
    }
    if fields.has("targets") {
        options.targets = texts("targets", fields.value("targets"))?.0;
    }
    let (texts, is_list) = texts("inputs", fields.value("inputs"))?;
    let size = (length(&texts) + length(&options.targets), texts.len());
    let share = Arc::clone(app.share());
    let begin = move |model: &Model| {
        let encoder = model.encoder();
        let targets = MaskJob::targets(encoder, &options)?;
        let jobs = texts.iter().enumerate();
        let jobs = jobs.map(|(index, text)| MaskJob::new(encoder, index, text));
        let jobs: Vec<MaskJob> = jobs.collect::<Result<_, _>>()?;
        let masks: usize = jobs.iter().map(|job| job.masks().len()).sum();
        // The response contains a copy of the whole text for each proposed token.
        let longest = texts.iter().map(String::len).max().unwrap_or(0);
        share.add((masks * options.top_k) as u64 * (TOKEN + 3 * longest as u64))?;
        let inputs = jobs.iter().map(|job| Text::Encoded(job.input().clone()));
        let inputs = inputs.collect();
        Ok(((jobs, targets, options.top_k), inputs))
    };
    let finish = move |model: &Model,
                       (jobs, targets, top_k): (Vec<MaskJob>, Vec<u32>, usize),
                       answers: Vec<Answer>| {
        let rows = jobs.iter().zip(&answers).map(|(job, answer)| {
            let width = answer.values.len() / job.masks().len().max(1);
            let rows: Vec<&[f32]> = answer.values.chunks_exact(width.max(1)).collect();
            let filled = job.finish(model.encoder(), &rows, top_k, &targets)?;
            let masks = filled.iter().map(|mask| json!(mask)).collect();
            Ok::<_, ServeError>(unlisted(masks, false))
        });
        rows.collect::<Result<Vec<Value>, ServeError>>()
    };
    let found = computed(app, &model, submit, size, begin, finish).await?;
    Ok(respond(found, is_list))
}

pub(super) fn fill_mask_doc() -> RouteDoc {
    RouteDoc::post(
        "Fills masks, like the pipeline of transformers",
        object(
            &["inputs"],
            json!({
                "model": or_null(text()), "inputs": inputs_schema(), "truncate": flag(), "top_k": top_k_schema(),
                "targets": {"anyOf": [{"type": "null"}, inputs_schema()]},
            }),
        ),
        list(json!({})),
    )
}

/// Scores labels for texts with a model for natural language inference.
pub(super) async fn zero_shot(
    app: &RequestContext<'_>,
    mut fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let model = app.asks(app.models.scoring(fields.text("model")?.as_deref()))?;
    let submit = wanted(&mut fields, submit, OutputKind::Logits)?;
    let mut options = ZeroShotOptions {
        multi_label: fields.flag("multi_label")?.unwrap_or(false),
        ..ZeroShotOptions::default()
    };
    if let Some(template) = fields.text("hypothesis_template")? {
        options.template = template;
    }
    let (labels, is_labels) = texts("candidate_labels", fields.value("candidate_labels"))?;
    let labels: Vec<String> = match is_labels {
        true => labels,
        // A single text may contain several labels, separated by commas, as in Hugging Face transformers.
        false => {
            let each = labels.iter().flat_map(|text| text.split(','));
            let each = each.map(str::trim).filter(|label| !label.is_empty());
            each.map(str::to_owned).collect()
        }
    };
    let (texts, is_list) = texts("inputs", fields.value("inputs"))?;
    // The model reads each text with each label, so the texts are copied once per label.
    let n = texts.len().saturating_mul(labels.len());
    let copies = length(&texts).saturating_mul(labels.len());
    let sentences = (length(&labels) + options.template.len().saturating_mul(labels.len()))
        .saturating_mul(texts.len());
    let size = (copies.saturating_add(sentences), n);
    let begin = {
        let options = options.clone();
        let texts = texts.clone();
        move |model: &Model| {
            let names = model.service()?.labels();
            let jobs = texts.iter().map(|text| {
                ZeroShotJob::new(model.encoder(), names, text, &labels, &options.template)
            });
            let jobs: Vec<ZeroShotJob> = jobs.collect::<Result<_, _>>()?;
            let inputs = jobs.iter().flat_map(ZeroShotJob::inputs);
            let inputs = inputs.cloned().map(Text::Encoded).collect();
            Ok((jobs, inputs))
        }
    };
    let finish = move |_: &Model, jobs: Vec<ZeroShotJob>, answers: Vec<Answer>| {
        let mut rest = answers.as_slice();
        let rows = jobs.iter().zip(texts).map(|(job, text)| {
            let (own, after) = rest.split_at(job.inputs().len().min(rest.len()));
            rest = after;
            let rows: Vec<&[f32]> = own.iter().map(|answer| answer.values.as_slice()).collect();
            let ranked = job.finish(&rows, &options);
            let (labels, scores): (Vec<String>, Vec<f32>) =
                ranked.into_iter().map(|own| (own.label, own.score)).unzip();
            json!({"sequence": text, "labels": labels, "scores": scores})
        });
        Ok(rows.collect::<Vec<Value>>())
    };
    let found = computed(app, &model, submit, size, begin, finish).await?;
    Ok(respond(found, is_list))
}

pub(super) fn zero_shot_doc() -> RouteDoc {
    RouteDoc::post(
        "Scores labels that the model was not trained on, like the pipeline of transformers",
        object(
            &["inputs", "candidate_labels"],
            json!({
                "model": or_null(text()), "inputs": inputs_schema(), "candidate_labels": inputs_schema(),
                "hypothesis_template": or_null(text()), "multi_label": flag(), "truncate": flag(),
            }),
        ),
        one_or_list(object(
            &["sequence", "labels", "scores"],
            json!({"sequence": text(), "labels": list(text()), "scores": list(number())}),
        )),
    )
}

/// Answers a question with spans of a text.
pub(super) async fn answer(
    app: &RequestContext<'_>,
    mut fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let model = app.asks(app.models.answering(fields.text("model")?.as_deref()))?;
    let submit = Submit {
        wanted: OutputKind::Tokens,
        ..submit
    };
    let usual = AnswerOptions::default();
    let top_k = fields.count("top_k", 1..=MAX_TOP_K)?;
    let max_answer_tokens = fields.count("max_answer_len", 1..=MAX_TOP_K)?;
    let options = AnswerOptions {
        top_k: top_k.unwrap_or(usual.top_k),
        max_answer_tokens: max_answer_tokens.unwrap_or(usual.max_answer_tokens),
        max_tokens: fields.count("max_seq_len", 1..=i64::MAX)?,
        stride: fields.count("doc_stride", 0..=i64::MAX)?,
        allows_none: fields.flag("handle_impossible_answer")?.unwrap_or(false),
        aligns_to_words: fields.flag("align_to_words")?.unwrap_or(true),
    };
    let question = fields.required_text("question")?;
    let context = fields.required_text("context")?;
    // The number of sequences is not known yet, so memory is reserved for the max number.
    let size = (question.len() + context.len(), QuestionJob::MAX_PARTS);
    let begin = {
        let options = options.clone();
        move |model: &Model| {
            let job = QuestionJob::new(model.encoder(), &question, &context, &options)?;
            let inputs = job.inputs().cloned().map(Text::Encoded).collect();
            Ok((job, inputs))
        }
    };
    let finish = move |_: &Model, job: QuestionJob, answers: Vec<Answer>| {
        let rows: Vec<&[f32]> = answers.iter().map(|own| own.values.as_slice()).collect();
        let found = job.finish(&rows, &options)?;
        Ok(found
            .iter()
            .map(|answer| json!(answer))
            .collect::<Vec<Value>>())
    };
    let found = computed(app, &model, submit, size, begin, finish).await?;
    Ok(respond(found, top_k.is_some()))
}

pub(super) fn answer_doc() -> RouteDoc {
    let mut answer = span_schema();
    answer["answer"] = text();
    answer["score"] = number();
    RouteDoc::post(
        "Answers a question with parts of a text, like the pipeline of transformers 4",
        object(
            &["question", "context"],
            json!({
                "model": or_null(text()), "question": some_text(), "context": some_text(),
                "top_k": top_k_schema(), "max_answer_len": top_k_schema(), "max_seq_len": or_null(whole(1)),
                "doc_stride": or_null(whole(0)), "handle_impossible_answer": flag(),
                "align_to_words": flag(),
            }),
        ),
        one_or_list(object(&["answer", "score", "start", "end"], answer)),
    )
}

fn inputs_schema() -> Value {
    let list = json!({"type": "array", "minItems": 1, "items": {"anyOf": [
        some_text(), {"type": "array", "minItems": 1, "maxItems": 1, "items": some_text()},
    ]}});
    json!({"anyOf": [some_text(), list]})
}

fn aggregation_schema() -> Value {
    only(json!([null, "none", "simple", "first", "average", "max"]))
}

fn labels_schema() -> Value {
    or_null(json!({"type": "array", "items": text()}))
}

fn top_k_schema() -> Value {
    or_null(json!({"type": "integer", "minimum": 1, "maximum": MAX_TOP_K}))
}

fn one_or_list(one: Value) -> Value {
    json!({"anyOf": [one.clone(), list(one)]})
}

fn span_schema() -> Value {
    json!({"start": whole(0), "end": whole(0)})
}
