//! Lowering of the fused graph to launches of the kernels that `select` chooses.

mod attention;
mod caches;
mod chains;
mod error;
mod kernels;
mod prepared;
mod rules;

use std::collections::HashMap;

use attention::conversions;
use caches::caches;
use chains::Chains;
pub use chains::alternatives;
pub use error::LowerError;
use prepared::Prepared;
use rules::{Appending, Converting};

use super::{
    AttentionChoice, Fusions, Padding, Program, Step, Storage, Tensor, TensorIndex,
    fusions::{Origin, Refused, RuleName},
    padding::{check_expanded, check_kept},
};
use crate::{
    graph::{Graph, NodeId, Op, WeightExpr},
    kernels::{Fill, KernelSpec, Role},
    machine::Machine,
    ops::BatchInput,
    select::{Dispatch, Timings},
    tensor::{DType, Element, Extents, Shape, Size, Symbol},
};

/// Options for lowering.
#[derive(Clone, Copy, Debug)]
pub struct LowerOptions<'a> {
    /// Storage type of activations and weights.
    pub dtype: DType,
    pub padding: Padding,
    /// The card that the program is compiled for.
    pub machine: &'a Machine,
    /// Kernel timings on a card of this kind, which correct the cost model.
    pub timings: Option<&'a Timings>,
    /// The kernels for fused attention.
    pub attention: AttentionChoice,
    /// Whether each operator has one kernel for all batches ([`Program::invariant`]).
    pub invariant: bool,
    /// Whether activations may be rounded to E4M3 or int8 before they are multiplied by a packed weight of the same type. Each row of the
    /// activations then has its own scale.
    pub quantizes_rows: bool,
    /// Whether every operator has separate launches, even if a fused launch is faster.
    pub no_fused_launches: bool,
}

/// Lowers a verified graph to a program. Unless padding is removed, softmax masks padding keys.
///
/// # Errors
/// Returns an error if an operator is unsupported. Unless padding is removed, also returns an error if an operator would read padding.
pub fn lower(graph: &Graph, options: &LowerOptions) -> Result<Program, LowerError> {
    match options.padding {
        Padding::Removed => {}
        Padding::Expanded => check_expanded(graph)?,
        Padding::Kept => check_kept(graph)?,
    }
    Ok(lowered(graph, options)?.program)
}

fn lowered<'a>(graph: &'a Graph, options: &LowerOptions<'a>) -> Result<Lowering<'a>, LowerError> {
    let mut lowering = Lowering::new(graph, options)?;
    for id in graph.topological() {
        lowering.node(id)?;
    }
    for (name, id) in graph.outputs() {
        let tensor = lowering.tensor_of[id];
        lowering.program.outputs.push((name.clone(), tensor));
    }
    lowering.lifetimes();
    Ok(lowering)
}

/// Returns the nodes that each launch computes, and the rules that do not apply to `batch`.
///
/// # Errors
/// Returns an error if the graph cannot be lowered.
pub fn explain(
    graph: &Graph,
    options: &LowerOptions,
    batch: &Extents,
) -> Result<Fusions, LowerError> {
    let lowering = lowered(graph, options)?;
    let mut refused = lowering.refused;
    refused.extend(lowering.chains.refused(graph, options, batch));
    let described = |&id: &NodeId| {
        let node = graph.node(id);
        format!("{} `{}`", node.op.name(), node.name)
    };
    let origins = lowering.origins.iter().map(|(rule, nodes)| Origin {
        rule: *rule,
        nodes: nodes.iter().map(described).collect(),
    });
    Ok(Fusions {
        origins: origins.collect(),
        refused,
    })
}

struct Lowering<'a> {
    graph: &'a Graph,
    options: LowerOptions<'a>,
    dtype: DType,
    /// The chains of nodes whose kernels depend on the number of rows, and their launches.
    chains: Chains,
    /// The launches that prepare operands of attention, each computing several nodes.
    prepared: Prepared,
    /// Attention nodes whose kernels convert their result to E4M3, keyed by the node of the conversion.
    conversions: HashMap<NodeId, Converting>,
    program: Program,
    tensor_of: HashMap<NodeId, TensorIndex>,
    meta_of: HashMap<BatchInput, TensorIndex>,
    /// Attention nodes whose decode kernels append to the cache themselves, each with the nodes that the separate append launch computes.
    appending: HashMap<NodeId, (Appending, Vec<NodeId>)>,
    /// Scratch tensors of implementations, by node and name.
    scratch_of: HashMap<(NodeId, &'static str), TensorIndex>,
    /// The nodes that each step computes, and the rule that fused them.
    origins: Vec<(Option<RuleName>, Vec<NodeId>)>,
    /// Rules of [`rules`] that do not apply although their pattern was found.
    refused: Vec<Refused>,
}

