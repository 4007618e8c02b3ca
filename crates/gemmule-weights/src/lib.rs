//! Readers of published weight files.
//!
//! [`torch::open`] lists the tensors of a file that `torch.save` wrote. [`gguf::Gguf`] reads a file of llama.cpp, and
//! [`gguf::folder::Folder`] translates it into the folder that transformers saves.
//! [`quantized`] joins the tensors of a quantized checkpoint to the matrices that they stand for.
//! A file is untrusted: nothing in it is executed, and sizes are checked before memory is allocated.

mod element;
pub mod gguf;
mod pickle;
pub mod quantized;
pub mod torch;

pub use element::Element;
