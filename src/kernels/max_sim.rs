//! Scores of late interaction (MaxSim, ColBERT).

use serde::{Deserialize, Serialize};

use super::{
    Case, Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance,
    rows::{count, offsets, one_per, read, rows_by, storage, vector_width, write},
};
use crate::{
    machine::Machine,
    tensor::{DType, Element, Extents, Shape, Symbol},
};

/// `query [rows, width]`, `vectors [tokens, width]`, `taken [tokens]`, `cu_lens [batch + 1]` → `out [batch]`: the score of each document.
/// For each vector of the query, the kernel finds the max dot product with a vector of the document. The score is the sum of these
/// products.
///
/// The vectors of document `d` are the rows of `vectors` with the indices `taken[cu_lens[d]..cu_lens[d + 1]]`. An empty document has the
/// score 0. For documents that several CTAs handle, the kernel needs two more tensors: `largest [batch, rows]` for the max products, and
/// `arrived [batch]` for the number of CTAs that are done. All bits of both tensors are 1 before and after a launch.
///
/// For 16-bit types, the products are computed with MMAs. The width is at most [`MaxSim::MAX_WIDTH`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MaxSim {
    pub width: u32,
    pub dtype: DType,
}

const THREADS: u32 = 128;
const WARPS: u32 = THREADS / 32;
/// Max bytes of the query's vectors in shared memory.
const STAGED_BYTES: u32 = 64 << 10;

impl MaxSim {
    /// Max width. With 16-bit types, an MMA needs eight query vectors at once, and `STAGED_BYTES` hold eight vectors of this width.
    pub const MAX_WIDTH: u32 = 4096;

    fn is_mma(&self) -> bool {
        match self.dtype {
            DType::F16 | DType::BF16 => true,
            DType::F32 => false,
        }
    }

    /// Number of columns that are multiplied in one step: the columns of two MMAs, or, in f32, the columns of one vector access.
    fn chunk(&self) -> u32 {
        if self.is_mma() { 32 } else { 4 }
    }

    /// Number of a document's rows that a warp handles at once: the rows of an MMA, or, in f32, one row per lane.
    fn rows_at_once(&self) -> u32 {
        if self.is_mma() { 16 } else { 32 }
    }

    /// Bytes that a query vector takes in shared memory.
    fn staged_row(&self) -> u32 {
        self.width.next_multiple_of(self.chunk()) * self.dtype.bytes() as u32
    }

    /// Max number of query vectors that are multiplied with a document's row each time the kernel reads the row. It is a power of two.
    fn queries(&self) -> u32 {
        let [fewest, most] = if self.is_mma() { [8, 32] } else { [1, 16] };
        let fit = (STAGED_BYTES / self.staged_row()).max(1);
        (1 << fit.ilog2()).clamp(fewest, most)
    }

    /// Min number of CTAs per SM for `__launch_bounds__`. Rows of more than four chunks need more registers.
    fn ctas_per_sm(&self) -> u32 {
        match self.is_mma() && self.width.div_ceil(self.chunk()) <= 4 {
            true => 4,
            false => 3,
        }
    }

    /// Number of warps that handle a piece of a document: a power of two, up to the number of warps of a CTA. It is the smallest number
    /// that leaves at most `2 * rows_at_once` rows of a document of mean length to each warp, or else the max.
    fn team(&self, extents: &Extents) -> u32 {
        let mut team = 1;
        while team < WARPS
            && u64::from(2 * self.rows_at_once() * team) * extents.batch < extents.tokens
        {
            team *= 2;
        }
        team
    }
}

impl Kernel for MaxSim {
    facts! { template: "max_sim", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!("max_sim_{}_w{}", self.dtype, self.width)
    }

