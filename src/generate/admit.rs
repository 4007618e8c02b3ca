//! Admission: validates requests and reserves their cache blocks.

use super::{
    AdmitError, Generator, Request, SamplingParams, Ticket, UnsupportedDraw,
    row::{Room, Row},
    source::{Parts, Source},
};
use crate::{
    runtime::batch::Limits,
    search::{Beams, Rules},
};

/// Returns the number of tokens before the first new token: the length of the prompt, or 1 (the start token) for an encoder-decoder model,
/// whose prompt is the source of its encoder.
pub(super) fn tokens_before(parts: Option<Parts>, prompt: usize) -> usize {
    match parts {
        None => prompt,
        Some(_) => 1,
    }
}

/// Capacity for sequences: the model's positions and the cache's blocks.
#[derive(Clone, Copy)]
pub(super) struct Space {
    pub(super) positions: Option<u32>,
    pub(super) parts: Option<Parts>,
    pub(super) blocks: u32,
}

impl Space {
    /// Returns the number of new tokens that fit after a prompt or source of `prompt` tokens. For an encoder-decoder model, the size of the
    /// KV cache does not lower this number, because a truncated result, such as half of a translation, would be wrong. A request that does
    /// not fit the cache is refused instead.
    fn left(self, prompt: usize, beams: Option<Beams>) -> usize {
        let before = tokens_before(self.parts, prompt);
        let positions = self.positions.map_or(usize::MAX, |n| n as usize);
        let cached = match self.parts {
            Some(_) => usize::MAX,
            None => Room::max_new(self.blocks, before, beams),
        };
        positions.saturating_sub(before).min(cached)
    }

    /// Maximum number of new tokens of a request; at least 1.
    pub(super) fn new_tokens(self, prompt: usize, options: &SamplingParams) -> usize {
        let before = tokens_before(self.parts, prompt);
        let room = self.left(prompt, options.beams);
        options.new_tokens(before, room).max(1)
    }
}

/// Returns the number of blocks that a request reserves.
pub(super) fn blocks_needed(
    parts: Option<Parts>,
    prompt: usize,
    new: usize,
    beams: Option<Beams>,
) -> u32 {
    let source = parts.map_or(0, |parts| parts.blocks_of(prompt));
    let room = Room::of(tokens_before(parts, prompt), new, beams);
    source.saturating_add(room.blocks())
}

impl Generator {
    /// Admits a request and reserves all cache blocks that it can need. The request runs from the next step on.
    ///
    /// # Errors
    /// Returns an error if the request is invalid, or [`AdmitError::Full`] if there is no room now. In both cases, the generator is
    /// unchanged.
    pub fn admit(&mut self, request: Request) -> Result<Ticket, AdmitError> {
        let n = self.admission().blocks_for(&request)?;
        let Request {
            prompt,
            mut options,
        } = request;
        let before = tokens_before(self.parts, prompt.len());
        options.rules.max_new_tokens = self.admission().space().new_tokens(prompt.len(), &options);
        if before == 1 {
            options.rules.forced_first = options.rules.forced_first.or(options.forced_bos);
        }
        // Suppress the padding token `Limits::skipped`, because no sequence may contain it.
        options.rules.suppressed.extend(self.limits.skipped);
        let mut blocks = self.blocks.admit(n).map_err(|full| AdmitError::Full {
            missing_bytes: u64::from(full.missing) * self.block_bytes,
        })?;
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        // For an encoder-decoder model, the prompt of the request is the source, and the target sequence begins with the start token.
        let (source, prompt) = match (self.parts, options.decoder_start) {
            (Some(parts), Some(start)) => {
                (Some(Source::new(parts, prompt, &mut blocks)), vec![start])
            }
            _ => (None, prompt),
        };
        // The blocks may have belonged to a canceled request whose prefill is still running on another stream. The new request therefore
        // waits for the newest prefill run.
        let filled = self.fills.last();
        let row = Row::new(ticket, prompt, source, blocks, options, filled);
        self.rows.push(row);
        Ok(ticket)
    }

    /// Checks whether [`admit`](Self::admit) would admit the request now.
    ///
    /// # Errors
    /// Returns the error that [`admit`](Self::admit) would return.
    pub fn has_room(&self, request: &Request) -> Result<(), AdmitError> {
        let n = self.admission().blocks_for(request)?;
        match n.saturating_sub(self.blocks.total() - self.blocks.held()) {
            0 => Ok(()),
            missing => Err(AdmitError::Full {
                missing_bytes: u64::from(missing) * self.block_bytes,
            }),
        }
    }

    /// Returns the admission limits, which do not depend on running requests.
    pub fn admission(&self) -> Admission {
        Admission {
            limits: self.limits,
            parts: self.parts,
            blocks: self.blocks.total(),
            block_bytes: self.block_bytes,
        }
    }

    /// Checks the options that do not depend on a prompt.
    ///
    /// # Errors
    /// Returns an error if an option is invalid. The error names the first invalid option.
    pub fn check_options(&self, options: &SamplingParams) -> Result<(), AdmitError> {
        self.admission().check_options(options)
    }
}

/// Limits of a generator, independent of running requests. A caller with a queue uses them to refuse invalid requests at
/// once.
#[derive(Clone, Copy)]
pub struct Admission {
    limits: Limits,
    parts: Option<Parts>,
    blocks: u32,
    block_bytes: u64,
}

impl Admission {
    /// Returns whether the model is an encoder-decoder model, which generates from a source instead of continuing a prompt.
    pub fn has_source(&self) -> bool {
        self.parts.is_some()
    }

    fn space(&self) -> Space {
        Space {
            positions: self.limits.longest,
            parts: self.parts,
            blocks: self.blocks,
        }
    }

