//! Decode attention: single tokens attend to their sequences' keys in a KV cache.

use serde::{Deserialize, Serialize};

use super::{AttentionError, Keys, MhaCached, storage};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, Tolerance,
        attention::position_bias::PositionBiasCode,
        cache::{BLOCK, Pool},
    },
    machine::Machine,
    ops::{HeadView, PositionBias, default_scale},
    tensor::{DType, Extents, Size},
};

/// Attention to a KV cache, optimized for batches with one new token per sequence. The results are correct for any batch.
///
/// A CTA computes all query heads that share a key head, for one token, to read keys and values only once. The keys are split among the
/// warps of the CTA, and among the CTAs of a cluster if there is one. Partial results are merged in (distributed) shared memory, as in
/// FlashDecoding. The result of a token depends on its number of keys, but not on the rest of the batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhaDecode {
    /// The plain kernel for the same attention. It defines the result.
    pub plain: MhaCached,
    /// Size and number of the CTAs for one token and key head.
    pub ctas: DecodeCtas,
}

/// The CTAs that compute the query heads of one key head for one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecodeCtas {
    pub size: DecodeCta,
    /// Number of CTAs among which the keys are split. Up to 8 medium or large CTAs form a cluster. With small CTAs, the number is 1.
    pub splits: u32,
}

/// Size of a CTA of [`MhaDecode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DecodeCta {
    /// At least three CTAs fit on an SM of Hopper, and at least one fits on an SM of every supported GPU.
    Small,
    /// Two CTAs fit on an SM of Hopper.
    Medium,
    /// One CTA fits on an SM of Hopper. A single CTA is large enough to keep a sufficient number of loads in flight.
    Large,
}

impl DecodeCtas {
    pub const SMALL: Self = Self::one(DecodeCta::Small);
    pub const MEDIUM: Self = Self::one(DecodeCta::Medium);
    pub const LARGE: Self = Self::one(DecodeCta::Large);

    const fn one(size: DecodeCta) -> Self {
        Self { size, splits: 1 }
    }

    /// Returns a cluster of `splits` CTAs of this size.
    pub const fn split(self, splits: u32) -> Self {
        Self { splits, ..self }
    }
}

/// Max query heads per CTA: the N extent of an MMA. If more query heads share a key head, several CTAs read the same keys.
const MAX_ROWS: u32 = 8;
/// Keys per tile.
const TILE: u32 = 16;
/// Min head size. With smaller heads, some lanes would hold no elements of a key.
const MIN_ELEMENTS: u32 = 32;

