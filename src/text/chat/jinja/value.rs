//! Values of a rendering, with the types and operators of Python.

use std::{cell::Cell, cmp::Ordering, rc::Rc};

use super::{
    error::{Error, Result},
    json::Json,
    meter::{Builder, Charge, Items, Meter},
};

/// Maximum nesting of lists and dicts.
const MAX_DEPTH: u32 = 200;

/// A value. Lists, dicts and texts are immutable.
#[derive(Clone, Debug)]
pub enum Value {
    /// An undefined value, with the error message for its use.
    Undefined(Rc<Text>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Rc<Text>),
    Seq(Rc<Seq>),
    Dict(Rc<Dict>),
    /// A generator or reversed iterator, which can be read once.
    Iter(Rc<Iter>),
    /// Index of a namespace in the interpreter.
    Namespace(usize),
    Loop(Rc<LoopState>),
    Macro(MacroRef),
    Global(Global),
    Method(Rc<Method>),
    /// Indices of `cycler` and `joiner` objects in the interpreter.
    Cycler(usize),
    Joiner(usize),
}

#[derive(Debug)]
pub struct Text {
    text: String,
    /// Whether the text is markup. Python's markupsafe escapes other text that is combined with it.
    pub is_markup: bool,
    _charge: Charge,
}

#[derive(Debug)]
pub struct Seq {
    pub kind: SeqKind,
    pub items: Vec<Value>,
    pub depth: u32,
    pub _charge: Charge,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeqKind {
    List,
    Tuple,
    /// An element of the result of `groupby`: a tuple with the attributes `grouper` and `list`.
    Group,
    Range {
        start: i128,
        stop: i128,
        step: i128,
    },
    /// Views of a dict.
    Keys,
    Values,
    Items,
}

#[derive(Debug)]
pub struct Dict {
    pub entries: Vec<(Value, Value)>,
    /// JSON text that a client sent for the dict. The dict is printed as this text.
    pub source: Option<Rc<Text>>,
    pub depth: u32,
    pub _charge: Charge,
}

#[derive(Debug)]
pub struct Iter {
    pub seq: Rc<Seq>,
    pub next: Cell<usize>,
}

/// State of a loop. The interpreter stores the values for `loop.changed`.
#[derive(Debug)]
pub struct LoopState {
    pub items: Rc<Seq>,
    pub index: Cell<usize>,
    pub depth: usize,
    /// Index of the loop in the interpreter.
    pub place: usize,
    /// Distinguishes this loop from earlier loops that had the same `place`.
    pub id: u64,
    pub _charge: Charge,
}

/// A macro of the template, with the scope in which it was defined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MacroRef {
    pub index: usize,
    pub scope: usize,
    pub id: u64,
}

#[derive(Debug)]
pub struct Method {
    pub of: Value,
    pub name: String,
    pub _charge: Charge,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Global {
    Range,
    Dict,
    Namespace,
    Cycler,
    Joiner,
    RaiseException,
    StrftimeNow,
}

impl std::ops::Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

pub fn depth_above<'a>(values: impl IntoIterator<Item = &'a Value>) -> Result<u32> {
    let depth = values.into_iter().map(Value::depth).max().unwrap_or(0) + 1;
    match depth <= MAX_DEPTH {
        true => Ok(depth),
        false => Err(Error::limit(format!(
            "lists and dicts nest deeper than {MAX_DEPTH} levels, the limit for one conversation"
        ))),
    }
}

impl Value {
    pub fn text(meter: &Rc<Meter>, text: &str) -> Result<Self> {
        let mut builder = Builder::new(meter)?;
        builder.push_str(text)?;
        Ok(Self::built(builder))
    }

    pub fn built(builder: Builder) -> Self {
        let (text, charge) = builder.into_parts();
        Self::Str(Rc::new(Text {
            text,
            is_markup: false,
            _charge: charge,
        }))
    }

    pub fn markup(builder: Builder) -> Self {
        let (text, charge) = builder.into_parts();
        Self::Str(Rc::new(Text {
            text,
            is_markup: true,
            _charge: charge,
        }))
    }

