//! Norms of rows.
//!
//! | operator | fields | result |
//! |---|---|---|
//! | `layer_norm` | `x`, `weight` (optional), `bias` (optional), `eps`, `plus_one` (default `false`), `heads` (optional), `interleaved` (optional) | over the width: `(x − mean) / √(variance + eps) · weight + bias`. With `plus_one`, the factor is `1 + weight` (Nemotron); without `weight`, it is 1. With `heads`, each of `heads` equal parts of the width is normalized separately, without a bias, and the weight has a row for each part. In each of these rows, the first `interleaved` columns are stored as pairs of adjacent columns, which are reordered like the rows of [`linear`](super::linear) |
//! | `rms_norm` | `x`, `weight`, `eps`, `heads` (default 1), `plus_one` (default `false`) | over the width, or over each of `heads` equal parts of it: `x / √(mean of x² + eps) · weight`, or `· (1 + weight)` (Gemma), where `1 + weight` is computed once when weights are loaded |
//! | `l2_normalize` | `x`, `eps` | rows scaled to length 1 |

use super::*;

/// All norms. The result of a norm has the shape of `x`. Without `heads`, its weight and bias have one element for each column of `x`.
pub const ALL: &[Entry] = &[
    Entry::new::<LayerNorm>("layer_norm"),
    Entry::new::<RmsNorm>("rms_norm"),
    Entry::new::<L2Normalize>("l2_normalize"),
];

fields! {
    struct LayerNorm {
        x: Value,
        weight: NormWeight,
        bias: Option<Weight>,
        eps: Real,
        heads: NormedHeads,
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

/// Weight of a `layer_norm`, and whether 1 is added to it. Without a weight, rows are only normalized.
#[derive(Debug)]
struct NormWeight {
    stored: Option<Weight>,
    plus_one: bool,
}

impl Field for NormWeight {
    fn keys(name: &'static str, to: &mut Vec<&'static str>) {
        to.extend([name, "plus_one"]);
    }

    fn decode<'a>(r: Reader<'a>, args: &Args<'a>, name: &'static str) -> Decoded<Self> {
        let stored: Option<Weight> = Field::decode(r, args, name)?;
        let plus_one = args.optional("plus_one");
        match (&stored, plus_one, args.optional("heads")) {
            (_, Some(piece), Some(_)) => {
                let expected =
                    "no such field: the weight of a norm of heads is read without changes";
                return Err(r.form("`plus_one` beside `heads` of `layer_norm`", expected, piece));
            }
            (None, Some(piece), None) => {
                let expected = "`weight` beside it";
                return Err(r.form("`plus_one` of `layer_norm`", expected, piece));
            }
            (None, None, Some(piece)) => {
                let expected = "`weight` beside it: a norm of heads has one";
                return Err(r.form("`heads` of `layer_norm`", expected, piece));
            }
            (Some(_), _, None) | (Some(_), None, Some(_)) | (None, None, None) => {}
        }
        Ok(Self {
            stored,
            plus_one: Field::decode(r, args, "plus_one")?,
        })
    }

    fn names<'s>(&'s self, to: &mut Names<'s>) {
        Field::names(&self.stored, to);
    }
}

/// Field `heads` of `layer_norm`: equal parts of a row that are normalized separately; `None` if it is not given.
#[derive(Debug)]
struct NormedHeads(Option<Heads>);

#[derive(Debug)]
struct Heads {
    n: Whole,
    /// Number of leading columns of each head whose weights are stored as pairs of adjacent columns (see `interleaved` of `linear`).
    interleaved: Option<Whole>,
}

impl Field for NormedHeads {
    fn keys(_: &'static str, to: &mut Vec<&'static str>) {
        to.extend(["heads", "interleaved"]);
    }

    fn decode<'a>(r: Reader<'a>, args: &Args<'a>, name: &'static str) -> Decoded<Self> {
        let [heads, bias, interleaved] =
            [name, "bias", "interleaved"].map(|key| args.optional(key));
        match (heads, bias, interleaved) {
            (Some(_), Some(bias), _) => {
                let expected = "no bias: a norm of heads has none";
                Err(r.form("`bias` beside `heads` of `layer_norm`", expected, bias))
            }
            (Some(heads), None, _) => Ok(Self(Some(Heads {
                n: Whole::read(r, heads)?,
                interleaved: Field::decode(r, args, "interleaved")?,
            }))),
            (None, _, Some(piece)) => {
                let expected = "`heads` beside it";
                Err(r.form("`interleaved` of `layer_norm`", expected, piece))
            }
            (None, _, None) => Ok(Self(None)),
        }
    }

    fn names<'s>(&'s self, to: &mut Names<'s>) {
        if let Some(heads) = &self.0 {
            Field::names(&heads.n, to);
            Field::names(&heads.interleaved, to);
        }
    }
}

impl Operator for LayerNorm {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let x = to.value(&self.x)?;
        if let (Some(of), Some(weight)) = (&self.heads.0, &self.weight.stored) {
            let heads = to.values.size(&of.n)?;
            let head = to.part_of(at.name, "layer_norm", x, heads, at.span)?;
            let dims = [heads.into(), head.into()];
            let weight = to.weight_of_heads(weight, dims, of.interleaved.as_deref())?;
            let op = Op::RmsNorm {
                eps: to.values.eps(&self.eps)?,
                heads,
                from: 0,
                centered: true,
            };
            return to.node(at, op, &[x, weight]);
        }
        let n = to.width(at.name, "layer_norm", x, at.span)?;
        let bias = match &self.bias {
            Some(bias) => to.weight(bias, &[n])?,
            None => to.computed(format!("zeros.{n}"), WeightExpr::Zeros { n }, at.span)?,
        };
        let weight = match &self.weight.stored {
            Some(weight) => to.norm_weight(weight, n, self.weight.plus_one)?,
            None => to.computed(format!("ones.{n}"), WeightExpr::Ones { n }, at.span)?,
        };
        let operands = [x, weight, bias];
        let eps = to.values.eps(&self.eps)?;
        to.node(at, Op::LayerNorm { eps }, &operands)
    }
}

impl Operator for RmsNorm {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let x = to.value(&self.x)?;
        let heads = self.heads.as_ref().map_or(Ok(1), |n| to.values.size(n))?;
        let n = to.part_of(at.name, "rms_norm", x, heads, at.span)?;
        let weight = to.norm_weight(&self.weight, n.into(), self.plus_one)?;
        let op = Op::RmsNorm {
            eps: to.values.eps(&self.eps)?,
            heads,
            from: 0,
            centered: false,
        };
        to.node(at, op, &[x, weight])
    }
}

impl Operator for L2Normalize {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let eps = to.values.eps(&self.eps)?;
        let x = to.value(&self.x)?;
        to.node(at, Op::L2Normalize { eps }, &[x])
    }
}

impl Builder<'_> {
    /// Returns a norm's weight of `n` elements, to which 1 is added if `plus_one`.
    fn norm_weight(
        &mut self,
        weight: &Weight,
        n: u64,
        plus_one: bool,
    ) -> Result<NodeId, ModelError> {
        match plus_one {
            true => self.tensor(weight, &[n], |name, dims| WeightExpr::PlusOne {
                name,
                dims,
            }),
            false => self.weight(weight, &[n]),
        }
    }
}
