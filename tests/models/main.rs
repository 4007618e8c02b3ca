//! Tests of checkpoints, tokenizers and descriptions of models. Expected results are from the libraries that publish them, such as
//! transformers.

#[path = "../common/mod.rs"]
mod common;

mod cache_scales;
mod checkpoints;
mod config_sweep;
mod differential;
mod folder_errors;
mod folders;
mod gguf;
mod heads;
mod pieces;
mod quantized;
mod references;
mod tokenizer;
mod tokenizer_settings;
mod torch;
