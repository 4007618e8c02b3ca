//! The tests of the template language, such as `defined` in `value is defined`.

use std::rc::Rc;

use super::{
    args::Args,
    ast::Operator,
    error::{Error, Result},
    machine::Machine,
    methods::has_case,
    value::{SeqKind, Value},
};

impl Machine<'_> {
    /// Evaluates `value is name(…)`.
    pub fn test(&mut self, name: &str, value: &Value, args: Args) -> Result<bool> {
        self.meter.work(1)?;
        let meter = Rc::clone(&self.meter);
        if let Some(found) = without_arguments(name, value) {
            args.none(name)?;
            return found;
        }
        let argument = |args: Args| {
            let [other] = args.bind(name, ["other"], 1)?;
            Ok::<Value, Box<Error>>(other.unwrap_or(Value::None))
        };
        match name {
            "odd" | "even" | "divisibleby" => {
                let divisor = match name {
                    "divisibleby" => argument(args)?,
                    _ => {
                        args.none(name)?;
                        Value::Int(2)
                    }
                };
                let rest = self.binary(Operator::Modulo, value, &divisor)?;
                let expected = Value::Int(i128::from(name == "odd"));
                rest.equals(&expected, &meter)
            }
            "lower" | "upper" => {
                args.none(name)?;
                let text = value.to_text(&meter)?;
                meter.scan(text.len().saturating_mul(12))?;
                has_case(
                    &text,
                    if name == "lower" {
                        "islower"
                    } else {
                        "isupper"
                    },
                )
            }
            "eq" | "equalto" | "==" => value.equals(&argument(args)?, &meter),
            "ne" | "!=" => value
                .equals(&argument(args)?, &meter)
                .map(|is_equal| !is_equal),
            "in" => argument(args)?.contains(value, &meter),
            "lt" | "lessthan" | "<" | "le" | "<=" | "gt" | "greaterthan" | ">" | "ge" | ">=" => {
                let sign = match name {
                    "lt" | "lessthan" | "<" => "<",
                    "le" | "<=" => "<=",
                    "gt" | "greaterthan" | ">" => ">",
                    _ => ">=",
                };
                let order = value.compare(&argument(args)?, sign, &meter)?;
                Ok(order.is_some_and(|order| match sign {
                    "<" => order.is_lt(),
                    "<=" => order.is_le(),
                    ">" => order.is_gt(),
                    _ => order.is_ge(),
                }))
            }
            "sameas" => same(value, &argument(args)?),
            "filter" | "test" => Err(Error::failed(format!(
                "the test `{name}` is not supported in chat templates"
            ))),
            other => Err(Error::failed(format!("No test named '{other}'."))),
        }
    }
}

/// Returns the result of the test `name`; `None` if there is no such test without arguments.
fn without_arguments(name: &str, value: &Value) -> Option<Result<bool>> {
    Some(Ok(match name {
        "defined" => !matches!(value, Value::Undefined(_)),
        "undefined" => matches!(value, Value::Undefined(_)),
        "none" => matches!(value, Value::None),
        "boolean" => matches!(value, Value::Bool(_)),
        "true" => matches!(value, Value::Bool(true)),
        "false" => matches!(value, Value::Bool(false)),
        "integer" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "number" => matches!(value, Value::Bool(_) | Value::Int(_) | Value::Float(_)),
        "string" => matches!(value, Value::Str(_)),
        "mapping" => matches!(value, Value::Dict(_)),
        "sequence" => match value {
            Value::Undefined(_) | Value::Str(_) | Value::Dict(_) => true,
            Value::Seq(seq) => {
                !matches!(seq.kind, SeqKind::Keys | SeqKind::Values | SeqKind::Items)
            }
            _ => false,
        },
        "iterable" => matches!(
            value,
            Value::Undefined(_)
                | Value::Str(_)
                | Value::Dict(_)
                | Value::Seq(_)
                | Value::Iter(_)
                | Value::Loop(_)
        ),
        "callable" => matches!(
            value,
            Value::Undefined(_)
                | Value::Global(_)
                | Value::Macro(_)
                | Value::Method(_)
                | Value::Loop(_)
                | Value::Joiner(_)
        ),
        "escaped" => value.as_text().is_some_and(|text| text.is_markup),
        _ => return None,
    }))
}

/// Implements Python's `is`.
fn same(a: &Value, b: &Value) -> Result<bool> {
    match (a, b) {
        (Value::None, Value::None) => Ok(true),
        (Value::Bool(a), Value::Bool(b)) => Ok(a == b),
        (Value::Dict(a), Value::Dict(b)) => Ok(Rc::ptr_eq(a, b)),
        (Value::Seq(a), Value::Seq(b)) => Ok(Rc::ptr_eq(a, b)),
        (Value::Namespace(a), Value::Namespace(b)) => Ok(a == b),
        (Value::Str(_), Value::Str(_))
        | (Value::Int(_), Value::Int(_))
        | (Value::Float(_), Value::Float(_)) => Err(Error::failed(format!(
            "`sameas` of two values of type '{}' is not defined; use `==`",
            a.type_name()
        ))),
        _ => Ok(false),
    }
}
