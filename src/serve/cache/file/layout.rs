//! The format of a cache file.
//!
//! The header of the file is followed by segments of equal size. A segment consists of a header with its generation, followed by records.
//! The generation is incremented each time a segment is begun or overwritten. A record is valid only if it has the generation of its
//! segment, so records from before the segment was overwritten are not read. Every part has a checksum. A record with a damaged payload is
//! skipped. After a damaged record header, the rest of the segment is skipped.

use sha2::{Digest, Sha256};

use super::super::Key;

/// Unit of positions and sizes, in bytes.
pub(super) const UNIT: u64 = 64;
/// Size in bytes of the header of the file, and of the header of a segment.
pub(super) const HEADER: u64 = UNIT;
/// Size in bytes of the header of a record.
pub(super) const RECORD: usize = 60;
/// Size of the smallest record. It limits the number of records, and thereby the memory of the index.
const MIN_RECORD: u64 = 256;
/// Max file size. The index stores positions as 32-bit multiples of [`UNIT`].
const MAX_FILE: u64 = UNIT << 32;
const MAGIC: &[u8; 16] = b"gemmule answers\x01";
const CHECK: usize = 8;
/// Number of segments in a file of at least [`LARGE_FILE`] bytes. A smaller file has [`FEW_SEGMENTS`].
const MANY_SEGMENTS: u64 = 16;
const FEW_SEGMENTS: u64 = 4;
const LARGE_FILE: u64 = 16 << 20;

/// Size and number of the segments of a cache file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub segment_bytes: u64,
    pub segments: u64,
}

/// Header of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub generation: u64,
    pub length: u32,
    pub key: Key,
}

impl Layout {
    /// Size of the smallest file whose segments each have room for a record.
    pub const MIN_BYTES: u64 = HEADER + FEW_SEGMENTS * (HEADER + MIN_RECORD);

    /// Returns the layout of a new file of at most `max_bytes` bytes, which must be at least [`MIN_BYTES`](Self::MIN_BYTES).
    pub fn new(max_bytes: u64) -> Self {
        let max_bytes = max_bytes.min(MAX_FILE);
        let segments = match max_bytes < LARGE_FILE {
            true => FEW_SEGMENTS,
            false => MANY_SEGMENTS,
        };
        let segment_bytes = (max_bytes - HEADER) / segments / UNIT * UNIT;
        Self {
            segment_bytes,
            segments,
        }
    }

    /// Returns the layout of an existing file with segments of `segment_bytes` bytes and a max size of `max_bytes`. Returns `None` if
    /// `segment_bytes` is not a positive multiple of [`UNIT`], or if the number of segments is less than [`FEW_SEGMENTS`] or more than four
    /// times [`MANY_SEGMENTS`].
    pub fn existing(segment_bytes: u64, max_bytes: u64) -> Option<Self> {
        let segments = (max_bytes.min(MAX_FILE) - HEADER).checked_div(segment_bytes)?;
        let is_suitable = segment_bytes.is_multiple_of(UNIT)
            && (FEW_SEGMENTS..=4 * MANY_SEGMENTS).contains(&segments);
        is_suitable.then_some(Self {
            segment_bytes,
            segments,
        })
    }

    /// Returns the position of the start of a segment.
    pub fn start(&self, segment: u64) -> u64 {
        HEADER + segment * self.segment_bytes
    }

    pub fn end(&self, segment: u64) -> u64 {
        self.start(segment + 1)
    }

    /// Size of the whole file.
    pub fn file_bytes(&self) -> u64 {
        self.start(self.segments)
    }
}

fn check(kind: u8, bytes: &[u8]) -> [u8; CHECK] {
    let digest = Sha256::new().chain_update([kind]).chain_update(bytes);
    let mut check = [0; CHECK];
    check.copy_from_slice(&digest.finalize()[..CHECK]);
    check
}

/// Appends a checksum to bytes, and pads them with zeros to the size of a header.
fn with_check(kind: u8, bytes: &[u8]) -> [u8; HEADER as usize] {
    let mut all = [0; HEADER as usize];
    all[..bytes.len()].copy_from_slice(bytes);
    all[bytes.len()..bytes.len() + CHECK].copy_from_slice(&check(kind, bytes));
    all
}