    pub fn undefined(meter: &Rc<Meter>, message: &str) -> Result<Self> {
        match Self::text(meter, message)? {
            Self::Str(text) => Ok(Self::Undefined(text)),
            other => Ok(other),
        }
    }

    pub fn seq(kind: SeqKind, items: Items<Value>) -> Result<Self> {
        Ok(Self::Seq(Rc::new(Seq::new(kind, items)?)))
    }

    pub fn list(items: Items<Value>) -> Result<Self> {
        Self::seq(SeqKind::List, items)
    }

    pub fn iter(items: Items<Value>) -> Result<Self> {
        Ok(Self::Iter(Rc::new(Iter {
            seq: Rc::new(Seq::new(SeqKind::List, items)?),
            next: Cell::new(0),
        })))
    }

    pub fn pair(meter: &Rc<Meter>, key: Value, value: Value) -> Result<Self> {
        let mut items = Items::new(meter)?;
        items.extend([key, value])?;
        Self::seq(SeqKind::Tuple, items)
    }

    /// Creates a dict of entries with distinct keys.
    pub fn dict(meter: &Rc<Meter>, entries: Vec<(Value, Value)>) -> Result<Self> {
        Self::dict_from(meter, entries, None)
    }

    pub fn dict_from(
        meter: &Rc<Meter>,
        entries: Vec<(Value, Value)>,
        source: Option<Rc<Text>>,
    ) -> Result<Self> {
        meter.work(entries.len())?;
        Ok(Self::Dict(Rc::new(Dict {
            depth: depth_above(entries.iter().flat_map(|(key, value)| [key, value]))?,
            _charge: meter.hold(entries.capacity() * size_of::<(Value, Value)>())?,
            entries,
            source,
        })))
    }

    /// Converts a JSON value.
    pub fn from_json(meter: &Rc<Meter>, json: &Json) -> Result<Self> {
        let _level = meter.enter()?;
        meter.work(1)?;
        match json {
            Json::Null => Ok(Self::None),
            Json::Bool(value) => Ok(Self::Bool(*value)),
            Json::Int(value) => Ok(Self::Int(*value)),
            Json::Float(value) => Ok(Self::Float(*value)),
            Json::String(text) => Self::text(meter, text),
            Json::Array(all) => {
                let mut items = Items::new(meter)?;
                for item in all {
                    items.push(Self::from_json(meter, item)?)?;
                }
                Self::list(items)
            }
            Json::Object(fields) => {
                let mut entries = Vec::with_capacity(fields.len());
                for (key, value) in fields {
                    let key = Self::text(meter, key)?;
                    entries.push((key, Self::from_json(meter, value)?));
                }
                Self::dict(meter, entries)
            }
        }
    }

    fn depth(&self) -> u32 {
        match self {
            Self::Seq(seq) => seq.depth,
            Self::Dict(dict) => dict.depth,
            Self::Iter(iter) => iter.seq.depth,
            Self::Loop(state) => state.items.depth + 1,
            Self::Method(method) => method.of.depth() + 1,
            _ => 0,
        }
    }