impl<'a> Lowering<'a> {
    fn new(graph: &'a Graph, options: &LowerOptions<'a>) -> Result<Self, LowerError> {
        let program = starting_program(graph, options);
        let mut prepared = Prepared::of(graph, &program, options);
        let (conversions, mut refused) = conversions(graph, options);
        refused.append(&mut prepared.refused);
        Ok(Self {
            graph,
            options: *options,
            dtype: options.dtype,
            chains: Chains::of(graph, options, &prepared, &conversions)?,
            prepared,
            conversions,
            program,
            tensor_of: HashMap::new(),
            meta_of: HashMap::new(),
            appending: HashMap::new(),
            scratch_of: HashMap::new(),
            origins: Vec::new(),
            refused,
        })
    }

    fn node(&mut self, id: NodeId) -> Result<(), LowerError> {
        let node = self.graph.node(id);
        let tensor = match &node.op {
            Op::Input(meta) => self.meta(*meta),
            Op::Weight(_) if !self.is_read(id) => return Ok(()),
            Op::Weight(expr) => {
                let place = Storage::Weight(expr.clone());
                self.tensor(&node.name, self.element(id), node.shape.clone(), place)
            }
            Op::Quantize(_) => {
                let weight = self.graph.operand(id, "weight");
                let Some(Op::Weight(expr)) = weight.map(|weight| self.graph.op(weight)) else {
                    let problem = "only weights are stored in another format".to_owned();
                    return Err(unsupported(self.graph, id, &node.op, problem));
                };
                let place = Storage::Weight(expr.clone());
                self.tensor(&node.name, self.element(id), node.shape.clone(), place)
            }
            _ if self.prepared.holds(id) => {
                self.prepared(id);
                return Ok(());
            }
            Op::Cache { .. } => self.cache(id)?,
            Op::CrossCache { name, .. } => self.remembered(id, name)?,
            // The launch is added with the node that converts the result.
            Op::Attention(_) if self.converts_itself(id) => return Ok(()),
            Op::ToE4m3 if self.conversions.contains_key(&id) => {
                let launch = self.conversions[&id].clone();
                self.converting_attention(id, launch)
            }
            _ if self.chains.holds(id) => {
                self.chained(id);
                return Ok(());
            }
            op => self.compute(id, op)?,
        };
        self.tensor_of.insert(id, tensor);
        Ok(())
    }

    /// Returns whether an attention converts its result to E4M3.
    fn converts_itself(&self, attention: NodeId) -> bool {
        let reader = self.graph.sole_consumer(attention);
        reader.is_some_and(|reader| self.conversions.contains_key(&reader))
    }

    /// Returns the type of the elements of a node's value.
    fn element(&self, id: NodeId) -> Element {
        let op = self.graph.op(id);
        if let Op::Quantize(format) = op {
            return (*format).into();
        }
        if *op == Op::ToE4m3 {
            return Element::E4m3;
        }
        // Log-probabilities and scales are in f32, because the storage type may be too imprecise.
        let is_single = matches!(
            op,
            Op::LogProbability
                | Op::Weight(
                    WeightExpr::ProductScales { .. }
                        | WeightExpr::Scale(_)
                        | WeightExpr::CacheScale { .. }
                )
        );
        if is_single { DType::F32 } else { self.dtype }.into()
    }

    /// Returns whether a weight must be loaded in its own format: it is an output, or an operator other than [`Op::Quantize`] reads it.
    fn is_read(&self, weight: NodeId) -> bool {
        let readers = self.graph.consumers(weight);
        let is_output = self.graph.outputs().iter().any(|&(_, id)| id == weight);
        let quantizes = |id| matches!(self.graph.op(id), Op::Quantize(_));
        is_output || readers.into_iter().any(|id| !quantizes(id))
    }

    fn compute(&mut self, id: NodeId, op: &Op) -> Result<TensorIndex, LowerError> {
        let node = self.graph.node(id);
        if matches!(op, Op::Attention(_)) {
            return self.attention(id, op);
        }
        if matches!(op, Op::Softmax { .. }) && self.options.attention != AttentionChoice::Auto {
            return Err(LowerError::AttentionInPieces {
                node: node.name.clone(),
                choice: self.options.attention,
            });
        }
        let dispatch = self
            .kernels(id, op)
            .map_err(|problem| unsupported(self.graph, id, op, problem))?;
        let mut operands = self.bind(&dispatch, |lowering, name| lowering.operand(id, name));
        if let Some(bounds) = self.pooled(id, op) {
            let all = self.meta_of.get(&BatchInput::CuLens).copied();
            let own = self.meta(bounds);
            for operand in operands.iter_mut().filter(|operand| Some(**operand) == all) {
                *operand = own;
            }
        }
        let out = self.tensor(&node.name, self.element(id), node.shape.clone(), UNPLACED);
        operands.push(out);
        self.step(id, dispatch, operands);
        Ok(out)
    }

