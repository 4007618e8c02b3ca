//! Embeddings, which read the inputs of the model.
//!
//! | operator | fields | result |
//! |---|---|---|
//! | `embedding` | `ids` (`token_ids`, `previous_ids`, `type_ids` or `positions`), `first` (only with `previous_ids`), `table` or `sinusoid` (`over_width` or `over_half`), `rows`, `width`, `offset` (default 0), `skips` (optional) | row `id + offset` of a table `[rows, width]` for each id. `skips` is the id of the padding token of models that do not count padding as positions. Batches have no padding, so a sequence that contains this id is rejected. `previous_ids` contains, for each token, the id of the token before it; for the first token of a sequence, it contains `first`. A `sinusoid` table is computed: sines in the first half of the columns and cosines in the second, with frequencies `10000^(−2j / width)` (`over_width`) or `10000^(−j / (width / 2 − 1))` (`over_half`) |

use super::*;

pub(super) const ALL: &[Entry] = &[Entry::new::<Embedding>("embedding")];

fields! {
    struct Embedding {
        ids: Ids,
        /// If `ids` are the `previous_ids`, the id that the first token of a sequence has as its previous id.
        first: First,
        table: Table,
        rows: Whole,
        width: Whole,
        offset: Option<Whole>,
        /// Token id that is not counted as a position. Sequences that contain it are rejected.
        skips: Option<Whole>,
    }
}

#[derive(Debug)]
struct Ids(At<BatchInput>);

impl Term for Ids {
    fn read<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<Self> {
        let name = r.string("`ids`", piece)?;
        match INPUTS.iter().find(|(n, _)| *n == name.value) {
            Some(&(_, meta)) => Ok(Self(At::new(meta, name.span))),
            None => {
                let problem = Problem::undefined("input", &name.value);
                let help = suggest(&name.value, INPUTS.iter().map(|&(n, _)| n));
                let error = r.file.error(problem, &name.span, "unknown input");
                Err(error.help(help))
            }
        }
    }

    fn names<'s>(&'s self, to: &mut Names<'s>) {
        to.inputs.push(self.0.value);
    }
}

#[derive(Debug)]
struct First(Option<Whole>);

impl Field for First {
    fn decode<'a>(r: Reader<'a>, args: &Args<'a>, name: &'static str) -> Decoded<Self> {
        let Ids(ids) = Field::decode(r, args, "ids")?;
        match (ids.value, args.optional(name)) {
            (BatchInput::PreviousIds { .. }, _) => {
                Whole::decode(r, args, name).map(|id| Self(Some(id)))
            }
            (_, None) => Ok(Self(None)),
            (_, Some(piece)) => {
                let expected = "`ids: \"previous_ids\"` beside it";
                Err(r.form("`first` of `embedding`", expected, piece))
            }
        }
    }

    fn names<'s>(&'s self, to: &mut Names<'s>) {
        Field::names(&self.0, to);
    }
}

/// The field `table`, a table of the checkpoint, or the field `sinusoid`, a computed table.
#[derive(Debug)]
enum Table {
    Stored(Weight),
    Sinusoid(Sinusoid),
}

impl Field for Table {
    fn keys(_: &'static str, to: &mut Vec<&'static str>) {
        to.extend(["table", "sinusoid"]);
    }

    fn decode<'a>(r: Reader<'a>, args: &Args<'a>, name: &'static str) -> Decoded<Self> {
        let Some(piece) = args.optional("sinusoid") else {
            return Field::decode(r, args, name).map(Self::Stored);
        };
        if let Some(table) = args.optional(name) {
            let expected = "either `table` or `sinusoid`";
            return Err(r.form("`table` beside `sinusoid`", expected, table));
        }
        let words = [
            ("over_width", Sinusoid::OverWidth),
            ("over_half", Sinusoid::OverHalf),
        ];
        choice(r, "`sinusoid`", piece, &words).map(Self::Sinusoid)
    }

    fn names<'s>(&'s self, to: &mut Names<'s>) {
        if let Self::Stored(table) = self {
            Field::names(table, to);
        }
    }
}

impl Operator for Embedding {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let values = to.values;
        let n = values.size(&self.rows)?;
        let offset = self.offset.as_ref();
        let by = offset.map_or(Ok(0), |o| values.offset(o))?;
        let ids = &self.ids.0;
        let of_tokens = match ids.value {
            BatchInput::PreviousIds { .. } => BatchInput::TokenIds,
            own => own,
        };
        to.ids_below(of_tokens, n, by, &offset.unwrap_or(&self.rows).span)?;
        if let Some(id) = &self.skips {
            to.skipped = Some(values.offset(id)?);
        }
        let dims = [n.into(), values.size(&self.width)?.into()];
        let ids = match &self.first.0 {
            Some(first) => &to.previous_ids(first, [n, by])?,
            None => ids,
        };
        let ids = to.input(ids, at.span)?;
        let table = match &self.table {
            Table::Stored(table) => to.weight(table, &dims)?,
            Table::Sinusoid(style) => to.sinusoid(*style, dims, (&self.rows, &self.width))?,
        };
        to.node(at, Op::Embedding { offset: by }, &[ids, table])
    }
}

impl Builder<'_> {
    /// Returns the input that contains, for each token, the id of the token before it, or `first` for the first token of a sequence.
    /// `first` must have a row in the table.
    fn previous_ids(
        &mut self,
        first: &At<Expr>,
        [rows, offset]: [u32; 2],
    ) -> Result<At<BatchInput>, ModelError> {
        let id = self.values.offset(first)?;
        let expected = match self.first {
            Some(other) if other != id => format!("{other}, as elsewhere in the model"),
            _ if u64::from(id) + u64::from(offset) >= u64::from(rows) => {
                format!("an id with one of the {rows} rows of the table")
            }
            _ => {
                self.first = Some(id);
                return Ok(At::new(
                    BatchInput::PreviousIds { first: id },
                    first.span.clone(),
                ));
            }
        };
        let problem = Problem::out_of_range("the id before the first token", id, expected);
        Err(self
            .values
            .about(problem, &[first], "not this id".to_owned()))
    }
}
