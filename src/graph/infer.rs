//! Shape inference: the shape of a result from the shapes of its operands.

mod linear;
mod norm;

use linear::linear;
use norm::normed;

use super::{Graph, GraphError, NodeId, Op};
use crate::{
    ops::{self, AttentionProblem, HeadView, PositionBias},
    tensor::{Shape, Size, Symbol},
};

/// Maximum elements of a row.
pub const MAX_WIDTH: u64 = ops::MAX_WIDTH as u64;
/// Maximum number of rows of a table, such as an embedding table.
const MAX_ROWS: u64 = ops::MAX_ROWS as u64;
/// Maximum number of values that one operator concatenates.
pub const MAX_PARTS: usize = 16;

/// Number of elements of a head that fused attention loads with one vector load. Head sizes must be multiples of this number.
pub const HEAD_STEP: u32 = 8;
/// Maximum elements of a head in fused attention, which keeps a row of the result in registers.
pub const MAX_HEAD: u32 = 256;
/// Maximum number of embedding tables that one operator sums. No encoder has more, and the kernel takes two pointers for each.
pub const MAX_TABLES: usize = 4;

impl Graph {
    pub(super) fn infer(
        &self,
        name: &str,
        op: &Op,
        operands: &[NodeId],
    ) -> Result<Shape, GraphError> {
        if operands.len() != op.arity() {
            return Err(GraphError::Arity {
                node: name.to_owned(),
                op: op.name(),
                expected: op.arity(),
                found: operands.len(),
            });
        }
        let shapes: Vec<&Shape> = operands.iter().map(|&o| self.shape(o)).collect();
        let of_log_probabilities = |&&o: &&NodeId| *self.op(o) == Op::LogProbability;
        let result = match operands.iter().find(of_log_probabilities) {
            Some(_) => Err(
                "log-probabilities are stored in f32 in every program, so no operator can read them; make them an output"
                    .to_owned(),
            ),
            None => result(op, &shapes),
        };
        result.map_err(|problem| GraphError::Shape {
            node: name.to_owned(),
            op: op.name(),
            problem,
            operands: operands
                .iter()
                .map(|&o| format!("`{}` {}", self.node(o).name, self.shape(o)))
                .collect::<Vec<_>>()
                .join(", "),
        })
    }
}

