//! Conversion of computed columns to Arrow arrays and tables.

use std::{collections::HashMap, sync::Arc};

use arrow_array::{
    Array as _, ArrayRef, BooleanArray, FixedSizeListArray, Float16Array, Float32Array, Int8Array,
    Int64Array, ListArray, RecordBatch, StringArray, StructArray, UInt8Array,
};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{ArrowError, DataType, Field, Fields, Schema, SchemaRef};
use half::f16;

use super::{Batch, Layout};
use crate::{Column, Kind, Value, Vectors, job::SCALE, window::Kept};

/// Metadata key of the model's identity in the schema.
const MODEL: &str = "gemmule:model";

/// Returns the integers and the scale of a vector in [`Vectors::Int8`].
pub(super) fn int8(vector: &[f32]) -> (impl Iterator<Item = i8>, f32) {
    let max = vector.iter().fold(0f32, |max, value| max.max(value.abs()));
    let scale = max / 127.0;
    let integer = move |value: &f32| match scale > 0.0 {
        true => (value / scale).round().clamp(-127.0, 127.0) as i8,
        false => 0,
    };
    (vector.iter().map(integer), scale)
}

/// Returns the sign bits of a vector, 8 in a byte, the first one in the highest bit.
pub(super) fn signs(vector: &[f32]) -> impl Iterator<Item = u8> {
    let byte = |values: &[f32]| {
        let bits = values.iter().enumerate();
        bits.fold(0, |byte, (i, value)| {
            byte | (u8::from(*value > 0.0) << (7 - i))
        })
    };
    vector.chunks(8).map(byte)
}

fn value_type(vectors: Vectors) -> DataType {
    match vectors {
        Vectors::F32 => DataType::Float32,
        Vectors::F16 => DataType::Float16,
        Vectors::Int8 => DataType::Int8,
        Vectors::Binary => DataType::UInt8,
    }
}

/// Returns the field of a list's elements.
fn element(data: DataType) -> Arc<Field> {
    Arc::new(Field::new("element", data, false))
}

fn vector_type(width: usize, vectors: Vectors) -> DataType {
    DataType::FixedSizeList(element(value_type(vectors)), vectors.stored(width) as i32)
}

/// Returns the type of a computed column.
fn data_type(kind: &Kind, vectors: Vectors) -> DataType {
    match kind {
        Kind::Vector(width) => vector_type(*width, vectors),
        Kind::Vectors(width) => DataType::List(element(vector_type(*width, vectors))),
        Kind::Number => DataType::Float32,
        Kind::Integer => DataType::Int64,
        Kind::Text => DataType::Utf8,
        Kind::Records(fields) => DataType::List(element(DataType::Struct(record(fields)))),
    }
}

/// Returns the fields of records.
fn record(fields: &[Column]) -> Fields {
    let field = |field: &Column| {
        let data = data_type(&field.kind, Vectors::F32);
        Field::new(&field.name, data, false)
    };
    fields.iter().map(field).collect()
}

/// Returns the type of the scales of a column; `None` if the column has no vectors.
fn scale_type(kind: &Kind) -> Option<DataType> {
    match kind {
        Kind::Vector(_) => Some(DataType::Float32),
        Kind::Vectors(_) => Some(DataType::List(element(DataType::Float32))),
        Kind::Number | Kind::Integer | Kind::Text | Kind::Records(_) => None,
    }
}

/// Returns the vectors of a value, each with `width` elements.
fn vectors_of(value: &Value, width: usize) -> impl Iterator<Item = &[f32]> {
    let values: &[f32] = match value {
        Value::Vector(values) | Value::Vectors(values) => values,
        Value::Number(_) | Value::Integer(_) | Value::Text(_) | Value::Records(_) => &[],
    };
    values.chunks_exact(width.max(1))
}

