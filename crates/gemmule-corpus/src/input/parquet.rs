//! Parquet files.

use std::{collections::VecDeque, fs::File, path::PathBuf, sync::Arc};

use arrow_array::{Array as _, ArrayRef, RecordBatch, cast::AsArray as _};
use arrow_schema::{DataType, Field, Fields, SchemaRef};
use parquet::{
    arrow::{
        ProjectionMask,
        arrow_reader::{
            ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
        },
    },
    basic::{Compression, Type},
    column::reader::{ColumnReader, ColumnReaderImpl},
    data_type::{ByteArray, ByteArrayType},
    file::{
        metadata::ParquetMetaData, reader::FileReader, serialized_reader::SerializedFileReader,
    },
    schema::types::SchemaDescriptor,
};

use super::{Source, described, lines::utf8, list, place};
use crate::{
    CorpusError, Keep, Limits,
    job::Checked,
    window::{Kept, Position, Row, Window, bytes},
};

const FORMAT: &str = "Parquet";

/// Approximate number of bytes of texts and kept columns that are decoded at once. It is converted to a number of rows with the average
/// size of a row.
const DECODED: u64 = 4 << 20;

/// Maximum number of rows that are decoded at once.
const MAX_DECODED: u64 = 1024;

/// A Parquet file.
pub(super) struct Parquet {
    path: PathBuf,
    limits: Limits,
    texts: Vec<Texts>,
    columns: Option<Columns>,
    fields: Fields,
    total: u64,
    row: u64,
}

/// A column of texts, read as bytes. A reader of strings validates whole pages: one row that is not UTF-8 would make all rows of its page
/// fail.
struct Texts {
    name: String,
    reader: SerializedFileReader<File>,
    column: usize,
    group: usize,
    /// Number of rows of the current group that have not been read.
    left: u64,
    values: Option<ColumnReaderImpl<ByteArrayType>>,
    n_decoded: usize,
    /// Decoded texts that are not in a window yet; `None` for null.
    decoded: VecDeque<Option<ByteArray>>,
}

/// The kept columns.
struct Columns {
    reader: ParquetRecordBatchReader,
    /// The index of each kept column in the batches.
    order: Vec<usize>,
    batch: RecordBatch,
    /// Number of rows of the batch that are already in windows.
    used: usize,
}

