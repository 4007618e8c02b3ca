//! From fused attention to launches: one step, or several where that depends on the lengths.

use std::collections::HashMap;

use super::{LowerError, Lowering, UNPLACED, choices::limit, rows, unsupported};
use crate::{
    graph::{NodeId, Op},
    kernels::{Fill, KernelSpec, Meta, attention::MhaSplitKeys, chain::Chain},
    program::{AttentionChoice, BatchRange, Limit, Measure, Step, TensorIndex},
    tune::{Choice, Problem, Range},
};

impl Lowering<'_> {
    /// Attention by what serves which lengths: neighbouring ranges of single kernels are the
    /// variants of one step, and kernels that are launched together are steps for these lengths.
    pub(super) fn attention(&mut self, id: NodeId, op: &Op) -> Result<TensorIndex, LowerError> {
        let node = self.graph.node(id);
        let graph = self.graph;
        let unsupported = |problem| unsupported(graph, id, op, problem);
        let Some(problem) = self.problem(id, op).map_err(unsupported)? else {
            return Err(unsupported("is no problem of attention".to_owned()));
        };
        let asked = self.attention;
        let forced = asked
            .ranges(&problem)
            .map_err(|problem| LowerError::Attention {
                node: node.name.clone(),
                choice: asked,
                problem,
            })?;
        let ranges = match forced {
            // The kernel for the longest serves every length.
            Some(ranges) if self.program.invariant => {
                ranges.into_iter().next_back().into_iter().collect()
            }
            Some(ranges) => ranges,
            None => self.ranges(&problem, &[]).map_err(unsupported)?,
        };
        self.check_invariant(&problem, &ranges)
            .map_err(unsupported)?;
        let ranges = within(ranges, self.longest().map_err(unsupported)?);
        let mut parts = parts(&problem, &ranges).map_err(unsupported)?;
        if asked == AttentionChoice::Auto && !self.program.invariant {
            for_few_tokens(&problem, &mut parts);
        }
        let out = self.tensor(&node.name, self.dtype, node.shape.clone(), UNPLACED);
        let mut named: HashMap<&str, TensorIndex> = HashMap::from([("out", out)]);
        for (name, operand) in ["q", "k", "v"].into_iter().zip(self.graph.operands(id)) {
            named.insert(name, self.tensor_of[&operand]);
        }
        let n_parts = parts.len();
        for part in parts {
            let when = (n_parts > 1).then_some(part.range);
            let tensors: Vec<TensorIndex> = part
                .chain
                .tensors
                .iter()
                .map(|t| match (named.get(t.name), t.fill) {
                    (Some(&tensor), _) => tensor,
                    (None, Some(Fill::Meta(meta))) => self.meta(meta),
                    (None, _) => {
                        let name = format!("{}.{}", node.name, t.name);
                        let tensor = self.tensor(&name, t.dtype, t.shape.clone(), UNPLACED);
                        named.insert(t.name, tensor);
                        tensor
                    }
                })
                .collect();
            let last = part.chain.launches.len() - 1;
            for (at, launch) in part.chain.launches.into_iter().enumerate() {
                let operands: Vec<TensorIndex> =
                    launch.operands.iter().map(|&o| tensors[o]).collect();
                let n_reads = operands.len() - launch.kernel.n_writes();
                let variants = match (at, &part.single) {
                    (0, Some(single)) => single.clone(),
                    _ => vec![(None, launch.kernel)],
                };
                let name = match operands.get(n_reads) {
                    Some(&written) if at < last => self.program.tensors[written].name.clone(),
                    _ => node.name.clone(),
                };
                let step = Step {
                    name,
                    when,
                    variants: self.variants(variants),
                    operands,
                    rows: rows(&node.shape),
                };
                self.program.steps.push(step);
            }
        }
        Ok(out)
    }
}

