//! A matrix of a quantized checkpoint, and the tensors that store it.

use half::{bf16, f16};

use super::{
    Info,
    config::Bits,
    error::{QuantizedError, wrong_tensor},
    unpack::{Packing, transposed},
    values::{Groups, Quantized, Values, Zeros, room},
};
use crate::Element;

/// A matrix, stored as quantized values, scales, and sometimes zero points and an order of columns.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Name of the tensor in the unquantized checkpoint, such as `layers.0.fc1.weight`.
    pub(super) name: String,
    pub(super) dims: [u64; 2],
    pub(super) values: String,
    pub(super) codes: Codes,
    pub(super) scales: Part,
    /// Number of rows and columns of scales.
    pub(super) grid: [u64; 2],
    /// Rows and columns of the block of values that shares a scale.
    pub(super) block: [u64; 2],
    pub(super) zeros: ZeroPoints,
    pub(super) order: Order,
}

/// Describes a matrix in which contiguous elements of a row share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    pub kind: Kind,
    /// Number of contiguous elements of a row that share a scale.
    pub columns: u64,
    /// Type in which the scales are stored.
    pub scales: Element,
}

/// Type of the values of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    E4M3,
    /// 8-bit integers with the zero point 0.
    Int8,
    /// 4-bit integers with zero points from 0 to 15.
    Int4,
}

/// A tensor of a matrix.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub name: String,
    pub element: Element,
    /// Whether the tensor is stored as the transpose of the grid.
    pub transposed: bool,
}

/// Storage of the values.
#[derive(Clone, Copy, Debug)]
pub(super) enum Codes {
    E4M3,
    Signed,
    Packed(Packing),
}

/// Assignment of columns to groups.
#[derive(Clone, Debug)]
pub(super) enum Order {
    /// Each group consists of adjacent columns.
    None,
    /// Each group consists of adjacent columns, and a tensor redundantly lists the group of each column.
    Runs(String),
    /// A tensor lists the group of each column.
    Listed {
        name: String,
        /// Whether -1 for all columns means that each group consists of adjacent columns.
        may_be_unset: bool,
    },
}

/// Storage of the zero points.
#[derive(Clone, Debug)]
pub(super) enum ZeroPoints {
    /// The same zero point for all groups.
    One(u16),
    /// Signed integers, one for each scale.
    Signed(String),
    /// The scheme is symmetric, but the tensor `name` stores zero points. All values of this tensor must be 0. The zero point of the codes
    /// is `zero`.
    Symmetric { name: String, zero: u16 },
    Packed {
        name: String,
        packing: Packing,
        /// Whether the tensor stores each zero point minus one.
        less_one: bool,
    },
}

impl Matrix {
    /// Returns the name of the tensor in the unquantized checkpoint.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the rows and columns.
    pub fn dims(&self) -> [u64; 2] {
        self.dims
    }

    /// Describes the runs: the adjacent elements of a row that share a scale. Returns `None` if a tensor assigns a group to each column
    /// (`Order::Listed`), and for 8-bit integers with zero points.
    pub fn runs_of_rows(&self) -> Option<Runs> {
        match self.order {
            Order::None | Order::Runs(_) => self.runs_of_groups(),
            Order::Listed { .. } => None,
        }
    }

    /// Like [`runs_of_rows`](Self::runs_of_rows), for a matrix in which a tensor assigns a group to each column. Describes the runs of the
    /// matrix whose columns are sorted by group; see [`column_order`](Self::column_order). Returns `None` for other matrices, and for 8-bit
    /// integers with zero points.
    pub fn ordered_runs_of_rows(&self) -> Option<Runs> {
        match self.order {
            Order::None | Order::Runs(_) => None,
            Order::Listed { .. } => self.runs_of_groups(),
        }
    }

    fn runs_of_groups(&self) -> Option<Runs> {
        let middle = Bits::Eight.middle();
        let is_symmetric = match self.zeros {
            ZeroPoints::One(zero) | ZeroPoints::Symmetric { zero, .. } => zero == middle,
            ZeroPoints::Signed(_) | ZeroPoints::Packed { .. } => false,
        };
        let kind = match self.codes {
            Codes::E4M3 => Kind::E4M3,
            Codes::Packed(Packing {
                bits: Bits::Four, ..
            }) => Kind::Int4,
            Codes::Signed
            | Codes::Packed(Packing {
                bits: Bits::Eight, ..
            }) if is_symmetric => Kind::Int8,
            Codes::Signed | Codes::Packed(_) => return None,
        };
        Some(Runs {
            kind,
            columns: self.block[1].min(self.dims[1]),
            scales: self.scales.element,
        })
    }

