//! Lowering of the fused graph to launches, with the kernels that `select` chooses.

mod attention;
mod chains;
mod error;
mod prepared;

use std::collections::HashMap;

use attention::Appending;
use chains::Chains;
pub use chains::alternatives;
pub use error::LowerError;
use prepared::Prepared;

use super::{
    AttentionChoice, Cache, Padding, Place, Program, Step, Tensor, TensorIndex, padding::check_kept,
};
use crate::{
    graph::{Graph, NodeId, Op},
    kernels::{
        KernelSpec, Meta, attention::*, cache::AppendCache, draw::Draw, elementwise::*,
        embedding::*, log_probability::LogProbability, pooling::*, rms_norm::RmsNorm,
        rotary::Rotary,
    },
    machine::Machine,
    select::{Dispatch, Timings},
    tensor::{DType, Shape, Size, Symbol},
};

/// Options of the lowering.
#[derive(Clone, Copy, Debug)]
pub struct LowerOptions<'a> {
    /// Storage type of reals.
    pub dtype: DType,
    pub padding: Padding,
    /// The card that the program is for.
    pub machine: &'a Machine,
    /// Timings on such a card that correct the cost model.
    pub timings: Option<&'a Timings>,
    /// Which kernels compute fused attention.
    pub attention: AttentionChoice,
    /// One kernel for each operator, whatever the batch ([`Program::invariant`]).
    pub invariant: bool,
    /// Whether every operator has launches of its own, also where a fused one is faster.
    pub no_joint_launches: bool,
}

/// Lowers a verified graph to a program. With padding kept, softmax masks keys that are padding;
/// an operator that would read padding is an error.
pub fn lower(graph: &Graph, options: &LowerOptions) -> Result<Program, LowerError> {
    if !options.dtype.is_real() {
        return Err(LowerError::DType(options.dtype));
    }
    if options.padding == Padding::Kept {
        check_kept(graph)?;
    }
    let mut lowering = Lowering::new(graph, options)?;
    for id in graph.topological() {
        lowering.node(id)?;
    }
    for (name, id) in graph.outputs() {
        let tensor = lowering.tensor_of[id];
        lowering.program.outputs.push((name.clone(), tensor));
    }
    lowering.lifetimes();
    Ok(lowering.program)
}

struct Lowering<'a> {
    graph: &'a Graph,
    options: LowerOptions<'a>,
    dtype: DType,
    /// The nodes whose kernels are chosen by rows, and their launches.
    chains: Chains,
    /// The launches that compute several nodes before an attention.
    prepared: Prepared,
    program: Program,
    tensor_of: HashMap<NodeId, TensorIndex>,
    meta_of: HashMap<Meta, TensorIndex>,
    /// The attentions whose steps of one token add to the cache themselves.
    appending: HashMap<NodeId, Appending>,
    /// Scratch tensors of implementations, by the node that they are named after.
    scratch_of: HashMap<(NodeId, &'static str), TensorIndex>,
}

impl<'a> Lowering<'a> {
    fn new(graph: &'a Graph, options: &LowerOptions<'a>) -> Result<Self, LowerError> {
        let program = starting_program(graph, options);
        let prepared = Prepared::of(graph, &program, options);
        Ok(Self {
            graph,
            options: *options,
            dtype: options.dtype,
            chains: Chains::of(graph, options, &prepared)?,
            prepared,
            program,
            tensor_of: HashMap::new(),
            meta_of: HashMap::new(),
            appending: HashMap::new(),
            scratch_of: HashMap::new(),
        })
    }

    fn node(&mut self, id: NodeId) -> Result<(), LowerError> {
        let node = self.graph.node(id);
        let tensor = match &node.op {
            Op::Input(meta) => self.meta(*meta),
            Op::Weight(expr) => self.tensor(
                &node.name,
                self.dtype,
                node.shape.clone(),
                Place::Weight(expr.clone()),
            ),
            _ if self.prepared.holds(id) => {
                self.prepared(id);
                return Ok(());
            }
            Op::Cache { .. } => self.cache(id)?,
            Op::Remembered { name, .. } => self.remembered(id, name)?,
            _ if self.chains.holds(id) => {
                self.chained(id);
                return Ok(());
            }
            op => self.compute(id, op)?,
        };
        self.tensor_of.insert(id, tensor);
        Ok(())
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
        let mut operands: Vec<TensorIndex> = self
            .graph
            .operands(id)
            .iter()
            .map(|o| self.tensor_of[o])
            .collect();
        for &meta in metas(op, self.options.padding) {
            operands.push(self.meta(meta));
        }
        let dtype = match op {
            // Sums of logarithms need more digits than a storage type may have.
            Op::LogProbability => DType::F32,
            _ => self.dtype,
        };
        let out = self.tensor(&node.name, dtype, node.shape.clone(), UNPLACED);
        operands.push(out);
        self.step(id, dispatch, operands);
        Ok(out)
    }

