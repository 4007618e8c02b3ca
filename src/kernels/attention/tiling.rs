use super::common::{SHARED_LIMIT, row_bytes};
use crate::{
    kernels::Launch,
    tensor::{DType, Extents},
};

/// Tiling of a fused attention kernel.
pub(super) struct Tiling {
    pub template: &'static str,
    /// Queries per CTA.
    pub rows: u32,
    /// Keys per stage in shared memory.
    pub keys: u32,
    pub threads: u32,
    /// Number of 16-row MMA tiles per warp.
    pub m_tiles: u32,
    /// Whether a warp keeps its Q fragments in registers.
    pub q_in_regs: bool,
    pub shared_bytes: u32,
}

impl Tiling {
    /// Returns the f32 kernel's tiling. Shared memory holds queries, keys, values and the probabilities of a key tile.
    pub fn simt(head: u32) -> Self {
        let rows = 32;
        let shared =
            |keys: u32| (rows + 2 * keys) * row_bytes(head, DType::F32) + rows * (keys + 4) * 4;
        let keys = if shared(32) <= SHARED_LIMIT { 32 } else { 16 };
        Self {
            template: "mha_simt",
            rows,
            keys,
            threads: 128,
            m_tiles: 1,
            q_in_regs: false,
            shared_bytes: shared(keys),
        }
    }

    /// Returns a launch with one CTA per tile index and head. The tiles of sequence `i`, whose first token is `start`, begin at index
    /// `start / rows + i`. Indices have gaps, but need no prefix sum over tiles.
    pub fn launch(&self, extents: &Extents, heads: u32) -> Launch {
        let tiles = extents.tokens / u64::from(self.rows) + extents.batch;
        Launch {
            // There are at most 2^24 tokens and 2^24 sequences, so the number of tiles fits in 32 bits.
            grid: [tiles as u32, heads, 1],
            threads: self.threads,
            shared_bytes: self.shared_bytes,
        }
    }
}
