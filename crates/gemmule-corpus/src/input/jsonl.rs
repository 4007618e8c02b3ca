//! JSONL: a JSON object on each line.

use std::{collections::HashMap, path::PathBuf, sync::Arc};

use arrow_schema::Fields;

use super::{
    Inferred, Kind, Source,
    bytes::{Line, Stream},
    infer::string,
    json::{Chooser, Members, type_name},
    lines::{too_long, utf8},
    list, read_error,
};
use crate::{
    CorpusError, Keep, Limits, OutputFormat,
    job::Checked,
    window::{Kept, Position, Row, Window, bytes},
};

const FORMAT: &str = "JSONL";

/// Maximum number of kept columns that are inferred from the first window.
const MAX_COLUMNS: usize = 4096;

/// Maximum number of lines that are examined to explain an error about the first window.
const EXAMINED: usize = 1000;

/// A reader of JSONL files.
pub(super) struct Jsonl {
    path: PathBuf,
    stream: Stream,
    limits: Limits,
    columns: Vec<String>,
    keep: Keep,
    row: u64,
    /// Names of the output's columns other than kept ones. Kept members must not have these names.
    taken: Vec<String>,
    /// Whether members are copied to the output unchanged.
    is_verbatim: bool,
    /// The kept columns; `None` before the first window.
    kept: Option<Inferred>,
}

/// A row of a JSONL file. Its kept members are JSON text.
struct Object {
    texts: Row,
    kept: Vec<(String, String)>,
    /// Whether the line is a JSON object.
    is_object: bool,
}

impl Object {
    fn refused(reason: String) -> Self {
        Self {
            texts: Err(reason),
            kept: Vec::new(),
            is_object: false,
        }
    }

    fn bytes(&self) -> usize {
        let kept = self.kept.iter().map(|(name, raw)| name.len() + raw.len());
        bytes(&self.texts) + kept.sum::<usize>()
    }
}

impl Jsonl {
    pub fn open(
        checked: &Checked<'_>,
        from: Position,
        inferred: Option<Inferred>,
    ) -> Result<Self, CorpusError> {
        let job = checked.job;
        let path = job.input.clone();
        let stream = Stream::open(&path, from.byte).map_err(read_error(&path, FORMAT))?;
        Ok(Self {
            path,
            stream,
            limits: job.limits,
            columns: job.columns.clone(),
            keep: job.keep.clone(),
            row: from.row,
            taken: checked.own.clone(),
            is_verbatim: checked.output == OutputFormat::Jsonl,
            kept: inferred,
        })
    }

    /// Parses a line into a row.
    fn parse(&self, line: &[u8]) -> Object {
        let chooser = Chooser {
            columns: &self.columns,
            keep: &self.keep,
        };
        let members = utf8(line, "the line").and_then(|line| chooser.read(line));
        let Members { texts, kept } = match members {
            Ok(members) => members,
            Err(reason) => return Object::refused(reason),
        };
        let text = |(column, raw): (&String, Option<&serde_json::value::RawValue>)| match raw
            .map(|raw| raw.get())
        {
            None => Err(format!("the field `{column}` is missing")),
            Some(raw) if type_name(raw) == "string" => string(raw).ok_or_else(|| {
                format!("the field `{column}` has half of a surrogate pair, which is no character")
            }),
            Some(raw) => Err(format!(
                "the field `{column}` is of type {}; expected a string",
                type_name(raw)
            )),
        };
        let texts: Row = self.columns.iter().zip(texts).map(text).collect();
        let taken = kept
            .iter()
            .find(|(name, _)| self.is_verbatim && self.taken.contains(name));
        let texts = match taken {
            Some((name, _)) => Err(format!(
                "the kept field `{name}` has the same name as a column of the output"
            )),
            None => texts,
        };
        let own =
            |(name, raw): (String, &serde_json::value::RawValue)| (name, raw.get().to_owned());
        Object {
            texts,
            kept: kept.into_iter().map(own).collect(),
            is_object: true,
        }
    }

