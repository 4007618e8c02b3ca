//! Kernels that only move elements. With fusion, they are not needed, because other kernels read the elements at their original location.

use serde::{Deserialize, Serialize};

use crate::{
    kernels::{
        Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance, limits,
        rows::{
            COPIED, STREAM_THREADS, count, read, rows_by, stream_constants, stream_launch,
            vector_width, write,
        },
    },
    machine::Machine,
    tensor::{DType, Extents, Shape, Symbol},
};

/// `x [rows, from_width]` → `out [rows, width]`: columns `start .. start + width`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SliceColumns {
    pub from_width: u32,
    pub start: u32,
    pub width: u32,
    pub dtype: DType,
}

/// `x [tokens, heads·head]` → `out [heads, tokens, head]`. The rows of a launch are tokens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SplitHeads {
    pub heads: u32,
    pub head: u32,
    pub dtype: DType,
}

/// `x [heads, tokens, head]` → `out [tokens, heads·head]`. The rows of a launch are tokens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MergeHeads {
    pub heads: u32,
    pub head: u32,
    pub dtype: DType,
}

impl SliceColumns {
    fn vector(&self) -> u32 {
        vector_width(self.dtype, &[self.from_width, self.start, self.width])
    }
}

impl Kernel for SliceColumns {
    facts! { template: "slice_columns", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!(
            "slice_columns_{}_w{}_from{}_of{}",
            self.dtype, self.width, self.start, self.from_width
        )
    }

    fn constants(&self) -> Constants {
        let mut constants = stream_constants(self.dtype, self.vector());
        constants.insert("from_width", self.from_width.into());
        constants.insert("start", self.start.into());
        constants.insert("width", self.width.into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        let from = rows_by(Symbol::Rows, self.from_width);
        vec![
            read("x", self.dtype, from, Fill::ACTIVATION),
            write("out", self.dtype, rows_by(Symbol::Rows, self.width)),
            count(Symbol::Rows),
        ]
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.from_width, self.width])?;
        limits::columns(self.start, self.width, self.from_width)
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        stream_launch(extents.rows * u64::from(self.width / self.vector()))
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [x] = reads else {
            unreachable!("the parameter list has one operand")
        };
        let columns = self.start as usize..(self.start + self.width) as usize;
        let rows = x.real().chunks_exact(self.from_width as usize);
        let out = rows.flat_map(|row| &row[columns.clone()]).copied();
        vec![HostTensor::Real(out.collect())]
    }

    fn tolerance(&self) -> Tolerance {
        COPIED
    }
}

/// `[heads, tokens, head]`.
fn head_major(heads: u32, head: u32) -> Shape {
    Shape::new([
        u64::from(heads).into(),
        Symbol::Tokens.into(),
        u64::from(head).into(),
    ])
}

fn head_constants(heads: u32, head: u32, dtype: DType) -> Constants {
    let mut constants = stream_constants(dtype, vector_width(dtype, &[head]));
    constants.insert("heads", heads.into());
    constants.insert("head", head.into());
    constants
}

fn head_launch(extents: &Extents, heads: u32, head: u32, dtype: DType) -> Launch {
    let packs = heads * (head / vector_width(dtype, &[head]));
    stream_launch(extents.tokens * u64::from(packs))
}

impl Kernel for SplitHeads {
    facts! { template: "split_heads", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!("split_heads_{}_{}x{}", self.dtype, self.heads, self.head)
    }

    fn constants(&self) -> Constants {
        head_constants(self.heads, self.head, self.dtype)
    }

    fn params(&self) -> Vec<Param> {
        let token_major = rows_by(Symbol::Tokens, self.heads * self.head);
        vec![
            read("x", self.dtype, token_major, Fill::ACTIVATION),
            write("out", self.dtype, head_major(self.heads, self.head)),
            count(Symbol::Tokens),
        ]
    }

    fn validate(&self) -> Result<(), String> {
        limits::heads(self.heads, self.head, &[])
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        head_launch(extents, self.heads, self.head, self.dtype)
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [x] = reads else {
            unreachable!("the parameter list has one operand")
        };
        let head = self.head as usize;
        let width = self.heads as usize * head;
        let mut out = Vec::with_capacity(x.real().len());
        for h in 0..self.heads as usize {
            for t in 0..extents.tokens as usize {
                out.extend_from_slice(&x.real()[t * width + h * head..][..head]);
            }
        }
        vec![HostTensor::Real(out)]
    }

    fn tolerance(&self) -> Tolerance {
        COPIED
    }
}

impl Kernel for MergeHeads {
    facts! { template: "merge_heads", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!("merge_heads_{}_{}x{}", self.dtype, self.heads, self.head)
    }

