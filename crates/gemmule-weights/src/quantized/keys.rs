//! Keys of a JSON object. Each has its path in config.json for messages.

use serde_json::{Map, Value};

use super::error::{Result, wrong_key};
use crate::pickle::shown;

/// An object of config.json. Reading a key removes it, so the keys that remain at the end are unknown.
pub(super) struct Keys {
    path: String,
    map: Map<String, Value>,
}

impl Keys {
    /// Returns the keys of the object at `path`.
    pub fn of(path: String, value: Value) -> Result<Self> {
        match value {
            Value::Object(map) => Ok(Self { path, map }),
            other => Err(wrong_key(
                &path,
                format!("is {}, expected an object", kind(&other)),
            )),
        }
    }

    /// Returns the full path of a key.
    pub fn path(&self, key: &str) -> String {
        format!("{}.{key}", self.path)
    }

    /// Removes a key and returns its value. A null value counts as absent.
    pub fn take(&mut self, key: &str) -> Option<Value> {
        self.map.remove(key).filter(|value| !value.is_null())
    }

    /// Removes all synonyms of a key. Returns the first one that exists, with its value.
    ///
    /// # Errors
    /// Returns an error if two synonyms have different values.
    fn take_any(&mut self, names: &[&str]) -> Result<Option<(String, Value)>> {
        let mut found: Option<(String, Value)> = None;
        for &name in names {
            let Some(value) = self.take(name) else {
                continue;
            };
            match &found {
                None => found = Some((self.path(name), value)),
                Some((first, other)) if !are_equal(other, &value) => {
                    let problem = format!(
                        "differs from `{}`, which has the same meaning; remove one of them",
                        shown(first)
                    );
                    return Err(wrong_key(&self.path(name), problem));
                }
                Some(_) => {}
            }
        }
        Ok(found)
    }

    pub fn whole(&mut self, names: &[&str]) -> Result<Option<i64>> {
        let Some((key, value)) = self.take_any(names)? else {
            return Ok(None);
        };
        let wrong = || {
            wrong_key(
                &key,
                format!("is {}, expected a whole number", kind(&value)),
            )
        };
        value.as_i64().ok_or_else(wrong).map(Some)
    }

    pub fn flag(&mut self, key: &str) -> Result<Option<bool>> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        let wrong = || {
            let problem = format!("is {}, expected true or false", kind(&value));
            wrong_key(&self.path(key), problem)
        };
        value.as_bool().ok_or_else(wrong).map(Some)
    }

    /// Removes a string, and returns it in lower case.
    pub fn text(&mut self, names: &[&str]) -> Result<Option<String>> {
        match self.take_any(names)? {
            None => Ok(None),
            Some((_, Value::String(text))) => Ok(Some(text.to_lowercase())),
            Some((key, other)) => Err(wrong_key(
                &key,
                format!("is {}, expected a text", kind(&other)),
            )),
        }
    }

    /// Removes a list of strings, and returns it with the path of its key.
    pub fn texts(&mut self, names: &[&str]) -> Result<Option<(String, Vec<String>)>> {
        let Some((key, value)) = self.take_any(names)? else {
            return Ok(None);
        };
        let wrong = |found: &str| wrong_key(&key, format!("is {found}, expected a list of texts"));
        let Value::Array(items) = value else {
            return Err(wrong(kind(&value)));
        };
        let texts = items.into_iter().map(|item| match item {
            Value::String(text) => Ok(text),
            other => Err(wrong(&format!("a list with {}", kind(&other)))),
        });
        let texts = texts.collect::<Result<Vec<_>>>()?;
        Ok(Some((key, texts)))
    }

    /// Removes a pair of positive sizes: a list of two integers, or a string such as `128x128`.
    pub fn pair(&mut self, key: &str) -> Result<Option<[u64; 2]>> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        let sizes: Vec<Option<u64>> = match &value {
            Value::Array(items) => items.iter().map(Value::as_u64).collect(),
            Value::String(text) => text.split('x').map(|part| part.parse().ok()).collect(),
            _ => Vec::new(),
        };
        match sizes.as_slice() {
            &[Some(rows @ 1..), Some(columns @ 1..)] => Ok(Some([rows, columns])),
            _ => {
                let problem = format!(
                    "is {}, expected a list of two positive whole numbers",
                    kind(&value)
                );
                Err(wrong_key(&self.path(key), problem))
            }
        }
    }

    /// Removes an object.
    pub fn object(&mut self, key: &str) -> Result<Option<Self>> {
        let path = self.path(key);
        self.take(key)
            .map(|value| Self::of(path, value))
            .transpose()
    }

    /// Returns the full path and the value of each key.
    pub fn entries(self) -> impl Iterator<Item = (String, Value)> {
        let path = self.path;
        let paths = self.map.into_iter();
        paths.map(move |(key, value)| (format!("{path}.{key}"), value))
    }

    /// Returns the paths of the remaining keys, except for `harmless` keys, which affect no weight.
    pub fn unknown(self, harmless: &[&str]) -> Vec<String> {
        let rest = self.map.iter().filter(|(_, value)| !value.is_null());
        let unknown = rest.filter(|(key, _)| !harmless.contains(&key.as_str()));
        unknown.map(|(key, _)| shown(&self.path(key))).collect()
    }
}

/// Compares values, ignoring the case of strings.
fn are_equal(a: &Value, b: &Value) -> bool {
    match (a.as_str(), b.as_str()) {
        (Some(a), Some(b)) => a.eq_ignore_ascii_case(b),
        _ => a == b,
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
