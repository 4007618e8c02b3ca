//! Methods of Python's types.

use std::rc::Rc;

use super::{
    args::{Args, int_or, is_true_or},
    error::{Error, Result},
    lex::is_space,
    machine::Machine,
    meter::{Builder, Charge, Items, Meter},
    value::{Dict, Seq, SeqKind, Text, Value},
};

impl Machine<'_> {
    pub fn method(&mut self, of: &Value, name: &str, args: Args) -> Result<Value> {
        let meter = Rc::clone(&self.meter);
        match of {
            Value::Dict(dict) => match (name, dict.source.is_some()) {
                ("get" | "items" | "keys" | "values" | "copy", _) | (_, false) => {
                    dict_method(dict, name, args, &meter)
                }
                (_, true) => self.text_method(&of.to_text(&meter)?, name, args),
            },
            Value::Str(text) => self.text_method(text, name, args),
            Value::Seq(seq) => seq_method(seq, name, args, &meter),
            Value::Loop(state) => match name {
                "cycle" => {
                    let items = args.positional.as_slice();
                    let at = state.index.get().checked_rem(items.len());
                    at.map(|at| items[at].clone())
                        .ok_or_else(|| Error::failed("no items for cycling given"))
                }
                "changed" => {
                    let values = Value::seq(SeqKind::Tuple, args.positional)?;
                    self.changed(state, values).map(Value::Bool)
                }
                other => Err(unsupported("LoopContext", other)),
            },
            Value::Cycler(place) => {
                args.none(name)?;
                let (items, at) = &mut self.cyclers[*place];
                let current = items.items.get(*at).cloned();
                match name {
                    "next" => {
                        *at = (*at + 1) % items.items.len().max(1);
                        Ok(current.unwrap_or(Value::None))
                    }
                    _ => {
                        *at = 0;
                        Ok(Value::None)
                    }
                }
            }
            other => Err(unsupported(other.type_name(), name)),
        }
    }

    fn text_method(&mut self, text: &Rc<Text>, name: &str, args: Args) -> Result<Value> {
        let meter = Rc::clone(&self.meter);
        if text.is_markup {
            return Err(Error::failed(format!(
                "the method `{name}` of text that is marked as safe is not supported"
            )));
        }
        // Counts the steps for the whole text in advance, because most methods read each character.
        meter.scan(text.len().saturating_mul(4))?;
        match name {
            "format" => self.format(text, args),
            "upper" | "lower" | "casefold" | "title" | "capitalize" | "swapcase" => {
                args.none(name)?;
                cased(text, name, &meter)
            }
            "strip" | "lstrip" | "rstrip" => {
                let [chars] = args.bind(name, ["chars"], 0)?;
                strip(text, name, chars.as_ref(), &meter)
            }
            "startswith" | "endswith" => {
                let [affix, start, end] = args.bind(name, ["affix", "start", "end"], 1)?;
                affixed(text, name, &affix.unwrap_or(Value::None), [start, end])
            }
            "split" | "rsplit" => {
                let [separator, n] = args.bind(name, ["sep", "maxsplit"], 0)?;
                let separator = separator.filter(|separator| !matches!(separator, Value::None));
                let n = usize::try_from(int_or(n.as_ref(), "maxsplit", -1)?).unwrap_or(usize::MAX);
                let separator = separator.map(|one| string(&one, "sep")).transpose()?;
                meter.scan(text.len().saturating_mul(12))?;
                let n_parts = match &separator {
                    Some(separator) if !separator.is_empty() => text.matches(&***separator).count(),
                    _ => text.matches(is_space).count(),
                };
                let _parts = meter.hold((n_parts + 4).saturating_mul(PART))?;
                let parts = match separator {
                    Some(separator) if separator.is_empty() => {
                        return Err(Error::failed("empty separator"));
                    }
                    Some(separator) => split(text, &separator, n, name == "rsplit"),
                    None => split_spaces(text, n, name == "rsplit"),
                };
                texts(parts, &meter)
            }
            "splitlines" => {
                let [keeps] = args.bind(name, ["keepends"], 0)?;
                meter.scan(text.len().saturating_mul(12))?;
                let _parts = hold_lines(text, &meter)?;
                texts(lines(text, is_true_or(keeps.as_ref(), false)), &meter)
            }
            "replace" => {
                let [old, new, n] = args.bind(name, ["old", "new", "count"], 2)?;
                let old = string(&old.unwrap_or(Value::None), "old")?;
                let new = string(&new.unwrap_or(Value::None), "new")?;
                replace(text, &old, &new, int_or(n.as_ref(), "count", -1)?, &meter)
            }
            "join" => {
                let [items] = args.bind(name, ["iterable"], 1)?;
                let mut builder = Builder::new(&meter)?;
                let items = items.unwrap_or(Value::None);
                let items = items.defined()?.elements(&meter)?;
                for (at, item) in items.items.iter().enumerate() {
                    if at > 0 {
                        builder.push_str(text)?;
                    }
                    let Some(item) = item.as_text() else {
                        return Err(Error::failed(format!(
                            "sequence item {at}: expected str instance, {} found",
                            item.type_name()
                        )));
                    };
                    builder.push_str(item)?;
                }
                Ok(Value::built(builder))
            }
            "find" | "rfind" | "index" | "rindex" | "count" => {
                let [sub, start, end] = args.bind(name, ["sub", "start", "end"], 1)?;
                let sub = string(&sub.unwrap_or(Value::None), "sub")?;
                meter.scan(text.len().saturating_mul(12))?;
                search(text, name, &sub, [start, end])
            }
            "center" | "ljust" | "rjust" | "zfill" => {
                let [width, fill] = args.bind(name, ["width", "fillchar"], 1)?;
                let width = int_or(width.as_ref(), "width", 0)?;
                let fill = fill.map(|fill| string(&fill, "fillchar")).transpose()?;
                pad(
                    text,
                    name,
                    width,
                    fill.as_deref().map(|fill| &**fill),
                    &meter,
                )
            }
            "partition" | "rpartition" => {
                let [separator] = args.bind(name, ["sep"], 1)?;
                let separator = string(&separator.unwrap_or(Value::None), "sep")?;
                if separator.is_empty() {
                    return Err(Error::failed("empty separator"));
                }
                let found = match name {
                    "partition" => text.split_once(&**separator),
                    _ => text.rsplit_once(&**separator),
                };
                let parts = match (found, name) {
                    (Some((before, after)), _) => [before, &separator, after],
                    (None, "partition") => [&***text, "", ""],
                    (None, _) => ["", "", &***text],
                };
                let mut items = Items::new(&meter)?;
                for part in parts {
                    items.push(Value::text(&meter, part)?)?;
                }
                Value::seq(SeqKind::Tuple, items)
            }
            "removeprefix" | "removesuffix" => {
                let [affix] = args.bind(name, ["affix"], 1)?;
                let affix = string(&affix.unwrap_or(Value::None), "affix")?;
                let left = match name {
                    "removeprefix" => text.strip_prefix(&**affix),
                    _ => text.strip_suffix(&**affix),
                };
                Value::text(&meter, left.unwrap_or(text))
            }
            _ if name.starts_with("is") => {
                args.none(name)?;
                meter.scan(text.len().saturating_mul(12))?;
                is_kind(text, name).map(Value::Bool)
            }
            other => Err(unsupported("str", other)),
        }
    }
}

