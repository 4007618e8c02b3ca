//! Filters, except those for sequences, which are in `sequences`.

use std::rc::Rc;

use super::{
    args::{Args, int_or, is_true_or},
    error::{Error, Result},
    lex::is_space,
    machine::Machine,
    meter::Builder,
    methods::{cased, dict_method, hold_lines, lines, pad, replace, strip},
    show::{JsonStyle, escape},
    value::{Text, Value},
};

/// Filters of jinja2 that are not supported.
const UNSUPPORTED: [&str; 8] = [
    "filesizeformat",
    "pprint",
    "random",
    "striptags",
    "urlencode",
    "urlize",
    "wordwrap",
    "xmlattr",
];
/// Filters that accept text marked as safe.
const TAKES_MARKUP: [&str; 13] = [
    "safe",
    "escape",
    "e",
    "forceescape",
    "string",
    "tojson",
    "length",
    "count",
    "default",
    "d",
    "list",
    "first",
    "last",
];

impl Machine<'_> {
    /// Evaluates `value | name(…)`.
    pub fn filter(&mut self, name: &str, value: Value, args: Args) -> Result<Value> {
        self.meter.work(1)?;
        let _level = self.meter.enter()?;
        let meter = Rc::clone(&self.meter);
        let is_markup = value.as_text().is_some_and(|text| text.is_markup);
        if is_markup && !TAKES_MARKUP.contains(&name) {
            return Err(Error::failed(format!(
                "the filter `{name}` of text that is marked as safe is not supported"
            )));
        }
        if let ("int" | "float", Some(text)) = (name, value.as_text()) {
            meter.scan(text.len().saturating_mul(16))?;
        }
        match name {
            "default" | "d" => {
                let [default, is_boolean] = args.bind(name, ["default_value", "boolean"], 0)?;
                let is_empty = matches!(value, Value::Undefined(_))
                    || (is_true_or(is_boolean.as_ref(), false) && !value.is_true());
                match (is_empty, default) {
                    (false, _) => Ok(value),
                    (true, Some(default)) => Ok(default),
                    (true, None) => Value::text(&meter, ""),
                }
            }
            "tojson" => to_json(&value, args, self),
            "string" => {
                args.none(name)?;
                Ok(Value::Str(value.to_text(&meter)?))
            }
            "safe" | "escape" | "e" | "forceescape" => {
                args.none(name)?;
                let text = value.to_text(&meter)?;
                meter.scan(text.len().saturating_mul(8))?;
                let mut builder = Builder::new(&meter)?;
                match name == "safe" || (text.is_markup && name != "forceescape") {
                    true => builder.push_str(&text)?,
                    false => escape(&text, &mut builder)?,
                }
                Ok(Value::markup(builder))
            }
            "length" | "count" => {
                args.none(name)?;
                Ok(Value::Int(value.length(&meter)? as i128))
            }
            "abs" => {
                args.none(name)?;
                match (value.defined()?.int(), &value) {
                    (Some(n), _) => Ok(Value::Int(n.saturating_abs())),
                    (None, Value::Float(x)) => Ok(Value::Float(x.abs())),
                    _ => Err(Error::failed(format!(
                        "bad operand type for abs(): '{}'",
                        value.type_name()
                    ))),
                }
            }
            "attr" => {
                let [attribute] = args.bind(name, ["name"], 1)?;
                let attribute = attribute.unwrap_or(Value::None).to_text(&meter)?;
                match &value {
                    // Dict entries are not attributes.
                    Value::Dict(_) => Err(Error::failed(
                        "the filter `attr` of a dict is not supported; use a subscript",
                    )),
                    other => self.attribute(other, &attribute),
                }
            }
            "items" => {
                args.none(name)?;
                match &value {
                    Value::Undefined(_) => Value::iter(super::meter::Items::new(&meter)?),
                    Value::Dict(dict) => {
                        let args = Args::new(&meter)?;
                        let entries = dict_method(dict, "items", args, &meter)?;
                        let mut items = super::meter::Items::new(&meter)?;
                        items.extend(entries.elements(&meter)?.items.iter().cloned())?;
                        Value::iter(items)
                    }
                    _ => Err(Error::failed("Can only get item pairs from a mapping.")),
                }
            }
            "int" => self.int_filter(&value, args),
            "float" => {
                let [default] = args.bind(name, ["default"], 0)?;
                let number = match value.defined()? {
                    Value::Str(text) => parse_float(text),
                    other => other.number(),
                };
                Ok(number.map_or(default.unwrap_or(Value::Float(0.0)), Value::Float))
            }
            "round" => round(&value, args),
            "upper" | "lower" | "capitalize" => {
                args.none(name)?;
                let text = value.to_text(&meter)?;
                meter.scan(text.len())?;
                cased(&text, name, &meter)
            }
            "title" => {
                args.none(name)?;
                title(&value.to_text(&meter)?, self)
            }
            "trim" => {
                let [chars] = args.bind(name, ["chars"], 0)?;
                let text = value.to_text(&meter)?;
                meter.scan(text.len().saturating_mul(4))?;
                strip(&text, "strip", chars.as_ref(), &meter)
            }
            "center" => {
                let [width] = args.bind(name, ["width"], 0)?;
                let text = value.to_text(&meter)?;
                meter.scan(text.len().saturating_mul(4))?;
                pad(
                    &text,
                    name,
                    int_or(width.as_ref(), "width", 80)?,
                    None,
                    &meter,
                )
            }
            "replace" => {
                let [old, new, count] = args.bind(name, ["old", "new", "count"], 2)?;
                let count = match count.filter(|count| !matches!(count, Value::None)) {
                    Some(count) => int_or(Some(&count), "count", -1)?,
                    None => -1,
                };
                let text = value.to_text(&meter)?;
                meter.scan(text.len())?;
                let old = old.unwrap_or(Value::None).to_text(&meter)?;
                let new = new.unwrap_or(Value::None).to_text(&meter)?;
                replace(&text, &old, &new, count, &meter)
            }
            "format" => {
                let text = value.to_text(&meter)?;
                let values = match (args.positional.as_slice().is_empty(), args.named.is_empty()) {
                    (false, false) => {
                        return Err(Error::failed(
                            "can't handle positional and keyword arguments at the same time",
                        ));
                    }
                    (true, false) => args.named_dict(&meter)?,
                    (_, true) => Value::seq(super::value::SeqKind::Tuple, args.positional)?,
                };
                self.percent(&text, &values)
            }
            "indent" => indent(&value.to_text(&meter)?, args, self),
            "truncate" => truncate(&value.to_text(&meter)?, args, self),
            "wordcount" => {
                args.none(name)?;
                let text = value.to_text(&meter)?;
                meter.scan(text.len().saturating_mul(16))?;
                let words = text.split(|c: char| c != '_' && !c.is_alphanumeric());
                Ok(Value::Int(
                    words.filter(|word| !word.is_empty()).count() as i128
                ))
            }
            other if UNSUPPORTED.contains(&other) => Err(Error::failed(format!(
                "the filter `{other}` is not supported in chat templates"
            ))),
            other => self.sequence_filter(other, value, args),
        }
    }

    fn int_filter(&mut self, value: &Value, args: Args) -> Result<Value> {
        let [default, base] = args.bind("int", ["default", "base"], 0)?;
        let base = int_or(base.as_ref(), "base", 10)?;
        let found = match value.defined()? {
            Value::Str(text) => {
                let text = text.trim_matches(is_space);
                let plain = text.replace('_', "");
                let prefixes = [("0x", 16), ("0o", 8), ("0b", 2)];
                let lower = plain.to_ascii_lowercase();
                let digits = prefixes
                    .iter()
                    .find(|(_, of)| *of == base)
                    .and_then(|(prefix, _)| lower.strip_prefix(prefix))
                    .unwrap_or(&lower);
                let radix = u32::try_from(base).ok().filter(|n| (2..=36).contains(n));
                let radix = radix.ok_or_else(|| Error::failed("int() base must be 2 to 36"))?;
                let whole = i128::from_str_radix(digits, radix).ok();
                // Text with a fraction is parsed as a float and truncated, as in jinja2.
                whole.or_else(|| parse_float(text).and_then(cut))
            }
            Value::Float(number) => cut(*number),
            other => other.int(),
        };
        Ok(found.map_or(default.unwrap_or(Value::Int(0)), Value::Int))
    }
}

