//! Values of a description's names, from a checkpoint's `config.json`.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    error::{At, File, ModelError, Problem, quoted, suggest},
    expr::Expr,
    syntax::{ACTIVATIONS, Ast, Definition, Origin, Requirement, activation},
};
use crate::kernels::gemm::Activation;

/// All that config.json gives to a description.
pub(super) struct Values<'a> {
    file: &'a File,
    pub dims: BTreeMap<String, u64>,
    reals: BTreeMap<String, f64>,
    activations: BTreeMap<String, Activation>,
}

/// Sizes are indices of kernels, which count in 32 bits.
const MAX_SIZE: u64 = i32::MAX as u64;

impl<'a> Values<'a> {
    /// Finds every value; `outputs` decides which requirements hold.
    pub fn resolve(
        file: &'a File,
        ast: &Ast,
        config: &Value,
        outputs: &[&str],
    ) -> Result<Self, ModelError> {
        let Value::Object(config) = config else {
            let found = kind(config);
            return Err(file
                .error_elsewhere(Problem::ConfigNotAnObject { found })
                .help("give the config.json that is published beside the weights"));
        };
        // A key with null is a key that is not there, as Hugging Face writes it.
        let config = Config {
            file,
            get: &|key| config.get(key).filter(|v| !v.is_null()),
        };
        for requirement in &ast.requirements {
            config.require(requirement, outputs)?;
        }
        let mut values = Values {
            file,
            dims: BTreeMap::new(),
            reals: BTreeMap::new(),
            activations: BTreeMap::new(),
        };
        for d in &ast.dims {
            let dim = values.dim(&config, d)?;
            values.dims.insert(d.name.value.clone(), dim);
        }
        for d in &ast.reals {
            let real = values.real_definition(&config, d)?;
            values.reals.insert(d.name.value.clone(), real);
        }
        for d in &ast.activations {
            let activation = config.activation(d)?;
            values.activations.insert(d.name.value.clone(), activation);
        }
        Ok(values)
    }

    fn dim(&self, config: &Config<'_>, definition: &Definition) -> Result<u64, ModelError> {
        for origin in &definition.origins {
            let found = match &origin.value {
                Origin::Key(key) => config.whole(key, &origin.span)?,
                Origin::Length(key) => config.length(key, &origin.span)?,
                Origin::Expr(expr) => Some(self.whole(expr, &origin.span)?),
                Origin::Word(_) => None,
            };
            if let Some(value) = found {
                return Ok(value);
            }
        }
        Err(config.no_value("dimension", definition))
    }

    fn real_definition(
        &self,
        config: &Config<'_>,
        definition: &Definition,
    ) -> Result<f64, ModelError> {
        for origin in &definition.origins {
            match &origin.value {
                Origin::Key(key) => match (config.get)(key) {
                    None => {}
                    Some(value) => {
                        return value
                            .as_f64()
                            .ok_or_else(|| config.wrong(key, value, "a number", &origin.span));
                    }
                },
                Origin::Expr(expr) => return self.real_of(expr, &origin.span),
                Origin::Length(_) | Origin::Word(_) => {}
            }
        }
        Err(config.no_value("real", definition))
    }

    fn whole(&self, expr: &Expr, span: &std::ops::Range<usize>) -> Result<u64, ModelError> {
        expr.whole(&|name| self.dims.get(name).copied())
            .map_err(|message| self.arithmetic(message, span, expr))
    }

    fn real_of(&self, expr: &Expr, span: &std::ops::Range<usize>) -> Result<f64, ModelError> {
        let dim = |name: &str| self.dims.get(name).map(|&d| d as f64);
        let lookup = |name: &str| self.reals.get(name).copied().or_else(|| dim(name));
        expr.real(&lookup)
            .map_err(|message| self.arithmetic(message, span, expr))
    }

    fn arithmetic(
        &self,
        message: String,
        span: &std::ops::Range<usize>,
        expr: &Expr,
    ) -> ModelError {
        let text = self.text(span).to_owned();
        let names: Vec<String> = expr
            .names()
            .iter()
            .filter_map(|n| Some(format!("{} = {}", n.value, self.dims.get(&n.value)?)))
            .collect();
        let error = self.file.error(
            Problem::Arithmetic {
                text,
                message: message.clone(),
            },
            span,
            message,
        );
        if names.is_empty() {
            return error;
        }
        error.help(format!("here {}", names.join(" and ")))
    }

    /// An expression as written, without its quotes.
    fn text(&self, span: &std::ops::Range<usize>) -> &str {
        self.file.text()[span.clone()].trim_matches('"')
    }

    /// How often a `Repeat` runs; at least once.
    pub fn times(&self, expr: &At<Expr>) -> Result<u64, ModelError> {
        match self.whole(&expr.value, &expr.span)? {
            0 => {
                let times = self.text(&expr.span).to_owned();
                let problem = Problem::RepeatZero { times };
                Err(self
                    .file
                    .error(problem, &expr.span, "is 0")
                    .help("a `Repeat` runs at least once; leave it out instead"))
            }
            times => Ok(times),
        }
    }

    /// A size of a tensor.
    pub fn size(&self, expr: &At<Expr>) -> Result<u32, ModelError> {
        self.within(expr, 1)
    }

    /// What is added to ids; it may be zero.
    pub fn offset(&self, expr: &At<Expr>) -> Result<u32, ModelError> {
        self.within(expr, 0)
    }

