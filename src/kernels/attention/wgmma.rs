//! Attention on Hopper with WGMMA. Persistent CTAs are warp-specialised, with TMA producers; with one tile per CTA all
//! threads load with `cp.async`.

use serde::{Deserialize, Serialize};

use super::{
    Attending, AttentionError, HeadView, MhaOnline, by_distance, fused::edge_cases, storage,
    view::usual_scale,
};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, RowOrder,
        TensorMap, Tolerance,
    },
    machine::Machine,
    tensor::{DType, Extents},
};

/// Tile shape and occupancy of attention on Hopper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MhaTile {
    /// Queries of a query tile, 64 for each consumer warpgroup.
    pub rows: u32,
    /// Keys of a key tile, which is a pipeline stage.
    pub keys: u32,
    /// CTAs of an SM, which share its registers and shared memory; pipelines of the CTA if it is persistent.
    pub blocks: u32,
    /// One persistent CTA per SM with `blocks` pipelines and a producer warpgroup for all of them, instead of one tile
    /// per CTA: a longer prologue, but loads of the next tile overlap with the epilogue of the last.
    pub persistent: bool,
}

/// Fused attention of any length with WGMMA, in f16 or bf16. Operands as
/// [`super::MhaShort`], all of them columns of `[tokens, stride]` tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhaWgmma {
    pub of: Attending,
    pub dtype: DType,
    pub tile: MhaTile,
}

/// Bytes of shared memory of an SM, what the system reserves of it for each CTA, and the limit of a CTA.
const SHARED_OF_SM: u32 = 228 * 1024;
const SHARED_OF_SYSTEM: u32 = 1024;
const SHARED_OF_BLOCK: u32 = 227 * 1024;
/// Alignment of TMA boxes in shared memory, in bytes.
const BOX_ALIGNMENT: u32 = 1024;
/// More K/V stages than this hide no more latency.
const MOST_STAGES: u32 = 8;
/// Bytes of a stage's barriers (full keys, full values, empty); of the scheduler's tile and the empty barrier of a Q
/// stage.
const STAGE_BARRIERS: u32 = 3 * 8;
const Q_STAGE_BARRIERS: u32 = 16 + 8;
/// 32-bit registers of an SM, and the granularity of their allocation to a thread.
const REGISTERS: u32 = 64 * 1024;
const REGISTER_UNIT: u32 = 8;

impl MhaTile {
    /// Queries × keys × CTAs per SM, one tile per CTA.
    const fn one_tile(rows: u32, keys: u32, blocks: u32) -> Self {
        MhaTile {
            rows,
            keys,
            blocks,
            persistent: false,
        }
    }

    /// Queries × keys × pipelines of a persistent CTA.
    const fn persistent(rows: u32, keys: u32, blocks: u32) -> Self {
        MhaTile {
            rows,
            keys,
            blocks,
            persistent: true,
        }
    }

