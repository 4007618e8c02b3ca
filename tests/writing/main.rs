//! Tests of generated and translated text, compared with Hugging Face transformers.

mod generation;
mod translation;
mod written;
