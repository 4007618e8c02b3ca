//! Evaluates expressions.

use std::rc::Rc;

use super::{
    args::Args,
    ast::{Arguments, Comparison, Expr, ExprKind},
    collections::insert,
    error::{Error, Result},
    machine::Machine,
    meter::Items,
    operators,
    value::{Global, SeqKind, Value},
};

/// Variables that every template has.
const GLOBALS: [(&str, Global); 7] = [
    ("range", Global::Range),
    ("dict", Global::Dict),
    ("namespace", Global::Namespace),
    ("cycler", Global::Cycler),
    ("joiner", Global::Joiner),
    ("raise_exception", Global::RaiseException),
    ("strftime_now", Global::StrftimeNow),
];
/// Variables of jinja2 that are not supported.
const UNSUPPORTED: [&str; 3] = ["lipsum", "self", "super"];

impl<'t> Machine<'t> {
    pub fn evaluate(&mut self, expr: &'t Expr) -> Result<Value> {
        self.meter.work(1)?;
        let _level = self.meter.enter()?;
        let value = self.evaluate_kind(&expr.kind);
        value.map_err(|error| error.at(expr.line))
    }

    fn evaluate_kind(&mut self, kind: &'t ExprKind) -> Result<Value> {
        let meter = Rc::clone(&self.meter);
        match kind {
            ExprKind::None => Ok(Value::None),
            ExprKind::Bool(value) => Ok(Value::Bool(*value)),
            ExprKind::Int(value) => Ok(Value::Int(*value)),
            ExprKind::Float(value) => Ok(Value::Float(*value)),
            ExprKind::Str(text) => Value::text(&meter, text),
            ExprKind::Name(name) => self.name(name),
            ExprKind::List(all) => Value::list(self.all(all)?),
            ExprKind::Tuple(all) => Value::seq(SeqKind::Tuple, self.all(all)?),
            ExprKind::Dict(pairs) => {
                let mut entries = Vec::new();
                // Charges the memory of the entries while they are collected. The created dict
                // has its own charge.
                let mut held = Items::new(&meter)?;
                for (key, value) in pairs {
                    let key = self.evaluate(key)?;
                    let value = self.evaluate(value)?;
                    held.extend([Value::None, Value::None])?;
                    insert(&mut entries, key, value, &meter)?;
                }
                Value::dict(&meter, entries)
            }
            ExprKind::Attribute(of, name) => {
                let of = self.evaluate(of)?;
                self.attribute(&of, name)
            }
            ExprKind::Item(of, index) => {
                let of = self.evaluate(of)?;
                let index = self.evaluate(index)?;
                self.item(&of, &index)
            }
            ExprKind::Slice(of, bounds) => {
                let of = self.evaluate(of)?;
                let mut found = [None, None, None];
                for (place, bound) in found.iter_mut().zip(bounds) {
                    if let Some(bound) = bound {
                        let value = self.evaluate(bound)?;
                        *place = match value.defined()? {
                            Value::None => None,
                            other => Some(other.int().ok_or_else(|| {
                                Error::failed("slice indices must be integers or None")
                            })?),
                        };
                    }
                }
                operators::slice(&of, found, &meter)
            }
            ExprKind::Call(callee, arguments) => {
                let callee = self.evaluate(callee)?;
                let args = self.arguments(arguments)?;
                self.call(&callee, args)
            }
            ExprKind::Filter(value, filter) => {
                let value = self.evaluate(value)?;
                let args = self.arguments(&filter.arguments)?;
                self.filter(&filter.name, value, args)
            }
            ExprKind::Test(value, test) => {
                let value = self.evaluate(value)?;
                let args = self.arguments(&test.arguments)?;
                self.test(&test.name, &value, args).map(Value::Bool)
            }
            ExprKind::Not(value) => Ok(Value::Bool(!self.evaluate(value)?.is_true())),
            ExprKind::Negative(value) => operators::negative(&self.evaluate(value)?),
            ExprKind::Positive(value) => operators::positive(&self.evaluate(value)?),
            ExprKind::And(left, right) => {
                let left = self.evaluate(left)?;
                match left.is_true() {
                    true => self.evaluate(right),
                    false => Ok(left),
                }
            }
            ExprKind::Or(left, right) => {
                let left = self.evaluate(left)?;
                match left.is_true() {
                    true => Ok(left),
                    false => self.evaluate(right),
                }
            }
            ExprKind::Conditional {
                condition,
                then,
                otherwise,
            } => match (self.evaluate(condition)?.is_true(), otherwise) {
                (true, _) => self.evaluate(then),
                (false, Some(otherwise)) => self.evaluate(otherwise),
                (false, None) => Value::undefined(
                    &meter,
                    "the inline if-expression evaluated to false and no else section was defined",
                ),
            },
            ExprKind::Binary(operator, left, right) => {
                let left = self.evaluate(left)?;
                let right = self.evaluate(right)?;
                self.binary(*operator, &left, &right)
            }
            ExprKind::Concat(all) => {
                let all = self.all(all)?;
                operators::concat(all.as_slice(), &meter)
            }
            ExprKind::Compare(first, others) => {
                let mut left = self.evaluate(first)?;
                for (comparison, right) in others {
                    let right = self.evaluate(right)?;
                    if !self.compared(*comparison, &left, &right)? {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Ok(Value::Bool(true))
            }
        }
    }

    fn all(&mut self, exprs: &'t [Expr]) -> Result<Items<Value>> {
        let mut items = Items::new(&self.meter)?;
        for expr in exprs {
            let value = self.evaluate(expr)?;
            items.push(value)?;
        }
        Ok(items)
    }

    fn name(&mut self, name: &str) -> Result<Value> {
        if let Some(value) = self.variable(name)? {
            return Ok(value);
        }
        if let Some((_, global)) = GLOBALS.iter().find(|(known, _)| *known == name) {
            return Ok(Value::Global(*global));
        }
        match UNSUPPORTED.contains(&name) {
            true => Err(Error::failed(format!(
                "`{name}` is not supported in chat templates"
            ))),
            false => Value::undefined(&self.meter, &format!("'{name}' is undefined")),
        }
    }

    pub fn arguments(&mut self, arguments: &'t Arguments) -> Result<Args> {
        let mut args = Args::new(&self.meter)?;
        for expr in &arguments.positional {
            let value = self.evaluate(expr)?;
            args.positional.push(value)?;
        }
        if let Some(list) = &arguments.list {
            let list = self.evaluate(list)?.elements(&self.meter)?;
            args.positional.extend(list.items.iter().cloned())?;
        }
        for (name, expr) in &arguments.named {
            let value = self.evaluate(expr)?;
            args.name(name, value)?;
        }
        if let Some(dict) = &arguments.dict {
            let Value::Dict(dict) = self.evaluate(dict)? else {
                return Err(Error::failed("an argument after ** must be a dict"));
            };
            for (key, value) in &dict.entries {
                let Some(name) = key.as_text() else {
                    return Err(Error::failed("keywords must be strings"));
                };
                args.name(name, value.clone())?;
            }
        }
        Ok(args)
    }

    fn compared(&mut self, comparison: Comparison, left: &Value, right: &Value) -> Result<bool> {
        let meter = &self.meter;
        let ordered = |sign: &str| left.compare(right, sign, meter);
        Ok(match comparison {
            Comparison::Equal => left.equals(right, meter)?,
            Comparison::NotEqual => !left.equals(right, meter)?,
            Comparison::Less => ordered("<")?.is_some_and(|order| order.is_lt()),
            Comparison::LessEqual => ordered("<=")?.is_some_and(|order| order.is_le()),
            Comparison::Greater => ordered(">")?.is_some_and(|order| order.is_gt()),
            Comparison::GreaterEqual => ordered(">=")?.is_some_and(|order| order.is_ge()),
            Comparison::In => right.contains(left, meter)?,
            Comparison::NotIn => !right.contains(left, meter)?,
        })
    }
}
