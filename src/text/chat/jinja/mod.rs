//! Jinja as the library transformers renders chat templates: jinja2's immutable sandbox with `trim_blocks`, `lstrip_blocks` and loop
//! controls.
//!
//! A template comes with a checkpoint, and a conversation comes from a client. Neither is trusted. Every value is charged to a [`Meter`],
//! which bounds memory, work and stack of a rendering; general Jinja engines do not bound growing texts and lists. Values have Python's
//! types and text form, since prompts must have the same format as in training. Unsupported features of jinja2 are errors and never render
//! as empty text.

mod args;
mod ast;
mod attributes;
mod calls;
mod collections;
mod error;
mod evaluate;
mod filters;
mod format;
mod json;
mod lex;
mod machine;
mod meter;
mod methods;
mod operators;
mod parse;
mod sequences;
mod show;
mod tests;
mod value;

pub use error::{Error, Kind};
pub use json::Json;
pub use meter::Limits;
use meter::Meter;
use value::Value;

/// A parsed template, which threads can share.
#[derive(Debug)]
pub struct Template {
    tree: ast::Template,
    names: Vec<String>,
}

/// Value of a template variable.
#[derive(Clone, Copy, Debug)]
pub enum Variable<'a> {
    Json(&'a Json),
    /// A conversation. Tool call `arguments` that are JSON strings become objects.
    Messages(&'a [Json]),
}

impl Template {
    /// Parses `source`. Nesting is bounded, so a stack of 1 MiB suffices.
    ///
    /// # Errors
    /// Returns an error, with the line, if the syntax is invalid.
    pub fn parse(source: &str) -> Result<Self, Error> {
        let tree = parse::template(source).map_err(|e| *e)?;
        let mut names: Vec<String> = Vec::new();
        for (token, _) in lex::tokens(source).map_err(|e| *e)? {
            // Collect names and strings, because a template reads a field as `message.content` or as `message['content']`.
            if let lex::Token::Name(name) | lex::Token::Str(name) = token {
                names.push(name);
            }
        }
        names.sort_unstable();
        names.dedup();
        Ok(Self { tree, names })
    }

    /// Returns whether `name` occurs in the template, as the name of a variable, as another name, or as a string.
    pub fn mentions(&self, name: &str) -> bool {
        self.names
            .binary_search_by(|known| known.as_str().cmp(name))
            .is_ok()
    }

    /// Renders the template with `variables`.
    ///
    /// # Errors
    /// Returns an error if an operation of the template fails, if the template refuses the variables with `raise_exception`, or if
    /// rendering exceeds `limits`.
    pub fn render(
        &self,
        variables: &[(&str, Variable<'_>)],
        limits: Limits,
    ) -> Result<String, Error> {
        let meter = Meter::new(limits);
        let values = variables.iter().map(|(name, variable)| {
            let value = match variable {
                Variable::Json(json) => Value::from_json(&meter, json)?,
                Variable::Messages(messages) => calls::messages(&meter, messages)?,
            };
            Ok(((*name).to_owned(), value))
        });
        let rendered = values
            .collect::<error::Result<Vec<(String, Value)>>>()
            .and_then(|values| machine::Machine::new(&meter, &self.tree, values)?.run());
        rendered.map_err(|error| *error)
    }
}
