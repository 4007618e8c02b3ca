//! Converts an operator of a description to operators of the graph.

use std::ops::Range;

use super::Builder;
use crate::{
    graph::{Buckets, NodeId, Op, Positions, WeightExpr},
    model::{
        error::{At, ModelError, Problem, suggest, words},
        expr::Expr,
        syntax::{self, Operator, Pattern, Table},
    },
    ops::{BatchInput, Bias, Epilogue, HeadView, PositionBias, Rotation, SoftCap},
    tensor::{SequenceEnd, Shape, Size, Symbol},
};

impl Builder<'_> {
    pub(super) fn operator(
        &mut self,
        name: &At<String>,
        op: &At<Operator>,
    ) -> Result<NodeId, ModelError> {
        let full = format!("{}{}", self.prefix, name.value);
        let place = &name.span;
        let values = self.values;
        let (op, operands) = match &op.value {
            Operator::Embedding {
                ids,
                first,
                table,
                rows,
                width,
                offset,
                skips,
            } => {
                let n = values.size(rows)?;
                let by = offset.as_ref().map_or(Ok(0), |o| values.offset(o))?;
                let of_tokens = match ids.value {
                    BatchInput::PreviousIds { .. } => BatchInput::TokenIds,
                    own => own,
                };
                self.ids_below(of_tokens, n, by, &offset.as_ref().unwrap_or(rows).span)?;
                if let Some(id) = skips {
                    self.skipped = Some(values.offset(id)?);
                }
                let dims = [n.into(), values.size(width)?.into()];
                let ids = match first {
                    Some(first) => &self.previous_ids(first, [n, by])?,
                    None => ids,
                };
                let ids = self.input(ids, place)?;
                let table = match table {
                    Table::Stored(table) => self.weight(table, &dims)?,
                    Table::Sinusoid(style) => self.sinusoid(*style, dims, (rows, width))?,
                };
                let operands = [ids, table];
                (Op::Embedding { offset: by }, operands.to_vec())
            }
            Operator::Linear {
                x,
                weight,
                bias,
                out,
                in_out,
                part,
            } => {
                let (x, out) = (self.value(x)?, values.size(out)?.into());
                let dims = [out, self.width(&full, "linear", x, place)?];
                let weight = &*self.untied(weight)?;
                let weight = match (in_out, part) {
                    (_, Some(part)) => {
                        let of = values.size(&part.of)?.into();
                        self.rows(weight, out, &[of, dims[1]], part)?
                    }
                    (true, None) => self.transposed(weight, dims)?,
                    (false, None) => self.weight(weight, &dims)?,
                };
                let epilogue = Epilogue::default();
                let Some(bias) = bias else {
                    return self.add(full, Op::Linear { epilogue }, &[x, weight], place);
                };
                let bias = &*self.untied(bias)?;
                let product = format!("{full}.product");
                let product = self.add(product, Op::Linear { epilogue }, &[x, weight], place)?;
                let bias = match part {
                    Some(part) => {
                        let of = values.size(&part.of)?.into();
                        self.rows(bias, out, &[of], part)?
                    }
                    None => self.weight(bias, &[out])?,
                };
                (Op::AddBias, vec![product, bias])
            }
            Operator::AddBias { x, bias } => {
                let x = self.value(x)?;
                let width = self.width(&full, "add_bias", x, place)?;
                (Op::AddBias, vec![x, self.weight(bias, &[width])?])
            }
            Operator::Add { a, b } => (Op::Add, vec![self.value(a)?, self.value(b)?]),
            Operator::Multiply { a, b } => (Op::Multiply, vec![self.value(a)?, self.value(b)?]),
            Operator::Scale { x, by } => {
                let by = values.real(by)?;
                (Op::Scale { by }, vec![self.value(x)?])
            }
            Operator::SoftCap { x, cap: bound } => {
                let found = values.real(bound)?;
                let cap = SoftCap::new(found).map_err(|_| {
                    let problem = Problem::OutOfRange {
                        what: "a soft cap".to_owned(),
                        found: found.to_string(),
                        expected: "a number from 1e-30 to 1e30".to_owned(),
                    };
                    values.about(problem, &[bound], "no such bound".to_owned())
                })?;
                (Op::SoftCap(cap), vec![self.value(x)?])
            }
            Operator::Activate { x, kind } => (Op::Activate(*kind), vec![self.value(x)?]),
            Operator::NamedActivation { x, kind } => {
                let found = values.activation(&kind.value)?.ok_or_else(|| {
                    let (what, name) = ("activation", kind.value.clone());
                    let problem = Problem::Undefined { what, name };
                    self.file.error(problem, &kind.span, "not defined")
                })?;
                (Op::Activate(found), vec![self.value(x)?])
            }
            Operator::LayerNorm {
                x,
                weight,
                bias,
                eps,
            } => {
                let x = self.value(x)?;
                let dims = [self.width(&full, "layer_norm", x, place)?];
                let bias = match bias {
                    Some(bias) => self.weight(bias, &dims)?,
                    None => {
                        let [n] = dims;
                        self.computed(format!("zeros.{n}"), WeightExpr::Zeros { n }, place)?
                    }
                };
                let operands = vec![x, self.weight(weight, &dims)?, bias];
                let eps = values.eps(eps)?;
                (Op::LayerNorm { eps }, operands)
            }
            Operator::RmsNorm {
                x,
                weight,
                eps,
                heads,
                plus_one,
            } => {
                let x = self.value(x)?;
                let heads = heads.as_ref().map_or(Ok(1), |heads| values.size(heads))?;
                let part = self.part_of(&full, "rms_norm", x, heads, place)?;
                let weight = match plus_one {
                    true => self.tensor(weight, &[part.into()], |name, dims| {
                        WeightExpr::PlusOne { name, dims }
                    })?,
                    false => self.weight(weight, &[part.into()])?,
                };
                let operands = vec![x, weight];
                let eps = values.eps(eps)?;
                let from = 0;
                (Op::RmsNorm { eps, heads, from }, operands)
            }
            Operator::Rotary {
                x,
                heads,
                width,
                part,
                theta,
                scaling,
                longest,
            } => {
                let heads = values.size(heads)?;
                let turning = values.rotary(width, part.as_ref(), theta, scaling)?;
                let longest = longest.as_ref().map(|n| values.size(n)).transpose()?;
                for positions in turning.positions.into_iter().chain(longest) {
                    self.ids_below(BatchInput::Positions, positions, 0, place)?;
                }
                let rotation = Rotation {
                    heads,
                    frequencies: turning.frequencies,
                    factor: turning.factor,
                };
                let x = self.value(x)?;
                let head = self.part_of(&full, "rotary", x, heads, place)?;
                let from = 0;
                let op = Op::Rotary {
                    rotation,
                    from,
                    head,
                };
                (op, vec![x])
            }
            Operator::Cache { x, heads, name } => {
                let (x, heads) = (self.value(x)?, values.size(heads)?);
                let width = self.width(&full, "cache", x, place)?;
                let mut names = values.names_of(name)?.into_iter();
                let (name, rest) = (names.next().unwrap_or_default(), names.next());
                // Shape inference rejects widths that do not divide evenly.
                let head = (width / u64::from(heads.max(1))) as u32;
                let own = (self.part, heads, head);
                if rest.is_some() || self.caches.insert(name.clone(), own).is_some() {
                    let problem = Problem::DefinedTwice {
                        what: "name of a cache",
                        name: name.clone(),
                    };
                    let error = self.file.error(problem, place, "again here");
                    return Err(error.help(
                        "each `cache` has a unique name; an index such as `{i}` may be missing in it",
                    ));
                }
                let op = Op::Cache {
                    name,
                    from: 0,
                    heads,
                    head,
                    format: None,
                    scaled: false,
                };
                (op, vec![x])
            }
            Operator::CrossCache { heads, width, name } => {
                let op = self.remembered(name, values.size(heads)?, values.size(width)?)?;
                let id = self.add(full, op, &[], place)?;
                self.graph.set_part(id, self.part);
                return Ok(id);
            }
            Operator::SplitHeads { x, heads } => {
                let heads = values.size(heads)?;
                (Op::SplitHeads { heads }, vec![self.value(x)?])
            }
            Operator::MergeHeads { x } => (Op::MergeHeads, vec![self.value(x)?]),
            Operator::Matmul { a, b, transpose_b } => {
                let operands = vec![self.value(a)?, self.value(b)?];
                let op = self
                    .matmul(&operands, *transpose_b)
                    .ok_or_else(|| self.no_product(&full, &operands, *transpose_b, place))?;
                (op, operands)
            }
            Operator::PositionTable {
                table,
                width,
                span,
                reach,
            } => {
                let positions = Positions {
                    span: values.size(span)?,
                    reach: reach.as_ref().map(|r| values.size(r)).transpose()?,
                };
                if let Some((found, expected)) = positions.problem() {
                    let problem = Problem::OutOfRange {
                        what: "a table of positions".to_owned(),
                        found,
                        expected,
                    };
                    return Err(self
                        .values
                        .about(problem, &[span], "no such table".to_owned()));
                }
                let dims = [2 * u64::from(positions.span), values.size(width)?.into()];
                let farthest = u64::from(positions.farthest().unwrap_or(0));
                let rows = [2 * farthest + 1, dims[1]];
                self.check_computed("a table of positions", &rows, span)?;
                return self.tensor(table, &dims, |name, _| WeightExpr::Positions {
                    name,
                    dims,
                    positions,
                });
            }
            Operator::RelativeScores {
                x,
                table,
                heads,
                of,
            } => {
                let (x, heads) = (self.value(x)?, values.size(heads)?);
                let head = self.part_of(&full, "relative_scores", x, heads, place)?;
                let of = *of;
                let op = Op::RelativeScores { heads, head, of };
                (op, vec![x, self.value(table)?])
            }
            Operator::Softmax {
                x,
                causal,
                window,
                bias,
            } => {
                let mut operands = vec![self.value(x)?];
                let window = window.as_ref().map(|w| values.offset(w)).transpose()?;
                let mut by = PositionBias {
                    window,
                    ..PositionBias::default()
                };
                if let Some(bias) = bias {
                    let (kind, operand) = self.bias(bias, operands[0], place)?;
                    by.bias = Some(kind);
                    operands.push(operand);
                }
                let (scale, causal) = (1.0, *causal);
                (Op::Softmax { scale, causal, by }, operands)
            }
            Operator::Columns { x, from, width } => {
                let (start, width) = (values.offset(from)?, values.size(width)?);
                (Op::SliceColumns { start, width }, vec![self.value(x)?])
            }
            // `same` adds no node, so the node keeps the name of the original value.
            Operator::Same { x } => return self.value(x),
            Operator::FirstToken { x } => (Op::FirstToken, vec![self.value(x)?]),
            Operator::MeanPool { x } => (Op::MeanPool, vec![self.value(x)?]),
            Operator::MaxPool { x } => (Op::MaxPool, vec![self.value(x)?]),
            Operator::WeightedPool { x, weights } => {
                (Op::WeightedPool(*weights), vec![self.value(x)?])
            }
            Operator::LastToken {
                x,
                end,
                highest_end,
                is,
            } => {
                if let Some(is) = is {
                    self.end = Some(SequenceEnd::Required(values.offset(is)?));
                }
                if let Some(end) = end {
                    let id = values.offset(end)?;
                    let highest = highest_end.as_ref().map(|h| values.offset(h)).transpose()?;
                    self.end = Some(match highest == Some(id) {
                        true => SequenceEnd::Highest,
                        false => SequenceEnd::Token(id),
                    });
                }
                (Op::LastToken, vec![self.value(x)?])
            }
            Operator::LogProbability { x } => {
                let x = self.value(x)?;
                // Token ids select columns of the logits, so they must be below the number of columns.
                let width = self.width(&full, "log_probability", x, place)?;
                let ids = u32::try_from(width).unwrap_or(u32::MAX);
                self.ids_below(BatchInput::TokenIds, ids, 0, place)?;
                (Op::LogProbability, vec![x])
            }
            Operator::Draw { mean, log_variance } => {
                (Op::Draw, vec![self.value(mean)?, self.value(log_variance)?])
            }
            Operator::Concat { of } => {
                let operands = of.iter().map(|x| self.value(x));
                let operands: Vec<NodeId> = operands.collect::<Result<_, _>>()?;
                let parts = operands.len() as u32;
                (Op::Concat { parts }, operands)
            }
            Operator::L2Normalize { x, eps } => {
                let eps = values.eps(eps)?;
                (Op::L2Normalize { eps }, vec![self.value(x)?])
            }
        };
        self.add(full, op, &operands, place)
    }

    /// Returns the input of previous ids. `first` is the id before the first token of a sequence, and must have a row in the table.
    fn previous_ids(
        &mut self,
        first: &At<Expr>,
        [rows, offset]: [u32; 2],
    ) -> Result<At<BatchInput>, ModelError> {
        let id = self.values.offset(first)?;
        let expected = match self.first {
            Some(other) if other != id => format!("{other}, as elsewhere in the model"),
            _ if u64::from(id) + u64::from(offset) >= u64::from(rows) => {
                format!("an id with one of the {rows} rows of the table")
            }
            _ => {
                self.first = Some(id);
                return Ok(At::new(
                    BatchInput::PreviousIds { first: id },
                    first.span.clone(),
                ));
            }
        };
        let problem = Problem::OutOfRange {
            what: "the id before the first token".to_owned(),
            found: id.to_string(),
            expected,
        };
        Err(self
            .values
            .about(problem, &[first], "not this id".to_owned()))
    }

    /// Limits sequences to `max_position_embeddings` of config.json. A position bias has no table that would limit them.
    fn limit_positions(&mut self, place: &Range<usize>) -> Result<(), ModelError> {
        match self.values.positions(place)? {
            Some(positions) => self.ids_below(BatchInput::Positions, positions, 0, place),
            None => Ok(()),
        }
    }

    /// Returns the bias of these scores, and the weight that it is computed from.
    fn bias(
        &mut self,
        bias: &syntax::PositionBias,
        scores: NodeId,
        place: &Range<usize>,
    ) -> Result<(Bias, NodeId), ModelError> {
        self.limit_positions(place)?;
        // If the operand is not scores, shape inference reports this, so the number of heads does not matter.
        let heads = self.graph.shape(scores).0.first();
        let heads = heads.and_then(Size::as_constant).unwrap_or(1);
        match bias {
            syntax::PositionBias::Alibi => {
                let name = format!("slopes.{heads}");
                let expr = WeightExpr::Slopes { heads };
                Ok((Bias::Slopes, self.computed(name, expr, place)?))
            }
            syntax::PositionBias::Relative {
                table,
                buckets,
                reach,
                bidirectional,
            } => {
                let all = Buckets {
                    n: self.values.size(buckets)?,
                    reach: self.values.size(reach)?,
                    bidirectional: *bidirectional,
                };
                if let Some(found) = all.problem() {
                    let problem = Problem::OutOfRange {
                        what: "a relative bias".to_owned(),
                        found: found.0,
                        expected: found.1,
                    };
                    let label = "no such buckets".to_owned();
                    return Err(self.values.about(problem, &[buckets, reach], label));
                }
                let dims = [all.n.into(), heads];
                let distances = [heads, 2 * u64::from(all.reach) + 1];
                self.check_computed("a table of biases", &distances, reach)?;
                let operand = self.tensor(table, &dims, |name, _| WeightExpr::RelativeBias {
                    name,
                    dims,
                    buckets: all,
                })?;
                Ok((Bias::Table { reach: all.reach }, operand))
            }
        }
    }

    /// Reads a cache that an earlier part appended to.
    fn remembered(&self, pattern: &At<Pattern>, heads: u32, width: u32) -> Result<Op, ModelError> {
        let name = self.values.names_of(pattern)?.into_iter().next();
        let name = name.unwrap_or_default();
        let Some(&(part, kept_heads, kept_head)) = self.caches.get(&name) else {
            let help = suggest(&name, self.caches.keys().map(String::as_str));
            let (what, name) = ("cache", name);
            let problem = Problem::Undefined { what, name };
            let label = "no part before this one adds to it";
            let error = self.file.error(problem, &pattern.span, label);
            return Err(error.help(help));
        };
        if part == self.part {
            let problem = Problem::SelfReference { name };
            let error = self
                .file
                .error(problem, &pattern.span, "this part adds to it");
            return Err(error.help("use the value of the `cache` with `x`; a `cache` without `x` reads what another part stored"));
        }
        let kept = u64::from(kept_heads) * u64::from(kept_head);
        if heads != kept_heads || u64::from(width) != kept {
            let problem = Problem::OutOfRange {
                what: format!("the shape of the cache `{name}`"),
                found: format!("{heads} heads in a width of {width}"),
                expected: format!("{kept_heads} heads in a width of {kept}, as it was added to"),
            };
            return Err(self.file.error(problem, &pattern.span, "read here"));
        }
        Ok(Op::CrossCache {
            name,
            heads,
            head: kept_head,
        })
    }

    /// Selects the matrix product of attention: `q · kᵀ`, or probabilities times `v`.
    fn matmul(&self, operands: &[NodeId], transpose_b: bool) -> Option<Op> {
        let &[a, b] = operands else { return None };
        let (a, b) = (self.graph.shape(a), self.graph.shape(b));
        let (kv_heads, head) = headed(b)?;
        let groups = |heads: u32| kv_heads > 0 && heads.is_multiple_of(kv_heads);
        let view = HeadView::HeadMajor;
        if transpose_b {
            let (heads, width) = headed(a)?;
            return (width == head && groups(heads)).then_some(Op::Scores {
                heads,
                kv_heads,
                head,
                q: view,
                k: view,
            });
        }
        let [heads, pairs] = a.0.as_slice() else {
            return None;
        };
        let heads = u32::try_from(heads.as_constant()?).ok()?;
        let counted = matches!(pairs.as_symbol(), Some(Symbol::Pairs | Symbol::SourcePairs));
        let fits = counted && groups(heads);
        fits.then_some(Op::Context {
            heads,
            kv_heads,
            head,
            v: view,
            out: view,
        })
    }

    fn no_product(
        &self,
        name: &str,
        operands: &[NodeId],
        transpose_b: bool,
        place: &Range<usize>,
    ) -> ModelError {
        let described: Vec<String> = operands
            .iter()
            .map(|&o| {
                format!(
                    "`{}` ({})",
                    self.graph.node(o).name,
                    words(self.graph.shape(o))
                )
            })
            .collect();
        let [a, b] = [0, 1].map(|i| described.get(i).cloned().unwrap_or_default());
        let problem = Problem::Matmul {
            name: name.to_owned(),
            a,
            b,
            transposed: if transpose_b { ", transposed" } else { "" },
        };
        self.file.error(problem, place, "computed here").help(
            "`matmul` takes two [heads, tokens, head] with `transpose_b: true` (scores), or [heads, pairs] and \
             [heads, tokens, head] (weighted sums), where the heads of the second divide those of the first; weights go \
             into `linear`",
        )
    }
}

/// Number of heads and head size of a shape `[heads, tokens, head]`.
fn headed(shape: &Shape) -> Option<(u32, u32)> {
    let [heads, tokens, head] = shape.0.as_slice() else {
        return None;
    };
    let size = |s: &Size| s.as_constant().and_then(|n| u32::try_from(n).ok());
    let counted = matches!(
        tokens.as_symbol(),
        Some(Symbol::Tokens | Symbol::SourceSlots)
    );
    counted.then_some((size(heads)?, size(head)?))
}