/// Returns vectors as an array of fixed-size lists.
fn stored<'v>(
    all: impl Iterator<Item = &'v [f32]>,
    width: usize,
    vectors: Vectors,
) -> Result<ArrayRef, ArrowError> {
    let values: ArrayRef = match vectors {
        Vectors::F32 => {
            let values: Vec<f32> = all.flatten().copied().collect();
            Arc::new(Float32Array::from(values))
        }
        Vectors::F16 => {
            let values = all.flatten().map(|value| f16::from_f32(*value));
            Arc::new(Float16Array::from(values.collect::<Vec<_>>()))
        }
        Vectors::Int8 => {
            let values = all.flat_map(|vector| int8(vector).0);
            Arc::new(Int8Array::from(values.collect::<Vec<_>>()))
        }
        Vectors::Binary => {
            let values = all.flat_map(signs);
            Arc::new(UInt8Array::from(values.collect::<Vec<_>>()))
        }
    };
    let width = vectors.stored(width) as i32;
    let list = FixedSizeListArray::try_new(element(value_type(vectors)), width, values, None)?;
    Ok(Arc::new(list))
}

/// Returns an array of lists with the given lengths. `values` are the elements of all lists, one list after another.
fn lists(lengths: impl Iterator<Item = usize>, values: ArrayRef) -> Result<ArrayRef, ArrowError> {
    let field = element(values.data_type().clone());
    let mut offsets = vec![0i32];
    let mut end = 0usize;
    for length in lengths {
        end += length;
        let too_many =
            || ArrowError::InvalidArgumentError("a window has too many vectors or records".into());
        offsets.push(i32::try_from(end).map_err(|_| too_many())?);
    }
    let offsets = OffsetBuffer::new(offsets.into());
    Ok(Arc::new(ListArray::try_new(field, offsets, values, None)?))
}

/// Returns a column of numbers, integers or texts as an array.
fn scalars<'v>(kind: &Kind, all: impl Iterator<Item = &'v Value>) -> ArrayRef {
    match kind {
        Kind::Number => {
            let number = |value: &Value| match value {
                Value::Number(number) => *number,
                _ => f32::NAN,
            };
            Arc::new(Float32Array::from(all.map(number).collect::<Vec<_>>()))
        }
        Kind::Integer => {
            let integer = |value: &Value| match value {
                Value::Integer(integer) => *integer,
                _ => 0,
            };
            Arc::new(Int64Array::from(all.map(integer).collect::<Vec<_>>()))
        }
        Kind::Text | Kind::Vector(_) | Kind::Vectors(_) | Kind::Records(_) => {
            let text = |value: &'v Value| match value {
                Value::Text(text) => text.as_str(),
                _ => "",
            };
            Arc::new(StringArray::from_iter_values(all.map(text)))
        }
    }
}

fn records(value: &Value) -> &[Vec<Value>] {
    match value {
        Value::Records(records) => records,
        _ => &[],
    }
}

/// Returns the values of a column as an array.
fn array(kind: &Kind, column: &[&Value], vectors: Vectors) -> Result<ArrayRef, ArrowError> {
    let all = || column.iter().copied();
    match kind {
        Kind::Vector(width) => {
            let own = all().flat_map(|value| vectors_of(value, *width));
            stored(own, *width, vectors)
        }
        Kind::Vectors(width) => {
            let own = all().flat_map(|value| vectors_of(value, *width));
            let lengths = all().map(|value| vectors_of(value, *width).count());
            lists(lengths, stored(own, *width, vectors)?)
        }
        Kind::Number | Kind::Integer | Kind::Text => Ok(scalars(kind, all())),
        Kind::Records(fields) => {
            let each: Vec<&Vec<Value>> = all().flat_map(records).collect();
            let arrays = fields.iter().enumerate().map(|(at, field)| {
                let own = each.iter().filter_map(|record| record.get(at));
                scalars(&field.kind, own)
            });
            let structs = StructArray::try_new(record(fields), arrays.collect(), None)?;
            lists(all().map(|value| records(value).len()), Arc::new(structs))
        }
    }
}