    /// Returns the max number of new tokens after a prompt or source of `prompt` tokens. The model's positions limit this number. After a
    /// prompt, the size of the whole KV cache also limits it. Returns 0 if the prompt alone is too long.
    pub fn room(&self, prompt: usize, options: &SamplingParams) -> usize {
        self.space().left(prompt, options.beams)
    }

    /// Maximum number of new tokens of the request; at least 1.
    pub fn new_tokens(&self, request: &Request) -> usize {
        let Request { prompt, options } = request;
        self.space().new_tokens(prompt.len(), options)
    }

    /// Checks whether [`Generator::admit`] would admit the request if nothing else ran.
    ///
    /// # Errors
    /// Returns an error if the request would be refused, with the reason.
    pub fn check(&self, request: &Request) -> Result<(), AdmitError> {
        self.blocks_for(request).map(|_| ())
    }

    /// Returns the max number of cache blocks that a request can need.
    fn blocks_for(&self, request: &Request) -> Result<u32, AdmitError> {
        let Request { prompt, options } = request;
        self.check_request(prompt, options)?;
        let new = self.new_tokens(request);
        let n = blocks_needed(self.parts, prompt.len(), new, options.beams);
        match n > self.blocks {
            false => Ok(n),
            true => Err(AdmitError::NeverFits {
                needed_bytes: u64::from(n) * self.block_bytes,
                bytes: u64::from(self.blocks) * self.block_bytes,
            }),
        }
    }

    fn check_request(&self, prompt: &[u32], options: &SamplingParams) -> Result<(), AdmitError> {
        self.check_options(options)?;
        if prompt.is_empty() {
            return Err(AdmitError::EmptyPrompt);
        }
        let has_source = self.has_source();
        if has_source {
            self.check_source(prompt)?;
        }
        let before = tokens_before(self.parts, prompt.len());
        let longest = self.limits.longest;
        if let Some(max_length) = options.max_length.filter(|&max| before >= max) {
            return Err(AdmitError::MaxLength { before, max_length });
        }
        let new = self.space().new_tokens(prompt.len(), options);
        if let Some(positions) = longest.filter(|&n| before.saturating_add(new) > n as usize) {
            let prompt = before;
            return Err(match has_source {
                true => AdmitError::LongTarget { new, positions },
                false => AdmitError::TooLong {
                    prompt,
                    new,
                    positions,
                    extended: self.limits.extended,
                },
            });
        }
        self.check_ids(prompt)
    }

    /// Checks the options; see [`Generator::check_options`].
    fn check_options(&self, options: &SamplingParams) -> Result<(), AdmitError> {
        if options.rules.max_new_tokens == 0 {
            return Err(AdmitError::NoNewTokens);
        }
        if self.parts.is_some() {
            let start = options.decoder_start.ok_or(AdmitError::NoStart)?;
            self.check_ids(&[start])?;
        }
        let rules = &options.rules;
        let forced = rules.forced_first.iter().chain(&rules.prefix);
        let forced = forced.chain(&rules.forced_last);
        let mut forced = forced.chain(&options.forced_bos);
        if let Some(&id) = forced.find(|&&id| id >= self.limits.vocabulary) {
            let vocabulary = self.limits.vocabulary;
            return Err(AdmitError::ForcedId { id, vocabulary });
        }
        let found = options.rules.repetition_penalty;
        if !(found.is_finite() && found > 0.0) {
            return Err(AdmitError::RepetitionPenalty { found });
        }
        self.check_bias(&options.rules)?;
        if let Some(sampling) = options.sampling {
            sampling.check()?;
            if let Some(UnsupportedDraw { key, value }) = options.unsupported_draws.first().cloned()
            {
                return Err(AdmitError::UnsupportedDraw { key, value });
            }
        }
        if let Some(beams) = options.beams {
            beams.check()?;
            if options.sampling.is_some() {
                return Err(AdmitError::BeamsAndSampling);
            }
            if options.logits {
                return Err(AdmitError::BeamsAndLogits);
            }
        }
        Ok(())
    }

    /// Checks that biases and penalties are finite, and that biases refer to tokens of the vocabulary.
    fn check_bias(&self, rules: &Rules) -> Result<(), AdmitError> {
        let penalties = [
            ("frequency penalty", rules.frequency_penalty),
            ("presence penalty", rules.presence_penalty),
        ];
        for (name, found) in penalties {
            if !found.is_finite() {
                return Err(AdmitError::Penalty { name, found });
            }
        }
        let vocabulary = self.limits.vocabulary;
        for &(id, found) in &rules.bias {
            if id >= vocabulary {
                return Err(AdmitError::BiasId { id, vocabulary });
            }
            if !found.is_finite() {
                return Err(AdmitError::Bias { id, found });
            }
        }
        Ok(())
    }

    /// Checks the length and token ids of a source.
    fn check_source(&self, source: &[u32]) -> Result<(), AdmitError> {
        let tokens = source.len();
        match self.limits.longest {
            Some(positions) if tokens > positions as usize => {
                Err(AdmitError::LongSource { tokens, positions })
            }
            _ => self.check_ids(source),
        }
    }

    /// Checks that the vocabulary contains each token, and that none is the padding token.
    fn check_ids(&self, ids: &[u32]) -> Result<(), AdmitError> {
        let vocabulary = self.limits.vocabulary;
        if let Some(at) = ids.iter().position(|&id| id >= vocabulary) {
            let id = ids[at];
            return Err(AdmitError::Id { at, id, vocabulary });
        }
        let skipped = self.limits.skipped;
        match ids.iter().position(|&id| Some(id) == skipped) {
            Some(at) => Err(AdmitError::Skipped { at, id: ids[at] }),
            None => Ok(()),
        }
    }
}
