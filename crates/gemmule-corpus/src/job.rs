//! Options of [`run`](crate::run).

use std::{
    collections::BTreeMap,
    fmt, fs,
    path::{Path, PathBuf},
    str::FromStr,
};

use crate::{Column, CorpusError, Kind};

/// Options of [`run`](crate::run): the files, the columns, the formats and the limits.
#[derive(Clone, Debug)]
pub struct Job {
    pub input: PathBuf,
    /// Format of the input. `None` selects it by the file extension.
    pub input_format: Option<InputFormat>,
    /// Names of the columns, or fields of JSON objects, that contain the texts; at least one. For plain lines, exactly one name, which may
    /// be any string.
    pub columns: Vec<String>,
    /// File to write. If it is a symbolic link to a file, the target is written, and the other files of the run are next to the target.
    pub output: PathBuf,
    /// Format of the output. `None` selects it by the file extension.
    pub output_format: Option<OutputFormat>,
    /// Columns of the input that are copied to the output.
    pub keep: Keep,
    /// Storage type of the values of vectors. Other columns are not affected.
    pub vectors: Vectors,
    /// Whether to replace an existing output, and to discard an interrupted run with other options.
    pub overwrite: bool,
    /// Name of the output's column with the row number.
    pub row_column: String,
    pub limits: Limits,
}

/// Limits that bound the memory of a run.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of rows of a window: consecutive rows that are read, computed and written together. A run resumes after its last
    /// finished window, so a slow model benefits from smaller windows.
    pub window_rows: usize,
    /// Number of bytes of texts and kept columns after which a window ends.
    pub window_bytes: usize,
    /// Maximum number of bytes of a row. Longer rows are refused.
    pub row_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            window_rows: 16_384,
            window_bytes: 64 << 20,
            row_bytes: 16 << 20,
        }
    }
}

/// Columns of the input that are copied to the output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Keep {
    #[default]
    None,
    /// All columns except the texts.
    All,
    /// Columns by name, including the texts if they are named.
    Named(Vec<String>),
}

/// Formats of inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputFormat {
    /// A JSON object on each line, possibly compressed with gzip.
    Jsonl,
    /// Comma-separated values with a header, possibly compressed with gzip.
    Csv,
    /// Tab-separated values with a header, possibly compressed with gzip.
    Tsv,
    Parquet,
    /// A text on each line, possibly compressed with gzip.
    Lines,
}

/// Formats of outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputFormat {
    Parquet,
    /// Arrow IPC file, also called Feather version 2.
    Arrow,
    /// NumPy array with two dimensions.
    Npy,
    /// A JSON object on each line.
    Jsonl,
}

/// Storage types for the values of vectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Vectors {
    #[default]
    F32,
    F16,
    /// Integers from -127 to 127, and a scale for each vector in the column `scale`: the vector's largest magnitude divided by 127. A value
    /// is approximately its integer times the scale.
    Int8,
    /// One bit per value, which is 1 if the value is positive. A byte holds 8 values, the first one in its highest bit, like `ubinary` of
    /// sentence-transformers. The last byte is padded with zeros.
    Binary,
}

/// Name of the column with the scales of [`Vectors::Int8`]: one scale per row, or a list of scales if a row has several vectors.
pub(crate) const SCALE: &str = "scale";

impl Job {
    /// Returns a job with default options, which reads the column `text`.
    pub fn new(input: impl Into<PathBuf>, output: impl Into<PathBuf>) -> Self {
        Self {
            input: input.into(),
            input_format: None,
            columns: vec!["text".to_owned()],
            output: output.into(),
            output_format: None,
            keep: Keep::None,
            vectors: Vectors::F32,
            overwrite: false,
            row_column: "row".to_owned(),
            limits: Limits::default(),
        }
    }

    /// Returns the folder of the unfinished output: the path of the output with `.partial` appended.
    pub fn partial(&self) -> PathBuf {
        beside(&self.output, ".partial")
    }

    /// Returns the file that lists refused rows: the path of the output with `.errors.jsonl` appended.
    pub fn errors(&self) -> PathBuf {
        beside(&self.output, ".errors.jsonl")
    }

    /// Checks the options as [`run`](crate::run) does, for a model that computes `columns`. A program may call this function before it
    /// loads the model. The widths of vectors do not affect the result, so any width may be given if they are not known yet.
    ///
    /// # Errors
    /// Returns an error for contradictory options, for an output format that cannot hold the columns, and for an output that is not a
    /// regular file.
    pub fn check(&self, columns: &[Column]) -> Result<(), CorpusError> {
        self.checked(columns).map(drop)
    }

