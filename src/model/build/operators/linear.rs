//! Linear layers.
//!
//! | operator | fields | result |
//! |---|---|---|
//! | `linear` | `x`, `out`, `weight`, `bias` (optional), `stored` (`out_in` or `in_out`, default `out_in`), `of` and `from` (optional), `groups` (default 1), `interleaved` (optional) | `x · weightᵀ + bias`, of width `out`. `stored` is the layout of the matrix in the checkpoint. With `of` and `from`, the weight and the bias consist of `out` rows that are selected from stored tensors with `of` rows: the stored rows form `groups` equal parts, and `out / groups` rows of each part are read, starting at row `from` of the part. In each part, the first `interleaved` rows that are read are stored as pairs of adjacent rows. These rows are reordered: the first rows of all pairs precede the second rows |
//! | `add_bias` | `x`, `bias` | adds a vector to every row |
//!
//! The operator `rotary` rotates columns `x[j]` with `x[j + w / 2]` of a head, but some models rotate adjacent columns, `x[2j]` with
//! `x[2j + 1]` (GPT-J, Cohere). If the columns of a head have the same order in queries and keys, the scores of attention do not depend
//! on this order. Descriptions of these models therefore read the projections of queries and keys with `interleaved: w`, which reorders
//! the columns for `rotary`.

use super::*;

pub(super) const ALL: &[Entry] = &[
    Entry::new::<Linear>("linear"),
    Entry::new::<AddBias>("add_bias"),
];

fields! {
    struct Linear {
        x: Value,
        out: Whole,
        weight: Weight,
        bias: Option<Weight>,
        stored: Stored,
        part: Part,
    }

    struct AddBias {
        x: Value,
        bias: Weight,
    }
}

/// Selects the rows of a stored matrix that a weight consists of.
#[derive(Debug)]
pub(in crate::model::build) struct RowsOf {
    /// Number of rows of the stored matrix.
    pub of: Whole,
    /// Number of equal parts of the rows; 1 if not given.
    pub groups: Option<Whole>,
    /// First row to read in each part.
    pub from: Whole,
    /// Number of leading rows read in each part that are stored as pairs of adjacent rows. These rows are reordered: the first rows of all
    /// pairs precede the second rows. If not given, no rows are reordered.
    pub interleaved: Option<Whole>,
}

/// Whether the weight is stored as `[in, out]`.
#[derive(Debug)]
struct Stored(bool);

impl Field for Stored {
    fn decode<'a>(r: Reader<'a>, args: &Args<'a>, name: &'static str) -> Decoded<Self> {
        let words = [("out_in", false), ("in_out", true)];
        let piece = args.optional(name);
        let read = |piece| choice(r, "`stored` of `linear`", piece, &words);
        piece.map_or(Ok(false), read).map(Self)
    }
}

/// Rows that are read if the weight is a part of a stored matrix; `None` if it is the whole matrix.
#[derive(Debug)]
struct Part(Option<RowsOf>);

impl Field for Part {
    fn keys(_: &'static str, to: &mut Vec<&'static str>) {
        to.extend(["of", "from", "groups", "interleaved"]);
    }

    fn decode<'a>(r: Reader<'a>, args: &Args<'a>, _: &'static str) -> Decoded<Self> {
        let [of, from, stored, groups] =
            ["of", "from", "stored", "groups"].map(|key| args.optional(key));
        match (of, from) {
            (Some(of), Some(from)) => match stored {
                Some(piece) => {
                    let expected = "a part of a matrix that is stored as `out_in`";
                    Err(r.form("`stored` beside `of`", expected, piece))
                }
                None => Ok(Self(Some(RowsOf {
                    of: Whole::read(r, of)?,
                    groups: Field::decode(r, args, "groups")?,
                    from: Whole::read(r, from)?,
                    interleaved: Field::decode(r, args, "interleaved")?,
                }))),
            },
            (None, None) => match groups {
                Some(piece) => {
                    let expected = "`of` and `from` beside it";
                    Err(r.form("`groups` of `linear`", expected, piece))
                }
                None => Ok(Self(None)),
            },
            (Some(piece), None) | (None, Some(piece)) => {
                Err(r.form("`of` and `from` of `linear`", "both or neither", piece))
            }
        }
    }

    fn names<'s>(&'s self, to: &mut Names<'s>) {
        if let Some(part) = &self.0 {
            let sizes = [&part.of, &part.from].into_iter();
            let sizes = sizes.chain(&part.groups).chain(&part.interleaved);
            sizes.for_each(|size| Field::names(size, to));
        }
    }
}

impl Operator for Linear {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let (x, out) = (to.value(&self.x)?, to.values.size(&self.out)?.into());
        let dims = [out, to.width(at.name, "linear", x, at.span)?];
        let part = self.part.0.as_ref();
        let of = part.map(|part| to.values.size(&part.of)).transpose()?;
        let of = of.map_or(out, u64::from);
        let weight = &*to.untied(&self.weight)?;
        let weight = match (self.stored.0, part) {
            (_, Some(part)) => to.rows(weight, out, &[of, dims[1]], part)?,
            (true, None) => to.transposed(weight, dims)?,
            (false, None) => to.weight(weight, &dims)?,
        };
        let epilogue = Epilogue::default();
        let linear = Op::Linear { epilogue };
        let Some(bias) = &self.bias else {
            return to.node(at, linear, &[x, weight]);
        };
        let bias = &*to.untied(bias)?;
        let product = to.add(
            format!("{}.product", at.name),
            linear,
            &[x, weight],
            at.span,
        )?;
        let bias = match part {
            Some(part) => to.rows(bias, out, &[of], part)?,
            None => to.weight(bias, &[out])?,
        };
        to.node(at, Op::AddBias, &[product, bias])
    }
}

impl Operator for AddBias {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let x = to.value(&self.x)?;
        let width = to.width(at.name, "add_bias", x, at.span)?;
        let bias = to.weight(&self.bias, &[width])?;
        to.node(at, Op::AddBias, &[x, bias])
    }
}
