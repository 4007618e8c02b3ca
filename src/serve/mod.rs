//! Serving without a network protocol: queueing, scheduling, batching and execution of requests.
//!
//! A [`Service`] computes embeddings and scores. [`Service::submit`] checks, tokenizes and queues a request. The launch thread
//! gets batches from the scheduler, through [`Desk`](crate::schedule::Desk), and submits them to the executor. Collect threads
//! wait for results and send the answers. A lane is a device with its queue of batches.
//!
//! A [`Writer`] generates text. [`Models`] looks up both by name.

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
