//! The interface to a model.

use std::{collections::VecDeque, error::Error, fmt};

use crate::Vectors;

/// An error of a model, which stops the run.
pub type ModelError = Box<dyn Error + Send + Sync>;

/// The texts of a row, one for each of [`Job::columns`](crate::Job::columns).
pub type Texts = Vec<String>;

/// Computes values from the texts of rows. [`run`](crate::run) calls all methods from one thread.
pub trait Model {
    /// Returns a string that changes whenever a computed value may change: it covers the model, revision, precision, prompt and truncation.
    ///
    /// An interrupted run resumes only with the same identity.
    fn identity(&self) -> String;

    /// Returns the columns that the model computes, at least one, in the order of the output.
    fn columns(&self) -> Vec<Column>;

    /// Begins a window. The rows are in the order of the input; the model may sort them by length and split them into batches.
    ///
    /// A run begins the next window before it finishes the current one, so a model that computes on its own threads always has work. Up to
    /// two windows are in progress. [`finish`](Self::finish) returns the errors of a window.
    fn begin(&mut self, rows: Vec<Texts>);

    /// Waits for the oldest window that is in progress, and returns its results.
    ///
    /// # Errors
    /// Returns an error for a failure that is not due to a single row. The error stops the run; finished windows are kept.
    fn finish(&mut self) -> Result<Results, ModelError>;
}

/// The results of a window.
#[derive(Clone, Debug, Default)]
pub struct Results {
    /// For each row in order, a value for each of [`Model::columns`], or the reason why the row is refused, such as "the text has 600
    /// tokens, and the model takes up to 512".
    pub rows: Vec<Result<Vec<Value>, String>>,
    /// Number of tokens of all texts, if known.
    pub tokens: Option<u64>,
}

/// A column that a model computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    pub name: String,
    pub kind: Kind,
}

impl Column {
    pub fn new(name: impl Into<String>, kind: Kind) -> Self {
        Self {
            name: name.into(),
            kind,
        }
    }
}

/// The type of a computed column. The table lists the value that a model returns for each kind, and the stored type in each output format.
/// A NumPy array supports only two kinds.
///
/// | kind | value | Parquet and Arrow | JSONL | NumPy |
/// |---|---|---|---|---|
/// | `Vector` | [`Value::Vector`] | list of fixed size | array | `[rows, width]` |
/// | `Vectors` | [`Value::Vectors`] | list of lists of fixed size | array of arrays | no |
/// | `Number` | [`Value::Number`] | 32-bit float | number | `[rows]` |
/// | `Integer` | [`Value::Integer`] | 64-bit integer | number | no |
/// | `Text` | [`Value::Text`] | string | string | no |
/// | `Records` | [`Value::Records`] | list of structs | array of objects | no |
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A vector of this width.
    Vector(usize),
    /// A list of vectors of this width. The number of vectors differs between rows.
    Vectors(usize),
    Number,
    Integer,
    Text,
    /// A list of records with these fields, which are numbers, integers or texts. The number of records differs between rows.
    Records(Vec<Column>),
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vector(width) => write!(f, "a vector of {width} values"),
            Self::Vectors(width) => write!(f, "vectors of {width} values"),
            Self::Number => f.write_str("a number"),
            Self::Integer => f.write_str("an integer"),
            Self::Text => f.write_str("a text"),
            Self::Records(fields) => {
                let names: Vec<_> = fields.iter().map(|field| field.name.as_str()).collect();
                write!(f, "records of {}", names.join(", "))
            }
        }
    }
}

/// A value of a computed column, of the [`Kind`] with the same name.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Vector(Vec<f32>),
    /// The vectors, one after another.
    Vectors(Vec<f32>),
    Number(f32),
    Integer(i64),
    Text(String),
    /// For each record, the values of its fields.
    Records(Vec<Vec<Value>>),
}

impl Kind {
    /// Checks whether a value is of this kind.
    fn fits(&self, value: &Value) -> bool {
        match (self, value) {
            (Self::Vector(width), Value::Vector(values)) => values.len() == *width,
            (Self::Vectors(width), Value::Vectors(values)) => values.len().is_multiple_of(*width),
            (Self::Number, Value::Number(_))
            | (Self::Integer, Value::Integer(_))
            | (Self::Text, Value::Text(_)) => true,
            (Self::Records(fields), Value::Records(records)) => {
                let fit = |record: &Vec<Value>| fit(fields, record);
                records.iter().all(fit)
            }
            _ => false,
        }
    }

    /// Returns the reason why a model cannot compute this kind; `None` if it can.
    fn problem(&self) -> Option<String> {
        match self {
            Self::Vector(width) | Self::Vectors(width) => {
                let is_good = *width > 0 && i32::try_from(*width).is_ok();
                (!is_good).then(|| format!("a vector of {width} values"))
            }
            Self::Number | Self::Integer | Self::Text => None,
            Self::Records(fields) => {
                let is_scalar = |field: &Column| {
                    matches!(field.kind, Self::Number | Self::Integer | Self::Text)
                };
                let other = fields.iter().find(|field| !is_scalar(field));
                match other {
                    Some(other) => Some(format!("records with {}", other.kind)),
                    None => fields
                        .is_empty()
                        .then(|| "records without fields".to_owned()),
                }
            }
        }
    }
}

