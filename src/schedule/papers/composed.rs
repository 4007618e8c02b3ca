//! The schedulers of TurboTransformers and TCB. Each is composed of three policies: when to schedule, which requests to select and which
//! layout to use.

use std::collections::HashMap;

use super::{
    das::{Chosen, das, first_fit, slotted},
    dp::partition,
    index::{Index, entry},
};
use crate::schedule::{
    Decision, Ids, Layout, Micros, Planned, Refusal, Rows, Scheduler, View, Waiting, costs::equal,
};

/// Policy that determines when to schedule (TurboTransformers 5).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Trigger {
    /// Schedule whenever the device is idle.
    Hungry,
    /// Schedule once `most` requests are waiting or the oldest request has waited for `timeout`. Schedule earlier if the oldest request's
    /// waiting time plus the running time of a batch of all waiting requests reaches half of `slo`.
    Lazy {
        timeout: Micros,
        most: usize,
        slo: Micros,
    },
}

/// Selection policy: which requests run first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Order {
    /// In order of arrival.
    Fcfs,
    /// Shortest first.
    Sjf,
    /// Earliest deadline first.
    Edf,
    /// By utility and deadline (TCB, algorithm 1), for `rows` rows of `length` tokens.
    Das {
        rows: u32,
        length: u32,
        dominance: f64,
    },
    /// DAS for the rows of [`BatchLayout::Rows`], which are then cut into slots (TCB, algorithm 2). With other layouts, which have no
    /// slots, all requests are selected.
    SlottedDas { dominance: f64 },
}

/// Batch layout policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BatchLayout {
    /// One request per batch.
    Single,
    /// Padded to the length of the longest request, with at most `most` requests per batch.
    Padded { most: usize },
    /// Padded, split into batches by dynamic programming (TurboTransformers, algorithm 3). All selected requests are scheduled at once. A
    /// device runs the batches with short requests first.
    Dp { most: usize },
    /// Rows of `length` tokens, each shared by several requests (TCB 4.1). A request longer than a row is refused.
    Rows { rows: u32, length: u32 },
}

/// Scheduler composed of three policies.
pub struct Composed {
    when: Trigger,
    which: Order,
    how: BatchLayout,
    index: Index,
    /// Memory of the largest lane at the last decision, in bytes. If this memory decreases, waiting requests may no longer fit.
    bytes: u64,
    /// Slots of the running batches, by lane.
    slots: HashMap<usize, Slots>,
    /// Ids of the requests that are already part of the current decision.
    gone: Ids,
}

/// The slots of a running batch.
struct Slots {
    length: u32,
    /// Number of unfinished requests in each slot.
    left: Vec<usize>,
    slot_of: HashMap<u64, usize>,
}

impl Composed {
    pub fn new(when: Trigger, which: Order, how: BatchLayout) -> Self {
        Self {
            when,
            which,
            how,
            index: match which {
                Order::Fcfs => Index::of_deadlines(),
                _ => Index::by_length(),
            },
            bytes: u64::MAX,
            slots: HashMap::new(),
            gone: Ids::default(),
        }
    }

    /// Returns the maximum number of tokens that a request may have: the length of a row for a layout with rows and for DAS, and no limit
    /// otherwise.
    fn max_tokens(&self) -> u32 {
        match (self.which, self.how) {
            (_, BatchLayout::Rows { length, .. }) | (Order::Das { length, .. }, _) => length,
            _ => u32::MAX,
        }
    }

    /// Returns the bytes of a batch with a single request of `tokens` tokens. In a layout with rows, the request takes up a whole row.
    fn alone(&self, view: &View<'_>, tokens: u32) -> u64 {
        let (layout, tokens) = match self.how {
            BatchLayout::Rows { length, .. } => (
                Layout::Rows {
                    length,
                    slot: length,
                },
                length,
            ),
            _ => (Layout::Padded, tokens),
        };
        view.costs.bytes(layout, &equal(1, u64::from(tokens)))
    }

