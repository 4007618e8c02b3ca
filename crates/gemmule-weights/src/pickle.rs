//! An interpreter for the pickles of state dicts.
//!
//! A pickle is a program for a stack machine that can call any function of Python. This interpreter knows the instructions and the
//! functions that `torch.save` needs for a dictionary of tensors, and refuses all others by name. Its functions only build values.

use std::ops::Range;

use thiserror::Error;

/// Maximum number of values of a pickle. A state dict has about twenty for each tensor.
const MAX_VALUES: usize = 1 << 22;

/// Reason for refusing a pickle.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PickleError {
    #[error("the pickle ends early, at byte {at}")]
    EndsEarly { at: usize },
    #[error(
        "the pickle uses the instruction {opcode:#04x} at byte {at}, which a dictionary of tensors does not need"
    )]
    Opcode { opcode: u8, at: usize },
    #[error("the pickle has version {found}; expected 2 to 5")]
    Version { found: u8 },
    #[error(
        "the pickle names `{name}`, which a dictionary of tensors does not need; it is not loaded"
    )]
    Global { name: String },
    #[error("the pickle calls `{name}` with unexpected arguments at byte {at}")]
    Call { name: &'static str, at: usize },
    #[error("the pickle is malformed at byte {at}: {problem}")]
    Malformed { at: usize, problem: &'static str },
    #[error("the pickle has more than {MAX_VALUES} values; expected a dictionary of tensors")]
    TooLarge,
}

/// Type of the elements of a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F64,
    F32,
    F16,
    BF16,
    I64,
    I32,
    I16,
    I8,
    U8,
    Bool,
}

impl Element {
    /// Returns the size of an element in bytes.
    pub fn bytes(self) -> u64 {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::BF16 | Self::I16 => 2,
            Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }
}

/// A function or class that pickles may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Global {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Size,
    Storage(Element),
}

impl Global {
    fn find(module: &str, name: &str) -> Option<Self> {
        Some(match (module, name) {
            ("collections", "OrderedDict") => Self::OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2") => Self::RebuildTensor,
            ("torch._utils", "_rebuild_parameter") => Self::RebuildParameter,
            ("torch", "Size") => Self::Size,
            ("torch", "DoubleStorage") => Self::Storage(Element::F64),
            ("torch", "FloatStorage") => Self::Storage(Element::F32),
            ("torch", "HalfStorage") => Self::Storage(Element::F16),
            ("torch", "BFloat16Storage") => Self::Storage(Element::BF16),
            ("torch", "LongStorage") => Self::Storage(Element::I64),
            ("torch", "IntStorage") => Self::Storage(Element::I32),
            ("torch", "ShortStorage") => Self::Storage(Element::I16),
            ("torch", "CharStorage") => Self::Storage(Element::I8),
            ("torch", "ByteStorage") => Self::Storage(Element::U8),
            ("torch", "BoolStorage") => Self::Storage(Element::Bool),
            _ => return None,
        })
    }

    fn name(self) -> &'static str {
        match self {
            Self::OrderedDict => "collections.OrderedDict",
            Self::RebuildTensor => "torch._utils._rebuild_tensor_v2",
            Self::RebuildParameter => "torch._utils._rebuild_parameter",
            Self::Size => "torch.Size",
            Self::Storage(_) => "a storage",
        }
    }
}

/// Index of a value in [`Pickle::values`]. Values refer to each other by index, so that no depth of nesting, and no cycle, can
/// overflow the stack.
pub(crate) type Id = usize;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    None,
    Bool,
    Int(i64),
    Float,
    /// Range of the text in the pickle, which is valid UTF-8.
    Text(Range<usize>),
    Tuple(Vec<Id>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Global(Global),
    /// Elements under a key of the archive.
    Storage {
        element: Element,
        key: Id,
        n: i64,
    },
    Tensor(Tensor),
}

/// A view of a storage, as recorded.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) element: Element,
    /// The storage's key, a [`Value::Text`].
    pub(crate) key: Id,
    /// Number of elements of the storage.
    pub(crate) n: i64,
    /// First element of the view.
    pub(crate) offset: i64,
    pub(crate) dims: Vec<i64>,
    pub(crate) strides: Vec<i64>,
}

/// The values of a pickle.
pub(crate) struct Pickle<'p> {
    bytes: &'p [u8],
    pub(crate) values: Vec<Value>,
    /// The result of the program.
    pub(crate) root: Id,
}

