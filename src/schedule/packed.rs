//! gemmule's own scheduler. It packs the smallest batches with which the device stays near its maximum throughput. Requests with near
//! deadlines come first, and tenants take turns.

mod line;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
};

use super::{
    Decision, Lane, Layout, Micros, Planned, Refusal, Rows, Scheduler, View, Waiting,
    costs::{equal, packed},
    fair::FairShares,
    queue::{Marks, Soonest},
};
use crate::tensor::Extents;
use line::Line;

/// Fraction of the maximum throughput, in tokens per second, that a batch must reach. It determines the token budget, the target number of
/// tokens of a batch.
const RATE: f64 = 0.97;
/// Replaces [`RATE`] if no request has a deadline and at least two full batches of requests are waiting.
const FULL_RATE: f64 = 0.995;
/// A batch is only made smaller for a deadline if its throughput remains at least this multiple of the rate at which tokens arrive.
const KEEP_UP: f64 = 1.1;
/// A token budget of at most this many tokens is not halved further.
const MIN_BUDGET: u64 = 64;
/// Candidates for the token budget: `64 · 2^(i/4)` tokens for each `i` of the range, from 64 to 128 Ki.
const SIZES: std::ops::RangeInclusive<u32> = 0..=44;
/// Number of tokens that a tenant's deficit gains per turn (the quantum of deficit round robin).
const QUANTUM: u64 = 512;
/// Max number of a tenant's requests that are examined to find one that fits the remaining room of a batch. The selection of urgent
/// requests also ends after this many requests that do not fit.
const LOOK_AHEAD: usize = 64;
/// Max number of times that later requests may overtake a tenant's first request if the first request does not fit.
const PASSED_OVER: u8 = 8;
/// Time before the end of the running batch at which the next batch is submitted.
const GUARD: Micros = Micros(300);
/// The requests of a class move up by one class for each full period that the oldest of them has waited. The period is this multiple of the
/// target latency.
const AGEING: u64 = 4;

/// Packed scheduler. Each decision plans at most one batch per lane, in these steps:
///
/// 1. A request is refused if its deadline has passed, or would pass even if the request ran alone at once. An urgent request (see 3) is
///    also refused if the planned batch would finish after its deadline. If less than a full batch is waiting, the request is assumed to
///    run alone for this estimate.
/// 2. The token budget is the smallest number of tokens that reaches 97 % of the maximum throughput, or 99.5 % if no request has a deadline
///    and at least two full batches are waiting. The costs predict the throughput for the mean sequence length of the first 64 waiting
///    requests, each weighted by its number of tokens. The budget is halved until the batch fits in the lane's memory. If fewer than two
///    full batches are waiting, it is also halved until the batch takes at most half of the time left until the earliest deadline, as long
///    as the throughput stays above the arrival rate.
/// 3. Urgent requests come first, earliest deadline first. A request is urgent if its deadline is less than two batch times after the start
///    of the planned batch. The other requests follow by class. The requests of a class move up by one class each time the oldest of them
///    has waited for four times the target latency. Tenants of one class take turns by tokens (deficit round robin); each tenant's requests
///    run in order of arrival. If a tenant's next request does not fit, one of the tenant's first 64 requests that fits may overtake it.
///    After the next request has been overtaken eight times, it comes before the requests of all other classes.
/// 4. If the device rounds up the number of tokens of a batch, further requests fill the difference at no extra cost.
/// 5. An idle lane gets its batch at once. A busy lane gets its next batch when the waiting requests have at least half as many tokens as
///    the token budget, or shortly before its current batch ends.
///
/// Generated texts start by class. Tenants of one class take turns, weighted by the tokens of their prompts and texts.
pub struct Packed {
    slo: Micros,
    /// Id of the newest request that was seen.
    last: Option<u64>,
    /// Queues by class and tenant, in order of arrival. They may contain requests that are no longer waiting.
    lines: BTreeMap<(u8, u32), Line>,
    /// Requests by deadline. The queue may contain requests that are no longer waiting.
    soonest: Soonest,
    /// Tenant that was served last.
    turn: u32,
    /// Memory of the largest lane at the last decision, in bytes.
    bytes: u64,
    /// The smallest numbers of tokens that reach [`RATE`] and [`FULL_RATE`], by quantized mean length. Computed only once per mean length,
    /// because a change of all costs by the same factor does not affect them.
    budgets: HashMap<i32, (u64, u64)>,
    /// Queue positions of the requests that are already part of the current decision.
    gone: Marks,
    gone_tokens: u64,
    /// Running time of a request that runs alone, by its number of tokens. Computed on demand for the current decision; 0 if not yet
    /// computed.
    alone: Vec<u64>,
    /// Tokens of the requests that arrived and were not refused, and the time during which they arrived, in microseconds. Their ratio is
    /// the arrival rate. Both values decay exponentially with the target latency as the time constant.
    came: (f64, f64),
    /// Time of the last decision.
    decided: Micros,
    /// Shares of tenants in generated text.
    shares: FairShares,
}

