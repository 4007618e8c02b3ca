//! The KV cache: keys and values of earlier positions, in blocks of positions (PagedAttention, Kwon et al. 2023).
//!
//! A block holds [`BLOCK`] positions of one sequence. It has room for these positions in all caches of a program, such as the caches of all
//! layers. The caches are stored one after another, each as `[heads, BLOCK, head]`, so a head's keys are contiguous. Position `p` of a
//! sequence is stored in *slot* `block · BLOCK + p % BLOCK`. A table contains the slot of each position.
//!
//! Keys and values are rounded to the cache's format when they are appended. Attention reads the rounded keys and values, even those of the
//! tokens that the same step appends. All executors and kernels do this. E4M3 rounds to the nearest value, with ties to an even mantissa.
//! Magnitudes above 448 become 448, and NaN stays NaN. Attention converts the elements to the type of the queries, without rounding.
//!
//! A cache in E4M3 may have a scale for its keys and a scale for its values, which the checkpoint contains. Keys and values are divided by
//! their scale in f32 before they are rounded. Attention multiplies the scores by the scale of the keys, and the result by the scale of the
//! values.

use serde::{Deserialize, Serialize};

use super::{
    Case, Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Role, Tolerance,
    rows::{
        COPIED, STREAM_THREADS, count, read, read_meta, rows_by, storage, stream_launch,
        vector_width, write,
    },
};
use crate::{
    kernels::limits,
    machine::Machine,
    ops::{BatchInput, HeadView},
    tensor::{DType, Element, Extents, Format, Shape, Symbol},
};

/// Number of positions (tokens) per block of the KV cache.
pub const BLOCK: u32 = 32;

/// The blocks of all caches, `[blocks, stride]`. A kernel gets a pointer to the first element of one cache in the first block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Pool {
    /// Elements per block.
    pub stride: u64,
    /// Format of the elements.
    pub format: Format,
    /// Whether keys and values are divided by scales, which kernels read. Only elements in E4M3 have scales.
    pub scaled: bool,
}

/// Names of the parameters for the scales of a cache's keys and values.
pub const SCALES: [&str; 2] = ["k_scale", "v_scale"];

impl Pool {
    /// Returns blocks for the keys and values of one layer.
    pub fn of_layer(kv_heads: u32, head: u32, format: impl Into<Format>) -> Self {
        Self {
            stride: u64::from(2 * kv_heads * head * BLOCK),
            format: format.into(),
            scaled: false,
        }
    }

    /// Returns the parameters for the scales, if there are any.
    pub(super) fn scales(self) -> Vec<Param> {
        let param = |name| Param {
            name,
            role: Role::Read {
                element: DType::F32.into(),
                shape: Shape::fixed(&[1]),
                fill: Fill::Normal {
                    mean: 0.25,
                    deviation: 0.02,
                },
            },
        };
        match self.scaled {
            true => SCALES.map(param).into(),
            false => Vec::new(),
        }
    }

    /// Removes the scales of keys and values from the start of `reads` and returns them. If the cache has no scales, removes nothing and
    /// returns 1 for both.
    pub(super) fn take_scales(self, reads: &mut &[&HostTensor]) -> [f32; 2] {
        match (self.scaled, *reads) {
            (true, [keys, values, rest @ ..]) => {
                *reads = rest;
                [keys.real()[0], values.real()[0]]
            }
            _ => [1.0; 2],
        }
    }

    pub(super) fn shape(self) -> Shape {
        Shape::new([Symbol::Blocks.into(), self.stride.into()])
    }

    pub(super) fn element(self) -> Element {
        self.format.into()
    }

    /// Checks that the heads of a cache fit a block, and that kernels with activations in `dtype` support the cache's format.
    pub(super) fn check(self, heads: u32, head: u32, dtype: DType) -> Result<(), String> {
        let least = u64::from(heads) * u64::from(head) * u64::from(BLOCK);
        if !(least..=limits::MAX_ELEMENTS).contains(&self.stride) {
            return Err(format!(
                "blocks of {} elements, expected at least {least}",
                self.stride
            ));
        }
        match self.format {
            Format::Plain(_) if self.scaled => Err(format!(
                "scales of a KV cache in {}; expected one in e4m3",
                self.format
            )),
            Format::Plain(stored) if stored == dtype => Ok(()),
            Format::E4m3 => Ok(()),
            Format::Plain(_) | Format::Scaled(_) => Err(format!(
                "a KV cache in {} with activations in {dtype}; expected {dtype} or e4m3",
                self.format
            )),
        }
    }

    /// Whether elements are in E4M3 instead of the type of the activations.
    pub fn is_e4m3(self) -> bool {
        match self.format {
            Format::E4m3 => true,
            Format::Plain(_) | Format::Scaled(_) => false,
        }
    }

    /// Part of a kernel's symbol that names the size and format of blocks.
    pub(super) fn word(self) -> String {
        match (self.is_e4m3(), self.scaled) {
            (true, true) => format!("_blocks{}_e4m3_scaled", self.stride),
            (true, false) => format!("_blocks{}_e4m3", self.stride),
            (false, _) => format!("_blocks{}", self.stride),
        }
    }