    fn constants(&self) -> Constants {
        head_constants(self.heads, self.head, self.dtype)
    }

    fn params(&self) -> Vec<Param> {
        let token_major = rows_by(Symbol::Tokens, self.heads * self.head);
        let from = head_major(self.heads, self.head);
        vec![
            read("x", self.dtype, from, Fill::ACTIVATION),
            write("out", self.dtype, token_major),
            count(Symbol::Tokens),
        ]
    }

    fn validate(&self) -> Result<(), String> {
        limits::heads(self.heads, self.head, &[])
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        head_launch(extents, self.heads, self.head, self.dtype)
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [x] = reads else {
            unreachable!("the parameter list has one operand")
        };
        let (tokens, head) = (extents.tokens as usize, self.head as usize);
        let mut out = Vec::with_capacity(x.real().len());
        for t in 0..tokens {
            for h in 0..self.heads as usize {
                out.extend_from_slice(&x.real()[(h * tokens + t) * head..][..head]);
            }
        }
        vec![HostTensor::Real(out)]
    }

    fn tolerance(&self) -> Tolerance {
        COPIED
    }
}

/// Instances for the device check and the compile tests: Q, K, V split from one tensor, slices without wide accesses, and
/// heads of every alignment.
pub(super) fn representative() -> Vec<KernelSpec> {
    let mut kernels: Vec<KernelSpec> = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let slices = [
            (2304, 768, 768),
            (1152, 768, 384),
            (960, 640, 320),
            (3009, 1003, 1003),
            (24, 2, 10),
        ];
        for (from_width, start, width) in slices {
            kernels.push(KernelSpec::from(SliceColumns {
                from_width,
                start,
                width,
                dtype,
            }));
        }
        for (heads, head) in [(12, 64), (12, 32), (5, 64), (16, 80), (3, 17), (2, 12)] {
            kernels.push(KernelSpec::from(SplitHeads { heads, head, dtype }));
            kernels.push(KernelSpec::from(MergeHeads { heads, head, dtype }));
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two tokens with two heads of two elements. The value of element c of head h of token t is `100·t + 10·h + c`.
    const TOKEN_MAJOR: [f32; 8] = [0.0, 1.0, 10.0, 11.0, 100.0, 101.0, 110.0, 111.0];
    const HEAD_MAJOR: [f32; 8] = [0.0, 1.0, 100.0, 101.0, 10.0, 11.0, 110.0, 111.0];

    #[test]
    fn heads_are_split_and_merged_back() {
        let extents = Extents::of(&[2]).unwrap();
        let (heads, head, dtype) = (2, 2, DType::F16);
        let token_major = HostTensor::Real(TOKEN_MAJOR.to_vec());
        let split = SplitHeads { heads, head, dtype }.reference(&extents, &[&token_major]);
        assert_eq!(split[0].real(), HEAD_MAJOR);
        let merged = MergeHeads { heads, head, dtype }.reference(&extents, &[&split[0]]);
        assert_eq!(merged[0], token_major);
    }

    #[test]
    fn a_slice_is_the_columns_from_start_on() {
        let kernel = SliceColumns {
            from_width: 4,
            start: 1,
            width: 2,
            dtype: DType::F32,
        };
        let x = HostTensor::Real(TOKEN_MAJOR.to_vec());
        let out = kernel.reference(&Extents::of(&[2]).unwrap(), &[&x]);
        assert_eq!(out[0].real(), [1.0, 10.0, 101.0, 110.0]);
    }

    #[test]
    fn slices_that_start_off_a_boundary_use_narrower_accesses() {
        let vector = |from_width, start, width| {
            let dtype = DType::F16;
            let kernel = SliceColumns {
                from_width,
                start,
                width,
                dtype,
            };
            kernel.vector()
        };
        assert_eq!(vector(2304, 768, 768), 8);
        assert_eq!(vector(2304, 4, 768), 4);
        assert_eq!(vector(24, 2, 10), 2);
        assert_eq!(vector(24, 3, 8), 1);
    }

    #[test]
    fn head_kernels_count_tokens() {
        let kernel = SplitHeads {
            heads: 12,
            head: 64,
            dtype: DType::F16,
        };
        assert_eq!(
            kernel
                .launch(
                    &Extents::of(&[32]).unwrap(),
                    &crate::machine::testing::hopper()
                )
                .grid,
            [12, 1, 1]
        );
        let params = kernel.params();
        let names: Vec<&str> = params.iter().map(|p| p.name).collect();
        assert_eq!(names, ["x", "out", "tokens"]);
    }
}
