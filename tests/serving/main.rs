//! Tests of the HTTP server through clients.

#[cfg(feature = "server")]
mod clients;
#[cfg(feature = "server")]
mod operating;
#[cfg(feature = "server")]
mod page;
#[cfg(feature = "server")]
mod serve;
