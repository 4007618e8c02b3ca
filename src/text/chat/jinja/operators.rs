//! Operators of Python on values.

use std::rc::Rc;

use super::{
    ast::Operator,
    error::{Error, Result},
    machine::Machine,
    meter::{Builder, Items, Meter},
    show::escape,
    value::{Seq, SeqKind, Text, Value},
};

fn unsupported(operator: Operator, left: &Value, right: &Value) -> Box<Error> {
    Error::failed(format!(
        "unsupported operand type(s) for {}: '{}' and '{}'",
        operator.symbol(),
        left.type_name(),
        right.type_name()
    ))
}

/// Returns the error for integers that exceed the supported range; Python's are unlimited.
fn large() -> Box<Error> {
    Error::failed("a whole number has more than 127 bits, which is not supported")
}

impl Machine<'_> {
    pub fn binary(&mut self, operator: Operator, left: &Value, right: &Value) -> Result<Value> {
        let meter = Rc::clone(&self.meter);
        left.defined()?;
        match (operator, left, right) {
            // The right operand of `%` on a string may be any value.
            (Operator::Modulo, Value::Str(text), right) => return self.percent(text, right),
            (_, _, right) => right.defined()?,
        };
        let failed = || unsupported(operator, left, right);
        match operator {
            Operator::Add => match (left, right) {
                (Value::Str(a), Value::Str(b)) => join(&[a, b], &meter),
                (Value::Str(a), Value::Dict(dict)) if dict.source.is_some() => {
                    join(&[a, &Value::Dict(Rc::clone(dict)).to_text(&meter)?], &meter)
                }
                (Value::Dict(dict), Value::Str(b)) if dict.source.is_some() => {
                    join(&[&Value::Dict(Rc::clone(dict)).to_text(&meter)?, b], &meter)
                }
                (Value::Str(_), other) => Err(Error::failed(format!(
                    "can only concatenate str (not \"{}\") to str",
                    other.type_name()
                ))),
                (Value::Seq(a), Value::Seq(b)) => match (plain_kind(a), plain_kind(b)) {
                    (Some(kind), Some(other)) if kind == other => {
                        let mut items = Items::new(&meter)?;
                        items.extend(a.items.iter().chain(&b.items).cloned())?;
                        Value::seq(kind, items)
                    }
                    _ => Err(failed()),
                },
                _ => arithmetic(operator, left, right),
            },
            Operator::Multiply => match (left, right) {
                (Value::Str(text), n) | (n, Value::Str(text)) => {
                    let n = times(n).ok_or_else(failed)?;
                    let mut builder = Builder::new(&meter)?;
                    builder.repeat(text, n)?;
                    Ok(match text.is_markup {
                        true => Value::markup(builder),
                        false => Value::built(builder),
                    })
                }
                (Value::Seq(seq), n) | (n, Value::Seq(seq)) => {
                    let kind = plain_kind(seq).ok_or_else(failed)?;
                    let n = if seq.items.is_empty() {
                        0
                    } else {
                        times(n).ok_or_else(failed)?
                    };
                    let mut items = Items::new(&meter)?;
                    for _ in 0..n {
                        items.extend(seq.items.iter().cloned())?;
                    }
                    Value::seq(kind, items)
                }
                _ => arithmetic(operator, left, right),
            },
            _ => arithmetic(operator, left, right),
        }
    }
}

/// Returns the kind of a list or tuple. Only sequences of equal kind can be added.
fn plain_kind(seq: &Seq) -> Option<SeqKind> {
    match seq.kind {
        SeqKind::List => Some(SeqKind::List),
        SeqKind::Tuple | SeqKind::Group => Some(SeqKind::Tuple),
        _ => None,
    }
}

/// Returns how often a text or list is repeated; 0 for negative numbers.
fn times(n: &Value) -> Option<usize> {
    n.int()
        .map(|n| usize::try_from(n.max(0)).unwrap_or(usize::MAX))
}

