//! Resolves the names of a description from a checkpoint's `config.json`.
//!
//! A value is resolved when it is first read, so keys for values that no requested output needs may be missing.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashSet},
};

use serde_json::{Map, Value};

use super::{
    activations::{activation, other_activations},
    error::{At, File, ModelError, Problem, nearest, quoted},
    expr::{Condition, Expr},
    spelling::Pattern,
    syntax::{Ast, Definition, Origin, Requirement, Test},
};
use crate::ops::Activation;

/// Values that a description takes from config.json.
pub(super) struct Values<'a> {
    pub(super) file: &'a File,
    ast: &'a Ast,
    pub(super) config: &'a Map<String, Value>,
    dims: RefCell<BTreeMap<String, u64>>,
    reals: RefCell<BTreeMap<String, f64>>,
    /// Current indices of the enclosing loops.
    indices: RefCell<Vec<(String, u64)>>,
}

/// Maximum size of a dimension: kernels index with 32 bits.
const MAX_SIZE: u64 = i32::MAX as u64;

/// Returns the value of a key. The key may be a path: `text_config.hidden_size` is a nested key, and `layer_types.3` is an entry of a list,
/// counted from 0. A null value counts as absent, as in Hugging Face configs.
pub(super) fn lookup<'c>(config: &'c Map<String, Value>, key: &str) -> Option<&'c Value> {
    entry(config, key).filter(|v| !v.is_null())
}

/// Like [`lookup`], but returns null values too.
fn entry<'c>(config: &'c Map<String, Value>, key: &str) -> Option<&'c Value> {
    config.get(key).or_else(|| {
        let (first, rest) = key.split_once('.')?;
        match config.get(first)? {
            Value::Object(inner) => entry(inner, rest),
            Value::Array(items) => items.get(rest.parse::<usize>().ok()?),
            _ => None,
        }
    })
}

impl Requirement {
    /// Returns whether a config.json meets the requirement, regardless of the requested outputs.
    pub(super) fn is_met_by(&self, config: &Map<String, Value>) -> bool {
        let own = |key| lookup(config, key).unwrap_or(&Value::Null);
        let applies = (self.only.iter()).all(|(key, has)| has.contains(own(&key.value)));
        let value = lookup(config, &self.key.value).or(self.default.as_ref());
        !applies || value.is_none_or(|value| self.is.contains(value))
    }
}

/// Returns config.json as an object.
pub(super) fn object<'c>(
    file: &File,
    config: &'c Value,
) -> Result<&'c Map<String, Value>, ModelError> {
    config.as_object().ok_or_else(|| {
        let found = kind(config);
        let error = file.error_elsewhere(Problem::ConfigNotAnObject { found });
        error.help("pass the config.json that is published with the weights")
    })
}

impl<'a> Values<'a> {
    /// Creates the values of a config.json that meets the requirements for `outputs`.
    pub fn new(
        file: &'a File,
        ast: &'a Ast,
        config: &'a Value,
        outputs: &[&str],
    ) -> Result<Self, ModelError> {
        let values = Values {
            file,
            ast,
            config: object(file, config)?,
            dims: RefCell::default(),
            reals: RefCell::default(),
            indices: RefCell::default(),
        };
        for requirement in &ast.requirements {
            values.require(requirement, outputs)?;
        }
        for keys in &ast.equal {
            values.require_equal(keys)?;
        }
        Ok(values)
    }

    /// Returns the dimensions that have been read so far, by name.
    pub fn dims(&self) -> BTreeMap<String, u64> {
        self.dims.borrow().clone()
    }

    /// Begins a loop iteration with this index.
    pub fn push_index(&self, index: &str, value: u64) {
        self.indices.borrow_mut().push((index.to_owned(), value));
    }

    pub fn pop_index(&self) {
        self.indices.borrow_mut().pop();
    }

    fn index(&self, name: &str) -> Option<u64> {
        let indices = self.indices.borrow();
        indices.iter().find(|(i, _)| i == name).map(|&(_, k)| k)
    }

