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

/// The dimensions of a tensor map. Columns are the first dimension.
struct Layout {
    rank: u32,
    /// Extents of the matrix.
    extents: [u64; 5],
    /// Strides in bytes of all dimensions except the first.
    pitches: [u64; 4],
    /// Extents of a box.
    sizes: [u32; 5],
}

impl Matrix {
    /// Returns whether the matrix is packed. The kernel then takes the address of the matrix in addition to the tensor maps, to read the
    /// scales.
    pub(super) fn is_packed(&self) -> bool {
        matches!(self.element, Element::Scaled(_))
    }

    /// Returns the number of tensor maps that the kernel takes.
    pub(super) fn n_maps(&self) -> usize {
        1 + usize::from(self.map.has_last_box)
    }

    /// Returns the number of rows per box for each tensor map that the kernel takes. If the kernel takes a second map, this map is for the
    /// last box, and its box has only the rows up to the end of the matrix.
    fn boxes(&self, extents: &Extents) -> impl Iterator<Item = u32> + use<> {
        let of_all = self.map.box_rows;
        let before_last = self.n_rows(extents).saturating_sub(1) % u64::from(of_all);
        let of_last = self.map.has_last_box.then_some(before_last as u32 + 1);
        [of_all].into_iter().chain(of_last)
    }

    fn n_rows(&self, extents: &Extents) -> u64 {
        self.rows.eval(extents).unwrap_or(0)
    }

    /// Appends to `maps` the tensor maps that the kernel takes for the matrix at `address`. Elements outside the matrix read as zero.
    pub(super) fn encode(
        &self,
        address: sys::CUdeviceptr,
        extents: &Extents,
        maps: &mut Vec<sys::CUtensorMap>,
    ) -> Result<(), DriverError> {
        for box_rows in self.boxes(extents) {
            maps.push(self.encode_box(address, self.layout(self.n_rows(extents), box_rows))?);
        }
        Ok(())
    }