    /// Returns `value / scale`, rounded to the cache's format. `scale` is 1 if the cache has no scales.
    pub(super) fn round(self, value: f32, scale: f32) -> f32 {
        self.element().round(value / scale)
    }
}

/// Returns the index of the first of the `head` elements of head `nth` in `slot`, relative to the first element of the cache. `stride` is
/// [`Pool::stride`].
pub(crate) fn index(slot: usize, nth: usize, head: usize, stride: usize) -> usize {
    let block = BLOCK as usize;
    slot / block * stride + (nth * block + slot % block) * head
}

/// `x [tokens, x.stride]`, (`k_scale, v_scale [1]`), `token_slots [tokens]` → `cache [blocks, stride]`: stores the heads of each token in
/// the token's slot. The rest of the cache is not written.
///
/// If `of_sequence` is true, the operands are `x [batch, x.stride]`, (`k_scale, v_scale [1]`), `slots`, `slot_starts [batch]`, and the
/// heads of each row are stored in the first slot of the row's sequence.
///
/// The first half of the heads is divided by `k_scale`, and the second half by `v_scale`. If the heads are only keys or only values, both
/// scales are equal.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AppendCache {
    pub heads: u32,
    pub head: u32,
    /// Location of the heads in the rows of `x`.
    pub x: HeadView,
    /// Whether `x` has one row per sequence instead of one per token. Each sequence then has a single position in the cache.
    pub of_sequence: bool,
    pub pool: Pool,
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
        match fits && width * u64::from(BLOCK) <= self.pool.stride {
            true => Ok(()),
            false => Err(format!(
                "{width} columns from column {offset} do not fit rows of {stride}, or cache blocks of {}",
                self.pool.stride
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
        // The offset of a cache in a block is a multiple of `head`.
        vector_width(self.dtype, &[column, stride, self.head])
    }

    fn packs(&self) -> u32 {
        self.heads * self.head / self.vector()
    }
}

impl Kernel for AppendCache {
    facts! { template: "append_cache", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!(
            "append_cache_{}{}_h{}x{}_from{}of{}{}",
            if self.of_sequence { "of_sequence_" } else { "" },
            self.dtype,
            self.heads,
            self.head,
            self.x.column(),
            self.x.stride(self.head),
            self.pool.word()
        )
    }

    fn constants(&self) -> Constants {
        Constants::from([
            ("storage", storage(self.dtype)),
            ("vector", self.vector().into()),
            ("head", self.head.into()),
            ("packs", self.packs().into()),
            ("x_column", self.x.column().into()),
            ("x_stride", self.x.stride(self.head).into()),
            ("stride", self.pool.stride.into()),
            ("e4m3", self.pool.is_e4m3().into()),
            ("scaled", self.pool.scaled.into()),
            ("keys", (self.heads / 2).into()),
            ("block", BLOCK.into()),
            ("of_sequence", self.of_sequence.into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        let one_per = |symbol: Symbol| Shape::new([symbol.into()]);
        let x = rows_by(self.rows(), self.x.stride(self.head));
        let mut all = vec![read("x", self.dtype, x, Fill::ACTIVATION)];
        all.extend(self.pool.scales());
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
            write("cache", self.pool.element(), self.pool.shape()),
            count(self.rows()),
        ]);
        all
    }

    fn validate(&self) -> Result<(), String> {
        limits::heads(self.heads, self.head, &[self.x])?;
        self.check()?;
        self.pool.check(self.heads, self.head, self.dtype)
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
        let mut of_slots = &reads[1..];
        let scales = self.pool.take_scales(&mut of_slots);
        let slots: Vec<i64> = match self.of_sequence {
            true => {
                let starts = of_slots[1].index().iter();
                starts
                    .map(|&start| of_slots[0].index()[start as usize])
                    .collect()
            }
            false => of_slots[0].index().to_vec(),
        };
        let (head, stride) = (self.head as usize, self.pool.stride as usize);
        let mut cache = vec![f32::NAN; extents.blocks as usize * stride];
        for (token, &slot) in slots.iter().enumerate() {
            for h in 0..self.heads as usize {
                let from = self.x.index(slots.len(), token, h, self.head);
                let to = index(slot as usize, h, head, stride);
                let scale = scales[usize::from(h >= self.heads as usize / 2)];
                let stored = x[from..from + head]
                    .iter()
                    .map(|&v| self.pool.round(v, scale));
                cache.splice(to..to + head, stored);
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

/// Instances for merged projections with grouped heads, a single head, and head sizes that do not allow wide accesses.
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
            for (format, scaled) in [
                (dtype.into(), false),
                (Format::E4m3, false),
                (Format::E4m3, true),
            ] {
                let kernel = AppendCache {
                    heads,
                    head,
                    x,
                    of_sequence: false,
                    pool: Pool {
                        scaled,
                        ..Pool::of_layer(heads, head, format)
                    },
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
    }
    all
}
