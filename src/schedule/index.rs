//! What waits, ordered for schedulers that choose by length and deadline. It is kept between decisions, so that a decision
//! costs what it chooses, and not what waits.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, VecDeque},
};

use super::{Decision, Micros, Refusal, View, Waiting};

/// A request among those of its length: by deadline, then by arrival. None is the last deadline.
type Entry = (Micros, u64);

pub(super) fn entry(waiting: &Waiting) -> Entry {
    (waiting.deadline.unwrap_or(Micros::MAX), waiting.id)
}

/// Requests by length, those of one length by deadline.
#[derive(Debug, Default)]
pub(super) struct Index {
    /// The newest request that was seen.
    last: Option<u64>,
    lengths: BTreeMap<u32, VecDeque<Entry>>,
    n: usize,
    tokens: u64,
    /// Deadlines, also of requests that have gone.
    soonest: BinaryHeap<Reverse<(Entry, u32)>>,
    /// Whether `lengths` is kept.
    by_length: bool,
    /// The first request of each length up to [`MOST_LENGTHS`].
    firsts: Firsts,
}

/// Lengths for which [`Firsts`] are kept; the deadlines of longer requests are looked at one length after another.
const MOST_LENGTHS: u32 = 1 << 13;

/// The earliest entry of any range of lengths, by a tree of minima: the leaf of a length is behind as many inner nodes as there
/// are leaves.
#[derive(Debug, Default)]
struct Firsts {
    nodes: Vec<Option<(Entry, u32)>>,
}

fn earlier(a: Option<(Entry, u32)>, b: Option<(Entry, u32)>) -> Option<(Entry, u32)> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

impl Firsts {
    fn set(&mut self, tokens: u32, entry: Option<Entry>) {
        if tokens >= MOST_LENGTHS {
            return;
        }
        let leaf = tokens as usize;
        if leaf >= self.nodes.len() / 2 {
            if entry.is_none() {
                return;
            }
            let leaves = (leaf + 1).next_power_of_two();
            let old = std::mem::replace(&mut self.nodes, vec![None; 2 * leaves]);
            let n_old = old.len() / 2;
            self.nodes[leaves..leaves + n_old].copy_from_slice(&old[n_old..]);
            for node in (1..leaves).rev() {
                self.nodes[node] = earlier(self.nodes[2 * node], self.nodes[2 * node + 1]);
            }
        }
        let mut node = leaf + self.nodes.len() / 2;
        self.nodes[node] = entry.map(|entry| (entry, tokens));
        while node > 1 {
            node /= 2;
            self.nodes[node] = earlier(self.nodes[2 * node], self.nodes[2 * node + 1]);
        }
    }

    /// The earliest of the lengths up to this one.
    fn earliest_to(&self, tokens: u32) -> Option<(Entry, u32)> {
        let leaves = self.nodes.len() / 2;
        if leaves == 0 {
            return None;
        }
        let leaf = (tokens as usize).min(leaves - 1);
        let mut node = leaf + leaves;
        let mut found = self.nodes[node];
        while node > 1 {
            // What lies left of a right child is in the range.
            if node % 2 == 1 {
                found = earlier(found, self.nodes[node - 1]);
            }
            node /= 2;
        }
        found
    }
}

impl Index {
    /// An index of deadlines alone.
    pub fn of_deadlines() -> Self {
        Self::default()
    }

    /// An index of lengths, too.
    pub fn by_length() -> Self {
        Self {
            by_length: true,
            ..Self::default()
        }
    }

