//! Decodes operators such as `linear(x: …, …)`.

use super::{each, expression, one_or_more, plain, word};
use crate::{
    graph::{MAX_PARTS, Sinusoid},
    model::{
        error::{At, Problem, suggest},
        expr::Expr,
        reader::{Args, Piece, Reader},
        syntax::{Decoded, INPUTS, Operator, Pattern, PositionBias, RowsOf, Spelling, Table},
    },
    ops::{Activation, BatchInput, PoolWeights, Side},
};

/// Names of the primitive operators.
pub(super) const OPERATORS: [&str; 36] = [
    "embedding",
    "linear",
    "add_bias",
    "add",
    "scale",
    "soft_cap",
    "gelu",
    "relu",
    "tanh",
    "activation",
    "layer_norm",
    "split_heads",
    "merge_heads",
    "matmul",
    "softmax",
    "first_token",
    "mean_pool",
    "l2_normalize",
    "max_pool",
    PoolWeights::Position.name(),
    PoolWeights::RootLength.name(),
    "last_token",
    "concat",
    "columns",
    "log_probability",
    "silu",
    "multiply",
    "rms_norm",
    "rotary",
    "cache",
    "same",
    "draw",
    "quick_gelu",
    "log1p_relu",
    "position_table",
    "relative_scores",
];

/// Decodes the table of an embedding: `table`, or `sinusoid` for a computed one.
fn table<'a>(r: Reader<'a>, args: &Args<'a>) -> Decoded<Table> {
    let Some(piece) = args.optional("sinusoid") else {
        return Ok(Table::Stored(pattern(r, args.required(r, "table")?)?));
    };
    if let Some(table) = args.optional("table") {
        let expected = "either `table` or `sinusoid`";
        return Err(r.form("`table` beside `sinusoid`", expected, table));
    }
    match piece.text {
        "over_width" => Ok(Table::Sinusoid(Sinusoid::OverWidth)),
        "over_half" => Ok(Table::Sinusoid(Sinusoid::OverHalf)),
        _ => Err(r.form("`sinusoid`", "`over_width` or `over_half`", piece)),
    }
}

/// Decodes the position bias of `softmax`.
fn bias<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<PositionBias> {
    if piece.text == "alibi" {
        return Ok(PositionBias::Alibi);
    }
    let (what, name) = ("`bias` of `softmax`", "relative_bias");
    let expected = "`relative_bias(field: …)` or `alibi`";
    let call = r.call(what, expected, piece)?;
    if call.name.value != name {
        return Err(r.form(what, expected, piece));
    }
    let args = call.named(r, &["table", "buckets", "reach", "bidirectional"])?;
    Ok(PositionBias::Relative {
        table: pattern(r, args.required(r, "table")?)?,
        buckets: expression(r, args.required(r, "buckets")?)?,
        reach: expression(r, args.required(r, "reach")?)?,
        bidirectional: r.flag("`bidirectional`", args.required(r, "bidirectional")?)?,
    })
}

