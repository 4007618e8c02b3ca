//! `TextStream`: an iterator over the parts of a text during generation.

use std::sync::{Arc, Mutex, PoisonError};

use gemmule::text::StreamDecoder;
use pyo3::prelude::*;

use crate::{
    error::Result,
    generator::WritingModel,
    requests::{Requests, Step},
    signals::Signals,
};

/// Iterator over the parts of a generated text, as str. Concatenated, they are the text that `generate` returns.
#[pyclass(frozen, module = "gemmule")]
pub struct TextStream {
    model: Arc<WritingModel>,
    stops: Vec<String>,
    /// `None` after the last part.
    state: Mutex<Option<State>>,
}

struct State {
    requests: Requests,
    text: StreamDecoder,
}

impl TextStream {
    /// Creates the iterator over the text of a single request.
    pub fn new(
        model: Arc<WritingModel>,
        requests: Requests,
        texts: Vec<StreamDecoder>,
        stops: Vec<String>,
    ) -> Self {
        let text = texts.into_iter().next().unwrap_or_default();
        Self {
            model,
            stops,
            state: Mutex::new(Some(State { requests, text })),
        }
    }
}

#[pymethods]
impl TextStream {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> Result<Option<String>> {
        py.detach(|| self.next())
    }

    /// End the generation and free its memory.
    fn close(&self, py: Python<'_>) {
        py.detach(|| *self.state.lock().unwrap_or_else(PoisonError::into_inner) = None);
    }
}

impl TextStream {
    /// Computes steps until there is text that later tokens cannot change.
    fn next(&self) -> Result<Option<String>> {
        let mut signals = Signals::new();
        let mut guard = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(state) = guard.as_mut() {
            let is_done = state.requests.are_done() || state.text.stopped;
            if let Some(part) = state.part(&self.stops, is_done) {
                return Ok(Some(part));
            }
            if is_done {
                *guard = None;
                break;
            }
            if let Err(error) = state.step(&self.model, &self.stops) {
                *guard = None;
                return Err(error);
            }
            signals.check()?;
        }
        Ok(None)
    }
}

impl State {
    fn step(&mut self, model: &WritingModel, stops: &[String]) -> Result<()> {
        for (index, step) in self.requests.step()? {
            if let Step::Token(id) = step
                && !self.text.stopped
            {
                self.text.push(id, |tokens| model.encoder.decode(tokens))?;
                if self.text.cut(stops) {
                    self.requests.stop(index);
                }
            }
        }
        Ok(())
    }

    /// Returns the text that later tokens cannot change and that has not been returned yet, if there is any.
    fn part(&mut self, stops: &[String], is_done: bool) -> Option<String> {
        let end = match is_done {
            true => self.text.text.len(),
            false => self.text.ready(stops),
        };
        let part = self.text.text.get(self.text.shown..end)?.to_owned();
        self.text.shown = end.max(self.text.shown);
        (!part.is_empty()).then_some(part)
    }
}
