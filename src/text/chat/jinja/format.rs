//! String formatting: `%` and `str.format`.

use std::rc::Rc;

use super::{
    args::Args,
    error::{Error, Result},
    machine::Machine,
    meter::{Builder, Meter},
    show::float,
    value::{SeqKind, Text, Value},
};

/// Maximum number of digits after the decimal point.
const MAX_PRECISION: usize = 100;

/// Format of one value.
#[derive(Default)]
struct Spec {
    fill: Option<char>,
    align: Option<char>,
    sign: Option<char>,
    is_alternate: bool,
    has_commas: bool,
    width: usize,
    precision: Option<usize>,
    kind: Option<char>,
}

fn wrong(problem: impl Into<String>) -> Box<Error> {
    Error::failed(format!("formatting a text: {}", problem.into()))
}

/// Reads decimal digits.
fn digits(chars: &mut std::iter::Peekable<std::str::Chars<'_>>) -> Result<Option<usize>> {
    let mut found = String::new();
    while let Some(c) = chars.next_if(char::is_ascii_digit) {
        found.push(c);
    }
    match found.is_empty() {
        true => Ok(None),
        false => found
            .parse()
            .map(Some)
            .map_err(|_| wrong(format!("the number {found} is too large"))),
    }
}

impl Machine<'_> {
    /// Evaluates `text % values`.
    pub fn percent(&mut self, text: &Rc<Text>, values: &Value) -> Result<Value> {
        let meter = Rc::clone(&self.meter);
        if text.is_markup {
            return Err(wrong("`%` of text that is marked as safe is not supported"));
        }
        meter.scan(text.len().saturating_mul(4))?;
        let listed: &[Value] = match values {
            Value::Seq(seq) if matches!(seq.kind, SeqKind::Tuple | SeqKind::Group) => &seq.items,
            other => std::slice::from_ref(other),
        };
        let (mut builder, mut next) = (Builder::new(&meter)?, listed.iter());
        let mut chars = text.chars().peekable();
        while let Some(c) = chars.next() {
            if c != '%' {
                builder.push(c)?;
                continue;
            }
            let mut by_name = None;
            if chars.next_if_eq(&'(').is_some() {
                let name: String = chars.by_ref().take_while(|&c| c != ')').collect();
                let Value::Dict(dict) = values else {
                    return Err(wrong("format requires a mapping"));
                };
                let found = dict.field(&name, &meter)?.cloned();
                by_name = Some(found.ok_or_else(|| wrong(format!("there is no '{name}'")))?);
            }
            let mut spec = Spec::default();
            while let Some(flag) = chars.next_if(|c| "-+ 0#".contains(*c)) {
                match flag {
                    '-' => spec.align = Some('<'),
                    '0' => spec.fill = Some('0'),
                    '#' => spec.is_alternate = true,
                    sign => spec.sign = Some(sign),
                }
            }
            spec.width = digits(&mut chars)?.unwrap_or(0);
            if chars.next_if_eq(&'.').is_some() {
                spec.precision = Some(digits(&mut chars)?.unwrap_or(0));
            }
            let Some(kind) = chars.next() else {
                return Err(wrong("incomplete format"));
            };
            if kind == '%' {
                builder.push('%')?;
                continue;
            }
            let value = match by_name {
                Some(value) => value,
                None => match next.next() {
                    Some(value) => value.clone(),
                    None => return Err(wrong("not enough arguments for format string")),
                },
            };
            spec.kind = Some(match kind {
                'i' | 'u' => 'd',
                other => other,
            });
            // Text is right-aligned, and zero padding applies only to numbers.
            spec.align = spec.align.or(match (kind, spec.fill) {
                ('s' | 'r', _) => Some('>'),
                (_, Some('0')) => Some('='),
                _ => Some('>'),
            });
            if spec.align != Some('=') {
                spec.fill = None;
            }
            spec.percent(&value, &mut builder, &meter)?;
        }
        if next.next().is_some() && !matches!(values, Value::Dict(_)) {
            return Err(wrong(
                "not all arguments converted during string formatting",
            ));
        }
        Ok(Value::built(builder))
    }

    /// Evaluates `text.format(…)`.
    pub fn format(&mut self, text: &Rc<Text>, args: Args) -> Result<Value> {
        let meter = Rc::clone(&self.meter);
        meter.scan(text.len().saturating_mul(4))?;
        let (mut builder, mut automatic) = (Builder::new(&meter)?, 0);
        let mut chars = text.chars().peekable();
        while let Some(c) = chars.next() {
            match c {
                '{' | '}' if chars.next_if_eq(&c).is_some() => builder.push(c)?,
                '}' => return Err(wrong("single '}' encountered in format string")),
                '{' => {
                    let mut field = String::new();
                    loop {
                        match chars.next() {
                            Some('}') => break,
                            Some('{') => return Err(wrong("nested fields are not supported")),
                            Some(c) => field.push(c),
                            None => return Err(wrong("expected '}' before end of string")),
                        }
                    }
                    let value = self.field(&field, &args, &mut automatic)?;
                    let spec = field.split_once(':').map_or("", |(_, spec)| spec);
                    let conversion = field
                        .split(':')
                        .next()
                        .and_then(|name| name.split_once('!'));
                    let value = match conversion {
                        None => value,
                        Some((_, "s")) => Value::Str(value.to_text(&meter)?),
                        Some((_, "r")) => {
                            let mut shown = Builder::new(&meter)?;
                            value.write_repr(&mut shown, &meter)?;
                            Value::built(shown)
                        }
                        Some((_, other)) => {
                            return Err(wrong(format!("unknown conversion '!{other}'")));
                        }
                    };
                    Spec::parse(spec)?.write(&value, &mut builder, &meter)?;
                }
                c => builder.push(c)?,
            }
        }
        Ok(Value::built(builder))
    }

    /// Returns the value named by a field such as `0.name` or `list[3]`.
    fn field(&mut self, field: &str, args: &Args, automatic: &mut usize) -> Result<Value> {
        let name = field.split([':', '!']).next().unwrap_or_default();
        let first = name.split(['.', '[']).next().unwrap_or_default();
        let positional = args.positional.as_slice();
        let found = match first.parse::<usize>() {
            Ok(at) => positional.get(at),
            Err(_) if first.is_empty() => {
                *automatic += 1;
                positional.get(*automatic - 1)
            }
            Err(_) => {
                let named = args.named.iter().find(|(known, _)| known == first);
                named.map(|(_, value)| value)
            }
        };
        let mut value = found
            .cloned()
            .ok_or_else(|| wrong(format!("there is no value for {{{name}}}")))?;
        let mut rest = &name[first.len()..];
        while let Some(c) = rest.chars().next() {
            let (key, left, is_item) = match c {
                '[' => match rest[1..].split_once(']') {
                    Some((key, left)) => (key, left, true),
                    None => return Err(wrong("missing ']' in format string")),
                },
                '.' => {
                    let end = rest[1..].find(['.', '[']).map_or(rest.len(), |at| at + 1);
                    (&rest[1..end], &rest[end..], false)
                }
                _ => return Err(wrong("only '.' or '[' may follow ']'")),
            };
            let key_value = match key.parse() {
                Ok(index) => Value::Int(index),
                Err(_) => Value::text(&self.meter, key)?,
            };
            value = match is_item {
                true => self.item(&value, &key_value)?,
                false => self.attribute(&value, key)?,
            };
            rest = left;
        }
        Ok(value)
    }
}