pub(super) fn operator<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<Operator> {
    let call = r.call("a value", "an operator `operator(field: …)`", piece)?;
    word(r, "operator", &call.name, &OPERATORS)?;
    let name = call.name.value.clone();
    let fields: &[&'static str] = match name.as_str() {
        "embedding" => &[
            "ids", "first", "table", "sinusoid", "rows", "width", "offset", "skips",
        ],
        "linear" => &[
            "x",
            "out",
            "weight",
            "bias",
            "stored",
            "of",
            "from",
            "groups",
            "interleaved",
        ],
        "softmax" => &["x", "causal", "window", "bias"],
        "columns" => &["x", "from", "width"],
        "add_bias" => &["x", "bias"],
        "add" | "multiply" => &["a", "b"],
        "rms_norm" => &["x", "weight", "eps", "heads", "plus_one"],
        "rotary" => &["x", "heads", "width", "part", "theta", "scaling", "longest"],
        "scale" => &["x", "by"],
        "soft_cap" => &["x", "cap"],
        "gelu" => &["x", "form"],
        "activation" => &["x", "kind"],
        "layer_norm" => &["x", "weight", "bias", "eps"],
        "split_heads" => &["x", "heads"],
        "cache" => &["x", "heads", "width", "name"],
        "matmul" => &["a", "b", "transpose_b"],
        "l2_normalize" => &["x", "eps"],
        "concat" => &["of"],
        "last_token" => &["x", "end", "highest_end", "is"],
        "draw" => &["mean", "log_variance"],
        "position_table" => &["table", "width", "span", "reach"],
        "relative_scores" => &["x", "table", "heads", "of"],
        _ => &["x"],
    };
    let args = call.named(r, fields)?;
    let value = |field| r.string("a value", args.required(r, field)?);
    let size = |field| expression(r, args.required(r, field)?);
    let optional = |field| args.optional(field).map(|p| expression(r, p)).transpose();
    let weight = |field| pattern(r, args.required(r, field)?);
    let flag = |field: &'static str| match args.optional(field) {
        Some(piece) => r.flag(&format!("`{field}`"), piece),
        None => Ok(false),
    };
    let activate = |kind| {
        Ok(Operator::Activate {
            x: value("x")?,
            kind,
        })
    };
    match name.as_str() {
        "embedding" => Ok(Operator::Embedding {
            ids: ids(r, args.required(r, "ids")?)?,
            first: first(r, &args)?,
            table: table(r, &args)?,
            rows: size("rows")?,
            width: size("width")?,
            offset: optional("offset")?,
            skips: optional("skips")?,
        }),
        "linear" => Ok(Operator::Linear {
            x: value("x")?,
            weight: weight("weight")?,
            bias: args.optional("bias").map(|p| pattern(r, p)).transpose()?,
            out: size("out")?,
            in_out: match args.optional("stored") {
                None => false,
                Some(piece) => match piece.text {
                    "out_in" => false,
                    "in_out" => true,
                    _ => return Err(r.form("`stored` of `linear`", "`out_in` or `in_out`", piece)),
                },
            },
            part: match (args.optional("of"), args.optional("from")) {
                (Some(of), Some(from)) => {
                    if let Some(piece) = args.optional("stored") {
                        let expected = "a part of a matrix that is stored as `out_in`";
                        return Err(r.form("`stored` beside `of`", expected, piece));
                    }
                    Some(RowsOf {
                        of: expression(r, of)?,
                        groups: optional("groups")?,
                        from: expression(r, from)?,
                        interleaved: optional("interleaved")?,
                    })
                }
                (None, None) => {
                    if let Some(piece) = args.optional("groups") {
                        let expected = "`of` and `from` beside it";
                        return Err(r.form("`groups` of `linear`", expected, piece));
                    }
                    None
                }
                (Some(piece), None) | (None, Some(piece)) => {
                    let expected = "both or neither";
                    return Err(r.form("`of` and `from` of `linear`", expected, piece));
                }
            },
        }),
        "add_bias" => Ok(Operator::AddBias {
            x: value("x")?,
            bias: weight("bias")?,
        }),
        "add" => Ok(Operator::Add {
            a: value("a")?,
            b: value("b")?,
        }),
        "scale" => Ok(Operator::Scale {
            x: value("x")?,
            by: size("by")?,
        }),
        "soft_cap" => Ok(Operator::SoftCap {
            x: value("x")?,
            cap: size("cap")?,
        }),
        "gelu" => {
            let form = args.required(r, "form")?;
            match form.text {
                "exact" => activate(Activation::GeluExact),
                "tanh" => activate(Activation::GeluTanh),
                _ => Err(r.form("`form` of `gelu`", "`exact` or `tanh`", form)),
            }
        }
        "relu" => activate(Activation::Relu),
        "tanh" => activate(Activation::Tanh),
        "silu" => activate(Activation::Silu),
        "quick_gelu" => activate(Activation::QuickGelu),
        "log1p_relu" => activate(Activation::Log1pRelu),
        "multiply" => Ok(Operator::Multiply {
            a: value("a")?,
            b: value("b")?,
        }),
        "activation" => Ok(Operator::NamedActivation {
            x: value("x")?,
            kind: r.string("`kind`", args.required(r, "kind")?)?,
        }),
        "layer_norm" => Ok(Operator::LayerNorm {
            x: value("x")?,
            weight: weight("weight")?,
            bias: args.optional("bias").map(|p| pattern(r, p)).transpose()?,
            eps: size("eps")?,
        }),
        "rms_norm" => Ok(Operator::RmsNorm {
            x: value("x")?,
            weight: weight("weight")?,
            eps: size("eps")?,
            heads: optional("heads")?,
            plus_one: flag("plus_one")?,
        }),
        "rotary" => Ok(Operator::Rotary {
            x: value("x")?,
            heads: size("heads")?,
            width: size("width")?,
            part: optional("part")?,
            theta: size("theta")?,
            scaling: match args.optional("scaling") {
                Some(piece) => one_or_more(r, "`scaling`", piece, |p| r.string("a key", p))?,
                None => Vec::new(),
            },
            longest: optional("longest")?,
        }),
        "cache" if args.optional("x").is_none() => Ok(Operator::CrossCache {
            heads: size("heads")?,
            width: size("width")?,
            name: weight("name")?,
        }),
        "cache" if args.optional("width").is_some() => {
            let piece = args.required(r, "width")?;
            let expected = "no width: it is that of `x`";
            Err(r.form("`width` beside `x` of `cache`", expected, piece))
        }
        "cache" => Ok(Operator::Cache {
            x: value("x")?,
            heads: size("heads")?,
            name: weight("name")?,
        }),
        "split_heads" => Ok(Operator::SplitHeads {
            x: value("x")?,
            heads: size("heads")?,
        }),
        "merge_heads" => Ok(Operator::MergeHeads { x: value("x")? }),
        "matmul" => Ok(Operator::Matmul {
            a: value("a")?,
            b: value("b")?,
            transpose_b: flag("transpose_b")?,
        }),
        "position_table" => Ok(Operator::PositionTable {
            table: weight("table")?,
            width: size("width")?,
            span: size("span")?,
            reach: optional("reach")?,
        }),
        "relative_scores" => Ok(Operator::RelativeScores {
            x: value("x")?,
            table: value("table")?,
            heads: size("heads")?,
            of: {
                let piece = args.required(r, "of")?;
                match piece.text {
                    "query" => Side::Query,
                    "key" => Side::Key,
                    _ => {
                        return Err(r.form("`of` of `relative_scores`", "`query` or `key`", piece));
                    }
                }
            },
        }),
        "softmax" => Ok(Operator::Softmax {
            x: value("x")?,
            causal: flag("causal")?,
            window: optional("window")?,
            bias: args.optional("bias").map(|p| bias(r, p)).transpose()?,
        }),
        "columns" => Ok(Operator::Columns {
            x: value("x")?,
            from: size("from")?,
            width: size("width")?,
        }),
        "draw" => Ok(Operator::Draw {
            mean: value("mean")?,
            log_variance: value("log_variance")?,
        }),
        "same" => Ok(Operator::Same { x: value("x")? }),
        "first_token" => Ok(Operator::FirstToken { x: value("x")? }),
        "mean_pool" => Ok(Operator::MeanPool { x: value("x")? }),
        "max_pool" => Ok(Operator::MaxPool { x: value("x")? }),
        "weighted_mean_pool" => Ok(Operator::WeightedPool {
            x: value("x")?,
            weights: PoolWeights::Position,
        }),
        "root_length_pool" => Ok(Operator::WeightedPool {
            x: value("x")?,
            weights: PoolWeights::RootLength,
        }),
        "last_token" => Ok(Operator::LastToken {
            x: value("x")?,
            end: optional("end")?,
            highest_end: optional("highest_end")?,
            is: last_id(r, &args)?,
        }),
        "log_probability" => Ok(Operator::LogProbability { x: value("x")? }),
        "concat" => {
            let piece = args.required(r, "of")?;
            let of = each(r, "`of` of `concat`", piece, |p| r.string("a value", p))?;
            match of.len() {
                2..=MAX_PARTS => Ok(Operator::Concat { of }),
                _ => {
                    let expected = format!("a list of 2 to {MAX_PARTS} values");
                    Err(r.form("`of` of `concat`", &expected, piece))
                }
            }
        }
        _ => Ok(Operator::L2Normalize {
            x: value("x")?,
            eps: size("eps")?,
        }),
    }
}