    /// Registers new requests. Refuses requests whose deadline has passed and requests that no lane can run.
    fn admit(&mut self, view: &View<'_>, decision: &mut Decision) {
        self.gone.clear();
        let new = self.index.follow(view);
        self.index.refuse_expired(view, decision);
        let bytes = view.max_bytes();
        // If the largest lane has less memory than before, requests that are already waiting may no longer fit.
        let is_less = std::mem::replace(&mut self.bytes, bytes) > bytes;
        let n = |looks: bool| if looks { usize::MAX } else { 0 };
        let all = view.waiting.iter().take(n(is_less));
        let suspects = all.chain(new.take(n(!is_less)));
        self.gone.extend(decision.refuse.iter().map(|&(id, _)| id));
        // Memory grows with the number of tokens, so every request of at most `fits_to` tokens fits.
        let mut fits_to = 0;
        for waiting in suspects {
            if waiting.tokens <= fits_to {
                continue;
            }
            let is_large =
                waiting.tokens > self.max_tokens() || self.alone(view, waiting.tokens) > bytes;
            if !is_large {
                fits_to = waiting.tokens;
                continue;
            }
            if self.gone.insert(waiting.id) {
                self.index.remove(waiting.tokens, entry(waiting));
                decision.refuse.push((waiting.id, Refusal::TooLarge));
            }
        }
    }

    /// Returns `Ok` if it is time to schedule. The error is the time until which to wait, or `None` if no request is waiting.
    fn is_time(&self, view: &View<'_>) -> Result<(), Option<Micros>> {
        if self.when == Trigger::Hungry && self.which != Order::Fcfs {
            return match self.index.n() {
                0 => Err(None),
                _ => Ok(()),
            };
        }
        let rest = || view.waiting.iter().filter(|w| !self.gone.contains(&w.id));
        let Some(oldest) = rest().next() else {
            return Err(None);
        };
        let Trigger::Lazy { timeout, most, slo } = self.when else {
            return Ok(());
        };
        let n = rest().take(most).count();
        let longest = rest().take(most).map(|w| w.tokens).max().unwrap_or(0);
        let extents = equal(n as u64, u64::from(longest));
        let estimate = view.costs.time(Layout::Padded, &extents);
        let half = Micros(slo.0 / 2).since(estimate);
        let at = oldest.arrived.plus(timeout.min(half));
        match n >= most || view.now >= at {
            true => Ok(()),
            false => Err(Some(at)),
        }
    }

    /// Returns the next request, in the order of the selection policy, that fits into `bytes` of memory when it runs alone. For
    /// [`Order::Fcfs`], `next` is the queue position to continue from.
    fn peek(&mut self, next: &mut usize, view: &View<'_>, bytes: u64) -> Option<Chosen> {
        if self.which == Order::Edf {
            let longest = self.longest_that_fits(view, bytes);
            return self.index.soonest_to(longest);
        }
        let fits = |tokens| self.alone(view, tokens) <= bytes;
        match self.which {
            Order::Fcfs => loop {
                let (waiting, at) = view.waiting.at(*next)?;
                *next = at;
                if !self.gone.contains(&waiting.id) && fits(waiting.tokens) {
                    return Some((waiting.tokens, entry(waiting)));
                }
                *next += 1;
            },
            // If the shortest request does not fit, no other request fits.
            _ => self.index.shortest().filter(|&(tokens, _)| fits(tokens)),
        }
    }

    /// Returns the maximum number of tokens of a request that fits into `bytes`. The binary search relies on memory being monotonic in
    /// tokens.
    fn longest_that_fits(&self, view: &View<'_>, bytes: u64) -> u32 {
        let (mut fits, mut not) = (0, u32::MAX);
        if self.alone(view, not) <= bytes {
            return not;
        }
        while fits + 1 < not {
            let middle = fits.midpoint(not);
            match self.alone(view, middle) <= bytes {
                true => fits = middle,
                false => not = middle,
            }
        }
        fits
    }

    fn take(&mut self, (tokens, entry): Chosen) {
        self.index.remove(tokens, entry);
        self.gone.insert(entry.1);
    }

    /// Selects the requests to run, in order. [`BatchLayout::Single`] and [`BatchLayout::Padded`] limit the number of requests. DAS does
    /// not apply this limit, because it fills a given number of rows.
    fn chosen(&mut self, view: &View<'_>, bytes: u64) -> Vec<Chosen> {
        let most = match self.how {
            BatchLayout::Single => 1,
            BatchLayout::Padded { most } => most,
            BatchLayout::Dp { .. } | BatchLayout::Rows { .. } => usize::MAX,
        };
        let rows = match self.which {
            Order::Das {
                rows,
                length,
                dominance,
            } => das(&mut self.index, rows, length, dominance),
            Order::SlottedDas { dominance } => das(&mut self.index, 1, u32::MAX, dominance),
            Order::Fcfs | Order::Sjf | Order::Edf => {
                let (mut at, mut chosen) = (0, Vec::new());
                while chosen.len() < most
                    && let Some(next) = self.peek(&mut at, view, bytes)
                {
                    self.take(next);
                    chosen.push(next);
                }
                return chosen;
            }
        };
        let (fits, not): (Vec<Chosen>, Vec<Chosen>) = rows
            .into_iter()
            .flat_map(|row| row.chosen)
            .partition(|&(tokens, _)| self.alone(view, tokens) <= bytes);
        self.put_back(not);
        self.has_gone(fits.iter().map(|&(_, (_, id))| id));
        fits
    }

