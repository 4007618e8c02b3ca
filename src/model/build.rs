//! Builds a [`Graph`] from a checked description and a config.json.

mod modules;
pub mod operators;
mod unroll;
mod weights;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    ops::Range,
};

use super::{
    Model, adapters,
    config::Values,
    error::{At, File, ModelError, Problem, words},
    expect::Expectation,
    expr::Expr,
    modules::{Module, computed, states},
    need::needed,
    rotary::MAX_CONTEXT,
    spelling::INPUTS,
    syntax::{Ast, Count, PartOf},
};
use unroll::reads_tokens;

use crate::{
    graph::{Adapter, Graph, GraphError, NodeId, Op, Part, Sinusoid, WeightExpr, WeightNames},
    ops::BatchInput,
    tensor::{SequenceEnd, Shape},
};

/// Maximum number of elements of a table that is computed when weights are loaded (128 MiB in f32). The shapes in a checkpoint do not limit
/// the size of such a table.
const MAX_COMPUTED: u64 = 1 << 25;

pub(super) fn model(
    file: &File,
    ast: &Ast,
    config: &serde_json::Value,
    outputs: &[&str],
    modules: &[Module],
    own: &BTreeSet<String>,
) -> Result<Model, ModelError> {
    let values = Values::new(file, ast, config, outputs)?;
    let mut builder = Builder {
        file,
        adapter: adapters::chosen(file, ast.adapters.as_ref(), config)?,
        values: &values,
        graph: Graph::new(),
        scopes: vec![HashMap::new()],
        prefix: String::new(),
        weights: HashMap::new(),
        other_names: BTreeMap::new(),
        ties: &ast.ties,
        own,
        tied: BTreeMap::new(),
        untied: BTreeSet::new(),
        names: HashMap::new(),
        part: 0,
        inputs: HashMap::new(),
        caches: HashMap::new(),
        rows: HashMap::new(),
        skipped: None,
        end: None,
        first: None,
        extended: None,
        expectations: Vec::new(),
    };
    // If the sentence-transformers modules and the description have an output of the same name, the output of the modules is built.
    let computed = computed(modules).filter(|name| outputs.contains(name));
    let pooled = computed.is_some();
    let described = |name: &At<String>| {
        let name = name.value.as_str();
        outputs.contains(&name) && computed != Some(name)
    };
    // `start` is the value that the modules read first. It exists once its part is built.
    let start = states(ast, modules).filter(|_| pooled);
    let starts = |part: &PartOf| {
        let mut values = part.outputs.iter().map(|(_, value)| value);
        start.filter(|start| values.any(|value| value.span == start.span))
    };
    builder.expect(&ast.expect);
    let is_built = |part: &PartOf| {
        starts(part).is_some() || part.outputs.iter().any(|(name, _)| described(name))
    };
    // Build a part if a requested output is in it or in a later part.
    let last = ast.parts.iter().rposition(is_built);
    let mut names = Vec::new();
    let mut of_modules = None;
    for (nth, part) in ast.parts.iter().enumerate() {
        let leaves = last.is_some_and(|last| nth < last);
        if part.named.is_some() && !leaves && Some(nth) != last {
            continue;
        }
        builder.enter(part, &mut names);
        let outputs = part.outputs.iter().filter(|(name, _)| described(name));
        let outputs: Vec<_> = outputs.collect();
        let wanted = outputs.iter().map(|(_, value)| value);
        let start = starts(part);
        let wanted = wanted.chain(start).map(|value| value.value.as_str());
        let body = needed(&part.body, wanted, leaves);
        builder.size_of(body.iter().copied())?;
        builder.expect(&part.expect);
        builder.body(body)?;
        for (output, value) in outputs {
            let id = builder.value(value)?;
            if matches!(builder.graph.op(id), Op::Weight(_)) {
                let problem = Problem::out_of_range(
                    format!("the output `{}`", output.value),
                    "a table of the checkpoint",
                    "a value that is computed",
                );
                return Err(file.error(problem, &value.span, "nothing computes it"));
            }
            builder.graph.add_output(output.value.as_str(), id);
        }
        if start.is_some() {
            of_modules = Some(builder.modules(ast, modules)?);
        }
    }
    // A single part needs no name.
    if names.len() > 1 {
        builder.graph.set_parts(names);
    }
    if let Some(output) = computed {
        let id = match of_modules {
            Some(id) => id,
            None => builder.modules(ast, modules)?,
        };
        builder.graph.add_output(output, id);
    }
    let folders = modules.iter().filter_map(Module::weights);
    let folders = folders.filter(|_| pooled).map(str::to_owned).collect();
    builder.finish(ast, outputs, folders)
}

