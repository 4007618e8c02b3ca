//! GEMMs alone, and with bias and GELU in the epilogue or in kernels of their own (ByteTransformer,
//! figure 10).

use gemmule::{
    DType,
    kernels::{
        Instructions,
        chain::Chain,
        elementwise::{Activate, AddBias},
        gemm::{Activation, Epilogue},
    },
    tune::{self, Origin},
};

use super::problem::{Contender, Launched, Problem, Task};

const ROWS: [u32; 8] = [10, 40, 128, 500, 1229, 2458, 4915, 9830];
/// Outputs and inputs of the weights of BERT-base, then BERT-large.
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
/// Those of the weight before the activation.
const INNER: [(u32, u32); 2] = [(3072, 768), (4096, 1024)];

/// `instructions` are those of the card.
pub(super) fn problems(
    dtype: DType,
    launched: &Launched,
    instructions: Instructions,
) -> Vec<Problem> {
    let gemm = Gemms {
        dtype,
        launched,
        instructions,
    };
    let plain = SIZES.into_iter().flat_map(|(n, k)| {
        ROWS.into_iter().map(move |rows| {
            let (chain, origin) = gemm.picked(rows, n, k, Epilogue::default());
            Problem {
                task: Task::Gemm { rows, n, k },
                lens: vec![rows],
                contenders: vec![Contender::picked("gemm", chain).by(origin)],
            }
        })
    });
    let inner = INNER.into_iter().flat_map(|(n, k)| {
        ROWS.into_iter().map(move |rows| Problem {
            task: Task::GemmBiasGelu { rows, n, k },
            lens: vec![rows],
            contenders: gemm.with_gelu(rows, n, k),
        })
    });
    plain.chain(inner).collect()
}

/// GEMMs of a storage type for a card.
#[derive(Clone, Copy)]
struct Gemms<'a> {
    dtype: DType,
    launched: &'a Launched,
    instructions: Instructions,
}

impl Gemms<'_> {
    /// What a model launches comes first.
    fn with_gelu(self, rows: u32, n: u32, k: u32) -> Vec<Contender> {
        let dtype = self.dtype;
        let activation = Activation::GeluExact;
        let gemm = |bias, activation| self.picked(rows, n, k, Epilogue { bias, activation });
        let gelu = || Activate {
            activation,
            width: n,
            dtype,
        };
        let two = gemm(true, None)
            .0
            .then(gelu(), &[("x", "out"), ("out", "activated")]);
        let activated = [("x", "sum"), ("out", "activated")];
        let three = gemm(false, None)
            .0
            .then(AddBias { width: n, dtype }, &[("x", "out"), ("out", "sum")])
            .then(gelu(), &activated);
        let (fused, origin) = gemm(true, Some(activation));
        vec![
            Contender::picked("gemm_bias_gelu", fused).by(origin),
            Contender::other("gemm_bias, gelu", two),
            Contender::other("gemm, add_bias, gelu", three),
        ]
    }

    /// The kernel that a model would launch for so many rows, and who chose it.
    fn picked(self, rows: u32, n: u32, k: u32, epilogue: Epilogue) -> (Chain, Origin) {
        let gemm = tune::Problem::Gemm {
            n,
            k,
            dtype: self.dtype,
            epilogue,
            instructions: self.instructions,
        };
        let (choice, origin) = self.launched.choice(&gemm, rows.into());
        let chain = gemm.chain(choice);
        (
            chain.expect("what is launched is a choice of the problem"),
            origin,
        )
    }
}
