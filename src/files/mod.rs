//! Files that a user names: how they are read.

mod read;

pub use read::{Beginning, Kind, ReadError, bytes, text, up_to};
