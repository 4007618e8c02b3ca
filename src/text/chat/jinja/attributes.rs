//! Attributes and elements of values, as jinja2's sandbox looks them up.

use std::rc::Rc;

use super::{
    error::{Error, Result},
    machine::Machine,
    value::{Global, LoopState, Method, SeqKind, Value},
};

/// Attributes of Python's types, one list for each type. Names that begin with an underscore are omitted.
const STR: [&str; 47] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "encode",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "maketrans",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];
const DICT: [&str; 11] = [
    "clear",
    "copy",
    "fromkeys",
    "get",
    "items",
    "keys",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "values",
];
const LIST: [&str; 11] = [
    "append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse",
    "sort",
];
const TUPLE: [&str; 2] = ["count", "index"];
const RANGE: [&str; 5] = ["count", "index", "start", "step", "stop"];
const VIEW: [&str; 2] = ["isdisjoint", "mapping"];
const NUMBER: [&str; 13] = [
    "as_integer_ratio",
    "bit_count",
    "bit_length",
    "conjugate",
    "denominator",
    "from_bytes",
    "from_number",
    "fromhex",
    "hex",
    "imag",
    "is_integer",
    "numerator",
    "real",
];
const GENERATOR: [&str; 8] = [
    "close",
    "gi_code",
    "gi_frame",
    "gi_running",
    "gi_suspended",
    "gi_yieldfrom",
    "send",
    "throw",
];
const MACRO: [&str; 6] = [
    "arguments",
    "caller",
    "catch_kwargs",
    "catch_varargs",
    "explicit_caller",
    "name",
];
const LOOP: [&str; 14] = [
    "changed",
    "cycle",
    "depth",
    "depth0",
    "first",
    "index",
    "index0",
    "last",
    "length",
    "nextitem",
    "previtem",
    "revindex",
    "revindex0",
    "iterable",
];
/// Methods that modify a list or dict. The sandbox refuses them.
const MUTATING: [&str; 11] = [
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
];

