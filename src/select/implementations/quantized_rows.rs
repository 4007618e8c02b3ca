//! Linear layers whose weight is packed E4M3 with a scale for each row, for many rows. A launch converts the rows of x to E4M3, each with a
//! scale of its own, and the GEMM multiplies E4M3. The GEMM reads the weight as it is stored.

use super::{
    Bindings, Candidate, Implementation, Launch, ONLY_HOPPER, Operand, ScratchRows, Unfit,
    gate::gated, require,
};
use crate::{
    kernels::{
        Instructions,
        gemm::{GemmProblem, GemmWgmma, QuantizeRows},
    },
    machine::Machine,
    select::site::{Link, Site},
    tensor::{DType, Element, Format},
};

/// Names of the rules, without and with a gate.
pub(in crate::select) const NAMES: [&str; 2] = ["quantize rows+gemm", "quantize rows+gemm+gate"];

/// Implements a linear layer.
pub(super) fn linear(chain: &[Link], machine: &Machine) -> Result<Implementation, Unfit> {
    let problem = packed(chain)?;
    quantized(problem, 1, machine)
}

/// Implements a linear layer whose only reader is a gate.
pub(super) fn with_gate(chain: &[Link], machine: &Machine) -> Result<Implementation, Unfit> {
    packed(chain)?;
    quantized(&gated(chain)?, 2, machine)
}

/// Returns the problem of the first site if its weight is packed E4M3 with a scale for each row.
fn packed(chain: &[Link]) -> Result<&GemmProblem, Unfit> {
    match chain.first().map(|link| &link.site) {
        Some(Site::Linear(problem)) if problem.weight == Format::FP8 => Ok(problem),
        _ => Err(Unfit::Sites),
    }
}

/// Implements the first sites of a chain, which compute `problem`.
fn quantized(
    problem: &GemmProblem,
    sites: usize,
    machine: &Machine,
) -> Result<Implementation, Unfit> {
    let &GemmProblem { n, k, dtype, .. } = problem;
    let is_hopper = machine.instructions == Instructions::Hopper;
    require(is_hopper, ONLY_HOPPER)?;
    let (Some((kernel, problem)), true) =
        (QuantizeRows::of(problem), GemmWgmma::serves(n, k, dtype))
    else {
        return Err(Unfit::Because(format!(
            "a weight of {n} x {k} beside activations in {dtype}; expected multiples of 8, and f16 or bf16"
        )));
    };
    let scratch = |name, element, columns: u32| Operand::Scratch {
        site: 0,
        name,
        element,
        columns: columns.into(),
        rows: ScratchRows::OfBatch { more: 0 },
    };
    let quantized = scratch("quantized", Element::E4m3, kernel.columns());
    let row_scale = scratch("row_scale", DType::F32.into(), 1);
    let site = sites - 1;
    let convert = Launch {
        site,
        bindings: Bindings::to_operands_of(&[0])
            .with("quantized", quantized)
            .with("row_scale", row_scale),
        candidates: vec![Candidate::new(kernel)],
    };
    let kernels = GemmWgmma::kernels(&problem, machine.instructions).into_iter();
    let multiply = Launch {
        site,
        bindings: Bindings::to_operands_of(&[0])
            .with("x", quantized)
            .with("x_scale", row_scale)
            .with("out", Operand::Value(site)),
        candidates: kernels.map(Candidate::new).collect(),
    };
    Implementation::of(sites, vec![convert, multiply], 0.0)
}
