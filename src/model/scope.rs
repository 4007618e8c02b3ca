//! Checks every name of a description: values, dimensions, indices and outputs.
//!
//! A value name is unique. Inside a `Repeat`, a `Let` of an outer name updates it for the next iteration and for the statements after the
//! loop. All other names are local to an iteration.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
};

use super::{
    build::operators::Operation,
    error::{At, File, ModelError, Problem, quoted, suggest},
    expr::Expr,
    spelling::INPUTS,
    syntax::{Ast, Definition, Origin, PartOf, Repeat, Statement, Test, When, given},
};

pub(super) fn check(file: &File, ast: &Ast) -> Result<(), ModelError> {
    let mut names = Names {
        file,
        dims: Vec::new(),
        reals: Vec::new(),
        activations: ast
            .activations
            .iter()
            .map(|d| d.name.value.as_str())
            .collect(),
        indices: Vec::new(),
        scopes: Vec::new(),
        ended: HashMap::new(),
    };
    for d in &ast.dims {
        names.definition("dimension", d, &ast.dims, false)?;
        names.dims.push(&d.name.value);
    }
    for d in &ast.reals {
        names.definition("real", d, &ast.reals, true)?;
        names.reals.push(&d.name.value);
        if ast.dims.iter().any(|dim| dim.name.value == d.name.value) {
            let problem = Problem::defined_twice("number", &d.name.value);
            return Err(file
                .error(problem, &d.name.span, "also a dimension")
                .help("rename one; `reals` may read `dims`"));
        }
    }
    names.parts(ast)?;
    for part in &ast.parts {
        names.ended.clear();
        names.body(&part.body)?;
        names.values_of_outputs(part)?;
    }
    names.outputs(ast)
}

struct Names<'a> {
    file: &'a File,
    dims: Vec<&'a str>,
    reals: Vec<&'a str>,
    activations: Vec<&'a str>,
    indices: Vec<&'a str>,
    /// Values defined so far, innermost body last.
    scopes: Vec<HashMap<&'a str, &'a Range<usize>>>,
    /// Values of bodies that have ended and are no longer visible.
    ended: HashMap<&'a str, &'a Range<usize>>,
}

impl<'a> Names<'a> {
    /// Checks that a definition uses only names defined above it.
    fn definition(
        &self,
        what: &'static str,
        definition: &Definition,
        all: &[Definition],
        real: bool,
    ) -> Result<(), ModelError> {
        for origin in &definition.origins {
            let Origin::Expr(expr) = &origin.value else {
                continue;
            };
            for name in expr.names() {
                let known = self.dims.contains(&name.value.as_str())
                    || real && self.reals.contains(&name.value.as_str());
                if known {
                    continue;
                }
                if let Some(later) = all.iter().find(|d| d.name.value == name.value) {
                    let name_ = name.value.clone();
                    let problem = Problem::UsedTooEarly { what, name: name_ };
                    return Err(self
                        .file
                        .error(problem, &name.span, "used here")
                        .also(&later.name.span, "defined here")
                        .help("a definition may use only those above it"));
                }
            }
            self.numbers(expr.names(), real)?;
        }
        Ok(())
    }

    /// Checks that `times` or `from` of a `Repeat` uses no index. The size of the graph is computed from these numbers before any loop is
    /// unrolled.
    fn fixed(&self, expr: &Expr) -> Result<(), ModelError> {
        for name in expr.names() {
            if self.indices.contains(&name.value.as_str()) {
                let problem = Problem::undefined("dimension", &name.value);
                let error = self.file.error(problem, &name.span, "an index");
                return Err(
                    error.help("the number of iterations of a `Repeat` cannot depend on an index")
                );
            }
        }
        self.numbers(expr.names(), false)
    }

