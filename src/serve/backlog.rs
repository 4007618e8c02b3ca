//! Estimates how long queued requests take, to decide whether to admit further requests. Tokenizers and devices work in parallel, so the
//! estimate is the maximum of the time of the tokenizers and the time of the devices. Both times are based on recent measurements.

use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

use crate::{
    schedule::{CostTable, Costs, Layout, Micros},
    tensor::Extents,
};

/// When a [`Pace`] covers more seconds of work than this, the weight of its measurements is halved.
const WINDOW: f64 = 0.2;
/// Seconds per byte that tokenizing is assumed to take until its pace is measured. This is the pace of WordPiece on one core.
const BYTE: f64 = 0.5e-6;
/// Determines the time that is reserved for sending a response: the request's time limit divided by the first value, but at most the second
/// value.
const RESERVED: (u32, Duration) = (20, Duration::from_millis(50));
/// Factor by which [`Backlog::late`] shrinks with each batch.
const DECAY: f64 = 0.98;
/// Batch size in tokens and mean sequence length, for estimating the time of a long queue.
const FULL: u64 = 4096;
const LENGTH: u64 = 128;
/// Candidate batch sizes, in tokens. [`Backlog::least`] assumes the size with the highest throughput.
const SIZES: [u64; 6] = [1 << 6, 1 << 8, 1 << 10, 1 << 12, 1 << 14, 1 << 16];
/// Factor by which [`Backlog::least`] multiplies an estimated time to get a lower bound, because the actual time varies with the load of
/// the machine.
const CERTAIN: f64 = 0.8;
/// Time after which a measured pace is no longer used to refuse a request because of its deadline.
const RECENT: Duration = Duration::from_secs(10);
/// Bytes of text per token that are assumed until texts are tokenized.
const PER_TOKEN: f64 = 4.0;

/// Amount of completed work (bytes or estimated seconds) and the seconds that it took. Newer measurements weigh more (see [`WINDOW`]).
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    amount: f64,
    seconds: f64,
    /// Seconds per unit of work that are assumed until work is measured.
    assumed: f64,
    /// Time of the last measurement.
    measured: Option<Instant>,
}

impl Pace {
    /// Returns a pace of `seconds` per unit of work, which is assumed until work is measured. The assumed pace weighs as much as a
    /// measurement that took a hundredth of [`WINDOW`], so the first real measurements outweigh it.
    pub fn of(seconds: f64) -> Self {
        let of = WINDOW / 100.0;
        Self {
            amount: of / seconds,
            seconds: of,
            assumed: seconds,
            measured: None,
        }
    }

    pub fn add(&mut self, amount: f64, took: Duration) {
        self.measured = Some(Instant::now());
        self.amount += amount;
        self.seconds += took.as_secs_f64();
        if self.seconds > WINDOW {
            (self.amount, self.seconds) = (self.amount / 2.0, self.seconds / 2.0);
        }
    }

    pub fn seconds(&self, amount: f64) -> f64 {
        amount * self.seconds / self.amount.max(f64::MIN_POSITIVE)
    }

    /// Like [`seconds`](Self::seconds), but if no work was measured recently, the pace is at worst the initial one (`assumed`). Without
    /// this bound, a single slow measurement could cause all further requests to be refused, and the pace would never be measured again.
    fn recent_seconds(&self, amount: f64) -> f64 {
        let is_recent = self.measured.is_some_and(|at| at.elapsed() < RECENT);
        match is_recent {
            true => self.seconds(amount),
            false => self.seconds(amount).min(amount * self.assumed),
        }
    }
}

/// Number of bytes of tokenized texts, and number of their tokens. Newer texts weigh more.
#[derive(Clone, Copy, Debug)]
struct Density {
    bytes: f64,
    tokens: f64,
}

impl Density {
    /// When more bytes than this are counted, the weight of the earlier texts is halved.
    const WINDOW: f64 = 262_144.0;

    fn assumed() -> Self {
        let bytes = Self::WINDOW / 64.0;
        Self {
            bytes,
            tokens: bytes / PER_TOKEN,
        }
    }

    fn add(&mut self, bytes: u64, tokens: u64) {
        self.bytes += bytes as f64;
        self.tokens += tokens as f64;
        if self.bytes > Self::WINDOW {
            (self.bytes, self.tokens) = (self.bytes / 2.0, self.tokens / 2.0);
        }
    }

