//! Finds the statements that the requested outputs need. Keys of config.json that only other statements read may be missing.

use std::collections::HashSet;

use super::syntax::{Statement, given};

/// Returns, in order, the statements that the `wanted` values need. If `caches` is set, also returns the statements that append to
/// caches and all statements that these need. A `Repeat` or a `When` is included as a whole.
pub(super) fn needed<'a>(
    body: &'a [Statement],
    wanted: impl Iterator<Item = &'a str>,
    caches: bool,
) -> Vec<&'a Statement> {
    let mut wanted: HashSet<&str> = wanted.collect();
    let mut kept: Vec<&Statement> = Vec::new();
    for statement in body.iter().rev() {
        let is_wanted = writes(statement).iter().any(|name| wanted.contains(name));
        if is_wanted || caches && appends(statement) {
            reads(std::slice::from_ref(statement), &mut wanted);
            kept.push(statement);
        }
    }
    kept.reverse();
    kept
}

/// Names that a statement may assign: its own, and outer names that its bodies update.
fn writes(statement: &Statement) -> Vec<&str> {
    let mut names = Vec::new();
    let mut open = vec![std::slice::from_ref(statement)];
    while let Some(body) = open.pop() {
        names.extend(given(body).map(|n| n.value.as_str()));
        for statement in body {
            match statement {
                Statement::Let { .. } => {}
                Statement::Repeat(repeat) => open.push(&repeat.body),
                Statement::When(when) => open.extend([&when.body[..], &when.otherwise[..]]),
            }
        }
    }
    names
}

/// Returns whether a statement appends to a cache.
fn appends(statement: &Statement) -> bool {
    let mut open = vec![std::slice::from_ref(statement)];
    while let Some(body) = open.pop() {
        for statement in body {
            match statement {
                Statement::Let { op, .. } if op.all_names().appends => return true,
                Statement::Let { .. } => {}
                Statement::Repeat(repeat) => open.push(&repeat.body),
                Statement::When(when) => open.extend([&when.body[..], &when.otherwise[..]]),
            }
        }
    }
    false
}

/// Collects the values that the statements read.
fn reads<'a>(body: &'a [Statement], into: &mut HashSet<&'a str>) {
    let mut open = vec![body];
    while let Some(body) = open.pop() {
        for statement in body {
            match statement {
                Statement::Let { op, .. } => {
                    let values = op.all_names().values;
                    into.extend(values.iter().map(|v| v.value.as_str()));
                }
                Statement::Repeat(repeat) => open.push(&repeat.body),
                Statement::When(when) => open.extend([&when.body[..], &when.otherwise[..]]),
            }
        }
    }
}
