//! Shapes of results from the shapes of operands.

use super::{Graph, GraphError, NodeId, Op};
use crate::{
    kernels::attention::HeadView,
    tensor::{Shape, Size, Symbol},
};

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
        result(op, &shapes).map_err(|problem| GraphError::Shape {
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
        Op::Embedding { .. } => Ok(Shape(vec![of[0].0[0].clone(), table_width(of[1])?])),
        Op::Linear { epilogue } => {
            let k = matrix(of[0])?;
            let [n, weight_k] = dims(of[1], "the weight is a matrix [out, in]")?;
            if k != weight_k {
                return Err(format!(
                    "the input is {k} wide, but the weight takes {weight_k}"
                ));
            }
            if epilogue.bias {
                vector(of[2], &n, "bias")?;
            }
            Ok(Shape(vec![of[0].0[0].clone(), n]))
        }
        Op::AddBias => {
            vector(of[1], &matrix(of[0])?, "bias")?;
            Ok(of[0].clone())
        }
        Op::Add => {
            if of[0] != of[1] {
                return Err(format!(
                    "both sides must have one shape, found {} and {}",
                    of[0], of[1]
                ));
            }
            Ok(of[0].clone())
        }
        Op::Activate(_) | Op::Scale { .. } => Ok(of[0].clone()),
        Op::L2Normalize { .. } => matrix(of[0]).map(|_| of[0].clone()),
        Op::LayerNorm { .. } => {
            let width = matrix(of[0])?;
            vector(of[1], &width, "weight")?;
            vector(of[2], &width, "bias")?;
            Ok(of[0].clone())
        }
        Op::SplitHeads { heads } => {
            let width = per_token(of[0])?;
            if *heads == 0 || width % u64::from(*heads) != 0 {
                return Err(format!(
                    "a width of {width} does not divide into {heads} heads"
                ));
            }
            let head = Size::constant(width / u64::from(*heads));
            Ok(Shape(vec![constant(*heads), tokens(), head]))
        }
        Op::MergeHeads => match of[0].0.as_slice() {
            [heads, t, head] if *t == tokens() => Ok(Shape(vec![tokens(), heads * head])),
            _ => Err("expected [heads, tokens, head]".to_owned()),
        },
        Op::Scores { heads, head, q, k } => {
            headed(of[0], *heads, *head, *q, "q")?;
            headed(of[1], *heads, *head, *k, "k")?;
            Ok(Shape(vec![constant(*heads), Symbol::Pairs.into()]))
        }
        Op::Softmax { .. } => match of[0].0.as_slice() {
            [_, pairs] if *pairs == Size::from(Symbol::Pairs) => Ok(of[0].clone()),
            _ => Err("expected scores [heads, pairs]".to_owned()),
        },
        Op::Context {
            heads,
            head,
            v,
            out,
        } => {
            if *of[0] != Shape(vec![constant(*heads), Symbol::Pairs.into()]) {
                return Err(format!("expected probabilities [{heads}, pairs]"));
            }
            headed(of[1], *heads, *head, *v, "v")?;
            Ok(match out {
                HeadView::HeadMajor => Shape(vec![constant(*heads), tokens(), constant(*head)]),
                HeadView::TokenMajor { .. } => Shape(vec![tokens(), constant(heads * head)]),
            })
        }
        Op::FirstToken | Op::MeanPool | Op::MeanPoolNormalize { .. } => {
            let width = per_token(of[0])?;
            Ok(Shape(vec![Symbol::Batch.into(), Size::constant(width)]))
        }
        Op::SliceColumns { start, width } => {
            let from = matrix(of[0])?;
            if from
                .as_constant()
                .is_none_or(|from| u64::from(start + width) > from)
            {
                return Err(format!(
                    "columns {start}..{} are not inside {from}",
                    start + width
                ));
            }
            Ok(Shape(vec![of[0].0[0].clone(), constant(*width)]))
        }
        Op::EmbeddingLayerNorm { offsets, .. } => {
            let n = offsets.len();
            let width = table_width(of.get(n).ok_or("expected at least one table")?)?;
            for table in &of[n..2 * n] {
                if table_width(table)? != width {
                    return Err("all tables must have one width".to_owned());
                }
            }
            vector(of[2 * n], &width, "weight")?;
            vector(of[2 * n + 1], &width, "bias")?;
            Ok(Shape(vec![of[0].0[0].clone(), width]))
        }
        Op::BiasResidualLayerNorm { bias, .. } => {
            let width = matrix(of[0])?;
            let rest = if *bias {
                vector(of[1], &width, "bias")?;
                &of[2..]
            } else {
                &of[1..]
            };
            if rest[0] != of[0] {
                return Err(format!("the residual must be {}, found {}", of[0], rest[0]));
            }
            vector(rest[1], &width, "weight")?;
            vector(rest[2], &width, "bias")?;
            Ok(of[0].clone())
        }
        Op::Attention {
            heads,
            head,
            q,
            k,
            v,
            ..
        } => {
            for (shape, view, name) in [(of[0], q, "q"), (of[1], k, "k"), (of[2], v, "v")] {
                headed(shape, *heads, *head, *view, name)?;
            }
            Ok(Shape(vec![tokens(), constant(heads * head)]))
        }
    }
}

fn dims<const N: usize>(shape: &Shape, expected: &str) -> Result<[Size; N], String> {
    <[Size; N]>::try_from(shape.0.clone()).map_err(|_| format!("{expected}, found {shape}"))
}

/// The last dimension of a `[rows, width]` tensor.
fn matrix(shape: &Shape) -> Result<Size, String> {
    let [_, width] = dims(shape, "expected [rows, width]")?;
    Ok(width)
}

fn table_width(shape: &Shape) -> Result<Size, String> {
    let [_, width] = dims(shape, "a table is a matrix [rows, width]")?;
    Ok(width)
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
        [t, width] if *t == Size::from(Symbol::Tokens) => width
            .as_constant()
            .ok_or_else(|| format!("the width {width} is not constant")),
        _ => Err("expected [tokens, width]".to_owned()),
    }
}

fn headed(shape: &Shape, heads: u32, head: u32, view: HeadView, name: &str) -> Result<(), String> {
    match view {
        HeadView::HeadMajor => {
            let expected = Shape(vec![
                Size::constant(heads.into()),
                Symbol::Tokens.into(),
                Size::constant(head.into()),
            ]);
            if *shape != expected {
                return Err(format!("{name} must be {expected}"));
            }
        }
        HeadView::TokenMajor { offset, stride } => {
            if per_token(shape)? != u64::from(stride) || offset + heads * head > stride {
                return Err(format!(
                    "{name} reads columns {offset}..{} of rows of {stride}",
                    offset + heads * head
                ));
            }
        }
    }
    Ok(())
}