    fn tokens(&self, bytes: u64) -> u64 {
        (bytes as f64 * self.tokens / self.bytes) as u64
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

    /// Returns the amount of work of `class` and of higher classes. This work runs before a new request of `class`.
    pub fn before(&self, class: u8) -> u64 {
        let ahead = self.0.range(class..).map(|(_, &amount)| amount);
        ahead.fold(0, u64::saturating_add)
    }
}

/// Number of texts that are always admitted, per second of the limit on the time of queued work. With the default limit of two seconds, 32
/// texts are always admitted.
///
/// Estimates can be wrong, for example before any work is measured. A few clients that each wait for their response before sending the next
/// request must not be refused because of such an estimate.
pub(super) const PER_SECOND: f64 = 16.0;

/// Returns the number of texts that are admitted even if the queued work takes longer than its limit `queue`.
pub(super) fn always_admitted(queue: Duration) -> u64 {
    (queue.as_secs_f64() * PER_SECOND) as u64
}

/// Queued work of one tenant or of all tenants.
#[derive(Clone, Debug, Default)]
pub(super) struct Work {
    /// Bytes of texts that are not yet tokenized.
    pub bytes: ByClass,
    /// Estimated number of tokens of these texts.
    pub expected: ByClass,
    /// Tokens that are waiting for a device.
    pub tokens: ByClass,
    /// Number of texts that have no answer yet. Each text of a request with several texts counts.
    pub texts: u64,
}

impl Work {
    fn is_empty(&self) -> bool {
        self.texts == 0
            && self.bytes.is_empty()
            && self.expected.is_empty()
            && self.tokens.is_empty()
    }

    /// Adds texts that are not yet tokenized.
    pub fn add_untokenized(&mut self, class: u8, load: Load) {
        self.bytes.add(class, load.bytes);
        self.expected.add(class, load.tokens);
    }

    /// Removes texts from the work that waits for tokenization, because they have been tokenized or need not be tokenized. `load` is the work
    /// of these texts.
    pub fn take_untokenized(&mut self, class: u8, load: Load) {
        self.bytes.take(class, load.bytes);
        self.expected.take(class, load.tokens);
    }

    /// Returns the work of `class` and of higher classes.
    fn before(&self, class: u8) -> Load {
        Load {
            bytes: self.bytes.before(class),
            tokens: self.tokens.before(class) + self.expected.before(class),
        }
    }
}

/// Work for the tokenizers and for the devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    /// Bytes of text to tokenize.
    pub bytes: u64,
    /// Tokens to compute, estimated for texts that are not yet tokenized.
    pub tokens: u64,
}

impl Load {
    fn plus(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            tokens: self.tokens.saturating_add(other.tokens),
        }
    }
}