/// Checks whether a row has a value of the right kind for each column.
pub(crate) fn fit(columns: &[Column], row: &[Value]) -> bool {
    let mut pairs = columns.iter().zip(row);
    columns.len() == row.len() && pairs.all(|(column, value)| column.kind.fits(value))
}

/// Returns the reason why the columns cannot be computed; `None` if they can.
pub(crate) fn problem(columns: &[Column]) -> Option<String> {
    match columns.is_empty() {
        true => Some("it computes no column".to_owned()),
        false => columns.iter().find_map(|column| column.kind.problem()),
    }
}

/// Returns the reason why a value cannot be written; `None` if it can.
pub(crate) fn unwritable(value: &Value, vectors: Vectors) -> Option<String> {
    let finite = |value: &f32| {
        let is_bad = !value.is_finite();
        is_bad.then(|| format!("the model gave the value {value}"))
    };
    match value {
        Value::Vector(values) | Value::Vectors(values) => {
            values.iter().find_map(finite).or_else(|| {
                let is_held = |value: &&f32| half::f16::from_f32(**value).is_finite();
                let large = values.iter().find(|value| !is_held(value));
                let large = large.filter(|_| vectors == Vectors::F16);
                large.map(|value| {
                    format!("the model gave the value {value}, and the max of f16 is 65504")
                })
            })
        }
        Value::Number(value) => finite(value),
        Value::Integer(_) | Value::Text(_) => None,
        Value::Records(records) => {
            let mut all = records.iter().flatten();
            all.find_map(|value| unwritable(value, vectors))
        }
    }
}

/// A model that computes each window by calling a function in [`Model::finish`].
#[derive(Clone, Debug)]
pub struct Function<F> {
    identity: String,
    columns: Vec<Column>,
    compute: F,
    begun: VecDeque<Vec<Texts>>,
}

impl<F> Function<F>
where
    F: FnMut(&[Texts]) -> Result<Results, ModelError>,
{
    /// Creates a model with an [identity](Model::identity) and [columns](Model::columns). `compute` returns the results of a window, as
    /// [`Model::finish`] does.
    pub fn new(identity: impl Into<String>, columns: Vec<Column>, compute: F) -> Self {
        Self {
            identity: identity.into(),
            columns,
            compute,
            begun: VecDeque::new(),
        }
    }
}

impl<F> Model for Function<F>
where
    F: FnMut(&[Texts]) -> Result<Results, ModelError>,
{
    fn identity(&self) -> String {
        self.identity.clone()
    }

    fn columns(&self) -> Vec<Column> {
        self.columns.clone()
    }

    fn begin(&mut self, rows: Vec<Texts>) {
        self.begun.push_back(rows);
    }

    fn finish(&mut self) -> Result<Results, ModelError> {
        let rows = self.begun.pop_front().unwrap_or_default();
        (self.compute)(&rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_cannot_be_written() {
        let bad = |values: &[f32], vectors| {
            unwritable(&Value::Vector(values.to_vec()), vectors).is_some()
        };
        assert!(bad(&[1.0, f32::NAN], Vectors::F32));
        assert!(bad(&[f32::NEG_INFINITY], Vectors::Binary));
        assert!(bad(&[70_000.0], Vectors::F16));
        assert!(!bad(&[70_000.0], Vectors::F32));
        assert!(!bad(&[65_504.0], Vectors::F16));
        let record = |score| Value::Records(vec![vec![Value::Number(score)]]);
        assert!(unwritable(&record(f32::NAN), Vectors::F32).is_some());
        assert!(unwritable(&record(70_000.0), Vectors::F16).is_none());
    }

    #[test]
    fn rows_fit_their_columns() {
        let fields = vec![
            Column::new("label", Kind::Text),
            Column::new("score", Kind::Number),
        ];
        let columns = [
            Column::new("v", Kind::Vectors(2)),
            Column::new("labels", Kind::Records(fields)),
        ];
        let row = |n: usize, record: Vec<Value>| {
            fit(
                &columns,
                &[Value::Vectors(vec![0.0; n]), Value::Records(vec![record])],
            )
        };
        let label = || vec![Value::Text("a".to_owned()), Value::Number(0.5)];
        assert!(row(0, label()) && row(4, label()));
        assert!(!row(3, label()));
        assert!(!row(4, vec![Value::Number(0.5)]));
        assert!(!fit(&columns, &[Value::Vectors(Vec::new())]));
        assert_eq!(problem(&columns), None);
        assert!(problem(&[]).is_some());
        assert!(problem(&[Column::new("v", Kind::Vector(0))]).is_some());
        let nested = Kind::Records(vec![Column::new("v", Kind::Vector(2))]);
        assert!(problem(&[Column::new("r", nested)]).is_some());
    }
}
