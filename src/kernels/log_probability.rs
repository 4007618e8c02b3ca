//! Log-probabilities that a language model assigns to the tokens of a text.

use serde::{Deserialize, Serialize};

use super::{
    Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance,
    rows::{blocks, read, read_meta, rows_by, storage, write},
};
use crate::{
    kernels::{embedding::Table, limits},
    machine::Machine,
    ops::BatchInput,
    tensor::{DType, Element, Extents, Shape, Symbol},
};

/// `logits [tokens, width]`, `token_ids [tokens]`, `positions [tokens]` → `out [tokens, 1]` in f32: the log-probability of each token given
/// the preceding tokens of its sequence. It is computed from the logits of the preceding token, and is 0 for the first token of a sequence.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LogProbability {
    /// Size of the vocabulary.
    pub width: u32,
    pub dtype: DType,
}

/// Threads per CTA. Each row has one CTA.
const THREADS: u32 = 256;

impl Kernel for LogProbability {
    facts! { template: "log_probability", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!("log_probability_{}_w{}", self.dtype, self.width)
    }

    fn constants(&self) -> Constants {
        Constants::from([
            ("storage", storage(self.dtype)),
            ("width", self.width.into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        let tokens = || Shape::new([Symbol::Tokens.into()]);
        let ids = Param {
            name: "token_ids",
            role: super::Role::Read {
                element: Element::I32,
                shape: tokens(),
                fill: Fill::Below(self.width),
            },
        };
        vec![
            read(
                "logits",
                self.dtype,
                rows_by(Symbol::Tokens, self.width),
                Fill::ACTIVATION,
            ),
            ids,
            read_meta("positions", BatchInput::Positions, tokens()),
            write("out", DType::F32, rows_by(Symbol::Tokens, 1)),
        ]
    }

    fn tables(&self) -> Vec<(usize, Table)> {
        {
            let columns = Table {
                ids: BatchInput::TokenIds,
                offset: 0,
                rows: self.width,
            };
            vec![(1, columns)]
        }
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width])
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        Launch::of_ctas(blocks(extents.tokens, 1).into(), THREADS, 0)
    }

    fn threads(&self) -> u32 {
        THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (logits, ids, positions) = (reads[0].real(), reads[1].index(), reads[2].index());
        let width = self.width as usize;
        let of_token = |t: usize| {
            if positions[t] == 0 {
                return 0.0;
            }
            let row = &logits[(t - 1) * width..t * width];
            let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let exps = row.iter().map(|&x| f64::from(x - top).exp());
            let sum: f64 = exps.sum();
            (f64::from(row[ids[t] as usize] - top) - sum.ln()) as f32
        };
        let all = (0..extents.tokens as usize).map(of_token).collect();
        vec![HostTensor::Real(all)]
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance {
            absolute: 2e-5,
            relative: 2e-6,
            reason: "an f32 sum of exponentials in another order, each within 2 ulp, and one logarithm",
        }
    }
}

/// Instances with fewer elements per row than threads per CTA, with a number of elements that is not a multiple of the threads, and with a
/// realistic vocabulary.
pub(super) fn representative() -> Vec<KernelSpec> {
    let of = |dtype| [7, 1003, 50257].map(|width| LogProbability { width, dtype }.into());
    let dtypes = [DType::F32, DType::F16, DType::BF16];
    dtypes.into_iter().flat_map(of).collect()
}