    fn encode_box(
        &self,
        address: sys::CUdeviceptr,
        layout: Layout,
    ) -> Result<sys::CUtensorMap, DriverError> {
        use sys::{
            CUtensorMapDataType_enum as Type, CUtensorMapFloatOOBfill_enum as Fill,
            CUtensorMapInterleave_enum as Interleave, CUtensorMapL2promotion_enum as Promotion,
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
        let Layout {
            rank,
            extents,
            pitches,
            sizes,
        } = layout;
        let [box_width, ..] = sizes;
        let swizzle = swizzle_of(u64::from(box_width) * self.element.bytes());
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
                extents.as_ptr(),
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

    /// Returns the dimensions of the tensor map of a matrix with `rows` rows, for boxes of `box_rows` rows.
    fn layout(&self, rows: u64, box_rows: u32) -> Layout {
        let [rows, columns] = match self.element {
            Element::Scaled(packed) => packed.rows_of_blocks(rows, self.columns),
            Element::Value(_) | Element::E4m3 | Element::I8 | Element::I32 | Element::I64 => {
                [rows, self.columns]
            }
        };
        let pitch = columns * self.element.bytes();
        let box_columns = self.map.box_columns;
        let (rank, extents, pitches, sizes) = match self.map.order {
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
            RowOrder::Pairs => (
                4,
                [
                    2 * columns,
                    2,
                    4,
                    rows / u64::from(RowOrder::EIGHT_PAIRS),
                    1,
                ],
                [4, 1, 8, 8].map(|pairs| 2 * pairs * pitch),
                [2 * box_columns, 2, 4, box_rows / RowOrder::EIGHT_PAIRS, 1],
            ),
            RowOrder::PairsOfQuads => (
                5,
                [2 * columns, 2, 4, 2, rows / u64::from(RowOrder::GROUP)],
                [1, 4, 2, 16].map(|pairs| 2 * pairs * pitch),
                [2 * box_columns, 2, 4, 2, box_rows / RowOrder::GROUP],
            ),
            RowOrder::PairsOfFours => (
                5,
                [2 * columns, 8, 2, rows / u64::from(RowOrder::GROUP), 1],
                [2, 1, 16, 16].map(|pairs| 2 * pairs * pitch),
                [2 * box_columns, 8, 2, box_rows / RowOrder::GROUP, 1],
            ),
        };
        Layout {
            rank,
            extents,
            pitches,
            sizes,
        }
    }
}

/// Returns the swizzle of boxes whose rows have this many bytes in shared memory.
fn swizzle_of(row_bytes: u64) -> sys::CUtensorMapSwizzle_enum {
    use sys::CUtensorMapSwizzle_enum as Swizzle;
    match row_bytes {
        128 => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        64 => Swizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        _ => Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Columns of a box.
    const COLUMNS: u32 = 64;

    /// Returns the layout of a matrix of bytes with 256 rows.
    fn layout_of_bytes(order: RowOrder, box_rows: u32, columns: u32) -> Layout {
        let map = TensorMap {
            param: "x",
            box_rows,
            box_columns: COLUMNS,
            order,
            has_last_box: false,
            streams: false,
        };
        let matrix = Matrix {
            map,
            element: Element::E4m3,
            rows: Size::constant(256),
            columns: columns.into(),
        };
        matrix.layout(256, box_rows)
    }

    /// Returns, for a box at the start of a matrix, the numbers of the box's rows in their order in shared memory, and their number of
    /// columns. The matrix consists of bytes, has 256 rows and is as wide as the box. If `order` pairs rows, a pair counts as one row,
    /// which has the number of the pair's first row.
    fn rows_of_box(order: RowOrder, box_rows: u32) -> (Vec<u64>, u32) {
        let layout = layout_of_bytes(order, box_rows, COLUMNS);
        let mut rows = vec![0];
        for dimension in 1..layout.rank as usize {
            let (size, pitch) = (layout.sizes[dimension], layout.pitches[dimension - 1]);
            assert!(
                u64::from(size) <= layout.extents[dimension],
                "the box is inside"
            );
            let steps = (0..u64::from(size)).map(|i| i * pitch / u64::from(COLUMNS));
            rows = steps
                .flat_map(|step| rows.iter().map(move |row| row + step))
                .collect();
        }
        (rows, layout.sizes[0])
    }

    /// Checks the order of a box's rows, or of its pairs of rows, in shared memory. The order is given as mixed-radix digits: each element
    /// of `digits` is (range of the digit, weight in the row number, weight in the index in shared memory). For all values of the digits,
    /// the row with the number `Σ digit · weight in the row number` must have the index `Σ digit · weight in the index`.
    fn check(order: RowOrder, box_rows: u32, digits: &[(u64, u64, u64)]) {
        let is_paired = matches!(
            order,
            RowOrder::Pairs | RowOrder::PairsOfQuads | RowOrder::PairsOfFours
        );
        let per_row = if is_paired { 2 } else { 1 };
        let (rows, columns) = rows_of_box(order, box_rows);
        assert_eq!(columns, 64 * per_row, "{order:?}");
        assert_eq!(rows.len() as u32, box_rows / per_row, "{order:?}");
        let mut all = vec![(0, 0)];
        for &(range, in_row, in_index) in digits {
            let add = |digit| {
                all.iter()
                    .map(move |(row, index)| (row + digit * in_row, index + digit * in_index))
            };
            all = (0..range).flat_map(add).collect();
        }
        assert_eq!(all.len(), rows.len(), "{order:?}");
        for (row, index) in all {
            assert_eq!(rows[index as usize], row * u64::from(per_row), "{order:?}");
        }
    }

    #[test]
    fn the_last_box_ends_at_the_last_row() {
        let boxes = |has_last_box, rows| {
            let map = TensorMap {
                param: "x",
                box_rows: 128,
                box_columns: COLUMNS,
                order: RowOrder::Plain,
                has_last_box,
                streams: false,
            };
            let matrix = Matrix {
                map,
                element: Element::E4m3,
                rows: Size::from(crate::tensor::Symbol::Rows),
                columns: COLUMNS.into(),
            };
            let boxes: Vec<_> = matrix.boxes(&Extents::default().with_rows(rows)).collect();
            assert_eq!(boxes.len(), matrix.n_maps());
            boxes
        };
        assert_eq!(boxes(true, 300), [128, 44]);
        assert_eq!(boxes(true, 256), [128, 128]);
        assert_eq!(boxes(true, 257), [128, 1]);
        assert_eq!(boxes(true, 5), [128, 5]);
        assert_eq!(boxes(false, 300), [128]);
    }

    #[test]
    fn rows_are_in_the_documented_order() {
        check(RowOrder::Plain, 48, &[(48, 1, 1)]);
        let group = |count| (count, 32, 32);
        let quads = [(4, 8, 2), (4, 2, 8), (2, 1, 1), group(3)];
        check(RowOrder::Quads, 96, &quads);
        let fours = [(4, 32, 16), (8, 4, 1), (2, 2, 64), (2, 1, 8)];
        check(RowOrder::Fours, 128, &fours);
        check(RowOrder::Halves, 48, &[(8, 1, 1), (2, 128, 8), (3, 8, 16)]);
        let pairs = [(2, 4, 1), (4, 1, 2), (3, 8, 8)];
        check(RowOrder::Pairs, 48, &pairs);
        let quads = [(4, 4, 2), (2, 2, 8), (2, 1, 1), (3, 16, 16)];
        check(RowOrder::PairsOfQuads, 96, &quads);
        let fours = [(8, 2, 1), (2, 1, 8), (4, 16, 16)];
        check(RowOrder::PairsOfFours, 128, &fours);
    }

    #[test]
    fn adjacent_boxes_are_copied_one_after_another() {
        let layout = layout_of_bytes(RowOrder::Boxes(2), 48, 128);
        assert_eq!(layout.rank, 3);
        assert_eq!(layout.extents[..3], [64, 256, 2]);
        assert_eq!(layout.pitches[..2], [128, 64]);
        assert_eq!(layout.sizes[..3], [64, 48, 2]);
    }

    #[test]
    fn rows_have_the_swizzle_that_kernels_expect() {
        use sys::CUtensorMapSwizzle_enum as Swizzle;
        assert_eq!(swizzle_of(128), Swizzle::CU_TENSOR_MAP_SWIZZLE_128B);
        // Rows of 32 elements of 16 bits, as in boxes for heads of size 96.
        assert_eq!(swizzle_of(64), Swizzle::CU_TENSOR_MAP_SWIZZLE_64B);
        assert_eq!(swizzle_of(48), Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE);
    }
}
