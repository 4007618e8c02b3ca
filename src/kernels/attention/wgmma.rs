//! Attention on Hopper: warpgroup products (`wgmma`) fed by the tensor memory accelerator.

use serde::{Deserialize, Serialize};

use super::{
    AttentionError, HeadView, MhaOnline,
    fused::edge_cases,
    storage,
    view::{scale_log2, scale_suffix, usual_scale, views_suffix},
};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, RowOrder,
        TensorMap, Tolerance, f32_literal,
    },
    tensor::{DType, Extents},
};

/// How a block of attention on Hopper is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MhaTile {
    /// Queries of a block, 64 for each of its warpgroups.
    pub rows: u32,
    /// Keys of a tile, of which several are in shared memory.
    pub keys: u32,
    /// Blocks that share a multiprocessor, which its registers and shared memory are divided by.
    pub blocks: u32,
}

/// Fused attention of any length by warpgroup products, in f16 or bf16. Operands as
/// [`super::MhaShort`], all of them columns of `[tokens, stride]` tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhaWgmma {
    pub heads: u32,
    pub head: u32,
    pub scale: f32,
    pub q: HeadView,
    pub k: HeadView,
    pub v: HeadView,
    pub dtype: DType,
    pub tile: MhaTile,
}

/// Shared memory of a multiprocessor, and what the system keeps of it for each block.
const SHARED_OF_SM: u32 = 228 * 1024;
const SHARED_OF_SYSTEM: u32 = 1024;
/// Boxes start at a multiple of this.
const BOX_ALIGNMENT: u32 = 1024;
/// More tiles of keys in shared memory than this hide nothing more.
const MOST_STAGES: u32 = 8;
/// Barriers of a stage.
const STAGE_BARRIERS: u32 = 3 * 8;

impl MhaTile {
    /// The tiles for heads of this size, the one for long sequences first; none where the kernel
    /// takes no such heads.
    pub fn candidates(head: u32) -> &'static [MhaTile] {
        const fn tile(rows: u32, keys: u32, blocks: u32) -> MhaTile {
            MhaTile { rows, keys, blocks }
        }
        const OF_32: &[MhaTile] = &[tile(128, 96, 2), tile(64, 64, 5)];
        const OF_64: &[MhaTile] = &[
            tile(128, 80, 2),
            tile(128, 64, 2),
            tile(64, 64, 4),
            tile(64, 48, 4),
            tile(64, 32, 5),
        ];
        const OF_96: &[MhaTile] = &[tile(192, 80, 1), tile(192, 64, 1), tile(64, 64, 3)];
        const OF_128: &[MhaTile] = &[tile(192, 64, 1), tile(64, 48, 3)];
        match head {
            32 => OF_32,
            64 => OF_64,
            96 => OF_96,
            128 => OF_128,
            _ => &[],
        }
    }

    /// Which tile is launched up to which longest sequence, where nothing was measured.
    pub fn by_length(head: u32) -> Vec<(Option<u64>, MhaTile)> {
        const fn tile(rows: u32, keys: u32, blocks: u32) -> MhaTile {
            MhaTile { rows, keys, blocks }
        }
        match head {
            32 => vec![(Some(640), tile(64, 64, 5)), (None, tile(128, 96, 2))],
            64 => vec![
                (Some(192), tile(64, 48, 4)),
                (Some(640), tile(64, 64, 4)),
                (None, tile(128, 80, 2)),
            ],
            96 => vec![(Some(640), tile(64, 64, 3)), (None, tile(192, 80, 1))],
            128 => vec![(Some(640), tile(64, 48, 3)), (None, tile(192, 64, 1))],
            _ => Vec::new(),
        }
    }

    /// As in symbols.
    pub fn name(self) -> String {
        format!("{}x{}x{}", self.rows, self.keys, self.blocks)
    }

    const fn threads(self) -> u32 {
        self.rows * 2
    }

    /// Tiles of keys and values in shared memory: as many as there is room for.
    fn stages(self, head: u32) -> u32 {
        let rest = (SHARED_OF_SM / self.blocks - SHARED_OF_SYSTEM).min(227 * 1024);
        let rest = rest - self.bytes(head, 0);
        (rest / (self.bytes(head, 1) - self.bytes(head, 0))).min(MOST_STAGES)
    }

    /// Shared memory of a block with so many stages.
    fn bytes(self, head: u32, stages: u32) -> u32 {
        let row = head * 2;
        let ones = if has_ones(head) { 16 * row } else { 0 };
        BOX_ALIGNMENT + self.rows * row + stages * (2 * self.keys * row + STAGE_BARRIERS) + ones
    }
}

