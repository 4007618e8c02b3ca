//! The tensors of a quantized module in each layout.

use super::{
    super::{
        Info, Matrix,
        config::{Bits, Scales},
        error::{Result, wrong_tensor},
        matrix::{Codes, Order, Part, ZeroPoints, check_dims, check_element},
        unpack::{Axis, Packing},
    },
    G_IDX, ORDER, PACKED, Parts, QWEIGHT, QZEROS, SCALE, SCALES, SHAPE, WEIGHT, ZERO_POINT,
};
use crate::{Element, pickle::shown};

const SCALE_TYPES: [Element; 3] = [Element::F32, Element::F16, Element::BF16];

/// A module with quantized tensors.
pub(super) struct Module<'t> {
    pub module: &'t str,
    pub parts: &'t Parts<'t>,
    /// The first quantized tensor.
    pub first: &'t str,
}

impl<'t> Module<'t> {
    pub fn find(&self, part: &str) -> Option<(&'t str, &'t Info)> {
        self.parts.get(part).copied()
    }

    /// Returns a tensor that the layout requires.
    fn part(&self, part: &str) -> Result<(&'t str, &'t Info)> {
        self.find(part).ok_or_else(|| {
            let problem = format!(
                "has no `{}` beside it, which belongs to the same weight; download the checkpoint again",
                shown(&format!("{}.{part}", self.module))
            );
            wrong_tensor(self.first, problem)
        })
    }

    /// Returns an error if the module has a tensor that is not part of the layout.
    pub fn check_parts(&self, layout: &str, known: &[&str]) -> Result<()> {
        let mut parts = self.parts.iter();
        match parts.find(|(part, _)| !known.contains(part)) {
            Some((_, (name, _))) => {
                let problem = format!(
                    "is unexpected: weights in {layout} have only {}; does the config.json belong to this checkpoint?",
                    known.join(", ")
                );
                Err(wrong_tensor(name, problem))
            }
            None => Ok(()),
        }
    }

    /// Checks that a tensor is a non-empty matrix, and returns its sizes.
    fn sizes(&self, name: &str, info: &Info) -> Result<[u64; 2]> {
        match info.dims.as_slice() {
            &[rows, columns] if rows > 0 && columns > 0 => Ok([rows, columns]),
            dims => {
                let problem = format!(
                    "is {dims:?}, expected a matrix; quantized weights of other shapes are not read: use a checkpoint in which it is not quantized"
                );
                Err(wrong_tensor(name, problem))
            }
        }
    }