/// A batch under construction.
struct Batch {
    ids: Vec<u64>,
    extents: Extents,
    /// Target number of tokens.
    budget: u64,
    bytes: u64,
    /// Number of tokens that fit in the lane's memory for any division of these tokens into sequences; 0 if unknown.
    roomy: u64,
}

impl Batch {
    fn with(&self, waiting: &Waiting) -> Extents {
        let len = u64::from(waiting.tokens);
        let tokens = self.extents.tokens + len;
        Extents {
            tokens,
            batch: self.extents.batch + 1,
            longest: self.extents.longest.max(len),
            pairs: self.extents.pairs.saturating_add(len * len),
            slots: tokens,
            rows: tokens,
            ..self.extents
        }
    }

    /// Returns whether a request fits in the lane's memory and the budget. The first request of a batch may exceed the budget.
    fn fits(&self, view: &View<'_>, waiting: &Waiting) -> bool {
        let extents = self.with(waiting);
        (self.ids.is_empty() || extents.tokens <= self.budget)
            && extents.tokens <= Extents::MAX_TOKENS
            && (extents.tokens <= self.roomy
                || view.costs.bytes(Layout::Packed, &extents) <= self.bytes)
    }

    /// Returns the maximum number of tokens that the next request of the batch may have.
    fn room(&self) -> u32 {
        let room = match self.ids.is_empty() {
            true => Extents::MAX_TOKENS,
            false => self.budget.saturating_sub(self.extents.tokens),
        };
        u32::try_from(room).unwrap_or(u32::MAX)
    }

    fn add(&mut self, waiting: &Waiting) {
        self.extents = self.with(waiting);
        self.ids.push(waiting.id);
    }

    fn is_full(&self) -> bool {
        self.extents.tokens >= self.budget
    }
}

impl Packed {
    /// Creates a scheduler with the target latency `slo`.
    pub fn new(slo: Micros) -> Self {
        Self {
            slo,
            last: None,
            lines: BTreeMap::new(),
            soonest: Soonest::default(),
            turn: 0,
            bytes: u64::MAX,
            budgets: HashMap::new(),
            gone: Marks::default(),
            gone_tokens: 0,
            alone: vec![0; 1024],
            came: (0.0, 0.0),
            decided: Micros(0),
            shares: FairShares::default(),
        }
    }

    /// Returns the estimated running time of a batch that contains only `waiting`.
    fn alone(&mut self, view: &View<'_>, waiting: &Waiting) -> Micros {
        let time = || {
            let extents = equal(1, u64::from(waiting.tokens));
            view.costs.time(Layout::Packed, &extents)
        };
        match self.alone.get_mut(waiting.tokens as usize) {
            Some(known) => {
                if *known == 0 {
                    *known = time().0;
                }
                Micros(*known)
            }
            None => time(),
        }
    }

