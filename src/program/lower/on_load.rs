//! LayerNorm and the linear layer that reads it first: two launches, or one for the fewest tokens, where
//! each block of the linear layer normalises the rows that it loads.

use super::{Lowering, constant, rows, width};
use crate::{
    graph::{NodeId, Op},
    kernels::{
        Instructions, KernelSpec,
        gemm::{ByMoments, Epilogue, ResidualLayerNormGemm},
    },
    program::{BatchRange, Limit, Measure, Step, TensorIndex},
    tensor::Symbol,
};

/// Columns, products of each, epsilon, whether there is a bias, and the linear layer's epilogue.
pub(super) type Asked = (u32, u32, f32, bool, Epilogue);
/// As [`ResidualLayerNormGemm::by_rows`] has it.
pub(super) type Found = Vec<(u64, ResidualLayerNormGemm)>;

/// A LayerNorm and its first reader, where one launch computes both.
pub(super) struct OnLoad {
    norm: NodeId,
    linear: NodeId,
    /// Ascending, by the most rows of each.
    kernels: Vec<(u64, ResidualLayerNormGemm)>,
    /// For batches of up to so many tokens.
    pub(super) most: u64,
}

impl OnLoad {
    /// The most tokens for which small tiles are faster than the launches of a triple.
    pub(super) fn most_of_small_tiles(&self) -> u64 {
        let most = |(up_to, kernel): &(u64, ResidualLayerNormGemm)| match kernel.k {
            ..=ByMoments::NARROW => *up_to,
            _ => (*up_to).min(ByMoments::SLOWER_THAN_ROWS),
        };
        let is_small =
            |kernel: &ResidualLayerNormGemm| kernel.tile.tokens <= ByMoments::SLOWER_THAN_TOKENS;
        let small = self
            .kernels
            .iter()
            .take_while(|(_, kernel)| is_small(kernel));
        small.last().map_or(0, most)
    }

    /// The batches for which one launch computes both.
    pub(super) fn range(&self) -> BatchRange {
        BatchRange {
            by: Measure::Tokens,
            above: 0,
            up_to: Some(self.most),
        }
    }
}

impl Lowering<'_> {
    /// The pair that a node is one of, if there is a kernel that computes both, for batches that no triple takes.
    pub(super) fn on_load(&self, id: NodeId) -> Result<Option<OnLoad>, String> {
        let Some(mut pair) = self.on_load_of_any(id)? else {
            return Ok(None);
        };
        if let Some(triple) = self.triple(pair.norm)? {
            pair.most = pair.most.min(triple.range().above);
            let mut above = 0;
            pair.kernels.retain(|&(up_to, _)| {
                let is_reached = above < pair.most;
                above = up_to;
                is_reached
            });
        }
        Ok((!pair.kernels.is_empty()).then_some(pair))
    }

    /// As [`Lowering::on_load`], whether there are triples or not.
    pub(super) fn on_load_of_any(&self, id: NodeId) -> Result<Option<OnLoad>, String> {
        let graph = self.graph;
        let norm = match graph.op(id) {
            Op::BiasResidualLayerNorm { .. } => id,
            Op::Linear { .. } => graph.operands(id)[0],
            _ => return Ok(None),
        };
        // What reads the rows before they are there could not be launched.
        let readers = graph.consumers(norm).into_iter();
        let Some(linear) = readers.min_by_key(|reader| self.order_of.get(reader)) else {
            return Ok(None);
        };
        let (&Op::BiasResidualLayerNorm { eps, bias }, &Op::Linear { epilogue }) =
            (graph.op(norm), graph.op(linear))
        else {
            return Ok(None);
        };
        let operands = graph.operands(linear);
        let over_tokens = |id| rows(graph.shape(id)).as_symbol() == Some(Symbol::Tokens);
        // An invariant program launches the same whatever the batch.
        let is_pair = self.instructions == Instructions::Hopper
            && !self.program.invariant
            && !self.norms_apart
            && (id == norm || id == linear)
            && operands[0] == norm
            && !operands[1..].contains(&norm)
            && over_tokens(norm)
            && over_tokens(linear);
        if !is_pair {
            return Ok(None);
        }
        let n = width(graph.shape(linear))?;
        let k = constant(&graph.shape(operands[1]).0[1])?;
        let asked = (n, k, eps, bias, epilogue);
        let kernels = self.on_load_of.get(asked, || {
            ResidualLayerNormGemm::by_rows(n, k, eps, self.dtype, bias, epilogue)
        });
        let most = kernels.last().map(|&(most, _)| most);
        Ok(most.map(|most| OnLoad {
            norm,
            linear,
            kernels,
            most,
        }))
    }

    /// The launch that computes both nodes of a pair.
    pub(super) fn load(&mut self, pair: &OnLoad, out: TensorIndex) {
        let graph = self.graph;
        let of_linear = graph.operands(pair.linear).into_iter().skip(1);
        let reads = graph.operands(pair.norm).into_iter().chain(of_linear);
        let mut operands: Vec<TensorIndex> = reads.map(|id| self.tensor_of[&id]).collect();
        operands.extend([self.tensor_of[&pair.norm], out]);
        let node = graph.node(pair.linear);
        // The last serves what is left of the range.
        let kernels = pair.kernels.iter().map(|(up_to, kernel)| {
            let limit = (*up_to < pair.most).then_some(Limit::Rows(*up_to));
            (limit, kernel.clone().into())
        });
        let step = Step {
            name: node.name.clone(),
            when: Some(pair.range()),
            variants: self.variants(kernels.collect()),
            operands,
            rows: rows(&node.shape),
        };
        self.program.steps.push(step);
    }
}

