//! Sources of encoder-decoder models, such as the sentence to translate. The encoder part of the model runs once for each
//! source.

use super::{Generator, NEXT_LOGITS};
use crate::{
    generate::GenerateError,
    kernels::cache::BLOCK,
    program::Program,
    runtime::batch::{Batch, Past, Sources},
};

/// The parts of an encoder-decoder model.
#[derive(Clone, Copy)]
pub(super) struct Parts {
    /// Index of the encoder part, which runs once for each source.
    pub(super) encode: u32,
    /// Index of the decoder part.
    pub(super) decode: u32,
    /// Whether a source of any length occupies a single position of the KV cache.
    pub(super) one_position: bool,
}

impl Parts {
    /// Returns the parts of an encoder-decoder model; `None` for a decoder-only model, which is a single graph.
    pub(super) fn of(program: &Program) -> Option<Self> {
        let writes = |&part: &u32| {
            let mut outputs = program.outputs_of(part);
            outputs.any(|(name, _)| name == NEXT_LOGITS)
        };
        let all = 0..program.parts.len() as u32;
        let decode = all.clone().find(writes)?;
        let encode = all.into_iter().find(|&part| part != decode)?;
        let kept = program.caches.iter().find(|cache| cache.part == encode);
        let one_position = kept.is_some_and(|cache| cache.one_position);
        Some(Self {
            encode,
            decode,
            one_position,
        })
    }

    /// Number of positions that a source of `tokens` tokens occupies.
    pub(super) fn positions(self, tokens: usize) -> usize {
        match self.one_position {
            true => tokens.min(1),
            false => tokens,
        }
    }

    /// Number of blocks that a source of `tokens` tokens occupies.
    pub(super) fn blocks_of(self, tokens: usize) -> u32 {
        let blocks = self.positions(tokens).div_ceil(BLOCK as usize);
        u32::try_from(blocks).unwrap_or(u32::MAX)
    }
}

/// The source of a request.
pub(super) struct Source {
    tokens: Vec<u32>,
    /// Slots by position. All beams share them.
    slots: Vec<u32>,
    blocks: Vec<u32>,
    is_encoded: bool,
}

impl Source {
    /// Creates a source, and moves the blocks that it needs from the front of `blocks` into it.
    pub(super) fn new(parts: Parts, tokens: Vec<u32>, blocks: &mut Vec<u32>) -> Self {
        let rest = blocks.split_off(parts.blocks_of(tokens.len()) as usize);
        let own = std::mem::replace(blocks, rest);
        let size = BLOCK as usize;
        let slot = |p: usize| own[p / size] * BLOCK + (p % size) as u32;
        Self {
            slots: (0..parts.positions(tokens.len())).map(slot).collect(),
            blocks: own,
            tokens,
            is_encoded: false,
        }
    }

    pub(super) fn is_encoded(&self) -> bool {
        self.is_encoded
    }

    #[cfg(test)]
    pub(super) fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    pub(super) fn into_blocks(self) -> Vec<u32> {
        self.blocks
    }

    /// Returns the slots of the source's positions.
    pub(super) fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// Appends the length and the slots of this source to `sources`, the list of the sources that a batch attends to.
    pub(super) fn append_to(&self, sources: &mut Sources) {
        sources.lens.push(self.slots.len() as u32);
        sources.slots.extend_from_slice(&self.slots);
    }
}

impl Generator {
    /// Encodes waiting sources in order, up to the maximum number of prompt tokens per step. A source is not split.
    pub(super) fn encode(&mut self) -> Result<(), GenerateError> {
        let Some(parts) = self.parts else {
            return Ok(());
        };
        let (mut ids, mut lens, mut seeds) = (Vec::new(), Vec::new(), Vec::new());
        let mut past = Past {
            blocks: u64::from(self.blocks.total()),
            ..Past::default()
        };
        let mut taken = Vec::new();
        for (at, row) in self.rows.iter().enumerate() {
            let Some(source) = row.source.as_ref().filter(|s| !s.is_encoded) else {
                continue;
            };
            let n = ids.len() + source.tokens.len();
            if !taken.is_empty() && n > self.max_prompt_tokens {
                break;
            }
            ids.extend_from_slice(&source.tokens);
            lens.push(source.tokens.len() as u32);
            past.cached.push(0);
            // If the source occupies one position, all of its tokens use the slot of that position.
            let slot = |i: usize| source.slots[i.min(source.slots.len() - 1)];
            past.slots.extend((0..source.tokens.len()).map(slot));
            seeds.push(row.seed());
            taken.push(at);
        }
        if taken.is_empty() || !self.fills.has_room()? {
            return Ok(());
        }
        let batch = Batch::from_packed(ids, &lens)?.with_past(past)?;
        let batch = batch.for_part(parts.encode).with_seeds(seeds)?;
        batch.check(&self.limits)?;
        let filled = self.executor.fill(&batch)?;
        let filled = self.fills.push(filled);
        for at in taken {
            let row = &mut self.rows[at];
            row.filled.clone_from(&filled);
            if let Some(source) = &mut row.source {
                source.is_encoded = true;
            }
        }
        Ok(())
    }
}
