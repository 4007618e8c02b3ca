//! Decodes RON to an [`Ast`].

use super::{
    activations::{activation, other_activations},
    build::operators::{self, operator},
    error::{At, Problem, suggest},
    expect,
    reader::{Args, Call, Piece, Reader, is_string},
    syntax::{
        Adapters, Ast, Count, Definition, Origin, PartOf, Repeat, Requirement, Statement, Test,
        When,
    },
    terms::{Decoded, condition, each, expression, is_number, one_or_more, spelling, word},
};

/// Decodes `Model(…)`.
pub(super) fn description<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<Ast> {
    let expected = "`Model(name: …, dims: …, graph: […], outputs: …, default: […])`";
    let call = r.call("a description", expected, piece)?;
    word(r, "description", &call.name, &["Model"])?;
    let args = call.named(
        r,
        &[
            "name",
            "model_types",
            "architectures",
            "prefixes",
            "endings",
            "ties",
            "ignores",
            "adapters",
            "require",
            "equal",
            "dims",
            "reals",
            "activations",
            "graph",
            "parts",
            "outputs",
            "default",
            "expect",
        ],
    )?;
    let strings = |field: &'static str, what| {
        let strings = listed(r, &args, field, |p| r.string(what, p))?.into_iter();
        Ok(strings.map(|string| string.value).collect::<Vec<_>>())
    };
    let texts = |field, what| match args.optional(field) {
        None => Ok(Vec::new()),
        Some(piece) => r.texts(what, piece),
    };
    let prefixes = match args.optional("prefixes") {
        None => vec![String::new()],
        Some(_) => strings("prefixes", "a prefix")?,
    };
    let model_types = strings("model_types", "a `model_type`")?;
    let mut architectures = Vec::new();
    for (name, outputs) in texts("architectures", "architecture")? {
        let outputs = each(r, "outputs", outputs, |p| r.string("an output's name", p))?;
        architectures.push((name.value, outputs));
    }
    let mut endings = Vec::new();
    for (ending, others) in texts("endings", "ending")? {
        let others = one_or_more(r, "an ending", others, |p| r.string("an ending", p))?;
        endings.push((ending.value, others.into_iter().map(|o| o.value).collect()));
    }
    let mut ties = Vec::new();
    for (own, table) in texts("ties", "tied tensor")? {
        ties.push((own.value, r.string("a table's name", table)?.value));
    }
    let ignores = strings("ignores", "a tensor's name")?;
    let adapters = args.optional("adapters").map(|p| adapters(r, p));
    let requirements = listed(r, &args, "require", |p| requirement(r, p))?;
    let equal = listed(r, &args, "equal", |p| {
        each(r, "keys of one value", p, |p| r.string("a key", p))
    })?;
    let parts = match args.optional("parts") {
        None => vec![PartOf {
            named: None,
            body: each(r, "`graph`", args.required(r, "graph")?, |p| {
                statement(r, p)
            })?,
            outputs: outputs(r, args.required(r, "outputs")?)?,
            expect: Vec::new(),
        }],
        Some(piece) => {
            for field in ["graph", "outputs"] {
                if let Some(piece) = args.optional(field) {
                    let expected = "either `graph` and `outputs`, or `parts` with these in each";
                    return Err(r.form(&format!("`{field}` beside `parts`"), expected, piece));
                }
            }
            one_or_more(r, "`parts`", piece, |p| part(r, p))?
        }
    };
    Ok(Ast {
        name: r.name("`name`", args.required(r, "name")?)?.value,
        model_types,
        architectures,
        prefixes,
        endings,
        ties,
        ignores,
        adapters: adapters.transpose()?,
        requirements,
        equal,
        dims: definitions(r, &args, "dims", "dimension", Kind::Dim)?,
        reals: definitions(r, &args, "reals", "real", Kind::Real)?,
        activations: definitions(r, &args, "activations", "activation", Kind::Activation)?,
        parts,
        default_outputs: each(r, "`default`", args.required(r, "default")?, |p| {
            r.string("an output's name", p)
        })?,
        expect: counts(r, &args, "expect")?,
    })
}

