//! Tests that send requests to the HTTP server, as its clients do.

#[cfg(feature = "server")]
mod clients;
#[cfg(feature = "server")]
mod operating;
#[cfg(feature = "server")]
mod page;
#[cfg(feature = "server")]
mod serve;
