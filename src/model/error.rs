//! Errors of descriptions, shown with file, line, column and a suggested fix.

use std::{fmt, ops::Range, sync::Arc};

use crate::{
    graph::GraphError,
    tensor::{Shape, Size, Symbol},
};

/// A problem without its source position. Values are quoted as the user wrote them.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    #[error("this is not RON: {message}")]
    Syntax { message: String },
    #[error("the description has {bytes} bytes; at most {limit} are read")]
    TooLong { bytes: usize, limit: usize },
    #[error("line {line} has {bytes} bytes; at most {limit} are read; break it")]
    LongLine {
        line: usize,
        bytes: usize,
        limit: usize,
    },
    #[error(
        "line {line}, column {column} has the raw control character U+{code:04X}; remove it, or write it as an escape in a string"
    )]
    Control {
        line: usize,
        column: usize,
        code: u32,
    },
    #[error("{what}: expected {expected}, found {found}")]
    Form {
        what: String,
        expected: String,
        found: String,
    },
    /// An operator, statement or field that does not exist in the language.
    #[error("there is no {what} `{name}`")]
    Unknown { what: String, name: String },
    #[error("`{owner}` lacks the field `{field}`")]
    MissingField { owner: String, field: &'static str },
    #[error("the {what} `{name}` is not defined")]
    Undefined { what: &'static str, name: String },
    #[error("the {what} `{name}` is defined twice")]
    DefinedTwice { what: &'static str, name: String },
    #[error("the {what} `{name}` is used before it is defined")]
    UsedTooEarly { what: &'static str, name: String },
    #[error("the value `{name}` is computed from itself")]
    SelfReference { name: String },
    #[error("the values `{first}` and `{second}` are computed from each other")]
    Cycle { first: String, second: String },
    #[error("`{text}` is not an expression: {message}")]
    Expression { text: String, message: String },
    #[error("`{text}` has no value: {message}")]
    Arithmetic { text: String, message: String },
    #[error("{what} is {found}; expected {expected}")]
    OutOfRange {
        what: String,
        found: String,
        expected: String,
    },
    #[error("the description unrolls to more than {limit} values")]
    TooManyValues { limit: u64 },
    #[error("config.json holds {found}; expected an object")]
    ConfigNotAnObject { found: &'static str },
    #[error("config.json: `{key}` is {found}; expected {expected}")]
    ConfigValue {
        key: String,
        found: String,
        expected: String,
    },
    #[error("the {what} `{name}` has no value: config.json has no {keys}")]
    NoValue {
        what: &'static str,
        name: String,
        keys: String,
    },
    #[error("config.json: `{key}` is {found}, but this description is for {expected}")]
    Requirement {
        key: String,
        found: String,
        expected: String,
    },
    /// The checkpoint is for another model than the description.
    #[error(
        "config.json: `model_type` is `{found}`, but the description `{name}` is for {expected}"
    )]
    OtherModel {
        name: String,
        found: String,
        expected: String,
    },
    /// The description lacks the checkpoint's head.
    #[error(
        "config.json: `architectures` names `{found}`, whose head the description `{name}` does not have; it has {expected}"
    )]
    Head {
        name: String,
        found: String,
        expected: String,
    },
    #[error("config.json has no `model_type`, and no description is for its `architectures`")]
    NoModelType,
    #[error("no shipped description supports the `model_type` `{found}` of config.json")]
    UnknownModelType { found: String },
    #[error("{}the activation `{name}` is not known", key.as_ref().map(|key| format!("config.json: `{key}`: ")).unwrap_or_default())]
    Activation { name: String, key: Option<String> },
    #[error("shapes do not match: {0}")]
    Shape(GraphError),
    #[error("the graph is invalid: {0}")]
    Graph(GraphError),
    #[error("`{name}`: `matmul` cannot multiply {a} by {b}{transposed}")]
    Matmul {
        name: String,
        a: String,
        b: String,
        transposed: &'static str,
    },
    #[error("the weight `{weight}` is used as {found}, but elsewhere as {before}")]
    WeightShape {
        weight: String,
        found: String,
        before: String,
    },
    #[error("no `embedding` reads `token_ids`, so the model takes no tokens")]
    NoTokens,
    #[error("{place}: expected {expected} × `{what}`, found {found}")]
    Expectation {
        place: String,
        what: String,
        expected: usize,
        found: usize,
    },
    #[error("the description has no output `{name}`")]
    UnknownOutput { name: String },
    #[error("no output was requested")]
    NoOutput,
}