    /// Returns Python's name of the type.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) => "str",
            Self::Seq(seq) => seq.kind.type_name(),
            Self::Dict(_) => "dict",
            Self::Iter(_) => "generator",
            Self::Namespace(_) => "Namespace",
            Self::Loop(_) => "LoopContext",
            Self::Macro(_) => "Macro",
            Self::Global(_) => "function",
            Self::Method(_) => "method",
            Self::Cycler(_) => "Cycler",
            Self::Joiner(_) => "Joiner",
        }
    }

    pub fn is_true(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(value) => *value,
            Self::Int(value) => *value != 0,
            Self::Float(value) => *value != 0.0,
            Self::Str(text) => !text.is_empty(),
            Self::Seq(seq) => !seq.items.is_empty(),
            Self::Dict(dict) => !dict.entries.is_empty(),
            _ => true,
        }
    }

    /// Returns an error if the value is undefined.
    pub fn defined(&self) -> Result<&Self> {
        match self {
            Self::Undefined(message) => Err(Error::failed(&***message)),
            other => Ok(other),
        }
    }

    /// Returns an integer; true and false are 1 and 0.
    pub fn int(&self) -> Option<i128> {
        match self {
            Self::Bool(value) => Some(i128::from(*value)),
            Self::Int(value) => Some(*value),
            _ => None,
        }
    }

    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Float(value) => Some(*value),
            other => other.int().map(|value| value as f64),
        }
    }

    pub fn as_text(&self) -> Option<&Rc<Text>> {
        match self {
            Self::Str(text) => Some(text),
            _ => None,
        }
    }

    /// Implements Python's `==`.
    pub fn equals(&self, other: &Self, meter: &Rc<Meter>) -> Result<bool> {
        let _level = meter.enter()?;
        meter.work(1)?;
        Ok(match (self, other) {
            (Self::Undefined(_), Self::Undefined(_)) | (Self::None, Self::None) => true,
            (Self::Str(a), Self::Str(b)) => {
                meter.scan(a.len().min(b.len()))?;
                ***a == ***b
            }
            (Self::Seq(a), Self::Seq(b)) => {
                if a.kind.compared() != b.kind.compared() || a.items.len() != b.items.len() {
                    return Ok(false);
                }
                if matches!(a.kind, SeqKind::Keys | SeqKind::Values | SeqKind::Items) {
                    return Err(Error::failed(
                        "views of a dict cannot be compared; compare lists",
                    ));
                }
                for (a, b) in a.items.iter().zip(&b.items) {
                    if !a.equals(b, meter)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Self::Dict(a), Self::Dict(b)) => {
                if a.entries.len() != b.entries.len() {
                    return Ok(false);
                }
                for (key, value) in &a.entries {
                    match b.get(key, meter)? {
                        Some(other) if value.equals(other, meter)? => {}
                        _ => return Ok(false),
                    }
                }
                true
            }
            // A dict parsed from JSON equals the JSON text that the client sent.
            (Self::Dict(dict), Self::Str(text)) | (Self::Str(text), Self::Dict(dict)) => dict
                .source
                .as_ref()
                .is_some_and(|source| ***source == ***text),
            (Self::Namespace(a), Self::Namespace(b))
            | (Self::Cycler(a), Self::Cycler(b))
            | (Self::Joiner(a), Self::Joiner(b)) => a == b,
            (Self::Macro(a), Self::Macro(b)) => a == b,
            (Self::Global(a), Self::Global(b)) => a == b,
            (Self::Loop(a), Self::Loop(b)) => Rc::ptr_eq(a, b),
            (Self::Iter(a), Self::Iter(b)) => Rc::ptr_eq(a, b),
            (a, b) => match (a.int(), b.int(), a.number(), b.number()) {
                (Some(a), Some(b), ..) => a == b,
                (_, _, Some(a), Some(b)) => a == b,
                _ => false,
            },
        })
    }

    /// Implements Python's `<` and similar operators.
    pub fn compare(&self, other: &Self, sign: &str, meter: &Rc<Meter>) -> Result<Option<Ordering>> {
        let _level = meter.enter()?;
        meter.work(1)?;
        self.defined()?;
        other.defined()?;
        match (self, other) {
            (Self::Str(a), Self::Str(b)) => {
                meter.scan(a.len().min(b.len()))?;
                // UTF-8 bytes sort like code points.
                Ok(Some(a.as_bytes().cmp(b.as_bytes())))
            }
            (Self::Seq(a), Self::Seq(b))
                if a.kind.compared() == b.kind.compared()
                    && matches!(a.kind.compared(), SeqKind::List | SeqKind::Tuple) =>
            {
                for (a, b) in a.items.iter().zip(&b.items) {
                    if !a.equals(b, meter)? {
                        return a.compare(b, sign, meter);
                    }
                }
                Ok(Some(a.items.len().cmp(&b.items.len())))
            }
            (a, b) => match (a.int(), b.int(), a.number(), b.number()) {
                (Some(a), Some(b), ..) => Ok(Some(a.cmp(&b))),
                (_, _, Some(a), Some(b)) => Ok(a.partial_cmp(&b)),
                _ => Err(Error::failed(format!(
                    "'{sign}' not supported between instances of '{}' and '{}'",
                    self.type_name(),
                    other.type_name()
                ))),
            },
        }
    }

    /// Evaluates Python's `self < other`.
    pub fn is_less(&self, other: &Self, meter: &Rc<Meter>) -> Result<bool> {
        Ok(self.compare(other, "<", meter)? == Some(Ordering::Less))
    }

    /// Returns an error if the value cannot be a dict key.
    pub fn check_key(&self, meter: &Rc<Meter>) -> Result<()> {
        meter.work(1)?;
        match self {
            Self::Seq(seq) if matches!(seq.kind, SeqKind::Tuple | SeqKind::Group) => {
                seq.items.iter().try_for_each(|item| item.check_key(meter))
            }
            Self::Seq(_) | Self::Dict(_) => Err(Error::failed(format!(
                "unhashable type: '{}'",
                self.type_name()
            ))),
            _ => Ok(()),
        }
    }

    /// Returns the elements of any iterable. A generator is consumed.
    pub fn elements(&self, meter: &Rc<Meter>) -> Result<Rc<Seq>> {
        let mut items = Items::new(meter)?;
        match self {
            Self::Seq(seq) => return Ok(Rc::clone(seq)),
            Self::Iter(iter) => {
                let from = iter.next.replace(iter.seq.items.len());
                if from == 0 {
                    return Ok(Rc::clone(&iter.seq));
                }
                items.extend(iter.seq.items.iter().skip(from).cloned())?;
            }
            Self::Undefined(_) => {}
            Self::Str(text) => {
                for c in text.chars() {
                    items.push(Self::text(meter, c.encode_utf8(&mut [0; 4]))?)?;
                }
            }
            Self::Dict(dict) => items.extend(dict.entries.iter().map(|(key, _)| key.clone()))?,
            Self::Loop(_) => {
                return Err(Error::failed("iterating over `loop` is not supported"));
            }
            other => {
                return Err(Error::failed(format!(
                    "'{}' object is not iterable",
                    other.type_name()
                )));
            }
        }
        Ok(Rc::new(Seq::new(SeqKind::List, items)?))
    }

    /// Implements Python's `len`.
    pub fn length(&self, meter: &Rc<Meter>) -> Result<usize> {
        match self {
            Self::Undefined(_) => Ok(0),
            Self::Str(text) => {
                meter.scan(text.len())?;
                Ok(text.chars().count())
            }
            Self::Seq(seq) => Ok(seq.items.len()),
            Self::Dict(dict) => Ok(dict.entries.len()),
            Self::Loop(state) => Ok(state.items.items.len()),
            other => Err(Error::failed(format!(
                "object of type '{}' has no len()",
                other.type_name()
            ))),
        }
    }

    /// Implements Python's `needle in self`.
    pub fn contains(&self, needle: &Self, meter: &Rc<Meter>) -> Result<bool> {
        match (self, needle) {
            (Self::Str(text), Self::Str(needle)) => {
                meter.scan(text.len())?;
                Ok(text.contains(&***needle))
            }
            (Self::Str(_), other) => Err(Error::failed(format!(
                "'in <string>' requires string as left operand, not {}",
                other.type_name()
            ))),
            (Self::Dict(dict), key) => {
                key.check_key(meter)?;
                Ok(dict.get(key, meter)?.is_some())
            }
            (
                Self::Namespace(_) | Self::None | Self::Bool(_) | Self::Int(_) | Self::Float(_),
                _,
            ) => Err(Error::failed(format!(
                "argument of type '{}' is not iterable",
                self.type_name()
            ))),
            (other, needle) => {
                for item in &other.elements(meter)?.items {
                    if item.equals(needle, meter)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
        }
    }
}