    fn constants(&self) -> Constants {
        Constants::from([
            ("storage", storage(self.dtype)),
            ("width", self.width.into()),
            ("vector", vector_width(self.dtype, &[self.width]).into()),
            ("is_mma", self.is_mma().into()),
            ("chunk", self.chunk().into()),
            ("rows_at_once", self.rows_at_once().into()),
            ("queries", self.queries().into()),
            ("ctas", self.ctas_per_sm().into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        let vectors = |symbol| rows_by(symbol, self.width);
        let products = Shape::new([Symbol::Batch.into(), Symbol::Rows.into()]);
        vec![
            read("query", self.dtype, vectors(Symbol::Rows), Fill::ACTIVATION),
            read(
                "vectors",
                self.dtype,
                vectors(Symbol::Tokens),
                Fill::ACTIVATION,
            ),
            read(
                "taken",
                Element::I32,
                one_per(Symbol::Tokens),
                Fill::TakenRows,
            ),
            read("cu_lens", Element::I32, offsets(), Fill::TakenOffsets),
            write("out", DType::F32, one_per(Symbol::Batch)),
            write("largest", DType::F32, products),
            write("arrived", Element::I32, one_per(Symbol::Batch)),
            count(Symbol::Tokens),
            count(Symbol::Batch),
            count(Symbol::Longest),
            count(Symbol::Rows),
        ]
    }

    /// Returns a grid in which a CTA handles one piece of each of its documents. Documents are split into several pieces if there are too
    /// few documents to fill the GPU, or if a document is much longer than the others.
    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        let team = self.team(extents);
        let per_cta = u64::from(WARPS / team);
        let resident = u64::from(self.ctas_per_sm() * machine.sms) * per_cta;
        let group = u64::from(self.rows_at_once() * team);
        let piece = (extents.tokens / resident)
            .max(2 * group)
            .next_multiple_of(group);
        let ctas = extents.batch.div_ceil(per_cta);
        let pieces = extents.longest.div_ceil(piece).clamp(1, 0xffff);
        Launch {
            grid: [
                u32::try_from(ctas).unwrap_or(u32::MAX).max(1),
                pieces as u32,
                1,
            ],
            threads: THREADS,
            shared_bytes: self.queries() * self.staged_row(),
        }
    }

    fn threads(&self) -> u32 {
        THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [query, vectors] = [0, 1].map(|i| reads[i].real());
        let [taken, cu_lens] = [2, 3].map(|i| reads[i].index());
        let width = self.width as usize;
        let product = |a: &[f32], b: &[f32]| -> f64 {
            let both = a.iter().zip(b);
            both.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
        };
        let score = |ends: &[i64]| {
            let rows = || taken[ends[0] as usize..ends[1] as usize].iter();
            let max = |q: &[f32]| {
                let row = |&row: &i64| &vectors[row as usize * width..][..width];
                rows().map(|at| product(q, row(at))).reduce(f64::max)
            };
            let maxima = query.chunks_exact(width).filter_map(max);
            maxima.sum::<f64>() as f32
        };
        let none = extents.batch as usize;
        vec![
            HostTensor::Real(cu_lens.windows(2).map(score).collect()),
            HostTensor::Real(vec![f32::NAN; none * extents.rows as usize]),
            HostTensor::Index(vec![-1; none]),
        ]
    }

    /// Short documents, documents of a mean length that takes all warps of a CTA, and a document that many CTAs handle.
    fn cases(&self) -> Vec<Case> {
        let mut cases = Case::standard();
        cases.push(Case::new("short", &[1; 67]));
        cases.push(Case::new("long", &[2100, 1, 33]));
        cases
    }

    /// Number of query vectors in a check. Depending on the batch, it is one, a multiple of the number of vectors that the kernel
    /// multiplies at once (`queries`), or a number that is not a multiple.
    fn check_rows(&self, extents: &Extents) -> u64 {
        match extents.batch {
            1 => 1,
            3 => 32,
            5 => 64,
            _ => 67 + extents.batch,
        }
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance {
            absolute: 1e-3,
            relative: 1e-5,
            reason: "sums of `width` products of magnitude 1 in f32 in another order, whose maxima, up to 100 of a magnitude of tens, \
                     are then added in f32",
        }
    }
}

/// Instances with the widths of published models, a width that is not a multiple of a chunk, and odd widths, for which an access has one
/// element.
pub(super) fn representative() -> Vec<KernelSpec> {
    let of = |dtype| [128, 96, 768, 1024, 48, 33, 1].map(|width| MaxSim { width, dtype }.into());
    let dtypes = [DType::F32, DType::F16, DType::BF16];
    dtypes.into_iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{kernels::trial::Trial, machine::testing::hopper};

    #[test]
    fn the_cpu_computes_the_scores_of_the_reference() {
        for width in [1, 33, 128] {
            let dtype = DType::F32;
            let kernel = MaxSim { width, dtype };
            for (case, trial) in Trial::all(&kernel, 1, u64::MAX).unwrap() {
                let reads: Vec<&HostTensor> = trial.reads.iter().map(|(_, read)| &**read).collect();
                let row = |&row: &i64| &reads[1].real()[row as usize * width as usize..];
                let row = |at: &i64| row(at)[..width as usize].iter().copied();
                let ends = reads[3].index().windows(2);
                let documents = ends.map(|ends| {
                    let taken = &reads[2].index()[ends[0] as usize..ends[1] as usize];
                    taken.iter().flat_map(row).collect::<Vec<f32>>()
                });
                let documents: Vec<Vec<f32>> = documents.collect();
                let documents: Vec<&[f32]> = documents.iter().map(Vec::as_slice).collect();
                let mut out = vec![f32::NAN; documents.len()];
                let run = gemmule_cpu::max_sim::MaxSim {
                    query: reads[0].real(),
                    documents: &documents,
                    width: width as usize,
                    out: &mut out,
                };
                run.run();
                let (_, _, want) = &trial.writes[0];
                let difference = kernel.tolerance().compare(&out, want.real());
                assert!(difference.worst <= 1.0, "{width} {case:?}: {difference:?}");
                let has_empty = ["tiny", "short", "long"].contains(&case.name);
                assert_eq!(want.real().contains(&0.0), has_empty, "{case:?}");
            }
        }
    }

    #[test]
    fn documents_are_split_only_if_they_leave_sms_idle() {
        let kernel = MaxSim {
            width: 128,
            dtype: DType::F16,
        };
        let launch = |lens: &[u32], rows| {
            let extents = Extents::of(lens).unwrap().with_rows(rows);
            let launch = kernel.launch(&extents, &hopper());
            (launch.grid, launch.shared_bytes)
        };
        assert_eq!(launch(&[300; 1000], 32), ([1000, 1, 1], 32 * 256));
        assert_eq!(launch(&[20; 10_000], 33), ([2500, 1, 1], 32 * 256));
        assert_eq!(launch(&[2000; 10], 32), ([10, 16, 1], 32 * 256));
        assert_eq!(launch(&[1], 1), ([1, 1, 1], 32 * 256));
    }

    #[test]
    fn shared_memory_holds_the_vectors_of_every_width() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for width in 1..=MaxSim::MAX_WIDTH {
                let kernel = MaxSim { width, dtype };
                assert!(
                    kernel.queries() * kernel.staged_row() <= STAGED_BYTES,
                    "{width}"
                );
            }
        }
    }
}