    fn numbers(&self, names: Vec<&At<String>>, real: bool) -> Result<(), ModelError> {
        for name in names {
            let text = name.value.as_str();
            let is_real = self.reals.contains(&text);
            let is_whole = self.dims.contains(&text) || self.indices.contains(&text);
            if is_whole || real && is_real {
                continue;
            }
            let problem = Problem::Undefined {
                what: if real { "number" } else { "dimension" },
                name: name.value.clone(),
            };
            let reals = self.reals.iter().filter(|_| real);
            let help = if is_real {
                format!(
                    "`{}` is a real number; a size is a whole number",
                    name.value
                )
            } else {
                let whole = self.dims.iter().chain(&self.indices);
                suggest(&name.value, whole.chain(reals).copied())
            };
            return Err(self
                .file
                .error(problem, &name.span, "not defined")
                .help(help));
        }
        Ok(())
    }

    fn body(&mut self, body: &'a [Statement]) -> Result<(), ModelError> {
        self.scopes.push(HashMap::new());
        // Names that this body defines, including names that nested bodies make visible here.
        let mut given: HashMap<&str, &Range<usize>> = HashMap::new();
        for (i, statement) in body.iter().enumerate() {
            match statement {
                Statement::Let { name, op } => {
                    self.operator(name, op, &body[i + 1..])?;
                    self.give(name, &mut given)?;
                }
                Statement::Repeat(repeat) => self.repeat(repeat, &body[..i])?,
                Statement::When(when) => self.when(when, &mut given)?,
            }
        }
        let ended = self.scopes.pop().unwrap_or_default();
        self.ended.extend(ended);
        Ok(())
    }

    fn give(
        &mut self,
        name: &'a At<String>,
        given: &mut HashMap<&'a str, &'a Range<usize>>,
    ) -> Result<(), ModelError> {
        let key = name.value.as_str();
        if INPUTS.iter().any(|&(n, _)| n == key) {
            let problem = Problem::defined_twice("value", key);
            return Err(self
                .file
                .error(problem, &name.span, "this is an input of the model")
                .help("inputs need no definition; choose another name"));
        }
        if let Some(before) = given.insert(key, &name.span) {
            let problem = Problem::defined_twice("value", key);
            return Err(self
                .file
                .error(problem, &name.span, "again here")
                .also(before, "first here")
                .help(
                    "rename one; only a `Repeat` may give a new value to a name from outside it",
                ));
        }
        let (inner, outer) = match self.scopes.split_last_mut() {
            Some(split) => split,
            None => return Ok(()),
        };
        match outer.iter_mut().find_map(|scope| scope.get_mut(key)) {
            Some(carried) => *carried = &name.span,
            None => {
                inner.insert(key, &name.span);
            }
        }
        Ok(())
    }

    fn when(
        &mut self,
        when: &'a When,
        given: &mut HashMap<&'a str, &'a Range<usize>>,
    ) -> Result<(), ModelError> {
        match &when.test {
            Test::Holds(condition) => self.numbers(condition.value.names(), false)?,
            Test::Key { key, absent, .. } => {
                self.numbers(key.value.names().collect(), false)?;
                if let Some(condition) = absent {
                    self.numbers(condition.value.names(), false)?;
                }
            }
        }
        self.body(&when.body)?;
        self.body(&when.otherwise)?;
        // Outer names were updated by the calls of `body` above. Names that are new in both bodies are defined here.
        for name in when.given_by_both() {
            let is_outer = |s: &HashMap<&str, _>| s.contains_key(name.value.as_str());
            if !self.scopes.iter().any(is_outer) {
                self.give(name, given)?;
            }
        }
        Ok(())
    }

