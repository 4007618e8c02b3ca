//! Index of the waiting requests, for schedulers that select by length and deadline. The index is kept between decisions. The cost of a
//! decision therefore depends on the number of selected requests, not on the number of waiting requests.

use std::collections::BTreeMap;

use crate::schedule::{Decision, Micros, Refusal, View, Waiting, queue::Soonest};

/// Key of a request among the requests of its length: the deadline, then the id. Requests without a deadline have the maximum deadline.
type Entry = (Micros, u64);

/// Sentinel that compares greater than or equal to every entry.
const LAST: Entry = (Micros::MAX, u64::MAX);

pub(in crate::schedule) fn entry(waiting: &Waiting) -> Entry {
    (waiting.deadline.unwrap_or(Micros::MAX), waiting.id)
}

/// Requests grouped by length. Each group is ordered by deadline.
#[derive(Debug, Default)]
pub(in crate::schedule) struct Index {
    /// Id of the newest request that was seen.
    last: Option<u64>,
    /// Requests by length, for lengths below [`N_SHORT_LENGTHS`].
    short: Vec<Soonest>,
    /// Bit set of the lengths below [`N_SHORT_LENGTHS`] that have a request.
    occupied: Vec<u64>,
    /// Requests whose length is at least [`N_SHORT_LENGTHS`].
    long: BTreeMap<u32, Soonest>,
    n: usize,
    tokens: u64,
    /// Requests by deadline. May contain requests that are no longer waiting.
    soonest: Soonest,
    /// Whether the index orders requests by length in addition to ordering them by deadline.
    by_length: bool,
    /// Earliest entry of each length below [`N_SHORT_LENGTHS`]. The entries of the lengths in `changed` are outdated.
    firsts: Firsts,
    changed: Vec<u32>,
}

/// Number of lengths that [`Firsts`] covers, starting at 0. Longer requests are searched length by length.
const N_SHORT_LENGTHS: u32 = 1 << 13;

/// Tournament tree over the lengths, which finds the earliest entry of a range of lengths. Each length has a leaf. The inner nodes are
/// stored before the leaves, as in a binary heap. Each node holds the length with the earliest entry among the leaves below the node.
#[derive(Debug, Default)]
struct Firsts {
    keys: Vec<Entry>,
    winners: Vec<u16>,
}

impl Firsts {
    /// Grows the tree to contain `leaf`.
    fn grow(&mut self, leaf: usize) {
        let leaves = (leaf + 1).next_power_of_two();
        self.keys.resize(leaves, LAST);
        self.winners = vec![0; leaves];
        self.winners.extend((0..leaves).map(|leaf| leaf as u16));
        for node in (1..leaves).rev() {
            self.winners[node] = self.earlier(self.winners[2 * node], self.winners[2 * node + 1]);
        }
    }

    fn earlier(&self, a: u16, b: u16) -> u16 {
        match self.keys[usize::from(a)] <= self.keys[usize::from(b)] {
            true => a,
            false => b,
        }
    }

    fn set(&mut self, leaf: usize, key: Entry) {
        if leaf >= self.keys.len() {
            if key == LAST {
                return;
            }
            self.grow(leaf);
        }
        if self.keys[leaf] == key {
            return;
        }
        self.keys[leaf] = key;
        let mut node = (leaf + self.keys.len()) / 2;
        while node > 0 {
            let winner = self.earlier(self.winners[2 * node], self.winners[2 * node + 1]);
            let before = std::mem::replace(&mut self.winners[node], winner);
            // The winner of this node has not changed and is not `leaf`, so the nodes above do not change, either.
            if winner == before && usize::from(winner) != leaf {
                break;
            }
            node /= 2;
        }
    }

    /// Returns the earliest entry of all lengths up to `tokens`.
    fn earliest_to(&self, tokens: u32) -> Option<(Entry, u32)> {
        let leaves = self.keys.len();
        if leaves == 0 {
            return None;
        }
        let leaf = (tokens as usize).min(leaves - 1);
        let mut node = leaf + leaves;
        let mut found = leaf as u16;
        while node > 1 {
            // If the node is a right child, its left sibling is entirely within the range.
            if node % 2 == 1 {
                found = self.earlier(self.winners[node - 1], found);
            }
            node /= 2;
        }
        let key = self.keys[usize::from(found)];
        (key != LAST).then_some((key, u32::from(found)))
    }
}

impl Index {
    /// Creates an index of deadlines only.
    pub fn of_deadlines() -> Self {
        Self::default()
    }

    /// Creates an index of deadlines and lengths.
    pub fn by_length() -> Self {
        Self {
            by_length: true,
            ..Self::default()
        }
    }

