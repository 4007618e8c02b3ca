//! x
use super::{super::error::Result, settings::Settings};
use serde_json::Value as Json;
pub(super) fn tokenizer(_: &Settings<'_>) -> Result<Json> {
    Ok(Json::Null)
}
pub(super) fn tokenizer_config(_: &Settings<'_>) -> Result<Json> {
    Ok(Json::Null)
}
pub(super) fn generation_config(_: &Settings<'_>) -> Result<Json> {
    Ok(Json::Null)
}
