//! GEMMs alone, and with bias and GELU in the epilogue or in kernels of their own (ByteTransformer,
//! figure 10).

use super::problem::{Contender, Problem, Task};
use crate::{
    DType,
    kernels::{
        Instructions,
        chain::Chain,
        elementwise::{Activate, AddBias},
        gemm::{Activation, Epilogue},
    },
    tune::{self, choice_at},
};

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
pub(super) fn problems(dtype: DType, instructions: Instructions) -> Vec<Problem> {
    let gemm = Gemms {
        dtype,
        instructions,
    };
    let plain = SIZES.into_iter().flat_map(|(n, k)| {
        ROWS.into_iter().map(move |rows| Problem {
            task: Task::Gemm { rows, n, k },
            lens: vec![rows],
            contenders: vec![Contender::picked(
                "gemm",
                gemm.picked(rows, n, k, Epilogue::default()),
            )],
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
struct Gemms {
    dtype: DType,
    instructions: Instructions,
}

impl Gemms {
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
        let two = gemm(true, None).then(gelu(), &[("x", "out"), ("out", "activated")]);
        let activated = [("x", "sum"), ("out", "activated")];
        let three = gemm(false, None)
            .then(AddBias { width: n, dtype }, &[("x", "out"), ("out", "sum")])
            .then(gelu(), &activated);
        vec![
            Contender::picked("gemm_bias_gelu", gemm(true, Some(activation))),
            Contender::other("gemm_bias, gelu", two),
            Contender::other("gemm, add_bias, gelu", three),
        ]
    }

    /// The kernel that a model would launch for so many rows.
    fn picked(self, rows: u32, n: u32, k: u32, epilogue: Epilogue) -> Chain {
        let gemm = tune::Problem::Gemm {
            n,
            k,
            dtype: self.dtype,
            epilogue,
            instructions: self.instructions,
        };
        choice_at(&gemm.guess(), rows.into())
            .and_then(|choice| gemm.chain(choice))
            .expect("the last range of a guess serves all row counts")
    }
}
