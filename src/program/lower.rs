//! From the fused graph to launches: one kernel for every operator that computes.

mod attention;
mod by_moments;
mod choices;
mod error;
mod joined;
mod memo;
mod on_load;
mod rare;

use std::{cell::Cell, collections::HashMap};

use by_moments::Triple;
pub use error::LowerError;
use joined::Pair;
use memo::Memo;
use on_load::{OnLoad, left, reached};

use super::{
    AttentionChoice, BatchRange, Limit, Padding, Place, Program, Step, Tensor, TensorIndex,
    Variant, padding::check_kept,
};
use crate::{
    graph::{Graph, NodeId, Op},
    kernels::{
        Instructions, KernelSpec, Meta, attention::*, elementwise::*, embedding::*, pooling::*,
    },
    tensor::{DType, Shape, Size, Symbol},
    tune::{Picks, Problem, Range},
};

/// What a graph is lowered for.
#[derive(Clone, Copy, Debug)]
pub struct LowerOptions<'a> {
    /// Storage type of reals.
    pub dtype: DType,
    pub padding: Padding,
    /// What the kernels may use: those of the card that the program is for.
    pub instructions: Instructions,
    /// Where several kernels serve an operator, which to launch; what they do not say is the cost
    /// model's first guess.
    pub picks: Option<&'a Picks>,
    /// Which kernels compute fused attention; unless that is [`AttentionChoice::Auto`], picks have
    /// no say in it.
    pub attention: AttentionChoice,
    /// One kernel for each operator, whatever the batch ([`Program::invariant`]).
    pub invariant: bool,
    /// Linear layers and the LayerNorms behind them in launches of their own, whatever is faster.
    pub norms_apart: bool,
}

/// Lowers a verified graph to a program. With padding kept, softmax masks keys that are padding;
/// what has no such mask is an error.
pub fn lower(graph: &Graph, options: &LowerOptions) -> Result<Program, LowerError> {
    if !options.dtype.is_real() {
        return Err(LowerError::DType(options.dtype));
    }
    if options.padding == Padding::Kept {
        check_kept(graph)?;
    }
    let mut lowering = Lowering::new(graph, options);
    for id in graph.topological() {
        lowering.node(id)?;
    }
    for (name, id) in graph.outputs() {
        let tensor = lowering.tensor_of[id];
        lowering.program.outputs.push((name.clone(), tensor));
    }
    lowering.share_rare_kernels();
    lowering.lifetimes();
    Ok(lowering.program)
}

/// What of a graph has several kernels to choose from, each once, in the order of its first launch.
pub fn problems(graph: &Graph, options: &LowerOptions) -> Result<Vec<Problem>, LowerError> {
    let lowering = Lowering::new(graph, options);
    let mut problems: Vec<Problem> = Vec::new();
    for id in graph.topological() {
        let op = graph.op(id);
        if matches!(op, Op::Attention { .. }) && options.attention != AttentionChoice::Auto {
            continue;
        }
        let problem = lowering
            .problem(id, op)
            .map_err(|problem| unsupported(graph, id, op, problem))?;
        problems.extend(problem.filter(|p| !problems.contains(p)));
        let pair = match op {
            Op::BiasResidualLayerNorm { .. } => lowering.pair_problem(id),
            _ => Ok(None),
        };
        let pair = pair.map_err(|problem| unsupported(graph, id, op, problem))?;
        problems.extend(pair.map(|(_, _, p)| p).filter(|p| !problems.contains(p)));
    }
    Ok(problems)
}

/// The problems of operators over tokens, those together that one choice is made of: a linear layer and the LayerNorm
/// behind it in one launch or two, and the linear layer's kernel if they are two. Each group once, in the order of its
/// first launch, with the number of times that a run has it.
pub fn groups(
    graph: &Graph,
    options: &LowerOptions,
) -> Result<Vec<(Vec<Problem>, usize)>, LowerError> {
    let lowering = Lowering::new(graph, options);
    let mut groups: Vec<(Vec<Problem>, usize)> = Vec::new();
    for id in graph.topological() {
        let op = graph.op(id);
        let is_chosen = match op {
            Op::Attention { .. } => options.attention == AttentionChoice::Auto,
            Op::Linear { .. } => rows(graph.shape(id)).as_symbol() == Some(Symbol::Tokens),
            _ => false,
        };
        if !is_chosen {
            continue;
        }
        let failed = |problem| unsupported(graph, id, op, problem);
        let own = lowering.problem(id, op).map_err(failed)?;
        let pair = lowering.pair_problem(id).map_err(failed)?;
        let group: Vec<Problem> = pair
            .map(|(_, _, pair)| pair)
            .into_iter()
            .chain(own)
            .collect();
        match groups.iter_mut().find(|(known, _)| *known == group) {
            Some((_, n)) => *n += 1,
            None => groups.push((group, 1)),
        }
    }
    Ok(groups)
}

