use std::{
    io,
    path::{Path, PathBuf},
};

use crate::ModelError;

/// Errors of [`run`](crate::run). Each message says how to fix the problem.
#[derive(Debug, thiserror::Error)]
pub enum CorpusError {
    #[error(
        "the format of `{path}` is not known by its name; expected one that ends in {expected}, or the format beside it"
    )]
    UnknownFormat {
        path: PathBuf,
        expected: &'static str,
    },
    #[error("`{given}` is not a format; expected one of {expected}")]
    BadFormat {
        given: String,
        expected: &'static str,
    },
    #[error("{problem}")]
    BadOption { problem: String },
    #[error("`{path}` has no column `{column}`; it has {columns}")]
    NoColumn {
        path: PathBuf,
        column: String,
        columns: String,
    },
    #[error(
        "`{path}` has several columns called `{column}`; rename all but one of them, or leave them out of the kept columns"
    )]
    SeveralColumns { path: PathBuf, column: String },
    #[error(
        "column `{column}` of `{path}` has no texts: its type is {found}, expected strings; the columns are {columns}"
    )]
    ColumnType {
        path: PathBuf,
        column: String,
        found: String,
        columns: String,
    },
    #[error(
        "column `{column}` has the type {found}, which {format} output cannot hold; leave it out of the kept columns, or write Parquet"
    )]
    KeptType {
        column: String,
        found: String,
        format: &'static str,
    },
    #[error(
        "the kept column `{column}` has the same name as a column of the output; rename the output column, or leave `{column}` out of the kept columns"
    )]
    NameTaken { column: String },
    #[error("`{path}` cannot be read as {format}: {problem}")]
    BadInput {
        path: PathBuf,
        format: &'static str,
        problem: String,
    },
    #[error(
        "`{path}` is not a regular file, so an interrupted run could not go on; write its contents to a file first"
    )]
    NotAFile { path: PathBuf },
    #[error(
        "`{path}` is {found}, to which no output can be written; choose the path of a regular file, or a path at which there is nothing"
    )]
    NotAnOutput { path: PathBuf, found: &'static str },
    #[error("`{path}` is both the input and the output; choose another output")]
    SameFile { path: PathBuf },
    #[error("`{path}` changed while it was read; start over with overwrite when it is complete")]
    InputChanged { path: PathBuf },
    #[error("`{output}` exists; choose another output, or replace it with overwrite")]
    Exists { output: PathBuf },
    #[error(
        "`{partial}` holds an interrupted run that differs from this one: {differences}; repeat that one to go on, or start over with overwrite"
    )]
    Differs {
        partial: PathBuf,
        differences: String,
    },
    #[error(
        "`{output}` is being written by {holder}; wait until it ends, or choose another output"
    )]
    Locked { output: PathBuf, holder: String },
    #[error("`{partial}` cannot go on: {problem}; start over with overwrite, or delete the folder")]
    Damaged { partial: PathBuf, problem: String },
    #[error("the model broke its contract: {problem}; this is an error of the program that calls")]
    BadModel { problem: String },
    #[error("the model failed at rows {first} to {last}: {source}")]
    Model {
        first: u64,
        last: u64,
        source: ModelError,
    },
    #[error("rows {first} to {last} cannot be encoded as {format}: {problem}")]
    Encode {
        first: u64,
        last: u64,
        format: &'static str,
        problem: String,
    },
    #[error("the run was cancelled")]
    Cancelled,
    #[error("the {thread} failed: {problem}; please report it with the input")]
    Panicked {
        thread: &'static str,
        problem: String,
    },
    #[error("the disk is full: `{path}` cannot be written ({source}); free some space")]
    DiskFull { path: PathBuf, source: io::Error },
    #[error("`{path}` cannot be {action}: {source}")]
    Io {
        path: PathBuf,
        action: &'static str,
        source: io::Error,
    },
    /// An error that stopped a run after some windows were finished. The same command resumes the
    /// run.
    #[error(
        "{error}; {rows} rows are finished and kept in `{partial}`; run the same command again to continue after them"
    )]
    Stopped {
        #[source]
        error: Box<CorpusError>,
        /// Number of rows that are finished.
        rows: u64,
        partial: PathBuf,
    },
}

impl CorpusError {
    /// Returns the error of an operation on a file.
    pub(crate) fn io(
        path: &Path,
        action: &'static str,
    ) -> impl Fn(io::Error) -> CorpusError + use<> {
        let path = path.to_owned();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::FileTooLarge => CorpusError::DiskFull {
                path: path.clone(),
                source,
            },
            _ => CorpusError::Io {
                path: path.clone(),
                action,
                source,
            },
        }
    }

    /// Returns the error of an input that does not match its format.
    pub(crate) fn input(path: &Path, format: &'static str, problem: impl ToString) -> CorpusError {
        CorpusError::BadInput {
            path: path.to_owned(),
            format,
            problem: problem.to_string(),
        }
    }
}