/// Columns of a box: a swizzled row of 128 bytes, or of 64 where a head is no multiple of that.
fn columns(head: u32) -> u32 {
    match head.is_multiple_of(64) {
        true => 64,
        false => 32,
    }
}

/// Whether a column of ones beside the values sums the weights. The columns of an operand lie box by
/// box at one distance, so it can be anywhere only where the values are one box.
fn has_ones(head: u32) -> bool {
    head == columns(head)
}

impl MhaWgmma {
    /// The tiles that serve attention on a card with these instructions; none where it is not
    /// for this kernel.
    pub fn tiles(
        head: u32,
        dtype: DType,
        views: &[HeadView],
        instructions: Instructions,
    ) -> &'static [MhaTile] {
        let columns = |v: &HeadView| matches!(v, HeadView::TokenMajor { .. });
        match instructions {
            Instructions::Hopper if dtype != DType::F32 && views.iter().all(columns) => {
                MhaTile::candidates(head)
            }
            _ => &[],
        }
    }

    /// Whether the kernel can be generated as described.
    pub fn check(&self) -> Result<(), AttentionError> {
        self.plain().check()?;
        let tiles = MhaTile::candidates(self.head);
        if tiles.is_empty() {
            return Err(AttentionError::WarpgroupHead { head: self.head });
        }
        if self.dtype == DType::F32 {
            return Err(AttentionError::WarpgroupStorage { dtype: self.dtype });
        }
        for (operand, view) in self.named() {
            if view == HeadView::HeadMajor {
                return Err(AttentionError::WarpgroupView { operand });
            }
        }
        match tiles.contains(&self.tile) {
            true => Ok(()),
            false => Err(AttentionError::WarpgroupTile {
                tile: self.tile,
                head: self.head,
            }),
        }
    }

    /// The same attention for any card, which is its definition.
    pub fn plain(&self) -> MhaOnline {
        MhaOnline {
            heads: self.heads,
            head: self.head,
            scale: self.scale,
            q: self.q,
            k: self.k,
            v: self.v,
            dtype: self.dtype,
        }
    }

    fn named(&self) -> [(&'static str, HeadView); 3] {
        [("q", self.q), ("k", self.k), ("v", self.v)]
    }

    fn width(&self) -> u32 {
        self.heads * self.head
    }
}

/// First column of the first head.
fn offset(view: HeadView) -> u32 {
    match view {
        HeadView::HeadMajor => 0,
        HeadView::TokenMajor { offset, .. } => offset,
    }
}

impl Kernel for MhaWgmma {
    fn symbol(&self) -> String {
        format!("{}_{}", self.definition(), self.tile.name())
    }

    fn definition(&self) -> String {
        format!(
            "mha_wgmma_{}_h{}x{}{}{}",
            self.dtype,
            self.heads,
            self.head,
            views_suffix(self.width(), &self.named()),
            scale_suffix(self.scale, usual_scale(self.head)),
        )
    }

