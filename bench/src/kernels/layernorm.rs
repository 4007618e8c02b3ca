//! LayerNorm alone (TurboTransformers, figure 5), and LayerNorm after a bias and a residual, computed by one kernel or by three
//! (ByteTransformer, figure 9).

use gemmule::{
    DType,
    kernels::{
        Case, KernelSpec,
        chain::Chain,
        elementwise::{AddBias, BinaryOp, Combine},
        layernorm::{BiasResidualLayerNorm, LayerNorm, Teams, Variance},
    },
    select::Site,
};
use miette::{Report, miette};

use super::problem::{Contender, Problem, Task, variants};
use crate::launched::{ChosenBy, Launched};

const EPS: f32 = 1e-12;
/// Numbers of tokens, for a width of 768 as in figure 5. With the last number, the data is three times as large as L2.
const ALONE: [u32; 8] = [10, 100, 200, 500, 2000, 10_000, 16_384, 65_536];
const WIDTHS: [u32; 2] = [768, 1024];
/// Numbers of tokens of single sequences, of packed batches, and of a batch that exceeds L2.
const ROWS: [u32; 9] = [10, 40, 128, 500, 1229, 2458, 4915, 9830, 32_768];

pub(super) fn problems(dtype: DType, launched: &Launched) -> Result<Vec<Problem>, Report> {
    let alone = ALONE.into_iter().map(|rows| {
        Ok(Problem {
            task: Task::LayerNorm { rows, width: 768 },
            case: Case::new("timed", &[rows]),
            contenders: alone(launched, rows, 768, dtype)?,
        })
    });
    let of_width = |width| {
        ROWS.into_iter().map(move |rows| {
            Ok(Problem {
                task: Task::BiasResidualLayerNorm { rows, width },
                case: Case::new("timed", &[rows]),
                contenders: after_a_gemm(launched, rows, width, dtype)?,
            })
        })
    };
    alone.chain(WIDTHS.into_iter().flat_map(of_width)).collect()
}

/// Returns the kernel that a model launches, followed by its variants.
///
/// - In the variants `X=1`, `X=2` and `X=4`, a team of warps normalizes X rows together (`warpAllReduce_XElem`). A team has the same number
///   of warps as in the launched kernel. If the variant does not exist for this number, the next larger number is used.
/// - The last variant computes the variance in two passes.
fn alone(
    launched: &Launched,
    rows: u32,
    width: u32,
    dtype: DType,
) -> Result<Vec<Contender>, Report> {
    let (picked, by) = picked_norm(launched, rows, width, dtype)?;
    let candidates = picked.candidates();
    let find = |teams, variance| {
        candidates
            .iter()
            .find(|c| c.teams == teams && c.variance == variance)
    };
    Ok(variants(
        (x_label(picked.teams), by),
        &picked,
        choices(picked.teams, width, dtype).map(|(label, teams, variance)| {
            (
                label,
                teams.and_then(|teams| find(teams, variance)).cloned(),
            )
        }),
    ))
}

/// Returns the LayerNorm that a model launches, and whether the cost model or timings selected it.
fn picked_norm(
    launched: &Launched,
    rows: u32,
    width: u32,
    dtype: DType,
) -> Result<(LayerNorm, ChosenBy), Report> {
    let site = Site::LayerNorm(LayerNorm::new(width, EPS, dtype));
    match launched.kernel(&site, rows.into())? {
        KernelSpec::LayerNorm(picked) => Ok((picked, launched.chosen_by(&site))),
        other => Err(without_variants(&other)),
    }
}

/// Returns the kernel that a model launches for a LayerNorm after a bias and a residual, followed by the same variants as in [`alone`]. The
/// last contender uses three kernels: one each for bias, residual and LayerNorm.
fn after_a_gemm(
    launched: &Launched,
    rows: u32,
    width: u32,
    dtype: DType,
) -> Result<Vec<Contender>, Report> {
    let site = Site::SumLayerNorm(BiasResidualLayerNorm::new(width, EPS, dtype, true));
    let picked = match launched.kernel(&site, rows.into())? {
        KernelSpec::BiasResidualLayerNorm(picked) => picked,
        other => return Err(without_variants(&other)),
    };
    let candidates = picked.candidates();
    let find = |teams, variance| {
        candidates
            .iter()
            .find(|c| c.teams == teams && c.variance == variance)
    };
    let mut all = variants(
        (x_label(picked.teams), launched.chosen_by(&site)),
        &picked,
        choices(picked.teams, width, dtype).map(|(label, teams, variance)| {
            (
                label,
                teams.and_then(|teams| find(teams, variance)).cloned(),
            )
        }),
    );
    let (norm, _) = picked_norm(launched, rows, width, dtype)?;
    let pieces = Chain::of(AddBias { width, dtype })
        .then(
            Combine {
                how: BinaryOp::Sum,
                width,
                dtype,
            },
            &[("a", "out"), ("b", "residual"), ("out", "sum")],
        )
        .then(norm, &[("x", "sum"), ("out", "normalized")]);
    all.push(Contender::other("add_bias, add, layernorm", pieces));
    Ok(all)
}

fn without_variants(kernel: &KernelSpec) -> Report {
    miette!(
        "a model launches `{}` for a LayerNorm, which has no known variants",
        kernel.as_kernel().symbol()
    )
}

/// Returns the variants that are compared with the selected kernel. They differ in the number of rows per team and in the way to compute
/// the variance. A variant is `None` if it does not exist.
fn choices(
    picked: Teams,
    width: u32,
    dtype: DType,
) -> [(&'static str, Option<Teams>, Variance); 4] {
    let candidates = Teams::candidates(width, dtype);
    let with = |x: u32| {
        let mut fitting = candidates.iter().filter(|t| t.x_rows == x);
        fitting.find(|t| t.warps >= picked.warps).copied()
    };
    [
        ("X=1", with(1), Variance::OnePassShifted),
        ("X=2", with(2), Variance::OnePassShifted),
        ("X=4", with(4), Variance::OnePassShifted),
        ("two passes", Some(picked), Variance::TwoPass),
    ]
}

fn x_label(teams: Teams) -> &'static str {
    match teams.x_rows {
        1 => "X=1",
        2 => "X=2",
        _ => "X=4",
    }
}
