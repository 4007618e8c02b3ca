//! Reads RON with source positions.
//!
//! The `ron` crate returns values without positions. A description is therefore read level by level as [`RawValue`]s. These are
//! slices of the source, so their positions are known.

use std::{fmt, ops::Range};

use ron::{
    error::{Error as RonError, Position, SpannedError},
    value::RawValue,
};
use serde::{
    Deserialize,
    de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor},
};

use super::error::{At, File, ModelError, Problem, suggest};

/// Maximum size of a description in bytes, far above the size of any real description. The limit bounds the time to read a description.
const MAX_BYTES: usize = 1 << 17;

/// Maximum length of a line in bytes. Errors show the line with a marker below, and the reporter counts columns in 16 bits, with up to four
/// columns per tab.
const MAX_LINE: usize = 1 << 13;

/// Maximum length of a name, longer than in any real description. A graph has a copy of the names of enclosing loops in each value name, so
/// the limit bounds the memory to build a graph.
const MAX_NAME: usize = 64;

/// Returns whether a terminal could interpret the character instead of showing it. This holds for control characters, except tab and line
/// ends, and for overrides of the text direction. No valid description contains such characters.
fn is_raw_control(c: char) -> bool {
    let overrides = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    overrides || (c.is_control() && !matches!(c, '\t' | '\r' | '\n'))
}

/// Returns whether a character is white space in RON.
fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{200e}' | '\u{200f}')
}

/// RON text of a value, without surrounding white space and comments.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece<'a> {
    pub text: &'a str,
    start: usize,
}

impl Piece<'_> {
    pub fn span(&self) -> Range<usize> {
        self.start..self.start + self.text.len()
    }
}

/// A call: `name(field: value, …)` or `name(value, …)`.
pub(super) struct Call<'a> {
    pub name: At<String>,
    fields: Fields<'a>,
}

