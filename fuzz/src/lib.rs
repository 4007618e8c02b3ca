//! Functions that the fuzz targets run on each input. `tests/house/fuzz.rs` runs them, too.

use std::path::PathBuf;

pub mod artifact;
pub mod bodies;
pub mod checkpoint;
pub mod config;
pub mod description;
pub mod generation;
pub mod ids;
pub mod timings;
pub mod tokenizer;

/// Returns the root of the repository. The manifest folder is `fuzz/` for the fuzz targets, and the root itself for the integration tests,
/// which also compile these files.
fn root() -> PathBuf {
    let package = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    match package.ends_with("fuzz") {
        true => package.join(".."),
        false => package,
    }
}