    /// Takes in what has come, and leaves out what has gone without a decision. The requests that came since the last time
    /// are returned.
    pub fn follow<'v>(&mut self, view: &View<'v>) -> &'v [Waiting] {
        let new = match self.last {
            Some(last) => view.waiting.partition_point(|w| w.id <= last),
            None => 0,
        };
        let new = &view.waiting[new..];
        for waiting in new {
            self.last = Some(waiting.id);
            if waiting.deadline.is_some() {
                self.soonest.push(Reverse((entry(waiting), waiting.tokens)));
            }
            self.insert(waiting);
        }
        if self.by_length && self.n != view.waiting.len() {
            self.lengths.values_mut().for_each(|requests| {
                requests.retain(|&(_, id)| view.find(id).is_some());
            });
            self.lengths.retain(|&tokens, requests| {
                self.firsts.set(tokens, requests.front().copied());
                !requests.is_empty()
            });
            self.n = self.lengths.values().map(VecDeque::len).sum();
            self.tokens = self
                .lengths
                .iter()
                .map(|(&l, r)| u64::from(l) * r.len() as u64)
                .sum();
        }
        new
    }

    pub fn insert(&mut self, waiting: &Waiting) {
        self.put(waiting.tokens, entry(waiting));
    }

    /// Adds a request, or puts one back.
    pub fn put(&mut self, tokens: u32, entry: Entry) {
        if !self.by_length {
            return;
        }
        let requests = self.lengths.entry(tokens).or_default();
        // Deadlines mostly rise with arrival.
        let at = match requests.back() {
            Some(&last) if last > entry => requests.partition_point(|&e| e < entry),
            _ => requests.len(),
        };
        requests.insert(at, entry);
        if at == 0 {
            self.firsts.set(tokens, Some(entry));
        }
        self.n += 1;
        self.tokens += u64::from(tokens);
    }

    pub fn remove(&mut self, tokens: u32, entry: Entry) {
        let Some(requests) = self.lengths.get_mut(&tokens) else {
            return;
        };
        if let Ok(at) = requests.binary_search(&entry) {
            requests.remove(at);
            if at == 0 {
                self.firsts.set(tokens, requests.front().copied());
            }
            self.n -= 1;
            self.tokens -= u64::from(tokens);
        }
        if requests.is_empty() {
            self.lengths.remove(&tokens);
        }
    }

    /// Refuses requests whose deadline is past, and tells whether there were any.
    pub fn refuse_expired(&mut self, view: &View<'_>, decision: &mut Decision) {
        while let Some(&Reverse(((deadline, id), tokens))) = self.soonest.peek()
            && deadline < view.now
        {
            self.soonest.pop();
            if view.find(id).is_some() {
                self.remove(tokens, (deadline, id));
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

    /// The shortest request, of those the one with the earliest deadline.
    pub fn shortest(&self) -> Option<(u32, Entry)> {
        let (&tokens, requests) = self.lengths.first_key_value()?;
        Some((tokens, *requests.front()?))
    }

    /// The first request of the shortest length from this one on.
    pub fn shortest_from(&self, tokens: u32) -> Option<(u32, Entry)> {
        let (&tokens, requests) = self.lengths.range(tokens..).next()?;
        Some((tokens, *requests.front()?))
    }

    /// The request with the earliest deadline of those with at most so many tokens.
    pub fn soonest_to(&self, tokens: u32) -> Option<(u32, Entry)> {
        let mut found = self.firsts.earliest_to(tokens);
        if tokens >= MOST_LENGTHS {
            let long = self.lengths.range(MOST_LENGTHS..=tokens);
            for (&tokens, requests) in long {
                let first = requests.front().map(|&entry| (entry, tokens));
                found = earlier(found, first);
            }
        }
        found.map(|(entry, tokens)| (tokens, entry))
    }

    /// How many of the shortest fit into so many tokens together.
    pub fn n_that_fit(&self, mut room: u64) -> usize {
        let mut n = 0;
        for (&tokens, requests) in &self.lengths {
            let fit = (room / u64::from(tokens.max(1))).min(requests.len() as u64);
            n += fit as usize;
            room -= fit * u64::from(tokens);
            if fit < requests.len() as u64 {
                break;
            }
        }
        n
    }
}
