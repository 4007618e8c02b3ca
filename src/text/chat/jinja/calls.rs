//! Calls: macros, methods, and the functions that every template has.

use std::rc::Rc;

use super::{
    args::{Args, int_or},
    collections::insert,
    error::{Error, Result},
    json::Json,
    machine::{Machine, Namespace},
    meter::{Items, Meter},
    value::{Global, Seq, SeqKind, Value},
};

/// Maximum length of a `range`, equal to that of jinja2's sandbox.
const MAX_RANGE: i128 = 100_000;

impl Machine<'_> {
    pub fn call(&mut self, callee: &Value, args: Args) -> Result<Value> {
        let _level = self.meter.enter()?;
        self.meter.work(1)?;
        let meter = Rc::clone(&self.meter);
        match callee.defined()? {
            Value::Macro(of) => self.call_macro(*of, args),
            Value::Method(method) => self.method(&method.of, &method.name, args),
            Value::Loop(state) => {
                let [iterable] = args.bind("loop", ["iterable"], 1)?;
                self.recurse(state, &iterable.unwrap_or(Value::None))
            }
            Value::Joiner(place) => {
                args.none("joiner")?;
                let (text, is_used) = &mut self.joiners[*place];
                match std::mem::replace(is_used, true) {
                    true => Ok(Value::Str(Rc::clone(text))),
                    false => Value::text(&meter, ""),
                }
            }
            Value::Global(global) => self.call_global(*global, args),
            other => Err(Error::failed(format!(
                "'{}' object is not callable",
                other.type_name()
            ))),
        }
    }

    fn call_global(&mut self, global: Global, args: Args) -> Result<Value> {
        let meter = Rc::clone(&self.meter);
        match global {
            Global::Range => range(args, &meter),
            Global::Dict => Value::dict(&meter, entries(args, "dict", &meter)?),
            Global::Namespace => {
                let entries = entries(args, "namespace", &meter)?;
                let place = self.namespaces.len();
                self.namespaces.push(Namespace {
                    entries: Vec::new(),
                    charge: meter.hold(size_of::<Namespace>())?,
                });
                for (name, value) in entries {
                    self.set_attribute(place, name, value)?;
                }
                Ok(Value::Namespace(place))
            }
            Global::Cycler => {
                let Args {
                    positional, named, ..
                } = args;
                if positional.as_slice().is_empty() || !named.is_empty() {
                    return Err(Error::failed(
                        "at least one item has to be provided to cycler",
                    ));
                }
                self.cyclers
                    .push((Rc::new(Seq::new(SeqKind::Tuple, positional)?), 0));
                Ok(Value::Cycler(self.cyclers.len() - 1))
            }
            Global::Joiner => {
                let [separator] = args.bind("joiner", ["sep"], 0)?;
                let separator = match separator {
                    Some(separator) => separator.to_text(&meter)?,
                    None => Value::text(&meter, ", ")?.to_text(&meter)?,
                };
                self.joiners.push((separator, false));
                // The joiner is stored in `self.joiners`, not in a value, so the meter must be charged for it here.
                let mut kept = Items::new(&meter)?;
                kept.push(Value::None)?;
                self.kept.push(kept);
                Ok(Value::Joiner(self.joiners.len() - 1))
            }
            Global::RaiseException => {
                let [message] = args.bind("raise_exception", ["message"], 1)?;
                let message = message.unwrap_or(Value::None).to_text(&meter)?;
                Err(Error::refused(
                    message.chars().take(1000).collect::<String>(),
                ))
            }
            Global::StrftimeNow => {
                let [format] = args.bind("strftime_now", ["format"], 1)?;
                let format = format.unwrap_or(Value::None);
                let Some(format) = format.as_text() else {
                    return Err(Error::failed("strftime_now needs a format"));
                };
                meter.scan(format.len().saturating_mul(64))?;
                let now = jiff::ZonedDateTime::now();
                let written = jiff::fmt::strtime::format(&***format, &now);
                let written = written
                    .map_err(|e| Error::failed(format!("strftime_now('{}'): {e}", &***format)))?;
                Value::text(&meter, &written)
            }
        }
    }
}

fn range(args: Args, meter: &Rc<Meter>) -> Result<Value> {
    let [first, second, third] = args.bind("range", ["start", "stop", "step"], 1)?;
    let whole = |value: &Option<Value>, default: i128| int_or(value.as_ref(), "range", default);
    let (start, stop) = match second.is_some() {
        true => (whole(&first, 0)?, whole(&second, 0)?),
        false => (0, whole(&first, 0)?),
    };
    let step = whole(&third, 1)?;
    let far = [start, stop, step]
        .iter()
        .any(|n| n.unsigned_abs() > 1 << 100);
    if step == 0 || far {
        return Err(Error::failed(
            "range() arg 3 must not be zero, nor any arg beyond 100 bits",
        ));
    }
    let n = match step > 0 {
        true => (stop - start + step - 1) / step,
        false => (stop - start + step + 1) / step,
    };
    let n = n.max(0);
    if n > MAX_RANGE {
        return Err(Error::limit(format!(
            "range is too long: {n} elements; the sandbox allows at most {MAX_RANGE}"
        )));
    }
    let mut items = Items::new(meter)?;
    items.extend((0..n).map(|at| Value::Int(start + at * step)))?;
    Value::seq(SeqKind::Range { start, stop, step }, items)
}

