//! Pooling of tokens to one row per sequence.

use serde::{Deserialize, Serialize};

use super::{
    Case, Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance, f32_literal,
    rows::{
        COPIED, STREAM_THREADS, Teams, blocks, count, offsets, read, read_meta, rounded_once,
        rows_by, storage, stream_constants, stream_launch, vector_width, word, write,
    },
};
use crate::{
    kernels::limits,
    machine::Machine,
    ops::BatchInput,
    tensor::{DType, Extents, Symbol},
};

/// `x [tokens, width]`, `cu_lens [batch + 1]` → `out [batch, width]`: the row of the selected token of each sequence.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TokenOfSequence {
    pub which: TokenPosition,
    pub width: u32,
    pub dtype: DType,
}

/// Position of the selected token in each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum TokenPosition {
    First,
    Last,
}

impl TokenPosition {
    /// Start of the kernel's symbol.
    pub const fn name(self) -> &'static str {
        match self {
            Self::First => "first_token",
            Self::Last => "last_token",
        }
    }
}

/// `x [tokens, width]`, `cu_lens [batch + 1]` → `out [batch, width]`: mean of each sequence's rows.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MeanPool {
    pub width: u32,
    pub dtype: DType,
}

/// `x [tokens, width]`, `cu_lens [batch + 1]` → `out [batch, width]`: maximum of each column over each sequence,
/// propagating NaN.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MaxPool {
    pub width: u32,
    pub dtype: DType,
}

/// `x [rows, width]` → `out [rows, width]`: each row divided by `max(‖row‖₂, eps)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct L2Normalize {
    pub width: u32,
    pub eps: f32,
    pub dtype: DType,
}

/// [`MeanPool`] fused with [`L2Normalize`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeanPoolNormalize {
    pub width: u32,
    pub eps: f32,
    pub dtype: DType,
}

/// Threads per CTA. With this number of threads, one CTA per SM has enough loads in flight.
pub(super) const POOL_THREADS: u32 = 512;

/// `x`, `cu_lens`, `out`, `batch`: the parameters of every pooling kernel.
pub(super) fn pool_params(width: u32, dtype: DType) -> Vec<Param> {
    vec![
        read("x", dtype, rows_by(Symbol::Tokens, width), Fill::ACTIVATION),
        read_meta("cu_lens", BatchInput::CuLens, offsets()),
        write("out", dtype, rows_by(Symbol::Batch, width)),
        count(Symbol::Batch),
    ]
}

/// Returns a launch of one CTA per sequence.
pub(super) fn pool_launch(extents: &Extents) -> Launch {
    Launch {
        grid: [blocks(extents.batch, 1), 1, 1],
        threads: POOL_THREADS,
        shared_bytes: 0,
    }
}

/// Constants of `partials/pool_groups.cu` and `partials/pool_sum.cu`.
pub(super) fn pool_constants(width: u32, dtype: DType) -> Constants {
    Constants::from([
        ("storage", storage(dtype)),
        ("width", width.into()),
        ("vector", vector_width(dtype, &[width]).into()),
        ("by_position", false.into()),
    ])
}

/// Returns the standard batches, and a batch with a sequence so long that each group of threads adds many of its rows.
pub(super) fn pool_cases() -> Vec<Case> {
    let mut cases = Case::standard();
    cases.push(Case::new("long", &[700, 1, 33]));
    cases
}

/// Returns the two inputs of a pooling kernel: the rows `x` and the offsets of the sequences.
pub(super) fn pool_reads<'a>(reads: &[&'a HostTensor]) -> (&'a [f32], &'a [i64]) {
    let [x, cu_lens] = reads else {
        unreachable!("the parameter list has two operands")
    };
    (x.real(), cu_lens.index())
}

/// Mean of each sequence's rows.
fn means(x: &[f32], cu_lens: &[i64], width: usize) -> Vec<Vec<f64>> {
    cu_lens
        .windows(2)
        .map(|ends| {
            let rows = &x[ends[0] as usize * width..ends[1] as usize * width];
            let mut mean = vec![0f64; width];
            for row in rows.chunks_exact(width) {
                for (sum, &v) in mean.iter_mut().zip(row) {
                    *sum += f64::from(v);
                }
            }
            let n = (ends[1] - ends[0]) as f64;
            mean.iter_mut().for_each(|m| *m /= n);
            mean
        })
        .collect()
}

/// Returns the maximum. Propagates NaN, unlike `f32::max`.
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    if b > a || b.is_nan() { b } else { a }
}

/// Returns `row / max(‖row‖₂, eps)`.
fn normalized(row: &[f64], eps: f32) -> impl Iterator<Item = f32> {
    let norm = row.iter().map(|v| v * v).sum::<f64>().sqrt();
    let divisor = norm.max(f64::from(eps));
    row.iter().map(move |v| (v / divisor) as f32)
}

impl Kernel for TokenOfSequence {
    facts! { template: "token_of_sequence", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!("{}_{}_w{}", self.which.name(), self.dtype, self.width)
    }

