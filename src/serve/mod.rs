//! Serving without a network protocol: queueing, scheduling, batching and execution of requests.
//!
//! A [`Service`] computes embeddings and scores. [`Service::submit`] checks, tokenizes and queues a request. The launch thread gets batches
//! from the scheduler, through [`SchedulerState`](crate::schedule::SchedulerState), and submits them to the executor. Collect threads wait
//! for results and send the answers. A lane is a device with its queue of batches.
//!
//! A [`GenerationService`] generates text. Its thread runs the steps of the generator. Texts start and end between steps, and the scheduler
//! decides which text starts next. [`Models`] looks up the services by the name of their model.

mod backlog;
mod cache;
mod chunks;
mod config;
mod costs;
mod device_lock;
mod error;
mod generation;
mod heads;
mod memory;
mod metrics;
mod models;
mod service;
mod submit;
mod tasks;
mod tokenize;
mod trace;
mod translation;

pub use cache::{Cache, CacheChoice, Lookup, Lookups, Tier};
pub use chunks::{JoinedTexts, JoinedTokens};
pub use config::{ModelConfig, ServeConfig, ServeConfigError, check_name};
pub use costs::{full_batch, known_or_measured, measure};
pub use device_lock::{DevicePermit, Devices, FairDeviceLock, ModelHandle};
pub use error::ServeError;
pub use generation::{
    Ending, GenerationParams, GenerationService, Piece, Scored, TextSource, TokenStream,
};
pub use memory::{BodyMemory, Memory, Share};
pub use metrics::{Histogram, LaneMetrics, Metrics};
pub use models::{DefaultPrompt, Kind, LOADING, Model, ModelChoice, Models, ReloadError};
pub use service::{Reply, SPARSE, Service, ServiceChoice};
pub use submit::{Answer, Further, OutputKind, Submit};
pub use tokenize::Text;
pub use trace::Recorder;
pub use translation::TranslationParams;

pub use crate::heads::{
    Aggregation, AnswerOptions, EntityOptions, MaskJob, MaskOptions, QuestionJob, TokenJob,
    TokenVectors, ZeroShotJob, ZeroShotOptions,
};
pub use crate::text::{
    ChatOptions, ClassScore, CutSide, Json, Message, TargetPrefix, TextRole, TextToken, Tool,
};