    /// Resolves names that have not been read yet. A definition uses only definitions above it. One upward pass therefore finds the
    /// definitions that are needed, and one downward pass evaluates them, without recursion.
    fn find<'n>(&self, names: impl IntoIterator<Item = &'n At<String>>) -> Result<(), ModelError> {
        let mut needed: HashSet<&str> = names.into_iter().map(|n| n.value.as_str()).collect();
        let known = |name: &str| {
            self.dims.borrow().contains_key(name) || self.reals.borrow().contains_key(name)
        };
        needed.retain(|name| !known(name));
        if needed.is_empty() {
            return Ok(());
        }
        let definitions = self.ast.reals.iter().rev();
        for d in definitions.chain(self.ast.dims.iter().rev()) {
            if needed.contains(d.name.value.as_str())
                && let Some(Origin::Expr(expr)) = self.chosen(d).map(|o| &o.value)
            {
                let names = expr.names().into_iter().map(|n| n.value.as_str());
                needed.extend(names.filter(|name| !known(name)));
            }
        }
        let is_needed = |d: &&Definition| needed.contains(d.name.value.as_str());
        for d in self.ast.dims.iter().filter(is_needed) {
            let dim = self.dim(d)?;
            self.dims.borrow_mut().insert(d.name.value.clone(), dim);
        }
        for d in self.ast.reals.iter().filter(is_needed) {
            let real = self.real_definition(d)?;
            self.reals.borrow_mut().insert(d.name.value.clone(), real);
        }
        Ok(())
    }

    /// Returns the first origin of a definition that is present: a key that config.json has, an expression, or the name of an activation.
    fn chosen(&self, definition: &'a Definition) -> Option<&'a At<Origin>> {
        definition.origins.iter().find(|o| match &o.value {
            Origin::Key(key) | Origin::Length(key) => lookup(self.config, key).is_some(),
            Origin::Expr(_) | Origin::Word(_) => true,
        })
    }

    fn number(&self, name: &str) -> Option<u64> {
        let dim = || self.dims.borrow().get(name).copied();
        self.index(name).or_else(dim)
    }

    fn dim(&self, definition: &'a Definition) -> Result<u64, ModelError> {
        let origin = self.chosen(definition);
        let found = match origin.map(|o| (&o.value, &o.span)) {
            Some((Origin::Key(key), span)) => self.whole_key(key, span)?,
            Some((Origin::Length(key), span)) => self.length(key, span)?,
            Some((Origin::Expr(expr), span)) => Some(self.evaluate(expr, span)?),
            Some((Origin::Word(_), _)) | None => None,
        };
        found.ok_or_else(|| self.no_value("dimension", definition))
    }

    fn real_definition(&self, definition: &'a Definition) -> Result<f64, ModelError> {
        let origin = self.chosen(definition);
        match origin.map(|o| (&o.value, &o.span)) {
            Some((Origin::Key(key), span)) => {
                let value = lookup(self.config, key);
                let wrong = |value| self.wrong(key, value, "a number", span);
                let value = value.ok_or_else(|| self.no_value("real", definition))?;
                value.as_f64().ok_or_else(|| wrong(value))
            }
            Some((Origin::Expr(expr), span)) => self.evaluate_real(expr, span),
            _ => Err(self.no_value("real", definition)),
        }
    }

    fn whole(&self, expr: &Expr, span: &std::ops::Range<usize>) -> Result<u64, ModelError> {
        self.find(expr.names())?;
        self.evaluate(expr, span)
    }

    /// Like [`whole`](Self::whole), for an expression whose names are already resolved.
    fn evaluate(&self, expr: &Expr, span: &std::ops::Range<usize>) -> Result<u64, ModelError> {
        expr.whole(&|name| self.number(name))
            .map_err(|message| self.arithmetic(message, span, expr.names()))
    }

    pub(super) fn real_of(
        &self,
        expr: &Expr,
        span: &std::ops::Range<usize>,
    ) -> Result<f64, ModelError> {
        self.find(expr.names())?;
        self.evaluate_real(expr, span)
    }

    fn evaluate_real(&self, expr: &Expr, span: &std::ops::Range<usize>) -> Result<f64, ModelError> {
        let real = |name: &str| self.reals.borrow().get(name).copied();
        let number = |name: &str| self.number(name).map(|n| n as f64);
        expr.real(&|name| real(name).or_else(|| number(name)))
            .map_err(|message| self.arithmetic(message, span, expr.names()))
    }

    fn condition(&self, condition: &At<Condition>) -> Result<bool, ModelError> {
        let names = condition.value.names();
        self.find(names.iter().copied())?;
        let holds = condition.value.holds(&|name| self.number(name));
        holds.map_err(|message| self.arithmetic(message, &condition.span, names))
    }

    /// Returns whether the first body of a `When` is taken.
    pub fn holds(&self, test: &Test) -> Result<bool, ModelError> {
        match test {
            Test::Holds(condition) => self.condition(condition),
            Test::Key { key, is, absent } => {
                self.find(key.value.names())?;
                let filled = key.value.fill(&|name| self.number(name));
                let filled = filled.map_err(|message| {
                    self.arithmetic(message, &key.span, key.value.names().collect())
                })?;
                let found = entry(self.config, &filled);
                let is_absent = found.is_none_or(|v| v.is_null() && !is.contains(v));
                match absent {
                    Some(condition) if is_absent => self.condition(condition),
                    _ => Ok(is.contains(found.unwrap_or(&Value::Null))),
                }
            }
        }
    }

    /// Returns the name of a weight in the current iteration, followed by its alternative names.
    pub fn names_of(&self, pattern: &At<Pattern>) -> Result<Vec<String>, ModelError> {
        let spellings = pattern.value.0.iter();
        let filled = spellings.map(|spelling| {
            self.find(spelling.names())?;
            let filled = spelling.fill(&|name| self.number(name));
            filled.map_err(|message| {
                self.arithmetic(message, &pattern.span, spelling.names().collect())
            })
        });
        filled.collect()
    }

    fn arithmetic(
        &self,
        message: String,
        span: &std::ops::Range<usize>,
        names: Vec<&At<String>>,
    ) -> ModelError {
        let text = self.text(span).to_owned();
        let names = self.in_words(&names);
        let error = self.file.error(
            Problem::Arithmetic {
                text,
                message: message.clone(),
            },
            span,
            message,
        );
        match names {
            None => error,
            Some(names) => error.help(names),
        }
    }

    /// Lists names with their values, and with the config.json keys from which the values come.
    fn in_words(&self, names: &[&'a At<String>]) -> Option<String> {
        let mut words: Vec<String> = Vec::new();
        let mut open: Vec<&At<String>> = names.iter().rev().copied().collect();
        while let Some(name) = open.pop() {
            let number = self.number(&name.value).map(|n| n.to_string());
            let real = || self.reals.borrow().get(&name.value).copied();
            let Some(value) = number.or_else(|| real().map(number_in_words)) else {
                continue;
            };
            let word = match self.origin_of(&name.value) {
                Some(Origin::Key(key) | Origin::Length(key)) => {
                    format!("{} = {value} (`{key}` of config.json)", name.value)
                }
                Some(Origin::Expr(expr)) => {
                    open.extend(expr.names().into_iter().rev());
                    format!("{} = {value}", name.value)
                }
                Some(Origin::Word(_)) | None => format!("{} = {value}", name.value),
            };
            if !words.contains(&word) {
                words.push(word);
            }
        }
        (!words.is_empty()).then(|| format!("here {}", words.join(" and ")))
    }

    fn origin_of(&self, name: &str) -> Option<&'a Origin> {
        let mut definitions = self.ast.dims.iter().chain(&self.ast.reals);
        let definition = definitions.find(|d| d.name.value == name)?;
        self.chosen(definition).map(|origin| &origin.value)
    }

    /// Creates an error about the values of `exprs`. The error points to the first expression. Its help text lists the names in all
    /// expressions with their values.
    pub(super) fn about(
        &self,
        problem: Problem,
        exprs: &[&'a At<Expr>],
        label: String,
    ) -> ModelError {
        let error = match exprs.first() {
            Some(expr) => self.file.error(problem, &expr.span, label),
            None => self.file.error_elsewhere(problem),
        };
        let names: Vec<&At<String>> = exprs.iter().flat_map(|e| e.value.names()).collect();
        match self.in_words(&names) {
            None => error,
            Some(names) => error.help(names),
        }
    }

    /// Returns the source text of an expression without quotes.
    fn text(&self, span: &std::ops::Range<usize>) -> &str {
        self.file.text()[span.clone()].trim_matches('"')
    }

    /// Evaluates the iteration count of a `Repeat` or the first value of its index.
    pub fn count(&self, expr: &At<Expr>) -> Result<u64, ModelError> {
        self.whole(&expr.value, &expr.span)
    }

    /// Evaluates a size, which is at least 1.
    pub fn size(&self, expr: &At<Expr>) -> Result<u32, ModelError> {
        self.within(expr, 1)
    }

    /// Evaluates a whole number that may be zero, such as an offset or a token id.
    pub fn offset(&self, expr: &At<Expr>) -> Result<u32, ModelError> {
        self.within(expr, 0)
    }

    fn within(&self, expr: &At<Expr>, least: u64) -> Result<u32, ModelError> {
        let value = self.whole(&expr.value, &expr.span)?;
        match u32::try_from(value) {
            Ok(size) if (least..=MAX_SIZE).contains(&value) => Ok(size),
            _ => {
                let problem = Problem::out_of_range(
                    format!("`{}`", self.text(&expr.span)),
                    value,
                    format!("{least} to {MAX_SIZE}"),
                );
                Err(self.about(problem, &[expr], format!("is {value}")))
            }
        }
    }

    /// Evaluates a real-valued attribute, such as `eps` of a norm, as f32.
    pub fn real(&self, expr: &At<Expr>) -> Result<f32, ModelError> {
        let value = self.real_of(&expr.value, &expr.span)?;
        let real = value as f32;
        if !real.is_finite() {
            let problem = Problem::out_of_range(
                format!("`{}`", self.text(&expr.span)),
                number_in_words(value),
                "a finite number in f32",
            );
            let label = format!("is {}", number_in_words(value));
            return Err(self.about(problem, &[expr], label));
        }
        Ok(real)
    }

    /// Evaluates a small positive number that avoids a division by zero.
    pub fn eps(&self, expr: &At<Expr>) -> Result<f32, ModelError> {
        let eps = self.real(expr)?;
        if eps <= 0.0 {
            // Show the value as written, because it may be rounded to 0 in f32.
            let value = self.real_of(&expr.value, &expr.span)?;
            let expected = match value > 0.0 {
                true => "a number that is above 0 in f32, too",
                false => "a number above 0",
            };
            let problem = Problem::out_of_range(
                format!("`{}`", self.text(&expr.span)),
                number_in_words(value),
                expected,
            );
            let label = format!("is {}", number_in_words(value));
            return Err(self.about(problem, &[expr], label));
        }
        Ok(eps)
    }

    /// Returns the activation `name`; `None` if it is not defined. The check of names in `scope` has already rejected undefined names.
    pub fn activation(&self, name: &str) -> Result<Option<Activation>, ModelError> {
        let mut definitions = self.ast.activations.iter();
        let definition = definitions.find(|d| d.name.value == name);
        definition.map(|d| self.activation_of(d)).transpose()
    }

    fn whole_key(
        &self,
        key: &str,
        span: &std::ops::Range<usize>,
    ) -> Result<Option<u64>, ModelError> {
        let Some(value) = lookup(self.config, key) else {
            return Ok(None);
        };
        let whole = value.as_u64();
        whole
            .ok_or_else(|| self.wrong(key, value, "a whole number", span))
            .map(Some)
    }

    fn length(&self, key: &str, span: &std::ops::Range<usize>) -> Result<Option<u64>, ModelError> {
        match lookup(self.config, key) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items.len() as u64)),
            Some(Value::Object(entries)) => Ok(Some(entries.len() as u64)),
            Some(value) => Err(self.wrong(key, value, "a list or an object", span)),
        }
    }

    fn activation_of(&self, definition: &'a Definition) -> Result<Activation, ModelError> {
        let missing = || self.no_value("activation", definition);
        let origin = self.chosen(definition).ok_or_else(missing)?;
        let name = match &origin.value {
            Origin::Word(name) => name,
            Origin::Key(key) => match lookup(self.config, key) {
                Some(Value::String(name)) => name,
                Some(value) => {
                    let expected = "the name of an activation";
                    return Err(self.wrong(key, value, expected, &origin.span));
                }
                None => return Err(missing()),
            },
            Origin::Length(_) | Origin::Expr(_) => return Err(missing()),
        };
        activation(name).ok_or_else(|| {
            let key = match &origin.value {
                Origin::Key(key) => Some(key.clone()),
                _ => None,
            };
            let problem = Problem::Activation {
                name: name.clone(),
                key,
            };
            let label = format!("config.json gives `{name}`");
            let error = self.file.error(problem, &origin.span, label);
            error.help(other_activations(name))
        })
    }

    fn require(&self, requirement: &Requirement, outputs: &[&str]) -> Result<(), ModelError> {
        let concerned = requirement
            .outputs
            .as_ref()
            .is_none_or(|names| names.iter().any(|n| outputs.contains(&n.value.as_str())));
        let key = &requirement.key.value;
        if !concerned || requirement.is_met_by(self.config) {
            return Ok(());
        }
        let found = match (lookup(self.config, key), &requirement.default) {
            (Some(value), _) => short(value),
            (None, Some(value)) => format!("absent, which means {}", short(value)),
            (None, None) => return Ok(()),
        };
        let expected: Vec<String> = requirement.is.iter().map(short).collect();
        let mut expected = expected.join(" or ");
        if let Some((other, _)) = &requirement.only {
            let value = lookup(self.config, &other.value).unwrap_or(&Value::Null);
            expected = format!("{expected} where `{}` is {}", other.value, short(value));
        }
        let problem = Problem::Requirement {
            key: key.clone(),
            found,
            expected,
        };
        let help = match &requirement.outputs {
            Some(names) => {
                let names: Vec<&str> = names.iter().map(|n| n.value.as_str()).collect();
                format!("other outputs than {} do not depend on it", quoted(&names))
            }
            None => "the checkpoint needs another description".to_owned(),
        };
        let label = "required here";
        let error = self.file.error(problem, &requirement.key.span, label);
        Err(error.help(help))
    }

    /// Returns an error if keys for the same value are present with different values.
    fn require_equal(&self, keys: &[At<String>]) -> Result<(), ModelError> {
        let there = keys
            .iter()
            .filter_map(|key| Some((key, lookup(self.config, &key.value)?)));
        let there: Vec<(&At<String>, &Value)> = there.collect();
        let Some(&[(first, one), (second, other)]) = there
            .windows(2)
            .find(|pair| pair[0].1 != pair[1].1)
            .and_then(|pair| pair.first_chunk())
        else {
            return Ok(());
        };
        let expected = format!(
            "{}, the value of `{}`, because both keys have the same meaning",
            short(one),
            first.value
        );
        Err(self.wrong(&second.value, other, &expected, &second.span))
    }

    pub(super) fn wrong(
        &self,
        key: &str,
        value: &Value,
        expected: &str,
        span: &std::ops::Range<usize>,
    ) -> ModelError {
        let problem = Problem::ConfigValue {
            key: key.to_owned(),
            found: short(value),
            expected: expected.to_owned(),
        };
        self.file.error(problem, span, "read here")
    }

    fn no_value(&self, what: &'static str, definition: &Definition) -> ModelError {
        let keys: Vec<&str> = definition
            .origins
            .iter()
            .filter_map(|o| match &o.value {
                Origin::Key(key) | Origin::Length(key) => Some(key.as_str()),
                _ => None,
            })
            .collect();
        let problem = Problem::NoValue {
            what,
            name: definition.name.value.clone(),
            keys: quoted(&keys).replace(" and ", " or "),
        };
        let known: Vec<&str> = self.config.keys().map(String::as_str).collect();
        let near = keys.iter().find_map(|key| nearest(key, &known));
        let help = match near {
            Some(near) => format!("config.json has `{near}`: did you mean that key?"),
            None => {
                "give config.json the key, or the description a default after it: `[Key(\"…\"), 2]`"
                    .to_owned()
            }
        };
        self.file
            .error(problem, &definition.name.span, "has no value")
            .help(help)
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Formats a number for a message without long runs of zeros.
fn number_in_words(value: f64) -> String {
    match value.abs() {
        size if size != 0.0 && !(1e-4..=1e7).contains(&size) => format!("{value:e}"),
        _ => value.to_string(),
    }
}

/// Formats a JSON value for a message.
fn short(value: &Value) -> String {
    match value {
        Value::Array(_) | Value::Object(_) => kind(value).to_owned(),
        Value::String(text) if text.chars().count() > 40 => "a long string".to_owned(),
        Value::Number(n) if n.is_f64() => {
            format!(
                "`{}`",
                n.as_f64().map_or_else(|| n.to_string(), number_in_words)
            )
        }
        other => format!("`{other}`"),
    }
}