pub(super) struct Builder<'a> {
    pub(super) file: &'a File,
    values: &'a Values<'a>,
    pub(super) graph: Graph,
    /// Visible values by name, with one map for each enclosing body, innermost last.
    scopes: Vec<HashMap<&'a str, NodeId>>,
    /// Prefix of value names, such as `layer.3.` in the fourth iteration.
    prefix: String,
    weights: HashMap<String, (NodeId, Range<usize>)>,
    /// Alternative names of weights.
    other_names: BTreeMap<String, Vec<String>>,
    /// Adapter that is added to the weights.
    adapter: Option<Adapter>,
    /// Pairs of a head tensor and the table that it is tied to.
    ties: &'a [(String, String)],
    /// Tied head tensors whose values in the checkpoint differ from those of their tables.
    own: &'a BTreeSet<String>,
    /// Table of each head tensor that is not read, because a linear layer reads the table instead.
    tied: BTreeMap<String, String>,
    /// Head tensors of `ties` that a linear layer reads by their own names.
    untied: BTreeSet<String>,
    /// Name of every node, with its source position.
    names: HashMap<String, Range<usize>>,
    /// Index of the part under construction.
    part: u32,
    inputs: HashMap<(u32, BatchInput), NodeId>,
    /// Part, number of heads and head size of each cache, by name.
    caches: HashMap<String, (u32, u32, u32)>,
    /// Number of valid ids of each input. If an input indexes several tables, each from an offset, this is the minimum over the tables of
    /// the number of rows minus the offset.
    rows: HashMap<BatchInput, u32>,
    /// Token id that is not counted as a position (`skips` of `embedding`).
    skipped: Option<u32>,
    /// Token that ends a sequence.
    end: Option<SequenceEnd>,
    /// Id before the first token of a sequence.
    first: Option<u32>,
    /// Number of positions that the rotary frequencies for long contexts support; `None` if no `rotary` has such frequencies.
    extended: Option<u32>,
    expectations: Vec<Expectation>,
}

impl<'a> Builder<'a> {
    /// Begins a part. In a description with `parts`, the names of the part's values start with the name of the part.
    fn enter(&mut self, part: &PartOf, names: &mut Vec<Part>) {
        let Some((name, stream)) = &part.named else {
            return;
        };
        self.part = names.len() as u32;
        self.prefix = format!("{}.", name.value);
        self.scopes = vec![HashMap::new()];
        names.push(Part {
            name: name.value.clone(),
            stream: stream.value.clone(),
        });
    }

    fn expect(&mut self, counts: &[Count]) {
        let scope = self.prefix.strip_suffix('.').map(str::to_owned);
        for count in counts {
            let expectation = Expectation::new(scope.clone(), &count.what, count.n, self.file);
            self.expectations.push(expectation);
        }
    }

    /// Binds a name to a node. If an enclosing body defines the name, that definition is updated. Otherwise, the current body defines the
    /// name.
    fn bind(&mut self, name: &'a str, id: NodeId) {
        if let Some((inner, outer)) = self.scopes.split_last_mut() {
            match outer.iter_mut().find_map(|scope| scope.get_mut(name)) {
                Some(carried) => *carried = id,
                None => {
                    inner.insert(name, id);
                }
            }
        }
    }

    pub(super) fn value(&self, name: &At<String>) -> Result<NodeId, ModelError> {
        let mut scopes = self.scopes.iter().rev();
        scopes
            .find_map(|scope| scope.get(name.value.as_str()).copied())
            .ok_or_else(|| {
                let problem = Problem::undefined("value", &name.value);
                self.file.error(problem, &name.span, "not defined")
            })
    }

    pub(super) fn add(
        &mut self,
        name: String,
        op: Op,
        operands: &[NodeId],
        place: &Range<usize>,
    ) -> Result<NodeId, ModelError> {
        self.claim(&name, place)?;
        let added = self.graph.add(name, op, operands);
        added.map_err(|error| self.shape_error(error, operands, place))
    }

    fn shape_error(
        &self,
        error: GraphError,
        operands: &[NodeId],
        place: &Range<usize>,
    ) -> ModelError {
        let words: Vec<String> = operands
            .iter()
            .filter(|&&o| !matches!(self.graph.op(o), Op::Weight(_)))
            .map(|&o| {
                format!(
                    "`{}` holds {}",
                    self.graph.node(o).name,
                    words(self.graph.shape(o))
                )
            })
            .collect();
        self.file
            .error(Problem::Shape(error), place, "computed here")
            .help(words.join("; "))
    }