fn result(op: &Op, of: &[&Shape]) -> Result<Shape, String> {
    let tokens = || Size::from(Symbol::Tokens);
    let constant = |v: u32| Size::constant(v.into());
    match op {
        Op::Input(_) => Ok(Shape::new([tokens()])),
        Op::Weight(expr) => Ok(Shape::fixed(&expr.dims())),
        Op::Quantize(_) => match of[0].0.as_slice() {
            [_, _] => Ok(of[0].clone()),
            _ => Err(format!("expected a matrix, found {}", of[0])),
        },
        Op::Embedding { .. } => {
            ids(of[0])?;
            Ok(Shape(vec![tokens(), table_width(of[1])?.into()]))
        }
        Op::Linear { epilogue } => linear(*epilogue, of[0], of[1], &of[2..]),
        Op::ScaledLinear { epilogue } => {
            let out = linear(*epilogue, of[0], of[1], &of[3..])?;
            vector(of[2], &out.0[1], "scale")?;
            Ok(out)
        }
        Op::ToE4m3 => {
            matrix(of[0])?;
            vector(of[1], &Size::constant(1), "scale of the result")?;
            Ok(of[0].clone())
        }
        Op::Add | Op::Multiply => {
            pointwise(of[0])?;
            if of[0] != of[1] {
                return Err(format!(
                    "both sides must have the same shape, found {} and {}",
                    of[0], of[1]
                ));
            }
            Ok(of[0].clone())
        }
        Op::Activate(_) | Op::Scale { .. } | Op::SoftCap(_) => {
            pointwise(of[0]).map(|()| of[0].clone())
        }
        Op::RmsNorm {
            heads,
            from,
            centered,
            ..
        } => {
            let width = normed(of, *heads, *from, *centered)?;
            Ok(Shape(vec![of[0].0[0].clone(), width.into()]))
        }
        Op::Rotary {
            rotation,
            from,
            head,
        } => {
            let width = columns(*from, rotation.heads, *head, per_token(of[0])?)?;
            let turned = 2 * rotation.frequencies.len() as u64;
            match (1..=u64::from(*head)).contains(&turned) {
                true => Ok(Shape(vec![tokens(), width.into()])),
                false => Err(format!(
                    "the rotation applies to {turned} columns, but a head has {head}; expected 1 to {head}"
                )),
            }
        }
        Op::Cache {
            from, heads, head, ..
        } => {
            of.get(1)
                .map_or(Ok(()), |scale| vector(scale, &Size::constant(1), "scale"))?;
            let rows = of[0].0.first().cloned().unwrap_or_else(tokens);
            if rows != tokens() && rows != Symbol::Batch.into() {
                return Err(format!(
                    "expected rows of tokens or of sequences, found {}",
                    of[0]
                ));
            }
            let width = columns(*from, *heads, *head, matrix(of[0])?)?;
            Ok(Shape(vec![rows, width.into()]))
        }
        Op::CrossCache { heads, head, .. } => {
            let width = Size::constant(u64::from(*heads) * u64::from(*head));
            constant_width(&width)?;
            Ok(Shape(vec![Symbol::SourceSlots.into(), width]))
        }
        Op::SplitHeads { heads } => {
            let rows = key_rows(of[0], 0)?;
            let head = Size::constant(part_of(matrix_of(of[0], rows)?, *heads)?);
            Ok(Shape(vec![constant(*heads), rows.into(), head]))
        }
        Op::MergeHeads => {
            let [heads, head] = heads_apart(of[0])
                .filter(|_| of[0].0[1] == tokens())
                .ok_or_else(|| format!("expected [heads, tokens, head], found {}", of[0]))?;
            Ok(Shape(vec![tokens(), (heads * head).into()]))
        }
        Op::Scores {
            heads,
            kv_heads,
            head,
            q,
            k,
        } => {
            groups(*heads, *kv_heads)?;
            headed(of[0], *heads, *head, *q, "q", Symbol::Tokens)?;
            let rows = rows_of_keys(of[1], *k)?;
            headed(of[1], *kv_heads, *head, *k, "k", rows)?;
            Ok(Shape(vec![constant(*heads), pairs_with(rows).into()]))
        }
        Op::RelativeScores { heads, head, .. } => {
            let width = Size::from(u64::from(*heads) * u64::from(*head));
            let found = Size::constant(per_token(of[0])?);
            if found != width {
                return Err(format!("{heads} heads of {head} are not {found} columns"));
            }
            let [rows, columns] = dims(of[1], "a table is a matrix [rows, width]")?;
            match rows.as_constant() {
                Some(n @ 1..=MAX_ROWS) if n % 2 == 1 && columns == width => {}
                _ => {
                    return Err(format!(
                        "the table must have a row for each distance and {width} columns, found {}",
                        of[1]
                    ));
                }
            }
            Ok(Shape(vec![constant(*heads), Symbol::Pairs.into()]))
        }
        Op::Softmax { scale, causal, by } => {
            positive(*scale)?;
            if let Some(heads) = of[0].0.first().and_then(Size::as_constant) {
                distances(*by, heads, of[0].0.last(), &of[1..])?;
            }
            if *causal && of[0].0.last() == Some(&Symbol::SourcePairs.into()) {
                return Err(
                    "no position of another stream is before or after a query; leave `causal` out"
                        .to_owned(),
                );
            }
            match is_scores(of[0]) {
                true => Ok(of[0].clone()),
                false => Err(format!("expected scores [heads, pairs], found {}", of[0])),
            }
        }
        Op::Context {
            heads,
            kv_heads,
            head,
            v,
            out,
        } => {
            groups(*heads, *kv_heads)?;
            let rows = rows_of_keys(of[1], *v)?;
            let pairs = pairs_with(rows);
            if *of[0] != Shape(vec![constant(*heads), pairs.into()]) {
                return Err(format!("expected probabilities [{heads}, {pairs}]"));
            }
            headed(of[1], *kv_heads, *head, *v, "v", rows)?;
            let width = heads * head;
            match *out {
                HeadView::HeadMajor => Ok(Shape(vec![constant(*heads), tokens(), constant(*head)])),
                HeadView::TokenMajor { offset, stride } if (offset, stride) == (0, width) => {
                    Ok(Shape(vec![tokens(), constant(width)]))
                }
                HeadView::TokenMajor { .. } => Err(format!(
                    "the result must have rows of {width} and start at column 0"
                )),
            }
        }
        Op::AfterPrompt => {
            per_token(of[0])?;
            Ok(of[0].clone())
        }
        Op::FirstToken
        | Op::LastToken
        | Op::MeanPool
        | Op::MaxPool
        | Op::WeightedPool(_)
        | Op::MeanPoolNormalize { .. } => {
            let width = per_token(of[0])?;
            Ok(Shape(vec![Symbol::Batch.into(), Size::constant(width)]))
        }
        Op::LogProbability => {
            per_token(of[0])?;
            Ok(Shape(vec![tokens(), Size::constant(1)]))
        }
        Op::Draw => {
            let expected = |shape: &Shape| match shape.0.as_slice() {
                [rows, _] if *rows == Symbol::Batch.into() => matrix(shape).map(|_| ()),
                _ => Err(format!("expected [batch, width], found {shape}")),
            };
            expected(of[0])?;
            match of[0] == of[1] {
                true => Ok(of[0].clone()),
                false => Err(format!(
                    "mean and log-variance must have the same shape, found {} and {}",
                    of[0], of[1]
                )),
            }
        }
        Op::Concat { .. } => {
            if !(2..=MAX_PARTS).contains(&of.len()) {
                let n = of.len();
                return Err(format!("expected 2 to {MAX_PARTS} parts, found {n}"));
            }
            let mut width = 0;
            for part in of {
                width += matrix(part)?;
                if part.0[0] != of[0].0[0] {
                    return Err(format!(
                        "all parts must have the same number of rows, found {} and {}",
                        of[0].0[0], part.0[0]
                    ));
                }
            }
            let width = Size::constant(width);
            constant_width(&width)?;
            Ok(Shape(vec![of[0].0[0].clone(), width]))
        }
        Op::SliceColumns { start, width } => {
            let from = matrix(of[0])?;
            let end = u64::from(*start) + u64::from(*width);
            if *width == 0 || end > from {
                return Err(format!("columns {start}..{end} exceed the width of {from}"));
            }
            Ok(Shape(vec![of[0].0[0].clone(), constant(*width)]))
        }
        Op::Gate(_) => {
            let width = matrix(of[0])?;
            match width.is_multiple_of(2) {
                true => Ok(Shape(vec![of[0].0[0].clone(), (width / 2).into()])),
                false => Err(format!(
                    "a width of {width} cannot be split in halves; expected an even width"
                )),
            }
        }
        Op::EmbeddingLayerNorm { offsets, .. } => {
            let n = offsets.len();
            if !(1..=MAX_TABLES).contains(&n) {
                return Err(format!("expected 1 to {MAX_TABLES} tables, found {n}"));
            }
            let width = table_width(of[n])?;
            of[..n].iter().try_for_each(|of| ids(of))?;
            for table in &of[n..2 * n] {
                if table_width(table)? != width {
                    return Err("all tables must have the same width".to_owned());
                }
            }
            let width = Size::constant(width);
            vector(of[2 * n], &width, "weight")?;
            vector(of[2 * n + 1], &width, "bias")?;
            Ok(Shape(vec![tokens(), width]))
        }
        Op::Attention(attending) => {
            let &AttentionProblem {
                heads,
                kv_heads,
                head,
                scale,
                by,
                ..
            } = attending;
            positive(scale)?;
            let pairs = Size::from(pairs_with(rows_of_keys(of[1], attending.k)?));
            distances(by, heads.into(), Some(&pairs), &of[3..])?;
            groups(heads, kv_heads)?;
            if head == 0 || head > MAX_HEAD || !head.is_multiple_of(HEAD_STEP) {
                return Err(format!(
                    "a head has {head} elements; expected a multiple of {HEAD_STEP} up to {MAX_HEAD}"
                ));
            }
            for (shape, (name, view, heads)) in of.iter().zip(attending.operands()) {
                let rows = match name {
                    "q" => Symbol::Tokens,
                    _ => rows_of_keys(of[1], attending.k)?,
                };
                if rows == Symbol::SourceSlots && attending.causal {
                    return Err(
                        "attention to another stream cannot be causal; leave `causal` out"
                            .to_owned(),
                    );
                }
                headed(shape, heads, head, view, name, rows)?;
                if !view.is_aligned(head, HEAD_STEP) {
                    return Err(format!(
                        "the first column and the row width of {name} must be multiples of {HEAD_STEP}"
                    ));
                }
            }
            Ok(Shape(vec![tokens(), constant(heads * head)]))
        }
        _ => of_rows(op, of),
    }
}

