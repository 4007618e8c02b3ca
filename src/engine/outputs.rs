use super::EngineError;
use crate::runtime::Output;

/// The outputs of a run, by name.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs {
    pub(crate) outputs: Vec<Output>,
    pub(crate) lens: Vec<u32>,
}

impl Outputs {
    /// Returns the output `name`. Its shape is `[tokens, width]`, in packed order, if it has a row for each token, and `[batch, width]`
    /// otherwise.
    ///
    /// # Errors
    /// Returns [`EngineError::NoOutput`] if the run has no such output.
    pub fn get(&self, name: &str) -> Result<&Output, EngineError> {
        self.outputs
            .iter()
            .find(|o| o.name == name)
            .ok_or_else(|| EngineError::NoOutput {
                name: name.to_owned(),
                known: self.outputs.iter().map(|o| o.name.clone()).collect(),
            })
    }

    /// Returns an iterator over all outputs.
    pub fn iter(&self) -> impl Iterator<Item = &Output> {
        self.outputs.iter()
    }

    /// Returns the rows of sequence `sequence` in an output with a row for each token, row-major.
    ///
    /// # Errors
    /// Returns [`EngineError::NoOutput`] if the run has no such output, and [`EngineError::NoSequence`] if the index is
    /// out of range.
    pub fn sequence(&self, name: &str, sequence: usize) -> Result<&[f32], EngineError> {
        let output = self.get(name)?;
        let rows = output.shape.first().copied().unwrap_or(0) as usize;
        let width = output.values.len() / rows.max(1);
        let (first, n) = if rows == self.lens.len() && self.lens.iter().any(|&n| n != 1) {
            (sequence, 1)
        } else {
            let before = self.lens.iter().take(sequence).map(|&n| n as usize).sum();
            (before, self.lens.get(sequence).map_or(0, |&n| n as usize))
        };
        output
            .values
            .get(first * width..(first + n) * width)
            .filter(|_| n > 0)
            .ok_or(EngineError::NoSequence {
                sequence,
                n_sequences: self.lens.len(),
            })
    }
}
