//! Dispatch tables: the choice for each range of batches.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::tensor::Extents;

/// A range of sizes: greater than `above`, up to `up_to` inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Interval {
    pub above: u64,
    /// The largest size; `None` if unbounded.
    pub up_to: Option<u64>,
}

impl Interval {
    pub const ALL: Self = Self {
        above: 0,
        up_to: None,
    };

    pub const fn new(above: u64, up_to: Option<u64>) -> Self {
        Self { above, up_to }
    }

    pub fn contains(self, size: u64) -> bool {
        size > self.above && size <= self.end()
    }

    pub fn is_empty(self) -> bool {
        self.end() <= self.above
    }

    pub fn meets(self, other: Self) -> bool {
        self.above.max(other.above) < self.end().min(other.end())
    }

    /// Returns the intersection of the two intervals.
    pub fn within(self, other: Self) -> Self {
        let ends = [self.up_to, other.up_to];
        Self {
            above: self.above.max(other.above),
            up_to: ends.into_iter().flatten().min(),
        }
    }

    fn end(self) -> u64 {
        self.up_to.unwrap_or(u64::MAX)
    }
}

/// Formats as `up to 64`, `65 to 192` or `above 192`.
impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.above, self.up_to) {
            (0, None) => f.write_str("any"),
            (above, None) => write!(f, "above {above}"),
            (0, Some(up_to)) => write!(f, "up to {up_to}"),
            (above, Some(up_to)) => write!(f, "{} to {up_to}", above.saturating_add(1)),
        }
    }
}

/// A range of batches by three sizes: the number of rows of a launch ([`Extents::rows`]), the length of the longest sequence, and the max
/// number of keys that a token attends to ([`Extents::max_keys`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Batches {
    pub rows: Interval,
    pub longest: Interval,
    pub keys: Interval,
}

impl Batches {
    pub const ALL: Self = Self {
        rows: Interval::ALL,
        longest: Interval::ALL,
        keys: Interval::ALL,
    };

    pub const fn by_rows(rows: Interval) -> Self {
        Self { rows, ..Self::ALL }
    }

    pub const fn by_longest(longest: Interval) -> Self {
        Self {
            longest,
            ..Self::ALL
        }
    }

    /// Returns whether a batch is in the range. `batch.rows` must be the rows of the current launch.
    pub fn contains(self, batch: &Extents) -> bool {
        self.has([batch.rows, batch.longest, batch.max_keys()])
    }

    pub fn is_empty(self) -> bool {
        self.intervals().into_iter().any(Interval::is_empty)
    }

    pub fn meets(self, other: Self) -> bool {
        self.rows.meets(other.rows)
            && self.longest.meets(other.longest)
            && self.keys.meets(other.keys)
    }

    fn intervals(self) -> [Interval; 3] {
        [self.rows, self.longest, self.keys]
    }

    /// Returns whether sizes, in the order of [`Self::intervals`], are in the range.
    fn has(self, [rows, longest, keys]: [u64; 3]) -> bool {
        self.rows.contains(rows) && self.longest.contains(longest) && self.keys.contains(keys)
    }

    /// Returns whether each batch in `self` is in at least one of `others`.
    pub fn is_covered_by(self, others: &[Self]) -> bool {
        let others = others.iter().copied().filter(|&other| self.meets(other));
        let others: Vec<Self> = others.collect();
        // All sizes between two adjacent bounds are in the same intervals, so it is sufficient to test the first of them.
        let first = |of: usize| {
            let intervals = others.iter().map(|o| o.intervals()[of]);
            let bounds = intervals.flat_map(|i| [Some(i.above), i.up_to]);
            let own = self.intervals()[of];
            let inner = bounds
                .flatten()
                .filter(|&bound| own.contains(bound.saturating_add(1)));
            let mut all: Vec<u64> = inner
                .chain([own.above])
                .map(|b| b.saturating_add(1))
                .collect();
            all.sort_unstable();
            all.dedup();
            all
        };
        let in_one = |sizes| others.iter().any(|other| other.has(sizes));
        let [rows, longest, keys] = [0, 1, 2].map(first);
        self.is_empty()
            || rows.iter().all(|&rows| {
                let mut of_rows = longest.iter();
                of_rows.all(|&longest| keys.iter().all(|&keys| in_one([rows, longest, keys])))
            })
    }
}

