//! Health checks for load balancers.

use hyper::{Response, StatusCode};
use serde_json::{Value, json};

use super::{
    Body, HandlerResult,
    error::Failure,
    json,
    schema::{RouteDoc, object, text},
};
use crate::serve::Models;

/// Responds as long as the process is alive. Does not use the device.
pub(super) fn health() -> Response<Body> {
    json(StatusCode::OK, &json!({"status": "ok"}))
}

pub(super) fn health_doc() -> RouteDoc {
    RouteDoc::get("Whether the process is alive", state_schema())
}

/// Responds with 200 if models are loaded, their devices work, and the server is not shutting down.
pub(super) fn ready(models: &Models) -> HandlerResult {
    match models.not_ready() {
        None => Ok(json(StatusCode::OK, &json!({"status": "ready"}))),
        Some(why) => Err(Failure::not_ready(why)),
    }
}

pub(super) fn ready_doc() -> RouteDoc {
    RouteDoc::get("Whether the server accepts new requests", state_schema())
}

fn state_schema() -> Value {
    object(&["status"], json!({"status": text()}))
}
