//! Norms of rows.
//!
//! | operator | fields (defaults) | result |
//! |---|---|---|
//! | `layer_norm` | `x`, `weight`, `bias` (none), `eps` | over the width: `(x − mean) / √(variance + eps) · weight + bias` |
//! | `rms_norm` | `x`, `weight`, `eps`, `heads` (1), `plus_one` (`false`) | over the width, or over each of `heads` equal parts of it: `x / √(mean of x² + eps) · weight`, or `· (1 + weight)` (Gemma), where `1 + weight` is computed once when weights are loaded |
//! | `l2_normalize` | `x`, `eps` | rows scaled to length 1 |

use super::*;

/// All norms. The result of each has the shape of `x`, and each weight is as long as a row of `x` if no optional field is given.
pub const ALL: &[Entry] = &[
    Entry::new::<LayerNorm>("layer_norm"),
    Entry::new::<RmsNorm>("rms_norm"),
    Entry::new::<L2Normalize>("l2_normalize"),
];

fields! {
    struct LayerNorm {
        x: Value,
        weight: Weight,
        bias: Option<Weight>,
        eps: Real,
    }

    struct RmsNorm {
        x: Value,
        weight: Weight,
        eps: Real,
        /// Number of equal parts of a row that are normalized separately.
        heads: Option<Whole>,
        /// Whether 1 is added to the weight.
        plus_one: bool,
    }

    struct L2Normalize {
        x: Value,
        eps: Real,
    }
}

impl Operator for LayerNorm {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let x = to.value(&self.x)?;
        let n = to.width(at.name, "layer_norm", x, at.span)?;
        let bias = match &self.bias {
            Some(bias) => to.weight(bias, &[n])?,
            None => to.computed(format!("zeros.{n}"), WeightExpr::Zeros { n }, at.span)?,
        };
        let operands = [x, to.weight(&self.weight, &[n])?, bias];
        let eps = to.values.eps(&self.eps)?;
        to.node(at, Op::LayerNorm { eps }, &operands)
    }
}

impl Operator for RmsNorm {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let x = to.value(&self.x)?;
        let heads = self.heads.as_ref().map_or(Ok(1), |n| to.values.size(n))?;
        let dims = [to.part_of(at.name, "rms_norm", x, heads, at.span)?.into()];
        let weight = match self.plus_one {
            true => to.tensor(&self.weight, &dims, |name, dims| WeightExpr::PlusOne {
                name,
                dims,
            })?,
            false => to.weight(&self.weight, &dims)?,
        };
        let eps = to.values.eps(&self.eps)?;
        let from = 0;
        to.node(at, Op::RmsNorm { eps, heads, from }, &[x, weight])
    }
}

impl Operator for L2Normalize {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let eps = to.values.eps(&self.eps)?;
        let x = to.value(&self.x)?;
        to.node(at, Op::L2Normalize { eps }, &[x])
    }
}
