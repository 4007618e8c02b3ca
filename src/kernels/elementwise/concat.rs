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
    tensor::{DType, Extents, Symbol},
};

/// One input `[rows, width]` for each width in `widths` → `out [rows, Σ widths]`: concatenates the rows of the inputs.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Concat {
    /// Widths of the 2 to [`Concat::MAX_PARTS`] inputs.
    pub widths: Vec<u32>,
    pub dtype: DType,
}

/// Names of the parameters for the inputs.
const PARTS: [&str; Concat::MAX_PARTS] = [
    "x_0", "x_1", "x_2", "x_3", "x_4", "x_5", "x_6", "x_7", "x_8", "x_9", "x_10", "x_11", "x_12",
    "x_13", "x_14", "x_15",
];

impl Concat {
    /// Max number of tensors that one kernel concatenates.
    pub const MAX_PARTS: usize = 16;

    /// Number of columns of the result: the sum of all widths, saturated to `u32::MAX`.
    pub fn width(&self) -> u32 {
        self.widths.iter().fold(0, |sum, &w| sum.saturating_add(w))
    }

    /// Name and width of each input.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (&'static str, u32)> {
        PARTS.into_iter().zip(self.widths.iter().copied())
    }

    fn vector(&self) -> u32 {
        vector_width(self.dtype, &self.widths)
    }
}

impl Kernel for Concat {
    facts! { template: "concat", dtype: self.dtype }

    fn symbol(&self) -> String {
        let widths: Vec<String> = self.widths.iter().map(|w| format!("_w{w}")).collect();
        format!("concat_{}{}", self.dtype, widths.concat())
    }

    fn constants(&self) -> Constants {
        let n = self.vector();
        let (mut names, mut begins, mut packs, mut begin) = (vec![], vec![], vec![], 0);
        for (name, width) in self.parts() {
            names.push(name);
            begins.push(begin.to_string());
            packs.push((width / n).to_string());
            begin += width / n;
        }
        let mut constants = stream_constants(self.dtype, n);
        constants.insert("width", self.width().into());
        constants.insert("n_parts", (names.len() as u64).into());
        constants.insert("parts", names.join(", ").into());
        constants.insert("begins", begins.join(", ").into());
        constants.insert("packs", packs.join(", ").into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        let part = |(name, width)| {
            let rows = rows_by(Symbol::Rows, width);
            read(name, self.dtype, rows, Fill::ACTIVATION)
        };
        let mut params: Vec<Param> = self.parts().map(part).collect();
        params.push(write(
            "out",
            self.dtype,
            rows_by(Symbol::Rows, self.width()),
        ));
        params.push(count(Symbol::Rows));
        params
    }

    fn validate(&self) -> Result<(), String> {
        let n = self.widths.len();
        if !(2..=Self::MAX_PARTS).contains(&n) {
            return Err(format!("{n} parts, expected 2 to {}", Self::MAX_PARTS));
        }
        limits::widths(&self.widths)?;
        limits::widths(&[self.width()])
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        stream_launch(extents.rows * u64::from(self.width() / self.vector()))
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let mut out = Vec::new();
        for row in 0..extents.rows as usize {
            for (part, &width) in reads.iter().zip(&self.widths) {
                let width = width as usize;
                out.extend_from_slice(&part.real()[row * width..][..width]);
            }
        }
        vec![HostTensor::Real(out)]
    }

    fn tolerance(&self) -> Tolerance {
        COPIED
    }
}

/// Instances for the device check and the compile tests: two inputs of equal width, widths that do not allow wide accesses, and the max
/// number of inputs.
pub(super) fn representative() -> Vec<KernelSpec> {
    let mut kernels: Vec<KernelSpec> = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for widths in [vec![768, 768], vec![384, 3, 1], (1..=16).collect()] {
            kernels.push(KernelSpec::from(Concat { widths, dtype }));
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_concatenated() {
        let (widths, dtype) = (vec![2, 1], DType::F32);
        let concat = Concat { widths, dtype };
        let extents = Extents::of(&[2]).unwrap().with_rows(2);
        let (a, b) = (vec![1.0, 2.0, 3.0, 4.0], vec![5.0, 6.0]);
        let (a, b) = (HostTensor::Real(a), HostTensor::Real(b));
        let out = concat.reference(&extents, &[&a, &b]);
        assert_eq!(out[0].real(), [1.0, 2.0, 5.0, 3.0, 4.0, 6.0]);
        let params = concat.params();
        let names: Vec<&str> = params.iter().map(|p| p.name).collect();
        assert_eq!(names, ["x_0", "x_1", "out", "rows"]);
    }

    #[test]
    fn an_access_is_within_one_part() {
        let concat = |widths: &[u32]| Concat {
            widths: widths.to_vec(),
            dtype: DType::F16,
        };
        assert_eq!(concat(&[768, 384]).vector(), 8);
        assert_eq!(concat(&[12, 16]).vector(), 4);
        assert_eq!(concat(&[16, 3]).vector(), 1);
        let constants = concat(&[12, 16]).constants();
        assert_eq!(constants["begins"], "0, 3".into());
        assert_eq!(constants["packs"], "3, 4".into());
    }
}
