//! Heads, rotations, caches and products of attention.
//!
//! | operator | fields | result |
//! |---|---|---|
//! | `rotary` | `x`, `heads`, `width`, `part` (default 1), `theta`, `scaling` (optional), `longest` (optional) | rotates each head's first `width` columns, or the share `part` of these columns, rounded down (formulas below). `scaling` is a key of config.json, or a list of keys of which the first one present applies. The key specifies how frequencies are scaled: `default`, `linear`, `llama3`, `yarn`, `ntk` (GTE: the base times the factor), `longrope` (`su`) or `dynamic`. With `dynamic`, and with `longrope` by default, sequences with more positions than the model was trained for are rejected. Sequences of more than `longest` positions are rejected too |
//! | `cache` | `x`, `heads`, `name` | appends `x` to the KV cache. The result is, for each sequence, the cached rows followed by the rows of this batch. Descriptions cache the keys and values of causal attention. A cache of an `x` with one row per sequence holds one position per sequence, and can only be read by another part |
//! | `cache` without `x` | `heads`, `width`, `name` | the rows that an earlier part appended to the cache `name`: keys or values of the source of each sequence. Attention to these rows is not causal |
//! | `split_heads` | `x`, `heads` | `[tokens, heads·head]` → `[heads, tokens, head]` |
//! | `merge_heads` | `x` | the inverse of `split_heads` |
//! | `matmul` | `a`, `b`, `transpose_b` (default `false`) | with `transpose_b`, scores `a · bᵀ`. Otherwise, sums of the rows of `b`, weighted by `a`. Each sequence is multiplied separately. The number of heads of `a` is a multiple of the number of heads of `b`: each head of `b` is shared by a group of adjacent heads of `a` |
//! | `position_table` | `table`, `width`, `span`, `reach` (optional) | `[2·R + 1, width]`: the rows of a checkpoint's table `[2·span, width]` for the distances −R to R, where R is the first distance after which rows repeat. The rows are looked up once, when weights are loaded. Norms and `linear` may follow, then `relative_scores` |
//! | `relative_scores` | `x`, `table`, `heads`, `of` (`query` or `key`) | `[heads, pairs]`: `x[i] · table[j − i]` of each head for query `i` and key `j` of a sequence, or `x[j] · table[j − i]` with `key` (disentangled attention). Distances outside the table use its first or last row |
//!
//! A `position_table` uses row `span + r` for distance `d`, with `r = −d` clamped to `−span ..= span − 1`. With a `reach`, this holds up to
//! half of the span, `m = ⌊span / 2⌋`; a larger `|d|` has `r = ±(m + ⌈(m − 1) · log(|d| / m) / log((reach − 1) / m)⌉)` (DeBERTa).
//!
//! `rotary` rotates the first `w` columns of each head in pairs, `x[j]` with `x[j + w / 2]`, by an angle proportional to the token's
//! position `p` in its sequence, counted from 0. With frequencies `f[j] = theta^(−2j / w)` for `j < w / 2`, and `c = 1`:
//!
//! ```text
//! y[j]         = c · (x[j] · cos(p · f[j]) − x[j + w / 2] · sin(p · f[j]))
//! y[j + w / 2] = c · (x[j + w / 2] · cos(p · f[j]) + x[j] · sin(p · f[j]))
//! ```
//!
//! A `scaling` replaces `f` and `c`. Let `s` be the `factor` and `L` the `original_max_position_embeddings` of the `scaling`:
//!
//! - `default`: no change.
//! - `linear`: `f[j] / s`.
//! - `dynamic`: no change, for sequences of at most `L` tokens, or `max_position_embeddings` if `L` is not given. With a number `alpha`
//!   (Hunyuan), `f[j]` is `(theta · alpha^(w / (w − 2)))^(−2j / w)` for all sequences.
//! - `longrope`: `f[j] / short_factor[j]`, for sequences of at most `L` tokens. If the key `max_context` of config.json is more than `L`,
//!   `f[j]` is replaced by `f[j] / long_factor[j]` for all sequences, which may have up to `max_position_embeddings` tokens. In both cases,
//!   `c` is `attention_factor`, or `√(1 + ln s / ln L)` if `s > 1`. `s` is `factor`, or `max_position_embeddings` divided by `L`.
//! - `ntk`: `(s · theta)^(−2j / w) / s^(2 / w)`; with `mixed_b = b`, `f[j] / exp(a · (j + 1)^b)` where `a = ln(s) / (w / 2)^b`.
//! - `llama3`: `(1 − r) · f[j] / s + r · f[j]`, where `r = (L · f[j] / 2π − low_freq_factor) / (high_freq_factor − low_freq_factor)`,
//!   clamped to 0 … 1.
//! - `yarn` (Peng et al. 2023, arXiv:2309.00071): `r · f[j] / s + (1 − r) · f[j]`, where `r = (j − low) / (high − low)`, clamped to 0 … 1.
//!   The pair that completes `n` rotations within `L` positions has the index `w · ln(L / 2πn) / (2 ln theta)`. `low` is this index for
//!   `n = beta_fast` (default 32), rounded down and at least 0. `high` is this index for `n = beta_slow` (default 1), rounded up and at
//!   most `w − 1`. If `truncate` is `false`, neither is rounded. `c` is `attention_factor` if given. Otherwise, if `s > 1`, `c` is
//!   `(0.1 · mscale · ln(s) + 1) / (0.1 · mscale_all_dim · ln(s) + 1)` if `mscale` and `mscale_all_dim` are given, and `0.1 · ln(s) + 1` if
//!   not.
//!
//! `max_position_embeddings` of config.json also limits the length of sequences in models without a position table, if they use `rotary` or
//! a position bias. A `position_table` does not limit the length, because larger distances use its last rows. The limit is
//! `max_position_embeddings`, except that `linear` multiplies it by `s` and that the limit of `yarn` is `s · L`, both rounded down. For
//! `dynamic` without `alpha`, and by default for `longrope`, the limit is `L`. If there are several limits, including `longest` and the
//! rows of position embeddings, the lowest applies. A limit that depends on `max_position_embeddings` does not exist without this key.
//!
//! The key `max_context` of config.json, which `Builder::max_context` and `--max-context` set, lowers the limit of any model. It is an
//! error if `max_context` exceeds the limit.

