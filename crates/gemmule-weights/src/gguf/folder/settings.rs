//! Metadata of an architecture.

use super::{
    super::{Gguf, GgufProblem, Value, error::Result},
    names::Architecture,
    wrong_key,
};

/// The metadata of a file. Keys are given without the prefix of the architecture.
#[derive(Clone, Copy)]
pub(super) struct Settings<'g> {
    pub gguf: &'g Gguf,
    pub architecture: &'static Architecture,
}

impl<'g> Settings<'g> {
    /// Returns a key with the architecture's prefix.
    pub(super) fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.name)
    }

    pub(super) fn integer(&self, key: &str) -> Result<Option<u64>> {
        let expected = "an integer of at least 0, for all layers";
        self.gguf.value(&self.key(key), expected, Value::as_u64)
    }

    pub(super) fn real(&self, key: &str) -> Result<Option<f64>> {
        let key = self.key(key);
        let value = self
            .gguf
            .value(&key, "a real number", |value| match *value {
                Value::F32(x) => Some(decimal(x)),
                Value::F64(x) => Some(x),
                _ => None,
            })?;
        match value {
            Some(x) if !x.is_finite() => Err(wrong_key(
                &key,
                format!("it is {x}; expected a finite number"),
            )),
            _ => Ok(value),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.gguf
            .value(&self.key(key), "a truth value", Value::as_bool)
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'g str>> {
        self.gguf.value(&self.key(key), "a string", Value::as_str)
    }

    /// Returns an integer that must exist and be positive.
    pub(super) fn count(&self, key: &str) -> Result<u64> {
        match self.integer(key)? {
            Some(0) => Err(wrong_key(&self.key(key), "it is 0; expected at least 1")),
            Some(n) if n > u64::from(u32::MAX) => Err(wrong_key(
                &self.key(key),
                format!("it is {n}; expected at most {}", u32::MAX),
            )),
            Some(n) => Ok(n),
            None => Err(GgufProblem::NoKey {
                key: self.key(key),
                expected: "an integer of at least 1".to_owned(),
            }),
        }
    }

    /// Returns a real number that must exist.
    pub(super) fn number(&self, key: &str) -> Result<f64> {
        self.real(key)?.ok_or_else(|| GgufProblem::NoKey {
            key: self.key(key),
            expected: "a real number".to_owned(),
        })
    }

    /// Returns whether the file has a tensor.
    pub(super) fn has(&self, tensor: &str) -> bool {
        self.gguf.tensor(tensor).is_some()
    }

    /// Returns the number of rows of a tensor that must exist.
    pub(super) fn rows(&self, tensor: &str) -> Result<u64> {
        let found = self.gguf.tensor(tensor);
        match found.map(|tensor| tensor.dims.as_slice()) {
            Some(&[rows, _]) => Ok(rows),
            Some(dims) => Err(super::wrong_tensor(
                tensor,
                format!("it has the sizes {dims:?}; expected a matrix"),
            )),
            None => Err(super::wrong_tensor(
                tensor,
                "it is missing; the file is no whole model, convert or download it again",
            )),
        }
    }
}

/// Returns the number with the shortest decimal form that rounds to this f32: 1e-5 rather than 9.99999974737875e-6.
pub(super) fn decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}
