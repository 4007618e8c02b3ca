//! The conversion of a whole packed weight to the type of the activations.

use serde::{Deserialize, Serialize};

use super::{GemmProblem, odd_sizes::odd_formats, packed};
use crate::{
    kernels::{
        Case, Class, Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance,
        rows::{STREAM_THREADS, read, write},
    },
    machine::Machine,
    ops::Epilogue,
    tensor::{DType, Extents, Format, Scaled, Shape},
};

/// `weight [n, k]`, packed → `unpacked [n, k]`: the weight multiplied by its scales, in the layout that the GEMMs for plain weights read.
///
/// If each row has one scale, the elements of the row are multiplied by the scale and rounded to the storage type. Kernels that read the
/// packed weight avoid this rounding: they multiply sums of products by the scale. If groups of columns have scales, the elements equal
/// those that kernels for a packed weight compute in registers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UnpackWeight {
    pub n: u32,
    pub k: u32,
    pub weight: Scaled,
    pub dtype: DType,
}

/// Octets of rows that a warp converts. The warp loads the values of all octets before it converts them, so enough loads are in flight.
const OCTETS: u64 = 4;
/// Columns of a block of packed values.
const BLOCK: u64 = 64;
/// Fraction of the data sheet's DRAM bandwidth that a copy of a large matrix reaches.
const COPY_SHARE: f64 = 0.8;

impl UnpackWeight {
    /// Returns the conversion of a problem's weight, and the problem with the converted weight. Returns `None` if the weight is not packed.
    pub fn of(problem: &GemmProblem) -> Option<(Self, GemmProblem)> {
        let conversion = Self {
            n: problem.weight_rows(),
            k: problem.k,
            weight: problem.packed()?,
            dtype: problem.dtype,
        };
        let plain = GemmProblem {
            weight: problem.dtype.into(),
            ..problem.clone()
        };
        Some((conversion, plain))
    }

    fn shape(&self) -> Shape {
        Shape::fixed(&[self.n.into(), self.k.into()])
    }
}

impl Kernel for UnpackWeight {
    fn symbol(&self) -> String {
        let Self {
            n,
            k,
            weight,
            dtype,
        } = self;
        format!("unpack_{}_{dtype}_n{n}_k{k}", weight.name())
    }

    fn template(&self) -> &'static str {
        "unpack_weight"
    }

    fn constants(&self) -> Constants {
        let mut constants = packed::constants(Some(self.weight));
        constants.extend([
            ("storage", self.dtype.name().into()),
            ("n", self.n.into()),
            ("k", self.k.into()),
            ("octets", OCTETS.into()),
            // Rows start at multiples of 16 bytes.
            ("aligned", self.k.is_multiple_of(8).into()),
            ("hopper", false.into()),
            ("warp_mma", false.into()),
        ]);
        constants
    }

    fn params(&self) -> Vec<Param> {
        let weights = Fill::Normal {
            mean: 0.0,
            deviation: 1.0 / (self.k as f32).sqrt(),
        };
        let format = Format::Scaled(self.weight);
        vec![
            read("weight", format, self.shape(), weights),
            write("unpacked", self.dtype, self.shape()),
        ]
    }

    fn dtype(&self) -> Option<DType> {
        Some(self.dtype)
    }

    fn class(&self) -> Class {
        Class::Gemm
    }

    fn validate(&self) -> Result<(), String> {
        let problem = GemmProblem {
            weight: Format::Scaled(self.weight),
            ..GemmProblem::new(self.n, self.k, self.dtype, Epilogue::default())
        };
        problem.check()?;
        match problem.packed() {
            Some(_) => Ok(()),
            None => Err(format!(
                "a packed weight that is converted to {}; expected f16 or bf16",
                self.dtype
            )),
        }
    }

    fn launch(&self, _: &Extents, _: &Machine) -> Launch {
        let blocks = u64::from(self.k).next_multiple_of(2 * BLOCK) / BLOCK;
        let warps = u64::from(self.n).div_ceil(8 * OCTETS) * blocks;
        Launch::of_ctas(
            warps.div_ceil((STREAM_THREADS / 32).into()),
            STREAM_THREADS,
            0,
        )
    }

    fn cycles(&self, _: u64, machine: &Machine) -> Option<f64> {
        let bytes = packed::bytes_per_element(self.weight) + self.dtype.bytes() as f64;
        let elements = f64::from(self.n) * f64::from(self.k);
        Some(machine.costs.norm.launch + elements * bytes / (COPY_SHARE * machine.rates.dram))
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let quantized = self.weight.quantize(reads[0].real(), self.k as usize);
        vec![HostTensor::Real(quantized.unpacked(self.dtype))]
    }

    /// Returns a single case, because the result does not depend on the batch.
    fn cases(&self) -> Vec<Case> {
        vec![Case::new("one_token", &[1])]
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance {
            absolute: 3e-5,
            relative: 1e-6,
            reason: "the reference rounds as the kernel does, except for scales of E4M3 groups below 2^-14 in f16: their error is up to \
                     2^-25, times 448, and an element below 2^-5 is then rounded to the next step of 2^-16",
        }
    }
}

/// Instances of every format. Their sizes give whole and partial groups, blocks and octets, and rows with every alignment.
pub(super) fn representative() -> Vec<KernelSpec> {
    const SIZES: [(u32, u32); 6] = [
        (768, 768),
        (1000, 328),
        (1003, 130),
        (33, 7),
        (8, 8),
        (3, 4096),
    ];
    let mut kernels = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for format in odd_formats() {
            for (n, k) in SIZES {
                let problem = GemmProblem {
                    weight: format,
                    ..GemmProblem::new(n, k, dtype, Epilogue::default())
                };
                kernels.extend(UnpackWeight::of(&problem).map(|(kernel, _)| kernel.into()));
            }
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::trial::Trial;

    /// Checks that elements differ from the values of the format by at most a rounding to the storage type.
    #[test]
    fn converted_elements_are_the_values_of_the_format() {
        for spec in representative() {
            let KernelSpec::UnpackWeight(kernel) = &spec else {
                panic!("{spec:?} is not a conversion");
            };
            let [(_, trial)] = &Trial::all(kernel, 3, 1).unwrap()[..] else {
                panic!("a conversion does not depend on the batch");
            };
            let matrix = trial.reads[0].1.real();
            let exact = kernel.weight.quantize(matrix, kernel.k as usize).values();
            let step = match kernel.dtype {
                DType::F16 => 1.0 / 1024.0,
                DType::BF16 | DType::F32 => 1.0 / 128.0,
            };
            let (_, _, got) = &trial.writes[0];
            for (&got, &want) in got.real().iter().zip(&exact) {
                assert_eq!(got, kernel.dtype.round(got), "{}", kernel.symbol());
                let error = (got - want).abs();
                assert!(
                    error <= 1.5e-5 + step * want.abs(),
                    "{}: {got} for {want}",
                    kernel.symbol()
                );
            }
        }
    }

    #[test]
    fn the_launch_covers_all_rows_and_blocks() {
        let machine = crate::machine::testing::hopper();
        let ctas = |n, k| {
            let problem = GemmProblem {
                weight: Format::INT4,
                ..GemmProblem::new(n, k, DType::F16, Epilogue::default())
            };
            let (kernel, _) = UnpackWeight::of(&problem).unwrap();
            kernel.launch(&Extents::default(), &machine).grid[0]
        };
        // 32 rows and 512 columns for each CTA of eight warps.
        assert_eq!(
            [(1, 1), (32, 512), (33, 512), (32, 513)].map(|(n, k)| ctas(n, k)),
            [1, 1, 2, 2]
        );
    }
}
