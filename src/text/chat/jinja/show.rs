//! Values as text: `str` and `repr` of Python, and `json.dumps`.

use std::rc::Rc;

use super::{
    error::{Error, Result},
    meter::{Builder, Meter},
    value::{Seq, SeqKind, Text, Value},
};

impl Value {
    /// Returns Python's `str(self)`, or the original JSON text of a dict parsed from JSON.
    pub fn to_text(&self, meter: &Rc<Meter>) -> Result<Rc<Text>> {
        if let Self::Str(text) = self {
            return Ok(Rc::clone(text));
        }
        if let Self::Dict(dict) = self
            && let Some(source) = &dict.source
        {
            return Ok(Rc::clone(source));
        }
        let mut builder = Builder::new(meter)?;
        self.write(&mut builder, meter)?;
        match Self::built(builder) {
            Self::Str(text) => Ok(text),
            _ => Err(Error::failed("text was expected")),
        }
    }

    /// Appends `str(self)`.
    pub fn write(&self, to: &mut Builder, meter: &Rc<Meter>) -> Result<()> {
        match self {
            Self::Undefined(_) => Ok(()),
            Self::Str(text) => to.push_str(text),
            Self::Dict(dict) if dict.source.is_some() => dict
                .source
                .iter()
                .try_for_each(|source| to.push_str(source)),
            other => other.write_repr(to, meter),
        }
    }

    /// Appends `repr(self)`.
    pub fn write_repr(&self, to: &mut Builder, meter: &Rc<Meter>) -> Result<()> {
        let _level = meter.enter()?;
        meter.work(1)?;
        match self {
            Self::Undefined(_) => to.push_str("Undefined"),
            Self::None => to.push_str("None"),
            Self::Bool(true) => to.push_str("True"),
            Self::Bool(false) => to.push_str("False"),
            Self::Int(value) => to.push_str(&value.to_string()),
            Self::Float(value) => to.push_str(&float(*value)),
            Self::Str(text) if text.is_markup => {
                to.push_str("Markup(")?;
                quoted(text, to)?;
                to.push(')')
            }
            Self::Str(text) => quoted(text, to),
            Self::Seq(seq) => write_seq(seq, to, meter),
            Self::Dict(dict) => {
                to.push('{')?;
                for (at, (key, value)) in dict.entries.iter().enumerate() {
                    if at > 0 {
                        to.push_str(", ")?;
                    }
                    key.write_repr(to, meter)?;
                    to.push_str(": ")?;
                    value.write_repr(to, meter)?;
                }
                to.push('}')
            }
            other => Err(Error::failed(format!(
                "a value of type '{}' has no text that a prompt can contain{}",
                other.type_name(),
                match other {
                    Self::Iter(_) => "; `| list` or `| join` make one",
                    Self::Method(_) | Self::Macro(_) | Self::Global(_) => "; call it",
                    _ => "",
                }
            ))),
        }
    }
}

fn write_seq(seq: &Seq, to: &mut Builder, meter: &Rc<Meter>) -> Result<()> {
    if let SeqKind::Range { start, stop, step } = seq.kind {
        return to.push_str(&match step {
            1 => format!("range({start}, {stop})"),
            _ => format!("range({start}, {stop}, {step})"),
        });
    }
    let name = seq.kind.type_name();
    let is_view = name.starts_with("dict");
    let (open, close) = match seq.kind {
        SeqKind::Tuple | SeqKind::Group => ("(", if seq.items.len() == 1 { ",)" } else { ")" }),
        _ => ("[", "]"),
    };
    if is_view {
        to.push_str(name)?;
        to.push('(')?;
    }
    to.push_str(open)?;
    for (at, item) in seq.items.iter().enumerate() {
        if at > 0 {
            to.push_str(", ")?;
        }
        item.write_repr(to, meter)?;
    }
    to.push_str(close)?;
    match is_view {
        true => to.push(')'),
        false => Ok(()),
    }
}

