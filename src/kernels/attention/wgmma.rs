//! Attention on Hopper with WGMMA. Persistent CTAs are warp-specialized: producers load tiles with TMA. In CTAs that compute a single tile,
//! all threads load with `cp.async`.

mod instances;

use serde::{Deserialize, Serialize};

use super::{AttentionError, MhaOnline, common::edge_cases, storage};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Instructions, Kernel, Launch, Param, RowOrder, TensorMap,
        Tolerance, attention::position_bias::PositionBiasCode, class::attention_flop, limits,
    },
    machine::Machine,
    ops::{AttentionProblem, HeadView},
    tensor::{DType, Extents, Size},
};

/// Tile shape and occupancy of attention on Hopper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MhaTile {
    /// Queries per query tile: 64 for each consumer warpgroup of a pipeline.
    pub rows: u32,
    /// Keys per key tile. A key tile is a pipeline stage.
    pub keys: u32,
    /// Number of CTAs per SM, or number of pipelines of a persistent CTA. The CTAs or pipelines share the SM's registers and shared memory.
    pub blocks: u32,
    /// Whether one persistent CTA per SM runs `blocks` pipelines with a common producer warpgroup. Otherwise, each CTA computes one tile. A
    /// persistent CTA has a longer prologue, but loads the next tile during the epilogue of the previous tile.
    pub persistent: bool,
}

/// Source of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// Columns of the batch's rows.
    Batch,
    /// A KV cache, from which keys and values are gathered by slot.
    Cache,
}

/// Fused attention of any length with WGMMA, in f16 or bf16. The operands are those of [`super::MhaShort`], as columns of `[tokens,
/// stride]` tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhaWgmma {
    pub of: AttentionProblem,
    pub dtype: DType,
    pub tile: MhaTile,
}

/// Shared memory in bytes: the size per SM, the size that the system reserves for each CTA, and the max size per CTA.
const SHARED_OF_SM: u32 = 228 * 1024;
const SHARED_OF_SYSTEM: u32 = 1024;
const SHARED_OF_BLOCK: u32 = 227 * 1024;
/// Alignment of TMA boxes in shared memory, in bytes.
const BOX_ALIGNMENT: u32 = 1024;
/// Max K/V stages. More stages would not hide more latency.
const MAX_STAGES: u32 = 8;
/// Bytes of the three barriers of a K/V stage: keys full, values full, empty.
const STAGE_BARRIERS: u32 = 3 * 8;
/// Bytes of the scheduler's tile record.
const TILE_RECORD: u32 = 32;
/// Bytes of the tile record and of the "empty" barrier of a Q stage.
const Q_STAGE_BARRIERS: u32 = TILE_RECORD + 8;
/// Number of 32-bit registers per SM, and the granularity at which a thread's registers are allocated.
const REGISTERS: u32 = 64 * 1024;
const REGISTER_UNIT: u32 = 8;

impl MhaTile {
    /// Creates the tile of a kernel with one tile per CTA. `blocks` is the number of CTAs per SM.
    const fn one_tile(rows: u32, keys: u32, blocks: u32) -> Self {
        MhaTile {
            rows,
            keys,
            blocks,
            persistent: false,
        }
    }

    /// Creates the tile of a kernel with persistent CTAs. `blocks` is the number of pipelines per CTA.
    const fn persistent(rows: u32, keys: u32, blocks: u32) -> Self {
        MhaTile {
            rows,
            keys,
            blocks,
            persistent: true,
        }
    }