/// Returns the 64-bit number that follows the prefix `before` in `bytes`. Returns `None` if `bytes` does not start with `before`, or if the
/// checksum that follows the number is wrong.
fn number(kind: u8, before: &[u8], bytes: &[u8]) -> Option<u64> {
    let end = before.len() + 8;
    let is_sound =
        bytes.starts_with(before) && bytes[end..end + CHECK] == check(kind, &bytes[..end]);
    let number = bytes[before.len()..end].try_into().ok()?;
    is_sound.then(|| u64::from_le_bytes(number))
}

pub(super) fn file_header(layout: &Layout) -> [u8; HEADER as usize] {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(layout.segment_bytes.to_le_bytes());
    with_check(0, &bytes)
}

/// Returns the size of a segment, from the header of the file; `None` if the header is not valid.
pub(super) fn read_file_header(bytes: &[u8; HEADER as usize]) -> Option<u64> {
    number(0, MAGIC, bytes)
}

pub(super) fn segment_header(generation: u64) -> [u8; HEADER as usize] {
    with_check(1, &generation.to_le_bytes())
}

/// Returns the generation of a segment, from its header; `None` if the header is not valid.
pub(super) fn read_segment_header(bytes: &[u8; HEADER as usize]) -> Option<u64> {
    number(1, &[], bytes)
}

impl Record {
    /// Returns the size of the record, including padding.
    pub fn size(&self) -> u64 {
        let bytes = RECORD as u64 + u64::from(self.length);
        bytes.next_multiple_of(UNIT).max(MIN_RECORD)
    }

    /// Serializes the record with its payload and padding.
    pub fn to_bytes(self, payload: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.size() as usize);
        bytes.extend(self.generation.to_le_bytes());
        bytes.extend(self.length.to_le_bytes());
        bytes.extend(self.key);
        let check = check(2, &bytes);
        bytes.extend(check);
        bytes.resize(RECORD, 0);
        bytes.extend(payload);
        bytes.resize(self.size() as usize, 0);
        bytes
    }

    /// Reads the header of a record; `None` if its checksum is wrong.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let (fields, rest) = bytes.split_at_checked(44)?;
        if rest.get(..CHECK)? != check(2, fields) {
            return None;
        }
        Some(Self {
            generation: u64::from_le_bytes(fields[..8].try_into().ok()?),
            length: u32::from_le_bytes(fields[8..12].try_into().ok()?),
            key: fields[12..].try_into().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_never_exceeds_its_size() {
        for max_bytes in [
            Layout::MIN_BYTES,
            Layout::MIN_BYTES + 1,
            3_000,
            1 << 20,
            LARGE_FILE,
            1 << 30,
            u64::MAX,
        ] {
            let layout = Layout::new(max_bytes);
            assert!(layout.file_bytes() <= max_bytes.min(MAX_FILE));
            assert!(layout.segment_bytes >= HEADER + MIN_RECORD);
            let same = Layout::existing(layout.segment_bytes, max_bytes);
            assert_eq!(same, Some(layout));
            assert_eq!(Layout::existing(0, max_bytes), None);
            assert_eq!(Layout::existing(max_bytes, max_bytes), None);
        }
    }

    #[test]
    fn headers_round_trip_and_damage_is_detected() {
        let layout = Layout::new(1 << 20);
        let file = file_header(&layout);
        assert_eq!(read_file_header(&file), Some(layout.segment_bytes));
        let segment = segment_header(7);
        assert_eq!(read_segment_header(&segment), Some(7));
        let record = Record {
            generation: 7,
            length: 3,
            key: [9; 32],
        };
        let bytes = record.to_bytes(&[1, 2, 3]);
        assert_eq!(bytes.len() as u64, record.size());
        assert_eq!(Record::read(&bytes), Some(record));
        for at in 0..44 {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert_eq!(Record::read(&damaged), None);
        }
        for at in 0..24 {
            let mut damaged = file;
            damaged[at] ^= 1;
            assert_eq!(read_file_header(&damaged), None);
        }
        for at in 0..16 {
            let mut damaged = segment;
            damaged[at] ^= 1;
            assert_eq!(read_segment_header(&damaged), None);
        }
        // A segment that was never written consists of zeros.
        assert_eq!(read_segment_header(&[0; HEADER as usize]), None);
        assert_eq!(Record::read(&[0; RECORD]), None);
    }
}