/// Formats a float like `repr`: the shortest digits that round-trip, with an exponent for very large and very small numbers.
pub fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let text = format!("{value:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = value.to_string();
        return match plain.contains('.') {
            true => plain,
            false => plain + ".0",
        };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// Appends `repr` of a text.
fn quoted(text: &str, to: &mut Builder) -> Result<()> {
    let quote = match text.contains('\'') && !text.contains('"') {
        true => '"',
        false => '\'',
    };
    to.push(quote)?;
    for c in text.chars() {
        match c {
            '\\' => to.push_str("\\\\")?,
            '\n' => to.push_str("\\n")?,
            '\r' => to.push_str("\\r")?,
            '\t' => to.push_str("\\t")?,
            c if c == quote => {
                to.push('\\')?;
                to.push(c)?;
            }
            c if is_printable(c) => to.push(c)?,
            c => {
                let code = u32::from(c);
                to.push_str(&match code {
                    0..=0xff => format!("\\x{code:02x}"),
                    0x100..=0xffff => format!("\\u{code:04x}"),
                    _ => format!("\\U{code:08x}"),
                })?;
            }
        }
    }
    to.push(quote)
}

fn is_printable(c: char) -> bool {
    // Rust escapes combining marks only at the beginning of a text, so the character is put after an `a`.
    let mut text = String::from("a");
    text.push(c);
    c == '"' || c == '\'' || !text.escape_debug().skip(1).any(|c| c == '\\')
}

/// Style of `json.dumps`.
pub struct JsonStyle {
    pub is_ascii: bool,
    /// Indentation per level; `None` writes one line.
    pub indent: Option<Rc<Text>>,
    pub item_separator: Rc<Text>,
    pub key_separator: Rc<Text>,
    pub sort_keys: bool,
}

impl JsonStyle {
    /// Appends `value` as JSON, at indentation level `level`.
    pub fn write(
        &self,
        value: &Value,
        level: usize,
        to: &mut Builder,
        meter: &Rc<Meter>,
    ) -> Result<()> {
        let _level = meter.enter()?;
        meter.work(1)?;
        match value {
            Value::None => to.push_str("null"),
            Value::Bool(true) => to.push_str("true"),
            Value::Bool(false) => to.push_str("false"),
            Value::Int(value) => to.push_str(&value.to_string()),
            Value::Float(value) => to.push_str(&json_float(*value)),
            Value::Str(text) => {
                // Counts the steps for the whole text in advance, because `string` reads each character.
                meter.scan(text.len().saturating_mul(8))?;
                self.string(text, to)
            }
            Value::Seq(seq)
                if matches!(seq.kind, SeqKind::List | SeqKind::Tuple | SeqKind::Group) =>
            {
                to.push('[')?;
                for (at, item) in seq.items.iter().enumerate() {
                    self.before_item(at, level + 1, to)?;
                    self.write(item, level + 1, to, meter)?;
                }
                self.close(seq.items.len(), ']', level, to)
            }
            Value::Dict(dict) => {
                let mut entries: Vec<&(Value, Value)> = dict.entries.iter().collect();
                if self.sort_keys {
                    entries = sort(entries, &mut |a, b| a.0.is_less(&b.0, meter))?;
                }
                to.push('{')?;
                for (at, (key, value)) in entries.iter().enumerate() {
                    self.before_item(at, level + 1, to)?;
                    match key {
                        Value::Str(text) => self.string(text, to)?,
                        Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
                            to.push('"')?;
                            self.write(key, 0, to, meter)?;
                            to.push('"')?;
                        }
                        other => {
                            return Err(Error::failed(format!(
                                "keys must be str, int, float, bool or None, not {}",
                                other.type_name()
                            )));
                        }
                    }
                    to.push_str(&self.key_separator)?;
                    self.write(value, level + 1, to, meter)?;
                }
                self.close(entries.len(), '}', level, to)
            }
            Value::Undefined(message) => Err(Error::failed(format!(
                "Object of type Undefined is not JSON serializable: {}",
                &***message
            ))),
            other => Err(Error::failed(format!(
                "Object of type {} is not JSON serializable",
                other.type_name()
            ))),
        }
    }

    fn before_item(&self, at: usize, level: usize, to: &mut Builder) -> Result<()> {
        if at > 0 {
            to.push_str(&self.item_separator)?;
        }
        self.new_line(level, to)
    }

    fn new_line(&self, level: usize, to: &mut Builder) -> Result<()> {
        match &self.indent {
            Some(indent) => {
                to.push('\n')?;
                to.repeat(indent, level)
            }
            None => Ok(()),
        }
    }

    fn close(&self, n: usize, bracket: char, level: usize, to: &mut Builder) -> Result<()> {
        if n > 0 {
            self.new_line(level, to)?;
        }
        to.push(bracket)
    }

    fn string(&self, text: &str, to: &mut Builder) -> Result<()> {
        to.push('"')?;
        let mut plain = 0;
        for (at, c) in text.char_indices() {
            if c >= ' ' && c != '"' && c != '\\' && (c.is_ascii() || !self.is_ascii) {
                continue;
            }
            to.push_str(&text[plain..at])?;
            plain = at + c.len_utf8();
            match c {
                '"' => to.push_str("\\\"")?,
                '\\' => to.push_str("\\\\")?,
                '\n' => to.push_str("\\n")?,
                '\r' => to.push_str("\\r")?,
                '\t' => to.push_str("\\t")?,
                '\x08' => to.push_str("\\b")?,
                '\x0c' => to.push_str("\\f")?,
                c => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        to.push_str(&format!("\\u{unit:04x}"))?;
                    }
                }
            }
        }
        to.push_str(&text[plain..])?;
        to.push('"')
    }
}

fn json_float(value: f64) -> String {
    match value {
        value if value.is_nan() => "NaN".to_owned(),
        f64::INFINITY => "Infinity".to_owned(),
        f64::NEG_INFINITY => "-Infinity".to_owned(),
        value => float(value),
    }
}

/// Sorts with `is_less` alone, as Python does. The sort is stable, and stops at the first error of a comparison.
pub fn sort<T>(
    mut items: Vec<T>,
    is_less: &mut impl FnMut(&T, &T) -> Result<bool>,
) -> Result<Vec<T>> {
    if items.len() < 2 {
        return Ok(items);
    }
    let right = items.split_off(items.len() / 2);
    let mut left = sort(items, is_less)?.into_iter().peekable();
    let mut right = sort(right, is_less)?.into_iter().peekable();
    let mut merged = Vec::with_capacity(left.len() + right.len());
    while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
        merged.extend(match is_less(b, a)? {
            true => right.next(),
            false => left.next(),
        });
    }
    merged.extend(left);
    merged.extend(right);
    Ok(merged)
}

/// Appends a text with HTML's special characters escaped, by the rules of markupsafe.
pub fn escape(text: &str, to: &mut Builder) -> Result<()> {
    let mut plain = 0;
    for (at, c) in text.char_indices() {
        let written = match c {
            '&' => "&amp;",
            '<' => "&lt;",
            '>' => "&gt;",
            '"' => "&#34;",
            '\'' => "&#39;",
            _ => continue,
        };
        to.push_str(&text[plain..at])?;
        to.push_str(written)?;
        plain = at + c.len_utf8();
    }
    to.push_str(&text[plain..])
}
