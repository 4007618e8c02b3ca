//! Types of vectors, and tables with them.

use std::{collections::HashMap, sync::Arc};

use arrow_array::{
    ArrayRef, BooleanArray, FixedSizeListArray, Float16Array, Float32Array, Int8Array, Int64Array,
    RecordBatch, UInt8Array,
};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use half::f16;

use super::{Batch, Layout};
use crate::{Vectors, job::SCALE, window::Kept};

/// The key of the model's identity in the metadata of tables.
const MODEL: &str = "gemmule:model";

/// Returns the reason why a vector cannot be written.
pub(crate) fn check(vector: &[f32], vectors: Vectors) -> Result<(), String> {
    if let Some(value) = vector.iter().find(|value| !value.is_finite()) {
        return Err(format!("the model gave the value {value}"));
    }
    let too_large = |value: &&f32| !f16::from_f32(**value).is_finite();
    match vector.iter().find(too_large) {
        Some(value) if vectors == Vectors::F16 => Err(format!(
            "the model gave the value {value}, and the max of f16 is 65504"
        )),
        _ => Ok(()),
    }
}

/// Returns the integers of a vector and their scale.
pub(super) fn int8(vector: &[f32]) -> (impl Iterator<Item = i8>, f32) {
    let max = vector.iter().fold(0f32, |max, value| max.max(value.abs()));
    let scale = max / 127.0;
    let integer = move |value: &f32| match scale > 0.0 {
        true => (value / scale).round().clamp(-127.0, 127.0) as i8,
        false => 0,
    };
    (vector.iter().map(integer), scale)
}

/// Returns the signs of a vector, 8 in a byte, the first one in the highest bit.
pub(super) fn signs(vector: &[f32]) -> impl Iterator<Item = u8> {
    let byte = |values: &[f32]| {
        let bits = values.iter().enumerate();
        bits.fold(0, |byte, (i, value)| {
            byte | (u8::from(*value > 0.0) << (7 - i))
        })
    };
    vector.chunks(8).map(byte)
}

impl Layout {
    /// Returns the number of stored values of a vector.
    pub fn stored(&self) -> usize {
        match self.vectors {
            Vectors::Binary => self.width.div_ceil(8),
            _ => self.width,
        }
    }

    /// Returns the type of a stored value.
    fn value(&self) -> DataType {
        match self.vectors {
            Vectors::F32 => DataType::Float32,
            Vectors::F16 => DataType::Float16,
            Vectors::Int8 => DataType::Int8,
            Vectors::Binary => DataType::UInt8,
        }
    }

    fn element(&self) -> Arc<Field> {
        Arc::new(Field::new("element", self.value(), false))
    }

    /// Returns the schema of tables: the row number, kept columns, the vector and its scale.
    pub fn schema(&self) -> SchemaRef {
        let mut fields = vec![Arc::new(Field::new(&self.row, DataType::Int64, false))];
        fields.extend(self.fields.iter().cloned());
        let vector = DataType::FixedSizeList(self.element(), self.stored() as i32);
        fields.push(Arc::new(Field::new(&self.vector, vector, false)));
        if self.vectors == Vectors::Int8 {
            fields.push(Arc::new(Field::new(SCALE, DataType::Float32, false)));
        }
        let metadata = HashMap::from([(MODEL.to_owned(), self.model.clone())]);
        Arc::new(Schema::new_with_metadata(fields, metadata))
    }

    /// Returns the rows with vectors as a table, unless there are none.
    pub fn table(&self, batch: &Batch) -> Result<Option<RecordBatch>, String> {
        let vectors: Vec<&[f32]> = batch.rows.iter().flatten().map(Vec::as_slice).collect();
        if vectors.is_empty() {
            return Ok(None);
        }
        let is_written: BooleanArray = batch.rows.iter().map(|row| Some(row.is_ok())).collect();
        let rows = batch.rows.iter().zip(batch.first as i64..);
        let rows = rows
            .filter(|(row, _)| row.is_ok())
            .map(|(_, number)| number);
        let rows: Int64Array = rows.collect::<Vec<_>>().into();
        let mut columns: Vec<ArrayRef> = vec![Arc::new(rows)];
        if let Kept::Columns(kept) = &batch.kept {
            for column in kept {
                let column = match vectors.len() == batch.rows.len() {
                    true => column.clone(),
                    false => arrow_select::filter::filter(column, &is_written)
                        .map_err(|e| e.to_string())?,
                };
                columns.push(column);
            }
        }
        let values: ArrayRef = match self.vectors {
            Vectors::F32 => Arc::new(Float32Array::from(vectors.concat())),
            Vectors::F16 => {
                let values = vectors
                    .iter()
                    .copied()
                    .flatten()
                    .map(|value| f16::from_f32(*value));
                Arc::new(Float16Array::from(values.collect::<Vec<_>>()))
            }
            Vectors::Int8 => {
                let values = vectors.iter().flat_map(|vector| int8(vector).0);
                Arc::new(Int8Array::from(values.collect::<Vec<_>>()))
            }
            Vectors::Binary => {
                let values = vectors.iter().flat_map(|vector| signs(vector));
                Arc::new(UInt8Array::from(values.collect::<Vec<_>>()))
            }
        };
        let width = self.stored() as i32;
        let list = FixedSizeListArray::try_new(self.element(), width, values, None);
        columns.push(Arc::new(list.map_err(|e| e.to_string())?));
        if self.vectors == Vectors::Int8 {
            let scales = vectors.iter().map(|vector| int8(vector).1);
            columns.push(Arc::new(Float32Array::from(scales.collect::<Vec<_>>())));
        }
        let table = RecordBatch::try_new(self.schema(), columns);
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

    #[test]
    fn values_that_cannot_be_written() {
        assert!(check(&[1.0, f32::NAN], Vectors::F32).is_err());
        assert!(check(&[f32::NEG_INFINITY], Vectors::Binary).is_err());
        assert!(check(&[70_000.0], Vectors::F16).is_err());
        assert!(check(&[70_000.0], Vectors::F32).is_ok());
        assert!(check(&[65_504.0], Vectors::F16).is_ok());
    }
}