use super::*;

pub(super) const ALL: &[Entry] = &[
    Entry::new::<Rotary>("rotary"),
    Entry::new::<Cache>("cache"),
    Entry::new::<SplitHeads>("split_heads"),
    plain!("merge_heads", x => Op::MergeHeads),
    Entry::new::<Matmul>("matmul"),
    Entry::new::<PositionTable>("position_table"),
    Entry::new::<RelativeScores>("relative_scores"),
];

fields! {
    struct Rotary {
        x: Value,
        heads: Whole,
        /// Number of leading columns of a head that are rotated.
        width: Whole,
        /// Share of the `width` columns that is rotated, rounded down.
        part: Option<Real>,
        theta: Real,
        scaling: Option<Keys>,
        /// Maximum number of positions of a sequence.
        longest: Option<Whole>,
    }

    struct Cache {
        x: Option<Value>,
        heads: Whole,
        width: Width,
        name: Weight,
    }

    struct SplitHeads {
        x: Value,
        heads: Whole,
    }

    struct Matmul {
        a: Value,
        b: Value,
        transpose_b: bool,
    }

    /// Rows of a checkpoint table, ordered by distance.
    struct PositionTable {
        table: Weight,
        width: Whole,
        span: Whole,
        /// If given, distances above half of `span` are scaled logarithmically, so that all distances below `reach` fit the table.
        reach: Option<Whole>,
    }

    struct RelativeScores {
        x: Value,
        table: Value,
        heads: Whole,
        of: SideOf,
    }
}

/// Keys of config.json. The first one present specifies the frequency scaling.
#[derive(Debug)]
struct Keys(Vec<At<String>>);

impl Term for Keys {
    fn read<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<Self> {
        one_or_more(r, "`scaling`", piece, |p| r.string("a key", p)).map(Self)
    }

    fn names<'s>(&'s self, _: &mut Names<'s>) {}
}

/// Width of a cache that another part appends to; `None` for a cache with `x`.
#[derive(Debug)]
struct Width(Option<Whole>);

impl Field for Width {
    fn decode<'a>(r: Reader<'a>, args: &Args<'a>, name: &'static str) -> Decoded<Self> {
        match (args.optional("x"), args.optional(name)) {
            (None, _) => Whole::decode(r, args, name).map(|width| Self(Some(width))),
            (Some(_), None) => Ok(Self(None)),
            (Some(_), Some(piece)) => {
                let expected = "no width: it is that of `x`";
                Err(r.form("`width` beside `x` of `cache`", expected, piece))
            }
        }
    }

    fn names<'s>(&'s self, to: &mut Names<'s>) {
        Field::names(&self.0, to);
        to.appends = self.0.is_none();
    }
}

