//! JSON files of a folder, and their error messages.

use std::path::PathBuf;

use serde_json::{Map, Value};

use crate::{files::Kind, names::nearest, runtime::weights::ModelFiles, text::TextError};

/// The value of a JSON file, with the file's name for error messages.
pub(super) struct Json {
    pub(super) file: PathBuf,
    pub(super) value: Value,
}

impl Json {
    /// Reads a JSON file; `None` if it does not exist.
    pub(super) fn optional(files: &ModelFiles, name: &str) -> Result<Option<Self>, TextError> {
        let text = files.text(name, Kind::Config)?;
        text.map(|text| Self::parse(files.name(name), &text))
            .transpose()
    }

    pub(super) fn read(files: &ModelFiles, name: &str) -> Result<Self, TextError> {
        match Self::optional(files, name)? {
            Some(json) => Ok(json),
            None => Err(files.missing(name).into()),
        }
    }

    fn parse(file: PathBuf, text: &str) -> Result<Self, TextError> {
        match serde_json::from_str(text) {
            Ok(value) => Ok(Self { file, value }),
            Err(e) => Err(TextError::Folder {
                file,
                problem: format!("it is not JSON: {e}"),
            }),
        }
    }

    /// Returns the value of a key; `None` if it is missing or null.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.value.get(key).filter(|v| !v.is_null())
    }

    pub(super) fn problem(&self, problem: impl Into<String>) -> TextError {
        TextError::Folder {
            file: self.file.clone(),
            problem: problem.into(),
        }
    }

    pub(super) fn wrong(&self, key: &str, expected: &str) -> TextError {
        let found = self.get(key).unwrap_or(&Value::Null);
        self.problem(format!("`{key}` is {found}; expected {expected}"))
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&str>, TextError> {
        let text = |v: &'_ Value| v.is_string();
        match self.get(key) {
            None => Ok(None),
            Some(v) if text(v) => Ok(v.as_str()),
            Some(_) => Err(self.wrong(key, "a string")),
        }
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool, TextError> {
        match self.get(key) {
            None => Ok(default),
            Some(v) => v.as_bool().ok_or_else(|| self.wrong(key, "true or false")),
        }
    }

    /// Returns a flag; `None` if it is missing or null.
    pub(super) fn optional_flag(&self, key: &str) -> Result<Option<bool>, TextError> {
        match self.get(key) {
            None => Ok(None),
            Some(_) => self.flag(key, false).map(Some),
        }
    }

    /// Returns a whole number from 1 to `max`; `None` if it is missing or null.
    pub(super) fn count(&self, key: &str, max: u32) -> Result<Option<u32>, TextError> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => {
                let count = v.as_u64().and_then(|n| u32::try_from(n).ok());
                let count = count.filter(|n| (1..=max).contains(n));
                count
                    .map(Some)
                    .ok_or_else(|| self.wrong(key, &format!("a whole number from 1 to {max}")))
            }
        }
    }

    pub(super) fn needed(&self, key: &str, max: u32) -> Result<u32, TextError> {
        self.count(key, max)?
            .ok_or_else(|| self.problem(format!("there is no `{key}`")))
    }

    /// Returns an object of settings by name; empty if it is missing.
    pub(super) fn object(&self, key: &str) -> Result<Map<String, Value>, TextError> {
        match self.get(key) {
            None => Ok(Map::new()),
            Some(Value::Object(object)) => Ok(object.clone()),
            Some(_) => Err(self.wrong(key, "an object")),
        }
    }

    /// Returns an error if the file is not a JSON object, or if it has an unknown key, which might change results.
    pub(super) fn check_keys(&self, known: &[&str]) -> Result<(), TextError> {
        let object = self.value.as_object();
        let object = object.ok_or_else(|| self.problem("expected an object"))?;
        check_known(object, known).map_err(|problem| self.problem(problem))
    }

    /// Returns the name of a class of torch, such as `Tanh` of `torch.nn.modules.activation.Tanh`. A class of another package is an error,
    /// since a class of the same name may compute something else.
    pub(super) fn class(&self, key: &str) -> Result<Option<&str>, TextError> {
        match self.text(key)? {
            None => Ok(None),
            Some(path) if path.starts_with("torch.") => Ok(path.rsplit('.').next()),
            Some(_) => Err(self.wrong(key, "a class of torch")),
        }
    }
}

/// Returns an error that names the first key of `object` that is not in `known`.
pub(super) fn check_known(object: &Map<String, Value>, known: &[&str]) -> Result<(), String> {
    let Some(key) = object.keys().find(|key| !known.contains(&key.as_str())) else {
        return Ok(());
    };
    let near = nearest(key, known.iter().copied());
    let near = near.map_or_else(String::new, |near| format!(" (did you mean `{near}`?)"));
    Err(format!(
        "`{key}` is not known{near}; remove it if it has no effect on the results"
    ))
}