/// Returns the shape of the result of an operator for which [`result`] has no rule. The result has the shape of `x`, which is a matrix.
/// Each other operand is a vector with an element for each column of `x`, or a residual with the shape of `x`.
fn of_rows(op: &Op, of: &[&Shape]) -> Result<Shape, String> {
    let width = matrix(of[0])?.into();
    for (slot, &shape) in op.slots().iter().zip(of) {
        match &**slot {
            "x" => {}
            "residual" if shape != of[0] => {
                return Err(format!("the residual must be {}, found {shape}", of[0]));
            }
            "residual" => {}
            "gamma" => vector(shape, &width, "weight")?,
            "bias" | "beta" => vector(shape, &width, "bias")?,
            other => return Err(format!("no rule defines the shape of `{other}`")),
        }
    }
    Ok(of[0].clone())
}

/// Returns the width of each of `heads` equal parts of a row.
fn part_of(width: u64, heads: u32) -> Result<u64, String> {
    match heads > 0 && width.is_multiple_of(u64::from(heads)) {
        true => Ok(width / u64::from(heads)),
        false => Err(format!(
            "a width of {width} does not divide into {heads} heads"
        )),
    }
}

/// Returns the total width of `heads` adjacent heads. They start at column `from` of rows with `of` columns.
fn columns(from: u32, heads: u32, head: u32, of: u64) -> Result<u64, String> {
    let width = u64::from(heads) * u64::from(head);
    let end = u64::from(from).saturating_add(width);
    match width > 0 && end <= of {
        true => Ok(width),
        false => Err(format!("columns {from}..{end} exceed the width of {of}")),
    }
}

