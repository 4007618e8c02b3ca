//! Files that others may have a hand in: outputs that a user named, files of the user's own, and
//! whom a path belongs to. Any room may use it.

pub(crate) mod own;
pub(crate) mod trust;
mod write;

pub(crate) use write::write;

#[cfg(all(test, unix))]
mod tests;