/// Returns the scales of a column of vectors as an array.
fn scales(kind: &Kind, column: &[&Value]) -> Option<Result<ArrayRef, ArrowError>> {
    let (width, is_list) = match kind {
        Kind::Vector(width) => (*width, false),
        Kind::Vectors(width) => (*width, true),
        Kind::Number | Kind::Integer | Kind::Text | Kind::Records(_) => return None,
    };
    let own = column.iter().flat_map(|value| vectors_of(value, width));
    let scales = own.map(|vector| int8(vector).1).collect::<Vec<_>>();
    let scales: ArrayRef = Arc::new(Float32Array::from(scales));
    Some(match is_list {
        true => lists(
            column.iter().map(|value| vectors_of(value, width).count()),
            scales,
        ),
        false => Ok(scales),
    })
}

impl Vectors {
    /// Returns the number of stored values of a vector.
    pub(super) fn stored(self, width: usize) -> usize {
        match self {
            Self::Binary => width.div_ceil(8),
            Self::F32 | Self::F16 | Self::Int8 => width,
        }
    }
}

impl Layout {
    /// Returns the schema of tables: the row number, the kept columns, and each computed column followed by its scales, if it has any.
    pub fn schema(&self) -> SchemaRef {
        let mut fields = vec![Arc::new(Field::new(&self.row, DataType::Int64, false))];
        fields.extend(self.fields.iter().cloned());
        for column in &self.columns {
            let data = data_type(&column.kind, self.vectors);
            fields.push(Arc::new(Field::new(&column.name, data, false)));
            if self.vectors == Vectors::Int8
                && let Some(data) = scale_type(&column.kind)
            {
                fields.push(Arc::new(Field::new(SCALE, data, false)));
            }
        }
        let metadata = HashMap::from([(MODEL.to_owned(), self.model.clone())]);
        Arc::new(Schema::new_with_metadata(fields, metadata))
    }

    /// Returns a table of the rows that are not refused; `None` if there are none.
    pub fn table(&self, batch: &Batch) -> Result<Option<RecordBatch>, String> {
        let written: Vec<&Vec<Value>> = batch.rows.iter().flatten().collect();
        if written.is_empty() {
            return Ok(None);
        }
        let is_written: BooleanArray = batch.rows.iter().map(|row| Some(row.is_ok())).collect();
        let rows = batch.rows.iter().zip(batch.first as i64..);
        let rows = rows
            .filter(|(row, _)| row.is_ok())
            .map(|(_, number)| number);
        let rows: Int64Array = rows.collect::<Vec<_>>().into();
        let mut arrays: Vec<ArrayRef> = vec![Arc::new(rows)];
        if let Kept::Columns(kept) = &batch.kept {
            for column in kept {
                let column = match written.len() == batch.rows.len() {
                    true => column.clone(),
                    false => arrow_select::filter::filter(column, &is_written)
                        .map_err(|e| e.to_string())?,
                };
                arrays.push(column);
            }
        }
        for (at, column) in self.columns.iter().enumerate() {
            let values: Vec<&Value> = written.iter().filter_map(|row| row.get(at)).collect();
            let own = array(&column.kind, &values, self.vectors);
            arrays.push(own.map_err(|e| e.to_string())?);
            if self.vectors == Vectors::Int8
                && let Some(scales) = scales(&column.kind, &values)
            {
                arrays.push(scales.map_err(|e| e.to_string())?);
            }
        }
        let table = RecordBatch::try_new(self.schema(), arrays);
        table.map(Some).map_err(|e| e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_and_signs() {
        let (values, scale) = int8(&[0.5, -1.0, 0.004, 0.0]);
        assert_eq!(values.collect::<Vec<_>>(), [64, -127, 1, 0]);
        assert_eq!(scale, 1.0 / 127.0);
        let (values, scale) = int8(&[0.0, -0.0]);
        assert_eq!((values.collect::<Vec<_>>(), scale), (vec![0, 0], 0.0));
        let tiny = f32::from_bits(1);
        assert_eq!(int8(&[tiny]).0.collect::<Vec<_>>(), [0]);
        let bits: Vec<u8> = signs(&[1.0, 0.0, -1.0, 2.0, 0.0, 0.0, 0.0, 1.0, 3.0]).collect();
        assert_eq!(bits, [0b1001_0001, 0b1000_0000]);
    }
}
