//! Files that others may have a hand in: those that a user names, read and written; files of the user's own; and whom a
//! path belongs to. Any room may use it.

pub(crate) mod own;
mod position;
mod read;
pub(crate) mod trust;
mod write;

pub(crate) use position::{read_at, write_at};
pub use read::{Beginning, Kind, ReadError, bytes, text, up_to};
pub(crate) use write::write;

#[cfg(all(test, unix))]
mod tests;
