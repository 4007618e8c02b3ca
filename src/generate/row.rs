//! Running requests: their sequences, cache slots and token selection.

use std::sync::Arc;

use super::{Event, Failure, Reason, SamplingParams, Ticket, source::Source};
use crate::{
    kernels::{
        cache::BLOCK,
        decoding::{Beam, Chosen, DeviceSamplingParams},
    },
    runtime::cuda::{CudaError, Fence},
    search::{BeamSearch, Beams, Hypothesis, largest, log_sum},
};

/// Events of a row in one step, and whether the row has ended.
pub(super) type Advanced = Result<(Vec<Event>, bool), Failure>;

/// A running request.
pub(super) struct Row {
    pub(super) ticket: Ticket,
    n_prompt: usize,
    /// One sequence, or one per beam; all have the same length. Beams are created once the prompt is in the cache.
    pub(super) lanes: Vec<Lane>,
    /// Number of tokens of each lane (sequence or beam) whose keys and values are in the cache.
    pub(super) cached: usize,
    blocks: Vec<u32>,
    /// Source of an encoder-decoder model.
    pub(super) source: Option<Source>,
    /// Fence of the prefill run that processes the prompt or source on a separate stream. Until that run is enqueued, the fence of the
    /// newest earlier run, which may still write to the request's blocks if a canceled request had them before. `None` once the fence has
    /// passed.
    pub(super) filled: Option<Arc<Fence>>,
    /// The request's row in the device's decode loop; the first row of a beam search.
    pub(super) row: Option<usize>,
    /// Number of new tokens enqueued on the device.
    pub(super) n_enqueued: usize,
    /// Whether the device can select the request's tokens ([`DeviceSamplingParams::encode`]) and return all requested values.
    suits_device: bool,
    search: Option<BeamSearch>,
    options: SamplingParams,
}

/// A sequence or beam that is being generated. Beams share the slots of their common prefix, and each beam writes new positions into its
/// own slots.
#[derive(Clone)]
pub(super) struct Lane {
    pub(super) tokens: Vec<u32>,
    /// Cache slots by position.
    pub(super) slots: Vec<u32>,
}

/// Numbers of blocks that a request reserves. The last token needs no room in the cache, because no token attends to it.
#[derive(Clone, Copy)]
pub(super) struct Room {
    /// Blocks of the prompt or, without beams, of the whole sequence.
    shared: u32,
    /// Blocks of each beam's new positions.
    of_beam: u32,
    beams: u32,
}

impl Room {
    pub(super) fn of(prompt: usize, new: usize, beams: Option<Beams>) -> Self {
        let blocks = |positions: usize| {
            u32::try_from(positions.div_ceil(BLOCK as usize)).unwrap_or(u32::MAX)
        };
        match beams {
            None => Self {
                shared: blocks(prompt.saturating_add(new) - 1),
                of_beam: 0,
                beams: 0,
            },
            Some(beams) => Self {
                shared: blocks(prompt),
                of_beam: blocks(new - 1),
                beams: u32::try_from(beams.n).unwrap_or(u32::MAX),
            },
        }
    }

    /// Maximum number of new tokens after `prompt` tokens that fit in `blocks` blocks.
    pub(super) fn max_new(blocks: u32, prompt: usize, beams: Option<Beams>) -> usize {
        let size = BLOCK as usize;
        let tokens = match beams {
            None => (blocks as usize * size).saturating_sub(prompt),
            Some(beams) => {
                let left = (blocks as usize).saturating_sub(prompt.div_ceil(size));
                left / beams.n.max(1) * size
            }
        };
        tokens.saturating_add(1)
    }

    pub(super) fn blocks(self) -> u32 {
        let own = self.of_beam.saturating_mul(self.beams);
        self.shared.saturating_add(own)
    }
}

impl Row {
    /// Creates a request before its first step. `blocks` must contain the number of blocks that its [`Room`] reserves.
    pub(super) fn new(
        ticket: Ticket,
        prompt: Vec<u32>,
        source: Option<Source>,
        blocks: Vec<u32>,
        options: SamplingParams,
        filled: Option<Arc<Fence>>,
    ) -> Self {
        let mut row = Self {
            ticket,
            n_prompt: prompt.len(),
            lanes: Vec::new(),
            cached: 0,
            blocks,
            source,
            filled,
            row: None,
            n_enqueued: 0,
            suits_device: false,
            search: options.beams.map(BeamSearch::new),
            options,
        };
        row.lanes.push(Lane {
            slots: (0..prompt.len()).map(|p| row.own_slot(0, p)).collect(),
            tokens: prompt,
        });
        let options = &row.options;
        let host_tells = options.top_tokens > 0 || options.logits;
        row.suits_device = row.choice(0).encode().is_some() && !host_tells;
        row
    }

