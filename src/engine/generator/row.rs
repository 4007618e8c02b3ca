//! A request that runs: its sequences, their slots, and how they go on.

use super::{Event, Generate, Reason, Ticket, source::Source};
use crate::{
    kernels::cache::BLOCK,
    search::{BeamSearch, Beams, Philox, greedy, log_probability},
};

/// What a step gives of a row, and whether it is its last.
pub(super) type Advanced = Result<(Vec<Event>, bool), String>;

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
    ) -> Self {
        let mut row = Self {
            ticket,
            n_prompt: prompt.len(),
            lanes: Vec::new(),
            cached: 0,
            blocks,
            source,
            search: options.beams.map(BeamSearch::new),
            options,
        };
        row.lanes.push(Lane {
            slots: (0..prompt.len()).map(|p| row.own_slot(0, p)).collect(),
            tokens: prompt,
        });
        row
    }

    /// Whether its next tokens can be computed: its source was, if it has one.
    pub(super) fn is_ready(&self) -> bool {
        self.source.as_ref().is_none_or(Source::is_encoded)
    }

    /// All blocks that it had.
    pub(super) fn into_blocks(self) -> Vec<u32> {
        let of_source = self.source.map(Source::into_blocks).unwrap_or_default();
        self.blocks.into_iter().chain(of_source).collect()
    }

    /// Goes on by the logits behind each lane, all of whose tokens are in the cache.
    pub(super) fn advance(&mut self, logits: &mut [&mut [f32]]) -> Advanced {
        self.has_numbers(logits)?;
        match self.search.is_some() {
            true => self.search_on(logits),
            false => self.write_on(logits[0]),
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

    /// Whether all logits are numbers.
    fn has_numbers(&self, logits: &[&mut [f32]]) -> Result<(), String> {
        let n_new = self.lanes[0].tokens.len() - self.n_prompt;
        let nan = logits
            .iter()
            .find_map(|x| x.iter().position(|x| x.is_nan()));
        match nan {
            None => Ok(()),
            Some(at) => Err(format!(
                "the logit of token {at} for new token {n_new} is NaN; the weights are damaged, or overflow the storage type: try bf16 or f32"
            )),
        }
    }

    /// Why nothing can be written on.
    fn no_token(&self) -> String {
        let n_new = self.lanes[0].tokens.len() - self.n_prompt;
        format!("the rules allow no token for new token {n_new}")
    }

    /// Adds the token behind a single sequence.
    fn write_on(&mut self, logits: &mut [f32]) -> Advanced {
        let options = &self.options;
        let tokens = &self.lanes[0].tokens;
        let plain = options.log_probabilities.then(|| logits.to_vec());
        options.rules.apply(logits, tokens, self.n_prompt);
        if logits.iter().all(|&x| x == f32::NEG_INFINITY) {
            return Err(self.no_token());
        }
        let id = match &options.sampling {
            None => greedy(logits),
            Some(sampling) => {
                let position = tokens.len() as u64;
                sampling.choose(logits, Philox::new(options.seed).uniform(position, 0))
            }
        };
        let ticket = self.ticket;
        let mut events = vec![Event::Token {
            ticket,
            id,
            log_probability: plain.map(|plain| log_probability(&plain, id)),
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
    fn search_on(&mut self, logits: &mut [&mut [f32]]) -> Advanced {
        let (beams, Some(mut search)) = (self.options.beams.map_or(1, |b| b.n), self.search.take())
        else {
            return Err("there are no beams to search".to_owned());
        };
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
                false => Ok((self.found(&search), true)),
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
    fn found(&self, search: &BeamSearch) -> Vec<Event> {
        let ticket = self.ticket;
        let hypotheses = search.hypotheses();
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
        });
        [Event::Found { ticket, hypotheses }]
            .into_iter()
            .chain(tokens)
            .chain([Event::Done { ticket, reason }])
            .collect()
    }
}
