//! A request that runs: its sequences, their slots, and how they go on.

use std::sync::Arc;

use super::{Event, Failure, Generate, Reason, Ticket, source::Source};
use crate::{
    kernels::{
        cache::BLOCK,
        decoding::{Beam, Choice, Chosen},
    },
    runtime::cuda::{CudaError, Fence},
    search::{BeamSearch, Beams, Hypothesis, largest, log_sum},
};

/// What a step gives of a row, and whether it is its last.
pub(super) type Advanced = Result<(Vec<Event>, bool), Failure>;

/// A request that runs.
pub(super) struct Row {
    pub(super) ticket: Ticket,
    n_prompt: usize,
    /// One, or a beam each; all of one length. Until the prompt is in the cache there is one.
    pub(super) lanes: Vec<Lane>,
    /// Tokens whose keys and values are in the cache, of each lane.
    pub(super) cached: usize,
    blocks: Vec<u32>,
    /// What the model reads before it writes, where it reads something.
    pub(super) source: Option<Source>,
    /// What reads its prompt or its source on a stream of its own, and before that what may still write to its blocks there, while
    /// that is on its way.
    pub(super) filled: Option<Arc<Fence>>,
    /// Its row in the loop of a device that decodes it, the first one of beams.
    pub(super) row: Option<usize>,
    /// New tokens that the device was asked for.
    pub(super) n_asked: usize,
    /// Whether such a device can be told how it goes on ([`Choice::encode`]), and tells all that is asked.
    suits_device: bool,
    search: Option<BeamSearch>,
    options: Generate,
}

/// A sequence in the making. Beams share the slots of what they have in common; each writes new positions into slots of its own.
#[derive(Clone)]
pub(super) struct Lane {
    pub(super) tokens: Vec<u32>,
    /// By position.
    pub(super) slots: Vec<u32>,
}

/// The blocks that a request reserves. The last token is never in the cache: nothing comes behind it.
#[derive(Clone, Copy)]
pub(super) struct Room {
    /// Blocks of the prompt, and of all that a single lane writes.
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

