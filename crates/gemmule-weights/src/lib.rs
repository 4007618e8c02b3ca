//! Readers of published weight files.
//!
//! [`torch::open`] lists the tensors of a file that `torch.save` wrote. [`gguf::Gguf`] reads a file of llama.cpp as it is; gemmule does
//! not load models from it yet. A file is untrusted: nothing in it is executed, and sizes are checked before memory is allocated.

mod element;
pub mod gguf;
mod pickle;
pub mod torch;

pub use element::Element;