impl fmt::Display for Batches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = ["rows", "longest", "keys"]
            .into_iter()
            .zip(self.intervals());
        let bounded = all.filter(|&(_, interval)| interval != Interval::ALL);
        let named: Vec<String> = bounded
            .map(|(name, interval)| format!("{name} {interval}"))
            .collect();
        match named.is_empty() {
            true => f.write_str("any batch"),
            false => f.write_str(&named.join(", ")),
        }
    }
}

/// A partition of batches into ranges, with one choice for each.
///
/// Batches outside all ranges are not covered; another step computes the value for them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Dispatch<T> {
    entries: Vec<Entry<T>>,
}

/// One range of a partition, with its choice.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry<T> {
    pub batches: Batches,
    pub choice: T,
}

impl<T> Dispatch<T> {
    /// Creates a dispatch with one choice for every batch.
    pub fn always(choice: T) -> Self {
        Self {
            entries: vec![Entry {
                batches: Batches::ALL,
                choice,
            }],
        }
    }

    /// Creates a dispatch from ranges, which must not overlap; see [`Dispatch::overlap`].
    pub fn of(entries: Vec<Entry<T>>) -> Self {
        Self { entries }
    }

    pub fn entries(&self) -> &[Entry<T>] {
        &self.entries
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the choice for a batch. `batch.rows` must be the rows of the current launch.
    pub fn at(&self, batch: &Extents) -> Option<&T> {
        self.entry(batch).map(|entry| &entry.choice)
    }

    /// Returns the choice for a batch with its range of batches. `batch.rows` must be the rows of the current launch.
    pub fn entry(&self, batch: &Extents) -> Option<&Entry<T>> {
        let mut entries = self.entries.iter();
        entries.find(|entry| entry.batches.contains(batch))
    }

    /// Returns the ranges of batches that have a choice.
    pub fn covered(&self) -> Vec<Batches> {
        self.entries.iter().map(|entry| entry.batches).collect()
    }

    /// Returns two overlapping ranges, if there are any.
    pub fn overlap(&self) -> Option<(Batches, Batches)> {
        let all = self.covered();
        let each = all.iter().enumerate();
        each.flat_map(|(at, &a)| all[..at].iter().map(move |&b| (a, b)))
            .find(|(a, b)| a.meets(*b))
    }

    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Dispatch<U> {
        let entries = self.entries.into_iter();
        let entries = entries.map(|Entry { batches, choice }| Entry {
            batches,
            choice: f(choice),
        });
        Dispatch {
            entries: entries.collect(),
        }
    }

    /// Returns the choices of the ranges, in order. A choice may occur several times.
    pub fn choices(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().map(|entry| &entry.choice)
    }
}

impl<T: PartialEq> Dispatch<T> {
    /// Creates a dispatch by rows. Each range is given by its max number of rows (`None` if unbounded) and its choice, in ascending order.
    /// A range whose choice is `None` is not covered.
    pub fn by_rows(ranges: impl IntoIterator<Item = (Option<u64>, Option<T>)>) -> Self {
        Self::by(ranges, Batches::by_rows)
    }

    /// Creates a dispatch by the length of the longest sequence, like [`Dispatch::by_rows`].
    pub fn by_longest(ranges: impl IntoIterator<Item = (Option<u64>, Option<T>)>) -> Self {
        Self::by(ranges, Batches::by_longest)
    }