    fn repeat(&mut self, repeat: &'a Repeat, before: &'a [Statement]) -> Result<(), ModelError> {
        self.fixed(&repeat.times.value)?;
        if let Some(from) = &repeat.from {
            self.fixed(&from.value)?;
        }
        for statement in before {
            if let Statement::Repeat(other) = statement
                && other.label.value == repeat.label.value
            {
                let problem = Problem::defined_twice("name of a `Repeat`", &repeat.label.value);
                return Err(self
                    .file
                    .error(problem, &repeat.label.span, "again here")
                    .also(&other.label.span, "first here")
                    .help("values are named after their `Repeat`; give each a `name:`"));
            }
        }
        let index = repeat.index.value.as_str();
        if self.dims.contains(&index) || self.reals.contains(&index) {
            let problem = Problem::defined_twice("index", index);
            let error = self
                .file
                .error(problem, &repeat.index.span, "also a number above");
            return Err(error.help("rename the index"));
        }
        if self.indices.contains(&index) {
            let problem = Problem::defined_twice("index", &repeat.index.value);
            return Err(self
                .file
                .error(
                    problem,
                    &repeat.index.span,
                    "a `Repeat` around this one has it",
                )
                .help("rename the inner index"));
        }
        self.indices.push(&repeat.index.value);
        let result = self.body(&repeat.body);
        self.indices.pop();
        result
    }

    fn operator(
        &self,
        name: &At<String>,
        op: &Operation,
        later: &[Statement],
    ) -> Result<(), ModelError> {
        let names = op.all_names();
        for value in names.values {
            if !self
                .scopes
                .iter()
                .any(|s| s.contains_key(value.value.as_str()))
            {
                return Err(self.undefined(name, value, later));
            }
        }
        for size in names.sizes {
            self.numbers(size.value.names(), false)?;
        }
        for real in names.reals {
            self.numbers(real.value.names(), true)?;
        }
        let is_unknown = |kind: &&At<String>| !self.activations.contains(&kind.value.as_str());
        if let Some(kind) = names.activations.into_iter().find(is_unknown) {
            let (what, name) = ("activation", kind.value.clone());
            let help = suggest(&name, self.activations.iter().copied());
            let help = format!("{help} (`activations:` at the top of the file names them)");
            let problem = Problem::Undefined { what, name };
            return Err(self
                .file
                .error(problem, &kind.span, "not defined")
                .help(help));
        }
        for weight in names.weights {
            for index in weight.value.0.iter().flat_map(|spelling| spelling.names()) {
                let text = index.value.as_str();
                if !self.indices.contains(&text) && !self.dims.contains(&text) {
                    let (what, name) = ("index", text.to_owned());
                    let help = suggest(text, self.indices.iter().copied());
                    let problem = Problem::Undefined { what, name };
                    let label = "no `Repeat` around this has such an index";
                    return Err(self.file.error(problem, &index.span, label).help(help));
                }
            }
        }
        Ok(())
    }

    /// Creates the error for `value`, which the definition of `name` reads but which is not available.
    fn undefined(&self, name: &At<String>, value: &At<String>, later: &[Statement]) -> ModelError {
        let wanted = value.value.as_str();
        if wanted == name.value {
            let problem = Problem::SelfReference {
                name: wanted.to_owned(),
            };
            return self
                .file
                .error(problem, &value.span, "this is the value being defined")
                .help("only a `Repeat` may update a name that has a value before it");
        }
        if let Some((defined, _)) = find(later, wanted) {
            if reaches(later, wanted, &name.value) {
                let (first, second) = (name.value.clone(), wanted.to_owned());
                let problem = Problem::Cycle { first, second };
                return self
                    .file
                    .error(
                        problem,
                        &value.span,
                        format!("`{}` needs `{wanted}`", name.value),
                    )
                    .also(&defined.span, format!("`{wanted}` needs `{}`", name.value))
                    .help("a graph has no cycles; break it with a value that is known before");
            }
            let (what, wanted) = ("value", wanted.to_owned());
            let problem = Problem::UsedTooEarly { what, name: wanted };
            return self
                .file
                .error(problem, &value.span, "used here")
                .also(&defined.span, "defined here")
                .help("a statement may use only values above it; move the definition up");
        }
        let problem = Problem::undefined("value", wanted);
        let error = self.file.error(problem, &value.span, "not defined");
        if INPUTS.iter().any(|&(n, _)| n == wanted) {
            return error.help("an input is read by `embedding(ids: …)` only");
        }
        if let Some(span) = self.ended.get(wanted) {
            return error
                .also(span, "visible only in this body")
                .help("define the name before its `Repeat` or `When`, or in both bodies of the `When`, to hand it on");
        }
        let known = self.scopes.iter().flat_map(|s| s.keys().copied());
        let mut known: Vec<&str> = known.collect();
        known.sort_unstable();
        error.help(suggest(wanted, known))
    }

