//! The interface to a model.

use std::error::Error;

/// An error of an embedder that stops a run.
pub type EmbedderError = Box<dyn Error + Send + Sync>;

/// Turns texts into vectors. It runs on the thread that calls [`run`](crate::run).
pub trait Embedder {
    /// Returns a text that changes with everything that changes a vector: model, revision, precision, prompt,
    /// truncation.
    ///
    /// An interrupted run resumes only with the same identity.
    fn identity(&self) -> String;

    /// Returns the number of values of each vector.
    fn width(&self) -> usize;

    /// Embeds the texts of a window, which are in the order of the input. The embedder may sort them by length and
    /// split them into batches.
    ///
    /// # Errors
    /// Returns an error for a failure that is not due to a single text. It stops the run; finished windows are kept.
    fn embed(&mut self, texts: &[&str]) -> Result<Embedded, EmbedderError>;
}

/// The vectors of a window's texts.
#[derive(Clone, Debug, Default)]
pub struct Embedded {
    /// A vector of [`Embedder::width`] values for each text in order, or the reason why the text has none, such as "the text
    /// has 600 tokens, and the model takes up to 512".
    pub rows: Vec<Result<Vec<f32>, String>>,
    /// Number of tokens of all texts, if it is known.
    pub tokens: Option<u64>,
}

/// An embedder that calls a function.
#[derive(Clone, Debug)]
pub struct Function<F> {
    /// See [`Embedder::identity`].
    pub identity: String,
    /// See [`Embedder::width`].
    pub width: usize,
    /// See [`Embedder::embed`].
    pub embed: F,
}

impl<F> Embedder for Function<F>
where
    F: FnMut(&[&str]) -> Result<Embedded, EmbedderError>,
{
    fn identity(&self) -> String {
        self.identity.clone()
    }

    fn width(&self) -> usize {
        self.width
    }

    fn embed(&mut self, texts: &[&str]) -> Result<Embedded, EmbedderError> {
        (self.embed)(texts)
    }
}