enum Fields<'a> {
    Named(Vec<(String, &'a RawValue)>),
    Positional(Vec<&'a RawValue>),
}

/// Named fields of a call. All of them are known fields of `owner`.
pub(super) struct Args<'a> {
    owner: At<String>,
    fields: Vec<(At<String>, Piece<'a>)>,
}

/// Reads pieces of one file.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    pub file: &'a File,
}

impl<'a> Reader<'a> {
    /// Returns the whole file as one value. The syntax is checked to the last byte.
    pub fn whole(file: &'a File) -> Result<(Self, Piece<'a>), ModelError> {
        let reader = Self { file };
        let text = file.text();
        if text.len() > MAX_BYTES {
            return Err(file.error_elsewhere(Problem::TooLong {
                bytes: text.len(),
                limit: MAX_BYTES,
            }));
        }
        let mut lines = text.split('\n').map(str::len).enumerate();
        if let Some((at, bytes)) = lines.find(|&(_, n)| n > MAX_LINE) {
            return Err(file.error_elsewhere(Problem::LongLine {
                line: at + 1,
                bytes,
                limit: MAX_LINE,
            }));
        }
        if let Some((at, c)) = text.char_indices().find(|&(_, c)| is_raw_control(c)) {
            let (before, line) = (&text[..at], text[..at].matches('\n').count() + 1);
            let column = before.chars().rev().take_while(|&c| c != '\n').count() + 1;
            // Do not show the line, because the terminal would interpret the character.
            return Err(file.error_elsewhere(Problem::Control {
                line,
                column,
                code: c.into(),
            }));
        }
        let raw = RawValue::from_ron(text).map_err(|e| reader.syntax(&e, 0, text))?;
        Ok((reader, reader.piece(raw)))
    }

    fn piece(&self, raw: &'a RawValue) -> Piece<'a> {
        // `RawValue::trim` parses the value to find its end, so it is only called if the text may begin or end with a comment.
        let text = raw.get_ron().trim_matches(is_space);
        let last_line = text.rsplit('\n').next().unwrap_or(text);
        let may_have_comment = text.starts_with('/') || text.ends_with("*/");
        let text = match may_have_comment || last_line.contains("//") {
            true => raw.trim().get_ron(),
            false => text,
        };
        // `text` is a slice of the file's text, so the difference is not negative.
        let start = text.as_ptr() as usize - self.file.text().as_ptr() as usize;
        Piece { text, start }
    }

    fn parse<T: Deserialize<'a>>(&self, piece: Piece<'a>) -> Result<T, ModelError> {
        ron::from_str(piece.text).map_err(|e| self.syntax(&e, piece.start, piece.text))
    }

    pub fn list(&self, what: &str, piece: Piece<'a>) -> Result<Vec<Piece<'a>>, ModelError> {
        if !piece.text.starts_with('[') {
            return Err(self.form(what, "a list `[…]`", piece));
        }
        let raws: Vec<&RawValue> = self.parse(piece)?;
        Ok(raws.into_iter().map(|r| self.piece(r)).collect())
    }

    /// Returns the entries of `{ "name": value, … }` in the order of the file. Names are unique and valid according to
    /// [`name`](Self::name).
    pub fn map(
        &self,
        what: &'static str,
        piece: Piece<'a>,
    ) -> Result<Vec<(At<String>, Piece<'a>)>, ModelError> {
        self.entries(what, piece, Self::name)
    }

    /// Like [`map`](Self::map), with arbitrary strings as names.
    pub fn texts(
        &self,
        what: &'static str,
        piece: Piece<'a>,
    ) -> Result<Vec<(At<String>, Piece<'a>)>, ModelError> {
        self.entries(what, piece, Self::string)
    }

    fn entries(
        &self,
        what: &'static str,
        piece: Piece<'a>,
        read: impl Fn(&Self, &str, Piece<'a>) -> Result<At<String>, ModelError>,
    ) -> Result<Vec<(At<String>, Piece<'a>)>, ModelError> {
        if !piece.text.starts_with('{') {
            return Err(self.form(what, "a map `{ \"name\": … }`", piece));
        }
        let Entries(raws) = self.parse(piece)?;
        let mut entries = Vec::with_capacity(raws.len());
        for (key, value) in raws {
            let key = read(self, what, self.piece(key))?;
            self.once(what, &entries, &key)?;
            entries.push((key, self.piece(value)));
        }
        Ok(entries)
    }

    fn once(
        &self,
        what: &'static str,
        entries: &[(At<String>, Piece<'a>)],
        key: &At<String>,
    ) -> Result<(), ModelError> {
        match entries.iter().find(|(k, _)| k.value == key.value) {
            None => Ok(()),
            Some((before, _)) => {
                let name = key.value.clone();
                let problem = Problem::DefinedTwice { what, name };
                let error = self.file.error(problem, &key.span, "again here");
                Err(error.also(&before.span, "first here").help("remove one"))
            }
        }
    }

    pub fn string(&self, what: &str, piece: Piece<'a>) -> Result<At<String>, ModelError> {
        if !is_string(piece) {
            return Err(self.form(what, "a string", piece));
        }
        Ok(At::new(self.parse(piece)?, piece.span()))
    }

    /// Returns a name that a description defines: letters, digits and underscores, up to the maximum length.
    pub fn name(&self, what: &str, piece: Piece<'a>) -> Result<At<String>, ModelError> {
        let name = self.string(what, piece)?;
        let starts = name.value.starts_with(|c: char| c.is_ascii_alphabetic());
        let rest = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if !starts || !name.value.chars().all(rest) {
            let expected = "a letter, then letters, digits and underscores";
            return Err(self.form(what, expected, piece));
        }
        if name.value.len() > MAX_NAME {
            let expected = format!("at most {MAX_NAME} characters");
            return Err(self.form(what, &expected, piece));
        }
        Ok(name)
    }

    pub fn flag(&self, what: &str, piece: Piece<'a>) -> Result<bool, ModelError> {
        match piece.text {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(self.form(what, "`true` or `false`", piece)),
        }
    }

    /// Returns a call `name(…)`. `expected` describes the valid forms.
    pub fn call(
        &self,
        what: &str,
        expected: &str,
        piece: Piece<'a>,
    ) -> Result<Call<'a>, ModelError> {
        let end = piece
            .text
            .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .unwrap_or(piece.text.len());
        let rest = piece.text[end..].trim_start();
        if end == 0 || !rest.starts_with(['(', '/']) {
            return Err(self.form(what, expected, piece));
        }
        let name = At::new(piece.text[..end].to_owned(), piece.start..piece.start + end);
        let fields = self.parse(Piece {
            text: &piece.text[end..],
            start: piece.start + end,
        })?;
        Ok(Call { name, fields })
    }

    pub fn form(&self, what: &str, expected: &str, piece: Piece<'_>) -> ModelError {
        let found = if piece.text.chars().count() > 40 || piece.text.contains('\n') {
            let start: String = piece
                .text
                .chars()
                .take_while(|&c| c != '\n')
                .take(30)
                .collect();
            format!("`{start}…`")
        } else {
            format!("`{}`", piece.text)
        };
        let problem = Problem::Form {
            what: what.to_owned(),
            expected: expected.to_owned(),
            found,
        };
        self.file
            .error(problem, &piece.span(), format!("expected {expected}"))
    }

    fn syntax(&self, error: &SpannedError, start: usize, text: &str) -> ModelError {
        let brackets = "brackets must match, and commas stand between fields and between items";
        let (message, help) = match &error.code {
            RonError::ExceededRecursionLimit => ("it is nested too deeply".to_owned(), brackets),
            RonError::Message(m) if m.contains("RawValue cannot") => (
                "extensions and attributes are not part of the language".to_owned(),
                "remove the line `#![…]` above this",
            ),
            RonError::Eof => (
                "the file ends too early".to_owned(),
                "a description is one `Model(…)`, and all its brackets are closed",
            ),
            RonError::TrailingCharacters => (
                "there is more after the end".to_owned(),
                "a file holds one `Model(…)`",
            ),
            code => {
                let text = code.to_string();
                let mut chars = text.chars();
                let first = chars.next().map(|c| c.to_ascii_lowercase());
                (first.into_iter().chain(chars).collect(), brackets)
            }
        };
        let at = start + offset(text, error.span.end);
        // The caret covers the character where reading stopped, if there is one.
        let next = self.file.text()[at..].chars().next();
        let len = next.filter(|c| !c.is_control()).map_or(0, char::len_utf8);
        self.file
            .error(
                Problem::Syntax { message },
                &(at..at + len),
                "reading stopped here",
            )
            .help(help)
    }
}

impl<'a> Call<'a> {
    /// Returns the named fields. A field that is not in `known` is an error.
    pub fn named(self, reader: Reader<'a>, known: &[&'static str]) -> Result<Args<'a>, ModelError> {
        let raws = match self.fields {
            Fields::Named(raws) => raws,
            Fields::Positional(raws) if raws.is_empty() => Vec::new(),
            Fields::Positional(raws) => {
                let what = format!("`{}`", self.name.value);
                let expected = "fields with names, `field: value`";
                return Err(reader.form(&what, expected, reader.piece(raws[0])));
            }
        };
        let mut fields: Vec<(At<String>, Piece<'a>)> = Vec::with_capacity(raws.len());
        for (name, value) in raws {
            let value = reader.piece(value);
            // RON returns a field's name without its position. Search for the position: the last occurrence of the name before the value.
            let start = reader.file.text()[..value.start]
                .rfind(&name)
                .unwrap_or(value.start);
            let name = At::new(name.clone(), start..start + name.len());
            if !known.contains(&name.value.as_str()) {
                let what = format!("field of `{}` called", self.name.value);
                let problem = Problem::Unknown {
                    what,
                    name: name.value.clone(),
                };
                return Err(reader
                    .file
                    .error(problem, &name.span, "unknown field")
                    .help(suggest(&name.value, known.iter().copied())));
            }
            reader.once("field", &fields, &name)?;
            fields.push((name, value));
        }
        Ok(Args {
            owner: self.name,
            fields,
        })
    }

    /// Returns exactly `N` positional values.
    pub fn positional<const N: usize>(
        self,
        reader: Reader<'a>,
        form: &'static str,
    ) -> Result<[Piece<'a>; N], ModelError> {
        let found = match self.fields {
            Fields::Positional(raws) => raws,
            Fields::Named(_) => Vec::new(),
        };
        let n = found.len();
        let pieces: Vec<Piece<'a>> = found.into_iter().map(|r| reader.piece(r)).collect();
        pieces.try_into().map_err(|_| {
            let problem = Problem::Form {
                what: format!("`{}`", self.name.value),
                expected: format!("{N} values without names"),
                found: if n == 0 {
                    "none".to_owned()
                } else {
                    n.to_string()
                },
            };
            reader
                .file
                .error(problem, &self.name.span, format!("expected {N} values"))
                .help(format!("write `{form}`"))
        })
    }
}

impl<'a> Args<'a> {
    pub fn optional(&self, field: &'static str) -> Option<Piece<'a>> {
        let found = self.fields.iter().find(|(name, _)| name.value == field);
        found.map(|&(_, piece)| piece)
    }

    pub fn required(
        &self,
        reader: Reader<'a>,
        field: &'static str,
    ) -> Result<Piece<'a>, ModelError> {
        self.optional(field).ok_or_else(|| {
            let owner = self.owner.value.clone();
            let problem = Problem::MissingField { owner, field };
            reader
                .file
                .error(problem, &self.owner.span, format!("`{field}` is missing"))
                .help(format!("add `{field}: …` to `{}(…)`", self.owner.value))
        })
    }
}

/// Returns whether a piece is a string rather than a number, a word or a call.
pub(super) fn is_string(piece: Piece<'_>) -> bool {
    ["\"", "r\"", "r#"]
        .iter()
        .any(|start| piece.text.starts_with(start))
}

/// Returns the byte offset of a position. Lines and columns count from 1.
fn offset(text: &str, position: Position) -> usize {
    let lines = text.split_inclusive('\n');
    let before: usize = lines
        .take(position.line.saturating_sub(1))
        .map(str::len)
        .sum();
    let line = &text[before..];
    let column = line.char_indices().nth(position.col.saturating_sub(1));
    before + column.map_or(line.len(), |(at, _)| at)
}

/// Pairs of a map, in order and with duplicates.
struct Entries<'a>(Vec<(&'a RawValue, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Entries<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Entries<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Parenthesised;
        impl<'de> Visitor<'de> for Parenthesised {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("fields in parentheses")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields::Named(fields))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut values = Vec::new();
                while let Some(value) = seq.next_element()? {
                    values.push(value);
                }
                Ok(Fields::Positional(values))
            }

            fn visit_unit<E: serde::de::Error>(self) -> Result<Self::Value, E> {
                Ok(Fields::Positional(Vec::new()))
            }
        }
        deserializer
            .deserialize_any(Parenthesised)
            .map_err(D::Error::custom)
    }
}
