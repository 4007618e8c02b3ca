//! The KV cache: keys and values of earlier positions, in blocks of positions (PagedAttention, Kwon et al. 2023).
//!
//! A block holds [`BLOCK`] positions of one sequence for all caches of a program: one cache after another, each
//! `[heads, BLOCK, head]`, so that a head's keys are contiguous. Position `p` of a sequence is stored in *slot* `block · BLOCK +
//! p % BLOCK`, which is looked up in a table.

use serde::{Deserialize, Serialize};

use super::{
    Case, Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance,
    rows::{
        COPIED, STREAM_THREADS, count, read, read_meta, rows_by, storage, stream_launch,
        vector_width, write,
    },
};
use crate::{
    kernels::limits,
    machine::Machine,
    ops::{BatchInput, HeadView},
    tensor::{DType, Extents, Shape, Symbol},
};

/// Positions per block.
pub const BLOCK: u32 = 32;

/// `[blocks, stride]`: a pool of blocks of `stride` elements, addressed from the first element of one cache.
pub(super) fn pool(stride: u64) -> Shape {
    Shape::new([Symbol::Blocks.into(), stride.into()])
}

/// Index of a slot's elements for one head, relative to the first element of its cache.
pub(crate) fn index(slot: usize, nth: usize, head: usize, stride: usize) -> usize {
    let block = BLOCK as usize;
    slot / block * stride + (nth * block + slot % block) * head
}

/// `x [tokens, x.stride]`, `token_slots [tokens]` → `cache [blocks, stride]`: stores the heads of each token in its slot. With
/// one row per sequence, `x [batch, x.stride]`, `slots`, `slot_starts [batch]`: stores the heads of each row in its sequence's
/// first slot. Nothing else in the cache is written.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AppendCache {
    pub heads: u32,
    pub head: u32,
    /// Location of the heads in the rows of `x`.
    pub x: HeadView,
    /// Whether `x` has one row per sequence instead of one per token. The sequence then has a single position.
    pub of_sequence: bool,
    /// Elements per block.
    pub stride: u64,
    pub dtype: DType,
}

impl AppendCache {
    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), String> {
        let width = u64::from(self.heads) * u64::from(self.head);
        let HeadView::TokenMajor { offset, stride } = self.x else {
            return Err("`x` is head-major; expected columns of token-major rows".to_owned());
        };
        let fits = u64::from(offset) + width <= u64::from(stride);
        match fits && width * u64::from(BLOCK) <= self.stride {
            true => Ok(()),
            false => Err(format!(
                "{width} columns from column {offset} do not fit rows of {stride}, or cache blocks of {}",
                self.stride
            )),
        }
    }

    fn rows(&self) -> Symbol {
        match self.of_sequence {
            true => Symbol::Batch,
            false => Symbol::Tokens,
        }
    }

    fn vector(&self) -> u32 {
        let (column, stride) = (self.x.column(), self.x.stride(self.head));
        // The offset of a cache is a multiple of `head`.
        vector_width(self.dtype, &[column, stride, self.head])
    }

    fn packs(&self) -> u32 {
        self.heads * self.head / self.vector()
    }
}

impl Kernel for AppendCache {
    fn symbol(&self) -> String {
        format!(
            "append_cache_{}{}_h{}x{}_from{}of{}_blocks{}",
            if self.of_sequence { "of_sequence_" } else { "" },
            self.dtype,
            self.heads,
            self.head,
            self.x.column(),
            self.x.stride(self.head),
            self.stride
        )
    }

    fn template(&self) -> &'static str {
        "append_cache"
    }

    fn constants(&self) -> Constants {
        Constants::from([
            ("storage", storage(self.dtype)),
            ("vector", self.vector().into()),
            ("head", self.head.into()),
            ("packs", self.packs().into()),
            ("x_column", self.x.column().into()),
            ("x_stride", self.x.stride(self.head).into()),
            ("stride", self.stride.into()),
            ("block", BLOCK.into()),
            ("of_sequence", self.of_sequence.into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        let one_per = |symbol: Symbol| Shape::new([symbol.into()]);
        let x = rows_by(self.rows(), self.x.stride(self.head));
        let mut all = vec![read("x", self.dtype, x, Fill::ACTIVATION)];
        match self.of_sequence {
            true => all.extend([
                read_meta("slots", BatchInput::Slots, one_per(Symbol::Slots)),
                read_meta(
                    "slot_starts",
                    BatchInput::SlotStarts,
                    one_per(Symbol::Batch),
                ),
            ]),
            false => all.push(read_meta(
                "token_slots",
                BatchInput::TokenSlots,
                one_per(Symbol::Tokens),
            )),
        }
        all.extend([
            write("cache", self.dtype, pool(self.stride)),
            count(self.rows()),
        ]);
        all
    }

    fn dtype(&self) -> Option<DType> {
        Some(self.dtype)
    }

    fn validate(&self) -> Result<(), String> {
        limits::heads(self.heads, self.head, &[self.x])?;
        self.check()?;
        check_stride(self.stride, self.heads, self.head)
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let rows = match self.of_sequence {
            true => extents.batch,
            false => extents.tokens,
        };
        stream_launch(rows * u64::from(self.packs()))
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let x = reads[0].real();
        let slots: Vec<i64> = match self.of_sequence {
            true => {
                let starts = reads[2].index().iter();
                starts
                    .map(|&start| reads[1].index()[start as usize])
                    .collect()
            }
            false => reads[1].index().to_vec(),
        };
        let (head, stride) = (self.head as usize, self.stride as usize);
        let mut cache = vec![f32::NAN; extents.blocks as usize * stride];
        for (token, &slot) in slots.iter().enumerate() {
            for h in 0..self.heads as usize {
                let from = self.x.index(slots.len(), token, h, self.head);
                let to = index(slot as usize, h, head, stride);
                cache[to..to + head].copy_from_slice(&x[from..from + head]);
            }
        }
        vec![HostTensor::Real(cache)]
    }

    fn cases(&self) -> Vec<Case> {
        Case::cached()
    }

    fn tolerance(&self) -> Tolerance {
        COPIED
    }
}

/// Merged projections, with grouped heads, a single head, and head sizes that no wide access divides.
pub(super) fn representative() -> Vec<KernelSpec> {
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (heads, head, offset, stride) in [
            (12, 64, 768, 2304),
            (8, 128, 2048, 4096),
            (3, 20, 0, 60),
            (1, 7, 3, 11),
        ] {
            let x = HeadView::TokenMajor { offset, stride };
            let kernel = AppendCache {
                heads,
                head,
                x,
                of_sequence: false,
                // Keys and values of one layer.
                stride: u64::from(2 * heads * head * BLOCK),
                dtype,
            };
            if head == 20 {
                let of_sequence = true;
                all.push(
                    AppendCache {
                        of_sequence,
                        ..kernel.clone()
                    }
                    .into(),
                );
            }
            all.push(kernel.into());
        }
    }
    all
}

/// Checks that a cache of these heads fits a block.
pub(super) fn check_stride(stride: u64, heads: u32, head: u32) -> Result<(), String> {
    let least = u64::from(heads) * u64::from(head) * u64::from(BLOCK);
    match (least..=limits::MAX_ELEMENTS).contains(&stride) {
        true => Ok(()),
        false => Err(format!(
            "blocks of {stride} elements, expected at least {least}"
        )),
    }
}
