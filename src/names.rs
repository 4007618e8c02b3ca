//! Helpers for error messages that quote what a user entered: suggestions for misspelled names, and excerpts of long values.

use std::borrow::Cow;

/// Max characters of a value in an error message.
const MAX_VALUE: usize = 80;
/// Max characters of a name that is compared with known names.
const MAX_NAME: usize = 200;

/// Returns `value` for an error message. If it has more than 80 characters, the rest is replaced by the number of omitted bytes.
pub fn excerpt(value: &str) -> Cow<'_, str> {
    match value.char_indices().nth(MAX_VALUE) {
        None => Cow::Borrowed(value),
        Some((at, _)) => {
            let (first, rest) = value.split_at(at);
            format!("{first}… ({} bytes left out)", rest.len()).into()
        }
    }
}

/// Shortens a message that may quote a long value to about `max` characters, by leaving out its middle.
pub fn without_middle(message: &str, max: usize) -> Cow<'_, str> {
    if message.char_indices().nth(max).is_none() {
        return Cow::Borrowed(message);
    }
    let mut starts = message.char_indices().map(|(at, _)| at);
    let first = starts.nth(max / 2).unwrap_or(0);
    let last = starts.nth_back(max / 2).unwrap_or(message.len());
    let (begin, end) = (&message[..first], &message[last..]);
    format!("{begin}… ({} bytes left out) …{end}", last - first).into()
}

/// Returns the first [`MAX_NAME`] characters of `name`, to bound the cost of an edit distance. No known name is that long.
fn beginning(name: &str) -> &str {
    let end = name.char_indices().nth(MAX_NAME);
    end.map_or(name, |(at, _)| &name[..at])
}

/// Returns the candidate with the smallest edit distance from `name`. The distance may be up to a third of the length of `name`, rounded
/// up, or up to 2 if that is more. Returns `None` if the distances of all candidates are larger.
pub fn nearest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let name = beginning(name);
    let limit = name.chars().count().div_ceil(3).max(2);
    candidates
        .map(|c| (strsim::levenshtein(name, c), c))
        .filter(|&(distance, _)| distance <= limit)
        .min()
        .map(|(_, c)| c)
}

/// Returns up to `most` candidates, in order of their edit distance from `name`. Candidates that begin with `name` come before all others.
pub fn nearest_few<'a>(
    name: &str,
    candidates: impl Iterator<Item = &'a str>,
    most: usize,
) -> Vec<&'a str> {
    let name = beginning(name);
    let mut all: Vec<(bool, usize, &str)> = candidates
        .map(|c| (!c.starts_with(name), strsim::levenshtein(name, c), c))
        .collect();
    all.sort_unstable();
    all.dedup();
    all.truncate(most);
    all.into_iter().map(|(.., c)| c).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_found_and_a_far_one_is_not_offered() {
        let names = ["layer_norm", "linear", "softmax"];
        assert_eq!(nearest("layernorm", names.into_iter()), Some("layer_norm"));
        assert_eq!(nearest("conv2d", names.into_iter()), None);
    }

    #[test]
    fn long_values_are_shortened_between_characters() {
        assert_eq!(excerpt("short"), "short");
        let long = "é".repeat(1000);
        let expected = format!("{}… (1840 bytes left out)", "é".repeat(80));
        assert_eq!(excerpt(&long), expected);
        assert_eq!(nearest(&long, ["softmax"].into_iter()), None);
        assert_eq!(without_middle("short", 5), "short");
        let message = format!("begins {long} ends");
        let short = without_middle(&message, 40);
        assert!(
            short.starts_with("begins éé") && short.ends_with("éé ends"),
            "{short}"
        );
        assert!(short.contains(" bytes left out"), "{short}");
        assert!(short.chars().count() < 70, "{short}");
        // The kept bytes and the reported number of omitted bytes add up to the whole message.
        let n = short
            .split(['(', ' '])
            .find_map(|word| word.parse::<usize>().ok());
        let kept = short.replace(&format!("… ({} bytes left out) …", n.unwrap()), "");
        assert_eq!(kept.len() + n.unwrap(), message.len());
    }

    #[test]
    fn the_nearest_few_begin_with_those_that_the_name_begins() {
        let names = ["deu_Latn", "dan_Latn", "eng_Latn", "de"];
        let few = |name, most| nearest_few(name, names.into_iter(), most);
        assert_eq!(few("deu", 2), ["deu_Latn", "de"]);
        assert_eq!(few("xx", 9).len(), 4);
    }
}