    /// The tiles for this head size, the one for long sequences first; none if the kernel does not support the head
    /// size.
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
            MhaTile::one_tile(64, 48, 3),
            MhaTile::one_tile(64, 32, 4),
        ];
        match head {
            32 => OF_32,
            64 => OF_64,
            96 => OF_96,
            128 => OF_128,
            _ => &[],
        }
    }

    /// Default dispatch without timings: upper bound on the longest sequence (inclusive), and the tile up to it.
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
            _ => Vec::new(),
        }
    }

    /// The tile for attention in which distances count, for every length; `None` if the kernel does not support the head size.
    pub fn for_distances(head: u32) -> Option<MhaTile> {
        let one_tile = |tile: &&MhaTile| !tile.persistent;
        Self::candidates(head).iter().find(one_tile).copied()
    }

    /// Name in symbols.
    pub fn name(self) -> String {
        let suffix = if self.persistent { "_persistent" } else { "" };
        format!("{}x{}x{}{suffix}", self.rows, self.keys, self.blocks)
    }

    /// Consumer warpgroups of a pipeline.
    const fn consumers_per_pipeline(self) -> u32 {
        self.rows / 64
    }

    /// Pipelines of a CTA.
    const fn pipelines(self) -> u32 {
        if self.persistent { self.blocks } else { 1 }
    }

    /// Consumer warpgroups of a CTA.
    const fn consumers(self) -> u32 {
        self.pipelines() * self.consumers_per_pipeline()
    }

    const fn threads(self) -> u32 {
        (self.consumers() + self.persistent as u32) * 128
    }

    /// Registers of a producer and of a consumer thread after `setmaxnreg`, out of those that a persistent CTA is
    /// launched with.
    fn registers(self) -> (u32, u32) {
        let whole = |n: u32| n / REGISTER_UNIT * REGISTER_UNIT;
        let all = whole(REGISTERS / self.threads()) * self.threads();
        let producer = if self.consumers() < 4 { 40 } else { 32 };
        let consumer = whole((all - producer * 128) / (self.consumers() * 128));
        (producer, consumer.min(240))
    }

    /// K/V stages of a pipeline: as many as fit shared memory.
    fn stages(self, head: u32) -> u32 {
        let room = match self.persistent {
            true => SHARED_OF_BLOCK,
            false => (SHARED_OF_SM / self.blocks - SHARED_OF_SYSTEM).min(SHARED_OF_BLOCK),
        };
        let fits = |&stages: &u32| self.bytes(head, stages) <= room;
        (1..=MOST_STAGES).rev().find(fits).unwrap_or_default()
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

/// Columns of a TMA box: a swizzled row of 128 bytes, or of 64 if the head size is not a multiple of that.
fn columns(head: u32) -> u32 {
    match head.is_multiple_of(64) {
        true => 64,
        false => 32,
    }
}

/// Whether a column of ones appended to V makes the tensor cores sum the rows of P. A descriptor has one stride between
/// boxes, so the ones can lie anywhere only if a tile of V is one box wide.
fn has_ones(head: u32) -> bool {
    head == columns(head)
}

impl MhaWgmma {
    /// The attention of `plain` with this tile.
    pub fn of(plain: &MhaOnline, tile: MhaTile) -> Self {
        Self {
            of: plain.of,
            dtype: plain.dtype,
            tile,
        }
    }

    /// The tiles that support this attention on a card with these instructions; none if the kernel does not. There is none where
    /// distances count, which has a tile that is chosen by name alone until it was timed ([`MhaTile::for_distances`]).
    pub fn tiles(of: &Attending, dtype: DType, instructions: Instructions) -> &'static [MhaTile] {
        let whole = |v: HeadView| has_whole_boxes(v, of.head);
        let serves = of.is_full() && [of.q, of.k, of.v].into_iter().all(whole);
        match instructions {
            Instructions::Hopper if dtype != DType::F32 && serves => MhaTile::candidates(of.head),
            _ => &[],
        }
    }

    /// Whether every query attends to keys on both sides, and has a key head of its own.
    pub fn serves(of: &Attending) -> bool {
        !of.causal && of.kv_heads == of.heads
    }

    /// Whether the kernel can be generated as described.
    pub fn check(&self) -> Result<(), AttentionError> {
        self.plain().check()?;
        if !Self::serves(&self.of) {
            return Err(AttentionError::WarpgroupMask);
        }
        let tiles = MhaTile::candidates(self.of.head);
        if tiles.is_empty() {
            return Err(AttentionError::WarpgroupHead { head: self.of.head });
        }
        if self.dtype == DType::F32 {
            return Err(AttentionError::WarpgroupStorage { dtype: self.dtype });
        }
        for (operand, view, _) in self.of.operands() {
            let HeadView::TokenMajor { offset, stride } = view else {
                return Err(AttentionError::WarpgroupView { operand });
            };
            if !has_whole_boxes(view, self.of.head) {
                return Err(AttentionError::WarpgroupColumns {
                    operand,
                    offset,
                    stride,
                    columns: columns(self.of.head),
                });
            }
        }
        // A persistent CTA's consumers have no registers left for what distances do.
        let serves = self.of.by.is_none() || !self.tile.persistent;
        match tiles.contains(&self.tile) && serves {
            true => Ok(()),
            false => Err(AttentionError::WarpgroupTile {
                tile: self.tile,
                head: self.of.head,
            }),
        }
    }

    /// The same attention for any card, which is its definition.
    pub fn plain(&self) -> MhaOnline {
        MhaOnline {
            of: self.of,
            dtype: self.dtype,
        }
    }
}