    /// Adds the requests that arrived since the last call and returns them. Also removes requests that left the queue without a decision,
    /// because their clients disconnected.
    pub fn follow<'v>(&mut self, view: &View<'v>) -> impl Iterator<Item = &'v Waiting> + use<'v> {
        let new = view.waiting.after(self.last);
        for waiting in new.clone() {
            self.last = Some(waiting.id);
            if let Some(deadline) = waiting.deadline {
                self.soonest.push(deadline, waiting.id);
            }
            self.insert(waiting);
        }
        if self.by_length && self.n != view.waiting.len() {
            let short = self.short.iter_mut().zip(0_u32..);
            let long = self.long.iter_mut().map(|(&tokens, all)| (all, tokens));
            let (mut n, mut sum) = (0, 0);
            for (requests, tokens) in short.chain(long) {
                requests.retain(|id| view.waiting.get(id).is_some());
                n += requests.len();
                sum += u64::from(tokens) * requests.len() as u64;
                if tokens < N_SHORT_LENGTHS {
                    mark(&mut self.occupied, tokens, !requests.is_empty());
                    self.changed.push(tokens);
                }
            }
            self.long.retain(|_, requests| !requests.is_empty());
            (self.n, self.tokens) = (n, sum);
        }
        new
    }

    pub fn insert(&mut self, waiting: &Waiting) {
        self.put(waiting.tokens, entry(waiting));
    }

    /// Adds a request, either a new one or one that was removed before.
    pub fn put(&mut self, tokens: u32, entry: Entry) {
        if !self.by_length {
            return;
        }
        let requests = match tokens < N_SHORT_LENGTHS {
            true => {
                let at = tokens as usize;
                if at >= self.short.len() {
                    self.short.resize_with(at + 1, Soonest::default);
                    self.occupied.resize(at / 64 + 1, 0);
                }
                &mut self.short[at]
            }
            false => self.long.entry(tokens).or_default(),
        };
        requests.push(entry.0, entry.1);
        let is_first = requests.peek() == Some(entry);
        self.n += 1;
        self.tokens += u64::from(tokens);
        if is_first && tokens < N_SHORT_LENGTHS {
            mark(&mut self.occupied, tokens, true);
            self.changed.push(tokens);
        }
    }

    fn of_length(&mut self, tokens: u32) -> Option<&mut Soonest> {
        match tokens < N_SHORT_LENGTHS {
            true => self.short.get_mut(tokens as usize),
            false => self.long.get_mut(&tokens),
        }
    }

    pub fn remove(&mut self, tokens: u32, entry: Entry) {
        let Some(requests) = self.of_length(tokens) else {
            return;
        };
        // The request is usually the first of its length.
        let is_first = requests.peek() == Some(entry);
        match is_first {
            true => drop(requests.pop()),
            false => {
                let before = requests.len();
                requests.retain(|id| id != entry.1);
                if requests.len() == before {
                    return;
                }
            }
        }
        let is_empty = requests.is_empty();
        self.n -= 1;
        self.tokens -= u64::from(tokens);
        match tokens < N_SHORT_LENGTHS {
            true => {
                if is_empty {
                    mark(&mut self.occupied, tokens, false);
                }
                if is_first && self.changed.last() != Some(&tokens) {
                    self.changed.push(tokens);
                }
            }
            false if is_empty => {
                self.long.remove(&tokens);
            }
            false => {}
        }
    }

    /// Refuses the requests whose deadline has passed.
    pub fn refuse_expired(&mut self, view: &View<'_>, decision: &mut Decision) {
        while let Some((deadline, id)) = self.soonest.peek()
            && deadline < view.now
        {
            self.soonest.pop();
            if let Some(waiting) = view.waiting.get(id) {
                self.remove(waiting.tokens, (deadline, id));
                decision.refuse.push((id, Refusal::Expired));
            }
        }
    }

    pub fn n(&self) -> usize {
        self.n
    }

    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns the smallest length that is at least `tokens` and has requests, together with these requests.
    fn next_length(&self, tokens: u32) -> Option<(u32, &Soonest)> {
        let first = tokens as usize;
        let mut word = first / 64;
        // Mask out the lengths below `tokens`.
        let mut mask = u64::MAX << (first % 64);
        while let Some(&bits) = self.occupied.get(word) {
            let bits = bits & mask;
            if bits != 0 {
                let at = word * 64 + bits.trailing_zeros() as usize;
                return Some((at as u32, self.short.get(at)?));
            }
            (word, mask) = (word + 1, u64::MAX);
        }
        let mut long = self.long.range(tokens..);
        long.next().map(|(&tokens, requests)| (tokens, requests))
    }

    /// Returns the shortest request. Among requests of equal length, returns the one with the earliest deadline.
    pub fn shortest(&self) -> Option<(u32, Entry)> {
        self.shortest_from(0)
    }

    /// Returns the first request of the smallest length that is at least `tokens`.
    pub fn shortest_from(&self, tokens: u32) -> Option<(u32, Entry)> {
        let (tokens, requests) = self.next_length(tokens)?;
        Some((tokens, requests.peek()?))
    }

    /// Returns the request with the earliest deadline among those with at most `tokens` tokens.
    pub fn soonest_to(&mut self, tokens: u32) -> Option<(u32, Entry)> {
        while let Some(at) = self.changed.pop() {
            let first = self.short.get(at as usize).and_then(Soonest::peek);
            self.firsts.set(at as usize, first.unwrap_or(LAST));
        }
        let mut found = self.firsts.earliest_to(tokens);
        if tokens >= N_SHORT_LENGTHS {
            let long = self.long.range(N_SHORT_LENGTHS..=tokens);
            for (&tokens, requests) in long {
                let first = requests.peek().map(|entry| (entry, tokens));
                found = match (found, first) {
                    (Some(a), Some(b)) => Some(a.min(b)),
                    (a, b) => a.or(b),
                };
            }
        }
        found.map(|(entry, tokens)| (tokens, entry))
    }

    /// Returns how many requests fit into `room` tokens together, if the shortest are taken first.
    pub fn n_that_fit(&self, mut room: u64) -> usize {
        let (mut n, mut from) = (0, 0);
        while let Some((tokens, requests)) = self.next_length(from) {
            let fit = (room / u64::from(tokens.max(1))).min(requests.len() as u64);
            n += fit as usize;
            room -= fit * u64::from(tokens);
            if fit < requests.len() as u64 {
                break;
            }
            from = tokens + 1;
        }
        n
    }
}

fn mark(occupied: &mut [u64], tokens: u32, is: bool) {
    let bit = 1 << (tokens % 64);
    if let Some(word) = occupied.get_mut(tokens as usize / 64) {
        match is {
            true => *word |= bit,
            false => *word &= !bit,
        }
    }
}