/// Returns the entries that the arguments of `dict(…)` or `namespace(…)` define.
fn entries(args: Args, callee: &str, meter: &Rc<Meter>) -> Result<Vec<(Value, Value)>> {
    let mut entries = Vec::new();
    match args.positional.as_slice() {
        [] => {}
        [Value::Dict(dict)] => entries.extend(dict.entries.iter().cloned()),
        [Value::Namespace(_)] => {
            return Err(Error::failed(format!(
                "{callee} of a namespace is not supported"
            )));
        }
        [pairs] => {
            for pair in &pairs.defined()?.elements(meter)?.items {
                match pair.elements(meter)?.items.as_slice() {
                    [key, value] => insert(&mut entries, key.clone(), value.clone(), meter)?,
                    other => {
                        return Err(Error::failed(format!(
                            "an element of the argument of {callee} has length {}; 2 is required",
                            other.len()
                        )));
                    }
                }
            }
        }
        several => {
            return Err(Error::failed(format!(
                "{callee} expected at most 1 argument, got {}",
                several.len()
            )));
        }
    }
    for (name, value) in args.named {
        let name = Value::text(meter, &name)?;
        insert(&mut entries, name, value, meter)?;
    }
    Ok(entries)
}

/// Converts the messages of a conversation. Clients send the arguments of a tool call as a JSON string, and templates expect
/// an object, so the string becomes an object that keeps the string as its text.
pub fn messages(meter: &Rc<Meter>, messages: &[Json]) -> Result<Value> {
    let mut items = Items::new(meter)?;
    for (at, message) in messages.iter().enumerate() {
        let mut entries = Vec::new();
        let Json::Object(fields) = message else {
            return Err(Error::messages(format!(
                "messages[{at}] is {}; expected an object",
                message.kind()
            )));
        };
        for (name, value) in fields {
            let value = match (name.as_str(), value) {
                ("tool_calls", Json::Array(calls)) => {
                    let mut all = Items::new(meter)?;
                    for (nth, call) in calls.iter().enumerate() {
                        let place = format!("messages[{at}].tool_calls[{nth}]");
                        all.push(tool_call(meter, call, &place)?)?;
                    }
                    Value::list(all)?
                }
                _ => Value::from_json(meter, value)?,
            };
            entries.push((Value::text(meter, name)?, value));
        }
        items.push(Value::dict(meter, entries)?)?;
    }
    Value::list(items)
}

/// Converts a tool call, or its `function`, with `arguments` as an object.
fn tool_call(meter: &Rc<Meter>, call: &Json, place: &str) -> Result<Value> {
    let Json::Object(fields) = call else {
        return Value::from_json(meter, call);
    };
    let mut entries = Vec::new();
    for (name, value) in fields {
        let place = format!("{place}.{name}");
        let value = match (name.as_str(), value) {
            ("function", function) => tool_call(meter, function, &place)?,
            ("arguments", Json::String(text)) => arguments(meter, text, &place)?,
            ("arguments", Json::Null) => Value::dict(meter, Vec::new())?,
            _ => Value::from_json(meter, value)?,
        };
        entries.push((Value::text(meter, name)?, value));
    }
    Value::dict(meter, entries)
}

fn arguments(meter: &Rc<Meter>, text: &str, place: &str) -> Result<Value> {
    let parsed = match text.trim().is_empty() {
        true => Ok(Json::Object(Vec::new())),
        false => serde_json::from_str::<Json>(text),
    };
    let wrong = |found: String| {
        Error::messages(format!(
            "`{place}` {found}; expected the arguments of the tool call as a JSON object"
        ))
    };
    match parsed {
        Ok(Json::Object(fields)) => {
            let Value::Dict(dict) = Value::from_json(meter, &Json::Object(fields))? else {
                return Err(Error::failed("an object was expected"));
            };
            let source = Value::text(meter, text)?.to_text(meter)?;
            Value::dict_from(meter, dict.entries.clone(), Some(source))
        }
        Ok(other) => Err(wrong(format!("is the JSON of {}", other.kind()))),
        Err(error) => Err(wrong(format!("is a string that is not JSON ({error})"))),
    }
}