/// Decodes an optional list.
fn listed<'a, T>(
    r: Reader<'a>,
    args: &Args<'a>,
    field: &'static str,
    decode: impl Fn(Piece<'a>) -> Decoded<T>,
) -> Decoded<Vec<T>> {
    match args.optional(field) {
        None => Ok(Vec::new()),
        Some(piece) => each(r, &format!("`{field}`"), piece, decode),
    }
}

/// Decodes `Adapters(names: "…", alpha: "…", rank: "…")`.
fn adapters<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<Adapters> {
    let expected = "`Adapters(names: \"…\", alpha: \"…\", rank: \"…\")`, with keys of config.json";
    let call = r.call("`adapters`", expected, piece)?;
    word(r, "adapters", &call.name, &["Adapters"])?;
    let args = call.named(r, &["names", "alpha", "rank"])?;
    let key = |field: &'static str| r.string("a key", args.required(r, field)?);
    Ok(Adapters {
        names: key("names")?,
        alpha: key("alpha")?,
        rank: key("rank")?,
    })
}

/// Decodes `Part(name: "encode", stream: "source", graph: […], outputs: {…})`.
fn part<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<PartOf> {
    let expected = "`Part(name: \"…\", stream: \"…\", graph: […], outputs: {…})`";
    let call = r.call("an entry of `parts`", expected, piece)?;
    word(r, "part", &call.name, &["Part"])?;
    let args = call.named(r, &["name", "stream", "graph", "outputs", "expect"])?;
    let name = r.name("`name`", args.required(r, "name")?)?;
    let stream = r.name("`stream`", args.required(r, "stream")?)?;
    Ok(PartOf {
        named: Some((name, stream)),
        body: each(r, "`graph`", args.required(r, "graph")?, |p| {
            statement(r, p)
        })?,
        outputs: outputs(r, args.required(r, "outputs")?)?,
        expect: counts(r, &args, "expect")?,
    })
}

/// Decodes `{"output": "value"}`.
fn outputs<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<Vec<(At<String>, At<String>)>> {
    let outputs = r.map("output", piece)?.into_iter();
    outputs
        .map(|(name, value)| Ok((name, r.string("an output's value", value)?)))
        .collect()
}

/// Decodes a config.json value as written in `is:`.
fn constant<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<serde_json::Value> {
    Ok(match piece.text {
        "true" => true.into(),
        "false" => false.into(),
        "null" => serde_json::Value::Null,
        _ if is_string(piece) => r.string("`is`", piece)?.value.into(),
        // `is:` is a list of alternatives. A value that is itself a list is therefore written as a
        // nested list, `[[1, 2]]`.
        list if list.starts_with('[') && !list[1..].contains('[') => {
            each(r, "`is`", piece, |p| constant(r, p))?.into()
        }
        number => match (
            number.parse::<u64>(),
            number.parse::<i64>(),
            number.parse::<f64>(),
        ) {
            (Ok(whole), ..) => whole.into(),
            (_, Ok(negative), _) => negative.into(),
            (.., Ok(real)) if real.is_finite() => real.into(),
            _ => {
                let expected = "a string, `true`, `false`, `null`, a number or a list of these";
                return Err(r.form("`is`", expected, piece));
            }
        },
    })
}