/// Bytes charged for each part while a text is split. Parts are slices in a list. While the list grows, its old and its new allocation
/// together have room for up to three slices per part.
const PART: usize = 3 * size_of::<&str>();

/// Charges the memory for a list of a text's lines.
pub fn hold_lines(text: &str, meter: &Rc<Meter>) -> Result<Charge> {
    let n = text.matches(is_line_end).count();
    meter.hold((n + 4).saturating_mul(PART))
}

fn is_line_end(c: char) -> bool {
    matches!(
        c,
        '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
    )
}

fn unsupported(kind: &str, name: &str) -> Box<Error> {
    Error::failed(format!(
        "the method `{name}` of '{kind}' is not supported in chat templates"
    ))
}

/// Returns the text of an argument that must be a string.
fn string(value: &Value, name: &str) -> Result<Rc<Text>> {
    let text = value.defined()?.as_text().cloned();
    text.ok_or_else(|| {
        Error::failed(format!(
            "`{name}` is '{}'; expected a string",
            value.type_name()
        ))
    })
}

fn texts(parts: Vec<&str>, meter: &Rc<Meter>) -> Result<Value> {
    let mut items = Items::new(meter)?;
    for part in parts {
        items.push(Value::text(meter, part)?)?;
    }
    Value::list(items)
}

