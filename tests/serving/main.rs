//! Tests of the HTTP server, to which the tests send requests as clients.

#[cfg(feature = "server")]
mod clients;
#[cfg(feature = "server")]
mod operating;
#[cfg(feature = "server")]
mod page;
#[cfg(feature = "server")]
mod serve;
