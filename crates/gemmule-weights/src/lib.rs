//! Readers of published weight files.
//!
//! [`torch::open`] lists the tensors of a file written by `torch.save`. [`gguf::Gguf`] reads a file of llama.cpp, and
//! [`gguf::folder::Folder`] converts it to the contents of a folder saved by Hugging Face transformers. [`quantized`] combines the tensors
//! of a quantized checkpoint into the matrices that they represent. Files are untrusted: nothing in them is executed, and sizes are checked
//! before memory is allocated.

mod element;
pub mod gguf;
mod pickle;
pub mod quantized;
pub mod torch;

pub use element::Element;
