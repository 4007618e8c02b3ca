//! Arrow IPC files: a magic number, the messages of a stream, and a footer that lists the messages.

use arrow_ipc::{
    Block, FooterBuilder, MetadataVersion, convert::IpcSchemaEncoder, writer::StreamWriter,
};
use arrow_schema::SchemaRef;
use flatbuffers::FlatBufferBuilder;

use super::{Batch, Encoder as Encodes, Layout, Part, Placed, Tail};

const MAGIC: &[u8] = b"ARROW1";

/// The end of the stream: the continuation marker of a message and a length of 0.
const END: [u8; 8] = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];

/// Number of bytes of a message's marker and length.
const PREFIX: usize = 8;

/// Encodes a window as a record batch message.
pub(super) struct Encoder {
    layout: Layout,
    schema: SchemaRef,
}

impl Encoder {
    pub fn new(layout: Layout) -> Self {
        Self {
            schema: layout.schema(),
            layout,
        }
    }

    /// Returns a stream writer whose buffer contains the schema.
    fn stream(&self) -> Result<StreamWriter<Vec<u8>>, String> {
        StreamWriter::try_new(Vec::new(), &self.schema).map_err(|e| e.to_string())
    }
}

impl Encodes for Encoder {
    fn head(&self) -> Result<Vec<u8>, String> {
        let mut head = MAGIC.to_vec();
        head.resize(8, 0);
        head.extend_from_slice(self.stream()?.get_ref());
        Ok(head)
    }

    fn window(&self, batch: &Batch) -> Result<Part, String> {
        let Some(table) = self.layout.table(batch)? else {
            return Ok(Part::default());
        };
        let mut stream = self.stream()?;
        let schema = stream.get_ref().len();
        stream.write(&table).map_err(|e| e.to_string())?;
        let bytes = stream.get_mut().split_off(schema);
        let length = bytes
            .get(4..PREFIX)
            .and_then(|length| length.try_into().ok());
        let length = length
            .map(u32::from_le_bytes)
            .ok_or("the message has no length")?;
        let metadata = PREFIX + length as usize;
        let body = bytes
            .len()
            .checked_sub(metadata)
            .ok_or("the message is too short")?;
        Ok(Part {
            note: format!("{metadata},{body}"),
            bytes,
        })
    }

    fn tail(&self, parts: &[Placed], _: u64, _: u64) -> Result<Tail, String> {
        let mut blocks = Vec::with_capacity(parts.len());
        for part in parts.iter().filter(|part| !part.note.is_empty()) {
            let sizes = part.note.split_once(',');
            let sizes = sizes.and_then(|(m, b)| Some((m.parse().ok()?, b.parse().ok()?)));
            let (metadata, body): (i32, i64) = sizes.ok_or("the journal has a bad note")?;
            blocks.push(Block::new(part.at as i64, metadata, body));
        }
        let mut builder = FlatBufferBuilder::new();
        let dictionaries = builder.create_vector::<Block>(&[]);
        let blocks = builder.create_vector(&blocks);
        let schema = IpcSchemaEncoder::new().schema_to_fb_offset(&mut builder, &self.schema);
        let mut footer = FooterBuilder::new(&mut builder);
        footer.add_version(MetadataVersion::V5);
        footer.add_schema(schema);
        footer.add_dictionaries(dictionaries);
        footer.add_recordBatches(blocks);
        let footer = footer.finish();
        builder.finish(footer, None);
        let footer = builder.finished_data();
        let mut end = END.to_vec();
        end.extend_from_slice(footer);
        end.extend((footer.len() as u32).to_le_bytes());
        end.extend_from_slice(MAGIC);
        Ok(Tail {
            head: Vec::new(),
            end,
        })
    }
}