    /// Tiles for this head size. The first tile is for long sequences. The list is empty if the kernel does not support the head size.
    pub fn candidates(head: u32) -> &'static [MhaTile] {
        const OF_32: &[MhaTile] = &[MhaTile::persistent(64, 80, 4), MhaTile::one_tile(64, 64, 5)];
        const OF_64: &[MhaTile] = &[
            MhaTile::persistent(128, 64, 2),
            MhaTile::persistent(64, 64, 4),
            MhaTile::one_tile(64, 64, 4),
            MhaTile::one_tile(64, 48, 4),
            MhaTile::one_tile(64, 32, 5),
        ];
        const OF_96: &[MhaTile] = &[
            MhaTile::persistent(192, 96, 1),
            MhaTile::one_tile(64, 48, 4),
            MhaTile::one_tile(64, 32, 4),
        ];
        const OF_128: &[MhaTile] = &[
            MhaTile::persistent(192, 80, 1),
            MhaTile::persistent(128, 128, 1),
            MhaTile::one_tile(64, 48, 3),
            MhaTile::one_tile(64, 32, 4),
        ];
        const OF_256: &[MhaTile] = &[
            MhaTile::persistent(128, 48, 1),
            MhaTile::one_tile(64, 32, 2),
        ];
        match head {
            32 => OF_32,
            64 => OF_64,
            96 => OF_96,
            128 => OF_128,
            256 => OF_256,
            _ => &[],
        }
    }

    /// Tiles of kernels that gather keys and values from a cache, from the largest to the smallest number of queries. The first tile is for
    /// launches with many tiles. No tile has four consumer warpgroups, because the producer warpgroup would then have too few registers to
    /// gather. The list is empty for unsupported head sizes.
    pub fn gathering(head: u32) -> &'static [MhaTile] {
        const OF_64: &[MhaTile] = &[
            MhaTile::persistent(192, 96, 1),
            MhaTile::persistent(64, 128, 1),
        ];
        const OF_96: &[MhaTile] = &[MhaTile::persistent(192, 96, 1)];
        const OF_128: &[MhaTile] = &[
            MhaTile::persistent(192, 80, 1),
            MhaTile::persistent(128, 128, 1),
            MhaTile::persistent(64, 128, 1),
        ];
        const OF_256: &[MhaTile] = &[
            MhaTile::persistent(128, 48, 1),
            MhaTile::persistent(64, 48, 1),
        ];
        match head {
            64 => OF_64,
            96 => OF_96,
            128 => OF_128,
            256 => OF_256,
            _ => &[],
        }
    }

    /// A launch with at most this number of tiles per SM uses smaller tiles instead ([`MhaTile::finer`]), if there are any.
    pub const ROUNDS: u64 = 4;

    /// Returns the smaller tile, if there is one, for launches with few tiles of `self` per SM. With tiles of `self`, a partial last wave
    /// would take a large part of the time of such a launch.
    pub fn finer(self, head: u32) -> Option<MhaTile> {
        let coarse = MhaTile::persistent(192, 80, 1);
        (head == 128 && self == coarse).then_some(MhaTile::persistent(128, 128, 1))
    }

    /// Default dispatch without timings. Each entry is a max sequence length in tokens (inclusive) and the tile for it.
    pub fn by_length(head: u32) -> Vec<(Option<u64>, MhaTile)> {
        match head {
            32 => vec![
                (Some(448), MhaTile::one_tile(64, 64, 5)),
                (None, MhaTile::persistent(64, 80, 4)),
            ],
            64 => vec![
                (Some(192), MhaTile::one_tile(64, 64, 4)),
                (Some(896), MhaTile::persistent(64, 64, 4)),
                (None, MhaTile::persistent(128, 64, 2)),
            ],
            96 => vec![
                (Some(448), MhaTile::one_tile(64, 32, 4)),
                (None, MhaTile::persistent(192, 96, 1)),
            ],
            128 => vec![
                (Some(448), MhaTile::one_tile(64, 32, 4)),
                (None, MhaTile::persistent(192, 80, 1)),
            ],
            256 => vec![
                (Some(448), MhaTile::one_tile(64, 32, 2)),
                (None, MhaTile::persistent(128, 48, 1)),
            ],
            _ => Vec::new(),
        }
    }

    /// Tile for attention with a bias or a cap, for every length; `None` if the kernel does not support the head size.
    pub fn for_adjusted_scores(head: u32) -> Option<MhaTile> {
        let one_tile = |tile: &&MhaTile| !tile.persistent;
        Self::candidates(head).iter().find(one_tile).copied()
    }

    /// Name of the tile in kernel symbols.
    pub fn name(self) -> String {
        let suffix = if self.persistent { "_persistent" } else { "" };
        format!("{}x{}x{}{suffix}", self.rows, self.keys, self.blocks)
    }

    /// Consumer warpgroups per pipeline.
    const fn consumers_per_pipeline(self) -> u32 {
        self.rows / 64
    }

    /// Pipelines per CTA.
    const fn pipelines(self) -> u32 {
        if self.persistent { self.blocks } else { 1 }
    }

    /// Consumer warpgroups per CTA.
    const fn consumers(self) -> u32 {
        self.pipelines() * self.consumers_per_pipeline()
    }

    pub(super) const fn threads(self) -> u32 {
        (self.consumers() + self.persistent as u32) * 128
    }

    /// Registers of a producer thread and of a consumer thread after `setmaxnreg`. A CTA does not use more registers in total than it is
    /// launched with.
    fn registers(self, origin: Origin) -> (u32, u32) {
        let whole = |n: u32| n / REGISTER_UNIT * REGISTER_UNIT;
        let all = whole(REGISTERS / self.threads()) * self.threads();
        let producer = match origin {
            Origin::Cache => 56,
            Origin::Batch if self.consumers() < 4 => 40,
            Origin::Batch => 32,
        };
        let consumer = whole((all - producer * 128) / (self.consumers() * 128));
        (producer, consumer.min(240))
    }

    /// Number of producer threads that arrive at a full barrier: the one thread that starts TMA copies, or all threads that gather rows for
    /// the pipeline.
    fn arrivals(self, origin: Origin) -> u32 {
        match origin {
            Origin::Batch => 1,
            Origin::Cache => 128 / self.pipelines(),
        }
    }

    /// Constants of the tile and the attention, for both templates: one tile per CTA, and persistent CTAs.
    pub(super) fn constants(
        self,
        of: &AttentionProblem,
        dtype: DType,
        origin: Origin,
    ) -> Constants {
        let registers = |n: u32| -> String {
            let all: Vec<String> = (0..n).map(|i| format!("%{i}")).collect();
            all.join(", ")
        };
        let operands = |n: u32| -> String {
            let all: Vec<String> = (0..n).map(|i| format!("\"+f\"(acc[{i}])")).collect();
            all.join(", ")
        };
        let head = of.head;
        let scores = self.keys / 2;
        let ones = has_ones(head);
        let acc = head / 2 + if ones { 4 } else { 0 };
        let mut all = Constants::from([
            ("storage", storage(dtype).into()),
            ("heads", of.heads.into()),
            ("group", (of.heads / of.kv_heads.max(1)).into()),
            ("causal", of.causal.into()),
            ("cached", (origin == Origin::Cache).into()),
            ("to_e4m3", false.into()),
            ("e4m3", false.into()),
            ("scaled", false.into()),
            ("score_scale", "SCALE_LOG2".into()),
            ("head", head.into()),
            ("columns", columns(head).into()),
            ("ones", ones.into()),
            ("keys", self.keys.into()),
            ("stages", self.stages(head).into()),
            (
                "n_keys",
                match of.by.window {
                    Some(_) => "n_keys",
                    None => "n",
                }
                .into(),
            ),
            ("out_stride", of.width().into()),
            ("q_column", of.q.column().into()),
            ("scores", scores.into()),
            ("score_registers", registers(scores).into()),
            ("score_operands", operands(scores).into()),
            ("acc", acc.into()),
            ("acc_registers", registers(acc).into()),
            ("acc_operands", operands(acc).into()),
        ]);
        all.extend(of.by.constants("head", of.scale));
        let skips_keys = of.by.window.is_some() && !of.by.adjusts();
        all.insert("skips_keys", skips_keys.into());
        if self.persistent {
            let (producer, consumer) = self.registers(origin);
            all.extend([
                ("pipelines", self.pipelines().into()),
                ("consumers", self.consumers_per_pipeline().into()),
                ("producer_registers", producer.into()),
                ("consumer_registers", consumer.into()),
                ("arrivals", self.arrivals(origin).into()),
                ("record", TILE_RECORD.into()),
                (
                    "first_key",
                    if skips_keys { "first_key" } else { "0" }.into(),
                ),
            ]);
        }
        all
    }

    /// Returns a launch with one CTA per tile index and head, or at most one persistent CTA per SM. Tile indices are as in
    /// `Tiling::launch`. The head index varies fastest.
    pub(super) fn launch(
        self,
        of: &AttentionProblem,
        extents: &Extents,
        machine: &Machine,
    ) -> Launch {
        let tiles = extents.tokens / u64::from(self.rows) + extents.batch;
        let blocks = tiles.saturating_mul(of.heads.into());
        let most = match self.persistent {
            true => machine.sms.into(),
            false => u64::MAX,
        };
        let bytes = self.bytes(of.head, self.stages(of.head));
        // If there are enough SMs, each CTA gets its own SM: it requests half of the SM's shared memory. Two such CTAs do not fit on an SM,
        // because the system reserves more shared memory for each CTA.
        let alone = !self.persistent && blocks <= machine.sms.into();
        let shared = match alone {
            true => bytes.max(SHARED_OF_SM / 2),
            false => bytes,
        };
        Launch::of_ctas(blocks.min(most), self.threads(), shared)
    }

    /// Tensor map with which a persistent kernel copies queries.
    pub(super) fn query_map(head: u32) -> TensorMap {
        heads_map("q", head, 64)
    }

    /// Returns the number of K/V stages per pipeline: the max number that fits in shared memory.
    fn stages(self, head: u32) -> u32 {
        let room = match self.persistent {
            true => SHARED_OF_BLOCK,
            false => (SHARED_OF_SM / self.blocks - SHARED_OF_SYSTEM).min(SHARED_OF_BLOCK),
        };
        let fits = |&stages: &u32| self.bytes(head, stages) <= room;
        (1..=MAX_STAGES).rev().find(fits).unwrap_or_default()
    }

    /// Bytes of shared memory of a CTA with `stages` stages per pipeline.
    fn bytes(self, head: u32, stages: u32) -> u32 {
        let row = head * 2;
        let ones = if has_ones(head) { 16 * row } else { 0 };
        let boxes = self.rows * row + stages * 2 * self.keys * row;
        match self.persistent {
            true => {
                let barriers = (Q_STAGE_BARRIERS + stages * STAGE_BARRIERS).next_multiple_of(16);
                self.pipelines() * (boxes + barriers) + ones
            }
            false => BOX_ALIGNMENT + boxes + ones,
        }
    }
}

