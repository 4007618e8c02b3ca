//! Queue of the waiting requests in order of arrival, and a priority queue of requests by deadline.

use std::{collections::VecDeque, fmt};

use super::{Micros, Planned, Waiting};

/// A bit set over positions.
#[derive(Clone, Debug, Default)]
pub(super) struct Marks(Vec<u64>);

impl Marks {
    /// Marks a position, and returns whether it was not marked before.
    pub fn set(&mut self, at: usize) -> bool {
        let (word, bit) = (at / 64, 1 << (at % 64));
        if word >= self.0.len() {
            self.0.resize(word + 1, 0);
        }
        let is_new = self.0[word] & bit == 0;
        self.0[word] |= bit;
        is_new
    }

    pub fn has(&self, at: usize) -> bool {
        has(&self.0, at)
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }
}

fn has(marks: &[u64], at: usize) -> bool {
    let word = marks.get(at / 64);
    word.is_some_and(|word| word & (1 << (at % 64)) != 0)
}

/// Returns the first unmarked position at or after `place`.
fn free(marks: &[u64], place: usize) -> usize {
    let (mut word, mut left) = (place / 64, u64::MAX << (place % 64));
    while let Some(marked) = marks.get(word) {
        let bits = !marked & left;
        if bits != 0 {
            return word * 64 + bits.trailing_zeros() as usize;
        }
        (word, left) = (word + 1, u64::MAX);
    }
    place.max(word * 64)
}

/// The waiting requests in order of arrival, which is also the order of their ids.
///
/// Requests that have left the queue remain in the array and are only marked. Looking up a request by its id therefore usually takes
/// constant time, and removing a request does not move others.
#[derive(Clone, Copy, Debug)]
pub struct Queue<'a> {
    all: &'a [Waiting],
    gone: &'a [u64],
    /// Position of the first waiting request.
    head: usize,
    n: usize,
    tokens: u64,
}

impl<'a> From<&'a [Waiting]> for Queue<'a> {
    fn from(all: &'a [Waiting]) -> Self {
        Self {
            all,
            gone: &[],
            head: 0,
            n: all.len(),
            tokens: all.iter().map(|w| u64::from(w.tokens)).sum(),
        }
    }
}

impl<'a> Queue<'a> {
    pub fn len(&self) -> usize {
        self.n
    }

    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// Sum of the tokens of all waiting requests.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    pub fn iter(&self) -> impl Iterator<Item = &'a Waiting> + Clone + use<'a> {
        self.starting_at(self.head)
    }

    /// Returns the request that arrived first.
    pub fn first(&self) -> Option<&'a Waiting> {
        self.iter().next()
    }

    /// Iterates over the requests that arrived after the request `id`, or over all if `id` is `None`.
    pub fn after(&self, id: Option<u64>) -> impl Iterator<Item = &'a Waiting> + Clone + use<'a> {
        let next = |id| self.head + self.all[self.head..].partition_point(|w| w.id <= id);
        self.starting_at(id.map_or(self.head, next))
    }

    /// Returns the waiting request `id`; `None` if it is no longer waiting.
    pub fn get(&self, id: u64) -> Option<&'a Waiting> {
        self.place(id).map(|at| &self.all[at])
    }

    /// Returns the position of the waiting request `id`; `None` if it is no longer waiting. The position is valid for the duration of one
    /// decision.
    pub(super) fn place(&self, id: u64) -> Option<usize> {
        let waiting = self.all.get(self.head..)?;
        let (first, last) = (waiting.first()?.id, waiting.last()?.id);
        let (before, after) = (id.checked_sub(first)?, last.checked_sub(id)?);
        let n = waiting.len() as u64;
        // Ids increase by at least 1, and usually by exactly 1. If they are consecutive, the position is computed without reading the
        // request.
        let at = match before + after + 1 == n {
            true => before as usize,
            // The ids have gaps where requests were removed. First try the position that is right if there are no gaps after `id`.
            false => {
                let guessed = n.checked_sub(after + 1).map(|at| at as usize);
                match guessed.filter(|&at| waiting[at].id == id) {
                    Some(at) => at,
                    None => {
                        let end = n.min(before + 1) as usize;
                        waiting[..end].binary_search_by_key(&id, |w| w.id).ok()?
                    }
                }
            }
        };
        (!has(self.gone, self.head + at)).then_some(self.head + at)
    }

    /// Returns the first waiting request at or after `place`, and its position.
    pub(super) fn at(&self, place: usize) -> Option<(&'a Waiting, usize)> {
        let next = free(self.gone, place.max(self.head));
        Some((self.all.get(next)?, next))
    }

    fn starting_at(&self, mut place: usize) -> impl Iterator<Item = &'a Waiting> + Clone + use<'a> {
        let (all, gone) = (self.all, self.gone);
        std::iter::from_fn(move || {
            let at = free(gone, place);
            place = at + 1;
            all.get(at)
        })
    }
}