/// Concatenates texts. If one is markup, the others are escaped.
fn join(texts: &[&Rc<Text>], meter: &Rc<Meter>) -> Result<Value> {
    let is_markup = texts.iter().any(|text| text.is_markup);
    let mut builder = Builder::new(meter)?;
    for text in texts {
        match is_markup && !text.is_markup {
            true => escape(text, &mut builder)?,
            false => builder.push_str(text)?,
        }
    }
    Ok(match is_markup {
        true => Value::markup(builder),
        false => Value::built(builder),
    })
}

/// Implements `~`, the concatenation of values as text. Without autoescape, markup is plain text.
pub fn concat(values: &[Value], meter: &Rc<Meter>) -> Result<Value> {
    let mut builder = Builder::new(meter)?;
    for value in values {
        value.write(&mut builder, meter)?;
    }
    Ok(Value::built(builder))
}

fn arithmetic(operator: Operator, left: &Value, right: &Value) -> Result<Value> {
    if let (Some(a), Some(b)) = (left.int(), right.int()) {
        return whole(operator, a, b);
    }
    let (Some(a), Some(b)) = (left.number(), right.number()) else {
        return Err(unsupported(operator, left, right));
    };
    let is_division = matches!(
        operator,
        Operator::Divide | Operator::FloorDivide | Operator::Modulo
    );
    if is_division && b == 0.0 {
        return Err(Error::failed("division by zero"));
    }
    Ok(Value::Float(match operator {
        Operator::Add => a + b,
        Operator::Subtract => a - b,
        Operator::Multiply => a * b,
        Operator::Divide => a / b,
        Operator::FloorDivide => (a / b).floor(),
        Operator::Modulo => {
            let rest = a % b;
            match rest != 0.0 && (rest < 0.0) != (b < 0.0) {
                true => rest + b,
                false => rest,
            }
        }
        Operator::Power => {
            if a == 0.0 && b < 0.0 {
                return Err(Error::failed("0.0 cannot be raised to a negative power"));
            }
            if a < 0.0 && b.fract() != 0.0 {
                return Err(Error::failed("complex numbers are not supported"));
            }
            a.powf(b)
        }
    }))
}

fn whole(operator: Operator, a: i128, b: i128) -> Result<Value> {
    let is_division = matches!(
        operator,
        Operator::Divide | Operator::FloorDivide | Operator::Modulo
    );
    if is_division && b == 0 {
        return Err(Error::failed("division by zero"));
    }
    let found = match operator {
        Operator::Add => a.checked_add(b),
        Operator::Subtract => a.checked_sub(b),
        Operator::Multiply => a.checked_mul(b),
        Operator::Divide => return Ok(Value::Float(a as f64 / b as f64)),
        Operator::FloorDivide => a.checked_div_euclid(b).and_then(|quotient| {
            // The Euclidean remainder is never negative. For a negative divisor, the floored quotient is therefore the Euclidean quotient
            // minus 1, unless the division is exact.
            let is_exact = a.checked_rem_euclid(b)? == 0;
            if b < 0 && !is_exact {
                quotient.checked_sub(1)
            } else {
                Some(quotient)
            }
        }),
        Operator::Modulo => a.checked_rem_euclid(b).and_then(|rest| {
            if b < 0 && rest != 0 {
                rest.checked_add(b)
            } else {
                Some(rest)
            }
        }),
        Operator::Power if b < 0 => {
            return arithmetic(operator, &Value::Float(a as f64), &Value::Float(b as f64));
        }
        Operator::Power => match (a, u32::try_from(b)) {
            (0 | 1, _) if b > 0 => Some(a),
            (-1, _) => Some(if b % 2 == 0 { 1 } else { -1 }),
            (_, Ok(b)) => a.checked_pow(b),
            (_, Err(_)) => None,
        },
    };
    found.map(Value::Int).ok_or_else(large)
}

