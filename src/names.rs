//! Suggestions for misspelt names in error messages.

/// Returns the candidate with the smallest edit distance from `name`, unless all are too different.
pub fn nearest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let limit = name.chars().count().div_ceil(3).max(2);
    candidates
        .map(|c| (strsim::levenshtein(name, c), c))
        .filter(|&(distance, _)| distance <= limit)
        .min()
        .map(|(_, c)| c)
}

/// Returns up to `most` candidates, those with the smallest edit distance from `name` first. Candidates that begin with `name`
/// come before all others.
pub fn nearest_few<'a>(
    name: &str,
    candidates: impl Iterator<Item = &'a str>,
    most: usize,
) -> Vec<&'a str> {
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
    fn the_nearest_few_begin_with_those_that_the_name_begins() {
        let names = ["deu_Latn", "dan_Latn", "eng_Latn", "de"];
        let few = |name, most| nearest_few(name, names.into_iter(), most);
        assert_eq!(few("deu", 2), ["deu_Latn", "de"]);
        assert_eq!(few("xx", 9).len(), 4);
    }
}