impl MhaDecode {
    /// Max CTAs per cluster: the portable cluster size.
    pub const MOST_SPLITS: u32 = 8;

    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), AttentionError> {
        let MhaCached { head, q, .. } = self.plain;
        self.plain.check()?;
        if head < MIN_ELEMENTS {
            return Err(AttentionError::DecodeHead { head });
        }
        if q == HeadView::HeadMajor {
            return Err(AttentionError::DecodeView);
        }
        if self.plain.pool.is_e4m3() && !self.plain.dtype.has_mma() {
            return Err(AttentionError::DecodeE4m3 {
                dtype: self.plain.dtype,
            });
        }
        let splits = self.ctas.splits;
        let max_splits = match self.ctas.size {
            DecodeCta::Small => 1,
            DecodeCta::Medium | DecodeCta::Large => Self::MOST_SPLITS,
        };
        match (1..=max_splits).contains(&splits) {
            true => Ok(()),
            false => Err(AttentionError::DecodeSplits { splits, max_splits }),
        }
    }

    /// CTAs per token if the keys are not split.
    pub fn ctas_of_token(&self) -> u32 {
        let MhaCached {
            heads, kv_heads, ..
        } = self.plain;
        kv_heads * (heads / kv_heads).div_ceil(self.rows())
    }

    /// Number of query heads per CTA. A CTA computes all query heads that share a key head. If these are too many, it computes an equal
    /// part of them.
    fn rows(&self) -> u32 {
        let MhaCached {
            heads, kv_heads, ..
        } = self.plain;
        let group = heads / kv_heads;
        // In the f32 kernel, a lane holds `value_packs` packs of accumulators for each query head. Registers have room for 16 packs in
        // total.
        let most = match self.plain.dtype {
            DType::F32 => (16 / self.value_packs()).clamp(1, MAX_ROWS),
            DType::F16 | DType::BF16 => MAX_ROWS,
        };
        group.div_ceil(group.div_ceil(most))
    }

    /// Number of packs of a key that a lane holds. Four lanes share a key, so a lane holds every fourth pack.
    fn key_packs(&self) -> u32 {
        self.packs().div_ceil(4)
    }

    /// Number of packs of a value that a lane holds. Eight lanes share a value, so a lane holds every eighth pack.
    fn value_packs(&self) -> u32 {
        self.packs().div_ceil(8)
    }

    /// Number of packs of a key or value of one head. A pack has 16 bytes in registers.
    fn packs(&self) -> u32 {
        self.plain.head * self.plain.dtype.bytes() as u32 / 16
    }

    /// Bytes of a pack in the cache: fewer than 16 if elements are smaller in the cache than in registers.
    fn pack_bytes(&self) -> u32 {
        let MhaCached { pool, dtype, .. } = self.plain;
        16 * pool.element().bytes() as u32 / dtype.bytes() as u32
    }

    /// Bytes of a pipeline stage, which holds 16 keys and 16 values. Keys and values are padded, so that all lanes of a warp hold equally
    /// many packs.
    fn stage_bytes(&self) -> u32 {
        (2 * self.key_packs() + 4 * self.value_packs()) * 32 * self.pack_bytes()
    }

    /// Returns the bytes of shared memory for tiles in flight, and the max number of warps. A large CTA with several query heads has up to
    /// 16 warps, because eight warps would compute more slowly than the keys are loaded.
    fn room(&self) -> (u32, u32) {
        match self.ctas.size {
            DecodeCta::Small => (64 * 1024, 4),
            DecodeCta::Medium => (96 * 1024, 8),
            DecodeCta::Large if self.rows() == 1 => (192 * 1024, 8),
            DecodeCta::Large => (192 * 1024, 16),
        }
    }

    fn warps(&self) -> u32 {
        let (bytes, most) = self.room();
        let fitting = bytes / (2 * self.stage_bytes());
        // The number of warps is a power of two. The keys of a warp and the keys of a CTA are then whole cache blocks.
        1 << fitting.clamp(1, most).ilog2()
    }

    /// Number of keys in one tile of each warp of a CTA.
    pub fn keys_at_once(&self) -> u64 {
        u64::from(TILE * self.warps())
    }

    /// Min number of keys that the first CTA of a cluster handles before the next CTA gets any: four tiles per warp.
    pub fn min_keys_of_cta(&self) -> u64 {
        4 * self.keys_at_once()
    }

    /// Tiles in flight per warp.
    fn stages(&self) -> u32 {
        let most = match self.ctas.size {
            DecodeCta::Large => 6,
            DecodeCta::Small | DecodeCta::Medium if self.is_brief() => 2,
            DecodeCta::Small | DecodeCta::Medium => 3,
        };
        (self.room().0 / (self.warps() * self.stage_bytes())).clamp(2, most)
    }

    /// Returns whether a CTA has little work: one query head with at most 64 columns. Six such CTAs per SM, with two tiles in flight per
    /// warp, hide more latency than fewer CTAs with three tiles, because their prologues and epilogues overlap.
    fn is_brief(&self) -> bool {
        let plain = &self.plain;
        let one_query = plain.heads == plain.kv_heads && plain.dtype.has_mma();
        one_query && plain.head <= 64 && self.ctas.size == DecodeCta::Small
    }

    /// Min CTAs per SM for `__launch_bounds__`. Without it, the occupancy heuristic of ptxas may limit registers so much that they spill.
    fn min_ctas(&self) -> u32 {
        match (self.ctas.size, self.plain.head) {
            _ if self.is_brief() => 6,
            (DecodeCta::Large, _) | (_, 129..) => 1,
            _ => 2,
        }
    }
}

impl Kernel for MhaDecode {
    facts! { template: "mha_decode", dtype: self.plain.dtype, class: Attention }

