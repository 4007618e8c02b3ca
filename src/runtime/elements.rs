//! Conversion between tensors and little-endian bytes, for every element type.

use super::weights::{decode, decode_into, encode};
use crate::{
    kernels::HostTensor,
    tensor::{Element, e4m3},
};

/// Encodes a tensor as `element`, and rounds the values to this type. For a type with scales, the tensor must be a matrix with rows of
/// `columns` elements.
pub fn encode_tensor(tensor: &HostTensor, element: Element, columns: usize) -> Vec<u8> {
    match (tensor, element) {
        (HostTensor::Real(values), Element::Value(dtype)) => encode(values, dtype),
        (HostTensor::Real(values), Element::Scaled(scaled)) => {
            scaled.quantize(values, columns).pack()
        }
        (HostTensor::Real(values), Element::E4m3) => {
            values.iter().map(|&value| e4m3::encode(value)).collect()
        }
        (HostTensor::Real(values), Element::I8 | Element::I32 | Element::I64) => {
            let indices = values.iter().map(|&value| element.round(value) as i64);
            encode_indices(indices, element)
        }
        (HostTensor::Index(values), _) => encode_indices(values.iter().copied(), element),
    }
}

fn encode_indices(values: impl Iterator<Item = i64>, element: Element) -> Vec<u8> {
    match element {
        Element::Value(dtype) => encode(&values.map(|v| v as f32).collect::<Vec<f32>>(), dtype),
        Element::E4m3 => values.map(|v| e4m3::encode(v as f32)).collect(),
        Element::Scaled(_) => values.map(|v| v as u8).collect(),
        Element::I8 => values.map(|v| v as i8 as u8).collect(),
        Element::I32 => values.flat_map(|v| (v as i32).to_le_bytes()).collect(),
        Element::I64 => values.flat_map(i64::to_le_bytes).collect(),
    }
}

/// Decodes elements to f32. Trailing bytes of an incomplete element are ignored.
pub fn decode_values(bytes: &[u8], element: Element) -> Vec<f32> {
    let mut values = Vec::new();
    extend_values(&mut values, bytes, element);
    values
}

/// Decodes elements like [`decode_values`], and appends them to `values`.
pub fn extend_values(values: &mut Vec<f32>, bytes: &[u8], element: Element) {
    match element {
        Element::Value(dtype) => decode_into(values, bytes, dtype),
        Element::E4m3 => values.extend(bytes.iter().map(|&code| e4m3::decode(code))),
        Element::Scaled(_) | Element::I8 | Element::I32 | Element::I64 => {
            let indices = decode_indices(bytes, element);
            values.extend(indices.into_iter().map(|index| index as f32));
        }
    }
}

/// Decodes elements to integers. Trailing bytes of an incomplete element are ignored.
pub fn decode_indices(bytes: &[u8], element: Element) -> Vec<i64> {
    match element {
        Element::Value(dtype) => {
            let values = decode(bytes, dtype);
            values.into_iter().map(|value| value as i64).collect()
        }
        Element::E4m3 => {
            let values = bytes.iter().map(|&code| e4m3::decode(code));
            values.map(|value| value as i64).collect()
        }
        Element::Scaled(_) => bytes.iter().map(|&b| b.into()).collect(),
        Element::I8 => bytes.iter().map(|&b| (b as i8).into()).collect(),
        Element::I32 => {
            let (elements, _) = bytes.as_chunks::<4>();
            elements
                .iter()
                .map(|&b| i32::from_le_bytes(b).into())
                .collect()
        }
        Element::I64 => {
            let (elements, _) = bytes.as_chunks::<8>();
            elements.iter().map(|&b| i64::from_le_bytes(b)).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    #[test]
    fn elements_of_every_type_round_trip() {
        let indices = HostTensor::Index(vec![-3, 0, 70_000]);
        for element in [Element::I32, Element::I64] {
            let bytes = encode_tensor(&indices, element, 1);
            assert_eq!(bytes.len() as u64, 3 * element.bytes());
            assert_eq!(decode_indices(&bytes, element), [-3, 0, 70_000]);
            assert_eq!(decode_values(&bytes, element), [-3.0, 0.0, 70_000.0]);
        }
        let integers = HostTensor::Real(vec![-127.0, 2.5, 0.0]);
        let bytes = encode_tensor(&integers, Element::I8, 3);
        assert_eq!(bytes, [129, 2, 0]);
        assert_eq!(decode_values(&bytes, Element::I8), [-127.0, 2.0, 0.0]);
        let values = HostTensor::Real(vec![-0.5, 2.0]);
        for element in DType::ALL.map(Element::Value) {
            let bytes = encode_tensor(&values, element, 1);
            assert_eq!(bytes.len() as u64, 2 * element.bytes());
            assert_eq!(decode_values(&bytes, element), [-0.5, 2.0]);
        }
    }
}
