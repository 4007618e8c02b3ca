//! Parquet files. Each window is a row group, and the footer lists all row groups.
//!
//! A window is encoded as a separate Parquet file. Its row group is appended to the output, and its footer is stored in the journal. At the
//! end, a footer with all row groups and their positions in the output is written.

use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use parquet::{
    arrow::{ArrowWriter, arrow_writer::ArrowWriterOptions},
    basic::Compression,
    file::{
        metadata::{
            ColumnChunkMetaData, FileMetaData, ParquetMetaData, ParquetMetaDataReader,
            ParquetMetaDataWriter, RowGroupMetaData,
        },
        properties::{EnabledStatistics, WriterProperties},
    },
    schema::types::ColumnPath,
};

use super::{Batch, Encoder as Encodes, Layout, Part, Placed, Tail};
use crate::{Kind, job::SCALE};

const MAGIC: &[u8] = b"PAR1";

/// Number of bytes after the footer: its length and the magic number.
const SUFFIX: usize = 8;

/// Encodes a window as a row group.
pub(super) struct Encoder {
    layout: Layout,
    schema: SchemaRef,
    properties: WriterProperties,
}

impl Encoder {
    pub fn new(layout: Layout) -> Self {
        let path = |name: &str, levels: usize| {
            let levels = ["list", "element"].repeat(levels);
            let parts = [name].into_iter().chain(levels).map(str::to_owned);
            ColumnPath::new(parts.collect())
        };
        let mut properties = WriterProperties::builder()
            .set_compression(Compression::SNAPPY)
            .set_max_row_group_row_count(None)
            .set_statistics_enabled(EnabledStatistics::Chunk)
            .set_offset_index_disabled(true)
            .set_column_dictionary_enabled(ColumnPath::from(layout.row.as_str()), false);
        for column in &layout.columns {
            let (levels, scale) = match column.kind {
                Kind::Vector(_) => (1, path(SCALE, 0)),
                Kind::Vectors(_) => (2, path(SCALE, 1)),
                Kind::Number => {
                    let own = path(&column.name, 0);
                    properties = properties.set_column_dictionary_enabled(own, false);
                    continue;
                }
                Kind::Integer | Kind::Text | Kind::Records(_) => continue,
            };
            // Disable compression, dictionaries and statistics: vectors do not compress, and their statistics are not useful.
            let vector = path(&column.name, levels);
            properties = properties
                .set_column_compression(vector.clone(), Compression::UNCOMPRESSED)
                .set_column_dictionary_enabled(vector.clone(), false)
                .set_column_statistics_enabled(vector, EnabledStatistics::None)
                .set_column_dictionary_enabled(scale, false);
        }
        let properties = properties.build();
        Self {
            schema: layout.schema(),
            layout,
            properties,
        }
    }

    /// Returns a Parquet file that contains `table`. Without a table, returns an empty file, whose footer with the Arrow schema is the
    /// basis of the output's footer.
    fn file(&self, table: Option<&RecordBatch>) -> Result<Vec<u8>, String> {
        let options = ArrowWriterOptions::new()
            .with_properties(self.properties.clone())
            .with_skip_arrow_metadata(table.is_some());
        let writer = ArrowWriter::try_new_with_options(Vec::new(), self.schema.clone(), options);
        let mut writer = writer.map_err(|e| e.to_string())?;
        if let Some(table) = table {
            writer.write(table).map_err(|e| e.to_string())?;
        }
        writer.into_inner().map_err(|e| e.to_string())
    }
}

/// Returns the start and the end of a file's footer.
fn footer(file: &[u8]) -> Result<(usize, usize), String> {
    let end = file
        .len()
        .checked_sub(SUFFIX)
        .ok_or("the file has no footer")?;
    let length = file[end..end + 4]
        .try_into()
        .map_err(|_| "the footer has no length")?;
    let start = end.checked_sub(u32::from_le_bytes(length) as usize);
    Ok((start.ok_or("the footer is longer than the file")?, end))
}

fn decode(footer: &[u8]) -> Result<ParquetMetaData, String> {
    ParquetMetaDataReader::decode_metadata(footer).map_err(|e| e.to_string())
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    text.as_bytes().chunks(2).map(pair).collect()
}

/// Returns the row group with `by` added to its file positions.
fn moved(group: &RowGroupMetaData, by: i64) -> Result<RowGroupMetaData, String> {
    let column = |column: &ColumnChunkMetaData| {
        let page = column.data_page_offset() + by;
        let dictionary = column.dictionary_page_offset().map(|at| at + by);
        let builder = column.clone().into_builder().set_data_page_offset(page);
        builder.set_dictionary_page_offset(dictionary).build()
    };
    let columns = group
        .columns()
        .iter()
        .map(column)
        .collect::<Result<Vec<_>, _>>();
    let mut builder = RowGroupMetaData::builder(group.schema_descr_ptr())
        .set_num_rows(group.num_rows())
        .set_total_byte_size(group.total_byte_size())
        .set_column_metadata(columns.map_err(|e| e.to_string())?);
    if let Some(at) = group.file_offset() {
        builder = builder.set_file_offset(at + by);
    }
    builder.build().map_err(|e| e.to_string())
}

impl Encodes for Encoder {
    fn head(&self) -> Result<Vec<u8>, String> {
        Ok(MAGIC.to_vec())
    }

    fn window(&self, batch: &Batch) -> Result<Part, String> {
        let Some(table) = self.layout.table(batch)? else {
            return Ok(Part::default());
        };
        let mut bytes = self.file(Some(&table))?;
        let (start, end) = footer(&bytes)?;
        let note = bytes[start..end]
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        bytes.truncate(start);
        bytes.drain(..MAGIC.len());
        Ok(Part { bytes, note })
    }

    fn tail(&self, parts: &[Placed], _: u64, _: u64) -> Result<Tail, String> {
        let empty = self.file(None)?;
        let (start, end) = footer(&empty)?;
        let template = decode(&empty[start..end])?;
        let template = template.file_metadata();
        let mut groups = Vec::new();
        for part in parts.iter().filter(|part| !part.note.is_empty()) {
            let footer = from_hex(&part.note).ok_or("the journal has a bad note")?;
            let by = part.at as i64 - MAGIC.len() as i64;
            for group in decode(&footer)?.row_groups() {
                groups.push(moved(group, by)?);
            }
        }
        let file = FileMetaData::new(
            template.version(),
            groups.iter().map(RowGroupMetaData::num_rows).sum(),
            template.created_by().map(str::to_owned),
            template.key_value_metadata().cloned(),
            Arc::clone(&template.schema_descr_ptr()),
            template.column_orders().cloned(),
        );
        let mut end = Vec::new();
        let metadata = ParquetMetaData::new(file, groups);
        let writer = ParquetMetaDataWriter::new(&mut end, &metadata);
        writer.finish().map_err(|e| e.to_string())?;
        Ok(Tail {
            head: Vec::new(),
            end,
        })
    }
}
