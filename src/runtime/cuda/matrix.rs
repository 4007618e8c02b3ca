//! Tensor maps of matrices that kernels copy by TMA.

use std::ffi::c_void;

use cudarc::driver::{DriverError, sys};

use crate::{
    kernels::{RowOrder, TensorMap},
    tensor::{DType, Element, Extents, Size},
};

/// Parameters of a tensor map except the address.
pub(super) struct Matrix {
    pub(super) map: TensorMap,
    pub(super) element: Element,
    pub(super) rows: Size,
    pub(super) columns: u64,
}

impl Matrix {
    /// Whether the kernel also takes the address, because it reads the scales of a packed matrix without a map.
    pub(super) fn is_packed(&self) -> bool {
        matches!(self.element, Element::Scaled(_))
    }

    /// Encodes a tensor map of the matrix at `address` with the box and the row order of `map`. Elements outside the matrix read
    /// as zero.
    pub(super) fn encode(
        &self,
        address: sys::CUdeviceptr,
        extents: &Extents,
    ) -> Result<sys::CUtensorMap, DriverError> {
        use sys::{
            CUtensorMapDataType_enum as Type, CUtensorMapFloatOOBfill_enum as Fill,
            CUtensorMapInterleave_enum as Interleave, CUtensorMapL2promotion_enum as Promotion,
            CUtensorMapSwizzle_enum as Swizzle,
        };
        let element = match self.element {
            Element::Value(DType::F32) => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            Element::Value(DType::F16) => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            Element::Value(DType::BF16) => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            // Packed weights and 8-bit elements are copied as bytes.
            Element::Scaled(_) | Element::E4m3 | Element::I8 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            Element::I32 => Type::CU_TENSOR_MAP_DATA_TYPE_INT32,
            Element::I64 => Type::CU_TENSOR_MAP_DATA_TYPE_INT64,
        };
        let rows = self.rows.eval(extents).unwrap_or(0);
        let [rows, columns] = match self.element {
            Element::Scaled(packed) => packed.rows_of_blocks(rows, self.columns),
            Element::Value(_) | Element::E4m3 | Element::I8 | Element::I32 | Element::I64 => {
                [rows, self.columns]
            }
        };
        let pitch = columns * self.element.bytes();
        let (box_columns, box_rows) = (self.map.box_columns, self.map.box_rows);
        // Rank, extents of the matrix, strides in bytes of all dimensions except the first, and extents of the box.
        let (rank, dims, pitches, sizes) = match self.map.order {
            RowOrder::Plain => (
                2,
                [columns, rows, 1, 1, 1],
                [pitch; 4],
                [box_columns, box_rows, 1, 1, 1],
            ),
            RowOrder::Quads => (
                5,
                [columns, 2, 4, 4, rows / u64::from(RowOrder::GROUP)],
                [1, 8, 2, u64::from(RowOrder::GROUP)].map(|rows| rows * pitch),
                [box_columns, 2, 4, 4, box_rows / RowOrder::GROUP],
            ),
            RowOrder::Boxes(boxes) => (
                3,
                [
                    u64::from(box_columns),
                    rows,
                    columns / u64::from(box_columns),
                    1,
                    1,
                ],
                [
                    pitch,
                    u64::from(box_columns) * self.element.bytes(),
                    pitch,
                    pitch,
                ],
                [box_columns, box_rows, boxes, 1, 1],
            ),
            RowOrder::Halves => (
                4,
                [columns, 8, 2, rows / 16, 1],
                [pitch, rows / 2 * pitch, 8 * pitch, pitch],
                [box_columns, 8, 2, box_rows / 16, 1],
            ),
            RowOrder::Fours => (
                5,
                [columns, 8, 2, rows / u64::from(RowOrder::GROUP), 2],
                [4, 1, u64::from(RowOrder::GROUP), 2].map(|rows| rows * pitch),
                [box_columns, 8, 2, box_rows / RowOrder::GROUP, 2],
            ),
        };
        let swizzle = match u64::from(self.map.box_columns) * self.element.bytes() {
            128 => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            64 => Swizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            _ => Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        };
        // Bytes that L2 fetches at once. A streamed matrix is read once, so L2 should fetch no more than a copy needs. For other matrices,
        // 256 bytes are faster.
        let promotion = match self.map.streams {
            true => Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            false => Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        };
        let mut map = std::mem::MaybeUninit::uninit();
        // SAFETY: the arrays have at least `rank` extents and `rank - 1` strides.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                map.as_mut_ptr(),
                element,
                rank,
                address as *mut c_void,
                dims.as_ptr(),
                pitches.as_ptr(),
                sizes.as_ptr(),
                [1; 5].as_ptr(),
                Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                promotion,
                Fill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
            .result()?;
            // SAFETY: the call succeeded, so it has initialized the map.
            Ok(map.assume_init())
        }
    }
}
