//! Operators that several kernels serve, and those that were picked.

use super::{Lowering, constant, width};
use crate::{
    graph::{NodeId, Op},
    kernels::{
        KernelSpec,
        attention::AttentionSoftmax,
        layernorm::{BiasResidualLayerNorm, LayerNorm},
    },
    program::{BatchRange, Limit, Measure, Padding},
    tune::{Counted, NotInvariant, Problem, Range},
};

impl Lowering<'_> {
    /// What an operator asks for, where several kernels serve it.
    pub(super) fn problem(&self, id: NodeId, op: &Op) -> Result<Option<Problem>, String> {
        let dtype = self.dtype;
        let first_width = || width(self.graph.shape(self.graph.operands(id)[0]));
        Ok(match *op {
            Op::Linear { epilogue } => Some(Problem::Gemm {
                n: width(self.graph.shape(id))?,
                k: first_width()?,
                dtype,
                epilogue,
                instructions: self.instructions,
            }),
            Op::LayerNorm { eps } => {
                let usual = LayerNorm::new(first_width()?, eps, dtype);
                Some(Problem::LayerNorm(usual))
            }
            Op::BiasResidualLayerNorm { eps, bias } => {
                let usual = BiasResidualLayerNorm::new(first_width()?, eps, dtype, bias);
                Some(Problem::BiasResidualLayerNorm(usual))
            }
            Op::Softmax { scale } => {
                let heads = constant(&self.graph.shape(id).0[0])?;
                Some(Problem::Softmax(AttentionSoftmax {
                    masked: self.padding == Padding::Kept,
                    ..AttentionSoftmax::new(heads, scale, dtype)
                }))
            }
            Op::Attention {
                heads,
                head,
                scale,
                q,
                k,
                v,
            } => Some(Problem::Attention {
                heads,
                head,
                scale,
                q,
                k,
                v,
                dtype,
                instructions: self.instructions,
            }),
            _ => None,
        })
    }

    /// The kernels that were picked, or the first guess.
    pub(super) fn chosen(
        &mut self,
        problem: &Problem,
        taken: &[BatchRange],
    ) -> Result<Vec<(Option<Limit>, KernelSpec)>, String> {
        self.ranges(problem, taken)?
            .into_iter()
            .map(|range| Ok((limit(problem, &range), single(problem, &range)?)))
            .collect()
    }

    /// What was picked, or the first guess for the batches that others do not take.
    pub(super) fn ranges(
        &self,
        problem: &Problem,
        taken: &[BatchRange],
    ) -> Result<Vec<Range>, String> {
        let asked = (problem.clone(), taken.to_vec());
        if let Some(known) = self.ranges_of.known(&asked) {
            return Ok(known);
        }
        let picked = match self.picks {
            Some(picks) => picks.ranges(problem).map_err(|refused| {
                format!("its picks are refused: {refused}; leave them out, or tune anew")
            })?,
            None => None,
        };
        let ranges = match (picked, self.program.invariant) {
            (Some(picked), _) => {
                self.has_picked.set(true);
                picked.to_vec()
            }
            (None, false) => {
                let by_tokens = taken.iter().filter(|range| range.by == Measure::Tokens);
                let others = by_tokens.map(|range| (range.above, range.up_to));
                problem.guess_beside(&others.collect::<Vec<_>>())
            }
            (None, true) => {
                let choice = problem.for_all_sizes().map_err(varies)?;
                vec![Range {
                    up_to: None,
                    choice,
                }]
            }
        };
        self.check_invariant(problem, &ranges)?;
        self.ranges_of.keep(asked, ranges.clone());
        Ok(ranges)
    }
}

impl Lowering<'_> {
    /// Whether an invariant program may launch these.
    pub(super) fn check_invariant(
        &self,
        problem: &Problem,
        ranges: &[Range],
    ) -> Result<(), String> {
        match self.program.invariant {
            true => problem.check_invariant(ranges).map_err(varies),
            false => Ok(()),
        }
    }
}

/// Why no invariant program can be made, and what to do.
fn varies(reason: NotInvariant) -> String {
    let mend = match reason {
        NotInvariant::Ranges { .. } => {
            "leave the picks out, give some of one range, or leave --invariant out"
        }
        NotInvariant::Choice { .. } | NotInvariant::NoChoice { .. } => {
            "leave the pass `fuse_attention` on (`gemmule explain` says why it refuses), or leave --invariant out"
        }
    };
    format!("{reason}; {mend}")
}

pub(super) fn limit(problem: &Problem, range: &Range) -> Option<Limit> {
    range.up_to.map(|most| match problem.counted() {
        Counted::Rows => Limit::Rows(most),
        Counted::Longest => Limit::Longest(most),
    })
}

fn single(problem: &Problem, range: &Range) -> Result<KernelSpec, String> {
    problem
        .kernel(range.choice)
        .ok_or_else(|| format!("{} does not compute it", range.choice))
}