/// What of all batches is left by others, in ranges of tokens; `None` is all of it. `taken` are
/// ranges of tokens that do not meet.
pub(super) fn left(mut taken: Vec<BatchRange>) -> Vec<Option<BatchRange>> {
    if taken.is_empty() {
        return vec![None];
    }
    taken.sort_by_key(|range| range.above);
    let mut left = Vec::new();
    let mut above = Some(0);
    for range in taken {
        if let Some(above) = above.filter(|&above| above < range.above) {
            left.push((above, Some(range.above)));
        }
        above = range.up_to;
    }
    left.extend(above.map(|above| (above, None)));
    let by = Measure::Tokens;
    let range = |(above, up_to)| BatchRange { by, above, up_to };
    left.into_iter().map(|ends| Some(range(ends))).collect()
}

/// What an operator over tokens launches by itself beside what takes all batches of these ranges of tokens: the
/// kernels without those of which every batch is taken, which then need not be compiled. The last serves the rest.
pub(super) fn reached(
    kernels: Vec<(Option<Limit>, KernelSpec)>,
    taken: &[BatchRange],
) -> Vec<(Option<Limit>, KernelSpec)> {
    let mut above = 0;
    let mut kept = kernels;
    kept.retain(|(limit, _)| {
        let up_to = match *limit {
            None => None,
            Some(Limit::Rows(most)) => Some(most),
            Some(_) => return true,
        };
        let by = Measure::Tokens;
        let range = BatchRange { by, above, up_to };
        above = up_to.unwrap_or(above);
        !range.is_covered_by(taken)
    });
    if let Some((limit, _)) = kept.last_mut() {
        *limit = None;
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_what_no_range_takes() {
        let range = |above, up_to| BatchRange {
            by: Measure::Tokens,
            above,
            up_to,
        };
        assert_eq!(left(vec![]), [None]);
        assert_eq!(left(vec![range(0, None)]), []);
        assert_eq!(left(vec![range(0, Some(24))]), [Some(range(24, None))]);
        assert_eq!(
            left(vec![
                range(1400, None),
                range(0, Some(24)),
                range(600, Some(700))
            ]),
            [Some(range(24, Some(600))), Some(range(700, Some(1400)))]
        );
        assert_eq!(
            left(vec![range(600, Some(700))]),
            [Some(range(0, Some(600))), Some(range(700, None))]
        );
    }
}