    /// Reads the rows of a window.
    fn rows(&mut self) -> Result<Vec<Object>, CorpusError> {
        let mut rows = Vec::new();
        let mut bytes = 0;
        let mut line = Vec::new();
        while rows.len() < self.limits.window_rows && bytes < self.limits.window_bytes {
            let kind = self.stream.line(self.limits.row_bytes, &mut line);
            let row = match kind.map_err(read_error(&self.path, FORMAT))? {
                Line::End => break,
                Line::TooLong(n) => Object::refused(too_long(n, self.limits.row_bytes)),
                Line::Complete => self.parse(&line),
            };
            bytes += row.bytes();
            rows.push(row);
        }
        Ok(rows)
    }

    /// Checks that at least one row of the first window has texts.
    fn check_first(&self, rows: &[Object]) -> Result<(), CorpusError> {
        if rows.is_empty() || rows.iter().any(|row| row.texts.is_ok()) {
            return Ok(());
        }
        let without_texts = || {
            let reason = rows[0].texts.as_ref().err().cloned().unwrap_or_default();
            let n = rows.len();
            let problem = format!("none of the first {n} lines has a text: {reason}");
            Err(CorpusError::input(&self.path, FORMAT, problem))
        };
        if !rows.iter().any(|row| row.is_object) {
            return without_texts();
        }
        let columns = self.examine()?;
        let find = |column: &String| columns.iter().find(|(name, _)| name == column);
        let has_strings =
            |column: &&String| find(column).is_some_and(|(_, k)| k.contains("string"));
        // If every column has strings, the texts are unusable for another reason, such as an invalid string. The reason of the first row is
        // reported.
        let Some(column) = self.columns.iter().find(|column| !has_strings(column)) else {
            return without_texts();
        };
        let found = find(column);
        let (path, column) = (self.path.clone(), column.clone());
        let shown = list(
            columns
                .iter()
                .map(|(name, kinds)| format!("`{name}` ({kinds})")),
        );
        Err(match found {
            None => CorpusError::NoColumn {
                path,
                column,
                columns: shown,
            },
            Some((_, kinds)) => CorpusError::ColumnType {
                path,
                column,
                found: kinds.clone(),
                columns: shown,
            },
        })
    }

