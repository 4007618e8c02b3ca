//! The HTTP server, asked by clients.

#[cfg(feature = "server")]
mod clients;
#[cfg(feature = "server")]
mod operating;
#[cfg(feature = "server")]
mod page;
#[cfg(feature = "server")]
mod serve;
