//! Attention on Hopper: warpgroup products (`wgmma`). Blocks that stay are fed by the tensor memory accelerator, others copy for
//! themselves.

use serde::{Deserialize, Serialize};

use super::{
    AttentionError, HeadView, MhaOnline,
    fused::edge_cases,
    storage,
    view::{scale_log2, usual_scale},
};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, RowOrder,
        TensorMap, Tolerance, f32_literal,
    },
    machine::Machine,
    tensor::{DType, Extents},
};

/// How a block of attention on Hopper is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MhaTile {
    /// Queries of a tile, 64 for each of its warpgroups.
    pub rows: u32,
    /// Keys of a tile, of which several are in shared memory.
    pub keys: u32,
    /// Blocks that share a multiprocessor, which its registers and shared memory are divided by.
    pub blocks: u32,
    /// Whether they are one block that stays, with a stream of tiles for each and a warpgroup that
    /// fetches for all of them: more to start with, and nothing to wait for between tiles.
    pub stays: bool,
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

/// Shared memory of a multiprocessor, what the system keeps of it for each block, and most of a block.
const SHARED_OF_SM: u32 = 228 * 1024;
const SHARED_OF_SYSTEM: u32 = 1024;
const SHARED_OF_BLOCK: u32 = 227 * 1024;
/// Boxes start at a multiple of this.
const BOX_ALIGNMENT: u32 = 1024;
/// More tiles of keys in shared memory than this hide nothing more.
const MOST_STAGES: u32 = 8;
/// Barriers of a stage; a tile's record, and the barrier of its queries' readers.
const STAGE_BARRIERS: u32 = 3 * 8;
const RECORD: u32 = 16 + 8;
/// Registers of a multiprocessor, and the unit that threads get them in.
const REGISTERS: u32 = 64 * 1024;
const REGISTER_UNIT: u32 = 8;

impl MhaTile {
    /// Queries by keys by blocks.
    const fn comes(rows: u32, keys: u32, blocks: u32) -> Self {
        MhaTile {
            rows,
            keys,
            blocks,
            stays: false,
        }
    }

    /// Queries by keys by streams.
    const fn stays(rows: u32, keys: u32, blocks: u32) -> Self {
        MhaTile {
            rows,
            keys,
            blocks,
            stays: true,
        }
    }

