//! An embedder of known vectors, and readers of outputs.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use arrow_array::RecordBatch;
use gemmule_corpus::{CorpusError, Embedded, Embedder, EmbedderError, Hooks, Job, Report, run};
use tempfile::TempDir;

pub const WIDTH: usize = 4;

/// Gives each text the vector of [`vector`], and counts its texts.
pub struct Known {
    pub identity: String,
    /// Number of windows after which it fails.
    pub windows: usize,
    pub texts: Vec<String>,
}

impl Known {
    pub fn new() -> Self {
        Self::failing_after(usize::MAX)
    }

    pub fn failing_after(windows: usize) -> Self {
        Self {
            identity: "known".to_owned(),
            windows,
            texts: Vec::new(),
        }
    }
}

/// Returns the vector of a text.
pub fn vector(text: &str) -> Vec<f32> {
    let sum: u32 = text.bytes().map(u32::from).sum();
    let n = text.len() as f32;
    vec![n, -(sum as f32) / 8.0, 0.5, (sum % 7) as f32 - 3.0]
}

impl Embedder for Known {
    fn identity(&self) -> String {
        self.identity.clone()
    }

    fn width(&self) -> usize {
        WIDTH
    }

    fn embed(&mut self, texts: &[&str]) -> Result<Embedded, EmbedderError> {
        if self.windows == 0 {
            return Err("the device is gone".into());
        }
        self.windows -= 1;
        self.texts.extend(texts.iter().map(|&text| text.to_owned()));
        let row = |text: &&str| match *text {
            "too long" => Err("the text has 600 tokens, and the model takes up to 512".to_owned()),
            "not a number" => Ok(vec![f32::NAN; WIDTH]),
            text => Ok(vector(text)),
        };
        Ok(Embedded {
            rows: texts.iter().map(row).collect(),
            tokens: Some(texts.iter().map(|text| text.len() as u64).sum()),
        })
    }
}

/// A folder with an input.
pub struct Place {
    pub folder: TempDir,
}

impl Place {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        Self { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns a job on an input with this content.
    pub fn job(&self, input: &str, content: impl AsRef<[u8]>, output: &str) -> Job {
        fs::write(self.path(input), content).expect("written");
        Job::new(self.path(input), self.path(output))
    }

    /// Lists the names of files.
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path()).expect("a folder");
        let name = |entry: std::io::Result<fs::DirEntry>| {
            entry
                .expect("an entry")
                .file_name()
                .into_string()
                .expect("UTF-8")
        };
        let mut names: Vec<String> = entries.map(name).collect();
        names.sort();
        names
    }
}

pub fn embed(job: &Job) -> Result<Report, CorpusError> {
    run(job, &mut Known::new(), Hooks::default())
}

pub fn read_parquet(path: &Path) -> Vec<RecordBatch> {
    let file = fs::File::open(path).expect("opened");
    let builder = parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder::try_new(file);
    let reader = builder.expect("Parquet").build().expect("a reader");
    reader.map(|batch| batch.expect("a batch")).collect()
}

pub fn read_arrow(path: &Path) -> Vec<RecordBatch> {
    let file = fs::File::open(path).expect("opened");
    let reader = arrow_ipc::reader::FileReader::try_new(file, None).expect("Arrow");
    reader.map(|batch| batch.expect("a batch")).collect()
}

pub fn read_lines(path: &Path) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(path).expect("read");
    let parse = |line| serde_json::from_str(line).expect("JSON");
    text.lines().map(parse).collect()
}

/// Returns the row numbers and reasons of refused rows.
pub fn refused(job: &Job) -> Vec<(u64, String)> {
    let lines = read_lines(&job.errors());
    let pair = |line: &serde_json::Value| {
        let row = line["row"].as_u64().expect("a row");
        (row, line["reason"].as_str().expect("a reason").to_owned())
    };
    lines.iter().map(pair).collect()
}
