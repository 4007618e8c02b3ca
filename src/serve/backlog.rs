//! How long what waits will take, by which requests are let in: at the pace of the slower of tokenizers and devices, as it was
//! measured of late.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    schedule::{CostTable, Costs, Layout, Micros},
    tensor::Extents,
};

/// Seconds of work that a pace is of; older ones count half, and half again.
const OF_LATE: f64 = 0.2;
/// What a byte of text takes where nothing was measured yet, in seconds: a word of WordPiece, on one core.
const BYTE: f64 = 0.5e-6;
/// An answer has this share of the time within which it is of use to be handed over and sent, and so long at most.
const ON_THE_WAY: (u32, Duration) = (20, Duration::from_millis(50));
/// What is left of a batch's lateness at the next one.
const FADES: f64 = 0.98;
/// Tokens by which the cost of a long queue is reckoned, and the mean length there.
const FULL: u64 = 4096;
const LENGTH: u64 = 128;

/// Seconds of work for an amount of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    amount: f64,
    seconds: f64,
}

impl Pace {
    /// A pace to begin with, which counts a hundredth of what is measured.
    pub fn of(seconds: f64) -> Self {
        let of = OF_LATE / 100.0;
        Self {
            amount: of / seconds,
            seconds: of,
        }
    }

    pub fn add(&mut self, amount: f64, took: Duration) {
        self.amount += amount;
        self.seconds += took.as_secs_f64();
        if self.seconds > OF_LATE {
            (self.amount, self.seconds) = (self.amount / 2.0, self.seconds / 2.0);
        }
    }

    pub fn seconds(&self, amount: f64) -> f64 {
        amount * self.seconds / self.amount.max(f64::MIN_POSITIVE)
    }
}

/// An amount of what waits, by class.
#[derive(Clone, Debug, Default)]
pub(super) struct ByClass(BTreeMap<u8, u64>);

impl ByClass {
    pub fn add(&mut self, class: u8, amount: u64) {
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

    /// What goes before another one of this class.
    pub fn before(&self, class: u8) -> u64 {
        let ahead = self.0.range(class..).map(|(_, &amount)| amount);
        ahead.fold(0, u64::saturating_add)
    }
}

/// What waits before the tokenizers, and how fast they and the devices are.
#[derive(Clone, Debug)]
pub(super) struct Backlog {
    /// Bytes of texts that no thread has taken yet.
    pub untokenized: ByClass,
    /// Seconds of one thread for a byte of text.
    pub tokenizing: Pace,
    /// Seconds of a device for a second that a batch was estimated to take.
    device: Pace,
    /// The most by which a batch of late took longer than it was estimated to, which fades.
    late: Duration,
    n_tokenizers: usize,
    n_lanes: usize,
}

impl Backlog {
    pub fn new(n_tokenizers: usize, n_lanes: usize) -> Self {
        Self {
            untokenized: ByClass::default(),
            tokenizing: Pace::of(BYTE),
            device: Pace::of(1.0),
            late: Duration::ZERO,
            n_tokenizers: n_tokenizers.max(1),
            n_lanes: n_lanes.max(1),
        }
    }

    /// Notes how long a batch took.
    pub fn ran(&mut self, estimate: Micros, took: Duration) {
        self.device.add(estimate.seconds(), took);
        let late = took.saturating_sub(Duration::from_micros(estimate.0));
        self.late = self.late.mul_f64(FADES).max(late);
    }

    /// What batches have of the time within which an answer is of use. Under overload every request is answered as late as it may
    /// be, so that an answer that is not handed over yet, and a batch that takes longer than estimated, would make all of them late.
    pub fn for_batches(&self, within: Duration) -> Duration {
        let (share, most) = ON_THE_WAY;
        within - (within / share).min(most) - self.late.min(within / 4)
    }

    /// How long what goes before a request of this class takes, so many tokens of it being known: tokenizers and devices work at the
    /// same time, so that the slower of them tells.
    pub fn time(&self, class: u8, tokens: u64, costs: &CostTable) -> Duration {
        let untokenized = self.untokenized.before(class);
        let tokenizing = self.tokenizing.seconds(untokenized as f64);
        // A text has about one token for four bytes.
        let tokens = tokens + untokenized / 4;
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
    fn what_waits_takes_as_long_as_the_slower_of_tokenizers_and_devices() {
        let costs = CostTable::parse(include_str!("../../examples/costs.ron")).unwrap();
        let seconds = |of: &Backlog, tokens| of.time(0, tokens, &costs).as_secs_f64();
        let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 0.05, "{a} {b}");
        let mut one = Backlog::new(1, 1);
        assert_eq!(one.time(0, 0, &costs), Duration::ZERO);
        let of_device = seconds(&one, 100_000);
        near(seconds(&one, 200_000), 2.0 * of_device);
        near(seconds(&Backlog::new(1, 4), 100_000), of_device / 4.0);
        // Batches take three times their estimates.
        for _ in 0..100 {
            one.ran(Micros(10_000), Duration::from_millis(30));
        }
        near(seconds(&one, 100_000), 3.0 * of_device);
        // Texts that take a tokenizer longer than the device.
        for _ in 0..100 {
            one.tokenizing.add(1000.0, Duration::from_millis(100));
        }
        one.untokenized.add(0, 100_000);
        near(seconds(&one, 0), 10.0);
        let mut four = Backlog::new(4, 1);
        (four.tokenizing, four.untokenized) = (one.tokenizing, one.untokenized.clone());
        near(seconds(&four, 0), 2.5);
        // What the device has to do beside that is no more.
        near(seconds(&four, 1), 2.5);
        // An urgent one passes what is there.
        assert_eq!(one.time(1, 0, &costs), Duration::ZERO);
        one.untokenized.add(7, 1000);
        near(one.time(1, 0, &costs).as_secs_f64(), 0.1);
        assert_eq!(one.time(8, 0, &costs), Duration::ZERO);
        one.untokenized.take(7, 1000);
        // A pace that changes is followed within a second of work.
        for _ in 0..1000 {
            one.tokenizing.add(1000.0, Duration::from_millis(1));
        }
        near(seconds(&one, 0), f64::max(0.1, 3.0 * of_device / 4.0));
    }

    #[test]
    fn batches_have_less_time_where_they_take_longer_than_estimated() {
        let ms = Duration::from_millis;
        let mut backlog = Backlog::new(1, 1);
        assert_eq!(backlog.for_batches(ms(400)), ms(380));
        assert_eq!(backlog.for_batches(ms(60_000)), ms(59_950));
        backlog.ran(Micros(10_000), ms(15));
        assert_eq!(backlog.for_batches(ms(400)), ms(375));
        // It fades, and never takes most of the time.
        (0..100).for_each(|_| backlog.ran(Micros(10_000), ms(10)));
        assert!(backlog.for_batches(ms(400)) > ms(379));
        backlog.ran(Micros(10_000), ms(5000));
        assert_eq!(backlog.for_batches(ms(400)), ms(280));
        assert_eq!(backlog.for_batches(Duration::ZERO), Duration::ZERO);
    }
}
