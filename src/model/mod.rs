//! RON to graph: a description and a checkpoint's `config.json` become a [`Graph`].
//!
//! Reading goes in three steps, each with its own errors: `reader` and `decode` make the syntax
//! tree and keep the place of every word; `scope` checks every name; `build` takes the sizes from
//! config.json and adds the operators to a graph, which infers shapes. All errors are
//! [`ModelError`]s: miette shows them with file, line, column and a caret. No input makes this room
//! panic, and the time it takes is bounded: sources, nesting, unrolled values and sizes have limits.
//!
//! # The language
//!
//! A file is one `Model(…)` in RON, with these fields:
//!
//! | field | holds |
//! |---|---|
//! | `name` | the model's name |
//! | `prefixes` | what published weight names may start with; `[""]` if left out |
//! | `require` | `Must(key: "…", is: …)`: a key of config.json that, if there, has this value; with `outputs: […]` only where one of them is asked for |
//! | `dims` | whole numbers by name |
//! | `reals` | real numbers by name |
//! | `activations` | activations by name |
//! | `graph` | statements |
//! | `outputs` | `{"output": "value"}` |
//! | `default` | the outputs that are built if none is asked for |
//! | `expect` | counts after the passes, in the whole graph |
//!
//! A number is `Key("key of config.json")`, `Length("key")` (entries of a list or an object), a
//! number, an expression such as `"hidden / heads"`, or a list of these: the first that is there
//! counts. A key with null is not there. Expressions have names, `+ - * /`, `sqrt(…)` and
//! parentheses; in whole numbers every division must come out even.
//!
//! A statement is `Let("name", operator(…))` or `Repeat(times: "layers", index: "i", name: "layer",
//! body: […], expect: {…})`. A name is given once. Inside a `Repeat`, `Let` of a name from outside
//! gives it the value that the next iteration, and what follows the loop, reads; other names end
//! with the iteration. Values of iteration 3 are called `layer.3.…` in the graph. `expect` counts
//! in every iteration: `launches`, `gemms`, or an operator of the graph.
//!
//! | operator | fields | result |
//! |---|---|---|
//! | `embedding` | `ids` (`token_ids`, `type_ids`, `positions`), `table`, `rows`, `width`, `offset` (0) | rows of the table |
//! | `linear` | `x`, `out`, `weight`, `bias` (none) | `x · weightᵀ + bias`, `out` wide |
//! | `add_bias` | `x`, `bias` | a vector added to every row |
//! | `add` | `a`, `b` | the sum of two values of one shape |
//! | `scale` | `x`, `by` | `by · x` |
//! | `gelu` | `x`, `form` (`exact`, `tanh`) | pointwise |
//! | `relu`, `tanh` | `x` | pointwise |
//! | `activation` | `x`, `kind` (a name of `activations`) | pointwise |
//! | `layer_norm` | `x`, `weight`, `bias`, `eps` | over the width |
//! | `split_heads` | `x`, `heads` | `[tokens, heads·head]` → `[heads, tokens, head]` |
//! | `merge_heads` | `x` | the way back |
//! | `matmul` | `a`, `b`, `transpose_b` (`false`) | scores `a · bᵀ`, or sums of `b` weighted by `a`; each sequence by itself |
//! | `softmax` | `x` | of scores, over the keys |
//! | `first_token`, `last_token`, `mean_pool`, `max_pool` | `x` | one row for each sequence |
//! | `concat` | `of` (2 to 16 values) | values of one number of rows, side by side |
//! | `l2_normalize` | `x`, `eps` | rows of length 1 |
//!
//! Weights (`table`, `weight`, `bias`) are named as published, with `{i}` for the index of a loop
//! around them. A name that is read twice is one tensor.

mod build;
mod config;
mod decode;
mod error;
mod expect;
mod expr;
mod reader;
mod scope;
mod syntax;

use std::collections::BTreeMap;

pub use error::{ModelError, Problem};
pub use expect::Expectation;

use crate::graph::Graph;
use error::{File, quoted, suggest};

/// Descriptions that come with the crate: name and source.
const SHIPPED: [(&str, &str); 4] = [
    (
        "bert",
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/models/bert.ron")),
    ),
    (
        "roberta",
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/models/roberta.ron")),
    ),
    (
        "distilbert",
        include_str!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/models/distilbert.ron"
        )),
    ),
    (
        "albert",
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/models/albert.ron")),
    ),
];

/// Names of [`SHIPPED`], in its order.
const SHIPPED_NAMES: [&str; SHIPPED.len()] = {
    let mut names = [""; SHIPPED.len()];
    let mut i = 0;
    while i < names.len() {
        names[i] = SHIPPED[i].0;
        i += 1;
    }
    names
};