/// Decodes the id before the first token. Only `previous_ids` has this field.
fn first<'a>(r: Reader<'a>, args: &Args<'a>) -> Decoded<Option<At<Expr>>> {
    let ids = ids(r, args.required(r, "ids")?)?;
    match (ids.value, args.optional("first")) {
        (BatchInput::PreviousIds { .. }, _) => Ok(Some(expression(r, args.required(r, "first")?)?)),
        (_, None) => Ok(None),
        (_, Some(piece)) => {
            let expected = "`ids: \"previous_ids\"` beside it";
            Err(r.form("`first` of `embedding`", expected, piece))
        }
    }
}

/// Decodes the id that the last token must have.
fn last_id<'a>(r: Reader<'a>, args: &Args<'a>) -> Decoded<Option<At<Expr>>> {
    match (args.optional("is"), args.optional("end")) {
        (Some(piece), Some(_)) => {
            Err(r.form("`is` of `last_token`", "either `is` or `end`", piece))
        }
        (Some(piece), None) => Ok(Some(expression(r, piece)?)),
        (None, _) => Ok(None),
    }
}

fn ids<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<At<BatchInput>> {
    let name = r.string("`ids`", piece)?;
    match INPUTS.iter().find(|(n, _)| *n == name.value) {
        Some(&(_, meta)) => Ok(At::new(meta, name.span)),
        None => {
            let problem = Problem::Undefined {
                what: "input",
                name: name.value.clone(),
            };
            let help = suggest(&name.value, INPUTS.iter().map(|&(n, _)| n));
            Err(r
                .file
                .error(problem, &name.span, "unknown input")
                .help(help))
        }
    }
}

fn pattern<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<At<Pattern>> {
    let spellings = one_or_more(r, "a weight's name", piece, |p| {
        Ok(spelling(r, "a weight's name", p)?.value)
    })?;
    Ok(At::new(Pattern(spellings), piece.span()))
}

/// Decodes a name with indices in braces.
pub(super) fn spelling<'a>(
    r: Reader<'a>,
    what: &'static str,
    piece: Piece<'a>,
) -> Decoded<At<Spelling>> {
    let name = r.string(what, piece)?;
    // Errors in braces point to a position in the file, so a string with braces must not contain escapes.
    let start = match name.value.contains(['{', '}']) {
        true => plain(r, what, what, piece)?.1,
        false => piece.span().start,
    };
    let parsed = Spelling::parse(&name.value, start);
    let parsed = parsed.map_err(|expected| r.form(what, &expected, piece))?;
    Ok(At::new(parsed, piece.span()))
}
