//! Whether a checkpoint has what a program reads, and no layers that it leaves out.

use serde_json::Value;

use super::{EngineError, Folder};
use crate::{
    graph::{Op, WeightNames},
    model::Description,
    program::{Place, Program},
    runtime::weights::{Checkpoint, WeightSource},
};

/// A tensor of a checkpoint by its name, and its shape.
type Stored<'a> = (&'a str, &'a [u64]);

/// The stored tensors that a program reads.
pub(super) fn stored(program: &Program) -> Vec<Stored<'_>> {
    let tensors = program.tensors.iter();
    let weights = tensors.filter_map(|t| match &t.place {
        Place::Weight(expr) => Some(expr.stored()),
        _ => None,
    });
    weights.flatten().collect()
}

/// A folder's checkpoint, all tensors of which that the program reads are there in their shapes.
///
/// # Errors
/// Files that are missing or damaged, and tensors that are not there or have another shape.
pub fn open_checkpoint(
    folder: &Folder,
    names: &WeightNames,
    program: &Program,
) -> Result<Checkpoint, EngineError> {
    let checkpoint = Checkpoint::open(folder.trunk(), folder.root(), names.clone())?;
    checkpoint.check(&stored(program))?;
    Ok(checkpoint)
}

/// Refuses a checkpoint whose layers are read in part: one with more of them than config.json says, or a description that
/// names a layer's weights without its number. What only other outputs read is no such layer.
///
/// # Errors
/// [`EngineError::LeftOut`] with the first tensor that is left out.
pub fn check_layers(
    source: &dyn WeightSource,
    program: &Program,
    description: &Description,
    config: &Value,
) -> Result<(), EngineError> {
    let stored = stored(program);
    if source.left_out(&stored).is_empty() {
        return Ok(());
    }
    let mut read: Vec<(String, Vec<u64>)> = Vec::new();
    for output in description.output_names() {
        // An output that this checkpoint cannot have reads nothing.
        let Ok(model) = description.build(config, Some(&[output])) else {
            continue;
        };
        for id in model.graph.topological() {
            if let Op::Weight(expr) = model.graph.op(id) {
                let stored = expr.stored().into_iter();
                read.extend(stored.map(|(name, dims)| (name.to_owned(), dims.to_vec())));
            }
        }
    }
    let read = read.iter().map(|(n, d)| (n.as_str(), d.as_slice()));
    let all: Vec<Stored> = read.chain(stored).collect();
    match source.left_out(&all).as_slice() {
        [] => Ok(()),
        [first, rest @ ..] => Err(EngineError::LeftOut {
            first: first.clone(),
            n: rest.len() + 1,
        }),
    }
}
