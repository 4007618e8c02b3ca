//! GEMMs alone, and GEMMs with bias and GELU, either in the epilogue or in separate kernels (ByteTransformer, figure 10).

use gemmule::{
    DType,
    kernels::{
        Case,
        chain::Chain,
        elementwise::{Activate, AddBias},
        gemm::GemmProblem,
    },
    ops::{Activation, Epilogue},
    select::Site,
};
use miette::Report;

use super::problem::{Contender, Problem, Task};
use crate::launched::{ChosenBy, Launched};

const ROWS: [u32; 8] = [10, 40, 128, 500, 1229, 2458, 4915, 9830];
/// Number of outputs and number of inputs of each weight in BERT-base, then in BERT-large.
const SIZES: [(u32, u32); 8] = [
    (2304, 768),
    (768, 768),
    (3072, 768),
    (768, 3072),
    (3072, 1024),
    (1024, 1024),
    (4096, 1024),
    (1024, 4096),
];
/// Number of outputs and number of inputs of the weight before the activation, in BERT-base and in BERT-large.
const INNER: [(u32, u32); 2] = [(3072, 768), (4096, 1024)];

pub(super) fn problems(dtype: DType, launched: &Launched) -> Result<Vec<Problem>, Report> {
    let gemm = Gemms { dtype, launched };
    let plain = SIZES.into_iter().flat_map(|(n, k)| {
        ROWS.into_iter().map(move |rows| {
            let (chain, by) = gemm.picked(rows, n, k, Epilogue::default())?;
            Ok(Problem {
                task: Task::Gemm { rows, n, k },
                case: Case::new("timed", &[rows]),
                contenders: vec![Contender::picked("gemm", chain, by)],
            })
        })
    });
    let inner = INNER.into_iter().flat_map(|(n, k)| {
        ROWS.into_iter().map(move |rows| {
            Ok(Problem {
                task: Task::GemmBiasGelu { rows, n, k },
                case: Case::new("timed", &[rows]),
                contenders: gemm.with_gelu(rows, n, k)?,
            })
        })
    });
    plain.chain(inner).collect()
}

/// GEMMs of one storage type on a card.
#[derive(Clone, Copy)]
struct Gemms<'a> {
    dtype: DType,
    launched: &'a Launched,
}

impl Gemms<'_> {
    /// Returns the ways to compute a GEMM with bias and GELU, in one, two or three kernels. The first is the kernel that a model launches.
    fn with_gelu(self, rows: u32, n: u32, k: u32) -> Result<Vec<Contender>, Report> {
        let dtype = self.dtype;
        let activation = Activation::GeluExact;
        let gemm = |bias, activation| self.picked(rows, n, k, Epilogue::new(bias, activation));
        let gelu = || Activate {
            activation,
            width: n,
            dtype,
        };
        let (biased, _) = gemm(true, None)?;
        let two = biased.then(gelu(), &[("x", "out"), ("out", "activated")]);
        let activated = [("x", "sum"), ("out", "activated")];
        let (plain, _) = gemm(false, None)?;
        let three = plain
            .then(AddBias { width: n, dtype }, &[("x", "out"), ("out", "sum")])
            .then(gelu(), &activated);
        let (fused, by) = gemm(true, Some(activation))?;
        Ok(vec![
            Contender::picked("gemm_bias_gelu", fused, by),
            Contender::other("gemm_bias, gelu", two),
            Contender::other("gemm, add_bias, gelu", three),
        ])
    }

    /// Returns the kernel that a model launches for `rows` rows, and whether the cost model or timings selected it.
    fn picked(
        self,
        rows: u32,
        n: u32,
        k: u32,
        epilogue: Epilogue,
    ) -> Result<(Chain, ChosenBy), Report> {
        let site = Site::Linear(GemmProblem::new(n, k, self.dtype, epilogue));
        let kernel = self.launched.kernel(&site, rows.into())?;
        Ok((Chain::of(kernel), self.launched.chosen_by(&site)))
    }
}
