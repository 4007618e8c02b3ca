//! The command `gemmule` that the package installs.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command line with these arguments. The first one is the program name. Returns the exit code.
#[pyfunction]
pub fn _run_command(py: Python<'_>, args: Vec<OsString>) -> u8 {
    py.detach(|| gemmule::cli::main_with(args))
}
