//! TEI's routes for tokens: texts to tokens, and token ids to texts.

use std::{ops::ControlFlow, sync::Arc};

use hyper::StatusCode;
use serde::Serialize;
use serde_json::json;

use super::{
    HandlerResult, RequestContext,
    embeddings::inputs,
    error::Failure,
    json, of_type, on_thread,
    request::Fields,
    schema::{RouteDoc, flag, list, named, object, or_null, text, whole},
    tei::routed,
};
use crate::serve::{Text, TextToken};

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

pub(super) fn tokenize_doc() -> RouteDoc {
    RouteDoc::post(
        "Tokenizes texts (TEI)",
        object(
            &["inputs"],
            json!({
                "inputs": {"anyOf": [text(), {"type": "array", "items": text(), "minItems": 1}]},
                "model": or_null(text()), "add_special_tokens": flag(),
                "prompt_name": or_null(text()), "prompt": or_null(text()),
            }),
        ),
        list(list(named("Token"))),
    )
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
                // Memory for three copies of the text: the text itself, the response, and the texts of the individual tokens.
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

pub(super) fn decode_doc() -> RouteDoc {
    RouteDoc::post(
        "Decodes token ids (TEI)",
        object(
            &["ids"],
            json!({
                "ids": {"anyOf": [
                    {"type": "array", "items": whole(0), "minItems": 1},
                    {"type": "array", "items": list(whole(0)), "minItems": 1},
                ]},
                "model": or_null(text()), "skip_special_tokens": flag(),
            }),
        ),
        list(text()),
    )
}