    /// Adds rows to a cache, which attention then reads in their place.
    fn cache(&mut self, id: NodeId) -> Result<TensorIndex, LowerError> {
        let node = self.graph.node(id);
        let &Op::Cache {
            from, heads, head, ..
        } = &node.op
        else {
            return Err(unsupported(
                self.graph,
                id,
                &node.op,
                "is no cache".to_owned(),
            ));
        };
        self.only_attended(id)?;
        let part = node.part;
        let is_other =
            |c: &Cache| c.part == part && c.one_position != is_one_position(self.graph, id);
        if let Some(other) = self.program.caches.iter().find(|c| is_other(c)) {
            let problem = format!(
                "a part keeps a row for each token or one for each sequence, and `{}` of this part is otherwise",
                other.name
            );
            return Err(unsupported(self.graph, id, &node.op, problem));
        }
        let wrong = |problem: String| unsupported(self.graph, id, &node.op, problem);
        if self.graph.is_output(id) {
            return Err(wrong(
                "it is an output; ask for what it is given".to_owned(),
            ));
        }
        let x = self.graph.operands(id)[0];
        let stride = width(self.graph.shape(x)).map_err(wrong)?;
        let elements = self.program.block_elements();
        let kernel = AppendCache {
            heads,
            head,
            x: HeadView::TokenMajor {
                offset: from,
                stride,
            },
            of_sequence: is_one_position(self.graph, id),
            stride: elements,
            dtype: self.dtype,
        };
        let cache = self.cache_tensor(id);
        let mut operands = vec![self.tensor_of[&x]];
        match kernel.of_sequence {
            true => operands.extend([Meta::Slots, Meta::SlotStarts].map(|meta| self.meta(meta))),
            false => operands.push(self.meta(Meta::TokenSlots)),
        }
        operands.push(cache);
        let dispatch = Dispatch::always(KernelSpec::from(kernel));
        self.step(id, dispatch, operands);
        Ok(cache)
    }

    /// The tensor of a cache.
    fn cache_tensor(&mut self, id: NodeId) -> TensorIndex {
        let node = self.graph.node(id);
        let is_own = |c: &Cache| matches!(&node.op, Op::Cache { name, .. } if *name == c.name);
        let index = self.program.caches.iter().position(is_own);
        let index = index.expect("all caches of the graph were listed") as u32;
        let elements = self.program.block_elements();
        let shape = Shape::new([Symbol::Blocks.into(), elements.into()]);
        self.tensor(&node.name, self.dtype, shape, Place::Cached(index))
    }

    /// Refuses a cache that something else than attention reads.
    fn only_attended(&self, id: NodeId) -> Result<(), LowerError> {
        let mut consumers = self.graph.consumers(id).into_iter();
        let other = consumers.find(|&c| !matches!(self.graph.op(c), Op::Attention(_)));
        let Some(other) = other.map(|other| self.graph.node(other)) else {
            return Ok(());
        };
        let problem = format!(
            "it is read by `{}` ({}), and only fused attention reads a cache; `gemmule explain` says why this was not fused",
            other.name, other.op
        );
        Err(unsupported(self.graph, id, self.graph.op(id), problem))
    }

    /// The cache that another part added to.
    fn remembered(&self, id: NodeId, name: &str) -> Result<TensorIndex, LowerError> {
        self.only_attended(id)?;
        let mut added = self.tensor_of.iter();
        let found = added.find(|&(&node, _)| match self.graph.op(node) {
            Op::Cache { name: of, .. } => of == name,
            _ => false,
        });
        found.map(|(_, &tensor)| tensor).ok_or_else(|| {
            let problem = format!("no part before this one adds to the cache `{name}`");
            unsupported(self.graph, id, self.graph.op(id), problem)
        })
    }