    /// Registers the name of a node. The name must be unique among all nodes, including weights.
    fn claim(&mut self, name: &str, place: &Range<usize>) -> Result<(), ModelError> {
        let Some(before) = self.names.insert(name.to_owned(), place.clone()) else {
            return Ok(());
        };
        let problem = Problem::defined_twice("name", name);
        // The name of a value is claimed after the names of the weights that it reads, so the order of claims may differ from the order in
        // the file.
        let (first, again) = match before.start <= place.start {
            true => (&before, place),
            false => (place, &before),
        };
        Err(self
            .file
            .error(problem, again, "again here")
            .also(first, "first here")
            .help("values, inputs and weights share their names; rename the value, or give the `When` around it a `name:`"))
    }

    fn input(&mut self, ids: &At<BatchInput>, place: &Range<usize>) -> Result<NodeId, ModelError> {
        let meta = ids.value;
        if let Some(&id) = self.inputs.get(&(self.part, meta)) {
            return Ok(id);
        }
        let named = match meta {
            BatchInput::PreviousIds { .. } => BatchInput::PreviousIds { first: 0 },
            meta => meta,
        };
        let name = INPUTS.iter().find(|&&(_, m)| m == named);
        let name = name.map_or_else(|| format!("{meta:?}"), |&(n, _)| n.to_owned());
        // Each part has its own batch, so inputs of different parts have different names.
        let name = match self.part {
            0 => name,
            part => format!("{name}.{part}"),
        };
        let id = self.add(name, Op::Input(meta), &[], place)?;
        self.graph.set_part(id, self.part);
        self.inputs.insert((self.part, meta), id);
        Ok(id)
    }

    /// Returns the node of a computed position table. All uses of the same style and size share one node.
    fn sinusoid(
        &mut self,
        style: Sinusoid,
        [rows, width]: [u64; 2],
        (of_rows, place): (&At<Expr>, &At<Expr>),
    ) -> Result<NodeId, ModelError> {
        // The exponents of the frequencies are divided by `width / 2 − 1`, which must not be 0.
        if width < 4 || !width.is_multiple_of(2) {
            let problem = Problem::out_of_range(
                "the width of a table of sines and cosines",
                width,
                "an even number of at least 4",
            );
            return Err(self
                .values
                .about(problem, &[place], "no such table".to_owned()));
        }
        self.check_computed("a table of sines and cosines", &[rows, width], of_rows)?;
        let expr = WeightExpr::Sinusoid { style, rows, width };
        let name = match style {
            Sinusoid::OverWidth => format!("sinusoid.over_width.{rows}x{width}"),
            Sinusoid::OverHalf => format!("sinusoid.over_half.{rows}x{width}"),
        };
        self.computed(name, expr, &place.span)
    }

    /// Returns an error if a computed table has more than [`MAX_COMPUTED`] elements.
    fn check_computed(&self, what: &str, dims: &[u64], place: &At<Expr>) -> Result<(), ModelError> {
        let elements = dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
        if elements.is_some_and(|n| n <= MAX_COMPUTED) {
            return Ok(());
        }
        let problem = Problem::out_of_range(
            what,
            Shape::fixed(dims),
            format!("at most {MAX_COMPUTED} elements"),
        );
        Err(self.values.about(problem, &[place], "too large".to_owned()))
    }

    /// Returns the node of a computed weight. All uses of the same name share one node.
    fn computed(
        &mut self,
        name: String,
        expr: WeightExpr,
        place: &Range<usize>,
    ) -> Result<NodeId, ModelError> {
        if let Some((id, _)) = self.weights.get(&name) {
            return Ok(*id);
        }
        let id = self.add(name.clone(), Op::Weight(expr), &[], place)?;
        self.weights.insert(name, (id, place.clone()));
        Ok(id)
    }

    /// Returns the width of the rows of `x`, an operand of `op`.
    ///
    /// # Errors
    /// Returns an error if the rows of `x` have no fixed width.
    fn width(
        &self,
        node: &str,
        op: &'static str,
        x: NodeId,
        place: &Range<usize>,
    ) -> Result<u64, ModelError> {
        self.graph.shape(x).width().ok_or_else(|| {
            let of = self.graph.node(x);
            let error = GraphError::Shape {
                node: node.to_owned(),
                op: op.into(),
                problem: "expected rows of one width".to_owned(),
                operands: format!("`{}` {}", of.name, of.shape),
            };
            self.shape_error(error, &[x], place)
        })
    }

