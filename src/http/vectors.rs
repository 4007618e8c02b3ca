//! Types of the values of embeddings in responses.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::Serialize;

use super::{error::Failure, request::Fields};
use crate::names::{excerpt, nearest};

/// Type of the values of an embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ValueType {
    Float,
    /// Integers from -127 to 127. A vector is scaled so that its largest magnitude is 127, which preserves cosines up to rounding.
    Int8,
    /// The integers of `Int8`, plus 128.
    Uint8,
    /// One bit per value (1 if it is positive), eight per byte, with the first value in the highest bit. 128 is subtracted from each byte.
    Binary,
    /// The bytes of [`Binary`](Self::Binary) before 128 is subtracted.
    Ubinary,
    /// The bytes of little-endian f32 in base64.
    Base64,
}

/// All types, with their names in requests.
pub(super) const TYPES: [(&str, ValueType); 6] = [
    ("float", ValueType::Float),
    ("int8", ValueType::Int8),
    ("uint8", ValueType::Uint8),
    ("binary", ValueType::Binary),
    ("ubinary", ValueType::Ubinary),
    ("base64", ValueType::Base64),
];

/// Reads `encoding_format`, which selects whether vectors are encoded in base64.
pub(super) fn is_base64(fields: &mut Fields) -> Result<bool, Failure> {
    match fields.text("encoding_format")?.as_deref() {
        None | Some("float") => Ok(false),
        Some("base64") => Ok(true),
        Some(other) => {
            let other = excerpt(other);
            let problem = format!("`encoding_format` is `{other}`; expected float or base64");
            Err(Failure::invalid("encoding_format", problem))
        }
    }
}

impl ValueType {
    /// Returns the type with this name. `param` is the field that contains the name.
    pub fn named(param: &str, name: &str) -> Result<Self, Failure> {
        if let Some(&(_, found)) = TYPES.iter().find(|(known, _)| *known == name) {
            return Ok(found);
        }
        let near = nearest(name, TYPES.iter().map(|(known, _)| *known));
        let near = near.map_or(String::new(), |near| format!(" (did you mean `{near}`?)"));
        let known = TYPES.map(|(known, _)| known).join(", ");
        let name = excerpt(name);
        let problem = format!("`{param}` has the type `{name}`{near}; expected one of {known}");
        Err(Failure::invalid(param, problem))
    }

    pub fn name(self) -> &'static str {
        let found = TYPES.iter().find(|(_, known)| *known == self);
        found.map_or("float", |(name, _)| name)
    }

    /// Returns the estimated bytes of a vector of `width` values, in memory and in JSON.
    pub fn memory(self, width: usize) -> u64 {
        let width = width as u64;
        match self {
            Self::Float => 20 * width,
            Self::Int8 | Self::Uint8 => 6 * width,
            Self::Binary | Self::Ubinary => width,
            Self::Base64 => 12 * width,
        }
    }
}

/// A vocabulary entry of a sparse embedding.
#[derive(Serialize)]
pub(super) struct Weight {
    index: u32,
    value: f32,
}

/// Returns the vocabulary entries of a sparse embedding with their weights.
pub(super) fn weights(entries: &[u32], values: &[f32]) -> Vec<Weight> {
    let weights = entries.iter().zip(values);
    let weights = weights.map(|(&index, &value)| Weight { index, value });
    weights.collect()
}

/// Values of an embedding in a response.
#[derive(Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub(super) enum Values {
    Floats(Vec<f32>),
    Signed(Vec<i8>),
    Unsigned(Vec<u8>),
    Base64(String),
}

impl Values {
    /// Converts an embedding. If `is_base64`, the bytes of the values are encoded in base64, whatever their type.
    pub fn new(values: Vec<f32>, of: ValueType, is_base64: bool) -> Self {
        let converted = match of {
            ValueType::Float => Self::Floats(values),
            ValueType::Int8 => Self::Signed(int8(&values).collect()),
            ValueType::Uint8 => {
                let shifted = int8(&values).map(|value| value as u8 ^ 0x80);
                Self::Unsigned(shifted.collect())
            }
            ValueType::Binary => {
                Self::Signed(signs(&values).map(|byte| (byte ^ 0x80) as i8).collect())
            }
            ValueType::Ubinary => Self::Unsigned(signs(&values).collect()),
            ValueType::Base64 => return Self::Floats(values).into_base64(),
        };
        match is_base64 {
            true => converted.into_base64(),
            false => converted,
        }
    }

    fn into_base64(self) -> Self {
        let bytes: Vec<u8> = match self {
            Self::Floats(values) => values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect(),
            Self::Signed(values) => values.iter().map(|&value| value as u8).collect(),
            Self::Unsigned(values) => values,
            Self::Base64(_) => return self,
        };
        Self::Base64(base64(&bytes))
    }
}

/// Returns integers from -127 to 127 that are proportional to the values of a vector.
fn int8(vector: &[f32]) -> impl Iterator<Item = i8> {
    let max = vector.iter().fold(0f32, |max, value| max.max(value.abs()));
    let scale = max / 127.0;
    vector.iter().map(move |value| match scale > 0.0 {
        true => (value / scale).round().clamp(-127.0, 127.0) as i8,
        false => 0,
    })
}

/// Returns bits that are 1 for the positive values of a vector, eight per byte. The last byte is padded with zeros.
fn signs(vector: &[f32]) -> impl Iterator<Item = u8> {
    vector.chunks(8).map(|values| {
        let bits = values.iter().enumerate();
        bits.fold(0, |byte, (at, value)| {
            byte | (u8::from(*value > 0.0) << (7 - at))
        })
    })
}

/// Encodes bytes in base64 (RFC 4648, section 4).
fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_follows_the_standard() {
        // 1.0 and -2.5 as little-endian f32, encoded with Python's base64.
        let bytes = [0, 0, 128, 63, 0, 0, 32, 192, 0, 0, 0, 0];
        assert_eq!(base64(&[]), "");
        assert_eq!(base64(&bytes[..4]), "AACAPw==");
        assert_eq!(base64(&bytes[..8]), "AACAPwAAIMA=");
        assert_eq!(base64(&bytes), "AACAPwAAIMAAAAAA");
    }

    #[test]
    fn vectors_are_converted_to_each_type() {
        let vector = [0.5, -1.0, 0.004, 0.0, -0.1, 0.2, 0.3, -0.4, 0.1];
        let of = |of, is_base64| Values::new(vector.to_vec(), of, is_base64);
        let signed = vec![64, -127, 1, 0, -13, 25, 38, -51, 13];
        assert_eq!(of(ValueType::Int8, false), Values::Signed(signed));
        let unsigned = vec![192, 1, 129, 128, 115, 153, 166, 77, 141];
        assert_eq!(of(ValueType::Uint8, false), Values::Unsigned(unsigned));
        // The expected bits are the result of `numpy.packbits(vector > 0)`.
        let bits = Values::Unsigned(vec![0b1010_0110, 0b1000_0000]);
        assert_eq!(of(ValueType::Ubinary, false), bits);
        assert_eq!(of(ValueType::Binary, false), Values::Signed(vec![38, 0]));
        assert_eq!(
            of(ValueType::Binary, true),
            Values::Base64("JgA=".to_owned())
        );
        assert_eq!(
            of(ValueType::Base64, false),
            of(ValueType::Float, true),
            "a type of its own, and the encoding of floats"
        );
        let zeros = Values::new(vec![0.0, -0.0], ValueType::Int8, false);
        assert_eq!(zeros, Values::Signed(vec![0, 0]));
    }
}
