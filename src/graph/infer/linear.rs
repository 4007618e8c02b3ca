//! Shape of a linear layer's result.

use super::{constant_width, dims, matrix, vector};
use crate::{
    ops::Epilogue,
    tensor::{Shape, Size},
};

/// Returns the shape of a linear layer's result. `more` are the operands after the weight, which the epilogue reads.
pub(super) fn linear(
    epilogue: Epilogue,
    x: &Shape,
    weight: &Shape,
    more: &[&Shape],
) -> Result<Shape, String> {
    let k = matrix(x)?;
    let [n, weight_k] = dims(weight, "the weight is a matrix [out, in]")?;
    constant_width(&n)?;
    if Size::constant(k) != weight_k {
        return Err(format!(
            "the input is {k} wide, but the weight takes {weight_k}"
        ));
    }
    if epilogue.bias {
        vector(more[0], &n, "bias")?;
    }
    let out = Shape(vec![x.0[0].clone(), n]);
    if epilogue.residual {
        let residual = more[usize::from(epilogue.bias)];
        if *residual != out {
            return Err(format!("the residual must be {out}, found {residual}"));
        }
    }
    Ok(out)
}