/// The requests of a [`SchedulerState`](super::SchedulerState).
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    all: Vec<Waiting>,
    gone: Marks,
    head: usize,
    n: usize,
    tokens: u64,
}

impl Arrivals {
    pub fn queue(&self) -> Queue<'_> {
        Queue {
            all: &self.all,
            gone: &self.gone.0,
            head: self.head,
            n: self.n,
            tokens: self.tokens,
        }
    }

    /// Adds a request. Its id must be larger than the ids of all earlier requests.
    pub fn push(&mut self, waiting: Waiting) {
        self.n += 1;
        self.tokens += u64::from(waiting.tokens);
        self.all.push(waiting);
    }

    /// Removes the requests with these ids. On an error, none is removed.
    ///
    /// # Errors
    /// Returns an error if a request is not waiting or occurs twice. The error is its id.
    pub fn remove(&mut self, ids: impl Iterator<Item = u64> + Clone) -> Result<(), u64> {
        for (nth, id) in ids.clone().enumerate() {
            let Some(at) = self.queue().place(id) else {
                // Restore the requests that were removed before the error.
                for id in ids.take(nth) {
                    self.put_back(id);
                }
                return Err(id);
            };
            self.gone.set(at);
            self.n -= 1;
            self.tokens -= u64::from(self.all[at].tokens);
        }
        self.head = free(&self.gone.0, self.head).min(self.all.len());
        // Compaction takes amortized constant time: for each request that is moved, at least three have left the queue.
        if self.all.len() > 4096 && self.n < self.all.len() / 4 {
            let mut at = 0;
            self.all.retain(|_| {
                at += 1;
                !self.gone.has(at - 1)
            });
            self.gone.clear();
            self.head = 0;
        }
        Ok(())
    }

    fn put_back(&mut self, id: u64) {
        let found = self.all[self.head..].binary_search_by_key(&id, |w| w.id);
        if let Ok(at) = found {
            let at = self.head + at;
            self.gone.0[at / 64] &= !(1 << (at % 64));
            self.n += 1;
            self.tokens += u64::from(self.all[at].tokens);
        }
    }
}

/// Priority queue of requests by deadline, then by id, optimized for repeatedly taking the earliest request while others arrive. Requests
/// that arrive in order of deadline are kept in a FIFO queue, and all others in an 8-ary heap. If all requests have the same time limit,
/// they arrive in order of deadline. The deadlines of a node's eight children are contiguous, and so are their ids, so a step down the heap
/// reads few cache lines.
#[derive(Debug, Default)]
pub(super) struct Soonest {
    in_order: VecDeque<(Micros, u64)>,
    deadlines: Vec<Micros>,
    /// Request ids, parallel to `deadlines`.
    ids: Vec<u64>,
}

const CHILDREN: usize = 8;
/// Key that compares greater than or equal to every other.
const LAST: (Micros, u64) = (Micros::MAX, u64::MAX);

impl Soonest {
    pub fn push(&mut self, deadline: Micros, id: u64) {
        if self
            .in_order
            .back()
            .is_none_or(|&last| last < (deadline, id))
        {
            return self.in_order.push_back((deadline, id));
        }
        self.insert(deadline, id);
    }

    fn insert(&mut self, deadline: Micros, id: u64) {
        self.deadlines.push(deadline);
        self.ids.push(id);
        self.raise(self.ids.len() - 1, deadline, id);
    }

    pub fn is_empty(&self) -> bool {
        self.in_order.is_empty() && self.ids.is_empty()
    }

    pub fn len(&self) -> usize {
        self.in_order.len() + self.ids.len()
    }

