//! Corrections of the cost model by measured times.

use std::collections::BTreeMap;

use crate::{kernels::KernelSpec, machine::Machine};

/// Measured times of kernels within a program.
///
/// A timing corrects the estimate of its kernel by a factor. Between two timed numbers of rows, the factor is interpolated in the logarithm
/// of rows, and the cost model still determines the effect of partial waves. Outside the timed range, the factor fades to 1. It
/// reaches 1 at half of the smallest timed number of rows, and at twice the largest.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timings {
    /// For each kernel symbol, the timed numbers of rows in ascending order, each with the microseconds of a launch.
    by_symbol: BTreeMap<String, Vec<(u64, f64)>>,
}

impl Timings {
    /// Adds or replaces the time of a kernel at a number of rows.
    pub fn add(&mut self, symbol: &str, rows: u64, us: f64) {
        let all = self.by_symbol.entry(symbol.to_owned()).or_default();
        match all.binary_search_by_key(&rows, |&(rows, _)| rows) {
            Ok(at) => all[at].1 = us,
            Err(at) => all.insert(at, (rows, us)),
        }
    }

    /// Returns whether a kernel was timed at a number of rows.
    pub fn has(&self, symbol: &str, rows: u64) -> bool {
        let all = self.by_symbol.get(symbol);
        all.is_some_and(|all| all.iter().any(|&(known, _)| known == rows))
    }

    pub fn is_empty(&self) -> bool {
        self.by_symbol.is_empty()
    }

    /// Returns the total number of timings.
    pub fn len(&self) -> usize {
        self.by_symbol.values().map(Vec::len).sum()
    }

    /// Returns, for each kernel symbol, the timed numbers of rows in ascending order, each with the microseconds of a launch.
    pub fn by_symbol(&self) -> &BTreeMap<String, Vec<(u64, f64)>> {
        &self.by_symbol
    }

    /// Returns the timed numbers of rows of a kernel, each with the ratio of the measured time to the estimate.
    pub(super) fn factors(&self, kernel: &KernelSpec, machine: &Machine) -> Vec<(u64, f64)> {
        let kernel = kernel.as_kernel();
        let all = self.by_symbol.get(&kernel.symbol());
        let factor = |&(rows, us): &(u64, f64)| {
            let cycles = kernel
                .cycles(rows, machine)
                .filter(|cycles| cycles.is_finite())?;
            Some((rows, us * f64::from(machine.clock_mhz) / cycles))
        };
        all.into_iter().flatten().filter_map(factor).collect()
    }
}

/// Returns the factor for an estimate at a number of rows. `factors` are the timed numbers of rows in ascending order, each with its
/// factor.
pub(super) fn correction(factors: &[(u64, f64)], rows: u64) -> f64 {
    let position = |rows: u64| (rows.max(1) as f64).log2();
    let at = position(rows);
    let next = factors.partition_point(|&(known, _)| known < rows);
    let faded = |&(known, factor): &(u64, f64)| {
        let left = (1.0 - (position(known) - at).abs()).max(0.0);
        1.0 + (factor - 1.0) * left
    };
    match (
        next.checked_sub(1).map(|before| &factors[before]),
        factors.get(next),
    ) {
        (None, None) => 1.0,
        (Some(only), None) | (None, Some(only)) => faded(only),
        (Some(before), Some(after)) => {
            let (from, to) = (position(before.0), position(after.0));
            let part = if to > from {
                (at - from) / (to - from)
            } else {
                1.0
            };
            before.1 + (after.1 - before.1) * part
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn corrections_are_interpolated_and_fade_within_an_octave() {
        let factors = [(256, 1.0), (1024, 1.4)];
        let at = |rows| (correction(&factors, rows) * 1e3).round() / 1e3;
        assert_eq!([256, 512, 1024].map(at), [1.0, 1.2, 1.4]);
        assert_eq!([2048, 4096, 1].map(at), [1.0, 1.0, 1.0]);
        assert!(at(1448) > 1.15 && at(1448) < 1.25);
        assert_eq!(correction(&[], 512), 1.0);
    }

    #[test]
    fn a_later_timing_replaces_an_earlier_one_and_rows_stay_sorted() {
        let mut timings = Timings::default();
        for (rows, us) in [(1024, 9.0), (256, 3.0), (1024, 8.0)] {
            timings.add("a", rows, us);
        }
        assert_eq!(timings.by_symbol()["a"], [(256, 3.0), (1024, 8.0)]);
        assert!(timings.has("a", 256) && !timings.has("a", 512) && !timings.has("b", 256));
        assert_eq!(timings.len(), 2);
    }
}