    /// Checks that parts, streams and outputs have unique names.
    fn parts(&self, ast: &Ast) -> Result<(), ModelError> {
        let unique = |what: &'static str, all: Vec<&At<String>>| {
            let mut seen: HashMap<&str, &Range<usize>> = HashMap::new();
            for name in all {
                if let Some(before) = seen.insert(&name.value, &name.span) {
                    let problem = Problem::DefinedTwice {
                        what,
                        name: name.value.clone(),
                    };
                    let error = self.file.error(problem, &name.span, "again here");
                    return Err(error.also(before, "first here").help("rename one"));
                }
            }
            Ok(())
        };
        let named = || ast.parts.iter().filter_map(|part| part.named.as_ref());
        unique("part", named().map(|(name, _)| name).collect())?;
        unique("stream", named().map(|(_, stream)| stream).collect())?;
        match named().count() {
            0 => Ok(()),
            _ => unique("output", ast.outputs().map(|(name, _)| name).collect()),
        }
    }

    fn values_of_outputs(&self, part: &'a PartOf) -> Result<(), ModelError> {
        for (output, value) in &part.outputs {
            if !given(&part.body).any(|name| name.value == value.value) {
                let problem = Problem::undefined("value", &value.value);
                let known = given(&part.body).map(|name| name.value.as_str());
                let label = format!("output `{}` needs it", output.value);
                let error = self.file.error(problem, &value.span, label);
                return Err(error.help(suggest(&value.value, known)));
            }
        }
        Ok(())
    }

    fn outputs(&self, ast: &Ast) -> Result<(), ModelError> {
        let outputs: Vec<&str> = ast.outputs().map(|(n, _)| n.value.as_str()).collect();
        let required = ast
            .requirements
            .iter()
            .flat_map(|r| r.outputs.iter().flatten());
        let by_architecture = ast.architectures.iter().flat_map(|(_, outputs)| outputs);
        let defaults = ast.default_outputs.iter().chain(by_architecture);
        for name in defaults.chain(required) {
            if !outputs.contains(&name.value.as_str()) {
                let problem = Problem::UnknownOutput {
                    name: name.value.clone(),
                };
                let help = format!("`outputs:` has {}", quoted(&outputs));
                let error = self.file.error(problem, &name.span, "not under `outputs`");
                return Err(error.help(help));
            }
        }
        Ok(())
    }
}

/// Returns the definition of the value `wanted` in `body`.
fn find<'b>(body: &'b [Statement], wanted: &str) -> Option<(&'b At<String>, &'b Operation)> {
    body.iter().find_map(|statement| match statement {
        Statement::Let { name, op } if name.value == wanted => Some((name, op)),
        _ => None,
    })
}

/// Returns whether the value `from`, defined in this body, depends on `target`.
fn reaches(body: &[Statement], from: &str, target: &str) -> bool {
    let defined: HashMap<&str, &Operation> = body
        .iter()
        .filter_map(|statement| match statement {
            Statement::Let { name, op } => Some((name.value.as_str(), op)),
            Statement::Repeat(_) | Statement::When(_) => None,
        })
        .collect();
    let mut seen = HashSet::from([from]);
    let mut open = vec![from];
    while let Some(name) = open.pop() {
        let read = defined.get(name).map(|op| op.all_names().values);
        for value in read.unwrap_or_default() {
            if value.value == target {
                return true;
            }
            if seen.insert(&value.value) {
                open.push(&value.value);
            }
        }
    }
    false
}