    /// Maximum number of new tokens after `prompt` others that `blocks` blocks have room for.
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
    /// A request of which nothing is computed yet, with the blocks that its [`Room`] asks for.
    pub(super) fn new(
        ticket: Ticket,
        prompt: Vec<u32>,
        source: Option<Source>,
        blocks: Vec<u32>,
        options: Generate,
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
            n_asked: 0,
            suits_device: false,
            search: options.beams.map(BeamSearch::new),
            options,
        };
        row.lanes.push(Lane {
            slots: (0..prompt.len()).map(|p| row.own_slot(0, p)).collect(),
            tokens: prompt,
        });
        let options = &row.options;
        let host_tells = options.most_probable > 0 || options.logits;
        row.suits_device = row.choice(0).encode().is_some() && !host_tells;
        row
    }

    /// How the single sequence goes on, or a beam.
    fn choice(&self, nth: usize) -> Choice {
        Choice {
            beam: self.options.beams.map(|of| Beam { of, nth }),
            rules: self.options.rules.clone(),
            sampling: self.options.sampling,
            seed: self.options.seed,
            n_prompt: self.n_prompt,
            log_probability: self.options.log_probabilities,
        }
    }

    /// Whether a device's loop can decode it: no more beams and no longer lists of tokens than the loop takes.
    pub(super) fn suits_device(&self) -> bool {
        self.suits_device
    }

    /// Whether such a device can go on with it now.
    pub(super) fn is_ready_for_device(&self) -> bool {
        self.suits_device() && self.is_ready() && (self.row.is_some() || self.open() == 1)
    }

    /// Forgets a fence that was passed.
    pub(super) fn note_filled(&mut self) -> Result<(), CudaError> {
        if let Some(filled) = &self.filled
            && filled.is_passed()?
        {
            self.filled = None;
        }
        Ok(())
    }

    /// What such a device is told of each of its rows.
    pub(super) fn encoded(&self) -> Vec<Vec<i32>> {
        let choices = (0..self.n_rows()).map(|nth| self.choice(nth).encode());
        choices.map(Option::unwrap_or_default).collect()
    }

    /// Rows that it takes in the loop of a device.
    pub(super) fn n_rows(&self) -> usize {
        self.options.beams.map_or(1, |beams| beams.n)
    }

    /// The rows that it has there.
    pub(super) fn device_rows(&self) -> Option<std::ops::Range<usize>> {
        self.row.map(|first| first..first + self.n_rows())
    }

    pub(super) fn beams(&self) -> Option<&Beams> {
        self.options.beams.as_ref()
    }

    /// Tokens that it has in the end at most.
    pub(super) fn most_tokens(&self) -> usize {
        self.n_prompt + self.options.rules.max_new_tokens
    }

    /// Keys that the next step on a device attends to, of its own or of its source, whichever are more.
    pub(super) fn most_keys(&self) -> usize {
        (self.n_prompt + self.n_asked).max(self.source_slots().len())
    }

    /// Whether it goes on behind the steps that are on their way.
    pub(super) fn awaits_steps(&self) -> bool {
        self.n_asked < self.options.rules.max_new_tokens
    }

    /// Lets a device's loop decode it in a row.
    pub(super) fn take_row(&mut self, row: usize) {
        self.row = Some(row);
        self.n_asked = self.lanes[0].tokens.len() - self.n_prompt;
    }

    /// The slots of all positions that a lane comes to write; the last token is never in the cache.
    pub(super) fn all_slots(&self, lane: usize) -> Vec<u32> {
        let positions = 0..self.most_tokens() - 1;
        positions.map(|p| self.own_slot(lane, p)).collect()
    }

    /// Goes on by what a device chose, and by what its search has found where that is done. `wrong` is the beam that has a logit
    /// which is no number, where one has.
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
            Chosen::NotANumber => Err(self.no_number(value as usize, wrong)),
            Chosen::Token(id) if self.search.is_some() => {
                // The device knows which beam goes on behind which; here only the number of tokens counts.
                self.lanes[0].tokens.push(id);
                Ok((Vec::new(), false))
            }
            _ => self.accept(chosen, value, Vec::new(), Vec::new()),
        }
    }

    /// The seed of all that is drawn for it.
    pub(super) fn seed(&self) -> u64 {
        self.options.seed
    }

    /// Whether its next tokens can be computed: its source was, if it has one.
    pub(super) fn is_ready(&self) -> bool {
        self.source.as_ref().is_none_or(Source::is_encoded)
    }

    /// The slots of its source, where it has one.
    pub(super) fn source_slots(&self) -> &[u32] {
        self.source.as_ref().map_or(&[], Source::slots)
    }

    /// All blocks that it has.
    #[cfg(test)]
    pub(super) fn blocks(&self) -> impl Iterator<Item = u32> {
        let of_source = self.source.iter().flat_map(Source::blocks);
        self.blocks.iter().chain(of_source).copied()
    }

    /// All blocks that it had.
    pub(super) fn into_blocks(self) -> Vec<u32> {
        let of_source = self.source.map(Source::into_blocks).unwrap_or_default();
        self.blocks.into_iter().chain(of_source).collect()
    }

    /// Goes on by the logits behind each lane, all of whose tokens are in the cache.
    pub(super) fn advance(&mut self, logits: &mut [&mut [f32]]) -> Advanced {
        match self.search.take() {
            Some(search) => self.search_on(search, logits),
            None => self.write_on(logits[0]),
        }
    }

    /// The slot that a lane writes a position into.
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

    /// Tokens of each lane that are not in the cache yet.
    pub(super) fn open(&self) -> usize {
        self.lanes[0].tokens.len() - self.cached
    }

    /// New tokens so far.
    fn n_new(&self) -> usize {
        self.lanes[0].tokens.len() - self.n_prompt
    }

    /// What is wrong with a logit.
    fn no_number(&self, token: usize, beam: Option<usize>) -> Failure {
        Failure::NotANumber {
            step: self.n_new(),
            beam,
            token,
        }
    }

    /// Why nothing can be written on.
    fn no_token(&self) -> Failure {
        Failure::NoToken { step: self.n_new() }
    }

    /// Adds the token behind a single sequence.
    fn write_on(&mut self, logits: &[f32]) -> Advanced {
        let (chosen, value) = self.choice(0).choose(logits, &self.lanes[0].tokens);
        let most_probable = match chosen {
            Chosen::Token(_) => most_probable(logits, self.options.most_probable),
            _ => Vec::new(),
        };
        let logits = match self.options.logits {
            true => logits.to_vec(),
            false => Vec::new(),
        };
        self.accept(chosen, value, most_probable, logits)
    }

    /// Adds a token that was chosen, with its log-probability and those of the most probable ones, and the logits of its place.
    fn accept(
        &mut self,
        chosen: Chosen,
        value: f32,
        most_probable: Vec<(u32, f32)>,
        logits: Vec<f32>,
    ) -> Advanced {
        let id = match chosen {
            Chosen::Token(id) => id,
            Chosen::NotANumber => return Err(self.no_number(value as usize, None)),
            Chosen::Idle | Chosen::NoToken | Chosen::Found => return Err(self.no_token()),
        };
        let options = &self.options;
        let tokens = &self.lanes[0].tokens;
        let ticket = self.ticket;
        let mut events = vec![Event::Token {
            ticket,
            id,
            log_probability: options.log_probabilities.then_some(value),
            most_probable,
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
            true => Some(Reason::End),
            false => (n_new == self.options.rules.max_new_tokens).then_some(Reason::Length),
        };
        events.extend(reason.map(|reason| Event::Done { ticket, reason }));
        Ok((events, reason.is_some()))
    }

    /// Lets beams go on, or ends them.
    fn search_on(&mut self, mut search: BeamSearch, logits: &mut [&mut [f32]]) -> Advanced {
        let is_wrong = |x: &f32| x.is_nan() || *x == f32::INFINITY;
        let wrong = logits.iter().enumerate().find_map(|(beam, x)| {
            let token = x.iter().position(is_wrong)?;
            Some((beam, token))
        });
        if let Some((beam, token)) = wrong {
            return Err(self.no_number(token, Some(beam)));
        }
        let beams = self.options.beams.map_or(1, |b| b.n);
        let rules = self.options.rules.clone();
        // Behind the prompt all beams are the one that there is.
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

    /// The events of a search that is done.
    fn found(&self, hypotheses: Vec<Hypothesis>) -> Vec<Event> {
        let ticket = self.ticket;
        let best = hypotheses.first().map(|h| h.tokens.clone());
        let best = best.unwrap_or_default();
        let reason = match best.last() {
            Some(&id) if self.options.rules.ends(id) => Reason::End,
            _ => Reason::Length,
        };
        let tokens = best.into_iter().map(|id| Event::Token {
            ticket,
            id,
            log_probability: None,
            most_probable: Vec::new(),
            logits: Vec::new(),
        });
        [Event::Found { ticket, hypotheses }]
            .into_iter()
            .chain(tokens)
            .chain([Event::Done { ticket, reason }])
            .collect()
    }
}

/// The `n` most probable tokens with their log-probabilities, the most probable first.
fn most_probable(logits: &[f32], n: usize) -> Vec<(u32, f32)> {
    if n == 0 {
        return Vec::new();
    }
    let sum = log_sum(logits);
    let all = largest(logits, n).into_iter();
    all.map(|(id, logit)| (id, logit - sum)).collect()
}
