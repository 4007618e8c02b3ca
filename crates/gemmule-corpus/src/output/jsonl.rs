//! JSONL: an object for each row that has a vector.

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
    vectors::{int8, signs},
};
use crate::{Vectors, job::SCALE, window::Kept};

/// Encodes rows as objects.
pub(super) struct Encoder {
    layout: Layout,
}

/// Checks whether values of a type can be written.
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

/// Appends a value as JSON. Floats that are not finite are null.
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

/// Appends a value of a column.
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

/// Appends numbers as an array.
fn numbers<T: Serialize>(out: &mut Vec<u8>, values: impl Iterator<Item = T>) -> Result<(), String> {
    out.push(b'[');
    for (i, value) in values.enumerate() {
        if i > 0 {
            out.push(b',');
        }
        put(out, &value)?;
    }
    out.push(b']');
    Ok(())
}

impl Encoder {
    pub fn new(layout: Layout) -> Self {
        Self { layout }
    }

    fn name(&self, out: &mut Vec<u8>, name: &str) -> Result<(), String> {
        put(out, name)?;
        out.push(b':');
        Ok(())
    }

    fn row(&self, out: &mut Vec<u8>, batch: &Batch, at: usize, v: &[f32]) -> Result<(), String> {
        out.push(b'{');
        self.name(out, &self.layout.row)?;
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
                    self.name(out, field.name())?;
                    cell(out, array, at)?;
                }
            }
        }
        out.push(b',');
        self.name(out, &self.layout.vector)?;
        match self.layout.vectors {
            Vectors::F32 => numbers(out, v.iter())?,
            Vectors::F16 => numbers(out, v.iter().map(|v| f16::from_f32(*v).to_f32()))?,
            Vectors::Binary => numbers(out, signs(v))?,
            Vectors::Int8 => {
                let (values, scale) = int8(v);
                numbers(out, values)?;
                out.push(b',');
                self.name(out, SCALE)?;
                put(out, &scale)?;
            }
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
            if let Ok(vector) = row {
                self.row(&mut bytes, batch, at, vector)?;
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
