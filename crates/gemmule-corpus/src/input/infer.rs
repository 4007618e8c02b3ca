//! Types of JSON columns.

use std::sync::Arc;

use arrow_array::{
    ArrayRef,
    builder::{BooleanBuilder, Float64Builder, Int64Builder, StringBuilder},
};
use arrow_schema::{DataType, Field};
use serde::{Deserialize, Serialize};

use super::json::type_name;

/// Magnitude up to which every integer is exact as a 64-bit float.
const EXACT: u64 = 1 << 53;

/// The type of a column of JSON values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    Boolean,
    Integer,
    Float,
    String,
    /// JSON text: arrays, objects, or values of several types.
    Json,
}

/// An array under construction.
pub(crate) enum Builder {
    Boolean(BooleanBuilder),
    Integer(Int64Builder),
    Float(Float64Builder),
    String(StringBuilder),
    Json(StringBuilder),
}

impl Kind {
    /// Returns the type that holds all values exactly: JSON text if there are no values, or if no other type fits.
    pub fn of<'v>(values: impl Iterator<Item = &'v str> + Clone) -> Self {
        let mut present = values.filter(|raw| *raw != "null").peekable();
        if present.peek().is_none() {
            return Self::Json;
        }
        let kinds = [Self::Boolean, Self::Integer, Self::Float, Self::String];
        let holding = kinds
            .into_iter()
            .find(|kind| present.clone().all(|raw| kind.holds(raw)));
        holding.unwrap_or(Self::Json)
    }

    pub fn field(self, name: &str) -> Field {
        let data = match self {
            Self::Boolean => DataType::Boolean,
            Self::Integer => DataType::Int64,
            Self::Float => DataType::Float64,
            Self::String | Self::Json => DataType::Utf8,
        };
        Field::new(name, data, true)
    }

    pub fn builder(self) -> Builder {
        match self {
            Self::Boolean => Builder::Boolean(BooleanBuilder::new()),
            Self::Integer => Builder::Integer(Int64Builder::new()),
            Self::Float => Builder::Float(Float64Builder::new()),
            Self::String => Builder::String(StringBuilder::new()),
            Self::Json => Builder::Json(StringBuilder::new()),
        }
    }

    /// Checks whether a column of this type can hold a value.
    pub fn holds(self, raw: &str) -> bool {
        match (self, type_name(raw)) {
            (_, "null") | (Self::Json, _) => true,
            (Self::Boolean, found) => found == "boolean",
            (Self::Integer, _) => raw.parse::<i64>().is_ok(),
            (Self::Float, found) => found == "number" && is_exact(raw),
            (Self::String, found) => found == "string" && string(raw).is_some(),
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Boolean => "booleans",
            Self::Integer => "integers of 64 bits",
            Self::Float => "numbers",
            Self::String => "strings",
            Self::Json => "values of several types",
        }
    }
}

impl Builder {
    /// Appends a value that the type [holds](Kind::holds), or null for `None`.
    pub fn push(&mut self, raw: Option<&str>) {
        let raw = raw.filter(|raw| *raw != "null");
        match self {
            Self::Boolean(b) => b.append_option(raw.map(|raw| raw == "true")),
            Self::Integer(b) => b.append_option(raw.and_then(|raw| raw.parse().ok())),
            Self::Float(b) => b.append_option(raw.and_then(|raw| raw.parse().ok())),
            Self::String(b) => b.append_option(raw.and_then(string)),
            Self::Json(b) => b.append_option(raw),
        }
    }

    pub fn finish(self) -> ArrayRef {
        match self {
            Self::Boolean(mut b) => Arc::new(b.finish()),
            Self::Integer(mut b) => Arc::new(b.finish()),
            Self::Float(mut b) => Arc::new(b.finish()),
            Self::String(mut b) | Self::Json(mut b) => Arc::new(b.finish()),
        }
    }
}

/// Checks whether a column of 64-bit floats can hold the JSON number `raw`. An integer must be exact as a float; any other number must be
/// finite as a float.
fn is_exact(raw: &str) -> bool {
    match raw.contains(['.', 'e', 'E']) {
        true => raw.parse().is_ok_and(f64::is_finite),
        false => raw.parse().is_ok_and(|n: i64| n.unsigned_abs() <= EXACT),
    }
}

/// Returns the value of a JSON string; `None` if it has an unpaired surrogate.
pub(super) fn string(raw: &str) -> Option<String> {
    serde_json::from_str(raw).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_holds_all_values() {
        let kind = |values: &[&str]| Kind::of(values.iter().copied());
        assert_eq!(kind(&["1", "null", "-2"]), Kind::Integer);
        assert_eq!(kind(&["1", "2.5"]), Kind::Float);
        assert_eq!(kind(&["2.5", "1", "3"]), Kind::Float);
        assert_eq!(kind(&["18446744073709551615"]), Kind::Json);
        assert_eq!(kind(&["9007199254740993", "0.5"]), Kind::Json);
        assert_eq!(kind(&["true", "false"]), Kind::Boolean);
        assert_eq!(kind(&["\"a\""]), Kind::String);
        assert_eq!(kind(&["\"a\"", "1"]), Kind::Json);
        assert_eq!(kind(&["[1]"]), Kind::Json);
        assert_eq!(kind(&["null"]), Kind::Json);
        assert_eq!(kind(&[]), Kind::Json);
        assert!(!Kind::Integer.holds("1.5") && Kind::Integer.holds("null"));
        assert!(Kind::Float.holds("1") && !Kind::Float.holds("\"1\""));
    }
}