    /// Returns the parameters for selecting the next token. In a beam search, they include the index `nth` of a beam.
    fn choice(&self, nth: usize) -> DeviceSamplingParams {
        DeviceSamplingParams {
            beam: self.options.beams.map(|of| Beam { of, nth }),
            rules: self.options.rules.clone(),
            sampling: self.options.sampling,
            seed: self.options.seed,
            n_prompt: self.n_prompt,
            log_probability: self.options.log_probabilities,
        }
    }

    /// Returns whether the device's loop can select the request's tokens and return all requested values.
    pub(super) fn suits_device(&self) -> bool {
        self.suits_device
    }

    /// Returns whether the device can decode the request's next token now.
    pub(super) fn is_ready_for_device(&self) -> bool {
        self.suits_device() && self.is_ready() && (self.row.is_some() || self.open() == 1)
    }

    /// Drops the fence of the prefill run if it has passed.
    pub(super) fn note_filled(&mut self) -> Result<(), CudaError> {
        if let Some(filled) = &self.filled
            && filled.is_passed()?
        {
            self.filled = None;
        }
        Ok(())
    }

    /// Returns the encoded sampling parameters of each of the request's rows on the device.
    pub(super) fn encoded(&self) -> Vec<Vec<i32>> {
        let choices = (0..self.n_rows()).map(|nth| self.choice(nth).encode());
        choices.map(Option::unwrap_or_default).collect()
    }

    /// Number of rows that the request occupies in the device's loop.
    pub(super) fn n_rows(&self) -> usize {
        self.options.beams.map_or(1, |beams| beams.n)
    }

    /// Returns the request's rows in the device's loop.
    pub(super) fn device_rows(&self) -> Option<std::ops::Range<usize>> {
        self.row.map(|first| first..first + self.n_rows())
    }

    pub(super) fn beams(&self) -> Option<&Beams> {
        self.options.beams.as_ref()
    }

    /// Maximum number of tokens, including the prompt.
    pub(super) fn max_tokens(&self) -> usize {
        self.n_prompt + self.options.rules.max_new_tokens
    }

    /// Max number of keys that a query in the next step on a device attends to, in the sequence or in the source.
    pub(super) fn max_keys(&self) -> usize {
        (self.n_prompt + self.n_enqueued).max(self.source_slots().len())
    }

    /// Returns whether the request may need further steps in addition to those that are enqueued.
    pub(super) fn awaits_steps(&self) -> bool {
        self.n_enqueued < self.options.rules.max_new_tokens
    }

    /// Assigns the request to a row of the device's loop.
    pub(super) fn take_row(&mut self, row: usize) {
        self.row = Some(row);
        self.n_enqueued = self.lanes[0].tokens.len() - self.n_prompt;
    }

    /// Returns the slots of all positions of a lane, except for that of the last token, which is never in the cache.
    pub(super) fn all_slots(&self, lane: usize) -> Vec<u32> {
        let positions = 0..self.max_tokens() - 1;
        positions.map(|p| self.own_slot(lane, p)).collect()
    }

    /// Adds a token that the device selected, or the result of the device's beam search. `wrong` is the beam with a NaN or infinite logit,
    /// if there is one.
    pub(super) fn accept_computed(
        &mut self,
        chosen: Chosen,
        value: f32,
        wrong: Option<usize>,
        found: impl FnOnce() -> Vec<Hypothesis>,
    ) -> Advanced {
        self.cached = self.lanes[0].tokens.len();
        match chosen {
            Chosen::Found => Ok((self.found(found()), true)),
            Chosen::NotANumber => Err(self.bad_logit(value as usize, wrong)),
            Chosen::Token(id) if self.search.is_some() => {
                // Only the device stores which beam each beam continues. On the host, only the number of tokens matters.
                self.lanes[0].tokens.push(id);
                Ok((Vec::new(), false))
            }
            _ => self.accept(chosen, value, Vec::new(), Vec::new()),
        }
    }