pub fn dict_method(dict: &Rc<Dict>, name: &str, args: Args, meter: &Rc<Meter>) -> Result<Value> {
    let mut items = Items::new(meter)?;
    match name {
        "get" => {
            let [key, default] = args.bind(name, ["key", "default"], 1)?;
            let key = key.unwrap_or(Value::None);
            key.check_key(meter)?;
            let found = dict.get(&key, meter)?.cloned();
            Ok(found.or(default).unwrap_or(Value::None))
        }
        "items" => {
            args.none(name)?;
            for (key, value) in &dict.entries {
                items.push(Value::pair(meter, key.clone(), value.clone())?)?;
            }
            Value::seq(SeqKind::Items, items)
        }
        "keys" => {
            args.none(name)?;
            items.extend(dict.entries.iter().map(|(key, _)| key.clone()))?;
            Value::seq(SeqKind::Keys, items)
        }
        "values" => {
            args.none(name)?;
            items.extend(dict.entries.iter().map(|(_, value)| value.clone()))?;
            Value::seq(SeqKind::Values, items)
        }
        "copy" => {
            args.none(name)?;
            Ok(Value::Dict(Rc::clone(dict)))
        }
        other => Err(unsupported("dict", other)),
    }
}

fn seq_method(seq: &Rc<Seq>, name: &str, args: Args, meter: &Rc<Meter>) -> Result<Value> {
    match name {
        "copy" => {
            args.none(name)?;
            Ok(Value::Seq(Rc::clone(seq)))
        }
        "index" | "count" => {
            let [value] = args.bind(name, ["value"], 1)?;
            let value = value.unwrap_or(Value::None);
            let mut n = 0;
            for (at, item) in seq.items.iter().enumerate() {
                if item.equals(&value, meter)? {
                    if name == "index" {
                        return Ok(Value::Int(at as i128));
                    }
                    n += 1;
                }
            }
            match name {
                "count" => Ok(Value::Int(n)),
                _ => Err(Error::failed("the value is not in the list")),
            }
        }
        other => Err(unsupported(seq.kind.type_name(), other)),
    }
}

/// Converts a text with the method `name`, such as `upper` or `title`.
pub fn cased(text: &str, name: &str, meter: &Rc<Meter>) -> Result<Value> {
    meter.scan(text.len().saturating_mul(16))?;
    let mut builder = Builder::new(meter)?;
    match name {
        "upper" => builder.push_str(&text.to_uppercase())?,
        "lower" => builder.push_str(&text.to_lowercase())?,
        "casefold" if text.is_ascii() => builder.push_str(&text.to_ascii_lowercase())?,
        "casefold" => {
            return Err(Error::failed(
                "`casefold` of text beyond ASCII is not supported",
            ));
        }
        "capitalize" => {
            let mut chars = text.chars();
            for c in chars.next().into_iter().flat_map(char::to_uppercase) {
                builder.push(c)?;
            }
            builder.push_str(&chars.as_str().to_lowercase())?;
        }
        "swapcase" => {
            for c in text.chars() {
                let upper: Vec<char> = c.to_uppercase().collect();
                let swapped = if c.is_lowercase() {
                    upper
                } else {
                    c.to_lowercase().collect()
                };
                swapped.into_iter().try_for_each(|c| builder.push(c))?;
            }
        }
        _ => {
            let mut is_inside = false;
            for c in text.chars() {
                let is_cased = c.is_lowercase() || c.is_uppercase();
                let written: Vec<char> = match is_inside {
                    true => c.to_lowercase().collect(),
                    false => c.to_uppercase().collect(),
                };
                written.into_iter().try_for_each(|c| builder.push(c))?;
                is_inside = is_cased;
            }
        }
    }
    Ok(Value::built(builder))
}

