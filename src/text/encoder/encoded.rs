use crate::runtime::batch::{Batch, BatchError};

/// Token ids of one sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    pub ids: Vec<u32>,
    /// Segment ids, one for each token; `None` if all are 0 or the model has no segments.
    pub types: Option<Vec<u32>>,
    /// Whether the text was longer than the checkpoint's maximum and was truncated.
    pub is_cut: bool,
    /// Number of leading tokens that are attended to; `None` for all tokens. See [`Batch::with_attended`].
    pub attended: Option<usize>,
    /// Number of leading prompt tokens that pooling leaves out. See [`Batch::with_left_out`].
    pub left_out: usize,
}

impl Encoded {
    /// Packs sequences into a batch.
    ///
    /// # Errors
    /// Returns the errors of [`Batch::from_packed`].
    pub fn batch<'e>(all: impl Iterator<Item = &'e Self> + Clone) -> Result<Batch, BatchError> {
        let lens: Vec<u32> = all.clone().map(|one| one.ids.len() as u32).collect();
        let ids = all.clone().flat_map(|one| one.ids.iter().copied());
        let mut batch = Batch::from_packed(ids.collect(), &lens)?;
        if all.clone().any(|one| one.attended.is_some()) {
            let attended = all
                .clone()
                .map(|one| one.attended.unwrap_or(one.ids.len()) as u32);
            batch = batch.with_attended(attended.collect())?;
        }
        if all.clone().any(|one| one.left_out > 0) {
            let left_out = all.clone().map(|one| one.left_out as u32);
            batch = batch.with_left_out(left_out.collect())?;
        }
        if all.clone().all(|one| one.types.is_none()) {
            return Ok(batch);
        }
        let types = all.flat_map(|one| match &one.types {
            Some(types) => types.clone(),
            None => vec![0; one.ids.len()],
        });
        batch.with_type_ids(types.collect())
    }
}