    /// Checks the shape of the tensor of scales. Returns two shapes, each as rows and columns: the shape of the grid of scales, and the
    /// shape of a block of values that share a scale.
    fn grid(
        &self,
        (name, info): (&str, &Info),
        [rows, columns]: [u64; 2],
        scales: Scales,
    ) -> Result<([u64; 2], [u64; 2])> {
        let block = match scales {
            Scales::Tensor => [rows, columns],
            Scales::Channel => [1, columns],
            Scales::Group(size) => {
                if columns > size && !columns.is_multiple_of(size) {
                    let problem = format!(
                        "has scales of groups of {size} inputs, which do not divide the {columns} inputs; use a checkpoint whose `group_size` does"
                    );
                    return Err(wrong_tensor(name, problem));
                }
                [1, size]
            }
            Scales::Block(sizes) => sizes,
        };
        let grid = [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
        match scales {
            Scales::Tensor => check_dims(name, info, &[&[1], &[], &[1, 1]])?,
            Scales::Channel => check_dims(name, info, &[&[rows, 1], &[rows]])?,
            Scales::Group(_) | Scales::Block(_) => check_dims(name, info, &[&grid])?,
        }
        Ok((grid, block))
    }

    /// Returns a matrix of weights in E4M3. If `scales` is `None`, the shape of the scale tensor determines which values share a scale.
    pub fn fp8(&self, scale: &str, scales: Option<Scales>) -> Result<Matrix> {
        let (values, info) = self.part(WEIGHT)?;
        check_element(values, info, &[Element::F8E4M3])?;
        let (scale, scale_info) = self.part(scale)?;
        let dims = self.sizes(values, info)?;
        let types = [&SCALE_TYPES[..], &[Element::F8E8M0]].concat();
        check_element(scale, scale_info, &types)?;
        let (grid, block) = match scales {
            Some(scales) => self.grid((scale, scale_info), dims, scales)?,
            None => {
                let expected: [&[u64]; 5] = [&[], &[1], &[1, 1], &[dims[0], 1], &[dims[0]]];
                check_dims(scale, scale_info, &expected)?;
                match scale_info.dims.iter().product() {
                    1 => ([1, 1], dims),
                    _ => ([dims[0], 1], [1, dims[1]]),
                }
            }
        };
        // E4M3 values have no zero points, but some files contain zero points that are all 0.
        let zeros = match self.find(ZERO_POINT) {
            None => ZeroPoints::One(0),
            Some((name, info)) => {
                check_element(name, info, &[Element::I8, Element::F8E4M3])?;
                check_dims(name, info, &[&scale_info.dims])?;
                ZeroPoints::Symmetric {
                    name: name.to_owned(),
                    zero: 0,
                }
            }
        };
        Ok(Matrix {
            name: self.name(),
            dims,
            values: values.to_owned(),
            codes: Codes::E4M3,
            scales: stored(scale, scale_info, false),
            grid,
            block,
            zeros,
            order: Order::None,
        })
    }

    fn name(&self) -> String {
        format!("{}.{WEIGHT}", self.module)
    }

    /// Returns a matrix of 8-bit integers, stored in `weight`.
    pub fn int8(&self, scales: Scales, symmetric: bool) -> Result<Matrix> {
        self.check_parts("int8", &[WEIGHT, SCALE, ZERO_POINT])?;
        let (values, info) = self.part(WEIGHT)?;
        check_element(values, info, &[Element::I8])?;
        let (scale, scale_info) = self.part(SCALE)?;
        let dims = self.sizes(values, info)?;
        check_element(scale, scale_info, &SCALE_TYPES)?;
        let (grid, block) = self.grid((scale, scale_info), dims, scales)?;
        let zeros = self.zeros_like(scale_info, symmetric, Bits::Eight.middle())?;
        Ok(Matrix {
            name: self.name(),
            dims,
            values: values.to_owned(),
            codes: Codes::Signed,
            scales: stored(scale, scale_info, false),
            grid,
            block,
            zeros,
            order: Order::None,
        })
    }

    /// Returns the zero points of signed integers. If a tensor stores them, it has the shape of `scale`, the tensor of scales. `zero` is
    /// the zero point of codes in a symmetric scheme.
    fn zeros_like(&self, scale: &Info, symmetric: bool, zero: u16) -> Result<ZeroPoints> {
        let found = match symmetric {
            true => self.find(ZERO_POINT),
            false => Some(self.part(ZERO_POINT)?),
        };
        let Some((name, info)) = found else {
            return Ok(ZeroPoints::One(zero));
        };
        check_element(name, info, &[Element::I8])?;
        check_dims(name, info, &[&scale.dims])?;
        let name = name.to_owned();
        Ok(match symmetric {
            true => ZeroPoints::Symmetric { name, zero },
            false => ZeroPoints::Signed(name),
        })
    }

    /// Returns a matrix of integers in the format of compressed-tensors, packed into words along the inputs.
    pub fn packed(
        &self,
        bits: Bits,
        scales: Scales,
        symmetric: bool,
        ordered: bool,
        shape: Option<[u64; 2]>,
    ) -> Result<Matrix> {
        let known = [PACKED, SCALE, ZERO_POINT, SHAPE, ORDER];
        self.check_parts("packed integers", &known)?;
        let (values, info) = self.part(PACKED)?;
        check_element(values, info, &[Element::I32])?;
        self.sizes(values, info)?;
        let (scale, scale_info) = self.part(SCALE)?;
        let (shape_name, _) = self.part(SHAPE)?;
        let dims @ [rows, columns] = shape.unwrap_or_default();
        let packing = |axis| Packing {
            bits,
            axis,
            interleaved: false,
            transposed: false,
        };
        let words = packing(Axis::Columns);
        if rows == 0 || columns == 0 || info.dims != words.stored(dims) {
            let problem = format!(
                "holds the sizes {dims:?}, but `{}` is {:?}, which fits {} integers in a word to no such matrix; download the checkpoint again",
                shown(values),
                info.dims,
                bits.per_word()
            );
            return Err(wrong_tensor(shape_name, problem));
        }
        check_element(scale, scale_info, &SCALE_TYPES)?;
        let (grid, block) = self.grid((scale, scale_info), dims, scales)?;
        let zeros = match (symmetric, scales) {
            (true, _) | (false, Scales::Tensor | Scales::Block(_)) => {
                self.zeros_like(scale_info, symmetric, bits.middle())?
            }
            (false, Scales::Channel | Scales::Group(_)) => {
                let (name, info) = self.part(ZERO_POINT)?;
                check_element(name, info, &[Element::I32])?;
                let packing = packing(Axis::Rows);
                check_dims(name, info, &[&packing.stored(grid)])?;
                ZeroPoints::Packed {
                    name: name.to_owned(),
                    packing,
                    less_one: false,
                }
            }
        };
        let order = match (ordered, self.find(ORDER)) {
            (true, _) => Order::Listed {
                name: self.order(self.part(ORDER)?, columns)?,
                may_be_unset: true,
            },
            (false, None) => Order::None,
            (false, Some((name, _))) => {
                let problem = "is an order of inputs, but `actorder` is not `group`; does the config.json belong to this checkpoint?";
                return Err(wrong_tensor(name, problem));
            }
        };
        Ok(Matrix {
            name: self.name(),
            dims,
            values: values.to_owned(),
            codes: Codes::Packed(words),
            scales: stored(scale, scale_info, false),
            grid,
            block,
            zeros,
            order,
        })
    }

    /// Checks the tensor that lists the group of each input.
    fn order(&self, (name, info): (&str, &Info), columns: u64) -> Result<String> {
        check_element(name, info, &[Element::I32])?;
        check_dims(name, info, &[&[columns]])?;
        Ok(name.to_owned())
    }

    pub fn gptq(
        &self,
        bits: Bits,
        group: Option<u64>,
        ordered: bool,
        less_one: bool,
    ) -> Result<Matrix> {
        self.check_parts("gptq", &[QWEIGHT, QZEROS, SCALES, G_IDX])?;
        let matrix = self.transposed(bits, Axis::Rows, group, less_one, false)?;
        let [_, columns] = matrix.dims;
        let order = match (ordered, self.find(G_IDX)) {
            (true, None) => {
                let problem = format!(
                    "has no `{}` beside it, but `desc_act` is true, so the groups of its inputs are unknown; download the checkpoint again, or use one with `desc_act` false",
                    shown(&format!("{}.{G_IDX}", self.module))
                );
                return Err(wrong_tensor(self.first, problem));
            }
            (true, Some(found)) => Order::Listed {
                name: self.order(found, columns)?,
                may_be_unset: false,
            },
            (false, Some(found)) => Order::Runs(self.order(found, columns)?),
            (false, None) => Order::None,
        };
        Ok(Matrix { order, ..matrix })
    }

    pub fn awq(&self, group: Option<u64>) -> Result<Matrix> {
        self.check_parts("awq", &[QWEIGHT, QZEROS, SCALES])?;
        self.transposed(Bits::Four, Axis::Columns, group, false, true)
    }

    /// Returns a matrix of GPTQ or AWQ, stored as `[inputs, outputs]`. Words are packed along `axis`, and zero points along the outputs.
    fn transposed(
        &self,
        bits: Bits,
        axis: Axis,
        group: Option<u64>,
        less_one: bool,
        is_awq: bool,
    ) -> Result<Matrix> {
        let (values, info) = self.part(QWEIGHT)?;
        let (scale, scale_info) = self.part(SCALES)?;
        let (zeros, zeros_info) = self.part(QZEROS)?;
        check_element(values, info, &[Element::I32])?;
        check_element(zeros, zeros_info, &[Element::I32])?;
        check_element(scale, scale_info, &SCALE_TYPES)?;
        let [height, width] = self.sizes(values, info)?;
        let n = bits.per_word();
        let [columns, rows] = match axis {
            Axis::Rows => [height.saturating_mul(n), width],
            Axis::Columns => [height, width.saturating_mul(n)],
        };
        if !rows.is_multiple_of(n) {
            let problem = format!(
                "has {rows} outputs, which is no multiple of the {n} integers in a word, so that its zero points are incomplete; use a checkpoint in which it is not quantized"
            );
            return Err(wrong_tensor(values, problem));
        }
        let size = group.unwrap_or(columns);
        if is_awq && !columns.is_multiple_of(size) {
            let problem = format!(
                "has {columns} inputs, which groups of {size} do not divide; use a checkpoint whose `group_size` does"
            );
            return Err(wrong_tensor(values, problem));
        }
        let grid = [rows, columns.div_ceil(size)];
        check_dims(scale, scale_info, &[&[grid[1], rows]])?;
        let packing = |axis| Packing {
            bits,
            axis,
            interleaved: is_awq,
            transposed: true,
        };
        let zero_packing = packing(Axis::Columns);
        check_dims(zeros, zeros_info, &[&zero_packing.stored(grid)])?;
        Ok(Matrix {
            name: self.name(),
            dims: [rows, columns],
            values: values.to_owned(),
            codes: Codes::Packed(packing(axis)),
            scales: stored(scale, scale_info, true),
            grid,
            block: [1, size],
            zeros: ZeroPoints::Packed {
                name: zeros.to_owned(),
                packing: zero_packing,
                less_one,
            },
            order: Order::None,
        })
    }
}

fn stored(name: &str, info: &Info, transposed: bool) -> Part {
    Part {
        name: name.to_owned(),
        element: info.element,
        transposed,
    }
}