    fn symbol(&self) -> String {
        let plain = self.plain.symbol();
        let plain = plain
            .strip_prefix("mha_cached")
            .or(plain.strip_prefix("mha"));
        let plain = plain.unwrap_or_default();
        let size = match (self.ctas.size, self.ctas.splits) {
            (DecodeCta::Small, _) | (DecodeCta::Medium, 2..) => "",
            (DecodeCta::Medium, _) => "_medium",
            (DecodeCta::Large, _) => "_large",
        };
        let splits = match self.ctas.splits {
            1 => String::new(),
            splits => format!("_split{splits}"),
        };
        format!("mha_decode{plain}{size}{splits}")
    }

    fn definition(&self) -> String {
        format!("{}_decode", self.plain.definition())
    }

    fn constants(&self) -> Constants {
        let plain = &self.plain;
        let cluster = match self.ctas.splits {
            1 => String::new(),
            splits => format!("__cluster_dims__({splits}, 1, 1) "),
        };
        let mut constants = Constants::from([
            ("storage", storage(plain.dtype).into()),
            ("mma", (plain.dtype.has_mma()).into()),
            ("causal", (plain.keys == Keys::Own).into()),
            ("group", (plain.heads / plain.kv_heads).into()),
            ("rows", self.rows().into()),
            ("head", plain.head.into()),
            ("block", BLOCK.into()),
            ("stride", plain.pool.stride.into()),
            ("e4m3", plain.pool.is_e4m3().into()),
            ("scaled", plain.pool.scaled.into()),
            ("warps", self.warps().into()),
            ("stages", self.stages().into()),
            ("splits", self.ctas.splits.into()),
            ("min_ctas", self.min_ctas().into()),
            ("cluster", cluster.into()),
            ("appends", false.into()),
            ("q_column", plain.q.column().into()),
            ("q_stride", plain.q.stride(plain.head).into()),
            ("out_stride", (plain.heads * plain.head).into()),
        ]);
        // The templates compute the index of each query head of a CTA themselves, so they do not use the expression `head`.
        constants.extend(plain.by.constants("head", plain.scale));
        constants
    }

    fn params(&self) -> Vec<Param> {
        self.plain.params()
    }

    fn instructions(&self) -> Instructions {
        match self.ctas.size {
            DecodeCta::Small => Instructions::Ampere,
            DecodeCta::Medium | DecodeCta::Large => Instructions::Hopper,
        }
    }

    fn flop(&self) -> Size {
        self.plain.flop()
    }

    fn validate(&self) -> Result<(), String> {
        self.plain.check_sizes()?;
        self.check().map_err(|e| e.to_string())
    }

    /// Returns a launch that does not depend on the numbers of keys, so it does not change while sequences grow.
    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        Launch {
            // There are at most 2^24 tokens, so the number of CTAs fits in 32 bits.
            grid: [
                extents.tokens.max(1) as u32 * self.ctas.splits,
                self.ctas_of_token(),
                1,
            ],
            threads: self.threads(),
            shared_bytes: self.warps() * self.stages() * self.stage_bytes(),
        }
    }

    fn threads(&self) -> u32 {
        self.warps() * 32
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.plain.reference(extents, reads)
    }

    /// Returns the cases of the plain kernel, and cases with key counts around the boundaries of tiles, warps and CTAs.
    fn cases(&self) -> Vec<Case> {
        let steps = |name, cached: &[u32]| Case {
            cached: cached.to_vec(),
            ..Case::new(name, &vec![1; cached.len()])
        };
        let mut cases = self.plain.cases();
        if self.plain.keys == Keys::Source {
            let sources = vec![1, 8, 15, 16, 31, 32, 33, 127, 128, 257, 513, 2049];
            let lens = vec![1; sources.len()];
            cases.push(Case {
                sources,
                ..Case::new("edges", &lens)
            });
            return cases;
        }
        cases.push(steps(
            "edges",
            &[
                0, 1, 7, 8, 15, 16, 17, 30, 31, 32, 47, 48, 127, 128, 255, 256, 257, 511, 512, 513,
            ],
        ));
        cases.push(steps("long", &[2047, 300, 2048, 4999, 0]));
        let many: Vec<u32> = (0..70).map(|i| i * 13 % 97).collect();
        cases.push(steps("many", &many));
        cases
    }

    fn tolerance(&self) -> Tolerance {
        super::operands::tolerance(self.plain.dtype)
    }
}