    /// Returns the names of the fields in the first lines, with their types.
    fn examine(&self) -> Result<Vec<(String, String)>, CorpusError> {
        let failed = read_error(&self.path, FORMAT);
        let mut stream = Stream::open(&self.path, 0).map_err(&failed)?;
        let chooser = Chooser {
            columns: &[],
            keep: &Keep::All,
        };
        let mut columns: Vec<(String, Vec<&'static str>)> = Vec::new();
        let mut line = Vec::new();
        for _ in 0..EXAMINED {
            match stream
                .line(self.limits.row_bytes, &mut line)
                .map_err(&failed)?
            {
                Line::End => break,
                Line::TooLong(_) => continue,
                Line::Complete => {}
            }
            let members = utf8(&line, "the line").and_then(|line| chooser.read(line));
            for (name, raw) in members.unwrap_or_default().kept {
                let kind = type_name(raw.get());
                let is_full = columns.len() == MAX_COLUMNS;
                match columns.iter_mut().find(|(known, _)| *known == name) {
                    Some((_, kinds)) if kinds.contains(&kind) => {}
                    Some((_, kinds)) => kinds.push(kind),
                    None if is_full => {}
                    None => columns.push((name, vec![kind])),
                }
            }
        }
        let join = |(name, kinds): (String, Vec<&str>)| (name, kinds.join(" or "));
        Ok(columns.into_iter().map(join).collect())
    }

    /// Determines the kept columns and their types from the first window.
    fn infer(&self, rows: &[Object]) -> Result<Inferred, CorpusError> {
        let mut values: HashMap<&str, Vec<&str>> = HashMap::new();
        let mut names: Vec<&str> = match &self.keep {
            Keep::Named(names) => names.iter().map(String::as_str).collect(),
            _ => Vec::new(),
        };
        for (name, raw) in rows.iter().flat_map(|row| &row.kept) {
            let seen = values.entry(name).or_default();
            if seen.is_empty() && self.keep == Keep::All {
                names.push(name);
            }
            seen.push(raw);
        }
        if names.len() > MAX_COLUMNS {
            return Err(CorpusError::input(
                &self.path,
                FORMAT,
                format!(
                    "the first {} lines have {} kept fields, and the limit is {MAX_COLUMNS}; name the ones to keep",
                    rows.len(),
                    names.len()
                ),
            ));
        }
        let kind = |name: &str| Kind::of(values.get(name).into_iter().flatten().copied());
        Ok(names
            .into_iter()
            .map(|name| (name.to_owned(), kind(name)))
            .collect())
    }
}

/// Returns the kept columns as arrays. Refuses rows whose values do not fit the column types.
fn arrays(columns: &Inferred, rows: &mut [Object]) -> Kept {
    let mut places = HashMap::new();
    for (place, (name, _)) in columns.iter().enumerate() {
        places.insert(name.as_str(), place);
    }
    let mut builders: Vec<_> = columns.iter().map(|(_, kind)| kind.builder()).collect();
    for row in rows {
        let mut values: Vec<Option<&str>> = vec![None; columns.len()];
        for (name, raw) in &row.kept {
            let place = places.get(name.as_str()).copied();
            let reason = match place.map(|place| (place, columns[place].1)) {
                Some((place, kind)) if kind.holds(raw) => {
                    values[place] = Some(raw);
                    continue;
                }
                Some((_, kind)) => format!(
                    "the kept field `{name}` is of type {}, and the first window has {}; write JSONL to keep any value",
                    type_name(raw),
                    kind.name()
                ),
                None => format!(
                    "the kept field `{name}` is in no row of the first window; name the fields to keep, or write JSONL to keep all"
                ),
            };
            if row.texts.is_ok() {
                row.texts = Err(reason);
            }
        }
        for (builder, value) in builders.iter_mut().zip(values) {
            builder.push(value);
        }
    }
    Kept::Columns(
        builders
            .into_iter()
            .map(|builder| builder.finish())
            .collect(),
    )
}

/// Returns the kept members of a row as the text of a JSON object, without the braces.
fn members(row: &Object) -> String {
    let member = |(name, raw): &(String, String)| format!("{}:{raw}", serde_json::json!(name));
    row.kept.iter().map(member).collect::<Vec<_>>().join(",")
}

impl Source for Jsonl {
    fn window(&mut self) -> Result<Option<Window>, CorpusError> {
        let first = self.row;
        let mut rows = self.rows()?;
        if first == 0 {
            self.check_first(&rows)?;
        }
        if self.kept.is_none() {
            self.kept = Some(match self.is_verbatim {
                true => Vec::new(),
                false => self.infer(&rows)?,
            });
        }
        let kept = match &self.kept {
            Some(columns) if !self.is_verbatim => arrays(columns, &mut rows),
            _ => Kept::Members(rows.iter().map(members).collect()),
        };
        self.row += rows.len() as u64;
        let end = Position {
            row: self.row,
            byte: self.stream.at(),
        };
        let rows: Vec<Row> = rows.into_iter().map(|row| row.texts).collect();
        Ok((!rows.is_empty()).then_some(Window {
            first,
            rows,
            kept,
            end,
        }))
    }

    fn fields(&self) -> Fields {
        let columns = self.kept.iter().flatten();
        columns
            .map(|(name, kind)| Arc::new(kind.field(name)))
            .collect()
    }

    fn inferred(&self) -> Option<Inferred> {
        self.kept.clone()
    }

    fn total_bytes(&self) -> Option<u64> {
        self.stream.size()
    }
}
