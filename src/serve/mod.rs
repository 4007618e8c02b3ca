//! Serving without a protocol: what is sent is tokenized, waits, is scheduled, runs, and is answered.
//!
//! A [`Service`] computes embeddings and scores. The path of a request: [`Service::submit`] checks it and lets it wait; the
//! launch thread asks the scheduler through the [`Desk`](crate::schedule::Desk) and gives batches to the executor; the collect
//! thread waits for results and answers. A [`Writer`] writes on from prompts. Both are asked through [`Models`], by name.

mod cache;
mod costs;
mod error;
mod metrics;
mod models;
mod service;
mod tokenize;
mod trace;
mod writer;

pub use cache::{Cache, CacheChoice, Lookup, Lookups, Tier};
pub use costs::measure;
pub use error::ServeError;
pub use metrics::{Histogram, Metrics};
pub use models::{Kind, Model, ModelChoice, Models};
pub use service::{Answer, Reply, Service, ServiceChoice, Submit};
pub use tokenize::Text;
pub use trace::Recorder;
pub use writer::{Ending, Piece, Pieces, Writer, Writing};

pub use crate::engine::Message;
