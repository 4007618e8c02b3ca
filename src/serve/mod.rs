//! Serving without a protocol: what is sent is tokenized, waits, is scheduled, runs, and is answered.
//!
//! A [`Service`] computes embeddings and scores. The path of a request: [`Service::submit`] checks it and lets it wait; the
//! launch thread asks the scheduler through the [`Desk`](crate::schedule::Desk) and gives batches to the executor; the collect
//! thread waits for results and answers. A [`Writer`] writes on from prompts. Both are asked through [`Models`], by name.

mod backlog;
mod cache;
mod config;
mod costs;
mod error;
mod memory;
mod metrics;
mod models;
mod service;
mod tokenize;
mod trace;
mod turns;
mod writer;

pub use cache::{Cache, CacheChoice, Lookup, Lookups, Tier};
pub use config::{ModelConfig, ServeConfig, ServeConfigError, check_name};
pub use costs::{full_batch, known_or_measured, measure};
pub use error::ServeError;
pub use memory::{Held, Memory, Share};
pub use metrics::{Histogram, LaneMetrics, Metrics};
pub use models::{Kind, LOADING, Model, ModelChoice, Models, ReloadError};
pub use service::{Answer, Reply, SPARSE, Service, ServiceChoice, Submit, Wanted};
pub use tokenize::Text;
pub use trace::Recorder;
pub use turns::{Devices, Seat, Turn, Turns};
pub use writer::{Ending, Piece, Pieces, Scored, Writer, Writing};

pub use crate::engine::{ChatOptions, ClassScore, CutSide, Json, Message, TextToken, Tool};
