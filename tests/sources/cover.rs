//! Choice of the texts that are reviewed: a few that contain all neighbouring lines of the others.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
};

use super::{partials::stem, skeleton::skeleton};

/// Text of a template or a partial in a source.
#[derive(Clone, Debug, PartialEq)]
pub struct Rendering {
    /// Name of the template, or path of the partial.
    pub path: &'static str,
    pub text: String,
    /// Symbol of the source.
    pub symbol: &'static str,
    /// Whether the kernel is only in a shipped model, so that it may change or vanish with the model.
    pub is_of_model: bool,
    /// Each line of the skeleton with the next one. An empty line precedes the first and follows the last.
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

    /// The pairs with the path.
    fn lines(&self) -> impl Iterator<Item = (&str, &str)> {
        self.pairs.iter().map(|pair| (self.path, pair.as_str()))
    }

    fn is_partial(&self) -> bool {
        self.path.starts_with("partials/")
    }
}

/// Returns the renderings for review by name of their snapshots. Those of a template or a partial together contain all pairs of
/// neighbouring lines of all its renderings. Among equals, the choice prefers those that come first in `all`.
pub fn snapshots(all: &[Rendering]) -> BTreeMap<String, &Rendering> {
    let mut by_path: BTreeMap<&str, Vec<&Rendering>> = BTreeMap::new();
    let mut distinct = HashSet::new();
    for rendering in all {
        if distinct.insert((rendering.path, &rendering.pairs)) {
            by_path.entry(rendering.path).or_default().push(rendering);
        }
    }
    let mut snapshots = BTreeMap::new();
    for (path, candidates) in by_path {
        let chosen = cover(&candidates);
        for &rendering in &chosen {
            let name = match (rendering.is_partial(), chosen.len()) {
                (false, _) => rendering.symbol.to_owned(),
                (true, 1) => format!("partials/{}", stem(path)),
                (true, _) => format!("partials/{}.{}", stem(path), rendering.symbol),
            };
            snapshots.insert(name, rendering);
        }
    }
    snapshots
}

/// Greedily chooses candidates that contain the most pairs which no chosen one contains. Chooses among kernels that are only in models
/// after all others, so that a change of a model does not affect the others.
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
            // The first of equals.
            let Some(&(_, best)) = left.iter().min_by_key(|(new, _)| Reverse(new.len())) else {
                break;
            };
            for pair in &best.pairs {
                *n_chosen_with.entry(pair).or_default() += 1;
            }
            chosen.push(best);
        }
        // Later choices can contain all that an earlier one was chosen for.
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

/// Returns a message for each pair of neighbouring lines that `all` contain and `shown` do not.
pub fn not_shown(all: &[Rendering], shown: &[Rendering]) -> Vec<String> {
    let mut seen: HashSet<(&str, &str)> = shown.iter().flat_map(Rendering::lines).collect();
    let mut messages = Vec::new();
    for rendering in all {
        for (path, lines) in rendering.lines() {
            if seen.insert((path, lines)) {
                let symbol = rendering.symbol;
                messages.push(format!(
                    "no snapshot of `{path}` has these lines of {symbol}:\n{lines}"
                ));
            }
        }
    }
    messages
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendering(path: &'static str, symbol: &'static str, lines: &str) -> Rendering {
        let is_of_model = symbol.starts_with("model");
        Rendering::new(path, lines.replace(' ', "\n"), symbol, is_of_model)
    }

    fn names(all: &[Rendering]) -> Vec<String> {
        snapshots(all).into_keys().collect()
    }

    #[test]
    fn snapshots_contain_all_neighbouring_lines_with_few_renderings() {
        let all = [
            rendering("t", "ab", "a b"),
            rendering("t", "abcab", "a b c1 a b"),
            rendering("t", "bca", "b c1 a"),
            // The numbers differ.
            rendering("t", "bca2", "b c2 a"),
            rendering("other", "ca", "c a"),
            rendering("partials/p.cu", "ab", "a b"),
            rendering("partials/q.cu", "ab", "a b"),
            rendering("partials/q.cu", "bca", "b"),
        ];
        let expected = [
            "abcab",
            "bca",
            "ca",
            "partials/p",
            "partials/q.ab",
            "partials/q.bca",
        ];
        assert_eq!(names(&all), expected);
    }

    /// `middle` comes first. Then the other two are needed, and contain all its pairs.
    #[test]
    fn a_choice_that_later_ones_make_redundant_is_no_snapshot() {
        let all = [
            rendering("t", "middle", "s a b c e"),
            rendering("t", "left", "s a b x e"),
            rendering("t", "right", "s y b c e"),
        ];
        assert_eq!(names(&all), ["left", "right"]);
        assert_eq!(names(&all[..2]), ["left", "middle"]);
    }

    #[test]
    fn kernels_of_models_change_no_other_choice() {
        let without = [rendering("t", "ab", "a b"), rendering("t", "ac", "a c")];
        let with = [&[rendering("t", "model", "a b a c d")], &without[..]].concat();
        assert_eq!(names(&without), ["ab", "ac"]);
        assert_eq!(names(&with), ["ab", "ac", "model"]);
    }

    #[test]
    fn lines_without_a_snapshot_are_reported_once() {
        let all = [
            rendering("t", "one", "a b c"),
            rendering("t", "two", "a c"),
            rendering("t", "three", "a c"),
        ];
        assert_eq!(
            not_shown(&all, &all[..1]),
            ["no snapshot of `t` has these lines of two:\na\nc"]
        );
        assert_eq!(not_shown(&all, &all[..2]), [""; 0]);
    }
}
