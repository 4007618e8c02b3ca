//! Fused attention, whose scores never reach global memory: a kernel for short sequences, and a kernel for any length.

use serde::{Deserialize, Serialize};

use super::{
    AttentionError,
    common::{SHARED_LIMIT, edge_cases, row_bytes},
    operands::{Operands, check_head},
    tiling::Tiling,
};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Kernel, Launch, Param, Tolerance, class::attention_flop,
        limits,
    },
    machine::Machine,
    ops::AttentionProblem,
    tensor::{DType, Extents, Size},
};

/// Fused attention for short sequences (ByteTransformer III.E.1): shared memory holds all keys of a sequence, at most `max_len`.
///
/// `q`, `k`, `v`, `cu_lens` → `out [tokens, heads·head]`: softmax of `scale · q·kᵀ`, times `v`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhaShort {
    pub of: AttentionProblem,
    pub max_len: u32,
    pub dtype: DType,
}

/// Fused attention for any length by online softmax, full or causal, with the operands of [`MhaShort`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhaOnline {
    pub of: AttentionProblem,
    pub dtype: DType,
}

/// Number of keys whose scores the short kernel computes or skips together.
const KEY_STEP: u32 = 32;
/// Max number of keys of the short kernel. The scores of a warp's 16 queries take one register per thread for every two keys.
const SHORT_LIMIT: u32 = 256;

impl MhaShort {
    /// Creates the short kernel that computes the attention of `plain` for sequences of at most `max_len` tokens.
    pub fn of(plain: &MhaOnline, max_len: u32) -> Self {
        Self {
            of: plain.of,
            max_len,
            dtype: plain.dtype,
        }
    }

    /// Returns the largest supported `max_len` for a head size, or 0 if the head size is not supported. With 16-bit types, shared memory
    /// must hold a query tile and all keys and values of a sequence, and registers must hold the scores. The f32 kernel streams key tiles,
    /// so only the limit of the registers applies.
    pub fn max_len_for(head: u32, dtype: DType) -> u32 {
        if check_head(head).is_err() {
            return 0;
        }
        if !dtype.has_mma() {
            return SHORT_LIMIT;
        }
        let row = row_bytes(head, dtype);
        let keys = (SHARED_LIMIT / row).saturating_sub(64) / 2;
        (keys / KEY_STEP * KEY_STEP).min(SHORT_LIMIT)
    }

    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), AttentionError> {
        self.operands().check()?;
        if !self.of.is_full() {
            return Err(AttentionError::Full { kernel: "short" });
        }
        let limit = Self::max_len_for(self.of.head, self.dtype);
        if self.max_len == 0 || self.max_len > limit {
            return Err(AttentionError::MaxLen {
                max_len: self.max_len,
                head: self.of.head,
                dtype: self.dtype,
                limit,
            });
        }
        Ok(())
    }

    fn operands(&self) -> Operands {
        Operands {
            of: self.of,
            dtype: self.dtype,
        }
    }

    fn plan(&self) -> Tiling {
        if !self.dtype.has_mma() {
            return Tiling::simt(self.of.head);
        }
        let keys = self.max_len.next_multiple_of(KEY_STEP);
        // Sequences of at most 32 tokens would leave half of a larger tile empty.
        let rows = if keys <= 32 { 32 } else { 64 };
        Tiling {
            template: "mha_short",
            rows,
            keys,
            threads: rows * 2,
            m_tiles: 1,
            q_in_regs: self.of.head <= 128,
            shared_bytes: (rows + 2 * keys) * row_bytes(self.of.head, self.dtype),
        }
    }
}

impl MhaOnline {
    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), AttentionError> {
        self.operands().check()
    }

    pub(super) fn operands(&self) -> Operands {
        Operands {
            of: self.of,
            dtype: self.dtype,
        }
    }

    /// Returns the tiling. A warp has two 16-row tiles if its accumulators leave enough registers: two tiles halve the shared-memory reads
    /// per MMA. Larger heads have smaller query and key tiles.
    fn plan(&self) -> Tiling {
        if !self.dtype.has_mma() {
            return Tiling::simt(self.of.head);
        }
        let (m_tiles, keys, q_in_regs) = match self.of.head {
            // A causal mask, a window or a bias takes the registers that a second 16-row tile would need.
            ..=64 if !self.of.causal && self.of.by.keeps_scores() => (2, 64, true),
            ..=128 => (1, 64, true),
            _ => (1, 32, false),
        };
        let rows = 64 * m_tiles;
        Tiling {
            template: "mha_online",
            rows,
            keys,
            threads: 128,
            m_tiles,
            q_in_regs,
            shared_bytes: (rows + 4 * keys) * row_bytes(self.of.head, self.dtype),
        }
    }
}

impl Kernel for MhaShort {
    facts! { dtype: self.dtype, class: Attention }

    fn symbol(&self) -> String {
        format!(
            "mha_short_{}_{}_l{}{}",
            self.dtype,
            self.operands().heads(),
            self.max_len,
            self.operands().suffix(),
        )
    }

    fn template(&self) -> &'static str {
        self.plan().template
    }

    fn constants(&self) -> Constants {
        self.operands().constants(&self.plan())
    }

    fn params(&self) -> Vec<Param> {
        self.operands().params()
    }

    fn flop(&self) -> Size {
        attention_flop(2, self.of.heads, self.of.head)
    }

    fn max_len(&self) -> Option<u32> {
        Some(self.max_len)
    }

    fn validate(&self) -> Result<(), String> {
        limits::attention(&self.of)?;
        self.check().map_err(|e| e.to_string())
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        self.plan().launch(extents, self.of.heads)
    }

    fn threads(&self) -> u32 {
        self.plan().threads
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.operands().reference(extents, reads)
    }

    /// Returns the edge cases and a case with the max length. Lengths that the kernel does not support are removed.
    fn cases(&self) -> Vec<Case> {
        let mut cases = edge_cases();
        let longest = self.max_len;
        let lens = [longest, 1, longest.saturating_sub(1), longest];
        cases.push(Case::new("longest", &lens));
        for case in &mut cases {
            case.lens.retain(|&n| n > 0 && n <= self.max_len);
        }
        cases.retain(|case| !case.lens.is_empty());
        cases
    }

    fn tolerance(&self) -> Tolerance {
        self.operands().tolerance()
    }
}

impl Kernel for MhaOnline {
    facts! { dtype: self.dtype, class: Attention }

    fn symbol(&self) -> String {
        format!(
            "mha_online_{}_{}{}",
            self.dtype,
            self.operands().heads(),
            self.operands().suffix(),
        )
    }

    fn template(&self) -> &'static str {
        self.plan().template
    }

    fn constants(&self) -> Constants {
        self.operands().constants(&self.plan())
    }

    fn params(&self) -> Vec<Param> {
        self.operands().params()
    }

    fn flop(&self) -> Size {
        attention_flop(2, self.of.heads, self.of.head)
    }

    fn validate(&self) -> Result<(), String> {
        limits::attention(&self.of)?;
        self.check().map_err(|e| e.to_string())
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        self.plan().launch(extents, self.of.heads)
    }

    fn threads(&self) -> u32 {
        self.plan().threads
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.operands().reference(extents, reads)
    }

    fn cases(&self) -> Vec<Case> {
        let mut cases = edge_cases();
        cases.push(Case::new("long", &[300, 1, 512]));
        cases.push(Case::new("longest", &[7, 1000]));
        cases
    }

    fn tolerance(&self) -> Tolerance {
        self.operands().tolerance()
    }
}
