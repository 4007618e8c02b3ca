//! The softmax of attention's scores.
//!
//! | operator | fields | result |
//! |---|---|---|
//! | `softmax` | `x`, `causal` (default `false`), `window` (optional), `bias` (optional), `sinks` (optional) | softmax of the scores over the keys `j` of query `i`: `e^(s[i, j]) / Σ e^(s[i, k])`. If `causal`, only over keys `j ≤ i`. With a `window`, only over keys with `abs(j − i) ≤ window`. Both restrictions can be combined. `sinks` is a weight `[heads]` (below) |
//!
//! A `bias` of `softmax` is added to its scores. It depends on the distance `d`, the position of the key minus that of the query:
//!
//! - `alibi`: `−slope · |d|` with a computed slope for each head (ALiBi): `2^(−8 (h + 1) / n)` for head `h` of `n`, if `n` is a power of
//!   two. Otherwise the slopes of the next smaller power are followed by every other slope of the next larger power. `alibi(scale: …)`
//!   multiplies the slopes by a number (Falcon-RW).
//! - `relative_bias(table: "…", buckets: …, reach: …, bidirectional: …)`: `table[bucket(d)][head]` of a weight `[buckets, heads]` (T5). If
//!   bidirectional, half of the buckets, from bucket `buckets / 2` on, are for keys after the query; otherwise all such keys share
//!   bucket 0. Let `b` be the number of buckets of one side. The first `b / 2` buckets have one distance each, and a larger `|d|` has
//!   bucket `b / 2 + ⌊log(2 |d| / b) / log(2 reach / b) · (b − b / 2)⌋`, at most `b − 1`.
//!
//! With `sinks`, the weights of head `h` are `e^(s[i, j]) / (e^(sinks[h]) + Σ e^(s[i, k]))`: the softmax over the scores and one more
//! column, the sink, whose weight is dropped (gpt-oss). The sink is not scaled, capped or biased, and every query attends to it, regardless
//! of the window. Weights of a query therefore add up to less than 1.

use super::*;

pub(super) const ALL: &[Entry] = &[Entry::new::<Softmax>("softmax")];

fields! {
    struct Softmax {
        x: Value,
        /// Whether a query attends only to keys up to its own position.
        causal: bool,
        /// Maximum distance between query and key; `None` for any.
        window: Option<Whole>,
        bias: Option<ByDistance>,
        /// A logit for each head, which counts as the score of one more key.
        sinks: Option<Weight>,
    }
}

/// Position bias of attention scores, a function of the distance between query and key.
#[derive(Debug)]
enum ByDistance {
    /// `relative_bias`: a table with one row per bucket of distances.
    Relative {
        table: Weight,
        buckets: Whole,
        /// All distances of at least `reach` on one side share a bucket.
        reach: Whole,
        bidirectional: bool,
    },
    /// `alibi`: computed slopes, times `scale` if given.
    Alibi { scale: Option<Real> },
}

impl Term for ByDistance {
    fn read<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<Self> {
        if piece.text == "alibi" {
            return Ok(Self::Alibi { scale: None });
        }
        let what = "`bias` of `softmax`";
        let expected = "`relative_bias(field: …)`, `alibi` or `alibi(scale: …)`";
        let call = r.call(what, expected, piece)?;
        if call.name.value == "alibi" {
            let args = call.named(r, &["scale"])?;
            let scale = Some(Field::decode(r, &args, "scale")?);
            return Ok(Self::Alibi { scale });
        }
        if call.name.value != "relative_bias" {
            return Err(r.form(what, expected, piece));
        }
        let args = call.named(r, &["table", "buckets", "reach", "bidirectional"])?;
        Ok(Self::Relative {
            table: Field::decode(r, &args, "table")?,
            buckets: Field::decode(r, &args, "buckets")?,
            reach: Field::decode(r, &args, "reach")?,
            bidirectional: r.flag("`bidirectional`", args.required(r, "bidirectional")?)?,
        })
    }

    fn names<'s>(&'s self, to: &mut Names<'s>) {
        match self {
            Self::Relative {
                table,
                buckets,
                reach,
                ..
            } => {
                Field::names(table, to);
                Field::names(buckets, to);
                Field::names(reach, to);
            }
            Self::Alibi { scale } => Field::names(scale, to),
        }
    }
}

impl Operator for Softmax {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let mut operands = vec![to.value(&self.x)?];
        let window = self.window.as_ref().map(|w| to.values.offset(w));
        let mut by = PositionBias {
            window: window.transpose()?,
            ..PositionBias::default()
        };
        if let Some(bias) = &self.bias {
            let (kind, operand) = to.bias(bias, operands[0], at.span)?;
            by.bias = Some(kind);
            operands.push(operand);
        }
        if let Some(sinks) = &self.sinks {
            by.sinks = true;
            operands.push(to.weight(sinks, &[to.heads_of(operands[0])])?);
        }
        let (scale, causal) = (1.0, self.causal);
        to.node(at, Op::Softmax { scale, causal, by }, &operands)
    }
}

impl Builder<'_> {
    /// Limits sequences to `max_position_embeddings` of config.json. In a model with a position bias, no position table limits their
    /// length.
    fn limit_positions(&mut self, place: &Range<usize>) -> Result<(), ModelError> {
        match self.values.positions(place)? {
            Some(positions) => self.ids_below(BatchInput::Positions, positions, 0, place),
            None => Ok(()),
        }
    }

    /// Returns the number of heads of `scores`. Returns 1 if the value has no heads. Shape inference then reports an error, so the number
    /// does not matter.
    fn heads_of(&self, scores: NodeId) -> u64 {
        let heads = self.graph.shape(scores).0.first();
        heads.and_then(Size::as_constant).unwrap_or(1)
    }

    /// Returns the kind of the bias of `scores`, and the node of the weight that the bias is computed from.
    fn bias(
        &mut self,
        bias: &ByDistance,
        scores: NodeId,
        place: &Range<usize>,
    ) -> Result<(Bias, NodeId), ModelError> {
        self.limit_positions(place)?;
        let heads = self.heads_of(scores);
        match bias {
            ByDistance::Alibi { scale } => {
                let scale = scale.as_ref().map_or(Ok(1.0), |by| self.values.real(by))?;
                let name = match scale {
                    1.0 => format!("slopes.{heads}"),
                    _ => format!("slopes.{heads}.times.{scale}"),
                };
                let scale = Factor::new(scale);
                let expr = WeightExpr::Slopes { heads, scale };
                Ok((Bias::Slopes, self.computed(name, expr, place)?))
            }
            ByDistance::Relative {
                table,
                buckets,
                reach,
                bidirectional,
            } => {
                let all = Buckets {
                    n: self.values.size(buckets)?,
                    reach: self.values.size(reach)?,
                    bidirectional: *bidirectional,
                };
                if let Some(found) = all.problem() {
                    let problem = Problem::out_of_range("a relative bias", found.0, found.1);
                    let label = "no such buckets".to_owned();
                    return Err(self.values.about(problem, &[buckets, reach], label));
                }
                let dims = [all.n.into(), heads];
                let distances = [heads, 2 * u64::from(all.reach) + 1];
                self.check_computed("a table of biases", &distances, reach)?;
                let operand = self.tensor(table, &dims, |name, _| WeightExpr::RelativeBias {
                    name,
                    dims,
                    buckets: all,
                })?;
                Ok((Bias::Table { reach: all.reach }, operand))
            }
        }
    }
}
