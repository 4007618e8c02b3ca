//! Low-rank adapters of a checkpoint, of which config.json chooses at most one.

use serde_json::Value;

use super::{
    Description, ModelError, Problem,
    config::{lookup, object},
    error::{At, File},
    syntax::Adapters,
};
use crate::{graph::Adapter, names::nearest};

/// Key of config.json with the name of the adapter that is added to the weights.
pub const ADAPTER: &str = "adapter";

impl Description {
    /// Returns the names of a checkpoint's adapters; `None` if the description has no adapters.
    ///
    /// # Errors
    /// Returns an error if the description has adapters, but config.json has no list of their
    /// names.
    pub fn adapter_names(&self, config: &Value) -> Result<Option<Vec<String>>, ModelError> {
        let adapters = self.ast.adapters.as_ref();
        adapters
            .map(|adapters| names(&self.file, adapters, config))
            .transpose()
    }
}

fn wrong(file: &File, key: &At<String>, config: &Value, expected: &str) -> ModelError {
    let found = config.get(&key.value).unwrap_or(&Value::Null);
    file.error(
        Problem::out_of_range(format!("`{}` in config.json", key.value), found, expected),
        &key.span,
        "read here",
    )
}

fn names(file: &File, adapters: &Adapters, config: &Value) -> Result<Vec<String>, ModelError> {
    let list = config.get(&adapters.names.value).and_then(Value::as_array);
    let texts = list.and_then(|list| {
        let texts = list.iter().map(|name| name.as_str().map(str::to_owned));
        texts.collect::<Option<Vec<String>>>()
    });
    texts.ok_or_else(|| wrong(file, &adapters.names, config, "a list of names"))
}

/// Returns the adapter that config.json chooses; `None` if it chooses no adapter.
pub(super) fn chosen(
    file: &File,
    adapters: Option<&Adapters>,
    config: &Value,
) -> Result<Option<Adapter>, ModelError> {
    let (Some(adapters), Some(chosen)) = (adapters, lookup(object(file, config)?, ADAPTER)) else {
        return Ok(None);
    };
    let names = names(file, adapters, config)?;
    let index = names.iter().position(|name| chosen == name.as_str());
    let index = index.ok_or_else(|| {
        let near = chosen.as_str();
        let near = near.and_then(|name| nearest(name, names.iter().map(String::as_str)));
        let near = near.map_or_else(String::new, |near| format!(" (did you mean `{near}`?)"));
        file.error_elsewhere(Problem::out_of_range(
            format!("`{ADAPTER}` in config.json"),
            chosen,
            format!("one of {}{near}", names.join(", ")),
        ))
    })?;
    let number = |key: &At<String>| {
        let found = config.get(&key.value).and_then(Value::as_f64);
        let found = found.filter(|n| n.is_finite() && *n > 0.0);
        found.ok_or_else(|| wrong(file, key, config, "a positive number"))
    };
    Ok(Some(Adapter {
        index: index as u32,
        count: names.len() as u32,
        scale: number(&adapters.alpha)? / number(&adapters.rank)?,
    }))
}
