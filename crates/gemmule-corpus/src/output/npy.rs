//! Arrays of NumPy, format version 1.0.

use half::f16;

use super::{Batch, Encoder as Encodes, Layout, Part, Placed, Tail, columns::signs};
use crate::{Kind, Value, Vectors};

/// Size of the header in bytes, which is enough for any number of rows.
const HEADER: usize = 128;

/// Magic number and version.
const START: &[u8] = b"\x93NUMPY\x01\x00";

/// Encodes an array of vectors, `[rows, values]`, or of numbers, `[rows]`. The values of a refused row are NaN, or zeros if values are
/// stored as bits.
pub(super) struct Encoder {
    vectors: Vectors,
    /// Number of values of a vector; `None` for numbers.
    width: Option<usize>,
}

impl Encoder {
    pub fn new(layout: &Layout) -> Self {
        let width = layout.columns.iter().find_map(|column| match column.kind {
            Kind::Vector(width) => Some(width),
            Kind::Vectors(_) | Kind::Number | Kind::Integer | Kind::Text | Kind::Records(_) => None,
        });
        Self {
            vectors: match width {
                Some(_) => layout.vectors,
                None => Vectors::F32,
            },
            width,
        }
    }

    fn header(&self, rows: u64) -> Vec<u8> {
        let kind = match self.vectors {
            Vectors::F32 => "<f4",
            Vectors::F16 => "<f2",
            Vectors::Int8 => "|i1",
            Vectors::Binary => "|u1",
        };
        let values = self.width.map_or_else(String::new, |width| {
            format!(" {}", self.vectors.stored(width))
        });
        let text =
            format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': ({rows},{values}), }}");
        let mut header = START.to_vec();
        header.extend(((HEADER - START.len() - 2) as u16).to_le_bytes());
        header.extend(text.bytes());
        header.resize(HEADER - 1, b' ');
        header.push(b'\n');
        header
    }
}

impl Encodes for Encoder {
    fn head(&self) -> Result<Vec<u8>, String> {
        Ok(self.header(0))
    }

    fn window(&self, batch: &Batch) -> Result<Part, String> {
        let width = self.width.unwrap_or(1);
        let mut bytes = Vec::with_capacity(4 * width * batch.rows.len());
        let refused = vec![f32::NAN; width];
        for row in &batch.rows {
            let vector: &[f32] = match row.as_ref().map(Vec::as_slice) {
                Ok([Value::Vector(values)]) => values,
                Ok([Value::Number(number)]) => std::slice::from_ref(number),
                Ok(_) => return Err("a row has no vector and no number".to_owned()),
                Err(_) => &refused,
            };
            match self.vectors {
                Vectors::F32 => bytes.extend(vector.iter().flat_map(|v| v.to_le_bytes())),
                Vectors::F16 => {
                    let values = vector.iter().map(|value| f16::from_f32(*value));
                    bytes.extend(values.flat_map(f16::to_le_bytes));
                }
                Vectors::Int8 => return Err("int8 needs a place for scales".to_owned()),
                Vectors::Binary => bytes.extend(signs(vector)),
            }
        }
        Ok(Part {
            bytes,
            note: String::new(),
        })
    }

    fn tail(&self, _: &[Placed], rows: u64, _: u64) -> Result<Tail, String> {
        Ok(Tail {
            head: self.header(rows),
            end: Vec::new(),
        })
    }
}
