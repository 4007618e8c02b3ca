//! Fields of a request body. Errors name the field and the values that it accepts.

use std::{collections::BTreeMap, marker::PhantomData, ops::RangeInclusive};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _, IgnoredAny, MapAccess, Visitor},
};
use serde_json::Value;

use super::{
    Route,
    error::{Failure, MAX_QUOTED},
    fields::{Elsewhere, FieldTable, shown},
};
use crate::names::without_middle;

/// The fields of a request body, or of an object in the body, that the route supports.
pub(super) struct Fields {
    table: &'static FieldTable,
    route: Route,
    /// Path of the object with a trailing dot; empty for the body itself.
    prefix: &'static str,
    values: BTreeMap<&'static str, Value>,
    /// The whole body if it contains a field in [`ORDERED`]; empty otherwise.
    body: Vec<u8>,
}

/// Fields whose objects must keep the order of their keys, because a chat template prints them. [`Value`] does not keep the order, so
/// [`Fields::parsed`] parses these fields from the body.
const ORDERED: [&str; 3] = ["messages", "tools", "chat_template_kwargs"];

impl Fields {
    /// Parses a body, and checks it against `table`. Fields that the route ignores are skipped.
    ///
    /// # Errors
    /// Returns an error if the body is not a JSON object, has the same field twice, or has a field that the route neither supports nor
    /// ignores.
    pub fn read(table: &'static FieldTable, route: Route, body: Vec<u8>) -> Result<Self, Failure> {
        let mut failure = None;
        let reader = Reader {
            table,
            route,
            failure: &mut failure,
        };
        let mut from = serde_json::Deserializer::from_slice(&body);
        let values = from.deserialize_map(reader).and_then(|values| {
            from.end()?;
            Ok(values)
        });
        match values {
            Ok(values) => Ok(Self {
                table,
                route,
                prefix: "",
                body: match ORDERED.iter().any(|name| values.contains_key(name)) {
                    true => body,
                    false => Vec::new(),
                },
                values,
            }),
            Err(error) => Err(failure.unwrap_or_else(|| Failure::json(&error))),
        }
    }

    /// Returns the fields of the same body for `route`, one of the routes that `POST /` forwards to.
    ///
    /// # Errors
    /// Returns an error if `route` does not support a field and the field's value can change a response.
    pub fn narrowed(self, route: Route) -> Result<Self, Failure> {
        for (name, value) in &self.values {
            let known = self.table.get(name);
            if let Some(known) = known.filter(|known| !known.is_computed(route))
                && !known.is_neutral(value)
            {
                return Err(known.refusal(route, value));
            }
        }
        Ok(Self { route, ..self })
    }

    /// Returns whether a field is present and not null.
    pub fn has(&self, name: &str) -> bool {
        self.values.get(name).is_some_and(|value| !value.is_null())
    }

    /// Returns the text of a field, and keeps the field; `None` if its value is not a text.
    pub fn peek(&self, name: &str) -> Option<&str> {
        self.values.get(self.path(name)?).and_then(Value::as_str)
    }