    /// Adds `ids`, the requests that are part of the current decision, to `gone`. Does nothing if the policies of this scheduler read only
    /// the index and not `gone`. The requests have already been removed from the index.
    fn has_gone(&mut self, ids: impl Iterator<Item = u64>) {
        if self.when != Trigger::Hungry || self.which == Order::Fcfs {
            self.gone.extend(ids);
        }
    }

    fn put_back(&mut self, chosen: impl IntoIterator<Item = Chosen>) {
        for (tokens, entry) in chosen {
            self.index.put(tokens, entry);
            self.gone.remove(&entry.1);
        }
    }

    /// Plans padded batches for a lane.
    fn padded(&mut self, view: &View<'_>, lane: usize, most: usize) -> Vec<Planned> {
        let bytes = view.lanes[lane].bytes;
        let mut chosen = self.chosen(view, bytes);
        let mut runs = Vec::new();
        if let BatchLayout::Dp { most } = self.how {
            chosen.sort_unstable_by_key(|&(tokens, (_, id))| (tokens, id));
            let lens: Vec<u32> = chosen.iter().map(|&(tokens, _)| tokens).collect();
            // Each request fits alone, so a partition exists.
            runs = partition(&lens, most, bytes, view.costs).unwrap_or_default();
        } else {
            let (mut n, mut longest) = (0, 0);
            for &(tokens, _) in &chosen {
                let extents = equal(n as u64 + 1, u64::from(tokens.max(longest)));
                if n == most || (n > 0 && view.costs.bytes(Layout::Padded, &extents) > bytes) {
                    runs.push(n);
                    (n, longest) = (0, 0);
                }
                (n, longest) = (n + 1, tokens.max(longest));
            }
            runs.extend((n > 0).then_some(n));
        }
        let mut rest = chosen.as_slice();
        let mut planned = Vec::new();
        for n in runs {
            let (run, after) = rest.split_at(n.min(rest.len()));
            rest = after;
            let layout = Layout::Padded;
            let extents = layout.computed(run.iter().map(|&(tokens, _)| tokens));
            planned.push(Planned {
                lane,
                layout,
                rows: Rows::of_one(run.iter().map(|&(_, (_, id))| id).collect()),
                estimate: view.costs.time(layout, &extents),
                joins: false,
            });
        }
        planned
    }

    /// Plans a batch of rows that several requests share.
    fn shared(&mut self, view: &View<'_>, lane: usize, rows: u32, length: u32) -> Option<Planned> {
        let bytes = view.lanes[lane].bytes;
        let pure = Layout::Rows {
            length,
            slot: length,
        };
        let holds = |n: u32| {
            view.costs
                .bytes(pure, &equal(u64::from(n), u64::from(length)))
                <= bytes
        };
        let rows = match holds(rows) {
            true => rows,
            // Memory is monotonic in the number of rows, so search for the largest number that fits.
            false => {
                let (mut held, mut not) = (0, rows);
                while held + 1 < not {
                    let middle = held.midpoint(not);
                    match holds(middle) {
                        true => held = middle,
                        false => not = middle,
                    }
                }
                held
            }
        };
        let ids = |chosen: Vec<Chosen>| chosen.into_iter().map(|(_, (_, id))| id);
        let (slot, filled): (u32, Vec<Vec<u64>>) = match self.which {
            Order::SlottedDas { dominance } => {
                let cut = slotted(das(&mut self.index, rows, length, dominance), length);
                self.put_back(cut.left);
                let slots = cut.rows.into_iter().flatten();
                (cut.slot, slots.map(|slot| ids(slot).collect()).collect())
            }
            Order::Das { dominance, .. } => {
                let filled = das(&mut self.index, rows, length, dominance);
                let filled = filled.into_iter().map(|row| ids(row.chosen).collect());
                (length, filled.collect())
            }
            Order::Fcfs | Order::Sjf | Order::Edf => {
                let (mut at, mut tried) = (0, Vec::new());
                let mut order = std::iter::from_fn(|| {
                    let next = self.peek(&mut at, view, bytes)?;
                    self.take(next);
                    tried.push(next);
                    Some(next)
                });
                let filled = first_fit(&mut order, rows as usize, length);
                let n_taken = filled.iter().map(Vec::len).sum();
                // If `first_fit` stopped early, the last request that it tried did not fit.
                let left = tried.split_off(n_taken);
                self.put_back(left);
                let filled = filled.into_iter();
                let row = |row: Vec<Chosen>| ids(row).collect();
                (length, filled.map(row).collect())
            }
        };
        self.has_gone(filled.iter().flatten().copied());
        if filled.iter().all(Vec::is_empty) {
            return None;
        }
        let layout = Layout::Rows { length, slot };
        let extents = equal(filled.len() as u64, u64::from(slot));
        // Requests with a single step all end with their batch. Only requests with several steps can free a slot earlier.
        let goes_on = |id: &u64| view.waiting.get(*id).is_some_and(|w| w.steps > 1);
        if slot < length && filled.iter().flatten().any(goes_on) {
            self.slots.insert(lane, Slots::new(slot, &filled));
        }
        Some(Planned {
            lane,
            layout,
            rows: filled.into(),
            estimate: view.costs.time(layout, &extents),
            joins: false,
        })
    }

