//! Names of inputs and of weights in descriptions.

use super::{error::At, expr::Expr};
use crate::ops::BatchInput;

/// Model inputs by the names that descriptions use. For `previous_ids`, the id before the first token comes from a field of the operator.
pub(super) const INPUTS: [(&str, BatchInput); 4] = [
    ("token_ids", BatchInput::TokenIds),
    ("previous_ids", BatchInput::PreviousIds { first: 0 }),
    ("type_ids", BatchInput::TypeIds),
    ("positions", BatchInput::Positions),
];

/// Published name of a weight with indices of the enclosing loops, such as `layer.{i}.weight`, followed by alternative names in
/// lookup order.
#[derive(Clone, Debug)]
pub(super) struct Pattern(pub Vec<Spelling>);

/// A name with expressions of indices and dimensions in braces.
#[derive(Clone, Debug)]
pub(super) struct Spelling(Vec<Part>);

#[derive(Clone, Debug)]
enum Part {
    Text(String),
    Number(Expr),
}

/// Maximum length of a name in bytes, longer than any published name. The limit bounds the memory for names, since a name in a loop is
/// expanded once per iteration.
const MAX_SPELLING: usize = 256;

impl Spelling {
    /// Parses `text`, which starts at byte `start` of the file. The error describes the expected form.
    pub fn parse(text: &str, start: usize) -> Result<Self, String> {
        if text.is_empty() {
            return Err("at least one character".to_owned());
        }
        if text.len() > MAX_SPELLING {
            return Err(format!("at most {MAX_SPELLING} bytes"));
        }
        let mut parts = Vec::new();
        let mut at = 0;
        while let Some(open) = text[at..].find(['{', '}']).map(|n| at + n) {
            let close = text[open..].find('}').filter(|&close| close > 0);
            let close =
                open + close.ok_or("matching braces around an index, as in `layer.{i}.weight`")?;
            parts.push(Part::Text(text[at..open].to_owned()));
            let inner = Expr::parse(&text[open + 1..close], start + open + 1).map_err(|why| {
                format!("an index or an expression in the braces, as in `layer.{{2 * i}}.weight` ({why})")
            })?;
            parts.push(Part::Number(inner));
            at = close + 1;
        }
        parts.push(Part::Text(text[at..].to_owned()));
        Ok(Self(parts))
    }

    /// Creates a fixed name, in which braces have no meaning.
    pub fn literal(text: &str) -> Self {
        Self(vec![Part::Text(text.to_owned())])
    }

    pub fn names(&self) -> impl Iterator<Item = &At<String>> {
        self.0.iter().flat_map(|part| match part {
            Part::Number(expr) => expr.names(),
            Part::Text(_) => Vec::new(),
        })
    }

    /// Returns the name with its placeholders replaced by numbers. `lookup` returns the number of an index or a dimension.
    pub fn fill(&self, lookup: &impl Fn(&str) -> Option<u64>) -> Result<String, String> {
        let mut name = String::new();
        for part in &self.0 {
            match part {
                Part::Text(text) => name.push_str(text),
                Part::Number(expr) => name.push_str(&expr.whole(lookup)?.to_string()),
            }
        }
        Ok(name)
    }
}
