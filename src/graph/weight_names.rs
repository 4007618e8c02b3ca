use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// Alternative names in checkpoints for the tensors of a graph.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WeightNames {
    /// Prefixes of published names, such as `bert.`. The empty prefix is tried even if it is not listed.
    pub prefixes: Vec<String>,
    /// Suffixes with their alternatives, for example `LayerNorm.weight` and `LayerNorm.gamma`.
    pub endings: Vec<(String, Vec<String>)>,
    /// Alternative names of single tensors.
    pub others: BTreeMap<String, Vec<String>>,
    /// Folders with separate weights, next to the checkpoint's files. The tensor `linear.weight` of `2_Dense` is called
    /// `2_Dense/linear.weight`. Such tensors have no alternative names.
    pub folders: Vec<String>,
    /// Names of tied tensors that are not read, each with the name of the tensor that is read instead.
    #[serde(default)]
    pub ties: BTreeMap<String, String>,
    /// Names of tensors that config.json declares untied. Their alternative names in a checkpoint then belong to other tensors, and are not
    /// read.
    #[serde(default)]
    pub untied: BTreeSet<String>,
    /// Names of tensors that affect no output of the model. One `*` in a name matches any text.
    #[serde(default)]
    pub ignored: Vec<String>,
    /// Adapter that is added to the weights; `None` if no adapter is added.
    #[serde(default)]
    pub adapter: Option<Adapter>,
}

/// A low-rank adapter (LoRA, Hu et al. 2021, arXiv:2106.09685), which adds a product of two narrow matrices to each adapted weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Adapter {
    /// Index among the adapters of the checkpoint.
    pub index: u32,
    /// Number of adapters of the checkpoint.
    pub count: u32,
    /// Number by which the product of the two narrow matrices is multiplied.
    pub scale: f64,
}

/// Buffers that the library transformers computes by itself. Checkpoints of older versions contain them.
const BUFFERS: [&str; 2] = ["*position_ids", "*rotary_emb.inv_freq"];

impl WeightNames {
    /// Returns all spellings of a name, in the order in which a checkpoint is searched for them.
    pub fn spellings(&self, name: &str) -> Vec<String> {
        if self.folders.iter().any(|f| in_folder(name, f).is_some()) {
            return vec![name.to_owned()];
        }
        let mut spellings = Vec::new();
        let others = self.others.get(name).into_iter().flatten();
        for name in std::iter::once(name).chain(others.map(String::as_str)) {
            let respelled = self.endings.iter().flat_map(|(ending, others)| {
                let stem = name.strip_suffix(ending.as_str());
                let with = move |other| stem.map(|stem| format!("{stem}{other}"));
                others.iter().filter_map(with)
            });
            for name in std::iter::once(name.to_owned()).chain(respelled) {
                let prefixed = self.prefixes.iter().map(|prefix| format!("{prefix}{name}"));
                spellings.extend(prefixed);
                // The empty prefix is always tried.
                if !self.prefixes.iter().any(String::is_empty) {
                    spellings.push(name);
                }
            }
        }
        spellings
    }

    /// Returns the names of tensors that must not be read in place of `name`: all spellings of tied tensors and, if `name` is untied, all
    /// spellings of its alternative names.
    pub fn unread(&self, name: &str) -> BTreeSet<String> {
        let others = self.others.get(name);
        let others = others.filter(|_| self.untied.contains(name));
        let unread = self.ties.keys().chain(others.into_iter().flatten());
        unread.flat_map(|name| self.spellings(name)).collect()
    }

    /// Returns whether a tensor of a checkpoint affects no output of the model.
    pub fn is_ignored(&self, name: &str) -> bool {
        let prefixes = self.prefixes.iter().map(String::as_str);
        let bare = prefixes.filter_map(|prefix| name.strip_prefix(prefix));
        let mut names = bare.chain([name]);
        let patterns = || {
            BUFFERS
                .into_iter()
                .chain(self.ignored.iter().map(String::as_str))
        };
        names.any(|name| patterns().any(|pattern| matches(pattern, name)))
    }

    /// Returns whether a tensor may be in a separate file beside the checkpoint, for example
    /// `sparse_linear/weight` in `sparse_linear.safetensors`.
    pub fn reads_other_files(&self) -> bool {
        self.others
            .values()
            .flatten()
            .any(|name| name.contains('/'))
    }
}

/// Returns whether a name matches a pattern, in which a `*` matches any text.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, end)) => name
            .strip_prefix(start)
            .is_some_and(|rest| rest.ends_with(end)),
    }
}

/// Returns the part of a tensor's name after `folder` and the slash; `None` if the name does not begin with them.
pub fn in_folder<'n>(name: &'n str, folder: &str) -> Option<&'n str> {
    name.strip_prefix(folder)?.strip_prefix('/')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_searched_with_every_prefix_then_other_endings_then_other_names() {
        let names = WeightNames {
            prefixes: vec![String::new(), "bert.".to_owned()],
            endings: vec![("norm.weight".to_owned(), vec!["norm.gamma".to_owned()])],
            others: BTreeMap::from([("norm.weight".to_owned(), vec!["scale".to_owned()])]),
            folders: vec!["2_Dense".to_owned()],
            ..WeightNames::default()
        };
        assert_eq!(
            names.spellings("norm.weight"),
            [
                "norm.weight",
                "bert.norm.weight",
                "norm.gamma",
                "bert.norm.gamma",
                "scale",
                "bert.scale",
            ]
        );
        assert_eq!(
            names.spellings("2_Dense/norm.weight"),
            ["2_Dense/norm.weight"]
        );
    }

    #[test]
    fn ignored_names_are_buffers_and_those_of_the_description_with_any_prefix() {
        let names = WeightNames {
            prefixes: vec!["transformer.".to_owned()],
            ignored: vec!["h.*.attn.bias".to_owned(), "cls.*".to_owned()],
            ..WeightNames::default()
        };
        for name in [
            "h.0.attn.bias",
            "transformer.h.11.attn.bias",
            "cls.seq_relationship.weight",
            "embeddings.position_ids",
            "model.layers.0.self_attn.rotary_emb.inv_freq",
        ] {
            assert!(names.is_ignored(name), "{name}");
        }
        for name in ["h.0.attn.c_attn.bias", "h.0.attn.bias.more", "score.weight"] {
            assert!(!names.is_ignored(name), "{name}");
        }
    }
}
