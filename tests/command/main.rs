//! Tests of the command line, which run `gemmule` as a separate process.

#[path = "../common/mod.rs"]
mod common;

mod cli;
#[cfg(feature = "corpora")]
mod embed;
mod examples;
#[cfg(feature = "corpora")]
mod files;
mod hub;
#[cfg(target_os = "linux")]
mod inputs;
mod tasks;
mod translator;
mod writer;
