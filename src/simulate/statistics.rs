//! Summary statistics of a simulation.

use serde::Serialize;

use super::{Fate, Outcome};
use crate::schedule::{Micros, Refusal, Waiting};

/// Statistics of a simulation. Latencies are those of completed requests, from arrival to response,
/// in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    pub requests: usize,
    /// Arrival rate, in requests per second.
    pub offered: f64,
    /// Responses per second until the last request arrived. If this rate is below `offered`, the
    /// queue keeps growing, and the latencies depend on the number of simulated requests.
    pub answered: f64,
    pub mean: f64,
    pub least: f64,
    pub most: f64,
    pub p50: f64,
    pub p99: f64,
    /// Fraction of all requests that completed by their deadline. Requests without a deadline count
    /// if they completed.
    pub in_time: f64,
    /// Sum of 1 / length over the requests that completed in time (TCB, equation 9).
    pub utility: f64,
    pub expired: usize,
    pub hopeless: usize,
    pub too_large: usize,
    pub batches: u64,
    /// Tokens of the requests that ran, divided by the tokens that their first passes computed, including padding.
    pub valid: f64,
    /// Busy time of a device, as a fraction of the time from the start to the last event. Averaged over the devices.
    pub busy: f64,
}

impl Summary {
    /// Computes the statistics of a simulation of `arrivals` on `n_devices` devices with the result `outcome`.
    pub fn of(arrivals: &[Waiting], outcome: &Outcome, n_devices: usize) -> Self {
        let last = arrivals.last().map_or(Micros(0), |w| w.arrived);
        let window = last.seconds().max(1e-6);
        let mut summary = Self {
            requests: arrivals.len(),
            offered: arrivals.len() as f64 / window,
            batches: outcome.batches,
            valid: outcome.tokens as f64 / outcome.computed.max(1) as f64,
            busy: outcome.busy.seconds()
                / (outcome.end.seconds() * n_devices.max(1) as f64).max(1e-6),
            ..Self::default()
        };
        let mut latencies = Vec::with_capacity(arrivals.len());
        let (mut in_window, mut in_time) = (0, 0);
        for (waiting, fate) in arrivals.iter().zip(&outcome.fates) {
            match *fate {
                Fate::Done(at) => {
                    latencies.push(at.since(waiting.arrived).0);
                    in_window += usize::from(at <= last);
                    if waiting.deadline.is_none_or(|deadline| at <= deadline) {
                        in_time += 1;
                        summary.utility += 1.0 / f64::from(waiting.tokens.max(1));
                    }
                }
                Fate::Refused(_, Refusal::Expired) => summary.expired += 1,
                Fate::Refused(_, Refusal::Hopeless) => summary.hopeless += 1,
                Fate::Refused(_, Refusal::TooLarge) => summary.too_large += 1,
                Fate::Waits | Fate::Runs => {}
            }
        }
        summary.answered = in_window as f64 / window;
        summary.in_time = in_time as f64 / arrivals.len().max(1) as f64;
        latencies.sort_unstable();
        let n = latencies.len();
        if n > 0 {
            let ms = |at: usize| Micros(latencies[at.min(n - 1)]).millis();
            // Smallest latency such that at least the fraction `share` of the completed requests took no longer.
            let quantile = |share: f64| ms(((n as f64 * share).ceil() as usize).saturating_sub(1));
            summary.mean = latencies.iter().sum::<u64>() as f64 / n as f64 / 1e3;
            (summary.least, summary.most) = (ms(0), ms(n - 1));
            (summary.p50, summary.p99) = (quantile(0.5), quantile(0.99));
        }
        summary
    }

    /// Returns whether the devices were saturated, which means that too many requests had no response when the last request arrived. The
    /// threshold is 3 % of all requests, plus twice the number of requests that are in flight even at a low load. The number in flight at a
    /// low load is estimated as 1 plus the number of requests that arrive during the minimum latency.
    pub fn is_saturated(&self) -> bool {
        let window = self.requests as f64 / self.offered.max(f64::MIN_POSITIVE);
        let unanswered = (self.offered - self.answered) * window;
        let running = 2.0 * (1.0 + self.offered * self.least / 1e3);
        unanswered > 0.03 * self.requests as f64 + running
    }
}