    /// Divides the rows of `x`, an operand of `op`, into `heads` equal parts, and returns the width of a part.
    fn part_of(
        &self,
        node: &str,
        op: &'static str,
        x: NodeId,
        heads: u32,
        place: &Range<usize>,
    ) -> Result<u32, ModelError> {
        let width = self.width(node, op, x, place)?;
        let part = match heads > 0 && width.is_multiple_of(heads.into()) {
            true => u32::try_from(width / u64::from(heads)).ok(),
            false => None,
        };
        part.ok_or_else(|| {
            let of = self.graph.node(x);
            let error = GraphError::Shape {
                node: node.to_owned(),
                op: op.into(),
                problem: format!("a width of {width} does not divide into {heads} heads"),
                operands: format!("`{}` {}", of.name, of.shape),
            };
            self.shape_error(error, &[x], place)
        })
    }

    fn ids_below(
        &mut self,
        ids: BatchInput,
        rows: u32,
        offset: u32,
        span: &Range<usize>,
    ) -> Result<(), ModelError> {
        if offset >= rows {
            let problem = Problem::out_of_range(
                "the offset into the table",
                offset,
                format!("less than its {rows} rows"),
            );
            return Err(self.file.error(problem, span, "no id has a row"));
        }
        let fewest = self.rows.entry(ids).or_insert(u32::MAX);
        *fewest = (*fewest).min(rows - offset);
        Ok(())
    }

    /// Returns the maximum sequence length: `max_context` of config.json if present, else the number of positions of the model. It is an
    /// error if `max_context` exceeds the number of positions.
    fn max_positions(&self) -> Result<Option<u32>, ModelError> {
        let positions = self.rows.get(&BatchInput::Positions).copied();
        let Some(asked) = self.values.max_context()? else {
            return Ok(positions);
        };
        match positions.filter(|&positions| asked > positions) {
            None => Ok(Some(asked)),
            Some(positions) => Err(self.file.error_elsewhere(Problem::out_of_range(
                format!("`{MAX_CONTEXT}`"),
                asked,
                format!("at most {positions}, the number of positions of the model"),
            ))),
        }
    }

    fn finish(
        mut self,
        ast: &Ast,
        outputs: &[&str],
        folders: Vec<String>,
    ) -> Result<Model, ModelError> {
        let sound = self
            .graph
            .select_outputs(outputs)
            .and_then(|()| self.graph.verify());
        sound.map_err(|error| self.file.error_elsewhere(Problem::Graph(error)))?;
        if !ast.parts.iter().any(|part| reads_tokens(&part.body)) {
            let error = self.file.error_elsewhere(Problem::NoTokens);
            return Err(error.help("start from `embedding(ids: \"token_ids\", …)`"));
        }
        if let (Some(_), Some(cache)) = (self.first, self.caches.keys().min()) {
            let problem = Problem::out_of_range(
                "an embedding of `previous_ids`",
                format!("in a model with the cache `{cache}`"),
                "a model without `cache`, as the token before a batch is not known",
            );
            return Err(self.file.error_elsewhere(problem));
        }
        // If no table is indexed by token ids, every id is accepted.
        let vocab = self.rows.get(&BatchInput::TokenIds).copied();
        let vocab = vocab.unwrap_or(i32::MAX as u32);
        let max_positions = self.max_positions()?;
        let positions = self.rows.get(&BatchInput::Positions).copied();
        let extended = self.extended.max(positions);
        // Iterations of a `Repeat` that no requested output needs are not in the graph, so their `expect:` counts do not apply.
        let nodes = self.graph.topological();
        let names = nodes.iter().map(|&id| self.graph.node(id).name.as_str());
        let scopes: HashSet<&str> = names
            .flat_map(|name| name.match_indices('.').map(move |(dot, _)| &name[..dot]))
            .collect();
        self.expectations
            .retain(|e| e.scope.as_ref().is_none_or(|s| scopes.contains(s.as_str())));
        Ok(Model {
            name: ast.name.clone(),
            weight_names: WeightNames {
                prefixes: ast.prefixes.clone(),
                endings: ast.endings.clone(),
                others: self.other_names,
                folders,
                ties: self.tied,
                untied: self.untied,
                ignored: ast.ignores.clone(),
                adapter: self.adapter,
            },
            expectations: self.expectations,
            dims: self.values.dims(),
            vocab,
            max_positions,
            extended_positions: extended.filter(|&n| max_positions.is_some_and(|max| max < n)),
            type_rows: self.rows.get(&BatchInput::TypeIds).copied(),
            skipped: self.skipped,
            end: self.end,
            graph: self.graph,
        })
    }
}