    fn within(&self, expr: &At<Expr>, least: u64) -> Result<u32, ModelError> {
        let value = self.whole(&expr.value, &expr.span)?;
        match u32::try_from(value) {
            Ok(size) if (least..=MAX_SIZE).contains(&value) => Ok(size),
            _ => {
                let problem = Problem::OutOfRange {
                    what: format!("`{}`", self.text(&expr.span)),
                    found: value.to_string(),
                    expected: format!("{least} to {MAX_SIZE}"),
                };
                Err(self.file.error(problem, &expr.span, format!("is {value}")))
            }
        }
    }

    /// An attribute in f32.
    pub fn real(&self, expr: &At<Expr>) -> Result<f32, ModelError> {
        let value = self.real_of(&expr.value, &expr.span)?;
        let real = value as f32;
        if !real.is_finite() {
            let problem = Problem::OutOfRange {
                what: format!("`{}`", self.text(&expr.span)),
                found: number(value),
                expected: "a finite number in f32".to_owned(),
            };
            let label = format!("is {}", number(value));
            return Err(self.file.error(problem, &expr.span, label));
        }
        Ok(real)
    }

    /// A small positive number that keeps a division sound.
    pub fn eps(&self, expr: &At<Expr>) -> Result<f32, ModelError> {
        let eps = self.real(expr)?;
        if eps <= 0.0 {
            // As written: what is too small for f32 is 0 in it.
            let value = self.real_of(&expr.value, &expr.span)?;
            let expected = match value > 0.0 {
                true => "a number that is above 0 in f32, too",
                false => "a number above 0",
            };
            let problem = Problem::OutOfRange {
                what: format!("`{}`", self.text(&expr.span)),
                found: number(value),
                expected: expected.to_owned(),
            };
            let label = format!("is {}", number(value));
            return Err(self.file.error(problem, &expr.span, label));
        }
        Ok(eps)
    }

    /// `None` where the name is not defined, which the check of names excludes.
    pub fn activation(&self, name: &str) -> Option<Activation> {
        self.activations.get(name).copied()
    }
}

/// config.json, with errors that point at the line that wants a key.
struct Config<'a> {
    file: &'a File,
    get: &'a dyn Fn(&str) -> Option<&'a Value>,
}

impl Config<'_> {
    fn whole(&self, key: &str, span: &std::ops::Range<usize>) -> Result<Option<u64>, ModelError> {
        let Some(value) = (self.get)(key) else {
            return Ok(None);
        };
        let whole = value.as_u64();
        whole
            .ok_or_else(|| self.wrong(key, value, "a whole number", span))
            .map(Some)
    }

    fn length(&self, key: &str, span: &std::ops::Range<usize>) -> Result<Option<u64>, ModelError> {
        match (self.get)(key) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items.len() as u64)),
            Some(Value::Object(entries)) => Ok(Some(entries.len() as u64)),
            Some(value) => Err(self.wrong(key, value, "a list or an object", span)),
        }
    }

    fn activation(&self, definition: &Definition) -> Result<Activation, ModelError> {
        for origin in &definition.origins {
            let name = match &origin.value {
                Origin::Word(name) => name,
                Origin::Key(key) => match (self.get)(key) {
                    None => continue,
                    Some(Value::String(name)) => name,
                    Some(value) => {
                        return Err(self.wrong(
                            key,
                            value,
                            "the name of an activation",
                            &origin.span,
                        ));
                    }
                },
                Origin::Length(_) | Origin::Expr(_) => continue,
            };
            return activation(name).ok_or_else(|| {
                let help = suggest(name, ACTIVATIONS.iter().map(|&(n, _)| n));
                let problem = Problem::Activation { name: name.clone() };
                let label = format!("config.json gives `{name}`");
                self.file.error(problem, &origin.span, label).help(help)
            });
        }
        Err(self.no_value("activation", definition))
    }

    fn require(&self, requirement: &Requirement, outputs: &[&str]) -> Result<(), ModelError> {
        let concerned = requirement
            .outputs
            .as_ref()
            .is_none_or(|names| names.iter().any(|n| outputs.contains(&n.value.as_str())));
        let key = &requirement.key.value;
        match (self.get)(key) {
            Some(value) if concerned && *value != requirement.is => {
                let problem = Problem::Requirement {
                    key: key.clone(),
                    found: short(value),
                    expected: short(&requirement.is),
                };
                let help = match &requirement.outputs {
                    Some(names) => {
                        let names: Vec<&str> = names.iter().map(|n| n.value.as_str()).collect();
                        format!("other outputs than {} do not depend on it", quoted(&names))
                    }
                    None => "the checkpoint needs another description".to_owned(),
                };
                let label = "required here";
                Err(self
                    .file
                    .error(problem, &requirement.key.span, label)
                    .help(help))
            }
            _ => Ok(()),
        }
    }

    fn wrong(
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
        self.file
            .error(problem, &definition.name.span, "has no value")
            .help("give config.json the key, or the description a default after it: `[Key(\"…\"), 2]`")
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

/// A number for a message, without hundreds of zeros.
fn number(value: f64) -> String {
    match value.abs() {
        size if size != 0.0 && !(1e-4..=1e7).contains(&size) => format!("{value:e}"),
        _ => value.to_string(),
    }
}

/// A JSON value for a message.
fn short(value: &Value) -> String {
    match value {
        Value::Array(_) | Value::Object(_) => kind(value).to_owned(),
        Value::String(text) if text.chars().count() > 40 => "a long string".to_owned(),
        Value::Number(n) if n.is_f64() => {
            format!("`{}`", n.as_f64().map_or_else(|| n.to_string(), number))
        }
        other => format!("`{other}`"),
    }
}
