//! Values of whole sequences, and log-probabilities of tokens.
//!
//! | operator | fields | result |
//! |---|---|---|
//! | `first_token`, `mean_pool`, `max_pool` | `x` | one row per sequence |
//! | `weighted_mean_pool`, `root_length_pool` | `x` | one row per sequence of `n` tokens: `Σ (i + 1) · x[i] / Σ (i + 1)`, and `Σ x[i] / √n` |
//! | `last_token` | `x`, `end` (optional), `highest_end` (optional), `padding` (optional), `is` (optional), `is_not` (optional) | the last row of each sequence. `is` is the id that the last token must have: sequences that end with another id are rejected. `end` is the id of the token that ends a sequence. Tokens after its first occurrence are padding and are removed before the model runs. If `end` equals `highest_end`, the token with the highest id in a sequence ends the sequence instead. Tokens with the id `padding` at the end of a sequence are removed before the model runs, too. A sequence that ends with the id `is_not` is rejected |
//! | `draw` | `mean`, `log_variance` | a latent variable, one row per sequence: `mean + exp(log_variance / 2) · noise`, where the noise is standard normal and depends on the sequence's seed |
//! | `log_probability` | `x` | from logits of every token: the log-probability of each token given the tokens before it, and 0 for the first token of a sequence. It must be an output, and no operator may read it |

use super::*;

pub(super) const ALL: &[Entry] = &[
    plain!("first_token", x => Op::FirstToken),
    plain!("mean_pool", x => Op::MeanPool),
    plain!("max_pool", x => Op::MaxPool),
    plain!("weighted_mean_pool", x => Op::WeightedPool(PoolWeights::Position)),
    plain!("root_length_pool", x => Op::WeightedPool(PoolWeights::RootLength)),
    Entry::new::<LastToken>("last_token"),
    plain!("draw", mean, log_variance => Op::Draw),
    Entry::new::<LogProbability>("log_probability"),
];

fields! {
    struct LastToken {
        x: Value,
        /// Id of the token that ends a sequence. Later tokens are padding.
        end: Option<Whole>,
        /// If `end` equals this id, the token with the highest id in a sequence ends the sequence (instead of a token with the id `end`).
        highest_end: Option<Whole>,
        /// Id of the padding token.
        padding: Option<Whole>,
        is: Required,
        /// Id of the padding token, with which no sequence may end.
        is_not: Option<Whole>,
    }

    struct LogProbability {
        x: Value,
    }
}

/// Id that the last token of each sequence must have.
#[derive(Debug)]
struct Required(Option<Whole>);

impl Field for Required {
    fn decode<'a>(r: Reader<'a>, args: &Args<'a>, name: &'static str) -> Decoded<Self> {
        match (args.optional(name), args.optional("end")) {
            (Some(piece), Some(_)) => {
                Err(r.form("`is` of `last_token`", "either `is` or `end`", piece))
            }
            (Some(piece), None) => Whole::read(r, piece).map(|id| Self(Some(id))),
            (None, _) => Ok(Self(None)),
        }
    }

    fn names<'s>(&'s self, to: &mut Names<'s>) {
        Field::names(&self.0, to);
    }
}

impl Operator for LastToken {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let values = to.values;
        if let Some(is) = &self.is.0 {
            to.end = Some(SequenceEnd::Required(values.offset(is)?));
        }
        if let Some(end) = &self.end {
            let id = values.offset(end)?;
            let highest = self.highest_end.as_ref().map(|h| values.offset(h));
            to.end = Some(match highest.transpose()? == Some(id) {
                true => SequenceEnd::Highest,
                false => SequenceEnd::Token(id),
            });
        }
        if let Some(padding) = &self.padding {
            to.end = Some(SequenceEnd::BeforePadding(values.offset(padding)?));
        }
        if let Some(padding) = &self.is_not {
            to.end = Some(SequenceEnd::NotPadding(values.offset(padding)?));
        }
        let x = to.value(&self.x)?;
        to.node(at, Op::LastToken, &[x])
    }
}

impl Operator for LogProbability {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let x = to.value(&self.x)?;
        // Token ids select columns of the logits, so they must be below the number of columns.
        let width = to.width(at.name, "log_probability", x, at.span)?;
        let ids = u32::try_from(width).unwrap_or(u32::MAX);
        to.ids_below(BatchInput::TokenIds, ids, 0, at.span)?;
        to.node(at, Op::LogProbability, &[x])
    }
}