struct Lowering<'a> {
    graph: &'a Graph,
    dtype: DType,
    padding: Padding,
    instructions: Instructions,
    picks: Option<&'a Picks>,
    attention: AttentionChoice,
    norms_apart: bool,
    /// Layers ask for the same things, and a guess takes longer than all else in lowering.
    ranges_of: Memo<(Problem, Vec<BatchRange>), Vec<Range>>,
    /// Whether a range came from picks.
    has_picked: Cell<bool>,
    on_load_of: Memo<on_load::Asked, on_load::Found>,
    by_moments_of: Memo<by_moments::Asked, by_moments::Found>,
    program: Program,
    tensor_of: HashMap<NodeId, TensorIndex>,
    /// Where each node comes in the order of the launches.
    order_of: HashMap<NodeId, usize>,
    meta_of: HashMap<Meta, TensorIndex>,
    /// Rows before a LayerNorm, scaled, and their moments.
    left_of: HashMap<NodeId, [TensorIndex; 2]>,
}

impl<'a> Lowering<'a> {
    fn new(graph: &'a Graph, options: &LowerOptions<'a>) -> Self {
        let dtype = options.dtype;
        Self {
            graph,
            dtype,
            padding: options.padding,
            instructions: options.instructions,
            picks: options.picks,
            attention: options.attention,
            norms_apart: options.norms_apart,
            ranges_of: Memo::default(),
            has_picked: Cell::new(false),
            on_load_of: Memo::default(),
            by_moments_of: Memo::default(),
            program: Program {
                dtype,
                invariant: options.invariant,
                kernels: Vec::new(),
                tensors: Vec::new(),
                steps: Vec::new(),
                outputs: Vec::new(),
            },
            tensor_of: HashMap::new(),
            order_of: graph.topological().into_iter().zip(0..).collect(),
            meta_of: HashMap::new(),
            left_of: HashMap::new(),
        }
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
            op => self.compute(id, op)?,
        };
        self.tensor_of.insert(id, tensor);
        Ok(())
    }

    fn compute(&mut self, id: NodeId, op: &Op) -> Result<TensorIndex, LowerError> {
        let node = self.graph.node(id);
        if matches!(op, Op::Attention { .. }) {
            return self.attention(id, op);
        }
        if matches!(op, Op::Softmax { .. }) && self.attention != AttentionChoice::Auto {
            return Err(LowerError::AttentionInPieces {
                node: node.name.clone(),
                choice: self.attention,
            });
        }
        let graph = self.graph;
        let failed = |problem| unsupported(graph, id, op, problem);
        let pair = self.pair(id).map_err(failed)?;
        let on_load = self.on_load(id).map_err(failed)?;
        let triples = self.triples(id).map_err(failed)?;
        let joined: Vec<BatchRange> = pair.iter().flat_map(Pair::ranges).collect();
        let variants = self.kernels(id, op, &joined).map_err(failed)?;
        let few = on_load.iter().map(OnLoad::range);
        let few = few.chain(triples.iter().map(Triple::range));
        let taken: Vec<BatchRange> = joined.into_iter().chain(few).collect();
        let mut operands: Vec<TensorIndex> = self
            .graph
            .operands(id)
            .iter()
            .map(|o| self.tensor_of[o])
            .collect();
        for &meta in metas(op, self.padding) {
            operands.push(self.meta(meta));
        }
        let out = self.tensor(&node.name, self.dtype, node.shape.clone(), UNPLACED);
        operands.push(out);
        let variants = self.variants(reached(variants, &taken));
        for when in left(taken) {
            self.program.steps.push(Step {
                name: node.name.clone(),
                when,
                variants: variants.clone(),
                operands: operands.clone(),
                rows: rows(&node.shape),
            });
        }
        if let (Some(pair), Op::BiasResidualLayerNorm { .. }) = (pair, op) {
            self.join(pair, out);
        }
        if let (Some(pair), Op::Linear { .. }) = (on_load, op) {
            self.load(&pair, out);
        }
        for triple in &triples {
            self.launch_of(triple, id, out);
        }
        Ok(out)
    }

    fn variants(&mut self, kernels: Vec<(Option<Limit>, KernelSpec)>) -> Vec<Variant> {
        kernels
            .into_iter()
            .map(|(limit, kernel)| Variant {
                kernel: self.kernel(kernel),
                limit,
            })
            .collect()
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

    /// First and last step of every planned tensor; what is an output lives to the end.
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

    /// The kernels for an operator, with the batches that each is for, where launches of several operators take some.
    fn kernels(
        &mut self,
        id: NodeId,
        op: &Op,
        taken: &[BatchRange],
    ) -> Result<Vec<(Option<Limit>, KernelSpec)>, String> {
        if let Some(problem) = self.problem(id, op)? {
            return self.chosen(&problem, taken);
        }
        let dtype = self.dtype;
        let operands = self.graph.operands(id);
        let operand_width = |slot: usize| width(self.graph.shape(operands[slot]));
        let one = |kernel: KernelSpec| Ok(vec![(None, kernel)]);
        match op {
            Op::Input(_) | Op::Weight(_) => Err("names data and computes nothing".to_owned()),
            Op::Linear { .. }
            | Op::Attention { .. }
            | Op::LayerNorm { .. }
            | Op::BiasResidualLayerNorm { .. }
            | Op::Softmax { .. } => {
                unreachable!("`problem` has these operators, so they were lowered above")
            }
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
            Op::Add => one(KernelSpec::Add(Add {
                width: self.row_width(id)?,
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
            Op::Scores { heads, head, q, k } => one(KernelSpec::AttentionScores(AttentionScores {
                heads: *heads,
                head: *head,
                scale: 1.0,
                q: *q,
                k: *k,
                dtype,
            })),
            Op::Context {
                heads,
                head,
                v,
                out,
            } => one(KernelSpec::AttentionContext(AttentionContext {
                heads: *heads,
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

    /// Elements of one row, as [`rows`] counts rows.
    fn row_width(&self, id: NodeId) -> Result<u32, String> {
        let shape = self.graph.shape(id);
        match shape.0.as_slice() {
            [width, pairs] if pairs.as_symbol() == Some(Symbol::Pairs) => constant(width),
            [heads, _, head] => constant(&(heads * head)),
            _ => width(shape),
        }
    }
}

fn unsupported(graph: &Graph, id: NodeId, op: &Op, problem: String) -> LowerError {
    LowerError::Unsupported {
        node: graph.node(id).name.clone(),
        op: op.name(),
        problem,
    }
}

/// Until the steps are known.
const UNPLACED: Place = Place::Planned { first: 0, last: 0 };

/// Rows of a launch that computes a tensor of this shape.
fn rows(shape: &Shape) -> Size {
    match shape.0.as_slice() {
        [_, rows] if rows.as_symbol().is_some() => rows.clone(),
        [_, rows, _] => rows.clone(),
        [rows, ..] => rows.clone(),
        [] => Size::constant(1),
    }
}

/// What of the batch an operator reads besides its operands, in the order of the signature.
fn metas(op: &Op, padding: Padding) -> &'static [Meta] {
    match op {
        Op::Softmax { .. } if padding == Padding::Kept => {
            &[Meta::CuLens, Meta::PairOffsets, Meta::ValidLens]
        }
        Op::Scores { .. } | Op::Softmax { .. } | Op::Context { .. } => {
            &[Meta::CuLens, Meta::PairOffsets]
        }
        Op::FirstToken
        | Op::LastToken
        | Op::MeanPool
        | Op::MaxPool
        | Op::MeanPoolNormalize { .. } => &[Meta::CuLens],
        _ => &[],
    }
}

/// Name and shape of batch data.
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