    /// Checks the options, and returns them with the selected formats.
    pub(crate) fn checked(&self, columns: &[Column]) -> Result<Checked<'_>, CorpusError> {
        let bad = |problem: String| Err(CorpusError::BadOption { problem });
        let input = match self.input_format {
            Some(format) => format,
            None => InputFormat::of(&self.input)?,
        };
        let output = match self.output_format {
            Some(format) => format,
            None => OutputFormat::of(&self.output)?,
        };
        if self.output.file_name().is_none() {
            return bad(format!(
                "`{}` is not the name of a file",
                self.output.display()
            ));
        }
        for path in [self.output.clone(), self.errors()] {
            check_place(&path)?;
        }
        let Limits {
            window_rows,
            window_bytes,
            row_bytes,
        } = self.limits;
        if window_rows == 0 || window_rows > 1 << 24 {
            return bad(format!(
                "a window of {window_rows} rows; expected 1 to 16,777,216"
            ));
        }
        if !(1..=1 << 30).contains(&window_bytes) || !(1..=1 << 30).contains(&row_bytes) {
            return bad(format!(
                "a window of {window_bytes} bytes with rows up to {row_bytes}; expected 1 to 1,073,741,824 each"
            ));
        }
        if output == OutputFormat::Npy {
            if self.keep != Keep::None {
                return bad("an array of NumPy has no columns to keep; write Parquet".to_owned());
            }
            self.check_array(columns)?;
        }
        if input == InputFormat::Lines && self.keep != Keep::None {
            return bad("plain lines have no columns to keep".to_owned());
        }
        match self.columns.as_slice() {
            [] => return bad("no column has texts; name at least one".to_owned()),
            [_] => {}
            several => {
                if let Some(name) = twice(several) {
                    return bad(format!("column `{name}` is read twice; name two columns"));
                }
                if input == InputFormat::Lines {
                    return bad(format!(
                        "plain lines have one text for each row, and {} are expected ({}); write JSONL, CSV, TSV or Parquet",
                        several.len(),
                        quoted(several)
                    ));
                }
            }
        }
        if let Keep::Named(names) = &self.keep
            && let Some(name) = twice(names)
        {
            return bad(format!("column `{name}` is kept twice; name it once"));
        }
        let own = self.own_columns(columns);
        if let Some(name) = twice(&own) {
            return bad(format!(
                "two columns of the output are called `{name}`; rename the one of row numbers or the computed one"
            ));
        }
        Ok(Checked {
            job: self,
            input,
            output,
            own,
        })
    }

    /// Returns the job. If its output is a symbolic link, the returned job writes to the target of the link, in the format that the link's
    /// name selects.
    ///
    /// # Errors
    /// Returns an error if the format is not known, or if the target cannot be found.
    pub(crate) fn followed(&self) -> Result<Self, CorpusError> {
        let mut job = self.clone();
        if fs::symlink_metadata(&self.output).is_ok_and(|found| found.is_symlink()) {
            job.output_format = Some(match self.output_format {
                Some(format) => format,
                None => OutputFormat::of(&self.output)?,
            });
            let target = fs::canonicalize(&self.output);
            job.output = target.map_err(CorpusError::io(&self.output, "followed"))?;
        }
        Ok(job)
    }

    /// Checks that a NumPy array can hold the columns.
    fn check_array(&self, columns: &[Column]) -> Result<(), CorpusError> {
        let problem = match columns {
            [column] => match column.kind {
                Kind::Vector(_) if self.vectors == Vectors::Int8 => {
                    "an array of NumPy has no place for the scales of int8; write Parquet"
                        .to_owned()
                }
                Kind::Vector(_) | Kind::Number => return Ok(()),
                Kind::Vectors(_) => format!(
                    "an array of NumPy has one vector for each row, and `{}` has several; write Parquet, Arrow or JSONL",
                    column.name
                ),
                Kind::Integer | Kind::Text | Kind::Records(_) => format!(
                    "an array of NumPy cannot hold `{}`, {}; write Parquet, Arrow or JSONL",
                    column.name, column.kind
                ),
            },
            columns => {
                let names = columns.iter().map(|column| column.name.clone());
                format!(
                    "an array of NumPy cannot hold several columns ({}); write Parquet, Arrow or JSONL",
                    quoted(&names.collect::<Vec<_>>())
                )
            }
        };
        Err(CorpusError::BadOption { problem })
    }

    /// Returns the names of the output's columns other than kept ones: the row number, the computed columns and their scales.
    fn own_columns(&self, columns: &[Column]) -> Vec<String> {
        let mut names = vec![self.row_column.clone()];
        for column in columns {
            names.push(column.name.clone());
            if self.vectors == Vectors::Int8
                && matches!(column.kind, Kind::Vector(_) | Kind::Vectors(_))
            {
                names.push(SCALE.to_owned());
            }
        }
        names
    }
}

