//! A linear layer, the LayerNorm behind it and the linear layer that reads it first: two launches for few
//! tokens. The first leaves the moments of its rows beside them, by which the second normalises.

use super::{Lowering, UNPLACED, constant, rows, width};
use crate::{
    graph::{NodeId, Op},
    kernels::{
        Instructions, KernelSpec,
        gemm::{ByMoments, Epilogue},
    },
    program::{BatchRange, Limit, Measure, Step, TensorIndex},
    tensor::{DType, Shape, Symbol},
};

/// What [`ByMoments::find`] is asked.
pub(super) type Asked = (u64, (u32, u32, bool), (u32, Epilogue), f32);
pub(super) type Found = Option<ByMoments>;

/// Three nodes for which there are kernels, and these.
pub(super) struct Triple {
    before: NodeId,
    norm: NodeId,
    behind: NodeId,
    kernels: ByMoments,
}

impl Triple {
    /// The most tokens of these batches.
    pub(super) fn most(&self) -> u64 {
        self.kernels.most()
    }

    /// The batches for which two launches compute all.
    pub(super) fn range(&self) -> BatchRange {
        BatchRange {
            by: Measure::Tokens,
            above: self.kernels.above,
            up_to: Some(self.kernels.most()),
        }
    }
}

impl Lowering<'_> {
    /// The triples that a node is one of: a linear layer between two LayerNorms is the last of one and the
    /// first of another.
    pub(super) fn triples(&self, id: NodeId) -> Result<Vec<Triple>, String> {
        let graph = self.graph;
        let norms = match graph.op(id) {
            Op::BiasResidualLayerNorm { .. } => vec![id],
            Op::Linear { .. } => {
                let reader = graph.sole_consumer(id);
                let norms = [Some(graph.operands(id)[0]), reader];
                norms.into_iter().flatten().collect()
            }
            _ => Vec::new(),
        };
        let mut triples = Vec::new();
        for norm in norms {
            let triple = self.triple(norm)?;
            let is_one = |t: &Triple| [t.before, t.norm, t.behind].contains(&id);
            triples.extend(triple.filter(is_one));
        }
        Ok(triples)
    }

    /// That of a LayerNorm.
    pub(super) fn triple(&self, norm: NodeId) -> Result<Option<Triple>, String> {
        let graph = self.graph;
        let &Op::BiasResidualLayerNorm { eps, bias } = graph.op(norm) else {
            return Ok(None);
        };
        let of_norm = graph.operands(norm);
        let before = of_norm[0];
        // What reads the rows before they are there could not be launched.
        let readers = graph.consumers(norm).into_iter();
        let Some(behind) = readers.min_by_key(|reader| self.order_of.get(reader)) else {
            return Ok(None);
        };
        let (Op::Linear { epilogue: none }, &Op::Linear { epilogue }) =
            (graph.op(before), graph.op(behind))
        else {
            return Ok(None);
        };
        let (of_before, of_behind) = (graph.operands(before), graph.operands(behind));
        let over_tokens = |id| rows(graph.shape(id)).as_symbol() == Some(Symbol::Tokens);
        // An invariant program launches the same whatever the batch.
        let is_triple = self.instructions == Instructions::Hopper
            && !self.program.invariant
            && !self.norms_apart
            && *none == Epilogue::default()
            && graph.sole_consumer(before) == Some(norm)
            && !of_norm[1..].contains(&before)
            && of_behind[0] == norm
            && !of_behind[1..].contains(&norm)
            && !self.is_before_a_norm(behind)
            && [before, norm, behind].into_iter().all(over_tokens);
        if !is_triple {
            return Ok(None);
        }
        // The fewest tokens have LayerNorm in one launch with what is behind it, and so may what is before.
        let of_fewest = self
            .on_load_of_any(norm)?
            .map_or(0, |pair| pair.most_of_small_tiles());
        let of_first = self.on_load_of_any(before)?.map_or(0, |pair| pair.most);
        let above = of_fewest.max(of_first);
        let n = width(graph.shape(before))?;
        let k = constant(&graph.shape(of_before[1]).0[1])?;
        let n_behind = width(graph.shape(behind))?;
        let asked = (above, (n, k, bias), (n_behind, epilogue), eps);
        let kernels = self.by_moments_of.get(asked, || {
            ByMoments::find(above, (n, k, bias), (n_behind, epilogue), eps, self.dtype)
        });
        Ok(kernels.map(|kernels| Triple {
            before,
            norm,
            behind,
            kernels,
        }))
    }

    /// Whether a linear layer may be the first of a triple, and so is not the last of another.
    fn is_before_a_norm(&self, linear: NodeId) -> bool {
        let reader = self.graph.sole_consumer(linear);
        reader.is_some_and(|id| matches!(self.graph.op(id), Op::BiasResidualLayerNorm { .. }))
    }

    /// The launch of a triple that is in the place of a node, if one is.
    pub(super) fn launch_of(&mut self, triple: &Triple, id: NodeId, out: TensorIndex) {
        if id == triple.norm {
            self.leave_moments(triple);
        } else if id == triple.behind {
            self.normalise(triple, out);
        }
    }

    /// That of its LayerNorm: all that it reads is there by then.
    fn leave_moments(&mut self, triple: &Triple) {
        let graph = self.graph;
        let node = graph.node(triple.norm);
        let Some((_, kernel)) = triple.kernels.before.first() else {
            return;
        };
        let mut tensor = |what: &str, dtype: DType, columns: u64| {
            let name = format!("{}.{what}", node.name);
            let shape = Shape::new([rows(&node.shape), columns.into()]);
            self.tensor(&name, dtype, shape, UNPLACED)
        };
        let left = [
            tensor("scaled", kernel.dtype, kernel.n.into()),
            tensor("moments", DType::F32, kernel.moments()),
        ];
        self.left_of.insert(triple.norm, left);
        // All that LayerNorm reads but beta.
        let of_norm = graph.operands(triple.norm);
        let reads = graph.operands(triple.before).into_iter();
        let reads = reads.chain(of_norm[1..of_norm.len() - 1].iter().copied());
        let mut operands: Vec<TensorIndex> = reads.map(|id| self.tensor_of[&id]).collect();
        operands.extend(left);
        let kernels = triple.kernels.before.iter();
        let kernels = kernels.map(|(most, kernel)| (*most, kernel.clone().into()));
        self.push_few(triple, triple.norm, kernels.collect(), operands);
    }

    /// That of the linear layer behind, which normalises.
    fn normalise(&mut self, triple: &Triple, out: TensorIndex) {
        let graph = self.graph;
        let Some(left) = self.left_of.get(&triple.norm) else {
            return;
        };
        let mut operands = left.to_vec();
        let of_norm = graph.operands(triple.norm);
        let affine = of_norm[of_norm.len() - 2..].iter().copied();
        let reads = affine.chain(graph.operands(triple.behind).into_iter().skip(1));
        operands.extend(reads.map(|id| self.tensor_of[&id]));
        operands.extend([self.tensor_of[&triple.norm], out]);
        let kernels = triple.kernels.behind.iter();
        let kernels = kernels.map(|(most, kernel)| (*most, kernel.clone().into()));
        self.push_few(triple, triple.behind, kernels.collect(), operands);
    }

    /// A launch of kernels, each up to its number of rows; the last serves what is left of the range.
    fn push_few(
        &mut self,
        triple: &Triple,
        of: NodeId,
        kernels: Vec<(u64, KernelSpec)>,
        operands: Vec<TensorIndex>,
    ) {
        let last = triple.kernels.most();
        let kernels = kernels.into_iter().map(|(most, kernel)| {
            let limit = (most < last).then_some(Limit::Rows(most));
            (limit, kernel)
        });
        let node = self.graph.node(of);
        let step = Step {
            name: node.name.clone(),
            when: Some(triple.range()),
            variants: self.variants(kernels.collect()),
            operands,
            rows: rows(&node.shape),
        };
        self.program.steps.push(step);
    }
}