/// Returns the tensor map with which a copy loads `rows` rows of a head.
fn heads_map(param: &'static str, head: u32, rows: u32) -> TensorMap {
    TensorMap {
        param,
        box_rows: rows,
        box_columns: columns(head),
        order: RowOrder::Boxes(head / columns(head)),
        has_last_box: false,
        streams: false,
    }
}

/// Columns of a TMA box. A row of a box is swizzled, and has 128 bytes, or 64 bytes if the head size is not a multiple of 64.
fn columns(head: u32) -> u32 {
    match head.is_multiple_of(64) {
        true => 64,
        false => 32,
    }
}

/// Whether columns of ones are appended to V, so that the tensor cores also sum the rows of P. A row of V must then fit one box, because a
/// descriptor has only one stride between boxes.
fn has_ones(head: u32) -> bool {
    head == columns(head)
}

impl MhaWgmma {
    /// Creates the kernel that computes the attention of `plain` with this tile.
    pub fn of(plain: &MhaOnline, tile: MhaTile) -> Self {
        Self {
            of: plain.of,
            dtype: plain.dtype,
            tile,
        }
    }

    /// Tiles that support this attention on a GPU with `instructions`. The list is empty if the kernel does not support the attention. It
    /// is also empty with a bias or a cap, for which [`MhaTile::for_adjusted_scores`] returns the only tile.
    pub fn tiles(
        of: &AttentionProblem,
        dtype: DType,
        instructions: Instructions,
    ) -> &'static [MhaTile] {
        let whole = |v: HeadView| has_whole_boxes(v, of.head);
        let serves = !of.by.adjusts() && [of.q, of.k, of.v].into_iter().all(whole);
        match instructions {
            Instructions::Hopper if dtype.has_mma() && serves => MhaTile::candidates(of.head),
            _ => &[],
        }
    }

    /// Whether the kernel supports this attention: causal attention must not have a bias or a cap.
    pub fn serves(of: &AttentionProblem) -> bool {
        !of.by.adjusts() || !of.causal
    }

    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), AttentionError> {
        self.plain().check()?;
        if !Self::serves(&self.of) {
            return Err(AttentionError::WarpgroupMask);
        }
        Self::check_tile(&self.of, self.tile, MhaTile::candidates(self.of.head))?;
        if !self.dtype.has_mma() {
            return Err(AttentionError::WarpgroupStorage { dtype: self.dtype });
        }
        Ok(())
    }

    /// Checks that the tile is one of `tiles` and supports this attention.
    pub(super) fn check_tile(
        of: &AttentionProblem,
        tile: MhaTile,
        tiles: &[MhaTile],
    ) -> Result<(), AttentionError> {
        if tiles.is_empty() {
            return Err(AttentionError::WarpgroupHead { head: of.head });
        }
        for (operand, view, _) in of.operands() {
            let HeadView::TokenMajor { offset, stride } = view else {
                return Err(AttentionError::WarpgroupView { operand });
            };
            if !has_whole_boxes(view, of.head) {
                return Err(AttentionError::WarpgroupColumns {
                    operand,
                    offset,
                    stride,
                    columns: columns(of.head),
                });
            }
        }
        // Consumer threads of a persistent CTA have too few registers for a bias or a cap.
        let serves = !of.by.adjusts() || !tile.persistent;
        match tiles.contains(&tile) && serves {
            true => Ok(()),
            false => Err(AttentionError::WarpgroupTile {
                tile,
                head: of.head,
            }),
        }
    }

    /// Returns the portable kernel for the same attention. Both kernels have the same reference.
    pub fn plain(&self) -> MhaOnline {
        MhaOnline {
            of: self.of,
            dtype: self.dtype,
        }
    }
}

