//! Readers of published weight files.
//!
//! [`torch::open`] lists the tensors of a file that `torch.save` wrote. A file is untrusted: nothing in it is executed, and sizes are
//! checked before memory is allocated.

mod element;
mod pickle;
pub mod torch;

pub use element::Element;
