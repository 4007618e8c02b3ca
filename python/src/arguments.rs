//! Texts and lists of texts as arguments.

use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    types::{PyBytes, PyDict, PyString},
};

use crate::error::{Error, Result};

/// One text, or several.
pub struct Texts {
    pub texts: Vec<String>,
    /// Whether the argument was a single text. The result then has no dimension for the texts.
    pub is_single: bool,
}

/// Returns the name of a value's type, for error messages.
pub fn kind_of(value: &Bound<'_, PyAny>) -> String {
    let name = value.get_type().name();
    name.map_or_else(|_| "of an unknown type".to_owned(), |name| name.to_string())
}

fn wrong(name: &str, value: &Bound<'_, PyAny>, expected: &str) -> Error {
    let found = kind_of(value);
    Error::Python(PyTypeError::new_err(format!(
        "{name} is {found}; expected {expected}"
    )))
}

/// Copies a text. `name` returns the name of the argument, for errors.
///
/// # Errors
/// Returns an error if the value is not a `str`, or if it has lone surrogates, which UTF-8 cannot represent.
pub fn text(value: &Bound<'_, PyAny>, name: impl Fn() -> String) -> Result<String> {
    let Ok(string) = value.cast::<PyString>() else {
        return Err(wrong(&name(), value, "str"));
    };
    match string.to_str() {
        Ok(text) => Ok(text.to_owned()),
        Err(_) => Err(Error::Input(format!(
            "{} has a lone surrogate (U+D800 to U+DFFF), which is half of a character; decode the text with another error handler than `surrogateescape` or `surrogatepass`",
            name()
        ))),
    }
}

/// Copies a text, or each text of a list or another iterable.
///
/// # Errors
/// Returns an error if the list is empty, and the errors of [`text`].
pub fn texts(value: &Bound<'_, PyAny>, name: &str) -> Result<Texts> {
    if value.is_instance_of::<PyString>() {
        return Ok(Texts {
            texts: vec![text(value, || name.to_owned())?],
            is_single: true,
        });
    }
    let texts = items(value, name, "str or a list of str", |item, index| {
        text(item, || format!("{name}[{index}]"))
    })?;
    Ok(Texts {
        texts,
        is_single: false,
    })
}

/// Converts each item of a list or another iterable.
///
/// # Errors
/// Returns an error if the value is empty or not iterable, and the errors of `convert`.
pub fn items<T>(
    value: &Bound<'_, PyAny>,
    name: &str,
    expected: &str,
    convert: impl Fn(&Bound<'_, PyAny>, usize) -> Result<T>,
) -> Result<Vec<T>> {
    let has_other_items = value.is_instance_of::<PyString>()
        || value.is_instance_of::<PyBytes>()
        || value.is_instance_of::<PyDict>();
    let iterator = match value.try_iter() {
        Ok(iterator) if !has_other_items => iterator,
        _ => return Err(wrong(name, value, expected)),
    };
    let mut converted = Vec::new();
    for (index, item) in iterator.enumerate() {
        converted.push(convert(&item?, index)?);
    }
    match converted.is_empty() {
        true => Err(Error::Input(format!(
            "{name} is empty; expected at least one item"
        ))),
        false => Ok(converted),
    }
}

/// Copies a pair of texts.
///
/// # Errors
/// Returns an error if the value is not a tuple or list of two texts.
pub fn pair(value: &Bound<'_, PyAny>, name: &str) -> Result<(String, String)> {
    let expected = "a pair of str";
    let both = items(value, name, expected, |item, index| {
        text(item, || format!("{name}[{index}]"))
    })?;
    match <[String; 2]>::try_from(both) {
        Ok([query, document]) => Ok((query, document)),
        Err(other) => Err(Error::Input(format!(
            "{name} has {} items; expected a pair: a query and a document",
            other.len()
        ))),
    }
}
