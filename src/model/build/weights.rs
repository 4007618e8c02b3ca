//! Weights of the graph: tensors of the checkpoint, and parts of them.

use std::borrow::Cow;

use super::{Builder, operators::linear::RowsOf};
use crate::{
    graph::{NodeId, Op, WeightExpr},
    model::{
        ModelError, Problem,
        error::At,
        expr::Expr,
        spelling::{Pattern, Spelling},
    },
    tensor::Shape,
};

/// Maximum number of elements of a tensor, larger than any in a checkpoint. It prevents byte counts from overflowing.
const MAX_ELEMENTS: u64 = 1 << 40;

impl Builder<'_> {
    /// Returns the pattern of the tensor that a linear layer reads if its weight is `pattern`. If `pattern` is a table that a head is tied
    /// to, and the checkpoint has a head tensor with different values, the result is the pattern of this head tensor. Otherwise, the result
    /// is `pattern`.
    ///
    /// If `pattern` is a tied head tensor, this function also records it as untied. Tensors with its alternative names may have different
    /// values, so they must not be read instead.
    pub(super) fn untied<'p>(
        &mut self,
        pattern: &'p At<Pattern>,
    ) -> Result<Cow<'p, At<Pattern>>, ModelError> {
        let names = self.values.names_of(pattern)?;
        let first = names.first().map(String::as_str).unwrap_or_default();
        for (own, table) in self.ties.iter().filter(|(_, table)| table == first) {
            if self.own.contains(own) {
                let own = Pattern(vec![Spelling::literal(own)]);
                return Ok(Cow::Owned(At::new(own, pattern.span.clone())));
            }
            self.tied.insert(own.clone(), table.clone());
        }
        if self.ties.iter().any(|(own, _)| own == first) {
            self.untied.insert(first.to_owned());
        }
        Ok(Cow::Borrowed(pattern))
    }

    /// Returns the node of a tensor. Each tensor of the checkpoint has one node, even if several operators read it.
    pub(super) fn weight(
        &mut self,
        pattern: &At<Pattern>,
        dims: &[u64],
    ) -> Result<NodeId, ModelError> {
        self.tensor(pattern, dims, |name, dims| WeightExpr::Stored {
            name,
            dims,
        })
    }

    /// Returns a matrix `[out, in]` that is stored as `[in, out]`.
    pub(super) fn transposed(
        &mut self,
        pattern: &At<Pattern>,
        [out, width]: [u64; 2],
    ) -> Result<NodeId, ModelError> {
        self.tensor(pattern, &[out, width], |name, mut dims| {
            dims.reverse();
            WeightExpr::Transposed { name, dims }
        })
    }

    /// Returns a weight with `out` rows, which `part` selects from a stored tensor of shape `dims`.
    pub(super) fn rows(
        &mut self,
        pattern: &At<Pattern>,
        out: u64,
        dims: &[u64],
        part: &RowsOf,
    ) -> Result<NodeId, ModelError> {
        let of = dims.first().copied().unwrap_or(0);
        let from = u64::from(self.values.offset(&part.from)?);
        let groups = match &part.groups {
            Some(groups) => u64::from(self.values.size(groups)?),
            None => 1,
        };
        if groups == 0 || !of.is_multiple_of(groups) || !out.is_multiple_of(groups) {
            let problem = Problem::out_of_range(
                "the number of parts of a matrix",
                groups,
                format!("a divisor of {of} and {out}, its rows and those of the result"),
            );
            let place = part.groups.as_ref().map_or(&part.of.span, |g| &g.span);
            return Err(self.file.error(problem, place, format!("is {groups}")));
        }
        let (each, rows) = (of / groups, out / groups);
        let end = from.saturating_add(rows);
        if end > each {
            let problem = Problem::out_of_range(
                "a part of a matrix",
                format!("rows {from} to {end}"),
                format!("rows of {each}"),
            );
            return Err(self.file.error(problem, &part.of.span, format!("is {of}")));
        }
        let interleaved = self.interleaved(part.interleaved.as_deref(), rows, "rows")?;
        self.tensor_called(
            pattern,
            dims,
            |name| match (groups, interleaved) {
                (1, 0) => format!("{name}[{from}..{end}]"),
                (groups, 0) => format!("{name}[{groups} of {from}..{end}]"),
                (groups, pairs) => format!("{name}[{groups} of {from}..{end}, {pairs} in pairs]"),
            },
            |name, dims| WeightExpr::Rows {
                name,
                dims,
                groups,
                from,
                rows,
                interleaved,
            },
        )
    }

    /// Returns the value of `given`, the number of interleaved rows or columns, or 0 if `given` is `None`. A number that is odd or exceeds
    /// `n` is an error, whose message calls the interleaved items `what` ("rows" or "columns").
    fn interleaved(&self, given: Option<&At<Expr>>, n: u64, what: &str) -> Result<u64, ModelError> {
        let Some(expr) = given else { return Ok(0) };
        let found = u64::from(self.values.size(expr)?);
        if found <= n && found.is_multiple_of(2) {
            return Ok(found);
        }
        let problem = Problem::out_of_range(
            format!("the number of interleaved {what}"),
            found,
            format!("an even number up to {n}"),
        );
        Err(self.values.about(problem, &[expr], format!("is {found}")))
    }

    /// Returns the weight `[heads, head]` of a norm of heads. The first `interleaved` columns of each head are stored as pairs of adjacent
    /// columns, and are reordered.
    pub(super) fn weight_of_heads(
        &mut self,
        pattern: &At<Pattern>,
        dims: [u64; 2],
        interleaved: Option<&At<Expr>>,
    ) -> Result<NodeId, ModelError> {
        let interleaved = self.interleaved(interleaved, dims[1], "columns")?;
        if interleaved == 0 {
            return self.weight(pattern, &dims);
        }
        self.tensor_called(
            pattern,
            &dims,
            |name| format!("{name}[{interleaved} in pairs]"),
            |name, _| WeightExpr::InterleavedColumns {
                name,
                dims,
                interleaved,
            },
        )
    }

    /// Returns the node of a tensor, and creates it with `expr` if it is new.
    pub(super) fn tensor(
        &mut self,
        pattern: &At<Pattern>,
        dims: &[u64],
        expr: impl FnOnce(String, Vec<u64>) -> WeightExpr,
    ) -> Result<NodeId, ModelError> {
        self.tensor_called(pattern, dims, str::to_owned, expr)
    }

    /// Like [`tensor`](Self::tensor), for a node that holds a part of a tensor. `called` derives the node's name from the tensor's name.
    pub(super) fn tensor_called(
        &mut self,
        pattern: &At<Pattern>,
        dims: &[u64],
        called: impl Fn(&str) -> String,
        expr: impl FnOnce(String, Vec<u64>) -> WeightExpr,
    ) -> Result<NodeId, ModelError> {
        let mut names = self.values.names_of(pattern)?.into_iter();
        let name = names.next().unwrap_or_default();
        let others: Vec<String> = names.collect();
        let found = Shape::fixed(dims);
        let expr = expr(name.clone(), dims.to_vec());
        let node = called(&name);
        if let Some((id, before)) = self.weights.get(&node) {
            let stored = self.graph.shape(*id);
            if *self.graph.op(*id) == Op::Weight(expr) {
                return Ok(*id);
            }
            let problem = Problem::WeightShape {
                weight: name,
                found: found.to_string(),
                before: stored.to_string(),
            };
            let span = &pattern.span;
            let error = if before == span {
                let label = format!("{stored} in an earlier iteration, {found} now");
                self.file.error(problem, span, label)
            } else {
                let error = self.file.error(problem, span, format!("{found} here"));
                error.also(before, format!("{stored} here"))
            };
            return Err(error.help(
                "a weight has one shape; an index such as `{i}` may be missing in its name",
            ));
        }
        let elements = dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
        if elements.is_none_or(|n| n > MAX_ELEMENTS) {
            let problem = Problem::out_of_range(
                format!("the size of `{name}`"),
                found,
                format!("at most {MAX_ELEMENTS} elements"),
            );
            return Err(self.file.error(problem, &pattern.span, "too large"));
        }
        let id = self.add(node.clone(), Op::Weight(expr), &[], &pattern.span)?;
        if !others.is_empty() {
            self.other_names.insert(name, others);
        }
        self.weights.insert(node, (id, pattern.span.clone()));
        Ok(id)
    }
}
