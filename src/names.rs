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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_found_and_a_far_one_is_not_offered() {
        let names = ["layer_norm", "linear", "softmax"];
        assert_eq!(nearest("layernorm", names.into_iter()), Some("layer_norm"));
        assert_eq!(nearest("conv2d", names.into_iter()), None);
    }
}