/// Implements `strip`, `lstrip` and `rstrip`.
pub fn strip(text: &str, name: &str, chars: Option<&Value>, meter: &Rc<Meter>) -> Result<Value> {
    let chars = match chars {
        None | Some(Value::None) => None,
        Some(chars) => Some(string(chars, "chars")?),
    };
    meter.work(
        text.len()
            .saturating_mul(chars.as_ref().map_or(0, |chars| chars.len() / 64)),
    )?;
    let is_stripped = |c: char| match &chars {
        None => is_space(c),
        Some(chars) => chars.contains(c),
    };
    let left = match name {
        "lstrip" => text.trim_start_matches(is_stripped),
        "rstrip" => text.trim_end_matches(is_stripped),
        _ => text.trim_matches(is_stripped),
    };
    Value::text(meter, left)
}

/// Returns the byte range of the part of a text between `start` and `end`, which count characters.
fn part(text: &str, [start, end]: [Option<Value>; 2]) -> Result<Option<(usize, usize)>> {
    if start.is_none() && end.is_none() {
        return Ok(Some((0, text.len())));
    }
    let n = text.chars().count() as i128;
    let bound = |value: Option<Value>, name: &str, default: i128| {
        let value = value.filter(|value| !matches!(value, Value::None));
        let bound = int_or(value.as_ref(), name, default)?;
        Ok::<i128, Box<Error>>(if bound < 0 { (bound + n).max(0) } else { bound })
    };
    let (start, end) = (bound(start, "start", 0)?, bound(end, "end", n)?.min(n));
    if start > end {
        return Ok(None);
    }
    let offset = |at: i128| {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        text.char_indices().nth(at).map_or(text.len(), |(at, _)| at)
    };
    Ok(Some((offset(start), offset(end))))
}

fn affixed(text: &str, name: &str, affix: &Value, bounds: [Option<Value>; 2]) -> Result<Value> {
    let Some((start, end)) = part(text, bounds)? else {
        return Ok(Value::Bool(false));
    };
    let text = &text[start..end];
    let is_affix = |affix: &str| match name {
        "startswith" => text.starts_with(affix),
        _ => text.ends_with(affix),
    };
    match affix.defined()? {
        Value::Str(affix) => Ok(Value::Bool(is_affix(affix))),
        Value::Seq(seq) if seq.kind == SeqKind::Tuple => {
            for affix in &seq.items {
                if is_affix(&string(affix, "affix")?) {
                    return Ok(Value::Bool(true));
                }
            }
            Ok(Value::Bool(false))
        }
        other => Err(Error::failed(format!(
            "{name} first arg must be str or a tuple of str, not {}",
            other.type_name()
        ))),
    }
}

fn search(text: &str, name: &str, sub: &str, bounds: [Option<Value>; 2]) -> Result<Value> {
    let found = part(text, bounds)?;
    if name == "count" {
        let n = match found {
            Some((start, end)) if sub.is_empty() => text[start..end].chars().count() + 1,
            Some((start, end)) => text[start..end].matches(sub).count(),
            None => 0,
        };
        return Ok(Value::Int(n as i128));
    }
    let found = found.and_then(|(start, end)| {
        let part = &text[start..end];
        let at = match name {
            "find" | "index" => part.find(sub),
            _ => part.rfind(sub),
        };
        at.map(|at| text[..start + at].chars().count() as i128)
    });
    match (found, name) {
        (Some(at), _) => Ok(Value::Int(at)),
        (None, "find" | "rfind") => Ok(Value::Int(-1)),
        (None, _) => Err(Error::failed("substring not found")),
    }
}

fn split<'t>(text: &'t str, separator: &str, n: usize, from_end: bool) -> Vec<&'t str> {
    let n = n.saturating_add(1);
    match from_end {
        false => text.splitn(n, separator).collect(),
        true => {
            let mut parts: Vec<&str> = text.rsplitn(n, separator).collect();
            parts.reverse();
            parts
        }
    }
}

/// Splits at whitespace, at most `n` times. The unsplit part keeps its trailing whitespace, or its leading whitespace if `from_end`.
fn split_spaces(text: &str, n: usize, from_end: bool) -> Vec<&str> {
    let trimmed = |text: &'_ str| match from_end {
        false => text.len() - text.trim_start_matches(is_space).len(),
        true => text.trim_end_matches(is_space).len(),
    };
    let (mut parts, mut rest) = (Vec::new(), text);
    loop {
        rest = match from_end {
            false => &rest[trimmed(rest)..],
            true => &rest[..trimmed(rest)],
        };
        if rest.is_empty() {
            break;
        }
        let found = match from_end {
            false => rest.find(is_space),
            true => rest.rfind(is_space),
        };
        let Some(at) = found.filter(|_| parts.len() < n) else {
            parts.push(rest);
            break;
        };
        let space = rest[at..].chars().next().map_or(1, char::len_utf8);
        let (before, after) = (&rest[..at], &rest[at + space..]);
        let (part, left) = match from_end {
            false => (before, after),
            true => (after, before),
        };
        parts.push(part);
        rest = left;
    }
    if from_end {
        parts.reverse();
    }
    parts
}

