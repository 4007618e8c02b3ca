//! Computes values from the texts of large files: vectors, scores or labels.
//!
//! [`run`] reads texts from a file, passes them to a [`Model`] in windows of a few thousand rows, and writes the values that the model
//! computes for each row. No code of the crate is specific to transformers.
//!
//! ```
//! use gemmule_corpus::{Column, Function, Hooks, Job, Keep, Kind, Results, Texts, Value, run};
//!
//! # let folder = tempfile::tempdir()?;
//! # let (input, output) = (folder.path().join("corpus.jsonl"), folder.path().join("vectors.parquet"));
//! # std::fs::write(&input, "{\"id\": 7, \"text\": \"a text\"}\n{\"id\": 8, \"text\": null}\n")?;
//! let mut job = Job::new(&input, &output);
//! job.keep = Keep::Named(vec!["id".to_owned()]);
//! let columns = vec![Column::new("embedding", Kind::Vector(2))];
//! let mut model = Function::new("lengths, revision 1", columns, |rows: &[Texts]| {
//!     let row = |texts: &Texts| match texts[0].len() {
//!         n if n <= 1000 => Ok(vec![Value::Vector(vec![n as f32, 1.0])]),
//!         n => Err(format!("the text has {n} bytes, and the model takes up to 1000")),
//!     };
//!     Ok(Results { rows: rows.iter().map(row).collect(), tokens: None })
//! });
//! let mut print = |progress: &gemmule_corpus::Progress| println!("{} rows", progress.rows);
//! let hooks = Hooks { progress: Some(&mut print), ..Hooks::default() };
//! let report = run(&job, &mut model, hooks)?;
//! assert_eq!((report.rows, report.written, report.refused), (2, 1, 1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Inputs
//!
//! | format | rows | kept columns |
//! |---|---|---|
//! | [`Jsonl`](InputFormat::Jsonl) | every line, including empty ones | typed by the first window, see below |
//! | [`Csv`](InputFormat::Csv), [`Tsv`](InputFormat::Tsv) | records after the header; empty lines are skipped | strings |
//! | [`Parquet`](InputFormat::Parquet) | the rows of all row groups | types of the Parquet schema; an Arrow schema in the file's metadata is ignored |
//! | [`Lines`](InputFormat::Lines) | every line; an empty line is an empty text | none |
//!
//! Text formats may be compressed with gzip, which is detected from the content and not from the name of the file. Parquet may be
//! compressed with Snappy, gzip or, with the feature `zstd`, Zstandard. Columns of texts contain strings or UTF-8 bytes. A kept string
//! column of Parquet that is not UTF-8 stops the run. [`Job::columns`] may name several columns, such as the query and the document of a
//! pair; plain lines have one text.
//!
//! Kept fields of JSONL are copied to JSONL unchanged. For other outputs, the first window determines the columns of
//! [`Keep::All`] and the type of each: boolean, 64-bit integer, 64-bit float, string, or else JSON text. Later rows
//! that do not fit these types are refused.
//!
//! # Outputs
//!
//! Each output row has the number of its input row, counted from 0, in the column [`Job::row_column`]; then the kept
//! columns; then the columns that the model computes. [`Kind`] lists their types in each format. The identity of the model
//! is in the metadata of the schema, under the key `gemmule:model`. Refused rows are omitted. [`Vectors`] describes the
//! types of the values of vectors.
//!
//! A NumPy array has a row for each input row. It holds one column, of vectors or of numbers. The values of a refused row are NaN, or zeros
//! for [`Vectors::Binary`]. With [`Vectors::Binary`], a vector of a row that is not refused may also be zero. The list of refused rows
//! tells the two cases apart.
//!
//! # Refused rows
//!
//! A row is refused if it is damaged, lacks a text or is longer than [`Limits::row_bytes`]. It is also refused if the model refuses its
//! texts or returns values that are not finite. [`Job::errors`] lists refused rows: each line is an object with the members `row` and
//! `reason`. If no row of the first window has texts, the run fails.
//!
//! # Interrupted runs
//!
//! A run writes to the folder [`Job::partial`] and moves the output to its final path at the end. It writes each window to disk while the
//! next one is computed. If a run is killed, the same command resumes after the last finished window. The output is then byte for byte that
//! of an uninterrupted run. Resuming requires the same input, options and [`Model::identity`]; see [`CorpusError::Differs`]. A run locks
//! the folder, so two runs never write the same output.
//!
//! # Memory
//!
//! Up to five windows are in memory: one that is being read, two that the model is computing, one that is being finished, and one that is
//! being written. A window has at most [`Limits::window_rows`] rows, and ends once it has [`Limits::window_bytes`] bytes. A page of a
//! Parquet file is decoded as a whole.

mod error;
mod input;
mod job;
mod journal;
mod lock;
mod model;
mod output;
mod run;
mod store;
mod window;

pub use error::CorpusError;
pub use job::{InputFormat, Job, Keep, Limits, OutputFormat, Vectors};
pub use model::{Column, Function, Kind, Model, ModelError, Results, Texts, Value};
pub use run::{Hooks, Progress, Report, run};