impl Spec {
    /// Parses the part of a field after `:`.
    fn parse(text: &str) -> Result<Self> {
        let mut spec = Self::default();
        let all: Vec<char> = text.chars().take(3).collect();
        let is_align = |c: Option<&char>| c.is_some_and(|c| "<>=^".contains(*c));
        let mut chars = text.chars().peekable();
        if is_align(all.get(1)) {
            spec.fill = chars.next();
        }
        if is_align(chars.peek()) {
            spec.align = chars.next();
        }
        spec.sign = chars.next_if(|c| "+- ".contains(*c));
        spec.is_alternate = chars.next_if_eq(&'#').is_some();
        if chars.next_if_eq(&'0').is_some() && spec.align.is_none() {
            (spec.fill, spec.align) = (Some('0'), Some('='));
        }
        spec.width = digits(&mut chars)?.unwrap_or(0);
        spec.has_commas = chars.next_if_eq(&',').is_some();
        if chars.next_if_eq(&'.').is_some() {
            spec.precision = digits(&mut chars)?;
        }
        spec.kind = chars.next();
        match chars.next() {
            None => Ok(spec),
            Some(_) => Err(wrong(format!("invalid format specifier '{text}'"))),
        }
    }

    fn precision(&self, default: usize) -> Result<usize> {
        match self.precision.unwrap_or(default) {
            found if found <= MAX_PRECISION => Ok(found),
            found => Err(wrong(format!(
                "{found} digits after the decimal point; expected at most {MAX_PRECISION}"
            ))),
        }
    }

