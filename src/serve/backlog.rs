//! Estimates how long the queued work takes, to admit or refuse requests. Tokenizers and devices work in parallel, so the estimate is the
//! larger of their times, at their recent pace.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use crate::{
    schedule::{CostTable, Costs, Layout, Micros},
    tensor::Extents,
};

/// When a [`Pace`] covers more seconds of work than this, the weight of its measurements is halved.
const WINDOW: f64 = 0.2;
/// Seconds per byte that tokenizing is assumed to take until its pace is measured. This is the pace of WordPiece on one core.
const BYTE: f64 = 0.5e-6;
/// Time that is reserved for sending the response: the request's time limit divided by the first value, at most the second value.
const RESERVED: (u32, Duration) = (20, Duration::from_millis(50));
/// Factor by which [`Backlog::late`] shrinks with each batch.
const DECAY: f64 = 0.98;
/// Batch size in tokens and mean sequence length, for estimating the time of a long queue.
const FULL: u64 = 4096;
const LENGTH: u64 = 128;

/// Amount of work and the seconds that it took. Newer measurements weigh more (see [`WINDOW`]).
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    amount: f64,
    seconds: f64,
}

impl Pace {
    /// Returns a pace of `seconds` per unit of work, which is assumed until work is measured. It has the weight of a measurement over a
    /// hundredth of [`WINDOW`], so the first real measurements outweigh it.
    pub fn of(seconds: f64) -> Self {
        let of = WINDOW / 100.0;
        Self {
            amount: of / seconds,
            seconds: of,
        }
    }

    pub fn add(&mut self, amount: f64, took: Duration) {
        self.amount += amount;
        self.seconds += took.as_secs_f64();
        if self.seconds > WINDOW {
            (self.amount, self.seconds) = (self.amount / 2.0, self.seconds / 2.0);
        }
    }

    pub fn seconds(&self, amount: f64) -> f64 {
        amount * self.seconds / self.amount.max(f64::MIN_POSITIVE)
    }
}

/// Amount of queued work by priority class. Higher classes run first.
#[derive(Clone, Debug, Default)]
pub(super) struct ByClass(BTreeMap<u8, u64>);

impl ByClass {
    pub fn add(&mut self, class: u8, amount: u64) {
        if amount == 0 {
            return;
        }
        let of_class = self.0.entry(class).or_default();
        *of_class = of_class.saturating_add(amount);
    }