impl<'p> Pickle<'p> {
    /// Interprets a pickle.
    pub(crate) fn read(bytes: &'p [u8]) -> Result<Self, PickleError> {
        let mut machine = Machine {
            bytes,
            at: 0,
            values: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Vec::new(),
        };
        let root = machine.run()?;
        Ok(Self {
            bytes,
            values: machine.values,
            root,
        })
    }

    /// Returns the text of a value; `None` if it is no text.
    pub(crate) fn text(&self, id: Id) -> Option<&'p str> {
        match &self.values[id] {
            Value::Text(range) => std::str::from_utf8(&self.bytes[range.clone()]).ok(),
            _ => None,
        }
    }
}

struct Machine<'p> {
    bytes: &'p [u8],
    /// Position of the next byte.
    at: usize,
    values: Vec<Value>,
    stack: Vec<Id>,
    /// Heights of the stack at the marks.
    marks: Vec<usize>,
    /// Values by memo index.
    memo: Vec<Option<Id>>,
}

impl<'p> Machine<'p> {
    fn run(&mut self) -> Result<Id, PickleError> {
        loop {
            let at = self.at;
            match self.byte()? {
                // PROTO
                0x80 => {
                    let found = self.byte()?;
                    if !(2..=5).contains(&found) {
                        return Err(PickleError::Version { found });
                    }
                }
                // FRAME
                0x95 => _ = self.take(8)?,
                b'(' => self.marks.push(self.stack.len()),
                b'N' => self.push(Value::None)?,
                // NEWTRUE, NEWFALSE
                0x88 | 0x89 => self.push(Value::Bool)?,
                b'K' => {
                    let n = self.byte()?;
                    self.push(Value::Int(n.into()))?;
                }
                b'M' => {
                    let n = u16::from_le_bytes(self.array()?);
                    self.push(Value::Int(n.into()))?;
                }
                b'J' => {
                    let n = i32::from_le_bytes(self.array()?);
                    self.push(Value::Int(n.into()))?;
                }
                // LONG1
                0x8a => {
                    let n = self.byte()?;
                    let n = self.long(n.into())?;
                    self.push(Value::Int(n))?;
                }
                b'G' => {
                    self.take(8)?;
                    self.push(Value::Float)?;
                }
                // SHORT_BINUNICODE
                0x8c => {
                    let n = self.byte()?;
                    self.text(n.into())?;
                }
                b'X' => {
                    let n = u32::from_le_bytes(self.array()?);
                    self.text(n as usize)?;
                }
                b')' => self.push(Value::Tuple(Vec::new()))?,
                b']' => self.push(Value::List(Vec::new()))?,
                b'}' => self.push(Value::Dict(Vec::new()))?,
                // TUPLE1, TUPLE2, TUPLE3
                opcode @ 0x85..=0x87 => {
                    let n = usize::from(opcode - 0x84);
                    let items = self.pop_many(n)?;
                    self.push(Value::Tuple(items))?;
                }
                b't' => {
                    let items = self.pop_to_mark()?;
                    self.push(Value::Tuple(items))?;
                }
                b'a' => {
                    let item = self.pop()?;
                    self.list()?.push(item);
                }
                b'e' => {
                    let items = self.pop_to_mark()?;
                    self.list()?.extend(items);
                }
                b's' => {
                    let pair = self.pop_many(2)?;
                    self.dict()?.push((pair[0], pair[1]));
                }
                b'u' => {
                    let items = self.pop_to_mark()?;
                    let (pairs, rest) = items.as_chunks::<2>();
                    if !rest.is_empty() {
                        return Err(self.malformed("a key has no value"));
                    }
                    self.dict()?.extend(pairs.iter().map(|&[k, v]| (k, v)));
                }
                b'q' => {
                    let index = self.byte()?;
                    self.remember(index.into())?;
                }
                b'r' => {
                    let index = u32::from_le_bytes(self.array()?);
                    self.remember(index as usize)?;
                }
                // MEMOIZE
                0x94 => self.remember(self.memo.len())?,
                b'h' => {
                    let index = self.byte()?;
                    self.recall(index.into())?;
                }
                b'j' => {
                    let index = u32::from_le_bytes(self.array()?);
                    self.recall(index as usize)?;
                }
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.global(module, name)?;
                }
                // STACK_GLOBAL
                0x93 => {
                    let names = self.pop_many(2)?;
                    let named = |id: Id| match &self.values[id] {
                        Value::Text(range) => std::str::from_utf8(&self.bytes[range.clone()]).ok(),
                        _ => None,
                    };
                    match (named(names[0]), named(names[1])) {
                        (Some(module), Some(name)) => self.global(module, name)?,
                        _ => return Err(self.malformed("a global has no name")),
                    }
                }
                b'R' => {
                    let pair = self.pop_many(2)?;
                    let value = self.call(pair[0], pair[1], at)?;
                    self.push(value)?;
                }
                b'b' => {
                    // Attributes of an OrderedDict, such as `_metadata`, which has the versions of modules.
                    self.pop()?;
                    self.dict()?;
                }
                b'Q' => {
                    let id = self.pop()?;
                    let value = self.storage(id)?;
                    self.push(value)?;
                }
                b'.' => return self.pop(),
                opcode => return Err(PickleError::Opcode { opcode, at }),
            }
        }
    }

    fn malformed(&self, problem: &'static str) -> PickleError {
        PickleError::Malformed {
            at: self.at,
            problem,
        }
    }

    fn take(&mut self, n: usize) -> Result<&'p [u8], PickleError> {
        let rest = &self.bytes[self.at..];
        let taken = rest.get(..n).ok_or(PickleError::EndsEarly {
            at: self.bytes.len(),
        })?;
        self.at += n;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], PickleError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn byte(&mut self) -> Result<u8, PickleError> {
        Ok(self.array::<1>()?[0])
    }

    /// Reads a signed integer of `n` bytes.
    fn long(&mut self, n: usize) -> Result<i64, PickleError> {
        let bytes = self.take(n)?;
        if n > 8 {
            return Err(self.malformed("an integer has more than 64 bits"));
        }
        let fill = match bytes.last() {
            Some(last) if last & 0x80 != 0 => 0xff,
            _ => 0,
        };
        let mut all = [fill; 8];
        all[..n].copy_from_slice(bytes);
        Ok(i64::from_le_bytes(all))
    }

    fn text(&mut self, n: usize) -> Result<(), PickleError> {
        let start = self.at;
        let bytes = self.take(n)?;
        if std::str::from_utf8(bytes).is_err() {
            return Err(self.malformed("a text is not valid UTF-8"));
        }
        self.push(Value::Text(start..self.at))
    }

    /// Reads a line of at most 256 bytes.
    fn line(&mut self) -> Result<&'p str, PickleError> {
        const MAX: usize = 256;
        let rest = &self.bytes[self.at..];
        let end = rest.iter().take(MAX).position(|&b| b == b'\n');
        let end = end.ok_or_else(|| self.malformed("a name has no end"))?;
        let line = self.take(end + 1)?;
        std::str::from_utf8(&line[..end]).map_err(|_| self.malformed("a name is not valid UTF-8"))
    }

    fn push(&mut self, value: Value) -> Result<(), PickleError> {
        if self.values.len() >= MAX_VALUES {
            return Err(PickleError::TooLarge);
        }
        self.stack.push(self.values.len());
        self.values.push(value);
        Ok(())
    }

    /// Height below which no instruction may pop.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Id, PickleError> {
        if self.stack.len() <= self.floor() {
            return Err(self.malformed("an instruction has no operand"));
        }
        Ok(self.stack.pop().expect("the stack is not empty"))
    }

    fn pop_many(&mut self, n: usize) -> Result<Vec<Id>, PickleError> {
        match self.stack.len().checked_sub(n) {
            Some(at) if at >= self.floor() => Ok(self.stack.split_off(at)),
            _ => Err(self.malformed("an instruction has no operand")),
        }
    }

    fn pop_to_mark(&mut self) -> Result<Vec<Id>, PickleError> {
        let mark = self.marks.pop();
        let mark = mark.ok_or_else(|| self.malformed("there is no mark"))?;
        Ok(self.stack.split_off(mark))
    }

    /// Returns the value on top of the stack.
    fn top(&mut self) -> Result<&mut Value, PickleError> {
        let top = self.pop()?;
        self.stack.push(top);
        Ok(&mut self.values[top])
    }

    fn list(&mut self) -> Result<&mut Vec<Id>, PickleError> {
        let problem = self.malformed("items are added to a value that is no list");
        match self.top()? {
            Value::List(items) => Ok(items),
            _ => Err(problem),
        }
    }

    fn dict(&mut self) -> Result<&mut Vec<(Id, Id)>, PickleError> {
        let problem = self.malformed("items are set in a value that is no dictionary");
        match self.top()? {
            Value::Dict(pairs) => Ok(pairs),
            _ => Err(problem),
        }
    }

    fn remember(&mut self, index: usize) -> Result<(), PickleError> {
        let top = self.pop()?;
        self.stack.push(top);
        if index >= MAX_VALUES {
            return Err(PickleError::TooLarge);
        }
        if index >= self.memo.len() {
            self.memo.resize(index + 1, None);
        }
        self.memo[index] = Some(top);
        Ok(())
    }

    fn recall(&mut self, index: usize) -> Result<(), PickleError> {
        match self.memo.get(index) {
            Some(&Some(id)) if self.stack.len() < MAX_VALUES => {
                self.stack.push(id);
                Ok(())
            }
            Some(&Some(_)) => Err(PickleError::TooLarge),
            _ => Err(self.malformed("a memo entry is read before it is written")),
        }
    }

    fn global(&mut self, module: &str, name: &str) -> Result<(), PickleError> {
        match Global::find(module, name) {
            Some(global) => self.push(Value::Global(global)),
            None => Err(PickleError::Global {
                name: format!("{module}.{name}"),
            }),
        }
    }

    fn call(&self, function: Id, arguments: Id, at: usize) -> Result<Value, PickleError> {
        let Value::Global(function) = self.values[function] else {
            return Err(self.malformed("a value that is no function is called"));
        };
        let wrong = PickleError::Call {
            name: function.name(),
            at,
        };
        let Value::Tuple(arguments) = &self.values[arguments] else {
            return Err(wrong);
        };
        let value = match (function, arguments.as_slice()) {
            (Global::OrderedDict, []) => Some(Value::Dict(Vec::new())),
            (Global::OrderedDict, &[pairs]) => self.pairs(pairs).map(Value::Dict),
            (Global::Size, &[dims]) => Some(self.values[dims].clone()),
            (Global::RebuildTensor, &[storage, offset, dims, strides, ..]) => {
                self.tensor(storage, offset, dims, strides)
            }
            (Global::RebuildParameter, &[tensor, ..]) => match &self.values[tensor] {
                Value::Tensor(tensor) => Some(Value::Tensor(tensor.clone())),
                _ => None,
            },
            _ => None,
        };
        value.ok_or(wrong)
    }

    /// Reads a list of pairs, from which Python 2 builds an OrderedDict.
    fn pairs(&self, list: Id) -> Option<Vec<(Id, Id)>> {
        let Value::List(items) = &self.values[list] else {
            return None;
        };
        let pair = |&id: &Id| match &self.values[id] {
            Value::List(pair) | Value::Tuple(pair) => match pair.as_slice() {
                &[key, value] => Some((key, value)),
                _ => None,
            },
            _ => None,
        };
        items.iter().map(pair).collect()
    }

    fn tensor(&self, storage: Id, offset: Id, dims: Id, strides: Id) -> Option<Value> {
        const MAX_DIMS: usize = 8;
        let ints = |id: Id| match &self.values[id] {
            Value::Tuple(items) if items.len() <= MAX_DIMS => {
                let int = |&id: &Id| match self.values[id] {
                    Value::Int(n) => Some(n),
                    _ => None,
                };
                items.iter().map(int).collect::<Option<Vec<i64>>>()
            }
            _ => None,
        };
        let (&Value::Storage { element, key, n }, &Value::Int(offset)) =
            (&self.values[storage], &self.values[offset])
        else {
            return None;
        };
        Some(Value::Tensor(Tensor {
            element,
            key,
            n,
            offset,
            dims: ints(dims)?,
            strides: ints(strides)?,
        }))
    }

    /// Reads a persistent id: `("storage", class, key, device, number of elements)`.
    fn storage(&self, id: Id) -> Result<Value, PickleError> {
        let found = || {
            let Value::Tuple(items) = &self.values[id] else {
                return None;
            };
            let &[_, class, key, _, n] = items.as_slice() else {
                return None;
            };
            match (&self.values[class], &self.values[key], &self.values[n]) {
                (&Value::Global(Global::Storage(element)), Value::Text(_), &Value::Int(n)) => {
                    Some(Value::Storage { element, key, n })
                }
                _ => None,
            }
        };
        found().ok_or_else(|| self.malformed("a persistent id is no storage"))
    }
}