impl Lowering<'_> {
    /// The longest sequence that the tables of positions allow, if there are any.
    fn longest(&self) -> Result<Option<u64>, String> {
        let mut longest: Option<u64> = None;
        for id in self.graph.topological() {
            let operands = self.graph.operands(id);
            let offsets = match self.graph.op(id) {
                Op::Embedding { offset } => vec![*offset],
                Op::EmbeddingLayerNorm { offsets, .. } => offsets.clone(),
                _ => continue,
            };
            for (i, &offset) in offsets.iter().enumerate() {
                let table = self.table(operands[i], operands[offsets.len() + i], offset)?;
                if table.ids == Meta::Positions {
                    let tokens = u64::from(table.rows.saturating_sub(offset));
                    longest = Some(longest.map_or(tokens, |longest| longest.min(tokens)));
                }
            }
        }
        Ok(longest)
    }
}

/// The ranges that sequences of at most `longest` tokens reach: kernels for longer ones need not be compiled. The last
/// is of a kernel that any length can be given to, so that nothing rests on the lengths having been checked.
fn within(mut ranges: Vec<Range>, longest: Option<u64>) -> Vec<Range> {
    let Some(longest) = longest else {
        return ranges;
    };
    let is_last = |range: &Range| {
        let serves_any = !matches!(range.choice, Choice::MhaShort { .. });
        serves_any && range.up_to.is_none_or(|up_to| up_to >= longest)
    };
    if let Some(last) = ranges.iter().position(is_last) {
        ranges.truncate(last + 1);
        ranges[last].up_to = None;
    }
    ranges
}

/// What serves some lengths.
struct Part {
    range: BatchRange,
    /// Its launches; where that is one, any of the variants' stands for all.
    chain: Chain,
    /// The variants of a single launch.
    single: Option<Vec<(Option<Limit>, KernelSpec)>>,
}

/// Batches of few tokens have a kernel of their own, whatever serves their lengths among more: blocks of small tiles.
fn for_few_tokens(problem: &Problem, parts: &mut [Part]) {
    let Some(few) = problem.attention_of_few_tokens() else {
        return;
    };
    let most = u64::from(MhaSplitKeys::MAX_LEN);
    if let Some(Part {
        range,
        single: Some(variants),
        ..
    }) = parts.first_mut()
        && range.up_to.is_none_or(|up_to| up_to >= most)
    {
        variants.insert(0, (Some(Limit::Rows(most)), few.into()));
    }
}

/// Ranges, in their order, with those of single kernels taken together.
fn parts(problem: &Problem, ranges: &[Range]) -> Result<Vec<Part>, String> {
    let mut parts: Vec<Part> = Vec::new();
    let mut above = 0;
    for range in ranges {
        let chain = problem
            .chain(range.choice)
            .ok_or_else(|| format!("{} does not compute it", range.choice))?;
        let reach = BatchRange {
            by: Measure::Longest,
            above,
            up_to: range.up_to,
        };
        above = range.up_to.unwrap_or(u64::MAX);
        let variant = match chain.launches.as_slice() {
            [only] => Some((limit(problem, range), only.kernel.clone())),
            _ => None,
        };
        match (parts.last_mut(), variant) {
            (
                Some(Part {
                    range,
                    single: Some(variants),
                    ..
                }),
                Some(variant),
            ) => {
                range.up_to = reach.up_to;
                variants.push(variant);
            }
            (_, variant) => parts.push(Part {
                range: reach,
                chain,
                single: variant.map(|v| vec![v]),
            }),
        }
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_no_position_reaches_are_left_out_but_any_length_is_served() {
        let range = |up_to, choice| Range { up_to, choice };
        let short = Choice::MhaShort { max_len: 64 };
        let all = vec![
            range(Some(64), short),
            range(Some(512), Choice::MhaOnline),
            range(None, Choice::MhaGrouped),
        ];
        assert_eq!(within(all.clone(), None), all);
        assert_eq!(within(all.clone(), Some(513)), all);
        let few = [range(Some(64), short), range(None, Choice::MhaOnline)];
        assert_eq!(within(all.clone(), Some(512)), few);
        assert_eq!(within(all, Some(32)), few);
    }
}
