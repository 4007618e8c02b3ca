//! File access: reading and writing files that the user named, files of the user's own, and checks of a path's owner. Any module may use
//! this module.

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
