//! Shape of the result of a norm of heads.

use super::{columns, dims, matrix};
use crate::tensor::Shape;

/// Returns the total width of `heads` heads that are normalized. The first head starts at column `from` of a row, and each head is as wide
/// as the weight. If `centered`, the weight has a row for each head.
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
