//! Linear layers whose weight is packed E4M3 or int8, for many rows. A launch converts the rows of x to the type of the weight, and the
//! GEMM multiplies 8-bit values. Each row of x has one scale, or one for every 128 columns if the weight has such scales. The GEMM reads
//! the weight as it is stored.

use super::{
    Bindings, Candidate, Implementation, Launch, ONLY_HOPPER, Operand, ScratchRows, Unfit,
    gate::gated, gemm::any_gpu, require,
};
use crate::{
    kernels::{
        Instructions, KernelSpec, RowOrder,
        gemm::{GemmProblem, GemmWgmma, QuantizeGroups, QuantizeRows, RowElement},
    },
    machine::Machine,
    select::site::{Link, Site},
    tensor::{DType, Element},
};

/// Names of the rules, without and with a gate.
pub(in crate::select) const NAMES: [&str; 2] = ["quantize rows+gemm", "quantize rows+gemm+gate"];

/// Implements a linear layer without a gate.
pub(super) fn linear(chain: &[Link], machine: &Machine) -> Result<Implementation, Unfit> {
    let problem = packed(chain)?;
    quantized(problem, 1, machine)
}

/// Implements a linear layer whose only reader is a gate.
pub(super) fn with_gate(chain: &[Link], machine: &Machine) -> Result<Implementation, Unfit> {
    packed(chain)?;
    quantized(&gated(chain)?, 2, machine)
}

/// Returns the problem of the first site if its weight is packed E4M3 or int8 with a scale for each row, or E4M3 with a scale for every 128
/// columns of a row.
fn packed(chain: &[Link]) -> Result<&GemmProblem, Unfit> {
    let is_served =
        |weight| RowElement::beside(weight).is_some() || weight == QuantizeGroups::WEIGHT;
    match chain.first().map(|link| &link.site) {
        Some(Site::Linear(problem)) if is_served(problem.weight) => Ok(problem),
        _ => Err(Unfit::Sites),
    }
}

/// The conversion of the input `x` of a [`GemmProblem`] to 8-bit values.
struct Conversion {
    kernel: KernelSpec,
    /// The problem with the converted x.
    problem: GemmProblem,
    /// Storage type of the converted x.
    element: Element,
    /// Columns of the converted x.
    columns: u64,
    /// Number of f32 values that are stored for each row: its scales, and in int8 also the sum of its integers.
    scales: u64,
}

/// Returns the conversion for the packed weight of a problem.
fn conversion(problem: &GemmProblem) -> Option<Conversion> {
    let of_rows = QuantizeRows::of(problem).map(|(kernel, problem)| Conversion {
        problem,
        element: kernel.to.element(),
        columns: kernel.columns().into(),
        scales: kernel.to.scales(),
        kernel: kernel.into(),
    });
    of_rows.or_else(|| {
        let (kernel, problem) = QuantizeGroups::of(problem)?;
        Some(Conversion {
            problem,
            element: Element::E4m3,
            columns: kernel.columns().into(),
            scales: kernel.groups().into(),
            kernel: kernel.into(),
        })
    })
}

/// Implements the first `sites` sites of a chain, which together compute `problem`.
fn quantized(
    problem: &GemmProblem,
    sites: usize,
    machine: &Machine,
) -> Result<Implementation, Unfit> {
    let &GemmProblem { n, k, dtype, .. } = problem;
    let is_hopper = machine.instructions == Instructions::Hopper;
    let is_int8 = problem.weight == RowElement::Int8.weight();
    // Kernels for cards other than Hopper multiply only int8, and compute no gate.
    require(is_hopper || is_int8 && !problem.gated, ONLY_HOPPER)?;
    require(
        is_hopper || machine.costs.mma_sync.tensor_int8.is_some(),
        "the card does not multiply 8-bit integers with mma.sync faster than 16-bit values",
    )?;
    let (Some(conversion), true) = (
        conversion(problem),
        !is_hopper || GemmWgmma::serves(n, k, dtype) && n.is_multiple_of(RowOrder::EIGHT_PAIRS),
    ) else {
        return Err(Unfit::Because(format!(
            "a weight of {n} x {k} beside activations in {dtype}; expected columns in multiples of 8 (in int8, up to 65536), rows in multiples of 16 on Hopper, and f16 or bf16"
        )));
    };
    let scratch = |name, element, columns| Operand::Scratch {
        site: 0,
        name,
        element,
        columns,
        rows: ScratchRows::OfBatch { more: 0 },
    };
    let quantized = scratch("quantized", conversion.element, conversion.columns);
    let row_scale = scratch("row_scale", DType::F32.into(), conversion.scales);
    let site = sites - 1;
    let convert = Launch {
        site,
        bindings: Bindings::to_operands_of(&[0])
            .with("quantized", quantized)
            .with("row_scale", row_scale),
        candidates: vec![Candidate::new(conversion.kernel)],
    };
    let problem = &conversion.problem;
    let persistent = GemmWgmma::kernels(problem, machine.instructions).into_iter();
    let any = any_gpu(problem, machine).into_iter().map(Candidate::new);
    let multiply = Launch {
        site,
        bindings: Bindings::to_operands_of(&[0])
            .with("x", quantized)
            .with("x_scale", row_scale)
            .with("out", Operand::Value(site)),
        candidates: persistent.map(Candidate::new).chain(any).collect(),
    };
    Implementation::of(sites, vec![convert, multiply], 0.0)
}