pub fn negative(value: &Value) -> Result<Value> {
    match (value.defined()?.int(), value) {
        (Some(value), _) => value.checked_neg().map(Value::Int).ok_or_else(large),
        (None, Value::Float(value)) => Ok(Value::Float(-value)),
        (None, other) => Err(bad_unary("-", other)),
    }
}

pub fn positive(value: &Value) -> Result<Value> {
    match (value.defined()?.int(), value) {
        (Some(value), _) => Ok(Value::Int(value)),
        (None, Value::Float(value)) => Ok(Value::Float(*value)),
        (None, other) => Err(bad_unary("+", other)),
    }
}

fn bad_unary(sign: &str, value: &Value) -> Box<Error> {
    Error::failed(format!(
        "bad operand type for unary {sign}: '{}'",
        value.type_name()
    ))
}

/// Returns the start, stop and step for slicing a sequence of `len` elements, by Python's rules.
fn indices(len: usize, [start, stop, step]: [Option<i128>; 3]) -> Result<(i128, i128, i128)> {
    let (len, step) = (len as i128, step.unwrap_or(1));
    if step == 0 {
        return Err(Error::failed("slice step cannot be zero"));
    }
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let bound = |bound: Option<i128>, default: i128| match bound {
        None => default,
        Some(bound) if bound < 0 => bound.saturating_add(len).max(low),
        Some(bound) => bound.min(high),
    };
    match step > 0 {
        true => Ok((bound(start, low), bound(stop, high), step)),
        false => Ok((bound(start, high), bound(stop, low), step)),
    }
}

/// Evaluates `value[start:stop:step]`.
pub fn slice(value: &Value, bounds: [Option<i128>; 3], meter: &Rc<Meter>) -> Result<Value> {
    let length = match value.defined()? {
        Value::Seq(seq) if plain_kind(seq).is_some() => seq.items.len(),
        Value::Str(_) => value.length(meter)?,
        // In jinja2, a slice of a value without indexed elements is undefined.
        Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) | Value::Iter(_) => {
            let message = format!("{} object has no slices", value.type_name());
            return Value::undefined(meter, &message);
        }
        other => {
            return Err(Error::failed(format!(
                "'{}' object cannot be sliced",
                other.type_name()
            )));
        }
    };
    let (mut at, stop, step) = indices(length, bounds)?;
    let mut places = Vec::new();
    if let (Value::Str(text), 1) = (value, step) {
        // A slice with step 1 needs no list of characters.
        let mut builder = Builder::new(meter)?;
        let n = usize::try_from((stop - at).max(0)).unwrap_or(0);
        let skipped = usize::try_from(at).unwrap_or(0);
        let start = text
            .char_indices()
            .nth(skipped)
            .map_or(text.len(), |(at, _)| at);
        let rest = &text[start..];
        let end = rest.char_indices().nth(n).map_or(rest.len(), |(at, _)| at);
        builder.push_str(&rest[..end])?;
        return Ok(Value::built(builder));
    }
    let mut charge = meter.hold(0)?;
    while (step > 0 && at < stop) || (step < 0 && at > stop) {
        meter.work(1)?;
        charge.grow(2 * size_of::<usize>())?;
        places.push(usize::try_from(at).unwrap_or(0));
        at = at.saturating_add(step);
    }
    match value {
        Value::Seq(seq) => {
            let mut items = Items::new(meter)?;
            items.extend(places.iter().filter_map(|&at| seq.items.get(at).cloned()))?;
            Value::seq(plain_kind(seq).unwrap_or(SeqKind::List), items)
        }
        other => {
            let text = other.to_text(meter)?;
            meter.scan(text.len().saturating_mul(16))?;
            let _chars = meter.hold(text.len().saturating_mul(size_of::<char>()))?;
            let chars: Vec<char> = text.chars().collect();
            let mut builder = Builder::new(meter)?;
            for at in places {
                if let Some(c) = chars.get(at) {
                    builder.push(*c)?;
                }
            }
            Ok(Value::built(builder))
        }
    }
}