fn cut(number: f64) -> Option<i128> {
    (number.is_finite() && number.abs() < 1e38).then_some(number.trunc() as i128)
}

fn parse_float(text: &str) -> Option<f64> {
    text.trim_matches(is_space).replace('_', "").parse().ok()
}

fn round(value: &Value, args: Args) -> Result<Value> {
    let [precision, method] = args.bind("round", ["precision", "method"], 0)?;
    let precision = int_or(precision.as_ref(), "precision", 0)?;
    let method = method.as_ref().map_or(Ok("common"), |method| {
        method
            .as_text()
            .map(|text| &***text)
            .filter(|name| ["common", "ceil", "floor"].contains(name))
            .ok_or_else(|| Error::failed("method must be common, ceil or floor"))
    })?;
    let number = value
        .defined()?
        .number()
        .ok_or_else(|| Error::failed(format!("'{}' cannot be rounded", value.type_name())))?;
    let places = i32::try_from(precision).unwrap_or(400).clamp(-400, 400);
    let scale = 10_f64.powi(places);
    Ok(match (method, value.int()) {
        ("common", Some(whole)) if places >= 0 => Value::Int(whole),
        ("common", Some(_)) => {
            return Err(Error::failed(
                "rounding whole numbers to tens is not supported",
            ));
        }
        // The exact decimal digits decide the rounding, with ties to even, as in Python.
        ("common", None) if (0..=100).contains(&places) => {
            let text = format!("{number:.*}", places as usize);
            Value::Float(text.parse().unwrap_or(number))
        }
        ("common", None) => Value::Float((number * scale).round_ties_even() / scale),
        ("ceil", _) => Value::Float((number * scale).ceil() / scale),
        _ => Value::Float((number * scale).floor() / scale),
    })
}

