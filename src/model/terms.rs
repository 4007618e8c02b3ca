//! Decodes the terms of a description: lists, numbers, conditions and names of weights.

use super::{
    error::{At, ModelError, Problem, suggest},
    expr::{Condition, Expr},
    reader::{Piece, Reader},
    spelling::{Pattern, Spelling},
};

/// Result of a decoder.
pub(super) type Decoded<T> = Result<T, ModelError>;

pub(super) fn each<'a, T>(
    r: Reader<'a>,
    what: &str,
    piece: Piece<'a>,
    decode: impl Fn(Piece<'a>) -> Decoded<T>,
) -> Decoded<Vec<T>> {
    r.list(what, piece)?.into_iter().map(decode).collect()
}

/// Decodes a non-empty list, or a single item.
pub(super) fn one_or_more<'a, T>(
    r: Reader<'a>,
    what: &str,
    piece: Piece<'a>,
    decode: impl Fn(Piece<'a>) -> Decoded<T>,
) -> Decoded<Vec<T>> {
    if !piece.text.starts_with('[') {
        return Ok(vec![decode(piece)?]);
    }
    let values = each(r, what, piece, decode)?;
    match values.is_empty() {
        true => Err(r.form(what, "at least one", piece)),
        false => Ok(values),
    }
}

pub(super) fn is_number(piece: Piece<'_>) -> bool {
    let digits = piece.text.strip_prefix('-').unwrap_or(piece.text);
    digits.starts_with(|c: char| c.is_ascii_digit())
}

/// Decodes an expression in a string, `"hidden / heads"`, or a bare number.
pub(super) fn expression<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<At<Expr>> {
    let (text, start) = match is_number(piece) {
        true => (piece.text, piece.span().start),
        false => plain(r, "a size or a number", "an expression", piece)?,
    };
    let expr = Expr::parse(text, start).map_err(|message| {
        let help = "expressions have names, numbers, `+ - * / %`, `sqrt(…)` and parentheses";
        no_expression(r, "not an expression", text, message, piece).help(help)
    })?;
    Ok(At::new(expr, piece.span()))
}

/// Decodes a condition, `"embedding != hidden"`.
pub(super) fn condition<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<At<Condition>> {
    let (text, start) = plain(r, "a condition", "a condition", piece)?;
    let condition = Condition::parse(text, start).map_err(|message| {
        let help = "a condition compares two sizes: `embedding != hidden`, by `== != < <= > >=`";
        no_expression(r, "not a condition", text, message, piece).help(help)
    })?;
    Ok(At::new(condition, piece.span()))
}

/// Returns the text of a string, which must not contain escapes, and its position in the file.
fn plain<'a>(
    r: Reader<'a>,
    what: &str,
    whole: &str,
    piece: Piece<'a>,
) -> Decoded<(&'a str, usize)> {
    let value = r.string(what, piece)?.value;
    let quoted = piece.text.strip_prefix('"');
    match quoted.and_then(|t| t.strip_suffix('"')) {
        Some(plain) if plain == value => Ok((plain, piece.span().start + 1)),
        _ => Err(r.form(whole, "a string without escapes", piece)),
    }
}

fn no_expression(
    r: Reader<'_>,
    label: &str,
    text: &str,
    message: String,
    piece: Piece<'_>,
) -> ModelError {
    let text = text.to_owned();
    let problem = Problem::Expression { text, message };
    r.file.error(problem, &piece.span(), label)
}

/// Checks that `found` is one of `known`.
pub(super) fn word(
    r: Reader<'_>,
    what: &str,
    found: &At<String>,
    known: &[&'static str],
) -> Decoded<()> {
    match known.contains(&found.value.as_str()) {
        true => Ok(()),
        false => Err(unknown(r, what, found, known)),
    }
}

/// Creates the error that `found` is none of `known`.
pub(super) fn unknown(
    r: Reader<'_>,
    what: &str,
    found: &At<String>,
    known: &[&'static str],
) -> ModelError {
    let problem = Problem::Unknown {
        what: what.to_owned(),
        name: found.value.clone(),
    };
    r.file
        .error(problem, &found.span, format!("unknown {what}"))
        .help(suggest(&found.value, known.iter().copied()))
}

pub(super) fn pattern<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<At<Pattern>> {
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