    /// Returns the path of the field `name` of this object; `None` if the server does not recognize it.
    fn path<'n>(&self, name: &'n str) -> Option<&'n str> {
        match self.prefix {
            "" => Some(name),
            prefix => {
                let known = self.table.get(&format!("{prefix}{name}"));
                known.map(|known| known.name.as_str())
            }
        }
    }

    pub fn is_object(&self, name: &str) -> bool {
        self.values.get(name).is_some_and(Value::is_object)
    }

    /// Removes a field and returns its value; null if it is missing.
    pub fn value(&mut self, name: &'static str) -> Value {
        let path = self.path(name);
        let value = path.and_then(|path| self.values.remove(path));
        value.unwrap_or_default()
    }

    fn wrong(&self, name: &str, value: &Value, expected: &str) -> Failure {
        let path = format!("{}{name}", self.prefix);
        let found = match value.is_null() {
            true => "missing".to_owned(),
            false => shown(value),
        };
        let problem = format!("`{path}` is {found}; expected {expected}");
        Failure::invalid(&path, problem)
    }

    pub fn text(&mut self, name: &'static str) -> Result<Option<String>, Failure> {
        match self.value(name) {
            Value::Null => Ok(None),
            Value::String(text) => Ok(Some(text)),
            other => Err(self.wrong(name, &other, "a text")),
        }
    }

    pub fn required_text(&mut self, name: &'static str) -> Result<String, Failure> {
        let text = self.text(name)?;
        text.ok_or_else(|| self.wrong(name, &Value::Null, "a text"))
    }

    /// Reads a list of texts, which may be empty.
    pub fn texts(&mut self, name: &'static str) -> Result<Vec<String>, Failure> {
        let list = match self.value(name) {
            Value::Array(list) => list,
            other => return Err(self.wrong(name, &other, "a list of texts")),
        };
        let path = format!("{}{name}", self.prefix);
        let text = |(at, value): (usize, Value)| match value {
            Value::String(text) => Ok(text),
            other => {
                let problem = format!(
                    "item {at} of `{path}` is {}; expected a text",
                    shown(&other)
                );
                Err(Failure::invalid(&path, problem))
            }
        };
        list.into_iter().enumerate().map(text).collect()
    }

    pub fn flag(&mut self, name: &'static str) -> Result<Option<bool>, Failure> {
        match self.value(name) {
            Value::Null => Ok(None),
            Value::Bool(flag) => Ok(Some(flag)),
            other => Err(self.wrong(name, &other, "true or false")),
        }
    }

    /// Reads a whole number within a range. Also accepts `4.0`, which some clients write, because JSON has only one type of number.
    pub fn whole(
        &mut self,
        name: &'static str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, Failure> {
        let value = self.value(name);
        if value.is_null() {
            return Ok(None);
        }
        match as_whole(&value).filter(|n| range.contains(n)) {
            Some(n) => Ok(Some(n)),
            None => {
                let expected = match (*range.start(), *range.end()) {
                    (i64::MIN, i64::MAX) => "a whole number of 64 bits".to_owned(),
                    (min, i64::MAX) => format!("a whole number, at least {min}"),
                    (min, max) => format!("a whole number from {min} to {max}"),
                };
                Err(self.wrong(name, &value, &expected))
            }
        }
    }

    /// Reads a non-negative whole number within a range.
    pub fn count(
        &mut self,
        name: &'static str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<usize>, Failure> {
        let n = self.whole(name, range)?;
        Ok(n.map(|n| usize::try_from(n).unwrap_or(usize::MAX)))
    }

    /// Reads a number within a range. The end of the range may be infinite.
    pub fn number(
        &mut self,
        name: &'static str,
        range: RangeInclusive<f32>,
    ) -> Result<Option<f32>, Failure> {
        let value = self.value(name);
        if value.is_null() {
            return Ok(None);
        }
        let found = value.as_f64().map(|x| x as f32);
        match found.filter(|x| x.is_finite() && range.contains(x)) {
            Some(x) => Ok(Some(x)),
            None => {
                let expected = match range.end().is_finite() {
                    true => format!("a number from {} to {}", range.start(), range.end()),
                    false => format!("a number, at least {}", range.start()),
                };
                Err(self.wrong(name, &value, &expected))
            }
        }
    }

    /// Reads the fields of the object `name` in the body. If it is missing, the result has no fields. `prefix` is `name` followed by a dot.
    pub fn object(&mut self, name: &'static str, prefix: &'static str) -> Result<Self, Failure> {
        let given = match self.value(name) {
            Value::Null => Default::default(),
            Value::Object(given) => given,
            other => return Err(self.wrong(name, &other, "an object")),
        };
        let mut values = BTreeMap::new();
        for (own, value) in given {
            let path = format!("{prefix}{own}");
            match self.table.get(&path) {
                Some(known) if known.is_computed(self.route) => {
                    values.insert(known.name.as_str(), value);
                }
                Some(known) if known.is_neutral(&value) => {}
                Some(known) => return Err(known.refusal(self.route, &value)),
                None if value.is_null() => {}
                None => return Err(self.table.unknown(self.route, prefix, &own)),
            }
        }
        Ok(Self {
            table: self.table,
            route: self.route,
            prefix,
            values,
            body: Vec::new(),
        })
    }

    /// Parses a field of [`ORDERED`] from the body; `None` if it is missing or null.
    pub fn parsed<T: DeserializeOwned>(
        &mut self,
        name: &'static str,
    ) -> Result<Option<T>, Failure> {
        if self.values.remove(name).is_none() {
            return Ok(None);
        }
        let pick = Pick {
            name,
            value: PhantomData,
        };
        let picked = serde_json::Deserializer::from_slice(&self.body).deserialize_map(pick);
        picked.map_err(|error| {
            let problem = error.to_string();
            let problem = without_middle(&problem, MAX_QUOTED);
            Failure::invalid(name, format!("`{name}` is not valid: {problem}"))
        })
    }
}