/// Whether the heads are columns of token-major rows that begin at a box boundary.
fn has_whole_boxes(view: HeadView, head: u32) -> bool {
    match view {
        HeadView::HeadMajor => false,
        HeadView::TokenMajor { offset, stride } => {
            offset.is_multiple_of(columns(head)) && stride.is_multiple_of(columns(head))
        }
    }
}

impl Kernel for MhaWgmma {
    fn symbol(&self) -> String {
        format!("{}_{}", self.definition(), self.tile.name())
    }

    fn definition(&self) -> String {
        format!(
            "mha_wgmma_{}_h{}x{}{}",
            self.dtype,
            self.of.heads,
            self.of.head,
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
        let registers = |n: u32| -> String {
            let all: Vec<String> = (0..n).map(|i| format!("%{i}")).collect();
            all.join(", ")
        };
        let operands = |n: u32| -> String {
            let all: Vec<String> = (0..n).map(|i| format!("\"+f\"(acc[{i}])")).collect();
            all.join(", ")
        };
        let scores = self.tile.keys / 2;
        let ones = has_ones(self.of.head);
        let acc = self.of.head / 2 + if ones { 4 } else { 0 };
        let stages = self.tile.stages(self.of.head);
        let mut all = Constants::from([
            ("storage", storage(self.dtype).into()),
            ("heads", self.of.heads.into()),
            ("head", self.of.head.into()),
            ("columns", columns(self.of.head).into()),
            ("ones", ones.into()),
            ("keys", self.tile.keys.into()),
            ("stages", stages.into()),
            (
                "n_keys",
                if self.of.by.window.is_some() {
                    "n_keys"
                } else {
                    "n"
                }
                .into(),
            ),
            ("out_stride", (self.of.heads * self.of.head).into()),
            ("q_column", self.of.q.column().into()),
            ("k_column", self.of.k.column().into()),
            ("v_column", self.of.v.column().into()),
            ("scores", scores.into()),
            ("score_registers", registers(scores).into()),
            ("score_operands", operands(scores).into()),
            ("acc", acc.into()),
            ("acc_registers", registers(acc).into()),
            ("acc_operands", operands(acc).into()),
        ]);
        all.extend(self.of.by.constants("head", self.of.scale));
        // No query is before its keys here.
        all.insert("causal", false.into());
        all.extend(match self.tile.persistent {
            true => {
                let (producer, consumer) = self.tile.registers();
                vec![
                    ("pipelines", self.tile.pipelines().into()),
                    ("consumers", self.tile.consumers_per_pipeline().into()),
                    ("producer_registers", producer.into()),
                    ("consumer_registers", consumer.into()),
                ]
            }
            false => {
                vec![
                    ("blocks", self.tile.blocks.into()),
                    ("q_stride", self.of.q.stride(self.of.head).into()),
                    ("k_stride", self.of.k.stride(self.of.head).into()),
                    ("v_stride", self.of.v.stride(self.of.head).into()),
                ]
            }
        });
        all
    }

    fn params(&self) -> Vec<Param> {
        self.plain().params()
    }

    /// Tensor maps for the persistent kernel only: with one tile per CTA, fetching a map would delay the first load.
    fn tensor_maps(&self) -> Vec<TensorMap> {
        if !self.tile.persistent {
            return Vec::new();
        }
        let map = |param, box_rows| TensorMap {
            param,
            box_rows,
            box_columns: columns(self.of.head),
            order: RowOrder::Boxes(self.of.head / columns(self.of.head)),
        };
        vec![
            map("q", 64),
            map("k", self.tile.keys),
            map("v", self.tile.keys),
        ]
    }

    /// Tile indices as in the other fused kernels, with the head as the fastest dimension. A persistent grid has at
    /// most one CTA per SM.
    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        let tiles = extents.tokens / u64::from(self.tile.rows) + extents.batch;
        let blocks = tiles.saturating_mul(self.of.heads.into());
        let most = if self.tile.persistent {
            machine.sms.into()
        } else {
            u64::MAX
        };
        let bytes = self
            .tile
            .bytes(self.of.head, self.tile.stages(self.of.head));
        // With no more CTAs than SMs, asking for half of the shared memory keeps two CTAs off one SM.
        let alone = !self.tile.persistent && blocks <= machine.sms.into();
        let shared = if alone {
            bytes.max(SHARED_OF_SM / 2)
        } else {
            bytes
        };
        Launch::of_ctas(blocks.min(most), self.threads(), shared)
    }