impl Machine<'_> {
    /// Evaluates `of.name`.
    pub fn attribute(&mut self, of: &Value, name: &str) -> Result<Value> {
        if let Some(value) = self.own_attribute(of, name)? {
            return Ok(value);
        }
        let found = match of {
            Value::Dict(dict) => dict.field(name, &self.meter)?.cloned(),
            _ => None,
        };
        match found {
            Some(value) => Ok(value),
            None => self.no_attribute(of, name),
        }
    }

    /// Evaluates `of[key]`.
    pub fn item(&mut self, of: &Value, key: &Value) -> Result<Value> {
        let meter = Rc::clone(&self.meter);
        let found = match of.defined()? {
            Value::Dict(dict) if key.check_key(&meter).is_ok() => dict.get(key, &meter)?.cloned(),
            Value::Seq(seq) if !seq.kind.type_name().starts_with("dict") => {
                key.int().and_then(|index| seq.at(index).cloned())
            }
            Value::Str(text) => match key.int() {
                Some(index) => {
                    meter.scan(text.len().saturating_mul(6))?;
                    let c = match usize::try_from(index) {
                        Ok(at) => text.chars().nth(at),
                        Err(_) => usize::try_from(index.unsigned_abs())
                            .ok()
                            .and_then(|back| text.chars().rev().nth(back - 1)),
                    };
                    match c {
                        Some(c) => Some(Value::text(&meter, c.encode_utf8(&mut [0; 4]))?),
                        None => None,
                    }
                }
                None => None,
            },
            _ => None,
        };
        if let Some(value) = found {
            return Ok(value);
        }
        if let Some(name) = key.as_text() {
            return match self.own_attribute(of, name)? {
                Some(value) => Ok(value),
                None => self.no_attribute(of, name),
            };
        }
        let kind = object_name(of);
        let mut message = super::meter::Builder::new(&meter)?;
        message.push_str(&format!("{kind} has no element "))?;
        key.write_repr(&mut message, &meter)
            .or_else(|_| message.push_str(key.type_name()))?;
        Value::undefined(&meter, message.as_str())
    }

    fn no_attribute(&self, of: &Value, name: &str) -> Result<Value> {
        if name.starts_with("__") && name.ends_with("__") {
            return Err(Error::failed(format!(
                "access to attribute '{name}' of '{}' object is unsafe",
                of.type_name()
            )));
        }
        let name: String = name.chars().take(80).collect();
        let message = format!("'{}' has no attribute '{name}'", object_name(of));
        Value::undefined(&self.meter, &message)
    }

    /// Returns an attribute of the value's Python type, if it exists.
    fn own_attribute(&mut self, of: &Value, name: &str) -> Result<Option<Value>> {
        let meter = Rc::clone(&self.meter);
        let of = of.defined()?;
        let known: &[&str] = match of {
            Value::Str(_) => &STR,
            Value::Dict(dict) => {
                // A dict parsed from a JSON string has the methods of a dict and of a string.
                let is_text = dict.source.is_some() && STR.contains(&name);
                match is_text && dict.field(name, &meter)?.is_none() {
                    true => &STR,
                    false => &DICT,
                }
            }
            Value::Seq(seq) => match seq.kind {
                SeqKind::List => &LIST,
                SeqKind::Tuple => &TUPLE,
                SeqKind::Group => match name {
                    "grouper" => return Ok(seq.at(0).cloned()),
                    "list" => return Ok(seq.at(1).cloned()),
                    _ => &TUPLE,
                },
                SeqKind::Range { start, stop, step } => match name {
                    "start" => return Ok(Some(Value::Int(start))),
                    "stop" => return Ok(Some(Value::Int(stop))),
                    "step" => return Ok(Some(Value::Int(step))),
                    _ => &RANGE,
                },
                SeqKind::Keys | SeqKind::Values | SeqKind::Items => &VIEW,
            },
            Value::Namespace(place) => {
                let key = Value::text(&meter, name)?;
                for (known, value) in &self.namespaces[*place].entries {
                    if known.equals(&key, &meter)? {
                        return Ok(Some(value.clone()));
                    }
                }
                return Ok(None);
            }
            Value::Loop(state) => {
                if let Some(value) = loop_attribute(state, name, self)? {
                    return Ok(Some(value));
                }
                &LOOP
            }
            Value::Macro(of) => match name {
                "name" => return Value::text(&meter, self.macro_name(*of)).map(Some),
                _ => &MACRO,
            },
            Value::Cycler(place) => match name {
                "current" => {
                    let (items, at) = &self.cyclers[*place];
                    return Ok(items.items.get(*at).cloned());
                }
                _ => &["next", "reset"],
            },
            Value::Bool(_) | Value::Int(_) | Value::Float(_) => &NUMBER,
            Value::Iter(_) => &GENERATOR,
            Value::Global(Global::Dict) => &["fromkeys"],
            Value::Global(_)
            | Value::None
            | Value::Method(_)
            | Value::Joiner(_)
            | Value::Undefined(_) => &[],
        };
        if !known.contains(&name) {
            return Ok(None);
        }
        let changes = matches!(of, Value::Dict(_) | Value::Seq(_)) && MUTATING.contains(&name);
        if changes {
            return Err(Error::failed(format!(
                "`{name}` would change a '{}', which a template must not",
                of.type_name()
            )));
        }
        Ok(Some(Value::Method(Rc::new(Method {
            of: of.clone(),
            name: name.to_owned(),
            _charge: meter.hold(size_of::<Method>())?,
        }))))
    }
}

/// Returns the name of a value for error messages.
fn object_name(of: &Value) -> String {
    match of {
        Value::None => "None".to_owned(),
        other => format!("{} object", other.type_name()),
    }
}

fn loop_attribute(state: &LoopState, name: &str, machine: &Machine<'_>) -> Result<Option<Value>> {
    let (at, n) = (state.index.get(), state.items.items.len());
    let whole = |value: usize| Ok(Some(Value::Int(value as i128)));
    let item = |found: Option<&Value>, missing: &str| match found {
        Some(value) => Ok(Some(value.clone())),
        None => Value::undefined(&machine.meter, missing).map(Some),
    };
    match name {
        "index" => whole(at + 1),
        "index0" => whole(at),
        "revindex" => whole(n - at),
        "revindex0" => whole(n - at - 1),
        "length" => whole(n),
        "depth" => whole(state.depth),
        "depth0" => whole(state.depth - 1),
        "first" => Ok(Some(Value::Bool(at == 0))),
        "last" => Ok(Some(Value::Bool(at + 1 == n))),
        "previtem" => item(
            at.checked_sub(1).and_then(|at| state.items.items.get(at)),
            "there is no previous item",
        ),
        "nextitem" => item(state.items.items.get(at + 1), "there is no next item"),
        _ => Ok(None),
    }
}