/// Visitor that reads one field of a body.
struct Pick<T> {
    name: &'static str,
    value: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for Pick<T> {
    type Value = Option<T>;

    fn expecting(&self, formatter: &mut std::fmt::Formatter) -> std::fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Option<T>, A::Error> {
        let mut found = None;
        while let Some(name) = map.next_key::<String>()? {
            if name == self.name {
                found = map.next_value()?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

/// Converts a value to a whole number; `None` if it is not a whole number.
pub(super) fn as_whole(value: &Value) -> Option<i64> {
    // The smallest double that is greater than every `i64`.
    const LIMIT: f64 = (1_u64 << 63) as f64;
    value.as_i64().or_else(|| {
        let x = value.as_f64()?;
        (x.fract() == 0.0 && (-LIMIT..LIMIT).contains(&x)).then_some(x as i64)
    })
}

/// Visitor that reads the fields of a body and checks them against the table of known fields.
struct Reader<'a> {
    table: &'static FieldTable,
    route: Route,
    /// Error about a refused field, which replaces the error of serde.
    failure: &'a mut Option<Failure>,
}

impl Reader<'_> {
    fn refuse<E: serde::de::Error>(self, failure: Failure) -> E {
        *self.failure = Some(failure);
        E::custom("a field is refused")
    }
}

impl<'de> Visitor<'de> for Reader<'_> {
    type Value = BTreeMap<&'static str, Value>;

    fn expecting(&self, formatter: &mut std::fmt::Formatter) -> std::fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut values = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            let top_level = (!name.contains('.')).then_some(name.as_str());
            let Some(known) = top_level.and_then(|name| self.table.get(name)) else {
                match map.next_value::<Option<IgnoredAny>>()? {
                    None => continue,
                    Some(_) => {
                        let failure = self.table.unknown(self.route, "", &name);
                        return Err(self.refuse(failure));
                    }
                }
            };
            if known.is_computed(self.route) {
                let value = match ORDERED.contains(&known.name.as_str()) {
                    true => map.next_value::<IgnoredAny>().map(|_| Value::Bool(true))?,
                    false => map.next_value()?,
                };
                if values.insert(known.name.as_str(), value).is_some() {
                    return Err(A::Error::custom(format_args!(
                        "the field `{name}` is given twice"
                    )));
                }
            } else if known.elsewhere == Elsewhere::Ignored {
                map.next_value::<IgnoredAny>()?;
            } else {
                let value: Value = map.next_value()?;
                if !known.is_neutral(&value) {
                    let failure = known.refusal(self.route, &value);
                    return Err(self.refuse(failure));
                }
            }
        }
        Ok(values)
    }
}