    /// Adds requests to the empty slots of running batches, including slots whose requests have finished (TCB 4.2.2).
    fn join(&mut self, view: &View<'_>, decision: &mut Decision) {
        let Order::SlottedDas { dominance } = self.which else {
            return;
        };
        for (lane, state) in view.lanes.iter().enumerate() {
            if state.in_flight == 0 {
                self.slots.remove(&lane);
                continue;
            }
            let Some(slots) = self.slots.get_mut(&lane) else {
                continue;
            };
            let n_free = slots.left.iter().filter(|&&left| left == 0).count();
            let filled = das(&mut self.index, n_free as u32, slots.length, dominance);
            if filled.is_empty() {
                continue;
            }
            let rows: Vec<Vec<u64>> = filled
                .into_iter()
                .map(|row| row.chosen.into_iter().map(|(_, (_, id))| id).collect())
                .collect();
            slots.fill(&rows);
            if self.when != Trigger::Hungry {
                self.gone.extend(rows.iter().flatten());
            }
            let slot = slots.length;
            let layout = Layout::Rows { length: slot, slot };
            let extents = equal(rows.len() as u64, u64::from(slot));
            decision.run.push(Planned {
                lane,
                layout,
                estimate: view.costs.time(layout, &extents),
                rows: rows.into(),
                joins: true,
            });
        }
    }
}

impl Slots {
    fn new(length: u32, rows: &[Vec<u64>]) -> Self {
        let mut slots = Self {
            length,
            left: vec![0; rows.len()],
            slot_of: HashMap::new(),
        };
        for (slot, ids) in rows.iter().enumerate() {
            slots.add(slot, ids);
        }
        slots
    }

    fn add(&mut self, slot: usize, ids: &[u64]) {
        self.left[slot] += ids.len();
        self.slot_of.extend(ids.iter().map(|&id| (id, slot)));
    }

    /// Puts the requests of each of `rows` into one empty slot.
    fn fill(&mut self, rows: &[Vec<u64>]) {
        let empty = (0..self.left.len()).filter(|&slot| self.left[slot] == 0);
        let empty: Vec<usize> = empty.collect();
        for (slot, ids) in empty.into_iter().zip(rows) {
            self.add(slot, ids);
        }
    }

    fn finish(&mut self, id: u64) {
        if let Some(slot) = self.slot_of.remove(&id) {
            self.left[slot] -= 1;
        }
    }
}

impl Scheduler for Composed {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut decision = Decision::default();
        self.admit(view, &mut decision);
        self.join(view, &mut decision);
        for (lane, state) in view.lanes.iter().enumerate() {
            if state.in_flight > 0 {
                continue;
            }
            if let Err(wake) = self.is_time(view) {
                decision.wake = wake;
                break;
            }
            let planned = match self.how {
                BatchLayout::Single => self.padded(view, lane, 1),
                BatchLayout::Padded { most } | BatchLayout::Dp { most } => {
                    self.padded(view, lane, most)
                }
                BatchLayout::Rows { rows, length } => {
                    self.shared(view, lane, rows, length).into_iter().collect()
                }
            };
            decision.run.extend(planned);
        }
        decision
    }

    fn finished(&mut self, ids: &[u64], lane: usize) {
        if let Some(slots) = self.slots.get_mut(&lane) {
            ids.iter().for_each(|&id| slots.finish(id));
        }
    }

    fn next_text(&self, waiting: &[Waiting], n_running: usize) -> Option<usize> {
        let is_free = n_running == 0 || self.how != BatchLayout::Single;
        (is_free && !waiting.is_empty()).then_some(0)
    }
}