/// Whether the view is token-major, and its heads begin at multiples of the columns of a TMA box.
fn has_whole_boxes(view: HeadView, head: u32) -> bool {
    match view {
        HeadView::HeadMajor => false,
        HeadView::TokenMajor { offset, stride } => {
            offset.is_multiple_of(columns(head)) && stride.is_multiple_of(columns(head))
        }
    }
}

impl Kernel for MhaWgmma {
    facts! { dtype: self.dtype, class: Attention }

    fn symbol(&self) -> String {
        format!("{}_{}", self.definition(), self.tile.name())
    }

    fn definition(&self) -> String {
        format!(
            "mha_wgmma_{}_{}{}",
            self.dtype,
            self.plain().operands().heads(),
            self.plain().operands().suffix(),
        )
    }

    fn template(&self) -> &'static str {
        match self.tile.persistent {
            true => "mha_wgmma_persistent",
            false => "mha_wgmma",
        }
    }

    fn instructions(&self) -> Instructions {
        Instructions::Hopper
    }

    fn constants(&self) -> Constants {
        let AttentionProblem { head, q, k, v, .. } = self.of;
        let mut all = self.tile.constants(&self.of, self.dtype, Origin::Batch);
        all.extend([
            ("k_column", k.column().into()),
            ("v_column", v.column().into()),
        ]);
        if !self.tile.persistent {
            all.extend([
                ("blocks", self.tile.blocks.into()),
                ("q_stride", q.stride(head).into()),
                ("k_stride", k.stride(head).into()),
                ("v_stride", v.stride(head).into()),
            ]);
        }
        all
    }

    fn params(&self) -> Vec<Param> {
        self.plain().params()
    }

    /// Only the persistent kernel uses tensor maps. With one tile per CTA, fetching a map would delay the first load.
    fn tensor_maps(&self) -> Vec<TensorMap> {
        if !self.tile.persistent {
            return Vec::new();
        }
        vec![
            MhaTile::query_map(self.of.head),
            heads_map("k", self.of.head, self.tile.keys),
            heads_map("v", self.of.head, self.tile.keys),
        ]
    }

    fn flop(&self) -> Size {
        attention_flop(2, self.of.heads, self.of.head)
    }

    fn validate(&self) -> Result<(), String> {
        limits::attention(&self.of)?;
        self.check().map_err(|e| e.to_string())
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        self.tile.launch(&self.of, extents, machine)
    }

    fn threads(&self) -> u32 {
        self.tile.threads()
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.plain().reference(extents, reads)
    }

    /// Adds sequences that refill every stage several times, and batches of many short sequences, to the edge cases.
    fn cases(&self) -> Vec<Case> {
        let mut cases = edge_cases();
        cases.push(Case::new("two_tiles", &[65, 63, 129, 1, 64, 128]));
        cases.push(Case::new("long", &[300, 1, 512]));
        cases.push(Case::new("refilled", &[7, 1600, 640]));
        // Several tiles per pipeline, and more sequences than a warp has lanes.
        let many: Vec<u32> = (0..90).map(|i| 1 + i * 37 % 190).collect();
        cases.push(Case::new("many", &many));
        // The scheduler searches these sequences in two steps.
        let short: Vec<u32> = (0..1100).map(|i| 1 + i % 3).collect();
        cases.push(Case::new("two_steps", &short));
        cases
    }

    fn tolerance(&self) -> Tolerance {
        self.plain().tolerance()
    }
}

pub(super) use instances::representative;

#[cfg(test)]
mod tests;
