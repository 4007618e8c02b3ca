//! Weights of norms of heads.

use super::{columns, dims, matrix};
use crate::tensor::Shape;

/// Returns the width of `heads` heads of rows, from column `from` on, that are normalized with a weight. Centered heads each have their own
/// row of the weight.
pub(super) fn normed(of: &[&Shape], heads: u32, from: u32, centered: bool) -> Result<u64, String> {
    let (x, weight) = (matrix(of[0])?, of[1]);
    let part = match centered {
        false => {
            let [part] = dims(weight, "the weight is a vector")?;
            part
        }
        true => {
            let [rows, part] = dims(weight, "the weight has a row for each head")?;
            if rows.as_constant() != Some(heads.into()) {
                return Err(format!("the weight has {rows} rows, expected {heads}"));
            }
            part
        }
    };
    let part = part.as_constant().and_then(|n| u32::try_from(n).ok());
    columns(from, heads, part.ok_or("the weight is too long")?, x)
}
