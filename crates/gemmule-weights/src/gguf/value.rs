//! Values of the metadata.

use std::fmt;

/// A metadata value with its type in the file.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(Array),
}

/// A metadata array. All elements have the same type.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    String(Vec<String>),
    Array(Vec<Array>),
}

impl Value {
    /// Returns the value if it is a non-negative integer of any type.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(n) => Some(n.into()),
            Self::U16(n) => Some(n.into()),
            Self::U32(n) => Some(n.into()),
            Self::U64(n) => Some(n),
            Self::I8(n) => n.try_into().ok(),
            Self::I16(n) => n.try_into().ok(),
            Self::I32(n) => n.try_into().ok(),
            Self::I64(n) => n.try_into().ok(),
            _ => None,
        }
    }

    /// Returns a real number.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::F32(x) => Some(x.into()),
            Self::F64(x) => Some(x),
            _ => None,
        }
    }

    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Self::Bool(is) => Some(is),
            _ => None,
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    pub fn as_array(&self) -> Option<&Array> {
        match self {
            Self::Array(array) => Some(array),
            _ => None,
        }
    }
}

impl Array {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::U8(list) => list.len(),
            Self::I8(list) => list.len(),
            Self::U16(list) => list.len(),
            Self::I16(list) => list.len(),
            Self::U32(list) => list.len(),
            Self::I32(list) => list.len(),
            Self::U64(list) => list.len(),
            Self::I64(list) => list.len(),
            Self::F32(list) => list.len(),
            Self::F64(list) => list.len(),
            Self::Bool(list) => list.len(),
            Self::String(list) => list.len(),
            Self::Array(list) => list.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns an element; `None` if the index is out of range.
    pub fn get(&self, index: usize) -> Option<Value> {
        Some(match self {
            Self::U8(list) => Value::U8(*list.get(index)?),
            Self::I8(list) => Value::I8(*list.get(index)?),
            Self::U16(list) => Value::U16(*list.get(index)?),
            Self::I16(list) => Value::I16(*list.get(index)?),
            Self::U32(list) => Value::U32(*list.get(index)?),
            Self::I32(list) => Value::I32(*list.get(index)?),
            Self::U64(list) => Value::U64(*list.get(index)?),
            Self::I64(list) => Value::I64(*list.get(index)?),
            Self::F32(list) => Value::F32(*list.get(index)?),
            Self::F64(list) => Value::F64(*list.get(index)?),
            Self::Bool(list) => Value::Bool(*list.get(index)?),
            Self::String(list) => Value::String(list.get(index)?.clone()),
            Self::Array(list) => Value::Array(list.get(index)?.clone()),
        })
    }

    pub fn as_strings(&self) -> Option<&[String]> {
        match self {
            Self::String(list) => Some(list),
            _ => None,
        }
    }

    pub fn as_f32s(&self) -> Option<&[f32]> {
        match self {
            Self::F32(list) => Some(list),
            _ => None,
        }
    }

    /// Returns the integers of an array; `None` if an element is negative or not an integer.
    pub fn to_u64s(&self) -> Option<Vec<u64>> {
        (0..self.len()).map(|i| self.get(i)?.as_u64()).collect()
    }
}

/// Displays a value's type in messages: `u32`, `array of string`.
pub(super) struct TypeOf<'v>(pub &'v Value);

impl fmt::Display for TypeOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            Value::U8(_) => "u8",
            Value::I8(_) => "i8",
            Value::U16(_) => "u16",
            Value::I16(_) => "i16",
            Value::U32(_) => "u32",
            Value::I32(_) => "i32",
            Value::U64(_) => "u64",
            Value::I64(_) => "i64",
            Value::F32(_) => "f32",
            Value::F64(_) => "f64",
            Value::Bool(_) => "bool",
            Value::String(_) => "string",
            Value::Array(array) => {
                f.write_str("array of ")?;
                match array {
                    Array::U8(_) => "u8",
                    Array::I8(_) => "i8",
                    Array::U16(_) => "u16",
                    Array::I16(_) => "i16",
                    Array::U32(_) => "u32",
                    Array::I32(_) => "i32",
                    Array::U64(_) => "u64",
                    Array::I64(_) => "i64",
                    Array::F32(_) => "f32",
                    Array::F64(_) => "f64",
                    Array::Bool(_) => "bool",
                    Array::String(_) => "string",
                    Array::Array(_) => "array",
                }
            }
        };
        f.write_str(name)
    }
}