/// Checks that the query heads divide into equal groups, one for each key head.
fn groups(heads: u32, kv_heads: u32) -> Result<(), String> {
    match kv_heads > 0 && heads.is_multiple_of(kv_heads) {
        true => Ok(()),
        false => Err(format!(
            "{heads} query heads do not divide into groups for {kv_heads} key heads"
        )),
    }
}

fn dims<const N: usize>(shape: &Shape, expected: &str) -> Result<[Size; N], String> {
    <[Size; N]>::try_from(shape.0.clone()).map_err(|_| format!("{expected}, found {shape}"))
}

/// Returns the width of a matrix whose rows belong to tokens or sequences, or are rows of a weight.
fn matrix(shape: &Shape) -> Result<u64, String> {
    match shape.0.as_slice() {
        [rows, width] if is_rows(rows) && width.as_constant().is_some() => constant_width(width),
        _ => Err(format!(
            "expected [tokens, width] or [batch, width], found {shape}"
        )),
    }
}

/// Checks that an elementwise kernel supports the shape: rows, separate heads or scores.
fn pointwise(shape: &Shape) -> Result<(), String> {
    match is_scores(shape) || heads_apart(shape).is_some() {
        true => Ok(()),
        false => matrix(shape).map(|_| ()),
    }
}

/// Returns whether `rows` is a valid number of rows: tokens, sequences or a constant.
fn is_rows(rows: &Size) -> bool {
    match rows.as_symbol() {
        Some(symbol) => matches!(symbol, Symbol::Tokens | Symbol::Batch),
        None => rows.as_constant().is_some(),
    }
}

/// Returns whether the shape is `[heads, pairs]`.
fn is_scores(shape: &Shape) -> bool {
    match shape.0.as_slice() {
        [heads, pairs] => {
            let counted = matches!(pairs.as_symbol(), Some(Symbol::Pairs | Symbol::SourcePairs));
            heads.as_constant().is_some() && counted
        }
        _ => false,
    }
}

/// Returns the number of heads and the head size of `[heads, tokens, head]`.
fn heads_apart(shape: &Shape) -> Option<[u64; 2]> {
    match shape.0.as_slice() {
        [heads, t, head] if is_rows_of_keys(t) => Some([heads.as_constant()?, head.as_constant()?]),
        _ => None,
    }
}

fn constant_width(width: &Size) -> Result<u64, String> {
    match width.as_constant() {
        Some(width) if (1..=MAX_WIDTH).contains(&width) => Ok(width),
        _ => Err(format!(
            "a row has {width} elements; expected 1 to {MAX_WIDTH}"
        )),
    }
}

fn ids(shape: &Shape) -> Result<(), String> {
    match *shape == Shape::new([Symbol::Tokens.into()]) {
        true => Ok(()),
        false => Err(format!("expected ids [tokens], found {shape}")),
    }
}

fn table_width(shape: &Shape) -> Result<u64, String> {
    let [rows, width] = dims(shape, "a table is a matrix [rows, width]")?;
    match rows.as_constant() {
        Some(1..=MAX_ROWS) => constant_width(&width),
        _ => Err(format!("a table has {rows} rows; expected 1 to {MAX_ROWS}")),
    }
}

