//! Splits a template into tokens by jinja2's rules with `trim_blocks` and `lstrip_blocks`.

use super::error::{Error, Result};

#[derive(Clone, Debug, PartialEq)]
pub enum Token {
    Data(String),
    OutputBegin,
    OutputEnd,
    BlockBegin,
    BlockEnd,
    Name(String),
    Str(String),
    Int(i128),
    Float(f64),
    Operator(&'static str),
    End,
}

/// Operators, longest first.
const OPERATORS: [&str; 27] = [
    "**", "//", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}",
    ">", "<", "=", ".", ":", "|", ",", ";", "!",
];

/// Returns whether Python counts the character as whitespace.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    line: u32,
    /// Whether the whitespace that was skipped after the last tag ended with a newline, so that the next data begins a line.
    is_line_start: bool,
    tokens: Vec<(Token, u32)>,
}

/// Returns the tokens of `source` with their line numbers.
pub fn tokens(source: &str) -> Result<Vec<(Token, u32)>> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer {
        source,
        at: 0,
        line: 1,
        is_line_start: true,
        tokens: Vec::new(),
    };
    while lexer.at < source.len() {
        lexer.root()?;
    }
    lexer.add(Token::End);
    Ok(lexer.tokens)
}

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    fn add(&mut self, token: Token) {
        self.tokens.push((token, self.line));
    }

    fn failed<T>(&self, message: impl Into<String>) -> Result<T> {
        Err(Error::failed(message).at(self.line))
    }

    /// Advances by `bytes` and counts lines.
    fn skip(&mut self, bytes: usize) {
        let skipped = &self.source[self.at..self.at + bytes];
        self.line += skipped.matches('\n').count() as u32;
        self.at += bytes;
    }

    fn skip_spaces(&mut self) {
        let rest = self.rest();
        self.skip(rest.len() - rest.trim_start_matches(is_space).len());
    }

    /// Reads the data up to the next tag, and then the tag.
    fn root(&mut self) -> Result<()> {
        let rest = self.rest();
        let begins = |&(at, _): &(usize, char)| {
            matches!(rest.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#'))
        };
        let found = rest.char_indices().filter(|&(_, c)| c == '{').find(begins);
        let Some((at, _)) = found else {
            self.add(Token::Data(rest.to_owned()));
            self.skip(rest.len());
            return Ok(());
        };
        let (kind, sign) = (
            rest.as_bytes()[at + 1],
            rest.as_bytes().get(at + 2).copied(),
        );
        let sign = sign.filter(|c| matches!(c, b'-' | b'+'));
        let data = self.before_tag(&rest[..at], sign, kind == b'{');
        if !data.is_empty() {
            self.add(Token::Data(data.to_owned()));
        }
        self.skip(at);
        let opening = 2 + usize::from(sign.is_some());
        match kind {
            b'#' => self.comment(opening),
            b'%' => match raw_tag(self.rest(), "raw") {
                Some((_, length, has_minus)) => self.raw(length, has_minus),
                None => {
                    self.add(Token::BlockBegin);
                    self.skip(opening);
                    self.inner("%}", Token::BlockEnd)
                }
            },
            _ => {
                self.add(Token::OutputBegin);
                self.skip(opening);
                self.inner("}}", Token::OutputEnd)
            }
        }
    }

    /// Returns data without the whitespace that the next tag strips.
    fn before_tag<'t>(&self, data: &'t str, sign: Option<u8>, is_output: bool) -> &'t str {
        if sign == Some(b'-') {
            return data.trim_end_matches(is_space);
        }
        if sign == Some(b'+') || is_output {
            return data;
        }
        let start = data.rfind('\n').map_or(0, |at| at + 1);
        let is_line = start > 0 || self.is_line_start;
        match is_line && data[start..].chars().all(is_space) {
            true => &data[..start],
            false => data,
        }
    }

    fn comment(&mut self, opening: usize) -> Result<()> {
        let Some(length) = self.rest()[opening..].find("#}") else {
            return self.failed("a comment has no end `#}`");
        };
        // A sign before `#}` is part of the comment's end.
        let end = opening + length;
        let sign = self.rest()[opening..end].bytes().last().unwrap_or(b' ');
        self.skip(end + 2);
        self.after_tag(sign, true);
        Ok(())
    }

    /// Skips whitespace after a tag: all of it if `sign` is `-`, none if it is `+`, and otherwise one newline if `trims`.
    fn after_tag(&mut self, sign: u8, trims: bool) {
        let before = self.at;
        match sign {
            b'-' => self.skip_spaces(),
            b'+' => {}
            _ if trims && self.rest().starts_with('\n') => self.skip(1),
            _ => {}
        }
        self.is_line_start = self.source[..self.at].ends_with('\n') && self.at > before;
    }

    /// Reads the text between `raw` and `endraw`.
    fn raw(&mut self, opening: usize, has_minus: bool) -> Result<()> {
        self.skip(opening);
        self.is_line_start = false;
        if has_minus {
            self.after_tag(b'-', false);
        }
        let rest = self.rest();
        let mut tags = rest.match_indices("{%");
        let found = tags.find_map(|(at, _)| Some((at, raw_tag(&rest[at..], "endraw")?)));
        let Some((at, (sign, length, _))) = found else {
            return self.failed("`raw` has no `endraw`");
        };
        let data = self.before_tag(&rest[..at], sign, false);
        if !data.is_empty() {
            self.add(Token::Data(data.to_owned()));
        }
        self.skip(at + length);
        let end = self.source.as_bytes()[self.at - 3];
        self.after_tag(end, true);
        Ok(())
    }

    /// Reads the tokens inside a tag, and the end of the tag.
    fn inner(&mut self, end: &str, token: Token) -> Result<()> {
        let mut open: Vec<u8> = Vec::new();
        let is_block = token == Token::BlockEnd;
        loop {
            let rest = self.rest();
            let Some(c) = rest.chars().next() else {
                return self.failed(format!("a tag has no end `{end}`"));
            };
            if open.is_empty() {
                let sign = rest.as_bytes()[0];
                let is_signed = sign == b'-' || (is_block && sign == b'+');
                let bare = if is_signed { &rest[1..] } else { rest };
                if bare.starts_with(end) {
                    self.add(token);
                    self.skip(end.len() + usize::from(is_signed));
                    self.after_tag(if is_signed { sign } else { b' ' }, is_block);
                    return Ok(());
                }
            }
            if is_space(c) {
                self.skip_spaces();
            } else if c.is_ascii_digit() {
                self.number()?;
            } else if c == '_' || c.is_alphabetic() {
                let end = rest.find(|c: char| c != '_' && !c.is_alphanumeric());
                let name = &rest[..end.unwrap_or(rest.len())];
                self.add(Token::Name(name.to_owned()));
                self.skip(name.len());
            } else if c == '"' || c == '\'' {
                self.string(c)?;
            } else {
                let operator = OPERATORS.iter().find(|known| rest.starts_with(**known));
                let Some(operator) = operator else {
                    return self.failed(format!("a tag has `{c}`, which is not part of Jinja"));
                };
                self.balance(&mut open, operator)?;
                self.add(Token::Operator(operator));
                self.skip(operator.len());
            }
        }
    }

    fn balance(&self, open: &mut Vec<u8>, operator: &str) -> Result<()> {
        match operator {
            "(" => open.push(b')'),
            "[" => open.push(b']'),
            "{" => open.push(b'}'),
            ")" | "]" | "}" if open.pop() != operator.bytes().next() => {
                return self.failed(format!("unexpected `{operator}`"));
            }
            _ => {}
        }
        Ok(())
    }

    fn number(&mut self) -> Result<()> {
        let rest = self.rest();
        let lower = rest.get(..2).unwrap_or_default().to_ascii_lowercase();
        let radix = [("0x", 16), ("0o", 8), ("0b", 2)];
        let radix = radix.iter().find(|(prefix, _)| *prefix == lower);
        if let Some((prefix, radix)) = radix {
            let digits = &rest[prefix.len()..];
            let end = digits.find(|c: char| !c.is_digit(*radix) && c != '_');
            let digits = &digits[..end.unwrap_or(digits.len())];
            let value = i128::from_str_radix(&digits.replace('_', ""), *radix);
            let Ok(value) = value else {
                return self.failed(format!("`{prefix}{digits}` is not a number"));
            };
            self.add(Token::Int(value));
            self.skip(prefix.len() + digits.len());
            return Ok(());
        }
        let digits = |from: usize| {
            let text = &rest[from..];
            let end = text.find(|c: char| !c.is_ascii_digit() && c != '_');
            from + end.unwrap_or(text.len())
        };
        let starts_digit = |at: usize| rest.as_bytes().get(at).is_some_and(u8::is_ascii_digit);
        let whole = digits(0);
        let mut end = whole;
        if rest.as_bytes().get(end) == Some(&b'.') && starts_digit(end + 1) {
            end = digits(end + 1);
        }
        if matches!(rest.as_bytes().get(end), Some(b'e' | b'E')) {
            let sign = usize::from(matches!(rest.as_bytes().get(end + 1), Some(b'+' | b'-')));
            if starts_digit(end + 1 + sign) {
                end = digits(end + 1 + sign);
            }
        }
        let text = rest[..end].replace('_', "");
        let token = match end == whole {
            true => text.parse().ok().map(Token::Int),
            false => text.parse().ok().map(Token::Float),
        };
        let Some(token) = token else {
            return self.failed(format!("the number {text} has more than 127 bits"));
        };
        self.add(token);
        self.skip(end);
        Ok(())
    }

    fn string(&mut self, quote: char) -> Result<()> {
        let (mut text, mut chars) = (String::new(), self.rest().char_indices().skip(1));
        loop {
            match chars.next() {
                None => return self.failed("a text has no end"),
                Some((at, c)) if c == quote => {
                    self.add(Token::Str(text));
                    self.skip(at + 1);
                    return Ok(());
                }
                Some((_, '\\')) => {
                    let Some((at, c)) = chars.next() else {
                        return self.failed("a text has no end");
                    };
                    let digits = match c {
                        'x' => 2,
                        'u' => 4,
                        'U' => 8,
                        '0'..='7' => {
                            let rest = &self.rest()[at..];
                            let n = rest
                                .bytes()
                                .take(3)
                                .take_while(|b| (b'0'..=b'7').contains(b));
                            let n = n.count();
                            let code = u32::from_str_radix(&rest[..n], 8).unwrap_or(0);
                            text.push(char::from_u32(code).unwrap_or('\u{fffd}'));
                            for _ in 1..n {
                                chars.next();
                            }
                            continue;
                        }
                        _ => 0,
                    };
                    if digits > 0 {
                        let code = self.rest().get(at + 1..at + 1 + digits);
                        let code = code.filter(|code| code.bytes().all(|b| b.is_ascii_hexdigit()));
                        let code = code.and_then(|code| u32::from_str_radix(code, 16).ok());
                        let Some(c) = code.and_then(char::from_u32) else {
                            return self.failed(format!("`\\{c}` in a string is not a character"));
                        };
                        text.push(c);
                        for _ in 0..digits {
                            chars.next();
                        }
                        continue;
                    }
                    match c {
                        'n' => text.push('\n'),
                        't' => text.push('\t'),
                        'r' => text.push('\r'),
                        'a' => text.push('\x07'),
                        'b' => text.push('\x08'),
                        'f' => text.push('\x0c'),
                        'v' => text.push('\x0b'),
                        '\\' | '\'' | '"' => text.push(c),
                        '\n' => {}
                        'N' => {
                            return self.failed(
                                "`\\N{…}` in a text is not supported; write the character",
                            );
                        }
                        other => text.extend(['\\', other]),
                    }
                }
                Some((_, c)) => text.push(c),
            }
        }
    }
}

/// If `text` begins with the tag `name`, returns the sign after `{%`, the tag's length, and whether it ends with `-%}`.
fn raw_tag(text: &str, name: &str) -> Option<(Option<u8>, usize, bool)> {
    let inner = text.strip_prefix("{%")?;
    let sign = inner.bytes().next().filter(|c| matches!(c, b'-' | b'+'));
    let inner = &inner[usize::from(sign.is_some())..];
    let inner = inner.trim_start_matches(is_space).strip_prefix(name)?;
    let inner = inner.trim_start_matches(is_space);
    let (inner, has_minus) = match inner.strip_prefix('-') {
        Some(inner) => (inner, true),
        // Only `endraw` may have a plus.
        None if name == "endraw" => (inner.strip_prefix('+').unwrap_or(inner), false),
        None => (inner, false),
    };
    let rest = inner.strip_prefix("%}")?;
    Some((sign, text.len() - rest.len(), has_minus))
}