impl Problem {
    pub(super) fn out_of_range(
        what: impl ToString,
        found: impl ToString,
        expected: impl ToString,
    ) -> Self {
        Self::OutOfRange {
            what: what.to_string(),
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }

    pub(super) fn undefined(what: &'static str, name: impl ToString) -> Self {
        let name = name.to_string();
        Self::Undefined { what, name }
    }

    pub(super) fn defined_twice(what: &'static str, name: impl ToString) -> Self {
        let name = name.to_string();
        Self::DefinedTwice { what, name }
    }
}

/// A [`Problem`] with its position in the description and a help text. With the feature `miette`, the error is a diagnostic that shows the
/// source line with a caret.
#[derive(Debug)]
pub struct ModelError(Box<Inner>);

#[derive(Debug)]
struct Inner {
    problem: Problem,
    file: File,
    labels: Vec<Label>,
    help: Option<String>,
}

/// A text at a byte range of the description.
#[derive(Debug)]
struct Label {
    text: String,
    span: Range<usize>,
}

impl ModelError {
    pub fn problem(&self) -> &Problem {
        &self.0.problem
    }

    /// Byte range in the description that the problem is about; `None` if the problem is about another file.
    pub fn span(&self) -> Option<Range<usize>> {
        self.0.labels.first().map(|label| label.span.clone())
    }

    /// Name of the description's file.
    pub fn file_name(&self) -> &str {
        &self.0.file.0.name
    }

    /// Short text about the [`span`](Self::span).
    pub fn label(&self) -> Option<&str> {
        self.0.labels.first().map(|label| label.text.as_str())
    }

    /// Suggested fix.
    pub fn suggestion(&self) -> Option<&str> {
        self.0.help.as_deref()
    }

    pub(super) fn help(mut self, help: impl Into<String>) -> Self {
        self.0.help = Some(help.into());
        self
    }

    /// Adds a label at a second position.
    pub(super) fn also(mut self, span: &Range<usize>, label: impl Into<String>) -> Self {
        self.0.labels.push(Label {
            text: label.into(),
            span: span.clone(),
        });
        self
    }
}

impl fmt::Display for ModelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.problem.fmt(f)
    }
}

impl std::error::Error for ModelError {}

#[cfg(feature = "miette")]
mod diagnostic {
    use std::fmt;

    use miette::{
        Diagnostic, LabeledSpan, MietteError, MietteSpanContents, SourceCode, SourceSpan,
        SpanContents,
    };

    use super::{ModelError, Source};

    impl Diagnostic for ModelError {
        fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
            let help = self.0.help.as_ref()?;
            Some(Box::new(help))
        }

        fn source_code(&self) -> Option<&dyn SourceCode> {
            Some(&*self.0.file.0)
        }

        fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
            let labels = self.0.labels.iter();
            Some(Box::new(labels.map(|label| {
                LabeledSpan::new_with_span(Some(label.text.clone()), label.span.clone())
            })))
        }
    }

    impl SourceCode for Source {
        fn read_span<'a>(
            &'a self,
            span: &SourceSpan,
            lines_before: usize,
            lines_after: usize,
        ) -> Result<Box<dyn SpanContents<'a> + 'a>, MietteError> {
            let read = self.text.read_span(span, lines_before, lines_after)?;
            Ok(Box::new(MietteSpanContents::new_named(
                self.name.clone(),
                read.data(),
                *read.span(),
                read.line(),
                read.column(),
                read.line_count(),
            )))
        }
    }
}

/// Source text and file name of a description, shared by all errors about it.
#[derive(Clone, Debug)]
pub(super) struct File(Arc<Source>);

