//! What a model reads before it writes: the source of a translation, which a part of its own computes once.

use super::{Generator, NEXT_LOGITS};
use crate::{
    engine::EngineError,
    kernels::cache::BLOCK,
    program::Program,
    runtime::batch::{Batch, Past, Sources},
};

/// The parts of a model that writes from a source.
#[derive(Clone, Copy)]
pub(super) struct Parts {
    /// The part that runs once, over the source.
    pub(super) encode: u32,
    /// The part that writes.
    pub(super) decode: u32,
    /// Whether a source is kept as one position, however long it is.
    pub(super) one_position: bool,
}

impl Parts {
    /// `None` where the model is one graph, which writes on from its prompt.
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

    /// The positions that a source of so many tokens is kept as.
    pub(super) fn positions(self, tokens: usize) -> usize {
        match self.one_position {
            true => tokens.min(1),
            false => tokens,
        }
    }

    /// The blocks of a source of so many tokens.
    pub(super) fn blocks_of(self, tokens: usize) -> u32 {
        let blocks = self.positions(tokens).div_ceil(BLOCK as usize);
        u32::try_from(blocks).unwrap_or(u32::MAX)
    }
}

/// The source of a request.
pub(super) struct Source {
    tokens: Vec<u32>,
    /// By position; all beams read them.
    slots: Vec<u32>,
    blocks: Vec<u32>,
    is_encoded: bool,
}

impl Source {
    /// A source that lies in the first of `blocks`; what it needs none of stays there.
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

    /// The slot of each of its tokens.
    pub(super) fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// Adds it to what a run attends to.
    pub(super) fn attended(&self, by: &mut Sources) {
        by.lens.push(self.slots.len() as u32);
        by.slots.extend_from_slice(&self.slots);
    }
}

impl Generator {
    /// Computes sources that wait, each whole, and of one run as many as the tokens of prompts that a step may take.
    pub(super) fn encode(&mut self) -> Result<(), EngineError> {
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
            if !taken.is_empty() && n > self.most_prompt_tokens {
                break;
            }
            ids.extend_from_slice(&source.tokens);
            lens.push(source.tokens.len() as u32);
            past.cached.push(0);
            // All tokens of a source that is kept as one position have its slot.
            let slot = |i: usize| source.slots[i.min(source.slots.len() - 1)];
            past.slots.extend((0..source.tokens.len()).map(slot));
            seeds.push(row.seed());
            taken.push(at);
        }
        if taken.is_empty() || !self.fills.have_place()? {
            return Ok(());
        }
        let batch = Batch::from_packed(ids, &lens)?.with_past(past)?;
        let batch = batch.for_part(parts.encode).with_seeds(seeds)?;
        batch.check(&self.limits)?;
        let filled = self.executor.fill(&batch)?;
        let filled = self.fills.note(filled);
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
