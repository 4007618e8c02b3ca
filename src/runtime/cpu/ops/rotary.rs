//! Rotary position embedding.

use super::OpError;
use super::args::Args;
use super::parallel::for_row_blocks;
use crate::kernels::rotary::{Rotary, Rotation};

pub(super) fn rotary(spec: &Rotary, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let Rotation {
        heads,
        frequencies,
        factor,
    } = &spec.rotation;
    let shape = [args.extents.tokens, u64::from(*heads), u64::from(spec.head)];
    let x = args.real("x", &[shape[0], u64::from(spec.stride)])?;
    let positions = args.i32s("positions", shape[0])?;
    let out = args.out(&shape)?;
    let (head, n) = (spec.head as usize, frequencies.len());
    let width = *heads as usize * head;
    for_row_blocks(out, width, |first, out| {
        let mut turns = vec![(0.0, 0.0); n];
        for (i, row) in out.chunks_exact_mut(width).enumerate() {
            let token = first + i;
            let position = positions[token] as f32;
            for (turn, &frequency) in turns.iter_mut().zip(frequencies) {
                let (sin, cos) = (position * frequency).sin_cos();
                *turn = (factor * sin, factor * cos);
            }
            let from = token * spec.stride as usize + spec.from as usize;
            row.copy_from_slice(&x[from..][..width]);
            for head in row.chunks_exact_mut(head) {
                let (low, high) = head.split_at_mut(n);
                for ((a, b), (sin, cos)) in low.iter_mut().zip(high).zip(&turns) {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
        }
    });
    Ok(())
}
