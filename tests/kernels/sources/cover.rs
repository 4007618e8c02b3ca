//! Chooses the renderings of templates and partials that are reviewed: a few texts that contain every pair of neighboring lines of all
//! texts.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
};

use super::skeleton::skeleton;

/// Text of a template or a partial in the source of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Rendering {
    /// Name of the template, or path of the partial.
    pub path: &'static str,
    pub text: String,
    /// Symbol of the kernel.
    pub symbol: &'static str,
    /// Whether only shipped models use the kernel. If so, a change of a model may change or remove the kernel.
    pub is_of_model: bool,
    /// All pairs of neighboring lines of the text's [`skeleton`]. An empty line is added before the first and after the last line.
    pairs: BTreeSet<String>,
}

impl Rendering {
    pub fn new(path: &'static str, text: String, symbol: &'static str, is_of_model: bool) -> Self {
        let skeleton = format!("\n{}\n", skeleton(symbol, text.trim_matches('\n')));
        let lines: Vec<&str> = skeleton.lines().collect();
        let pairs = lines.windows(2).map(|pair| pair.join("\n")).collect();
        Self {
            path,
            text,
            symbol,
            is_of_model,
            pairs,
        }
    }
}

/// Returns, for each path of a template or partial, the renderings that are chosen for review. Any two neighboring lines in a rendering of
/// a path are also neighbors in a chosen rendering of the path. Ties go to the rendering that comes first in `all`.
pub fn chosen(all: &[Rendering]) -> BTreeMap<&'static str, Vec<&Rendering>> {
    let mut by_path: BTreeMap<&str, Vec<&Rendering>> = BTreeMap::new();
    let mut distinct = HashSet::new();
    for rendering in all {
        if distinct.insert((rendering.path, &rendering.pairs)) {
            by_path.entry(rendering.path).or_default().push(rendering);
        }
    }
    let by_path = by_path.into_iter();
    by_path
        .map(|(path, candidates)| (path, cover(&candidates)))
        .collect()
}

/// Chooses candidates that together contain all pairs of neighboring lines. Greedily chooses the candidate with the most pairs that no
/// chosen rendering contains. Candidates that occur only in models are considered last, so that a change of a model does not affect the
/// other choices.
fn cover<'a>(candidates: &[&'a Rendering]) -> Vec<&'a Rendering> {
    let mut n_chosen_with: HashMap<&String, usize> = HashMap::new();
    let mut all_chosen = Vec::new();
    for is_of_model in [false, true] {
        let candidates = candidates.iter().filter(|c| c.is_of_model == is_of_model);
        let mut left: Vec<(Vec<&String>, &Rendering)> =
            candidates.map(|c| (c.pairs.iter().collect(), *c)).collect();
        let mut chosen: Vec<&Rendering> = Vec::new();
        loop {
            for (new, _) in &mut left {
                new.retain(|pair| !n_chosen_with.contains_key(pair));
            }
            left.retain(|(new, _)| !new.is_empty());
            // Ties go to the first candidate.
            let Some(&(_, best)) = left.iter().min_by_key(|(new, _)| Reverse(new.len())) else {
                break;
            };
            for pair in &best.pairs {
                *n_chosen_with.entry(pair).or_default() += 1;
            }
            chosen.push(best);
        }
        // Drop a rendering if the other chosen renderings contain all its pairs of neighboring lines.
        chosen.retain(|rendering| {
            let is_needed = rendering.pairs.iter().any(|pair| n_chosen_with[pair] == 1);
            if !is_needed {
                for pair in &rendering.pairs {
                    *n_chosen_with.get_mut(pair).expect("it was counted") -= 1;
                }
            }
            is_needed
        });
        all_chosen.extend(chosen);
    }
    all_chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendering(path: &'static str, symbol: &'static str, lines: &str) -> Rendering {
        let is_of_model = symbol.starts_with("model");
        Rendering::new(path, lines.replace(' ', "\n"), symbol, is_of_model)
    }

    fn symbols(all: &[Rendering], path: &str) -> Vec<&'static str> {
        let mut symbols: Vec<_> = chosen(all)[path].iter().map(|r| r.symbol).collect();
        symbols.sort_unstable();
        symbols
    }

    #[test]
    fn chosen_renderings_contain_all_neighboring_lines() {
        let all = [
            rendering("t", "ab", "a b"),
            rendering("t", "abcab", "a b c1 a b"),
            rendering("t", "bca", "b c1 a"),
            // Only the numbers differ.
            rendering("t", "bca2", "b c2 a"),
            rendering("other", "ca", "c a"),
            rendering("partials/p.cu", "ab", "a b"),
            rendering("partials/q.cu", "ab", "a b"),
            rendering("partials/q.cu", "bca", "b"),
        ];
        assert_eq!(symbols(&all, "t"), ["abcab", "bca"]);
        assert_eq!(symbols(&all, "other"), ["ca"]);
        assert_eq!(symbols(&all, "partials/p.cu"), ["ab"]);
        assert_eq!(symbols(&all, "partials/q.cu"), ["ab", "bca"]);
    }

    /// `middle` is chosen first. `left` and `right` are also needed, and together contain all pairs of `middle`. Therefore `middle` is
    /// dropped.
    #[test]
    fn a_choice_that_later_ones_make_redundant_is_dropped() {
        let all = [
            rendering("t", "middle", "s a b c e"),
            rendering("t", "left", "s a b x e"),
            rendering("t", "right", "s y b c e"),
        ];
        assert_eq!(symbols(&all, "t"), ["left", "right"]);
        assert_eq!(symbols(&all[..2], "t"), ["left", "middle"]);
    }

    #[test]
    fn kernels_of_models_change_no_other_choice() {
        let without = [rendering("t", "ab", "a b"), rendering("t", "ac", "a c")];
        let with = [&[rendering("t", "model", "a b a c d")], &without[..]].concat();
        assert_eq!(symbols(&without, "t"), ["ab", "ac"]);
        assert_eq!(symbols(&with, "t"), ["ab", "ac", "model"]);
    }
}