/// A model's description: parsed, and every name in it checked. Sizes come with [`build`].
///
/// [`build`]: Description::build
#[derive(Clone, Debug)]
pub struct Description {
    file: File,
    ast: syntax::Ast,
}

impl Description {
    /// Reads a description; `name` is the file's name in errors.
    ///
    /// # Errors
    /// Syntax, unknown operators and fields, undefined and twice-defined names, cycles.
    pub fn parse(name: &str, source: &str) -> Result<Self, ModelError> {
        let file = File::new(name, source);
        let ast = {
            let (reader, whole) = reader::Reader::whole(&file)?;
            decode::description(reader, whole)?
        };
        scope::check(&file, &ast)?;
        Ok(Self { file, ast })
    }

    /// A description that comes with the crate; `None` where there is none of this name.
    pub fn shipped(name: &str) -> Option<Result<Self, ModelError>> {
        let source = Self::shipped_source(name)?;
        Some(Self::parse(&format!("{name}.ron"), source))
    }

    /// The text of a shipped description, to start one's own from.
    pub fn shipped_source(name: &str) -> Option<&'static str> {
        let found = SHIPPED.iter().find(|(n, _)| *n == name);
        found.map(|&(_, source)| source)
    }

    /// Names that [`shipped`](Self::shipped) takes.
    pub fn shipped_names() -> &'static [&'static str] {
        &SHIPPED_NAMES
    }

    /// The model's name as the description gives it.
    pub fn name(&self) -> &str {
        &self.ast.name
    }

    /// All outputs that can be asked for, in the order of the file.
    pub fn output_names(&self) -> Vec<&str> {
        let outputs = self.ast.outputs.iter();
        outputs.map(|(name, _)| name.value.as_str()).collect()
    }

    /// The outputs that are built where none is asked for.
    pub fn default_outputs(&self) -> Vec<&str> {
        let outputs = self.ast.default_outputs.iter();
        outputs.map(|name| name.value.as_str()).collect()
    }

    /// The graph for the sizes of `config` (a checkpoint's config.json) with the asked outputs, or
    /// the default ones. What no output needs is not in the graph.
    ///
    /// # Errors
    /// Dimensions without a value, values of a wrong type, requirements that `config` does not
    /// meet, sizes without sense, shapes that do not fit, outputs that are not there.
    pub fn build(
        &self,
        config: &serde_json::Value,
        outputs: Option<&[&str]>,
    ) -> Result<Model, ModelError> {
        let outputs = self.choose(outputs)?;
        build::model(&self.file, &self.ast, config, &outputs)
    }

    /// The outputs that are asked for, each known and named once.
    fn choose<'o>(&'o self, asked: Option<&[&'o str]>) -> Result<Vec<&'o str>, ModelError> {
        let known = self.output_names();
        let mut chosen = Vec::new();
        for name in asked.map_or_else(|| self.default_outputs(), <[&str]>::to_vec) {
            if !known.contains(&name) {
                let problem = Problem::UnknownOutput {
                    name: name.to_owned(),
                };
                let help = suggest(name, known.iter().copied());
                let help = format!("{help} The outputs are {}.", quoted(&known));
                return Err(self.file.error_elsewhere(problem).help(help));
            }
            if !chosen.contains(&name) {
                chosen.push(name);
            }
        }
        if chosen.is_empty() {
            let help = format!("the outputs are {}", quoted(&known));
            return Err(self.file.error_elsewhere(Problem::NoOutput).help(help));
        }
        Ok(chosen)
    }
}

/// A description with sizes: what the passes start from.
#[derive(Clone, Debug)]
pub struct Model {
    pub name: String,
    /// Unfused. Values are named as in the description, inside a `Repeat` as `layer.3.query`;
    /// weights as in the checkpoint, without prefix.
    pub graph: Graph,
    /// What published names of weights may start with, such as `bert.`; often one is empty.
    pub prefixes: Vec<String>,
    /// What must hold after the passes.
    pub expectations: Vec<Expectation>,
    /// The description's dimensions.
    pub dims: BTreeMap<String, u64>,
    /// Token ids are below this.
    pub vocab: u32,
    /// The longest sequence that the position table has rows for; `None` without such a table.
    pub max_positions: Option<u32>,
    /// Type ids are below this; `None` where the model reads none.
    pub type_rows: Option<u32>,
}

impl Model {
    /// Checks all `expect:` lines on the graph after the passes.
    ///
    /// # Errors
    /// The first that is not met, with what the graph has instead.
    pub fn check_expectations(&self, fused: &Graph) -> Result<(), ModelError> {
        expect::check(&self.expectations, fused)
    }
}

#[cfg(test)]
mod tests;
