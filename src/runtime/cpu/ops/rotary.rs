//! Rotary position embedding.

use gemmule_cpu::{parallel::for_row_blocks, rows};

use super::args::Args;
use super::{OpError, forms};
use crate::{kernels::rotary::Rotary, ops::Rotation};

forms! {
    Rotary => rotary;
}

fn rotary(spec: &Rotary, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let heads = spec.rotation.heads;
    let shape = [args.extents.tokens, u64::from(heads), u64::from(spec.head)];
    let x = args.real("x", &[shape[0], u64::from(spec.stride)])?;
    let positions = args.i32s("positions", shape[0])?;
    let out = args.out(&shape)?;
    let head = spec.head as usize;
    let width = heads as usize * head;
    for_row_blocks(out, width, &|first, out| {
        for (i, row) in out.chunks_exact_mut(width).enumerate() {
            let token = first + i;
            let from = token * spec.stride as usize + spec.from as usize;
            row.copy_from_slice(&x[from..][..width]);
            rotate(&spec.rotation, head, positions[token], row);
        }
    });
    Ok(())
}

/// Rotates the heads of a token. Each head has `head` columns.
pub(super) fn rotate(rotation: &Rotation, head: usize, position: i32, heads: &mut [f32]) {
    rows::rotate(
        &rotation.frequencies,
        rotation.factor,
        head,
        position,
        heads,
    );
}
