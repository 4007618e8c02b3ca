//! File access: reading and writing files that the user named, files of the user's own, and checks
//! of a path's owner. Any module may use it.

pub(crate) mod own;
mod read;
pub(crate) mod trust;
mod write;

pub use read::{Beginning, Kind, ReadError, bytes, text, up_to};
pub(crate) use write::write;

#[cfg(all(test, unix))]
mod tests;