/// Decodes `Must(key: "position_embedding_type", is: "absolute", outputs: […])`.
fn requirement<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<Requirement> {
    let expected = "`Must(key: \"…\", is: …)`";
    let call = r.call("an entry of `require`", expected, piece)?;
    word(r, "requirement", &call.name, &["Must"])?;
    let args = call.named(r, &["key", "is", "default", "where", "has", "outputs"])?;
    let default = args.optional("default").map(|piece| constant(r, piece));
    let only = args.optional("where").map(|piece| {
        let has = args.required(r, "has")?;
        let has = one_or_more(r, "`has`", has, |p| constant(r, p))?;
        Ok((r.string("`where`", piece)?, has))
    });
    let outputs = args
        .optional("outputs")
        .map(|piece| each(r, "`outputs`", piece, |p| r.string("an output's name", p)));
    Ok(Requirement {
        key: r.string("`key`", args.required(r, "key")?)?,
        is: one_or_more(r, "`is`", args.required(r, "is")?, |p| constant(r, p))?,
        default: default.transpose()?,
        only: only.transpose()?,
        outputs: outputs.transpose()?,
    })
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Dim,
    Real,
    Activation,
}

/// Decodes `{ "name": origin, "other": [origin, …] }`.
fn definitions<'a>(
    r: Reader<'a>,
    args: &Args<'a>,
    field: &'static str,
    what: &'static str,
    kind: Kind,
) -> Decoded<Vec<Definition>> {
    let Some(piece) = args.optional(field) else {
        return Ok(Vec::new());
    };
    let mut definitions = Vec::new();
    for (name, value) in r.map(what, piece)? {
        let span = name.span.clone();
        let origins = if value.text.starts_with('[') {
            each(r, what, value, |p| origin(r, p, kind))?
        } else {
            vec![origin(r, value, kind)?]
        };
        if origins.is_empty() {
            let problem = Problem::Form {
                what: what.to_owned(),
                expected: "at least one origin".to_owned(),
                found: "`[]`".to_owned(),
            };
            let help = "write `Key(\"key of config.json\")` or a value";
            return Err(r.file.error(problem, &span, "has no origin").help(help));
        }
        definitions.push(Definition { name, origins });
    }
    Ok(definitions)
}

fn origin<'a>(r: Reader<'a>, piece: Piece<'a>, kind: Kind) -> Decoded<At<Origin>> {
    let expected = match kind {
        Kind::Dim => "`Key(\"…\")`, `Length(\"…\")`, a whole number or an expression",
        Kind::Real => "`Key(\"…\")`, a number or an expression",
        Kind::Activation => "`Key(\"…\")` or the name of an activation",
    };
    let value = if kind == Kind::Activation && is_string(piece) {
        let name = r.string("an activation", piece)?.value;
        known_activation(r, &name, piece)?;
        Origin::Word(name)
    } else if is_string(piece) || is_number(piece) {
        if kind == Kind::Activation {
            return Err(r.form("an origin", expected, piece));
        }
        Origin::Expr(expression(r, piece)?.value)
    } else {
        let call = r.call("an origin", expected, piece)?;
        let known: &[&str] = match kind {
            Kind::Dim => &["Key", "Length"],
            _ => &["Key"],
        };
        word(r, "origin", &call.name, known)?;
        let length = call.name.value == "Length";
        let [key] = call.positional(r, "Key(\"key of config.json\")")?;
        let key = r.string("a key of config.json", key)?.value;
        if length {
            Origin::Length(key)
        } else {
            Origin::Key(key)
        }
    };
    Ok(At::new(value, piece.span()))
}

fn known_activation(r: Reader<'_>, name: &str, piece: Piece<'_>) -> Decoded<()> {
    if activation(name).is_some() {
        return Ok(());
    }
    let problem = Problem::Activation {
        key: None,
        name: name.to_owned(),
    };
    Err(r
        .file
        .error(problem, &piece.span(), "unknown activation")
        .help(other_activations(name)))
}

fn counts<'a>(r: Reader<'a>, args: &Args<'a>, field: &'static str) -> Decoded<Vec<Count>> {
    let Some(piece) = args.optional(field) else {
        return Ok(Vec::new());
    };
    let mut counts = Vec::new();
    for (what, n) in r.map("expectation", piece)? {
        let counted = expect::counted();
        if !counted.contains(&what.value) {
            let problem = Problem::Unknown {
                what: "countable".to_owned(),
                name: what.value.clone(),
            };
            return Err(r
                .file
                .error(problem, &what.span, "not an operator of the graph")
                .help(suggest(&what.value, counted.iter().map(String::as_str))));
        }
        let n = n
            .text
            .parse()
            .map_err(|_| r.form("a count", "a whole number", n))?;
        counts.push(Count { what, n });
    }
    Ok(counts)
}