    fn constants(&self) -> Constants {
        let mut constants = stream_constants(self.dtype, vector_width(self.dtype, &[self.width]));
        constants.insert("width", self.width.into());
        constants.insert("is_last", (self.which == TokenPosition::Last).into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        pool_params(self.width, self.dtype)
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width])
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let packs = self.width / vector_width(self.dtype, &[self.width]);
        stream_launch(extents.batch * u64::from(packs))
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (x, cu_lens) = pool_reads(reads);
        let width = self.width as usize;
        let token = |ends: &[i64]| match self.which {
            TokenPosition::First => ends[0],
            TokenPosition::Last => ends[1] - 1,
        };
        let out = cu_lens
            .windows(2)
            .flat_map(|ends| &x[token(ends) as usize * width..][..width])
            .copied()
            .collect();
        vec![HostTensor::Real(out)]
    }

    fn tolerance(&self) -> Tolerance {
        COPIED
    }
}

impl Kernel for MeanPool {
    facts! { template: "mean_pool", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!("mean_pool_{}_w{}", self.dtype, self.width)
    }

    fn constants(&self) -> Constants {
        pool_constants(self.width, self.dtype)
    }

    fn params(&self) -> Vec<Param> {
        pool_params(self.width, self.dtype)
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width])
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        pool_launch(extents)
    }

    fn threads(&self) -> u32 {
        POOL_THREADS
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (x, cu_lens) = pool_reads(reads);
        let means = means(x, cu_lens, self.width as usize);
        let out = means.iter().flatten().map(|&m| m as f32).collect();
        vec![HostTensor::Real(out)]
    }

    fn cases(&self) -> Vec<Case> {
        pool_cases()
    }

    fn tolerance(&self) -> Tolerance {
        rounded_once(
            self.dtype,
            1e-6,
            "a thread adds up to a few hundred values of magnitude 1 in f32 before the division \
             by their number; the mean is then rounded to storage",
        )
    }
}

impl MaxPool {
    /// Max packs (the elements of one vector access) of a row that a thread's registers hold.
    const MAX_PACKS: u32 = 8;

    /// CTAs per sequence: one, unless a row exceeds the registers of a CTA. Such a row is split among CTAs in which each thread has one
    /// pack.
    fn ctas(&self) -> u32 {
        let packs = self.width / vector_width(self.dtype, &[self.width]);
        match packs.div_ceil(POOL_THREADS) {
            ctas if ctas > Self::MAX_PACKS => ctas,
            _ => 1,
        }
    }
}

impl Kernel for MaxPool {
    facts! { template: "max_pool", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!("max_pool_{}_w{}", self.dtype, self.width)
    }

    fn constants(&self) -> Constants {
        let mut constants = pool_constants(self.width, self.dtype);
        constants.insert("wide", (self.ctas() > 1).into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        pool_params(self.width, self.dtype)
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width])
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let launch = pool_launch(extents);
        Launch {
            grid: [launch.grid[0], self.ctas(), 1],
            ..launch
        }
    }

    fn threads(&self) -> u32 {
        POOL_THREADS
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (x, cu_lens) = pool_reads(reads);
        let width = self.width as usize;
        let mut out = Vec::new();
        for ends in cu_lens.windows(2) {
            let rows = ends[0] as usize..ends[1] as usize;
            for c in 0..width {
                let column = rows.clone().map(|row| x[row * width + c]);
                out.push(column.fold(f32::NEG_INFINITY, larger));
            }
        }
        vec![HostTensor::Real(out)]
    }

    fn cases(&self) -> Vec<Case> {
        pool_cases()
    }

    fn tolerance(&self) -> Tolerance {
        COPIED
    }
}

impl Kernel for L2Normalize {
    facts! { template: "l2_normalize", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!(
            "l2_normalize_{}_w{}_eps{}",
            self.dtype,
            self.width,
            word(self.eps)
        )
    }

    fn constants(&self) -> Constants {
        let mut constants = Teams::usual(self.width, self.dtype).constants(self.width, self.dtype);
        constants.insert("eps", f32_literal(self.eps).into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        let rows = rows_by(Symbol::Rows, self.width);
        vec![
            read("x", self.dtype, rows.clone(), Fill::ACTIVATION),
            write("out", self.dtype, rows),
            count(Symbol::Rows),
        ]
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width])?;
        limits::eps(self.eps)
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        Teams::usual(self.width, self.dtype).launch(extents.rows)
    }

    fn threads(&self) -> u32 {
        Teams::usual(self.width, self.dtype).threads()
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [x] = reads else {
            unreachable!("the parameter list has one operand")
        };
        let mut out = Vec::with_capacity(x.real().len());
        for row in x.real().chunks_exact(self.width as usize) {
            let row: Vec<f64> = row.iter().map(|&v| v.into()).collect();
            out.extend(normalized(&row, self.eps));
        }
        vec![HostTensor::Real(out)]
    }

    fn tolerance(&self) -> Tolerance {
        normalize_tolerance(self.dtype)
    }
}

