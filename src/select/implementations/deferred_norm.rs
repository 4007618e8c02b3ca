//! Deferred normalization, for few rows. Two GEMMs compute a linear layer, the LayerNorm after it, and the first linear layer that reads
//! the LayerNorm. The first GEMM stores row statistics next to its rows, and the second GEMM normalizes its accumulators with them.

use super::{
    Bindings, Candidate, IS_READ, Implementation, Launch, NOT_PLAIN, ONLY_HOPPER, Operand,
    ScratchRows, Unfit, require,
};
use crate::{
    kernels::{
        Instructions,
        gemm::{DeferredLayerNormGemm, GemmProblem, GemmResidualRowStats, SplitKTile},
    },
    machine::Machine,
    ops::Epilogue,
    select::site::{Link, Site},
    tensor::{DType, Element},
};

/// Max number of rows for which the two launches were timed.
const MAX_ROWS: u64 = 128;
/// Max number of row tiles of the first launch.
const MAX_TILES: u64 = 4;
/// Rows of x in the candidate tiles of the first launch. With smaller tiles, a launch would have more CTAs, which leave the CTAs of the
/// next kernel no room to prefetch their weights.
const FIRST_ROWS: [u32; 3] = [32, 48, 64];
/// Rows of x in the candidate tiles of the second launch.
const SECOND_ROWS: [u32; 2] = [48, 64];
/// Replaces [`FIRST_ROWS`] if the weights of the second launch do not fit in shared memory together with 48 rows of x.
const FIRST_ROWS_OF_WIDE: [u32; 4] = [16, 32, 48, 64];
/// Replaces [`SECOND_ROWS`] in the same case as [`FIRST_ROWS_OF_WIDE`].
const SECOND_ROWS_OF_WIDE: [u32; 4] = [24, 40, 48, 64];

pub(super) fn implement(chain: &[Link], machine: &Machine) -> Result<Implementation, Unfit> {
    let [before, norm, after, ..] = chain else {
        return Err(Unfit::Sites);
    };
    let (Site::Linear(first), Site::SumLayerNorm(norm), Site::Linear(second)) =
        (&before.site, &norm.site, &after.site)
    else {
        return Err(Unfit::Sites);
    };
    let GemmProblem { n, k, dtype, .. } = *first;
    let GemmProblem {
        n: n_after,
        epilogue,
        ..
    } = *second;
    let hopper = machine.costs.hopper.as_ref();
    let hopper = hopper.filter(|_| machine.instructions == Instructions::Hopper);
    let hopper = hopper.ok_or_else(|| Unfit::Because(ONLY_HOPPER.to_owned()))?;
    require(before.is_private, IS_READ)?;
    require(first.is_plain() && second.is_plain(), NOT_PLAIN)?;
    let has_no_epilogue = first.epilogue == Epilogue::default() && !epilogue.residual;
    require(
        has_no_epilogue,
        "a linear layer has an epilogue that its kernels lack",
    )?;
    // The max number of rows is limited so that all CTAs of a launch are resident at the same time. A further wave of CTAs would start
    // without loads in flight.
    let first = |tile: SplitKTile| {
        let kernel = GemmResidualRowStats {
            n,
            k,
            dtype,
            bias: norm.bias,
            tile,
        };
        kernel.check().ok()?;
        let at_once = u64::from(machine.sms) / tile.ctas(1, n);
        let most = at_once.min(MAX_TILES) * u64::from(tile.tokens);
        candidate(kernel.into(), most)
    };
    let second_kernel = |tokens| DeferredLayerNormGemm {
        n: n_after,
        k: n,
        eps: norm.eps,
        dtype,
        epilogue,
        tokens,
    };
    let (first_rows, second_rows): (&[u32], &[u32]) =
        match second_kernel(SECOND_ROWS[0]).has_room_for_all() {
            true => (&FIRST_ROWS, &SECOND_ROWS),
            false => (&FIRST_ROWS_OF_WIDE, &SECOND_ROWS_OF_WIDE),
        };
    let second = |&tokens: &u32| {
        let kernel = second_kernel(tokens);
        kernel.check().ok()?;
        let tile = SplitKTile::new(tokens, 1);
        let at_once = u64::from(machine.sms) / tile.ctas(1, n_after);
        candidate(
            kernel.into(),
            (at_once * u64::from(tokens)).min(tile.max_rows()),
        )
    };
    let splits = [1, 2, 4, 8].into_iter();
    let tiles = splits.flat_map(|splits| {
        first_rows
            .iter()
            .map(move |&tokens| SplitKTile::new(tokens, splits))
    });
    let scratch = |name, dtype, columns| Operand::Scratch {
        site: 1,
        name,
        element: Element::Value(dtype),
        columns,
        rows: ScratchRows::OfBatch { more: 0 },
    };
    let scaled = scratch("scaled", dtype, n.into());
    let statistics = scratch("row_stats", DType::F32, GemmResidualRowStats::stats_of(n));
    let launches = vec![
        Launch {
            site: 1,
            bindings: Bindings::to_operands_of(&[0, 1])
                .with("scaled", scaled)
                .with("row_stats", statistics),
            candidates: tiles.filter_map(first).collect(),
        },
        Launch {
            site: 2,
            // A parameter reads the operand of its name from the first of these sites that has one. Site 2 comes first, so that `bias` is
            // the bias of the second linear layer.
            bindings: Bindings::to_operands_of(&[2, 1])
                .with("scaled", scaled)
                .with("row_stats", statistics)
                .with("normal", Operand::Value(1))
                .with("out", Operand::Value(2)),
            candidates: second_rows.iter().filter_map(second).collect(),
        },
    ];
    Implementation::of(3, launches, hopper.split_k.two_warpgroups)
}

fn candidate(kernel: crate::kernels::KernelSpec, most: u64) -> Option<Candidate> {
    let most = most.min(MAX_ROWS);
    (most > 0).then_some(Candidate {
        kernel,
        max_rows: Some(most),
    })
}