    fn threads(&self) -> u32 {
        self.tile.threads()
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.plain().reference(extents, reads)
    }

    /// Beyond the edge cases: sequences that refill every stage several times, and batches of many short sequences.
    fn cases(&self) -> Vec<Case> {
        let mut cases = edge_cases();
        cases.push(Case::new("two_tiles", &[65, 63, 129, 1, 64, 128]));
        cases.push(Case::new("long", &[300, 1, 512]));
        cases.push(Case::new("refilled", &[7, 1600, 640]));
        // Several tiles per pipeline, and more sequences than a warp has lanes.
        let many: Vec<u32> = (0..90).map(|i| 1 + i * 37 % 190).collect();
        cases.push(Case::new("many", &many));
        // So many sequences that the scheduler's search takes two steps.
        let short: Vec<u32> = (0..1100).map(|i| 1 + i % 3).collect();
        cases.push(Case::new("two_steps", &short));
        cases
    }

    fn tolerance(&self) -> Tolerance {
        self.plain().tolerance()
    }
}

/// Every tile of every head size in both storage types, with Q, K, V merged in one tensor and apart.
pub(super) fn representative() -> Vec<KernelSpec> {
    let mut all = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for (heads, head) in [(12, 32), (12, 64), (5, 96), (2, 128)] {
            for &tile in MhaTile::candidates(head) {
                let column = |i| HeadView::TokenMajor {
                    offset: i * heads * head,
                    stride: 3 * heads * head,
                };
                let views = [0, 1, 2].map(column);
                all.push(KernelSpec::from(MhaWgmma {
                    of: Attending::full(heads, head, usual_scale(head), views),
                    dtype,
                    tile,
                }));
            }
        }
        // What distances do.
        for (heads, head) in [(12, 64), (2, 128), (12, 32), (5, 96)] {
            let column = |i| HeadView::TokenMajor {
                offset: i * heads * head,
                stride: 3 * heads * head,
            };
            let full = Attending::full(heads, head, usual_scale(head), [0, 1, 2].map(column));
            for (_, by) in by_distance::examples()
                .into_iter()
                .filter(|(causal, _)| !causal)
            {
                // Other heads differ in their tiles alone.
                if head % 64 != 0 && by.window.is_some() != by.bias.is_some() {
                    continue;
                }
                let of = Attending { by, ..full };
                let tile = MhaTile::for_distances(head);
                all.extend(tile.map(|tile| KernelSpec::from(MhaWgmma { of, dtype, tile })));
            }
        }
        let (heads, head) = (3, 64);
        let plain = HeadView::TokenMajor {
            offset: 0,
            stride: heads * head,
        };
        all.push(KernelSpec::from(MhaWgmma {
            of: Attending::full(heads, head, 1.0, [plain; 3]),
            dtype,
            tile: MhaTile::candidates(head)[0],
        }));
    }
    all
}

#[cfg(test)]
mod tests;