    /// Combines the tensors of the matrix. `read` returns the bytes of a tensor.
    ///
    /// # Errors
    /// Returns the errors of `read`, and an error if scales, zero points or groups are out of range.
    pub fn read<E: From<QuantizedError>>(
        &self,
        mut read: impl FnMut(&str) -> Result<Vec<u8>, E>,
    ) -> Result<Quantized, E> {
        let [rows, columns] = self.dims.map(|n| n as usize);
        let bytes = read(&self.values)?;
        let values = match self.codes {
            Codes::E4M3 => {
                self.zeros(&mut read)?;
                Values::E4M3(bytes)
            }
            Codes::Signed => {
                // Codes from 0 to 255 represent -128 to 127.
                let codes = bytes.into_iter().map(|byte| byte ^ 0x80).collect();
                let zeros = self.zeros(&mut read)?;
                Values::Integers { codes, zeros }
            }
            Codes::Packed(packing) => {
                let codes = packing.unpack(&self.values, &bytes, [rows, columns])?;
                drop(bytes);
                let zeros = self.zeros(&mut read)?;
                Values::Integers { codes, zeros }
            }
        };
        let scales = self.scales(&read(&self.scales.name)?)?;
        let columns_by_group = self.columns_by_group(&mut read)?;
        Ok(Quantized {
            rows,
            columns,
            values,
            scales,
            block_rows: self.block_rows(),
            columns_by_group,
        })
    }

    /// Returns the indices of the columns, sorted by group, so that the columns of a group are adjacent. The size of every group must equal
    /// the group size, except that the last group may be smaller; otherwise, returns `None`.
    ///
    /// # Errors
    /// Returns the errors of `read`, and an error if groups are out of range.
    pub fn column_order<E: From<QuantizedError>>(
        &self,
        mut read: impl FnMut(&str) -> Result<Vec<u8>, E>,
    ) -> Result<Option<Vec<u32>>, E> {
        let columns = self.dims[1] as u32;
        let mut order = room(&self.name, columns as usize)?;
        order.extend(0..columns);
        let Groups::Listed(groups) = self.columns_by_group(&mut read)? else {
            return Ok(Some(order));
        };
        order.sort_by_key(|&column| groups[column as usize]);
        let group = |column: u32| u64::from(groups[column as usize]);
        let mut places = order.iter().zip(0u64..);
        let are_runs = places.all(|(&column, at)| group(column) == at / self.block[1]);
        Ok(are_runs.then_some(order))
    }

    /// Returns the scale and the zero point of each run of `width` columns in each row. All columns of a run must belong to one group.
    /// `quantized` is the matrix as returned by [`read`](Self::read). If a tensor lists the groups of the columns, a run
    /// consists of adjacent columns in the order of [`column_order`](Self::column_order).
    ///
    /// # Errors
    /// Returns an error if memory runs out.
    pub fn groups_of(
        &self,
        quantized: &Quantized,
        width: usize,
    ) -> Result<Vec<(f32, u16)>, QuantizedError> {
        let size = match quantized.columns_by_group {
            Groups::Runs(size) => size,
            Groups::Listed(_) => self.block[1] as usize,
        };
        let zero = |at| match &quantized.values {
            Values::E4M3(_) => 0,
            Values::Integers { zeros, .. } => zeros.at(at),
        };
        let [rows, columns] = self.dims.map(|n| n as usize);
        let (per_row, width) = (self.grid[1] as usize, width.max(1));
        let mut groups = room(&self.name, rows * columns.div_ceil(width))?;
        for row in 0..rows {
            let first = row / self.block_rows() * per_row;
            groups.extend((0..columns).step_by(width).map(|column| {
                let at = first + column / size;
                (quantized.scales[at], zero(at))
            }));
        }
        Ok(groups)
    }

    /// Number of rows that share a row of scales.
    fn block_rows(&self) -> usize {
        self.block[0].min(self.dims[0]) as usize
    }

    fn columns_by_group<E: From<QuantizedError>>(
        &self,
        read: &mut impl FnMut(&str) -> Result<Vec<u8>, E>,
    ) -> Result<Groups, E> {
        match &self.order {
            Order::None => Ok(self.runs()),
            Order::Runs(name) | Order::Listed { name, .. } => {
                let bytes = read(name)?;
                Ok(self.groups(name, &bytes)?)
            }
        }
    }

    fn scales(&self, bytes: &[u8]) -> Result<Vec<f32>, QuantizedError> {
        let Part {
            name,
            element,
            transposed: is_transposed,
        } = &self.scales;
        let mut scales = room(name, bytes.len() / element.bytes() as usize)?;
        let pairs = || bytes.as_chunks::<2>().0.iter();
        match element {
            Element::F32 => {
                let quads = bytes.as_chunks::<4>().0.iter();
                scales.extend(quads.map(|&b| f32::from_le_bytes(b)));
            }
            Element::F16 => scales.extend(pairs().map(|&b| f16::from_le_bytes(b).to_f32())),
            Element::BF16 => scales.extend(pairs().map(|&b| bf16::from_le_bytes(b).to_f32())),
            // A scale is a power of two, stored as its exponent. 255 is NaN.
            Element::F8E8M0 => scales.extend(bytes.iter().map(|&byte| match byte {
                0 => f32::from_bits(1 << 22),
                255 => f32::NAN,
                _ => f32::from_bits(u32::from(byte) << 23),
            })),
            _ => {
                let problem = format!("is stored as {element}, which is no type of scales");
                return Err(wrong_tensor(name, problem));
            }
        }
        let is_wrong = |scale: &f32| !(scale.is_finite() && *scale > 0.0);
        if let Some(at) = scales.iter().position(is_wrong) {
            let problem = format!(
                "has the scale {} at index {at}, expected a finite number above 0; the checkpoint is damaged or was written by a faulty program: download it again, or use another one",
                scales[at]
            );
            return Err(wrong_tensor(name, problem));
        }
        match is_transposed {
            true => transposed(name, &scales, self.grid[0] as usize),
            false => Ok(scales),
        }
    }

