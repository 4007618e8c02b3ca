//! Reads and writes files that the user named and private files of the user, and checks who can write to a path. Any module may use this
//! module.

pub(crate) mod own;
mod position;
mod read;
pub(crate) mod trust;
mod write;

pub(crate) use position::read_at;
#[cfg(feature = "serve")]
pub(crate) use position::write_at;
pub use read::{Beginning, Kind, ReadError, bytes, text, up_to};
pub(crate) use write::write;

#[cfg(all(test, unix))]
mod tests;