    fn bytes_alone(view: &View<'_>, waiting: &Waiting) -> u64 {
        let extents = equal(1, u64::from(waiting.tokens));
        view.costs.bytes(Layout::Packed, &extents)
    }

    fn refuse(
        &mut self,
        view: &View<'_>,
        decision: &mut Decision,
        waiting: &Waiting,
        refusal: Refusal,
    ) {
        if self.forget(view, waiting) {
            self.came.0 = (self.came.0 - f64::from(waiting.tokens)).max(0.0);
            decision.refuse.push((waiting.id, refusal));
        }
    }

    /// Registers new requests. Refuses requests that are too large for any lane, and requests that would miss their deadlines even if each
    /// of them started immediately in a batch of its own.
    fn admit(&mut self, view: &View<'_>, decision: &mut Decision) {
        self.gone.clear();
        self.gone_tokens = 0;
        self.alone.fill(0);
        let new = view.waiting.after(self.last);
        let span = view
            .now
            .since(std::mem::replace(&mut self.decided, view.now))
            .0 as f64;
        let fades = (-span / (self.slo.0 as f64).max(1.0)).exp();
        self.came = (self.came.0 * fades, self.came.1 * fades + span);
        for waiting in new.clone() {
            self.came.0 += f64::from(waiting.tokens);
            self.last = Some(waiting.id);
            let line = self.lines.entry((waiting.class, waiting.tenant));
            line.or_default().add(waiting);
            if let Some(deadline) = waiting.deadline {
                self.soonest.push(deadline, waiting.id);
            }
        }
        let bytes = view.max_bytes();
        let is_less = std::mem::replace(&mut self.bytes, bytes) > bytes;
        let n = |looks: bool| if looks { usize::MAX } else { 0 };
        let all = view.waiting.iter().take(n(is_less));
        let suspects = all.chain(new.take(n(!is_less)));
        // Memory grows with the number of tokens, so every request of at most `fits_to` tokens fits.
        let mut fits_to = 0;
        for waiting in suspects {
            if waiting.tokens <= fits_to {
                continue;
            }
            let is_long = u64::from(waiting.tokens) > Extents::MAX_TOKENS;
            match is_long || Self::bytes_alone(view, waiting) > bytes {
                true => self.refuse(view, decision, waiting, Refusal::TooLarge),
                false => fits_to = waiting.tokens,
            }
        }
        while let Some((deadline, id)) = self.soonest.peek() {
            let refused = match view.waiting.get(id) {
                None => None,
                Some(waiting) if deadline < view.now => Some((waiting, Refusal::Expired)),
                Some(waiting) => {
                    let done = view.now.plus(self.alone(view, waiting));
                    if done <= deadline {
                        break;
                    }
                    Some((waiting, Refusal::Hopeless))
                }
            };
            self.soonest.pop();
            if let Some((waiting, refusal)) = refused {
                self.refuse(view, decision, waiting, refusal);
            }
        }
    }

