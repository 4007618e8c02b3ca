//! Rotary position embedding.

use super::OpError;
use super::args::Args;
use super::parallel::for_row_blocks;
use crate::{kernels::rotary::Rotary, ops::Rotation};

pub(super) fn rotary(spec: &Rotary, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let heads = spec.rotation.heads;
    let shape = [args.extents.tokens, u64::from(heads), u64::from(spec.head)];
    let x = args.real("x", &[shape[0], u64::from(spec.stride)])?;
    let positions = args.i32s("positions", shape[0])?;
    let out = args.out(&shape)?;
    let head = spec.head as usize;
    let width = heads as usize * head;
    for_row_blocks(out, width, |first, out| {
        for (i, row) in out.chunks_exact_mut(width).enumerate() {
            let token = first + i;
            let from = token * spec.stride as usize + spec.from as usize;
            row.copy_from_slice(&x[from..][..width]);
            rotate(&spec.rotation, head, positions[token], row);
        }
    });
    Ok(())
}

/// Rotates the heads of a token, each `head` columns wide.
pub(super) fn rotate(rotation: &Rotation, head: usize, position: i32, heads: &mut [f32]) {
    let position = position as f32;
    for (c, &frequency) in rotation.frequencies.iter().enumerate() {
        let (sin, cos) = (position * frequency).sin_cos();
        let (sin, cos) = (rotation.factor * sin, rotation.factor * cos);
        for head in heads.chunks_exact_mut(head) {
            let (a, b) = (head[c], head[c + rotation.frequencies.len()]);
            head[c] = a * cos - b * sin;
            head[c + rotation.frequencies.len()] = b * cos + a * sin;
        }
    }
}
