//! Default sizes of the KV cache.

use super::{
    GenerateError, GenerationModel, LoadedModel, Parts, SamplingParams,
    admit::{Space, blocks_needed, tokens_before},
    check_generating,
};
use crate::kernels::{cache::BLOCK, decoding::Advance};

/// Max cache bytes to plan for the new tokens of a request that does not limit their number. If [`NO_LIMIT_TOKENS`] new tokens per sequence
/// need more bytes, their bytes are the maximum instead. In addition, the model's positions limit the tokens per sequence.
const NO_LIMIT_BYTES: u64 = 1 << 30;
const NO_LIMIT_TOKENS: usize = 4096;

impl GenerationModel<'_> {
    pub(crate) fn cache_bytes_needed(
        &self,
        prompts: &[usize],
        options: &SamplingParams,
    ) -> Result<u64, GenerateError> {
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
            // Admission refuses a request for more positions than the model has, so more blocks are never needed.
            let new = new.min(left).max(1);
            let new = match options.has_no_limit() {
                true => new.min(unlimited),
                false => new,
            };
            u64::from(blocks_needed(parts, prompt, new, options.beams))
        });
        Ok(blocks.sum::<u64>() * block_bytes)
    }

    pub(crate) fn default_cache_bytes(
        &self,
        options: &SamplingParams,
    ) -> Result<u64, GenerateError> {
        /// Max number of positions to plan for per sequence.
        const POSITIONS: u32 = 4096;
        let all = self.limits.longest.unwrap_or(POSITIONS).min(POSITIONS) as usize;
        let new = options.rules.max_new_tokens.clamp(1, all);
        let mut limited = options.clone();
        limited.rules.max_new_tokens = new;
        let one = self.cache_bytes_needed(&[(all - new).max(1)], &limited)?;
        let eight = one.saturating_mul(8);
        match self.model {
            LoadedModel::Cpu(_) => Ok(eight),
            LoadedModel::Cuda(model) => {
                let (free, _) = model.device().memory()?;
                let max = one.saturating_mul(Advance::ROWS as u64);
                Ok(max.min(free / 2).max(eight))
            }
        }
    }

    pub(crate) fn cache_bytes_at_most(
        &self,
        prompts: &[usize],
        options: &SamplingParams,
    ) -> Result<u64, GenerateError> {
        /// Max number of concurrent sequences on a CPU. More do not increase throughput.
        const CPU_ROWS: usize = 64;
        let rows = match self.model {
            LoadedModel::Cpu(_) => CPU_ROWS,
            LoadedModel::Cuda(_) => Advance::ROWS,
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
        match self.model {
            LoadedModel::Cpu(_) if options.has_no_limit() => {
                Ok(all.min(4 * NO_LIMIT_BYTES).max(one))
            }
            LoadedModel::Cpu(_) => Ok(all.max(one)),
            LoadedModel::Cuda(model) => {
                let (free, _) = model.device().memory()?;
                Ok(all.min(free / 2).max(one))
            }
        }
    }
}