    /// Seed of the request's sampling.
    pub(super) fn seed(&self) -> u64 {
        self.options.seed
    }

    /// Returns whether the next tokens can be computed: the source, if any, has been encoded.
    pub(super) fn is_ready(&self) -> bool {
        self.source.as_ref().is_none_or(Source::is_encoded)
    }

    /// Returns the slots of the source; empty without a source.
    pub(super) fn source_slots(&self) -> &[u32] {
        self.source.as_ref().map_or(&[], Source::slots)
    }

    /// Returns all blocks of the request.
    #[cfg(test)]
    pub(super) fn blocks(&self) -> impl Iterator<Item = u32> {
        let of_source = self.source.iter().flat_map(Source::blocks);
        self.blocks.iter().chain(of_source).copied()
    }

    /// Returns all blocks of the request for reuse.
    pub(super) fn into_blocks(self) -> Vec<u32> {
        let of_source = self.source.map(Source::into_blocks).unwrap_or_default();
        self.blocks.into_iter().chain(of_source).collect()
    }

    /// Selects the next tokens from the logits of each lane. All previous tokens must be in the cache.
    pub(super) fn advance(&mut self, logits: &mut [&mut [f32]]) -> Advanced {
        match self.search.take() {
            Some(search) => self.advance_beams(search, logits),
            None => self.advance_single(logits[0]),
        }
    }

    /// Returns the cache slot into which a lane writes the key and value of a position.
    fn own_slot(&self, lane: usize, position: usize) -> u32 {
        let size = BLOCK as usize;
        let (first, position) = match self.options.beams {
            Some(beams) if position >= self.n_prompt => {
                let room = Room::of(
                    self.n_prompt,
                    self.options.rules.max_new_tokens,
                    Some(beams),
                );
                let first = room.shared as usize + lane * room.of_beam as usize;
                (first, position - self.n_prompt)
            }
            _ => (0, position),
        };
        self.blocks[first + position / size] * BLOCK + (position % size) as u32
    }

    /// Number of tokens of each lane that are not in the cache yet.
    pub(super) fn open(&self) -> usize {
        self.lanes[0].tokens.len() - self.cached
    }

    fn n_new(&self) -> usize {
        self.lanes[0].tokens.len() - self.n_prompt
    }

    /// Builds the error for a NaN or infinite logit.
    fn bad_logit(&self, token: usize, beam: Option<usize>) -> Failure {
        Failure::NotANumber {
            step: self.n_new(),
            beam,
            token,
        }
    }

    /// Builds the error for rules that allow no token.
    fn no_token(&self) -> Failure {
        Failure::NoToken { step: self.n_new() }
    }

    /// Selects the next token of a single sequence.
    fn advance_single(&mut self, logits: &[f32]) -> Advanced {
        let (chosen, value) = self.choice(0).choose(logits, &self.lanes[0].tokens);
        let top_tokens = match chosen {
            Chosen::Token(_) => top_tokens(logits, self.options.top_tokens),
            _ => Vec::new(),
        };
        let logits = match self.options.logits {
            true => logits.to_vec(),
            false => Vec::new(),
        };
        self.accept(chosen, value, top_tokens, logits)
    }

    /// Appends the selected token, and returns it with its log-probability, the most probable tokens and the logits of its position.
    fn accept(
        &mut self,
        chosen: Chosen,
        value: f32,
        top_tokens: Vec<(u32, f32)>,
        logits: Vec<f32>,
    ) -> Advanced {
        let id = match chosen {
            Chosen::Token(id) => id,
            Chosen::NotANumber => return Err(self.bad_logit(value as usize, None)),
            Chosen::Idle | Chosen::NoToken | Chosen::Found => return Err(self.no_token()),
        };
        let options = &self.options;
        let tokens = &self.lanes[0].tokens;
        let ticket = self.ticket;
        let mut events = vec![Event::Token {
            ticket,
            id,
            log_probability: options.log_probabilities.then_some(value),
            top_tokens,
            logits,
        }];
        let slot = (tokens.len() + 1 < self.n_prompt + options.rules.max_new_tokens)
            .then(|| self.own_slot(0, tokens.len()));
        let ends = options.rules.ends(id);
        let lane = &mut self.lanes[0];
        lane.tokens.push(id);
        lane.slots.extend(slot);
        let n_new = lane.tokens.len() - self.n_prompt;
        let reason = match ends {
            true => Some(self.end_of(n_new)),
            false => (n_new == self.options.rules.max_new_tokens).then_some(Reason::Length),
        };
        events.extend(reason.map(|reason| Event::Done { ticket, reason }));
        Ok((events, reason.is_some()))
    }

