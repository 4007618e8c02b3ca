//! Errors of parsing and rendering.

/// Maximum number of characters of a message.
const MAX_MESSAGE: usize = 1000;

/// An error of parsing or rendering a template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub kind: Kind,
    pub message: String,
    /// Line of the template, counted from 1.
    pub line: Option<u32>,
}

/// Kind of an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The template is invalid, or an operation fails for the values of the variables.
    Failed,
    /// The template refuses the conversation with `raise_exception`.
    Refused,
    /// Rendering would exceed a limit.
    Limit,
    /// The messages are invalid for any template.
    Messages,
}

pub type Result<T> = std::result::Result<T, Box<Error>>;

impl Error {
    pub fn failed(message: impl Into<String>) -> Box<Self> {
        Self::new(Kind::Failed, message.into())
    }

    pub fn refused(message: impl Into<String>) -> Box<Self> {
        Self::new(Kind::Refused, message.into())
    }

    pub fn messages(message: impl Into<String>) -> Box<Self> {
        Self::new(Kind::Messages, message.into())
    }

    pub fn limit(message: impl Into<String>) -> Box<Self> {
        Self::new(Kind::Limit, message.into())
    }

    fn new(kind: Kind, message: String) -> Box<Self> {
        // Messages are truncated, because they may quote long text from the template.
        let end = message.char_indices().nth(MAX_MESSAGE);
        Box::new(Self {
            kind,
            message: end
                .map_or(message.as_str(), |(end, _)| &message[..end])
                .to_owned(),
            line: None,
        })
    }

    /// Sets the line, unless the error has one.
    pub fn at(mut self: Box<Self>, line: u32) -> Box<Self> {
        self.line = self.line.or(Some(line));
        self
    }
}