/// Reason for refusing a request that would miss its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Miss {
    /// The request takes longer than its time limit even if nothing else is queued. `takes` includes the time for sending the response.
    Alone { takes: Duration },
    /// The queued work and the request together take `over` longer than the time limit.
    Queued { over: Duration },
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

    /// Returns the queued work of `tenant`, or `None` if it has none, and the number of tenants with queued work. `tenant` is counted even
    /// if it has no queued work.
    fn sharing(&self, tenant: u32) -> (Option<&Work>, u32) {
        let own = self.each.get(&tenant);
        let n = self.each.len() + usize::from(own.is_none());
        (own, u32::try_from(n).unwrap_or(u32::MAX))
    }

    /// Returns whether `more` texts of a tenant may join the queue, which has room for `max` texts. Even if the queue is full, a
    /// tenant may have up to its share: `max` divided by the number of tenants with queued work.
    pub fn has_place(&self, tenant: u32, more: u64, max: u64) -> bool {
        let (own, n) = self.sharing(tenant);
        let own = own.map_or(0, |own| own.texts);
        self.all.texts + more <= max || own + more <= max / u64::from(n)
    }

    /// Decides whether to admit a request of a tenant. `time` estimates the time that queued work takes, and `queue` is the limit for this
    /// time. A request is admitted if one of these conditions holds:
    ///
    /// - The queued work of all tenants is within the limit.
    /// - Fewer than [`always_admitted`] texts are queued.
    /// - The tenant has no queued work.
    /// - Several tenants have queued work, and the tenant has at most an equal share of the time, or less than an equal share of the
    ///   texts that are always admitted.
    ///
    /// # Errors
    /// Returns an error if the request is refused. The error is the estimated time of the queued work that would run before the request.
    pub fn admit(
        &self,
        tenant: u32,
        queue: Duration,
        time: impl Fn(&Work) -> Duration,
    ) -> Result<(), Duration> {
        let always = always_admitted(queue);
        let ahead = time(&self.all);
        if ahead <= queue || self.all.texts < always {
            return Ok(());
        }
        let (own, n) = self.sharing(tenant);
        let has_less = match own {
            None => true,
            Some(_) if n == 1 => false,
            Some(own) => own.texts < always / u64::from(n) || time(own) <= queue / n,
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
    /// Measured time of batches on a device, in seconds per estimated second.
    device: Pace,
    density: Density,
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
            density: Density::assumed(),
            late: Duration::ZERO,
            n_tokenizers: n_tokenizers.max(1),
            n_lanes: n_lanes.max(1),
        }
    }

    /// Records the number of tokens of a text, and the time that tokenizing took.
    pub fn tokenized(&mut self, bytes: usize, tokens: usize, took: Duration) {
        self.tokenizing.add(bytes as f64, took);
        self.density.add(bytes as u64, tokens as u64);
    }

    /// Estimates the number of tokens of a text with `bytes` bytes.
    pub fn expected(&self, bytes: usize) -> u64 {
        self.density.tokens(bytes as u64).max(1)
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

    /// Decides whether to admit a request of `tenant` and `class`, as described for [`Tenants::admit`].
    ///
    /// # Errors
    /// Returns an error if the request is refused. The error is the estimated time of the queued work that would run before the request.
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
        let Load { bytes, tokens } = work.before(class);
        let tokenizing = self.tokenizing.seconds(bytes as f64);
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

    /// Returns a lower bound on the time that `load` takes. It assumes that batches have the size with the highest throughput and that
    /// nothing else runs. The result is multiplied by [`CERTAIN`], because the estimates may be too long. `mean` is the mean number of
    /// tokens per text.
    pub fn least(&self, load: Load, mean: u64, costs: &CostTable) -> Duration {
        let Load { bytes, tokens } = load;
        let tokenizing = self.tokenizing.recent_seconds(bytes as f64);
        let seconds = |size: u64| {
            let size = size.min(tokens).max(1);
            let extents = Extents {
                pairs: size * mean.clamp(1, size),
                ..Layout::Packed.computed([size as u32])
            };
            let one = costs.time(Layout::Packed, &extents).seconds();
            one * tokens as f64 / size as f64
        };
        let device = SIZES.map(seconds).into_iter().fold(f64::MAX, f64::min);
        let slower = f64::max(
            tokenizing / self.n_tokenizers as f64,
            self.device.recent_seconds(device) / self.n_lanes as f64,
        );
        Duration::try_from_secs_f64(CERTAIN * slower).unwrap_or(Duration::MAX)
    }

    /// Checks whether a request with the work `load` can be answered within the time limit `within`. Texts of a class run in order of
    /// arrival, and tenants take turns. The request therefore waits for the queued work of its own tenant. From each other tenant, it waits
    /// for at most as much queued work as its own tenant has, including the request.
    ///
    /// # Errors
    /// Returns an error if the request would miss its deadline. The error says by how much.
    pub fn meets(
        &self,
        (tenant, class): (u32, u8),
        load: Load,
        mean: u64,
        within: Duration,
        costs: &CostTable,
    ) -> Result<(), Miss> {
        let reserved = within - self.for_batches(within);
        let within = within - reserved;
        let takes = self.least(load, mean, costs);
        if takes > within {
            let takes = takes.saturating_add(reserved);
            return Err(Miss::Alone { takes });
        }
        let all = self.tenants.all.before(class).plus(load);
        let (own, n) = self.tenants.sharing(tenant);
        let own = own.map_or(Load::default(), |own| own.before(class));
        let all = self.least(all, mean, costs);
        let in_turns = self.least(own.plus(load), mean, costs).saturating_mul(n);
        match all.min(in_turns).checked_sub(within) {
            None | Some(Duration::ZERO) => Ok(()),
            Some(over) => Err(Miss::Queued { over }),
        }
    }
}

#[cfg(test)]
mod tests;
