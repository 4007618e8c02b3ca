//! Angles of rotary position embeddings (RoPE; Su et al. 2021).

use serde::{Deserialize, Serialize};

/// Rotation angles for the heads of a row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rotation {
    /// Number of heads per row.
    pub heads: u32,
    /// Rotation angle per position, in radians, of each pair of columns: columns `c` and `c + frequencies.len()` of a head.
    /// Later columns of the head are unchanged.
    pub frequencies: Vec<f32>,
    /// Factor applied to rotated columns. Some frequency scalings require it.
    pub factor: f32,
}

impl Rotation {
    /// Max number of column pairs per head. Their frequencies are in constant memory.
    pub const MAX_PAIRS: usize = 1024;

    /// Checks that a kernel can rotate heads of `head` columns.
    ///
    /// # Errors
    /// Returns an error with the reason if it cannot.
    pub fn check(&self, head: u32) -> Result<(), String> {
        let n = self.frequencies.len();
        if n == 0 || n > Self::MAX_PAIRS || 2 * n > head as usize {
            return Err(format!(
                "{n} pairs of columns do not fit a head of {head}; expected 1 to {}",
                (head / 2).min(Self::MAX_PAIRS as u32)
            ));
        }
        let mut all = self.frequencies.iter().chain([&self.factor]);
        match all.all(|f| f.is_finite()) {
            true => Ok(()),
            false => Err("a frequency or the factor is not finite".to_owned()),
        }
    }

    pub(crate) fn rotate(&self, head: &mut [f64], position: f32) {
        let n = self.frequencies.len();
        for (c, &frequency) in self.frequencies.iter().enumerate() {
            // The product is rounded to f32, as in published implementations. At large positions, the angles therefore differ from those of
            // the exact product.
            let (sin, cos) = f64::from(position * frequency).sin_cos();
            let factor = f64::from(self.factor);
            let (sin, cos) = (factor * sin, factor * cos);
            let (a, b) = (head[c], head[n + c]);
            head[c] = a * cos - b * sin;
            head[n + c] = b * cos + a * sin;
        }
    }
}