    fn zeros<E: From<QuantizedError>>(
        &self,
        read: &mut impl FnMut(&str) -> Result<Vec<u8>, E>,
    ) -> Result<Zeros, E> {
        match &self.zeros {
            ZeroPoints::One(zero) => Ok(Zeros::One(*zero)),
            ZeroPoints::Symmetric { name, zero } => {
                // 0x80 is -0 in E4M3, which is also zero.
                if read(name)?.iter().any(|&byte| byte != 0 && byte != 0x80) {
                    let problem = "has values other than 0, but `symmetric` is true; does the config.json belong to this checkpoint?";
                    return Err(wrong_tensor(name, problem).into());
                }
                Ok(Zeros::One(*zero))
            }
            ZeroPoints::Signed(name) => {
                let bytes = read(name)?;
                let zeros = bytes.into_iter().map(|byte| u16::from(byte ^ 0x80));
                Ok(Zeros::Each(zeros.collect()))
            }
            ZeroPoints::Packed {
                name,
                packing,
                less_one,
            } => {
                let grid = self.grid.map(|n| n as usize);
                let codes = packing.unpack(name, &read(name)?, grid)?;
                let largest = (1u16 << packing.bits.count()) - 1;
                if *less_one && codes.iter().any(|&code| u16::from(code) == largest) {
                    let problem = format!(
                        "has the zero point {largest}, which version 1 of GPTQ's format cannot tell from -1; use the checkpoint in the format gptq_v2"
                    );
                    return Err(wrong_tensor(name, problem).into());
                }
                let add = u16::from(*less_one);
                let zeros = codes.into_iter().map(|code| u16::from(code) + add);
                Ok(Zeros::Each(zeros.collect()))
            }
        }
    }

    fn runs(&self) -> Groups {
        Groups::Runs(self.block[1].min(self.dims[1]) as usize)
    }

    fn groups(&self, name: &str, bytes: &[u8]) -> Result<Groups, QuantizedError> {
        let words = bytes.as_chunks::<4>().0.iter();
        let mut groups = words.map(|&word| i32::from_le_bytes(word)).zip(0u64..);
        let n = self.grid[1];
        let may_be_unset = match self.order {
            Order::None => return Ok(self.runs()),
            Order::Runs(_) => {
                let run = |at| at / self.block[1];
                let is_other = |&(group, at): &(i32, u64)| u64::try_from(group) != Ok(run(at));
                return match groups.find(is_other) {
                    None => Ok(self.runs()),
                    Some((group, at)) => {
                        let problem = format!(
                            "has the group {group} at index {at}, but `desc_act` is false, which means the group {}; does the config.json belong to this checkpoint?",
                            run(at)
                        );
                        Err(wrong_tensor(name, problem))
                    }
                };
            }
            Order::Listed { may_be_unset, .. } => may_be_unset,
        };
        if may_be_unset && groups.clone().all(|(group, _)| group == -1) {
            return Ok(self.runs());
        }
        let mut listed = room(name, self.dims[1] as usize)?;
        for (group, at) in groups {
            match u32::try_from(group) {
                Ok(group) if u64::from(group) < n => listed.push(group),
                _ => {
                    let problem = format!(
                        "has the group {group} at index {at}, but there are {n} groups; expected 0 to {}: download the checkpoint again, or use another one",
                        n - 1
                    );
                    return Err(wrong_tensor(name, problem));
                }
            }
        }
        Ok(Groups::Listed(listed))
    }
}

/// Returns an error unless a tensor has one of the given shapes.
pub(super) fn check_dims(
    name: &str,
    info: &Info,
    expected: &[&[u64]],
) -> Result<(), QuantizedError> {
    if expected.contains(&info.dims.as_slice()) {
        return Ok(());
    }
    let shown: Vec<String> = expected.iter().map(|dims| format!("{dims:?}")).collect();
    let problem = format!(
        "is {:?}, expected {}; does the config.json belong to this checkpoint?",
        info.dims,
        shown.join(" or ")
    );
    Err(wrong_tensor(name, problem))
}

/// Returns an error unless a tensor has one of the given types.
pub(super) fn check_element(
    name: &str,
    info: &Info,
    expected: &[Element],
) -> Result<(), QuantizedError> {
    if expected.contains(&info.element) {
        return Ok(());
    }
    let shown: Vec<String> = expected.iter().map(Element::to_string).collect();
    let problem = format!(
        "is stored as {}, expected {}; does the config.json belong to this checkpoint?",
        info.element,
        shown.join(" or ")
    );
    Err(wrong_tensor(name, problem))
}
