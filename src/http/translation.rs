//! The route for translations, as a whole response or as server-sent events.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use hyper::StatusCode;
use serde_json::{Value, json};

use super::{
    App, HandlerResult, RequestContext,
    error::Failure,
    fields::{kind, shown},
    generation::{
        Done, End, Events, add_event, finished, reason, stream_options_schema, streamed, usage,
    },
    json, on_thread,
    request::Fields,
    schema::{RouteDoc, flag, list, object, or_null, text, whole},
};
use crate::{
    search::Beams,
    serve::{GenerationParams, Scored, ServeError, Submit, TargetPrefix, TranslationParams},
};

/// Max length penalty. The minimum is its negative.
const MAX_PENALTY: f32 = 100.0;

struct TranslationRequest {
    model: Option<String>,
    texts: Vec<String>,
    /// Prefixes of the translations, one per text. Several texts may share a prefix.
    prefixes: Vec<Arc<TargetPrefix>>,
    params: TranslationParams,
    stream: bool,
    include_usage: bool,
}

impl TranslationRequest {
    fn parse(mut fields: Fields) -> Result<Self, Failure> {
        let mut options = fields.object("stream_options", "stream_options.")?;
        let texts = match fields.value("text") {
            Value::String(text) => vec![text],
            Value::Array(list) if !list.is_empty() => list
                .into_iter()
                .enumerate()
                .map(|(at, item)| match item {
                    Value::String(text) => Ok(text),
                    other => {
                        let problem =
                            format!("item {at} of `text` is {}; expected a text", shown(&other));
                        Err(Failure::invalid("text", problem))
                    }
                })
                .collect::<Result<Vec<String>, Failure>>()?,
            other => {
                let found = match &other {
                    Value::Array(_) => "an empty list",
                    other => kind(other),
                };
                let problem = format!("`text` is {found}; expected a text or a list of texts");
                return Err(Failure::invalid("text", problem));
            }
        };
        let most = Beams::MAX as i64;
        let (name, other) = ("num_hypotheses", "n");
        let hypotheses = match (
            fields.count(name, 1..=most)?,
            fields.count(other, 1..=most)?,
        ) {
            (Some(a), Some(b)) if a != b => {
                let problem = format!("`{name}` is {a} and `{other}` is {b}; send one of the two");
                return Err(Failure::invalid(other, problem));
            }
            (a, b) => a.or(b).unwrap_or(1),
        };
        Ok(Self {
            model: fields.text("model")?,
            prefixes: prefixes(fields.value("target_prefix"), texts.len())?,
            texts,
            params: TranslationParams {
                source_lang: fields.text("source_lang")?,
                target_lang: fields.text("target_lang")?,
                max_tokens: fields.count("max_tokens", 1..=i64::MAX)?,
                num_beams: fields.count("num_beams", 1..=most)?,
                length_penalty: fields.number("length_penalty", -MAX_PENALTY..=MAX_PENALTY)?,
                hypotheses,
            },
            stream: fields.flag("stream")?.unwrap_or(false),
            include_usage: options.flag("include_usage")?.unwrap_or(false),
        })
    }
}

/// Reads `target_prefix`: a text for all translations, or a list with one entry per text. An entry is a text, a list of tokens, or null.
fn prefixes(value: Value, n: usize) -> Result<Vec<Arc<TargetPrefix>>, Failure> {
    let name = "target_prefix";
    let wrong = |found: &str, expected: &str| {
        Failure::invalid(name, format!("`{name}` is {found}; expected {expected}"))
    };
    let shared = |prefix| std::iter::repeat_n(Arc::new(prefix), n).collect();
    let list = match value {
        Value::Null => return Ok(shared(TargetPrefix::None)),
        Value::String(text) => return Ok(shared(TargetPrefix::Text(text))),
        Value::Array(list) => list,
        other => {
            let expected = "a text, or a list with a text or a list of tokens for each text";
            return Err(wrong(&shown(&other), expected));
        }
    };
    if list.len() != n {
        let found = format!("a list of {} items", list.len());
        return Err(wrong(
            &found,
            &format!("one for each text, of which there are {n}"),
        ));
    }
    let prefix = |(at, item)| match item {
        Value::Null => Ok(TargetPrefix::None),
        Value::String(text) => Ok(TargetPrefix::Text(text)),
        Value::Array(tokens) => {
            let tokens = tokens.into_iter().map(|token| match token {
                Value::String(token) => Ok(token),
                other => Err(wrong(
                    &format!("a list whose item {at} has {}", shown(&other)),
                    "tokens as written in the model's files",
                )),
            });
            Ok(TargetPrefix::Tokens(tokens.collect::<Result<_, _>>()?))
        }
        other => Err(wrong(
            &format!("a list whose item {at} is {}", shown(&other)),
            "a text, a list of tokens, or null",
        )),
    };
    let each = list.into_iter().enumerate();
    each.map(|entry| prefix(entry).map(Arc::new)).collect()
}

