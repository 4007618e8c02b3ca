//! A linear layer and the LayerNorm behind it: two launches, or one for the numbers of tokens for
//! which a kernel that does both is faster.

use super::{Lowering, Triple, constant, rows, width};
use crate::{
    graph::{NodeId, Op},
    kernels::{
        Instructions, KernelSpec,
        gemm::{Epilogue, GemmResidualLayerNorm},
    },
    program::{BatchRange, Limit, Measure, Step, TensorIndex},
    tensor::Symbol,
    tune::{LinearLayerNorm, Problem},
};

/// How a linear layer and its LayerNorm are computed, by the tokens of the batch.
pub(super) struct Pair {
    linear: NodeId,
    norm: NodeId,
    joined: Vec<Joined>,
}

/// Where one launch computes both.
struct Joined {
    range: BatchRange,
    kernels: Vec<(Option<Limit>, KernelSpec)>,
}

impl Pair {
    /// The batches for which one launch computes both.
    pub(super) fn ranges(&self) -> impl Iterator<Item = BatchRange> {
        self.joined.iter().map(|joined| joined.range)
    }
}

impl Lowering<'_> {
    /// What a node and another ask for together, if there are kernels that compute both: the products of tokens
    /// that only LayerNorm reads, as what it adds the residual to.
    pub(super) fn pair_problem(
        &self,
        id: NodeId,
    ) -> Result<Option<(NodeId, NodeId, Problem)>, String> {
        let graph = self.graph;
        let (linear, norm) = match graph.op(id) {
            Op::Linear { .. } => match graph.sole_consumer(id) {
                Some(reader) => (id, reader),
                None => return Ok(None),
            },
            Op::BiasResidualLayerNorm { .. } => (graph.operands(id)[0], id),
            _ => return Ok(None),
        };
        let (&Op::Linear { epilogue }, &Op::BiasResidualLayerNorm { eps, bias }) =
            (graph.op(linear), graph.op(norm))
        else {
            return Ok(None);
        };
        let operands = graph.operands(norm);
        // An invariant program launches the same whatever the batch.
        let is_pair = self.instructions == Instructions::Hopper
            && !self.program.invariant
            && !self.norms_apart
            && epilogue == Epilogue::default()
            && graph.sole_consumer(linear) == Some(norm)
            && operands[0] == linear
            && !operands[1..].contains(&linear)
            && rows(graph.shape(norm)).as_symbol() == Some(Symbol::Tokens);
        if !is_pair {
            return Ok(None);
        }
        let n = width(graph.shape(linear))?;
        let k = constant(&graph.shape(graph.operands(linear)[1]).0[1])?;
        let dtype = self.dtype;
        if GemmResidualLayerNorm::candidates(n, k, dtype).is_empty() {
            return Ok(None);
        }
        let pair = LinearLayerNorm {
            n,
            k,
            eps,
            dtype,
            bias,
        };
        Ok(Some((linear, norm, Problem::LinearLayerNorm(pair))))
    }

    /// The pair that a node is one of, if one launch computes both for some batches.
    pub(super) fn pair(&self, id: NodeId) -> Result<Option<Pair>, String> {
        let Some((linear, norm, problem)) = self.pair_problem(id)? else {
            return Ok(None);
        };
        let mut pair = Pair {
            linear,
            norm,
            joined: Vec::new(),
        };
        let ranges = self.ranges(&problem, &[])?.into_iter();
        let kernels = ranges.map(|range| (range.up_to, problem.kernel(range.choice)));
        let mut above = 0;
        for (up_to, kernel) in kernels {
            let range = BatchRange {
                by: Measure::Tokens,
                above,
                up_to,
            };
            above = up_to.unwrap_or(u64::MAX);
            match (kernel, pair.joined.last_mut()) {
                (None, _) => {}
                (Some(kernel), Some(before)) if before.range.up_to == Some(range.above) => {
                    before.range.up_to = range.up_to;
                    before.kernels.push((up_to.map(Limit::Rows), kernel));
                }
                (Some(kernel), _) => {
                    let kernels = vec![(up_to.map(Limit::Rows), kernel)];
                    pair.joined.push(Joined { range, kernels });
                }
            }
        }
        // What is normalised on load takes the fewest tokens.
        let mut least = 0;
        for id in [linear, norm] {
            least = least.max(self.on_load(id)?.map_or(0, |on_load| on_load.most));
            let triples = self.triples(id)?;
            least = triples.iter().map(Triple::most).fold(least, u64::max);
        }
        pair.joined.retain_mut(|Joined { range, .. }| {
            range.above = range.above.max(least);
            range.up_to.is_none_or(|up_to| up_to > least)
        });
        Ok((!pair.joined.is_empty()).then_some(pair))
    }

    /// The launches that compute both nodes of a pair, for the batches that have them.
    pub(super) fn join(&mut self, pair: Pair, out: TensorIndex) {
        let graph = self.graph;
        let node = graph.node(pair.norm);
        let of_norm = graph.operands(pair.norm).into_iter().skip(1);
        let operands: Vec<TensorIndex> = graph
            .operands(pair.linear)
            .into_iter()
            .chain(of_norm)
            .map(|id| self.tensor_of[&id])
            .chain([out])
            .collect();
        for Joined { range, kernels } in pair.joined {
            // The last serves what is left of its range.
            let last = kernels.len() - 1;
            let kernels = kernels.into_iter().enumerate();
            let kernels = kernels.map(|(at, (limit, k))| (limit.filter(|_| at < last), k));
            let step = Step {
                name: node.name.clone(),
                when: Some(range),
                variants: self.variants(kernels.collect()),
                operands: operands.clone(),
                rows: rows(&node.shape),
            };
            self.program.steps.push(step);
        }
    }
}