fn statement<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<Statement> {
    let expected = "`Let(\"name\", operator(…))` or `Repeat(…)`";
    let call = r.call("a statement", expected, piece)?;
    if operators::named(&call.name.value).is_some() {
        let problem = Problem::Unknown {
            what: "statement".to_owned(),
            name: call.name.value.clone(),
        };
        let help = format!(
            "give its result a name: `Let(\"name\", {}(…))`",
            call.name.value
        );
        let label = "an operator stands inside `Let`";
        return Err(r.file.error(problem, &call.name.span, label).help(help));
    }
    word(r, "statement", &call.name, &["Let", "Repeat", "When"])?;
    match call.name.value.as_str() {
        "Repeat" => return repeat(r, call).map(Statement::Repeat),
        "When" => return when(r, call).map(Statement::When),
        _ => {}
    }
    let [name, op] = call.positional(r, "Let(\"name\", operator(…))")?;
    Ok(Statement::Let {
        name: r.name("a value's name", name)?,
        op: operator(r, op)?,
    })
}

fn repeat<'a>(r: Reader<'a>, call: Call<'a>) -> Decoded<Repeat> {
    let known = ["times", "from", "index", "name", "body", "expect"];
    let args = call.named(r, &known)?;
    let index = r.name("`index`", args.required(r, "index")?)?;
    let label = match args.optional("name") {
        Some(piece) => r.name("`name`", piece)?,
        None => index.clone(),
    };
    Ok(Repeat {
        times: expression(r, args.required(r, "times")?)?,
        from: args
            .optional("from")
            .map(|p| expression(r, p))
            .transpose()?,
        index,
        label,
        body: each(r, "`body`", args.required(r, "body")?, |p| statement(r, p))?,
        expect: counts(r, &args, "expect")?,
    })
}

fn when<'a>(r: Reader<'a>, call: Call<'a>) -> Decoded<When> {
    let owner = call.name.clone();
    let known = [
        "key",
        "is",
        "absent",
        "holds",
        "name",
        "body",
        "otherwise",
        "expect",
        "expect_otherwise",
    ];
    let args = call.named(r, &known)?;
    let test = match (args.optional("key"), args.optional("holds")) {
        (Some(key), None) => Test::Key {
            key: spelling(r, "`key`", key)?,
            is: one_or_more(r, "`is`", args.required(r, "is")?, |p| constant(r, p))?,
            absent: args
                .optional("absent")
                .map(|p| condition(r, p))
                .transpose()?,
        },
        (None, Some(holds))
            if args.optional("is").is_none() && args.optional("absent").is_none() =>
        {
            Test::Holds(condition(r, holds)?)
        }
        _ => {
            let problem = Problem::Form {
                what: "`When`".to_owned(),
                expected: "`key` and `is`, or `holds`".to_owned(),
                found: "another choice of them".to_owned(),
            };
            let label = "which body is taken?";
            let help = "write `When(key: \"key of config.json\", is: …, …)` or `When(holds: \"a == b\", …)`";
            return Err(r.file.error(problem, &owner.span, label).help(help));
        }
    };
    let statements = |field| match args.optional(field) {
        None => Ok(Vec::new()),
        Some(piece) => each(r, "a body", piece, |p| statement(r, p)),
    };
    args.required(r, "body")?;
    let label = args.optional("name").map(|piece| r.name("`name`", piece));
    Ok(When {
        test,
        label: label.transpose()?,
        body: statements("body")?,
        otherwise: statements("otherwise")?,
        expect: counts(r, &args, "expect")?,
        expect_otherwise: counts(r, &args, "expect_otherwise")?,
    })
}