    /// Appends a launch that computes a node's value.
    fn step(&mut self, id: NodeId, dispatch: Dispatch<KernelSpec>, operands: Vec<TensorIndex>) {
        let node = self.graph.node(id);
        let dispatch = dispatch.map(|kernel| self.kernel(kernel));
        self.program.steps.push(Step {
            name: node.name.clone(),
            dispatch,
            most_longest: None,
            operands,
            rows: rows(&node.shape),
            part: node.part,
        });
    }

    fn tensor(&mut self, name: &str, dtype: DType, shape: Shape, place: Place) -> TensorIndex {
        self.program.tensors.push(Tensor {
            name: name.to_owned(),
            dtype,
            shape,
            place,
        });
        self.program.tensors.len() - 1
    }

    /// The tensor of batch data, made on first use.
    fn meta(&mut self, meta: Meta) -> TensorIndex {
        if let Some(&tensor) = self.meta_of.get(&meta) {
            return tensor;
        }
        let (name, shape) = meta_layout(meta);
        let tensor = self.tensor(name, meta.dtype(), shape, Place::Batch(meta));
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

    /// Sets the first and last step of every planned tensor; outputs live to the last step.
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
            if let (Place::Planned { first, last }, Some(&span)) =
                (&mut tensor.place, spans.get(&index))
            {
                (*first, *last) = span;
            }
        }
    }

    /// The kernels for an operator that is no site of a chain.
    fn kernels(&self, id: NodeId, op: &Op) -> Result<Dispatch<KernelSpec>, String> {
        let dtype = self.dtype;
        let operands = self.graph.operands(id);
        let operand_width = |slot: usize| width(self.graph.shape(operands[slot]));
        let one = |kernel: KernelSpec| Ok(Dispatch::always(kernel));
        match op {
            Op::Input(_) | Op::Weight(_) | Op::Cache { .. } | Op::Remembered { .. } => {
                Err("names data and computes nothing".to_owned())
            }
            Op::Linear { .. }
            | Op::Gate(_)
            | Op::Attention(_)
            | Op::LayerNorm { .. }
            | Op::BiasResidualLayerNorm { .. } => {
                unreachable!("these are lowered as sites of chains and as attention")
            }
            Op::Softmax { scale, causal, by } => self.softmax(id, *scale, *causal, *by),
            Op::Embedding { offset } => one(KernelSpec::Embedding(Embedding {
                table: self.table(operands[0], operands[1], *offset)?,
                width: operand_width(1)?,
                dtype,
            })),
            Op::EmbeddingLayerNorm { eps, offsets } => {
                let n = offsets.len();
                let tables = (0..n)
                    .map(|i| self.table(operands[i], operands[n + i], offsets[i]))
                    .collect::<Result<_, _>>()?;
                let width = operand_width(n)?;
                one(KernelSpec::EmbeddingLayerNorm(EmbeddingLayerNorm {
                    tables,
                    width,
                    eps: *eps,
                    dtype,
                }))
            }
            Op::AddBias => one(KernelSpec::AddBias(AddBias {
                width: operand_width(0)?,
                dtype,
            })),
            Op::Add | Op::Multiply => one(KernelSpec::Combine(Combine {
                how: match op {
                    Op::Multiply => How::Product,
                    _ => How::Sum,
                },
                width: self.row_width(id)?,
                dtype,
            })),
            Op::RmsNorm { eps, heads, from } => one(KernelSpec::RmsNorm(RmsNorm {
                width: operand_width(1)?,
                heads: *heads,
                from: *from,
                stride: operand_width(0)?,
                eps: *eps,
                dtype,
            })),
            Op::Rotary {
                rotation,
                from,
                head,
            } => one(KernelSpec::Rotary(Rotary {
                rotation: rotation.clone(),
                head: *head,
                from: *from,
                stride: operand_width(0)?,
                dtype,
            })),
            Op::Activate(activation) => one(KernelSpec::Activate(Activate {
                activation: *activation,
                width: self.row_width(id)?,
                dtype,
            })),
            Op::Scale { by } => one(KernelSpec::Scale(Scale {
                by: *by,
                width: self.row_width(id)?,
                dtype,
            })),
            Op::SplitHeads { heads } => {
                let head = width(self.graph.shape(id))?;
                one(KernelSpec::SplitHeads(SplitHeads {
                    heads: *heads,
                    head,
                    dtype,
                }))
            }
            Op::MergeHeads => {
                let head = operand_width(0)?;
                let heads = width(self.graph.shape(id))? / head.max(1);
                one(KernelSpec::MergeHeads(MergeHeads { heads, head, dtype }))
            }
            Op::SliceColumns { start, width } => one(KernelSpec::SliceColumns(SliceColumns {
                from_width: operand_width(0)?,
                start: *start,
                width: *width,
                dtype,
            })),
            Op::Scores {
                heads,
                kv_heads,
                head,
                q,
                k,
            } => one(KernelSpec::AttentionScores(AttentionScores {
                heads: *heads,
                kv_heads: *kv_heads,
                head: *head,
                scale: 1.0,
                q: *q,
                k: *k,
                dtype,
            })),
            Op::RelativeScores { heads, head, of } => {
                let rows = constant(&self.graph.shape(operands[1]).0[0])?;
                one(KernelSpec::RelativeScores(RelativeScores {
                    heads: *heads,
                    head: *head,
                    reach: rows / 2,
                    of: *of,
                    dtype,
                }))
            }
            Op::Context {
                heads,
                kv_heads,
                head,
                v,
                out,
            } => one(KernelSpec::AttentionContext(AttentionContext {
                heads: *heads,
                kv_heads: *kv_heads,
                head: *head,
                v: *v,
                out: *out,
                dtype,
            })),
            Op::FirstToken | Op::LastToken => one(KernelSpec::TokenOfSequence(TokenOfSequence {
                which: match op {
                    Op::LastToken => Which::Last,
                    _ => Which::First,
                },
                width: operand_width(0)?,
                dtype,
            })),
            Op::MaxPool => one(KernelSpec::MaxPool(MaxPool {
                width: operand_width(0)?,
                dtype,
            })),
            Op::Concat { .. } => one(KernelSpec::Concat(Concat {
                widths: (0..operands.len())
                    .map(operand_width)
                    .collect::<Result<_, _>>()?,
                dtype,
            })),
            Op::MeanPool => one(KernelSpec::MeanPool(MeanPool {
                width: operand_width(0)?,
                dtype,
            })),
            Op::Draw => one(KernelSpec::Draw(Draw {
                width: operand_width(0)?,
                dtype,
            })),
            Op::LogProbability => one(KernelSpec::LogProbability(LogProbability {
                width: operand_width(0)?,
                dtype,
            })),
            Op::L2Normalize { eps } => one(KernelSpec::L2Normalize(L2Normalize {
                width: operand_width(0)?,
                eps: *eps,
                dtype,
            })),
            Op::MeanPoolNormalize { eps } => {
                one(KernelSpec::MeanPoolNormalize(MeanPoolNormalize {
                    width: operand_width(0)?,
                    eps: *eps,
                    dtype,
                }))
            }
        }
    }

    /// Softmax of stored scores, by the longest sequence.
    fn softmax(
        &self,
        id: NodeId,
        scale: f32,
        causal: bool,
        by: ByDistance,
    ) -> Result<Dispatch<KernelSpec>, String> {
        if self.options.invariant && by.is_none() {
            return Err("sums rows in an order that depends on where they begin in memory, and so on the sequences before; leave the pass `fuse_attention` on (`gemmule explain` says why it refuses), or leave --invariant out".to_owned());
        }
        let heads = constant(&self.graph.shape(id).0[0])?;
        let mask = match self.options.padding {
            // A causal query sees no padding, which is at the end of its sequence.
            _ if causal => SoftmaxMask::Causal,
            Padding::Kept => SoftmaxMask::Padding,
            Padding::Removed => SoftmaxMask::None,
        };
        if !by.is_none() {
            return Ok(Dispatch::always(KernelSpec::from(SoftmaxByDistance {
                heads,
                scale,
                mask,
                by,
                dtype: self.dtype,
            })));
        }
        let softmax = AttentionSoftmax {
            mask,
            ..AttentionSoftmax::new(heads, scale, self.dtype)
        };
        let kernels = softmax.by_length().into_iter();
        Ok(Dispatch::by_longest(
            kernels.map(|(up_to, kernel)| (up_to, Some(kernel.into()))),
        ))
    }

    fn table(&self, ids: NodeId, table: NodeId, offset: u32) -> Result<Table, String> {
        let Op::Input(ids) = self.graph.op(ids) else {
            return Err("the ids of an embedding must be an input of the model".to_owned());
        };
        Ok(Table {
            ids: *ids,
            offset,
            rows: constant(&self.graph.shape(table).0[0])?,
        })
    }

    /// The elements of a row, as [`rows`] counts rows.
    fn row_width(&self, id: NodeId) -> Result<u32, String> {
        let shape = self.graph.shape(id);
        match shape.0.as_slice() {
            [width, pairs] if pairs.as_symbol() == Some(Symbol::Pairs) => constant(width),
            [heads, _, head] => constant(&(heads * head)),
            _ => width(shape),
        }
    }
}