/// Instances with 1 to 12 query heads per key head, head sizes with every number of packs, and clusters.
pub(super) fn representative() -> Vec<KernelSpec> {
    const SMALL: DecodeCtas = DecodeCtas::SMALL;
    const MEDIUM: DecodeCtas = DecodeCtas::MEDIUM;
    const LARGE: DecodeCtas = DecodeCtas::LARGE;
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (heads, kv_heads, head, ctas) in [
            (12, 12, 64, SMALL),
            (12, 12, 64, LARGE),
            (12, 12, 64, MEDIUM.split(8)),
            (12, 12, 64, LARGE.split(2)),
            (16, 8, 128, SMALL),
            (16, 8, 128, MEDIUM),
            (16, 8, 128, LARGE),
            (16, 8, 128, LARGE.split(2)),
            (32, 8, 64, MEDIUM),
            (32, 8, 64, LARGE),
            (32, 8, 64, MEDIUM.split(8)),
            (6, 1, 40, MEDIUM.split(2)),
            (8, 1, 128, MEDIUM.split(8)),
            (6, 3, 96, SMALL),
            (12, 1, 80, LARGE),
            (12, 1, 80, MEDIUM.split(8)),
            (12, 1, 80, LARGE.split(2)),
            (4, 1, 256, LARGE),
            (4, 1, 256, MEDIUM.split(2)),
            (4, 1, 256, LARGE.split(2)),
            (3, 3, 256, MEDIUM.split(8)),
            (2, 2, 32, SMALL),
            (4, 2, 32, LARGE),
        ] {
            let plain = MhaCached {
                heads,
                kv_heads,
                head,
                scale: default_scale(head),
                q: HeadView::TokenMajor {
                    offset: 0,
                    stride: (heads + 2 * kv_heads) * head,
                },
                keys: Keys::Own,
                by: PositionBias::default(),
                pool: Pool::of_layer(kv_heads, head, dtype),
                dtype,
            };
            if head == 96 || (heads, ctas) == (32, LARGE) || (head, ctas) == (64, MEDIUM.split(8)) {
                let all_by = plain.by_distance();
                all.extend(all_by.map(|plain| MhaDecode { plain, ctas }.into()));
            }
            if (head, ctas) == (256, LARGE) {
                let capped = plain.by_distance().filter(|plain| plain.by.cap.is_some());
                all.extend(capped.map(|plain| MhaDecode { plain, ctas }.into()));
            }
            // Some tilings also have an instance with an E4M3 cache and scales.
            let is_scaled = matches!(
                (head, ctas.size, ctas.splits),
                (64, DecodeCta::Medium, 2..)
                    | (96 | 128, DecodeCta::Small, 1)
                    | (80 | 256, DecodeCta::Large, 1)
            );
            let e4m3 = [plain.in_e4m3()].into_iter();
            let e4m3 = e4m3.chain(is_scaled.then(|| plain.scaled()));
            for plain in e4m3.filter(|_| dtype.has_mma()) {
                // Only this tiling has instances with an E4M3 cache and position biases.
                if (head, ctas) == (96, SMALL) {
                    let all_by = plain.by_distance();
                    let all_by = all_by.filter(|by| !plain.pool.scaled || by.by.cap.is_some());
                    all.extend(all_by.map(|plain| MhaDecode { plain, ctas }.into()));
                }
                if (head, ctas) == (64, MEDIUM.split(8)) && heads == 12 {
                    let plain = MhaCached {
                        keys: Keys::Source,
                        ..plain.clone()
                    };
                    all.push(MhaDecode { plain, ctas }.into());
                }
                all.push(MhaDecode { plain, ctas }.into());
            }
            if kv_heads == heads {
                let plain = MhaCached {
                    keys: Keys::Source,
                    ..plain.clone()
                };
                all.push(MhaDecode { plain, ctas }.into());
            }
            all.push(MhaDecode { plain, ctas }.into());
        }
    }
    all
}
