//! Builds statements in order. Loops are unrolled, and only the selected body of a `When` is built.

use std::collections::HashMap;

use super::{Builder, operators::Target};
use crate::{
    model::{
        error::{ModelError, Problem},
        syntax::{Repeat, Statement, When},
    },
    ops::BatchInput,
};

/// Maximum number of values after unrolling, which bounds the time to build a graph. A model of 24 layers has about 700 values.
const MAX_VALUES: u64 = 20_000;

impl<'a> Builder<'a> {
    /// Upper bound on the number of values after unrolling, computed without unrolling. Both bodies of a `When` are counted.
    pub(super) fn size_of<'b>(
        &self,
        body: impl IntoIterator<Item = &'b Statement>,
    ) -> Result<u64, ModelError> {
        let mut n: u64 = 0;
        for statement in body {
            n = match statement {
                Statement::Let { .. } => n.saturating_add(1),
                Statement::When(when) => {
                    let both = when.body.iter().chain(&when.otherwise);
                    n.saturating_add(self.size_of(both)?)
                }
                Statement::Repeat(repeat) => {
                    let times = self.values.count(&repeat.times)?;
                    let inner = self.size_of(&repeat.body)?.max(1);
                    let unrolled = n.saturating_add(times.saturating_mul(inner));
                    if unrolled > MAX_VALUES {
                        let problem = Problem::TooManyValues { limit: MAX_VALUES };
                        let label = format!("{times} iterations of {inner} values");
                        let error = self.file.error(problem, &repeat.times.span, label);
                        return Err(error.help("a model of 24 layers has about 700"));
                    }
                    unrolled
                }
            };
        }
        Ok(n)
    }

    pub(super) fn body(
        &mut self,
        body: impl IntoIterator<Item = &'a Statement>,
    ) -> Result<(), ModelError> {
        for statement in body {
            match statement {
                Statement::Let { name, op } => {
                    let at = Target {
                        name: &format!("{}{}", self.prefix, name.value),
                        span: &name.span,
                    };
                    let id = op.build(self, &at)?;
                    self.bind(&name.value, id);
                }
                Statement::Repeat(repeat) => self.repeat(repeat)?,
                Statement::When(when) => self.when(when)?,
            }
        }
        Ok(())
    }

    fn repeat(&mut self, repeat: &'a Repeat) -> Result<(), ModelError> {
        let outer = self.prefix.clone();
        let first = match &repeat.from {
            Some(from) => self.values.count(from)?,
            None => 0,
        };
        for k in first..first.saturating_add(self.values.count(&repeat.times)?) {
            self.prefix = format!("{outer}{}.{k}.", repeat.label.value);
            self.expect(&repeat.expect);
            self.values.push_index(&repeat.index.value, k);
            self.scopes.push(HashMap::new());
            self.body(&repeat.body)?;
            self.scopes.pop();
            self.values.pop_index();
        }
        self.prefix = outer;
        Ok(())
    }

    /// Builds the selected body. Names that both bodies define stay visible to later statements.
    fn when(&mut self, when: &'a When) -> Result<(), ModelError> {
        let (body, expect) = match self.values.holds(&when.test)? {
            true => (&when.body, &when.expect),
            false => (&when.otherwise, &when.expect_otherwise),
        };
        self.expect(expect);
        let outer = self.prefix.clone();
        if let Some(label) = &when.label {
            self.prefix = format!("{outer}{}.", label.value);
        }
        self.scopes.push(HashMap::new());
        self.body(body)?;
        self.prefix = outer;
        let own = self.scopes.pop().unwrap_or_default();
        for name in when.given_by_both() {
            if let Some((name, &id)) = own.get_key_value(name.value.as_str()) {
                self.bind(name, id);
            }
        }
        Ok(())
    }
}

/// Returns whether an embedding reads the token ids or the previous ids.
pub(super) fn reads_tokens(body: &[Statement]) -> bool {
    let mut open = vec![body];
    while let Some(body) = open.pop() {
        for statement in body {
            match statement {
                Statement::Let { op, .. } => {
                    let are_tokens = |ids: &BatchInput| {
                        matches!(ids, BatchInput::TokenIds | BatchInput::PreviousIds { .. })
                    };
                    if op.all_names().inputs.iter().any(are_tokens) {
                        return true;
                    }
                }
                Statement::Repeat(repeat) => open.push(&repeat.body),
                Statement::When(when) => open.extend([&when.body[..], &when.otherwise[..]]),
            }
        }
    }
    false
}