impl Parquet {
    pub fn open(checked: &Checked<'_>, from: Position) -> Result<Self, CorpusError> {
        let job = checked.job;
        let path = job.input.clone();
        let failed = CorpusError::io(&path, "read");
        let bad = |problem: String| CorpusError::input(&path, FORMAT, problem);
        let file = File::open(&path).map_err(&failed)?;
        let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
        let builder = ParquetRecordBatchReaderBuilder::try_new_with_options(file, options);
        let builder = builder.map_err(|e| bad(e.to_string()))?;
        let schema = builder.schema().clone();
        let metadata = builder.metadata().clone();
        let descriptor = metadata.file_metadata().schema_descr_ptr();
        if schema.fields().len() != descriptor.root_schema().get_fields().len() {
            return Err(bad(
                "it has columns of a type that is not supported".to_owned()
            ));
        }
        let names = || schema.fields().iter().map(|field| field.name().as_str());
        let place = |column: &str| match place(&path, column, names())? {
            Some(place) => Ok(place),
            None => Err(CorpusError::NoColumn {
                path: path.clone(),
                column: column.to_owned(),
                columns: listed(&schema),
            }),
        };
        let mut roots = Vec::new();
        let mut leaves = Vec::new();
        for name in &job.columns {
            let root = place(name)?;
            let column = match schema.field(root).data_type() {
                DataType::Utf8 | DataType::Binary => leaf(&descriptor, root),
                _ => None,
            };
            leaves.push(column.ok_or_else(|| wrong_type(&path, &schema, root))?);
            roots.push(root);
        }
        let kept: Vec<usize> = match &job.keep {
            Keep::None => Vec::new(),
            Keep::All => {
                let is_text = |name: &&str| job.columns.iter().any(|column| column == name);
                let places = names().filter(|name| !is_text(name)).map(place);
                places.collect::<Result<_, _>>()?
            }
            Keep::Named(names) => {
                let places = names.iter().map(|name| place(name));
                places.collect::<Result<_, _>>()?
            }
        };
        let total =
            total(&metadata).ok_or_else(|| bad("its numbers of rows are not valid".into()))?;
        roots.extend(&kept);
        check_columns(&metadata, &roots).map_err(bad)?;
        let n_decoded = batch_rows(&metadata, &roots, total);
        let field = |&place: &usize| {
            let field = schema.field(place);
            Field::new(field.name(), field.data_type().clone(), field.is_nullable())
        };
        let fields: Fields = kept.iter().map(field).collect();
        let skipped = usize::try_from(from.row).unwrap_or(usize::MAX);
        let columns = match kept.is_empty() {
            true => None,
            false => {
                let mask = ProjectionMask::roots(&descriptor, kept.iter().copied());
                let builder = builder.with_projection(mask).with_batch_size(n_decoded);
                let reader = builder.with_offset(skipped).build();
                let mut sorted = kept.clone();
                sorted.sort_unstable();
                let order = kept
                    .iter()
                    .filter_map(|place| sorted.binary_search(place).ok());
                Some(Columns {
                    reader: reader.map_err(|e| bad(e.to_string()))?,
                    order: order.collect(),
                    batch: RecordBatch::new_empty(Arc::new(arrow_schema::Schema::empty())),
                    used: 0,
                })
            }
        };
        let mut texts = Vec::with_capacity(leaves.len());
        for (name, column) in job.columns.iter().zip(leaves) {
            let file = File::open(&path).map_err(&failed)?;
            let reader = SerializedFileReader::new(file).map_err(|e| bad(e.to_string()))?;
            let mut own = Texts {
                name: described(&job.columns, name),
                reader,
                column,
                group: 0,
                left: 0,
                values: None,
                n_decoded,
                decoded: VecDeque::new(),
            };
            own.skip(from.row).map_err(bad)?;
            texts.push(own);
        }
        Ok(Self {
            limits: job.limits,
            texts,
            columns,
            fields,
            total,
            row: from.row,
            path,
        })
    }

    /// Reads the rows of a window, and returns their texts and kept columns.
    fn rows(&mut self) -> Result<(Vec<Row>, Vec<ArrayRef>), String> {
        let mut rows = Vec::new();
        let mut n_bytes = 0;
        let mut slices: Vec<RecordBatch> = Vec::new();
        let mut began = self.columns.as_ref().map_or(0, |columns| columns.used);
        while rows.len() < self.limits.window_rows && n_bytes < self.limits.window_bytes {
            let limit = self.limits.row_bytes;
            let values = self.texts.iter_mut().map(|texts| {
                let value = texts.next()?;
                Ok::<_, String>(value.map(|value| text(value, limit, &texts.name)))
            });
            let values: Vec<Option<Result<String, String>>> = values.collect::<Result<_, _>>()?;
            if values.iter().all(Option::is_none) {
                break;
            }
            let row = values.into_iter().zip(&self.texts);
            let row = row.map(|(value, texts)| value.ok_or_else(|| texts.short()));
            let row: Row = row.collect::<Result<Vec<_>, _>>()?.into_iter().collect();
            if let Some(columns) = &mut self.columns {
                if columns.used == columns.batch.num_rows() {
                    slices.push(columns.batch.slice(began, columns.used - began));
                    columns.advance()?;
                    began = 0;
                }
                n_bytes += columns.row_bytes();
                columns.used += 1;
            }
            n_bytes += bytes(&row);
            rows.push(row);
        }
        let Some(columns) = &self.columns else {
            return Ok((rows, Vec::new()));
        };
        slices.push(columns.batch.slice(began, columns.used - began));
        slices.retain(|slice| slice.num_rows() > 0);
        let column = |&place: &usize| {
            let parts: Vec<_> = slices
                .iter()
                .map(|slice| slice.column(place).as_ref())
                .collect();
            arrow_select::concat::concat(&parts).map_err(|e| e.to_string())
        };
        let kept = match slices.is_empty() {
            true => Vec::new(),
            false => columns.order.iter().map(column).collect::<Result<_, _>>()?,
        };
        Ok((rows, kept))
    }
}

