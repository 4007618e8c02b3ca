//! Comparison of a checkpoint's tensors with those that a program reads.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{EngineError, Folder};
use crate::{
    graph::{Op, WeightExpr, WeightNames},
    model::Description,
    program::{Program, Storage, Tensor},
    runtime::weights::{Checkpoint, WeightSource},
    tensor::Element,
};

/// A tensor of a checkpoint: its name and shape.
type Stored<'a> = (&'a str, &'a [u64]);

/// Returns the stored tensors that a program reads.
pub(super) fn stored(program: &Program) -> Vec<Stored<'_>> {
    let tensors = program.tensors.iter();
    let weights = tensors.filter_map(|t| match &t.place {
        Storage::Weight(expr) => Some(expr.stored()),
        _ => None,
    });
    weights.flatten().collect()
}

/// Returns the number of matrices that are stored as low-bit values with scales.
pub(super) fn n_packed(program: &Program) -> usize {
    let is_packed = |tensor: &&Tensor| matches!(tensor.element, Element::Scaled(_));
    program.tensors.iter().filter(is_packed).count()
}

/// Returns the number of matrices whose columns are sorted by quantization group (`desc_act`).
pub(super) fn n_ordered(program: &Program) -> usize {
    let is_ordered = |tensor: &&Tensor| {
        matches!(
            tensor.place,
            Storage::Weight(WeightExpr::OrderedColumns { .. })
        )
    };
    program.tensors.iter().filter(is_ordered).count()
}

/// Opens a folder's checkpoint, and checks that it has all tensors of the program with the expected shapes.
///
/// # Errors
/// Returns an error if files are missing or damaged, or if tensors are missing or have another shape.
pub fn open_checkpoint(
    folder: &Folder,
    names: &WeightNames,
    program: &Program,
) -> Result<Checkpoint, EngineError> {
    let checkpoint = Checkpoint::of(folder.files(), folder.root_files(), names.clone())?;
    checkpoint.check(&stored(program))?;
    Ok(checkpoint)
}

/// Returns the names of a checkpoint's tensors that no output of the description reads. Tensors that are known to be irrelevant are left
/// out.
///
/// If a tensor is read in some layers but not in others, this is an error. Either the checkpoint has more layers than config.json, or the
/// description names a layer's weights without the layer's index.
///
/// # Errors
/// Returns [`EngineError::LeftOut`] if a tensor is read in only some layers. The error names the first unread tensor.
pub fn unread(
    source: &dyn WeightSource,
    names: &WeightNames,
    program: &Program,
    description: &Description,
    config: &Value,
) -> Result<Vec<String>, EngineError> {
    let stored = stored(program);
    // The graphs of all outputs are built only if this program leaves tensors unread.
    let mut left = source.surplus(&stored);
    left.retain(|name| !names.is_ignored(name));
    if left.is_empty() {
        return Ok(left);
    }
    let mut names = names.clone();
    let mut read: Vec<(String, Vec<u64>)> = Vec::new();
    for output in description.output_names() {
        // An output that this config.json does not support reads no tensors.
        let Ok(model) = description.build(config, Some(&[output])) else {
            continue;
        };
        names.others.extend(model.weight_names.others);
        names.ties.extend(model.weight_names.ties);
        for id in model.graph.topological() {
            if let Op::Weight(expr) = model.graph.op(id) {
                let stored = expr.stored().into_iter();
                read.extend(stored.map(|(name, dims)| (name.to_owned(), dims.to_vec())));
            }
        }
    }
    let read = read.iter().map(|(n, d)| (n.as_str(), d.as_slice()));
    let all: Vec<Stored> = read.chain(stored).collect();
    if let [first, rest @ ..] = source.left_out(&all).as_slice() {
        return Err(EngineError::LeftOut {
            first: first.clone(),
            n: rest.len() + 1,
        });
    }
    // Tensors whose names are alternative spellings of names in `all`, and tied output heads, do not count as unread.
    let heads = names.ties.keys().map(String::as_str);
    let known = all.iter().map(|&(name, _)| name).chain(heads);
    let known: BTreeSet<String> = known.flat_map(|name| names.spellings(name)).collect();
    left.retain(|name| !known.contains(name));
    Ok(left)
}

/// Warns of tensors that the description does not read.
pub(super) fn warn_of_unread(description: &Description, unread: &[String]) {
    if let [first, rest @ ..] = unread {
        let more = match rest.len() {
            0 => String::new(),
            n => format!(" and {n} more of its tensors"),
        };
        let name = description.name();
        tracing::warn!(
            "no output of the description `{name}` reads the checkpoint's `{first}`{more}; if the model was trained with them, results differ"
        );
    }
}