impl Kernel for MeanPoolNormalize {
    facts! { template: "mean_pool_normalize", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!(
            "mean_pool_normalize_{}_w{}_eps{}",
            self.dtype,
            self.width,
            word(self.eps)
        )
    }

    fn constants(&self) -> Constants {
        let mut constants = pool_constants(self.width, self.dtype);
        constants.insert("eps", f32_literal(self.eps).into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        pool_params(self.width, self.dtype)
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width])?;
        limits::eps(self.eps)
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        pool_launch(extents)
    }

    fn threads(&self) -> u32 {
        POOL_THREADS
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (x, cu_lens) = pool_reads(reads);
        let means = means(x, cu_lens, self.width as usize);
        let rows = means.iter().flat_map(|mean| normalized(mean, self.eps));
        vec![HostTensor::Real(rows.collect())]
    }

    fn cases(&self) -> Vec<Case> {
        pool_cases()
    }

    fn tolerance(&self) -> Tolerance {
        normalize_tolerance(self.dtype)
    }
}

fn normalize_tolerance(dtype: DType) -> Tolerance {
    rounded_once(
        dtype,
        1e-6,
        "values and their norm are f32 sums of a few hundred to a few thousand terms; the result, \
         of magnitude at most 1, is then rounded to storage",
    )
}

/// Instances for the device check and the compile tests.
pub fn representative() -> Vec<KernelSpec> {
    let eps = 1e-12;
    let mut kernels: Vec<KernelSpec> = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for width in [768, 384, 320, 1024, 1003, 128, 4096, 8191] {
            let which = TokenPosition::First;
            kernels.push(KernelSpec::from(TokenOfSequence {
                which,
                width,
                dtype,
            }));
            kernels.push(KernelSpec::from(MeanPool { width, dtype }));
            kernels.push(KernelSpec::from(L2Normalize { width, eps, dtype }));
            kernels.push(KernelSpec::from(MeanPoolNormalize { width, eps, dtype }));
        }
        for width in [768, 1003] {
            let which = TokenPosition::Last;
            kernels.push(KernelSpec::from(TokenOfSequence {
                which,
                width,
                dtype,
            }));
        }
        for width in [768, 100, 1003] {
            kernels.push(KernelSpec::from(MaxPool { width, dtype }));
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sequences of 1 and of 3 tokens, with two columns.
    fn batch() -> (Extents, HostTensor, HostTensor) {
        (
            Extents::of(&[1, 3]).unwrap(),
            HostTensor::Real(vec![3.0, -4.0, 1.0, 0.0, 2.0, 0.0, 6.0, 0.0]),
            HostTensor::Index(vec![0, 1, 4]),
        )
    }

    #[test]
    fn a_sequence_becomes_its_first_or_last_row_its_largest_values_or_its_mean() {
        let (extents, x, cu_lens) = batch();
        let (width, dtype) = (2, DType::F32);
        let token = |which| {
            let kernel = TokenOfSequence {
                which,
                width,
                dtype,
            };
            kernel.reference(&extents, &[&x, &cu_lens])[0]
                .real()
                .to_vec()
        };
        assert_eq!(token(TokenPosition::First), [3.0, -4.0, 1.0, 0.0]);
        assert_eq!(token(TokenPosition::Last), [3.0, -4.0, 6.0, 0.0]);
        let largest = MaxPool { width, dtype }.reference(&extents, &[&x, &cu_lens]);
        assert_eq!(largest[0].real(), [3.0, -4.0, 6.0, 0.0]);
        let mean = MeanPool { width, dtype }.reference(&extents, &[&x, &cu_lens]);
        assert_eq!(mean[0].real(), [3.0, -4.0, 3.0, 0.0]);
    }

    #[test]
    fn a_norm_below_eps_divides_by_eps() {
        let (extents, x, cu_lens) = batch();
        let normalize = |eps| {
            let kernel = MeanPoolNormalize {
                width: 2,
                eps,
                dtype: DType::F32,
            };
            kernel.reference(&extents, &[&x, &cu_lens])[0]
                .real()
                .to_vec()
        };
        assert_eq!(normalize(1e-12), [0.6, -0.8, 1.0, 0.0]);
        assert_eq!(normalize(4.0), [0.6, -0.8, 0.75, 0.0]);
        let rows = L2Normalize {
            width: 2,
            eps: 4.0,
            dtype: DType::F32,
        };
        let out = rows.reference(&extents, &[&x]);
        assert_eq!(out[0].real(), [0.6, -0.8, 0.25, 0.0, 0.5, 0.0, 1.0, 0.0]);
    }

    #[test]
    fn a_sequence_has_one_cta() {
        let (width, dtype) = (768, DType::F16);
        let extents = Extents::of(&[5, 70, 9]).unwrap();
        let pool = MeanPool { width, dtype };
        let launch = pool.launch(&extents, &crate::machine::testing::hopper());
        assert_eq!((launch.grid, launch.threads), ([3, 1, 1], pool.threads()));
        let names: Vec<&str> = pool.params().iter().map(|p| p.name).collect();
        assert_eq!(names, ["x", "cu_lens", "out", "batch"]);
    }
}