    /// Returns the waiting request `id`; `None` if it is no longer waiting or is part of the current decision.
    fn live<'v>(&self, view: &View<'v>, id: u64) -> Option<&'v Waiting> {
        let at = view.waiting.place(id).filter(|&at| !self.gone.has(at))?;
        view.waiting.at(at).map(|(waiting, _)| waiting)
    }

    /// Marks a request as part of the current decision. Returns `false` if it is marked already or has left the queue.
    fn forget(&mut self, view: &View<'_>, waiting: &Waiting) -> bool {
        let at = view.waiting.place(waiting.id);
        let is_new = at.is_some_and(|at| self.gone.set(at));
        if is_new {
            self.gone_tokens += u64::from(waiting.tokens);
        }
        is_new
    }

    /// Returns the token budget of a batch for `lane`, and the running time of a batch of that many tokens.
    fn budget(&mut self, view: &View<'_>, lane: &Lane) -> (u64, Micros) {
        let first = view.waiting.iter().take(LOOK_AHEAD);
        let (tokens, pairs) = first.fold((0.0, 0.0), |(tokens, pairs), w| {
            let len = f64::from(w.tokens);
            (tokens + len, pairs + len * len)
        });
        // The mean weights each request by its number of tokens. It is quantized to a power of 2^(1/4).
        let step = (f64::max(pairs / f64::max(tokens, 1.0), 1.0).log2() * 4.0).round();
        let mean = (step / 4.0).exp2();
        let slack = self
            .soonest
            .peek()
            .map_or(Micros::MAX, |(deadline, _)| deadline.since(view.now));
        let time = |tokens| view.costs.time(Layout::Packed, &packed(tokens, mean));
        let at_best = || {
            let size = |i: u32| (64.0 * (f64::from(i) / 4.0).exp2()) as u64;
            let rate = |tokens: u64| tokens as f64 / (time(tokens).0 as f64).max(1.0);
            let rates: Vec<(u64, f64)> = SIZES.map(size).map(|n| (n, rate(n))).collect();
            let best = rates.iter().map(|&(_, rate)| rate).fold(0.0, f64::max);
            let reaching = |share: f64| {
                let enough = rates.iter().find(|&&(_, rate)| rate >= share * best);
                enough.map_or(MIN_BUDGET, |&(tokens, _)| tokens)
            };
            (reaching(RATE), reaching(FULL_RATE))
        };
        let (lean, full) = *self.budgets.entry(step as i32).or_insert_with(at_best);
        let holds = |tokens| {
            let extents = packed(tokens, mean);
            view.costs.bytes(Layout::Packed, &extents) <= lane.bytes
        };
        // If a request has a deadline, do not use the larger budget of `FULL_RATE`, because it delays requests too long. Reduce the budget
        // for a deadline only if fewer than two full batches are waiting and the throughput stays above the arrival rate. Otherwise even
        // more requests would miss their deadlines.
        let full = match self.soonest.is_empty() {
            true => full,
            false => lean,
        };
        let is_overloaded = self.waits(view, 2 * full);
        let mut budget = match is_overloaded {
            true => full,
            false => lean,
        };
        let came = KEEP_UP * self.came.0 / self.came.1.max(1.0);
        let keeps_up = |budget: u64| budget as f64 >= came * time(budget).0 as f64;
        let is_late =
            |budget| !is_overloaded && time(budget).0 > slack.0 / 2 && keeps_up(budget / 2);
        while budget > MIN_BUDGET && (!holds(budget) || is_late(budget)) {
            budget /= 2;
        }
        let budget = view.costs.rounded(budget);
        (budget, time(budget))
    }

    /// Returns whether the waiting requests have at least `tokens` tokens in total, not counting the requests of the current decision.
    fn waits(&self, view: &View<'_>, tokens: u64) -> bool {
        view.waiting.tokens() >= tokens.saturating_add(self.gone_tokens)
    }

    fn take(&mut self, view: &View<'_>, batch: &mut Batch, waiting: &Waiting) {
        self.forget(view, waiting);
        batch.add(waiting);
    }

    /// Adds requests with near deadlines to the batch, earliest deadline first. Refuses requests that would finish after their deadlines.
    /// `start` is the estimated start of the batch, and `time` the estimated running time of a full batch.
    fn urgent(
        &mut self,
        view: &View<'_>,
        start: Micros,
        time: Micros,
        batch: &mut Batch,
        decision: &mut Decision,
    ) {
        let within = start.plus(Micros(time.0.saturating_mul(2)));
        let is_full = self.waits(view, batch.budget);
        // If a request without a deadline has waited long, reserve a quarter of the batch for requests without deadlines.
        let old = view.now.since(Micros(self.slo.0.saturating_mul(AGEING)));
        let mut oldest = view.waiting.iter().take(LOOK_AHEAD);
        let keep = match oldest.any(|w| w.deadline.is_none() && w.arrived < old) {
            true => batch.budget / 4,
            false => 0,
        };
        let mut not_now = Vec::new();
        while let Some((deadline, id)) = self.soonest.peek()
            && deadline < within
            && not_now.len() < LOOK_AHEAD
            && batch.extents.tokens < batch.budget - keep
        {
            self.soonest.pop();
            let Some(waiting) = self.live(view, id) else {
                continue;
            };
            let alone = self.alone(view, waiting);
            // If a full batch of requests is waiting, the request runs in a full batch, and only finishes when the whole batch does.
            let own = match is_full {
                true => time.max(alone),
                false => alone,
            };
            if start.plus(own) > deadline {
                self.refuse(view, decision, waiting, Refusal::Hopeless);
            } else if batch.fits(view, waiting) {
                self.take(view, batch, waiting);
            } else {
                not_now.push((deadline, id));
            }
        }
        for (deadline, id) in not_now {
            self.soonest.push(deadline, id);
        }
    }

    /// Removes requests that are no longer waiting from the front of each queue, and then removes the empty queues.
    fn tidy(&mut self, view: &View<'_>) {
        let mut lines = std::mem::take(&mut self.lines);
        lines.retain(|_, line| {
            while let Some(&(id, _)) = line.requests.front()
                && self.live(view, id).is_none()
            {
                line.forget_first();
            }
            !line.requests.is_empty()
        });
        self.lines = lines;
    }

    /// Returns the first request of the queue `line` that fits the batch, with its position in the queue. If the first request does not fit
    /// and has been overtaken fewer than [`PASSED_OVER`] times, the first [`LOOK_AHEAD`] requests are searched for one that fits. Removes
    /// requests that are no longer waiting from the front of the queue.
    fn next<'v>(
        &self,
        view: &View<'v>,
        line: &mut Line,
        batch: &Batch,
    ) -> Option<(usize, &'v Waiting)> {
        let first = loop {
            match self.live(view, line.requests.front()?.0) {
                Some(first) => break first,
                None => line.forget_first(),
            }
        };
        if batch.fits(view, first) {
            return Some((0, first));
        }
        if line.passed >= PASSED_OVER {
            return None;
        }
        let room = batch.room();
        let first = line.requests.iter().take(LOOK_AHEAD);
        if line.least == 0 {
            line.least = first.clone().map(|r| r.1).min().unwrap_or(u32::MAX);
        }
        if line.least > room {
            return None;
        }
        let mut short = first.enumerate().filter(|(_, (_, tokens))| *tokens <= room);
        short.find_map(|(at, &(id, _))| {
            let waiting = self.live(view, id).filter(|w| batch.fits(view, w))?;
            Some((at, waiting))
        })
    }

    /// Fills a batch by class. Tenants of one class take turns.
    fn by_turns(&mut self, view: &View<'_>, batch: &mut Batch) {
        self.tidy(view);
        let head = |line: &Line| {
            line.requests
                .front()
                .and_then(|&(id, _)| view.waiting.get(id))
        };
        // The age of the oldest request of a class, from any tenant, determines how far the whole class moves up. If each tenant moved up
        // separately, the tenant with the most requests would overtake the others, because its requests wait longest.
        let mut oldest: BTreeMap<u8, u64> = BTreeMap::new();
        for (&(class, _), line) in &self.lines {
            if let Some(first) = head(line) {
                let age = oldest.entry(class).or_default();
                *age = view.now.since(first.arrived).0.max(*age);
            }
        }
        let mut order: Vec<(Reverse<u64>, u32, (u8, u32))> = self
            .lines
            .iter()
            .filter_map(|(&(class, tenant), line)| {
                head(line)?;
                let age = oldest.get(&class).copied().unwrap_or_default();
                let raised = age / self.slo.0.saturating_mul(AGEING).max(1);
                let turn = tenant.wrapping_sub(self.turn).wrapping_sub(1);
                let class_now = match line.passed >= PASSED_OVER {
                    true => u64::MAX,
                    false => u64::from(class) + raised,
                };
                Some((Reverse(class_now), turn, (class, tenant)))
            })
            .collect();
        order.sort_unstable();
        for level in order.chunk_by(|a, b| a.0 == b.0) {
            self.level(view, level.iter().map(|&(_, _, key)| key).collect(), batch);
            if batch.is_full() {
                break;
            }
        }
    }

    /// Runs deficit round robin over the queues of one class.
    fn level(&mut self, view: &View<'_>, mut keys: Vec<(u8, u32)>, batch: &mut Batch) {
        let mut lines = std::mem::take(&mut self.lines);
        while !keys.is_empty() && !batch.is_full() {
            keys.retain(|key| {
                let Some(line) = lines.get_mut(key) else {
                    return false;
                };
                line.deficit += QUANTUM;
                loop {
                    let Some((at, waiting)) = self.next(view, line, batch) else {
                        // A tenant without waiting requests does not accumulate deficit.
                        if line.requests.is_empty() {
                            line.deficit = 0;
                        }
                        return false;
                    };
                    let tokens = u64::from(waiting.tokens);
                    if tokens > line.deficit {
                        return true;
                    }
                    line.deficit -= tokens;
                    self.turn = key.1;
                    self.take(view, batch, waiting);
                    line.take(at);
                }
            });
        }
        self.lines = lines;
    }

    /// Plans one batch for a lane.
    fn batch(&mut self, view: &View<'_>, at: usize, decision: &mut Decision) -> Option<Planned> {
        let lane = &view.lanes[at];
        let (budget, time) = self.budget(view, lane);
        let start = match lane.in_flight {
            0 => view.now,
            _ => view.now.max(lane.free_at),
        };
        // Memory grows with the number of query-key pairs, which is largest if a single sequence has all tokens. If that sequence fits, so
        // does any batch within the budget.
        let max_bytes = view.costs.bytes(Layout::Packed, &equal(1, budget));
        let mut batch = Batch {
            ids: Vec::new(),
            extents: Extents::default(),
            budget,
            bytes: lane.bytes,
            roomy: if max_bytes <= lane.bytes { budget } else { 0 },
        };
        self.urgent(view, start, time, &mut batch, decision);
        self.by_turns(view, &mut batch);
        let rounded = view.costs.rounded(batch.extents.tokens);
        if !batch.ids.is_empty() && rounded > batch.extents.tokens {
            batch.budget = rounded;
            self.by_turns(view, &mut batch);
        }
        let estimate = view.costs.time(Layout::Packed, &batch.extents);
        (!batch.ids.is_empty()).then(|| Planned {
            lane: at,
            layout: Layout::Packed,
            rows: Rows::of_one(batch.ids),
            estimate,
            joins: false,
        })
    }
}

impl Scheduler for Packed {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut decision = Decision::default();
        self.admit(view, &mut decision);
        let mut lanes: Vec<(u8, Micros, usize)> = view
            .lanes
            .iter()
            .enumerate()
            .filter(|(_, lane)| lane.in_flight < lane.depth)
            .map(|(at, lane)| (lane.in_flight, lane.free_at, at))
            .collect();
        lanes.sort_unstable();
        for (in_flight, free_at, at) in lanes {
            if !self.waits(view, 1) {
                break;
            }
            if in_flight > 0 {
                let (budget, _) = self.budget(view, &view.lanes[at]);
                let is_soon = free_at.since(view.now) <= GUARD;
                if !is_soon && !self.waits(view, budget.div_ceil(2)) {
                    let wake = free_at.since(GUARD);
                    decision.wake = Some(decision.wake.map_or(wake, |w| w.min(wake)));
                    continue;
                }
            }
            if let Some(planned) = self.batch(view, at, &mut decision) {
                decision.run.push(planned);
            }
        }
        decision
    }

    fn next_text(&self, waiting: &[Waiting], _: usize) -> Option<usize> {
        self.shares.next(waiting)
    }

    fn text_started(&mut self, text: &Waiting) {
        self.shares.started(text);
    }
}