    /// Formats a value for `%`. `s` and `r` take any value, and integer formats truncate numbers.
    fn percent(&self, value: &Value, to: &mut Builder, meter: &Rc<Meter>) -> Result<()> {
        match (self.kind, value) {
            (Some('s'), value) => self.text(&value.to_text(meter)?, to),
            (Some('r'), value) => {
                let mut shown = Builder::new(meter)?;
                value.write_repr(&mut shown, meter)?;
                self.text(shown.as_str(), to)
            }
            (Some('d'), Value::Float(number)) => {
                self.number(&Value::Int(number.trunc() as i128), to)
            }
            (Some('d' | 'f' | 'F' | 'x' | 'X' | 'o'), value) => self.number(value.defined()?, to),
            (kind, _) => Err(wrong(format!(
                "the format character '{}' is not supported",
                kind.unwrap_or(' ')
            ))),
        }
    }

    /// Formats a value for `str.format`.
    fn write(&self, value: &Value, to: &mut Builder, meter: &Rc<Meter>) -> Result<()> {
        match (value, self.kind) {
            (Value::Int(_) | Value::Float(_), _)
            | (Value::Bool(_), Some('d' | 'f' | 'F' | 'x' | 'X' | 'o' | 'b' | '%')) => {
                self.number(value, to)
            }
            (Value::Str(text), None | Some('s')) => {
                if self.align == Some('=') {
                    return Err(wrong(
                        "'=' alignment not allowed in string format specifier",
                    ));
                }
                self.text(text, to)
            }
            (value, None) if self.width == 0 && self.precision.is_none() => {
                to.push_str(&value.to_text(meter)?)
            }
            (value, kind) => Err(wrong(format!(
                "unsupported format{} for '{}'",
                kind.map(|kind| format!(" '{kind}'")).unwrap_or_default(),
                value.type_name()
            ))),
        }
    }

    fn text(&self, text: &str, to: &mut Builder) -> Result<()> {
        let end = self.precision.and_then(|n| text.char_indices().nth(n));
        let text = end.map_or(text, |(end, _)| &text[..end]);
        self.padded("", text, '<', to)
    }

    fn number(&self, value: &Value, to: &mut Builder) -> Result<()> {
        let Some(number) = value.number() else {
            return Err(wrong(format!(
                "a number is required, not {}",
                value.type_name()
            )));
        };
        let whole = value.int();
        let is_negative = whole.map_or(number.is_sign_negative(), |whole| whole < 0);
        let magnitude = whole.map(i128::unsigned_abs);
        let digits = match (self.kind, magnitude) {
            (None | Some('d'), Some(n)) => n.to_string(),
            (None, None) if self.precision.is_none() => float(number.abs()),
            (Some('f' | 'F'), _) => format!("{:.*}", self.precision(6)?, number.abs()),
            (Some('%'), _) => format!("{:.*}%", self.precision(6)?, number.abs() * 100.0),
            (Some('x'), Some(n)) => format!("{n:x}"),
            (Some('X'), Some(n)) => format!("{n:X}"),
            (Some('o'), Some(n)) => format!("{n:o}"),
            (Some('b'), Some(n)) => format!("{n:b}"),
            (kind, _) => {
                return Err(wrong(format!(
                    "the format '{}' of '{}' is not supported",
                    kind.map(String::from).unwrap_or_default(),
                    value.type_name()
                )));
            }
        };
        if self.is_alternate {
            return Err(wrong("the flag '#' is not supported"));
        }
        let digits = match self.has_commas {
            true => with_commas(&digits),
            false => digits,
        };
        let sign = match (is_negative, self.sign) {
            (true, _) => "-",
            (false, Some('+')) => "+",
            (false, Some(' ')) => " ",
            (false, _) => "",
        };
        self.padded(sign, &digits, '>', to)
    }

    fn padded(&self, sign: &str, text: &str, align: char, to: &mut Builder) -> Result<()> {
        let length = sign.len() + text.chars().count();
        let missing = self.width.saturating_sub(length);
        let fill = self.fill.unwrap_or(' ').to_string();
        let (before, between, after) = match self.align.unwrap_or(align) {
            '<' => (0, 0, missing),
            '^' => (missing / 2, 0, missing - missing / 2),
            '=' => (0, missing, 0),
            _ => (missing, 0, 0),
        };
        to.repeat(&fill, before)?;
        to.push_str(sign)?;
        to.repeat(&fill, between)?;
        to.push_str(text)?;
        to.repeat(&fill, after)
    }
}

/// Groups the digits before the decimal point in threes.
fn with_commas(digits: &str) -> String {
    let whole = digits
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(digits.len());
    let mut text = String::new();
    for (at, c) in digits.char_indices() {
        if at > 0 && at < whole && (whole - at) % 3 == 0 {
            text.push(',');
        }
        text.push(c);
    }
    text
}