impl Texts {
    fn skip(&mut self, rows: u64) -> Result<(), String> {
        let mut rows = rows;
        while rows > 0 && self.open()? {
            let n = rows.min(self.left);
            let skipped = match &mut self.values {
                // A row group that is skipped entirely is not read.
                Some(_) if n == self.left => n,
                Some(values) => {
                    let n = usize::try_from(n).map_err(|e| e.to_string())?;
                    values.skip_records(n).map_err(|e| e.to_string())? as u64
                }
                None => 0,
            };
            if skipped < n {
                return Err(self.short());
            }
            self.left -= n;
            rows -= n;
        }
        Ok(())
    }

    /// If no rows of the current row group are left, opens the next row group that has rows. Returns false at the end of the file.
    fn open(&mut self) -> Result<bool, String> {
        while self.left == 0 {
            if self.group == self.reader.num_row_groups() {
                return Ok(false);
            }
            let group = self
                .reader
                .get_row_group(self.group)
                .map_err(|e| e.to_string())?;
            self.group += 1;
            self.left = u64::try_from(group.metadata().num_rows()).unwrap_or(0);
            let values = group
                .get_column_reader(self.column)
                .map_err(|e| e.to_string())?;
            self.values = match values {
                ColumnReader::ByteArrayColumnReader(values) => Some(values),
                _ => return Err("the column of texts has another type in a row group".to_owned()),
            };
        }
        Ok(true)
    }

    /// Returns the next text, `Some(None)` if it is null, or `None` at the end.
    fn next(&mut self) -> Result<Option<Option<ByteArray>>, String> {
        if self.decoded.is_empty() {
            self.decoded = self.decode()?;
        }
        Ok(self.decoded.pop_front())
    }

    /// Decodes the next texts. A null text is `None`. The list is empty at the end of the file.
    fn decode(&mut self) -> Result<VecDeque<Option<ByteArray>>, String> {
        if !self.open()? {
            return Ok(VecDeque::new());
        }
        let Some(values) = &mut self.values else {
            return Ok(VecDeque::new());
        };
        let n = self.left.min(self.n_decoded as u64) as usize;
        let mut levels = Vec::new();
        let mut found: Vec<ByteArray> = Vec::new();
        let read = values.read_records(n, Some(&mut levels), None, &mut found);
        let (n_read, ..) = read.map_err(|e| e.to_string())?;
        if n_read == 0 {
            return Err(self.short());
        }
        self.left -= n_read as u64;
        if levels.is_empty() {
            return Ok(found.into_iter().map(Some).collect());
        }
        let mut found = found.into_iter();
        let present = |level: i16| if level > 0 { found.next() } else { None };
        Ok(levels.into_iter().map(present).collect())
    }

    fn short(&self) -> String {
        format!("row group {} has fewer texts than rows", self.group - 1)
    }
}

impl Columns {
    /// Decodes the next batch of rows.
    fn advance(&mut self) -> Result<(), String> {
        match self.reader.next() {
            Some(Ok(batch)) if batch.num_rows() > 0 => {
                self.batch = batch;
                self.used = 0;
                Ok(())
            }
            Some(Err(e)) => Err(e.to_string()),
            _ => Err("a kept column has fewer values than rows".to_owned()),
        }
    }

    /// Returns the size of the current row in bytes.
    fn row_bytes(&self) -> usize {
        let row = self.used;
        let bytes = |array: &ArrayRef| match array.data_type() {
            DataType::Utf8 => array.as_string::<i32>().value_length(row) as usize,
            DataType::Binary => array.as_binary::<i32>().value_length(row) as usize,
            data if data.is_nested() => array
                .slice(row, 1)
                .to_data()
                .get_slice_memory_size()
                .unwrap_or(0),
            data => data.primitive_width().unwrap_or(16),
        };
        self.batch.columns().iter().map(bytes).sum()
    }
}

/// Returns the text of a value, or the reason why it has none. `what` describes the text.
fn text(value: Option<ByteArray>, limit: usize, what: &str) -> Result<String, String> {
    match value {
        None => Err(format!("{what} is null")),
        Some(value) if value.len() > limit => {
            let n = value.len();
            Err(format!("{what} has {n} bytes, and the limit is {limit}"))
        }
        Some(value) => utf8(value.data(), what).map(str::to_owned),
    }
}