/// Uppercases the first letter after spaces, hyphens and opening brackets, and lowercases all others.
fn title(text: &Rc<Text>, machine: &Machine<'_>) -> Result<Value> {
    let mut builder = Builder::new(&machine.meter)?;
    let mut is_start = true;
    for c in text.chars() {
        let is_gap = is_space(c) || "-({[<".contains(c);
        let written: Vec<char> = match is_start {
            true => c.to_uppercase().collect(),
            false => c.to_lowercase().collect(),
        };
        written.into_iter().try_for_each(|c| builder.push(c))?;
        is_start = is_gap;
    }
    Ok(Value::built(builder))
}

fn indent(text: &Rc<Text>, args: Args, machine: &Machine<'_>) -> Result<Value> {
    let meter = &machine.meter;
    let [width, first, blank] = args.bind("indent", ["width", "first", "blank"], 0)?;
    let mut indention = Builder::new(meter)?;
    match &width {
        Some(Value::Str(text)) => indention.push_str(text)?,
        other => {
            let n = int_or(other.as_ref(), "width", 4)?;
            indention.repeat(" ", usize::try_from(n.max(0)).unwrap_or(usize::MAX))?;
        }
    }
    let (is_first, is_blank) = (
        is_true_or(first.as_ref(), false),
        is_true_or(blank.as_ref(), false),
    );
    meter.scan(text.len().saturating_mul(16))?;
    // jinja2 appends a newline before it splits lines.
    let mut ended = Builder::new(meter)?;
    ended.push_str(text)?;
    ended.push('\n')?;
    let _lines = hold_lines(ended.as_str(), meter)?;
    let all = lines(ended.as_str(), false);
    let mut builder = Builder::new(meter)?;
    for (at, line) in all.iter().enumerate() {
        if at > 0 {
            builder.push('\n')?;
        }
        let is_indented = match at {
            0 => is_first,
            _ => is_blank || !line.is_empty(),
        };
        if is_indented {
            builder.push_str(indention.as_str())?;
        }
        builder.push_str(line)?;
    }
    Ok(Value::built(builder))
}