    /// Advances all beams by one token, or ends the search.
    fn advance_beams(&mut self, mut search: BeamSearch, logits: &mut [&mut [f32]]) -> Advanced {
        let is_wrong = |x: &f32| x.is_nan() || *x == f32::INFINITY;
        let wrong = logits.iter().enumerate().find_map(|(beam, x)| {
            let token = x.iter().position(is_wrong)?;
            Some((beam, token))
        });
        if let Some((beam, token)) = wrong {
            return Err(self.bad_logit(token, Some(beam)));
        }
        let beams = self.options.beams.map_or(1, |b| b.n);
        let rules = self.options.rules.clone();
        // In the first step after the prompt, there is a single lane, so all beams start from its logits.
        let mut copies: Vec<Vec<f32>> = Vec::new();
        let mut all: Vec<&mut [f32]> = match self.lanes.len() < beams {
            true => {
                copies.resize(beams, logits[0].to_vec());
                copies.iter_mut().map(Vec::as_mut_slice).collect()
            }
            false => logits.iter_mut().map(|x| &mut **x).collect(),
        };
        let n_prompt = self.n_prompt;
        let prompt = self.lanes[0].tokens[..n_prompt].to_vec();
        let apply = |logits: &mut [f32], new: &[u32]| {
            let tokens: Vec<u32> = prompt.iter().chain(new).copied().collect();
            rules.apply(logits, &tokens, n_prompt);
        };
        let most = rules.max_new_tokens;
        let steps = search.step(&mut all, &apply, &rules.end, most);
        let Some(steps) = steps else {
            return match search.hypotheses().is_empty() {
                true => Err(self.no_token()),
                false => Ok((self.found(search.hypotheses()), true)),
            };
        };
        let position = self.lanes[0].tokens.len();
        let before = std::mem::take(&mut self.lanes);
        for (lane, step) in steps.iter().enumerate() {
            let parent = before.get(step.parent).unwrap_or(&before[0]);
            let mut lane_of = parent.clone();
            lane_of.tokens.push(step.token);
            lane_of.slots.push(self.own_slot(lane, position));
            self.lanes.push(lane_of);
        }
        self.search = Some(search);
        Ok((Vec::new(), false))
    }

    /// Returns the reason for a sequence that ended with an end token after `n_new` new tokens. If the rules force an end token at the
    /// maximum length, the reason is [`Reason::Length`], because the text was cut.
    fn end_of(&self, n_new: usize) -> Reason {
        let rules = &self.options.rules;
        match n_new == rules.max_new_tokens && !rules.forced_last.is_empty() {
            true => Reason::Length,
            false => Reason::End,
        }
    }

    /// Returns the events of a finished search.
    fn found(&self, hypotheses: Vec<Hypothesis>) -> Vec<Event> {
        let ticket = self.ticket;
        let best = hypotheses.first().map(|h| h.tokens.clone());
        let best = best.unwrap_or_default();
        let reason = match best.last() {
            Some(&id) if self.options.rules.ends(id) => self.end_of(best.len()),
            _ => Reason::Length,
        };
        let tokens = best.into_iter().map(|id| Event::Token {
            ticket,
            id,
            log_probability: None,
            top_tokens: Vec::new(),
            logits: Vec::new(),
        });
        [Event::Found { ticket, hypotheses }]
            .into_iter()
            .chain(tokens)
            .chain([Event::Done { ticket, reason }])
            .collect()
    }
}

/// Returns the `n` most probable tokens with their log-probabilities, most probable first.
fn top_tokens(logits: &[f32], n: usize) -> Vec<(u32, f32)> {
    if n == 0 {
        return Vec::new();
    }
    let sum = log_sum(logits);
    let all = largest(logits, n).into_iter();
    all.map(|(id, logit)| (id, logit - sum)).collect()
}
