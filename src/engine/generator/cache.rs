//! Sizes of the KV cache for given and for unknown requests.

use super::{
    Backend, Engine, EngineError, Generate, Parts,
    admit::{Space, blocks_needed, tokens_before},
    check_generating,
};
use crate::kernels::{cache::BLOCK, decoding::Advance};

/// Cache for a request without a limit of new tokens, unless there are fewer positions: this many bytes, or this many new tokens if
/// those need more.
const NO_LIMIT_BYTES: u64 = 1 << 30;
const NO_LIMIT_TOKENS: usize = 4096;

impl Engine {
    /// Bytes of KV cache that prompts of these lengths need to run at once. A request without a limit of new tokens is given room for
    /// all positions that are left, but no more than 1 GiB or 4,096 new tokens, whichever is more.
    ///
    /// # Errors
    /// An engine that was not built by [`Builder::generating`](super::Builder::generating).
    pub fn cache_bytes_needed(
        &self,
        prompts: &[usize],
        options: &Generate,
    ) -> Result<u64, EngineError> {
        check_generating(self.program())?;
        let parts = Parts::of(self.program());
        let positions = self.limits.longest;
        let space = Space {
            positions,
            parts,
            blocks: u32::MAX,
        };
        let block_bytes = self.program().block_bytes();
        let sequences = options.beams.map_or(1, |beams| beams.n.max(1));
        let unlimited = NO_LIMIT_BYTES / block_bytes.max(1) * u64::from(BLOCK);
        let unlimited = (unlimited as usize / sequences).max(NO_LIMIT_TOKENS);
        let blocks = prompts.iter().map(|&prompt| {
            let prompt = prompt.max(1);
            let before = tokens_before(parts, prompt);
            let left = positions.map_or(usize::MAX, |n| (n as usize).saturating_sub(before));
            let new = space.new_tokens(prompt, options);
            // More than there are positions for is refused, and needs nothing.
            let new = new.min(left).max(1);
            let new = match options.has_no_limit() {
                true => new.min(unlimited),
                false => new,
            };
            u64::from(blocks_needed(parts, prompt, new, options.beams))
        });
        Ok(blocks.sum::<u64>() * block_bytes)
    }

    /// Default size of the KV cache in bytes, for unknown requests: eight texts of all positions, at most 4,096 each, and, on a device,
    /// as many as it decodes at once, as far as half of the memory goes that is free now.
    ///
    /// # Errors
    /// As [`cache_bytes_needed`](Self::cache_bytes_needed), and a device that does not answer.
    pub fn usual_cache_bytes(&self, options: &Generate) -> Result<u64, EngineError> {
        /// Maximum length of a text that counts.
        const POSITIONS: u32 = 4096;
        let all = self.limits().longest.unwrap_or(POSITIONS).min(POSITIONS) as usize;
        let new = options.rules.max_new_tokens.clamp(1, all);
        let mut limited = options.clone();
        limited.rules.max_new_tokens = new;
        let one = self.cache_bytes_needed(&[(all - new).max(1)], &limited)?;
        let eight = one.saturating_mul(8);
        match &self.backend {
            Backend::Cpu(_) => Ok(eight),
            Backend::Cuda(model) => {
                let (free, _) = model.device().memory()?;
                let most = one.saturating_mul(Advance::ROWS as u64);
                Ok(most.min(free / 2).max(eight))
            }
        }
    }

    /// Bytes of KV cache to write on from prompts of these lengths, however many there are: for those that fit the model, as many at
    /// once as a device decodes or a CPU has use for, the longest ones together, and on a device half of the memory that is free
    /// now at most, but always enough for each by itself.
    ///
    /// # Errors
    /// As [`usual_cache_bytes`](Self::usual_cache_bytes).
    pub fn cache_bytes_at_most(
        &self,
        prompts: &[usize],
        options: &Generate,
    ) -> Result<u64, EngineError> {
        /// Rows of a step of a CPU, from which on more are no faster.
        const CPU_ROWS: usize = 64;
        let rows = match &self.backend {
            Backend::Cpu(_) => CPU_ROWS,
            Backend::Cuda(_) => Advance::ROWS,
        };
        let fits = |n: &usize| self.limits.longest.is_none_or(|most| *n <= most as usize);
        let mut lens: Vec<usize> = prompts.iter().copied().filter(fits).collect();
        lens.sort_unstable_by_key(|&n| std::cmp::Reverse(n));
        lens.truncate((rows / options.beams.map_or(1, |beams| beams.n.max(1))).max(1));
        let longest = [lens.first().copied().unwrap_or(1)];
        let (one, all) = (
            self.cache_bytes_needed(&longest, options)?,
            self.cache_bytes_needed(&lens, options)?,
        );
        match &self.backend {
            Backend::Cpu(_) if options.has_no_limit() => Ok(all.min(4 * NO_LIMIT_BYTES).max(one)),
            Backend::Cpu(_) => Ok(all.max(one)),
            Backend::Cuda(model) => {
                let (free, _) = model.device().memory()?;
                Ok(all.min(free / 2).max(one))
            }
        }
    }
}