fn truncate(text: &Rc<Text>, args: Args, machine: &Machine<'_>) -> Result<Value> {
    let meter = &machine.meter;
    let names = ["length", "killwords", "end", "leeway"];
    let [length, kills, end, leeway] = args.bind("truncate", names, 0)?;
    let length = int_or(length.as_ref(), "length", 255)?;
    let end = match end {
        Some(end) => end.to_text(meter)?,
        None => Value::text(meter, "...")?.to_text(meter)?,
    };
    let leeway = leeway.filter(|leeway| !matches!(leeway, Value::None));
    let leeway = int_or(leeway.as_ref(), "leeway", 5)?;
    meter.scan(text.len())?;
    let kept = length - end.chars().count() as i128;
    if kept < 0 || leeway < 0 {
        let least = length - kept;
        return Err(Error::failed(format!(
            "expected length >= {least}, got {length}"
        )));
    }
    if text.chars().count() as i128 <= length.saturating_add(leeway) {
        return Ok(Value::Str(Rc::clone(text)));
    }
    let kept = usize::try_from(kept).unwrap_or(usize::MAX);
    let bytes = text
        .char_indices()
        .nth(kept)
        .map_or(text.len(), |(at, _)| at);
    let mut left = &text[..bytes];
    if !is_true_or(kills.as_ref(), false) {
        left = left.rsplit_once(' ').map_or(left, |(before, _)| before);
    }
    let mut builder = Builder::new(meter)?;
    builder.push_str(left)?;
    builder.push_str(&end)?;
    Ok(Value::built(builder))
}

/// Implements `tojson` with the options that the library transformers adds.
fn to_json(value: &Value, args: Args, machine: &Machine<'_>) -> Result<Value> {
    let meter = &machine.meter;
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [is_ascii, indent, separators, sort_keys] = args.bind("tojson", names, 0)?;
    let text = |text: &str| Value::text(meter, text)?.to_text(meter);
    let indent = match indent {
        None | Some(Value::None) => None,
        Some(Value::Str(text)) => Some(text),
        other => {
            let n = int_or(other.as_ref(), "indent", 0)?;
            let mut spaces = Builder::new(meter)?;
            spaces.repeat(" ", usize::try_from(n.max(0)).unwrap_or(usize::MAX))?;
            Some(Value::built(spaces).to_text(meter)?)
        }
    };
    let (item_separator, key_separator) = match separators {
        None | Some(Value::None) if indent.is_some() => (text(",")?, text(": ")?),
        None | Some(Value::None) => (text(", ")?, text(": ")?),
        Some(pair) => match pair.elements(meter)?.items.as_slice() {
            [Value::Str(item), Value::Str(key)] => (Rc::clone(item), Rc::clone(key)),
            _ => return Err(Error::failed("`separators` must be two strings")),
        },
    };
    let style = JsonStyle {
        is_ascii: is_true_or(is_ascii.as_ref(), false),
        indent,
        item_separator,
        key_separator,
        sort_keys: is_true_or(sort_keys.as_ref(), false),
    };
    let mut builder = Builder::new(meter)?;
    style.write(value, 0, &mut builder, meter)?;
    Ok(Value::built(builder))
}