#[derive(Debug)]
struct Source {
    /// File name, shown with the text.
    name: String,
    text: String,
}

impl File {
    pub fn new(name: &str, text: &str) -> Self {
        Self(Arc::new(Source {
            name: name.to_owned(),
            text: text.to_owned(),
        }))
    }

    pub fn name(&self) -> &str {
        &self.0.name
    }

    pub fn text(&self) -> &str {
        &self.0.text
    }

    /// Creates an error at `span`, with `label` at the caret.
    pub fn error(
        &self,
        problem: Problem,
        span: &Range<usize>,
        label: impl Into<String>,
    ) -> ModelError {
        self.error_elsewhere(problem).also(span, label)
    }

    /// Creates an error about something outside the description's text.
    pub fn error_elsewhere(&self, problem: Problem) -> ModelError {
        ModelError(Box::new(Inner {
            problem,
            file: self.clone(),
            labels: Vec::new(),
            help: None,
        }))
    }
}

/// A value and its byte range in the description.
#[derive(Clone, Debug)]
pub(super) struct At<T> {
    pub value: T,
    pub span: Range<usize>,
}

impl<T> At<T> {
    pub fn new(value: T, span: Range<usize>) -> Self {
        Self { value, span }
    }
}

/// Returns "did you mean `x`?" if a candidate is similar, and the list of candidates otherwise.
pub(super) fn suggest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> String {
    let candidates: Vec<&str> = candidates.into_iter().collect();
    match nearest(name, &candidates) {
        Some(near) => format!("did you mean `{near}`?"),
        None => match candidates.as_slice() {
            [] => "none is defined here".to_owned(),
            [one] => format!("there is `{one}`"),
            several => format!("there are {}", quoted(several)),
        },
    }
}

/// Returns the candidate that a typing error could turn into `name`.
pub(super) fn nearest<'a>(name: &str, candidates: &[&'a str]) -> Option<&'a str> {
    // The time to compute the distance is proportional to the product of the lengths of the two names, and a wrong name may be arbitrarily
    // long. Names above this length are therefore not compared.
    const LONGEST: usize = 96;
    let n = name.chars().count();
    if n > LONGEST {
        return None;
    }
    candidates
        .iter()
        .filter_map(|&c| {
            let m = c.chars().count();
            let most = 1 + m.min(n) / 3;
            let near = m.abs_diff(n) <= most;
            let distance = near.then(|| strsim::damerau_levenshtein(name, c))?;
            (distance <= most).then_some((distance, c))
        })
        .min()
        .map(|(_, c)| c)
}

/// Formats a list as "`a`, `b` and `c`".
pub(super) fn quoted(names: &[&str]) -> String {
    let quoted: Vec<String> = names.iter().map(|n| format!("`{n}`")).collect();
    match quoted.as_slice() {
        [] => "none".to_owned(),
        [one] => one.clone(),
        [rest @ .., last] => format!("{} and {last}", rest.join(", ")),
    }
}

/// Describes a shape in words: "384 values for each token".
pub(super) fn words(shape: &Shape) -> String {
    let row = |s: &Size| match s.as_symbol() {
        Some(Symbol::Tokens) => Some("token"),
        Some(Symbol::Batch) => Some("sequence"),
        Some(Symbol::Pairs) => Some("pair of tokens"),
        _ => None,
    };
    match shape.0.as_slice() {
        [rows] if row(rows).is_some() => format!("one value for each {}", row(rows).unwrap_or("")),
        [rows, width] if row(rows).is_some() => {
            format!("{width} values for each {}", row(rows).unwrap_or(""))
        }
        [heads, pairs] if row(pairs).is_some() => {
            format!(
                "one value for each of {heads} heads and each {}",
                row(pairs).unwrap_or("")
            )
        }
        [heads, tokens, head] if row(tokens).is_some() => {
            format!(
                "{heads} heads of {head} values for each {}",
                row(tokens).unwrap_or("")
            )
        }
        _ => shape.to_string(),
    }
}