/// Checks that an output can be written to a path: the path does not exist, or it is a regular file or a symbolic link to a regular file.
fn check_place(path: &Path) -> Result<(), CorpusError> {
    let refused = |found| {
        let path = path.to_owned();
        Err(CorpusError::NotAnOutput { path, found })
    };
    let is_link = match fs::symlink_metadata(path) {
        Ok(found) => found.is_symlink(),
        // The file is missing, which is fine. Any other problem, such as a missing permission, is reported when the file is created.
        Err(_) => return Ok(()),
    };
    match fs::metadata(path) {
        Err(_) if is_link => refused("a symbolic link to a missing file"),
        Err(_) => Ok(()),
        Ok(found) if found.is_file() => Ok(()),
        Ok(found) if found.is_dir() => refused("a folder"),
        Ok(_) => refused("neither a file nor a folder"),
    }
}

/// Returns a name that occurs twice; `None` if there is none.
fn twice(names: &[String]) -> Option<&str> {
    let again = |(at, name): &(usize, &String)| names[..*at].contains(name);
    let found = names.iter().enumerate().find(again);
    found.map(|(_, name)| name.as_str())
}

fn quoted(names: &[String]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    quoted.join(", ")
}

/// A job whose options have been checked.
#[derive(Clone)]
pub(crate) struct Checked<'j> {
    pub job: &'j Job,
    pub input: InputFormat,
    pub output: OutputFormat,
    /// Names of the output's columns other than kept ones.
    pub own: Vec<String>,
}

impl Checked<'_> {
    /// Returns all options that affect the bytes of the output, for the journal.
    pub fn options(&self) -> BTreeMap<String, String> {
        let job = self.job;
        let keep = match &job.keep {
            Keep::None => "none".to_owned(),
            Keep::All => "all".to_owned(),
            Keep::Named(names) => format!("{names:?}"),
        };
        let pairs = [
            ("input format", self.input.to_string()),
            ("columns of texts", quoted(&job.columns)),
            ("output format", self.output.to_string()),
            ("kept columns", keep),
            ("vectors", job.vectors.to_string()),
            ("row column", job.row_column.clone()),
            ("rows of a window", job.limits.window_rows.to_string()),
            ("bytes of a window", job.limits.window_bytes.to_string()),
            ("bytes of a row", job.limits.row_bytes.to_string()),
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ];
        pairs.map(|(name, value)| (name.to_owned(), value)).into()
    }
}

/// Appends `ending` to the last component of the path.
fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(ending);
    path.with_file_name(name)
}

/// Returns the extension of a file in lower case, ignoring `.gz`.
fn extension(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.to_lowercase();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    name.rsplit_once('.')
        .map_or("", |(_, ending)| ending)
        .to_owned()
}

/// Implements `Display` and `FromStr` with a table of names. `Display` uses the first name of a value.
macro_rules! names {
    ($type:ident, $list:literal, $($value:ident => $name:literal),+) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl $type {
            /// Returns the name of the value, which [`FromStr`] parses.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name),+
                }
            }
        }

        impl FromStr for $type {
            type Err = CorpusError;

            fn from_str(name: &str) -> Result<Self, CorpusError> {
                match name {
                    $($name => Ok(Self::$value),)+
                    _ => Err(CorpusError::BadFormat { given: name.to_owned(), expected: $list }),
                }
            }
        }
    };
}

names!(InputFormat, "jsonl, csv, tsv, parquet, lines",
    Jsonl => "jsonl", Csv => "csv", Tsv => "tsv", Parquet => "parquet", Lines => "lines");
names!(OutputFormat, "parquet, arrow, npy, jsonl",
    Parquet => "parquet", Arrow => "arrow", Npy => "npy", Jsonl => "jsonl");
