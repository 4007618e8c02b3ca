//! The status page and its data.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

use hyper::{
    Response, StatusCode,
    header::{CONTENT_SECURITY_POLICY, HeaderValue},
};
use serde_json::{Value, json};

use super::{
    App, Body, json, of_type,
    schema::{RouteDoc, list, number, object, or_null, text, whole, yes_or_no},
};
use crate::serve::{Histogram, Model};

/// Returns the status page. It is a single file without external resources.
pub(super) fn page() -> Response<Body> {
    let page = include_str!("status.html");
    let mut response = of_type(
        StatusCode::OK,
        "text/html; charset=utf-8",
        page.as_bytes().to_vec(),
    );
    let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:";
    let policy = HeaderValue::from_static(policy);
    response
        .headers_mut()
        .insert(CONTENT_SECURITY_POLICY, policy);
    response
}

pub(super) fn page_doc() -> RouteDoc {
    RouteDoc::get_as("The status page", "text/html", text())
}

/// Returns counts since the start of the server as JSON. The status page computes rates from them.
pub(super) fn counts(app: &App) -> Response<Body> {
    let (answers, seconds) = app.counts.of_requests();
    let (ends, below): (Vec<f64>, Vec<u64>) = seconds.0.into_iter().unzip();
    let answers: BTreeMap<String, u64> = answers
        .into_iter()
        .map(|(code, n)| (code.to_string(), n))
        .collect();
    let models = app.models.all();
    let models: Vec<Value> = models.iter().map(|model| of_model(model)).collect();
    let counts = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "ready": app.models.not_ready().is_none(),
        "uptime_seconds": app.began.elapsed().as_secs_f64(),
        "answers": answers,
        "seconds": {"ends": ends, "below": below, "count": seconds.1, "sum": seconds.2},
        "models": models,
    });
    json(StatusCode::OK, &counts)
}

pub(super) fn counts_doc() -> RouteDoc {
    RouteDoc::get(
        "Data of the status page, counted since the start",
        object(
            &[
                "version",
                "ready",
                "uptime_seconds",
                "answers",
                "seconds",
                "models",
            ],
            json!({
                "version": text(), "ready": yes_or_no(), "uptime_seconds": number(),
                "answers": {"type": "object", "additionalProperties": whole(0)},
                "seconds": object(&["ends", "below", "count", "sum"], json!({
                    "ends": list(number()), "below": list(whole(0)), "count": whole(0), "sum": number(),
                })),
                "models": list(object(&["name", "does", "device", "dtype"], json!({
                    "name": text(), "does": text(), "device": text(), "dtype": text(),
                    "full_batch": or_null(whole(1)),
                }))),
            }),
        ),
    )
}

fn of_model(model: &Model) -> Value {
    let metrics = model.metrics();
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let stage = |histogram: &Histogram| {
        let (_, count, sum) = histogram.read();
        json!([count, sum])
    };
    let refused = [
        &metrics.expired,
        &metrics.hopeless,
        &metrics.too_large,
        &metrics.overloaded,
    ];
    json!({
        "name": model.name, "does": model.does(), "device": model.device, "dtype": model.dtype.name(),
        "tokens": read(&metrics.tokens), "batches": read(&metrics.batches),
        "sequences": read(&metrics.batch_sequences), "failed_batches": read(&metrics.failed_batches),
        "queue_tokens": read(&metrics.queue_tokens), "queue_requests": read(&metrics.queue_requests),
        "refused": refused.into_iter().map(read).sum::<u64>(), "cancelled": read(&metrics.cancelled),
        "full_batch": model.costs.as_ref().map(crate::serve::full_batch),
        "stages": {
            "tokenize": stage(&metrics.tokenize), "queue": stage(&metrics.queue), "device": stage(&metrics.device),
        },
    })
}