/// A program without launches, with the graph's caches.
fn starting_program(graph: &Graph, options: &LowerOptions) -> Program {
    Program {
        dtype: options.dtype,
        invariant: options.invariant,
        kernels: Vec::new(),
        tensors: Vec::new(),
        steps: Vec::new(),
        outputs: Vec::new(),
        caches: caches(graph),
        parts: graph.parts().to_vec(),
    }
}

/// The caches that a graph's nodes add to, in their order.
fn caches(graph: &Graph) -> Vec<Cache> {
    let nodes = graph.topological().into_iter();
    let of = |id| match graph.op(id) {
        Op::Cache {
            name, heads, head, ..
        } => Some(Cache {
            name: name.clone(),
            heads: *heads,
            head: *head,
            part: graph.node(id).part,
            one_position: is_one_position(graph, id),
        }),
        _ => None,
    };
    nodes.filter_map(of).collect()
}

/// Whether a cache keeps one row for each sequence.
fn is_one_position(graph: &Graph, id: NodeId) -> bool {
    graph.shape(id).0.first() == Some(&Symbol::Batch.into())
}

fn unsupported(graph: &Graph, id: NodeId, op: &Op, problem: String) -> LowerError {
    LowerError::Unsupported {
        node: graph.node(id).name.clone(),
        op: op.name(),
        problem,
    }
}

