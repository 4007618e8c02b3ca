//! Validation of tensor shapes and weight expressions.

use crate::{
    graph::{Bound, WeightExpr},
    kernels::MAX_ELEMENTS,
    ops::MAX_WIDTH,
    tensor::{Shape, Size, Symbol},
};

/// Max number of dimensions per tensor, terms per size, and factors per term. Lowered programs have at most three. The limit bounds the
/// time that multiplying sizes takes.
const MAX_PARTS: usize = 4;

pub(super) fn check_shape(shape: &Shape) -> Result<(), String> {
    if shape.rank() > MAX_PARTS {
        return Err(format!("has {} dimensions", shape.rank()));
    }
    shape.0.iter().try_for_each(|size| {
        check_size(size).map_err(|problem| format!("has a size that {problem}"))
    })
}

pub(super) fn check_size(size: &Size) -> Result<(), String> {
    let (n_terms, degree) = size.extent();
    if n_terms > MAX_PARTS || degree > MAX_PARTS {
        return Err(format!("has {n_terms} terms of up to {degree} factors"));
    }
    if size.depends_on(Symbol::Rows) {
        return Err("depends on the rows of a launch".to_owned());
    }
    Ok(())
}

/// Returns the dimensions of a weight, or an error if its attributes are inconsistent or its parts cannot be stacked.
pub(super) fn weight_dims(expr: &WeightExpr) -> Result<Vec<u64>, String> {
    let dims = match expr {
        WeightExpr::Stored { dims, .. } | WeightExpr::PlusOne { dims, .. } => dims.clone(),
        WeightExpr::OrderedColumns { dims, .. } => dims.to_vec(),
        WeightExpr::OrderedRows { dims, by_dims, .. } => match (dims.first(), by_dims[1]) {
            (Some(rows), columns @ 1..) if rows.is_multiple_of(columns) => dims.clone(),
            _ => return Err(format!("orders {dims:?} by the columns of {by_dims:?}")),
        },
        WeightExpr::Transposed { dims, .. } => match dims.as_slice() {
            &[rows, columns] => vec![columns, rows],
            _ => return Err("is transposed but not a matrix".to_owned()),
        },
        WeightExpr::Rows {
            dims,
            groups,
            from,
            rows,
            interleaved,
            ..
        } => {
            let all = dims.first().copied().unwrap_or(0);
            let is_whole = *groups > 0 && all.is_multiple_of(*groups);
            if interleaved > rows || !interleaved.is_multiple_of(2) {
                return Err(format!("has {interleaved} interleaved rows of {rows}"));
            }
            match from.checked_add(*rows) {
                Some(end) if is_whole && end <= all / groups && all <= MAX_ELEMENTS => expr.dims(),
                _ => {
                    return Err(format!(
                        "has {rows} rows from {from} on of each of {groups} parts of {all}"
                    ));
                }
            }
        }
        WeightExpr::Sinusoid { rows, width, .. } => match *width >= 4 && width % 2 == 0 {
            true => vec![*rows, *width],
            false => return Err(format!("has sines and cosines in {width} columns")),
        },
        WeightExpr::RelativeBias { dims, buckets, .. } => match buckets.problem() {
            None if dims[0] == u64::from(buckets.n) => expr.dims(),
            None => return Err(format!("has {} buckets in {} rows", buckets.n, dims[0])),
            Some((found, expected)) => return Err(format!("has {found}, expected {expected}")),
        },
        WeightExpr::Positions {
            dims, positions, ..
        } => match positions.problem() {
            None if dims[0] == 2 * u64::from(positions.span) => expr.dims(),
            None => return Err(format!("spans {} in {} rows", positions.span, dims[0])),
            Some((found, expected)) => return Err(format!("has {found}, expected {expected}")),
        },
        WeightExpr::Slopes { heads, scale } if scale.get().is_finite() => vec![*heads],
        WeightExpr::Slopes { scale, .. } => return Err(format!("is scaled by {}", scale.get())),
        WeightExpr::ResizedHeads { heads, from, to } => {
            let widths = [from, to].map(|width| heads.checked_mul(*width));
            match widths
                .iter()
                .all(|w| w.is_some_and(|w| (1..=u64::from(MAX_WIDTH)).contains(&w)))
            {
                true => expr.dims(),
                false => return Err(format!("has {heads} heads of {from} and {to} elements")),
            }
        }
        WeightExpr::Zeros { n } | WeightExpr::Ones { n } => vec![*n],
        WeightExpr::ConcatRows(parts) => stacked_dims(parts)?,
        WeightExpr::ProductScales { weight, input } => {
            check_bound(input)?;
            match stacked_dims(weight)?.as_slice() {
                &[rows, _] => vec![rows],
                other => return Err(format!("has scales of the rows of {other:?}")),
            }
        }
        WeightExpr::Scale(bound) => {
            check_bound(bound)?;
            vec![1]
        }
        WeightExpr::CacheScale { .. } => vec![1],
        WeightExpr::InterleavedColumns {
            dims, interleaved, ..
        } => match *interleaved <= dims[1] && interleaved.is_multiple_of(2) {
            true => dims.to_vec(),
            false => {
                return Err(format!(
                    "has {interleaved} interleaved columns of {}",
                    dims[1]
                ));
            }
        },
    };
    let elements = dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
    match elements {
        Some(n) if (1..=MAX_ELEMENTS).contains(&n) && dims.len() <= MAX_PARTS => Ok(dims),
        _ => Err(format!("is {dims:?}, at most {MAX_ELEMENTS} elements fit")),
    }
}

fn stacked_dims(parts: &[WeightExpr]) -> Result<Vec<u64>, String> {
    let mut stacked: Option<Vec<u64>> = None;
    for part in parts {
        let dims = weight_dims(part)?;
        let (Some(&rows), rest) = (dims.first(), dims.get(1..).unwrap_or_default()) else {
            return Err("has a part without rows".to_owned());
        };
        match &mut stacked {
            None => stacked = Some(dims),
            Some(sum) if sum[1..] == *rest => sum[0] = sum[0].saturating_add(rows),
            Some(_) => return Err("has parts of different widths".to_owned()),
        }
    }
    stacked.ok_or_else(|| "has no parts".to_owned())
}

/// Checks that the weights of a bound have the dimensions of a norm followed by a linear layer.
fn check_bound(bound: &Bound) -> Result<(), String> {
    let is = |parts: &[WeightExpr], expected: &[u64]| {
        parts.is_empty() || stacked_dims(parts).is_ok_and(|dims| dims == expected)
    };
    let norm = stacked_dims(&bound.gamma)?;
    let &[width] = norm.as_slice() else {
        return Err(format!("has a bound of a norm with a weight of {norm:?}"));
    };
    if !is(&bound.beta, &[width]) {
        return Err("has a bound of a norm whose bias has other dimensions".to_owned());
    }
    let Some(linear) = &bound.linear else {
        return Ok(());
    };
    let dims = stacked_dims(&linear.weight)?;
    let &[rows, columns] = dims.as_slice() else {
        return Err(format!(
            "has a bound of a linear layer with a weight of {dims:?}"
        ));
    };
    let end = linear.from.checked_add(linear.outputs);
    let fits = columns == width
        && is(&linear.bias, &[rows])
        && linear.outputs > 0
        && end.is_some_and(|end| end <= rows)
        && !(linear.gated && linear.outputs % 2 != 0);
    match fits {
        true => Ok(()),
        false => {
            Err("has a bound of a linear layer whose dimensions do not fit the norm".to_owned())
        }
    }
}