/// Splits lines by Python's rules. Several characters besides the newline end a line.
pub fn lines(text: &str, keeps_ends: bool) -> Vec<&str> {
    let (mut parts, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(is_line_end) {
        let end = match rest[at..].starts_with("\r\n") {
            true => 2,
            false => rest[at..].chars().next().map_or(1, char::len_utf8),
        };
        parts.push(&rest[..if keeps_ends { at + end } else { at }]);
        rest = &rest[at + end..];
    }
    if !rest.is_empty() {
        parts.push(rest);
    }
    parts
}

/// Implements `text.replace(old, new, count)`. A negative `count` replaces all.
pub fn replace(text: &str, old: &str, new: &str, count: i128, meter: &Rc<Meter>) -> Result<Value> {
    let n = usize::try_from(count).unwrap_or(usize::MAX);
    let (mut builder, mut from) = (Builder::new(meter)?, 0);
    for (at, _) in text.match_indices(old).take(n) {
        builder.push_str(&text[from..at])?;
        builder.push_str(new)?;
        from = at + old.len();
    }
    builder.push_str(&text[from..])?;
    Ok(Value::built(builder))
}

/// Implements `center`, `ljust`, `rjust` and `zfill`.
pub fn pad(
    text: &str,
    name: &str,
    width: i128,
    fill: Option<&str>,
    meter: &Rc<Meter>,
) -> Result<Value> {
    let fill = fill.unwrap_or(if name == "zfill" { "0" } else { " " });
    if fill.chars().count() != 1 {
        return Err(Error::failed(
            "The fill character must be exactly one character long",
        ));
    }
    let len = text.chars().count() as i128;
    let missing = usize::try_from((width - len).max(0)).unwrap_or(usize::MAX);
    let left = match name {
        "ljust" => 0,
        // If the number of padding characters is odd, Python puts the extra character on the left for an odd width, else on the right.
        "center" => missing / 2 + (missing & usize::try_from(width.max(0)).unwrap_or(0) & 1),
        _ => missing,
    };
    let mut builder = Builder::new(meter)?;
    let sign = match name {
        "zfill" => text.len() - text.trim_start_matches(['+', '-']).len(),
        _ => 0,
    };
    let sign = sign.min(1);
    builder.push_str(&text[..sign])?;
    builder.repeat(fill, left)?;
    builder.push_str(&text[sign..])?;
    builder.repeat(fill, missing - left)?;
    Ok(Value::built(builder))
}

/// Implements `isdigit` and similar methods.
fn is_kind(text: &str, name: &str) -> Result<bool> {
    let has = !text.is_empty();
    let all = |f: fn(char) -> bool| has && text.chars().all(f);
    let cased = |is: fn(char) -> bool, is_not: fn(char) -> bool| {
        text.chars().any(is) && !text.chars().any(is_not)
    };
    Ok(match name {
        "isascii" => text.is_ascii(),
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        "isspace" => all(is_space),
        "islower" => cased(char::is_lowercase, char::is_uppercase),
        "isupper" => cased(char::is_uppercase, char::is_lowercase),
        "isnumeric" => all(char::is_numeric),
        "isdigit" | "isdecimal" => {
            if text.chars().any(|c| c.is_numeric() && !c.is_ascii()) {
                return Err(Error::failed(format!(
                    "`{name}` of digits beyond ASCII is not supported"
                )));
            }
            all(|c| c.is_ascii_digit())
        }
        other => return Err(unsupported("str", other)),
    })
}

/// Returns whether the letters of `text` have the case that the method `name` tests for (`islower`, `isupper`).
pub fn has_case(text: &str, name: &str) -> Result<bool> {
    is_kind(text, name)
}
