//! Runs with padding: batches are padded before a run, and padding is removed from the outputs.

use std::borrow::Cow;

use crate::{
    program::{Padding, Program},
    runtime::{
        Output,
        batch::{Batch, BatchError},
    },
    tensor::{Shape, Symbol},
};

/// Returns the batch in the layout that `padding` requires.
pub(crate) fn laid_out(batch: &Batch, padding: Padding) -> Result<Cow<'_, Batch>, BatchError> {
    match padding {
        Padding::Removed => {
            batch.check_unpadded()?;
            batch.check_attended().map(|()| Cow::Borrowed(batch))
        }
        Padding::Expanded => batch.check_unpadded().map(|()| Cow::Borrowed(batch)),
        Padding::Kept => batch.with_padding().map(Cow::Owned),
    }
}

/// Removes the padding from the outputs of a padded batch, so that they have the layout of the packed batch.
pub(crate) fn remove(outputs: &mut [Output], program: &Program, batch: &Batch) {
    for output in outputs {
        let named = program.outputs.iter().find(|(n, _)| *n == output.name);
        if let Some((_, tensor)) = named {
            let kept = Kept::of(&program.tensors[*tensor].shape, batch);
            if let Some(kept) = kept {
                kept.take(output);
            }
        }
    }
}

/// Indices along one dimension that remain when padding is removed.
struct Kept {
    axis: usize,
    /// Indices along the dimension, ascending.
    indices: Vec<usize>,
}

impl Kept {
    /// Returns the indices to keep in a tensor; `None` if the tensor has no padding, because no dimension counts tokens or query-key pairs.
    fn of(shape: &Shape, batch: &Batch) -> Option<Self> {
        let longest = batch.extents().longest as usize;
        let lens: Vec<usize> = batch.valid_lens().iter().map(|&n| n as usize).collect();
        let lens = || lens.iter().copied().enumerate();
        shape.0.iter().enumerate().find_map(|(axis, size)| {
            let indices = match size.as_symbol()? {
                Symbol::Tokens => lens()
                    .flat_map(|(b, n)| (0..n).map(move |i| b * longest + i))
                    .collect(),
                // Keep the scores whose query and key are both tokens of the sequence, not padding.
                Symbol::Pairs => lens()
                    .flat_map(|(b, n)| (0..n).map(move |i| (b, n, i)))
                    .flat_map(|(b, n, i)| (0..n).map(move |j| (b * longest + i) * longest + j))
                    .collect(),
                _ => return None,
            };
            Some(Self { axis, indices })
        })
    }

    fn take(&self, output: &mut Output) {
        let width: u64 = output.shape[self.axis + 1..].iter().product();
        let slab = output.shape[self.axis] * width;
        let (width, slab) = (width as usize, slab as usize);
        output.values = output
            .values
            .chunks_exact(slab.max(1))
            .flat_map(|slab| {
                let rows = self.indices.iter();
                rows.flat_map(move |&i| &slab[i * width..(i + 1) * width])
            })
            .copied()
            .collect();
        output.shape[self.axis] = self.indices.len() as u64;
    }
}
