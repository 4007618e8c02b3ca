//! Module names in the lists of a configuration.

use std::collections::BTreeSet;

use fancy_regex::Regex;

use super::error::{Result, wrong_key};
use crate::pickle::shown;

/// Maximum number of regular expressions in a list.
const MAX_PATTERNS: usize = 1024;
/// Maximum size of a regular expression in bytes.
const MAX_PATTERN: usize = 1024;

/// A list of modules by name, by pattern (`re:…`) and by class.
#[derive(Debug, Default)]
pub(super) struct Modules {
    /// Key of config.json, for messages.
    key: String,
    exact: BTreeSet<String>,
    patterns: Vec<Regex>,
    /// Whether the class `Linear` is listed.
    linear: bool,
    /// Whether an entry of `exact` also matches consecutive components of a module's name, such as `mlp` in `layers.0.mlp.up_proj`.
    parts: bool,
}

/// Kind of match between a list and a module, in ascending order of precedence in compressed-tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Match {
    Class,
    Pattern,
    Exact,
}

impl Modules {
    /// Parses a list in the format of compressed-tensors.
    pub fn compressed(key: String, texts: Vec<String>) -> Result<Self> {
        let mut modules = Self::default();
        for text in texts {
            if text == "Linear" {
                modules.linear = true;
            } else if let Some(pattern) = text.strip_prefix("re:") {
                modules.patterns.push(regex(&key, pattern)?);
                check_number(&key, modules.patterns.len())?;
            } else {
                modules.exact.insert(text);
            }
        }
        modules.key = key;
        Ok(modules)
    }

    /// Parses a list of module names, or of components of names, such as `lm_head`.
    pub fn parts(key: String, texts: Vec<String>) -> Result<Self> {
        Ok(Self {
            key,
            exact: texts.into_iter().collect(),
            parts: true,
            ..Self::default()
        })
    }

    /// Adds a regular expression that is matched at the start of a name.
    pub fn add_pattern(&mut self, key: &str, pattern: &str) -> Result<()> {
        self.patterns.push(regex(key, pattern)?);
        self.key = key.to_owned();
        check_number(key, self.patterns.len())
    }

    pub fn key(&self) -> &str {
        &self.key
    }

    /// Returns a listed class other than `Linear`. Class names have no dot and begin with a capital letter.
    pub fn other_class(&self) -> Option<&str> {
        let mut names = self.exact.iter().map(String::as_str);
        names.find(|name| name.starts_with(|c: char| c.is_ascii_uppercase()) && !name.contains('.'))
    }

    /// Returns how the list matches `module`; `None` if the list does not match it.
    pub fn find(&self, module: &str) -> Result<Option<Match>> {
        if self.exact.contains(module) || (self.parts && self.has_part(module)) {
            return Ok(Some(Match::Exact));
        }
        for pattern in &self.patterns {
            let found = pattern.is_match(module).map_err(|error| {
                let problem = format!(
                    "has the pattern `{}`, which cannot be applied to `{}`: {error}; simplify it",
                    shown(pattern.as_str()),
                    shown(module)
                );
                wrong_key(&self.key, problem)
            })?;
            if found {
                return Ok(Some(Match::Pattern));
            }
        }
        Ok(self.linear.then_some(Match::Class))
    }

    /// Returns whether consecutive components of the module's name are listed as one entry.
    fn has_part(&self, module: &str) -> bool {
        let starts = std::iter::once(0).chain(module.match_indices('.').map(|(at, _)| at + 1));
        let starts: Vec<usize> = starts.take(32).collect();
        let ends = module.match_indices('.').map(|(at, _)| at);
        let ends: Vec<usize> = ends.take(32).chain([module.len()]).collect();
        starts.iter().any(|&start| {
            let ends = ends.iter().filter(|&&end| end > start);
            ends.into_iter()
                .any(|&end| self.exact.contains(&module[start..end]))
        })
    }
}

fn check_number(key: &str, n: usize) -> Result<()> {
    match n > MAX_PATTERNS {
        true => {
            let problem = format!("has more than {MAX_PATTERNS} patterns; join them");
            Err(wrong_key(key, problem))
        }
        false => Ok(()),
    }
}

/// Compiles a pattern that is matched at the start of a text, like Python's `re.match`.
fn regex(key: &str, pattern: &str) -> Result<Regex> {
    let wrong = |problem: String| {
        let problem = format!("has the pattern `{}`, {problem}", shown(pattern));
        wrong_key(key, problem)
    };
    if pattern.len() > MAX_PATTERN {
        return Err(wrong(format!(
            "which is longer than {MAX_PATTERN} bytes; shorten it"
        )));
    }
    Regex::new(&format!(r"\A(?:{pattern})"))
        .map_err(|error| wrong(format!("which is no regular expression: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.to_owned()).collect()
    }

    #[test]
    fn patterns_match_from_the_start_and_names_whole() {
        let texts = list(&["lm_head", "re:.*gate$", "re:mlp", "re:a(?!b)", "Linear"]);
        let modules = Modules::compressed("ignore".to_owned(), texts).expect("they are valid");
        for (module, found) in [
            ("lm_head", Match::Exact),
            ("model.lm_head", Match::Class),
            ("layers.0.mlp.gate", Match::Pattern),
            ("layers.0.mlp.gate_proj", Match::Class),
            ("mlp.up", Match::Pattern),
            ("ab", Match::Class),
            ("ac", Match::Pattern),
        ] {
            let is = modules.find(module).expect("the patterns are simple");
            assert_eq!(is, Some(found), "{module}");
        }
    }

    #[test]
    fn a_part_is_a_run_of_whole_components() {
        let texts = list(&["lm_head", "mlp.gate", "layers.1"]);
        let modules = Modules::parts("modules_to_not_convert".to_owned(), texts).expect("valid");
        for (module, found) in [
            ("lm_head", true),
            ("model.lm_head", true),
            ("layers.0.mlp.gate", true),
            ("layers.0.mlp.gate_proj", false),
            ("layers.1.q", true),
            ("layers.11.q", false),
        ] {
            let is = modules.find(module).expect("no pattern").is_some();
            assert_eq!(is, found, "{module}");
        }
    }

    #[test]
    fn a_pattern_that_is_none_is_named() {
        let error = Modules::compressed("ignore".to_owned(), list(&["re:(a"])).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("its key `ignore` has the pattern `(a`"),
            "{error}"
        );
    }
}