/// The place of a planned tensor until the steps are known.
const UNPLACED: Place = Place::Planned { first: 0, last: 0 };

/// The rows of a launch that computes a tensor of this shape.
fn rows(shape: &Shape) -> Size {
    match shape.0.as_slice() {
        [_, rows] if rows.as_symbol().is_some() => rows.clone(),
        [_, rows, _] => rows.clone(),
        [rows, ..] => rows.clone(),
        [] => Size::constant(1),
    }
}

/// The batch data that an operator reads besides its operands, in the order of the signature.
fn metas(op: &Op, padding: Padding) -> &'static [Meta] {
    match op {
        Op::Softmax { causal: false, .. } if padding == Padding::Kept => {
            &[Meta::CuLens, Meta::PairOffsets, Meta::ValidLens]
        }
        Op::Scores { .. } | Op::RelativeScores { .. } | Op::Softmax { .. } | Op::Context { .. } => {
            &[Meta::CuLens, Meta::PairOffsets]
        }
        Op::FirstToken
        | Op::LastToken
        | Op::MeanPool
        | Op::MaxPool
        | Op::MeanPoolNormalize { .. } => &[Meta::CuLens],
        Op::LogProbability => &[Meta::TokenIds, Meta::Positions],
        Op::Draw => &[Meta::Seeds],
        Op::Rotary { .. } => &[Meta::Positions],
        _ => &[],
    }
}

/// The name and shape of batch data.
pub(super) fn meta_layout(meta: Meta) -> (&'static str, Shape) {
    let tokens = || Shape::new([Symbol::Tokens.into()]);
    let bounds = || Shape::new([&Size::from(Symbol::Batch) + &Size::constant(1)]);
    match meta {
        Meta::TokenIds => ("token_ids", tokens()),
        Meta::TypeIds => ("type_ids", tokens()),
        Meta::Positions => ("positions", tokens()),
        Meta::CuLens => ("cu_lens", bounds()),
        Meta::PairOffsets => ("pair_offsets", bounds()),
        Meta::ValidLens => ("valid_lens", Shape::new([Symbol::Batch.into()])),
        Meta::TokenSlots => ("token_slots", tokens()),
        Meta::Slots => ("slots", Shape::new([Symbol::Slots.into()])),
        Meta::SlotStarts => ("slot_starts", Shape::new([Symbol::Batch.into()])),
        Meta::KeyLens => ("key_lens", Shape::new([Symbol::Batch.into()])),
        Meta::SourceSlots => ("source_slots", Shape::new([Symbol::SourceSlots.into()])),
        Meta::SourceStarts => ("source_starts", Shape::new([Symbol::Batch.into()])),
        Meta::SourceLens => ("source_lens", Shape::new([Symbol::Batch.into()])),
        Meta::Seeds => (
            "seeds",
            Shape::new([&Size::from(Symbol::Batch) * &Size::constant(2)]),
        ),
        Meta::Mask => (
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
