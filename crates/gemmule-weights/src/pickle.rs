//! An interpreter for the pickles of state dicts.
//!
//! A pickle is a program for a stack machine that can call any Python function. This interpreter supports only the opcodes and functions
//! that `torch.save` uses for a dictionary of tensors, and refuses all others by name. The supported functions only build values.

mod opcode;
mod value;

use thiserror::Error;

use value::{Global, Id};
pub(crate) use value::{Storage, Value, View};

/// Maximum number of values of a pickle, including list items and uses of the memo. A state dict has about 40 per tensor.
const MAX_VALUES: usize = 1 << 22;
/// Maximum number of open marks, which limits the nesting of tuples and lists under construction.
const MAX_MARKS: usize = 1 << 10;
/// Maximum size of a string in bytes.
const MAX_TEXT: usize = 1 << 20;

/// Reason for refusing a pickle.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PickleError {
    #[error("the pickle ends early, at byte {at}; download the file again")]
    EndsEarly { at: usize },
    #[error(
        "the pickle uses the instruction {} at byte {at}, which a dictionary of tensors does not need; it is not loaded",
        instruction(*opcode)
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
    #[error("the pickle nests more than {MAX_MARKS} values; expected a dictionary of tensors")]
    TooDeep,
    #[error(
        "the pickle has a text of {bytes} bytes, above the limit of {MAX_TEXT}; expected a dictionary of tensors"
    )]
    LongText { bytes: usize },
}

fn instruction(opcode: u8) -> String {
    match opcode::name(opcode) {
        Some(name) => name.to_owned(),
        None => format!("{opcode:#04x}"),
    }
}

/// Prepares text from a file for an error message: truncates it and escapes control characters.
pub(crate) fn shown(text: &str) -> String {
    const MAX: usize = 120;
    let mut shown: String = text
        .chars()
        .take(MAX)
        .flat_map(char::escape_debug)
        .collect();
    if text.chars().nth(MAX).is_some() {
        shown.push('…');
    }
    shown
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
            n_values: 0,
        };
        let root = machine.run()?;
        Ok(Self {
            bytes,
            values: machine.values,
            root,
        })
    }

    /// Returns the text of a string value; `None` for other values.
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
    /// Stack heights at the marks.
    marks: Vec<usize>,
    /// Values by memo index.
    memo: Vec<Option<Id>>,
    /// Number of values so far, as defined by [`MAX_VALUES`].
    n_values: usize,
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
                b'(' => {
                    if self.marks.len() >= MAX_MARKS {
                        return Err(PickleError::TooDeep);
                    }
                    self.marks.push(self.stack.len());
                }
                // NONE, NEWTRUE, NEWFALSE
                b'N' | 0x88 | 0x89 => self.push(Value::Other)?,
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
                    let value = self.long(n.into())?;
                    self.push(value)?;
                }
                b'G' => {
                    self.take(8)?;
                    self.push(Value::Other)?;
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
                    // Discard the attributes of an OrderedDict, such as `_metadata` with the versions of modules.
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
    fn long(&mut self, n: usize) -> Result<Value, PickleError> {
        let bytes = self.take(n)?;
        let fill = match bytes.last() {
            Some(last) if last & 0x80 != 0 => 0xff,
            _ => 0,
        };
        let mut all = [fill; 8];
        Ok(match all.get_mut(..n) {
            Some(low) => {
                low.copy_from_slice(bytes);
                Value::Int(i64::from_le_bytes(all))
            }
            None => Value::Other,
        })
    }

    fn text(&mut self, n: usize) -> Result<(), PickleError> {
        if n > MAX_TEXT {
            return Err(PickleError::LongText { bytes: n });
        }
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

    /// Counts `n` more values.
    fn count(&mut self, n: usize) -> Result<(), PickleError> {
        self.n_values = self.n_values.saturating_add(n);
        match self.n_values > MAX_VALUES {
            true => Err(PickleError::TooLarge),
            false => Ok(()),
        }
    }

    fn push(&mut self, value: Value) -> Result<(), PickleError> {
        self.count(1)?;
        self.stack.push(self.values.len());
        self.values.push(value);
        Ok(())
    }

    /// Height below which the stack may not be popped.
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
        let Some(&Some(id)) = self.memo.get(index) else {
            return Err(self.malformed("a memo entry is read before it is written"));
        };
        self.count(1)?;
        self.stack.push(id);
        Ok(())
    }

    fn global(&mut self, module: &str, name: &str) -> Result<(), PickleError> {
        match Global::find(module, name) {
            Some(global) => self.push(Value::Global(global)),
            None => Err(PickleError::Global {
                name: format!("{}.{}", shown(module), shown(name)),
            }),
        }
    }

    fn call(&mut self, function: Id, arguments: Id, at: usize) -> Result<Value, PickleError> {
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
            (Global::Size, &[dims]) => match &self.values[dims] {
                Value::Tuple(dims) | Value::List(dims) => Some(Value::Tuple(dims.clone())),
                _ => None,
            },
            (Global::RebuildTensor, &[storage, offset, dims, strides, ..]) => {
                self.tensor(storage, offset, dims, strides, None)
            }
            (Global::RebuildTypedTensor, &[storage, offset, dims, strides, _, _, dtype, ..]) => {
                match self.values[dtype] {
                    Value::Global(Global::DType(element)) => {
                        self.tensor(storage, offset, dims, strides, Some(element))
                    }
                    _ => None,
                }
            }
            (Global::RebuildParameter, &[tensor, ..]) => match &self.values[tensor] {
                Value::Tensor(tensor) => Some(Value::Tensor(tensor.clone())),
                _ => None,
            },
            _ => None,
        };
        let value = value.ok_or(wrong)?;
        // A call copies its argument. Count the copy, because a short pickle could otherwise build a large value.
        self.count(match &value {
            Value::Tuple(items) => items.len(),
            Value::Dict(pairs) => pairs.len(),
            Value::Tensor(view) => view.dims.len(),
            _ => 0,
        })?;
        Ok(value)
    }

    /// Reads a list of pairs, the argument of an OrderedDict.
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

    fn tensor(
        &self,
        storage: Id,
        offset: Id,
        dims: Id,
        strides: Id,
        dtype: Option<crate::Element>,
    ) -> Option<Value> {
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
        let (&Value::Storage(storage), &Value::Int(offset)) =
            (&self.values[storage], &self.values[offset])
        else {
            return None;
        };
        let element = match (storage.element, dtype) {
            (Some(element), None) | (None, Some(element)) => element,
            // The storage has a known type, and the argument repeats it.
            (Some(stored), Some(element)) if stored == element => element,
            _ => return None,
        };
        Some(Value::Tensor(Box::new(View {
            element,
            storage,
            offset,
            dims: ints(dims)?,
            strides: ints(strides)?,
        })))
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
            let element = match self.values[class] {
                Value::Global(Global::Storage(element)) => Some(element),
                Value::Global(Global::UntypedStorage) => None,
                _ => return None,
            };
            match (&self.values[key], &self.values[n]) {
                (Value::Text(_), &Value::Int(n)) => {
                    Some(Value::Storage(Storage { element, key, n }))
                }
                _ => None,
            }
        };
        found().ok_or_else(|| self.malformed("a persistent id is no storage"))
    }
}