#[derive(Debug)]
struct SideOf(Side);

impl Field for SideOf {
    fn decode<'a>(r: Reader<'a>, args: &Args<'a>, name: &'static str) -> Decoded<Self> {
        let words = [("query", Side::Query), ("key", Side::Key)];
        choice(
            r,
            "`of` of `relative_scores`",
            args.required(r, name)?,
            &words,
        )
        .map(Self)
    }
}

impl Operator for Rotary {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let values = to.values;
        let heads = values.size(&self.heads)?;
        let scaling = self.scaling.as_ref().map_or(&[][..], |keys| &keys.0);
        let part = self.part.as_deref();
        let turning = values.rotary(&self.width, part, &self.theta, scaling)?;
        to.extended = to.extended.into_iter().chain(turning.extended).min();
        let longest = self.longest.as_ref().map(|n| values.size(n)).transpose()?;
        for positions in turning.positions.into_iter().chain(longest) {
            to.ids_below(BatchInput::Positions, positions, 0, at.span)?;
        }
        let rotation = Rotation {
            heads,
            frequencies: turning.frequencies,
            factor: turning.factor,
        };
        let x = to.value(&self.x)?;
        let head = to.part_of(at.name, "rotary", x, heads, at.span)?;
        let from = 0;
        let op = Op::Rotary {
            rotation,
            from,
            head,
        };
        to.node(at, op, &[x])
    }
}

impl Operator for Cache {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let values = to.values;
        let Some(x) = &self.x else {
            let heads = values.size(&self.heads)?;
            let width = self.width.0.as_ref().map_or(Ok(0), |w| values.size(w))?;
            let op = to.cross_cache(&self.name, heads, width)?;
            let id = to.node(at, op, &[])?;
            to.graph.set_part(id, to.part);
            return Ok(id);
        };
        let (x, heads) = (to.value(x)?, values.size(&self.heads)?);
        let width = to.width(at.name, "cache", x, at.span)?;
        let mut names = values.names_of(&self.name)?.into_iter();
        let (name, rest) = (names.next().unwrap_or_default(), names.next());
        // Shape inference rejects a width that is not a multiple of `heads`.
        let head = (width / u64::from(heads.max(1))) as u32;
        let own = (to.part, heads, head);
        if rest.is_some() || to.caches.insert(name.clone(), own).is_some() {
            let problem = Problem::defined_twice("name of a cache", name);
            let error = to.file.error(problem, at.span, "again here");
            return Err(error.help(
                "each `cache` has a unique name; an index such as `{i}` may be missing in it",
            ));
        }
        let op = Op::Cache {
            name,
            from: 0,
            heads,
            head,
            format: None,
            scaled: false,
        };
        to.node(at, op, &[x])
    }
}

impl Operator for SplitHeads {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let heads = to.values.size(&self.heads)?;
        let x = to.value(&self.x)?;
        to.node(at, Op::SplitHeads { heads }, &[x])
    }
}

impl Operator for Matmul {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let operands = [to.value(&self.a)?, to.value(&self.b)?];
        let op = to
            .matmul(&operands, self.transpose_b)
            .ok_or_else(|| to.no_product(at.name, &operands, self.transpose_b, at.span))?;
        to.node(at, op, &operands)
    }
}

impl Operator for PositionTable {
    fn build(&self, to: &mut Builder<'_>, _: &Target<'_>) -> Result<NodeId, ModelError> {
        let (values, span) = (to.values, &*self.span);
        let reach = self.reach.as_ref().map(|r| values.size(r));
        let positions = Positions {
            span: values.size(span)?,
            reach: reach.transpose()?,
        };
        if let Some((found, expected)) = positions.problem() {
            let problem = Problem::out_of_range("a table of positions", found, expected);
            return Err(values.about(problem, &[span], "no such table".to_owned()));
        }
        let dims = [
            2 * u64::from(positions.span),
            values.size(&self.width)?.into(),
        ];
        let farthest = u64::from(positions.farthest().unwrap_or(0));
        to.check_computed("a table of positions", &[2 * farthest + 1, dims[1]], span)?;
        to.tensor(&self.table, &dims, |name, _| WeightExpr::Positions {
            name,
            dims,
            positions,
        })
    }
}