    fn template(&self) -> &'static str {
        "mha_wgmma"
    }

    fn instructions(&self) -> Instructions {
        Instructions::Hopper
    }

    fn constants(&self) -> Constants {
        let registers = |n: u32| -> String {
            let all: Vec<String> = (0..n).map(|i| format!("%{i}")).collect();
            all.join(", ")
        };
        let operands = |n: u32| -> String {
            let all: Vec<String> = (0..n).map(|i| format!("\"+f\"(sums[{i}])")).collect();
            all.join(", ")
        };
        let scores = self.tile.keys / 2;
        let ones = has_ones(self.head);
        let sums = self.head / 2 + if ones { 4 } else { 0 };
        Constants::from([
            ("storage", storage(self.dtype).into()),
            ("heads", self.heads.into()),
            ("head", self.head.into()),
            ("columns", columns(self.head).into()),
            ("ones", ones.into()),
            ("keys", self.tile.keys.into()),
            ("groups", (self.tile.rows / 64).into()),
            ("stages", self.tile.stages(self.head).into()),
            ("blocks", self.tile.blocks.into()),
            ("scale_log2", f32_literal(scale_log2(self.scale)).into()),
            ("out_stride", self.width().into()),
            ("q_column", offset(self.q).into()),
            ("k_column", offset(self.k).into()),
            ("v_column", offset(self.v).into()),
            ("scores", scores.into()),
            ("score_registers", registers(scores).into()),
            ("score_operands", operands(scores).into()),
            ("sums", sums.into()),
            ("sum_registers", registers(sums).into()),
            ("sum_operands", operands(sums).into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        self.plain().params()
    }

    fn tensor_maps(&self) -> Vec<TensorMap> {
        let map = |param, box_rows| TensorMap {
            param,
            box_rows,
            box_columns: columns(self.head),
            order: RowOrder::Plain,
        };
        vec![
            map("q", 64),
            map("k", self.tile.keys),
            map("v", self.tile.keys),
        ]
    }

    /// Numbers are given to tiles as by the other fused kernels; the heads of a tile are neighbours.
    fn launch(&self, extents: &Extents) -> Launch {
        let tiles = extents.tokens / u64::from(self.tile.rows) + extents.batch;
        let blocks = tiles.saturating_mul(self.heads.into());
        Launch {
            // More than fit are refused before the launch.
            grid: [u32::try_from(blocks).unwrap_or(u32::MAX), 1, 1],
            threads: self.threads(),
            shared_bytes: self.tile.bytes(self.head, self.tile.stages(self.head)),
        }
    }

    fn threads(&self) -> u32 {
        self.tile.threads()
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.plain().reference(extents, reads)
    }

    /// Also tiles of keys that are filled again, several times, and many sequences of few tokens.
    fn cases(&self) -> Vec<Case> {
        let mut cases = edge_cases();
        cases.push(Case::new("two_tiles", &[65, 63, 129, 1, 64, 128]));
        cases.push(Case::new("long", &[300, 1, 512]));
        cases.push(Case::new("refilled", &[7, 1600, 640]));
        cases
    }

    fn tolerance(&self) -> Tolerance {
        self.plain().tolerance()
    }
}

/// Every tile of every head size, in both storage types, out of one tensor and out of three.
pub(super) fn representative() -> Vec<KernelSpec> {
    let mut all = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for (heads, head) in [(12, 32), (12, 64), (5, 96), (2, 128)] {
            for &tile in MhaTile::candidates(head) {
                let column = |i| HeadView::TokenMajor {
                    offset: i * heads * head,
                    stride: 3 * heads * head,
                };
                all.push(KernelSpec::from(MhaWgmma {
                    heads,
                    head,
                    scale: usual_scale(head),
                    q: column(0),
                    k: column(1),
                    v: column(2),
                    dtype,
                    tile,
                }));
            }
        }
        let (heads, head) = (3, 64);
        let plain = HeadView::TokenMajor {
            offset: 0,
            stride: heads * head,
        };
        all.push(KernelSpec::from(MhaWgmma {
            heads,
            head,
            scale: 1.0,
            q: plain,
            k: plain,
            v: plain,
            dtype,
            tile: MhaTile::candidates(head)[0],
        }));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(head: u32, tile: MhaTile) -> MhaWgmma {
        let column = |i: u32| HeadView::TokenMajor {
            offset: i * 12 * head,
            stride: 36 * head,
        };
        MhaWgmma {
            heads: 12,
            head,
            scale: usual_scale(head),
            q: column(0),
            k: column(1),
            v: column(2),
            dtype: DType::F16,
            tile,
        }
    }

    #[test]
    fn every_tile_fits_as_many_blocks_to_a_multiprocessor_as_it_says() {
        for head in [32, 64, 96, 128] {
            let tiles = MhaTile::candidates(head);
            for &tile in tiles {
                let stages = tile.stages(head);
                let bytes = tile.bytes(head, stages);
                assert!(
                    tile.blocks * (bytes + SHARED_OF_SYSTEM) <= SHARED_OF_SM && bytes <= 227 * 1024,
                    "{head}: {tile:?}"
                );
                // One more where several warpgroups need not wait for each other at once.
                assert!(stages >= 2 + u32::from(tile.rows > 64), "{head}: {tile:?}");
                let registers = tile.blocks * tile.threads() * (tile.keys / 2 + head / 2);
                assert!(registers < 64 * 1024, "{head}: {tile:?}");
                assert!(tile.rows.is_multiple_of(64) && tile.keys.is_multiple_of(16));
                assert_eq!(kernel(head, tile).check(), Ok(()));
            }
            let guessed = MhaTile::by_length(head);
            assert!(
                guessed.iter().all(|(_, tile)| tiles.contains(tile)),
                "{head}"
            );
            assert_eq!(guessed.last().map(|&(up_to, _)| up_to), Some(None));
            assert!(
                guessed
                    .windows(2)
                    .all(|pair| pair[1].0.is_none() || pair[0].0 < pair[1].0)
            );
        }
        assert!(MhaTile::candidates(80).is_empty() && MhaTile::by_length(80).is_empty());
    }

    #[test]
    fn blocks_are_the_heads_of_each_tile() {
        let tile = MhaTile::candidates(64)[0];
        let launch = |lens: &[u32]| {
            let extents = Extents::of(lens).expect("a batch");
            kernel(64, tile).launch(&extents)
        };
        assert_eq!(launch(&[1]).grid, [12, 1, 1]);
        assert_eq!(launch(&[128, 129, 1]).grid, [12 * (2 + 3), 1, 1]);
        assert_eq!(launch(&[7]).threads, 256);
    }

    #[test]
    fn what_the_kernel_does_not_serve_is_refused_with_the_reason() {
        let tile = MhaTile::candidates(64)[0];
        let good = kernel(64, tile);
        let refused = |kernel: MhaWgmma| kernel.check().expect_err("an error").to_string();
        assert_eq!(
            refused(kernel(80, tile)),
            "the head size is 80; warpgroup attention takes 32, 64, 96 and 128, use the online kernel"
        );
        assert_eq!(
            refused(MhaWgmma {
                dtype: DType::F32,
                ..good.clone()
            }),
            "warpgroup attention over f32 elements; expected f16 or bf16"
        );
        assert_eq!(
            refused(MhaWgmma {
                k: HeadView::HeadMajor,
                ..good.clone()
            }),
            "`k` is head-major; warpgroup attention reads columns of rows of tokens, use the online kernel"
        );
        let odd = MhaTile { keys: 72, ..tile };
        assert_eq!(
            refused(MhaWgmma {
                tile: odd,
                ..good.clone()
            }),
            "MhaTile { rows: 128, keys: 72, blocks: 2 } is no tile of warpgroup attention with head size 64"
        );
        let views = [good.q, good.k, good.v];
        let tiles = |instructions| MhaWgmma::tiles(64, DType::F16, &views, instructions);
        assert!(tiles(Instructions::Ampere).is_empty());
        assert!(!tiles(Instructions::Hopper).is_empty());
    }
}
