//! Tiles and shared-memory layout of the GEMM that streams its weight.

use serde::{Deserialize, Serialize};

use super::super::small_m::ALIGNMENT;

/// Tile of the GEMM that streams its weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StreamTile {
    /// Rows of x per tile, the N extent of an MMA: a multiple of 8 up to 128.
    pub rows: u32,
    /// CTAs per cluster, among which k is split: 1 to 8, the portable max cluster size.
    pub splits: u32,
    /// Number of consumer warpgroups, each with 64 rows of the weight: 1 or 2, or up to 4 if the weight is packed.
    pub groups: u32,
    /// Number of CTAs that fit in an SM's shared memory at once: 1 or 2, or up to 4 if the weight is packed.
    pub per_sm: u32,
}

impl StreamTile {
    const ROWS: [u32; 5] = [8, 16, 32, 64, 128];
    const SPLITS: [u32; 5] = [1, 2, 4, 6, 8];

    pub const fn new(rows: u32, splits: u32, groups: u32, per_sm: u32) -> Self {
        Self {
            rows,
            splits,
            groups,
            per_sm,
        }
    }

    /// Tiles for a packed weight, in ascending order of rows. Some tiles with at most 32 rows have more warps per SM than the tiles for a
    /// plain weight, because the warps also convert the weight.
    pub(super) fn converting() -> impl Iterator<Item = StreamTile> {
        Self::ROWS.into_iter().flat_map(|rows| {
            [1, 2, 4, 8].into_iter().flat_map(move |splits| {
                let shapes: &[(u32, u32)] = match rows {
                    128 => &[(1, 1), (2, 1)],
                    64 => &[(1, 2), (2, 1)],
                    32 => &[(1, 2), (1, 3), (2, 2), (4, 1)],
                    _ => &[(1, 2), (1, 3), (1, 4), (2, 2), (4, 1)],
                };
                let shapes = shapes.iter();
                shapes.map(move |&(groups, per_sm)| Self::new(rows, splits, groups, per_sm))
            })
        })
    }

    /// Tiles for a plain weight, in ascending order of rows.
    pub(super) fn candidates() -> impl Iterator<Item = StreamTile> {
        Self::ROWS.into_iter().flat_map(|rows| {
            Self::SPLITS.into_iter().flat_map(move |splits| {
                let shapes: &[(u32, u32)] = match (rows, splits) {
                    // Clusters of six CTAs are only for the largest tiles: 128 rows, two warpgroups, and one CTA per SM. With clusters of
                    // eight, a launch of these tiles may have more CTAs than fit the GPU at once.
                    (128, 6) => &[(2, 1)],
                    (_, 6) => &[],
                    (128, _) => &[(1, 1), (1, 2), (2, 1)],
                    _ => &[(1, 1), (1, 2)],
                };
                shapes
                    .iter()
                    .map(move |&(groups, per_sm)| Self::new(rows, splits, groups, per_sm))
            })
        })
    }

    pub(super) fn name(self) -> String {
        let Self {
            rows,
            splits,
            groups,
            per_sm,
        } = self;
        format!("stream{rows}x{}_splits{splits}_{per_sm}", 64 * groups)
    }

    /// Rows of the weight per tile.
    pub(super) const fn weight_rows(self) -> u32 {
        64 * self.groups
    }

    /// Max number of steps, each of `step_k` columns, that a CTA of the cluster computes.
    pub(super) const fn steps(self, k: u32, step_k: u32) -> u32 {
        k.div_ceil(step_k).div_ceil(self.splits)
    }
}

/// Shared-memory sizes of a CTA.
pub(super) struct Layout {
    pub(super) stages: u32,
    /// N extent of the MMAs: the rows of x per tile, and an octet for gamma and beta if they follow the rows.
    pub(super) mma_n: u32,
    pub(super) stage_bytes: u32,
    /// Bytes of partial accumulators that the CTA receives from its cluster. If `is_aliased`, they reuse the memory of the ring.
    pub(super) received: u32,
    pub(super) is_aliased: bool,
}

impl Layout {
    pub(super) fn shared_bytes(&self) -> u32 {
        let beside = if self.is_aliased { 0 } else { self.received };
        ALIGNMENT + self.stages * self.stage_bytes + beside
    }
}
