//! Names of values in loops. The names of two iterations differ in one index.

/// Returns the prefix of a value that a `Repeat` computes, and its iteration: `layer.` and 3 for `layer.3.query`.
pub fn iteration(name: &str) -> Option<(&str, u64)> {
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
pub fn index_ranges(mut indices: Vec<u64>) -> String {
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
