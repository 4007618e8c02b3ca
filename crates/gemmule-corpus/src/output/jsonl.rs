//! JSONL: an object for each row that has values.

use std::io::Write as _;

use arrow_array::{
    Array, ArrayRef,
    cast::AsArray as _,
    types::{
        ArrowPrimitiveType, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type,
        UInt8Type, UInt16Type, UInt32Type, UInt64Type,
    },
};
use arrow_schema::DataType;
use half::f16;
use serde::Serialize;

use super::{
    Batch, Encoder as Encodes, Layout, Part, Placed, Tail,
    columns::{int8, signs},
};
use crate::{Column, Kind, Value, Vectors, job::SCALE, window::Kept};

/// Encodes rows as objects.
pub(super) struct Encoder {
    layout: Layout,
}

/// Checks whether values of an Arrow type can be written as JSON.
pub(super) fn holds(data: &DataType) -> bool {
    use DataType::*;
    matches!(
        data,
        Null | Boolean
            | Int8
            | Int16
            | Int32
            | Int64
            | UInt8
            | UInt16
            | UInt32
            | UInt64
            | Float32
            | Float64
            | Utf8
    )
}

/// Appends a value as JSON. NaN and infinities become null.
fn put(out: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) -> Result<(), String> {
    serde_json::to_writer(out, value).map_err(|e| e.to_string())
}

fn number<T: ArrowPrimitiveType>(
    out: &mut Vec<u8>,
    array: &ArrayRef,
    row: usize,
) -> Result<(), String>
where
    T::Native: Serialize,
{
    put(out, &array.as_primitive::<T>().value(row))
}

/// Appends a value of a kept column.
fn cell(out: &mut Vec<u8>, array: &ArrayRef, row: usize) -> Result<(), String> {
    if array.is_null(row) {
        return put(out, &());
    }
    match array.data_type() {
        DataType::Null => put(out, &()),
        DataType::Boolean => put(out, &array.as_boolean().value(row)),
        DataType::Int8 => number::<Int8Type>(out, array, row),
        DataType::Int16 => number::<Int16Type>(out, array, row),
        DataType::Int32 => number::<Int32Type>(out, array, row),
        DataType::Int64 => number::<Int64Type>(out, array, row),
        DataType::UInt8 => number::<UInt8Type>(out, array, row),
        DataType::UInt16 => number::<UInt16Type>(out, array, row),
        DataType::UInt32 => number::<UInt32Type>(out, array, row),
        DataType::UInt64 => number::<UInt64Type>(out, array, row),
        DataType::Float32 => number::<Float32Type>(out, array, row),
        DataType::Float64 => number::<Float64Type>(out, array, row),
        DataType::Utf8 => put(out, array.as_string::<i32>().value(row)),
        other => Err(format!("a kept column has the type {other}")),
    }
}

/// Appends an array. `element` appends each of its elements.
fn array<T>(
    out: &mut Vec<u8>,
    values: impl Iterator<Item = T>,
    element: impl Fn(&mut Vec<u8>, T) -> Result<(), String>,
) -> Result<(), String> {
    out.push(b'[');
    for (i, value) in values.enumerate() {
        if i > 0 {
            out.push(b',');
        }
        element(out, value)?;
    }
    out.push(b']');
    Ok(())
}

/// Appends numbers as an array.
fn numbers<T: Serialize>(out: &mut Vec<u8>, values: impl Iterator<Item = T>) -> Result<(), String> {
    array(out, values, |out, value| put(out, &value))
}

/// Appends a vector as a JSON array.
fn vector(out: &mut Vec<u8>, v: &[f32], vectors: Vectors) -> Result<(), String> {
    match vectors {
        Vectors::F32 => numbers(out, v.iter()),
        Vectors::F16 => numbers(out, v.iter().map(|v| f16::from_f32(*v).to_f32())),
        Vectors::Binary => numbers(out, signs(v)),
        Vectors::Int8 => numbers(out, int8(v).0),
    }
}

/// Appends a name and a colon.
fn name(out: &mut Vec<u8>, name: &str) -> Result<(), String> {
    put(out, name)?;
    out.push(b':');
    Ok(())
}

/// Appends a record as an object.
fn record(out: &mut Vec<u8>, fields: &[Column], values: &[Value]) -> Result<(), String> {
    out.push(b'{');
    for (at, (field, value)) in fields.iter().zip(values).enumerate() {
        if at > 0 {
            out.push(b',');
        }
        computed(out, field, value, Vectors::F32)?;
    }
    out.push(b'}');
    Ok(())
}

/// Appends the members of a computed column: the value and, if it has any, the scales.
fn computed(
    out: &mut Vec<u8>,
    column: &Column,
    value: &Value,
    vectors: Vectors,
) -> Result<(), String> {
    name(out, &column.name)?;
    match (value, &column.kind) {
        (Value::Vector(v), _) => {
            vector(out, v, vectors)?;
            if vectors == Vectors::Int8 {
                out.push(b',');
                name(out, SCALE)?;
                put(out, &int8(v).1)?;
            }
            Ok(())
        }
        (Value::Vectors(v), Kind::Vectors(width)) => {
            let rows = || v.chunks_exact((*width).max(1));
            array(out, rows(), |out, v| vector(out, v, vectors))?;
            if vectors == Vectors::Int8 {
                out.push(b',');
                name(out, SCALE)?;
                numbers(out, rows().map(|v| int8(v).1))?;
            }
            Ok(())
        }
        (Value::Number(number), _) => put(out, number),
        (Value::Integer(integer), _) => put(out, integer),
        (Value::Text(text), _) => put(out, text),
        (Value::Records(records), Kind::Records(fields)) => {
            array(out, records.iter(), |out, values| {
                record(out, fields, values)
            })
        }
        (Value::Vectors(_) | Value::Records(_), kind) => Err(format!(
            "column `{}` is {kind}, and its value is not",
            column.name
        )),
    }
}

impl Encoder {
    pub fn new(layout: Layout) -> Self {
        Self { layout }
    }

    fn row(
        &self,
        out: &mut Vec<u8>,
        batch: &Batch,
        at: usize,
        values: &[Value],
    ) -> Result<(), String> {
        out.push(b'{');
        name(out, &self.layout.row)?;
        let _ = write!(out, "{}", batch.first + at as u64);
        match &batch.kept {
            Kept::Members(members) if members[at].is_empty() => {}
            Kept::Members(members) => {
                out.push(b',');
                out.extend_from_slice(members[at].as_bytes());
            }
            Kept::Columns(columns) => {
                for (field, array) in self.layout.fields.iter().zip(columns) {
                    out.push(b',');
                    name(out, field.name())?;
                    cell(out, array, at)?;
                }
            }
        }
        for (column, value) in self.layout.columns.iter().zip(values) {
            out.push(b',');
            computed(out, column, value, self.layout.vectors)?;
        }
        out.extend_from_slice(b"}\n");
        Ok(())
    }
}

impl Encodes for Encoder {
    fn head(&self) -> Result<Vec<u8>, String> {
        Ok(Vec::new())
    }

    fn window(&self, batch: &Batch) -> Result<Part, String> {
        let mut bytes = Vec::new();
        for (at, row) in batch.rows.iter().enumerate() {
            if let Ok(values) = row {
                self.row(&mut bytes, batch, at, values)?;
            }
        }
        Ok(Part {
            bytes,
            note: String::new(),
        })
    }

    fn tail(&self, _: &[Placed], _: u64, _: u64) -> Result<Tail, String> {
        Ok(Tail::default())
    }
}
