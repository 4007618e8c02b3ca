//! Grouping of the values that loops compute. The names of a value in two iterations, such as `layer.0.query` and `layer.1.query`, differ
//! only in the index.

/// Finds the index in the name of a value in a loop. Returns the text before the index, and the index: `layer.` and 3 for `layer.3.query`.
/// Returns `None` for a name without an index.
fn iteration(name: &str) -> Option<(&str, u64)> {
    let mut at = 0;
    for part in name.split_inclusive('.') {
        let index = part.strip_suffix('.').and_then(|part| part.parse().ok());
        match index {
            Some(index) if at > 0 => return Some((&name[..at], index)),
            _ => at += part.len(),
        }
    }
    None
}

/// Formats indices as `{0..11}`, or `{0..3,6}` if some are missing.
fn index_ranges(mut indices: Vec<u64>) -> String {
    indices.sort_unstable();
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for index in indices {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == index => *last = index,
            _ => runs.push((index, index)),
        }
    }
    let words: Vec<String> = runs
        .into_iter()
        .map(|(first, last)| match first == last {
            true => first.to_string(),
            false => format!("{first}..{last}"),
        })
        .collect();
    format!("{{{}}}", words.join(","))
}

/// An item of a report about a value. Its texts may also contain names of other values.
pub trait Iterated: Clone + PartialEq {
    /// Returns the name of the value.
    fn name(&self) -> &str;

    /// Returns the item with `name` applied to each of its texts that contain names of values.
    fn renamed(&self, name: &dyn Fn(&str) -> String) -> Self;
}

/// Items that differ only in the iteration of a loop.
pub struct Alike<'a, T> {
    pub first: &'a T,
    /// Prefix of the names before the index; empty if the item belongs to no iteration.
    prefix: &'a str,
    /// Iterations, starting with that of the first item.
    indices: Vec<u64>,
}

impl<T: Iterated> Alike<'_, T> {
    /// Returns the number of items.
    pub fn n(&self) -> usize {
        self.indices.len().max(1)
    }

    /// Returns the first item with `{0..11}` in place of its own index, if the items have the indices 0 to 11. An index in another name,
    /// such as that of the reader `layer.1.key`, becomes the range shifted by the same distance, `{1..12}`.
    pub fn shown(&self) -> T {
        let [own, _, ..] = self.indices.as_slice() else {
            return self.first.clone();
        };
        let all = |n: u64| {
            let shifted = |&index: &u64| (index + n).saturating_sub(*own);
            index_ranges(self.indices.iter().map(shifted).collect())
        };
        self.first.renamed(&|name| indexed(name, self.prefix, all))
    }
}

/// Groups items that differ only in the iteration of a loop. The groups are in the order of their first items.
pub fn alike<T: Iterated>(items: &[T]) -> Vec<Alike<'_, T>> {
    let mut all: Vec<(T, Alike<'_, T>)> = Vec::new();
    for item in items {
        let (prefix, index) = iteration(item.name()).unzip();
        let prefix = prefix.unwrap_or_default();
        // Formats an index relative to the index of the item.
        let from = |n: u64| format!("{{{}}}", i128::from(n) - i128::from(index.unwrap_or(0)));
        let general = match index {
            Some(_) => item.renamed(&|name| indexed(name, prefix, from)),
            None => item.clone(),
        };
        let same = all.iter_mut().find(|(known, alike)| {
            let is_new = |index| !alike.indices.contains(&index);
            index.is_some_and(is_new) && alike.prefix == prefix && *known == general
        });
        match same {
            Some((_, alike)) => alike.indices.extend(index),
            None => {
                let alike = Alike {
                    first: item,
                    prefix,
                    indices: index.into_iter().collect(),
                };
                all.push((general, alike));
            }
        }
    }
    all.into_iter().map(|(_, alike)| alike).collect()
}

/// Finds each name in `text` that starts with `prefix` and an index, and replaces the index with the result of `show`.
fn indexed(text: &str, prefix: &str, show: impl Fn(u64) -> String) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(prefix) {
        let (before, from) = rest.split_at(at);
        let after = &from[prefix.len()..];
        out.push_str(before);
        let begins = !out.ends_with(|c: char| c.is_alphanumeric() || "._".contains(c));
        out.push_str(prefix);
        let digits = after.find(|c: char| !c.is_ascii_digit());
        let (index, end) = after.split_at(digits.unwrap_or(after.len()));
        rest = match index.parse() {
            Ok(index) if begins && end.starts_with('.') => {
                out.push_str(&show(index));
                end
            }
            _ => after,
        };
    }
    out + rest
}