    /// Keeps the requests for which `stays` returns true.
    pub fn retain(&mut self, stays: impl Fn(u64) -> bool) {
        self.in_order.retain(|&(_, id)| stays(id));
        let deadlines = std::mem::take(&mut self.deadlines);
        let ids = std::mem::take(&mut self.ids);
        for (deadline, id) in deadlines.into_iter().zip(ids) {
            if stays(id) {
                self.insert(deadline, id);
            }
        }
    }

    /// Returns the earliest deadline and the id of its request.
    pub fn peek(&self) -> Option<(Micros, u64)> {
        match self.is_top() {
            true => self
                .deadlines
                .first()
                .copied()
                .zip(self.ids.first().copied()),
            false => self.in_order.front().copied(),
        }
    }

    pub fn pop(&mut self) -> Option<(Micros, u64)> {
        let soonest = self.peek();
        match self.is_top() {
            true => self.pop_top(),
            false => drop(self.in_order.pop_front()),
        }
        soonest
    }

    /// Returns whether the earliest request is at the top of the heap, instead of at the front of the FIFO queue.
    fn is_top(&self) -> bool {
        let top = self.deadlines.first().zip(self.ids.first());
        match (top, self.in_order.front()) {
            (Some((at, id)), Some(first)) => (*at, *id) < *first,
            (top, _) => top.is_some(),
        }
    }

    fn pop_top(&mut self) {
        let (Some(deadline), Some(id)) = (self.deadlines.pop(), self.ids.pop()) else {
            return;
        };
        let n = self.ids.len();
        if n == 0 {
            return;
        }
        // Move the hole at the root down to a leaf and insert the last element there, because that element usually belongs near the bottom.
        let mut at = 0;
        while at * CHILDREN + 1 < n {
            let first = at * CHILDREN + 1;
            let (mut child, mut earliest) = (first, LAST);
            for at in first..n.min(first + CHILDREN) {
                let key = (self.deadlines[at], self.ids[at]);
                child = if key < earliest { at } else { child };
                earliest = earliest.min(key);
            }
            (self.deadlines[at], self.ids[at]) = earliest;
            at = child;
        }
        self.raise(at, deadline, id);
    }

    /// Inserts an element at the free position `at`, and moves it up while it is earlier than its parent.
    fn raise(&mut self, mut at: usize, deadline: Micros, id: u64) {
        while at > 0 {
            let above = (at - 1) / CHILDREN;
            if (self.deadlines[above], self.ids[above]) < (deadline, id) {
                break;
            }
            (self.deadlines[at], self.ids[at]) = (self.deadlines[above], self.ids[above]);
            at = above;
        }
        (self.deadlines[at], self.ids[at]) = (deadline, id);
    }
}

/// Requests of a batch, by row. With [`Layout::Packed`](super::Layout::Packed) and [`Layout::Padded`](super::Layout::Padded), each row has
/// one request. With [`Layout::Rows`](super::Layout::Rows), an entry of this type is a slot instead of a whole row of the layout: each row
/// of the layout has `length / slot` consecutive entries.
#[derive(Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(from = "Vec<Vec<u64>>", into = "Vec<Vec<u64>>")]
pub struct Rows {
    ids: Vec<u64>,
    /// Index in `ids` at which each row ends; empty if every row has one request.
    ends: Vec<usize>,
}

impl Rows {
    /// Creates rows with one request each.
    pub fn of_one(ids: Vec<u64>) -> Self {
        Self {
            ids,
            ends: Vec::new(),
        }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        match self.ends.is_empty() {
            true => self.ids.len(),
            false => self.ends.len(),
        }
    }

    /// Returns whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Requests of all rows.
    pub fn ids(&self) -> &[u64] {
        &self.ids
    }

    /// Iterates over the requests of each row.
    pub fn iter(&self) -> impl Iterator<Item = &[u64]> {
        (0..self.len()).map(|at| match self.ends.get(at) {
            None => &self.ids[at..=at],
            Some(&end) => {
                let begin = at.checked_sub(1).map_or(0, |before| self.ends[before]);
                &self.ids[begin..end]
            }
        })
    }
}

impl fmt::Debug for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl From<Vec<Vec<u64>>> for Rows {
    fn from(rows: Vec<Vec<u64>>) -> Self {
        let ids = rows.concat();
        if rows.iter().all(|row| row.len() == 1) {
            return Self::of_one(ids);
        }
        let mut end = 0;
        let ends = rows.iter().map(|row| {
            end += row.len();
            end
        });
        Self {
            ends: ends.collect(),
            ids,
        }
    }
}