names!(Vectors, "f32, f16, int8, binary",
    F32 => "f32", F16 => "f16", Int8 => "int8", Binary => "binary");

impl InputFormat {
    fn of(path: &Path) -> Result<Self, CorpusError> {
        Ok(match extension(path).as_str() {
            "jsonl" | "ndjson" => Self::Jsonl,
            "csv" => Self::Csv,
            "tsv" | "tab" => Self::Tsv,
            "parquet" | "pq" => Self::Parquet,
            "txt" => Self::Lines,
            _ => {
                return Err(CorpusError::UnknownFormat {
                    path: path.to_owned(),
                    expected: ".jsonl, .ndjson, .csv, .tsv, .parquet or .txt",
                });
            }
        })
    }
}

impl OutputFormat {
    fn of(path: &Path) -> Result<Self, CorpusError> {
        Ok(match extension(path).as_str() {
            "parquet" | "pq" => Self::Parquet,
            "arrow" | "feather" => Self::Arrow,
            "npy" => Self::Npy,
            "jsonl" | "ndjson" => Self::Jsonl,
            _ => {
                return Err(CorpusError::UnknownFormat {
                    path: path.to_owned(),
                    expected: ".parquet, .arrow, .npy or .jsonl",
                });
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_by_ending() {
        let input = |name: &str| InputFormat::of(Path::new(name)).ok();
        assert_eq!(input("a/b.JSONL"), Some(InputFormat::Jsonl));
        assert_eq!(input("b.tsv.gz"), Some(InputFormat::Tsv));
        assert_eq!(input("b.x.txt"), Some(InputFormat::Lines));
        assert_eq!(
            [input("jsonl"), input("a.jsonl/b"), input("b.gz")],
            [None; 3]
        );
        let output = OutputFormat::of(Path::new("v.feather")).ok();
        assert_eq!(output, Some(OutputFormat::Arrow));
    }

    #[test]
    fn options_that_do_not_go_together() {
        let good = Job::new("a.jsonl", "b/v.parquet");
        let columns = [Column::new("embedding", Kind::Vector(4))];
        assert!(good.check(&columns).is_ok());
        assert_eq!(good.partial(), Path::new("b/v.parquet.partial"));
        assert_eq!(good.errors(), Path::new("b/v.parquet.errors.jsonl"));
        let changes: [fn(&mut Job); 12] = [
            |job| job.limits.window_rows = 0,
            |job| job.limits.window_bytes = usize::MAX,
            |job| job.limits.row_bytes = 0,
            |job| job.row_column = "embedding".to_owned(),
            |job| (job.vectors, job.row_column) = (Vectors::Int8, SCALE.to_owned()),
            |job| job.keep = Keep::Named(vec!["a".to_owned(), "a".to_owned()]),
            |job| (job.keep, job.output) = (Keep::All, "v.npy".into()),
            |job| (job.vectors, job.output) = (Vectors::Int8, "v.npy".into()),
            |job| (job.keep, job.input) = (Keep::All, "a.txt".into()),
            |job| job.columns.clear(),
            |job| job.columns.push("text".to_owned()),
            |job| (job.columns, job.input) = (vec!["q".into(), "d".into()], "a.txt".into()),
        ];
        for (i, change) in changes.iter().enumerate() {
            let mut job = good.clone();
            change(&mut job);
            assert!(
                matches!(job.check(&columns), Err(CorpusError::BadOption { .. })),
                "change {i}"
            );
        }
    }

    #[test]
    fn arrays_hold_vectors_and_numbers_alone() {
        let job = Job::new("a.jsonl", "v.npy");
        let check = |kinds: &[Kind]| {
            let columns = kinds.iter().zip(["a", "b"]);
            let columns = columns.map(|(kind, name)| Column::new(name, kind.clone()));
            let checked = job.check(&columns.collect::<Vec<_>>());
            checked.map_err(|error| error.to_string())
        };
        assert!(check(&[Kind::Vector(4)]).is_ok() && check(&[Kind::Number]).is_ok());
        for (kinds, part) in [
            (&[Kind::Vectors(4)][..], "`a` has several"),
            (&[Kind::Text], "`a`, a text"),
            (&[Kind::Text, Kind::Number], "several columns (`a`, `b`)"),
        ] {
            let error = check(kinds).expect_err("it is refused");
            assert!(error.contains(part), "{error}");
        }
    }
}