    pub fn take(&mut self, class: u8, amount: u64) {
        if let Some(of_class) = self.0.get_mut(&class) {
            *of_class = of_class.saturating_sub(amount);
            if *of_class == 0 {
                self.0.remove(&class);
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the amount of work of this class and of higher classes, which runs before a new request of this class.
    pub fn before(&self, class: u8) -> u64 {
        let ahead = self.0.range(class..).map(|(_, &amount)| amount);
        ahead.fold(0, u64::saturating_add)
    }
}

/// Number of requests that are always admitted for each second that queued work may take. With the default limit of two seconds, these are
/// 32 requests.
///
/// A few clients that each wait for a response must not be refused because of a wrong estimate, such as one before the pace is measured.
pub(super) const PER_SECOND: f64 = 16.0;

/// Returns the number of requests that are admitted even if the queued work takes longer than its limit `queue`.
pub(super) fn always_admitted(queue: Duration) -> u64 {
    (queue.as_secs_f64() * PER_SECOND) as u64
}

/// Queued work of one tenant or of all tenants.
#[derive(Clone, Debug, Default)]
pub(super) struct Work {
    /// Bytes of texts that are not yet tokenized.
    pub bytes: ByClass,
    /// Tokens that are waiting for a device.
    pub tokens: ByClass,
    /// Number of requests that have no answer yet.
    pub requests: u64,
}

impl Work {
    fn is_empty(&self) -> bool {
        self.requests == 0 && self.bytes.is_empty() && self.tokens.is_empty()
    }
}

/// Queued work of each tenant, and the total.
#[derive(Clone, Debug, Default)]
pub(super) struct Tenants {
    all: Work,
    each: HashMap<u32, Work>,
}

impl Tenants {
    /// Applies `change` to the work of a tenant and to the total.
    pub fn change(&mut self, tenant: u32, change: impl Fn(&mut Work)) {
        change(&mut self.all);
        let own = self.each.entry(tenant).or_default();
        change(own);
        if own.is_empty() {
            self.each.remove(&tenant);
        }
    }

    pub fn all(&self) -> &Work {
        &self.all
    }

    /// Returns the queued work of a tenant, or `None` if it has none, and the number of tenants with queued work. The tenant itself is
    /// counted in any case.
    fn sharing(&self, tenant: u32) -> (Option<&Work>, u32) {
        let own = self.each.get(&tenant);
        let n = self.each.len() + usize::from(own.is_none());
        (own, u32::try_from(n).unwrap_or(u32::MAX))
    }

    /// Returns whether `more` requests of a tenant may join the queue, which has room for `max` requests. Even if the queue is full, a
    /// tenant may have up to its share: `max` divided by the number of tenants with queued work.
    pub fn has_place(&self, tenant: u32, more: u64, max: u64) -> bool {
        let (own, n) = self.sharing(tenant);
        let own = own.map_or(0, |own| own.requests);
        self.all.requests + more <= max || own + more <= max / u64::from(n)
    }

    /// Decides whether to admit a request of a tenant. `time` estimates the time of queued work, and `queue` is the limit for this time. A
    /// request is admitted in each of these cases:
    ///
    /// - The queued work of all tenants is within the limit.
    /// - Fewer than [`always_admitted`] requests are queued.
    /// - The tenant has no queued work.
    /// - Several tenants have queued work, and the tenant has at most an equal share of the time, or less than an equal share of the
    ///   requests that are always admitted.
    ///
    /// # Errors
    /// Returns the time of the queued work that runs before the request.
    pub fn admit(
        &self,
        tenant: u32,
        queue: Duration,
        time: impl Fn(&Work) -> Duration,
    ) -> Result<(), Duration> {
        let always = always_admitted(queue);
        let ahead = time(&self.all);
        if ahead <= queue || self.all.requests < always {
            return Ok(());
        }
        let (own, n) = self.sharing(tenant);
        let has_less = match own {
            None => true,
            Some(_) if n == 1 => false,
            Some(own) => own.requests < always / u64::from(n) || time(own) <= queue / n,
        };
        match has_less {
            true => Ok(()),
            false => Err(ahead),
        }
    }
}

/// Queued work, and the pace of tokenizers and devices.
#[derive(Clone, Debug)]
pub(super) struct Backlog {
    pub tenants: Tenants,
    /// Seconds of a tokenizer thread per byte of text.
    pub tokenizing: Pace,
    /// Measured seconds of a device per estimated second.
    device: Pace,
    /// Largest recent time by which a batch took longer than estimated. It decays with each batch.
    late: Duration,
    n_tokenizers: usize,
    n_lanes: usize,
}

impl Backlog {
    pub fn new(n_tokenizers: usize, n_lanes: usize) -> Self {
        Self {
            tenants: Tenants::default(),
            tokenizing: Pace::of(BYTE),
            device: Pace::of(1.0),
            late: Duration::ZERO,
            n_tokenizers: n_tokenizers.max(1),
            n_lanes: n_lanes.max(1),
        }
    }

    /// Records the estimated and the actual time of a batch.
    pub fn ran(&mut self, estimate: Micros, took: Duration) {
        self.device.add(estimate.seconds(), took);
        let late = took.saturating_sub(Duration::from_micros(estimate.0));
        self.late = self.late.mul_f64(DECAY).max(late);
    }

    /// Returns the part of a request's time limit that is left for its batch. Under overload, every request finishes close to its deadline.
    /// The rest of the limit is therefore reserved for sending the response, and for batches that take longer than estimated.
    pub fn for_batches(&self, within: Duration) -> Duration {
        let (share, most) = RESERVED;
        within - (within / share).min(most) - self.late.min(within / 4)
    }

    /// Decides whether to admit a request.
    ///
    /// # Errors
    /// Returns the time of the queued work that runs before the request.
    pub fn admit(
        &self,
        tenant: u32,
        class: u8,
        queue: Duration,
        costs: &CostTable,
    ) -> Result<(), Duration> {
        let time = |work: &Work| self.time(work, class, costs);
        self.tenants.admit(tenant, queue, time)
    }

    /// Estimates the time of the queued work that runs before a request of `class`. Tokenizers and devices work in parallel, so the result
    /// is the larger of their times.
    pub fn time(&self, work: &Work, class: u8, costs: &CostTable) -> Duration {
        let untokenized = work.bytes.before(class);
        let tokenizing = self.tokenizing.seconds(untokenized as f64);
        // Assume four bytes of text per token.
        let tokens = work.tokens.before(class) + untokenized / 4;
        let size = tokens.min(FULL);
        let device = match size {
            0 => 0.0,
            _ => {
                let extents = Extents {
                    pairs: size * LENGTH.min(size),
                    ..Layout::Packed.computed([size as u32])
                };
                let one = costs.time(Layout::Packed, &extents).seconds();
                self.device.seconds(one * tokens as f64 / size as f64)
            }
        };
        let slower = f64::max(
            tokenizing / self.n_tokenizers as f64,
            device / self.n_lanes as f64,
        );
        Duration::try_from_secs_f64(slower).unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimated_time_is_that_of_the_slower_of_tokenizers_and_devices() {
        let costs = CostTable::parse(include_str!("../../examples/costs.ron")).unwrap();
        let seconds = |of: &Backlog, tokens: u64| {
            let mut work = of.tenants.all().clone();
            work.tokens.add(0, tokens);
            of.time(&work, 0, &costs).as_secs_f64()
        };
        let before = |of: &Backlog, class| of.time(of.tenants.all(), class, &costs);
        let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 0.05, "{a} {b}");
        let mut one = Backlog::new(1, 1);
        assert_eq!(before(&one, 0), Duration::ZERO);
        let of_device = seconds(&one, 100_000);
        near(seconds(&one, 200_000), 2.0 * of_device);
        near(seconds(&Backlog::new(1, 4), 100_000), of_device / 4.0);
        // Batches take three times as long as estimated.
        for _ in 0..100 {
            one.ran(Micros(10_000), Duration::from_millis(30));
        }
        near(seconds(&one, 100_000), 3.0 * of_device);
        // The tokenizer is slower than the device.
        for _ in 0..100 {
            one.tokenizing.add(1000.0, Duration::from_millis(100));
        }
        one.tenants.change(0, |work| work.bytes.add(0, 100_000));
        near(seconds(&one, 0), 10.0);
        let mut four = Backlog::new(4, 1);
        (four.tokenizing, four.tenants) = (one.tokenizing, one.tenants.clone());
        near(seconds(&four, 0), 2.5);
        // Devices work in parallel with tokenizers and are faster, so their time adds nothing.
        near(seconds(&four, 1), 2.5);
        // An urgent request runs before the queued work.
        assert_eq!(before(&one, 1), Duration::ZERO);
        one.tenants.change(0, |work| work.bytes.add(7, 1000));
        near(before(&one, 1).as_secs_f64(), 0.1);
        assert_eq!(before(&one, 8), Duration::ZERO);
        one.tenants.change(0, |work| work.bytes.take(7, 1000));
        // The estimate follows a changed pace within a second of work.
        for _ in 0..1000 {
            one.tokenizing.add(1000.0, Duration::from_millis(1));
        }
        near(seconds(&one, 0), f64::max(0.1, 3.0 * of_device / 4.0));
    }

    #[test]
    fn a_tenant_below_its_share_is_admitted_under_overload() {
        let queue = Duration::from_secs(2);
        let mut tenants = Tenants::default();
        // A token takes a millisecond.
        let time = |work: &Work| Duration::from_millis(work.tokens.before(0));
        let ask = |tenants: &Tenants, tenant| tenants.admit(tenant, queue, time);
        let add = |tenants: &mut Tenants, tenant, tokens| {
            tenants.change(tenant, |work| {
                work.requests += 1;
                work.tokens.add(0, tokens);
            });
        };
        // 32 requests are admitted however long they take.
        for _ in 0..32 {
            assert_eq!(ask(&tenants, 1), Ok(()));
            add(&mut tenants, 1, 1000);
        }
        assert_eq!(ask(&tenants, 1), Err(Duration::from_secs(32)));
        // With two tenants, the second one gets half of the time and half of the requests that are always admitted.
        for _ in 0..16 {
            assert_eq!(ask(&tenants, 2), Ok(()));
            add(&mut tenants, 2, 100);
        }
        let ahead = Duration::from_millis(33_600);
        assert_eq!(ask(&tenants, 2), Err(ahead));
        assert_eq!(ask(&tenants, 1), Err(ahead));
        assert_eq!(ask(&tenants, 3), Ok(()));
        // Up to the limit, a single tenant may use all of the time.
        let mut tenants = Tenants::default();
        for _ in 0..100 {
            assert_eq!(ask(&tenants, 1), Ok(()));
            add(&mut tenants, 1, 20);
        }
        add(&mut tenants, 1, 1);
        assert_eq!(ask(&tenants, 1), Err(Duration::from_millis(2001)));
        add(&mut tenants, 2, 1);
        assert_eq!(ask(&tenants, 2), Ok(()));
        // Answered requests do not count.
        for _ in 0..101 {
            tenants.change(1, |work| {
                work.requests -= 1;
                work.tokens.take(0, 1000);
            });
        }
        assert_eq!(tenants.each.len(), 1);
        assert_eq!(ask(&tenants, 2), Ok(()));
    }

    #[test]
    fn batches_get_less_time_if_they_take_longer_than_estimated() {
        let ms = Duration::from_millis;
        let mut backlog = Backlog::new(1, 1);
        assert_eq!(backlog.for_batches(ms(400)), ms(380));
        assert_eq!(backlog.for_batches(ms(60_000)), ms(59_950));
        backlog.ran(Micros(10_000), ms(15));
        assert_eq!(backlog.for_batches(ms(400)), ms(375));
        // The lateness decays, and it never takes more than a quarter of the time limit.
        (0..100).for_each(|_| backlog.ran(Micros(10_000), ms(10)));
        assert!(backlog.for_batches(ms(400)) > ms(379));
        backlog.ran(Micros(10_000), ms(5000));
        assert_eq!(backlog.for_batches(ms(400)), ms(280));
        assert_eq!(backlog.for_batches(Duration::ZERO), Duration::ZERO);
    }
}