    /// Returns the batch input that the node's kernel reads instead of `cu_lens`, if the node selects the rows after prompts
    /// ([`Op::AfterPrompt`]) or reads the selected rows. Returns `None` for all other nodes.
    fn pooled(&self, id: NodeId, op: &Op) -> Option<BatchInput> {
        let after = |id: NodeId| *self.graph.op(id) == Op::AfterPrompt;
        match op {
            Op::AfterPrompt => Some(BatchInput::PooledTokens),
            _ if self.graph.operands(id).into_iter().any(after) => Some(BatchInput::PooledCuLens),
            _ => None,
        }
    }

    /// Returns the tensors that the kernels of a dispatch read, in the order of their parameters. The kernel itself declares which of its
    /// parameters are batch inputs. For any other parameter, `named` returns the tensor, given the parameter's name.
    fn bind(
        &mut self,
        dispatch: &Dispatch<KernelSpec>,
        mut named: impl FnMut(&mut Self, &str) -> Option<TensorIndex>,
    ) -> Vec<TensorIndex> {
        // All kernels of a dispatch have equal parameters.
        let Some(kernel) = dispatch.choices().next().map(KernelSpec::as_kernel) else {
            return Vec::new();
        };
        let (params, tables) = (kernel.params(), kernel.tables());
        let reads = params.iter().filter_map(|param| match &param.role {
            Role::Read { fill, .. } => Some((param.name, fill)),
            Role::Write { .. } | Role::Count(_) => None,
        });
        let mut operands = Vec::new();
        for (at, (name, fill)) in reads.enumerate() {
            let ids = tables.iter().find(|(ids, _)| *ids == at);
            operands.push(match (fill, ids) {
                (Fill::BatchInput(meta), _) => self.meta(*meta),
                (_, Some((_, table))) => self.meta(table.ids),
                _ => named(self, name).unwrap_or_else(|| {
                    unreachable!(
                        "`{}` reads `{name}`, which no operand is called",
                        kernel.symbol()
                    )
                }),
            });
        }
        operands
    }

    /// Returns the tensor of the operand `name` of the node `id`. If `id` is the last node of a launch that prepares operands of attention,
    /// `name` refers to an operand of the launch instead.
    fn operand(&self, id: NodeId, name: &str) -> Option<TensorIndex> {
        let operand = match self.prepared.launch(id) {
            Some(launch) => launch.read(name),
            None => self.graph.operand(id, name),
        };
        operand.map(|operand| self.tensor_of[&operand])
    }

    /// Appends a launch that computes a node's value.
    fn step(&mut self, id: NodeId, dispatch: Dispatch<KernelSpec>, operands: Vec<TensorIndex>) {
        let node = self.graph.node(id);
        let dispatch = dispatch.map(|kernel| self.kernel(kernel));
        self.program.steps.push(Step {
            name: node.name.clone(),
            dispatch,
            max_longest: None,
            operands,
            rows: rows(&node.shape),
            by_token: node.op == Op::AfterPrompt,
            part: node.part,
        });
        self.origins.push((None, vec![id]));
    }

    /// Records which rule created the last step, and which nodes this step computes.
    fn fused(&mut self, rule: RuleName, nodes: &[NodeId]) {
        if let Some(origin) = self.origins.last_mut() {
            *origin = (Some(rule), nodes.to_vec());
        }
    }

    fn tensor(
        &mut self,
        name: &str,
        element: impl Into<Element>,
        shape: Shape,
        place: Storage,
    ) -> TensorIndex {
        self.program.tensors.push(Tensor {
            name: name.to_owned(),
            element: element.into(),
            shape,
            place,
        });
        self.program.tensors.len() - 1
    }

    /// Returns the tensor of a batch input, created at first use.
    fn meta(&mut self, meta: BatchInput) -> TensorIndex {
        if let Some(&tensor) = self.meta_of.get(&meta) {
            return tensor;
        }
        let (name, shape) = meta_layout(meta);
        let tensor = self.tensor(name, meta.element(), shape, Storage::Batch(meta));
        self.meta_of.insert(meta, tensor);
        tensor
    }

    fn kernel(&mut self, kernel: KernelSpec) -> usize {
        match self.program.kernels.iter().position(|k| *k == kernel) {
            Some(index) => index,
            None => {
                self.program.kernels.push(kernel);
                self.program.kernels.len() - 1
            }
        }
    }

