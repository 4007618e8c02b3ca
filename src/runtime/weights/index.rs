//! Files of a checkpoint: the shards that its index lists, and additional files next to the checkpoint.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Component, Path},
};

use super::CheckpointError;
use crate::{
    files::{self, Kind},
    graph::WeightNames,
};

/// Returns the file stem of a tensor that is in an additional file next to the checkpoint. The name of such a tensor is `stem/tensor`, for
/// example `sparse_linear/weight`. Returns `None` for other names.
pub(super) fn file_of(name: &str) -> Option<String> {
    let (stem, _) = name.split_once('/')?;
    let mut parts = Path::new(stem).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(_)), None) => Some(stem.to_owned()),
        _ => None,
    }
}

/// Returns the stems of all additional files that `names` mentions.
pub(super) fn files_of(names: &WeightNames) -> BTreeSet<String> {
    let others = names.others.values().flatten();
    others.filter_map(|name| file_of(name)).collect()
}

/// Reads an index. Returns the names of the tensors in each shard, by the file name of the shard.
pub(super) fn named_by(index: &Path) -> Result<BTreeMap<String, Vec<String>>, CheckpointError> {
    let broken = |problem: String| CheckpointError::Index {
        file: index.to_owned(),
        problem,
    };
    let text = files::text(index, Kind::ShardIndex)?;
    let json: serde_json::Value = serde_json::from_str(&text).map_err(|e| broken(e.to_string()))?;
    let map = json
        .get("weight_map")
        .and_then(serde_json::Value::as_object)
        .ok_or_else(|| broken("there is no `weight_map`".to_owned()))?;
    let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, shard) in map {
        let name = shard
            .as_str()
            .ok_or_else(|| broken(format!("`{tensor}` names no file")))?;
        // An index is untrusted input: it may name files in its own folder only.
        if Path::new(name).components().count() != 1 || name.starts_with('.') {
            return Err(broken(format!("`{name}` is not a plain file name")));
        }
        let tensors = shards.entry(name.to_owned()).or_default();
        tensors.push(tensor.clone());
    }
    Ok(shards)
}

/// Replaces every numeric component of a dotted tensor name with `#`.
pub(super) fn without_indices(name: &str) -> String {
    let part = |part: &str| match part.bytes().all(|b| b.is_ascii_digit()) {
        true => "#".to_owned(),
        false => part.to_owned(),
    };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}
