//! What a balancer asks.

use hyper::{Response, StatusCode};
use serde_json::json;

use super::{Answered, Body, error::Failure, json};
use crate::serve::Models;

/// The process is alive. Nothing runs on the device for it.
pub(super) fn health() -> Response<Body> {
    json(StatusCode::OK, &json!({"status": "ok"}))
}

/// New requests are welcome: models are loaded, their devices compute, and the server is not about to end.
pub(super) fn ready(models: &Models) -> Answered {
    match models.not_ready() {
        None => Ok(json(StatusCode::OK, &json!({"status": "ready"}))),
        Some(why) => Err(Failure::not_ready(why)),
    }
}