/// Checks the factor that scales scores. The factor must be positive because the softmax takes the maximum before scaling.
fn positive(scale: f32) -> Result<(), String> {
    match scale.is_finite() && scale > 0.0 {
        true => Ok(()),
        false => Err(format!(
            "scores are scaled by {scale}; expected a number above 0"
        )),
    }
}

/// Checks the window, the bias and the cap of attention scores with `heads` heads. Also checks the shapes of `operands`: the bias and the
/// sinks, if there are any.
fn distances(
    by: PositionBias,
    heads: u64,
    pairs: Option<&Size>,
    operands: &[&Shape],
) -> Result<(), String> {
    by.check().map_err(|problem| problem.to_string())?;
    if !by.keeps_scores() && pairs == Some(&Symbol::SourcePairs.into()) {
        return Err(
            match by.cap {
                Some(_) => "scores of another stream have no soft cap; leave it out",
                None => "positions of another stream have no distance to a query; leave `window` and `bias` out",
            }
            .to_owned(),
        );
    }
    let heads = u32::try_from(heads).map_err(|_| format!("{heads} heads are too many"))?;
    let bias = by.bias.map(|kind| ("bias", kind.dims(heads)));
    let sinks = by.sinks.then(|| ("sinks", vec![heads.into()]));
    let expected = bias.into_iter().chain(sinks);
    for ((name, dims), found) in expected.zip(operands) {
        let expected = Shape::fixed(&dims);
        if **found != expected {
            return Err(format!("the {name} must be {expected}, found {found}"));
        }
    }
    Ok(())
}

fn vector(shape: &Shape, width: &Size, what: &str) -> Result<(), String> {
    let [found] = dims(shape, &format!("the {what} is a vector"))?;
    if found != *width {
        return Err(format!("the {what} has {found} elements, expected {width}"));
    }
    Ok(())
}

fn per_token(shape: &Shape) -> Result<u64, String> {
    match shape.0.as_slice() {
        [t, width] if *t == Size::from(Symbol::Tokens) => constant_width(width),
        _ => Err(format!("expected [tokens, width], found {shape}")),
    }
}

/// Returns whether `rows` can be the number of rows of keys and values: the tokens of the batch, or the tokens of source texts (in a
/// decoder).
fn is_rows_of_keys(rows: &Size) -> bool {
    matches!(rows.as_symbol(), Some(Symbol::Tokens | Symbol::SourceSlots))
}

/// Returns the symbol for the number of rows of keys or values: dimension `at` of `shape`.
fn key_rows(shape: &Shape, at: usize) -> Result<Symbol, String> {
    let rows = shape.0.get(at).filter(|rows| is_rows_of_keys(rows));
    let symbol = rows.and_then(Size::as_symbol);
    symbol.ok_or_else(|| format!("expected rows of tokens, found {shape}"))
}

/// Like [`key_rows`], for either layout of the heads.
fn rows_of_keys(shape: &Shape, view: HeadView) -> Result<Symbol, String> {
    key_rows(shape, usize::from(view == HeadView::HeadMajor))
}

/// Returns the symbol for the number of (query, key) pairs, where `rows` is the symbol for the number of keys.
fn pairs_with(rows: Symbol) -> Symbol {
    match rows {
        Symbol::SourceSlots => Symbol::SourcePairs,
        _ => Symbol::Pairs,
    }
}

/// Returns the width of a matrix whose number of rows is `rows`.
fn matrix_of(shape: &Shape, rows: Symbol) -> Result<u64, String> {
    match shape.0.as_slice() {
        [t, width] if *t == Size::from(rows) => constant_width(width),
        _ => Err(format!("expected [{rows}, width], found {shape}")),
    }
}

fn headed(
    shape: &Shape,
    heads: u32,
    head: u32,
    view: HeadView,
    name: &str,
    rows: Symbol,
) -> Result<(), String> {
    match view {
        HeadView::HeadMajor => {
            let expected = Shape(vec![
                Size::constant(heads.into()),
                rows.into(),
                Size::constant(head.into()),
            ]);
            if *shape != expected {
                return Err(format!("{name} must be {expected}"));
            }
        }
        HeadView::TokenMajor { offset, stride } => {
            let end = u64::from(offset) + u64::from(heads) * u64::from(head);
            if matrix_of(shape, rows)? != u64::from(stride) || end > u64::from(stride) {
                return Err(format!(
                    "{name} reads columns {offset}..{end} of rows of {stride}"
                ));
            }
        }
    }
    Ok(())
}