impl From<Rows> for Vec<Vec<u64>> {
    fn from(rows: Rows) -> Self {
        rows.iter().map(<[u64]>::to_vec).collect()
    }
}

impl Planned {
    pub fn ids(&self) -> impl Iterator<Item = u64> + Clone {
        self.rows.ids().iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_earliest_remaining_deadline_is_taken_each_time(
            steps in prop::collection::vec((prop::collection::vec(0_u64..50, 0..90), 0_usize..70), 1..60),
        ) {
            let (mut soonest, mut heap) = (Soonest::default(), std::collections::BinaryHeap::new());
            let (mut id, mut ids) = (0, Vec::new());
            for (come, n_taken) in steps {
                for deadline in come {
                    id += 1;
                    soonest.push(Micros(deadline), id);
                    heap.push(std::cmp::Reverse((Micros(deadline), id)));
                }
                for _ in 0..n_taken {
                    let next = soonest.peek();
                    prop_assert_eq!(next, soonest.pop());
                    prop_assert_eq!(next, heap.pop().map(|v| v.0));
                    ids.extend(next.map(|(_, id)| id));
                }
                prop_assert_eq!(soonest.is_empty(), heap.is_empty());
            }
            ids.extend(std::iter::from_fn(|| soonest.pop()).map(|(_, id)| id));
            ids.sort_unstable();
            prop_assert!(ids.into_iter().eq(1..=id));
        }

        #[test]
        fn a_queue_contains_exactly_the_waiting_requests(
            steps in prop::collection::vec((0_usize..3000, prop::collection::vec(any::<prop::sample::Index>(), 0..900)), 1..12),
            gap in 1_u64..3,
        ) {
            let (mut arrivals, mut list, mut id) = (Arrivals::default(), Vec::new(), 5);
            for (come, go) in steps {
                for _ in 0..come {
                    id += gap;
                    let waiting = Waiting { id, ..Waiting::new(id as u32 % 7 + 1, Micros(id)) };
                    arrivals.push(waiting);
                    list.push(waiting);
                }
                let mut gone: Vec<u64> = Vec::new();
                for at in go {
                    if !list.is_empty() {
                        gone.push(list.remove(at.index(list.len())).id);
                    }
                }
                // If one of the ids does not belong to a waiting request or occurs twice, nothing is removed.
                let before = arrivals.queue().len();
                let wrong = gone.iter().chain(gone.first()).copied().chain([u64::MAX]);
                prop_assert!(arrivals.remove(wrong).is_err());
                prop_assert_eq!(arrivals.queue().len(), before);
                prop_assert_eq!(arrivals.remove(gone.iter().copied()), Ok(()));
                let queue = arrivals.queue();
                prop_assert_eq!(queue.iter().copied().collect::<Vec<_>>(), list.clone());
                prop_assert_eq!(queue.len(), list.len());
                prop_assert_eq!(queue.tokens(), list.iter().map(|w| u64::from(w.tokens)).sum::<u64>());
                prop_assert_eq!(queue.first(), list.first());
                prop_assert!(gone.iter().all(|&id| queue.get(id).is_none()));
                prop_assert!(list.iter().all(|w| queue.get(w.id) == Some(w)));
                let middle = list.get(list.len() / 2).map(|w| w.id);
                let later = list.iter().filter(|w| middle.is_none_or(|id| w.id > id));
                prop_assert!(queue.after(middle).eq(later));
            }
        }
    }

    #[test]
    fn rows_serialize_as_lists_of_lists_and_round_trip() {
        for rows in [
            vec![],
            vec![vec![3], vec![1]],
            vec![vec![3, 4], vec![], vec![1]],
            vec![vec![]],
        ] {
            let of = Rows::from(rows.clone());
            assert_eq!(of.len(), rows.len());
            assert_eq!(of.ids(), rows.concat());
            let text = serde_json::to_string(&of).unwrap();
            assert_eq!(text, serde_json::to_string(&rows).unwrap());
            assert_eq!(format!("{of:?}"), format!("{rows:?}"));
            assert_eq!(serde_json::from_str::<Rows>(&text).unwrap(), of);
        }
    }
}
