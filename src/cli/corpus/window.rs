//! A window, which is a group of rows that are read together. The sequences of its rows may be computed in any order.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use gemmule_corpus::{Results, Texts, Value};

use super::model::Task;
use crate::EngineError;

/// Rows that are read and computed together, with their results.
pub(super) struct Window<T: Task> {
    pub(super) texts: Vec<Texts>,
    state: Mutex<State<T>>,
    changed: Condvar,
}

struct State<T: Task> {
    rows: Vec<Slot<T>>,
    /// Number of rows without a result.
    left: usize,
    tokens: u64,
    error: Option<EngineError>,
}

/// State of a row.
enum Slot<T: Task> {
    Waiting,
    Encoded {
        row: T::Row,
        /// The values of each sequence.
        outputs: Vec<Option<Vec<f32>>>,
    },
    /// All outputs are available, and the result is being computed.
    Finishing,
    Done(Result<Vec<Value>, String>),
}

/// Position of a sequence in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) row: usize,
    pub(super) sequence: usize,
}

impl<T: Task> Window<T> {
    pub(super) fn new(texts: Vec<Texts>) -> Self {
        let rows: Vec<Slot<T>> = texts.iter().map(|_| Slot::Waiting).collect();
        Self {
            state: Mutex::new(State {
                left: rows.len(),
                rows,
                tokens: 0,
                error: None,
            }),
            texts,
            changed: Condvar::new(),
        }
    }

    /// Locks the state, even if a thread panicked while it held the lock. The state is still consistent: each row has a result or waits for
    /// one.
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a row that has been tokenized.
    pub(super) fn encoded(&self, at: usize, row: T::Row, sequences: usize, tokens: u64) {
        let mut state = self.state();
        state.tokens += tokens;
        state.rows[at] = Slot::Encoded {
            row,
            outputs: vec![None; sequences],
        };
    }

    /// Sets the result of a row, unless it already has one.
    pub(super) fn set(&self, at: usize, result: Result<Vec<Value>, String>) {
        let mut state = self.state();
        if matches!(state.rows[at], Slot::Done(_)) {
            return;
        }
        state.rows[at] = Slot::Done(result);
        state.left -= 1;
        if state.left == 0 {
            self.changed.notify_all();
        }
    }

    /// Adds the values of a sequence. Once the values of all sequences of the row have been added, computes the row's result.
    pub(super) fn add(&self, task: &T, place: Place, output: &[f32]) {
        if let Some(value) = output.iter().find(|value| !value.is_finite()) {
            let reason = format!("the model gave the value {value}");
            return self.set(place.row, Err(reason));
        }
        let mut state = self.state();
        let slot = &mut state.rows[place.row];
        let (row, outputs) = match std::mem::replace(slot, Slot::Finishing) {
            Slot::Encoded { row, mut outputs } => {
                let is_other =
                    |(at, own): (usize, &Option<Vec<f32>>)| at != place.sequence && own.is_none();
                if outputs.iter().enumerate().any(is_other) {
                    outputs[place.sequence] = Some(output.to_vec());
                    *slot = Slot::Encoded { row, outputs };
                    return;
                }
                (row, outputs)
            }
            // The row has already been refused because of another sequence.
            other => {
                *slot = other;
                return;
            }
        };
        drop(state);
        let outputs = outputs.iter().map(|own| own.as_deref().unwrap_or(output));
        let outputs: Vec<&[f32]> = outputs.collect();
        self.set(place.row, task.finish(row, &outputs));
    }

    /// Makes the window fail with an error, unless it has already failed.
    pub(super) fn fail(&self, error: EngineError) {
        self.state().error.get_or_insert(error);
        self.changed.notify_all();
    }

    /// Waits for all rows.
    pub(super) fn wait(&self) -> Result<Results, EngineError> {
        let mut state = self.state();
        while state.left > 0 && state.error.is_none() {
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(error) = state.error.take() {
            return Err(error);
        }
        let rows = std::mem::take(&mut state.rows).into_iter();
        let rows = rows.map(|slot| match slot {
            Slot::Done(result) => result,
            Slot::Waiting | Slot::Encoded { .. } | Slot::Finishing => {
                Err("it was not computed".to_owned())
            }
        });
        Ok(Results {
            rows: rows.collect(),
            tokens: Some(state.tokens),
        })
    }
}