    /// Sets the first and last step of every planned tensor. Outputs stay alive until the last step.
    fn lifetimes(&mut self) {
        let end = self.program.steps.len().saturating_sub(1) as u32;
        let mut spans: HashMap<TensorIndex, (u32, u32)> = HashMap::new();
        for (at, step) in self.program.steps.iter().enumerate() {
            for &operand in &step.operands {
                spans.entry(operand).or_insert((at as u32, at as u32)).1 = at as u32;
            }
        }
        for &(_, output) in &self.program.outputs {
            spans.entry(output).and_modify(|span| span.1 = end);
        }
        for (index, tensor) in self.program.tensors.iter_mut().enumerate() {
            if let (Storage::Planned { first, last }, Some(&span)) =
                (&mut tensor.place, spans.get(&index))
            {
                (*first, *last) = span;
            }
        }
    }
}

/// Creates a program without launches, with the graph's caches.
fn starting_program(graph: &Graph, options: &LowerOptions) -> Program {
    Program {
        dtype: options.dtype,
        invariant: options.invariant,
        kernels: Vec::new(),
        tensors: Vec::new(),
        steps: Vec::new(),
        outputs: Vec::new(),
        caches: caches(graph, options.dtype),
        parts: graph.parts().to_vec(),
    }
}

fn unsupported(graph: &Graph, id: NodeId, op: &Op, problem: String) -> LowerError {
    LowerError::Unsupported {
        node: graph.node(id).name.clone(),
        op: op.name(),
        problem,
    }
}

/// Placeholder for the storage of a planned tensor until its first and last steps are known.
const UNPLACED: Storage = Storage::Planned { first: 0, last: 0 };

/// Returns the number of rows of a launch that computes a tensor of this shape.
fn rows(shape: &Shape) -> Size {
    match shape.0.as_slice() {
        [_, rows] if rows.as_symbol().is_some() => rows.clone(),
        [_, rows, _] => rows.clone(),
        [rows, ..] => rows.clone(),
        [] => Size::constant(1),
    }
}

/// Returns the name and the shape of a batch input.
pub(super) fn meta_layout(meta: BatchInput) -> (&'static str, Shape) {
    let tokens = || Shape::new([Symbol::Tokens.into()]);
    let bounds = || Shape::new([&Size::from(Symbol::Batch) + &Size::constant(1)]);
    match meta {
        BatchInput::TokenIds => ("token_ids", tokens()),
        BatchInput::TypeIds => ("type_ids", tokens()),
        BatchInput::Positions => ("positions", tokens()),
        BatchInput::CuLens => ("cu_lens", bounds()),
        BatchInput::PairOffsets => ("pair_offsets", bounds()),
        BatchInput::ValidLens => ("valid_lens", Shape::new([Symbol::Batch.into()])),
        BatchInput::TokenSlots => ("token_slots", tokens()),
        BatchInput::Slots => ("slots", Shape::new([Symbol::Slots.into()])),
        BatchInput::SlotStarts => ("slot_starts", Shape::new([Symbol::Batch.into()])),
        BatchInput::KeyLens => ("key_lens", Shape::new([Symbol::Batch.into()])),
        BatchInput::SourceSlots => ("source_slots", Shape::new([Symbol::SourceSlots.into()])),
        BatchInput::SourceStarts => ("source_starts", Shape::new([Symbol::Batch.into()])),
        BatchInput::SourceLens => ("source_lens", Shape::new([Symbol::Batch.into()])),
        BatchInput::Seeds => (
            "seeds",
            Shape::new([&Size::from(Symbol::Batch) * &Size::constant(2)]),
        ),
        BatchInput::PreviousIds { .. } => ("previous_ids", tokens()),
        BatchInput::PooledTokens => (
            "pooled_tokens",
            Shape::new([&Size::from(Symbol::Tokens) + &Size::constant(1)]),
        ),
        BatchInput::PooledCuLens => ("pooled_cu_lens", bounds()),
        BatchInput::Mask => (
            "mask",
            Shape::new([Symbol::Batch.into(), Symbol::Longest.into()]),
        ),
    }
}

fn width(shape: &Shape) -> Result<u32, String> {
    shape.0.last().map_or_else(
        || Err("expected at least one dimension".to_owned()),
        constant,
    )
}

fn constant(size: &Size) -> Result<u32, String> {
    size.as_constant()
        .and_then(|v| u32::try_from(v).ok())
        .ok_or_else(|| format!("expected a constant below 2³², found {size}"))
}

#[cfg(test)]
mod tests;