    /// The tiles for heads of this size, the one for long sequences first; none where the kernel
    /// takes no such heads.
    pub fn candidates(head: u32) -> &'static [MhaTile] {
        const OF_32: &[MhaTile] = &[MhaTile::stays(64, 80, 4), MhaTile::comes(64, 64, 5)];
        const OF_64: &[MhaTile] = &[
            MhaTile::stays(128, 64, 2),
            MhaTile::stays(64, 64, 4),
            MhaTile::comes(64, 64, 4),
            MhaTile::comes(64, 48, 4),
            MhaTile::comes(64, 32, 5),
        ];
        const OF_96: &[MhaTile] = &[
            MhaTile::stays(192, 96, 1),
            MhaTile::comes(64, 48, 4),
            MhaTile::comes(64, 32, 4),
        ];
        const OF_128: &[MhaTile] = &[
            MhaTile::stays(192, 80, 1),
            MhaTile::comes(64, 48, 3),
            MhaTile::comes(64, 32, 4),
        ];
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
        match head {
            32 => vec![
                (Some(448), MhaTile::comes(64, 64, 5)),
                (None, MhaTile::stays(64, 80, 4)),
            ],
            64 => vec![
                (Some(192), MhaTile::comes(64, 64, 4)),
                (Some(896), MhaTile::stays(64, 64, 4)),
                (None, MhaTile::stays(128, 64, 2)),
            ],
            96 => vec![
                (Some(448), MhaTile::comes(64, 32, 4)),
                (None, MhaTile::stays(192, 96, 1)),
            ],
            128 => vec![
                (Some(448), MhaTile::comes(64, 32, 4)),
                (None, MhaTile::stays(192, 80, 1)),
            ],
            _ => Vec::new(),
        }
    }

    /// As in symbols.
    pub fn name(self) -> String {
        let stays = if self.stays { "_stays" } else { "" };
        format!("{}x{}x{}{stays}", self.rows, self.keys, self.blocks)
    }

    const fn groups(self) -> u32 {
        self.rows / 64
    }

    /// Of a block.
    const fn streams(self) -> u32 {
        if self.stays { self.blocks } else { 1 }
    }

    /// Warpgroups of a block that compute.
    const fn computing(self) -> u32 {
        self.streams() * self.groups()
    }

    const fn threads(self) -> u32 {
        (self.computing() + self.stays as u32) * 128
    }

    /// Registers of a thread that fetches and of one that computes, out of those that all threads of
    /// a block that stays have at its start.
    fn registers(self) -> (u32, u32) {
        let whole = |n: u32| n / REGISTER_UNIT * REGISTER_UNIT;
        let all = whole(REGISTERS / self.threads()) * self.threads();
        let given = if self.computing() < 4 { 40 } else { 32 };
        let taken = whole((all - given * 128) / (self.computing() * 128));
        (given, taken.min(240))
    }

    /// Tiles of keys and values of a stream in shared memory: as many as there is room for.
    fn stages(self, head: u32) -> u32 {
        let room = match self.stays {
            true => SHARED_OF_BLOCK,
            false => (SHARED_OF_SM / self.blocks - SHARED_OF_SYSTEM).min(SHARED_OF_BLOCK),
        };
        let fits = |&stages: &u32| self.bytes(head, stages) <= room;
        (1..=MOST_STAGES).rev().find(fits).unwrap_or_default()
    }

    /// Shared memory of a block with so many stages.
    fn bytes(self, head: u32, stages: u32) -> u32 {
        let row = head * 2;
        let ones = if has_ones(head) { 16 * row } else { 0 };
        let boxes = self.rows * row + stages * 2 * self.keys * row;
        match self.stays {
            true => {
                let barriers = (RECORD + stages * STAGE_BARRIERS).next_multiple_of(16);
                self.streams() * (boxes + barriers) + ones
            }
            false => BOX_ALIGNMENT + boxes + ones,
        }
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
    /// What the kernel for any card computes, by this tile.
    pub fn of(plain: &MhaOnline, tile: MhaTile) -> Self {
        Self {
            heads: plain.heads,
            head: plain.head,
            scale: plain.scale,
            q: plain.q,
            k: plain.k,
            v: plain.v,
            dtype: plain.dtype,
            tile,
        }
    }

    /// The tiles that serve attention on a card with these instructions; none where it is not
    /// for this kernel.
    pub fn tiles(
        head: u32,
        dtype: DType,
        views: &[HeadView],
        instructions: Instructions,
    ) -> &'static [MhaTile] {
        let whole = |v: &HeadView| has_whole_boxes(*v, head);
        match instructions {
            Instructions::Hopper if dtype != DType::F32 && views.iter().all(whole) => {
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
        for (operand, view) in self.plain().operands().named() {
            let HeadView::TokenMajor { offset, stride } = view else {
                return Err(AttentionError::WarpgroupView { operand });
            };
            if !has_whole_boxes(view, self.head) {
                return Err(AttentionError::WarpgroupColumns {
                    operand,
                    offset,
                    stride,
                    columns: columns(self.head),
                });
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
}

/// Whether the heads are columns of rows of tokens that begin where a box does.
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
            self.heads,
            self.head,
            self.plain().operands().suffix(),
        )
    }

    fn template(&self) -> &'static str {
        match self.tile.stays {
            true => "mha_wgmma_streams",
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
            let all: Vec<String> = (0..n).map(|i| format!("\"+f\"(sums[{i}])")).collect();
            all.join(", ")
        };
        let scores = self.tile.keys / 2;
        let ones = has_ones(self.head);
        let sums = self.head / 2 + if ones { 4 } else { 0 };
        let stages = self.tile.stages(self.head);
        let mut all = Constants::from([
            ("storage", storage(self.dtype).into()),
            ("heads", self.heads.into()),
            ("head", self.head.into()),
            ("columns", columns(self.head).into()),
            ("ones", ones.into()),
            ("keys", self.tile.keys.into()),
            ("stages", stages.into()),
            ("scale_log2", f32_literal(scale_log2(self.scale)).into()),
            ("out_stride", (self.heads * self.head).into()),
            ("q_column", self.q.column().into()),
            ("k_column", self.k.column().into()),
            ("v_column", self.v.column().into()),
            ("scores", scores.into()),
            ("score_registers", registers(scores).into()),
            ("score_operands", operands(scores).into()),
            ("sums", sums.into()),
            ("sum_registers", registers(sums).into()),
            ("sum_operands", operands(sums).into()),
        ]);
        all.extend(match self.tile.stays {
            true => {
                let (given, taken) = self.tile.registers();
                vec![
                    ("streams", self.tile.streams().into()),
                    ("groups", self.tile.groups().into()),
                    ("given", given.into()),
                    ("taken", taken.into()),
                ]
            }
            false => {
                vec![
                    ("blocks", self.tile.blocks.into()),
                    ("q_stride", self.q.stride(self.head).into()),
                    ("k_stride", self.k.stride(self.head).into()),
                    ("v_stride", self.v.stride(self.head).into()),
                ]
            }
        });
        all
    }

    fn params(&self) -> Vec<Param> {
        self.plain().params()
    }

    /// Where blocks come for one tile, all threads copy: a map would have to be looked up first.
    fn tensor_maps(&self) -> Vec<TensorMap> {
        if !self.tile.stays {
            return Vec::new();
        }
        let map = |param, box_rows| TensorMap {
            param,
            box_rows,
            box_columns: columns(self.head),
            order: RowOrder::Boxes(self.head / columns(self.head)),
        };
        vec![
            map("q", 64),
            map("k", self.tile.keys),
            map("v", self.tile.keys),
        ]
    }

    /// Numbers are given to tiles as by the other fused kernels; the heads of a tile are neighbours.
    /// Blocks that stay take each other's.
    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        let tiles = extents.tokens / u64::from(self.tile.rows) + extents.batch;
        let blocks = tiles.saturating_mul(self.heads.into());
        let most = if self.tile.stays {
            machine.sms.into()
        } else {
            u64::MAX
        };
        let bytes = self.tile.bytes(self.head, self.tile.stages(self.head));
        // As many as there are multiprocessors or fewer get one each: two on one share its products and its copies.
        let alone = !self.tile.stays && blocks <= machine.sms.into();
        let shared = if alone {
            bytes.max(SHARED_OF_SM / 2)
        } else {
            bytes
        };
        Launch::of_blocks(blocks.min(most), self.threads(), shared)
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
        // Several tiles for each stream, and more sequences than a warp has lanes.
        let many: Vec<u32> = (0..90).map(|i| 1 + i * 37 % 190).collect();
        cases.push(Case::new("many", &many));
        // So many that the search takes two steps.
        let short: Vec<u32> = (0..1100).map(|i| 1 + i % 3).collect();
        cases.push(Case::new("two_steps", &short));
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
mod tests;
