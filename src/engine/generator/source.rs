//! What a model reads before it writes: the source of a translation, which a part of its own computes once.

use super::{AdmitError, Generator, NEXT_LOGITS};
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
        Some(Self { encode, decode })
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

/// The blocks of a source of so many tokens.
pub(super) fn blocks_of(tokens: usize) -> u32 {
    u32::try_from(tokens.div_ceil(BLOCK as usize)).unwrap_or(u32::MAX)
}

impl Source {
    /// A source that lies in the first of `blocks`; what it needs none of stays there.
    pub(super) fn new(tokens: Vec<u32>, blocks: &mut Vec<u32>) -> Self {
        let rest = blocks.split_off(blocks_of(tokens.len()) as usize);
        let own = std::mem::replace(blocks, rest);
        let size = BLOCK as usize;
        let slot = |p: usize| own[p / size] * BLOCK + (p % size) as u32;
        Self {
            slots: (0..tokens.len()).map(slot).collect(),
            blocks: own,
            tokens,
            is_encoded: false,
        }
    }

    pub(super) fn is_encoded(&self) -> bool {
        self.is_encoded
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
        by.lens.push(self.tokens.len() as u32);
        by.slots.extend_from_slice(&self.slots);
    }
}

impl Generator {
    /// Computes sources that wait, each whole, and of one run as many as the tokens of prompts that a step may take.
    pub(super) fn encode(&mut self) -> Result<(), EngineError> {
        let Some(parts) = self.parts else {
            return Ok(());
        };
        let (mut ids, mut lens) = (Vec::new(), Vec::new());
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
            past.slots.extend_from_slice(&source.slots);
            taken.push(at);
        }
        if taken.is_empty() {
            return Ok(());
        }
        let batch = Batch::from_packed(ids, &lens)?.with_past(past)?;
        let batch = batch.for_part(parts.encode);
        batch.check(&self.limits)?;
        self.executor.fill(&batch)?;
        for at in taken {
            if let Some(source) = &mut self.rows[at].source {
                source.is_encoded = true;
            }
        }
        Ok(())
    }

    /// Whether a source can be read.
    pub(super) fn check_source(&self, source: &[u32]) -> Result<(), AdmitError> {
        let tokens = source.len();
        match self.limits.longest {
            Some(positions) if tokens > positions as usize => {
                Err(AdmitError::LongSource { tokens, positions })
            }
            _ => self.check_ids(source),
        }
    }
}