impl Operator for RelativeScores {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let (x, heads) = (to.value(&self.x)?, to.values.size(&self.heads)?);
        let head = to.part_of(at.name, "relative_scores", x, heads, at.span)?;
        let of = self.of.0;
        let table = to.value(&self.table)?;
        to.node(at, Op::RelativeScores { heads, head, of }, &[x, table])
    }
}

impl Builder<'_> {
    /// Returns the operator that reads a cache to which an earlier part appends.
    fn cross_cache(&self, pattern: &At<Pattern>, heads: u32, width: u32) -> Result<Op, ModelError> {
        let name = self.values.names_of(pattern)?.into_iter().next();
        let name = name.unwrap_or_default();
        let Some(&(part, kept_heads, kept_head)) = self.caches.get(&name) else {
            let help = suggest(&name, self.caches.keys().map(String::as_str));
            let (what, name) = ("cache", name);
            let problem = Problem::Undefined { what, name };
            let label = "no part before this one adds to it";
            let error = self.file.error(problem, &pattern.span, label);
            return Err(error.help(help));
        };
        if part == self.part {
            let problem = Problem::SelfReference { name };
            let error = self
                .file
                .error(problem, &pattern.span, "this part adds to it");
            return Err(error.help("use the value of the `cache` with `x`; a `cache` without `x` reads what another part stored"));
        }
        let kept = u64::from(kept_heads) * u64::from(kept_head);
        if heads != kept_heads || u64::from(width) != kept {
            let problem = Problem::out_of_range(
                format!("the shape of the cache `{name}`"),
                format!("{heads} heads in a width of {width}"),
                format!("{kept_heads} heads in a width of {kept}, as it was added to"),
            );
            return Err(self.file.error(problem, &pattern.span, "read here"));
        }
        Ok(Op::CrossCache {
            name,
            heads,
            head: kept_head,
        })
    }

    /// Selects the matrix product of attention: `q · kᵀ`, or probabilities times `v`. Returns `None` if the shapes of the operands fit
    /// neither product.
    fn matmul(&self, operands: &[NodeId], transpose_b: bool) -> Option<Op> {
        let &[a, b] = operands else { return None };
        let (a, b) = (self.graph.shape(a), self.graph.shape(b));
        let (kv_heads, head) = headed(b)?;
        let groups = |heads: u32| kv_heads > 0 && heads.is_multiple_of(kv_heads);
        let view = HeadView::HeadMajor;
        if transpose_b {
            let (heads, width) = headed(a)?;
            return (width == head && groups(heads)).then_some(Op::Scores {
                heads,
                kv_heads,
                head,
                q: view,
                k: view,
            });
        }
        let [heads, pairs] = a.0.as_slice() else {
            return None;
        };
        let heads = u32::try_from(heads.as_constant()?).ok()?;
        let counted = matches!(pairs.as_symbol(), Some(Symbol::Pairs | Symbol::SourcePairs));
        let fits = counted && groups(heads);
        fits.then_some(Op::Context {
            heads,
            kv_heads,
            head,
            v: view,
            out: view,
        })
    }

    fn no_product(
        &self,
        name: &str,
        operands: &[NodeId],
        transpose_b: bool,
        place: &Range<usize>,
    ) -> ModelError {
        let described: Vec<String> = operands
            .iter()
            .map(|&o| {
                format!(
                    "`{}` ({})",
                    self.graph.node(o).name,
                    words(self.graph.shape(o))
                )
            })
            .collect();
        let [a, b] = [0, 1].map(|i| described.get(i).cloned().unwrap_or_default());
        let problem = Problem::Matmul {
            name: name.to_owned(),
            a,
            b,
            transposed: if transpose_b { ", transposed" } else { "" },
        };
        self.file.error(problem, place, "computed here").help(
            "`matmul` takes two [heads, tokens, head] with `transpose_b: true` (scores), or [heads, pairs] and \
             [heads, tokens, head] (weighted sums), where the heads of the second divide those of the first; weights go \
             into `linear`",
        )
    }
}

/// Number of heads and head size of a shape `[heads, tokens, head]`.
fn headed(shape: &Shape) -> Option<(u32, u32)> {
    let [heads, tokens, head] = shape.0.as_slice() else {
        return None;
    };
    let size = |s: &Size| s.as_constant().and_then(|n| u32::try_from(n).ok());
    let counted = matches!(
        tokens.as_symbol(),
        Some(Symbol::Tokens | Symbol::SourceSlots)
    );
    counted.then_some((size(heads)?, size(head)?))
}