/// Checks the compression and the positions of columns, because the Parquet reader panics if they are invalid.
fn check_columns(metadata: &ParquetMetaData, roots: &[usize]) -> Result<(), String> {
    let descriptor = metadata.file_metadata().schema_descr();
    for group in metadata.row_groups() {
        for (leaf, column) in group.columns().iter().enumerate() {
            if !roots.contains(&descriptor.get_column_root_idx(leaf)) {
                continue;
            }
            let path = column.column_path();
            let start = column
                .dictionary_page_offset()
                .unwrap_or(column.data_page_offset());
            if start < 0 || column.compressed_size() < 0 {
                return Err(format!("column {path} has a negative place or size"));
            }
            match column.compression() {
                Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::GZIP(_) => {}
                Compression::ZSTD(_) if cfg!(feature = "zstd") => {}
                found => {
                    return Err(format!(
                        "column {path} is compressed with {found}; write it with Snappy, gzip{} or without compression",
                        if cfg!(feature = "zstd") {
                            ", Zstandard"
                        } else {
                            ""
                        }
                    ));
                }
            }
        }
    }
    Ok(())
}

/// Returns the number of rows; `None` if the row counts of the groups are invalid.
fn total(metadata: &ParquetMetaData) -> Option<u64> {
    let rows = metadata
        .row_groups()
        .iter()
        .map(|group| u64::try_from(group.num_rows()).ok());
    rows.into_iter()
        .try_fold(0u64, |sum, rows| sum.checked_add(rows?))
}

/// Returns the number of rows to decode at once.
fn batch_rows(metadata: &ParquetMetaData, roots: &[usize], total: u64) -> usize {
    let descriptor = metadata.file_metadata().schema_descr();
    let mut bytes = 0u64;
    for group in metadata.row_groups() {
        for (leaf, column) in group.columns().iter().enumerate() {
            if roots.contains(&descriptor.get_column_root_idx(leaf)) {
                bytes =
                    bytes.saturating_add(u64::try_from(column.uncompressed_size()).unwrap_or(0));
            }
        }
    }
    let average = bytes / total.max(1);
    (DECODED / average.max(1)).clamp(1, MAX_DECODED) as usize
}

/// Returns the index of the leaf column of the top-level column `root`; `None` if `root` is not a flat column of byte strings.
fn leaf(descriptor: &SchemaDescriptor, root: usize) -> Option<usize> {
    let is_of_root = |leaf: &usize| descriptor.get_column_root_idx(*leaf) == root;
    let leaf = (0..descriptor.num_columns()).find(is_of_root)?;
    let column = descriptor.column(leaf);
    let is_flat = column.max_rep_level() == 0 && column.path().parts().len() == 1;
    (is_flat && column.physical_type() == Type::BYTE_ARRAY).then_some(leaf)
}

fn wrong_type(path: &std::path::Path, schema: &SchemaRef, place: usize) -> CorpusError {
    CorpusError::ColumnType {
        path: path.to_owned(),
        column: schema.field(place).name().clone(),
        found: schema.field(place).data_type().to_string(),
        columns: listed(schema),
    }
}

/// Lists columns and their types.
fn listed(schema: &SchemaRef) -> String {
    let fields = schema.fields().iter();
    list(fields.map(|field| format!("`{}` ({})", field.name(), field.data_type())))
}

impl Source for Parquet {
    fn window(&mut self) -> Result<Option<Window>, CorpusError> {
        let first = self.row;
        let rows = self.rows().map_err(|problem| {
            let problem = format!("after row {}: {problem}", self.row);
            CorpusError::input(&self.path, FORMAT, problem)
        });
        let (rows, kept) = rows?;
        self.row += rows.len() as u64;
        Ok((!rows.is_empty()).then_some(Window {
            first,
            rows,
            kept: Kept::Columns(kept),
            end: Position {
                row: self.row,
                byte: 0,
            },
        }))
    }

    fn fields(&self) -> Fields {
        self.fields.clone()
    }

    fn total(&self) -> Option<u64> {
        Some(self.total)
    }
}
