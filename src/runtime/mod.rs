//! Runs a program.

pub mod cpu;