/// Translates texts.
pub(super) async fn translate(
    app: &RequestContext<'_>,
    fields: Fields,
    submit: Submit,
) -> HandlerResult {
    let TranslationRequest {
        model,
        texts,
        prefixes,
        params,
        stream,
        include_usage,
    } = TranslationRequest::parse(fields)?;
    let model = app.asks(app.models.translating(model.as_deref()))?;
    let service = model.generation()?;
    let n = texts.len();
    let index = move |at: usize, error: ServeError| match n {
        1 => error,
        _ => error.of_text("text", at),
    };
    let has_place = service.has_place(n as u64, submit);
    has_place.map_err(|error| error.of_source("text"))?;
    let holds = Arc::clone(&model);
    let sources = on_thread(move || {
        let service = holds.generation()?;
        let each = texts.iter().zip(&prefixes).enumerate();
        let each = each.map(|(at, (text, prefix))| {
            let source = service.translation(at, text, prefix, &params);
            source.map_err(|error| index(at, error))
        });
        each.collect::<Result<Vec<Option<(Vec<u32>, GenerationParams)>>, ServeError>>()
    });
    let sources = sources.await??;
    let share = app.share();
    let each = sources.iter().flatten();
    let tokens: usize = each
        .map(|(ids, params)| ids.len() + params.prefix.len())
        .sum();
    // Each token id has 4 bytes and is stored twice: in the queue and in the generator.
    share.reserve(8 * tokens as u64).await?;
    let mut all = Vec::with_capacity(n);
    for (at, source) in sources.into_iter().enumerate() {
        let submitted = source
            .map(|(ids, params)| service.submit_within(ids, params, submit, share))
            .transpose();
        all.push(submitted.map_err(|error| index(at, error))?);
    }
    let head = Head::new(app, &model.name, include_usage);
    if stream {
        return streamed(head, all).await;
    }
    let is_blank: Vec<bool> = all.iter().map(Option::is_none).collect();
    let mut written = finished(all.into_iter().flatten().collect(), share)
        .await?
        .into_iter();
    let done = is_blank.into_iter().map(|is_blank| match is_blank {
        true => Some(Done::empty()),
        false => written.next(),
    });
    let (mut translations, mut used) = (Vec::with_capacity(n), (0, 0));
    for (index, done) in done.flatten().enumerate() {
        used = (used.0 + done.used.0, used.1 + done.used.1);
        let end = End {
            ending: done.ending,
            hypotheses: done.hypotheses,
        };
        translations.push(translation(index, done.text, Some(end)));
    }
    let answer = json!({
        "id": head.id, "object": "translations", "created": head.created, "model": head.model,
        "translations": translations, "usage": usage(used.0, used.1),
    });
    Ok(json(StatusCode::OK, &answer))
}

pub(super) fn translate_doc() -> RouteDoc {
    let count = || or_null(json!({"type": "integer", "minimum": 1, "maximum": Beams::MAX}));
    let tokens = list(text());
    let properties = json!({
        "model": or_null(text()),
        "text": {"anyOf": [text(), {"type": "array", "minItems": 1, "items": text()}]},
        "source_lang": or_null(text()),
        "target_lang": or_null(text()),
        "target_prefix": {"anyOf": [
            {"type": ["string", "null"]},
            list(json!({"anyOf": [{"type": ["string", "null"]}, tokens]})),
        ]},
        "num_beams": count(),
        "num_hypotheses": count(),
        "n": count(),
        "length_penalty": or_null(json!({"type": "number", "minimum": -MAX_PENALTY, "maximum": MAX_PENALTY})),
        "max_tokens": or_null(whole(1)),
        "stream": flag(),
        "stream_options": stream_options_schema(),
    });
    RouteDoc::streamed(
        "Translates texts",
        object(&["text"], properties),
        "Translations",
    )
}

/// Returns the JSON of a translation, or of a part of a translation if `end` is `None`.
fn translation(index: usize, text: String, end: Option<End>) -> Value {
    let mut translation =
        json!({"index": index, "text": text, "finish_reason": null, "score": null});
    if let Some(end) = end {
        translation["finish_reason"] = json!(reason(end.ending));
        let mut hypotheses = end.hypotheses.into_iter();
        translation["score"] = json!(hypotheses.next().map(|(_, score)| score));
        let others = hypotheses.map(|(text, score)| json!({"text": text, "score": score}));
        translation["alternatives"] = others.collect();
    }
    translation
}

/// Fields shared by all events of a response.
struct Head {
    id: String,
    model: String,
    created: u64,
    with_usage: bool,
}

impl Head {
    fn new(app: &App, model: &str, with_usage: bool) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            id: app.new_id("trans"),
            model: model.to_owned(),
            created: now.unwrap_or_default().as_secs(),
            with_usage,
        }
    }

    fn event(&self, to: &mut Vec<u8>, translations: Vec<Value>, usage: Value) {
        let mut event = json!({
            "id": self.id, "object": "translations.chunk", "created": self.created, "model": self.model,
            "translations": translations,
        });
        if self.with_usage {
            event["usage"] = usage;
        }
        add_event(to, &event);
    }
}

impl Events for Head {
    fn part(&self, to: &mut Vec<u8>, index: usize, text: &str, _: &[Scored]) {
        self.event(
            to,
            vec![translation(index, text.to_owned(), None)],
            Value::Null,
        );
    }

    fn end(&self, to: &mut Vec<u8>, index: usize, end: End) {
        let last = translation(index, String::new(), Some(end));
        self.event(to, vec![last], Value::Null);
    }

    fn usage(&self, to: &mut Vec<u8>, used: (usize, usize)) {
        if self.with_usage {
            self.event(to, Vec::new(), usage(used.0, used.1));
        }
    }

    fn has_own_prompts(&self) -> bool {
        true
    }
}
