//! A model with known vectors, and readers of outputs.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::{
    collections::VecDeque,
    fs,
    path::{Path, PathBuf},
};

use arrow_array::RecordBatch;
use gemmule_corpus::{
    Column, CorpusError, Hooks, Job, Kind, Model, ModelError, Report, Results, Texts, Value, run,
};
use tempfile::TempDir;

pub const WIDTH: usize = 4;

/// A model that returns [`vector`] for each text, and records the texts that it received.
pub struct Known {
    pub identity: String,
    /// Number of windows after which the model fails.
    pub windows: usize,
    pub texts: Vec<String>,
    begun: VecDeque<Vec<Texts>>,
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
            begun: VecDeque::new(),
        }
    }
}

/// Returns the vector of a text.
pub fn vector(text: &str) -> Vec<f32> {
    let sum: u32 = text.bytes().map(u32::from).sum();
    let n = text.len() as f32;
    vec![n, -(sum as f32) / 8.0, 0.5, (sum % 7) as f32 - 3.0]
}

/// Returns a column of vectors of this width.
pub fn column(width: usize) -> Vec<Column> {
    vec![Column::new("embedding", Kind::Vector(width))]
}

/// Returns the results of a window: vectors, without a number of tokens.
pub fn results(vectors: impl IntoIterator<Item = Vec<f32>>) -> Results {
    let row = |vector| Ok(vec![Value::Vector(vector)]);
    Results {
        rows: vectors.into_iter().map(row).collect(),
        tokens: None,
    }
}

impl Model for Known {
    fn identity(&self) -> String {
        self.identity.clone()
    }

    fn columns(&self) -> Vec<Column> {
        column(WIDTH)
    }

    fn begin(&mut self, rows: Vec<Texts>) {
        self.begun.push_back(rows);
        assert!(self.begun.len() <= 2, "two windows are begun at once");
    }

    fn finish(&mut self) -> Result<Results, ModelError> {
        if self.windows == 0 {
            return Err("the device is gone".into());
        }
        self.windows -= 1;
        let texts = self.begun.pop_front().expect("a window is begun").concat();
        let row = |text: &String| match text.as_str() {
            "too long" => Err("the text has 600 tokens, and the model takes up to 512".to_owned()),
            "not a number" => Ok(vec![Value::Vector(vec![f32::NAN; WIDTH])]),
            text => Ok(vec![Value::Vector(vector(text))]),
        };
        let results = Results {
            rows: texts.iter().map(row).collect(),
            tokens: Some(texts.iter().map(|text| text.len() as u64).sum()),
        };
        self.texts.extend(texts);
        Ok(results)
    }
}

/// A folder with an input.
pub struct Place {
    pub folder: TempDir,
}

impl Place {
    pub fn new() -> Self {
        // A run syncs its files. In memory, syncing costs nothing.
        let memory = Path::new("/dev/shm");
        let folder = match memory.is_dir() {
            true => tempfile::tempdir_in(memory),
            false => tempfile::tempdir(),
        };
        Self {
            folder: folder.expect("a folder"),
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns a job for an input file with this content.
    pub fn job(&self, input: &str, content: impl AsRef<[u8]>, output: &str) -> Job {
        fs::write(self.path(input), content).expect("written");
        Job::new(self.path(input), self.path(output))
    }

    /// Lists the names of the files in the folder.
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