    fn by(
        ranges: impl IntoIterator<Item = (Option<u64>, Option<T>)>,
        batches: fn(Interval) -> Batches,
    ) -> Self {
        let mut parts: Vec<(Interval, T)> = Vec::new();
        let mut above = 0;
        for (up_to, choice) in ranges {
            let interval = Interval { above, up_to };
            above = up_to.unwrap_or(u64::MAX);
            match (choice, parts.last_mut()) {
                _ if interval.is_empty() => {}
                (None, _) => {}
                (Some(choice), Some((last, before)))
                    if *before == choice && last.up_to == Some(interval.above) =>
                {
                    last.up_to = up_to;
                }
                (Some(choice), _) => parts.push((interval, choice)),
            }
        }
        let entry = |(interval, choice)| Entry {
            batches: batches(interval),
            choice,
        };
        Self {
            entries: parts.into_iter().map(entry).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(above: u64, up_to: Option<u64>) -> Batches {
        Batches::by_rows(Interval { above, up_to })
    }

    fn longest(above: u64, up_to: Option<u64>) -> Batches {
        Batches::by_longest(Interval { above, up_to })
    }

    #[test]
    fn batches_are_covered_if_neither_size_has_a_gap() {
        let (few, many) = (rows(0, Some(64)), rows(64, None));
        assert!(Batches::ALL.is_covered_by(&[many, few]) && !Batches::ALL.is_covered_by(&[few]));
        assert!(Batches::ALL.is_covered_by(&[Batches::ALL]));
        let (short, long) = (longest(0, Some(256)), longest(256, None));
        assert!(many.is_covered_by(&[long, short]) && !many.is_covered_by(&[long]));
        let corner = Batches {
            keys: Interval::ALL,
            rows: many.rows,
            longest: short.longest,
        };
        assert!(Batches::ALL.is_covered_by(&[few, corner, long]));
        assert!(!Batches::ALL.is_covered_by(&[few, corner]));
        assert!(corner.is_covered_by(&[short]) && !short.is_covered_by(&[corner]));
        assert!(rows(10, Some(10)).is_empty() && rows(10, Some(10)).is_covered_by(&[]));
    }

    #[test]
    fn batches_of_few_and_many_keys_are_distinguished() {
        let keys = |above, up_to| Batches {
            keys: Interval { above, up_to },
            ..rows(0, Some(8))
        };
        let (short, long) = (keys(0, Some(512)), keys(512, None));
        assert_eq!(short.to_string(), "rows up to 8, keys up to 512");
        assert!(!short.meets(long) && short.meets(longest(4, None)));
        assert!(rows(0, Some(8)).is_covered_by(&[long, short]));
        assert!(!rows(0, Some(9)).is_covered_by(&[long, short]));
        assert!(!rows(0, Some(8)).is_covered_by(&[long]));
        assert!(keys(9, Some(9)).is_empty());
        // With a cache, the number of cached keys matters. Without a cache, the sequences' own keys do.
        let batch =
            |lens: &[u32], cached: &[u32]| Extents::continuing(lens, cached, 64).expect("a batch");
        assert!(short.contains(&batch(&[1, 1], &[0, 511])));
        assert!(long.contains(&batch(&[1, 1], &[512, 0])));
        assert!(long.contains(&batch(&[1], &[0]).with_sources(&[1], &[513])));
        let one = Extents::of(&[513]).expect("a batch").with_rows(1);
        assert!(long.contains(&one) && !short.contains(&one));
    }

    #[test]
    fn batches_meet_if_both_sizes_do() {
        assert!(rows(0, Some(64)).meets(longest(900, None)));
        assert!(!rows(0, Some(64)).meets(rows(64, None)));
        assert!(rows(0, Some(65)).meets(rows(64, None)));
    }

    #[test]
    fn equal_neighbors_are_merged_and_gaps_stay() {
        let ranges = [
            (Some(8), Some('a')),
            (Some(16), Some('a')),
            (Some(32), None),
            (Some(32), Some('b')),
            (None, Some('a')),
        ];
        let dispatch = Dispatch::by_rows(ranges);
        let shown: Vec<String> = dispatch
            .entries()
            .iter()
            .map(|entry| format!("{}: {}", entry.batches, entry.choice))
            .collect();
        assert_eq!(shown, ["rows up to 16: a", "rows above 32: a"]);
        let one = Extents::of(&[1]).expect("a batch");
        let at = |rows| dispatch.at(&one.with_rows(rows)).copied();
        assert_eq!([16, 17, 32, 33].map(at), [Some('a'), None, None, Some('a')]);
        assert_eq!(dispatch.overlap(), None);
        assert!(!Batches::ALL.is_covered_by(&dispatch.covered()));
    }

    #[test]
    fn overlapping_ranges_are_reported() {
        let entry = |batches| Entry { batches, choice: 0 };
        let dispatch = Dispatch::of(vec![entry(rows(0, Some(64))), entry(longest(0, Some(64)))]);
        assert!(dispatch.overlap().is_some());
    }
}
